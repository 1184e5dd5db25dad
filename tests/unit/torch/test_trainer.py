"""TorchTrainer with one worker in this process.

Tests of invalid arguments are in tests/contracts/test_wrong_inputs.py.
"""

import pytest
import torch
from torch.utils.data import DataLoader

from raysgd.tf.options import KerasOptions
from raysgd.torch.options import TorchOptions
from tests.operators import Adversaries, Classifier, local, make_data


def test_an_old_pytorch_is_an_error(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.8.1+cpu")
    with pytest.raises(ImportError, match=r"needs torch 2\.9 or newer, but .* has 2\.8\.1"):
        local()


@pytest.mark.parametrize("options_cls", [TorchOptions, KerasOptions])
def test_several_workers_with_use_local_train_on_cpus(options_cls, caplog, monkeypatch):
    monkeypatch.setattr("raysgd.loop.options._gpus_in_cluster", lambda: 2)
    two = {"num_workers": 2, "use_local": True, "use_gpu": "auto"}
    decided = options_cls(**two).resolve()
    assert (decided.use_gpu, decided.backend) == (False, "gloo")
    assert "Training on CPUs, although the cluster has GPUs" in caplog.text
    with pytest.raises(ValueError, match="cannot assign a GPU"):
        options_cls(**two, resources_per_worker={"GPU": 0.5}).resolve()


# ---- models


def test_get_model_returns_a_copy(make_trainer):
    trainer = make_trainer()
    trainer.train()
    model = trainer.get_model()
    mine = trainer.get_local_operator().model
    assert type(model) is type(mine)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), mine.parameters(), strict=True)
    )
    with torch.no_grad():
        model[0].weight.zero_()
    assert trainer.get_model(to_cpu=True)[0].weight.abs().sum() > 0
    several = make_trainer(Adversaries, {"batch_size": 5}).get_model()
    assert [model.in_features for model in several] == [2, 3]


class LastOfOne(Classifier):
    """Batch normalization with a last batch of one sample, unless `drop_last` is set."""

    def setup(self, config):
        super().setup({**config, "batch_norm": True})
        data = make_data(config["batch_size"] + 1)
        loader = DataLoader(data, config["batch_size"], drop_last=config["drop_last"])
        self.register_data(train_loader=loader)

    def train_epoch(self, iterator, info):
        for batch in iterator:
            self.train_batch(batch, {})
        return {}


def test_error_in_a_step_of_one_sample_names_drop_last(make_trainer, tmp_path):
    failing = make_trainer(LastOfOne, {"drop_last": False})
    with pytest.raises(ValueError, match=r"more than 1 value per channel(.|\n)*drop_last=True"):
        failing.train()
    failing.save(tmp_path / "before the step")
    trainer = make_trainer(LastOfOne, {"drop_last": True})
    trainer.load(tmp_path / "before the step")
    assert trainer.state_dict()["global_step"] == 1
    trainer.train()
    assert trainer.state_dict()["global_step"] == 2
