"""The snippets of the documentation run, and the messages that it quotes are in the source.

The ```` ```python ```` blocks of a page run from top to bottom in one namespace. The first block of
the quick start runs before them. A block that cannot run here is a
```` ```{code-block} python ```` with a comment above it that gives the reason::

    % not run: needs a cluster of several machines
"""

import ast
import json
import logging
import re
import string
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import IN_SOAK, import_horovod
from tests.contracts.test_surface import SURFACE

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
QUICKSTART = DOCS / "quickstart.md"
TROUBLESHOOTING = DOCS / "troubleshooting.md"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
MAX_NOT_RUN = 8

# ---- files


def test_the_files_that_the_architecture_page_names_exist():
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`(?!.*NAME)(\w+/[\w/.]*|\w+\.py)`", text))
    folders = (ROOT, ROOT / "raysgd", ROOT / "raysgd" / "elastic")
    assert len(paths) > 50
    assert {path for path in paths if not any((each / path).exists() for each in folders)} == set()


# ---- snippets

FENCE = re.compile(r"(?P<above>.*)\n *```(?P<kind>\S.*)?\n(?P<code>(?:.*\n)*?) *``` *(?=\n)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    kind: str
    line: int
    """Number of its first line in the page."""
    code: str
    above: str
    """The line above the block."""


def blocks(path):
    """Return the fenced blocks of a page."""
    text = f"\n{path.read_text(encoding='utf-8')}\n"
    return [
        Block(
            kind=(fence["kind"] or "").strip(),
            line=text.count("\n", 0, fence.start("code")),
            code=textwrap.dedent(fence["code"]).removesuffix("\n"),
            above=fence["above"].strip(),
        )
        for fence in FENCE.finditer(text)
    ]


def snippets(path):
    if path == NOTEBOOK:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        return [Block("python", 1, each, "") for each in code]
    return [block for block in blocks(path) if block.kind == "python"]


def is_run_as_it_is(path, block):
    """Return whether a block keeps its number of workers. The README runs as users run it."""
    return path == ROOT / "README.md" or "Chaos" in block.code or "dcp." in block.code


class OneWorker(ast.NodeTransformer):
    """Gives trainers one worker, in this process if possible, because a start takes seconds."""

    def visit_Call(self, node):
        self.generic_visit(node)
        given = {keyword.arg for keyword in node.keywords}
        if "num_workers" not in given or "use_local" in given:
            return node
        changed = {"num_workers": 1}
        if "training_operator_cls" in given:  # trainers of functions do not have these
            changed |= {"min_workers": 1, "use_local": True}
        kept = [keyword for keyword in node.keywords if keyword.arg not in changed]
        new = [ast.keyword(name, ast.Constant(value)) for name, value in changed.items()]
        node.keywords = [*kept, *new]
        return node


def run(path, block, namespace):
    # tracebacks show the line number in the page
    tree = ast.parse("\n" * (block.line - 1) + block.code)
    if not is_run_as_it_is(path, block) and not IN_SOAK:
        tree = ast.fix_missing_locations(OneWorker().visit(tree))
    exec(compile(tree, str(path.relative_to(ROOT)), "exec"), namespace)


WITH_SNIPPETS = [path for path in [*PAGES, NOTEBOOK] if snippets(path)]


@pytest.fixture
def kept_logging():
    """Restore log levels and handlers, because a page may change them."""
    loggers = [logging.getLogger(), logging.getLogger("raysgd")]
    before = [(each.level, list(each.handlers)) for each in loggers]
    yield
    for each, (level, handlers) in zip(loggers, before, strict=True):
        each.setLevel(level)
        each.handlers = handlers


@pytest.fixture
def run_page(tmp_path, monkeypatch, kept_logging):
    """A function that runs the snippets of a page."""

    def run_all(path):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path))  # runs of functions save files here
        # Ray sends classes and functions of __main__ to workers by value, as for a script.
        namespace = {"__name__": "__main__"}
        if path not in (QUICKSTART, NOTEBOOK, ROOT / "README.md"):
            run(QUICKSTART, snippets(QUICKSTART)[0], namespace)
        for block in snippets(path):
            run(path, block, namespace)
        namespace.clear()  # break reference cycles of functions and globals

    return run_all


@pytest.mark.slow("a page makes up to three trainers")
@pytest.mark.parametrize("path", WITH_SNIPPETS, ids=lambda path: path.name)
def test_the_snippets_of_a_page_run(path, run_page, ray_cluster):
    if path.stem == "horovod":
        import_horovod()
    if path.stem == "frameworks" and not IN_SOAK:
        pytest.skip("tests/distributed/test_train_scripts.py runs scripts like these")
    if path.stem == "frameworks":
        for name in ("accelerate", "lightning", "transformers"):
            pytest.importorskip(name, reason=f"{name} is not installed")
    run_page(path)


def test_the_notebook_is_kept_without_outputs():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


def test_most_pages_have_snippets():
    assert len(WITH_SNIPPETS) >= 12


def test_a_block_of_python_that_does_not_run_says_why():
    skipped = []
    for path in PAGES:
        for block in blocks(path):
            if "python" in block.kind and block.kind != "python":
                skipped.append(f"{path.name}:{block.line}")
                assert block.kind == "{code-block} python", skipped[-1]
                assert re.fullmatch(r"% not run: \S.{10,}", block.above), skipped[-1]
    assert len(skipped) <= MAX_NOT_RUN, skipped


