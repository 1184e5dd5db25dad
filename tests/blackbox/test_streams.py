"""Each epoch of a stream trains on each sample once, whatever happens to workers."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from raysgd import ElasticConfig, TorchTrainer
from raysgd.testing import chaos
from raysgd.testing.chaos import Chaos, Fault
from tests.ledger import SlowLedger, check_ledger, ledger_of, ledger_trainer
from tests.shared import Shared

NUM_SAMPLES = 1603


class Numbers(IterableDataset):
    """Numbers, split across the loader processes."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        info = get_worker_info()
        yield from range(self.size) if info is None else range(info.id, self.size, info.num_workers)


class FromStream(SlowLedger):
    def make_loader(self, config):
        size, kind = config["num_samples"], config["kind"]
        if kind == "loader":
            return DataLoader(Numbers(size), batch_size=8, num_workers=2)
        return lambda: (yield from torch.arange(size).split(3))  # a generator function

    def validate_batch(self, batch, batch_info):
        return {"num_samples": len(batch)}


@pytest.fixture(scope="module")
def two_workers(module_cluster):
    elastic = ElasticConfig(resize_cooldown_s=0.0)
    with ledger_trainer(2, NUM_SAMPLES, elastic, FromStream, kind="loader") as trainer:
        yield Shared(trainer)


@pytest.fixture
def two(two_workers):
    return two_workers.fresh()


@pytest.mark.slow("a worker and its loader processes start twice")
def test_a_stream_is_read_once_despite_losses_and_on_another_number_of_workers(two, tmp_path):
    trainer = two.trainer
    with Chaos(trainer, [Fault(rank=0, step=5)]):
        metrics = trainer.train()
    assert two.kinds.count("lost") == 1
    assert trainer.num_workers == 2
    check_ledger(trainer, metrics)
    before = ledger_of(trainer).clone()
    trainer.train(num_steps=41)
    saved = trainer.save(tmp_path / "state.pt")
    for rank in range(2):
        chaos.kill(trainer, rank)
    trainer.train()
    assert torch.equal(ledger_of(trainer), before + 1)
    for kind in ("loader",):
        config = {**trainer.config, "kind": kind, "until_size": 1}
        with TorchTrainer(
            training_operator_cls=FromStream, config=config, use_local=True
        ) as one:
            one.load(saved)
            assert one.train()["num_samples"] == NUM_SAMPLES - 41 * 16
            assert torch.equal(ledger_of(one), before + 1)
            assert one.test(DataLoader(Numbers(37), batch_size=5))["num_samples"] == 37
    assert trainer.test(lambda config: DataLoader(Numbers(37), batch_size=5))["num_samples"] == 37
    predicted = trainer.predict(lambda config: DataLoader(Numbers(37), batch_size=5))
    assert torch.equal(predicted, before[:37] + 1)
