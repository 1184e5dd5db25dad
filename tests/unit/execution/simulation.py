"""A cluster that is simulated: a clock of its own, workers that train in step, and no threads.

The driver's code runs as it is; only its clock, its waiting and its workers are replaced.
Wherever it waits, the world goes on by a tick: workers that train together do a step, and what
the test planned for that time happens. So a run is the same each time, and takes no time.
"""

import bisect
import itertools
import pickle
import queue
from concurrent.futures import FIRST_COMPLETED, Future
from dataclasses import dataclass, field, replace
from typing import Any

from raysgd.context import Progress
from raysgd.elastic.config import ElasticConfig
from raysgd.elastic.policies import Place
from raysgd.errors import InsufficientResourcesError
from raysgd.execution import attempt, group, placement, recruit, recruiting, supervisor, watch
from raysgd.execution.group import GroupOptions, WorkerGroup
from raysgd.execution.members import Member
from raysgd.execution.supervisor import State, Supervisor
from raysgd.execution.worker import Outcome

TICK_S = 0.05
"""Simulated seconds of a tick, and of a step."""
MAX_TICKS = 60_000
"""After so many ticks, nearly an hour, a call counts as one that does not end."""
MAX_LOOKS = 400_000
"""So often may the clock be read."""


class LostError(Exception):
    """What Ray would say of a dead actor."""


class BadBatchError(Exception):
    """An error of the user's code."""


@dataclass
class Task:
    """One call that a worker has been given."""

    method: str
    arguments: tuple[Any, ...]
    future: Future = field(default_factory=Future)
    since: float = -1.0
    """When it began; negative before."""


class Slot:
    """Room for one worker, which is there while the cluster has that much room."""

    strategy = None

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

    def request_slot(self, bundle):
        self.slots.append(Slot(self._world, len(self.slots)))
        return self.slots[-1]

    def release(self):
        self.slots = []


class SimBackend:
    """Gives each generation a rendezvous of its own."""

    def __init__(self, rejoins=True):
        self.rejoins = rejoins
        self.num_prepared = 0
        self.closed = 0

    def prepare(self, addresses):
        self.num_prepared += 1
        return self.num_prepared, len(addresses)

    def close(self):
        self.closed += 1


