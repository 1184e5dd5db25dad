"""A LightningModule in an operator: steps, hooks, data, and errors."""

import json
import pickle

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, TensorDataset

from raysgd import EqualBits, TrainingOperator
from raysgd._internal.runner import WorkerContext
from raysgd.callbacks import CheckpointCallback
from raysgd.metrics import merge_worker_metrics
from raysgd.testing import run_operator
from raysgd.torch.interop.torchmetrics import MergeableTorchMetric, copy_without_sync
from raysgd.torch.options import TorchOptions, TorchSettings
from raysgd.torch.runner import build_operator
from tests.fidelity import flat
from tests.operators import local
from tests.unit.loop.test_fidelity import Workers

lightning = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")

torchmetrics = pytest.importorskip("torchmetrics")
X = torch.linspace(-1, 1, 40).reshape(-1, 1)
Y = 2 * X + 1


def loader(batch_size=8):
    return DataLoader(TensorDataset(X, Y), batch_size=batch_size)


class Line(lightning.LightningModule):
    """Records the calls of its hooks."""

    def __init__(self, config):
        super().__init__()
        torch.manual_seed(0)
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(1, 1)
        self.config, self.calls = config, []

    def __getattribute__(self, name):
        is_hook = name.startswith("on_") and not name.endswith("_checkpoint")
        if is_hook or name in ("prepare_data", "setup"):
            self.calls.append(name)
        return super().__getattribute__(name)

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self(x), y)
        self.log("where", float(self.current_epoch), prog_bar=True)
        self.log("hidden", 1.0, logger=False)
        self.log("is_first", float(self.trainer.is_global_zero))
        self.log_dict({"step": float(self.global_step), "error": loss.sqrt()})
        return {"loss": loss, "output": self(x)}

    def on_train_epoch_end(self):
        self.log("epoch_end", 1.5)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log_dict({"val_mae": (self(x) - y).abs().mean(), "at": float(self.current_epoch)})
        loss = torch.nn.functional.mse_loss(self(x), y)
        return {"loss": loss, "outputs": x}

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.config["lr"])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        given = {"scheduler": scheduler, **self.config.get("scheduler", {})}
        return {"optimizer": optimizer, "lr_scheduler": given}

    def train_dataloader(self):
        return loader()

    def val_dataloader(self):
        return loader(16)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["num_calls"] = len(self.calls) * self.trainer.is_global_zero

    def on_load_checkpoint(self, checkpoint):
        self.loaded = checkpoint["num_calls"] * self.trainer.is_global_zero


def start(module_cls=Line, config=None, frequency="epoch", **data):
    operator_cls = TrainingOperator.from_ptl(module_cls, **data)
    return local(operator_cls, {"lr": 0.1, **(config or {})}, scheduler_step_freq=frequency)


