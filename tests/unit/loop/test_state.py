"""Snapshots for restarts, and checks of the counts in a loaded state."""

import copy

import pytest
import torch

from raysgd._internal.context import WorkerContext
from raysgd.elastic.config import ElasticConfig
from raysgd.errors import CheckpointError
from raysgd.loop.requests import ApplyOperatorRequest, TrainRequest
from raysgd.loop.state import check_position
from raysgd.torch.options import TorchOptions
from raysgd.torch.runner import TorchRunner
from tests.unit.recorder import Recorder

EPOCH = list(range(40))


def make_runner(every, config=None, context=None, operator_cls=Recorder, **options):
    """Return a runner whose epochs have five batches of eight samples."""
    config = {"num_samples": 40, "batch_size": 8, **(config or {})}
    runner = TorchRunner(
        TorchOptions(
            training_operator_cls=operator_cls,
            config=config,
            elastic=ElasticConfig(snapshot_every=every),
            **options,
        )
    )
    context = context or WorkerContext(in_driver=True)
    runner.prepare(context)
    runner.setup(context)
    return runner


def taken(runner, until_step):
    """Train, and return the step of the newest snapshot before each step and at the end."""
    steps = []

    def look(batch_info, when):
        if when == "before":
            steps.append(runner.progress().snapshot)

    runner.operator.fail = look
    runner.handle(TrainRequest(call=runner.progress().global_step, until_step=until_step))
    return [*steps, runner.progress().snapshot]


def test_a_snapshot_is_taken_at_the_start_of_each_epoch():
    assert taken(make_runner("epoch"), 11) == [0] * 5 + [5] * 5 + [10] * 2


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (1, list(range(13))),
        (3, [0, 0, 0, 3, 3, 3, 6, 6, 6, 9, 9, 9, 12]),
        (5, [0] * 5 + [5] * 5 + [10] * 3),
        (100, [0] * 13),
    ],
)
def test_a_snapshot_is_taken_every_n_steps(every, expected):
    assert taken(make_runner(every), 12) == expected


def test_snapshots_can_be_disabled():
    runner = make_runner(None)
    assert taken(runner, 12) == [None] * 13
    assert runner.snapshot() is None


@pytest.mark.parametrize("every", ["epoch", 1])
def test_only_rank_0_takes_snapshots(every):
    runner = make_runner(every)
    runner.operator._train_state.settings.context = WorkerContext(world_rank=1)
    assert taken(runner, 3) == [None] * 4
    assert runner.snapshot() is None


def test_a_worker_that_becomes_rank_0_takes_a_snapshot():
    runner = make_runner("epoch")
    train_state = runner.operator._train_state
    train_state.settings.context = WorkerContext(world_rank=1)
    assert taken(runner, 2)[-1] is None
    train_state.settings.context = WorkerContext(world_rank=0)
    assert taken(runner, 3) == [2, 2]


def test_a_snapshot_does_not_change_as_training_goes_on():
    runner = make_runner(2, {"batch_norm": True})
    runner.handle(TrainRequest(call=0, until_step=2))
    held = runner.snapshot()
    before = copy.deepcopy(held)
    assert held["global_step"] == 2
    runner._loop.snapshots.maybe_take = lambda *arguments: None
    runner.handle(TrainRequest(call=1, until_step=9))
    for snapshot in (held, runner.snapshot()):
        torch.testing.assert_close(snapshot, before, rtol=0, atol=0)
    # training did change the weights
    now = runner.state_dict()["models"][0]
    assert any(not torch.equal(now[name], before["models"][0][name]) for name in now)


def test_a_snapshot_is_the_state_that_would_have_been_saved_then():
    runner = make_runner(3)
    saved = make_runner(None)
    runner.handle(TrainRequest(call=0, until_step=4))
    saved.handle(TrainRequest(call=0, until_step=3))
    expected = saved.state_dict()
    # a snapshot may also describe the current call
    held = {name: runner.snapshot()[name] for name in expected}
    torch.testing.assert_close(held, expected, rtol=0, atol=0)


def test_a_snapshot_has_a_copy_of_the_operators_own_state():
    class Counting(Recorder):
        def setup(self, config):
            super().setup(config)
            self.seen = torch.zeros(1)

        def train_batch(self, batch, batch_info):
            self.seen += 1
            return super().train_batch(batch, batch_info)

        def state_dict(self):
            return {"seen": self.seen, "nested": [self.seen]}

    runner = make_runner(3, operator_cls=Counting)
    runner.handle(TrainRequest(call=0, until_step=5))
    own = runner.snapshot()["operator"]
    assert (own["seen"].item(), own["nested"][0].item()) == (3.0, 3.0)


