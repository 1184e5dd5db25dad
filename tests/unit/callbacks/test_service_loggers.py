"""TensorBoard, MLflow and Weights & Biases, read back with their own readers."""

import json
import struct
import sys
from types import SimpleNamespace

import pytest

from raysgd.callbacks import CheckpointCallback, MLflowLogger, TensorBoardLogger, WandbLogger
from tests.unit.callbacks.spy import Scripted
from tests.unit.recorder import Recorder, failure

CONFIG = {"lr": 0.5, "name": "tiny", "odd": object()}


def mlflow_client(folder):
    from mlflow import MlflowClient  # takes two seconds

    return MlflowClient(str(folder))


@pytest.mark.parametrize(
    ("callback", "package"),
    [(TensorBoardLogger, "tensorboard"), (MLflowLogger, "mlflow"), (WandbLogger, "wandb")],
)
def test_a_missing_package_is_named_with_its_extra(callback, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf'{callback.__name__}.*"raysgd\[callbacks\]"'):
        callback()


# ---- TensorBoard


def scalar(accumulator, tag):
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def texts(accumulator, tag):
    found = accumulator.Tensors(f"{tag}/text_summary")
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in found]


def test_tensorboard_shows_metrics_workers_events_and_config(make_trainer, tmp_path, board):
    trainer = make_trainer(Recorder, CONFIG, callbacks=[TensorBoardLogger()], logdir=tmp_path)
    trainer.train()
    assert len(scalar(board(tmp_path / "tensorboard"), "train/train_loss")) == 1
    history = [trainer.latest_metrics, *trainer.fit(2)]
    with failure(trainer.get_local_operator(), 12):
        trainer.fit(3)
    trainer.shutdown()
    read = board(tmp_path / "tensorboard")
    expected = [(5 * (n + 1), pytest.approx(e["train_loss"])) for n, e in enumerate(history)]
    assert scalar(read, "train/train_loss") == expected
    assert [step for step, _ in scalar(read, "validate/val_loss")] == [10]
    assert scalar(read, "train/num_samples") == [(5, 40), (10, 40)]
    assert all(speed > 0 for _, speed in scalar(read, "speed/train_samples_per_s"))
    assert all(seconds > 0 for _, seconds in scalar(read, "speed/forward_s"))
    assert set(scalar(read, "workers/num_workers")) == {(0, 1), (5, 1), (10, 1), (12, 1)}
    started, error = (texts(read, f"events/{kind}")[0] for kind in ("started", "user_error"))
    assert (started[0], error[0]) == (0, 12)
    assert "started" in started[1]
    assert "bad batch" in error[1]
    assert '"lr": 0.5' in texts(read, "config")[0][1]


def test_steps_after_the_checkpoint_are_hidden_when_a_run_is_resumed(make_trainer, tmp_path, board):
    callbacks = [CheckpointCallback(), TensorBoardLogger()]
    trainer = make_trainer(Recorder, callbacks=callbacks, logdir=tmp_path)
    trainer.fit(1)
    trainer.train(num_steps=3)  # not saved
    callbacks = [CheckpointCallback(), TensorBoardLogger()]
    again = make_trainer(Recorder, callbacks=callbacks, logdir=tmp_path)
    again.fit(2)
    steps = [step for step, _ in scalar(board(tmp_path / "tensorboard"), "train/train_loss")]
    assert steps == [5, 10]


# ---- MLflow