def trained_by_hand(num_epochs):
    model = Line({"lr": 0.1})
    given = model.configure_optimizers()
    optimizer, scheduler = given["optimizer"], given["lr_scheduler"]["scheduler"]
    for _ in range(num_epochs):
        for x, y in loader():
            torch.nn.functional.mse_loss(model.layer(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    return model


def test_module_trains_like_a_plain_loop(tmp_path):
    trainer = start(frequency=None)  # the interval of Lightning's schedulers is an epoch
    stats = [trainer.train() for _ in range(2)]
    expected = trained_by_hand(2)
    model = trainer.get_model()
    assert type(model) is Line
    torch.testing.assert_close([*model.parameters()], [*expected.parameters()], rtol=0, atol=0)
    assert [(s["num_samples"], s["where"]) for s in stats] == [(40, 0), (40, 1)]
    assert [s["last_step"] for s in stats] == [4, 9]
    assert [stats[0][name] for name in ("is_first", "epoch_end", "hidden")] == [1, 1.5, 1]
    assert stats[1]["train_loss"] < stats[0]["train_loss"]

    found = trainer.validate()
    errors = (expected.layer(X) - Y).abs()
    assert found["val_mae"] == pytest.approx(errors.mean().item(), rel=1e-5)
    assert found["val_loss"] == pytest.approx((errors**2).mean().item(), rel=1e-5)
    assert found["at"] == 1, "the epoch of Lightning ends after its validation"
    assert "outputs" not in found
    # the state includes the entries that the module adds
    trainer.train(num_steps=2)
    trainer.load(trainer.save(tmp_path / "line.pt"))
    assert trainer.get_local_operator().module.loaded > 0


def test_num_items_weights_the_validation_loss_of_a_module():
    class Counting(TrainingOperator.from_ptl(Line)):
        def num_items(self, batch):
            return (batch[1] > 0).sum()

    operator = run_operator(Counting, {"lr": 0.1}, scheduler_step_freq="epoch")
    batches = [(X[:20], Y[:20]), (X[20:], Y[20:])]
    operator._train_state.segment = batches  # a train_epoch validates
    result = operator.validate(iter(batches))
    assert operator.module.training
    with torch.no_grad():
        losses = [torch.nn.functional.mse_loss(operator.module(x), y) for x, y in batches]
    counts = [(y > 0).sum() for _, y in batches]
    expected = sum(n * loss for n, loss in zip(counts, losses, strict=True)) / sum(counts)
    assert result["val_loss"] == pytest.approx(expected.item(), rel=1e-5)


class Strict(Line):
    def __init__(self, lr, width=1):
        super().__init__({"lr": lr})
        self.given = {"lr": lr, "width": width}


class Named(Strict):
    def __init__(self, lr, width=1, **options):
        super().__init__(lr, width)
        self.given |= options


class Plain(lightning.LightningDataModule):
    def __init__(self, batch_size=40):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return loader(self.batch_size)


@pytest.mark.parametrize("module_cls", [Named, Strict])
def test_constructors_get_the_keys_of_the_config_by_name(module_cls, caplog):
    config = {"lr": 0.3, "width": 2, "batch_size": 20, "depth": 5}
    trainer = start(module_cls, config, datamodule=Plain)
    module = trainer.get_local_operator().module
    assert module.given == (config if module_cls is Named else {"lr": 0.3, "width": 2})
    assert trainer.train()["batch_count"] == 2
    assert ("keys of the config: 'depth'." in caplog.text) == (module_cls is Strict)


class Logging(Line):
    def training_step(self, batch, batch_idx):
        value = float(batch_idx) if batch_idx % 2 else torch.tensor(batch_idx - 5.0)
        self.log("total", value, reduce_fx="sum")
        self.log_dict({"low": value, "also_low": 1.0}, reduce_fx=torch.min)
        self.log("high", value, reduce_fx="max")
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.log("epoch_total", 2.0, reduce_fx="sum")

    def validation_step(self, batch, batch_idx):
        self.log("val_count", len(batch[0]), reduce_fx=torch.sum)


def test_reduce_fx_of_logged_values():
    trainer = start(Logging)
    stats = trainer.train()
    values = [-5, 1, -3, 3, -1]
    found = (stats["total"], stats["low"], stats["high"], stats["also_low"])
    assert found == (sum(values), min(values), max(values), 1)
    assert stats["where"] == 0  # values without reduce_fx use the mean
    assert stats["epoch_total"] == 2
    assert trainer.validate()["val_count"] == 40
    operator = trainer.get_local_operator()
    workers = [operator.train_epoch(iter([batch] * 2)) for batch in loader(20)]
    merged = merge_worker_metrics(pickle.loads(pickle.dumps(workers)))
    assert (merged["total"], merged["low"], merged["high"]) == (-8, -5, 1)


class Graphs:
    """A batch whose tensors do not count its samples, or that Lightning cannot measure."""

    def __init__(self, rows, num_graphs):
        self.rows, self.num_graphs = rows, num_graphs

    def to(self, *_):
        return self


class OfGraphs(Line):
    def training_step(self, batch, batch_idx):
        self.log("size", float(batch.num_graphs), batch_size=batch.num_graphs)
        self.log("also", torch.tensor(float(batch.num_graphs)))
        self.log_dict({"nodes": 1.0 * len(batch.rows)}, batch_size=len(batch.rows))
        return self(batch.rows).sum() * 0 + batch.num_graphs

    def on_validation_epoch_start(self):
        self.log("first", 1.0, batch_size=9)

    def validation_step(self, batch, batch_idx):
        self.log("hidden", 1.0, logger=False, batch_size=batch.num_graphs)
        self.log("val_size", float(batch.num_graphs))
        return torch.tensor(float(batch.num_graphs))


def test_a_logged_batch_size_counts_the_samples_of_a_batch():
    batches = [Graphs(X[:8], 1), Graphs(X[:2], 3)]
    trainer = start(OfGraphs, train_dataloader=batches, val_dataloader=batches)
    stats = trainer.train()
    expected = (1 * 1 + 3 * 3) / 4
    assert (stats["size"], stats["also"], stats["train_loss"]) == (expected, expected, expected)
    rest = stats["num_samples"], stats["nodes"], stats["last_size"]
    assert rest == (4, (8 * 8 + 2 * 2) / 10, 3)
    found = trainer.validate()
    assert (found["num_samples"], found["val_size"], found["val_loss"]) == (4, expected, expected)


class MeanRows(torchmetrics.Metric):
    def __init__(self):
        super().__init__()
        self.add_state("rows", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, output, target):
        self.rows += len(target)

    def compute(self):
        return self.rows


class Measuring(Line):
    def __init__(self, config):
        super().__init__(config)
        kinds = {"mae": torchmetrics.MeanAbsoluteError, "mse": torchmetrics.MeanSquaredError}
        kinds |= {"r": torchmetrics.PearsonCorrCoef, "rows": MeanRows}
        metrics = {name: kind() for name, kind in kinds.items()}
        self.metrics = torchmetrics.MetricCollection(metrics, prefix="val_")
        self.largest, self.share = torchmetrics.MaxMetric().eval(), torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        self.print("batch", batch_idx)
        self.largest(-batch[0].min() + 0 * self.layer.bias)  # has a graph
        self.log("largest", self.largest, on_step=True)
        self.share.update(self.current_epoch / self.trainer.max_epochs)
        self.log("gathered", self.all_gather(batch_idx).sum())
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        assert not self.largest.training, "Lightning keeps the modes of the constructor"
        self.log("share", self.share)
        self.log("end_largest", self.largest.compute())

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.metrics.update(self(x), y)
        self.log_dict(self.metrics)
        return self(x)

    def on_validation_epoch_end(self):
        self.log("end_mse", self.metrics["mse"].compute())


def test_a_module_logs_metrics_of_torchmetrics_and_uses_its_trainer(capsys):
    trainer = start(Measuring, {"max_epochs": 4})
    for epoch in range(2):
        trainer.train(num_steps=2)
        stats = trainer.train()
        found = trainer.validate()
        assert (stats["end_largest"], stats["share"]) == (1, epoch / 4), "those of both calls"
        assert stats["last_largest"] < stats["largest"] < stats["gathered"] == 1
        with torch.no_grad():
            errors = trainer.get_local_operator().module(X) - Y
        assert found["val_mae"] == pytest.approx(errors.abs().mean().item(), rel=1e-5)
        assert found["val_mse"] == pytest.approx(errors.square().mean().item(), rel=1e-5)
        assert (found["end_mse"], found.get("val_loss")) == (found["val_mse"], None)
        assert [found["val_r"], found["val_rows"]] == pytest.approx([1, (16 + 16 + 8) / 3])
    assert capsys.readouterr().out.count("batch 2") == 2
    operator = trainer.get_local_operator()
    with torch.no_grad():
        workers = [operator.validate(iter([batch])) for batch in loader(20)]
    merged = merge_worker_metrics(pickle.loads(pickle.dumps(workers)))
    assert merged["val_mse"] == pytest.approx(found["val_mse"], rel=1e-5)


def test_a_logged_metric_of_torchmetrics_does_not_wait_for_other_workers():
    def wait(*_, **__):
        raise AssertionError

    metric = torchmetrics.MinMaxMetric(
        torchmetrics.SumMetric(dist_sync_fn=wait, distributed_available_fn=lambda: True)
    )
    metric.update(2.0)
    assert MergeableTorchMetric(copy_without_sync(metric)).compute() == {
        "_raw": 2,
        "_min": 2,
        "_max": 2,
    }


class Planning(Line):
    def configure_optimizers(self):
        self.planned = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()

    def training_step(self, batch, batch_idx):
        self.planned += self.trainer.num_training_batches
        assert self.optimizers() is self.trainer.optimizers[0]
        assert (self.trainer.model, self.trainer.num_devices) == (self, 1)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_):
        self.planned += self.global_step


def test_a_module_plans_with_the_number_and_interval_of_its_steps():
    trainer = start(Planning, {"max_epochs": 4, "scheduler": {"interval": "step"}}, None)
    assert trainer.apply_all_operators(lambda each: each.scheduler_step_freq) == ["batch"]
    assert trainer.scheduler_step_freq is None  # that of the trainer
    trainer.train(num_steps=1)
    assert trainer.get_local_operator().module.planned == 4 * 5 + 5 + 1
    with pytest.raises(AttributeError, match=r"pass config={\"max_epochs\": ...}"):
        start(Planning)


def test_hooks_are_called_in_the_order_of_lightning():
    trainer = start(train_dataloader=loader(20), val_dataloader=loader(40))
    calls = trainer.get_local_operator().module.calls
    assert calls == ["prepare_data", "setup", "on_fit_start"]
    calls.clear()
    trainer.train(num_steps=1)
    transfer = ["on_before_batch_transfer", "on_after_batch_transfer"]
    batch = [
        *transfer,
        "on_train_batch_start",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_before_zero_grad",
        "on_train_batch_end",
    ]
    assert calls == ["on_train_start", "on_train_epoch_start", *batch]
    state = trainer.state_dict()
    calls.clear()
    layer = trainer.get_local_operator().module.layer.eval()  # as a hook of the epoch may do
    trainer.train()
    assert calls == [*batch, "on_train_epoch_end"]
    assert not layer.training
    calls.clear()
    trainer.validate()
    names = ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")
    validation = [f"on_validation_{name}" for name in names]
    assert calls == [*validation[:2], *transfer, *validation[2:]]
    # a replacement joins within an epoch
    replacement = start(train_dataloader=loader(20))
    replacement.load_state_dict(state)
    replacement.train()
    calls = replacement.get_local_operator().module.calls[3:]
    assert calls == ["on_train_start", "on_train_epoch_start", *batch, "on_train_epoch_end"]


class Probing(Line):
    """Asks whether objects have attributes, and collects its outputs."""

    def __init__(self, config):
        super().__init__(config)
        self.inner, self.outputs, self.lazy = Inner(), [], Lazy()

    def validation_step(self, batch, batch_idx):
        self.outputs.append(self.inner(self(batch[0])))
        return super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self):
        self.trainer._operator.state_dict()  # as for a snapshot
        known = [hasattr(self.trainer, name) for name in ("global_step", "callback_metrics")]
        assert [*known, getattr(self.trainer, "max_epochs", 7)] == [True, False, 7]
        assert self.optimizers(use_pl_optimizer=False) is self.optimizers()
        self.log("val_rows", float(sum(map(len, self.outputs))))


