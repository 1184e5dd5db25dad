"""Configs by name, and backends of one's own."""

import pytest

from raysgd.train.backend import Backend, BackendConfig, backend_class, checked_config
from raysgd.train.executor import BackendExecutor
from raysgd.train.tensorflow import TensorflowConfig
from raysgd.train.torch import TorchConfig


class Mine(Backend):
    pass


class ByProperty(BackendConfig):
    @property
    def backend_cls(self):
        return Mine


class ByMethod(BackendConfig):
    def backend_cls(self):
        return Mine


class ByAttribute(BackendConfig):
    backend_cls = Mine


@pytest.mark.parametrize("config", [ByProperty, ByMethod, ByAttribute])
def test_a_config_names_its_backend_in_any_way(config):
    assert backend_class(config()) is Mine


def test_what_is_no_backend_is_an_error():
    class Wrong(BackendConfig):
        backend_cls = int

    with pytest.raises(TypeError, match=r"Wrong\.backend_cls"):
        backend_class(Wrong())


def test_a_config_by_name():
    assert isinstance(checked_config("torch"), TorchConfig)
    with pytest.raises(ValueError, match="horovod, tensorflow, torch"):
        checked_config("jax")
    with pytest.raises(TypeError, match="BackendConfig"):
        checked_config(5)


@pytest.mark.parametrize(
    "arguments", [{"backend": "mpi"}, {"init_method": "file"}, {"timeout_s": 0}]
)
def test_wrong_settings_of_torch_are_errors(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        TorchConfig(**arguments)


def test_wrong_settings_of_tensorflow_are_errors():
    with pytest.raises(ValueError, match=r"TensorflowConfig\(timeout_s=0\)"):
        TensorflowConfig(timeout_s=0)


@pytest.mark.parametrize("size", [0, -1, True, 1.5, (2, 1), (0, 1), (1, 2, 3), "2"])
def test_wrong_numbers_of_workers_are_errors(size):
    with pytest.raises(ValueError, match="num_workers"):
        BackendExecutor(BackendConfig(), size)


@pytest.mark.parametrize("max_retries", [-2, 1.0, None])
def test_wrong_numbers_of_retries_are_errors(max_retries):
    with pytest.raises(ValueError, match="max_retries"):
        BackendExecutor(BackendConfig(), 1, max_retries=max_retries)
