"""The sentence about slow training.

Rows of seconds come from real runs with planted causes.
"""

from types import SimpleNamespace

import pytest

from raysgd._internal.step_timing import PHASES, PhaseTotals
from raysgd._internal.worker_status import Measurements, ReportedPosition, WorkerStatus
from raysgd.elastic.speed import SpeedReport, WorkerSpeed, find_bottleneck
from raysgd.elastic.speed_monitor import SpeedMonitor

HEALTHY = {"data": 1.0, "forward": 3.4, "backward": 10.2, "wait": 9.1, "optimizer": 0.9}


def ms(**milliseconds):
    return {name: milliseconds.get(name, 0.0) / 1000 for name in PHASES}


def speeds(*rows, hosts="ABCD", num_loader_workers=0):
    return [
        WorkerSpeed(
            rank=rank,
            host=hosts[rank],
            num_steps=100,
            samples_per_s=1.0,
            phase_s=ms(**row),
            num_loader_workers=num_loader_workers,
        )
        for rank, row in enumerate(rows)
    ]


def advice(workers, link_speeds=None):
    cause = find_bottleneck(workers, 42, link_speeds)
    return "" if cause is None else cause.advice


@pytest.mark.parametrize(
    "rows",
    [
        (HEALTHY,),
        (HEALTHY, HEALTHY),
        # Nothing helps against the overhead of tiny steps.
        ({"data": 0.3, "forward": 0.2, "wait": 0.6, "other": 0.4},) * 2,
        ({"forward": 0.2, "wait": 0.9}, {"forward": 1.1}),
        # Three processes share two cores.
        ({"forward": 7.8, "backward": 17.6, "wait": 24.5}, {"backward": 25.3, "wait": 24.0}),
    ],
)
def test_healthy_training_has_no_sentence(rows):
    assert advice(speeds(*rows)) == ""


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"data": 78.5}, "76 % of the step waits for data on all workers since step 42: raise "),
        ({"copy": 19.0}, "42 % of the step copies batches to the device on all workers"),
        ({"other": 5.9}, "19 % of the step is code outside of forward, backward, and optimizer on"),
        ({"save": 31.6}, "55 % of the time goes into checkpoints and snapshots since step 42"),
        ({"wait": 71.0}, "81 % of the step waits for gradients since step 42, on all workers"),
    ],
)
def test_a_slow_phase_of_all_workers_is_named(row, said):
    rows = {**HEALTHY, "other": 1.5, **row}
    assert advice(speeds(rows, rows)).startswith(said)


def test_advice_names_the_loader_or_the_loss():
    row = {**HEALTHY, "data": 80}
    assert advice(speeds(row, num_loader_workers=3)).endswith("raise DataLoader(num_workers=3).")
    assert "in other processes" in advice(speeds(row, num_loader_workers=None))
    assert "all workers" not in advice(speeds(row))
    assert "look at the loss" in advice(speeds({**HEALTHY, "other": 80}))


@pytest.mark.parametrize(
    ("slow", "said"),
    [
        ({"data": 76.9}, "Worker 2 on C waits for data much longer than the others since step 42"),
        ({"other": 12}, "Worker 2 on C runs code outside of forward, backward, and optimizer 12.0"),
        (
            # The loader works on the busy processor too.
            {"data": 35.0, "forward": 12.7, "backward": 26.8, "optimizer": 2.0},
            "Worker 2 on C computes 2.9 times longer than the others since step 42: use",
        ),
    ],
)
def test_the_slowest_worker_is_named_though_the_others_wait(slow, said):
    usual = {"data": 1.0, "forward": 4.0, "backward": 10.0, "optimizer": 0.5, "other": 1.0}
    waiting = {**usual, "wait": sum(slow.values())}
    found = advice(speeds(waiting, waiting, {**usual, **slow, "wait": 1.0}))
    assert found.startswith(said)


def test_a_slow_connection_is_named():
    row = {**HEALTHY, "wait": 519.7}
    link_speeds = {("A", "B"): 16e8, ("B", "C"): 12e6, ("C", "A"): 11e6, ("C", "B"): 12e6}
    found = advice(speeds(row, row, row), link_speeds)
    assert "because worker 2 on C sends 12.0 MB/s, and the others 1600.0 MB/s" in found
    both = advice(speeds(row, row), {("A", "B"): 11e6, ("B", "A"): 12e6})
    assert ", on all workers: look at the network" in both, "either host may be slow"
    assert advice(speeds(HEALTHY, HEALTHY, HEALTHY), link_speeds) == ""


