"""The defaults and tools of an operator, and errors if something is missing."""

import collections
import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysgd import TrainingOperator
from raysgd._internal.context import WorkerContext
from raysgd.testing import run_operator
from raysgd.torch.options import TorchOptions
from raysgd.torch.train_state import OperatorSettings
from tests.operators import Classifier, make_model, parameters

BATCH = (torch.randn(4, 8), torch.tensor([0, 1, 0, 1]))


def operator_with(*, criterion=None, keep=("model", "optimizer", "criterion")):
    """An operator that sets only some of the attributes that the defaults need."""

    class Custom(TrainingOperator):
        def setup(self, config):
            model = make_model()
            given = self.register(
                models=model,
                optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
                criterion=criterion or torch.nn.CrossEntropyLoss(),
            )
            for name, value in zip(("model", "optimizer", "criterion"), given, strict=True):
                if name in keep:
                    setattr(self, name, value)

    return run_operator(Custom)


# ---- missing things


def test_validation_needs_no_optimizer():
    operator_with(keep={"model", "criterion"}).validate_batch(BATCH, {})


def test_register_suggests_a_name_for_a_misspelled_argument():
    class Wrong(TrainingOperator):
        def setup(self, config):
            self.register(model=1, optimizers=1)

    with pytest.raises(TypeError, match=r"Wrong\.register\(\).*'model'\. Did you mean 'models'"):
        run_operator(Wrong)


def test_several_models_need_an_own_train_batch():
    operator = operator_with()
    operator.model = [operator.model, operator.model]
    for method in (operator.train_batch, operator.validate_batch):
        with pytest.raises(RuntimeError, match=r"holds 2 objects.*Override them in Custom"):
            method(BATCH, {})


# ---- train


def test_train_batch_equals_a_plain_step():
    operator = operator_with()
    twin = make_model()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        expected = torch.nn.functional.cross_entropy(twin(BATCH[0]), BATCH[1])
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        result = operator.train_batch(BATCH, {})
        assert float(result["train_loss"]) == expected.item()
        assert not result["train_loss"].requires_grad
    for mine, its in zip(operator.model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_train_epoch_passes_batches_with_their_info():
    class Noting(Classifier):
        def train_batch(self, batch, batch_info):
            self.seen.append(batch_info)
            assert self.model.training
            return {"num_samples": batch, "k": float(batch)}

    operator = run_operator(Noting)
    operator.seen = []
    operator.model.eval()
    result = operator.train_epoch(iter([1, 3]), info={"a": 1}, epoch_idx=4)
    assert [seen["batch_idx"] for seen in operator.seen] == [0, 1]
    assert all(seen["info"] == {"a": 1} and seen["epoch_idx"] == 4 for seen in operator.seen)
    assert all("global_step" in seen for seen in operator.seen)
    assert result == {"num_samples": 4, "batch_count": 2, "k": 2.5, "last_k": 3.0}


@pytest.mark.parametrize("method", ["train_batch", "validate_batch"])
def test_batch_methods_must_return_a_dict(method):
    operator_cls = type("Wrong", (Classifier,), {method: lambda self, batch, batch_info: None})
    operator = run_operator(operator_cls)
    run = operator.train_epoch if method == "train_batch" else operator.validate
    with pytest.raises(TypeError, match="returned NoneType; it must return a dict"):
        run(iter([BATCH]))


# ---- validate


def test_train_mode_reaches_every_layer():
    operator = run_operator(Classifier, {"num_samples": 20, "batch_size": 8, "batch_norm": True})
    for module in operator.model.children():
        module.eval()
    operator.train_epoch(iter([BATCH]))
    assert all(module.training for module in operator.model.modules())


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
        operator.train_mode(True)
        modes = [module.training for module in operator.teacher.children()]
        assert [operator.student.training, operator.teacher.training] == [True, training]
        assert modes == [training, True]
        operator.train_mode(False)
        assert not any(module.training for module in operator.teacher.modules())


def test_unfrozen_model_follows_the_mode():
    operator = run_operator(Distilled, {"training": False})
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


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4))
def test_accuracy_and_loss_do_not_depend_on_how_samples_are_batched(sizes):
    operator = operator_with()
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
        (torch.eye(3), torch.eye(3), None),  # targets of probabilities
        (torch.ones(3, 2), torch.tensor([0.0, 1.0, 0.5]), None),  # real targets
        (torch.ones(3, 1), torch.tensor([[0.5], [0.0], [1.5]]), None),  # a regression
        (torch.ones(3, 1), torch.tensor([0, 1, 0]), None),  # counts: one class is none
        (torch.ones(3), torch.tensor([0, 1, 0]), None),  # one score a sample
        (torch.ones(3, 2, dtype=torch.bool), torch.tensor([0, 1, 0]), None),
        (torch.eye(3), torch.tensor([[0], [1], [0]]), 2 / 3),
        (torch.ones(3, 2, 5), torch.zeros(3, dtype=torch.long), None),
        (torch.ones(3, 2), torch.zeros(4, dtype=torch.long), None),
        ({"logits": torch.eye(3)}, torch.tensor([0, 1, 0]), 2 / 3),
        ({"scores": torch.eye(3)}, torch.tensor([0, 1, 0]), None),
    ],
)
def test_accuracy_needs_class_indices_of_a_fitting_shape(output, target, accuracy):
    operator = operator_with(criterion=lambda output, target: torch.tensor(0.0))
    operator.model = lambda features: output
    result = operator.validate_batch((torch.zeros(1), target), {})
    if accuracy is None:
        assert "val_accuracy" not in result
    else:
        assert float(result["val_accuracy"]) == pytest.approx(accuracy, rel=1e-12)
    assert result["num_samples"] == len(target)


