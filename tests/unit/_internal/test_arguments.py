"""Checks of the arguments of trainers, and their messages."""

import pickle

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from raysgd._internal import arguments
from raysgd.torch.options import TorchOptions
from tests.operators import Classifier

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
    taken = arguments.as_dict("T", "config", mine)
    taken["a"] = 2
    assert mine == {"a": 1}
    assert arguments.as_dict("T", "config", None) == {}


@given(st.dictionaries(st.text(), st.one_of(st.integers(), st.floats(), st.booleans(), st.text())))
@example({"x": float("nan")})
@example({"CPU": 1})
def test_resources_are_positive_numbers(resources):
    """NaN is invalid, and CPUs have their own argument."""
    fine = all(type(amount) in (int, float) and amount > 0 for amount in resources.values())
    if fine and "CPU" not in resources:
        assert options(resources_per_worker=resources).resources_per_worker == resources
    else:
        with pytest.raises(ValueError, match=r"TorchTrainer\(resources_per_worker"):
            options(resources_per_worker=resources)


@pytest.mark.parametrize("num_cpus", [0, -1, float("nan"), "1", None, True])
def test_cpus_are_a_positive_number(num_cpus):
    assert options(num_cpus_per_worker=0.001).num_cpus_per_worker == 0.001
    said = rf"\(num_cpus_per_worker={num_cpus!r}\): must be above 0. .* CPU, pass 0\.001"
    with pytest.raises(ValueError, match=said):
        options(num_cpus_per_worker=num_cpus)


def test_only_worker_in_this_process_uses_one_gpu():
    local = {"use_local": True, "use_gpu": True}
    options(**local, resources_per_worker={"GPU": 1})
    options(**local, resources_per_worker={"GPU": 2}, num_workers=2)
    with pytest.raises(ValueError, match=r"resources_per_worker=\{'GPU': 2\}.* uses one GPU"):
        options(**local, resources_per_worker={"GPU": 2})


@pytest.mark.parametrize(
    ("given", "bundle"),
    [
        ({}, {"CPU": 1}),
        ({"use_gpu": True}, {"CPU": 1, "GPU": 1}),
        ({"use_gpu": True, "num_cpus_per_worker": 3}, {"CPU": 3, "GPU": 1}),
        (
            {"use_gpu": True, "resources_per_worker": {"GPU": 0.5, "disk": 2}},
            {"CPU": 1, "GPU": 0.5, "disk": 2},
        ),
    ],
)
def test_group_reserves_the_resources_of_each_worker(given, bundle):
    taken = options(num_workers=4, min_workers=2, use_local=True, **given)
    for _ in range(2):  # the options stay as they are
        group = taken.group_options(7.0)
        assert group.bundle == bundle
        assert (group.num_workers, group.min_workers, group.start_timeout_s) == (4, 2, 7.0)
        assert group.use_local


@pytest.mark.parametrize("size", [10, 100_000])
def test_each_worker_unpacks_its_own_config(size):
    mine = {"rates": [0.1], "data": np.zeros(size)}
    given = options(training_operator_cls=Classifier, config=mine)
    sent = pickle.loads(pickle.dumps(given, protocol=5))
    assert given.unpack() == (Classifier, given.config)
    for _ in range(2):
        operator_cls, config = sent.unpack()
        assert operator_cls is Classifier
        assert (config["rates"], len(config["data"])) == ([0.1], size)
        config["rates"].append(0.2)


def test_gpus_are_used_if_requested_or_found(monkeypatch):
    def decide(use_gpu, resources, found=False, **arguments):
        monkeypatch.setattr("torch.cuda.is_available", lambda: found)
        given = {"use_gpu": use_gpu, "resources_per_worker": resources, **arguments}
        return TorchOptions(**given).resolve().use_gpu

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
    assert TorchOptions(**given).resolve().backend == backend
