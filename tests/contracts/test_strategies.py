"""Only the files of a strategy, and tables, name it. Only the file of updates assigns their fields.

Private names of libraries are in a table.
"""

import ast
import re
from pathlib import Path

import raysgd

ROOT = Path(raysgd.__file__).parents[1]
# Such as sharding, equal bits, and Horovod. Files, strings of messages, and docs count too.
WORDS = re.compile(
    r"\b(num_logical_workers|is_sharded|fully_sharded|use_horovod"
    r"|(?<!`)wrap_ddp|num_averaged|sum_over_workers|EqualBits\w*|FullySharded\w*|ShardedOptimizersPlacement|OptimizerShards"
    r"|HorovodExchange|DDPExchange|UserDDPExchange|IndependentModelsPlacement)\b"
)
ALLOWED = re.compile(
    r"torch/strategies/|(loop|torch|tf)/options\.py|(torch|tf)/trainer\.py"
    r"|tf/communication\.py|(comm|train|cli)/|raysgd/__init__\.py|horovod|equal_bits|shard"
)
OF_PYTHON = {"_asdict", "_current_frames", "_exit", "_getframe", "_internal", "_make", "_replace"}
PORTS = {"GradientExchange", "StatePlacement"}


def files():
    paths = [p for folder in ("raysgd", "operators") for p in (ROOT / folder).rglob("*.py")]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


NODES = [(name, node) for name, text in files().items() for node in ast.walk(ast.parse(text))]


def test_no_other_file_names_a_strategy():
    found = [
        f"{name}:{number}: {line.strip()}"
        for name, text in files().items()
        if not ALLOWED.search(name)
        for number, line in enumerate(text.splitlines(), start=1)
        if WORDS.search(line)
    ]
    assert found == []


def test_no_other_code_asks_for_the_class_of_a_strategy():
    known, before = set(PORTS), set()
    classes = [n for file, n in NODES if "strategies/" in file and isinstance(n, ast.ClassDef)]
    while known != before:  # add the classes that derive from known ones
        before = set(known)
        known |= {c.name for c in classes if {ast.unparse(base) for base in c.bases} & known}
    assert len(known) > 8
    for name, call in NODES:
        if isinstance(call, ast.Call) and "torch/strategies/" not in name:
            asks = ast.unparse(call.func).split(".")[-1] in ("isinstance", "issubclass", "feature")
            names = {n.id for a in call.args for n in ast.walk(a) if isinstance(n, ast.Name)}
            assert not (asks and names & known), (name, ast.unparse(call))


def test_no_other_file_assigns_a_field_of_an_update():
    fields = re.compile(r"\b_?(update|optimizer_steps|loss_weights)\.\w+$")
    stored = [(f, ast.unparse(n)) for f, n in NODES if type(getattr(n, "ctx", 0)) is ast.Store]
    found = [f for f, assigned in stored if fields.search(assigned)]
    assert [name for name in found if "loop/update" not in name] == []


def test_a_decision_lists_the_private_names_of_libraries():
    code, table = files(), (ROOT / "docs/adr/0041-private-names-of-libraries.md").read_text()
    used = set(re.findall(r"[\w)\]]\.(_[a-z]\w*)", text := "\n".join(code.values())))
    own = set(re.findall(r"(?:(?:def|class) |(?:self|cls)\.|^ *)(_\w+)", text, re.M))
    assert used - own - OF_PYTHON <= set(re.findall(r"`(_\w+)`", table))
    for names, paths in re.findall(r"^\| (`.*?) \| (`.*?) \|", table, re.M):
        of_row = "".join(code[f"raysgd/{path}"] for path in re.findall("`([^`]+)`", paths))
        assert [name for name in re.findall("`([^`]+)`", names) if name not in of_row] == []


def test_one_file_imports_a_private_module_of_keras_or_tensorflow():
    homes = {
        "keras.src": "raysgd/tf/private_keras.py",
        "tensorflow.python": "raysgd/comm/tensorflow.py",
    }
    for module, home in homes.items():
        assert [name for name, text in files().items() if module in text] == [home]


def test_no_satellite_reaches_into_the_training_state_of_an_operator():
    folder = re.compile(
        r"(raysgd/)?(callbacks|cli|operators|testing|torch/interop|train|trials|tune)\b"
    )
    reach = re.compile(r"(?<!\bself)\._train_state\b")
    assert [n for n, text in files().items() if folder.match(n) and reach.search(text)] == []
