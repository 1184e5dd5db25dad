"""Training functions survive losses and errors, with their newest checkpoint and without hangs.

Workers import this module, so functions import what takes long to import.
"""

import gc
import os
import signal
import threading
import time
import tracemalloc

import pytest

from raysgd import train
from raysgd.elastic import group_builder
from raysgd.errors import InsufficientResourcesError
from raysgd.train import Trainer, TrainingCallback
from raysgd.train.backend import BackendConfig
from tests.conftest import SOON_S

UNREADABLE = threading.Event()
"""Makes the driver fail to decode reports."""


def decode(data):
    if UNREADABLE.is_set():
        raise ValueError("not decoded")
    return data


@pytest.fixture(scope="module")
def trainer(module_cluster, tmp_path_factory):
    """Two workers in a PyTorch process group, which the tests share."""
    from raysgd.train.torch import TorchConfig

    class Config(TorchConfig):
        @property
        def backend_cls(self):
            return type("Decoding", (super().backend_cls,), {"decode_data": staticmethod(decode)})

    made = Trainer(Config(), 2, logdir=tmp_path_factory.mktemp("runs"))
    made.start()
    yield made
    made.shutdown()


@pytest.fixture
def no_loss(trainer):
    """Fail if a worker of the shared trainer is lost."""

    def losses():
        return [event for event in trainer.events if event.kind == "lost"]

    before = losses()
    yield
    assert losses() == before


def all_reduce():
    import torch
    import torch.distributed

    torch.distributed.all_reduce(torch.ones(1))


def rank_and_size():
    import torch.distributed as dist

    all_reduce()
    return dist.get_rank(), dist.get_world_size(), os.environ["RANK"]


def returns_early():
    if train.world_rank() == 0:
        return
    all_reduce()


def raises_while_the_other_waits():
    if train.world_rank() == 0:
        raise KeyError("bad batch")
    all_reduce()


def saves_less():
    for n in range(10):
        all_reduce()
        if train.world_rank() == 1 or n % 2:
            train.save_checkpoint(n=n)


def reports_after_the_end():
    all_reduce()
    if train.world_rank() == 1:
        train.report(n=1)


def only_worker_1_has_a_checkpoint():
    all_reduce()
    checkpoint = train.Checkpoint.from_dict({}) if train.world_rank() else None
    train.report({}, checkpoint=checkpoint)


OUT_OF_STEP = [
    (returns_early, RuntimeError, "Workers 1 wait in a collective"),
    (raises_while_the_other_waits, KeyError, "bad batch"),
    (saves_less, RuntimeError, "equally often"),
    (reports_after_the_end, RuntimeError, "worker 0 returned from the function"),
    (only_worker_1_has_a_checkpoint, RuntimeError, "Worker 1 reported a checkpoint, but worker 0"),
]


@pytest.mark.slow("five runs fail, each after a wait")
def test_workers_out_of_step_soon_raise_a_clear_error(trainer):
    trainer.run(all_reduce)  # afterwards, everything has started
    for function, kind, said in OUT_OF_STEP:
        began = time.monotonic()
        with pytest.raises(kind, match=said):
            trainer.run(function)
        assert time.monotonic() - began < SOON_S, function.__name__
        # The trainer and its process group still work.
        assert trainer.run(rank_and_size) == [(0, 2, "0"), (1, 2, "1")]


def test_function_that_never_returns_is_killed_before_the_next_run(trainer, monkeypatch):
    monkeypatch.setattr(group_builder, "_RESTART_STRAGGLER_S", 0.5)

    def function():
        if train.world_rank() == 0:
            raise ValueError("over")
        while True:
            time.sleep(0.01)

    began = time.monotonic()
    with pytest.raises(ValueError, match="over"):
        trainer.run(function)
    assert time.monotonic() - began < SOON_S
    assert trainer.run(train.world_size) == [2, 2]


def reports_for_long():
    for n in range(1000):
        train.report(n=n)


class Raising(TrainingCallback):
    def __init__(self, error):
        self._error = error

    def handle_result(self, results, **info):
        raise self._error


