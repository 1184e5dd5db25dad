"""A step that runs out of memory is repeated with smaller micro-batches."""

import logging
import weakref
from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, TrainingOperator
from raysgd._internal.runner import WorkerContext
from raysgd.callbacks import Callback
from raysgd.errors import CheckpointError
from raysgd.torch.features.micro_batching import is_oom_error, num_rows, rows_of
from tests import operators
from tests.fidelity import Exact, flat, make_data
from tests.operators import Classifier, on_gpu, register_with_sgd

CONFIG = {"num_samples": 61, "num_epochs": 2, "batch_size": 8}
MESSAGE = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."


class Failing(torch.nn.Module):
    """A module that fails once, in the pass that `where` names."""

    where = None

    def forward(self, tensor):
        self.fail("forward")
        if self.where == "backward" and tensor.requires_grad:
            tensor.register_hook(lambda gradient: self.fail("backward"))
        return tensor

    def fail(self, where):
        if self.where == where:
            self.where = None
            raise RuntimeError(MESSAGE)


class Scarce(Exact):
    """Runs out of memory once in each step of `faults`, and whenever a batch exceeds `room`."""

    def setup(self, config):
        super().setup(config)
        self.failing, self.faults = Failing(), dict(config.get("faults", {}))
        self.sizes = []
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(lambda *_: self.failing.fail("update"))
        if config.get("averages", False):
            self._update_features.averaging.start(decay=0.5, start_epoch=1)

    def train_batch(self, batch, batch_info):
        features, ids, target = batch
        self.sizes.append(len(ids))
        self.failing.where = self.faults.pop(batch_info["global_step"], self.failing.where)
        if len(ids) > self.config.get("room", 100):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        loss = (self.failing(self.model(features, ids)) - target).square().mean()
        self.backward(loss)
        for optimizer in self.optimizers:
            self.optimizer_step(optimizer)
        return {"train_loss": loss.detach(), "num_samples": len(ids)}


def local(operator_cls=Scarce, config=None, **arguments):
    config = {**CONFIG, **(config or {})}
    return operators.local(operator_cls, config, scheduler_step_freq="batch", **arguments)


def splits(trainer):
    return [event.num_splits for event in trainer.events if event.kind == "out_of_memory"]


# ---- results equal those with more memory


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("arguments", [{}, {"use_fp16": True, "amp_dtype": torch.float16}])
def test_split_changes_neither_weights_nor_metrics(accumulated, arguments):
    class Clipped(Scarce):
        def register(self, models, **given):
            models.register_buffer("passes", torch.tensor(0))
            models.register_forward_hook(lambda m, *_: setattr(m, "passes", m.passes + m.training))
            return super().register(models=models, max_grad_norm=0.05, **given)

        def autocast(self):  # it trains in float64, with a scaled loss
            return torch.autocast("cpu", enabled=False)

        def train_batch(self, batch, batch_info):
            metrics = super().train_batch(batch, batch_info)
            return {"double": 2 * metrics["train_loss"], **metrics}

    class Points(Callback):
        def on_log(self, trainer, call, metrics):
            points.append({"global_step": trainer.global_step, **metrics})

    results = []
    for faults in ({}, {1: "forward", 3: "backward", 6: "update"}):
        config = {"accumulated": accumulated, "faults": faults, "shuffle": True, "averages": True}
        points = []
        with local(Clipped, config, callbacks=[Points()], **arguments) as trainer:
            measured = [*trainer.fit(2, log_every=2), *points]
            operator = trainer.get_local_operator()
            (averages,) = operator._update_features.averaging.averages
            learnt = [flat(operator.model), *(each.flatten() for each in averages.values())]
            results.append((measured, torch.cat(learnt), trainer.global_step))
            assert splits(trainer) == ([2, 4, 8] if faults else [])
            assert operator.faults == {}
            assert operator.model.passes == trainer.global_step
    (expected, weights, num_steps), (measured, own_weights, own_steps) = results
    torch.testing.assert_close(own_weights, weights, rtol=0.0, atol=1e-12)
    assert own_steps == num_steps == 16
    for before, after in zip(expected, measured, strict=True):
        for each in (before, after):
            each.pop("last_train_loss", None)
            each.pop("last_double", None)
        assert after == pytest.approx(before, rel=1e-12)
    norms = [point[name] for point in points for name in point if "grad_norm" in name]
    assert max(norms) > 0.05, "the norms are those before clipping"


