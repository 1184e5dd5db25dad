"""A class with one subclass is often one class. No files import each other in a circle."""

import ast
import graphlib

import grimp

from tests.contracts.test_modes import files

FOR_USERS = {"ImageClassifier", "text"}
OF_TWO_LAYERS = {
    "BaseTrainable",  # TensorFlow has a class of its own, and PyTorch a function
    "BatchSource",  # any iterable; the subclass is for those that workers partition
    "GradientExchange",  # the state of training has one, and its subclasses have the state
    "MicroBatching",  # Keras has no parts of batches
    "OperatorBase",  # two subclasses have the same name
    "TrainerProperties",
}
VARIANTS = {"OptimizerShards", "Stream", "TorchCreators", "UserWrappedExchange"}


def test_few_classes_have_exactly_one_subclass():
    trees = list(map(ast.parse, files().values()))
    classes = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    subclasses = {each.name: set() for each in classes}
    for each in classes:
        for base in each.bases:
            subclasses.get(ast.unparse(base).split(".")[-1], set()).add(each.name)
    found = {name for name, names in subclasses.items() if len(names) == 1}
    assert found == FOR_USERS | OF_TWO_LAYERS | VARIANTS


def test_no_circle_of_files_even_for_types():
    graph = grimp.build_graph("raysgd", cache_dir=None)
    imports = {each: graph.find_modules_directly_imported_by(each) for each in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()  # raises an error that names a circle
