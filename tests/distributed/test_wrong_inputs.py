"""What users get wrong: each has an error of its own that says what was given and what to do.

Where it can be known at once, no worker is started; nothing is left behind in any case; and
after an error in a call the trainer works on.
"""

import contextlib
import copy
import os
import pickle
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from raysgd import TorchTrainer, TrainingOperator
from raysgd.data import Dataset
from raysgd.errors import (
    CheckpointError,
    InsufficientResourcesError,
    RemoteError,
    RemoteTraceback,
    WorkerLostError,
)
from raysgd.torch import CreatorOperator
from raysgd.utils import BATCH_SIZE, NUM_SAMPLES
from tests.conftest import alive_actors, wait_until
from tests.operators import Classifier, make_data, make_model, parameters, replica_hash


def actors():
    """Return Ray's table of all actors that there ever were, by id."""
    from ray._private.state import actors

    return actors()


def assert_names(error, words):
    text = str(error)
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} not in: {text}"


@contextlib.contextmanager
def refused(error, *words):
    """Expect an error that holds the words, and that no worker was started."""
    known = set(actors())
    with pytest.raises(error) as caught:
        yield caught
    assert_names(caught.value, words)
    assert set(actors()) == known


def with_setup(function, **methods):
    """Make an operator class of a setup function; such a class is pickled by value."""
    return type("Operator", (TrainingOperator,), {"setup": function, **methods})


def register_all(operator, **changes):
    """Register a small model with all that belongs to it."""
    model = make_model()
    given = {
        "models": model,
        "optimizers": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "criterion": nn.CrossEntropyLoss(),
    }
    operator.model, operator.optimizer, operator.criterion = operator.register(
        **{**given, **changes}
    )[:3]
    operator.register_data(train_loader=DataLoader(make_data(64), batch_size=16))


# ---- arguments of the constructor

OPERATOR = {"training_operator_cls": Classifier}
TWO = {**OPERATOR, "num_workers": 2}