class Inner(lightning.LightningModule):
    def forward(self, x):
        self.log("val_inner", float(len(x)), reduce_fx="sum")
        return x


class Lazy:
    def __getattr__(self, name):
        raise (AttributeError if name.startswith("__") else KeyError)(name)


def test_logged_norms_see_the_unscaled_gradients_of_a_module(tmp_path):
    half = {"use_fp16": True, "amp_dtype": torch.float16, "scheduler_step_freq": "epoch"}
    trainer = local(TrainingOperator.from_ptl(Line), {"lr": 0.1}, logdir=tmp_path, **half)
    trainer.fit(1, log_every=2)
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    norms = [line["metrics"]["grad_norm"] for line in lines if line["kind"] == "step"]
    assert len(norms) == 2
    assert norms[0] < 100  # the scale is 65536


def test_fit_validates_and_resumes_a_module(tmp_path):
    operator_cls = TrainingOperator.from_ptl(Probing)
    for num_epochs in (1, 2):
        trainer = local(
            operator_cls,
            {"lr": 0.1},
            scheduler_step_freq="epoch",
            logdir=tmp_path,
            callbacks=[CheckpointCallback(monitor="val_loss")],
        )
        (metrics,) = trainer.fit(num_epochs)  # the batches that fit tries first leave no trace
        assert (metrics["epoch"], metrics["val_rows"], metrics["val_inner"]) == (num_epochs, 40, 40)
    expected = trained_by_hand(2).layer
    torch.testing.assert_close(flat(trainer.get_model().layer), flat(expected))
    assert metrics["val_mae"] == pytest.approx((expected(X) - Y).abs().mean().item(), rel=1e-5)


