"""An update uses the mean over the items of all workers, losses, and micro-batches."""

import itertools
import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, TrainingOperator
from raysgd.metrics import Sums, merge_worker_metrics, ratio
from tests.conftest import HAS_FULL_SHARDING, needs_full_sharding
from tests.unit.torch import cases
from tests.unit.torch.cases import FLOAT16

MOST_WORKERS = 3
BATCH = 3
LENGTH = 2


def make_model():
    torch.manual_seed(3)
    layers = torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1), torch.nn.Flatten(-2)
    return torch.nn.Sequential(*layers).double()


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)


def errors(output, target):
    return (output - target.nan_to_num()) * ~target.isnan()


def count_items(target):
    return (~target.isnan()).sum()


def mean_loss(output, target):
    """Return the mean over the unmasked tokens, or NaN if all are masked."""
    return errors(output, target).square().sum() / count_items(target)


class OwnBatches(list):
    """A list with the attribute that says that user code selects a part."""


class Tokens(TrainingOperator):
    def setup(self, config):
        self.case = case = config["case"]
        model = make_model()
        criterion = torch.nn.MSELoss(reduction="sum") if case.kind == "sum" else mean_loss
        arguments = (
            {"sharding_args": {"wrap_classes": torch.nn.Linear}} if case.sharding == "full" else {}
        )
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=make_optimizer(model),
            criterion=criterion,
            gradient_accumulation_steps=case.accumulation,
            max_grad_norm=case.max_grad_norm,
            sharding=case.sharding,
            **arguments,
        )
        loader = train_loader = DataLoader(TensorDataset(*case.data()), batch_size=BATCH)
        if case.by_hand:
            train_loader = case.own_batches(self.world_rank)
        self.register_data(train_loader=train_loader, validation_loader=loader)


class Masked(Tokens):
    def num_items(self, batch):
        return count_items(batch[1])


class SeveralLosses(Tokens):
    def train_batch(self, batch, batch_info):
        features, target = batch
        if batch_info["batch_idx"] == self.case.skipped:
            return {}
        self.optimizer.zero_grad()  # keeps the gradients of earlier batches in the group
        output, count = self.model(features), count_items(target)
        given = {"num_items": count} if self.case.kind in ("tokens", "both") else {}
        self.backward(mean_loss(output, target), **given)
        if self.case.kind == "both":
            count, given = len(target), {"num_items": len(target)}
        for _ in range(self.case.num_losses - 1):
            loss = errors(self.model(features), target).abs().sum() / count
            self.backward(loss, **given)
        count = count_items(target)
        self.optimizer_step(self.optimizer)
        total = errors(output.detach(), target).square().sum()
        return {"train_loss": Sums(ratio, total=total, weight=count), "num_samples": len(target)}

    def validate_batch(self, batch, batch_info):
        total = errors(self.model(batch[0]), batch[1]).square().sum()
        loss = Sums(ratio, total=total, weight=count_items(batch[1]))
        return {"val_loss": loss, "num_samples": len(batch[1])}


