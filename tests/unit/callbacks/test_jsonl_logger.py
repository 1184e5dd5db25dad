"""The run folder's own files, in the format that reports are made from."""

import json
import time

import raysgd
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
    assert run.pop("versions").keys() >= {"python", "torch"}
    assert run == {
        "kind": "run",
        "version": raysgd.__version__,
        "operator": "Recorder",
        "device": "CPU",
        "config": {
            "num_samples": 40,
            "batch_size": 8,
            "lr": 0.5,
            "layers": [8, 4],
            "rate": "inf",
        },
        "epoch": 0,
        "global_step": 0,
        "num_workers": 1,
        "min_workers": 1,
    }
    keys = ["kind", "time", "seconds", "epoch", "global_step", "num_workers", "metrics"]
    assert [list(line) for line in rest] == [keys] * 3
    assert [(line["kind"], line["epoch"], line["global_step"]) for line in rest] == [
        ("train", 1, 5),
        ("train", 2, 7),
        ("validate", 2, 7),
    ]
    assert rest[0]["metrics"] == result
    assert rest[2]["metrics"]["num_samples"] == 40
    times = [line["time"] for line in rest]
    assert began < times[0] < times[1] < times[2] < time.time()
    assert all(0 < line["seconds"] < line["time"] - began for line in rest)

    (event,) = lines(folder / "events.jsonl")
    assert event["kind"] == "started"
    assert event["num_workers"] == 1
    fields = {"kind", "generation", "ranks", "nodes", "step", "cause", "seconds", "time"}
    assert fields | {"factor", "num_workers", "shares", "old_shares"} == set(event)
    assert event["ranks"] == [0]


def test_a_run_that_is_resumed_appends(make_trainer, tmp_path):
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
