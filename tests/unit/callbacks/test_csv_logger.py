"""The metrics as a table."""

import csv
import json

import torch

from raysgd.callbacks import Callback, CsvLogger


class Adding(Callback):
    """A metric that appears in the second epoch."""

    def on_epoch_end(self, trainer, metrics):
        if trainer.epoch == 2:
            metrics |= {"late, with a comma": 0.5, "note": 'a "text"\nof two lines'}
            metrics["matrix"] = torch.eye(2)


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


def test_columns_may_appear_later(make_trainer, tmp_path):
    trainer = make_trainer(callbacks=[Adding(), CsvLogger()], logdir=tmp_path)
    for _ in range(3):
        trainer.train()
    found = rows(tmp_path / "metrics.csv")
    assert [row["late, with a comma"] for row in found] == ["", "0.5", ""]
    assert found[1]["note"] == 'a "text"\nof two lines'
    assert [row["epoch"] for row in found] == ["1", "2", "3"]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    matrices = [json.loads(found[1]["matrix"]), json.loads(lines[2])["metrics"]["matrix"]]
    assert matrices == [[[1.0, 0.0], [0.0, 1.0]]] * 2
    assert [path.name for path in tmp_path.glob("*.csv*")] == ["metrics.csv"]


def test_rows_are_added_to_an_existing_table(make_trainer, tmp_path):
    make_trainer(callbacks=[Adding(), CsvLogger()], logdir=tmp_path).fit(2)
    make_trainer(callbacks=[CsvLogger()], logdir=tmp_path).train()
    found = rows(tmp_path / "metrics.csv")
    assert [row["kind"] for row in found] == ["train", "validate", "train", "validate", "train"]
    assert found[2]["late, with a comma"] == "0.5"
    assert found[4]["late, with a comma"] == ""


def test_incomplete_row_does_not_damage_the_next_one(make_trainer, tmp_path):
    make_trainer(callbacks=[CsvLogger()], logdir=tmp_path).fit(1)
    path = tmp_path / "metrics.csv"
    path.write_bytes(path.read_bytes()[:-20])  # its writer was killed
    make_trainer(callbacks=[CsvLogger()], logdir=tmp_path).train()
    assert [row["kind"] for row in rows(path)] == ["train", "validate", "train"]