def test_mlflow_has_metrics_parameters_and_the_final_status(make_trainer, tmp_path):
    folder = tmp_path / "mlruns"
    logger = MLflowLogger(folder, experiment="digits", run_name="first", tags={"team": "vision"})
    trainer = make_trainer(Recorder, CONFIG, callbacks=[logger])
    history = trainer.fit(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        client = mlflow_client(folder)
        experiment = client.get_experiment_by_name("digits")
        (run,) = client.search_runs([experiment.experiment_id])
        assert run.info.run_id == logger.run_id
        assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
        expected = {"lr": "0.5", "name": "tiny", "num_samples": "40", "batch_size": "8"}
        assert run.data.params == expected
        measured = client.get_metric_history(logger.run_id, "train/train_loss")
        losses = [(5 * epoch, each["train_loss"]) for epoch, each in enumerate(history, start=1)]
        assert [(m.step, m.value) for m in measured] == losses
        assert run.data.metrics["validate/val_loss"] == history[1]["val_loss"]
        assert run.data.tags["team"] == "vision"
        assert run.data.tags["started"] == trainer.provenance["started"]

        with failure(trainer.get_local_operator(), 12):
            trainer.fit(3)
        (run,) = client.search_runs([experiment.experiment_id])
        assert run.info.status == "FAILED"

        trainer.validate()
        with failure(trainer.get_local_operator(), 13):
            trainer.train()
        trainer.train()  # a success after the failure
        trainer.shutdown()
        (run,) = client.search_runs([experiment.experiment_id])
        assert run.info.status == "FINISHED"


def test_mlflow_gets_metrics_and_parameters_with_odd_characters(make_trainer, tmp_path):
    logger, adding = MLflowLogger(tmp_path / "mlruns"), Scripted([0.5], "f1: cat", "on_epoch_end")
    make_trainer(Recorder, {"*a;b": 2}, callbacks=[adding, logger]).fit(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        found = mlflow_client(tmp_path / "mlruns").get_run(logger.run_id).data
    assert 0.5 in found.metrics.values()
    assert "2" in found.params.values()


def test_mlflow_writes_into_the_folder_that_it_was_given(make_trainer, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    make_trainer(callbacks=[MLflowLogger("~/ü #1:2 %20?")]).fit(1)
    assert [path.name for path in tmp_path.iterdir()] == ["ü #1:2 %20?"]


def test_resumed_training_continues_the_mlflow_run(make_trainer, tmp_path, monkeypatch):
    """Repeated steps are not logged again."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    loggers = []
    for num_epochs in (2, 3):
        loggers.append(MLflowLogger(tmp_path / "mlruns"))
        callbacks = [loggers[-1], CheckpointCallback(tmp_path / "checkpoints")]
        make_trainer(Recorder, callbacks=callbacks).fit(num_epochs)
        max((tmp_path / "checkpoints").iterdir()).unlink()  # as if the process had been killed
    assert loggers[0].run_id == loggers[1].run_id
    client = mlflow_client(tmp_path / "mlruns")
    for name in ("train/train_loss", "validate/val_loss"):
        history = client.get_metric_history(loggers[0].run_id, name)
        assert [each.step for each in history] == [5, 10, 15]


# ---- Weights & Biases


def records(folder):
    """Yield the records of an offline run, which is a LevelDB log."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, place, part = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        part += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(part)
            part = b""


@pytest.fixture
def wandb_offline(monkeypatch):
    """Silence wandb, and stop its background process after the test."""
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    yield
    wandb.teardown()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_writes_a_run_without_network_and_login(make_trainer, tmp_path, wandb_offline):
    logger = WandbLogger("digits", mode="offline", settings={"console": "off"})
    trainer = make_trainer(Recorder, CONFIG, callbacks=[logger], logdir=tmp_path)
    history = trainer.fit(2)
    trainer.shutdown()
    found = list(records(tmp_path))
    (run,) = [r.run for r in found if r.WhichOneof("record_type") == "run"][:1]
    assert (run.project, run.run_id) == ("digits", logger.run_id)
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["lr"] == 0.5
    assert f"started: {trainer.provenance['started']}" in run.tags
    rows = [
        {
            ".".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in record.history.item
        }
        for record in found
        if record.WhichOneof("record_type") == "history"
    ]
    name = "train/train_loss"
    trained = [(row["global_step"], row[name]) for row in rows if name in row]
    assert trained == [(5, history[0]["train_loss"]), (10, history[1]["train_loss"])]
    assert [row["global_step"] for row in rows if "validate/val_loss" in row] == [5, 10]
    assert (rows[0]["event"], rows[0]["workers/num_workers"]) == ("started", 1)
    (end,) = [r.exit for r in found if r.WhichOneof("record_type") == "exit"]
    assert end.exit_code == 0


def test_each_wandb_logger_and_trainer_has_its_own_run(make_trainer, tmp_path, wandb_offline):
    import wandb

    settings = {"console": "off"}
    with wandb.init(mode="offline", dir=tmp_path, settings=settings) as users:
        own = type("Own", (WandbLogger,), {"load_state_dict": lambda self, state: state["own"]})
        loggers = [kind(mode="offline", settings=settings) for kind in (own, WandbLogger)]
        ids = [users.id]
        for callbacks in (loggers, loggers[:1]):
            make_trainer(callbacks=callbacks, logdir=tmp_path).fit(1)
            ids += [logger.run_id for logger in callbacks]
        assert len({*ids}) == 4
        forked = WandbLogger(mode="offline", id="forked")
        forked.load_state_dict(loggers[0].state_dict())
        assert forked.run_id == "forked"
        users.log({"still": "open"})


# ---- all services


def test_secrets_in_the_config_are_in_no_file(make_trainer, tmp_path, monkeypatch):
    """Other users may be able to read the folder or the server."""
    monkeypatch.setenv("HOME", str(tmp_path))
    names = ("api_key", "token", "dbPassword", "SECRET", "tokens", "credentials")
    config = {name: "hunter2" for name in names} | {
        "wandb": {"key": "hunter2"},
        "sources": [{"url": "s3://me:hunter2@bucket/x"}, "https://host/x?sig=hunter2"],
        "password": 86753090123,
        "tokenizer": "words",
        "max_tokens": 512,
        "object": SimpleNamespace(dbPassword="hunter2"),
        "set": {"s3://me:hunter2@bucket/x"},
    }
    config["ring"] = ring = {}
    ring["ring"] = ring
    callbacks = [
        TensorBoardLogger(),
        MLflowLogger(tmp_path / "mlruns"),
        WandbLogger(mode="offline"),
    ]
    trainer = make_trainer(Recorder, config, callbacks=callbacks, logdir=tmp_path / "run")
    trainer.fit(1)

    def fail(batch_info, when):
        raise OSError("cannot read https://me:hunter2@host/x?sig=hunter2")

    trainer.get_local_operator().fail = fail
    with pytest.raises(OSError, match="hunter2@host"):
        trainer.fit(2)
    trainer.shutdown()
    assert "https://me:***@host/x?***" in (tmp_path / "run" / "events.jsonl").read_text()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        assert b"hunter2" not in path.read_bytes(), path
        assert b"86753090123" not in path.read_bytes(), path
    shown = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])["config"]
    assert shown["sources"] == [{"url": "s3://me:***@bucket/x"}, "https://host/x?***"]
    assert (shown["tokenizer"], shown["max_tokens"]) == ("words", 512)
    assert shown["wandb"] == {"key": "***"}
