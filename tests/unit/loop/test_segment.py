"""The step iterator: when it counts a step, and what a failed step leaves behind."""

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysgd._internal.runner import WorkerContext
from raysgd.data.partition import MicroBatchPlan
from raysgd.data.source import BatchSource
from raysgd.loop.loop_control import LoopControl, StepInterruptedError
from raysgd.loop.segment import Segment
from raysgd.loop.update import Update
from raysgd.torch.feature_list import OperatorFeatures
from raysgd.torch.optimization import Optimization
from raysgd.torch.options import TorchSettings
from raysgd.torch.registration import register
from raysgd.torch.train_state import TorchTrainState


def make_steps(
    batches,
    limit=None,
    steps_left="all",
    agree=None,
    size=1,
    num_optimizers=1,
    is_partitioned=False,
    before=0,
    world_size=1,
):
    """Return a new train state, and an iterator with accumulation groups of `size` batches."""
    train_state = TorchTrainState(TorchSettings())
    models = [torch.nn.BatchNorm1d(1) for _ in range(num_optimizers)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    features = OperatorFeatures(train_state)
    register(train_state, features, models, optimizers, gradient_accumulation_steps=size)
    train_state.position.global_step = before
    if agree is not None:
        world_size, train_state.collectives.all_reduce_min = 2, lambda flag: [agree(flag)]
    train_state.settings.context = WorkerContext(world_size=world_size)
    if steps_left == "all":
        batches = list(batches)
        steps_left = len(batches)
    source = BatchSource(batches)
    source.is_partitioned = is_partitioned
    return train_state, Segment(train_state, source, LoopControl(), limit, steps_left)


def rest_after_error(steps):
    steps.end_after_error()
    return [each.content for each in steps.source.unread or steps.source.read(0, 0)]


def reading(size, fetched):
    """Yield batches, and add each to `fetched` when it is read."""
    for index in range(size):
        fetched.append(index)
        yield index


def test_a_step_is_done_only_when_every_optimizer_has_stepped():
    train_state, steps = make_steps("ab", num_optimizers=2)
    next(steps)
    for _ in range(2):
        train_state.optimizers[0].step()
    assert [*train_state.update.optimizer_steps.counts.values()] == [2]
    assert rest_after_error(steps) == ["a", "b"]
    assert train_state.position.global_step == 0
    for fails_in_another, rest in ((False, ["b"]), (True, ["a", "b"])):
        train_state, steps = make_steps("ab", num_optimizers=2)
        next(steps)
        for optimizer in train_state.optimizers:
            optimizer.step()
        if fails_in_another:
            train_state.update.optimizer_steps.begin(optimizer)
        assert rest_after_error(steps) == rest


def test_a_requested_step_counts_once_also_if_it_is_skipped_and_not_if_it_raises():
    update, optimizer = Update(), object()
    steps = update.optimizer_steps
    steps.expect([optimizer])
    update.begin_micro_batch(MicroBatchPlan())

    def step(optimizer):
        assert steps.is_requested
        steps.begin(optimizer)
        steps.end(optimizer)

    for function in (step, lambda optimizer: None):
        steps.make(optimizer, function)
        steps.skip(object())  # not registered
    with pytest.raises(ZeroDivisionError):
        steps.make(optimizer, lambda optimizer: 1 / 0)
    assert [*steps.counts.values()] == [2]
    assert not steps.is_requested


def test_a_request_to_stop_raises_at_the_next_step_and_keeps_those_done():
    train_state, steps = make_steps(range(5))
    next(steps)
    steps._control.is_interrupted = True
    with pytest.raises(StepInterruptedError):
        next(steps)
    assert rest_after_error(steps) == [1, 2, 3, 4]
    assert train_state.position.global_step == 1


def test_all_ranks_end_when_one_has_no_batch_left_and_are_not_asked_at_a_pause():
    """At a pause, all ranks stop. A rank that asked the others would wait forever."""
    asked, answers = [], [False, True, True, True]

    def agree(has_batch):
        asked.append(has_batch)
        return answers.pop()

    train_state, steps = make_steps(range(5), steps_left=None, agree=agree)
    assert groups_of(train_state, steps, pause=2, after=1) == [[0], [1]]
    assert (asked, steps.epoch_is_over) == ([True, True], False)
    _, steps = make_steps(range(5), steps_left=None, agree=agree)
    assert list(steps) == [0]
    assert (asked, steps.epoch_is_over) == ([True] * 4, True)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loader_that_ends_before_its_length_is_refused_if_others_would_wait(world_size):
    _, steps = make_steps(range(3), steps_left=5, world_size=world_size)
    refused = pytest.raises(RuntimeError, match="worker 0 ended after 3 of 5 batches")
    with refused if world_size > 1 else contextlib.nullcontext():
        assert list(steps) == [0, 1, 2]


def test_the_mean_time_of_a_step_is_known_after_the_first(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("raysgd.loop.segment.time.perf_counter", lambda: now[0])
    _, steps = make_steps(range(5))
    means = []
    for seconds in (0.0, 2.0, 4.0):
        now[0] += seconds
        next(steps)
        means.append(steps.step_s)
    assert means == [0.0, 2.0, 3.0]


# ---- groups of batches that make one update


def groups_of(train_state, steps, after=None, pause=None):
    """Return all batches, in groups."""
    groups, group = [], []
    for count, batch in enumerate(steps, start=1):
        assert train_state.update.micro_batch_index == len(group)
        group.append(batch)
        if train_state.update.in_last_micro_batch:
            groups.append(group)
            group = []
        if count == after:
            steps._control.driver_pause_step = pause
    assert group == []
    steps.finish()
    return groups


@given(
    size=st.integers(1, 5),
    count=st.integers(1, 14),
    limit=st.none() | st.integers(1, 15),
    length_known=st.booleans(),
    is_partitioned=st.booleans(),
)
def test_batches_come_in_groups_and_a_smaller_one_at_the_end(
    size, count, limit, length_known, is_partitioned
):
    train_state, steps = make_steps(
        range(count),
        limit,
        count if length_known else None,
        size=size,
        is_partitioned=is_partitioned and length_known,
    )
    whole = min(count, limit or count)
    expected = [list(range(start, min(start + size, whole))) for start in range(0, whole, size)]
    assert groups_of(train_state, steps) == expected
    position = train_state.position
    assert position.global_step == position.offset == steps.num_committed == whole
    if length_known:
        assert steps.epoch_is_over == (whole == count)


@given(size=st.integers(1, 4), count=st.integers(1, 14), fails_at=st.integers(0, 15))
def test_no_batch_is_lost_if_a_worker_fails_while_ranks_agree(size, count, fails_at):
    answers = iter([True] * fails_at)

    def agree(has_batch):
        if not next(answers, False):
            raise ConnectionError
        return has_batch

    train_state, steps = make_steps(range(count), steps_left=None, agree=agree, size=size)
    with contextlib.suppress(ConnectionError):
        list(steps)
    assert rest_after_error(steps) == list(range(train_state.position.offset, count))


def test_a_group_is_committed_as_one_when_its_last_batch_is_done():
    train_state, steps = make_steps(range(7), size=3)
    position, seen = train_state.position, []
    for _ in steps:
        seen.append((position.global_step, steps.num_committed, steps.num_finished_steps))
    assert seen == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (3, 3, 3), (3, 3, 4), (3, 3, 5), (6, 6, 6)]
    assert train_state.position.global_step == 7


def test_only_within_a_group_is_a_loader_of_unknown_length_read_one_batch_ahead():
    fetched = []
    _, steps = make_steps(reading(8, fetched), steps_left=None, size=3)
    seen = [(batch, len(fetched)) for batch in steps]
    assert seen == [(0, 2), (1, 3), (2, 3), (3, 5), (4, 6), (5, 6), (6, 8), (7, 8)]


@given(st.integers(1, 4), st.integers(1, 12), st.integers(1, 14), st.data())
def test_a_pause_is_made_at_the_end_of_the_group_that_reaches_it(size, count, pause, data):
    """If the request comes too late, the pause is at the end of the current group."""
    after = data.draw(st.integers(1, count))
    train_state, steps = make_steps(range(count), size=size)
    groups_of(train_state, steps, after, pause)
    assert train_state.position.global_step == min(count, -(-max(pause, after) // size) * size)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("length_known", [True, False])
@pytest.mark.parametrize("at", range(5))
def test_a_failure_discards_the_group_and_returns_its_batches(at, length_known, size):
    train_state, steps = make_steps("abcde", steps_left=5 if length_known else None, size=size)
    for _ in range(at + 1):
        batch = next(steps)
    assert batch == "abcde"[at]
    reached = at // size * size
    assert rest_after_error(steps) == list("abcde"[reached:])
    position = train_state.position
    assert position.global_step == position.offset == steps.num_committed == reached
    assert train_state.update.micro_batch_index == -1


def test_after_an_error_before_the_first_batch_an_iteration_can_begin():
    train_state, steps = make_steps("ab")
    steps.end_after_error()
    assert list(Segment(train_state, steps.source, LoopControl())) == ["a", "b"]


def optimize(train_state, loss, count, updates=True):
    (optimization,) = (f for f in train_state.features if isinstance(f, Optimization))
    optimization.backward(loss, count)
    if updates:
        optimization.step(train_state.optimizers[0])


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_loop_that_catches_an_error_of_its_loader_is_an_error(at):
    failing = (1 // (index - at) for index in range(5))
    train_state, steps = make_steps(failing, steps_left=None, size=2)
    for _ in range(3):
        with contextlib.suppress(ZeroDivisionError):
            list(steps)
    with pytest.raises(RuntimeError, match="train_epoch caught an error of its loader"):
        steps.finish()
    assert train_state.position.global_step == at // 2 * 2


def test_a_loop_that_catches_an_error_of_an_update_is_an_error():
    train_state, steps = make_steps(range(6), size=2)
    for _ in range(2):
        next(steps)
        optimize(train_state, train_state.models[0].weight.sum(), 1, updates=False)
    with pytest.raises(RuntimeError, match="makes no update in the last batch"):
        next(steps)
    assert list(steps) == []
    with pytest.raises(RuntimeError, match="train_epoch caught an error at the end of an update"):
        steps.finish()
    assert rest_after_error(steps) == [*range(6)]


@pytest.mark.parametrize("size", [1, 3])
def test_a_group_whose_update_is_done_is_counted_as_a_whole_when_the_loop_raises(size):
    train_state, steps = make_steps("abcde", size=size)
    for _ in range(size):
        next(steps)
        optimize(train_state, train_state.models[0].weight.sum(), 1)
    assert rest_after_error(steps) == list("abcde"[size:])
    assert (train_state.position.global_step, train_state.position.offset) == (size, size)
    assert train_state.models[0].weight.grad is None


def test_a_loop_that_stops_within_a_group_is_an_error_and_leaves_no_gradient():
    batches = [torch.ones(2, 1) * index for index in range(5)]
    train_state, steps = make_steps(batches, size=3)
    for index, batch in enumerate(steps):
        optimize(train_state, train_state.models[0](batch).square().mean(), 2)
        if index == 3:
            break
    with pytest.raises(RuntimeError, match="within an accumulation group"):
        steps.finish()
    assert [int(batch[0]) for batch in rest_after_error(steps)] == [3, 4]
    assert (train_state.position.global_step, train_state.position.offset) == (3, 3)
    assert train_state.models[0].weight.grad is None
    assert train_state.models[0].num_batches_tracked == 3
