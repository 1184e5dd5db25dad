"""Wrong inputs raise errors of the right type, which name the argument and say what to do.

These errors need no workers in other processes, so no test starts Ray. The trainer still works
after a wrong call. tests/distributed has the errors that only workers detect.
"""

import copy
import os
import pickle
import sys
import threading

import pytest
import ray
import torch
from torch import nn
from torch.utils.data import DataLoader

from raysgd import TorchTrainer, TrainingOperator
from raysgd.data import Dataset
from raysgd.errors import CheckpointError, RemoteError
from raysgd.torch import CreatorOperator
from raysgd.utils import BATCH_SIZE, NUM_SAMPLES
from tests.conftest import assert_names
from tests.operators import Classifier, make_data, make_model, register_all, replica_hash


def actors():
    """Return the IDs of all actors, dead ones included, or None if Ray is not running."""
    if not ray.is_initialized():
        return None
    from ray._private.state import actors

    return set(actors())


@pytest.fixture(autouse=True)
def no_worker_started():
    """Fail if a test starts Ray, or an actor if Ray is already running."""
    known = actors()
    yield
    assert actors() == known


def check(call, error, words):
    with pytest.raises(error) as caught:
        call()
    assert_names(caught.value, words)


def rows(table, num_values):
    """Return the rows of a table for `parametrize`, with the words of each in one tuple."""
    return [(*row[:num_values], row[num_values:]) for row in table]


def with_setup(function):
    """Make an operator class of a setup function."""
    return type("Operator", (TrainingOperator,), {"setup": function})


# ---- arguments of the constructor

OPERATOR = {"training_operator_cls": Classifier}


def generating():
    yield os.environ


async def asynchronous():
    """Not called."""


async def both():
    yield os.environ


class Asynchronous:
    async def __call__(self):
        """Not called."""


TWO = {**OPERATOR, "num_workers": 2, "use_gpu": False}
LOCAL_TWO = {**TWO, "use_local": True}

WRONG_VALUES = [
    # The message contains the argument with its value, and the words.
    ("num_workers", 0, ValueError, "1"),
    ("num_workers", -2, ValueError, "1"),
    ("num_workers", 10**6, ValueError, "at most 10000"),
    ("num_workers", 2.5, TypeError, "int"),
    ("num_workers", True, TypeError, "int"),
    ("num_workers", "2", TypeError, "int"),
    ("min_workers", 0, ValueError, "num_workers=2", "between 1 and num_workers"),
    ("min_workers", 3, ValueError, "num_workers=2", "between 1 and num_workers"),
    ("min_workers", 1.5, TypeError, "int"),
    ("min_workers", None, TypeError, "int"),
    ("backend", "mpi", ValueError, "'gloo'", "'nccl'"),
    ("backend", None, ValueError, "'gloo'", "'nccl'"),
    ("use_gpu", "yes", ValueError, "True", "'auto'"),
    ("use_gpu", 1, ValueError, "True", "'auto'"),
    ("use_gpu", None, ValueError, "True", "'auto'"),
    ("timeout_s", 0, ValueError, "positive"),
    ("timeout_s", -1.5, ValueError, "positive"),
    ("timeout_s", "60", ValueError, "number"),
    ("timeout_s", float("nan"), ValueError),
    ("timeout_s", float("inf"), ValueError),
    ("num_cpus_per_worker", 0, ValueError, "above 0"),
    ("num_cpus_per_worker", "1", ValueError),
    ("scheduler_step_freq", "step", ValueError, "'batch'", "'epoch'", "'manual'"),
    ("use_fp16", "half", ValueError, "True"),
    ("use_fp16", 1, ValueError),
]


@pytest.mark.parametrize(("name", "value", "error", "words"), rows(WRONG_VALUES, 3))
def test_wrong_value_is_refused_before_a_worker_starts(name, value, error, words):
    given = {**TWO, name: value}
    check(lambda: TorchTrainer(**given), error, [f"{name}={value!r}", *words])


