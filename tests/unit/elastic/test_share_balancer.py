"""Shares of the global batch: when they change, and to what."""

from types import SimpleNamespace

import pytest

from raysgd._internal.worker_status import Measurements, WorkerStatus
from raysgd.cluster.group_options import GroupOptions
from raysgd.cluster.worker import WorkerLocation
from raysgd.elastic.config import ElasticConfig
from raysgd.elastic.share_balancer import ShareBalancer
from tests.unit.cluster.clock import ManualClock


class FakeMember(str):
    @property
    def location(self):
        return WorkerLocation(node_id=f"node of {self}", node_ip="")


class FakeGroup:
    def __init__(self, num_workers):
        self.clock = ManualClock()
        self.options = GroupOptions(num_workers=num_workers, num_cpus=1)
        self.members = [FakeMember(f"w{rank}") for rank in range(num_workers)]

    def node_traits(self):
        return {member.location.node_id: {"CPU", f"slot={member}"} for member in self.members}


class FakeRecord:
    def __init__(self, group, config):
        self.group, self.policy, self.events = group, SimpleNamespace(elastic=config), []

    def add_event(self, kind, members, *, shares, old_shares, **_):
        assert kind == "rebalanced"
        self.events.append((old_shares, shares))


def make(num_workers=2, **config):
    record = FakeRecord(group := FakeGroup(num_workers), ElasticConfig(**config))
    shares = ShareBalancer(record)
    shares.choose_for(group.members)
    return group, record, shares


def poll(group, shares, *speeds, seconds=0.0):
    """Report `speeds` once per second, for `seconds`."""
    for _ in range(int(seconds) + 1):
        statuses = [WorkerStatus(measured=Measurements(samples_per_s=speed)) for speed in speeds]
        shares.observe(dict(zip(group.members, statuses, strict=True)))
        group.clock.sleep(1.0)


def test_shares_follow_a_difference_of_speed_that_lasts():
    group, record, shares = make(shares="measured")
    poll(group, shares, 300, 100)
    assert shares.choose_for(group.members) is None
    poll(group, shares, 300, 100, seconds=5)
    assert shares.wants_change
    assert shares.choose_for(group.members) == (1.5, 0.5)
    assert record.events == [((1.0, 1.0), (1.5, 0.5))]
    assert not shares.wants_change


def test_shares_do_not_follow_noise():
    group, record, shares = make(shares="measured")
    for second in range(60):
        poll(group, shares, 300 if second % 2 else 100, 100)
    poll(group, shares, 120, 100, seconds=60)
    assert not shares.wants_change
    assert shares.choose_for(group.members) is None
    assert record.events == []


def test_a_worker_that_recovers_gets_its_share_back_after_the_cooldown():
    group, record, shares = make(shares="measured", resize_cooldown_s=30.0)
    poll(group, shares, 300, 100, seconds=5)
    shares.choose_for(group.members)
    poll(group, shares, 100, 100, seconds=20)
    assert shares.choose_for(group.members) == (1.5, 0.5)
    poll(group, shares, 105, 100, seconds=20)
    assert shares.choose_for(group.members) is None, "small differences give even shares"
    assert [new for _, new in record.events] == [(1.5, 0.5), (1.0, 1.0)]


def test_a_new_group_has_shares_by_the_speeds_that_are_known():
    group, record, shares = make(3, shares="measured")
    poll(group, shares, 400, 100, 200, seconds=5)
    assert shares.choose_for(group.members) == (1.714, 0.429, 0.857)
    assert shares.choose_for([group.members[0], group.members[2]]) == (1.333, 0.667)
    assert shares.choose_for([group.members[0], FakeMember("new")]) is None
    assert [new for _, new in record.events[1:]] == [(1.333, 0.667), (1.0, 1.0)]


def test_a_replacement_worker_joins_with_the_speed_of_its_warm_up():
    group, record, shares = make(shares="measured")
    poll(group, shares, 100, 100)
    new = FakeMember("new")
    shares.observe({new: WorkerStatus(measured=Measurements(samples_per_s=300))})
    poll(group, shares, 100, 100)
    assert shares.choose_for([group.members[0], new]) == (0.5, 1.5)
    assert record.events == [((1.0, 1.0), (0.5, 1.5))]
    shares.choose_for(group.members)
    # speeds of workers that left are forgotten
    assert shares.choose_for([group.members[0], new]) is None


def test_a_worker_that_has_almost_stopped_keeps_a_share():
    group, _, shares = make(shares="measured")
    poll(group, shares, 10_000, 1, seconds=5)
    assert min(shares.choose_for(group.members)) > 0
    poll(group, shares, 10_000, 10_000, seconds=20)
    assert shares.choose_for(group.members) is None


def test_nodes_have_the_shares_of_a_mapping():
    group, record, shares = make(shares={"slot=w1": 0.25})
    assert shares.choose_for(group.members) == shares.configured_for(group.members) == (1.6, 0.4)
    assert record.events == [((1.0, 1.0), (1.6, 0.4))]
    assert make(shares={"CPU": 2.0})[2].configured_for(group.members) is None


def test_resources_that_no_node_has_yet_are_logged(caplog):
    make(shares={"slot=w1": 0.25, "A600": 2.0})
    assert "resource 'A600' yet. The nodes have CPU, slot=w0, slot=w1." in caplog.text


def test_the_only_worker_has_the_whole_batch_without_a_look_at_nodes(monkeypatch):
    monkeypatch.delattr(FakeGroup, "node_traits")  # it would need Ray
    group, _, shares = make(1, shares={"slot=w0": 0.25})
    assert shares.choose_for(group.members) is None
    assert shares.configured_for(group.members) is None


@pytest.mark.parametrize(
    ("shares", "error"),
    [("fast", ValueError), ({}, ValueError), ({"A": 0}, ValueError), ({"A": "x"}, TypeError),
     (None, ValueError), ({"A": float("inf")}, ValueError)],
)  # fmt: skip
def test_wrong_shares_are_refused(shares, error):
    with pytest.raises(error, match="ElasticConfig"):
        ElasticConfig(shares=shares)
