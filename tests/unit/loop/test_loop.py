"""Iteration over loaders in training and validation: cursors, goals, failures, and results.

The only worker is this process. An epoch has five batches of eight samples.
"""

import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from raysgd import ElasticConfig
from raysgd._internal import step_timing
from raysgd._internal.runner import PausedError
from raysgd.data import Dataset
from raysgd.loop.requests import TrainRequest
from raysgd.testing import run_operator
from raysgd.torch import constants
from raysgd.torch.features.lr_scheduling import LRScheduling
from tests.unit.recorder import Recorder, Streaming, Unsized, failure, idle

EPOCH = list(range(40))


def kinds(**more):
    """Return a mark that runs a test with each kind of loader, and with `more` operators."""
    cases = {"sharded": (Recorder, {}), "unsized": (Streaming, {})}
    cases |= {"list": (Streaming, {"wrap": list}), **more}
    return pytest.mark.parametrize(("operator_cls", "config"), cases.values(), ids=cases)


KINDS = kinds()


@pytest.fixture
def start(make_trainer):
    """Return a function that returns a new trainer and its operator."""

    def start(operator_cls=Recorder, config=None, **arguments):
        trainer = make_trainer(operator_cls, config, **arguments)
        return trainer, trainer.get_local_operator()

    return start


class Epochs:
    """Batches that count how often an epoch begins, and ends."""

    def __init__(self, batches):
        self.batches, self.began, self.ended = batches, 0, 0

    def __len__(self):
        return 10**20  # Python raises OverflowError

    def __iter__(self):
        self.began += 1
        yield from self.batches
        self.ended += 1


class SizedEpochs(Epochs):
    def __len__(self):
        return len(self.batches)


class SelfIterating(SizedEpochs):
    """Batches that are their own iterator, and begin again after their end."""

    def __init__(self, batches):
        super().__init__(batches)
        self._rest = iter(batches)

    def __iter__(self):
        self.began += 1
        return self

    def __next__(self):
        try:
            return next(self._rest)
        except StopIteration:
            self._rest = iter(self.batches)
            self.ended += 1
            raise


# ---- train: epochs and steps


@pytest.mark.parametrize("partitions", [True, False])
@pytest.mark.parametrize("wrap", [Epochs, SizedEpochs, SelfIterating])
def test_loader_begins_and_ends_once_in_an_epoch(start, wrap, partitions):
    trainer, operator = start(Streaming, {"wrap": wrap}, add_dist_sampler=partitions)
    for call in (trainer.train, trainer.validate):
        call(num_steps=2)
        call()
        call()
    assert operator.trained == operator.validated == 2 * EPOCH
    for loader in operator._train_state.data.registered_loaders.values():
        assert (loader.began, loader.ended) == (2, 2)
    operator.register_data(train_loader=[0])  # keeps no earlier one
    assert len(operator._train_state.data.registered_loaders) == 2


@pytest.mark.parametrize("partitions", [True, False])
def test_a_loader_that_is_longer_than_its_length_is_named(start, partitions, caplog):
    class Longer(Epochs):
        def __len__(self):
            return len(self.batches) - 1

    trainer, operator = start(Streaming, {"wrap": Longer}, add_dist_sampler=partitions)
    trainer.train()
    trainer.train()
    assert operator.trained == 2 * EPOCH[:32]
    assert caplog.text.count("leave out the rest of") == 1


def test_sampler_that_counts_its_epochs_after_its_end_gives_each_its_order(start):
    class Turning(Recorder):
        def make_loaders(self, config):
            data = super().make_loaders(config)["train_loader"].dataset
            return {"train_loader": DataLoader(data, batch_size=8, sampler=SizedEpochs(EPOCH))}

    trainer, operator = start(Turning)
    trainer.train()
    assert operator.train_loader.sampler.ended == 1


class ReadsLoader(Recorder):
    """A loop over ``self.train_loader`` instead of its iterator."""

    def train_epoch(self, iterator, info, **given):
        self.trained.append([int(x) for batch in self.train_loader for x in batch[0]])
        return {"num_samples": 40}


class HasSampler(ReadsLoader):
    def make_loaders(self, config):
        loaders = super().make_loaders(config)
        data = loaders["train_loader"].dataset
        sampler = DistributedSampler(data, self.world_size, self.world_rank)
        return {**loaders, "train_loader": DataLoader(data, batch_size=8, sampler=sampler)}