WRONG_ARGUMENTS = {
    "operator_is_a_number": (
        {"training_operator_cls": 5},
        TypeError,
        ["training_operator_cls", "TrainingOperator", "5"],
    ),
    "operator_is_an_instance": (
        {"training_operator_cls": Classifier({})},
        TypeError,
        ["training_operator_cls", "not an instance", "Classifier"],
    ),
    "operator_is_another_class": (
        {"training_operator_cls": nn.Linear},
        TypeError,
        ["training_operator_cls", "subclass", "Linear"],
    ),
    "operator_has_no_setup": (
        {"training_operator_cls": type("Bare", (TrainingOperator,), {})},
        NotImplementedError,
        ["Bare", "setup(self, config)"],
    ),
    "operator_is_missing": ({"num_workers": 2}, TypeError, ["training_operator_cls"]),
    "creator_operator_without_creators": (
        {"training_operator_cls": CreatorOperator},
        (TypeError, NotImplementedError),
        ["CreatorOperator", "from_creators"],
    ),
    "unknown_keyword": ({**OPERATOR, "num_worker": 2}, TypeError, ["'num_worker'"]),
    "num_workers_zero": ({**OPERATOR, "num_workers": 0}, ValueError, ["num_workers=0", "1"]),
    "num_workers_negative": ({**OPERATOR, "num_workers": -2}, ValueError, ["num_workers=-2", "1"]),
    "num_workers_float": ({**OPERATOR, "num_workers": 2.0}, TypeError, ["num_workers=2.0", "int"]),
    "num_workers_bool": ({**OPERATOR, "num_workers": True}, TypeError, ["num_workers=True", "int"]),
    "num_workers_text": ({**OPERATOR, "num_workers": "2"}, TypeError, ["num_workers='2'", "int"]),
    "min_workers_zero": (
        {**TWO, "min_workers": 0},
        ValueError,
        ["min_workers=0", "num_workers=2", "between 1 and num_workers"],
    ),
    "min_workers_above_num_workers": (
        {**TWO, "min_workers": 3},
        ValueError,
        ["min_workers=3", "num_workers=2", "between 1 and num_workers"],
    ),
    "min_workers_float": ({**TWO, "min_workers": 1.0}, TypeError, ["min_workers=1.0", "int"]),
    "backend_unknown": ({**TWO, "backend": "mpi"}, ValueError, ["'mpi'", "'gloo'", "'nccl'"]),
    "backend_none": ({**TWO, "backend": None}, ValueError, ["backend=None", "'gloo'", "'nccl'"]),
    "nccl_with_gpus_refused": (
        {**TWO, "backend": "nccl", "use_gpu": False},
        ValueError,
        ["nccl", "use_gpu=True", "gloo"],
    ),
    "nccl_on_a_cluster_without_gpus": (
        {**TWO, "backend": "nccl"},
        ValueError,
        ["nccl", "GPU", "gloo"],
    ),
    "use_gpu_text": ({**TWO, "use_gpu": "yes"}, ValueError, ["use_gpu='yes'", "True", "'auto'"]),
    "use_gpu_number": ({**TWO, "use_gpu": 1}, ValueError, ["use_gpu=1", "True", "'auto'"]),
    "use_gpu_none": ({**TWO, "use_gpu": None}, ValueError, ["use_gpu=None", "True", "'auto'"]),
    "timeout_zero": ({**TWO, "timeout_s": 0}, ValueError, ["timeout_s=0", "positive"]),
    "timeout_negative": ({**TWO, "timeout_s": -1.5}, ValueError, ["timeout_s=-1.5", "positive"]),
    "timeout_text": ({**TWO, "timeout_s": "60"}, ValueError, ["timeout_s='60'", "number"]),
    "timeout_nan": ({**TWO, "timeout_s": float("nan")}, ValueError, ["timeout_s=nan"]),
    "timeout_infinite": ({**TWO, "timeout_s": float("inf")}, ValueError, ["timeout_s=inf"]),
    "config_is_a_list": (
        {**TWO, "config": [("lr", 1)]},
        TypeError,
        ["config", "dict", "('lr', 1)"],
    ),
    "config_is_a_text": ({**TWO, "config": "lr=1"}, TypeError, ["config", "dict", "'lr=1'"]),
    "batch_smaller_than_workers": (
        {**TWO, "config": {BATCH_SIZE: 1}},
        ValueError,
        ["BATCH_SIZE", "1", "num_workers=2"],
    ),
    "batch_negative": ({**TWO, "config": {BATCH_SIZE: -8}}, ValueError, ["BATCH_SIZE", "-8"]),
    "batch_float": ({**TWO, "config": {BATCH_SIZE: 32.0}}, TypeError, ["BATCH_SIZE", "32.0"]),
    "batch_text": ({**TWO, "config": {BATCH_SIZE: "32"}}, TypeError, ["BATCH_SIZE", "'32'"]),
    "cpus_zero": (
        {**TWO, "num_cpus_per_worker": 0},
        ValueError,
        ["num_cpus_per_worker=0", "above 0"],
    ),
    "cpus_text": ({**TWO, "num_cpus_per_worker": "1"}, ValueError, ["num_cpus_per_worker='1'"]),
    "resources_is_a_list": (
        {**TWO, "resources_per_worker": ["GPU"]},
        TypeError,
        ["resources_per_worker", "dict", "['GPU']"],
    ),
    "resources_negative": (
        {**TWO, "resources_per_worker": {"disk": -1}},
        ValueError,
        ["resources_per_worker", "'disk'", "-1"],
    ),
    "resources_with_cpus": (
        {**TWO, "resources_per_worker": {"CPU": 2}},
        ValueError,
        ["resources_per_worker", "num_cpus_per_worker"],
    ),
    "resources_with_gpus_that_are_refused": (
        {**TWO, "resources_per_worker": {"GPU": 1}, "use_gpu": False},
        ValueError,
        ["resources_per_worker", "GPU", "use_gpu=False"],
    ),
    "scheduler_step_freq_unknown": (
        {**TWO, "scheduler_step_freq": "step"},
        ValueError,
        ["scheduler_step_freq='step'", "'batch'", "'epoch'", "'manual'"],
    ),
    "hook_not_callable": (
        {**TWO, "initialization_hook": "print"},
        TypeError,
        ["initialization_hook", "function", "'print'"],
    ),
    "config_cannot_be_pickled": (
        {**TWO, "config": {"lock": threading.Lock()}},
        TypeError,
        ["config['lock']", "setup()"],
    ),
    "hook_cannot_be_pickled": (
        {**TWO, "initialization_hook": threading.Lock().acquire},
        TypeError,
        ["initialization_hook", "lock"],
    ),
}


@pytest.mark.parametrize("case", WRONG_ARGUMENTS)
def test_wrong_argument_is_refused_before_a_worker_starts(ray_cluster, case):
    arguments, error, words = WRONG_ARGUMENTS[case]
    with refused(error, *words):
        TorchTrainer(**arguments)


def test_positional_arguments_are_refused(ray_cluster):
    with refused(TypeError, "positional"):
        TorchTrainer(Classifier, None, {}, 2)


OLD_ARGUMENTS = {
    "model_creator": "from_creators",
    "data_creator": "from_creators",
    "optimizer_creator": "from_creators",
    "scheduler_creator": "from_creators",
    "loss_creator": "from_creators",
    "num_replicas": "num_workers",
    "batch_size": "BATCH_SIZE",
    "apex_args": "register",
    "data_loader_args": "DataLoader",
}


