"""The process group of training functions, in a group of one."""

import os
from threading import get_ident

import cloudpickle
import pytest
import torch.distributed as dist

from raysgd._internal.runner import WorkerContext
from raysgd.elastic.call import LoadRequest
from raysgd.train.function_runner import EndRunRequest, FunctionRunner, NextResultRequest
from raysgd.train.torch import TorchConfig
from raysgd.train.worker_session import RunSpec, process_state

VARIABLES = (
    "ACCELERATE_USE_CPU",
    "GLOO_SOCKET_IFNAME",
    "GROUP_RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "PL_TRAINER_ACCELERATOR",
    "PL_TRAINER_DEVICES",
    "PL_TRAINER_NUM_NODES",
    "RANK",
    "TORCHELASTIC_RUN_ID",
    "WORLD_SIZE",
)


@pytest.mark.parametrize("init_method", ["env", "tcp"])
def test_a_process_group_forms_and_only_env_sets_variables(monkeypatch, init_method):
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    config = TorchConfig(backend="gloo", init_method=init_method, timeout_s=30)
    transport = config.collective_backend()
    try:
        rendezvous = transport.create_rendezvous(["127.0.0.1"])
        transport.setup(WorkerContext(has_process_group=True), rendezvous)
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        found = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")]
        port = str(rendezvous.store.port)
        assert found == (["0", "1", port] if init_method == "env" else [None] * 3)
        transport.teardown()
        assert not dist.is_initialized()
    finally:
        transport.teardown()
        transport.close()


@pytest.mark.parametrize(("function", "warns"), [(int, True), (dist.barrier, False)])
def test_workers_that_never_communicate_cause_a_warning(monkeypatch, caplog, function, warns):
    gpus = {}  # by thread, because each thread has its own current one
    monkeypatch.setattr(process_state, "select_gpu", None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", lambda gpu: gpus.update({get_ident(): gpu}))
    transport = TorchConfig(backend="gloo", init_method="tcp").collective_backend()
    runner = FunctionRunner(False)
    try:
        # a group of one counts the collectives of a worker of two
        context = WorkerContext(has_process_group=True, gpu_index=1)
        transport.setup(context, transport.create_rendezvous(["127.0.0.1"]))
        runner.setup(WorkerContext(world_size=2))
        runner.handle(LoadRequest(state=vars(RunSpec("run", cloudpickle.dumps(function)))))
        assert runner.handle(NextResultRequest()).kind == "end"
        assert ("2 workers, and they never communicated" in caplog.text) == warns
        assert [*gpus.values()] == [1, 1]
    finally:
        runner.handle(EndRunRequest())
        runner.teardown()
        transport.teardown()
        transport.close()
