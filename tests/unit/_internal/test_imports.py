"""Imports without garbage collection, and errors of missing packages."""

import gc

import pytest

from raysgd._internal.imports import frozen_imports, import_extra
from tests.conftest import run_python


@pytest.fixture(autouse=True)
def _as_before():
    threshold = gc.get_threshold()
    yield
    gc.enable()
    gc.set_threshold(*threshold)


def collections():
    return sum(generation["collections"] for generation in gc.get_stats())


def many_lists():
    return [[] for _ in range(100 * gc.get_threshold()[0] or 100_000)]


def test_no_garbage_is_collected_during_an_import():
    before = collections()
    assert many_lists()
    assert collections() > before
    with frozen_imports():
        before = collections()
        loaded = many_lists()
        assert collections() == before
    looked_through = {id(thing) for thing in gc.get_objects()}
    assert not looked_through & {id(thing) for thing in loaded}
    assert many_lists()
    assert collections() > before


def test_frozen_imports_keep_the_settings_of_the_user():
    gc.disable()
    with frozen_imports():
        pass
    assert not gc.isenabled()
    gc.enable()
    with frozen_imports():
        gc.disable()
    assert not gc.isenabled()
    with frozen_imports():
        gc.set_threshold(50_000)
    assert gc.get_threshold()[0] == 50_000


@pytest.mark.parametrize("module", ["missing_package", "missing_package.inner"])
def test_a_missing_package_names_its_extra(module):
    with pytest.raises(ImportError) as caught:
        import_extra("MyLogger", module, "callbacks")
    assert str(caught.value) == (
        "MyLogger needs missing_package, which cannot be imported here (No module named "
        "'missing_package'). Install it on the driver and all workers: "
        'pip install "raysgd[callbacks]"'
    )
    assert isinstance(caught.value.__cause__, ImportError)


@pytest.mark.parametrize("first", ["tensorflow", "torch", "raysgd.tf"])
def test_tensorflow_and_triton_do_not_end_the_process(first):
    """Without `load_triton_first`, LLVM ends the process with SIGABRT."""
    pytest.importorskip("triton", reason="this PyTorch has no Triton")
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    script = (
        f"import {first}\n"
        "from raysgd._internal.imports import load_triton_first\n"
        "load_triton_first()\n"
        "import tensorflow, torch, torch._dynamo\n"
        "torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1)\n"
    )
    run_python("-c", script)
