"""Helpers of train_batch: accumulation, clipping, several optimizers, and errors."""

import dataclasses

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig
from raysgd.callbacks import EMA
from raysgd.data.partition import MicroBatchPlan, UpdatePlan
from raysgd.testing import run_operator
from tests.operators import Adversaries, Classifier, local, parameters
from tests.unit.recorder import Recorder

PRECISIONS = [{}, {"use_fp16": True, "amp_dtype": torch.float16}, {"use_fp16": True}]
BATCH = (torch.randn(4, 8), torch.tensor([0, 1, 0, 1]))


class Accumulating(Classifier):
    """A Classifier whose config sets accumulation and clipping."""

    def register(self, **given):
        config = self.config
        return super().register(
            **given,
            gradient_accumulation_steps=config.get("steps", 1),
            max_grad_norm=config.get("clip"),
        )


def trained(config, calls=(None,), operator_cls=Accumulating, **arguments):
    """Call train with each number of steps. Return the parameters and the global step."""
    with local(operator_cls, {"shuffle": False, "momentum": 0.9, **config}, **arguments) as trainer:
        for num_steps in calls:
            trainer.train(num_steps=num_steps)
        return parameters(trainer.get_local_operator()).clone(), trainer.global_step


def test_each_batch_is_a_group_without_a_trainer():
    operator = run_operator(Accumulating, {"steps": 4})
    plain = run_operator(Accumulating)
    for size in (4, 3, 1):
        batch = tuple(part[:size] for part in BATCH)
        operator.train_batch(batch, {})
        plain.train_batch(batch, {})
    assert torch.equal(parameters(operator), parameters(plain))


# ---- a failure within a group


@pytest.mark.parametrize(
    ("at", "when"), [(0, "before"), (4, "before"), (7, "before"), (1, "after"), (2, "after")]
)
def test_group_with_an_error_is_repeated(when, at):
    class Failing(Recorder):
        def register(self, **given):
            return super().register(**given, gradient_accumulation_steps=3)

    config = {"num_samples": 16, "batch_size": 2}
    with local(Failing, config) as trainer:
        operator = trainer.get_local_operator()

        def fail(batch_info, now):
            if (batch_info["global_step"], now) == (at, when) and not failed:
                failed.append(at)
                raise KeyError

        failed = []
        operator.fail = fail
        with pytest.raises(KeyError):
            trainer.train()
        # a group ends with its update, and a later error does not undo the update
        updated = when == "after" and at in (2, 5)
        reached = at + 1 if updated else at // 3 * 3
        assert trainer.global_step == reached
        assert all(parameter.grad is None for parameter in operator.model.parameters())
        trainer.train()
        assert trainer.global_step == 8
        found = parameters(operator).clone()
    # the failure does not change where groups begin
    assert torch.equal(found, trained(config, operator_cls=Failing)[0])


# ---- several optimizers


class Zeroing(Adversaries):
    """Zeroes the gradients of each optimizer before its loss, as GAN loops do."""

    def train_batch(self, batch, batch_info):
        real, noise = batch
        for which in self.config["order"]:
            self.optimizers[which].zero_grad()
            loss = adversarial_loss(which, self.judge, self.maker, real, noise)
            self.backward(loss, num_items=len(real))
            self.optimizer_step(self.optimizers[which])
        return {}


def adversarial_loss(which, judge, maker, real, noise):
    if which == 0:
        return judge(maker(noise).detach()).mean() - judge(real).mean()
    return (judge(maker(noise)) - 1).square().mean()