HALF = {**TWO, "use_fp16": True}
OLDEST = {
    "model_creator": "from_creators",
    "data_creator": "from_creators",
    "optimizer_creator": "from_creators",
    "scheduler_creator": "from_creators",
    "loss_creator": "from_creators",
    "num_replicas": "num_workers",
    "batch_size": "BATCH_SIZE",
    "apex_args": "use_fp16",
    "data_loader_args": "DataLoader",
}
WITH_LOCK = type("Op", (Classifier,), {"lock": threading.Lock()})
WITHOUT_SETUP = type("Bare", (TrainingOperator,), {})


def of(operator_cls):
    return {"training_operator_cls": operator_cls}


def needs(resources):
    return {**TWO, "resources_per_worker": resources}


WRONG_ARGUMENTS = [
    (of(5), TypeError, "training_operator_cls", "TrainingOperator", "5"),
    (of(Classifier({})), TypeError, "training_operator_cls", "not an instance", "Classifier"),
    (of(nn.Linear), TypeError, "training_operator_cls", "subclass", "Linear"),
    (of(WITHOUT_SETUP), NotImplementedError, "Bare", "setup(self, config)"),
    ({"num_workers": 2}, TypeError, "training_operator_cls"),
    (of(CreatorOperator), (TypeError, NotImplementedError), "CreatorOperator", "from_creators"),
    ({**OPERATOR, "num_worker": 2}, TypeError, "'num_worker'", "'num_workers'"),
    ({**TWO, "backend": "nccl"}, ValueError, "nccl", "use_gpu=True", "gloo"),
    (
        {**LOCAL_TWO, "use_gpu": True},
        ValueError,
        "use_local=True, use_gpu=True",
        "needs num_workers=1",
        "use_gpu=False",
    ),
    ({**TWO, "config": [("lr", 1)]}, TypeError, "config", "dict", "('lr', 1)"),
    ({**TWO, "config": "lr=1"}, TypeError, "config", "dict", "'lr=1'"),
    ({**TWO, "config": {BATCH_SIZE: 1}}, ValueError, "BATCH_SIZE", "1", "num_workers=2"),
    ({**TWO, "config": {BATCH_SIZE: -8}}, ValueError, "BATCH_SIZE", "-8"),
    ({**TWO, "config": {BATCH_SIZE: 32.5}}, TypeError, "BATCH_SIZE", "32.5"),
    ({**TWO, "config": {BATCH_SIZE: "32"}}, TypeError, "BATCH_SIZE", "'32'"),
    (needs(["GPU"]), TypeError, "resources_per_worker", "dict", "['GPU']"),
    (needs({"disk": 0}), ValueError, "resources_per_worker", "'disk'", "above 0"),
    (needs({"disk": -1}), ValueError, "resources_per_worker", "'disk'", "-1"),
    (needs({"CPU": 2}), ValueError, "resources_per_worker", "num_cpus_per_worker"),
    (needs({"GPU": 1}), ValueError, "resources_per_worker", "GPU", "use_gpu=False"),
    (
        {**OPERATOR, "use_local": True, "resources_per_worker": {"GPU": 0.5}},
        ValueError,
        "use_local=True",
        "{'GPU': 0.5}",
        "one GPU",
        "Remove GPU",
    ),
    ({**HALF, "amp_dtype": torch.float64}, ValueError, "amp_dtype", "torch.bfloat16"),
    ({**HALF, "amp_dtype": "float16"}, ValueError, "amp_dtype='float16'"),
    ({**TWO, "amp_dtype": torch.float16}, ValueError, "amp_dtype", "pass use_fp16=True"),
    ({**TWO, "use_fp16": "apex"}, ValueError, "apex.amp", "Pass use_fp16=True"),
    ({**TWO, "config": {"lock": threading.Lock()}}, TypeError, "config['lock']", "setup()"),
    ({**TWO, **of(WITH_LOCK)}, TypeError, "training_operator_cls", "lock"),
    *(
        ({**TWO, "initialization_hook": hook}, TypeError, "initialization_hook", *words)
        for hook, *words in (
            ("print", "function", "'print'"),
            (generating, "generating", "plain function"),
            (asynchronous, "asynchronous", "plain function"),
            (both, "both", "plain function"),
            (Asynchronous(), "Asynchronous", "plain function"),
            (threading.Lock().acquire, "lock"),
        )
    ),
    *(
        ({**OPERATOR, name: make_model}, DeprecationWarning, f"{name}=", "Use ", instead)
        for name, instead in OLDEST.items()
    ),
    # The error is about model_creator, not about the missing operator class.
    ({"model_creator": make_model, "num_workers": 2}, DeprecationWarning, "model_creator"),
]