def test_every_block_has_a_known_kind():
    """Otherwise a block of Python could remain untested."""
    for path in PAGES:
        for block in blocks(path):
            kind = block.kind.split("}")[0] + "}" if block.kind[0] == "{" else block.kind
            if kind in ("{image}", "{include}", "{literalinclude}"):
                assert (path.parent / block.kind.split()[1]).is_file(), f"{path.name}:{block.line}"
                continue
            known = {"python", "shell", "text", "{code-block} python", "{eval-rst}", "{toctree}"}
            assert block.kind in known, f"{path.name}:{block.line}"


def test_a_block_is_no_wider_than_the_pages():
    wide = [
        f"{path.name}:{block.line + number}: {line}"
        for path in PAGES
        for block in blocks(path)
        if path.parent == DOCS and path != TROUBLESHOOTING  # its messages wrap
        for number, line in enumerate(block.code.splitlines())
        if len(line) > 90
    ]
    assert wide == []


# ---- links from files that Sphinx does not read


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_a_link_to_a_file_leads_somewhere(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", text)
    assert [link for link in links if not (ROOT / link).exists()] == []


# ---- messages

HOLE = "\0"
CONVERSION = re.compile(r"%(?:\(\w+\))?(?:r|s|d|g|\.\d+f)")


@cache
def sentences():
    """Return (caller, pattern) for each sentence in the source, unless it is too short.

    `caller` is the name of the function or class that takes the text, such as ``ValueError``.
    """
    return [
        (caller, re.compile("(.+?)".join(map(re.escape, sentence.split(HOLE)))))
        for caller, text in _texts()
        for sentence in _split(text)
        if len(sentence.replace(HOLE, "").strip(string.punctuation + " ")) >= 8
    ]


def _split(text):
    return re.split("[.:] ", text.rstrip(".:"))


def _texts():
    """Return (caller, text) for each string in the source. `HOLE` replaces its values."""
    found = set()
    for path in [*(ROOT / "raysgd").rglob("*.py"), *(ROOT / "operators").glob("*.py")]:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        callers = {
            id(argument): getattr(call.func, "id", getattr(call.func, "attr", ""))
            for call in nodes
            if isinstance(call, ast.Call)
            for argument in call.args
        }
        parts = {id(part) for node in nodes for part in _parts(node)}
        found |= {
            (callers.get(id(node), ""), text)
            for node in nodes
            if id(node) not in parts and (text := _template(node))
        }
    return found


def _parts(node):
    """Return the parts of an f-string or of a sum of strings."""
    if isinstance(node, ast.JoinedStr):
        return node.values
    is_sum = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)
    return [node.left, node.right] if is_sum else []


def _template(node):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return " ".join(re.sub(r"\{\d?\}", HOLE, CONVERSION.sub(HOLE, node.value)).split("\n"))
    texts = [_template(part) for part in _parts(node)]
    if not any(texts):
        return None
    # merge adjacent holes, because one hole matches several values
    return re.sub(rf"{HOLE}(\s*{HOLE})+", HOLE, "".join(text or HOLE for text in texts))


def quoted_messages(path):
    """Yield (line, kind or None, message) for each text block. A block is one message."""
    for block in blocks(path):
        if block.kind == "text":
            message = " ".join(block.code.split()).removesuffix(" …")
            kind, rest = re.fullmatch(r"(?:(\w+(?:Error|Warning)): )?(.*)", message).groups()
            yield block.line, kind, rest


def is_in_the_source(kind, message):
    """Return whether each sentence of a message is in the source."""
    return all(len(part) <= 15 or _is_sentence(kind, part) for part in _split(message))


def _is_sentence(kind, sentence):
    return any(
        all(len(value) <= 40 or _is_sentence(None, value) for value in match.groups())
        for caller, pattern in sentences()
        if kind is None or caller == kind or not re.search("(Error|Warning)$", caller)
        if (match := pattern.fullmatch(sentence))
    )


QUOTED = list(quoted_messages(TROUBLESHOOTING))


@pytest.mark.parametrize(
    ("kind", "message"),
    [(kind, message) for _, kind, message in QUOTED],
    ids=[f"line-{line}" for line, _, _ in QUOTED],
)
def test_a_quoted_message_is_in_the_source(kind, message):
    assert is_in_the_source(kind, message), f"{kind}: {message}"


def test_a_message_that_is_not_in_the_source_is_detected():
    known = "CheckpointStore(experiment=''): must be a string with a name."
    assert is_in_the_source("ValueError", known)
    assert not is_in_the_source("TypeError", known)
    assert not is_in_the_source("ValueError", known.replace("string", "text"))
    assert not is_in_the_source(None, "The trainer has no workers left, and says so.")


# ---- the reference

OLDER = {"raysgd.torch.constants", "raysgd.train.trainer"}
"""Modules for older scripts."""


def test_the_reference_has_the_names_of_every_public_module():
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^   (raysgd\S*)$", text, re.MULTILINE)) & SURFACE.keys()
    names = {name for module in documented for name in SURFACE[module].split()}
    assert {home for home, own in SURFACE.items() if not {*own.split()} <= names} == OLDER


def test_the_page_of_callbacks_has_a_row_for_each():
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "callbacks.md").read_text(encoding="utf-8"), re.M)
    documented = {name for row in rows for name in re.findall(r"`([A-Z]\w+)\(", row)}
    others = {"BatchProgress", "Callback", "CallInfo", "History", "LoggerCallback"}
    assert documented == {*SURFACE["raysgd.callbacks"].split()} - others
