"""The mutants of a file, and the sample of an area."""

import ast
import difflib
import hashlib
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

import cosmic_ray.mutating
import cosmic_ray.plugins
import parso
from cosmic_ray.ast import ast_nodes
from cosmic_ray.operators.operator import Operator

ROOT = Path(__file__).parents[2]
AREAS = {
    "cluster": ["raysgd/cluster"],
    "loop": ["raysgd/loop", "raysgd/data"],
    "torch/sources": ["raysgd/torch/input/sources.py", "raysgd/torch/input/orders.py"],
    "torch/optimization": ["raysgd/torch/optimization.py", "raysgd/torch/losses.py"],
    "strategies": ["raysgd/torch/strategies"],
    "comm": ["raysgd/comm", "raysgd/backends.py"],
    "checkpoint": ["raysgd/checkpoint"],
    "elastic": ["raysgd/elastic"],
}
"""Folders and files with a score."""
TYPING_DECORATORS = ("override", "overload", "final")


@dataclass(frozen=True)
class Mutant:
    """The n-th change that an operator of cosmic-ray can make in a file."""

    file: str
    line: int
    operator: str
    occurrence: int

    def __str__(self):
        return f"{self.file}:{self.line} {self.operator} {self.occurrence}"

    def source(self):
        """Return the changed source; None if it is invalid or equivalent Python."""
        before = (ROOT / self.file).read_text(encoding="utf-8")
        operator = operators()[self.operator]
        after = cosmic_ray.mutating.mutate_code(before, operator, self.occurrence)
        try:
            same = ast.dump(ast.parse(after)) == ast.dump(ast.parse(before))
        except SyntaxError:
            return None
        return None if same else after

    def change(self):
        """Return the lines of a diff."""
        before = (ROOT / self.file).read_text(encoding="utf-8").splitlines()
        diff = difflib.unified_diff(before, self.source().splitlines(), lineterm="", n=1)
        return [line for line in list(diff)[2:] if not line.startswith("@@")]


class RemoveStatement(Operator):
    """Remove a call whose value is unused, or an assignment to an attribute or an item."""

    def mutation_positions(self, node):
        if node.parent is not None and node.parent.type == "simple_stmt":
            is_assignment = node.type == "expr_stmt"
            what = node.children[0] if is_assignment else node
            if what.type == "atom_expr" and (is_assignment or what.children[-1].children[0] == "("):
                yield node.start_pos, node.end_pos

    def mutate(self, node, index):
        prefix = node.get_first_leaf().prefix
        return parso.python.tree.Keyword("pass", node.start_pos, prefix=prefix)

    @classmethod
    def examples(cls):
        return ()


@cache
def operators():
    """Return the operators of cosmic-ray by name, without weak and random ones."""
    found = {"RemoveStatement": RemoveStatement()}
    for name in cosmic_ray.plugins.operator_names():
        short = name.removeprefix("core/")
        sides = set(short.split("_")[1:])
        is_identity = bool(sides & {"Is", "IsNot"}) and sides != {"Is", "IsNot"}
        if not is_identity and not short.startswith("Variable"):
            found[short] = cosmic_ray.plugins.get_operator(name)()
    return found


def is_left_alone(node):
    """Whether a node is part of a type, a message, a signature, or an assertion."""
    if node.type == "decorator":
        return node.children[1].get_code().strip() in TYPING_DECORATORS
    if node.type == "operator" and (
        node.parent.type in ("parameters", "param", "lambdef")  # a bare * or /
        or any("string" in each.type for each in node.parent.children)  # concatenates strings
    ):
        return True
    while (parent := node.parent) is not None:
        if (
            (parent.type == "annassign" and node is parent.children[1])
            or (parent.type == "tfpdef" and node is parent.children[-1])
            or (parent.type == "funcdef" and node is parent.annotation)
            or (node.type == "if_stmt" and _begins(node, "if TYPE_CHECKING:"))
            or (node.type == "atom_expr" and _begins(node, "logger.", "warnings.warn("))
            or (node.type == "argument" and _begins(node, "strict="))  # of zip, like an assertion
            or node.type == "raise_stmt"
        ):
            return True
        node = parent
    return False


def _begins(node, *texts):
    return node.get_code(include_prefix=False).startswith(texts)


def digest(*parts):
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


def mutants_by_line(file, seed):
    """Return (order, mutant) for the mutants of each line of a file. The seed decides the order."""
    source = (ROOT / file).read_text(encoding="utf-8")
    lines, found = source.splitlines(), {}
    nodes = list(ast_nodes(parso.parse(source)))
    for name, operator in operators().items():
        positions = [(n, at) for n in nodes for at, _ in operator.mutation_positions(n)]
        for occurrence, (node, (line, column)) in enumerate(positions):
            if not is_left_alone(node):
                # each kind of change is equally likely, for any number of its operators
                kind = digest(seed, file, lines[line - 1].strip(), name.split("_")[0])
                order = (kind, digest(kind, name, column, occurrence))
                found.setdefault(line, []).append((order, Mutant(file, line, name, occurrence)))
    return [sorted(some, key=lambda pair: pair[0]) for some in found.values()]


def sample(area, number, seed):
    """Return mutants of different lines of an area."""
    files = [
        path.relative_to(ROOT).as_posix()
        for name in AREAS[area]
        for path in ([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*.py"))
    ]
    lines = sorted(
        (line for file in files for line in mutants_by_line(file, seed)),
        key=lambda line: line[0][0],
    )
    firsts = (next((m for _, m in line if m.source() is not None), None) for line in lines)
    return sorted(islice(filter(None, firsts), number), key=str)