@pytest.mark.parametrize(("arguments", "error", "words"), rows(WRONG_ARGUMENTS, 2))
def test_wrong_argument_is_refused_before_a_worker_starts(arguments, error, words):
    check(lambda: TorchTrainer(**arguments), error, words)


def test_positional_arguments_are_refused():
    check(lambda: TorchTrainer(Classifier, None, {}, 2), TypeError, ["positional"])


@pytest.mark.parametrize("text", ["0", "soon"])
def test_start_timeout_that_is_no_number_is_refused(monkeypatch, text):
    monkeypatch.setenv("SGD_PLACEMENT_GROUP_TIMEOUT_S", text)
    # The check must come before any use of Ray.
    monkeypatch.setattr("raysgd.loop.options._gpus_in_cluster", lambda: 1 / 0)
    words = ["SGD_PLACEMENT_GROUP_TIMEOUT_S", repr(text), "positive number"]
    check(lambda: TorchTrainer(**{**TWO, "use_gpu": "auto"}), ValueError, words)


# ---- what setup registers


def with_scheduler(operator, config):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    operator.register(models=model, optimizers=optimizer, schedulers=scheduler)


def registering(**arguments):
    return lambda operator, config: register_all(operator, **arguments)


def with_loaders(**loaders):
    def setup(operator, config):
        register_all(operator)
        operator.register_data(**loaders)

    return setup


def twice(operator, config):
    register_all(operator)
    register_all(operator)


TWO_LOADERS = {"a": DataLoader([1]), "b": DataLoader([1])}
FREQUENCIES = ['"batch"', '"epoch"', '"manual"']
WRONG_SETUPS = [
    # A SystemExit would end the driver without a message, with status 0.
    (lambda op, config: sys.exit(), RemoteError, "SystemExit", "sys.exit("),
    (lambda op, config: None, RuntimeError, "setup", "self.register("),
    (
        lambda op, config: op.register_data(train_loader=[]),
        RuntimeError,
        "setup",
        "self.register(",
    ),
    (twice, RuntimeError, "register()", "twice", "lists"),
    (registering(models=make_model), TypeError, "models", "Module", "make_model"),
    (registering(models=[make_model(), "model"]), TypeError, "models", "Module", "'model'"),
    (registering(models=[]), ValueError, "models", "empty"),
    (registering(optimizers="sgd"), TypeError, "optimizers", "Optimizer", "'sgd'"),
    (registering(schedulers=0.5), TypeError, "schedulers", "scheduler", "0.5"),
    (registering(ddp_args=["a"]), TypeError, "ddp_args", "dict", "['a']"),
    (with_scheduler, ValueError, "schedulers", "scheduler_step_freq", *FREQUENCIES),
    (with_loaders(train_loader=TWO_LOADERS), TypeError, "one loader", "dict of 2", "ConcatDataset"),
    (with_loaders(validation_loader=3), TypeError, "validation_loader", "iterable", "3"),
    (with_loaders(train_loader=torch.ones(3, 8)), TypeError, "Tensor", "samples", "DataLoader"),
]


@pytest.mark.parametrize(("setup", "error", "words"), rows(WRONG_SETUPS, 2))
def test_wrong_registration_is_refused(setup, error, words):
    operator_cls = with_setup(setup)
    check(lambda: TorchTrainer(training_operator_cls=operator_cls, use_local=True), error, words)


