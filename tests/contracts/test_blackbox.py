"""Black-box tests use only public names. Only their `seam.py` files may use internals."""

import ast
import re
from pathlib import Path

import pytest

from tests.contracts.test_surface import SURFACE

FOLDER = Path(__file__).parents[1] / "blackbox"
FROM_BEFORE = {
    f"raysgd.train.{name}"
    for name in (
        "callbacks.logging",
        "callbacks.print",
        "callbacks.profile",
        "constants",
        "session",
    )
}
"""Modules that scripts for older libraries import. Their names are public elsewhere."""
HIDDEN = r"(?!self\.).*\._[^_]"
"""A private attribute of another object."""


@pytest.mark.parametrize(
    "path", sorted(FOLDER.rglob("*.py")), ids=lambda path: path.relative_to(FOLDER).as_posix()
)
def test_a_black_box_test_uses_only_public_names(path):
    if path.name == "seam.py":
        return
    imported, private = set(), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module)
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and re.match(HIDDEN, ast.unparse(node)):
            private.add(ast.unparse(node))
    inside = {name for name in imported if name.split(".")[0] == "raysgd"} - {*SURFACE}
    if path.name.endswith("scripts.py"):
        inside -= FROM_BEFORE
    assert not inside
    assert not private
