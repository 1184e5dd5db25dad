"""Losses that are not means over samples, and unequal batches, count as in one process."""

import functools
import itertools
import logging.handlers
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    Subset,
    TensorDataset,
)

from raysgd import TrainingOperator
from raysgd.data import Dataset
from raysgd.metrics import merge_worker_metrics
from tests.conftest import assert_names
from tests.operators import register_with_sgd
from tests.unit.torch import cases

NUM_SAMPLES = 23
BATCH = 3
WEIGHTS = torch.tensor([0.5, 3.0, 1.0], dtype=torch.float64)


class Lengths(BatchSampler):
    """Yields consecutive batches of different sizes."""

    sizes = (1, 7, 2, 5, 1, 3, 4)

    def __init__(self):
        pass

    def __iter__(self):
        ends = list(itertools.accumulate(self.sizes))
        return iter([[*range(end - size, end)] for size, end in zip(self.sizes, ends, strict=True)])

    def __len__(self):
        return len(self.sizes)


class Parts(IterableDataset):
    """A stream from which each worker reads its own batches."""

    def __init__(self, batches, operator):
        self.batches, self.operator = batches, operator

    def __iter__(self):
        return iter(self.batches[self.operator.world_rank :: self.operator.world_size])


@dataclass
class Case(cases.Case):
    criterion: Any
    loader: str = "samples"
    accumulation: int = 1
    ignored: int = -100
    data_set: str = "tensors"
    """Key of DATA_SETS."""

    @property
    def operator_cls(self):
        return Trained

    def run(self, rank):
        """Train an epoch, and validate. Return parameters, metrics, and warnings."""
        runner = self.start(rank, add_dist_sampler=self.loader != "stream")
        log = logging.handlers.MemoryHandler(1000, flushLevel=100)
        logging.getLogger("raysgd").addHandler(log)
        found = cases.train_and_validate(runner)
        logging.getLogger("raysgd").removeHandler(log)
        return *found, [record.getMessage() for record in log.buffer]

    def data(self):
        generator = torch.Generator().manual_seed(2)
        features = torch.randn(NUM_SAMPLES, 4, generator=generator).double()
        if isinstance(self.criterion, torch.nn.MSELoss | functools.partial):
            return features, features.square()[:, :3].contiguous()
        target = torch.randint(0, 3, (NUM_SAMPLES,), generator=generator)
        target[torch.rand(NUM_SAMPLES, generator=generator) < 0.4] = self.ignored
        target[2:12] = self.ignored
        target[0] = 1
        return features, target

    def sizes(self):
        """Return the numbers of samples of the batches, in the order of the data."""
        if self.loader == "samples":
            step = BATCH * self.num_workers
            return [min(step, NUM_SAMPLES - i) for i in range(0, NUM_SAMPLES, step)]
        sizes = Lengths.sizes
        # An epoch of streams ends with the shortest.
        stop = len(sizes) - (self.loader == "stream")
        return [sum(sizes[i : i + self.num_workers]) for i in range(0, stop, self.num_workers)]


DATA_SETS = {
    "tensors": lambda data: data,
    "list": list,
    "subset": lambda data: Subset(Subset(data, range(len(data))), range(len(data))),
    "joined": lambda data: ConcatDataset([Subset(data, range(5)), Subset(data, range(5, 23))]),
}


def make_model(criterion):
    torch.manual_seed(3)
    layers = [torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)]
    if isinstance(criterion, torch.nn.NLLLoss):
        layers.append(torch.nn.LogSoftmax(dim=1))
    return torch.nn.Sequential(*layers).double()


class Trained(TrainingOperator):
    def setup(self, config):
        self.case = case = config["case"]
        given = {"criterion": case.criterion, "gradient_accumulation_steps": case.accumulation}
        register_with_sgd(self, make_model(case.criterion), lr=0.05, momentum=0.5, **given)
        whole = TensorDataset(*case.data())
        data, batches = DATA_SETS[case.data_set](whole), [whole[indices] for indices in Lengths()]
        loaders = {
            "samples": lambda: DataLoader(data, batch_size=BATCH),
            "batch sampler": lambda: DataLoader(data, batch_sampler=Lengths()),
            "stream": lambda: DataLoader(Parts(batches, self), batch_size=None),
            "ready batches": lambda: DataLoader(batches, batch_size=None),
            "items": lambda: Dataset(batches, batch_size=1),
        }
        loader = loaders[case.loader]()
        self.register_data(
            train_loader=loader, validation_loader=DataLoader(data, batch_size=BATCH)
        )


def expected(case):
    """Return the parameters and the validation loss of a plain loop in one process."""
    (features, target), model = case.data(), make_model(case.criterion)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    sizes, start = case.sizes(), 0
    for first in range(0, len(sizes), case.accumulation):
        stop = start + sum(sizes[first : first + case.accumulation])
        optimizer.zero_grad()
        loss = case.criterion(model(features[start:stop]), target[start:stop])
        if loss.isfinite():  # NaN is the mean over no items
            loss.backward()
            optimizer.step()
        start = stop
    with torch.no_grad():
        validated = case.criterion(model(features), target)
    is_sum = "sum" in (
        getattr(case.criterion, "reduction", ""),
        getattr(case.criterion, "keywords", {}).get("reduction"),
    )
    return [*model.parameters()], validated / NUM_SAMPLES if is_sum else validated


cross_entropy = torch.nn.CrossEntropyLoss
CRITERIA = {
    "ignores": cross_entropy(),
    "weights": cross_entropy(weight=WEIGHTS),
    "smooth": cross_entropy(weight=WEIGHTS, label_smoothing=0.1),
    "log likelihood": torch.nn.NLLLoss(weight=WEIGHTS),
    "sum of classes": cross_entropy(weight=WEIGHTS, reduction="sum"),
    "sum": torch.nn.MSELoss(reduction="sum"),
    "sum by a function": functools.partial(functional.mse_loss, reduction="sum"),
}


def check(case, results):
    parameters, val_loss = expected(case)
    for found, *_ in results:
        torch.testing.assert_close(found, parameters, atol=1e-12, rtol=0)
    trained, validated = (merge_worker_metrics([each[i] for each in results]) for i in (1, 2))
    assert validated["val_loss"] == pytest.approx(val_loss.item(), abs=1e-12)
    assert trained["num_samples"] == sum(case.sizes())
    assert not any(warnings for *_, warnings in results)


def test_uncounted_targets_are_a_warning(workers):
    results = workers(Case(CRITERIA["ignores"], data_set="list"))
    for *_, warnings in results:
        assert len(warnings) == 1
        assert_names(warnings[0], ["-100", "num_items"])


UNEQUAL = itertools.product(
    [CRITERIA["sum"], torch.nn.MSELoss()],
    ["batch sampler", "stream", "ready batches", "items"],
    [1, 2],
)


@pytest.mark.parametrize(
    "case",
    [
        *(Case(each, accumulation=number) for each in CRITERIA.values() for number in (1, 2)),
        Case(cross_entropy(ignore_index=2), ignored=2),
        Case(CRITERIA["ignores"], data_set="subset"),
        Case(CRITERIA["ignores"], data_set="joined"),
        *(Case(*each) for each in UNEQUAL),
    ],
)
def test_losses_count_what_they_weight_ignore_or_sum_and_batches_their_samples(workers, case):
    check(case, workers(case))
