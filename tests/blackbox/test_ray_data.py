"""Each epoch of a Ray Data iterator trains on each batch once, whatever happens to workers."""

import pytest
import torch

from raysgd import ElasticConfig
from raysgd.testing.chaos import Chaos, Fault
from tests.ledger import SlowLedger, ledger_of, ledger_trainer

NUM_SAMPLES = 640

ray_data = pytest.importorskip("ray.data", reason="Ray Data is not installed")


class FromRayData(SlowLedger):
    def make_loader(self, config):
        if config.get("raw"):
            return config["rows"]
        return config["rows"].iter_torch_batches(
            batch_size=8, collate_fn=lambda batch: torch.tensor(batch["id"])
        )


@pytest.fixture
def rows(module_cluster, monkeypatch):
    # Without this, batches come in the order in which tasks end.
    options = ray_data.DataContext.get_current().execution_options
    monkeypatch.setattr(options, "preserve_order", True)
    return ray_data.range(NUM_SAMPLES, override_num_blocks=4).iterator()


@pytest.mark.slow("workers start several times, and so do those of Ray Data")
def test_batches_of_ray_data_are_read_once_despite_losses(rows):
    settings = {"elastic": ElasticConfig(resize_cooldown_s=0.0), "operator_cls": FromRayData}
    with ledger_trainer(2, NUM_SAMPLES, rows=rows, **settings) as trainer:
        with Chaos(trainer, [Fault(rank=1, step=5)]):
            trainer.train()
        assert [event.kind for event in trainer.events].count("lost") == 1
        assert trainer.num_workers == 2  # the new worker has joined
        trained = ledger_of(trainer)
        # If the last step has one batch, the loss, which assumes two, counts it twice.
        assert trained.min() == 1
        assert (trained > 1).sum() in (0, 8)


def test_rows_of_ray_data_are_refused_because_they_are_not_batches(rows):
    with pytest.raises(TypeError, match=r"of Ray Data has no batches.* iter_torch_batches\(batch"):
        ledger_trainer(1, rows=rows, raw=True, operator_cls=FromRayData, use_local=True)
