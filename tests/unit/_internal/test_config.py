"""The global batch size, and numbers from the environment."""

import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysgd._internal.config import BATCH_SIZE, env_seconds, round_batch_size, worker_config
from raysgd.torch.options import EqualBits, TorchOptions

sizes = st.integers(1, 10_000)
workers = st.integers(1, 64)


@given(sizes, workers)
def test_shares_of_a_global_batch_are_equal_and_positive(size, num_workers):
    if size < num_workers:
        with pytest.raises(ValueError, match=f"smaller than num_workers={num_workers}"):
            round_batch_size(size, num_workers)
        return
    share = worker_config({BATCH_SIZE: size, "lr": 1}, num_workers)[BATCH_SIZE]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rounded = round_batch_size(size, num_workers)
    assert share >= 1
    assert share * num_workers == rounded
    assert 0 <= size - rounded < num_workers


def test_each_logical_worker_needs_a_sample_of_the_global_batch():
    with pytest.raises(ValueError, match=r"smaller than num_logical_workers=8\. Each"):
        TorchOptions(config={BATCH_SIZE: 5}, num_workers=2, exact=EqualBits(8.0))


@pytest.mark.parametrize(("size", "num_workers", "rounded"), [(21, 2, 20), (7, 3, 6), (5, 4, 4)])
def test_a_trainer_rounds_the_global_batch_down_and_keeps_the_users_config(
    size, num_workers, rounded
):
    config = {BATCH_SIZE: size}
    with pytest.warns(UserWarning, match=rf"={size} is not a multiple .* batch is {rounded},"):
        options = TorchOptions(config=config, num_workers=num_workers)
    assert options.config == {BATCH_SIZE: rounded}
    assert config == {BATCH_SIZE: size}


def test_the_config_is_never_changed():
    for config in ({BATCH_SIZE: 21, "lr": 1}, {"lr": 1}):
        before = dict(config)
        worker_config(config, 2)["more"] = 1
        assert config == before


def test_a_config_without_batch_size_is_fine():
    assert TorchOptions(config={BATCH_SIZE: None}).config == {BATCH_SIZE: None}
    assert worker_config({}, 8) == {}


def test_seconds_come_from_the_environment(monkeypatch):
    monkeypatch.delenv("RAYSGD_TEST_S", raising=False)
    assert env_seconds("RAYSGD_TEST_S", 3.0) == 3.0
    monkeypatch.setenv("RAYSGD_TEST_S", "0.5")
    assert env_seconds("RAYSGD_TEST_S", 3.0) == 0.5


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "nan"])
def test_invalid_seconds_in_the_environment_are_an_error(monkeypatch, text):
    monkeypatch.setenv("RAYSGD_TEST_S", text)
    with pytest.raises(ValueError, match=r"RAYSGD_TEST_S=.*must be a positive number"):
        env_seconds("RAYSGD_TEST_S", 3.0)