def by_hand_adversaries(batch_size, order, steps=1):
    """Sum the gradients of each group of batches. In the last batch, step the models in order."""
    torch.manual_seed(0)
    models = judge, maker = torch.nn.Linear(2, 1), torch.nn.Linear(3, 2)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.5) for m in models]
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(20, 2, generator=generator), torch.randn(20, 3))
    batches = list(DataLoader(data, batch_size=batch_size))
    for start in range(0, len(batches), steps):
        group = batches[start : start + steps]
        total = sum(len(real) for real, _ in group)
        sums = [[torch.zeros_like(p) for p in model.parameters()] for model in models]
        for index, (real, noise) in enumerate(group):
            for which in order:
                parameters = list(models[which].parameters())
                loss = adversarial_loss(which, judge, maker, real, noise)
                gradients = torch.autograd.grad(loss * len(real) / total, parameters)
                for held, gradient in zip(sums[which], gradients, strict=True):
                    held += gradient
                if index == len(group) - 1:
                    for parameter, held in zip(parameters, sums[which], strict=True):
                        parameter.grad = held
                    optimizers[which].step()
                    sums[which] = [torch.zeros_like(p) for p in parameters]
    return flat(*models)


def flat(*models):
    return torch.cat([p.detach().reshape(-1).clone() for m in models for p in m.parameters()])


def use_small_scale(trainer):
    """Set a loss scale at which nothing overflows."""
    precision = trainer.get_local_operator()._train_state.precision
    if scaler := getattr(precision, "scaler", None):
        scaler.load_state_dict({**scaler.state_dict(), "scale": 64.0})


@pytest.mark.parametrize(("precision", "times"), [*((each, 1) for each in PRECISIONS), ({}, 3)])
def test_two_optimizers_train_like_a_plain_loop(precision, times):
    with local(Adversaries, {"batch_size": 5, "times": times}, **precision) as trainer:
        use_small_scale(trainer)
        operator = trainer.get_local_operator()
        trainer.train()
        found = flat(operator.judge, operator.maker)
    tolerance = {"atol": 2e-2 if precision else 1e-6, "rtol": 0}
    expected = by_hand_adversaries(5, [0] * times + [1])
    torch.testing.assert_close(found, expected, **tolerance)


@pytest.mark.parametrize(("order", "batch_size"), [((0, 1), 5), ((1, 0), 5), ((0, 1), 3)])
def test_zero_grad_between_losses_keeps_accumulated_gradients(order, batch_size):
    """If the maker comes first, its loss leaves unwanted gradients in the judge."""
    config = {"batch_size": batch_size, "steps": 2, "order": order}
    with local(Zeroing, config) as trainer:
        trainer.train()
        operator = trainer.get_local_operator()
        found = flat(operator.judge, operator.maker)
    expected = by_hand_adversaries(batch_size, order, steps=2)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("config", "precision"), [({"times": 3}, {}), ({"steps": 2}, {}), ({}, PRECISIONS[1])]
)
@pytest.mark.parametrize("fail_at", [1, 2])
def test_step_that_fails_between_two_optimizers_is_repeated(fail_at, config, precision):
    def fail(*_):
        updates.append(1)
        if len(updates) == fail_at:
            raise KeyError

    found, updates = [], []
    for fails in (True, False):
        with local(Adversaries, {"batch_size": 5, **config}, **precision) as trainer:
            use_small_scale(trainer)
            operator = trainer.get_local_operator()
            if fails:
                operator.optimizers[1].register_step_pre_hook(fail)
                with pytest.raises(KeyError):
                    trainer.train()
                assert operator.judge.weight.grad is None
            trainer.train()
            assert trainer.global_step == 4
            found.append(flat(operator.judge, operator.maker))
    assert torch.equal(*found)


# ---- errors and warnings


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"steps": 0}, ValueError, "gradient_accumulation_steps=0.*at least 1"),
        ({"steps": 2.5}, TypeError, "gradient_accumulation_steps=2.5.*must be an int"),
        ({"clip": 0}, ValueError, "max_grad_norm=0.*above 0"),
        ({"clip": float("inf")}, ValueError, "finite"),
        ({"clip": "1"}, TypeError, "max_grad_norm='1'.*must be a number"),
    ],
)
def test_invalid_numbers_are_an_error(arguments, error, message):
    with pytest.raises(error, match=message):
        run_operator(Accumulating, arguments)


def with_train_batch(function):
    return type("Custom", (Accumulating,), {"train_batch": function})


