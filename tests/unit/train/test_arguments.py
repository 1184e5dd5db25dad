"""Arguments of trainers and executors."""

import functools
import re
import threading
from pathlib import Path

import pytest

from raysgd.train.arguments import bind_config, make_folder, pickle_function, run_folder
from raysgd.train.backend import BackendConfig, BackendExecutor
from raysgd.train.configs import FailureConfig, ScalingConfig, executor_arguments
from raysgd.train.constants import DEFAULT_RESULTS_DIR
from raysgd.train.worker_group import group_options


@pytest.mark.parametrize(
    ("given", "expected"), [(3, (3, 3)), ((1, 3), (1, 3)), ([2, 2], (2, 2)), ((1, 1), (1, 1))]
)
def test_a_number_of_workers_may_be_a_range(given, expected):
    options = group_options(given)
    assert (options.min_workers, options.num_workers) == expected


@pytest.mark.parametrize(
    "size", [0, -1, 10**6, True, 1.5, "2", None, (2, 1), (0, 1), (1, 2, 3), (1, 2.0)]
)
def test_a_wrong_number_of_workers_is_refused(size):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the start of the message is below
        group_options(size)
    assert str(caught.value).startswith(f"num_workers={size!r}: must be")


@pytest.mark.parametrize(
    ("amounts", "bundle"),
    [
        ((1, 0, None), {"CPU": 1}),
        ((0.5, 2, {"a": 1.5, "b": 0}), {"CPU": 0.5, "GPU": 2, "a": 1.5}),
        ((0, 0, {"a": 1}), {"a": 1}),
    ],
)
def test_a_worker_reserves_its_amounts(amounts, bundle):
    assert group_options(1, *amounts).bundle == bundle


@pytest.mark.parametrize(
    ("amounts", "match"),
    [
        ((-1, 0, None), r"CPU=-1\): must be at least 0"),
        ((1, float("nan"), None), r"GPU=nan\): must be at least 0"),
        ((1, 0, {"license": "1"}), r"license='1'\): must be a number"),
        ((1, 0, {"license": True}), r"license=True\): must be a number"),
        ((0, 0, {"a": 0}), "must reserve a CPU"),
    ],
)
def test_wrong_amounts_are_refused(amounts, match):
    with pytest.raises((TypeError, ValueError), match=match):
        group_options(1, *amounts)


def test_workers_are_packed_unless_arguments_or_the_environment_say_otherwise(monkeypatch):
    monkeypatch.delenv("TRAIN_ENABLE_WORKER_SPREAD", raising=False)
    monkeypatch.setenv("TRAIN_PLACEMENT_GROUP_TIMEOUT_S", "7")
    options = group_options(2)
    assert (options.placement_strategy, options.start_timeout_s) == ("PACK", 7)
    assert group_options(2, placement_strategy="STRICT_PACK").placement_strategy == "STRICT_PACK"
    monkeypatch.setenv("TRAIN_ENABLE_WORKER_SPREAD", "1")
    assert group_options(2, placement_strategy="PACK").placement_strategy == "SPREAD"


def executor(use_gpu, resources):
    arguments = executor_arguments(ScalingConfig(1, use_gpu, resources), FailureConfig())
    return BackendExecutor(BackendConfig(), **arguments)


@pytest.mark.parametrize(
    ("use_gpu", "resources", "expected"),
    [
        (False, {"CPU": 2, "custom": 3}, (2, 0, {"custom": 3})),
        (True, None, (1, 1, {})),
        (1, None, (1, 1, {})),
        (0, None, (1, 0, {})),
        (True, {"GPU": 0.5}, (1, 0.5, {})),
    ],
)
def test_resources_of_a_worker(use_gpu, resources, expected):
    before = dict(resources or {})
    options = executor(use_gpu, resources).options
    assert (options.num_cpus, options.num_gpus, options.resources) == expected
    assert before == (resources or {})


@pytest.mark.parametrize(
    "function",
    [
        lambda config: config,
        functools.partial(lambda config, data: config, data=1),
        lambda config, verbose=False: config,
        lambda config, **options: config,
        lambda *arguments: arguments[0],
    ],
)
def test_a_function_with_one_required_parameter_gets_the_config(function):
    assert bind_config(function, {"a": 2})() == {"a": 2}
    assert bind_config(function, None)() == {}


@pytest.mark.parametrize(
    "function",
    [lambda num_epochs=3: num_epochs, lambda **options: 3, functools.partial(lambda n: n, 3)],
)
def test_a_function_without_required_parameters_gets_no_argument(function, caplog):
    assert bind_config(function, {})() == 3
    assert caplog.messages == []
    assert bind_config(lambda num_epochs=3: num_epochs, {"lr": 0.1})() == 3
    assert "is called without the config" in caplog.text


def generator(config):
    yield config


async def coroutine(config):
    """Runs only if it is awaited."""


class Callable:
    async def __call__(self, config):
        """Runs only if it is awaited."""


@pytest.mark.parametrize(
    ("function", "error", "match"),
    [
        (lambda config, extra: 1, ValueError, "requires 2 arguments"),
        (functools.partial(lambda a, b, c: 1, 1), ValueError, "requires 2 arguments"),
        (5, ValueError, "must be callable, but it is 5"),
        (generator, TypeError, "must be a plain function, not a generator"),
        (coroutine, TypeError, "must be a plain function, not a generator"),
        (Callable(), TypeError, "must be a plain function, not a generator"),
        (functools.partial(coroutine, {}), TypeError, "must be a plain function, not a generator"),
    ],
)
def test_a_wrong_function_is_refused(function, error, match):
    with pytest.raises(error, match=match):
        bind_config(function, {})


@pytest.mark.parametrize(
    ("locked_config", "name"), [(True, r"config\['b'\]"), (False, "the training function")]
)
def test_what_cannot_be_pickled_is_named(locked_config, name):
    lock = threading.Lock()
    config = {"a": 1, "b": lock if locked_config else 2}
    function = (lambda config: 1) if locked_config else (lambda config: lock)
    with pytest.raises(TypeError, match=rf"Cannot send {name} .* cannot be pickled"):
        pickle_function(bind_config(function, config))


@pytest.mark.parametrize(
    ("given", "expected"),
    [("mine", "ray_results/mine"), ("~/own", "own"), (Path("/elsewhere"), "/elsewhere")],
)
def test_relative_folders_are_below_the_results_of_ray(monkeypatch, tmp_path, given, expected):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run_folder("train", given) == tmp_path / expected


def test_by_default_a_folder_has_the_date():
    folder = run_folder("train", None)
    assert re.fullmatch(r"train_\d{4}(-\d\d){2}_\d\d(-\d\d){2}", folder.name)
    assert folder.parent == DEFAULT_RESULTS_DIR


def test_a_folder_for_a_run_gets_a_number_if_it_exists(tmp_path):
    wanted = tmp_path / "deep" / "run"
    names = [make_folder(wanted).name for _ in range(3)]
    assert names == ["run", "run_002", "run_003"]
    (tmp_path / "disk").symlink_to(tmp_path / "not mounted")
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "disk" / "run")
