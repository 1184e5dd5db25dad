"""Checks of the arguments of trainers, and their messages."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from raysgd import ElasticConfig
from raysgd._internal import arguments
from raysgd.elastic.config import checked_elastic
from raysgd.torch.options import TorchOptions

NUMBERS = st.integers(-3, 5)


def options(**given):
    return TorchOptions(**{"use_gpu": False, **given})


@given(NUMBERS, NUMBERS)
def test_min_workers_is_between_1_and_num_workers(num_workers, min_workers):
    given = {"num_workers": num_workers, "min_workers": min_workers}
    if 1 <= min_workers <= num_workers:
        assert options(**given).min_workers == min_workers
    else:
        said = rf"^TorchTrainer\(.*num_workers={num_workers}.*: .*must be"
        with pytest.raises(ValueError, match=said):
            options(**given)


def test_a_dict_is_copied():
    mine = {"a": 1}
    taken = arguments.checked_dict("T", "config", mine)
    taken["a"] = 2
    assert mine == {"a": 1}
    assert arguments.checked_dict("T", "config", None) == {}
    with pytest.raises(TypeError, match=r"T\(config=\[1\]\): must be a dict"):
        arguments.checked_dict("T", "config", [1])


def test_elastic_is_an_elastic_config():
    assert checked_elastic("T", None) == ElasticConfig()
    with pytest.raises(TypeError, match=r"elastic=\{'grow': False\}\): must be an Ela"):
        checked_elastic("T", {"grow": False})


@given(st.dictionaries(st.text(), st.one_of(st.integers(), st.floats(), st.booleans(), st.text())))
@example({"x": float("nan")})
@example({"CPU": 1})
def test_resources_are_positive_numbers(resources):
    """NaN is invalid, and CPUs have their own argument."""
    fine = all(type(amount) in (int, float) and amount > 0 for amount in resources.values())
    if fine and "CPU" not in resources:
        assert options(resources_per_worker=resources).resources_per_worker == resources
    else:
        with pytest.raises(ValueError, match=r"TorchTrainer\(resources_per_worker="):
            options(resources_per_worker=resources)


def test_gpus_are_used_if_requested_or_found(monkeypatch):
    def decide(use_gpu, resources, found=False, **arguments):
        monkeypatch.setattr("torch.cuda.is_available", lambda: found)
        given = {"use_gpu": use_gpu, "resources_per_worker": resources, **arguments}
        return TorchOptions(**given).decided().use_gpu

    local = {"use_local": True}
    assert decide(True, {}, **local) is True
    assert decide(False, {}, found=True, **local) is False
    assert [decide("auto", {}, found=found, **local) for found in (True, False)] == [True, False]
    assert decide("auto", {"GPU": 1})  # does not need a cluster
    with pytest.raises(ValueError, match="Remove GPU, or pass use_gpu=True"):
        decide(False, {"GPU": 1})


@pytest.mark.parametrize(("num_gpus", "backend"), [(2, "nccl"), (1, "nccl"), (0.5, "gloo")])
def test_workers_that_share_a_gpu_use_gloo(num_gpus, backend):
    given = {"use_gpu": "auto", "resources_per_worker": {"GPU": num_gpus}}
    assert TorchOptions(**given).decided().backend == backend
