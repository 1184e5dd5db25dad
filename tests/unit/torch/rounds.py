"""Workers in separate processes, without Ray, that leave and join at chosen moments.

Four processes play the same rounds. In a round, workers train, leave within a step, and join again.
The result must equal that of one process.
"""

import copy
import datetime
import functools
import json
import pickle
import queue
import threading
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, TrainingOperator
from raysgd._internal.runner import WorkerContext
from raysgd.backends import create_backend
from raysgd.checkpoint.shards import collect_shards, merge_shards
from raysgd.elastic.call import ExportShardsRequest, ImportShardsRequest
from raysgd.loop.requests import TrainRequest, ValidateRequest
from raysgd.torch.strategies.sharded_optimizer import OptimizerShards
from raysgd.torch.strategies.shards import ShardLayout
from tests.unit.torch import cases

NUM_WORKERS = 4
BATCH = 6
NUM_STEPS = 8
MOVE_AT = 4


class LeftError(Exception):
    """Raised to simulate the loss of a worker."""


class Tied(torch.nn.Module):
    """A model with tied weights, blocks, a frozen part, and a buffer."""

    def __init__(self, sharding):
        super().__init__()
        torch.manual_seed(3)
        is_fully_sharded = sharding == "full"
        self.embedding = torch.nn.Embedding(7, 5)
        self.convolution = torch.nn.Conv2d(1, 3, 2)
        self.frozen = torch.nn.Linear(5, 5)
        self.inner = torch.nn.Linear(5, 5)
        self.scale = torch.nn.Parameter(torch.ones(1 if is_fully_sharded else ()))
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(5, 5)) for _ in "ab")
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.zeros(()))
        self.frozen.requires_grad_(False)
        self.double()

    def forward(self, tokens):
        self.count += 1
        hidden = self.embedding(tokens) * self.scale
        image = self.convolution(hidden[:, None, :, :]).mean(dim=(1, 2, 3), keepdim=True)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return self.head(torch.tanh(self.inner(self.frozen(hidden)) + image[:, 0]))