@dataclass
class Case(cases.Case):
    """A training problem, its number of workers, and its settings."""

    targets: list[list[float]]
    """The tokens of each sample. NaN marks a masked token."""
    num_workers: int = field(default=1, kw_only=True)
    accumulation: int = 1
    num_parts: int = 1
    num_losses: int = 1
    """Losses per batch. More than 1 selects `SeveralLosses` instead of the default loop."""
    sharding: str | None = None
    max_grad_norm: float | None = None
    scaled: bool = False
    """Whether to scale the loss, as for float16."""
    shares: tuple[float, ...] | None = None
    """Relative shares of the workers."""
    num_missing: int = 0
    """Workers that the group lacks, so that batches are larger, and are split."""
    kind: str = "tokens"
    """The loss: a mean over unmasked "tokens", or a mean over "samples", or a "sum". "both" has two
    losses, the first over tokens, and the second over samples."""
    by_hand: bool = False
    """Whether user code partitions the data, so that raysgd does not know the sizes."""

    skipped: int | None = None
    """The number of the batch for which `SeveralLosses` computes no loss."""

    @property
    def full_size(self):
        return self.num_workers + self.num_missing

    @property
    def is_valid(self):
        """Whether raysgd supports this combination."""
        is_one_loss = self.num_losses == 1
        if self.kind == "both":
            return self.num_losses == 2 and self.accumulation == 1 and not self.by_hand
        if not self.by_hand:
            return is_one_loss or self.kind != "sum"
        is_plain = self.shares is None and not self.num_missing
        fits = all(stop - start >= self.num_workers for start, stop in self.steps())
        return is_plain and fits and (is_one_loss or self.kind == "tokens")

    def steps(self):
        """Return the first and the last sample of each step."""
        size = BATCH * self.full_size
        return list(itertools.pairwise([*range(0, len(self.targets), size), len(self.targets)]))

    def data(self):
        generator = torch.Generator().manual_seed(1)
        features = torch.randn(len(self.targets), LENGTH, 2, generator=generator).double()
        targets = torch.tensor(self.targets, dtype=torch.float64)
        return features, targets if self.kind in ("tokens", "both") else targets.nan_to_num()

    def own_batches(self, rank):
        """Return the batches of one worker, whose sizes differ."""
        features, targets = self.data()
        batches = OwnBatches()
        batches.num_replicas = self.num_workers
        for start, stop in self.steps():
            own = slice(start + rank, stop, self.num_workers)
            batches.append((features[own], targets[own]))
        return batches

    @property
    def operator_cls(self):
        if self.num_losses > 1:
            return SeveralLosses
        return Masked if self.kind == "tokens" else Tokens

    def run(self, rank):
        """Train for an epoch and validate; return parameters and metrics."""
        elastic = ElasticConfig(shares={"node": 1.0} if self.shares else "even")
        precision = FLOAT16 if self.scaled else {}
        runner = self.start(rank, num_workers=self.full_size, elastic=elastic, **precision)
        try:
            return cases.train_and_validate(runner, self.num_parts, self.shares)
        except RuntimeError as error:
            return str(error)

    def expected(self):
        """Return the parameters and losses of a plain PyTorch loop in one process."""
        (features, targets), model = self.data(), make_model()
        optimizer = make_optimizer(model)
        total = 0.0
        step = BATCH * self.full_size
        for start in range(0, len(targets), step * self.accumulation):
            target = targets[start : start + step * self.accumulation]
            error = errors(model(features[start : start + len(target)]), target)
            total += error.detach().square().sum()
            first, others = error.square().sum(), (self.num_losses - 1) * error.abs().sum()
            if not count_items(target) and self.kind == "tokens":
                continue
            count = 1 if self.kind == "sum" else max(1, count_items(target))
            (first / count + others / (len(target) if self.kind == "both" else count)).backward()
            if self.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        parameters = [each.detach() for each in model.parameters()]
        with torch.no_grad():
            validated = errors(model(features), targets).square().sum()
        count = len(targets) if self.kind == "sum" else count_items(targets)
        return parameters, (total / count).item(), (validated / count).item()


MASKED = math.nan
NOTHING = [MASKED] * LENGTH
"""A sample whose tokens are all masked."""
tokens = st.one_of(st.just(MASKED), st.floats(-2, 2, width=32))
samples = st.one_of(st.just(NOTHING), st.lists(tokens, min_size=LENGTH, max_size=LENGTH))


def check(case, results):
    assert not any(isinstance(each, str) for each in results), "\n".join(map(str, results))
    parameters, train_loss, val_loss = case.expected()
    found, *metrics = zip(*results, strict=True)
    torch.testing.assert_close([*found], [parameters] * len(found), atol=1e-10, rtol=0)
    trained, validated = map(merge_worker_metrics, metrics)
    assert trained["num_samples"] == validated["num_samples"] == len(case.targets)
    assert trained["train_loss"] == pytest.approx(train_loss, abs=1e-10, nan_ok=True)
    assert validated["val_loss"] == pytest.approx(val_loss, abs=1e-10, nan_ok=True)


def supported(case):
    """Return the case without what raysgd does not support together."""
    case = replace(
        case,
        scaled=case.scaled and case.sharding != "full",
        shares=case.shares and tuple(case.shares[: case.num_workers]),
    )
    return case if case.is_valid else replace(case, by_hand=False, kind="tokens")