def test_trainer_works_after_an_error_on_the_driver(trainer, no_loss):
    for error in (ValueError("callback"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            trainer.run(reports_for_long, callbacks=[Raising(error)])
        assert trainer.run(train.world_size) == [2, 2]
    with pytest.raises(TypeError, match="must be a Ray Dataset"):
        trainer.run(reports_for_long, dataset=[1, 2, 3])
    next(trainer.run_iterator(reports_for_long))  # the iterator is dropped
    assert trainer.run(train.world_size) == [2, 2]
    kept = trainer.run_iterator(reports_for_long)
    next(kept)
    assert trainer.run(train.world_size) == [2, 2]
    with pytest.raises(RuntimeError, match="Another run of the trainer"):
        next(kept)
    UNREADABLE.set()
    try:
        with pytest.raises(ValueError, match="not decoded"):
            trainer.run(reports_for_long)
    finally:
        UNREADABLE.clear()
    assert trainer.run(train.world_size) == [2, 2]
    with pytest.raises(RuntimeError, match="not started"):
        trainer.to_tune_trainable(reports_for_long)


def trains_on_numbers(config):
    """Train on 61 numbers. Save the used ones and the position after each step."""
    import torch
    import torch.distributed as dist

    loader = torch.utils.data.DataLoader(list(range(61)), 4, shuffle=True)
    loader = train.torch.prepare_data_loader(loader)
    saved = train.load_checkpoint() or {"used": [], "loader": loader.state_dict(), "starts": 0}
    loader.load_state_dict(saved["loader"])
    used, starts = saved["used"], saved["starts"] + 1
    for number, batch in enumerate(loader, start=1):
        parts = [None] * train.world_size()
        dist.all_gather_object(parts, batch.tolist())
        used = sum(parts, used)
        train.save_checkpoint(used=used, loader=loader.state_dict(), starts=starts)
        if (starts, number, train.world_rank()) == (1, 2, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if number == config["num_steps"]:
            break


@pytest.mark.slow("three workers start")
def test_each_sample_counts_once_after_a_kill_and_on_another_number_of_workers(trainer, tmp_path):
    alone, newest = Trainer("torch", 1, logdir=tmp_path), None
    alone.start()
    try:
        for own, num_steps in ((trainer, 3), (alone, 5), (trainer, None)):
            own.run(trains_on_numbers, {"num_steps": num_steps}, checkpoint=newest)
            newest = own.latest_checkpoint
    finally:
        alone.shutdown()
    assert newest["starts"] == 4
    assert len(newest["used"]) - len(set(newest["used"])) < 3  # a last step can repeat samples
    assert set(newest["used"]) == set(range(61))


def test_trainer_on_a_worker_reserves_its_own_room(trainer, tmp_path):
    def function():
        def sizes(num_workers):
            folder = tmp_path / f"inner-{train.world_rank()}-{num_workers}"
            inner = Trainer(BackendConfig(), num_workers, logdir=folder)
            inner.start()
            try:
                return inner.run(train.world_size)
            finally:
                inner.shutdown()

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRAIN_PLACEMENT_GROUP_TIMEOUT_S", "2")
            with pytest.raises(InsufficientResourcesError) as refused:
                sizes(3)
        return str(refused.value), sizes(1), train.world_size()

    for said, inner, outer in trainer.run(function):
        assert "No room within 2 s for 3 workers" in said
        assert (inner, outer) == ([1], 2)


def held():
    """Return the bytes of Python objects and the number of Ray references in this process."""
    import ray._private.worker

    gc.collect()
    references = ray._private.worker.global_worker.core_worker.get_all_reference_counts()
    return tracemalloc.get_traced_memory()[0], len(references)


def grown(reports):
    """Read 300 reports. Return the growth of `held` over the last 200."""
    tracemalloc.start()
    try:
        before = next(held() for n in reports if n == 99)
        assert sum(1 for _ in reports) == 200
        after = held()
    finally:
        tracemalloc.stop()
    return tuple(new - old for old, new in zip(before, after, strict=True))


def test_many_reports_do_not_leak_memory(trainer):
    def function():
        def reports():
            for n in range(300):
                train.report(n=n, text=str(n) * 20_000)
                yield n

        return grown(reports())

    iterator = trainer.run_iterator(function)
    on_driver = grown(results[0]["n"] for results in iterator)
    for num_bytes, num_references in (on_driver, *iterator.get_final_results()):
        # If the reports were kept, 200 of them would take 12 MB. A thread that imports a module or
        # a report that is on its way takes less than 1 MB.
        assert num_bytes < 2e6
        assert num_references < 20
