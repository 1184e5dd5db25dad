"""``raysgd compare``."""

import time

import pytest

from raysgd._internal.step_timing import PHASES
from tests.operators import Classifier
from tests.unit.callbacks.test_report import call, run, write
from tests.unit.cli.test_commands import invoke

BASE = {"data": 1, "forward": 4, "backward": 5}


def write_run(folder, epochs, kind="train"):
    """Write the log of a run of two workers, from the milliseconds of the phases of each epoch."""
    folder.mkdir()
    records = [run()]
    for number, slow in enumerate(epochs, start=1):
        busy_ms = {**BASE, **slow}
        record = call(100.0 + number, 1.0, 10 * number, kind)
        record["speed"] = {f"{name}_s": [0.0, 0.0] for name in PHASES}
        record["speed"] |= {
            f"{n}_s": [ms / 1000, BASE.get(n, 0) / 1000] for n, ms in busy_ms.items()
        }
        extra_s = (sum(busy_ms.values()) - sum(BASE.values())) / 1000
        record["speed"]["wait_s"] = [0.0, extra_s]  # worker 1 waits for worker 0
        records.append(record)
    write(folder, records)
    return folder


SAME = "Nothing differs beyond the spread."
DATA = "What grew most is data: from 1 to 9 ms per step."


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ([{}] * 3, [{}] * 5, SAME),
        ([{}] * 3, [{"data": 9, "forward": 6}] * 5, DATA),  # and not the wait of the other worker
        ([{}], [{"data": 9}], DATA),
        ([{}], [{"data": 2.5}], SAME),  # how much single epochs differ is unknown
        ([{}] * 2, [{"data": 2.5}] * 2, "What grew most is data: from 1 to 2.5 ms per step."),
        ([{"data": 9}, {}, {}, {}], [{"data": 9}, {}, {}, {}, {}], SAME),  # a slow first epoch
        ([{"data": 1}, {"data": 9}], [{"data": 4}, {"data": 9}], SAME),
        ([{}] * 2, [{"save": 3}] * 2, "What grew most is save: from 0 to 3 ms per step."),
        (
            [{"data": 9}] * 2,
            [{}] * 2,
            "Nothing grew beyond the spread. What shrank most is data: from 9 to 1 ms per step.",
        ),
        (
            [{"optimizer": 4}] * 2,
            [{"data": 1.5, "forward": 4.5, "backward": 5.5, "optimizer": 4.5}] * 2,
            "What grew most is step: from 14 to 16 ms per step.",
        ),
    ],
)
def test_compare_names_the_phase_that_grew_most(tmp_path, before, after, sentence):
    folders = [write_run(tmp_path / n, epochs) for n, epochs in (("a", before), ("b", after))]
    result = invoke("compare", *map(str, folders))
    assert result.output.splitlines()[-1] == sentence
    assert result.exit_code == 0


def test_compare_shows_the_runs_of_a_trainer(make_trainer, tmp_path):
    class Slow(Classifier):
        def train_batch(self, batch, batch_info):
            time.sleep(batch_info["info"]["s"])
            return super().train_batch(batch, batch_info)

    for s in (0, 0.1):
        trainer = make_trainer(Slow, logdir=tmp_path / str(s))
        trainer.fit(2, validate_every=None, info={"s": s}, log_every=1)
    lines = invoke("compare", str(tmp_path / "0"), str(tmp_path / "0.1")).output.splitlines()
    assert lines[0].split() == ["ms", "per", "step", "before", "after", "spread"]
    assert lines[-2].startswith("step ")
    assert lines[-1].startswith("What grew most is forward: ")


def test_compare_names_a_folder_without_a_table(tmp_path):
    good = write_run(tmp_path / "good", [{}])
    (tmp_path / "old").mkdir()
    write(tmp_path / "old", [run(), call(101.0, 1.0, 10)])
    for folder, text in (("old", "old has no table of phases"), ("x", "x has no metrics.jsonl")):
        result = invoke("compare", str(good), str(tmp_path / folder))
        assert (result.exit_code, result.output) == (1, result.stderr)
        assert text in result.stderr