# ---- items


def test_only_an_overridden_num_items_communicates():
    def asked(count):
        raise AssertionError

    for overridden in (False, True):
        methods = {"num_items": lambda self, batch: None} if overridden else {}
        operator = run_operator(type("Counting", (Classifier,), methods))
        operator._train_state.optimization.mean_over_workers = asked
        if overridden:  # also if it has no number for this batch, since others may have one
            with pytest.raises(AssertionError):
                operator.train_batch(BATCH, {})
        else:
            operator.train_batch(BATCH, {})


def test_batch_of_no_items_is_ignored():
    class Ignoring(Classifier):
        def setup(self, config):
            super().setup(config)
            self.criterion = torch.nn.CrossEntropyLoss(ignore_index=0)

        def num_items(self, batch):
            return (batch[1] != 0).sum()

    operator = run_operator(Ignoring)
    before = parameters(operator).clone()
    features, classes = BATCH
    nothing = (features, torch.zeros_like(classes))
    operator.train_batch(nothing, {})
    assert torch.equal(parameters(operator), before)
    result = operator.validate(iter([nothing, BATCH, nothing]))
    with torch.no_grad():
        expected = operator.criterion(operator.model(features), classes)
    assert result["val_loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert result["num_samples"] == 12


@pytest.mark.parametrize(("found", "error"), [("3", TypeError), (-1, ValueError)])
def test_invalid_num_items_is_an_error(found, error):
    operator = run_operator(type("Odd", (Classifier,), {"num_items": lambda self, batch: found}))
    with pytest.raises(error, match=r"Odd\.num_items returned '?-?[13]'?: the count must be"):
        operator.train_batch(BATCH, {})


# ---- properties and helpers


def test_error_of_the_criterion_names_its_arguments():
    with pytest.raises(RuntimeError) as caught:
        operator_with().train_batch((BATCH[0], BATCH[1][:, None]), {})
    assert caught.value.__notes__ == [
        "The criterion CrossEntropyLoss raised this for the output float32 (4, 2) "
        "and the target int64 (4, 1)."
    ]


def test_properties_of_an_operator():
    context = WorkerContext(world_rank=3, world_size=4, local_rank=1)
    options = TorchOptions(scheduler_step_freq="batch", use_tqdm=True)
    settings = OperatorSettings(options=options, context=context)
    operator = Classifier({"a": 1}, settings)
    assert (operator.world_rank, operator.world_size, operator.local_rank) == (3, 4, 1)
    assert operator.config == {"a": 1}
    assert operator.scheduler_step_freq == "batch"
    assert operator.use_tqdm
    assert operator.global_step == 0
    assert not operator.use_gpu
    assert operator.device_ids is None
    assert operator.timers.stats() == {}


@dataclasses.dataclass
class Sample:
    features: torch.Tensor


def test_nested_tensors_move_to_the_device():
    pair = collections.namedtuple("pair", "left right")
    operator = Classifier({}, OperatorSettings(device=torch.device("meta")))
    tensor = torch.ones(1)
    moved = operator.to_device([tensor, (tensor, "text"), {"k": [tensor]}, pair(tensor, 1), None])
    assert moved[0].is_meta
    assert moved[1][0].is_meta
    assert moved[1][1] == "text"
    assert moved[2]["k"][0].is_meta
    assert isinstance(moved[3], pair)
    assert moved[3].left.is_meta
    assert moved[3].right == 1
    assert moved[4] is None
    assert operator.to_device(Sample(tensor)).features.is_meta
    edge = collections.namedtuple("edge", "frm to")
    assert operator.to_device(edge(tensor, tensor)).to.is_meta
    assert not tensor.is_meta


def test_objects_with_to_move_themselves():
    """The sizes of a packed sequence have to stay on the CPU."""
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    moved, *_ = Classifier({}, OperatorSettings(device=torch.device("meta"))).to_device([packed])
    assert isinstance(moved, torch.nn.utils.rnn.PackedSequence)
    assert moved.data.is_meta
    assert not moved.batch_sizes.is_meta


@pytest.mark.parametrize(
    ("use_fp16", "kinds"),
    [
        (False, (False, False, False)),
        (True, (True, True, False)),
        ("apex", (True, False, True)),
    ],
)
def test_properties_of_the_precision(use_fp16, kinds, monkeypatch):
    monkeypatch.setattr("raysgd.torch.train_state.create_precision", lambda *arguments: None)
    operator = Classifier({}, OperatorSettings(options=TorchOptions(use_fp16=use_fp16)))
    assert (operator.use_fp16, operator.use_fp16_native, operator.use_fp16_apex) == kinds