SEVERAL = [[1.0, MASKED], NOTHING, [2, 1], [-1, MASKED], NOTHING, [0.5, 0.25], [1, 1]]
NOTHING_ON_RANK_0 = [NOTHING] * 3 + [[1, 2]] * 9


@pytest.mark.slow("three processes train many small models")
@settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.generate],
    deadline=None,
)
@given(
    st.builds(
        Case,
        targets=st.lists(samples, min_size=1, max_size=22),
        num_workers=st.integers(1, MOST_WORKERS),
        accumulation=st.integers(1, 3),
        num_parts=st.sampled_from([1, 2, 4]),
        num_losses=st.integers(1, 3),
        sharding=st.sampled_from([None, None, "optimizer", *["full"] * HAS_FULL_SHARDING]),
        max_grad_norm=st.sampled_from([None, 0.05]),
        scaled=st.booleans(),
        shares=st.none()
        | st.lists(st.floats(0.2, 1), min_size=MOST_WORKERS, max_size=MOST_WORKERS),
        num_missing=st.sampled_from([0, 0, 1, 2]),
        kind=st.sampled_from(["tokens", "tokens", "samples", "sum", "both"]),
        by_hand=st.booleans(),
    ).map(supported)
)
@example(Case(NOTHING_ON_RANK_0, num_workers=2))
@example(Case(NOTHING_ON_RANK_0, num_workers=2, num_losses=2, sharding="full"))
@example(Case(NOTHING_ON_RANK_0, num_workers=2, accumulation=2, num_losses=2, sharding="full"))
@example(Case([NOTHING] * 7, num_workers=2, accumulation=2))
@example(Case([[1, 2]] * 7 + [NOTHING] * 9, num_workers=2, sharding="optimizer"))
@example(Case([[1, 2]] * 7 + [NOTHING] * 9, num_workers=2, num_losses=2, sharding="full"))
@example(Case([[1, 2]] * 7 + [NOTHING] * 9, scaled=True, accumulation=2))
@example(Case(SEVERAL * 2, num_workers=2, num_losses=2, kind="both", num_parts=2))
@example(Case(SEVERAL * 2, num_workers=2, num_losses=2, kind="both", num_missing=1))
@example(Case(SEVERAL, num_workers=3, accumulation=2, num_parts=2, sharding="full"))
@example(Case(SEVERAL, num_workers=2, accumulation=3, num_losses=2, sharding="optimizer"))
@example(Case(SEVERAL, num_workers=2, accumulation=2, max_grad_norm=0.05))
@example(Case(SEVERAL, num_workers=3, shares=(3.0, 1.0, 2.0), num_parts=2, kind="samples"))
@example(Case(SEVERAL * 2, num_workers=2, shares=(1.5, 0.5), sharding="optimizer"))
@example(Case(SEVERAL * 2, num_workers=2, shares=(1.5, 0.5), sharding="full"))
@example(Case(SEVERAL * 2, num_workers=2, accumulation=3, num_missing=2, kind="sum"))
@example(Case(SEVERAL, num_workers=2, accumulation=2, kind="sum", sharding="full"))
@example(Case(SEVERAL, num_workers=2, accumulation=2, kind="sum", sharding="optimizer"))
@example(Case(SEVERAL, num_workers=2, accumulation=2, kind="samples", by_hand=True))
@example(Case(SEVERAL, num_workers=2, accumulation=2, num_losses=2, by_hand=True, num_parts=2))
def test_update_equals_that_of_one_process(workers, case):
    assume(HAS_FULL_SHARDING or case.sharding != "full")
    check(case, workers(case))


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("sharding", [None, pytest.param("full", marks=needs_full_sharding)])
def test_batch_without_a_loss_is_an_error_with_several_workers(workers, sharding, by_hand):
    """The number of samples with a loss would depend on the rank."""
    given = {"sharding": sharding, "by_hand": by_hand, "kind": "samples", "skipped": 1}
    for result in workers(
        Case([[1, 2]] * 17, num_workers=2, accumulation=3, num_losses=2, **given)
    ):
        assert "does not call self.backward(loss) for every batch" in str(result)
        assert "pass num_items=0" in str(result)
