"""Files are replaced completely or not at all, and keep their mode."""

import json
import stat

import numpy as np
import pytest

from raysgd._internal.files import TEMPORARY_NAME, temporary_name
from raysgd.callbacks.loggers import _rewrite
from raysgd.callbacks.report import make_report
from raysgd.checkpoint import save_model, write_file
from raysgd.train.result import append_report

STATE = {"epoch": 1, "models": [{"w": np.ones(2)}], "optimizers": []}
RUN = {"kind": "run", "time": 1.0, "global_step": 0}


def report(path):
    (path.parent / "metrics.jsonl").write_text(json.dumps(RUN))
    make_report(path.parent)


WRITERS = {
    "state.ckpt": lambda path: write_file(STATE, path),
    "model.safetensors": lambda path: save_model(STATE["models"][0], path),
    "metrics.csv": lambda path: (path.touch(), _rewrite(path, ["kind"])),
    "report.html": report,
    "result.json": lambda path: append_report(path, {"n": 1}),
}


@pytest.mark.parametrize("mode", [0o600, 0o664])
@pytest.mark.parametrize("name", WRITERS)
def test_a_replaced_file_keeps_its_mode(tmp_path, name, mode):
    path = tmp_path / name
    WRITERS[name](path)
    path.chmod(mode)
    WRITERS[name](path)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert [each.name for each in tmp_path.iterdir() if each.name[0] == "."] == []


def test_a_temporary_name_contains_the_final_one():
    names = {temporary_name("state.pt") for _ in range(10)}
    assert len(names) == 10
    assert {TEMPORARY_NAME.fullmatch(name)[1] for name in names} == {"state.pt"}
