"""Updates that must equal those of a plain loop in one process, and what leaves a trainer."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce
from torch.utils.data import DataLoader, TensorDataset, default_collate

from raysgd import ElasticConfig, EqualBits, TorchTrainer, TrainingOperator
from raysgd._internal.nested import map_leaves, try_copy
from raysgd._internal.runner import WorkerContext
from raysgd.callbacks import EMA
from raysgd.errors import CheckpointError
from raysgd.loop.requests import TrainRequest
from raysgd.loop.update import Update
from raysgd.torch.collectives import _FIRST_CALLS, TorchCollectives
from raysgd.torch.options import TorchOptions
from raysgd.torch.runner import TorchRunner
from raysgd.torch.strategies import replicated_model
from raysgd.torch.tensors import state_digest
from tests.operators import local
from tests.unit.torch.strategies.test_phases import calls_of
from tests.unit.torch.test_rollback import rollback_of

X = torch.randn(16, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1, keepdim=True))


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)).double()


def momentum(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05)


class Plain(TrainingOperator):
    """The default step. Tests change what it registers."""

    make_optimizer = staticmethod(momentum)
    collate_fn = None

    def setup(self, config):
        model = net()
        optimizer = self.make_optimizer(model)
        given = {}
        if config.get("scheduler"):
            given["schedulers"] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 1)
        self.model, self.optimizer, self.criterion, *_ = self.register(
            models=model,
            optimizers=optimizer,
            criterion=torch.nn.MSELoss(),
            gradient_accumulation_steps=config.get("accumulation", 1),
            **given,
        )
        loader = DataLoader(DATA, batch_size=4, collate_fn=self.collate_fn)
        self.register_data(train_loader=loader, validation_loader=loader)


def train(cls, config=None, num_epochs=1, **arguments):
    with local(cls, config, **arguments) as trainer:
        for _ in range(num_epochs):
            trainer.train()
        return trainer.get_model(), trainer.state_dict()


def plain(num_epochs=1, make_optimizer=momentum, size=4, collate=None, skips=lambda number: False):
    """Train the same in a plain loop. Return the model and the optimizer."""
    model = net()
    optimizer = make_optimizer(model)
    getattr(optimizer, "train", int)()
    for _ in range(num_epochs):
        for number, (x, y) in enumerate(DataLoader(DATA, batch_size=size, collate_fn=collate)):
            if skips(number):
                continue
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return model, optimizer


def check_equal(model, expected):
    torch.testing.assert_close([*model.parameters()], [*expected.parameters()], rtol=0, atol=1e-12)


# ---- updates without items


class Empty(Plain):
    """No worker counts an item in the second and the third batch."""

    def train_batch(self, batch, batch_info):
        number = 0 if batch_info["global_step"] in (1, 2) else len(batch[0])

        def compute():
            loss = torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])
            self.backward(loss if number else loss * float("nan"), num_items=number)
            return loss

        if (step := self.config["step"]) != "closure":
            compute()
        if step == "helper":
            self.optimizer_step(self.optimizer)
        else:
            self.optimizer.step(compute if step == "closure" else None)
            self.optimizer.zero_grad()
        return {"num_samples": number}


class TwoLosses(Plain):
    """The first loss has no items, and the second is a plain one."""

    def train_batch(self, batch, batch_info):
        self.backward(self.model(batch[0]).sum(), num_items=0)
        self.optimizer_step(self.optimizer)
        before = self.model[0].weight.clone()
        self.optimizer.step(lambda: self.model(batch[0]).sum().backward())
        return {"moved": (self.model[0].weight - before).abs().sum()}


def test_a_plain_loss_after_one_without_items_is_trained(make_trainer):
    assert make_trainer(TwoLosses).train(num_steps=1)["moved"] > 0


@pytest.mark.parametrize("step", ["helper", "raw", "closure", "exact"])
def test_update_without_items_is_skipped(step):
    exact = {"exact": EqualBits(2)} if step == "exact" else {}
    size, num_applied = (8, 1) if exact else (4, 2)  # two shards make a step
    config = {"step": "helper" if exact else step, "scheduler": True}
    options = {"callbacks": [EMA(0.9)], "scheduler_step_freq": "batch"}
    expected, _ = plain(size=size, skips=lambda number: number in (1, 2))
    _, state = train(Empty, config, **options, **exact)
    torch.testing.assert_close(state["models"], [expected.state_dict()], rtol=0, atol=1e-12)
    assert state["global_step"] == 16 / size
    assert state["schedulers"][0]["last_epoch"] == state["averages"]["count"] == num_applied


# ---- collectives in a step


class Communicating(Plain):
    def train_batch(self, batch, batch_info):
        self.seen.append(len(batch[0]))
        call = self.config["call"]
        getattr(self, call, getattr(dist, call, None))(torch.ones(1))
        return super().train_batch(batch, batch_info)

    def on_world_change(self):
        self.seen, self.group = [], dist.new_group()

    def in_own_group(self, tensor):
        dist.broadcast(tensor, 0, group=self.group)

    def functional(self, tensor):
        all_reduce(tensor, "sum", dist.group.WORLD).wait()

    def by_method(self, tensor):
        dist.group.WORLD.allreduce([tensor]).wait()

    def in_hook(self, tensor):
        weight = next(self.unwrapped(self.model).parameters())
        weight.register_hook(lambda gradient: dist.all_reduce(tensor))


def communicating(call, operator_cls=Communicating, **arguments):
    """Train in a group of one of two workers, whose batches have twice the size."""
    options = TorchOptions(
        training_operator_cls=operator_cls,
        config={"call": call},
        num_workers=2,
        use_gpu=False,
        elastic=ElasticConfig(),
        **arguments,
    )
    runner = TorchRunner(options)
    runner.setup(WorkerContext(has_process_group=True))
    operator = runner.operator
    runner.handle(TrainRequest(call_number=0, until_epoch=1))
    runner.teardown()
    assert all(getattr(module, name) is first for module, name, first in _FIRST_CALLS)
    return operator


@pytest.mark.parametrize("call", ["all_reduce", "irecv", "in_own_group", "functional"])
def test_batch_with_a_collective_of_user_code_is_not_divided(process_group, call):
    assert communicating("to_device").seen == [4, 4, 4, 4]
    operator = communicating(call)
    assert operator.seen[1:] == [8, 8]  # the first part shows the collective
    check_equal(operator.unwrapped(operator.model), plain(size=8)[0])


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("all_reduce", "calls all_reduce"),
        ("irecv", "calls irecv"),
        ("in_own_group", "calls broadcast"),
        ("by_method", "communicates"),
        ("in_hook", "communicates"),
    ],
)
def test_equal_bits_refuse_a_collective_of_user_code(process_group, call, name):
    with pytest.raises(RuntimeError, match=f"train_batch {name}.*exact"):
        communicating(call, exact=EqualBits(2))


def test_passes_that_complete_averages_do_not_depend_on_earlier_steps(process_group, monkeypatch):
    """A replacement has no hooks of parts that were trained before it joined."""
    seen, average = [], replicated_model.average_gradients
    monkeypatch.setattr(
        replicated_model, "average_gradients", lambda p: (seen.append(len(p)), average(p))
    )

    class Heads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)

        def forward(self, x):
            return {"out": self.first(x) + self.second(x), "cache": object()}

    def step(wrapped, trained, frozen):
        trained.requires_grad_(True)
        frozen.requires_grad_(False)
        seen.clear()
        wrapped(torch.ones(2, 3))["out"].sum().backward()
        wrapped._passes.end_update()
        return [*seen]

    old, new = (replicated_model.ReplicatedModel(Heads()) for _ in range(2))
    step(old, old.module.first, old.module.second)
    of_old = step(old, old.module.second, old.module.first)
    assert of_old == step(new, new.module.second, new.module.first)


# ---- samples that a collate_fn drops


def drop(rows):
    rows = [row for row in rows if row[1] < 1] or rows
    return tuple(torch.stack(column) for column in zip(*rows, strict=True))


class Dropping(Plain):
    collate_fn = staticmethod(drop)


def test_dropped_samples_weigh_nothing():
    check_equal(train(Dropping, {"accumulation": 2})[0], plain(size=8, collate=drop)[0])


class OwnStep(Dropping):
    def train_batch(self, batch, batch_info):
        self.backward(torch.nn.functional.mse_loss(self.model(batch[0]), batch[1]))
        self.optimizer_step(self.optimizer)
        return {}


@pytest.mark.parametrize(("collate_fn", "warns"), [(drop, True), (default_collate, False)])
def test_own_step_warns_of_dropped_samples(monkeypatch, caplog, collate_fn, warns):
    monkeypatch.setattr(OwnStep, "collate_fn", staticmethod(lambda rows: collate_fn(rows)))
    train(OwnStep, {"accumulation": 2})
    assert warns == ("rows, and the loader joined 4 samples" in caplog.text)


class Idle(OwnStep):
    def train_batch(self, batch, batch_info):
        return {"train_loss": self.criterion(self.model(batch[0]), batch[1])}


class Inner(Plain):
    make_optimizer = staticmethod(lambda model: Wrapping(model))

    def train_batch(self, batch, batch_info):
        self.optimizer.zero_grad()
        torch.nn.functional.mse_loss(self.model(batch[0]), batch[1]).backward()
        self.optimizer.base.step()
        return {}


class Ahead(OwnStep):
    def train_epoch(self, iterator, info=None):
        return [self.train_batch(batch, {}) for batch in list(iterator)][-1]


@pytest.mark.parametrize(
    ("operator", "num_averaged", "warning"),
    [
        (Idle, 0, "has made a step"),
        (OwnStep, 4, ""),
        (Inner, 4, ""),
        (Ahead, 0, "before it draws the next"),
    ],
)
def test_missing_and_late_steps_of_optimizers_warn(caplog, operator, num_averaged, warning):
    _, state = train(operator, {}, callbacks=[EMA(0.9)])
    assert state["averages"]["count"] == num_averaged
    assert bool(warning) == ((warning or "optimizer") in caplog.text)


def test_batch_whose_parts_would_step_an_optimizer_in_another_is_not_divided(process_group):
    operator = communicating("", Inner)
    check_equal(operator.unwrapped(operator.model), plain(size=8)[0])


# ---- optimizers


class Switched(Plain):
    """Has an optimizer with other weights in evaluation."""

    @staticmethod
    def make_optimizer(model):
        schedulefree = pytest.importorskip("schedulefree")
        return schedulefree.AdamWScheduleFree(model.parameters(), lr=0.05)

    def train_epoch(self, *arguments, **named):
        metrics = super().train_epoch(*arguments, **named)
        if self.config.get("validates"):
            self.validate(iter(self.validation_loader))
        return metrics


@pytest.mark.parametrize("validates", [False, True])
def test_evaluation_and_export_switch_optimizers_and_training_does_not_notice(tmp_path, validates):
    expected, optimizer = plain(1, Switched.make_optimizer)
    optimizer.eval()
    arguments = {"config": {"validates": validates}, "use_local": True}
    with TorchTrainer(training_operator_cls=Switched, **arguments) as trainer:
        trainer.train()
        check_equal(trainer.get_model(), expected)
        loss = torch.nn.functional.mse_loss(expected(X), DATA.tensors[1]).item()
        assert trainer.validate()["val_loss"] == pytest.approx(loss)
        path = trainer.save(tmp_path / "state.pt")
    with TorchTrainer(training_operator_cls=Switched, callbacks=[EMA(0.5)], **arguments) as trainer:
        trainer.load(path)
        trainer.train()
        trainer.validate()
        (trained,) = trainer.state_dict()["models"]
    expected, _ = plain(2, Switched.make_optimizer)
    torch.testing.assert_close(trained, expected.state_dict(), rtol=0, atol=1e-12)


class Wrapping(torch.optim.Optimizer):
    """Wraps an optimizer, and has a format of its own, as Lookahead does."""

    def __init__(self, model):
        self.base = momentum(model)
        super().__init__(self.base.param_groups, {"counts": []})
        self.param_groups, self.count = self.base.param_groups, 0

    def step(self, closure=None):
        self.count += 1
        self.base.step(closure)
        self.param_groups[0]["lr"] *= 0.9  # the wrapped optimizer has the same groups
        self.param_groups[0]["counts"] = [*self.param_groups[0]["counts"], self.count]

    def state_dict(self):
        return {"count": self.count, "inner": self.base.state_dict()}

    def load_state_dict(self, state):
        self.count = state["count"]
        self.base.load_state_dict(state["inner"])


class Bare(Wrapping):
    """Has the usual format, without the state of the wrapped optimizer, which is in a dict."""

    base = property(lambda self: self.named[0], lambda self, x: setattr(self, "named", {0: x}))
    state_dict = torch.optim.Optimizer.state_dict
    load_state_dict = torch.optim.Optimizer.load_state_dict


class Sharing(Bare):
    """Has the state and the groups of the wrapped optimizer, in a list of its own."""

    def __init__(self, model):
        super().__init__(model)
        self.param_groups, self.state = [*self.base.param_groups], self.base.state


@pytest.mark.parametrize(
    ("kind", "key"), [(Wrapping, "count"), (Bare, "state"), (Sharing, "state")]
)
def test_wrapper_loads_its_state(kind, key):
    class Wrapped(Plain):
        make_optimizer = staticmethod(kind)

    _, state = train(Wrapped)
    with local(Wrapped) as trainer:
        trainer.load_state_dict(state)
        trainer.train()
        check_equal(trainer.get_model(), plain(2, kind)[0])
        state["optimizers"][0].pop(key)
        with pytest.raises(CheckpointError, match=r"lacks count|not the state of an optimizer"):
            trainer.load_state_dict(state)


def test_rollback_restores_the_wrapped_optimizer():
    model = net()
    optimizer = Wrapping(model)
    model(X).sum().backward()
    optimizer.step()
    rollback, update = rollback_of([optimizer]), Update()
    update.optimizer_steps.expect([optimizer], counts_in_commit=True)
    before = copy.deepcopy(optimizer.base.state)
    rollback.begin_update(update)
    optimizer.step()
    rollback.roll_back(update)
    torch.testing.assert_close([*optimizer.base.state.values()], [*before.values()])


class Packed(torch.Tensor):
    """Consists of two tensors, and has few operations, as quantized states do."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(**inner)

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), named=None):
        if function is torch.ops.aten.detach.default:
            return cls(arguments[0].codes, arguments[0].scale)
        raise NotImplementedError(function)


