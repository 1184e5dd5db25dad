"""Simulated workers and resources. This file depends on internals.

If the protocol between the driver and the workers changes, adapt this file, but no test.
"""

from concurrent.futures import ALL_COMPLETED, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray.exceptions

from raysgd._internal.worker_status import (
    BatchProgress,
    Measurements,
    ProcessStatus,
    ReportedPosition,
    SnapshotStatus,
    StateStatus,
    WorkerStatus,
)
from raysgd.callbacks.callback_list import CallbackList
from raysgd.cluster.actor_group import ActorGroup
from raysgd.cluster.clock import Clock
from raysgd.cluster.group_options import GroupOptions
from raysgd.cluster.serialization import pack
from raysgd.cluster.worker import Outcome, WorkerLocation
from raysgd.cluster.worker_handle import WorkerHandle
from raysgd.data.partition import MicroBatchPlan
from raysgd.driver.dispatcher import Dispatcher
from raysgd.driver.result_reporter import ResultReporter
from raysgd.elastic.call import Call
from raysgd.elastic.config import ElasticConfig
from raysgd.elastic.controller import Controller
from raysgd.loop.requests import TrainRequest
from raysgd.loop.update import Update

__all__ = ["POINTS", "BadBatchError", "Driver", "LostError", "PartialStateError"]

POINTS = ("forward", "backward", "update", "after update", "commit")
"""Where a step can fail. Workers exchange gradients in the backward pass."""


class LostError(ray.exceptions.RayActorError):
    """The error that Ray raises for a dead actor."""

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
    """A clock whose waits advance the simulated world."""

    def __init__(self, world):
        self._world = world

    def monotonic(self):
        return self._world.monotonic()

    def time(self):
        return self._world.now

    def sleep(self, seconds):
        self._world.sleep(seconds)

    def wait(self, futures, timeout_s, until=ALL_COMPLETED):
        futures = set(futures)
        enough = all if until == ALL_COMPLETED else any
        self._world.tick_until(lambda: enough(future.done() for future in futures), timeout_s)
        return {future for future in futures if not future.done()}


DRIVERS = []
"""The drivers of a test."""


class Driver:
    """A replacement for a trainer: it trains up to a step, and shows events and workers."""

    def __init__(
        self,
        world,
        num_workers,
        min_workers=1,
        timeout_s=100.0,
        can_join=True,
        rejoins=True,
        on_start=lambda: None,
        **elastic,
    ):
        DRIVERS.append(self)
        self.max_workers = num_workers
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
            supports_live_join=can_join,
            on_start=on_start,
        )

    def start(self):
        self.controller.start()

    def train(self, goal, max_retries=0):
        """Train up to a step. Return the step of each worker."""
        self.call = Call(
            request=TrainRequest(call_number=0, until_step=goal),
            max_retries=max_retries,
            has_batches=True,
            can_pause=True,
        )
        return self.controller.run(self.call)

    def train_further(self, num_steps):
        """Train a number of steps, in a call that computes its goal itself."""
        request = TrainRequest(call_number=0)
        callback_list = CallbackList(self)
        reporter = ResultReporter(self.controller, callback_list)
        dispatcher = Dispatcher(self.controller, callback_list, "Trainer", reporter)
        make_request = partial(dispatcher._make_train_request, request, num_steps)
        call = Call(request=request, make_request=make_request, has_batches=True, can_pause=True)
        return self.controller.run(call)

    @property
    def workers(self):
        """The members of the group in the order of their ranks."""
        return list(self.controller.members)

    @property
    def generation(self):
        """Number of the newest generation."""
        return self.controller.record.generation

    @property
    def events(self):
        return list(self.controller.events)

    @property
    def step(self):
        return self.controller.record.newest_status.position.global_step

    @property
    def has_snapshot(self):
        return self.controller.snapshots.load() is not None

    @property
    def min_workers(self):
        return self.controller.record.group.options.min_workers

    @property
    def losses_in_call(self):
        return self.call.losses.num_losses

    def shutdown(self):
        self.controller.shutdown()
        assert self.controller.is_shut_down


@dataclass
class Task:
    """A call to a worker."""

    method: str
    arguments: tuple[Any, ...]
    future: Future = field(default_factory=Future)
    since: float = -1.0
    """Time when the task began; negative before."""
    request: Any = None
    """The request to the runner, if the method is "handle"."""

    def __post_init__(self):
        if self.method == "handle":
            self.request = self.arguments[0].unpack()
        joins = self.method in ("setup", "rejoin")
        self.meets = joins and not self.arguments[0].is_alone


@dataclass
class Meeting:
    """A rendezvous, as one worker knows it."""

    token: int
    size: int
    context: Any
    leader: int | None = None
    """Rank whose state all workers copy; None if each has the state of its setup."""


