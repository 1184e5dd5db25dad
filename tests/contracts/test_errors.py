"""Each error keeps its type, text, and fields when it is pickled."""

import builtins
import inspect
import pickle
import re

import cloudpickle
import pytest

from raysgd import errors
from raysgd.loop.loop_control import StepInterruptedError
from raysgd.train.backend import (
    InactiveWorkerGroupError,
    TrainBackendError,
)

EXAMPLES = {
    "BadStepsError": errors.BadStepsError("too many", steps=[{"step": 5}]),
    "ReplicasDifferError": errors.ReplicasDifferError("differ", ranks=(2,)),
    "WorkerLostError": errors.WorkerLostError("gone", rank=3, node_id="ab", cause="OOM"),
    "StepInterruptedError": StepInterruptedError("stop"),
    "RemoteTraceback": errors.RemoteTraceback("all lines", "the last line"),
}
KINDS = [
    *(getattr(errors, name) for name in errors.__all__),
    InactiveWorkerGroupError,
    TrainBackendError,
    StepInterruptedError,
]


@pytest.mark.parametrize("pickler", [pickle, cloudpickle], ids=lambda module: module.__name__)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_pickles_with_its_fields(kind, pickler):
    own = vars(kind).get("__init__")
    num_fields = 0 if own is None else len(inspect.signature(own).parameters) - 2
    assert num_fields <= 0 or kind.__name__ in EXAMPLES  # otherwise, no field is compared
    error = EXAMPLES.get(kind.__name__) or kind("what happened")
    twin = pickle.loads(pickler.dumps(error))
    assert type(twin) is kind
    assert str(twin) == str(error)
    assert twin.args == error.args
    assert vars(twin) == vars(error)


def test_the_error_tree_in_the_module_docstring_is_true():
    tree = re.findall(r"── (\w+) +\(([^)]*)\)", errors.__doc__)
    assert {name for name, _ in tree} == {*errors.__all__} - {"RaySGDError", "RemoteTraceback"}
    for name, bases in tree:
        assert issubclass(getattr(errors, name), errors.RaySGDError)
        for base in bases.split(", "):
            assert issubclass(getattr(errors, name), getattr(builtins, base))
