"""States with NumPy arrays: they load unchanged, run no code, and do not need PyTorch."""

import pickle
import zipfile

import numpy as np
import pytest

from raysgd.checkpoint import read_file, read_manifest, save_model, write_file
from raysgd.errors import CheckpointError
from tests.conftest import run_python
from tests.unit.checkpoint.states import Code

STATE = {
    "epoch": 3,
    "global_step": 7,
    "models": [{"0/kernel": np.arange(6.0, dtype="float32").reshape(2, 3), "1/n": np.array(5)}],
    "optimizers": [{"0/iteration": np.array(7, "int64")}],
    "operator": {"best": float("nan"), 3: ("a", None, True, b"\x00"), "x": np.float32(0.1)},
    "data": {"rng": [{"numpy": ("MT19937", np.arange(4, dtype="uint32"), 1, 0, 0.0)}]},
}


def same(left, right):
    if isinstance(left, np.ndarray | np.generic):
        return left.dtype == right.dtype and np.array_equal(left, right, equal_nan=True)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and all(map(same, left, right))
    return type(left) is type(right) and (left == right or left != left)


def test_a_state_comes_back(tmp_path):
    path = write_file(STATE, tmp_path / "state")
    found = read_file(path)
    assert same(found, {**STATE, "operator": {**STATE["operator"], "x": float(np.float32(0.1))}})
    assert read_manifest(path).global_step == 7
    found["models"][0]["0/kernel"][0, 0] = 1.0  # not read-only


@pytest.mark.parametrize("name", ["bfloat16", "float8_e5m2"])
def test_a_type_of_another_package_comes_back(tmp_path, name):
    array = np.array([1.5, 2.5], getattr(pytest.importorskip("ml_dtypes"), name))
    path = write_file({**STATE, "models": [{"w": array}]}, tmp_path / "state")
    assert same(read_file(path)["models"], [{"w": array}])


def test_a_pickle_in_place_of_an_array_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "state"
    write_file(STATE, path)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            if name.endswith("manifest.json"):
                continue
            evil = name.endswith("arrays/0")
            archive.writestr(name, pickle.dumps(Code()) if evil else content)
    with pytest.raises(CheckpointError):
        read_file(path)
    assert list(tmp_path.iterdir()) == [path]


def test_transposed_arrays_keep_their_values_in_safetensors(tmp_path):
    from safetensors.numpy import load_file

    weights = {"kernel": np.arange(6).reshape(3, 2).T, "part": np.arange(6)[::2], "n": np.array(3)}
    saved = load_file(save_model(weights, tmp_path / "model.safetensors"))
    assert all(same(saved[name], np.asarray(array)) for name, array in weights.items())


def test_torch_is_not_needed(tmp_path):
    code = f"""
import sys
sys.modules["torch"] = None
import numpy as np
from raysgd.checkpoint import read_file, write_file
state = {{"epoch": 1, "models": [{{"w": np.ones(3)}}], "optimizers": []}}
assert read_file(write_file(state, {str(tmp_path / "s")!r}))["models"][0]["w"].sum() == 3
"""
    run_python("-c", code)