def test_the_report_is_a_table_and_the_sentence():
    workers = speeds({**HEALTHY, "data": 80}, HEALTHY)
    text = str(SpeedReport(workers=workers, advice="It is slow."))
    head, first, second, last = text.splitlines()
    assert (
        " ".join(head.split()) == "ms per step data forward backward wait optimizer sum samples/s"
    )
    assert first.split()[:5] == ["worker", "0", "on", "A", "80"]
    assert second.split()[-2:] == ["24.6", "1"]
    assert last == "It is slow."


class Group:
    """A group whose workers have measured 1 s of steps more in each call of `train`."""

    def __init__(self, num_workers=2):
        self.members = [self.new_member(f"host{rank}") for rank in range(num_workers)]
        self.totals = dict.fromkeys(self.members, PhaseTotals())
        self.seen_step = 0
        self.monitor = SpeedMonitor(self)

    def new_member(self, host):
        return SimpleNamespaceKey(location=SimpleNamespace(node_ip=host))

    def train(self, *rows, seconds=1.0):
        step_s = sum(rows[0].values()) / 1000
        num_steps = round(seconds / step_s)
        self.seen_step += num_steps
        for member, row in zip(self.members, rows, strict=True):
            old = self.totals.setdefault(member, PhaseTotals())
            more = zip(old.phase_s, ms(**row).values(), strict=True)
            self.totals[member] = PhaseTotals(
                tuple(before + num_steps * each for before, each in more),
                old.num_steps + num_steps,
                old.num_samples + 32 * num_steps,
                0,
            )
        step, totals = self.seen_step, self.totals
        measured = {member: Measurements(timing=totals[member]) for member in self.members}
        at = ReportedPosition(global_step=step)
        self.monitor.observe({m: WorkerStatus(at, measured=each) for m, each in measured.items()})


class SimpleNamespaceKey(SimpleNamespace):
    __hash__ = object.__hash__


FAST = {"data": 2.0, "forward": 4.0, "backward": 10.0, "wait": 4.0}
SLOW = {"data": 2.0, "forward": 14.0, "backward": 35.0, "wait": 1.0}
WAITS = {"data": 2.0, "forward": 4.0, "backward": 10.0, "wait": 36.0}


def test_short_slowness_and_noise_are_no_sentence():
    group = Group()
    for second in range(120):
        rows = [WAITS, SLOW] if second % 5 else [SLOW, WAITS]
        group.train(*(rows if second % 16 >= 8 else [FAST, FAST]))
    assert group.monitor.report().advice == ""
    group = Group()
    for _ in range(5):
        group.train(FAST, FAST)
    group.train({**FAST, "wait": 60000.0}, {**FAST, "other": 60000.0}, seconds=60)
    assert find_bottleneck(group.monitor.report().workers).rank == 1, "on average"
    assert group.monitor.report().advice == ""


def test_a_new_group_is_measured_from_its_start():
    group = Group()
    for _ in range(5):
        group.train(WAITS, SLOW)
    assert "Worker 1" in group.monitor.report().advice
    group.members[1] = group.new_member("new")
    changed = group.seen_step
    group.train(FAST, FAST)
    report = group.monitor.report()
    assert (report.since_step, report.advice) == (changed, "")
    assert report.workers[0].step_s == pytest.approx(0.020)
    assert report.workers[1].host == "new"


def test_a_lap_has_the_times_since_the_last_lap_of_its_kind():
    group = Group()
    group.train(FAST, FAST)
    assert group.monitor.end_interval("train")["forward_s"] == [pytest.approx(0.004)] * 2
    group.train(WAITS, SLOW)
    interval = group.monitor.end_interval("train")
    assert interval["forward_s"] == pytest.approx([0.004, 0.014])
    assert interval["samples_per_s"] == pytest.approx([32 / 0.052] * 2)
    group.monitor._saved_s += 5.0
    assert group.monitor.end_interval("train") == {}, "no step since then"
    group.members[1] = group.new_member("new")
    group.train(FAST, FAST)
    assert group.monitor.end_interval("train")["save_s"] == pytest.approx([0.0, 0.0])
