"""Helpers of train_batch: accumulation, clipping, several optimizers, and what is refused."""

import dataclasses
import pickle

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, TorchTrainer, TrainingOperator
from raysgd._internal.nested import map_leaves
from raysgd.data.partition import MicroBatch, micro_batches_of
from raysgd.testing import run_operator
from raysgd.torch.optimization import Group
from tests.conftest import examples
from tests.operators import Adversaries, Classifier, make_model, parameters
from tests.unit.recorder import Recorder, Unsized, batches_of

PRECISIONS = [{}, {"use_fp16": True, "amp_dtype": torch.float16}, {"use_fp16": True}]
BATCH = (torch.randn(4, 8), torch.tensor([0, 1, 0, 1]))


class Accumulating(Classifier):
    """A Classifier with what the config says about updates."""

    def register(self, **given):
        config = self.config
        return super().register(
            **given,
            gradient_accumulation_steps=config.get("steps", 1),
            max_grad_norm=config.get("clip"),
        )


def local(operator_cls, config, **arguments):
    return TorchTrainer(
        training_operator_cls=operator_cls,
        config=config,
        use_local=True,
        use_gpu=False,
        **arguments,
    )


def trained(config, calls=(None,), operator_cls=Accumulating, **arguments):
    """The parameters and the number of steps after calls of train with so many steps."""
    with local(operator_cls, {"shuffle": False, "momentum": 0.9, **config}, **arguments) as trainer:
        for num_steps in calls:
            trainer.train(num_steps=num_steps)
        return parameters(trainer.get_local_operator()).clone(), trainer.global_step


# ---- accumulation


@examples(15)
@given(
    steps=st.integers(2, 4),
    num_samples=st.integers(1, 40),
    calls=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    plain=st.booleans(),
)
def test_calls_train_on_each_sample_once_per_epoch(steps, num_samples, calls, plain):
    """A call that stops within an epoch leaves nothing pending: its remainder is a small group."""

    class Grouped(Recorder):
        def register(self, **given):
            return super().register(**given, gradient_accumulation_steps=steps)

        def make_loaders(self, config):
            if plain:
                return {"train_loader": Unsized(batches_of(config["num_samples"], 3))}
            return super().make_loaders(config)

    config = {"num_samples": num_samples, "batch_size": 3}
    with local(Grouped, config) as trainer:
        optimization = counting_updates(trainer)
        num_batches = -(-num_samples // 3)
        for num_steps in calls:
            step = trainer.global_step
            metrics = trainer.train(num_steps=num_steps)
            assert metrics["batch_count"] == num_steps
            assert trainer.global_step == step + num_steps
            assert no_gradients(trainer)
        operator = trainer.get_local_operator()
        epoch = list(range(num_samples))
        done = operator.trained
        assert done == (epoch * (1 + sum(calls)))[: len(done)]
        assert len(done) >= sum(calls) // num_batches * num_samples
        assert operator._train_state.global_step == sum(calls)
        assert [info["global_step"] for info in operator.infos] == list(range(sum(calls)))
        assert sum(optimization) == sum(calls)


def counting_updates(trainer):
    """A list that gets the number of batches of each update."""
    operator, sizes, before = trainer.get_local_operator(), [], [0]

    def note(*arguments):
        now = len(operator.infos)
        sizes.append(now - before[0])
        before[0] = now

    operator.optimizer.register_step_post_hook(note)
    return sizes


def no_gradients(trainer):
    return all(p.grad is None for p in trainer.get_local_operator().model.parameters())


def test_batch_scheduler_steps_with_the_update():
    class Scheduled(Accumulating):
        def register(self, *, optimizers, **given):
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizers, 0.5)
            *rest, self.scheduler = super().register(
                optimizers=optimizers, schedulers=scheduler, **given
            )
            return rest

    config = {"num_samples": 7, "batch_size": 1, "steps": 3}
    with local(Scheduled, config, scheduler_step_freq="batch") as trainer:
        trainer.train()
        assert trainer.get_local_operator().scheduler.last_epoch == 3
        trainer.train(num_steps=2)
        assert trainer.get_local_operator().scheduler.last_epoch == 4