ACTIONS = {
    "zero": lambda operator, batch: operator.optimizer.zero_grad(),
    "backward": lambda operator, batch: operator.backward(loss_of(operator, batch)),
    "raw backward": lambda operator, batch: loss_of(operator, batch).backward(),
    "step": lambda operator, batch: operator.optimizer_step(operator.optimizer),
    "raw step": lambda operator, batch: operator.optimizer.step(),
}


def loss_of(operator, batch):
    return operator.criterion(operator.model(batch[0]), batch[1])


def steps_of(*actions):
    """Return a ``train_batch``."""

    def train_batch(self, batch, batch_info):
        for action in actions:
            ACTIONS[action](self, batch)
        return {}

    return train_batch


by_hand = steps_of("zero", "raw backward", "raw step")
half_by_hand = steps_of("backward", "raw step")
zeroing = steps_of("zero", "backward", "step")
twice = steps_of("backward", "step", "backward", "step")
zeroing_between = steps_of("backward", "zero", "backward", "step")
backward_by_hand = steps_of("raw backward", "step")
without_step = steps_of("backward")


def not_the_last(self, batch, batch_info):
    return (zeroing if batch_info["batch_idx"] % 2 == 0 else steps_of("step"))(self, batch, {})


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
        (without_step, {}, {"exact": "bits"}, "no update in the last batch"),
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
    with local(with_train_batch(function), config, callbacks=[EMA(0.9)]) as trainer:
        before = parameters(trainer.get_local_operator()).clone()
        trainer.train()
        assert trainer.global_step == 4
        changed = not torch.equal(parameters(trainer.get_local_operator()), before)
        assert changed == (function is not without_step)
        assert trainer.state_dict()["averages"]["count"] == 4 * changed


def with_all_reduce(self, batch, batch_info):
    self._update_features.checks.refuse_collective("all_reduce")
    return zeroing(self, batch, batch_info)


@pytest.mark.parametrize(
    ("shares", "function", "warns"),
    [
        ("measured", by_hand, True),
        ("even", by_hand, False),
        ("measured", zeroing, False),
        ("even", with_all_reduce, True),
    ],
)
def test_loss_without_the_weight_of_its_share_gets_a_warning(shares, function, warns, caplog):
    operator = run_operator(with_train_batch(function))
    state = operator._train_state
    elastic = ElasticConfig(shares=shares)
    settings = state.settings
    settings.options = dataclasses.replace(settings.options, elastic=elastic)
    update = state.update
    update.begin(UpdatePlan((MicroBatchPlan(num_samples=6),), total_samples=8))
    update.begin_micro_batch(MicroBatchPlan(num_samples=6))
    operator.train_batch(BATCH, {})
    operator._update_features.checks.commit(update)
    assert ("Losses then have wrong weights" in caplog.text) == warns


def test_gradients_stay_if_none_of_several_optimizers_steps():
    class Late(Adversaries):
        def train_batch(self, batch, batch_info):
            self.backward(self.judge(batch[0]).mean())
            return {}

    with local(Late, {"batch_size": 5}) as trainer:
        trainer.train(num_steps=1)
        assert trainer.get_local_operator().judge.weight.grad is not None


def keeping(backward, step, fails_at=None):
    """Return a ``train_batch`` that keeps the gradients of every other batch."""

    def train_batch(self, batch, batch_info):
        number = batch_info["global_step"]
        if number == fails_at:
            raise KeyError
        return steps_of(backward, *[step, "zero"] * (number % 2))(self, batch, batch_info)

    return with_train_batch(train_batch)


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_failure_warns_of_gradients_that_train_batch_has_kept(fails_at, caplog):
    operator_cls = keeping("raw backward", "raw step", fails_at)
    with local(operator_cls, {}) as trainer, pytest.raises(KeyError):
        trainer.train()
    assert caplog.text.count("register(gradient_accumulation_steps=...)") == fails_at % 2