@pytest.mark.parametrize("name", OLD_ARGUMENTS)
def test_argument_of_the_oldest_library_is_refused_with_its_replacement(ray_cluster, name):
    with refused(DeprecationWarning, name, OLD_ARGUMENTS[name]):
        TorchTrainer(training_operator_cls=Classifier, **{name: make_model})


def test_script_of_the_oldest_library_is_told_what_replaces_its_creators(ray_cluster):
    with refused(DeprecationWarning, "model_creator", "from_creators"):
        TorchTrainer(model_creator=make_model, data_creator=make_data, num_workers=2)


def test_start_timeout_that_is_no_number_is_refused(ray_cluster, monkeypatch):
    monkeypatch.setenv("SGD_PLACEMENT_GROUP_TIMEOUT_S", "soon")
    with refused(ValueError, "SGD_PLACEMENT_GROUP_TIMEOUT_S", "'soon'", "positive number"):
        TorchTrainer(**TWO)


# ---- more than the cluster has


@pytest.mark.parametrize(
    ("arguments", "requested", "words"),
    [
        pytest.param(
            {"num_workers": 2, "min_workers": 2, "num_cpus_per_worker": 3},
            {"CPU": 3},
            ["2 workers", "3 CPU", "has 4 CPU", "4 CPU are free"],
            id="cpus",
        ),
        pytest.param(
            {"num_workers": 1, "use_gpu": True},
            {"CPU": 1, "GPU": 1},
            ["1 worker", "1 GPU", "has 4 CPU, 0 GPU"],
            id="gpus",
        ),
        pytest.param(
            {"num_workers": 2, "resources_per_worker": {"licence": 1}},
            {"CPU": 1, "licence": 1},
            ["1 worker", "1 licence", "0 licence"],
            id="custom_resource",
        ),
    ],
)
def test_too_few_resources_are_shown_beside_what_was_asked_for(
    ray_cluster, arguments, requested, words
):
    """At once, since this Ray gets no more nodes while the caller waits."""
    started = time.monotonic()
    with refused(InsufficientResourcesError, *words, "num_cpus_per_worker") as caught:
        TorchTrainer(training_operator_cls=Classifier, **arguments)
    assert time.monotonic() - started < 20
    assert caught.value.requested == requested
    assert caught.value.total["CPU"] == 4


# ---- what setup registers; on one worker in this process, where such errors are the same


def scheduler_of(operator):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    operator.register(models=model, optimizers=optimizer, schedulers=scheduler)


WRONG_SETUPS = {
    "nothing_registered": (lambda op, config: None, RuntimeError, ["setup", "self.register("]),
    "only_data_registered": (
        lambda op, config: op.register_data(train_loader=[]),
        RuntimeError,
        ["setup", "self.register("],
    ),
    "registered_twice": (
        lambda op, config: (register_all(op), register_all(op)),
        RuntimeError,
        ["register()", "twice", "lists"],
    ),
    "model_not_a_module": (
        lambda op, config: register_all(op, models=make_model),
        TypeError,
        ["models", "Module", "make_model"],
    ),
    "model_in_list_not_a_module": (
        lambda op, config: register_all(op, models=[make_model(), "model"]),
        TypeError,
        ["models", "Module", "'model'"],
    ),
    "no_models": (
        lambda op, config: register_all(op, models=[]),
        ValueError,
        ["models", "empty"],
    ),
    "optimizer_not_an_optimizer": (
        lambda op, config: register_all(op, optimizers="sgd"),
        TypeError,
        ["optimizers", "Optimizer", "'sgd'"],
    ),
    "scheduler_not_a_scheduler": (
        lambda op, config: register_all(op, schedulers=0.5),
        TypeError,
        ["schedulers", "scheduler", "0.5"],
    ),
    "ddp_args_not_a_dict": (
        lambda op, config: register_all(op, ddp_args=["find_unused_parameters"]),
        TypeError,
        ["ddp_args", "dict", "['find_unused_parameters']"],
    ),
    "scheduler_without_frequency": (
        lambda op, config: scheduler_of(op),
        ValueError,
        ["schedulers", "scheduler_step_freq", '"batch"', '"epoch"', '"manual"'],
    ),
    "loader_not_iterable": (
        lambda op, config: (register_all(op), op.register_data(validation_loader=3)),
        TypeError,
        ["validation_loader", "iterable", "3"],
    ),
}


@pytest.mark.parametrize("case", WRONG_SETUPS)
def test_wrong_registration_is_refused(case):
    setup, error, words = WRONG_SETUPS[case]
    with pytest.raises(error) as caught:
        TorchTrainer(training_operator_cls=with_setup(setup), use_local=True)
    assert_names(caught.value, words)