@pytest.mark.parametrize("every", ["epoch", 3])
@pytest.mark.parametrize("stop", [1, 4, 8])
def test_an_epoch_continues_where_its_snapshot_was_taken(every, stop):
    first = make_runner(every)
    first.handle(TrainRequest(call=0, until_step=stop))
    snapshot = first.snapshot()
    step = snapshot["global_step"]
    assert snapshot["data"]["epoch"] == step // 5
    assert snapshot["data"]["offset"] == step % 5 * 8
    assert snapshot["epoch"] == -(-step // 5)
    second = make_runner(every)
    second.load_state_dict(snapshot)
    assert second.progress().global_step == step
    second.handle(TrainRequest(call=0, until_epoch=2))
    assert second.operator.trained == (EPOCH * 2)[step * 8 :]
    whole = make_runner(None)
    whole.handle(TrainRequest(call=0, until_epoch=2))
    torch.testing.assert_close(
        second.operator.model.state_dict(), whole.operator.model.state_dict(), rtol=0, atol=0
    )


@pytest.mark.parametrize(("start_step", "num_batches"), [(5, 5), (4, 6)])
def test_replayed_steps_of_earlier_calls_do_not_count(start_step, num_batches):
    """The end of the replay does not end an epoch either."""
    first = make_runner(3)
    first.handle(TrainRequest(call=0, until_step=start_step))
    second = make_runner(3)
    second.load_state_dict(first.snapshot())
    metrics = second.handle(TrainRequest(call=1, until_epoch=2, start_step=start_step))
    assert second.operator.trained == (EPOCH * 2)[24:]
    assert (metrics["num_samples"], metrics["batch_count"]) == (8 * num_batches, num_batches)


def test_from_a_snapshot_at_the_very_end_of_an_epoch_no_epoch_is_trained_twice():
    """A snapshot may be taken after the last step, but before the epoch is counted."""
    first = make_runner(5)
    first.handle(TrainRequest(call=0, until_step=5))
    assert first.snapshot()["global_step"] == 5
    second = make_runner(5)
    second.load_state_dict(first.snapshot())
    # the interrupted call asked for one epoch
    second.handle(TrainRequest(call=0, until_epoch=1))
    assert second.operator.trained == []
    assert (second.progress().epoch, second.progress().global_step) == (1, 5)


def begin_averages(operator):
    operator._train_state.feature("Averaging").begin(0.9, 1)


def set_rate(operator):
    operator.optimizer.param_groups[0]["lr"] = 0.125


@pytest.mark.parametrize("change", [begin_averages, set_rate])
@pytest.mark.parametrize("until_step", [None, 5, 7])
def test_a_snapshot_has_what_was_changed_between_calls(change, until_step):
    runner = make_runner("epoch")
    if until_step is not None:
        taken(runner, until_step)
    runner.handle(ApplyOperatorRequest(function=change))
    if until_step is not None:
        # None makes the driver fetch the next snapshot, even if its step is the same
        assert runner.progress().snapshot is None
        taken(runner, until_step + 1)
    state = runner.snapshot()
    if change is begin_averages:
        assert "averages" in state
    else:
        assert state["optimizers"][0]["param_groups"][0]["lr"] == 0.125


def test_a_snapshot_stays_if_a_function_changes_nothing():
    runner = make_runner("epoch")
    taken(runner, 7)
    runner.handle(
        ApplyOperatorRequest(function=lambda operator: operator.optimizer.param_groups[0]["lr"])
    )
    assert runner.progress().snapshot == 5


# ---- checks


@pytest.mark.parametrize("data", [None, {"epoch": 3, "offset": 0, "rng": "anything"}])
def test_older_states_may_lack_some_counts(data):
    check_position({"epoch": 3, "data": data})


@pytest.mark.parametrize("wrong", [-1, 1.0, True, "1", None, 2**62])
@pytest.mark.parametrize("key", ["epoch", "global_step"])
def test_a_wrong_count_is_named_with_its_value(key, wrong):
    with pytest.raises(CheckpointError) as caught:
        check_position({"epoch": 0, "global_step": 0, key: wrong})
    assert str(caught.value) == f"The state's {key} must be a count, but it is {wrong!r}."


@pytest.mark.parametrize("key", ["epoch", "offset", "validation_offset"])
def test_a_wrong_place_in_the_data_is_named(key):
    with pytest.raises(CheckpointError, match=rf"data\['{key}'\] must be a count.*-1"):
        check_position({"epoch": 0, "data": {"epoch": 0, "offset": 0, key: -1}})


def test_data_must_be_a_dict_with_a_place():
    with pytest.raises(CheckpointError, match="data cannot be loaded"):
        check_position({"epoch": 0, "data": [1]})
    with pytest.raises(CheckpointError, match=r"data\['offset'\] must be a count.*None"):
        check_position({"epoch": 0, "data": {"epoch": 0}})
