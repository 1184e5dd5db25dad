"""Updates with a bad loss or gradient are not applied, and their samples are named."""

import copy
import json
import math

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import BadSteps, TrainingOperator
from raysgd.callbacks import CheckpointCallback, EarlyStopping, TerminateOnNaN
from raysgd.data import Stream, jsonl
from raysgd.errors import BadStepsError
from raysgd.loop.state_placement import StatePlacement
from tests.operators import Streamed, local

BATCH, NUM_SAMPLES, BAD = 8, 80, 37
SAMPLES = list(range(32, 40))
"""The samples of the batch with the bad one."""


def data(kind):
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(NUM_SAMPLES, 3, dtype=torch.float64, generator=generator)
    targets = features.sum(1, keepdim=True)
    if kind == "loss":
        features[BAD] = math.nan
    elif kind == "all":
        features[:] = math.nan
    elif kind == "no target":
        targets[SAMPLES] = math.nan
    elif kind == "spike":
        targets[BAD] = 1e4
    return features, targets


def parts(normalizes=True):
    """Return a model with a buffer, an optimizer, and a scheduler."""
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(3, dtype=torch.float64) if normalizes else torch.nn.Identity()
    model = torch.nn.Sequential(norm, torch.nn.Linear(3, 1, dtype=torch.float64))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.1)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)