# ---- errors that the first step detects


def without(name):
    def setup(operator, config):
        register_all(operator)
        delattr(operator, name)

    return setup


def with_two_models(operator, config):
    models = [make_model(), make_model()]
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)
    register_all(operator, models=models, optimizers=optimizer)


def without_a_loader(operator, config):
    model = make_model()
    operator.register(models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1))


UNTRAINABLE = {
    **{
        f"no_{name}": (without(name), [f"self.{name}", "train_batch", "self.register("])
        for name in ("model", "optimizer", "criterion")
    },
    "two_models": (with_two_models, ["model", "2", "train_batch", "Override"]),
    "all_batches_dropped": (
        with_loaders(train_loader=DataLoader(make_data(8), batch_size=9, drop_last=True)),
        ["train loader", "no", "9"],
    ),
    "empty_list": (with_loaders(train_loader=[]), ["train loader", "no", "list"]),
    "empty_iterator": (with_loaders(train_loader=iter(())), ["train loader", "no"]),
    "no_loader": (without_a_loader, ["train loader", "register_data(train_loader=", "setup"]),
}


@pytest.mark.parametrize("case", UNTRAINABLE)
def test_operator_that_cannot_train_says_what_it_lacks(case):
    setup, words = UNTRAINABLE[case]
    trainer = TorchTrainer(training_operator_cls=with_setup(setup), use_local=True)
    check(trainer.train, RuntimeError, words)


# ---- calls on a trainer, which still works after each of them


class Moody(Classifier):
    """Returns the wrong result that `info["mood"]` selects. Has no validation loader."""

    own_state = {}  # noqa: RUF012  replaced as a whole, never changed

    def setup(self, config):
        register_all(self)

    def state_dict(self):
        return self.own_state

    def train_batch(self, batch, batch_info):
        mood = (batch_info["info"] or {}).get("mood")
        metrics = super().train_batch(batch, batch_info)
        if mood == "nothing":
            return None
        if mood == "text":
            return "fine"
        if mood == "number as name":
            metrics[5] = 1.0
        if isinstance(mood, dict):
            metrics |= mood
        return metrics

    def train_epoch(self, iterator, info=None, num_steps=None, epoch_idx=0):
        result = super().train_epoch(iterator, info, num_steps, epoch_idx)
        mood = (info or {}).get("mood")
        if mood == "no samples in all":
            result[NUM_SAMPLES] = -result[NUM_SAMPLES]
        return None if mood == "no result" else result


@pytest.fixture(scope="module")
def shared_trainer():
    with TorchTrainer(training_operator_cls=Moody, use_local=True) as trainer:
        yield trainer


@pytest.fixture
def trainer(shared_trainer):
    """A trainer that must be usable after the test."""
    yield shared_trainer
    done = shared_trainer.global_step
    assert shared_trainer.train(num_steps=1)["num_samples"] == 16
    assert shared_trainer.global_step == done + 1


WRONG_CALLS = [
    ("train", {"num_steps": 0}, ValueError, "num_steps=0", "1"),
    ("train", {"num_steps": -1}, ValueError, "num_steps=-1", "1"),
    ("train", {"num_steps": 0.5}, TypeError, "num_steps", "int", "0.5"),
    ("train", {"num_steps": True}, TypeError, "num_steps", "int", "True"),
    ("validate", {"num_steps": 0}, ValueError, "num_steps=0", "1"),
    ("validate", {"num_steps": "1"}, TypeError, "num_steps", "'1'"),
    ("validate", {"num_steps": True}, TypeError, "num_steps", "int", "True"),
    ("train", {"max_retries": -1}, ValueError, "max_retries=-1", "0"),
    ("train", {"max_retries": 1.5}, TypeError, "max_retries", "1.5"),
    ("train", {"info": [1]}, TypeError, "info", "dict", "[1]"),
    ("validate", {"info": "exam"}, TypeError, "info", "dict", "'exam'"),
    ("train", {"dataset": [1, 2]}, TypeError, "dataset", "raysgd.data.Dataset", "[1, 2]"),
    ("train", {"dataset": DataLoader([1])}, TypeError, "raysgd.data.Dataset", "DataLoader"),
    ("train", {"dataset": Dataset([])}, RuntimeError, "no batch", "0 samples"),
    ("validate", {}, RuntimeError, "validation loader", "register_data(validation_loader="),
    ("apply_all_workers", {"fn": 3}, TypeError, "apply_all_workers", "function", "3"),
    ("apply_all_operators", {"fn": None}, TypeError, "apply_all_operators", "function", "None"),
    ("save", {"path": b"x.pt"}, TypeError, "path", "b'x.pt'"),
    ("save", {"path": "~nosuch/x.pt"}, CheckpointError, "'~nosuch/x.pt'", "home folder"),
    ("save", {"path": None}, TypeError, "None"),
    ("load", {"path": None}, TypeError, "None"),
    *(
        ("load_state_dict", {"state": state}, CheckpointError, "state", "models")
        for state in (None, "x", [1], {})
    ),
]


