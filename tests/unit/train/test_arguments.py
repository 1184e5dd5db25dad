"""What trainers and executors make of their arguments."""

import functools
import threading
from pathlib import Path

import cloudpickle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd.train.arguments import (
    bound_function,
    checked_size,
    make_folder,
    pickled_function,
    run_folder,
    worker_resources,
)

SIZES = st.integers(-2, 4)


@given(SIZES, SIZES)
def test_a_number_of_workers_may_be_a_range(fewest, most):
    if 1 <= fewest <= most:
        assert checked_size((fewest, most)) == checked_size([fewest, most]) == (fewest, most)
        assert checked_size(most) == (most, most)
    else:
        with pytest.raises(ValueError, match=r"at least 1, or \(min, max\)"):
            checked_size((fewest, most))


@pytest.mark.parametrize("size", [0, -1, 10**6, True, 1.5, (1, 2, 3), (1, 2.0), "2", None])
def test_what_is_no_number_of_workers_is_shown(size):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the start of the message is below
        checked_size(size)
    assert str(caught.value).startswith(f"num_workers={size!r}: must be")


def test_a_function_gets_the_config_if_it_takes_one():
    assert bound_function(lambda: 1, {"a": 2})() == 1
    assert bound_function(lambda config: config, {"a": 2})() == {"a": 2}
    assert bound_function(lambda config: config, None)() == {}


def test_resources_of_a_worker():
    given = {"CPU": 2, "custom": 3}
    assert worker_resources(False, given) == (2, 0, {"custom": 3})
    assert given == {"CPU": 2, "custom": 3}
    assert worker_resources(True, None) == (1, 1, {})
    assert worker_resources(True, {"GPU": 0.5}) == (1, 0.5, {})


def test_one_and_zero_say_whether_there_are_gpus():
    assert worker_resources(1, None) == worker_resources(True, None)
    assert worker_resources(0, None) == worker_resources(False, None)
    with pytest.raises(TypeError, match="use_gpu='yes': must be True or False"):
        worker_resources("yes", None)


def test_resources_that_contradict_use_gpu_say_how_to_agree():
    with pytest.raises(ValueError, match=r"'GPU': 0\.5.*pass use_gpu=True, or leave GPU out"):
        worker_resources(False, {"GPU": 0.5})
    with pytest.raises(ValueError, match=r"'GPU': 0\}.*pass use_gpu=False, or a positive"):
        worker_resources(True, {"GPU": 0})


def test_a_function_of_two_arguments_is_told_what_it_may_take():
    def train(config, extra):
        """Not called."""

    with pytest.raises(ValueError, match=r"no required argument, or one.*train.* requires 2"):
        bound_function(train, {})
    with pytest.raises(ValueError, match="must be callable, but it is 5"):
        bound_function(5, {})


def test_relative_folders_are_below_those_of_ray(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run_folder("mine", "train") == tmp_path / "ray_results" / "mine"
    assert run_folder("~/own", "train") == tmp_path / "own"
    assert run_folder(Path("/elsewhere"), "train") == Path("/elsewhere")
    by_date = run_folder(None, "train")
    assert by_date.parent == tmp_path / "ray_results"
    assert by_date.name.startswith("train_2")


@pytest.mark.parametrize("given", ["", "s3://bucket/runs", "~nosuch/runs", b"runs"])
def test_what_is_no_folder_is_refused(given):
    with pytest.raises((TypeError, ValueError), match="logdir"):
        run_folder(given, "train")


def test_a_function_travels_with_what_it_holds():
    held = [1, 2]
    assert cloudpickle.loads(pickled_function(lambda: held))() == held
    lock = threading.Lock()
    with pytest.raises(
        TypeError, match=r"Cannot send the training function .* inside of the train"
    ):
        pickled_function(lambda: lock)
    for function, named in (
        (lambda config: 1, r"config\['b'\]"),
        (lambda config: lock, "the train"),
    ):
        config = {"a": 1, "b": lock if "'b'" in named else 2}
        with pytest.raises(TypeError, match=rf"Cannot send {named}.* cannot be pickled"):
            pickled_function(bound_function(function, config))


def by_name(*, config):
    """Cannot be given the config by position."""


def test_a_function_that_takes_the_config_by_name_alone_is_an_error():
    with pytest.raises(ValueError, match="takes 'config' by name alone"):
        bound_function(by_name, {})


@pytest.mark.parametrize(
    "function",
    [
        functools.partial(lambda config, data: config, data=1),
        lambda config, verbose=False: config,
        lambda config, **options: config,
        lambda *arguments: arguments[0],
    ],
)
def test_a_function_with_one_required_parameter_gets_the_config(function):
    assert bound_function(function, {"a": 2})() == {"a": 2}


@pytest.mark.parametrize(
    "function",
    [lambda num_epochs=3: num_epochs, lambda **options: 3, functools.partial(lambda n: n, 3)],
)
def test_a_function_without_required_parameters_is_called_with_none(function, caplog):
    assert bound_function(function, {})() == 3
    assert caplog.messages == []


def test_a_config_that_no_parameter_takes_is_warned_about(caplog):
    assert bound_function(lambda num_epochs=3: num_epochs, {"lr": 0.1})() == 3
    assert "is called without the config" in caplog.text


def generator(config):
    """Does nothing when it is called."""
    yield config


async def coroutine(config):
    """Does nothing either."""


class Callable:
    async def __call__(self, config):
        """Nor does this."""


@pytest.mark.parametrize(
    "function", [generator, coroutine, Callable(), functools.partial(coroutine, {})]
)
def test_a_function_that_a_call_would_not_run_is_an_error(function):
    with pytest.raises(TypeError, match="is a generator or async function"):
        bound_function(function, {})


def test_a_function_without_a_signature_is_to_be_wrapped():
    with pytest.raises(ValueError, match="Cannot tell which arguments <class 'dict'> takes"):
        bound_function(dict, {})


def test_a_folder_that_cannot_be_made_is_an_error_and_not_tried_for_ever(tmp_path):
    (tmp_path / "disk").symlink_to(tmp_path / "not mounted")
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "disk" / "run")
    assert make_folder(tmp_path / "deep" / "run") == tmp_path / "deep" / "run"
    assert make_folder(tmp_path / "deep" / "run") == tmp_path / "deep" / "run_002"
