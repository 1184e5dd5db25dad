"""Configs by name, and backends of one's own."""

import pytest

from raysgd.train import horovod, tensorflow
from raysgd.train.backend import (
    Backend,
    BackendConfig,
    InactiveWorkerGroupError,
    backend_class,
    checked_config,
)
from raysgd.train.executor import BackendExecutor
from raysgd.train.horovod import HorovodConfig
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


def test_a_backend_that_handles_failures_itself_is_warned_of(caplog):
    class Old(Mine):
        def handle_failure(self, worker_group, failed_worker_indexes, backend_config):
            pass

    class OldConfig(BackendConfig):
        backend_cls = Old

    backend_class(OldConfig())
    assert "Old.handle_failure is not called" in caplog.text


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


def test_mpi_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="mpirun: Ray cannot start it"):
        TorchConfig(backend="mpi")


def test_what_older_scripts_say_to_horovod_is_taken(monkeypatch):
    monkeypatch.setattr(horovod, "check_horovod", lambda: None)
    transport = HorovodConfig(nics={"eth1", "eth0"}, placement_group_timeout_s=30).transport()
    assert transport._variables["HOROVOD_GLOO_IFACE"] == "eth0"
    assert transport._variables["NCCL_SOCKET_IFNAME"] == "eth0,eth1"
    for nics in (set(), "eth0"):
        with pytest.raises(ValueError, match="must be a set of names"):
            HorovodConfig(nics=nics)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), "60", True, None])
@pytest.mark.parametrize("config_cls", [TorchConfig, TensorflowConfig, HorovodConfig])
def test_a_timeout_is_a_positive_number_of_seconds(monkeypatch, config_cls, timeout_s):
    monkeypatch.setattr(tensorflow, "check_tensorflow", lambda asked_by: None)
    monkeypatch.setattr(horovod, "check_horovod", lambda: None)
    with pytest.raises(ValueError, match=rf"{config_cls.__name__}\(timeout_s=.*positive number"):
        config_cls(timeout_s=timeout_s)


@pytest.mark.parametrize("size", [0, -1, True, 1.5, (2, 1), (0, 1), (1, 2, 3), "2"])
def test_wrong_numbers_of_workers_are_errors(size):
    with pytest.raises(ValueError, match="num_workers"):
        BackendExecutor(BackendConfig(), size)


@pytest.mark.parametrize("max_retries", [-2, 1.5, None])
def test_wrong_numbers_of_retries_are_errors(max_retries):
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