def test_batches_are_split_until_they_fit(caplog):
    with local(config={"room": 2}) as trainer:
        trainer.train(num_steps=2)
        assert splits(trainer) == [2, 4]
        assert trainer.get_local_operator().sizes == [8, 4, *[2] * 8]
        kinds = [event.kind for event in trainer.events]
        assert kinds == ["started", "out_of_memory", "regrouped", "out_of_memory", "regrouped"]
    (said,) = [r.getMessage() for r in caplog.records if "split into 4" in r.getMessage()]
    assert said.startswith("Worker 0 ran out of memory after step 0.")
    assert "CUDA out of memory." in said


class Streamed(Scarce):
    """Pops its tensors from the batches of an iterable. One batch cannot be split."""

    def register_data(self, train_loader=None, validation_loader=None):
        data = make_data(61)
        batches = [list(data[start : start + 8]) for start in range(0, 61, 8)]
        batches[2].append("text")
        super().register_data(train_loader=batches, validation_loader=validation_loader)

    def train_batch(self, batch, batch_info):
        taken = [batch.pop(0) for _ in range(3)]
        return {"train_loss": super().train_batch(taken, batch_info)["train_loss"]}


@pytest.mark.parametrize("accumulated", [1, 3])
def test_batches_of_an_iterable_are_split(accumulated):
    results = []
    for faults in ({}, {1: "forward", 4: "backward"}):
        with local(Streamed, {"faults": faults, "accumulated": accumulated}) as trainer:
            measured = trainer.train()
            results.append((flat(trainer.get_model()), measured["train_loss"], measured))
            assert trainer.num_splits == (4 if faults else 1)
            assert trainer.get_local_operator().sizes.count(8) >= 1
    (weights, loss, before), (own_weights, own_loss, after) = results
    torch.testing.assert_close(own_weights, weights, rtol=0.0, atol=1e-12)
    assert own_loss == pytest.approx(loss, rel=1e-12)
    assert before["batch_count"] == after["batch_count"] == 8
    assert after["num_samples"] == pytest.approx(before["num_samples"])


def test_metrics_stay_if_a_later_batch_cannot_be_split():
    class ByHandLater(Scarce):
        def train_batch(self, batch, batch_info):
            if batch_info["global_step"] < 3:
                return super().train_batch(batch, batch_info)
            features, ids, target = batch
            loss = (self.model(features, ids) - target).square().mean()
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            return {"train_loss": loss.detach(), "num_samples": len(ids)}

    with local(ByHandLater, {"faults": {1: "forward"}}) as trainer:
        result = trainer.train()
    assert (result["num_samples"], result["batch_count"]) == (61, 8)


@pytest.mark.parametrize("splits_on_oom", [True, False])
def test_training_continues_without_memory_for_a_snapshot(splits_on_oom, caplog):
    elastic = ElasticConfig(snapshot_every=1)
    with local(split_on_oom=splits_on_oom, elastic=elastic) as trainer:
        train_state = trainer.get_local_operator()._train_state
        train_state.settings.context = WorkerContext()  # a remote worker, which takes snapshots
        train_state.copy_leaf = Mock(side_effect=RuntimeError(MESSAGE))
        if not splits_on_oom:
            with pytest.raises(RuntimeError, match="can't allocate memory"):
                trainer.train()
            return
        trainer.train()
        assert trainer.global_step == 8
    assert caplog.text.count("Memory is too small for a snapshot") == 1


@pytest.mark.parametrize("call", ["validate", "predict"])
def test_evaluation_that_runs_out_of_memory_raises_with_advice(call):
    class Full(Scarce):
        def validate_batch(self, batch, batch_info):
            raise MemoryError

        predict_batch = validate_batch

    arguments = () if call == "validate" else (DataLoader(make_data(61), batch_size=8),)
    advice = "Give this loader a smaller batch_size"
    with local(Full) as trainer, pytest.raises(MemoryError, match=advice):
        getattr(trainer, call)(*arguments)


# ---- after a split


