"""Classes with one subclass, names in strings, and imports in a circle."""

import ast
import graphlib

import grimp

from tests.contracts.test_strategies import NODES

FOR_USERS = {"ImageClassifier", "text"}
OF_TWO_LAYERS = {
    "BaseTrainable",  # TensorFlow has a class of its own, and PyTorch a function
    "BatchSource",  # any iterable; the subclass is for those that workers partition
    "GradientExchange",  # the state of training has one, and its subclasses have the state
    "MicroBatching",  # Keras has no parts of batches
    "OperatorBase",  # two subclasses have the same name
    "TrainerProperties",
}
VARIANTS = {"OptimizerShards", "Stream", "TorchCreators", "UserDDPExchange"}


def test_few_classes_have_exactly_one_subclass():
    classes = [node for _, node in NODES if isinstance(node, ast.ClassDef)]
    subclasses = {each.name: set() for each in classes}
    for each in classes:
        for base in each.bases:
            subclasses.get(ast.unparse(base).split(".")[-1], set()).add(each.name)
    found = {name for name, names in subclasses.items() if len(names) == 1}
    assert found == FOR_USERS | OF_TWO_LAYERS | VARIANTS


def test_every_name_of_a_forwarded_path_is_defined():
    stored = [n for _, n in NODES if type(getattr(n, "ctx", 0)) is ast.Store]
    defined = {getattr(n, "attr", None) or getattr(n, "id", None) for n in stored}
    defined |= {n.name for _, n in NODES if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    calls = [n for _, n in NODES if isinstance(n, ast.Call) and n.args]
    firsts = [n.args[0] for n in calls if ast.unparse(n.func) in ("forward_to", "argument")]
    paths = [first.value for first in firsts if isinstance(first, ast.Constant)]
    assert len(paths) > 40
    assert {name for path in paths for name in path.split(".")} <= defined


def test_no_circle_of_files_even_for_types():
    graph = grimp.build_graph("raysgd", cache_dir=None)
    imports = {each: graph.find_modules_directly_imported_by(each) for each in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()  # raises an error that names a circle
