"""The default methods and the helpers of an operator."""

import collections
import copy
import dataclasses
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysgd import TrainingOperator
from raysgd._internal import step_timing
from raysgd._internal.runner import WorkerContext
from raysgd.metrics import AverageMeterCollection
from raysgd.testing import run_operator
from raysgd.torch.options import TorchOptions, TorchSettings
from tests.operators import Classifier, local, make_model, register_all

BATCH = (torch.randn(4, 8), torch.tensor([0, 1, 0, 1]))


class Small(TrainingOperator):
    def setup(self, config):
        register_all(self, **config)


# ---- what new workers lack


class Shadow:
    def __init__(self, model):
        self.copy = copy.deepcopy(model).requires_grad_(False)


class Teaching(Small):
    def setup(self, config):
        super().setup({})
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)
        self.fixed = torch.nn.Linear(2, 2)
        self.average = {"bias": torch.zeros(2)}
        self.shadow = Shadow(self.model)
        self.newest, self.alpha = None, 1.0
        self.keeps = config["keeps"]

    def train_batch(self, batch, batch_info):
        self.teacher[0].weight.mul_(0.9)
        self.shadow.copy[0].bias.mul_(0.9)
        self.average["bias"] = self.average["bias"] + 1
        self.newest = torch.zeros(1)
        return super().train_batch(batch, batch_info)

    def state_dict(self):
        kept = {"teacher_state": self.teacher.state_dict(), "average": self.average}
        return kept if self.keeps else {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("keeps", [False, True])
def test_tensors_that_train_batch_changes_and_no_state_has_are_a_warning(keeps, caplog):
    with local(Teaching, {"keeps": keeps}) as trainer:
        for _ in range(2):
            trainer.train()
    warnings = [r.message for r in caplog.records if "train_batch changed" in r.message]
    names = "self.teacher.0.weight, self.average['bias'], self.shadow.copy.0.bias"
    assert len(warnings) == (not keeps)
    assert keeps or f"changed {names}. Checkpoints" in warnings[0]


def test_a_state_that_is_not_loaded_is_a_warning(caplog):
    with local(type("Half", (Small,), {"state_dict": lambda self: {}}), {}):
        assert "Half overrides state_dict, but not load_state_dict" in caplog.text


# ---- missing objects


@pytest.mark.parametrize("name", ["model", "optimizer"])
def test_an_object_in_place_of_a_registered_one_is_a_warning(name, caplog):
    with local(Small, {}) as trainer:
        trainer.train(num_steps=1)
        operator = trainer.get_local_operator()
        operator.model = torch.compile(operator.model, backend="eager")
        trainer.train(num_steps=1)
        setattr(operator, name, copy.deepcopy(getattr(operator, name)))
        assert "was replaced" not in caplog.text
        trainer.train(num_steps=1)
    assert f"self.{name} was replaced by a " in caplog.text


# ---- validate


class Watched(TrainingOperator):
    """Notes whether the output of the model still exists in the backward pass."""

    def setup(self, config):
        register_all(self, criterion=self.sum_of)
        self.exists = []

    def sum_of(self, output, target):
        loss, output = output.sum(), weakref.ref(output)
        loss.register_hook(lambda gradient: self.exists.append(output() is not None))
        return loss


def test_the_output_needs_no_memory_in_the_backward_pass():
    operator = run_operator(Watched)
    operator.train_batch(BATCH, {})
    assert operator.exists == [False]


class Distilled(TrainingOperator):
    def setup(self, config):
        student, teacher = make_model(), torch.nn.Sequential(make_model(), torch.nn.Dropout())
        teacher.requires_grad_(False).train(config["training"])
        teacher[1].train()
        (self.student, self.teacher), _ = self.register(
            models=[student, teacher], optimizers=torch.optim.SGD(student.parameters(), lr=0.1)
        )


@pytest.mark.parametrize("training", [True, False])
def test_frozen_model_keeps_its_modes_from_register(training):
    operator = run_operator(Distilled, {"training": training})
    for _ in range(2):
        operator.student[0].eval()
        operator.train_mode(True)
        assert all(module.training for module in operator.student.modules())
        assert operator.teacher.training == training
        assert [module.training for module in operator.teacher.children()] == [training, True]
        operator.train_mode(False)
        assert not any(module.training for module in operator.teacher.modules())
    operator.teacher.requires_grad_(True)
    operator.train_mode(True)
    assert operator.teacher.training


def test_validation_is_in_eval_mode_without_gradients_and_sees_every_batch():
    class Noting(Classifier):
        def validate_batch(self, batch, batch_info):
            assert not self.model.training
            assert not torch.is_grad_enabled()
            assert batch_info["info"] == {"a": 1}
            metrics = super().validate_batch(batch, batch_info)
            right = batch_info["output"].argmax(dim=1) == batch[1]
            assert metrics["val_accuracy"] == right.double().mean()
            return {**metrics, "index": batch_info["batch_idx"]}

    operator = run_operator(Noting, {"num_samples": 20, "batch_size": 8, "batch_norm": True})
    before = {name: value.clone() for name, value in operator.model.state_dict().items()}
    result = operator.validate(iter(operator.validation_loader), info={"a": 1})
    assert (result["num_samples"], result["batch_count"], result["last_index"]) == (20, 3, 2)
    after = operator.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.is_grad_enabled()


def test_a_validation_that_fails_within_an_epoch_leaves_the_modes_of_training(make_trainer):
    modes = []

    class Validating(Classifier):
        def train_epoch(self, iterator, *arguments, **named):
            with pytest.raises(ZeroDivisionError):
                self.validate(1 // 0 for _ in range(1))
            modes.append(self.model.training)
            return super().train_epoch(iterator, *arguments, **named)

        def train_batch(self, batch, batch_info):
            modes.append(self.model.training)
            return super().train_batch(batch, batch_info)

    make_trainer(Validating).train(num_steps=1)
    assert modes == [True, True]


def test_a_validation_that_fails_leaves_the_metrics_of_an_epoch():
    operator = run_operator(Classifier)
    operator._train_state.meters = before = AverageMeterCollection()
    with pytest.raises(ZeroDivisionError):
        operator.validate(1 // 0 for _ in range(1))
    assert operator._train_state.meters is before


def test_validation_within_an_epoch_takes_no_time_of_a_step(make_trainer, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(step_timing, "perf_counter", lambda: now[0])

    class Validating(Classifier):
        def train_epoch(self, iterator, *arguments, **named):
            result = super().train_epoch(iterator, *arguments, **named)
            self.validate(self.validation_loader)
            now[0] += 1
            return result

        def validate_batch(self, batch, batch_info):
            now[0] += 100
            return super().validate_batch(batch, batch_info)

    trainer = make_trainer(Validating)
    trainer.train()
    timing = trainer.get_local_operator()._train_state.step_timing
    assert sum(timing.totals.phase_s) == timing.totals.phase_s[step_timing.OTHER] == 1


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_accuracy_and_loss_do_not_depend_on_how_samples_are_batched(sizes):
    operator = run_operator(Small)
    features = torch.randn(sum(sizes), 8)
    target = (features[:, 0] > 0).long()
    whole = operator.validate(iter([(features, target)]))
    parts = operator.validate(zip(features.split(sizes), target.split(sizes), strict=True))
    for key in ("val_loss", "val_accuracy", "num_samples"):
        assert parts[key] == pytest.approx(whole[key], rel=1e-5)
    exact = (operator.model(features).argmax(dim=1) == target).double().mean().item()
    assert parts["val_accuracy"] == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(
    ("output", "target", "accuracy"),
    [
        (torch.eye(3), torch.tensor([0, 1, 0]), 2 / 3),
        # (batch, classes, positions), as in segmentation
        (torch.eye(2).reshape(1, 2, 2), torch.tensor([[0, 0]]), 0.5),
        (torch.eye(3), torch.eye(3), None),  # probabilities as targets
        (torch.ones(3, 2), torch.tensor([0.0, 1.0, 0.5]), None),  # real targets
        (torch.ones(3, 1), torch.tensor([[0.5], [0.0], [1.5]]), None),  # a regression
        (torch.ones(3, 1), torch.tensor([0, 1, 0]), None),  # counts: a single class has no accuracy
        (torch.ones(3), torch.tensor([0, 1, 0]), None),  # one score per sample
        (torch.ones(3, 2, dtype=torch.bool), torch.tensor([0, 1, 0]), None),
        (torch.eye(3), torch.tensor([[0], [1], [0]]), 2 / 3),
        (torch.ones(3, 2, 5), torch.zeros(3, dtype=torch.long), None),
        (torch.ones(3, 2), torch.zeros(4, dtype=torch.long), None),
        ({"logits": torch.eye(3)}, torch.tensor([0, 1, 0]), 2 / 3),
        ({"scores": torch.eye(3)}, torch.tensor([0, 1, 0]), None),
    ],
)
def test_accuracy_needs_class_indices_of_a_fitting_shape(output, target, accuracy):
    operator = run_operator(Small, {"criterion": lambda output, target: torch.tensor(0.0)})
    operator.model = lambda features: output
    del operator.optimizer  # a validation needs none
    result = operator.validate_batch((torch.zeros(1), target), {})
    if accuracy is None:
        assert "val_accuracy" not in result
    else:
        assert float(result["val_accuracy"]) == pytest.approx(accuracy, rel=1e-12)
    assert result["num_samples"] == len(target)


# ---- items


@pytest.mark.parametrize(("found", "error"), [("3", TypeError), (-1, ValueError)])
def test_invalid_num_items_is_an_error(found, error):
    operator = run_operator(type("Odd", (Classifier,), {"num_items": lambda self, batch: found}))
    with pytest.raises(error, match=r"Odd\.num_items returned \(count='?-?[13]'?\): must be"):
        operator.train_batch(BATCH, {})


# ---- properties and helpers


def test_properties_of_an_operator():
    context = WorkerContext(world_rank=3, world_size=4, local_rank=1)
    options = TorchOptions(scheduler_step_freq="batch", use_tqdm=True, use_fp16=True)
    settings = TorchSettings(options=options, context=context)
    operator = Classifier({"a": 1}, settings)
    assert (operator.world_rank, operator.world_size, operator.local_rank) == (3, 4, 1)
    assert operator.config == {"a": 1}
    assert operator.scheduler_step_freq == "batch"
    assert operator.use_tqdm
    flags = operator.use_fp16, operator.use_fp16_native, operator.use_fp16_apex
    assert flags == (True, True, False)
    assert operator.global_step == 0
    assert not operator.use_gpu
    assert operator.device_ids is None
    assert operator.timers.stats() == {}


@dataclasses.dataclass
class Sample:
    features: torch.Tensor


Pair = collections.namedtuple("Pair", "frm to")


@pytest.mark.parametrize(
    ("make", "tensor_of"),
    [
        (lambda tensor: (tensor, "text"), lambda moved: moved[0]),
        (lambda tensor: {"k": [tensor, None]}, lambda moved: moved["k"][0]),
        (lambda tensor: Pair(1, tensor), lambda moved: moved.to),
        (Sample, lambda moved: moved.features),
        # the sizes of a packed sequence stay on the CPU
        (lambda tensor: [torch.nn.utils.rnn.pack_sequence([tensor])], lambda moved: moved[0].data),
    ],
)
def test_nested_tensors_move_to_the_device(make, tensor_of):
    operator = Classifier({}, TorchSettings(device=torch.device("meta")))
    batch = make(torch.ones(1))
    moved = operator.to_device(batch)
    assert type(moved) is type(batch)
    assert tensor_of(moved).is_meta
    assert not tensor_of(batch).is_meta


@pytest.mark.parametrize("methods", [{}, {"num_items": lambda self, batch: None}])
def test_only_an_overridden_num_items_communicates(methods):
    """Also if it returns None, because other workers may return a count."""
    operator, asked = run_operator(type("Counting", (Classifier,), methods)), []
    exchange = operator._train_state.exchange
    exchange.all_reduce_sum = lambda count: asked.append(count) or count
    operator.train_batch(BATCH, {})
    assert bool(asked) == bool(methods)
