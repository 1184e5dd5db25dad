"""Each epoch trains on each sample once, whatever happens to workers."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import DataLoader

from raysgd import ElasticConfig, TorchTrainer
from raysgd.testing import chaos
from raysgd.testing.chaos import Chaos, Fault
from raysgd.utils import BATCH_SIZE
from tests.conftest import SOON_S, wait_until
from tests.faulty import pids_of
from tests.ledger import Ids, Ledger, SlowLedger, check_ledger, ledger_of, ledger_trainer
from tests.shared import Shared

NUM_SAMPLES = 1500
NUM_WORKERS = 3


@pytest.fixture(scope="module")
def module_workers(module_cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("set-up")
    settings = {BATCH_SIZE: 12, "num_loader_workers": 2, "folder": str(folder)}
    elastic = ElasticConfig(resize_cooldown_s=0.0)
    with ledger_trainer(NUM_WORKERS, NUM_SAMPLES, elastic, **settings) as trainer:
        yield Shared(trainer, folder)


def test_a_run_resumes_in_mid_epoch_with_another_number_of_workers(fresh, tmp_path):
    config = {"num_samples": NUM_SAMPLES, "batch_size": 7, "num_loader_workers": 2, "until_size": 1}
    fresh.trainer.train(num_steps=50)
    many = fresh.trainer.save(tmp_path / "many.pt")
    fresh.trainer.train(num_steps=2)  # steps after the save do not count
    with TorchTrainer(training_operator_cls=SlowLedger, config=config, use_local=True) as one:
        one.train(num_steps=11)
        few = one.save(tmp_path / "few.pt")
        one.load(many)
        assert (one.epoch, one.global_step) == (1, 50)
        assert one.train()["num_samples"] == NUM_SAMPLES - 50 * 12
        assert torch.equal(ledger_of(one), torch.ones(NUM_SAMPLES))
    fresh.trainer.load(few)
    assert int(ledger_of(fresh.trainer).sum()) == 11 * 7
    metrics = fresh.trainer.train()
    check_ledger(fresh.trainer, {**metrics, "num_samples": metrics["num_samples"] + 11 * 7})


class Shuffling:
    """A sampler that shuffles with `generator`, which raysgd can seed, or a hidden generator."""

    def __init__(self, size, seeded):
        self.size = size
        if seeded:
            self.generator = torch.Generator()
        else:
            self.hidden = torch.Generator()
            self.hidden.seed()

    def __len__(self):
        return self.size

    def __iter__(self):
        generator = self.generator if hasattr(self, "generator") else self.hidden
        return iter(torch.randperm(self.size, generator=generator).tolist())


class OwnOrder(Ledger):
    """A ledger with a custom sampler."""

    def make_loader(self, config, seeded=False):
        data = Ids(config["num_samples"])
        return DataLoader(data, batch_size=8, sampler=Shuffling(len(data), seeded))

    def use_generator(self):
        self.register_data(train_loader=self.make_loader(self.config, seeded=True))


def test_a_custom_sampler_gives_all_workers_one_order_or_is_rejected(module_cluster):
    with TorchTrainer(
        training_operator_cls=OwnOrder,
        config={"num_samples": 48},
        num_workers=2,
        use_local=True,
        use_gpu=False,
    ) as trainer:
        with pytest.raises(RuntimeError, match=r"Shuffling gives the workers different orders"):
            trainer.train()
        assert ledger_of(trainer).tolist() == [0] * 48
        trainer.apply_all_operators(OwnOrder.use_generator)
        trainer.train(num_steps=1)
        trainer.train()
        trainer.train()
        assert ledger_of(trainer).tolist() == [2] * 48


@pytest.mark.slow("two workers start, one after the other")
def test_lost_workers_are_replaced_also_where_the_first_is_lost_as_a_replacement_joins(fresh):
    trainer = fresh.trainer
    pids = pids_of(trainer)

    def kill():
        wait_until(lambda: any(fresh.folder.iterdir()), timeout_s=60)
        chaos.kill(trainer, 0)

    with ThreadPoolExecutor(1) as pool, Chaos(trainer, [Fault(rank=2, step=5)]) as injected:
        killing = pool.submit(kill)
        metrics = trainer.train()
        killing.result()
    (hit,) = injected.injected
    # the processes of a DataLoader must not hide the death, which they could for twice as long
    assert fresh.events[0].time - hit.time < SOON_S
    assert fresh.kinds.count("lost") == 2
    assert {*pids_of(trainer)} & {*pids} == {pids[1]}
    assert trainer.num_workers == NUM_WORKERS
    assert trainer.config[BATCH_SIZE] == 12
    check_ledger(trainer, metrics)