class Clipping(Line):
    """Clips its gradients in the hook that sees those of the whole batch."""

    def on_before_optimizer_step(self, optimizer):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


def test_hooks_of_the_update_run_once_for_a_batch_in_parts():
    found = []
    for num_workers, size in ((1, 8), (2, 4)):
        operator_cls = TrainingOperator.from_ptl(Clipping, train_dataloader=loader(size))
        config = {"lr": 0.1, "scheduler": {"interval": "step"}}
        workers = Workers(1, config, num_workers, operator_cls)
        workers.train(10)
        found.append(workers.members[0].operator)
    whole, in_parts = (operator.module for operator in found)
    with_shards = local(operator_cls, config, exact=EqualBits(2), scheduler_step_freq="batch")
    with_shards.train(num_steps=10)
    torch.testing.assert_close(flat(with_shards.get_model()), flat(whole))
    torch.testing.assert_close(flat(in_parts), flat(whole))
    assert in_parts.calls.count("on_before_backward") == 20
    batch = ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end")
    assert [in_parts.calls.count(hook) for hook in (*batch, "on_before_zero_grad")] == [10] * 4


def test_workers_average_gradients(process_group):
    operator = build_operator(
        TrainingOperator.from_ptl(Line, train_dataloader=loader()),
        {"lr": 0.1},
        TorchSettings(
            options=TorchOptions(scheduler_step_freq="manual", num_workers=2),
            context=WorkerContext(has_process_group=True),
        ),
    )
    averaged = []

    def average(group, bucket):
        averaged.append(bucket.buffer())
        return allreduce_hook(group, bucket)

    (model,) = operator._train_state.models
    model.register_comm_hook(None, average)
    operator.train_epoch(iter(loader()))
    assert len(averaged) == 5