def test_each_batch_is_a_group_without_a_trainer():
    operator = run_operator(Accumulating, {"steps": 4})
    plain = run_operator(Accumulating)
    for size in (4, 3, 1):
        batch = tuple(part[:size] for part in BATCH)
        operator.train_batch(batch, {})
        plain.train_batch(batch, {})
    assert torch.equal(parameters(operator), parameters(plain))


# ---- a failure within a group


class Failing(Recorder):
    def register(self, **given):
        return super().register(**given, gradient_accumulation_steps=3)


class FailingStream(Failing):
    def make_loaders(self, config):
        return {"train_loader": Unsized(batches_of(config["num_samples"], config["batch_size"]))}


@pytest.mark.parametrize("operator_cls", [Failing, FailingStream])
@pytest.mark.parametrize(
    ("at", "when"), [(0, "before"), (4, "before"), (7, "before"), (1, "after"), (2, "after")]
)
def test_group_with_an_error_is_repeated(operator_cls, when, at):
    config = {"num_samples": 16, "batch_size": 2}
    with local(operator_cls, config) as trainer:
        operator, done = trainer.get_local_operator(), []
        operator.optimizer.register_step_post_hook(lambda *a: done.append(len(operator.infos)))

        def fail(batch_info, now):
            if (batch_info["global_step"], now) == (at, when) and not failed:
                failed.append(at)
                raise KeyError

        failed = []
        operator.fail = fail
        with pytest.raises(KeyError):
            trainer.train()
        # the update of a group is done with its last batch, and what follows does not undo it
        updated = when == "after" and at in (2, 5)
        reached = at + 1 if updated else at // 3 * 3
        assert trainer.global_step == reached
        assert no_gradients(trainer)
        trainer.train()
        assert trainer.global_step == 8
        assert operator._train_state.epoch == 1
        found = parameters(operator).clone()
        steps = [info["global_step"] for info in operator.infos]
        assert steps == [*range(at + 1), *range(reached, 8)]
    # groups after the failure begin where the last update was, which is where they began before
    assert torch.equal(found, trained(config, operator_cls=operator_cls)[0])


def test_loop_that_leaves_a_group_is_an_error():
    class Leaving(Accumulating):
        def train_epoch(self, iterator, info=None, num_steps=None, epoch_idx=0):
            for index, batch in enumerate(iterator):
                self.train_batch(batch, {})
                if index == self.leave_after:
                    break
            return {}

    config = {"num_samples": 12, "batch_size": 1, "steps": 3}
    with local(Leaving, config) as trainer:
        operator = trainer.get_local_operator()
        operator.leave_after = 4
        with pytest.raises(RuntimeError, match="within an accumulation group"):
            trainer.train()
        assert trainer.state_dict()["global_step"] == 3
        assert no_gradients(trainer)
        operator.leave_after = 2
        trainer.train()
        assert (trainer.global_step, trainer.epoch) == (6, 1)


# ---- clipping


@pytest.mark.parametrize("precision", PRECISIONS[:2])
@pytest.mark.parametrize("steps", [1, 3])
def test_gradients_are_clipped_by_their_real_norm(precision, steps):
    norms = []

    class Noting(Accumulating):
        def optimizer_step(self, optimizer):
            super().optimizer_step(optimizer)

        def setup(self, config):
            super().setup(config)
            self.optimizer.register_step_pre_hook(self.note)

        def note(self, *arguments):
            gradients = [p.grad for p in self.model.parameters()]
            norms.append(torch.nn.utils.get_total_norm(gradients).item())

    config = {"num_samples": 24, "batch_size": 4, "steps": steps, "clip": 0.01}
    trained(config, operator_cls=Noting, **precision)
    assert norms == pytest.approx([0.01] * (6 // steps), rel=1e-3)


# ---- several optimizers


def with_a_small_scale(trainer):
    """Let the scaler begin with a scale at which nothing overflows."""
    scaler = getattr(
        trainer.get_local_operator()._train_state.optimization.precision, "scaler", None
    )
    if scaler is not None:
        scaler.load_state_dict({**scaler.state_dict(), "scale": 64.0})


def plain_adversaries(batch_size, times=1):
    """The same by hand, in full precision."""
    torch.manual_seed(0)
    judge, maker = torch.nn.Linear(2, 1), torch.nn.Linear(3, 2)
    for_judge, for_maker = (
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.5) for m in (judge, maker)
    )
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(20, 2, generator=generator), torch.randn(20, 3))
    for real, noise in DataLoader(data, batch_size=batch_size):
        for _ in range(times):
            for_judge.zero_grad()
            (judge(maker(noise).detach()).mean() - judge(real).mean()).backward()
            for_judge.step()
        for_maker.zero_grad()
        (judge(maker(noise)) - 1).square().mean().backward()
        for_maker.step()
    return flat(judge, maker)


