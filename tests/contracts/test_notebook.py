"""The notebook runs from top to bottom in its own kernel, and test_docs.py runs its cells."""

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import IN_SOAK

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


@pytest.mark.skipif(not IN_SOAK, reason="tests/contracts/test_docs.py runs the cells")
def test_the_notebook_runs(ray_cluster, monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster.get_runtime_context().gcs_address)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    said = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ())
    )
    assert "epoch 10 " in said
    predicted, truth = (json.loads(line.split(None, 1)[1]) for line in said.splitlines()[-2:])
    assert len(truth) == 10
    assert sum(a == b for a, b in zip(predicted, truth, strict=True)) >= 9


def test_the_notebook_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