def test_states_of_several_tensors_are_copied_sent_and_restored(process_group):
    packed = Packed(torch.arange(3, dtype=torch.uint8), torch.tensor(0.5))
    optimizer = momentum(net())
    parameter = optimizer.param_groups[0]["params"][0]
    optimizer.state[parameter]["exp_avg"] = packed
    rollback, update = rollback_of([optimizer]), Update()
    update.optimizer_steps.expect([optimizer], counts_in_commit=True)
    rollback.begin_update(update)
    copied = map_leaves({"state": [packed]}, try_copy)["state"][0]
    sent = TorchCollectives(torch.device("cpu")).broadcast(lambda: {"a": packed}, 0)["a"]
    digest = state_digest({"a": packed})
    assert digest == state_digest({"a": copied})
    packed.codes.zero_()
    assert digest != state_digest({"a": packed})
    rollback.roll_back(update)
    for each in (copied, sent, optimizer.state[parameter]["exp_avg"]):
        assert type(each) is Packed
        assert each.codes.tolist() == [0, 1, 2]


# ---- parameters that are thawed later


class Frozen(Plain):
    def setup(self, config):
        super().setup(config)
        self.unwrapped(self.model)[0].requires_grad_(False)


def thaw(operator):
    operator.unwrapped(operator.model)[0].requires_grad_(True)


