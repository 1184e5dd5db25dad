"""Backends and their configs."""

import pytest

from raysgd.train import horovod, tensorflow
from raysgd.train.backend import (
    Backend,
    BackendConfig,
    InactiveWorkerGroupError,
    as_backend_config,
    backend_class,
)
from raysgd.train.executor import BackendExecutor
from raysgd.train.horovod import HorovodConfig
from raysgd.train.tensorflow import TensorflowConfig
from raysgd.train.torch import TorchConfig
from tests.conftest import needs_horovod


class Mine(Backend):
    def handle_failure(self, worker_group, failed_worker_indexes, backend_config):
        """A method of old backends."""


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
def test_a_config_has_its_backend_as_property_method_or_attribute(config, caplog):
    assert backend_class(config()) is Mine
    assert "does not call Mine.handle_failure" in caplog.text


def test_a_backend_may_be_a_name_and_must_be_a_subclass_of_backend():
    assert isinstance(as_backend_config("torch"), TorchConfig)
    with pytest.raises(ValueError, match="horovod, tensorflow, torch"):
        as_backend_config("jax")
    with pytest.raises(TypeError, match="BackendConfig"):
        as_backend_config(5)
    with pytest.raises(TypeError, match=r"Wrong\.backend_cls"):
        backend_class(type("Wrong", (BackendConfig,), {"backend_cls": int})())


@pytest.fixture
def installed(monkeypatch):
    """Pretend that all frameworks are installed."""
    monkeypatch.setattr(tensorflow, "check_tensorflow", lambda asked_by: None)
    monkeypatch.setattr(horovod, "check_horovod", lambda: None)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (TorchConfig, {"backend": "mpi"}),
        (TorchConfig, {"init_method": "file"}),
        (HorovodConfig, {"nics": set()}),
        (HorovodConfig, {"nics": "eth0"}),
        *((kind, {"timeout_s": 0}) for kind in (TorchConfig, TensorflowConfig, HorovodConfig)),
    ],
)
def test_wrong_settings_of_a_backend_are_refused(installed, kind, arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=rf"{kind.__name__}\({name}="):
        kind(**arguments)


@needs_horovod
def test_a_horovod_config_takes_the_arguments_of_old_scripts(installed):
    transport = HorovodConfig(
        nics={"eth1", "eth0"}, placement_group_timeout_s=30
    ).collective_backend()
    assert transport._variables["HOROVOD_GLOO_IFACE"] == "eth0"
    assert transport._variables["NCCL_SOCKET_IFNAME"] == "eth0,eth1"


@pytest.mark.parametrize("max_retries", [-2, 1.5, None])
def test_wrong_numbers_of_retries_are_refused(max_retries):
    with pytest.raises((TypeError, ValueError), match="max_retries"):
        BackendExecutor(BackendConfig(), 1, max_retries=max_retries)


def test_before_the_start_there_are_no_workers():
    executor = BackendExecutor(BackendConfig(), 2)
    assert not executor.is_started
    assert executor.events == []
    for call in (
        lambda: executor.start_training(lambda: 1),
        executor.fetch_next_result,
        executor.finish_training,
        executor.pause_reporting,
        lambda: executor.run(lambda: 1),
        lambda: executor.worker_group,
    ):
        with pytest.raises(InactiveWorkerGroupError, match=r"Call start\(\) first"):
            call()
    executor.shutdown()  # does nothing
