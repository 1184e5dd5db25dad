"""Results equal those of one plain PyTorch process, whatever the number of workers."""

import sys

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from raysgd import TorchTrainer, TrainingOperator
from raysgd.utils import BATCH_SIZE
from tests.operators import NUM_SAMPLES, Classifier, make_data, make_model, parameters, replica_hash


def plain_validation(model, batch_size):
    """Validate as a hand-written loop in one process does."""
    criterion, loss, correct = torch.nn.CrossEntropyLoss(reduction="sum"), 0.0, 0
    model.eval()
    with torch.no_grad():
        for features, target in DataLoader(make_data(), batch_size=batch_size):
            output = model(features)
            loss += criterion(output, target).item()
            correct += int((output.argmax(dim=1) == target).sum())
    return {
        "num_samples": NUM_SAMPLES,
        "val_loss": loss / NUM_SAMPLES,
        "val_accuracy": correct / NUM_SAMPLES,
    }


def plain_training(num_steps, batch_size, batch_norm=False):
    """Train as a hand-written loop in one process does; return the model."""
    model = make_model(batch_norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = torch.nn.CrossEntropyLoss()
    batches = iter(DataLoader(make_data(), batch_size=batch_size))
    for _ in range(num_steps):
        features, target = next(batches)
        optimizer.zero_grad()
        criterion(model(features), target).backward()
        optimizer.step()
    return model


def num_small_reductions(operator):
    """Return how many reductions this worker's mesh has begun."""
    return torch.distributed.group.WORLD._mesh._num_started


class Compiling(Classifier):
    """Compiles its model, once it has trained some steps without."""

    def train_batch(self, batch, batch_info):
        features, target = batch
        if self.global_step == 2:
            self.loaded = is_dynamo_loaded()
            self.model = torch.compile(self.model, backend="eager")
        loss = self.criterion(self.model(features), target)
        self.backward(loss, num_samples=len(target))
        self.optimizer_step(self.optimizer)
        return {"train_loss": loss.detach(), "num_samples": len(target)}


def is_dynamo_loaded():
    return "torch._dynamo.eval_frame" in sys.modules


def test_models_can_be_compiled_and_nothing_is_loaded_for_it_before(ray_cluster):
    config = {"shuffle": False, "batch_size": 16, "momentum": 0.9}
    with TorchTrainer(training_operator_cls=Compiling, config=config, num_workers=2) as trainer:
        trainer.train(num_steps=10)
        assert trainer.apply_all_operators(lambda op: op.loaded) == [False, False]
        assert trainer.apply_all_workers(is_dynamo_loaded) == [True, True]
        found = trainer.apply_all_operators(parameters)
    expected = torch.cat([p.reshape(-1) for p in plain_training(10, 32).parameters()]).detach()
    for each in found:
        assert torch.allclose(each, expected, atol=1e-6, rtol=0)


class Whole(Classifier):
    """Registers lists, which each worker reads as a whole, and may measure like a beginner."""

    def setup(self, config):
        super().setup(config)
        data = make_data(64)
        loader = torch.utils.data.DataLoader(data, batch_size=32)
        self.register_data(train_loader=list(loader), validation_loader=list(loader))

    def validate(self, val_iterator, info=None):
        metrics = super().validate(val_iterator, info)
        return {"val_loss": metrics["val_loss"] + self.world_rank} if info else metrics


def test_what_is_most_likely_wrong_is_pointed_out_once(ray_cluster, caplog):
    with TorchTrainer(training_operator_cls=Whole, num_workers=2) as trainer:
        for _ in range(2):
            trainer.train()
            trainer.validate(info={"own": True})
    assert caplog.text.count("All 2 workers measured the same in train()") == 1
    assert caplog.text.count("no 'num_samples'") == 1


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("loader_workers", [0, 1])
def test_validation_equals_a_single_process(ray_cluster, num_workers, loader_workers):
    config = {"batch_size": 28, "loader_workers": loader_workers}
    with TorchTrainer(
        training_operator_cls=Classifier, config=config, num_workers=num_workers
    ) as trainer:
        metrics = trainer.validate()
        expected = plain_validation(make_model(), batch_size=28)
        assert {key: metrics[key] for key in expected} == pytest.approx(expected, abs=1e-6)
        trainer.train()
        metrics = trainer.validate()
        expected = plain_validation(trainer.get_model(), batch_size=28)
        assert {key: metrics[key] for key in expected} == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_two_workers_take_the_steps_of_one_process_with_twice_the_batch(
    ray_cluster, loader_workers
):
    config = {
        "batch_size": 16,
        "shuffle": False,
        "momentum": 0.9,
        "loader_workers": loader_workers,
    }
    with TorchTrainer(training_operator_cls=Classifier, config=config, num_workers=2) as trainer:
        trainer.train(num_steps=1)
        trainer.train(num_steps=9)
        found = trainer.apply_all_operators(parameters)
        reduced = trainer.apply_all_operators(num_small_reductions)
    assert min(reduced) >= 10  # gradients as small as these do not go by gloo
    expected = torch.cat([p.reshape(-1) for p in plain_training(10, 32).parameters()]).detach()
    assert torch.equal(found[0], found[1])
    assert torch.allclose(found[0], expected, atol=1e-6, rtol=0)


def test_batch_norm_replicas_are_identical_and_validate_exactly(ray_cluster):
    config = {"batch_norm": True, "momentum": 0.9, "batch_size": 31}
    with TorchTrainer(training_operator_cls=Classifier, config=config, num_workers=3) as trainer:
        trainer.train(num_steps=4)
        assert len(set(trainer.apply_all_operators(replica_hash))) == 1
        metrics = trainer.validate()
        expected = plain_validation(trainer.get_model(), batch_size=31)
        assert {key: metrics[key] for key in expected} == pytest.approx(expected, abs=1e-6)
        assert len(set(trainer.apply_all_operators(replica_hash))) == 1


def test_num_steps_goes_on_where_the_last_call_stopped(ray_cluster):
    with TorchTrainer(
        training_operator_cls=Classifier, config={"batch_size": 100}, num_workers=2
    ) as trainer:
        first = trainer.train(num_steps=2)  # an epoch is 6 steps, the last one of 3 samples
        assert (first["epoch"], first["num_samples"], first["batch_count"]) == (1, 400, 2)
        rest = trainer.train()
        assert (rest["epoch"], rest["num_samples"], rest["batch_count"]) == (1, 603, 4)
        long = trainer.train(num_steps=8)
        assert (long["epoch"], long["num_samples"], long["batch_count"]) == (3, 1403, 8)
        assert (trainer.epoch, trainer.global_step) == (3, 14)
        half = trainer.validate(num_steps=3)
        other = trainer.validate(num_steps=3)
        assert half["num_samples"] + other["num_samples"] == NUM_SAMPLES


class Centers(torch.nn.Module):
    """A loss that learns: the distance to a center of each class."""

    def __init__(self):
        super().__init__()
        self.centers = torch.nn.Parameter(torch.rand(2, 2))  # another on each worker
        self.register_buffer("scale", torch.ones(2))

    def forward(self, output, target):
        return ((output - self.centers[target]) * self.scale).square().mean()


class Centered(Classifier):
    def register(self, *, models, optimizers, criterion):
        criterion = Centers()
        optimizers.add_param_group({"params": criterion.parameters()})
        return super().register(models=models, optimizers=optimizers, criterion=criterion)

    def setup(self, config):
        torch.seed()
        super().setup(config)

    def train_batch(self, batch, batch_info):
        features, target = batch
        output = self.model(features)
        loss = self.criterion(output, target) + self.criterion(output / 2, target)
        self.backward(loss)
        self.optimizer_step(self.optimizer)
        return {"train_loss": loss.detach(), "num_samples": len(target)}


def centers_of(operator):
    return operator.criterion.centers.tolist()


def test_a_criterion_that_learns_is_the_same_on_all_workers_and_is_saved(ray_cluster, tmp_path):
    with TorchTrainer(training_operator_cls=Centered, num_workers=2) as trainer:
        trainer.train()
        trainer.validate()
        assert len(set(trainer.apply_all_operators(replica_hash))) == 1
        assert isinstance(trainer.get_model(), torch.nn.Sequential)
        trainer.save(tmp_path / "state.pt")
        (held, same) = trainer.apply_all_operators(centers_of)
        assert held == same
    with TorchTrainer(training_operator_cls=Centered, use_local=True) as trainer:
        trainer.load(tmp_path / "state.pt")
        assert centers_of(trainer.get_local_operator()) == held


class Ledger(TrainingOperator):
    """One parameter a sample, which training on that sample once moves from 0 to 1."""

    def setup(self, config):
        model = Weights(config["num_samples"])
        self.model, self.optimizer = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=1.0)
        )
        batch_size = config.get(BATCH_SIZE, config.get("batch_size"))
        data = Ids(config["num_samples"])
        self.register_data(
            train_loader=DataLoader(
                data, batch_size=batch_size, shuffle=True, num_workers=config["loader_workers"]
            )
        )

    def train_batch(self, batch, batch_info):
        loss = -self.model(batch).sum() * self.world_size
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"num_samples": len(batch)}