class SimMember(Member):
    """A worker that does one task after the other as the world ticks."""

    remote = True

    def __init__(self, world, slot):
        self._world = world
        self.slot = slot
        self.home = Place(
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
        self.silent = False
        """Stopped: it answers nothing and does nothing."""
        self.deaf = False
        """It does not come back when it is interrupted."""
        self.error = None
        """What its next training step raises."""
        self.work_s = 0.0
        """How long a call takes that is no training."""
        self.setup_s = 0.5
        self.setup_error = None
        self.join_error = None
        self.stack = "in user code"
        self.num_joins = 0
        self.has_trained = False
        self.interruptions = 0

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

    def _place(self):
        return self.home

    def _interrupt(self, generation=None):
        assert generation is None or generation >= self._generation_number
        self.interruptions += 1
        if self.queue and not self.deaf:
            self.end("stopped", RuntimeError("stopped by the driver"))

    def _progress(self):
        return Progress(
            global_step=self.step,
            num_batches=self.step,
            step_s=self._world.step_s,
            snapshot=self.snapshot_step,
        )

    @property
    def _generation_number(self):
        return 0 if self.context is None else self.context.generation

    def _pause_at(self, generation, step):
        assert generation == self._generation_number
        self.pause = step
        return self.step

    def _snapshot(self):
        return None if self.snapshot_step is None else pickle.dumps({"step": self.snapshot_step})

    def _stacks(self):
        return self.stack

    # ---- life

    def die(self, cause):
        if self.dead:
            return
        self.dead = LostError(f"The actor died: {cause}")
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

    def is_at(self, method):
        task = self.task
        if self.dead or self.silent or task is None:
            return False
        return (task.arguments[0] if task.method == "call" else task.method) == method

    def go_on(self):
        """Do what takes no time, up to something that does."""
        while (task := self.task) is not None and not self.dead and not self.silent:
            if task.since < 0:
                task.since = self._world.now
            if task.method in ("create", "prepare"):
                self.end("ok")
            elif task.method == "teardown":
                self.queue.pop(0).future.set_result(None)
            elif task.method == "enter" and len(task.arguments) == 3:
                self._world.meet(self)
                return
            elif self.is_at("restart_state"):
                self.end("ok", {"step": self.step})
            elif self.is_at("load_state_dict"):
                self.step = pickle.loads(task.arguments[1])["state"]["step"]
                self.end("ok")
            else:
                if self.is_at("train"):
                    self._begin_training()
                return

    def _begin_training(self):
        if self.context.world_rank == 0 and self.snapshot_step is None:
            self.snapshot_step = self.step
        self._check_goal()

    def _check_goal(self):
        if self.step >= pickle.loads(self.task.arguments[1])["until_step"]:
            self.end("ok", self.step)
        elif self.pause is not None and self.step >= self.pause:
            self.end("paused")

    def tick(self):
        """Let time pass for what is done alone."""
        task = self.task
        if task is None or self.dead or self.silent:
            return
        if task.method == "enter" and len(task.arguments) == 4:
            if self._world.now - task.since < self.setup_s:
                return
            if self.setup_error is not None:
                self.end("user", self.setup_error)
            else:
                self.is_set_up = True
                self.end("ok")
        elif self.is_at("work") or self.is_at("validate"):
            if self._world.now - task.since < self.work_s:
                return
            self.end("ok", self.context.world_rank)

    def train_one_step(self):
        error, self.error = self.error, None
        if error is not None:
            self.end("user", error)
            return
        self.step += 1
        self.has_trained = True
        self._world.committed(self)
        if self.context.world_rank == 0 and self.step % self._world.snapshot_every == 0:
            self.snapshot_step = self.step
        self._check_goal()

    def enter(self, token, context, leader_step):
        """Enter a generation that all of its members have come to."""
        self.generation, self.context = token, context
        self.pause = None
        self.num_joins += 1
        if self.join_error is not None:
            self.end("user", self.join_error)
            return
        if leader_step is None:
            self.step, self.is_set_up = 0, True
        else:
            self.step = leader_step
        self.end("ok")


class SimGroup(WorkerGroup):
    """The real group, with room and workers of the simulated world."""

    def __init__(self, world, options):
        super().__init__(options)
        self._world = world
        self.num_starts = 0

    def start(self, timeout_s, queue=None):
        self.num_starts += 1
        super().start(timeout_s, queue)

    def shutdown(self, force=False):
        world = self._world
        if world.supervisor is not None and world.supervisor.state is not State.CLOSED:
            alive = [member for member in self.members if not member.dead]
            if world.supervisor._rejoins:
                assert not any(m.has_trained for m in alive), "a survivor's state is given up"
        super().shutdown(force)

    def _actor_class(self):
        return None

    def new_member(self, slot):
        member = SimMember(self._world, slot)
        self._slots[member] = slot
        self._world.workers.append(member)
        for change in self._world.on_new_worker:
            change(member)
        return member

    def room(self):
        return f"room for {self._world.room}"


class World:
    """All that is simulated. It stands in for the module `time` as well."""

    def __init__(self, room):
        self.room = room
        self.now = 1000.0
        self.step_s = TICK_S
        self.snapshot_every = 10
        self.workers = []
        self.on_new_worker = []
        self.on_meeting = []
        """Functions that are called, once each, as all members of a generation have come."""
        self.furthest = 0
        """The most steps that a worker which is alive, or was when it mattered, has committed."""
        self.trained = []
        """Each step at the time when the first worker committed it."""
        self.reservations = []
        self.supervisor = None
        self._plan = []
        self._order = itertools.count()
        self._meetings = {}
        self._ticks = self._looks = 0

    # ---- what tests say

    def plan(self, after_s, action):
        """Let something happen so many seconds from now."""
        bisect.insort(self._plan, (self.now + after_s, next(self._order), action))

    def at_step(self, step, action):
        """Let something happen as soon as a worker has committed `step`."""

        def look():
            if self.furthest >= step:
                action()
            else:
                self.plan(0.0, look)

        self.plan(0.0, look)

    def make(
        self, num_workers, min_workers=1, timeout_s=100.0, can_join=True, rejoins=True, **elastic
    ):
        """Return a supervisor in this world that has started."""
        options = GroupOptions(
            num_workers=num_workers, min_workers=min_workers, start_timeout_s=10.0
        )
        made = SimGroup(self, options)
        config = ElasticConfig(**{"jitter": 0.0, **elastic})
        self.supervisor = Supervisor(
            made, "runner", SimBackend(rejoins), None, timeout_s, config, can_join=can_join
        )
        self.supervisor.start()
        return self.supervisor

    def lose(self, rank, cause="OOM", ahead=(), noticing=()):
        """Kill a worker in its step, which the ranks `ahead` have committed.

        The ranks `noticing` fail at once, the others wait for the dead one.
        """
        members = list(self.supervisor.members)
        if rank >= len(members):
            return
        ahead = [members[n] for n in ahead if n < len(members) and n != rank]
        for member in ahead:
            if member.is_at("train") and self._in_step(member):
                member.train_one_step()
        for member in (members[n] for n in noticing if n < len(members) and n != rank):
            if member.is_at("train"):
                member.end("communication", ConnectionError("closed by peer"))
        members[rank].die(cause)

    # ---- the clock

    def monotonic(self):
        self._looks += 1
        assert self._looks < MAX_LOOKS, "the driver turns in a circle"
        return self.now

    def sleep(self, seconds):
        end = self.now + seconds
        while self.now < end:
            self.tick()

    def wait(self, futures, timeout=None, return_when=None):
        """Stand in for `concurrent.futures.wait`."""
        futures = set(futures)
        end = self.now + (1e9 if timeout is None else timeout)
        while True:
            done = {future for future in futures if future.done()}
            if len(done) == len(futures) or (done and return_when == FIRST_COMPLETED):
                return done, futures - done
            if self.now >= end:
                return done, futures - done
            self.tick()

    def new_queue(self):
        """Return a stand-in for a `queue.SimpleQueue`."""
        return SimulatedQueue(self)

    def tick(self):
        self.now += TICK_S
        self._ticks += 1
        assert self._ticks < MAX_TICKS, "the call does not end"
        planned, self._plan = self._plan, []
        for entry in planned:
            if entry[0] <= self.now:
                entry[2]()
            else:
                bisect.insort(self._plan, entry)
        for worker in list(self.workers):
            worker.tick()
        if self._ticks % max(1, round(self.step_s / TICK_S)) == 0:
            self._train()
        self.check()

    # ---- what workers do together

    def _members_of(self, token):
        return [worker for worker in self.workers if worker.generation == token]

    def _in_step(self, member):
        """Whether the members of its generation are at the same step, so that all can do it."""
        members = self._members_of(member.generation)
        return len({worker.step for worker in members}) == 1

    def _train(self):
        for token in {worker.generation for worker in self.workers} - {None}:
            members = self._members_of(token)
            if all(m.is_at("train") and m.context.generation == self._newest for m in members):
                if any(m.error is not None for m in members):
                    for member in members:
                        if member.error is not None:
                            member.train_one_step()
                elif self._in_step(members[0]):
                    for member in members:
                        member.train_one_step()

    @property
    def _newest(self):
        return self.supervisor._generation

    def committed(self, member):
        if member.step > self.furthest:
            self.furthest = member.step
        if member.step not in self.trained:
            self.trained.append(member.step)

    def meet(self, member):
        """Note that a worker has come to a rendezvous; it is over when all have."""
        context, (token, size), leader = member.task.arguments
        here = self._meetings.setdefault(token, {})
        here[context.world_rank] = member
        if len(here) < size:
            return
        actions, self.on_meeting = self.on_meeting, []
        for action in actions:
            action()
        if any(m.dead or not m.is_at("enter") for m in here.values()):
            return  # those that are left wait until they are interrupted
        step = None
        if leader is not None:
            old = [m for m in here.values() if m.generation is not None]
            assert here[leader].step == max(m.step for m in old), "a committed step is given up"
            assert here[leader].generation is not None, "a newcomer leads"
            step = here[leader].step
        contexts = {rank: m.task.arguments[0] for rank, m in here.items()}
        assert all(c.world_size == size for c in contexts.values())
        for rank, m in here.items():
            m.enter(token, contexts[rank], step)

    # ---- what must hold at any time

    def check(self):
        members = [] if self.supervisor is None else self.supervisor.members
        assert len(set(members)) == len(members), "a worker is a member twice"
        if self.supervisor is not None:
            assert len(members) <= self.supervisor.max_workers, "more members than num_workers"

    def reserve(self, bundle, *, num_workers, min_workers, timeout_s, strategy, queue=None):
        """Stand in for `placement.reserve`."""
        end = self.now + timeout_s
        while self.room < min_workers and self.now < end:
            self.tick()
        if self.room < min_workers:
            raise InsufficientResourcesError("no room", bundle, {}, {})
        self.reservations.append(Reservation(self, min(num_workers, self.room)))
        return self.reservations[-1]


class SimulatedQueue:
    """A queue; while somebody waits for it, the world goes on."""

    def __init__(self, world):
        self._world = world
        self._held = []

    def put(self, item):
        self._held.append(item)

    def get(self, timeout):
        end = self._world.now + timeout
        while not self._held and self._world.now < end:
            self._world.tick()
        return self.get_nowait()

    def get_nowait(self):
        if not self._held:
            raise queue.Empty
        return self._held.pop(0)


def install(world, monkeypatch):
    """Let the driver's code live in a simulated world."""
    for module in (group, supervisor, watch):
        monkeypatch.setattr(module, "wait", world.wait)
    monkeypatch.setattr(attempt, "SimpleQueue", world.new_queue)
    for module in (attempt, group, recruit, recruiting, supervisor, watch):
        monkeypatch.setattr(module, "time", world)
    for module in (attempt, group, supervisor):
        monkeypatch.setattr(module, "is_loss", lambda error: isinstance(error, LostError))
    monkeypatch.setattr(placement, "reserve", world.reserve)
    monkeypatch.setattr(placement, "connect", lambda: None)


def run_until(supervisor, step, **arguments):
    """Train up to a step, as the trainer does."""
    return supervisor.call("train", until_step=step, **arguments)


def kinds(supervisor):
    return [event.kind for event in supervisor.events]


def progress(step, **values):
    return replace(Progress(global_step=step), **values)
