"""The simulated side of what the driver says to workers, in today's words of the inside.

A change of the protocol between driver and workers changes this file, and no test beside it.
"""

import pickle
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import ray.exceptions

from raysgd._internal.context import Progress
from raysgd.cluster.clock import Clock
from raysgd.cluster.group_options import GroupOptions
from raysgd.cluster.worker import Outcome, WorkerInfo
from raysgd.cluster.worker_group import WorkerGroup
from raysgd.cluster.worker_handle import WorkerHandle
from raysgd.data.partition import MicroBatch
from raysgd.elastic.call import Call
from raysgd.elastic.config import ElasticConfig
from raysgd.elastic.controller import Controller
from raysgd.elastic.machine import Closed
from raysgd.loop.requests import TrainRequest
from raysgd.loop.step import Step
from raysgd.trainer.calls import TrainCall

__all__ = ["POINTS", "BadBatchError", "Driver", "LostError", "PartialStateError"]

POINTS = ("forward", "backward", "update", "after update", "commit")
"""Where a step can fail. Workers exchange gradients in the backward pass."""


class LostError(ray.exceptions.RayActorError):
    """What Ray says of a dead actor."""

    def __init__(self, cause):
        super().__init__()
        self._cause = cause

    def __str__(self):
        return f"The actor died: {self._cause}"


class BadBatchError(Exception):
    """An error of the user's code."""


class PartialStateError(Exception):
    """Workers refuse to train on a partly updated state."""


class SimClock(Clock):
    """While somebody waits by it, the world goes on."""

    def __init__(self, world):
        self._world = world

    def monotonic(self):
        return self._world.monotonic()

    def time(self):
        return self._world.now

    def sleep(self, seconds):
        self._world.sleep(seconds)

    def wait(self, futures, timeout_s):
        futures = set(futures)
        self._world.tick_until(lambda: all(future.done() for future in futures), timeout_s)
        return {future for future in futures if not future.done()}

    def queue(self):
        return self._world.new_queue()


class Driver:
    """What a trainer is to its tests: calls that train up to a step, events, and who is there."""

    def __init__(
        self,
        world,
        num_workers,
        min_workers=1,
        timeout_s=100.0,
        can_join=True,
        rejoins=True,
        **elastic,
    ):
        options = GroupOptions(
            num_workers=num_workers, min_workers=min_workers, start_timeout_s=10.0
        )
        self.controller = Controller(
            SimGroup(world, options),
            "runner",
            SimBackend(rejoins),
            None,
            timeout_s,
            ElasticConfig(**elastic),
            can_join=can_join,
        )

    def start(self):
        self.controller.start()

    def train(self, goal, max_losses=0):
        """Train up to a step; return where each worker is then."""
        self.call = Call(
            request=TrainRequest(call=0, until_step=goal),
            max_losses=max_losses,
            has_batches=True,
            can_pause=True,
        )
        outcomes = self.controller.run(self.call)
        return [outcome.progress.global_step for outcome in outcomes]

    def train_further(self, num_steps):
        """Train so many steps, in a call that makes its goal itself."""
        call = TrainCall(
            request=TrainRequest(call=0),
            num_steps=num_steps,
            next_pause=lambda step, at_once: None,
        )
        outcomes = self.controller.run(call)
        return [outcome.progress.global_step for outcome in outcomes]

    @property
    def workers(self):
        """The members of the group in the order of their ranks."""
        return list(self.controller.members)

    @property
    def max_workers(self):
        return self.controller.max_workers

    @property
    def generation(self):
        """Number of the newest generation."""
        return self.controller.journal.generation

    @property
    def events(self):
        return list(self.controller.events)

    @property
    def step(self):
        return self.controller.progress.global_step

    @property
    def has_snapshot(self):
        return self.controller.snapshots.state() is not None

    @property
    def min_workers(self):
        return self.controller.min_workers

    @property
    def losses_in_call(self):
        return self.call.num_losses

    def shutdown(self):
        self.controller.shutdown()
        assert isinstance(self.controller.state, Closed)


@dataclass
class Task:
    """One call that a worker has been given."""

    method: str
    arguments: tuple[Any, ...]
    future: Future = field(default_factory=Future)
    since: float = -1.0
    """When it began; negative before."""
    request: Any = None
    """What the runner is asked for, in a call."""

    def __post_init__(self):
        if self.method == "call":
            self.request = self.arguments[0].value()


@dataclass
class Meeting:
    """A rendezvous, as one worker is told of it."""

    token: int
    size: int
    context: Any
    leader: int | None
    """Rank whose state all take; None where each has that of its setup."""


class Slot:
    """Room for one worker, which is there while the cluster has that much room."""

    strategy = node_id = last_node_id = None

    def __init__(self, world, index):
        self.index = index
        self._world = world

    @property
    def is_ready(self):
        return self.index < self._world.room


class Reservation:
    def __init__(self, world, size):
        self._world = world
        self.slots = [Slot(world, index) for index in range(size)]

    def drop_lost(self, taken):
        pass

    def request_slot(self, bundle):
        self.slots.append(Slot(self._world, len(self.slots)))
        return self.slots[-1]

    def drop_pending(self, requested):
        self.slots = [slot for slot in self.slots if slot not in requested or slot.is_ready]

    def release(self):
        self.slots = []