@pytest.mark.parametrize(
    "name",
    ["model_creator", "optimizer_creator", "data_creator", "loss_creator", "scheduler_creator"],
)
def test_creator_that_is_not_callable_is_refused_when_the_class_is_made(name):
    creators = {"model_creator": make_model, "optimizer_creator": make_model, name: "creator"}
    with pytest.raises(TypeError) as caught:
        TrainingOperator.from_creators(**creators)
    assert_names(caught.value, [name, "function", "'creator'"])


def test_more_than_two_created_loaders_are_refused():
    cls = TrainingOperator.from_creators(
        lambda config: make_model(),
        lambda model, config: torch.optim.SGD(model.parameters(), lr=0.1),
        data_creator=lambda config: [DataLoader(make_data(8))] * 3,
    )
    with pytest.raises(ValueError, match="3 loaders") as caught:
        TorchTrainer(training_operator_cls=cls, use_local=True)
    assert_names(caught.value, ["data_creator", "train loader", "validation loader"])


@pytest.mark.parametrize("name", ["model", "optimizer", "criterion"])
def test_missing_attribute_of_the_default_step_is_named(name):
    def setup(operator, config):
        register_all(operator)
        delattr(operator, name)

    trainer = TorchTrainer(training_operator_cls=with_setup(setup), use_local=True)
    with pytest.raises(RuntimeError) as caught:
        trainer.train()
    assert_names(caught.value, [f"self.{name}", "train_batch", "self.register("])


def test_several_models_need_a_step_of_their_own():
    def setup(operator, config):
        models = [make_model(), make_model()]
        optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)
        register_all(operator, models=models, optimizers=optimizer)

    trainer = TorchTrainer(training_operator_cls=with_setup(setup), use_local=True)
    with pytest.raises(RuntimeError) as caught:
        trainer.train()
    assert_names(caught.value, ["model", "2", "train_batch", "Override"])


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        pytest.param(DataLoader(make_data(8), batch_size=9, drop_last=True), ["9"], id="dropped"),
        pytest.param([], ["[]"], id="empty_list"),
        pytest.param(iter(()), ["train loader"], id="empty_iterator"),
    ],
)
def test_train_loader_without_a_batch_is_refused(loader, words):
    def setup(operator, config):
        register_all(operator)
        operator.register_data(train_loader=loader)

    trainer = TorchTrainer(training_operator_cls=with_setup(setup), use_local=True)
    with pytest.raises(RuntimeError) as caught:
        trainer.train()
    assert_names(caught.value, ["train loader", "no", *words])


def test_missing_train_loader_is_named():
    def setup(operator, config):
        model = make_model()
        operator.register(models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.1))

    trainer = TorchTrainer(training_operator_cls=with_setup(setup), use_local=True)
    with pytest.raises(RuntimeError) as caught:
        trainer.train()
    assert_names(caught.value, ["train loader", "register_data(train_loader=", "setup"])


# ---- failures on workers while they start


def start(**arguments):
    TorchTrainer(num_workers=2, **arguments)


def raise_on_rank_one(operator, config):
    """Fail on one worker; the other waits for it when it wraps its model."""
    if operator.world_rank == 1:
        raise LookupError("no data here", time.time())
    register_all(operator)


def test_exception_in_setup_of_one_worker_surfaces_as_itself_at_once(ray_cluster):
    with pytest.raises(LookupError) as caught:
        start(training_operator_cls=with_setup(raise_on_rank_one))
    assert type(caught.value) is LookupError
    assert caught.value.args[0] == "no data here"
    # not after the collective's timeout of half an hour, for which the other worker would wait
    assert time.time() - caught.value.args[1] < 5
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert_names(caught.value.__cause__, ["worker 1", "raise_on_rank_one", "no data here"])
    wait_until(lambda: not alive_actors())


@pytest.fixture
def no_process_group():
    """Check that the test leaves no process group in the driver, where the next would fail."""
    yield
    try:
        wait_until(lambda: not dist.is_initialized(), timeout_s=5)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_exception_in_setup_of_one_worker_frees_the_one_in_the_driver(
    ray_cluster, no_process_group
):
    with pytest.raises(LookupError) as caught:
        start(training_operator_cls=with_setup(raise_on_rank_one), use_local=True)
    assert time.time() - caught.value.args[1] < 5
    wait_until(lambda: not alive_actors())


def fail_on_rank_one(operator, batch, batch_info):
    if operator.world_rank == 1:
        raise LookupError("no luck here")
    return TrainingOperator.train_batch(operator, batch, batch_info)