class Slot:
    """Room for one worker, which is ready while the cluster has enough room."""

    scheduling_strategy = node_id = last_node_id = None

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
    """A backend that gives each generation a new rendezvous."""

    def __init__(self, rejoins=True):
        self.process_can_rejoin = rejoins
        self.num_prepared = 0

    def create_rendezvous(self, addresses):
        self.num_prepared += 1
        return self.num_prepared, len(addresses)

    def release_rendezvous(self):
        pass

    def close(self):
        pass


class SimMember(WorkerHandle):
    """A simulated worker, which does its tasks in order as the world ticks."""

    is_remote = True

    def __init__(self, world, slot):
        self._world = world
        self.slot = slot
        self.home = WorkerLocation(
            node_id=f"node{slot.index // 2}", node_ip="127.0.0.1", pid=slot.index
        )
        self.dead = None
        self.queue = []
        self.step = 0
        self.is_set_up = False
        self.generation = None
        """Token of the current rendezvous; None before the first."""
        self.context = None
        self.pause = None
        self.snapshot_step = None
        self.speed = 0.0
        self.warning = ""
        """Samples per second."""
        self.silent = False
        """Whether the process is stopped, so that it does and answers nothing."""
        self.holds_gil = False
        """Whether it is silent although its process runs."""
        self.unanswered = []
        self.deaf = False
        """Whether it ignores interruptions."""
        self.error = None
        """The exception that its next training step raises."""
        self.work_s = 0.0
        """Seconds that a call takes that does not train."""
        self.start_s = 0.0
        """Seconds that its process takes to start."""
        self.setup_s = 0.5
        self.setup_error = None
        self.join_error = None
        self.num_joins = 0
        self.is_from_setup = False
        """Whether its state is that of its setup, and it has not trained since."""
        self.has_trained = False
        self.condition = "good"
        """The condition of its state."""
        self.weights = [0, 0]
        """Number of updates of each of its two parameters."""
        self.failure = None
        """The point at which its next step fails, and whether the process dies there."""
        self.divided = False
        """Whether it holds only a shard of the state."""
        self.held = []
        """The shards of other workers that it has imported."""
        self.interruptions = 0
        self.terminated_at = None

    # ---- calls of the driver

    def submit_work(self, method, *arguments):
        task = Task(method.__name__, arguments)
        if self.dead:
            task.future.set_exception(self.dead)
        else:
            self.queue.append(task)
            self.go_on()
        return task.future

    def submit_control(self, method, *arguments):
        future = Future()
        if self.dead:
            future.set_exception(self.dead)
        elif self.silent:
            self.unanswered.append((future, method, arguments))
        else:
            future.set_result(getattr(self, f"_{method.__name__}")(*arguments))
        return future

    def hold_gil(self, seconds):
        """Do and answer nothing for this many seconds, although the process runs."""
        self.silent = self.holds_gil = True
        self._world.plan(seconds, self._release_gil)

    def _release_gil(self):
        self.silent = self.holds_gil = False
        unanswered, self.unanswered = self.unanswered, []
        for future, method, arguments in unanswered:
            if not self.dead:
                future.set_result(getattr(self, f"_{method.__name__}")(*arguments))
        self.go_on()

    def ask_if_stopped(self):
        answer = Future()
        answer.set_result(self.silent and not self.holds_gil)
        return answer

    def kill(self):
        self.die("killed by the driver")

    def kill_process(self):
        self.kill()

    # ---- control calls

    def _locate(self):
        return self.home

    def _interrupt(self, generation=None):
        assert generation is None or generation >= self._generation_number
        self.interruptions += 1
        if self.queue and not self.deaf:
            self.end("interrupted", RuntimeError("stopped by the driver"))

    def fail_to_talk(self):
        """End its step like a worker that has lost a peer."""
        self.end("communication_error", ConnectionError("closed by peer"))

    def _status(self, acknowledged_step=-1):
        began = self.terminated_at
        terminated_s = None if began is None else self._world.now - began
        return WorkerStatus(
            position=ReportedPosition(global_step=self.step),
            batches=BatchProgress(global_step=self.step),
            measured=Measurements(step_s=self._world.step_s, samples_per_s=self.speed),
            snapshot=SnapshotStatus(self.snapshot_step),
            state_status=StateStatus(is_complete=not self.divided, condition=self.condition),
            process=ProcessStatus(terminated_s=terminated_s),
        )

    @property
    def _generation_number(self):
        return 0 if self.context is None else self.context.generation

    def _pause_at(self, generation, step):
        assert generation == self._generation_number
        self.pause = step
        return self.step

    def _send_snapshot(self, step, num_invalidations, inbox):
        if self.snapshot_step is None:
            return None
        self._world.kept_by_driver = self.snapshot_step
        return pack({"global_step": self.snapshot_step})

    def _stacks(self):
        return "in user code"

    # ---- tasks

    def die(self, cause):
        if self.dead:
            return
        self.dead = LostError(cause)
        self.fail_all()

    def fail_all(self):
        """Fail all tasks of the dead worker."""
        queue, self.queue = self.queue, []
        unanswered, self.unanswered = self.unanswered, []
        for future in [task.future for task in queue] + [each[0] for each in unanswered]:
            future.set_exception(self.dead)

    def end(self, kind, value=None):
        """End the current task and begin the next one."""
        task = self.queue.pop(0)
        task.future.set_result(Outcome(kind, value, self._status()))
        self.go_on()

    @property
    def task(self):
        return self.queue[0] if self.queue else None

    @property
    def meeting(self):
        """The rendezvous of the current task."""
        context, (token, size), *leader = self.task.arguments
        return Meeting(token, size, context, *leader)

    def is_meeting(self, token):
        """Whether it waits at this rendezvous."""
        in_it = self.task and self.task.meets and self.is_at(self.task.method)
        return in_it and self.meeting.token == token

    def is_at(self, method):
        task = self.task
        if self.dead or self.silent or task is None:
            return False
        return (task.request.name if task.method == "handle" else task.method) == method

    def go_on(self):
        """Do tasks that take no time, up to the first one that does."""
        while (task := self.task) is not None and not self.dead and not self.silent:
            if task.since < 0:
                task.since = self._world.now
            if task.method == "create_runner" and not self.start_s:
                self.end("ok")
            elif task.method == "teardown":
                self.queue.pop(0).future.set_result(None)
            elif task.meets:
                self._world.meet(self)
                return
            elif self.is_at("leaving_metrics"):
                self.end("ok", f"of {self.home.pid}")
            elif self.is_at("export_shards"):
                self.end("ok", self.home.pid)
            elif self.is_at("import_shards"):
                self.held.append(task.request.shards)
                self.end("ok")
            elif self.is_at("restart_state"):
                self._world.kept_by_driver = self.step
                shards = {"shards": self.home.pid} if self.divided else {}
                self.end("ok", {"global_step": self.step, **shards})
            elif self.is_at("load"):
                self.step = task.request.state["global_step"]
                self.weights = [self.step] * 2
                error = task.request.state.get("error")
                self.end("ok" if error is None else "user_error", error)
            else:
                if self.is_at("train"):
                    self._begin_training()
                return

    def _begin_training(self):
        if self.condition == "damaged":
            self.end("user_error", PartialStateError())
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
        """Let time pass for a task that needs no other worker."""
        task = self.task
        if task is None or self.dead or self.silent:
            return
        took_s = self._world.now - task.since
        if task.method == "create_runner":
            if took_s >= self.start_s:
                self.end("ok")
        elif task.method == "setup" and not task.meets:
            if took_s < self.setup_s:
                return
            if self.setup_error is not None:
                self.end("user_error", self.setup_error)
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
            self.end("user_error", error)
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
            self.end("user_error", BadBatchError(f"raised in {point}"))
        else:
            self._check_goal()

    def _take_step(self, failure):
        """Do a step up to its failure. Return whether the step counts."""
        update = Update()
        update.optimizer_steps.expect([self])
        update.begin_micro_batch(MicroBatchPlan())
        if failure is None or failure > 1:
            update.optimizer_steps.begin(self)
            self.weights[0] += 1
        if failure is None or failure > 2:
            self.weights[1] += 1
            update.optimizer_steps.end(self)
        counts = update.optimizer_steps.are_complete
        if not counts and self.weights[0] != self.weights[1]:
            self.condition = "damaged"
        if counts:
            update.commit()
        update.close()
        return counts

    def _commit(self):
        self.step += 1
        self.has_trained = True
        self._world.committed(self)
        if self.context.world_rank == 0 and self.step % self._world.snapshot_every == 0:
            self.snapshot_step = self.step

    def enter(self, token, context, leader):
        """Enter a generation whose members have all arrived."""
        self.generation, self.context = token, context
        self.pause = None
        self.num_joins += 1
        if self.join_error is not None:
            self.end("user_error", self.join_error)
            return
        if leader is None:
            self.step, self.is_set_up, self.is_from_setup = 0, True, True
        else:
            self.step, self.condition = leader.step, leader.condition
            self.weights = list(leader.weights)
        self.end("ok", self.warning)


class SimGroup(ActorGroup):
    """The real worker group, with simulated room and workers."""

    def __init__(self, world, options):
        super().__init__(options, clock=SimClock(world))
        self._world = world

    def discard(self, *members):
        for member in members if self._world.driver is not None else ():
            stays = self._world.driver.controller.record.policy.survivors_stay
            is_fine = not (member.dead or member.silent or member.deaf)
            is_fine = is_fine and member.condition == "good"
            is_fine = is_fine and not self.notices.preempted([member])
            assert not (stays and is_fine and member.has_trained), "a survivor is given up"
        super().discard(*members)

    def _reserve(self, num_workers, min_workers):
        limit_s = self.options.start_timeout_s
        room = self._world.find_room(num_workers, min_workers, limit_s, lambda: self._is_wanted)
        self._world.reservations.append(Reservation(self._world, room))
        return self._world.reservations[-1]

    def start_worker(self, slot):
        member = SimMember(self._world, slot)
        self._slots[member] = slot
        self._world.begin(member)
        return member

    def describe_demand(self):
        return f"room for {self._world.room}"