class Weights(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(size))

    def forward(self, ids):
        return self.weights[ids]


class Ids(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index


class Shuffling:
    """A sampler that keeps its random numbers to itself, or to a generator that is known."""

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
    """A Ledger with a sampler of its own."""

    def setup(self, config):
        super().setup(config)
        sampler = Shuffling(config["num_samples"], config["seeded"])
        data = Ids(config["num_samples"])
        self.register_data(train_loader=DataLoader(data, batch_size=8, sampler=sampler))


@pytest.mark.parametrize("seeded", [True, False])
def test_a_sampler_of_ones_own_gives_all_workers_one_order_or_is_refused(ray_cluster, seeded):
    config = {"num_samples": 48, "batch_size": 8, "loader_workers": 0, "seeded": seeded}
    with TorchTrainer(training_operator_cls=OwnOrder, config=config, num_workers=2) as trainer:
        if seeded:
            trainer.train(num_steps=1)
            trainer.train()
            trainer.train()
            assert ledger_of(trainer).tolist() == [2] * 48
        else:
            with pytest.raises(RuntimeError, match=r"orders of epoch 0 differ, as Shuffling"):
                trainer.train()
            assert ledger_of(trainer).tolist() == [0] * 48


def ledger_of(trainer):
    return trainer.get_model().weights.detach()


@pytest.mark.parametrize(
    ("num_workers", "loader_workers", "batch"),
    [(2, 0, {"batch_size": 8}), (3, 2, {"batch_size": 8}), (4, 0, {BATCH_SIZE: 32})],
)
def test_an_epoch_trains_each_sample_once(ray_cluster, num_workers, loader_workers, batch):
    config = {"num_samples": 205, "loader_workers": loader_workers, **batch}
    with TorchTrainer(
        training_operator_cls=Ledger, config=config, num_workers=num_workers
    ) as trainer:
        trainer.train(num_steps=3)
        metrics = trainer.train()
        ledger = ledger_of(trainer)
        # the last step may repeat some samples, to give every worker one
        repeats = int((ledger == 2).sum())
        assert int((ledger == 1).sum()) == 205 - repeats
        assert repeats < num_workers
        assert metrics["epoch"] == 1