def flat(*models):
    return torch.cat([p.detach().reshape(-1).clone() for m in models for p in m.parameters()])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("times", [1, 3])
def test_adversaries_train_as_by_hand(precision, times):
    with local(Adversaries, {"batch_size": 5, "times": times}, **precision) as trainer:
        with_a_small_scale(trainer)
        metrics = trainer.train()
        operator = trainer.get_local_operator()
        found = flat(operator.judge, operator.maker)
        assert metrics.get("num_skipped_steps", 0) == 0
    tolerance = {"atol": 2e-2 if precision else 1e-6, "rtol": 0}
    torch.testing.assert_close(found, plain_adversaries(5, times), **tolerance)


class Zeroing(Adversaries):
    """Zeroes the gradients of each optimizer before its loss, as loops of a GAN do."""

    def train_batch(self, batch, batch_info):
        losses = [self.loss_of_judge, self.loss_of_maker]
        for index in self.config["order"]:
            self.optimizers[index].zero_grad()
            self.backward(losses[index](*batch), num_samples=len(batch[0]))
            self.optimizer_step(self.optimizers[index])
        return {}

    def loss_of_judge(self, real, noise):
        return self.judge(self.maker(noise).detach()).mean() - self.judge(real).mean()

    def loss_of_maker(self, real, noise):
        return (self.judge(self.maker(noise)) - 1).square().mean()


@pytest.mark.parametrize(("order", "batch_size"), [((0, 1), 5), ((1, 0), 5), ((0, 1), 3)])
def test_zero_grad_between_losses_keeps_accumulated_gradients(order, batch_size):
    """If the maker comes first, its loss leaves gradients in the judge, which are not wanted."""
    config = {"batch_size": batch_size, "steps": 2, "order": order}
    with local(Zeroing, config) as trainer:
        trainer.train()
        operator = trainer.get_local_operator()
        found = flat(operator.judge, operator.maker)
    expected = accumulating_adversaries(batch_size, order)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def accumulating_adversaries(batch_size, order=(0, 1)):
    """By hand: both gradients over two batches, with the judge as it was before the group.

    In the group's last batch the first of the two has stepped before the other's loss.
    """
    torch.manual_seed(0)
    judge, maker = torch.nn.Linear(2, 1), torch.nn.Linear(3, 2)
    for_judge, for_maker = (
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.5) for m in (judge, maker)
    )
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(20, 2, generator=generator), torch.randn(20, 3))
    batches = list(DataLoader(data, batch_size=batch_size))
    for start in range(0, len(batches), 2):
        group = batches[start : start + 2]
        total = sum(len(real) for real, _ in group)
        sums = [[torch.zeros_like(p) for p in model.parameters()] for model in (judge, maker)]
        for index, (real, noise) in enumerate(group):
            for which in order:
                if which == 0:
                    loss = judge(maker(noise).detach()).mean() - judge(real).mean()
                else:
                    loss = (judge(maker(noise)) - 1).square().mean()
                model, optimizer = [(judge, for_judge), (maker, for_maker)][which]
                gradients = torch.autograd.grad(loss, list(model.parameters()))
                add(sums[which], gradients, len(real) / total)
                if index == len(group) - 1:
                    put(model, sums[which])
                    optimizer.step()
    return flat(judge, maker)


