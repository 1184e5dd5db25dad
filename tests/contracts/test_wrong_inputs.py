"""Wrong inputs raise errors of the right type, which name the argument and say what to do.

These errors need no workers in other processes, so no test starts Ray. The trainer still works
after a wrong call. tests/distributed has the errors that only workers detect.
"""

import asyncio
import copy
import os
import sys
import threading

import pytest
import torch
from torch.utils.data import DataLoader

from raysgd import TorchTrainer, TrainingOperator
from raysgd._internal.files import lock_of_node
from raysgd.callbacks.callback_list import as_logdir
from raysgd.cli.fit import read_settings
from raysgd.data import Dataset, Stream, jsonl, mix, parquet, text
from raysgd.errors import CheckpointError, RemoteError
from raysgd.torch import CreatorOperator
from raysgd.utils import BATCH_SIZE, NUM_SAMPLES
from tests.conftest import all_actors, assert_names
from tests.operators import Classifier, make_model, register_all


@pytest.fixture(autouse=True)
def no_worker_started():
    """Fail if a test starts Ray, or an actor if Ray is already running."""
    known = all_actors()
    yield
    assert all_actors() == known


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


TWO = {**OPERATOR, "num_workers": 2, "use_gpu": False}
LOCAL_TWO = {**TWO, "use_local": True}

WRONG_VALUES = [
    # The message contains the argument with its value, and the words.
    ("num_workers", 10**6, ValueError, "at most 10000"),
    ("num_workers", 0, ValueError, "at least 1"),
    ("num_workers", True, TypeError, "int"),
    ("num_workers", "2", TypeError, "int"),
    ("num_workers", (1, 2), TypeError, "min_workers"),
    ("min_workers", None, TypeError, "int"),
    ("backend", "mpi", ValueError, "'gloo'", "'nccl'"),
    ("use_gpu", "yes", ValueError, "True", "'auto'"),
    ("use_gpu", 1, ValueError, "True", "'auto'"),
    ("timeout_s", 0, ValueError, "above 0"),
    ("timeout_s", "60", ValueError, "seconds"),
    ("timeout_s", float("nan"), ValueError),
    ("timeout_s", 1e10, ValueError, "at most 1e9"),
    ("scheduler_step_freq", "step", ValueError, "'batch'", "'epoch'", "'manual'"),
    ("use_fp16", "half", ValueError, "True", "'apex'"),
    ("use_fp16", 1, ValueError),
]


@pytest.mark.parametrize(("name", "value", "error", "words"), rows(WRONG_VALUES, 3))
def test_wrong_value_is_refused_before_a_worker_starts(name, value, error, words):
    given = {**TWO, name: value}
    check(lambda: TorchTrainer(**given), error, [f"{name}={value!r}", *words])


HALF = {**TWO, "use_fp16": True}
OLDEST = {
    "loss_creator": "from_creators",
    "num_replicas": "num_workers",
    "batch_size": "BATCH_SIZE",
    "apex_args": "register",
    "data_loader_args": "DataLoader",
}
LOCK = threading.Lock()


def locked_operator():
    class Locked(Classifier):
        def setup(self, config):
            super().setup({"lock": LOCK})

    return Locked


def of(operator_cls):
    return {"training_operator_cls": operator_cls}


def needs(resources):
    return {**TWO, "resources_per_worker": resources}


def early_hooks():
    yield lambda: (LOCK, late)
    late = "has no value yet"