def test_exception_in_a_call_leaves_the_driver_as_it_was(ray_cluster, no_process_group):
    operator_cls = with_setup(lambda op, config: register_all(op), train_batch=fail_on_rank_one)
    with (
        pytest.raises(LookupError, match="no luck here"),
        TorchTrainer(training_operator_cls=operator_cls, num_workers=2, use_local=True) as trainer,
    ):
        trainer.train()
    wait_until(lambda: not alive_actors())


class UnpicklableError(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


def raise_unpicklable(operator, config):
    raise UnpicklableError("holds a lock")


def test_exception_that_cannot_be_pickled_is_reported_by_name_and_text(ray_cluster):
    with pytest.raises(RemoteError) as caught:
        start(training_operator_cls=with_setup(raise_unpicklable))
    assert_names(caught.value, ["UnpicklableError", "holds a lock"])
    assert_names(caught.value.__cause__, ["raise_unpicklable", "holds a lock"])
    wait_until(lambda: not alive_actors())


def leave(operator, config):
    sys.exit()


def test_sys_exit_in_setup_does_not_end_the_driver_silently(ray_cluster):
    with pytest.raises(BaseException) as caught:  # noqa: PT011  which one is checked below
        start(training_operator_cls=with_setup(leave))
    # raised as itself it would end the driver's program without a word, and with status 0
    assert isinstance(caught.value, Exception)
    assert_names(caught.value, ["SystemExit"])
    assert_names(caught.value.__cause__, ["leave", "sys.exit()"])
    wait_until(lambda: not alive_actors())


def die(operator, config):
    if operator.world_rank == 1:
        os._exit(1)
    register_all(operator)


def test_worker_that_dies_in_setup_is_a_lost_worker(ray_cluster):
    with pytest.raises(WorkerLostError) as caught:
        start(training_operator_cls=with_setup(die))
    assert caught.value.rank == 1
    assert caught.value.node_id
    assert caught.value.cause
    # it died while the trainer was made, not in a train() with a number of retries
    assert_names(caught.value, ["worker 1", "starting"])
    assert "max_retries" not in str(caught.value)
    wait_until(lambda: not alive_actors())


def raising_hook():
    raise OSError("no such interface")


def test_exception_in_the_initialization_hook_surfaces_as_itself(ray_cluster):
    with pytest.raises(OSError, match="no such interface") as caught:
        start(training_operator_cls=Classifier, initialization_hook=raising_hook)
    assert_names(caught.value.__cause__, ["raising_hook"])
    wait_until(lambda: not alive_actors())


def test_wrong_registration_on_two_workers_leaves_none_behind(ray_cluster):
    setup, error, words = WRONG_SETUPS["model_not_a_module"]
    with pytest.raises(error) as caught:
        start(training_operator_cls=with_setup(setup))
    assert_names(caught.value, words)
    wait_until(lambda: not alive_actors())


# ---- calls on a trainer, which works on after each of them


class Moody(Classifier):
    """Does in a batch what the caller's information says; has no validation loader."""

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
        if mood == "samples":
            metrics[NUM_SAMPLES] = "many"
        if mood == "unpicklable metric":
            metrics["lock"] = threading.Lock()
        if mood == "exit":
            sys.exit()
        if mood == "unpicklable error":
            raise UnpicklableError("holds a lock")
        return metrics

    def train_epoch(self, iterator, info=None, num_steps=None, epoch_idx=0):
        result = super().train_epoch(iterator, info, num_steps, epoch_idx)
        return None if (info or {}).get("mood") == "no result" else result


class Custom:
    """An object of a type that a file may not hold."""


class Evil:
    """Runs a command when it is unpickled without care."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.fixture(scope="class")
def shared_trainer(cluster):
    with TorchTrainer(training_operator_cls=Moody, num_workers=2, timeout_s=60) as trainer:
        yield trainer
    wait_until(lambda: not alive_actors())


@pytest.fixture
def trainer(shared_trainer):
    """A trainer that must be usable after the test, with the same two workers in step."""
    pids = shared_trainer.apply_all_workers(os.getpid)
    yield shared_trainer
    shared_trainer.apply_all_workers(os.getpid)  # brings together again what an error parted
    done = shared_trainer.global_step
    assert shared_trainer.train(num_steps=1)["num_samples"] == 32
    assert shared_trainer.global_step == done + 1
    assert shared_trainer.apply_all_workers(os.getpid) == pids
    hashes = shared_trainer.apply_all_operators(replica_hash)
    assert hashes[0] == hashes[1]


WRONG_CALLS = {
    "no_steps": (lambda t: t.train(num_steps=0), ValueError, ["num_steps=0", "1"]),
    "negative_steps": (lambda t: t.train(num_steps=-1), ValueError, ["num_steps=-1", "1"]),
    "half_a_step": (lambda t: t.train(num_steps=0.5), TypeError, ["num_steps", "int", "0.5"]),
    "steps_true": (lambda t: t.train(num_steps=True), TypeError, ["num_steps", "int", "True"]),
    "no_validation_steps": (lambda t: t.validate(num_steps=0), ValueError, ["num_steps=0", "1"]),
    "validation_steps_text": (lambda t: t.validate(num_steps="1"), TypeError, ["num_steps", "'1'"]),
    "negative_retries": (lambda t: t.train(max_retries=-1), ValueError, ["max_retries=-1", "0"]),
    "retries_float": (lambda t: t.train(max_retries=1.5), TypeError, ["max_retries", "1.5"]),
    "info_is_a_list": (lambda t: t.train(info=[1]), TypeError, ["info", "dict", "[1]"]),
    "validation_info_is_a_text": (
        lambda t: t.validate(info="exam"),
        TypeError,
        ["info", "dict", "'exam'"],
    ),
    "info_cannot_be_pickled": (
        lambda t: t.train(info={"lock": threading.Lock()}),
        TypeError,
        ["train", "pickled", "lock"],
    ),
    "dataset_is_a_list": (
        lambda t: t.train(dataset=[1, 2]),
        TypeError,
        ["dataset", "raysgd.data.Dataset", "[1, 2]"],
    ),
    "dataset_is_a_loader": (
        lambda t: t.train(dataset=DataLoader(make_data(8))),
        TypeError,
        ["dataset", "raysgd.data.Dataset", "DataLoader"],
    ),
    "dataset_is_empty": (
        lambda t: t.train(dataset=Dataset([])),
        RuntimeError,
        ["no batch", "0 samples"],
    ),
    "no_validation_loader": (
        lambda t: t.validate(),
        RuntimeError,
        ["validation loader", "register_data(validation_loader="],
    ),
    "batch_returns_nothing": (
        lambda t: t.train(info={"mood": "nothing"}),
        TypeError,
        ["Moody.train_batch", "NoneType", "dict"],
    ),
    "batch_returns_a_text": (
        lambda t: t.train(info={"mood": "text"}),
        TypeError,
        ["Moody.train_batch", "str", "dict"],
    ),
    "epoch_returns_nothing": (
        lambda t: t.train(info={"mood": "no result"}),
        TypeError,
        ["Moody.train_epoch", "NoneType", "dict"],
    ),
    "num_samples_is_a_text": (
        lambda t: t.train(info={"mood": "samples"}),
        TypeError,
        ["train_batch", "num_samples", "many"],
    ),
    "metric_cannot_be_pickled": (
        lambda t: t.train(info={"mood": "unpicklable metric"}),
        TypeError,
        ["worker", "lock"],
    ),
    "error_cannot_be_pickled": (
        lambda t: t.train(info={"mood": "unpicklable error"}),
        RemoteError,
        ["UnpicklableError", "holds a lock"],
    ),
    "no_function_for_workers": (
        lambda t: t.apply_all_workers(3),
        TypeError,
        ["apply_all_workers", "function", "3"],
    ),
    "no_function_for_operators": (
        lambda t: t.apply_all_operators(None),
        TypeError,
        ["apply_all_operators", "function", "None"],
    ),
    "function_that_cannot_be_sent": (
        lambda t: t.apply_all_workers(threading.Lock().acquire),
        TypeError,
        ["pickled", "lock"],
    ),
    "function_whose_result_cannot_be_sent": (
        lambda t: t.apply_all_workers(threading.Lock),
        TypeError,
        ["worker", "lock"],
    ),
    "function_that_raises": (
        lambda t: t.apply_all_operators(lambda op: op.no_such_attribute),
        AttributeError,
        ["no_such_attribute"],
    ),
    "operator_is_not_local": (
        lambda t: t.get_local_operator(),
        NotImplementedError,
        ["get_local_operator", "use_local=True"],
    ),
    "save_without_a_path": (lambda t: t.save(None), TypeError, ["None"]),
    "load_without_a_path": (lambda t: t.load(None), TypeError, ["None"]),
    "state_is_none": (lambda t: t.load_state_dict(None), CheckpointError, ["state", "models"]),
    "state_is_a_text": (lambda t: t.load_state_dict("x"), CheckpointError, ["state", "models"]),
    "state_is_empty": (lambda t: t.load_state_dict({}), CheckpointError, ["state", "models"]),
}


class TestCallsOnATrainer:
    @pytest.mark.parametrize("case", WRONG_CALLS)
    def test_wrong_call_is_refused(self, trainer, case):
        call, error, words = WRONG_CALLS[case]
        with pytest.raises(error) as caught:
            call(trainer)
        assert_names(caught.value, words)

    def test_sys_exit_in_a_batch_does_not_end_the_driver_silently(self, trainer):
        with pytest.raises(BaseException) as caught:  # noqa: PT011  checked below
            trainer.train(info={"mood": "exit"})
        assert isinstance(caught.value, Exception)
        assert_names(caught.value, ["SystemExit"])

    def test_step_that_was_done_before_the_error_counts_at_once(self, trainer):
        done = trainer.global_step
        with pytest.raises(TypeError, match="train_batch"):
            trainer.train(info={"mood": "nothing"})
        # the batch's update had been made
        assert trainer.global_step == done + 1

    # -- files that cannot be written

    def test_save_into_a_missing_folder_is_refused(self, trainer, tmp_path):
        path = tmp_path / "missing" / "model.pt"
        with pytest.raises(CheckpointError) as caught:
            trainer.save(path)
        assert_names(caught.value, [str(path), "missing", "does not exist"])

    def test_save_to_a_folder_is_refused(self, trainer, tmp_path):
        with pytest.raises(CheckpointError) as caught:
            trainer.save(tmp_path)
        assert_names(caught.value, [str(tmp_path), "is a folder"])
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.skipif(not os.path.isdir("/proc"), reason="a folder where nobody can write")
    def test_save_where_the_system_does_not_allow_it_is_refused(self, trainer):
        with pytest.raises(CheckpointError) as caught:
            trainer.save("/proc/model.pt")
        assert_names(caught.value, ["/proc/model.pt"])

    def test_own_state_that_could_not_be_loaded_again_is_not_saved(self, trainer, tmp_path):
        path = tmp_path / "model.pt"
        trainer.apply_all_operators(lambda op: setattr(op, "own_state", {"own": Custom()}))
        with pytest.raises(CheckpointError) as caught:
            trainer.save(path)
        trainer.apply_all_operators(lambda op: setattr(op, "own_state", {}))
        assert_names(caught.value, [str(path), "state_dict()", "add_safe_globals"])
        assert list(tmp_path.iterdir()) == []

    # -- files that cannot be read

    def test_missing_file_is_refused(self, trainer, tmp_path):
        path = tmp_path / "model.pt"
        with pytest.raises(CheckpointError) as caught:
            trainer.load(path)
        assert_names(caught.value, [str(path), "no such file"])

    def test_folder_is_not_loaded(self, trainer, tmp_path):
        with pytest.raises(CheckpointError) as caught:
            trainer.load(tmp_path)
        assert_names(caught.value, [str(tmp_path), "folder"])

    @pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "text"])
    def test_damaged_file_is_refused_and_changes_nothing(self, trainer, tmp_path, damage):
        path = tmp_path / "model.pt"
        trainer.save(path)
        held = trainer.apply_all_operators(replica_hash)
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
        with pytest.raises(CheckpointError) as caught:
            trainer.load(path)
        assert_names(caught.value, [str(path), "damaged"])
        assert trainer.apply_all_operators(replica_hash) == held

    @pytest.mark.parametrize(
        "content",
        [
            pytest.param({"weight": torch.ones(2)}, id="a_model_only"),
            pytest.param(torch.ones(3), id="a_tensor"),
            pytest.param([1, 2], id="a_list"),
            pytest.param({"models": [], "epoch": 3}, id="without_optimizers"),
        ],
    )
    def test_file_of_something_else_is_refused(self, trainer, tmp_path, content):
        path = tmp_path / "model.pt"
        torch.save(content, path)
        with pytest.raises(CheckpointError) as caught:
            trainer.load(path)
        assert_names(caught.value, [str(path), "no state of a trainer", "optimizers"])

    @pytest.mark.parametrize("writer", ["torch", "pickle"])
    def test_no_code_in_a_file_is_run(self, trainer, tmp_path, writer):
        path, marker = tmp_path / "model.pt", tmp_path / "was_here"
        state = {"models": Evil(marker), "optimizers": [], "epoch": 1}
        if writer == "torch":
            torch.save(state, path)
        else:
            path.write_bytes(pickle.dumps(state, protocol=2))
        with pytest.raises(CheckpointError) as caught:
            trainer.load(path)
        assert_names(caught.value, [str(path), "not allowed"])
        assert not marker.exists()

    # -- states that do not belong to this trainer

    @pytest.fixture
    def state(self, trainer):
        """The trainer's state, to be spoilt; the trainer gets it back unspoilt afterwards."""
        state = trainer.state_dict()
        yield copy.deepcopy(state)
        trainer.load_state_dict(state)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            pytest.param({"models": "abc"}, ["models"], id="models_is_a_text"),
            pytest.param({"models": 3}, ["models"], id="models_is_a_number"),
            pytest.param({"models": []}, ["models"], id="no_models"),
            pytest.param({"optimizers": []}, ["optimizers"], id="no_optimizers"),
            pytest.param({"optimizers": [{}]}, ["optimizer"], id="optimizer_is_empty"),
            pytest.param({"epoch": "three", "data": None}, ["epoch"], id="epoch_is_a_text"),
            pytest.param({"data": {"offset": "x"}}, ["data"], id="data_is_nonsense"),
            pytest.param({"global_step": None}, ["global_step"], id="global_step_is_none"),
        ],
    )
    def test_state_with_a_part_that_makes_no_sense_is_refused(self, trainer, state, change, words):
        assert_refused_without_a_trace(trainer, {**state, **change}, *words)

    def test_state_of_another_model_is_refused(self, trainer, state):
        torch.manual_seed(9)
        other = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))
        state["models"] = [other.state_dict()]
        assert_refused_without_a_trace(trainer, state, "model", "2.weight")

    def test_state_of_two_models_is_refused(self, trainer, state):
        state["models"] = state["models"] * 2
        assert_refused_without_a_trace(trainer, state, "models", "2", "1")

    def test_state_with_another_models_optimizer_is_refused(self, trainer, state):
        other = torch.optim.SGD(nn.Linear(3, 3, bias=False).parameters(), lr=0.1)
        state["optimizers"] = [other.state_dict()]
        state["models"] = [{name: value + 1 for name, value in state["models"][0].items()}]
        assert_refused_without_a_trace(trainer, state, "optimizer")

    def test_file_of_another_trainer_is_refused(self, trainer, state, tmp_path):
        def setup(operator, config):
            model = nn.Linear(3, 3)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            register_all(operator, models=model, optimizers=optimizer)

        path = tmp_path / "other.pt"
        TorchTrainer(training_operator_cls=with_setup(setup), use_local=True).save(path)
        with pytest.raises(CheckpointError) as caught:
            trainer.load(path)
        assert_names(caught.value, ["model"])