class Regression(TrainingOperator):
    def setup(self, config):
        kind = config.get("kind", "loss")
        model, optimizer, scheduler = parts(config.get("normalizes", True))
        self.model, self.optimizer, self.criterion, self.scheduler = self.register(
            models=model,
            optimizers=optimizer,
            criterion=config.get("criterion", torch.nn.MSELoss()),
            schedulers=scheduler,
            gradient_accumulation_steps=config.get("accumulation", 1),
        )
        self.register_data(
            train_loader=DataLoader(TensorDataset(*data(kind)), BATCH // self.world_size)
        )

    def train_batch(self, batch, batch_info):
        if "moved" in self.config:  # as sharpness-aware minimization moves the parameters
            for parameter in self.model.parameters():
                parameter.detach().add_(batch[0].sum() * 0)
        return super().train_batch(batch, batch_info)


COUNTS = {"num_items": lambda operator, _: 1 if operator.global_step < 3 else 100}


def trainer_of(config, operator=Regression, **arguments):
    usual = {"scheduler_step_freq": "batch", "bad_steps": BadSteps(spike=8.0)}
    return local(operator, config, **{**usual, **arguments})


def by_hand(kind, accumulation=1, normalizes=True):
    """Train an epoch in a plain loop that leaves out the update with the bad batch."""
    model, optimizer, scheduler = parts(normalizes)
    features, targets = data(kind)
    for start in range(0, NUM_SAMPLES, BATCH * accumulation):
        before = copy.deepcopy(model[0].state_dict())
        for first in range(start, start + BATCH * accumulation, BATCH):
            batch = slice(first, first + BATCH)
            loss = torch.nn.functional.mse_loss(model(features[batch]), targets[batch])
            (loss / accumulation).backward()
        if start <= BAD < start + BATCH * accumulation:
            model[0].load_state_dict(before)
        else:
            optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model, scheduler


@pytest.mark.parametrize(
    ("kind", "config", "arguments"),
    [
        ("loss", {}, {}),
        # the mean of no elements is NaN, and has gradients of 0
        ("no target", {"criterion": lambda o, t: (o - t)[t.isfinite()].square().mean()}, {}),
        ("spike", {}, {}),
        ("loss", {"moved": True}, {}),
        ("loss", {"accumulation": 2}, {}),
        ("spike", {"accumulation": 2}, {}),
        ("loss", {}, {"exact": "bits"}),
        ("spike", {}, {"exact": "bits", "operator": type("Counting", (Regression,), COUNTS)}),
    ],
)
def test_bad_steps_change_nothing_but_the_schedule(tmp_path, kind, config, arguments):
    with trainer_of({"kind": kind, **config}, logdir=tmp_path, **arguments) as trainer:
        metrics = trainer.train()
        model, accumulation = trainer.get_model(), config.get("accumulation", 1)
        expected, scheduler = by_hand(kind, accumulation)
        torch.testing.assert_close(model.state_dict(), expected.state_dict())
        rate = trainer.state_dict()["schedulers"][0]["_last_lr"]
        assert rate == pytest.approx(scheduler.get_last_lr())
        assert metrics["num_samples"] == NUM_SAMPLES - BATCH * accumulation
        assert trainer.global_step == NUM_SAMPLES // BATCH
        (record,) = trainer.bad_steps
        assert record["samples"] == list(range(32, 32 + BATCH * accumulation))
        assert (record["epoch"], record["step"]) == (1, 4 + accumulation)
        assert kind == "spike" or record["value"] == "nan"
    lines = (tmp_path / "bad_steps.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [record]


def test_gradient_that_is_not_finite_is_a_bad_step():
    class Infinite(Regression):
        def backward(self, loss, num_items):
            super().backward(loss, num_items)
            if self.global_step == 4:
                self.model[1].weight.grad.mul_(math.inf)

    with trainer_of({"kind": "none"}, operator=Infinite) as trainer:
        trainer.train()
        assert [b["reason"] for b in trainer.bad_steps] == ["the gradient is not finite"]
        expected = by_hand("loss")[0].state_dict()
        torch.testing.assert_close(trainer.get_model().state_dict(), expected)


@pytest.mark.parametrize("bad", [True, False])
def test_overflow_with_a_finite_loss_is_left_to_the_scaler(bad):
    class Scaled(Regression):
        def train_batch(self, batch, batch_info):
            if self.global_step == 0 and not bad:  # its gradients overflow when they are scaled
                batch = [each * 1000 for each in batch]
            self.model.float()
            return super().train_batch([each.float() for each in batch], batch_info)

    config = {"kind": "loss" if bad else "none"}
    half = {"use_fp16": True, "amp_dtype": torch.float16, "scheduler_step_freq": "epoch"}
    with trainer_of(config, operator=Scaled, bad_steps=BadSteps(), **half) as trainer:
        trainer.train()
        assert [each["samples"] for each in trainer.bad_steps] == [SAMPLES] * bad


def test_too_many_bad_steps_are_an_error_without_the_last_one(tmp_path):
    saving = CheckpointCallback(tmp_path, every=100)
    with trainer_of({}, bad_steps=BadSteps(max_skipped=0), callbacks=[saving]) as trainer:
        with pytest.raises(BadStepsError, match="step 5, the loss is not finite") as caught:
            trainer.train()
        assert caught.value.steps[0]["samples"] == SAMPLES
        assert trainer.global_step == 4
        assert all(v.isfinite().all() for v in trainer.get_model().state_dict().values())
        assert [file.name for file in tmp_path.glob("*.ckpt")] == [
            "0001-epoch-00001-step-00000004.ckpt"
        ]
        with pytest.raises(BadStepsError):  # the same step, as long as nothing changes
            trainer.train()


def test_resumed_run_decides_the_same(tmp_path):
    states = []
    for split in (False, True):
        with trainer_of({"kind": "spike"}) as trainer:
            trainer.train(num_steps=4)
            trainer.save(tmp_path / "state.pt")
        with trainer_of({"kind": "spike"}) as other:
            other.load(tmp_path / "state.pt")
            for num_steps in (1, 3, 2) if split else (6,):
                other.train(num_steps=num_steps)
            states.append((other.bad_steps, other.state_dict()["bad_steps"]))
    assert states[0] == states[1]
    assert [each["step"] for each in states[0][0]] == [5]
    assert len(states[0][1]["losses"]) == 9
    with trainer_of({}) as last:
        last.load_state_dict({**last.state_dict(), "bad_steps": states[0][1]})
        assert last.bad_steps == states[0][0]


def test_samples_of_a_stream_are_files_and_records(tmp_path):
    for name in "ab":
        rows = [{"x": math.nan if (name, n) == ("b", 3) else n / 10} for n in range(10)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    class OfStream(Regression):
        def setup(self, config):
            super().setup(config)
            stream = Stream(
                jsonl(str(tmp_path / "[ab]"), cache_dir=tmp_path / "cache"),
                transform=lambda row: (torch.full((3,), row["x"]).double(), torch.ones(1).double()),
                shuffle=8,
            )
            self.register_data(train_loader=DataLoader(stream, batch_size=5))

    arguments = {"bad_steps": BadSteps(), "scheduler_step_freq": "epoch"}
    with trainer_of({"kind": "none"}, operator=OfStream, **arguments) as trainer:
        trainer.train()
        (record,) = trainer.bad_steps
    assert [str(tmp_path / "b"), 3] in record["samples"]
    assert len(record["samples"]) == 5


@pytest.mark.parametrize(
    ("samples", "options"),
    [
        (Streamed(list(zip(*data("loss"), strict=True))), {}),  # positions of another stream
        (TensorDataset(*data("loss")), {"sampler": np.arange(NUM_SAMPLES)}),
    ],
)
def test_samples_of_other_data_are_integers(samples, options):
    class Other(Regression):
        def setup(self, config):
            super().setup(config)
            self.register_data(train_loader=DataLoader(samples, BATCH, **options))

    with trainer_of({}, operator=Other) as trainer:
        trainer.train()
        assert [each["samples"] for each in trainer.bad_steps] == [SAMPLES]


def test_sparse_gradients_have_a_norm(tmp_path):
    class Sparse(TrainingOperator):
        def setup(self, config):
            model = torch.nn.Embedding(NUM_SAMPLES, 1, sparse=True)
            optimizer = torch.optim.SparseAdam(model.parameters())
            self.model, self.optimizer = self.register(models=model, optimizers=optimizer)
            self.register_data(train_loader=DataLoader(range(NUM_SAMPLES), BATCH))

        def train_batch(self, batch, batch_info):
            loss = (self.model(batch) * batch.where(batch != BAD, math.nan)).mean()
            self.backward(loss)
            self.optimizer_step(self.optimizer)
            return {"train_loss": loss.item(), "num_samples": len(batch)}

    with local(Sparse, {}, bad_steps=BadSteps(), logdir=tmp_path) as trainer:
        trainer.fit(1, validate_every=None, log_every=1, verbose=False)
        assert [each["samples"] for each in trainer.bad_steps] == [SAMPLES]
    assert '"grad_norm": ' in (tmp_path / "metrics.jsonl").read_text()


def test_losses_below_zero_are_no_spikes():
    config = {"kind": "none", "criterion": lambda output, _: -output.exp().mean()}
    with trainer_of(config) as trainer:
        trainer.train()
        assert trainer.bad_steps == []


def test_one_warning_has_all_bad_steps_before_an_error(caplog, tmp_path):
    class Fails(Regression):
        def train_batch(self, batch, batch_info):
            if self.global_step == 6:
                raise KeyError("x")
            factor = math.nan if self.global_step in (2, 4) else 1.0
            return super().train_batch([each * factor for each in batch], batch_info)

    with trainer_of({"kind": "none"}, operator=Fails, logdir=tmp_path) as trainer:
        with pytest.raises(KeyError):
            trainer.fit(1, validate_every=None, log_every=1, verbose=False)
        assert [each["step"] for each in trainer.bad_steps] == [3, 5]
    warnings = [each.message for each in caplog.records if "not applied" in each.message]
    assert ["applied: 2. The newest is step 5" in each for each in warnings] == [True]
    assert len((tmp_path / "bad_steps.jsonl").read_text().splitlines()) == 2
    assert (tmp_path / "metrics.jsonl").read_text().count('"grad_norm"') == 4  # of applied steps


def test_epoch_of_bad_steps_has_a_loss_that_is_nan(caplog):
    callbacks = [EarlyStopping("train_loss", patience=2), TerminateOnNaN()]
    with trainer_of({"kind": "all"}, callbacks=callbacks, scheduler_step_freq="manual") as trainer:
        history = trainer.fit(3, validate_every=None, verbose=False)
        of_own_batches = trainer.get_local_operator().train_epoch([data("all")])
    with trainer_of({}) as trainer:
        trainer.get_local_operator().train_batch(data("none"), {})  # before any update
        assert math.isfinite(trainer.train(num_steps=5)["last_train_loss"])  # of the fourth step
    assert of_own_batches["num_samples"] == NUM_SAMPLES  # which no record of bad steps has
    assert [math.isnan(each["train_loss"]) for each in history] == [True, True]
    assert "may be lost" not in caplog.text


def test_several_optimizers_and_several_steps_of_shards_are_refused(monkeypatch):
    class Two(TrainingOperator):
        def setup(self, config):
            model = torch.nn.Linear(3, 1)
            optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
            self.register(models=model, optimizers=optimizers)

    with pytest.raises(ValueError, match="needs one optimizer, but register"):
        trainer_of({}, operator=Two)
    with pytest.raises(TypeError, match="must be None or a raysgd"):
        trainer_of({}, bad_steps=10)
    monkeypatch.setattr(StatePlacement, "is_unsharded", lambda *_: False)
    with trainer_of({}) as trainer:
        step = (operator := trainer.get_local_operator()).optimizer_step
        operator.optimizer_step = lambda each: step(each) and step(each)
        with pytest.raises(RuntimeError, match="one step"):
            trainer.train()