WRONG_ARGUMENTS = [
    (of(Classifier({})), TypeError, "training_operator_cls", "not an instance", "Classifier"),
    ({"num_workers": 2}, TypeError, "training_operator_cls"),
    (of(3), TypeError, "training_operator_cls=...) must be a subclass of", "but it is 3"),
    (of(torch.nn.Sequential(*[make_model()] * 9)), TypeError, "it is Sequential(", "(0): S"),
    (of(with_setup(TrainingOperator.setup)), NotImplementedError, "must override setup(self, con"),
    (of(CreatorOperator), (TypeError, NotImplementedError), "CreatorOperator", "from_creators"),
    ({**OPERATOR, "num_worker": 2}, TypeError, "'num_worker'", "'num_workers'"),
    ({**TWO, "backend": "nccl"}, ValueError, "nccl", "use_gpu=True", "gloo"),
    ({**LOCAL_TWO, "use_gpu": True}, ValueError, "use_gpu=True", "num_workers=1", "use_gpu=False"),
    ({**TWO, "config": "lr=1"}, TypeError, "config", "dict", "'lr=1'"),
    ({**TWO, "config": {BATCH_SIZE: 1}}, ValueError, "BATCH_SIZE", "1", "num_workers=2"),
    ({**TWO, "config": {BATCH_SIZE: 32.5}}, TypeError, "BATCH_SIZE", "32.5"),
    (needs(["GPU"]), TypeError, "resources_per_worker", "dict", "['GPU']"),
    (needs({"CPU": 2}), ValueError, "resources_per_worker", "num_cpus_per_worker"),
    ({**HALF, "amp_dtype": torch.float64}, ValueError, "amp_dtype", "torch.bfloat16"),
    ({**HALF, "amp_dtype": "float16"}, ValueError, "amp_dtype='float16'"),
    ({**TWO, "amp_dtype": torch.float16}, ValueError, "amp_dtype", "pass use_fp16=True"),
    ({**TWO, "config": {"a": {"lock": LOCK}}}, TypeError, "config['a']['lock']", "setup()"),
    ({**TWO, **of(locked_operator())}, TypeError, "training_operator_cls.setup (uses LOCK) to"),
    *(
        ({**TWO, "initialization_hook": hook}, TypeError, "initialization_hook", *words)
        for hook, *words in (
            ("print", "function", "'print'"),
            (generating, "generating", "plain function"),
            (lambda: LOCK, "hook (uses LOCK) to the workers", "lock"),
            (next(early_hooks()), "hook to the workers", "lock"),
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


def test_positional_creators_of_ray_0_8_are_refused_with_the_new_way():
    words = ("model_creator=", "TrainingOperator.from_creators")
    check(lambda: TorchTrainer(make_model, generating, make_model), DeprecationWarning, words)
    check(lambda: TorchTrainer(TrainingOperator), TypeError, ("cls=TrainingOperator",))


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


def with_optimizer_of_another(operator, config):
    register_all(operator, optimizers=torch.optim.SGD(make_model().parameters(), lr=0.1))


def with_scheduler_of_another(operator, config):
    other = torch.optim.SGD(make_model().parameters(), lr=0.1)
    register_all(operator, schedulers=torch.optim.lr_scheduler.StepLR(other, 1))


TWO_LOADERS = {"a": DataLoader([1]), "b": DataLoader([1])}
FREQUENCIES = ['"batch"', '"epoch"', '"manual"']
WRONG_SETUPS = [
    # A SystemExit would end the driver without a message, with status 0.
    (lambda op, config: sys.exit(), RemoteError, "SystemExit", "sys.exit("),
    (lambda op, _: op.register_data(train_loader=[]), RuntimeError, "setup", "self.register("),
    (twice, RuntimeError, "register()", "twice", "lists"),
    (registering(models=make_model), TypeError, "models", "Module", "make_model"),
    (registering(models=[make_model(), "model"]), TypeError, "models", "Module", "'model'"),
    (registering(models=[]), ValueError, "models", "empty"),
    (registering(optimizers="sgd"), TypeError, "optimizers", "Optimizer", "'sgd'"),
    (registering(schedulers=0.5), TypeError, "schedulers", "scheduler", "0.5"),
    (registering(ddp_args=["a"]), TypeError, "ddp_args", "dict", "['a']"),
    (with_scheduler, ValueError, "schedulers", "scheduler_step_freq", *FREQUENCIES),
    (with_optimizer_of_another, ValueError, "optimizers", "no registered model", "SGD"),
    (with_scheduler_of_another, ValueError, "schedulers", "StepLR", "not registered"),
    (with_loaders(train_loader=Stream), TypeError, "train_loader", "iterable", "Stream"),
    (with_loaders(train_loader=TWO_LOADERS), TypeError, "one loader", "dict of 2", "ConcatDataset"),
    (with_loaders(train_loader=len), TypeError, "iterable", "but it is <built-in function len>"),
    (with_loaders(train_loader=generating()), TypeError, "a generator can be read only once"),
    (with_loaders(validation_loader=3), TypeError, "validation_loader", "iterable", "3"),
    (lambda op, config: None, RuntimeError, "Operator.setup did not register anything"),
    (with_loaders(train_loader=torch.ones(3, 8)), TypeError, "Tensor", "samples", "DataLoader"),
]


@pytest.mark.parametrize(("setup", "error", "words"), rows(WRONG_SETUPS, 2))
def test_wrong_registration_is_refused(setup, error, words):
    operator_cls = with_setup(setup)
    arguments = {"training_operator_cls": operator_cls, "use_local": True}
    if setup is with_scheduler_of_another:
        arguments["scheduler_step_freq"] = "epoch"
    check(lambda: TorchTrainer(**arguments), error, words)


# ---- calls on a trainer, which still works after each of them


class Moody(Classifier):
    """Returns the wrong result that `info["mood"]` selects. Has no validation loader."""

    def setup(self, config):
        register_all(self)

    def train_batch(self, batch, batch_info):
        mood = (batch_info["info"] or {}).get("mood")
        metrics = super().train_batch(batch, batch_info)
        if mood == "nothing":
            return None
        if mood == "text":
            return "fine"
        if mood == "large":
            return {"large": 10**400}
        if mood == "replaced":
            self.model[0] = torch.nn.Linear(8, 16)
        return metrics

    def train_epoch(self, iterator, info=None, num_steps=None, epoch_idx=0):
        result = super().train_epoch(iterator, info, num_steps, epoch_idx)
        mood = (info or {}).get("mood")
        if mood == "no samples in all":
            result[NUM_SAMPLES] = -result[NUM_SAMPLES]
        return {"large": 10**400} if mood == "large in all" else result


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
    ("train", {"num_steps": 0.5}, TypeError, "num_steps=0.5): must be an int"),
    ("validate", {"num_steps": "1"}, TypeError, "num_steps", "'1'"),
    ("train", {"max_retries": -1}, ValueError, "max_retries=-1", "0"),
    ("fit", {"num_epochs": None}, TypeError, "num_epochs=None", "an int, unless max_steps"),
    ("fit", {"num_epochs": 1, "max_steps": 0}, ValueError, "max_steps=0", "at least 1"),
    ("train", {"info": [1]}, TypeError, "info", "dict", "[1]"),
    ("validate", {"info": "exam"}, TypeError, "info", "dict", "'exam'"),
    ("train", {"dataset": [1, 2]}, TypeError, "dataset", "raysgd.data.Dataset", "[1, 2]"),
    ("train", {"dataset": Dataset([])}, RuntimeError, "no batch", "0 samples"),
    ("validate", {}, RuntimeError, "validation loader", "register_data(validation_loader="),
    ("apply_all_workers", {"fn": 3}, TypeError, "apply_all_workers", "function", "3"),
    ("apply_all_operators", {"fn": None}, TypeError, "apply_all_operators", "function", "None"),
    ("apply_all_workers", {"fn": asyncio.sleep}, TypeError, "apply_all_workers", "async", "sleep"),
    ("drain", {"rank": "0"}, TypeError, "drain(rank='0')", "int"),
    ("drain", {"node_id": 3}, TypeError, "node_id=3", "str"),
    ("drain", {"rank": 0, "deadline_s": "1"}, ValueError, "deadline_s='1'", "at least 0"),
    ("save_model", {"path": "weights.pt"}, ValueError, "'weights.pt'", ".safetensors"),
    ("save", {"path": b"x.pt"}, TypeError, "path", "b'x.pt'"),
    ("load", {"path": None}, TypeError, "None", "path or URL"),
    ("save", {"path": "~nosuch/x.pt"}, CheckpointError, "'~nosuch/x.pt'", "home folder"),
    ("save", {"path": "/missing/x.pt"}, CheckpointError, "/missing/x.pt: No such file"),
    ("load", {"path": "/dev/null"}, CheckpointError, "/dev/null is not a regular file"),
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
    ("large", ValueError, "'large'", "1329 bits", "1.8e308"),
    ("large in all", ValueError, "'large'", "1329 bits", "1.8e308"),
    ("no samples in all", ValueError, "train_epoch", "num_samples=-", "at least 0"),
]


@pytest.mark.parametrize(("mood", "error", "words"), rows(WRONG_RESULTS, 2))
def test_wrong_result_of_an_overridden_method_is_named(trainer, mood, error, words):
    check(lambda: trainer.train(info={"mood": mood}), error, words)


def test_new_parameters_without_an_optimizer_are_refused():
    trainer = TorchTrainer(training_operator_cls=Moody, use_local=True)
    words = ["changed after register()", "0.weight is new", "no optimizer has it"]
    check(lambda: trainer.train(info={"mood": "replaced"}), RuntimeError, words)


# ---- files


@pytest.fixture
def data(tmp_path):
    (tmp_path / "file.zip").write_text("no archive")
    return tmp_path


WRONG_FILES = [
    (lambda data: jsonl(None), TypeError, "jsonl(None)", "path"),
    (lambda data: jsonl([3]), TypeError, "jsonl([3])", "path"),
    (lambda data: text(""), TypeError, "text('')", "path"),
    (lambda data: parquet("x", columns="ab"), TypeError, "columns='ab'", "list"),
    (lambda data: parquet("x", columns=3), TypeError, "columns=3", "list"),
    (lambda data: jsonl("x", cache_dir=3), TypeError, "cache_dir", "3"),
    (lambda data: mix([], []), ValueError, "mix([])", "at least one"),
    (lambda data: as_logdir(data / "file.zip" / "run"), ValueError, "run'", "file.zip is a"),
    *(
        (lambda data, text=text: settings_of(data, text), ValueError, "run.yaml", word)
        for text, word in (
            ("config: {a: 1, b: 2, a: 3}", "'a' twice"),
            ("config: &a {b: *a}", "recursi"),
            ("config: {a: \xe9}", "utf-8"),
        )
    ),
    (lambda data: read_settings(None, ["config.n=[64"]), ValueError, "'config.n=[64'", "YAML"),
]


def settings_of(folder, text):
    (folder / "run.yaml").write_text(text, encoding="latin-1")
    return read_settings(folder / "run.yaml", [])


@pytest.mark.parametrize(("call", "error", "words"), rows(WRONG_FILES, 2))
def test_wrong_file_or_folder_is_named(data, call, error, words):
    check(lambda: call(data), error, words)


def test_lock_of_another_user_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / f"raysgd-data-{os.getuid()}.lock").mkdir()
    check(lock_of_node, RuntimeError, ["raysgd-data-", "TMPDIR"])


def test_a_trainer_is_not_copied(trainer):
    check(lambda: copy.deepcopy(trainer), TypeError, ["TorchTrainer", "copied", "state_dict()"])


@pytest.mark.parametrize("name", ["pipe", "link"])
@pytest.mark.parametrize("method", ["save", "save_model"])
def test_save_does_not_replace_a_device_or_a_pipe(trainer, tmp_path, method, name):
    os.mkfifo(pipe := tmp_path / "pipe")
    (tmp_path / "link").symlink_to(pipe)
    check(
        lambda: getattr(trainer, method)(tmp_path / name),
        CheckpointError,
        [f"Cannot save to {tmp_path / name}", f"{pipe} is not a regular file", "path of a file"],
    )
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    "content", [{"weight": torch.ones(2)}, {"models": [], "epoch": 3}], ids=["model", "part"]
)
def test_file_of_something_else_is_refused(trainer, tmp_path, content):
    path = tmp_path / "model.pt"
    torch.save(content, path)
    words = [str(path), "not the state of a trainer", "optimizers"]
    check(lambda: trainer.load(path), CheckpointError, words)
