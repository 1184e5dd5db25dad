"""Snapshots for restarts, and checks of the counts in a loaded state."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from raysgd._internal.runner import WorkerContext
from raysgd._internal.step_timing import StepTiming
from raysgd._internal.worker_status import StateStatus
from raysgd.elastic.config import ElasticConfig
from raysgd.errors import CheckpointError
from raysgd.loop.requests import ApplyOperatorRequest, TrainRequest
from raysgd.loop.snapshot_taker import SnapshotTaker, _num_bytes
from raysgd.loop.state_dict import check_state, read_state
from raysgd.loop.state_placement import StatePlacement
from raysgd.torch.tensors import copy_leaf
from tests.operators import on_gpu
from tests.unit.recorder import Recorder, make_runner, runner_with_snapshots

EPOCH = list(range(40))


def taken(runner, until_step):
    """Train, and return the step of the newest snapshot before each step and at the end."""
    steps = []

    def look(batch_info, when):
        if when == "before":
            steps.append(runner.status().snapshot.step)

    runner.operator.fail = look
    step = runner.status().position.global_step
    runner.handle(TrainRequest(call_number=step, until_step=until_step))
    return [*steps, runner.status().snapshot.step]


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (None, [None] * 13),
        ("epoch", [0] * 5 + [5] * 5 + [10] * 3),
        ("auto", [0] * 5 + [5] * 5 + [10] * 3),  # the state is small
        (1, list(range(13))),
        (3, [0, 0, 0, 3, 3, 3, 6, 6, 6, 9, 9, 9, 12]),
        (5, [0] * 5 + [5] * 5 + [10] * 3),
        (100, [0] * 13),
    ],
)
def test_a_snapshot_is_taken_at_each_epoch_or_every_n_steps(every, expected):
    assert taken(runner_with_snapshots(every), 12) == expected


def test_a_worker_that_becomes_rank_0_takes_a_snapshot():
    runner = runner_with_snapshots("epoch")
    train_state = runner.operator._train_state
    train_state.settings.context = WorkerContext(world_rank=1)
    assert taken(runner, 2)[-1] is None
    train_state.settings.context = WorkerContext(world_rank=0)
    assert taken(runner, 3) == [2, 2]


def test_a_snapshot_is_the_state_that_would_have_been_saved_then():
    class Counting(Recorder):
        def setup(self, config):
            super().setup(config)
            self.seen = torch.zeros(1)

        def train_batch(self, batch, batch_info):
            self.seen += 1
            return super().train_batch(batch, batch_info)

        def state_dict(self):
            return {"seen": self.seen, "nested": [self.seen]}

    runner, saved = (
        runner_with_snapshots(every, {"batch_norm": True}, operator_cls=Counting)
        for every in (3, None)
    )
    runner.handle(TrainRequest(call_number=0, until_step=5))  # changes the state once more
    saved.handle(TrainRequest(call_number=0, until_step=3))
    expected = saved.state_dict()
    del expected["data"]["loaders"]  # only files describe the data
    # a snapshot may also describe the current call
    held = {name: runner.acquire_snapshot()[name] for name in expected}
    torch.testing.assert_close(held, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("start_step", "num_batches"), [(5, 5), (4, 6)])
def test_replayed_steps_of_earlier_calls_do_not_count(start_step, num_batches):
    """The end of the replay does not end an epoch either."""
    first = runner_with_snapshots(3)
    first.handle(TrainRequest(call_number=0, until_step=start_step))
    second = runner_with_snapshots(3)
    second.load_state_dict(first.acquire_snapshot())
    metrics = second.handle(TrainRequest(call_number=1, until_epoch=2, start_step=start_step))
    assert second.operator.trained == (EPOCH * 2)[24:]
    assert (metrics["num_samples"], metrics["batch_count"]) == (8 * num_batches, num_batches)


def test_from_a_snapshot_at_the_very_end_of_an_epoch_no_epoch_is_trained_twice():
    """A snapshot may be taken after the last step, but before the epoch is counted."""
    first = runner_with_snapshots(5)
    first.handle(TrainRequest(call_number=0, until_step=5))
    assert first.acquire_snapshot()["global_step"] == 5
    second = runner_with_snapshots(5)
    second.load_state_dict(first.acquire_snapshot())
    # the interrupted call asked for one epoch
    second.handle(TrainRequest(call_number=0, until_epoch=1))
    assert second.operator.trained == []
    position = second.status().position
    assert (position.num_completed_epochs, position.global_step) == (1, 5)


def begin_averages(operator):
    operator._update_features.averaging.start(0.9, 1)


def set_rate(operator):
    operator.optimizer.param_groups[0]["lr"] = 0.125


def freeze(operator):
    operator.model.requires_grad_(False)


@pytest.mark.parametrize("change", [begin_averages, set_rate, freeze])
@pytest.mark.parametrize("until_step", [None, 5, 7])
def test_a_snapshot_has_what_was_changed_between_calls(change, until_step):
    runner = runner_with_snapshots("epoch")
    if until_step is not None:
        taken(runner, until_step)
    runner.handle(ApplyOperatorRequest(function=change))
    if until_step is not None:
        # the driver fetches this snapshot, even if its step is the same
        assert runner.status().snapshot.num_invalidations == 1
    state = runner.acquire_snapshot()
    if change is begin_averages:
        assert "averages" in state
    elif change is freeze:
        restarted = runner_with_snapshots("epoch")
        restarted.load_state_dict(state)
        assert not any(p.requires_grad for p in restarted.operator.model.parameters())
    else:
        assert state["optimizers"][0]["param_groups"][0]["lr"] == 0.125


def test_a_snapshot_has_batch_sizes_that_were_changed_between_calls():
    def halve(operator):
        operator.register_data(**operator.make_loaders({"num_samples": 40, "batch_size": 4}))

    runner = runner_with_snapshots("epoch")
    taken(runner, 6)
    runner.handle(ApplyOperatorRequest(function=halve))
    assert runner.status().snapshot.num_invalidations == 1
    restarted = runner_with_snapshots("epoch")
    restarted.load_state_dict(runner.acquire_snapshot())
    taken(restarted, 7)
    assert restarted.operator.trained == list(range(8, 12))


def test_a_snapshot_stays_if_a_function_changes_nothing():
    runner = runner_with_snapshots("epoch")
    taken(runner, 7)
    runner.handle(ApplyOperatorRequest(function=vars))
    assert runner.status().snapshot == (5, 0)


# ---- the budget


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def timed(monkeypatch):
    """Return a function that trains steps of one second, and returns the steps with snapshots.

    Copying takes one second, and sending three. The expected cost is 1.7 seconds.
    """
    monkeypatch.setattr("raysgd.loop.snapshot_taker._SMALL_BYTES", 0)
    monkeypatch.setattr("raysgd.loop.snapshot_taker._S_PER_BYTE", 0.01)
    runner = runner_with_snapshots("auto")
    snapshots = runner._loop.snapshots
    clock = snapshots.clock = Clock()
    copy_leaf, taken = runner.operator._train_state.copy_leaf, []

    def copy(leaf, on_host=False):
        if not taken or taken[-1] != runner.status().position.global_step:
            taken.append(runner.status().position.global_step)
            clock.now += 1
        return copy_leaf(leaf, on_host)

    def step(batch_info, when):
        clock.now += when == "before"
        if (snapshot := runner.acquire_snapshot()) is not None:
            runner.release_snapshot(snapshot, 3.0)

    runner.operator._train_state.copy_leaf, runner.operator.fail = copy, step

    def train(until_step):
        call_number = runner.status().position.global_step
        runner.handle(TrainRequest(call_number=call_number, until_step=until_step))
        return taken

    train.runner, train.clock = runner, clock
    return train


def test_snapshots_cost_at_most_one_percent_of_the_training_time(timed):
    first, *others = timed(1500)
    assert first == _num_bytes(read_state(timed.runner._hosted_loop, is_snapshot=True))
    assert [step - first for step in others] == [400, 800, 1200]


def test_time_between_calls_pays_for_no_snapshot(timed):
    before = list(timed(200))
    timed.clock.now += 1e6
    assert timed(300) == before != []


def test_a_changed_learning_rate_is_in_a_snapshot_at_once(timed):
    timed(200)
    timed.runner.handle(ApplyOperatorRequest(function=set_rate))
    assert timed(201)[-1] == 200


def test_the_time_before_a_worker_becomes_rank_0_pays_for_no_snapshot(timed):
    settings = timed.runner.operator._train_state.settings
    settings.context = WorkerContext(world_rank=1)
    timed(150)
    settings.context = WorkerContext()
    assert timed(300) == []
    assert timed(340) != []


def test_ranks_take_snapshots_of_their_shards_at_one_step():
    """Their clocks differ, so they agree when a segment begins."""
    answers = []
    state = SimpleNamespace(
        settings=SimpleNamespace(options=SimpleNamespace(elastic=ElasticConfig())),
        context=WorkerContext(world_rank=1, has_process_group=True),
        state_status=StateStatus(is_complete=False),
        placement=StatePlacement(),
        step_timing=StepTiming(),
        position=SimpleNamespace(epoch=0, global_step=7),
        collectives=SimpleNamespace(all_reduce_min=lambda value: [min(value, answers.pop())]),
        copy_leaf=lambda leaf, on_host: leaf,
    )
    snapshots = SnapshotTaker(state, dict)
    snapshots.take_if_due()
    assert snapshots.newest_step is None
    for answer, expected in ((0, None), (1, 7)):
        answers.append(answer)
        snapshots.clear()
        snapshots.take_if_due(is_collective=True)
        assert (snapshots.newest_step, answers) == (expected, [])


def test_a_worker_that_ends_with_the_driver_takes_no_snapshot():
    runner = make_runner(elastic=ElasticConfig(snapshot_every="auto"))
    assert taken(runner, 11) == [None] * 12
    assert runner.acquire_snapshot() is None


def test_a_snapshot_that_was_sent_is_released():
    runner = runner_with_snapshots("epoch")
    taken(runner, 2)
    released = weakref.ref(runner.acquire_snapshot()["models"][0]["0.weight"])
    runner.release_snapshot(runner.acquire_snapshot(), 0.0)
    assert runner.acquire_snapshot() is None
    assert released() is None
    assert runner.status().snapshot.step == 0  # the driver does not ask for it again


def test_no_snapshot_is_taken_while_the_driver_fetches_one():
    """Otherwise the worker would hold two copies."""
    runner = runner_with_snapshots(1)
    taken(runner, 2)
    fetched = runner.acquire_snapshot()
    assert taken(runner, 4)[-1] == 2
    runner.release_snapshot(fetched, 0.0)
    assert taken(runner, 6)[-1] == 6
    fetched = runner.acquire_snapshot()
    runner._loop.snapshots.clear()  # as when another state is loaded
    assert taken(runner, 7)[-1] == 7
    runner.release_snapshot(fetched, 0.0)
    assert runner.acquire_snapshot() is not None


@on_gpu
def test_a_snapshot_needs_no_memory_on_the_gpu():
    tensor = torch.zeros(2**24, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    assert copy_leaf(tensor, on_host=True).device.type == "cpu"
    assert torch.cuda.max_memory_allocated() == before


# ---- checks


NONE = {"models": [], "optimizers": [], "epoch": 0}
AT, COUNT = {"epoch": 0, "offset": 0}, "The state's {} must be a count, but it is {!r}.".format
KEYS, NO_COUNTS = (*AT, "validation_offset", "seed"), (-1, 1.0, True, "1", None, 2**62)
WRONG = [
    *((key, n, COUNT(key, n)) for key in ("epoch", "global_step") for n in NO_COUNTS),
    *(("data", {**AT, key: -1}, COUNT(f"data[{key!r}]", -1)) for key in KEYS),
    ("data", {"epoch": 0}, COUNT("data['offset']", None)),
    ("data", {**AT, "loader_seeds": {"a": -1}}, COUNT("data['loader_seeds']['a']", -1)),
    ("data", [1], "state['data'] must be a dict, but it is [1]."),
    ("data", {**AT, "split": 0}, "The state's data['split'] must be at least 1."),
]


@pytest.mark.parametrize(("key", "value", "message"), WRONG)
def test_a_wrong_entry_is_named_with_its_value(key, value, message):
    with pytest.raises(CheckpointError) as caught:
        check_state({**NONE, key: value})
    assert str(caught.value) == message


@pytest.mark.parametrize("data", [None, {"epoch": 3, "offset": 0, "rng": "anything"}])
def test_older_states_may_lack_some_counts(data):
    check_state({**NONE, "epoch": 3, "data": data})
