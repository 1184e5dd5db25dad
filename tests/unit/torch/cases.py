"""Cases of "N workers, a change, a moment": worker processes without Ray play them."""

import contextlib
import datetime
import itertools
import os
import pickle
import traceback
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from raysgd import TrainingOperator
from raysgd._internal.runner import WorkerContext
from raysgd.loop.requests import TrainRequest, ValidateRequest
from raysgd.torch.options import TorchOptions
from raysgd.torch.runner import TorchRunner
from tests.conftest import RANK, Script, measure

FLOAT16 = {"use_fp16": True, "amp_dtype": torch.float16}


@dataclass
class Case:
    """What some workers train. A subclass says how, what happens when, and what the result is.

    Its functions and classes must be importable, because other processes play the case.
    """

    operator_cls: ClassVar[type[TrainingOperator]]
    """Finds its case in the config."""
    register: dict[str, Any] = field(default_factory=dict, kw_only=True)
    """Arguments of ``register``."""
    settings: dict[str, Any] = field(default_factory=dict, kw_only=True)
    """Arguments of the trainer."""
    num_workers: int = field(default=2, kw_only=True)

    has_group: ClassVar[bool] = True
    """Whether the workers form a process group before `run`."""
    number = port = 0
    """Number of the case, and port of the store, while it runs."""

    def __str__(self):
        values = (v for name, v in vars(self).items() if v != getattr(type(self), name, None))
        return " ".join(str(getattr(v, "__name__", v)) for v in values if v)

    def make_runner(self, **settings):
        options = {"num_workers": self.num_workers, "use_gpu": False, **self.settings, **settings}
        given = {"training_operator_cls": self.operator_cls, "config": self.config()}
        return TorchRunner(TorchOptions(**given, **options))

    def config(self):
        return {"case": self}

    def context(self, rank):
        size = self.num_workers
        return WorkerContext(world_rank=rank, world_size=size, has_process_group=size > 1)

    def start(self, rank, **settings):
        """Return the runner of a worker after its setup."""
        runner, context = self.make_runner(**settings), self.context(rank)
        runner.prepare(context)
        runner.setup(context)
        return runner

    def run(self, rank):
        """Play a worker in a process group of `num_workers`, and return its result."""
        raise NotImplementedError


def train_and_validate(runner, num_parts=1, shares=None):
    """Train an epoch, with batches in parts, and validate. Return parameters and metrics."""
    if num_parts > 1:
        runner._train_state.micro_batching.increase_num_splits(num_parts)
    trained = runner.handle(TrainRequest(call_number=0, until_epoch=1, shares=shares))
    validated = runner.handle(ValidateRequest(call_number=1))
    parameters = parameters_of(runner)
    runner.teardown()
    return parameters, trained, validated


def parameters_of(runner):
    """Return copies of the parameters of the only model, without wrappers and shards."""
    model = runner.operator.unwrapped(runner.operator.model)
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    return [parameter.detach().clone() for parameter in whole]


PLAY = """
from tests.unit.torch.cases import play

play(rank, int(sys.argv[2]), dist.TCPStore("127.0.0.1", int(sys.argv[-1])))
"""


@contextlib.contextmanager
def processes(size, timeout_s=60):
    """Yield a function that plays a case in `size` processes, and returns the results by rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set_timeout(datetime.timedelta(seconds=timeout_s))
    ranks, numbers = [], itertools.count()

    def run(case):
        number = next(numbers)
        if not ranks:
            ranks.extend(Script(RANK + PLAY, rank, number, store.port) for rank in range(size))
        store.set(
            f"cases/{number}", pickle.dumps((os.environ.get("PYTEST_CURRENT_TEST", ""), case))
        )
        keys = [f"results/{number}/{rank}" for rank in range(case.num_workers)]
        try:
            store.wait(keys)
        except dist.DistStoreError:  # the others wait for a process that failed
            keys = [key for key in keys if store.check([key])]
        results = [pickle.loads(store.get(key)) for key in keys]
        failed = [text for text, _ in results if text]
        if failed or len(results) < case.num_workers:
            stop()
        assert not failed, "\n".join(failed)
        assert len(results) == case.num_workers, f"only {keys} in time"
        return [result for _, result in results]

    def stop():
        for rank in ranks:
            rank.close()
        ranks.clear()

    try:
        yield run
    finally:
        stop()


def play(rank, number, store):
    """Play cases from the store, from a number on."""
    for each in itertools.count(number):
        test, case = pickle.loads(store.get(f"cases/{each}"))
        if rank >= case.num_workers:
            continue
        measure(test)
        text, result, case.number, case.port = "", None, each, store.port
        try:
            if case.num_workers > 1 and case.has_group:
                own, size = dist.PrefixStore(f"group-{each}", store), case.num_workers
                dist.init_process_group("gloo", store=own, rank=rank, world_size=size)
            result = case.run(rank)
        except Exception:
            text = traceback.format_exc()
        measure(test)  # this process is killed later
        store.set(f"results/{each}/{rank}", pickle.dumps((text, result)))
        if dist.is_initialized():
            dist.destroy_process_group()