class Holding(Classifier):
    """Fails while it holds a tensor. Later calls record whether the tensor is still alive."""

    def setup(self, config):
        self.held, self.noted = [], []
        super().setup(config)

    def train_batch(self, batch, batch_info):
        tensor = torch.ones(2)
        self.noted += [each() is not None for each in self.held]
        if len(batch[0]) > 16:
            self.held.append(weakref.ref(tensor))
            raise MemoryError
        return super().train_batch(batch, batch_info)


def test_retry_frees_the_memory_of_the_failed_step(caplog):
    """A log handler may keep its records, as caplog does."""
    with local(Holding, {"batch_size": 32}) as trainer:
        trainer.train()
        operator = trainer.get_local_operator()
        assert len(operator.held) == 1
        assert operator.noted
        assert not any(operator.noted)


def test_split_is_saved(tmp_path):
    with local(config={"faults": {1: "forward"}}) as trainer:
        trainer.train(num_steps=3)
        trainer.save(tmp_path / "state.pt")
    with local() as trainer:
        trainer.load(tmp_path / "state.pt")
        trainer.train(num_steps=1)
        assert trainer.get_local_operator().sizes == [4, 4]
        assert trainer.num_splits == 2
        state = trainer.state_dict()
        for wrong in ([2], "x"):
            with pytest.raises(CheckpointError, match="data\\['split'\\]"):
                trainer.load_state_dict({**state, "data": {**state["data"], "split": wrong}})
    with local(split_on_oom=False) as trainer:
        trainer.load(tmp_path / "state.pt")
        trainer.train(num_steps=1)
        assert trainer.get_local_operator().sizes == [8]


# ---- errors that are not handled


def test_batch_of_one_sample_raises_the_error():
    with local(config={"room": 0}) as trainer:
        with pytest.raises(torch.OutOfMemoryError, match="parts would have too few samples"):
            trainer.train()
        assert splits(trainer) == [2, 4, 8]


def test_batch_normalization_gets_two_samples_and_a_warning(caplog):
    class Normalized(Classifier):
        def train_batch(self, batch, batch_info):
            result = super().train_batch(batch, batch_info)
            if len(batch[0]) > self.config["room"]:
                raise MemoryError
            return result

    config = {"batch_norm": True, "batch_size": 9, "num_samples": 29, "room": 3}
    trainer = operators.local(Normalized, config)
    with trainer, caplog.at_level(logging.WARNING):
        trainer.train()
        trainer.get_local_operator()._config["room"] = 1
        with pytest.raises(MemoryError, match="parts would have too few samples"):
            trainer.train()
    assert caplog.text.count("batch normalization normalizes parts of a batch") == 1


def test_custom_loop_or_step_raises_the_error():
    class Loop(Scarce):
        def train_epoch(self, iterator, info=None, num_steps=None, epoch_idx=0):
            for batch in iterator:
                self.train_batch(batch, {"global_step": 0})
            return {}

    class Steps(Classifier):
        def train_batch(self, batch, batch_info):
            loss = self.criterion(self.model(batch[0]), batch[1])
            if len(batch[0]) > 4:
                raise MemoryError
            self.backward(loss)
            self.optimizer.step()
            return {}

    class Accumulates(Classifier):
        def train_batch(self, batch, batch_info):
            if len(batch[0]) > 4:
                raise MemoryError
            self.criterion(self.model(batch[0]), batch[1]).backward()
            return {}

    for operator_cls, reason in (
        (Loop, "train_epoch is not the default one"),
        (Accumulates, r"not call self\.backward\(loss\)"),
        (Steps, r"train_batch calls optimizer\.step\(\)"),
    ):
        refused = pytest.raises((MemoryError, torch.OutOfMemoryError), match=reason)
        with local(operator_cls, {"room": 2}) as trainer, refused:
            trainer.train()


def test_split_on_oom_false_and_other_errors():
    with local(config={"room": 4}, split_on_oom=False) as trainer:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            trainer.train()
        assert "not repeated" not in str(vars(caught.value))  # its notes
    of_compiler = torch._dynamo.exc.BackendCompilerFailed(int, MemoryError(), None)
    assert is_oom_error(of_compiler)
    assert not is_oom_error(RuntimeError("a mistake"))
    for message in (
        "CUDA error: out of memory\nCUDA kernel",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED",
    ):
        assert is_oom_error(RuntimeError(message))
    with pytest.raises(TypeError, match="split_on_oom"):
        local(split_on_oom="yes")


