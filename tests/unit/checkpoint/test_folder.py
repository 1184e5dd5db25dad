"""States in a folder, to which all workers write."""

import shutil

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator
from raysgd.checkpoint import read_manifest
from raysgd.errors import CheckpointError


class Divided(TrainingOperator):
    """Would be divided, if there was another worker."""

    def setup(self, config):
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
        model.tied = torch.nn.Linear(3, 3, bias=False)
        model.tied.weight = model[0].weight
        self.model, self.optimizer = self.register(
            models=model,
            optimizers=torch.optim.AdamW(model.parameters()),
            sharding=config.get("sharding", "full"),
        )
        data = TensorDataset(torch.randn(8, 3), torch.randn(8, 3))
        self.register_data(train_loader=DataLoader(data, batch_size=4, shuffle=True))

    def train_batch(self, batch, batch_info):
        features, target = batch
        loss = torch.nn.functional.mse_loss(self.model[1](self.model[0](features)), target)
        self.backward(loss)
        self.optimizer_step(self.optimizer)
        return {"train_loss": loss.detach()}


@pytest.fixture
def trainer():
    with TorchTrainer(training_operator_cls=Divided, use_local=True) as made:
        made.train(num_steps=1)
        yield made


def tensors_in(folder):
    (found,) = folder.glob("tensors-*/*.safetensors")
    return found


def same(state, expected):
    for kind in ("models", "optimizers"):
        torch.testing.assert_close(state[kind], expected[kind], rtol=0, atol=0)
    assert state["global_step"] == expected["global_step"]


def test_a_state_comes_back_from_a_folder_and_a_save_that_was_cut_off_leaves_the_one_before(
    trainer, tmp_path
):
    folder = tmp_path / "saved"
    assert trainer.save(folder, sharded=True) == str(folder)
    assert read_manifest(folder).global_step == 1
    (folder / "tensors-0123abcd").mkdir()
    expected = trainer.state_dict()
    trainer.train()
    trainer.load(folder)
    same(trainer.state_dict(), expected)
    trainer.train()
    trainer.save(folder, sharded=True)
    later = trainer.state_dict()
    assert tensors_in(folder)  # those of one state
    with TorchTrainer(
        training_operator_cls=Divided, config={"sharding": None}, use_local=True
    ) as other:
        other.load(folder)
        same(other.state_dict(), later)


def test_a_folder_that_is_damaged_is_refused_and_named(trainer, tmp_path):
    trainer.save(tmp_path, sharded=True)
    tensors = tensors_in(tmp_path)
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"safetensors is damaged"):
        trainer.load(tmp_path)
    shutil.rmtree(tensors.parent)
    with pytest.raises(CheckpointError, match="No such file"):
        trainer.load(tmp_path)
    stray = {**trainer.state_dict(), "tensors": {"file": "../../etc/passwd", "sha256": ""}}
    with pytest.raises(CheckpointError, match="the tensors of a state"):
        trainer.load_state_dict(stray)


@pytest.mark.parametrize(
    ("where", "options", "error", "match"),
    [
        ("memory://run", {}, CheckpointError, "file system that all of them have mounted"),
        ("file", {}, CheckpointError, "must be a folder"),
        ("new", {"blocking": False}, ValueError, "waits until all is written"),
    ],
)
def test_what_no_workers_could_write_to_together_is_refused(
    trainer, tmp_path, monkeypatch, where, options, error, match
):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=match):
        trainer.save(where, sharded=True, **options)


def test_where_nothing_is_divided_it_is_refused(tmp_path):
    with (
        TorchTrainer(
            training_operator_cls=Divided, config={"sharding": None}, use_local=True
        ) as trainer,
        pytest.raises(ValueError, match="Leave sharded out"),
    ):
        trainer.save(tmp_path / "new", sharded=True)