def test_data_may_come_from_a_data_module():
    class Data(lightning.LightningDataModule):
        def setup(self, stage):
            self.size = {"fit": 10}[stage]

        def train_dataloader(self):
            return loader(self.size)

        def on_after_batch_transfer(self, batch, dataloader_idx):  # instead of the module's
            return [each[:5] for each in batch]

    ready = lightning.LightningDataModule()
    ready.train_dataloader = loader  # as from_datasets() does
    for data in (Data, Data(), ready):
        trainer = start(datamodule=data)
        assert trainer.train()["num_samples"] == (40 if data is ready else 20)
        with pytest.raises(RuntimeError, match="no validation loader"):
            trainer.validate()


# ---- errors


@pytest.mark.parametrize("given", [torch.nn.Linear, Line({"lr": 0.1}), None])
def test_other_classes_are_an_error(given):
    with pytest.raises(TypeError, match=r"must be a subclass of LightningModule .*raysgd\["):
        TrainingOperator.from_ptl(given)


Combined = lightning.utilities.CombinedLoader


def several(self):
    return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of Lightning
@pytest.mark.parametrize(
    ("methods", "config", "words"),
    [
        ({"optimizer_step": print, "on_fit_end": print}, {}, ["on_fit_end (", "optimizer_step ("]),
        ({"training_epoch_end": print}, {}, ["training_epoch_end", "on_train_epoch_end"]),
        ({"configure_optimizers": several}, {}, ["must have one optimizer", "own train_batch"]),
        ({"train_dataloader": lambda self: [loader()] * 2}, {}, ["A list of 2 loaders"]),
        ({"train_dataloader": lambda self: Combined({"a": loader()})}, {}, ["A CombinedLoader of"]),
        ({}, {"scheduler": {"interval": "step"}}, ["interval='step'", "scheduler_step_freq"]),
        ({}, {"scheduler": {"monitor": "loss"}}, ["monitor='loss'", "update_scheduler"]),
        ({}, {"scheduler": {"frequency": 2}}, ["frequency=2", "scheduler_step_freq='epoch'"]),
        ({"automatic_optimization": False, "on_fit_end": None}, {}, ["_optimization = True"]),
    ],
)
def test_unsupported_features_are_an_error(methods, config, words):
    kind = type("Own", (Line,), methods)
    operator_cls = TrainingOperator.from_ptl(kind)
    config = {"lr": 0.1, **config}
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        run_operator(operator_cls, config, scheduler_step_freq="epoch")
    assert all(word in str(caught.value) for word in words), caught.value


def test_hooks_that_never_run_cause_a_warning(caplog):
    run_operator(TrainingOperator.from_ptl(type("Own", (Line,), {"teardown": print})), {"lr": 0.1})
    assert "raysgd does not call Own.teardown." in caplog.text


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        ({"training_step": lambda self, batch: None}, "Own.training_step returned None"),
        ({"training_step": lambda self, batch: torch.ones(2)}, "The loss is float32[2]. It must"),
        ({"on_train_batch_start": lambda self, b, i: self.log("a", 1) or -1}, "start returned -1"),
        ({"training_step": lambda self, batch: self.trainer.fit_loop}, "self.trainer.fit_loop"),
        ({"training_step": lambda self, b: self.trainer.strategy.barrier()}, "trainer.barrier:"),
        ({"training_step": lambda self, b: setattr(self.trainer, "should_stop", 1)}, "should_stop"),
        ({"training_step": lambda self, batch: self.log("a", "b")}, "self.log('a', 'b'): must be"),
    ],
)
def test_unsupported_results_of_a_step_are_an_error(methods, said):
    operator = run_operator(
        TrainingOperator.from_ptl(type("Own", (Line,), methods)),
        {"lr": 0.1},
        scheduler_step_freq="epoch",
    )
    with pytest.raises((TypeError, ValueError, RuntimeError, AttributeError)) as caught:
        operator.train_epoch(iter(loader()))
    assert said in str(caught.value)
    assert (operator.module._trainer, operator._stand_in.pop_logged()) == (None, {})