def add(sums, gradients, weight):
    for held, gradient in zip(sums, gradients, strict=True):
        held += weight * gradient


def put(model, gradients):
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient


# ---- a failure between the updates of several optimizers


def by_helper(self, optimizer, loss_of):
    with self.autocast():
        loss = loss_of()
    self.backward(loss)
    self.optimizer_step(optimizer)


def by_own_step(self, optimizer, loss_of):
    optimizer.zero_grad()
    loss_of().backward()
    optimizer.step()


def by_closure(self, optimizer, loss_of):
    def closure():
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    optimizer.step(closure)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


class Halfway(TrainingOperator):
    """Two models, of which the first has made its update when the loss of the second raises."""

    def setup(self, config):
        torch.manual_seed(0)
        self.judge, self.maker = torch.nn.Linear(2, 1), torch.nn.Linear(3, 2)
        first = config.get("first", sgd)
        _, self.optimizers = self.register(
            models=[self.judge, self.maker],
            optimizers=[first(self.judge.parameters()), adam(self.maker.parameters())],
            gradient_accumulation_steps=config.get("steps", 1),
        )
        generator = torch.Generator().manual_seed(1)
        data = [torch.randn(24, size, generator=generator) for size in (2, 3)]
        self.register_data(train_loader=DataLoader(TensorDataset(*data), batch_size=4))
        self.fail_at, self.before = None, {}

    def train_batch(self, batch, batch_info):
        real, noise = batch
        step = batch_info["global_step"]
        self.before[step] = bits(self)

        def loss_of_judge():
            return (self.judge(real) - 1).square().mean() + self.judge(self.made(noise)).mean()

        def loss_of_maker():
            if step == self.fail_at:
                raise KeyError
            return (self.judge(self.maker(noise)) - 1).square().mean()

        update = self.config.get("update", by_helper)
        for _ in range(self.config.get("times", 1)):
            update(self, self.optimizers[0], loss_of_judge)
        (by_own_step if update is by_closure else update)(self, self.optimizers[1], loss_of_maker)
        return {}

    def made(self, noise):
        return self.maker(noise).detach()


def bits(operator):
    """Copies of the parameters and of what the optimizers hold, as bytes."""
    parts = (operator.judge, operator.maker, *operator.optimizers)
    return pickle.dumps(map_leaves([part.state_dict() for part in parts], plain))


def plain(leaf):
    return leaf.numpy().tobytes() if isinstance(leaf, torch.Tensor) else leaf


@pytest.mark.parametrize(
    ("config", "precision"),
    [
        ({}, {}),
        ({"first": adam}, {}),
        ({"times": 3}, {}),
        ({"steps": 2}, {}),
        ({"update": by_own_step}, {}),
        ({"update": by_closure, "first": torch.optim.LBFGS}, {}),
        ({}, PRECISIONS[1]),
        ({"steps": 3, "first": adam}, PRECISIONS[1]),
    ],
)
@pytest.mark.parametrize("fail_at", [0, 5])
def test_step_that_fails_between_two_optimizers_is_rolled_back(fail_at, config, precision):
    with local(Halfway, config, **precision) as trainer:
        trainer.train(num_steps=12)
        expected = bits(trainer.get_local_operator())
    with local(Halfway, config, **precision) as trainer:
        operator = trainer.get_local_operator()
        held = [operator.judge.weight, operator.optimizers[0].state]
        operator.fail_at = fail_at
        with pytest.raises(KeyError):
            trainer.train(num_steps=12)
        operator.fail_at = None
        assert trainer.global_step == fail_at - fail_at % config.get("steps", 1)
        assert bits(operator) == operator.before[trainer.global_step]
        assert all(p.grad is None for p in (*operator.judge.parameters(), operator.maker.weight))
        trainer.train(num_steps=12 - trainer.global_step)
        assert bits(operator) == expected
        assert held[0] is operator.judge.weight
        assert held[1] is operator.optimizers[0].state


