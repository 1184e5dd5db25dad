"""Each epoch of a stream trains on each sample once, whatever happens to workers."""

import importlib.util
import io
import tarfile

import pytest
import torch
from torch.utils.data import DataLoader

from raysgd import ElasticConfig, TorchTrainer
from raysgd.data import Stream, text
from raysgd.testing.chaos import Chaos, Fault
from tests.ledger import SlowLedger, check_ledger, ledger_of, ledger_trainer
from tests.operators import Streamed
from tests.shared import Shared

NUM_SAMPLES = 1603


def valid(lines):
    """Drop lines without a number."""
    return [int(line) for line in lines if line]


def write_archive(file, numbers):
    with tarfile.open(file, "w") as archive:
        for number in numbers:
            member = tarfile.TarInfo(f"{number}.cls")
            member.size = 4
            archive.addfile(member, io.BytesIO(b"%04d" % number))


def web_dataset(files):
    import webdataset as wds

    data = wds.WebDataset(files, shardshuffle=False)
    return data.decode().map(lambda sample: sample["cls"])


class FromStream(SlowLedger):
    def make_loader(self, config):
        size, kind = config["num_samples"], config["kind"]
        if kind == "plain":
            return DataLoader(Streamed(range(size)), batch_size=8)
        if kind == "generator":
            return lambda: (yield from torch.arange(size).split(8))
        if kind == "web":
            samples = web_dataset(f"{config['data']}/{{0..5}}.tar").shuffle(50, seed=0)
            return DataLoader(samples, batch_size=8, num_workers=config["num_loader_workers"])
        records = text(f"{config['data']}/*.txt", cache_dir=config["data"])
        stream = Stream(records, transform=valid, group_size=64, shuffle=100)
        return DataLoader(stream, batch_size=8, num_workers=config["num_loader_workers"])

    def validate_batch(self, batch, batch_info):
        return {"num_samples": len(batch)}

    def predict_batch(self, batch, batch_info):
        return batch


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    numbers = iter(range(NUM_SAMPLES))
    for file in range(5):
        lines = [f"{next(numbers)}\n\n" for _ in range(300)]
        (folder / f"{file}.txt").write_text("".join(lines))
    (folder / "5.txt").write_text("".join(f"{number}\n" for number in numbers))
    for file in range(6):
        write_archive(folder / f"{file}.tar", range(file, NUM_SAMPLES, 6))
    return str(folder)


@pytest.fixture(scope="module")
def module_workers(module_cluster, data):
    elastic = ElasticConfig(resize_cooldown_s=0.0)
    kind = "grouped" if importlib.util.find_spec("webdataset") is None else "web"
    settings = {"kind": kind, "data": data, "num_loader_workers": 1}
    with ledger_trainer(2, NUM_SAMPLES, elastic, FromStream, **settings) as trainer:
        yield Shared(trainer)


def one_worker(**config):
    config = {"num_samples": NUM_SAMPLES, "until_size": 1, "num_loader_workers": 0, **config}
    return TorchTrainer(training_operator_cls=FromStream, config=config, use_local=True)


@pytest.mark.slow("workers and their loader processes start several times")
def test_each_sample_is_read_once_despite_losses_and_on_another_number_of_workers(fresh, tmp_path):
    trainer = fresh.trainer
    assert "every worker reads all samples" in trainer.describe_data()["train"]
    with Chaos(trainer, [Fault(rank=0, step=5)]):
        metrics = trainer.train()
    assert fresh.kinds.count("lost") == 1
    assert trainer.num_workers == 2
    check_ledger(trainer, metrics)
    before = ledger_of(trainer).clone()
    trainer.train(num_steps=41)
    saved = trainer.save(tmp_path / "state.pt")
    config = {name: trainer.config[name] for name in ("kind", "data", "num_loader_workers")}
    with one_worker(**config) as one:
        one.load(saved)
        assert one.train()["num_samples"] == NUM_SAMPLES - 41 * 16
        assert torch.equal(ledger_of(one), before + 1)


def test_evaluation_of_a_stream_counts_each_sample_once(fresh):
    def loader(config):
        return DataLoader(Streamed(range(37)), batch_size=5)

    assert fresh.trainer.test(loader)["num_samples"] == 37
    assert fresh.trainer.predict(loader).tolist() == list(range(37))


@pytest.mark.parametrize("kind", ["plain", "generator", "grouped"])
def test_a_run_resumes_within_an_epoch_of_any_stream(kind, data, tmp_path):
    with one_worker(kind=kind, data=data) as first:
        first.train(num_steps=77)
        saved = first.save(tmp_path / "state.pt")
        first.train()
        assert torch.equal(ledger_of(first), torch.ones(NUM_SAMPLES))
    with one_worker(kind=kind, data=data) as second:
        second.train(num_steps=3)  # leaves another position
        second.load(saved)
        assert second.train()["num_samples"] == NUM_SAMPLES - 77 * 8
        assert torch.equal(ledger_of(second), torch.ones(NUM_SAMPLES))
