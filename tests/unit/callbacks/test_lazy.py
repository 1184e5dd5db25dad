"""Packages of callbacks, imported when they are needed."""

import json
import sys

import pytest

from raysgd.callbacks.lazy import import_for


def test_a_package_that_is_there_is_returned():
    assert import_for("Mine", "json") is json
    assert import_for("Mine", "json.decoder") is json.decoder


@pytest.mark.parametrize("module", ["missing_package", "missing_package.inner"])
def test_a_missing_one_is_named_with_the_callback_the_reason_and_the_extra(module):
    with pytest.raises(ImportError) as caught:
        import_for("MyLogger", module)
    assert str(caught.value) == (
        "MyLogger needs missing_package, which cannot be imported (No module named "
        "'missing_package'): pip install \"raysgd[callbacks]\""
    )
    assert isinstance(caught.value.__cause__, ImportError)


def test_a_package_that_fails_itself_is_told_with_its_reason(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("raise ImportError('needs libcuda.so')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"cannot be imported \(needs libcuda\.so\)"):
        import_for("MyLogger", "broken_package")
    assert "broken_package" not in sys.modules