def test_step_of_all_optimizers_stays_after_an_error():
    class Late(Halfway):
        def train_batch(self, batch, batch_info):
            super().train_batch(batch, batch_info)
            self.last = bits(self)
            raise KeyError

    with local(Late, {"times": 2}) as trainer:
        with pytest.raises(KeyError):
            trainer.train()
        assert trainer.global_step == 1
        assert bits(trainer.get_local_operator()) == trainer.get_local_operator().last


# ---- what is refused


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"steps": 0}, ValueError, "gradient_accumulation_steps=0.*at least 1"),
        ({"steps": 2.5}, TypeError, "gradient_accumulation_steps=2.5.*must be an int"),
        ({"clip": 0}, ValueError, "max_grad_norm=0.*above 0 and finite"),
        ({"clip": float("inf")}, ValueError, "finite"),
        ({"clip": "1"}, TypeError, "max_grad_norm='1'.*number or None"),
    ],
)
def test_invalid_numbers_are_an_error(arguments, error, message):
    with pytest.raises(error, match=message):
        run_operator(Accumulating, arguments)


def with_train_batch(function):
    return type("Custom", (Accumulating,), {"train_batch": function})


def by_hand(self, batch, batch_info):
    self.optimizer.zero_grad()
    self.criterion(self.model(batch[0]), batch[1]).backward()
    self.optimizer.step()
    return {}


def half_by_hand(self, batch, batch_info):
    self.backward(self.criterion(self.model(batch[0]), batch[1]))
    self.optimizer.step()
    return {}


def zeroing(self, batch, batch_info):
    self.optimizer.zero_grad()
    self.backward(self.criterion(self.model(batch[0]), batch[1]))
    self.optimizer_step(self.optimizer)
    return {}


def zeroing_in_place(self, batch, batch_info):
    self.model.zero_grad(set_to_none=False)
    self.backward(self.criterion(self.model(batch[0]), batch[1]))
    self.optimizer_step(self.optimizer)
    return {}


def twice(self, batch, batch_info):
    for _ in range(2):
        self.backward(self.criterion(self.model(batch[0]), batch[1]))
        self.optimizer_step(self.optimizer)
    return {}


def not_the_last(self, batch, batch_info):
    if batch_info["batch_idx"] % 2 == 0:
        self.backward(self.criterion(self.model(batch[0]), batch[1]))
    self.optimizer_step(self.optimizer)
    return {}


def zeroing_between(self, batch, batch_info):
    self.backward(self.criterion(self.model(batch[0]), batch[1]))
    self.optimizer.zero_grad()
    self.backward(self.criterion(self.model(batch[0]), batch[1]))
    self.optimizer_step(self.optimizer)
    return {}


def backward_by_hand(self, batch, batch_info):
    self.criterion(self.model(batch[0]), batch[1]).backward()
    self.optimizer_step(self.optimizer)
    return {}


def without_step(self, batch, batch_info):
    self.backward(self.criterion(self.model(batch[0]), batch[1]))
    return {}


HALF = PRECISIONS[1]


@pytest.mark.parametrize(
    ("function", "config", "precision", "message"),
    [
        (by_hand, {"steps": 2}, {}, r"SGD\.step.*gradient_accumulation_steps=2"),
        (by_hand, {"clip": 1.0}, {}, r"SGD\.step.*max_grad_norm=1\.0"),
        (half_by_hand, {}, HALF, r"SGD\.step.*scaled gradients.*self\.optimizer_step"),
        (twice, {"steps": 2}, {}, "train_batch steps the same SGD twice"),
        (not_the_last, {"steps": 2}, {}, "not call self.backward\\(loss\\) for every batch"),
        (zeroing_between, {"steps": 2}, {}, "removed accumulated gradients"),
        (backward_by_hand, {"steps": 2}, {}, "not call self.backward\\(loss\\) for every batch"),
        (without_step, {"steps": 2}, {}, "no update in the last batch"),
    ],
)
def test_step_that_bypasses_the_helpers_is_an_error(function, config, precision, message):
    config = {"num_samples": 16, "batch_size": 4, **config}
    with local(with_train_batch(function), config, **precision) as trainer:
        operator = trainer.get_local_operator()
        before = parameters(operator).clone()
        with pytest.raises(RuntimeError, match=message):
            trainer.train()
        assert torch.equal(parameters(operator), before)
        assert trainer.global_step == 0


