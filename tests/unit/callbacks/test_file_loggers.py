"""JSON logs of metrics and events in the run folder, and the CSV table of metrics."""

import csv
import json
import time

from raysgd.callbacks import Callback, CsvLogger
from tests.unit.recorder import Recorder


def lines(path):
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def refuse(name):
    raise AssertionError(f"{name} is no JSON")


def test_the_run_folder_holds_metrics_and_events(make_trainer, tmp_path):
    config = {"lr": 0.5, "layers": (8, 4), "data": object(), "rate": float("inf")}
    folder = tmp_path / "runs" / "1"
    began = time.time()
    trainer = make_trainer(Recorder, config, logdir=folder)
    assert trainer.logdir == folder
    assert not folder.exists()
    result = trainer.train()
    trainer.train(num_steps=2)
    trainer.validate()
    run, *rest = lines(folder / "metrics.jsonl")
    assert run.pop("time") >= began
    assert run.pop("versions").keys() >= {"python", "raysgd", "torch"}
    assert run == {
        "kind": "run",
        "operator": "Recorder",
        "device": "CPU",
        "config": {"num_samples": 40, "batch_size": 8, "lr": 0.5, "layers": [8, 4], "rate": "inf"},
        "epoch": 0,
        "global_step": 0,
        "num_workers": 1,
        "min_workers": 1,
    }
    keys = ["kind", "time", "seconds", "epoch", "global_step", "num_workers", "metrics"]
    assert [list(line) for line in rest] == [[*keys, "speed"]] * 2 + [keys]
    assert len(rest[0]["speed"]["forward_s"]) == 1
    assert [(line["kind"], line["epoch"], line["global_step"]) for line in rest] == [
        ("train", 1, 5),
        ("train", 2, 7),
        ("validate", 2, 7),
    ]
    assert rest[0]["metrics"] == result
    assert rest[2]["metrics"]["num_samples"] == 40
    times = [line["time"] for line in rest]
    assert began <= times[0] <= times[1] <= times[2] <= time.time()
    assert all(0 < line["seconds"] < line["time"] - began for line in rest)

    (event,) = lines(folder / "events.jsonl")
    assert event["kind"] == "started"
    assert event["num_workers"] == 1
    fields = {"kind", "generation", "ranks", "node_ids", "step", "cause", "seconds", "time"}
    assert fields | {"num_splits", "num_workers", "shares", "old_shares"} == set(event)
    assert event["ranks"] == [0]


def test_a_resumed_run_appends_to_the_log(make_trainer, tmp_path):
    first = make_trainer(logdir=tmp_path)
    first.fit(1)
    first.fit(2)
    path = tmp_path / "metrics.jsonl"
    assert [line["kind"] for line in lines(path)] == ["run", "train", "validate"] * 2
    with path.open("a") as file:
        file.write('{"kind": "tra')  # its writer was killed
    second = make_trainer(logdir=tmp_path)
    second.train()
    kept = path.read_text().splitlines()
    assert kept[6] == '{"kind": "tra'
    assert [json.loads(line)["kind"] for line in kept[7:]] == ["run", "train"]


# ---- CSV table


class Adding(Callback):
    """A callback that adds metrics in the second epoch only."""

    def on_epoch_end(self, trainer, metrics):
        if trainer.epoch == 2:
            metrics |= {"late, with a comma": 0.5, "note": 'a "text"\nof two lines'}


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_is_written_for_each_call(make_trainer, tmp_path):
    trainer = make_trainer(callbacks=[CsvLogger()], logdir=tmp_path / "new")
    trained, validated = trainer.train(), trainer.validate()
    first, second = rows(tmp_path / "new" / "metrics.csv")
    assert (first["kind"], first["epoch"], first["global_step"]) == ("train", "1", "5")
    assert float(first["train_loss"]) == trained["train_loss"]
    assert float(second["val_loss"]) == validated["val_loss"]
    assert second["train_loss"] == first["val_loss"] == ""


def test_rows_and_columns_are_added_to_an_existing_table(make_trainer, tmp_path):
    make_trainer(callbacks=[Adding(), CsvLogger()], logdir=tmp_path).fit(2)
    path = tmp_path / "metrics.csv"
    path.write_bytes(path.read_bytes()[:-20])  # its writer was killed
    make_trainer(callbacks=[CsvLogger()], logdir=tmp_path).train()
    found = rows(path)
    assert [row["kind"] for row in found] == ["train", "validate", "train", "validate", "train"]
    late = [row["late, with a comma"] for row in found]
    assert (late[0], late[2], late[4]) == ("", "0.5", "")
    assert found[2]["note"] == 'a "text"\nof two lines'
    assert [path.name for path in tmp_path.glob("*.csv*")] == ["metrics.csv"]