class SimBackend:
    """Gives each generation a rendezvous of its own."""

    def __init__(self, rejoins=True):
        self.rejoins = rejoins
        self.num_prepared = 0

    def prepare(self, addresses):
        self.num_prepared += 1
        return self.num_prepared, len(addresses)

    def met(self):
        pass

    def close(self):
        pass


class SimMember(WorkerHandle):
    """A worker that does one task after the other as the world ticks."""

    remote = True

    def __init__(self, world, slot):
        self._world = world
        self.slot = slot
        self.home = WorkerInfo(
            node_id=f"node{slot.index // 2}", node_ip=f"10.0.0.{slot.index // 2}", pid=slot.index
        )
        self.dead = None
        self.queue = []
        self.step = 0
        self.is_set_up = False
        self.generation = None
        """The rendezvous that it is in; None before the first."""
        self.context = None
        self.pause = None
        self.snapshot_step = None
        self.speed = 0.0
        """Samples per second."""
        self.silent = False
        """Stopped: it answers nothing and does nothing."""
        self.deaf = False
        """It does not come back when it is interrupted."""
        self.error = None
        """What its next training step raises."""
        self.work_s = 0.0
        """How long a call takes that is no training."""
        self.start_s = 0.0
        """How long its process takes to come up."""
        self.setup_s = 0.5
        self.setup_error = None
        self.join_error = None
        self.num_joins = 0
        self.is_from_setup = False
        """Its state is that of its setup, until it trains or loads another."""
        self.has_trained = False
        self.lacks_shards = False
        """What was divided over the workers was lost with others."""
        self.partial = False
        """Its optimizer raised within a step."""
        self.weights = [0, 0]
        """How many updates each of its parameters has had."""
        self.failure = None
        """The point at which its next step fails, and whether the process dies there."""
        self.divided = False
        """It has a share of the state."""
        self.held = []
        """Whose shares it was given."""
        self.interruptions = 0
        self.terminated = False

    # ---- what the driver calls

    def work(self, method, *arguments):
        task = Task(method, arguments)
        if self.dead:
            task.future.set_exception(self.dead)
        else:
            self.queue.append(task)
            self.go_on()
        return task.future

    def control(self, method, *arguments):
        future = Future()
        if self.dead:
            future.set_exception(self.dead)
        elif not self.silent:
            future.set_result(getattr(self, f"_{method}")(*arguments))
        return future

    def kill(self):
        self.die("killed by the driver")

    def kill_process(self):
        self.kill()

    # ---- control calls

    def _info(self):
        return self.home

    def _interrupt(self, generation=None):
        assert generation is None or generation >= self._generation_number
        self.interruptions += 1
        if self.queue and not self.deaf:
            self.end("stopped", RuntimeError("stopped by the driver"))

    def fail_to_talk(self):
        """End its step as one does whose peer is gone."""
        self.end("communication", ConnectionError("closed by peer"))

    def _progress(self):
        return Progress(
            global_step=self.step,
            num_batches=self.step,
            step_s=self._world.step_s,
            samples_per_s=self.speed,
            snapshot=self.snapshot_step,
            terminated=self.terminated,
            divided=self.divided,
            lacks_shards=self.lacks_shards,
            partial=self.partial,
        )

    @property
    def _generation_number(self):
        return 0 if self.context is None else self.context.generation

    def _pause_at(self, generation, step):
        assert generation == self._generation_number
        self.pause = step
        return self.step

    def _snapshot(self):
        if self.snapshot_step is None:
            return None
        self._world.kept_by_driver = self.snapshot_step
        return pickle.dumps({"step": self.snapshot_step})

    def _stacks(self):
        return "in user code"

    # ---- life

    def die(self, cause):
        if self.dead:
            return
        self.dead = LostError(cause)
        self.fail_all()

    def fail_all(self):
        """Fail all that is asked of one that is dead."""
        queue, self.queue = self.queue, []
        for task in queue:
            task.future.set_exception(self.dead)

    def end(self, kind, value=None):
        """End the task under way, and begin the next."""
        task = self.queue.pop(0)
        task.future.set_result(Outcome(kind, value, self._progress()))
        self.go_on()

    @property
    def task(self):
        return self.queue[0] if self.queue else None

    @property
    def meeting(self):
        """The rendezvous that it has come to."""
        context, (token, size), leader = self.task.arguments
        return Meeting(token, size, context, leader)

    def is_meeting(self, token):
        """Whether it waits at a rendezvous."""
        in_it = self.is_at("enter") and len(self.task.arguments) == 3
        return in_it and self.meeting.token == token

    def is_at(self, method):
        task = self.task
        if self.dead or self.silent or task is None:
            return False
        return (task.request.name if task.method == "call" else task.method) == method

    def go_on(self):
        """Do what takes no time, up to something that does."""
        while (task := self.task) is not None and not self.dead and not self.silent:
            if task.since < 0:
                task.since = self._world.now
            if task.method == "prepare" or (task.method == "create" and not self.start_s):
                self.end("ok")
            elif task.method == "teardown":
                self.queue.pop(0).future.set_result(None)
            elif task.method == "enter" and len(task.arguments) == 3:
                self._world.meet(self)
                return
            elif self.is_at("measured"):
                self.end("ok", f"of {self.home.pid}")
            elif self.is_at("export_replica"):
                self.end("ok", self.home.pid)
            elif self.is_at("import_replica"):
                self.held.append(task.request.held)
                self.end("ok")
            elif self.is_at("restart_state"):
                self._world.kept_by_driver = self.step
                shares = {"shares": self.home.pid} if self.divided else {}
                self.end("ok", {"step": self.step, **shares})
            elif self.is_at("load"):
                self.step = task.request.state["step"]
                self.weights = [self.step] * 2
                self.end("ok")
            else:
                if self.is_at("train"):
                    self._begin_training()
                return

    def _begin_training(self):
        if self.partial:
            self.end("user", PartialStateError())
            return
        if self.is_from_setup:
            assert self.step == self._world.kept_by_driver, "a restart goes back further"
            self.is_from_setup = False
        if self.context.world_rank == 0 and self.snapshot_step is None:
            self.snapshot_step = self.step
        self._check_goal()

    def _check_goal(self):
        if self.step >= self.task.request.until_step:
            self.end("ok", self.step)
        elif self.pause is not None and self.step >= self.pause:
            self.end("paused")

    def tick(self):
        """Let time pass for what is done alone."""
        task = self.task
        if task is None or self.dead or self.silent:
            return
        took_s = self._world.now - task.since
        if task.method == "create":
            if took_s >= self.start_s:
                self.end("ok")
        elif task.method == "enter" and len(task.arguments) == 4:
            if took_s < self.setup_s:
                return
            if self.setup_error is not None:
                self.end("user", self.setup_error)
            else:
                self.is_set_up = True
                self.end("ok")
        elif self.is_at("work") or self.is_at("validate"):
            if took_s < self.work_s:
                return
            self.end("ok", self.context.world_rank)

    @property
    def stops_others(self):
        """Whether its next step fails before it has sent its gradients."""
        is_early = self.failure is not None and self.failure[0] in POINTS[:2]
        return is_early or self.error is not None

    def train_one_step(self):
        error, self.error = self.error, None
        if error is not None:
            self.end("user", error)
            return
        assert self.weights == [self.step] * 2, "it trains on a partly updated state"
        (point, dies), self.failure = self.failure or (None, False), None
        counts = self._take_step(None if point is None else POINTS.index(point))
        if dies:
            self.die(f"killed in {point}")
            return
        assert counts == (point not in POINTS[:3])
        if counts:
            self._commit()
        if point is not None:
            self.end("user", BadBatchError(f"raised in {point}"))
        else:
            self._check_goal()

    def _take_step(self, failure):
        """Do a step up to its failure; return whether it counts."""
        step = Step()
        step.optimizers = [self]
        step.draw(None)
        step.run(MicroBatch())
        if failure is None or failure > 1:
            step.begin_update(self)
            self.weights[0] += 1
        if failure is None or failure > 2:
            self.weights[1] += 1
            step.end_update(self)
        counts = step.is_updated
        self.partial = not counts and self.weights[0] != self.weights[1]
        if counts:
            step.commit()
        else:
            step.discard()
        return counts

    def _commit(self):
        self.step += 1
        self.has_trained = True
        self._world.committed(self)
        if self.context.world_rank == 0 and self.step % self._world.snapshot_every == 0:
            self.snapshot_step = self.step

    def enter(self, token, context, leader):
        """Enter a generation that all of its members have come to."""
        self.generation, self.context = token, context
        self.pause = None
        self.num_joins += 1
        if self.join_error is not None:
            self.end("user", self.join_error)
            return
        if leader is None:
            self.step, self.is_set_up, self.is_from_setup = 0, True, True
        else:
            self.step, self.partial = leader.step, leader.partial
            self.weights = list(leader.weights)
        self.end("ok")


class SimGroup(WorkerGroup):
    """The real group, with room and workers of the simulated world."""

    def __init__(self, world, options):
        super().__init__(options, clock=SimClock(world))
        self._world = world

    def discard(self, member):
        if (driver := self._world.driver) is not None:
            stays = driver.controller.policy.joins
            is_fine = not (member.dead or member.silent or member.deaf or member.lacks_shards)
            is_fine = is_fine and not member.partial
            is_fine = is_fine and self.drains.of(member) is None
            assert not (stays and is_fine and member.has_trained), "a survivor is given up"
        super().discard(member)

    def _reserve(self, num_workers, min_workers, timeout_s):
        room = self._world.find_room(num_workers, min_workers, timeout_s, lambda: self._is_wanted)
        self._world.reservations.append(Reservation(self._world, room))
        return self._world.reservations[-1]

    def new_member(self, slot):
        member = SimMember(self._world, slot)
        self._slots[member] = slot
        self._world.begin(member)
        return member

    def room(self):
        return f"room for {self._world.room}"