@pytest.mark.parametrize("function", [by_hand, half_by_hand, zeroing, twice, without_step])
def test_loops_may_mix_helpers_without_scaler_and_accumulation(function):
    config = {"num_samples": 16, "batch_size": 4}
    with local(with_train_batch(function), config) as trainer:
        before = parameters(trainer.get_local_operator()).clone()
        trainer.train()
        assert trainer.global_step == 4
        changed = not torch.equal(parameters(trainer.get_local_operator()), before)
        assert changed == (function is not without_step)


@pytest.mark.parametrize(
    ("shares", "function", "warns"),
    [("measured", by_hand, True), ("even", by_hand, False), ("measured", zeroing, False)],
)
def test_loss_without_the_weight_of_its_share_gets_a_warning(shares, function, warns, caplog):
    operator = run_operator(with_train_batch(function))
    state = operator._train_state
    elastic = ElasticConfig(shares=shares)
    state.settings.options = dataclasses.replace(state.settings.options, elastic=elastic)
    state.step.draw(None)
    state.optimization.begin_batch(MicroBatch(share=1.5))
    operator.train_batch(BATCH, {})
    state.optimization.before_commit()
    assert ("does not call self.backward(loss)" in caplog.text) == warns


@pytest.mark.parametrize("function", [zeroing, zeroing_in_place])
def test_loop_may_zero_gradients_with_accumulation(function):
    config = {"num_samples": 16, "batch_size": 4, "steps": 2}
    found, _ = trained(config, operator_cls=with_train_batch(function))
    assert torch.equal(found, trained(config)[0])


@pytest.mark.parametrize("helpers", [False, True])
def test_loop_may_accumulate_by_itself(helpers):
    def accumulating_by_hand(self, batch, batch_info):
        loss = self.criterion(self.model(batch[0]), batch[1])
        self.backward(loss) if helpers else loss.backward()
        if batch_info["global_step"] % 2:
            if helpers:
                self.optimizer_step(self.optimizer)
            else:
                self.optimizer.step()
                self.optimizer.zero_grad()
        return {}

    config = {"num_samples": 16, "batch_size": 4}
    one, _ = trained(config, [1] * 4, operator_cls=with_train_batch(accumulating_by_hand))
    twin = make_model()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    with local(Accumulating, {**config, "shuffle": False}) as trainer:
        batches = list(trainer.get_local_operator().train_loader)
    for index, (features, target) in enumerate(batches):
        torch.nn.functional.cross_entropy(twin(features), target).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(one, flat(twin))


def test_optimizer_with_a_closure_is_an_error():
    class Quasi(Classifier):
        def register(self, *, models, optimizers, **given):
            optimizer = torch.optim.LBFGS(models.parameters())
            return super().register(models=models, optimizers=optimizer, **given)

    with pytest.raises(TypeError, match=r"LBFGS.step\(\) missing.*closure"):
        run_operator(Quasi).train_batch(BATCH, {})


@given(
    st.integers(2, 99), st.integers(1, 3), st.sampled_from([2, 4, 8]), st.booleans(), st.booleans()
)
@example(55, 1, 4, True, True)  # whose fractions do not add up to all of it
@example(5, 1, 2, False, True)
def test_gradients_of_parts_are_weighted_once(rows, accumulated, number, is_known, says):
    """Where models are divided, gradients are with others by the time that the next part comes."""
    places = micro_batches_of((rows,) * accumulated, 1, 0, rows, in_parts=True)
    if not is_known:
        places = [
            MicroBatch(n, accumulated, n == accumulated - 1, step=n) for n in range(accumulated)
        ]
    group, total = Group(), 0.0
    for place in places:
        for part in place.parts(number, rows, number):
            group.begin(part)
            size = round(part.weight * rows) or 1
            correction, weight = group.weigh(size if says else None)
            assert correction == 1.0
            total += weight
    assert total == pytest.approx(1.0)