def required(operator):
    return [p.requires_grad for p in operator.model.parameters()]


def test_checkpoint_knows_which_parameters_were_trained(tmp_path):
    with local(Frozen) as first:
        frozen = first.state_dict()
        first.apply_all_operators(thaw)
        path = first.save(tmp_path / "state.pt")
    with local(Frozen) as second:
        second.load(path)
        assert second.apply_all_operators(required) == [[True] * 4]
        second.load_state_dict(frozen)
        assert second.apply_all_operators(required) == [[False] * 2 + [True] * 2]
        with pytest.raises(CheckpointError, match="requires_grad"):
            second.load_state_dict({**frozen, "requires_grad": [1]})
        second.apply_all_operators(thaw)
        frozen.pop("requires_grad")  # as in older files
        second.load_state_dict(frozen)
        assert second.apply_all_operators(required) == [[True] * 4]


# ---- updates that fail


class Twice(Plain):
    def train_batch(self, batch, batch_info):
        for number in range(2):
            self.backward(self.criterion(self.model(batch[0]), batch[1]))
            self.optimizer_step(self.optimizer)
            if number == 0 and batch_info["info"].get("fails"):
                raise ValueError("between two steps")
        return {}


def test_a_worker_that_loads_a_state_knows_when_an_update_is_complete(make_trainer):
    """Half of its first update would count otherwise."""
    trainer, loaded = make_trainer(Twice), make_trainer(Twice)
    trainer.train(num_steps=1)
    loaded.load_state_dict(trainer.state_dict())
    before = state_digest(trainer.get_model().state_dict())
    with pytest.raises(ValueError, match="between two steps"):
        loaded.train(info={"fails": True})
    assert loaded.global_step == 1
    assert state_digest(loaded.get_model().state_dict()) == before


class InTurn(Plain):
    def setup(self, config):
        models = [net(), net()]
        optimizer = torch.optim.SGD([p for each in models for p in each.parameters()], lr=0.1)
        self.models, self.optimizer = self.register(models=models, optimizers=optimizer)
        self.register_data(train_loader=DataLoader(DATA, batch_size=4))

    def train_batch(self, batch, batch_info):
        model = self.models[batch_info["global_step"] % 2]
        self.backward(torch.nn.functional.mse_loss(model(batch[0]), batch[1]))
        self.optimizer_step(self.optimizer)
        return {}


def test_the_only_step_of_an_update_comes_after_all_averages(process_group):
    """If a worker is lost in an average after it, nothing could undo the step."""
    runner = TorchRunner(TorchOptions(training_operator_cls=InTurn))
    runner.setup(WorkerContext(has_process_group=True))
    step, request = ["_finish_step", "before_commit"], TrainRequest(call_number=0, until_step=3)
    calls = calls_of(["complete_skipped", *step], lambda: runner.handle(request))
    assert calls == [*step, "complete_skipped", *step, "complete_skipped", *step]