@pytest.mark.parametrize(("method", "arguments", "error", "words"), rows(WRONG_CALLS, 3))
def test_wrong_call_is_refused_and_trains_nothing(trainer, method, arguments, error, words):
    done = trainer.global_step
    check(lambda: getattr(trainer, method)(**arguments), error, words)
    assert trainer.global_step == done


WRONG_RESULTS = [
    ("nothing", TypeError, "Moody.train_batch", "NoneType", "dict"),
    ("text", TypeError, "Moody.train_batch", "str", "dict"),
    ("no result", TypeError, "Moody.train_epoch", "NoneType", "dict"),
    ({NUM_SAMPLES: "many"}, TypeError, "train_batch", "num_samples", "many"),
    *(
        ({NUM_SAMPLES: value}, ValueError, "train_batch", f"num_samples={value}", "at least 0")
        for value in (-1, float("nan"), float("inf"))
    ),
    ("no samples in all", ValueError, "train_epoch", "num_samples=-", "at least 0"),
    ("number as name", TypeError, "Moody.train_batch", "5", "must be a string"),
]


@pytest.mark.parametrize(("mood", "error", "words"), rows(WRONG_RESULTS, 2))
def test_wrong_result_of_an_overridden_method_is_named(trainer, mood, error, words):
    check(lambda: trainer.train(info={"mood": mood}), error, words)


# ---- files that cannot be written


class Custom:
    """A type that a state file may not contain."""


def test_save_into_a_missing_folder_is_refused(trainer, tmp_path):
    path = tmp_path / "missing" / "model.pt"
    words = [str(path), "No such file or directory"]
    check(lambda: trainer.save(path), CheckpointError, words)


