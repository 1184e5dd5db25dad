"""The process group of training functions, in a group of one."""

import os

import pytest
import torch.distributed as dist

from raysgd._internal.context import WorkerContext
from raysgd.train.torch import TorchConfig

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
    transport = config.transport()
    try:
        rendezvous = transport.prepare(["127.0.0.1"])
        transport.setup(WorkerContext(distributed=True), rendezvous)
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        found = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")]
        port = str(rendezvous.store.port)
        assert found == (["0", "1", port] if init_method == "env" else [None] * 3)
        transport.teardown()
        assert not dist.is_initialized()
    finally:
        transport.teardown()
        transport.close()