def test_optimizer_that_raises_leaves_a_damaged_state():
    class Within(Classifier):
        def setup(self, config):
            super().setup(config)
            self.optimizer.register_step_pre_hook(self.fail)

        def fail(self, optimizer, *_):
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].add_(1.0)
            raise MemoryError

    with local(Within) as trainer:
        with pytest.raises(MemoryError, match="within the step of an optimizer"):
            trainer.train()
        with pytest.raises(RuntimeError, match="Load a checkpoint to continue"):
            trainer.train()


# ---- batches

Pair = namedtuple("Pair", "features target")


@dataclass
class Record:
    features: torch.Tensor
    weights: Any = None


@dataclass
class Derived(Record):
    def __post_init__(self):
        self.lengths = [1] * len(self.features)


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: a,
        lambda a, b: (a, b),
        lambda a, b: [a, (b,), None],
        lambda a, b: {"a": a, "b": [b]},
        lambda a, b: UserDict(a=a, b=b),
        lambda a, b: Pair(a, {"b": b}),
        lambda a, b: Record(a, Pair(b, None)),
        lambda a, b: (a, b.numpy()),
    ],
)
def test_batches_of_tensors_are_split(make):
    a, b = torch.arange(10).reshape(5, 2), torch.arange(5)
    batch = make(a, b)
    assert num_rows(batch) == 5
    parts = [rows_of(batch, 0, 3), rows_of(batch, 3, 5)]
    assert [num_rows(part) for part in parts] == [3, 2]
    assert repr(parts) == repr([make(a[:3], b[:3]), make(a[3:], b[3:])])
    assert [type(part) for part in parts] == [type(batch)] * 2


CLIPS = list(torch.ones(4, 10, 3))


@pytest.mark.parametrize(
    "batch",
    [
        (torch.ones(3), torch.ones(4)),
        (torch.ones(3), torch.tensor(1.0)),
        (torch.ones(3), "text"),
        [None],
        torch.eye(2).to_sparse(),
        np.float64(2.0),
        Derived(torch.ones(2)),
        # the common first dimension of these clips is time
        CLIPS,
        (CLIPS, {"more": CLIPS}),
        (torch.ones(10, 4, 3), torch.ones(10, 4)),
        {"clips": CLIPS},
    ],
)
def test_other_batches_are_not_split(batch):
    assert num_rows(batch, samples=4) == 0


# ---- on a GPU


class Wide(TrainingOperator):
    """A model whose activations take 256 MiB each for a batch of 256 samples."""

    def setup(self, config):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 2**17), torch.nn.Tanh(), torch.nn.Tanh(), torch.nn.Linear(2**17, 1)
        ).double()
        model = torch.compile(model) if config["compiled"] else model
        register_with_sgd(self, model, lr=1e-5, criterion=torch.nn.MSELoss())
        self.register_data(train_loader=wide_loader(), validation_loader=wide_loader())


def wide_loader():
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(1024, 4, dtype=torch.float64, generator=generator)
    return DataLoader(TensorDataset(features, features.sum(dim=1, keepdim=True)), batch_size=256)


@pytest.fixture
def fill_gpu():
    """Return a function that leaves a given number of bytes of GPU memory free."""
    others = []

    def fill(room):
        torch.cuda.empty_cache()
        taken = torch.cuda.mem_get_info()[0] - room
        others.append(torch.empty(taken, dtype=torch.uint8, device="cuda"))

    yield fill
    others.clear()
    torch.cuda.empty_cache()


@on_gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("compiled", [False, True])
def test_full_gpu_splits_batches(compiled, fill_gpu):
    results = []
    for room in (None, 400 * 2**20):  # autotuning in Triton takes 60 MiB of them
        with operators.local(Wide, {"compiled": compiled}, use_gpu=True) as trainer:
            trainer.train(num_steps=1)
            if room is not None:
                fill_gpu(room)
            loss = trainer.train()["train_loss"]
            assert (trainer.num_splits > 1) == (room is not None)
            results.append((torch.tensor(loss), flat(trainer.get_model()).cpu()))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
