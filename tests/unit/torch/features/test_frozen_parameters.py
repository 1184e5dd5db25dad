"""States without the frozen parameters that setup makes again."""

import logging

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TrainingOperator
from raysgd.callbacks import EMA, CheckpointCallback
from raysgd.errors import CheckpointError
from raysgd.loop.requests import ApplyOperatorRequest, TrainRequest
from raysgd.torch import tensors
from raysgd.torch.tensors import tensor_digest
from tests.operators import local
from tests.unit.recorder import runner_with_snapshots


class Adapter(torch.nn.Module):
    """A frozen base, with tied weights, and a small layer that is trained."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.base = torch.nn.Linear(200, 200)
        self.tied = torch.nn.Linear(200, 200, bias=False)
        self.tied.weight = self.base.weight
        self.norm = torch.nn.BatchNorm1d(200)
        self.head = torch.nn.Linear(200, 1)
        for module in (self.base, self.tied, self.norm):
            module.requires_grad_(False)

    def forward(self, x):
        return self.head(self.norm(self.tied(self.base(x))))


class Tuned(TrainingOperator):
    def setup(self, config):
        model = Adapter(config.get("seed", 0))
        torch.manual_seed(1)
        data = TensorDataset(torch.randn(40, 200), torch.randn(40, 1))
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=torch.optim.Adam(model.head.parameters()),
            criterion=torch.nn.MSELoss(),
        )
        loader = DataLoader(data, batch_size=4)
        self.register_data(train_loader=loader, validation_loader=loader)


def test_small_file_loads_only_where_setup_makes_the_same(tmp_path):
    with local(Tuned) as trainer:
        trainer.train()
        expected = trainer.get_model().state_dict()
        for frozen in (True, False):
            trainer.save(tmp_path / f"{frozen}.pt", frozen=frozen)
        large, small = ((tmp_path / f"{frozen}.pt").stat().st_size for frozen in (True, False))
        assert small < large / 5
        assert "base.weight" not in trainer.state_dict(frozen=False)["models"][0]
        trainer.train()
        trainer.load(tmp_path / "False.pt")  # also into the trainer that has gone on
        torch.testing.assert_close(trainer.get_model().state_dict(), expected, rtol=0, atol=0)
        trainer.save(tmp_path / "again.pt", frozen=False)
        assert (tmp_path / "again.pt").stat().st_size < large / 5
    for name in ("False.pt", "again.pt"):
        with local(Tuned) as other:
            other.load(tmp_path / name)
            torch.testing.assert_close(other.get_model().state_dict(), expected, rtol=0, atol=0)
    with local(Tuned, {"seed": 5}) as other:
        before = other.get_model().state_dict()
        with pytest.raises(CheckpointError, match=r"'base.weight' of model 0 is not the one"):
            other.load(tmp_path / "False.pt")
        torch.testing.assert_close(other.get_model().state_dict(), before)


def test_layer_that_was_trained_before_it_was_frozen_stays(tmp_path, caplog):
    with local(Tuned) as trainer:
        trainer.train()
        trainer.apply_all_operators(
            lambda o: (o.model.head.requires_grad_(False), o.model.base.requires_grad_(True))
        )
        with caplog.at_level(logging.WARNING):
            state = trainer.state_dict(frozen=False)
    assert {"head.weight", "base.weight"} <= state["models"][0].keys()
    order = ["base.weight", "base.bias", "head.weight", "head.bias"]  # equal on all workers
    assert list(state["requires_grad"][0]) == order
    assert "head.weight of model 0 is saved, although it is frozen" in caplog.text


def test_layer_that_user_code_changed_stays():
    runner = runner_with_snapshots(4, operator_cls=Tuned)
    runner.operator._train_state.frozen_parameters.are_reproducible = True
    runner.handle(TrainRequest(call_number=0, until_step=7))
    runner.operator.model.norm.requires_grad_(True)  # it still is as setup made it
    assert "norm.weight" not in runner.acquire_snapshot()["models"][0]
    runner.operator.model.base.weight.data[0, 1] = 2  # as a step does, without a new version
    assert runner.acquire_snapshot() is None  # it may lack the change
    runner.handle(TrainRequest(call_number=0, until_step=9))
    saved = runner.acquire_snapshot()["models"][0]
    assert "base.bias" not in saved
    assert saved["base.weight"][0, 1] == 2
    change = ApplyOperatorRequest(function=lambda op: op.model.base.bias.data.add_(1))
    runner.handle(change)
    assert {"base.weight", "base.bias"} <= runner.state_dict(frozen=False)["models"][0].keys()


def test_checkpoints_and_weights_without_the_base(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    callback = CheckpointCallback(tmp_path / "checkpoints", frozen=False)
    with local(Tuned, callbacks=[callback, EMA()]) as trainer:
        trainer.train()
        trainer.validate()  # with the averages, which are also of frozen parameters
        expected = trainer.get_model().state_dict()
        trainer.save_model(tmp_path / "adapter.safetensors", frozen=False)
    names = safetensors.load_file(tmp_path / "adapter.safetensors").keys()
    assert {"head.weight", "head.bias", "norm.running_mean"} <= names
    assert not {"base.weight", "tied.weight", "base.bias", "norm.weight"} & names
    again = CheckpointCallback(tmp_path / "checkpoints", frozen=False)
    with local(Tuned, callbacks=[again]) as other:
        other.train()  # resumes
        assert other.epoch == 2
        assert again.restored_from is not None
        for name in ("base.weight", "norm.weight"):
            torch.testing.assert_close(other.get_model().state_dict()[name], expected[name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_digest_does_not_depend_on_the_device(monkeypatch, dtype):
    frozen = torch.arange(2**18 + 7).to(dtype)  # more than one chunk on a CPU, and one on a GPU
    on_cpu = tensor_digest([frozen], frozen.device)
    monkeypatch.setitem(tensors._WORDS, "cpu", tensors._WORDS["cuda"])
    assert tensor_digest([frozen], frozen.device) == on_cpu
    frozen[-1] = 0
    assert tensor_digest([frozen], frozen.device) != on_cpu