def test_save_to_a_folder_is_refused(trainer, tmp_path):
    check(lambda: trainer.save(tmp_path), CheckpointError, [str(tmp_path), "Is a directory"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="a folder where nobody can write")
def test_save_where_the_system_does_not_allow_it_is_refused(trainer):
    check(lambda: trainer.save("/proc/model.pt"), CheckpointError, ["/proc/model.pt"])


def test_own_state_that_could_not_be_loaded_again_is_not_saved(trainer, tmp_path):
    path = tmp_path / "model.pt"
    operator = trainer.get_local_operator()
    operator.own_state = {"own": Custom()}
    words = [str(path), "state_dict()", "add_safe_globals"]
    check(lambda: trainer.save(path), CheckpointError, words)
    operator.own_state = {}
    assert list(tmp_path.iterdir()) == []


# ---- files that cannot be read


class Evil:
    """Creates a folder when it is unpickled without restrictions."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_missing_file_is_refused(trainer, tmp_path):
    path = tmp_path / "model.pt"
    check(lambda: trainer.load(path), CheckpointError, [str(path), "no such file"])


def test_folder_is_not_loaded(trainer, tmp_path):
    check(lambda: trainer.load(tmp_path), CheckpointError, [str(tmp_path), "folder"])


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "text"])
def test_damaged_file_is_refused_and_changes_nothing(trainer, tmp_path, damage):
    path = tmp_path / "model.pt"
    trainer.save(path)
    held = replica_hash(trainer.get_local_operator())
    whole = path.read_bytes()
    middle = len(whole) // 2
    path.write_bytes(
        {
            "empty": b"",
            "cut": whole[:middle],
            "flipped": whole[:-60] + bytes(255 - byte for byte in whole[-60:]),
            "text": b"epoch,loss\n1,0.5\n",
        }[damage]
    )
    check(lambda: trainer.load(path), CheckpointError, [str(path), "damaged"])
    assert replica_hash(trainer.get_local_operator()) == held


@pytest.mark.parametrize(
    "content",
    [
        pytest.param({"weight": torch.ones(2)}, id="a_model_only"),
        pytest.param(torch.ones(3), id="a_tensor"),
        pytest.param([1, 2], id="a_list"),
        pytest.param({"models": [], "epoch": 3}, id="without_optimizers"),
    ],
)
def test_file_of_something_else_is_refused(trainer, tmp_path, content):
    path = tmp_path / "model.pt"
    torch.save(content, path)
    words = [str(path), "not the state of a trainer", "optimizers"]
    check(lambda: trainer.load(path), CheckpointError, words)


@pytest.mark.parametrize("writer", ["torch", "pickle"])
def test_no_code_in_a_file_is_run(trainer, tmp_path, writer):
    path, marker = tmp_path / "model.pt", tmp_path / "was_here"
    state = {"models": Evil(marker), "optimizers": [], "epoch": 1}
    if writer == "torch":
        torch.save(state, path)
    else:
        path.write_bytes(pickle.dumps(state, protocol=2))
    check(lambda: trainer.load(path), CheckpointError, [str(path), "not allowed"])
    assert not marker.exists()


# ---- states that do not belong to this trainer


@pytest.fixture
def state(trainer):
    """A copy of the trainer's state to corrupt. The trainer is restored afterwards."""
    state = trainer.state_dict()
    yield copy.deepcopy(state)
    trainer.load_state_dict(state)


def state_of_another_model():
    other = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
    return [other.state_dict()]


WRONG_STATES = {
    "models_is_a_text": (lambda state: {"models": "abc"}, ["models"]),
    "models_is_a_number": (lambda state: {"models": 3}, ["models"]),
    "no_models": (lambda state: {"models": []}, ["models"]),
    "two_models": (lambda state: {"models": state["models"] * 2}, ["models", "2", "1"]),
    "another_model": (lambda state: {"models": state_of_another_model()}, ["model", "2.weight"]),
    "no_optimizers": (lambda state: {"optimizers": []}, ["optimizers"]),
    "optimizer_is_empty": (lambda state: {"optimizers": [{}]}, ["optimizer"]),
    "epoch_is_a_text": (lambda state: {"epoch": "three", "data": None}, ["epoch"]),
    "data_is_nonsense": (lambda state: {"data": {"offset": "x"}}, ["data"]),
    "global_step_is_none": (lambda state: {"global_step": None}, ["global_step"]),
}


@pytest.mark.parametrize("case", WRONG_STATES)
def test_state_of_something_else_is_refused_and_changes_nothing(trainer, state, case):
    changed, words = WRONG_STATES[case]
    operator = trainer.get_local_operator()
    held = replica_hash(operator), trainer.epoch, trainer.global_step
    spoilt = {**state, **changed(state)}
    check(lambda: trainer.load_state_dict(spoilt), CheckpointError, words)
    assert (replica_hash(operator), trainer.epoch, trainer.global_step) == held


def test_file_of_another_trainer_is_refused(trainer, state, tmp_path):
    def setup(operator, config):
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        register_all(operator, models=model, optimizers=optimizer)

    path = tmp_path / "other.pt"
    TorchTrainer(training_operator_cls=with_setup(setup), use_local=True).save(path)
    check(lambda: trainer.load(path), CheckpointError, ["model"])
