"""States in a folder, to which all workers write."""

import math
import shutil

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator
from raysgd.callbacks import CheckpointCallback
from raysgd.checkpoint import CheckpointStore, read_file, read_manifest, write_file
from raysgd.checkpoint.sharded import UnsharedFolderError
from raysgd.errors import CallbackError, CheckpointError
from raysgd.torch.runner import TorchRunner
from raysgd.torch.trainer_state import TorchTrainerState


class Divided(TrainingOperator):
    """Would be divided, if there was another worker."""

    def setup(self, config):
        torch.manual_seed(0)
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
def make():
    """A factory of trainers whose only worker is this process."""
    made = []

    def make(**config):
        made.append(TorchTrainer(training_operator_cls=Divided, config=config, use_local=True))
        return made[-1]

    yield make
    for trainer in made:
        trainer.shutdown()


@pytest.fixture
def trainer(make):
    trainer = make()
    trainer.train(num_steps=1)
    return trainer


def tensors_in(folder):
    (found,) = folder.glob("tensors-*/*.safetensors")
    return found


def same(state, expected):
    for kind in ("models", "optimizers"):
        torch.testing.assert_close(state[kind], expected[kind], rtol=0, atol=0)
    assert state["global_step"] == expected["global_step"]


def test_a_state_comes_back_from_a_folder_and_a_save_that_was_cut_off_leaves_the_one_before(
    trainer, make, tmp_path
):
    folder = tmp_path / "saved"
    assert trainer.save(folder, sharded=True) == str(folder)
    assert read_manifest(folder).global_step == 1
    (folder / "tensors-0123abcd").mkdir()
    (folder / ".saving-0123abcd-tensors").mkdir()
    expected = trainer.state_dict()
    trainer.train()
    trainer.load(folder)
    same(trainer.state_dict(), expected)
    trainer.train()
    trainer.save(folder, sharded=True)
    later = trainer.state_dict()
    assert tensors_in(folder)  # those of one state
    assert len(names_in(folder)) == 2
    other = make(sharding=None)
    other.load(folder)
    same(other.state_dict(), later)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def name_at(step, number):
    return f"{number:04d}-epoch-{-(-step // 2):05d}-step-{step:08d}"


def saving(folder, **arguments):
    return CheckpointCallback(folder, **{"sharded": True, "keep": 2, **arguments})


def test_run_saves_folders_keeps_the_best_and_resumes_from_the_newest(make, tmp_path):
    trainer = make()
    trainer.fit(3, callbacks=[saving(tmp_path, keep=1, monitor="train_loss", mode="max")])
    assert names_in(tmp_path) == [name_at(4, 2), name_at(6, 3)]
    expected = trainer.state_dict()
    assert trainer.load_best() == str(tmp_path / name_at(4, 2))
    assert trainer.global_step == 4
    again = make()
    resumed = saving(tmp_path)
    again.fit(3, callbacks=[resumed])
    assert resumed.restored_from == str(tmp_path / name_at(6, 3))
    same(again.state_dict(), expected)
    # files and folders go together, also of one step
    for sharded, step in ((False, 8), (True, 8), (True, 10)):
        trainer = make()
        trainer.fit(step // 2, callbacks=[saving(tmp_path, sharded=sharded)])
        trainer.shutdown()
    assert names_in(tmp_path) == [name_at(8, 4) + ".ckpt", name_at(10, 5)]


def test_incomplete_folders_are_no_checkpoints_and_are_removed(make, tmp_path, monkeypatch, caplog):
    trainer = make()
    trainer.fit(1, callbacks=[saving(tmp_path, keep=1)])
    with monkeypatch.context() as patch:  # killed as it removes the one before
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        trainer.fit(2, callbacks=[saving(tmp_path, keep=1)])
    assert name_at(2, 1) in names_in(tmp_path)
    (tmp_path / ".saving-0123abcd-tensors").mkdir()
    assert CheckpointStore(tmp_path, job="Divided").restore().path == str(tmp_path / name_at(4, 2))

    def fail(*_):
        raise OSError("full")

    with monkeypatch.context() as patch:
        patch.setattr("raysgd.checkpoint.store.write_folder", fail)
        with pytest.raises(CallbackError):
            trainer.fit(3, callbacks=[saving(tmp_path, keep=1)])
    assert len(names_in(tmp_path)) == 4  # the two, and what was killed twice
    trainer.fit(4, callbacks=[saving(tmp_path, keep=1)])
    assert names_in(tmp_path) == [name_at(8, 3)]


def test_an_exception_saves_a_folder_unless_there_is_nan_in_it(make, tmp_path, caplog):
    for value, found in ((1.0, [name_at(1, 1)]), (math.nan, [])):
        folder = tmp_path / str(value)
        folder.mkdir()

        def fail(operator, value=value):
            operator.model[0].bias.data[0] = value
            operator.train_batch = None

        trainer = make()
        trainer.train(num_steps=1)
        trainer.apply_all_operators(fail)
        with pytest.raises(TypeError):
            trainer.fit(2, callbacks=[saving(folder, on_exception=True)])
        assert names_in(folder) == found
    assert "NaN" in caplog.text


@pytest.fixture
def unshared(monkeypatch):
    """Whether the workers have another folder each, as on several nodes."""

    def refuse(*_, **__):
        raise UnsharedFolderError("Some have another.")

    monkeypatch.setattr(TorchTrainerState, "is_fully_sharded", True)
    monkeypatch.setattr(TorchRunner, "save_tensors", refuse)
    monkeypatch.setattr(TorchRunner, "save_weights", refuse)


def test_driver_writes_the_state_if_workers_share_no_folder(trainer, tmp_path, unshared, caplog):
    trainer.fit(2, callbacks=[saving(tmp_path, sharded=None)])
    assert names_in(tmp_path) == [name_at(2, 1) + ".ckpt", name_at(4, 2) + ".ckpt"]
    assert caplog.text.count("The driver gathers and saves the state") == 1
    trainer.save_model(tmp_path / "model.safetensors")
    assert "The driver writes the whole models" in caplog.text
    with pytest.raises(CallbackError, match="Some have another"):
        trainer.fit(3, callbacks=[saving(tmp_path)])
    assert len(names_in(tmp_path)) == 3


def test_a_state_that_was_read_from_a_folder_is_in_no_other_file(trainer, tmp_path):
    trainer.save(tmp_path / "saved", sharded=True)
    state = read_file(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="with a trainer, and save the trainer"):
        write_file(state, tmp_path / "other.ckpt")


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
        ("memory://run", {}, CheckpointError, "a file system that all workers have mounted"),
        ("file", {}, CheckpointError, "must be a folder"),
        ("new", {"blocking": False}, ValueError, "waits until all workers"),
    ],
)
def test_sharded_save_needs_a_shared_folder(
    trainer, tmp_path, monkeypatch, where, options, error, match
):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=match):
        trainer.save(where, sharded=True, **options)


def test_sharded_save_needs_sharded_models(make, tmp_path):
    trainer = make(sharding=None)
    with pytest.raises(ValueError, match="Leave out sharded"):
        trainer.save(tmp_path / "new", sharded=True)
    assert names_in(tmp_path / "new") == []
    with pytest.raises(CallbackError, match="Leave out sharded"):
        trainer.fit(1, callbacks=[saving(tmp_path)])
    assert trainer.global_step == 0