class Divided(TrainingOperator):
    def setup(self, config):
        case = config["case"]
        self.at = case.at
        models = [Tied(case.sharding) for _ in range(case.num_optimizers)]
        optimizers = [self.optimizer_of(model, case.optimizer) for model in models]
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]
        self.all_models, self.optimizers, self.schedulers = self.register(
            models=models, optimizers=optimizers, schedulers=schedulers, **case.arguments()
        )
        generator = torch.Generator().manual_seed(5)
        tokens = torch.randint(0, 7, (BATCH * NUM_WORKERS * NUM_STEPS // 2, 4), generator=generator)
        self.register_data(
            train_loader=DataLoader(TensorDataset(tokens), batch_size=BATCH),
            validation_loader=DataLoader(TensorDataset(tokens[:15]), batch_size=2),
        )
        self.num_updates = 0

    def optimizer_of(self, model, kind):
        groups = [
            {"params": [*model.embedding.parameters(), *model.convolution.parameters()]},
            {"params": [*model.frozen.parameters(), *model.inner.parameters(), model.scale]},
            {"params": model.blocks.parameters()},
        ]
        groups[1]["lr"] = 0.02
        more = {"momentum": 0.9} if kind == "SGD" else {}
        optimizer = getattr(torch.optim, kind)(groups, lr=0.01, **more)
        optimizer.register_step_post_hook(lambda *_: self.at("within"))
        return optimizer

    def train_batch(self, batch, batch_info):
        case, (tokens,) = self.config["case"], self.to_device(batch)
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] *= 0.9
        pairs = [*zip(self.all_models, self.optimizers, strict=True)]
        if batch_info["global_step"] == 2 and case.sharding == "optimizer" and len(pairs) == 1:
            self.all_models[0].frozen.requires_grad_(True)  # no copy can undo it between two steps
        if len(pairs) > case.register.get("gradient_accumulation_steps", 1):
            pairs.insert(0, pairs[0])  # two steps of this optimizer
        for number, (model, optimizer) in enumerate(pairs):
            self.at("forward")
            output = model(tokens)
            loss = torch.nn.functional.cross_entropy(output.flatten(0, 1), tokens.flatten())
            if number == 0:
                output.register_hook(lambda gradient: self.at("backward"))
            self.backward(loss)
            self.at("step")
            updated = self.optimizer_step(optimizer)
            self.at(f"after {number}")
        self.num_updates += updated  # state that follows updates, such as a moving average
        return {"train_loss": loss.detach(), "num_samples": len(tokens)}

    def validate_batch(self, batch, batch_info):
        loss = self.all_models[0](batch[0]).sum()
        self.at("validate")
        return {"val_loss": loss, "num_samples": len(batch[0])}

    def state_dict(self):
        return {"num_updates": self.num_updates}

    def load_state_dict(self, state):
        self.num_updates = state["num_updates"]


@dataclass
class Round(cases.Case):
    """A training setup, the workers that leave it, and when they rejoin."""

    optimizer: str = "AdamW"
    copies: int | None = None
    leaves: list[tuple[int, int, str]] = field(default_factory=list)
    """Process, step (None in validation), and moment. "fail MOMENT" raises instead of leaving."""
    moves: int | None = None
    """The process that leaves between two steps and hands over its shards."""
    joins_at: int | None = None
    """Step before which the absent processes join."""
    num_optimizers: int = 1
    sharding: str = "optimizer"
    divides: bool = True
    """Whether to shard. False in one process."""
    is_lost: bool = False
    """Whether all holders of a share fail."""
    num_workers: int = field(default=NUM_WORKERS, kw_only=True)

    operator_cls = Divided
    has_group = False
    at = staticmethod(lambda moment: None)

    def make_runner(self):
        elastic = ElasticConfig(snapshot_every=3)
        return super().make_runner(scheduler_step_freq="batch", elastic=elastic)

    def arguments(self):
        """Return the arguments of ``register``."""
        copies = {} if self.copies is None else {"num_copies": self.copies}
        sharded = {"sharding": self.sharding, "sharding_args": copies}
        return self.register | sharded if self.divides else self.register

    def run(self, rank):
        player = player_of(rank, self.port)
        try:
            if (result := player.play(self)) is not None:
                self.check(result)
        finally:
            player.leave_group()

    def check(self, result):
        """Compare the result with that of one process."""
        register = json.dumps(self.register)
        expected = plain_state(self.optimizer, self.num_optimizers, register, self.sharding)
        names = ("models", "optimizers", "schedulers", "operator", "global_step", "epoch")
        reference = {name: copy.deepcopy(expected[name]) for name in names}
        for model in (*reference["models"], *result["models"]):
            del model["count"]  # which counts forward passes
        check_equal({name: result[name] for name in names}, reference, str(self))


@functools.cache
def plain_state(optimizer, num_optimizers, register, sharding):
    """Return the state after training in one process."""
    given = Round(optimizer, num_optimizers=num_optimizers, sharding=sharding, divides=False)
    given.register = json.loads(register)
    runner = given.make_runner()
    runner.setup(WorkerContext())
    runner.handle(TrainRequest(call_number=0, until_step=NUM_STEPS))
    state = runner.state_dict()
    runner.teardown()
    return state


class Player:
    """One process in all rounds."""

    def __init__(self, process, port):
        a_minute = datetime.timedelta(minutes=1)
        self.store, self.watched_store = (
            dist.TCPStore("127.0.0.1", port, timeout=a_minute) for _ in range(2)
        )
        self.process = process
        self.generation = 0
        self.prefix = ""
        self.entered = None, "", []
        self.entries = queue.SimpleQueue()
        threading.Thread(target=self.interrupt_broken, daemon=True).start()
        self.watch()

    def play(self, given):
        self.prefix, self.generation, given.at = f"round-{given.number}", 0, self.at
        self.leaves = list(given.leaves)
        members, absent = list(range(NUM_WORKERS)), []
        runner = self.runner = given.make_runner()
        self.enter(members)
        runner.setup(self.context)
        self.gather("set up", members, None)  # no process leaves while another sets up
        call = 0
        while True:
            goal = NUM_STEPS if given.joins_at is None or not absent else given.joins_at
            goes = given.moves is not None and not self.step
            left = self.attempt(partial(self.train, call, MOVE_AT if goes else goal))
            if goes:
                left = self.hand_over(given.moves, members)
            told = self.gather("left", members, left)
            gone = [process for process, has_left in told.items() if has_left == "left"]
            members = [process for process in members if process not in gone]
            absent += gone
            if left == "left":
                self.runner.teardown()
                if given.joins_at is None:
                    return None
                runner = self.runner = given.make_runner()
                break
            if not any(told.values()) and (goal == NUM_STEPS):
                return self.result(given, members)
            if not any(told.values()):
                members, absent = sorted(members + absent), []
                self.store.set(f"{self.prefix}/join", json.dumps([members, self.generation]))
            self.rejoin(members, is_new=False)
            if given.is_lost:
                assert runner.status().state_status.condition == "lost"
                return None
        # a process that left joins again
        members, self.generation = json.loads(self.store.get(f"{self.prefix}/join"))
        self.enter([self.process], "alone", context_of=members)
        runner.setup(self.context)
        models = runner.operator.all_models
        assert not any(isinstance(p, DTensor) for model in models for p in model.parameters())
        placement = runner.operator._train_state.placement
        pieces = [p for o in placement.features for p in o._pieces]
        assert all(piece.base is None for piece in pieces)  # no copy of the parameters
        self.rejoin(members, is_new=True)
        self.train(call, NUM_STEPS)
        self.gather("left", members, "")
        return self.result(given, members)

    def hand_over(self, goes, members):
        """Hand over shards, as the driver does after a preemption notice."""
        if self.process == goes:
            self.store.set(
                f"{self.prefix}/held", pickle.dumps(self.runner.handle(ExportShardsRequest()))
            )
            return "left"
        if self.process == next(member for member in members if member != goes):
            held = pickle.loads(self.store.get(f"{self.prefix}/held"))
            self.runner.handle(ImportShardsRequest(shards=held))
        return "stays"

    def watch(self):
        """Patch the steps of optimizers so that they call `at`."""

        def watch(kind, name, *moments):
            method = getattr(kind, name)

            def watched(divided, *arguments):
                before, after = moments[:2] if vars(divided).get("_buffers") == {} else moments[-2:]
                self.at(before)
                result = method(divided, *arguments)
                self.at(after)
                return result

            setattr(kind, name, watched)

        watch(OptimizerShards, "_await_workers", "barrier", "passed", "update", "gathered")
        watch(ShardLayout, "all_gather_updates", "update", "gathered")

    def at(self, moment):
        step = self.runner._train_state.segment and self.runner._train_state.position.global_step
        if (self.process, step, moment) in self.leaves:
            # processes that leave at the same moment wait for each other
            together = [each for each, *when in self.leaves if when == [step, moment]]
            self.leaves.remove((self.process, step, moment))
            place = f"{self.prefix}/leaves-{step}-{moment}"
            self.store.set(f"{place}-{self.process}", "")
            for each in together:
                self.store.get(f"{place}-{each}")
            raise LeftError
        if (self.process, step, f"fail {moment}") in self.leaves:
            self.leaves.remove((self.process, step, f"fail {moment}"))
            raise dist.DistBackendError("on purpose")

    def train(self, call, goal):
        self.runner.handle(TrainRequest(call_number=call, until_step=goal))

    def attempt(self, function):
        """Call a function. Return "left", "failed", or "" for success."""
        result = ""
        try:
            function()
            return result
        except LeftError:
            result = "left"
        except RuntimeError as error:
            if not self.entered[0].is_communication_error(error):
                raise
            result = "failed"
        _, group, members = self.entered
        for member in members:
            self.store.set(f"{group}/end-of-{member}", "broken")
        return result

    def interrupt_broken(self):
        """Interrupt the collectives of a broken group, as the driver does if a worker fails."""
        while True:
            backend, group, _ = self.entries.get()
            if self.watched_store.get(f"{group}/end-of-{self.process}") == b"broken":
                backend.interrupt()

    def enter(self, members, name="", context_of=None):
        """Enter a process group, as a worker does."""
        self.leave_group()
        group = f"{self.prefix}/{self.generation}/{name}/{members}"
        backend = create_backend("gloo", 30)
        if members[0] == self.process:
            self.store.set(group, pickle.dumps(backend.create_rendezvous(["127.0.0.1"])))
        rendezvous = pickle.loads(self.store.get(group))
        context = self.context = WorkerContext(
            world_rank=members.index(self.process),
            world_size=len(members),
            has_process_group=True,
            generation=self.generation,
        )
        backend.setup(context, rendezvous)
        self.entered = backend, group, members
        self.entries.put(self.entered)
        if context_of:  # a worker that sets up alone knows its later rank
            self.context = WorkerContext(
                world_rank=context_of.index(self.process),
                world_size=len(context_of),
                has_process_group=True,
                generation=self.generation,
                is_alone=True,
            )

    def leave_group(self):
        (backend, group, _), self.entered = self.entered, (None, "", [])
        if backend is not None:
            self.store.set(f"{group}/end-of-{self.process}", "left")
            backend.teardown()
            backend.close()

    def rejoin(self, members, is_new):
        steps = self.gather("steps", members, None if is_new else self.step)
        furthest = max(step for step in steps.values() if step is not None)
        leader = next(p for p in members if steps[p] == furthest)
        self.generation += 1
        self.enter(members)
        self.runner.rejoin(self.context, members.index(leader))

    @property
    def step(self):
        return self.runner.status().position.global_step

    def gather(self, what, members, value):
        """Exchange a value with the members, and return all values by process."""
        key = f"{self.prefix}/{self.generation}/{what}"
        self.store.set(f"{key}/{self.process}", json.dumps(value))
        return {p: json.loads(self.store.get(f"{key}/{p}")) for p in members}

    def validate(self, members):
        """Validate until no worker leaves. Return the metrics, or None if this process leaves."""
        found, request = [], ValidateRequest(call_number=-1)
        while not found:
            left = self.attempt(lambda: found.append(self.runner.handle(request)))
            told = self.gather("validated", members, left)
            if left == "left":
                self.runner.teardown()
                return None
            members = [process for process, has_left in told.items() if has_left != "left"]
            if any(told.values()):
                found.clear()
                self.rejoin(members, is_new=False)
        return found[0]

    def result(self, given, members):
        """Check snapshots, loading, and validation. Return the complete state."""
        held = self.joined(self.runner.acquire_snapshot())
        assert self.step - held["global_step"] in range(4)
        state = self.joined(self.runner.state_dict())
        self.runner.load_state_dict(copy.deepcopy(state))
        check_equal(self.joined(self.runner.state_dict()), state)
        # the numbers of batches differ between workers
        if (losses := self.validate(members)) is None:
            return None
        models = self.runner._hosted_loop.state_access.unsharded_models()
        size = dist.get_world_size()
        if given.sharding == "full" and size > 1:
            (model,) = self.runner.operator.all_models
            sizes = [(p.to_local().numel(), p.numel()) for p in model.parameters()]
            own, whole = map(sum, zip(*sizes, strict=True))
            assert own < 1.5 * whole / size
        if self.context.world_rank == 0:
            assert models[0](torch.zeros(1, 4, dtype=torch.int64)).isfinite().all()
            held = [{k: v.detach() for k, v in model.state_dict().items()} for model in models]
            for model, saved in zip(held, state["models"], strict=True):
                model["count"] = saved["count"]  # which counts forward passes
            check_equal(held, state["models"])
        assert losses["num_samples"] > 0
        assert (self.process, None, "validate") not in self.leaves
        assert len(list(self.runner.operator.validation_loader)) > 1
        return state

    def joined(self, own):
        """Gather the shards of all workers into one state."""
        held = [None] * dist.get_world_size()
        dist.all_gather_object(held, own)
        assert len({each["global_step"] for each in held}) == 1
        return merge_shards(collect_shards(held))


def check_equal(found, expected, place=""):
    """Assert that two values are equal except for rounding."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), (place, found.keys(), expected.keys())
        for key, value in expected.items():
            check_equal(found[key], value, f"{place}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), place
        for number, value in enumerate(expected):
            check_equal(found[number], value, f"{place}.{number}")
    elif isinstance(expected, torch.Tensor):
        assert found.shape == expected.shape, (place, found.shape, expected.shape)
        difference = (found.double() - expected.double()).abs().max().item()
        assert difference < 1e-10, (place, difference)
    elif isinstance(expected, float):
        assert abs(found - expected) < 1e-10, place
    else:
        assert found == expected, (place, found, expected)


player_of = functools.cache(Player)