def assert_refused_without_a_trace(trainer, state, *words):
    """Check that a state is refused, and that nothing of it was taken over."""
    held = trainer.apply_all_operators(replica_hash)
    reached = trainer.epoch, trainer.global_step
    with pytest.raises(CheckpointError) as caught:
        trainer.load_state_dict(state)
    assert_names(caught.value, words)
    assert trainer.apply_all_operators(replica_hash) == held
    assert (trainer.epoch, trainer.global_step) == reached


# ---- calls after the end

CALLS_AFTER_THE_END = {
    "train": lambda t, state, path: t.train(),
    "validate": lambda t, state, path: t.validate(),
    "update_scheduler": lambda t, state, path: t.update_scheduler(0.5),
    "get_model": lambda t, state, path: t.get_model(),
    "get_local_operator": lambda t, state, path: t.get_local_operator(),
    "state_dict": lambda t, state, path: t.state_dict(),
    "load_state_dict": lambda t, state, path: t.load_state_dict(state),
    "save": lambda t, state, path: t.save(path),
    "load": lambda t, state, path: t.load(path),
    "apply_all_workers": lambda t, state, path: t.apply_all_workers(os.getpid),
    "apply_all_operators": lambda t, state, path: t.apply_all_operators(parameters),
}


@pytest.fixture(scope="module")
def ended_trainers(cluster, tmp_path_factory):
    """Two trainers that are shut down, one of which never needed Ray, a state and its file."""
    path = tmp_path_factory.mktemp("ended") / "model.pt"
    remote = TorchTrainer(training_operator_cls=Moody, num_workers=2)
    state = remote.state_dict()
    remote.save(path)
    remote.shutdown()
    alone = TorchTrainer(training_operator_cls=Moody, use_local=True)
    alone.shutdown()
    return [remote, alone], state, path


@pytest.mark.parametrize("call", CALLS_AFTER_THE_END)
def test_call_after_shutdown_says_that_the_trainer_is_shut_down(ended_trainers, call):
    trainers, state, path = ended_trainers
    known = set(actors())
    for trainer in trainers:
        with pytest.raises(RuntimeError, match="shut down"):
            CALLS_AFTER_THE_END[call](trainer, state, path)
    assert set(actors()) == known


def test_shutdown_after_shutdown_does_nothing(ended_trainers):
    for trainer in ended_trainers[0]:
        trainer.shutdown()
        trainer.shutdown(force=True)


def test_what_a_trainer_reached_can_be_read_after_its_end(ray_cluster):
    with TorchTrainer(training_operator_cls=Moody, use_local=True) as trainer:
        trainer.train()
    assert (trainer.epoch, trainer.global_step) == (1, 4)
    assert trainer.latest_metrics["num_samples"] == 64
    assert trainer.num_workers == 0