@pytest.mark.parametrize("operator_cls", [ReadsLoader, HasSampler])
@pytest.mark.parametrize("partitions", [True, False])
def test_own_loop_over_the_train_loader_has_a_new_order_in_each_epoch(
    start, operator_cls, partitions
):
    trainer, operator = start(operator_cls, {"shuffle": True}, add_dist_sampler=partitions)
    trainer.fit(3, verbose=False)
    orders = operator.trained
    assert all(sorted(order) == EPOCH for order in orders)
    assert len({tuple(order) for order in orders}) == 3


@KINDS
@given(calls=st.lists(st.none() | st.integers(1, 12), min_size=1, max_size=5))
def test_calls_go_on_where_the_last_one_stopped(start, operator_cls, config, calls):
    """A call without num_steps (None) reads the rest of an epoch, or a whole one.

    Validation has a cursor of its own.
    """
    trainer, operator = start(operator_cls, config)
    steps = 0
    for num_steps in calls:
        taken = num_steps or 5 - steps % 5
        steps += taken
        result = trainer.train(num_steps=num_steps)
        assert trainer.global_step == steps
        assert (result["num_samples"], result["batch_count"]) == (8 * taken, taken)
        assert not math.isnan(result["train_loss"])
        assert operator.trained == (EPOCH * 20)[: steps * 8]
        if operator_cls is Recorder or config:  # the length of an epoch is known
            assert result["epoch"] == trainer.epoch == math.ceil(steps / 5)
    infos = [(i["epoch_idx"], i["batch_idx"], i["global_step"]) for i in operator.infos]
    assert [(epoch, step) for epoch, _, step in infos] == [(n // 5, n) for n in range(steps)]
    trained, steps = steps, 0
    for num_steps in reversed(calls):
        taken = num_steps or 5 - steps % 5
        steps += taken
        result = trainer.validate(num_steps=num_steps)
        assert (result["num_samples"], result["batch_count"]) == (8 * taken, taken)
    assert operator.validated == (EPOCH * 20)[: steps * 8]
    assert trainer.global_step == trained
    trainer.train()
    assert operator.trained == EPOCH * (trained // 5 + 1)
    trainer.shutdown()


LOADERS = pytest.mark.parametrize(
    ("method", "name"), [("train", "train"), ("validate", "validation")]
)
EMPTY = pytest.mark.parametrize("wrap", [list, lambda _: Unsized([])], ids=["list", "unsized"])


@LOADERS
@EMPTY
@pytest.mark.parametrize("num_steps", [None, 3])
def test_an_empty_loader_is_an_error(start, method, name, wrap, num_steps):
    for operator_cls in (Recorder, Streaming):
        trainer, _ = start(operator_cls, {"num_samples": 0, "wrap": wrap})
        with pytest.raises(RuntimeError, match=f"{name} loader"):
            getattr(trainer, method)(num_steps=num_steps)


def test_empty_validation_loader_is_an_error_even_if_the_loop_does_not_read_it(start):
    class Idle(Streaming):
        def validate(self, val_iterator, info):
            return {}

    trainer, _ = start(Idle, {"num_samples": 0, "wrap": list})
    with pytest.raises(RuntimeError, match="validation loader has no batches"):
        trainer.validate()


@EMPTY
def test_worker_with_an_empty_loader_raises_before_it_waits_for_others(start, wrap):
    config = {"num_samples": 0, "wrap": wrap}
    trainer, operator = start(Streaming, config, add_dist_sampler=False)
    train_state = operator._train_state
    train_state.settings.context = dataclasses.replace(train_state.context, world_size=2)
    train_state.collectives.all_reduce_min = None
    with pytest.raises(RuntimeError, match="train loader has no batches"):
        trainer.train()


# ---- custom loops


def test_a_loop_gets_the_arguments_of_its_signature(start):
    class Taking(Recorder):
        def train_epoch(self, iterator, **given):
            own = {name: value for name, value in given["info"].items() if name == "a"}
            self.given, self.info = {**given, "info": own}, given["info"]
            return super().train_epoch(iterator, **given)

    trainer, operator = start(Taking)
    trainer.train()
    assert operator.given == {"info": {}, "num_steps": None, "epoch_idx": 0}
    trainer.train(num_steps=2, info={"a": 1})
    assert operator.given == {"info": {"a": 1}, "num_steps": 2, "epoch_idx": 1}
    page = Path(__file__).parents[3] / "docs" / "custom_loops.md"
    (row,) = (line for line in page.read_text().splitlines() if line.startswith("| `info` |"))
    documented = re.findall(r"`(\w+)`", row.partition("the keys")[2])
    assert {getattr(constants, name) for name in documented} == operator.info.keys() - {"a"}


def test_batches_without_num_samples_count_as_one_each(start):
    class Plain(Recorder):
        def train_batch(self, batch, batch_info):
            return {"train_loss": super().train_batch(batch, batch_info)["train_loss"]}

        def validate_batch(self, batch, batch_info):
            return {"val_loss": super().validate_batch(batch, batch_info)["val_loss"]}

    trainer, _ = start(Plain)
    assert [repr(call()["num_samples"]) for call in (trainer.train, trainer.validate)] == ["5", "5"]
    assert trainer.speed().workers[0].samples_per_s == 0.0  # the size of batches is unknown


@pytest.mark.parametrize("value", [None, 3.0, [1]])
def test_a_loop_that_returns_no_dict_is_refused_by_name(start, value):
    class Wrong(Recorder):
        def train_epoch(self, iterator, info=None):
            list(iterator)
            return value

        def validate(self, val_iterator, info=None):
            return value

    trainer, _ = start(Wrong)
    for method, name in ((trainer.train, "train_epoch"), (trainer.validate, "validate")):
        with pytest.raises(TypeError, match=rf"Wrong\.{name} returned {type(value).__name__}"):
            method()


def test_a_loop_that_draws_no_batch_is_an_error_only_with_num_steps(start, caplog):
    class Stopping(Recorder):
        """Stops for good after two batches."""

        def train_epoch(self, iterator, info=None):
            while len(self.trained) < 16:
                self.train_batch(next(iterator), {})
            return {}

    trainer, operator = start(Stopping)
    with pytest.raises(RuntimeError, match="drew no batch"):
        trainer.train(num_steps=4)
    assert operator.trained == EPOCH[:16]
    assert trainer.train()["epoch"] == 1
    assert "Stopping.train_epoch drew no batch from its iterator" in caplog.text


def test_an_init_that_does_not_call_its_base_is_an_error():
    class Forgetful(Recorder):
        def __init__(self, config, settings):
            pass

    with pytest.raises(TypeError, match=r"Forgetful\.__init__ must take \*args and call super"):
        run_operator(Forgetful)


# ---- validate


def test_metrics_of_own_batches_remain_if_train_batch_validates(start):
    class Validates(Recorder):
        def train_batch(self, batch, batch_info):
            return {**self.validate([batch]), **super().train_batch(batch, batch_info)}

    assert start(Validates)[1].train_epoch([[torch.ones(2, 1)] * 2] * 3)["num_samples"] == 6


def test_segments_count_by_their_batches_without_num_samples(start):
    class Lengths(Streaming):
        def train_epoch(self, iterator, info):
            return {"length": sum(1 for _ in map(self.train_batch, iterator, [info] * 9))}

        def validate(self, val_iterator, info):
            return {"val_length": sum(1 for _ in val_iterator)}

    trainer, _ = start(Lengths)
    assert trainer.train(num_steps=7)["length"] == (5 * 5 + 2 * 2) / 7
    # The second call begins where the iterable has ended, with a part that does not count.
    assert [trainer.validate(num_steps=n)["val_length"] for n in (5, 3)] == [5, 3]


@KINDS
def test_a_failed_validation_is_repeated_from_its_start(start, operator_cls, config):
    trainer, operator = start(operator_cls, config)
    trainer.validate(num_steps=1)

    def fail(batch_info, when):
        if batch_info["batch_idx"] == 2:
            raise ValueError("bad batch")

    operator.fail = fail
    with pytest.raises(ValueError, match="bad batch"):
        trainer.validate()
    operator.fail = idle
    operator.validated.clear()
    assert trainer.validate()["num_samples"] == 32
    assert operator.validated == EPOCH[8:]


@pytest.mark.parametrize(("rank", "firsts"), [(0, [0, 16, 32]), (1, [8, 24])])
def test_validation_counts_the_steps_of_the_group(start, rank, firsts):
    """Rank 0 has three of the five batches, and rank 1 has two."""
    trainer, operator = start(elastic=ElasticConfig(global_batch="scale"))
    train_state = operator._train_state
    context = dataclasses.replace(train_state.context, world_rank=rank, world_size=2)
    train_state.begin_generation(context)
    for num_steps, first, last in ((1, 0, 1), (2, 1, 3), (2, 0, 2), (None, 2, 3), (3, 0, 3)):
        operator.validated.clear()
        trainer.validate(num_steps=num_steps)
        assert operator.validated[::8] == firsts[first:last]
        assert train_state.position.validation_offset == last % 3 * 16


# ---- profile


def test_profile_names_the_stages_of_a_step(start):
    trainer, operator = start()
    trained = trainer.train(profile=True)["profile"]
    phases = ("train_epoch", "fwd", "grad", "apply", "data")
    assert set(trained) == {f"mean_{phase}_s" for phase in phases}
    validated = trainer.validate(profile=True)["profile"]
    assert set(validated) == {"mean_validation_s", "mean_eval_fwd_s"}
    assert all(seconds >= 0 for seconds in [*trained.values(), *validated.values()])
    assert trained["mean_train_epoch_s"] >= trained["mean_fwd_s"]
    for call in (trainer.train, trainer.validate):
        assert "profile" not in call()
    assert operator.timers.stats() == {}


def test_profile_has_the_phases_of_this_call(start, monkeypatch):
    trainer, operator = start()
    timing, now = operator._train_state.step_timing, [0.0]
    monkeypatch.setattr(step_timing, "perf_counter", lambda: now[0])
    backward = operator.backward

    def slow(*arguments, **keywords):
        with timing.within(step_timing.BACKWARD):
            now[0] += 2
        backward(*arguments, **keywords)

    monkeypatch.setattr(operator, "backward", slow)
    trainer.train(num_steps=2)
    profile = trainer.train(num_steps=3, profile=True)["profile"]
    assert (profile["mean_grad_s"], profile["mean_apply_s"]) == (2, 0)


# ---- schedulers


def halving(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def rate(operator):
    return operator.optimizer.param_groups[0]["lr"] / 0.01


class Wrapping(Recorder):
    """Wraps its iterator, and has the oldest signature."""

    def train_epoch(self, iterator, info):
        return super().train_epoch((batch for batch in iterator), info)


@kinds(wrapping=(Wrapping, {}))
def test_schedulers_of_epochs_step_when_the_loop_ends_an_epoch(start, operator_cls, config):
    trainer, operator = start(
        operator_cls, {**config, "scheduler": halving}, scheduler_step_freq="epoch"
    )
    rates = []
    for num_steps in (3, None, 4, 7, None):  # 3, 5, 9, 16, 20 steps
        trainer.train(num_steps=num_steps)
        rates.append(rate(operator))
    assert rates == pytest.approx([1, 0.5, 0.5, 0.125, 0.0625])
    assert [info["epoch_idx"] for info in operator.infos] == [step // 5 for step in range(20)]


@pytest.mark.parametrize("length", [2, 5])
def test_a_loop_that_stops_by_itself_ends_its_epoch(start, length):
    class Stopping(Recorder):
        def train_epoch(self, iterator, info):
            return super().train_epoch(itertools.islice(iterator, length), info)

    trainer, operator = start(Stopping, {"scheduler": halving}, scheduler_step_freq="epoch")
    fit, train, fresh = trainer.fit, trainer.train, trainer.state_dict()
    fails = failure(operator, length)(train)
    calls = (lambda: fit(1) and fails(3), lambda: fit(2, max_steps=99), lambda: train(3), train)
    goals = ((1, 0, 0.5), (2, length, 0.25), (3, length + 3, 0.25), (3, length + 5, 0.125))
    for call, (epoch, step, factor) in zip(calls, goals, strict=True):
        call()
        reached = epoch, length + step, pytest.approx(factor)
        assert (trainer.epoch, trainer.global_step, rate(operator)) == reached
        replay = trainer._dispatcher._make_replay(trainer._reporter.position)
        trainer.load_state_dict(fresh)
        trainer._dispatcher.controller.run(replay)
        assert (trainer.epoch, trainer.global_step, rate(operator)) == reached


class OwnPlateau(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler of user code whose step takes a loss."""

    def step(self, loss=None):
        self.losses = [*getattr(self, "losses", []), loss]


class NeedsEpoch(OwnPlateau):
    def step(self, epoch, metric=None):
        super().step(epoch)


def test_only_schedulers_that_take_a_metric_get_it():
    schedulers = torch.optim.lr_scheduler
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    linear = schedulers.LinearLR(optimizer, 0.5, total_iters=4)
    chained = schedulers.ChainedScheduler([schedulers.ConstantLR(optimizer, 1.0)])
    plateau, own = schedulers.ReduceLROnPlateau(optimizer), OwnPlateau(optimizer)
    needs = NeedsEpoch.__new__(NeedsEpoch)
    optimizer.step()
    given = SimpleNamespace(schedulers=[linear, chained, plateau, own, needs])
    for metric in (9.0, 8.0):
        LRScheduling(given, lambda: None).step_with_metric(metric)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.75)
    assert plateau.best == 8.0
    assert own.losses == [None, 9.0, 8.0]
    assert needs.losses == [9.0, 8.0]


# ---- failures of user code


@KINDS
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_after_an_error_training_goes_on_at_the_failed_batch(start, operator_cls, config, error):
    expected, its_operator = start(operator_cls, {**config, "batch_norm": True})
    expected.train()
    trainer, operator = start(operator_cls, {**config, "batch_norm": True})
    with failure(operator, 2, error=error):
        trainer.train()
    assert trainer.state_dict()["global_step"] == trainer.global_step == 2
    assert trainer.epoch == 1
    result = trainer.train()
    assert (result["epoch"], result["num_samples"]) == (1, 24)
    assert operator.trained == EPOCH
    models = [each.model.state_dict() for each in (operator, its_operator)]
    torch.testing.assert_close(*models, rtol=0, atol=0)


class Once(Iterator):
    """Batches that can be read only once. Reading the third one raises `error` once."""

    error = None

    def __init__(self, batches):
        self.rest, self.epochs = [*batches], []

    def __next__(self):
        if not self.rest:
            raise StopIteration
        if len(self.rest) == 3 and (error := self.error):
            self.error = None
            raise error
        return self.rest.pop(0)

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_iterator_that_fails_once_loses_no_batches(start, error):
    trainer, operator = start(Streaming, {"wrap": Once})
    loader = operator._train_state.data.registered_loaders["train"]
    loader.error = error
    with pytest.raises(error):
        trainer.train()
    epochs = [*loader.epochs]
    trainer.train()
    assert operator.trained == EPOCH
    assert loader.epochs == epochs  # it may begin again in `set_epoch`


def test_iterator_continues_from_its_own_position_only(start):
    trainer, operator = start(Streaming, {"wrap": Once})
    first = trainer.state_dict()
    trainer.train(num_steps=2)
    trainer.validate(num_steps=2)
    trainer.load_state_dict(second := trainer.state_dict())
    trainer.train(num_steps=1)
    trainer.validate()
    assert operator.trained == EPOCH[:24]
    assert operator.validated == EPOCH
    for state, offset in (first, 0), (second, 2):
        trainer.load_state_dict(state)
        told = rf"epoch 0 after {offset} batches, because Once can .* given 3 batches of epoch 0\."
        with pytest.raises(RuntimeError, match=told):
            trainer.train()
    new, its_operator = start(Streaming, {"wrap": Once})
    new.load_state_dict(second)
    new.train()
    assert its_operator.trained == EPOCH[16:]


def test_iterator_without_end_continues_in_each_epoch(start):
    class Op(Streaming):
        def train_epoch(self, iterator, info=None, num_steps=None, epoch_idx=0):
            return super().train_epoch(itertools.islice(iterator, 3), info, num_steps, epoch_idx)

    def endless(batches):
        return map(lambda batch: batch, itertools.cycle(batches))

    trainer, operator = start(Op, {"wrap": endless})
    trainer.train()
    trainer.train()
    assert trainer.epoch == 2
    trainer.train(num_steps=1)
    trainer.load_state_dict(trainer.state_dict())
    trainer.train(num_steps=1)
    assert operator.trained == [*EPOCH, *EPOCH[:24]]


# ---- data sets of items


def items(size, **arguments):
    return Dataset(
        range(100, 100 + size),
        batch_size=4,
        transform=lambda i: (torch.full((1, 1), float(i)), torch.zeros(1, 1)),
        **arguments,
    )


def test_a_data_set_takes_the_place_of_the_train_loader_and_begins_at_its_beginning(start):
    trainer, operator = start()
    trainer.train(num_steps=2)
    data = items(10)
    for epoch in (1, 2):
        result = trainer.train(dataset=data)
        assert (result["epoch"], result["num_samples"], result["batch_count"]) == (epoch, 10, 3)
    trainer.train(dataset=data, num_steps=1)
    assert operator._train_state.data.batching()[f"dataset {data.uid}"] == (4, False)
    trainer.train(dataset=items(6))
    assert trainer.train()["num_samples"] == 40
    of_items = [*range(100, 110), *range(100, 110), *range(100, 104), *range(100, 106)]
    assert operator.trained == [*EPOCH[:16], *of_items, *EPOCH]
    with pytest.raises(ValueError, match=r'dataset=\.\.\.\) does not work with exact="bits"'):
        start(exact="bits")[0].train(dataset=data)


# ---- pauses


class OwnLoop(Recorder):
    """Has a custom loop with the oldest signature."""

    def train_epoch(self, iterator, info):
        seen = total = 0
        for batch in iterator:
            self.train_batch(batch, {"global_step": self.global_step, "info": info})
            seen += len(batch[0])
            total += batch[0].sum().item()
        return {"mean": total / max(1, seen), "num_samples": seen}


@pytest.fixture
def loop_of(start):
    """Return a function that returns the loop of a new operator, and the operator."""

    def loop_of(operator_cls=Recorder, config=None):
        trainer, operator = start(operator_cls, config)
        runner = trainer._controller.members[0].worker.runner
        return runner._loop, operator

    return loop_of


def train(loop, call=0, until_epoch=None, until_step=None, start_step=0):
    goal = {"until_epoch": until_epoch, "until_step": until_step}
    return loop.train(TrainRequest(call_number=call, start_step=start_step, **goal))


def pausing(loop, pauses):
    """Return a hook that requests pauses, by the number of steps before each request."""

    def ask(batch_info, when):
        if when == "before" and (step := loop.operator.global_step) in pauses:
            loop.control.driver_pause_step = pauses[step]

    return ask


@kinds(shuffled=(Recorder, {"shuffle": True}), own=(OwnLoop, {}))
@given(data=st.data())
def test_a_call_pauses_exactly_at_the_step_and_its_repetition_does_the_rest(
    loop_of, operator_cls, config, data
):
    whole, its_operator = loop_of(operator_cls, config)
    expected = train(whole, until_epoch=2)
    loop, operator = loop_of(operator_cls, config)
    operator._train_state.data.reseed(its_operator._train_state.data.seed)
    at = data.draw(st.integers(0, 8))
    pause = data.draw(st.integers(at + 1, 9))
    operator.fail = pausing(loop, {at: pause})
    with pytest.raises(PausedError):
        train(loop, until_epoch=2)
    assert operator.global_step == pause
    assert len(operator.trained) == 8 * pause
    if operator_cls is not Streaming or config:  # the length of an epoch is known
        assert operator._train_state.position.epoch == pause // 5
    operator.fail = idle
    # while the request holds, a repeated call trains nothing
    with pytest.raises(PausedError):
        train(loop, until_epoch=2)
    assert operator.global_step == pause
    loop.control.driver_pause_step = math.inf
    result = train(loop, until_epoch=2)
    assert operator.trained == its_operator.trained
    assert operator.global_step == 10
    assert operator._train_state.position.epoch == 2
    assert {"num_samples", "batch_count"} & set(result)
    for name, value in expected.items():
        assert result[name] == pytest.approx(value, rel=1e-9), name


def test_a_joining_worker_has_the_call_state_of_the_others(loop_of):
    """The call began at the end of an epoch, which does not count as its first epoch."""
    loop, operator = loop_of(Streaming)
    train(loop, until_step=5)
    operator.fail = pausing(loop, {6: 7})
    with pytest.raises(PausedError):
        train(loop, call=1, until_epoch=1, start_step=5)
    joining, _ = loop_of(Streaming)
    joining.recorder.continue_call(vars(loop.train_state.call))
    assert joining.train_state.call == loop.train_state.call
    assert joining.train_state.call.extra_epochs == 1


def test_a_failure_just_before_the_end_of_an_epoch_does_not_keep_it_open(loop_of):
    class Failing(Recorder):
        def train_epoch(self, iterator, info):
            result = super().train_epoch(iterator, info)
            self.fail({"global_step": 5}, "after the last step")
            return result

    loop, operator = loop_of(Failing)
    with failure(operator, when="after the last step"):
        train(loop, until_step=5)
    assert operator._train_state.position.epoch == 0
    train(loop, until_step=5)
    assert (operator._train_state.position.epoch, operator._train_state.position.offset) == (1, 0)
    assert operator.trained == EPOCH


def test_metrics_of_an_update_that_fails_between_calls_of_train_epoch_do_not_count(loop_of):
    class InParts(Recorder):
        def train_epoch(self, iterator, info):
            assert super().train_epoch(itertools.islice(iterator, 3), info)["num_samples"] == 24
            self.fail({"global_step": 2}, "between")

    loop, operator = loop_of(InParts)
    loop.train_state.accumulation_steps = 2
    with failure(operator, when="between"):
        train(loop, until_step=5)
    ((_, metrics),) = loop.recorder.own_metrics
    assert metrics["num_samples"] == 16


def test_an_empty_rest_of_an_epoch_counts_if_the_goal_needs_it(loop_of):
    """For example, after a restart from a snapshot of the last step of an epoch."""
    loop, operator = loop_of(Streaming)
    train(loop, until_step=5)
    train(loop, call=1, until_epoch=2, start_step=5)
    assert (operator.global_step, operator._train_state.position.epoch) == (10, 2)


def test_a_replay_adds_the_extra_epoch_of_a_call_once(start):
    trainer, operator = start(Streaming)
    trainer.train(num_steps=5)
    trainer.train()  # began at the end of an epoch
    dispatcher = trainer._dispatcher
    dispatcher.controller.run(dispatcher._make_replay(trainer._reporter.position))
    assert operator.global_step == 10


@pytest.mark.parametrize("goal", [{"until_step": 4}, {"until_epoch": 1}])
@pytest.mark.parametrize("pause", [1, 2])
def test_a_pause_that_comes_too_late_leads_to_no_step_too_many(loop_of, goal, pause):
    """Until the driver learns that the step has passed, the loop must keep to its goal."""
    loop, operator = loop_of()
    operator.fail = pausing(loop, {3: pause})
    with contextlib.suppress(PausedError):
        train(loop, **goal)
    assert loop.control.driver_pause_step == pause
    assert operator.global_step <= goal.get("until_step", 5)
    loop.control.driver_pause_step = math.inf
    train(loop, **goal)
    assert operator.trained == EPOCH[: len(operator.trained)]
    assert operator.global_step == goal.get("until_step", 5)


@pytest.mark.parametrize("goal", [{"until_step": 9}, {"until_epoch": 2}])
@pytest.mark.parametrize("operator_cls", [Recorder, OwnLoop])
def test_a_pause_can_be_cancelled(loop_of, goal, operator_cls):
    """The current segment continues its epoch beyond the canceled pause."""
    loop, operator = loop_of(operator_cls)
    operator.fail = pausing(loop, {1: 3, 2: math.inf})
    train(loop, **goal)
    steps = goal.get("until_step", 10)
    assert operator.global_step == steps
    assert operator.trained == (EPOCH * 2)[: steps * 8]


def test_batch_idx_counts_in_the_call_across_pauses_failures_and_restarts(loop_of):
    loop, operator = loop_of()
    train(loop, until_step=3)
    snapshot = vars(dataclasses.replace(loop.train_state.call))
    operator.fail = pausing(loop, {4: 6})
    with pytest.raises(PausedError):
        train(loop, 1, until_step=12, start_step=3)
    loop.control.driver_pause_step = math.inf
    with failure(operator, 8):
        train(loop, 1, until_step=12, start_step=3)
    train(loop, 1, until_step=12, start_step=3)
    indices = [info["batch_idx"] for info in operator.infos]
    assert indices == [0, 1, 2, *range(6), *range(5, 9)]
    restarted, its_operator = loop_of()
    restarted.train_state.load_position({"epoch": 0, "offset": 8}, 1)
    restarted.recorder.continue_call(snapshot)
    train(restarted, 1, until_step=5, start_step=3)
    train(restarted, 2, until_step=12, start_step=11)  # each earlier epoch counts as a call
    indices = [info["batch_idx"] for info in its_operator.infos]
    assert indices == [1, 2, 0, 1, *range(5), 0, 0]
    restarted.recorder.continue_call(snapshot)
    assert restarted.recorder.own_metrics == []  # those of another call


def test_a_pause_keeps_the_modes_that_a_step_has_set(loop_of):
    class Frozen(Recorder):
        def train_batch(self, batch, batch_info):
            self.infos.append(self.model.training)
            self.model.train(batch_info["batch_idx"] != 1)
            return {}

    loop, operator = loop_of(Frozen)
    kept = []  # in the snapshot at the start of each segment, from which a restart continues
    loop.snapshots.take_if_due = lambda **_: kept.append(loop.recorder.export_call()["keeps_modes"])
    loop.control.driver_pause_step = 2
    with pytest.raises(PausedError):
        train(loop, until_epoch=1)
    loop.control.driver_pause_step = math.inf
    train(loop, until_epoch=1)
    train(loop, 1, until_step=6, start_step=5)
    assert operator.infos == [True, True, False, True, True, True]
    assert kept == [False, True, False]


def test_a_repeated_segment_sets_the_modes_again(loop_of):
    class Failing(Recorder):
        def train_batch(self, batch, batch_info):
            self.infos.append(self.model.training)
            self.model.eval()
            raise ValueError

        def train_epoch(self, *arguments, **keywords):
            if self.infos:
                return super().train_epoch(*arguments, **keywords)
            self.infos.append(self._train_state.call.keeps_modes)
            self.model.eval()
            raise KeyError  # before the default `train_epoch` sets the modes

    loop, operator = loop_of(Failing)
    loop.train_state.call.keeps_modes = True
    loop.train_state.call.call_number = 0
    for error in (KeyError, ValueError, ValueError):
        with pytest.raises(error):
            train(loop, until_epoch=1)
    assert operator.infos == [True, True, True]


# ---- one order for all ranks


class OwnGenerator(Recorder):
    """Shuffles with a generator that each worker may seed differently."""

    def make_loaders(self, config):
        numbers = torch.arange(40.0).reshape(-1, 1)
        generator = torch.Generator().manual_seed(config["generator_seed"])
        data = TensorDataset(numbers, numbers / 40)
        return {"train_loader": DataLoader(data, 8, shuffle=True, generator=generator)}


@pytest.mark.parametrize("seed", [3, 4])
def test_a_shuffle_by_generators_of_different_seeds_is_refused(loop_of, seed):
    loop, operator = loop_of(OwnGenerator, {"generator_seed": seed})
    train_state = operator._train_state
    train_state.settings.context = dataclasses.replace(train_state.context, world_size=2)
    train_state.data.repartition()
    # values of the other rank: its seed, its negated seed, and 0 for no earlier agreement
    others = iter([3, -3, 0])
    train_state.collectives.all_reduce_min = lambda *own: [min(n, next(others)) for n in own]
    if seed == 3:
        train_state.data.source("train").agree_on_order(0, 0, train_state.collectives)
    else:
        with pytest.raises(
            RuntimeError,
            match=r"RandomSampler gives the workers different orders .*same seed on all workers",
        ):
            train(loop, until_step=1)


def test_workers_that_join_a_worker_alone_take_its_order(loop_of):
    _, operator = loop_of(OwnGenerator, {"generator_seed": 4})
    train_state, given = operator._train_state, []
    source = train_state.data.source("train")
    source.agree_on_order(0, 0, train_state.collectives)
    train_state.settings.context = dataclasses.replace(train_state.context, world_size=2)
    train_state.data.repartition()
    others = iter([3, -3, 0, 2])  # the new worker has another seed, and has drawn no order
    train_state.collectives.all_reduce_min = lambda *own: [min(n, next(others)) for n in own]
    train_state.collectives.broadcast = lambda make, rank: given.append(rank) or make()
    source.agree_on_order(0, 0, train_state.collectives)
    assert given == [0]
