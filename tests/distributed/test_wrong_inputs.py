"""Wrong inputs that only a cluster or workers in other processes detect.

The others are in tests/contracts. No error leaves a process behind, and the trainer still works
after an error in a call.
"""

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

from raysgd import TorchTrainer, TrainingOperator
from raysgd.errors import CollectiveError, RemoteTraceback
from tests.conftest import SOON_S, alive_actors, assert_names, wait_until
from tests.operators import Classifier, register_all, replica_hash

# ---- failures on workers while they start


class Failing(TrainingOperator):
    """Fails on rank 1. Rank 0 waits for it when it wraps its model."""

    def setup(self, config):
        if self.world_rank == 1:
            raise LookupError("no data here", time.time())
        register_all(self)


def test_exception_in_setup_of_one_worker_keeps_its_type_and_frees_the_driver(ray_cluster):
    with pytest.raises(LookupError) as caught:
        TorchTrainer(training_operator_cls=Failing, num_workers=2, use_local=True)
    assert type(caught.value) is LookupError
    assert caught.value.args[0] == "no data here"
    assert time.time() - caught.value.args[1] < SOON_S
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert_names(caught.value.__cause__, ["worker 1", "in setup", "no data here"])
    wait_until(lambda: not dist.is_initialized() and not alive_actors())


# ---- calls on a trainer, which still works after each of them


class Moody(Classifier):
    """Fails in a batch as `info["mood"]` selects."""

    def setup(self, config):
        register_all(self)

    def train_batch(self, batch, batch_info):
        mood = (batch_info["info"] or {}).get("mood")
        metrics = super().train_batch(batch, batch_info)
        if mood == "extra pass" and self.world_rank == 1:
            self.model(batch[0]).sum().backward()
        if mood == "unpicklable metric":
            metrics["lock"] = threading.Lock()
        if mood == "keyboard interrupt":
            raise KeyboardInterrupt("in a batch")
        return metrics


@pytest.fixture(scope="module")
def shared_trainer(module_cluster):
    with TorchTrainer(training_operator_cls=Moody, num_workers=2, timeout_s=120) as trainer:
        yield trainer


@pytest.fixture
def trainer(shared_trainer):
    """A trainer that must be usable after the test, with the same two workers in step."""
    pids = shared_trainer.apply_all_workers(os.getpid)
    yield shared_trainer
    shared_trainer.apply_all_workers(os.getpid)  # forms the group again after an error
    done = shared_trainer.global_step
    assert shared_trainer.train(num_steps=1)["num_samples"] == 32
    assert shared_trainer.global_step == done + 1
    assert shared_trainer.apply_all_workers(os.getpid) == pids
    hashes = shared_trainer.apply_all_operators(replica_hash)
    assert hashes[0] == hashes[1]


def mood(text):
    return {"info": {"mood": text}}


WRONG_CALLS = [
    ("train", {"info": {"lock": threading.Lock()}}, TypeError, "train", "pickled", "lock"),
    ("train", mood("unpicklable metric"), TypeError, "worker", "lock"),
    ("train", mood("keyboard interrupt"), KeyboardInterrupt, "in a batch"),
    ("apply_all_workers", {"fn": threading.Lock}, TypeError, "worker", "lock"),
    ("get_local_operator", {}, NotImplementedError, "get_local_operator", "use_local=True"),
]


@pytest.mark.parametrize("case", WRONG_CALLS, ids=lambda case: f"{case[0]}-{case[2].__name__}")
def test_wrong_call_is_refused(trainer, case):
    method, arguments, error, *words = case
    with pytest.raises(error) as caught:
        getattr(trainer, method)(**arguments)
    assert_names(caught.value, words)


def test_extra_pass_of_one_worker_is_an_error_before_the_timeout(trainer):
    """Models with buffers exchange them at the end of the call."""
    trainer.train(num_steps=1)  # in the first step, only the timeout ends an extra pass
    trainer.apply_all_operators(add_buffer)
    with pytest.raises(CollectiveError, match="must call the same collectives in the same order"):
        trainer.train(num_steps=2, info={"mood": "extra pass"})
    trainer.apply_all_operators(lambda each: delattr(each.unwrapped(each.model), "seen"))


def add_buffer(operator):
    model = operator.unwrapped(operator.model)
    model.register_buffer("seen", torch.zeros(10**6), persistent=False)