@pytest.mark.parametrize("actions", [("backward", "step"), ("raw backward", "raw step")])
def test_loop_may_accumulate_by_itself(actions):
    config = {"num_samples": 16, "batch_size": 4}
    found, _ = trained({**config, "lr": 0.05}, [1] * 4, operator_cls=keeping(*actions))
    torch.testing.assert_close(found, trained({**config, "lr": 0.1, "steps": 2})[0])


def test_optimizer_that_needs_a_closure_is_refused_with_the_way(make_trainer):
    class Closing(Classifier):
        def register(self, *, models, optimizers, criterion):
            optimizers = torch.optim.LBFGS(models.parameters())
            return super().register(models=models, optimizers=optimizers, criterion=criterion)

    with pytest.raises(TypeError, match=r"LBFGS.*self.optimizer.step\(closure\)"):
        make_trainer(Closing).train()


@pytest.mark.parametrize("count", [0, 3])
def test_loss_of_a_closure_is_the_mean_over_the_items_of_all_workers(monkeypatch, count):
    operator, of_other = run_operator(Classifier), iter([1.0, 0.0])  # its items, and its loss
    exchange = operator._train_state.exchange
    monkeypatch.setattr(type(exchange), "num_averaging_workers", 2)
    monkeypatch.setattr(exchange, "all_reduce_sum", lambda number: number + next(of_other))

    def compute():
        loss = operator.model(BATCH[0]).sum() * 0 + (2.0 if count else float("nan"))
        operator.backward(loss, num_items=count)
        return loss

    assert operator.optimizer.step(compute) == pytest.approx(2.0 * count / (count + 1))


def test_backward_accepts_num_items_by_its_former_name():
    operator = run_operator(Classifier)
    for name, count in (("num_items", 3), ("num_samples", 4)):
        operator.backward(operator.model(BATCH[0]).sum(), **{name: count})
        assert operator._train_state.update.loss_weights.counted_items == count
    with pytest.raises(TypeError, match="pass only num_items"):
        operator.backward(operator.model(BATCH[0]).sum(), num_items=3, num_samples=3)


def test_the_default_step_calls_an_override_of_backward_with_the_former_name():
    class Former(Classifier):
        def backward(self, loss, num_samples=None):
            super().backward(loss, num_samples=num_samples)

    operators = [run_operator(each) for each in (Former, Classifier)]
    for operator in operators:
        operator.train_batch(BATCH, {})
    assert torch.equal(*map(parameters, operators))


# ---- gradients that user code changes before the update


def clip_values(optimizer):
    for group in optimizer.param_groups:
        torch.nn.utils.clip_grad_value_(group["params"], 1e-3)


def add_noise(optimizer):
    for p in optimizer.param_groups[0]["params"]:
        p.grad = p.grad + 1e-3


class Changing(Accumulating):
    """Changes gradients after the backward pass, or in a hook of the optimizer."""

    def register(self, *, optimizers, **given):
        if self.config["in_hook"]:
            optimizers.register_step_pre_hook(lambda o, *_: self.config["change"](o))
        return super().register(optimizers=optimizers, **given)

    def train_batch(self, batch, batch_info):
        self.backward(loss_of(self, batch))
        if not self.config["in_hook"]:
            self.config["change"](self.optimizer)
        self.optimizer_step(self.optimizer)
        return {}


@pytest.mark.parametrize("change", [clip_values, add_noise])
@pytest.mark.parametrize(
    ("steps", "precision"), [(2, {}), (3, PRECISIONS[1]), (1, PRECISIONS[1]), (1, {})]
)
def test_gradients_change_exactly_or_are_refused_before_the_update(change, steps, precision):
    config = {"change": change, "batch_size": 4, "num_samples": 48}
    plain = {**config, "batch_size": 4 * steps, "in_hook": False}
    expected, _ = trained(plain, operator_cls=Changing)
    config |= {"steps": steps, "in_hook": True}
    found, _ = trained(config, operator_cls=Changing, **precision)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    config["in_hook"] = False
    if steps == 1 and not precision:
        return
    with pytest.raises(RuntimeError, match=r"changes gradients between self.backward"):
        trained(config, operator_cls=Changing, **precision)
