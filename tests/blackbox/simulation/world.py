"""A simulated cluster, with its own clock and without threads.

The code of the driver is real. Only its clock and its workers are simulated. Whenever the driver
waits, the world advances by a tick: each group of workers trains a step, and the actions happen
that the test has planned for this time. So runs are deterministic and fast.
"""

import bisect
import itertools

from raysgd.errors import InsufficientResourcesError
from tests.blackbox.simulation import seam

TICK_S = 0.05
"""Simulated seconds of a tick, and of a step."""
MAX_TICKS = 60_000
"""Ticks after which a run counts as endless: nearly an hour."""
MAX_LOOKS = 1_000_000
"""Limit of clock reads."""


class World:
    """The simulated cluster."""

    def __init__(self, room):
        self.room = room
        self.now = 1000.0
        self.step_s = TICK_S
        self.snapshot_every = 10
        self.join_s = 0.0
        """Seconds from the arrival of all members of a generation to its start."""
        self.workers = []
        self.on_new_worker = []
        self.on_meeting = []
        """Functions to call once, when all members of the next generation have arrived."""
        self.furthest = 0
        """The most steps that any worker has committed."""
        self.trained = []
        """The committed steps, in the order of their first commits."""
        self.kept_by_driver = 0
        """Step of the newest snapshot that the driver has; 0 is the state of the setup."""
        self.reservations = []
        self.driver = None
        self._plan = []
        self._order = itertools.count()
        self._meetings = {}
        self._ticks = self._looks = 0
        self.has_ctrl_c = False
        """Whether Ctrl-C ends the driver's wait at the next tick."""

    # ---- calls of tests

    def plan(self, after_s, action):
        """Call `action` after this many simulated seconds."""
        bisect.insort(self._plan, (self.now + after_s, next(self._order), action))

    def at_step(self, step, action):
        """Call `action` as soon as a worker has committed `step`."""

        def look():
            if self.furthest >= step:
                action()
            else:
                self.plan(0.0, look)

        self.plan(0.0, look)

    def drive(self, num_workers, **options):
        """Return a driver in this world whose workers have started."""
        self.driver = seam.Driver(self, num_workers, **options)
        self.driver.start()
        return self.driver

    def lose(self, rank, cause="OOM", ahead=(), noticing=()):
        """Kill a worker in a step that the ranks `ahead` have committed.

        The ranks `noticing` fail immediately. The others wait for the dead worker.
        """
        members = self.driver.workers
        if rank >= len(members):
            return
        ahead = [members[n] for n in ahead if n < len(members) and n != rank]
        for member in ahead:
            if member.is_at("train") and self._in_step(member):
                member.train_one_step()
        for member in (members[n] for n in noticing if n < len(members) and n != rank):
            if member.is_at("train"):
                member.fail_to_talk()
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

    def tick_until(self, condition, timeout_s):
        """Let time pass until a condition holds, or until the timeout."""
        end = self.now + timeout_s
        while not condition() and self.now < end:
            self.tick()

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
        if self.has_ctrl_c:
            self.has_ctrl_c = False
            raise KeyboardInterrupt

    # ---- what workers do together

    def _members_of(self, token):
        return [worker for worker in self.workers if worker.generation == token]

    def _in_step(self, member):
        """Whether all members of its generation are at the same step."""
        members = self._members_of(member.generation)
        return len({worker.step for worker in members}) == 1

    def _train(self):
        for token in {worker.generation for worker in self.workers} - {None}:
            members = self._members_of(token)
            if all(
                m.is_at("train") and m.context.generation == self.driver.generation for m in members
            ):
                if failing := [member for member in members if member.stops_others]:
                    for member in failing:
                        member.train_one_step()
                elif self._in_step(members[0]):
                    for member in members:
                        member.train_one_step()

    def committed(self, member):
        if member.step > self.furthest:
            self.furthest = member.step
        if member.step not in self.trained:
            self.trained.append(member.step)

    def meet(self, member):
        """Record that a worker is at a rendezvous. When all are, start their generation."""
        meeting = member.meeting
        here = self._meetings.setdefault(meeting.token, {})
        here[meeting.context.world_rank] = member
        if len(here) < meeting.size:
            return
        if self.join_s:
            self.plan(self.join_s, lambda: self._begin(here, meeting))
        else:
            self._begin(here, meeting)

    def _begin(self, here, meeting):
        actions, self.on_meeting = self.on_meeting, []
        for action in actions:
            action()
        if any(not m.is_meeting(meeting.token) for m in here.values()):
            return  # the others wait until the driver interrupts them
        leader = None
        if meeting.leader is not None:
            leader = here[meeting.leader]
            old = [m for m in here.values() if m.generation is not None]
            good = [m for m in old if m.condition == "good"]
            assert leader in good or not good, "a damaged state counts"
            furthest = max((m.step for m in good or old), default=self.kept_by_driver)
            assert leader.step == furthest, "a committed step is given up"
            assert leader in old or not old, "a new worker leads"
        contexts = {rank: m.meeting.context for rank, m in here.items()}
        assert all(c.world_size == meeting.size for c in contexts.values())
        for rank, m in here.items():
            m.enter(meeting.token, contexts[rank], leader)

    # ---- what must hold at any time

    def check(self):
        if self.driver is not None:
            members = self.driver.workers
            assert len(set(members)) == len(members), "a worker is a member twice"
            assert len(members) <= self.driver.max_workers, "more members than num_workers"

    def find_room(self, num_workers, min_workers, timeout_s, is_wanted):
        """Wait for room for `min_workers`. Return the number of workers for which there is room."""
        self.tick_until(lambda: self.room >= min_workers or not is_wanted(), timeout_s)
        if not is_wanted():
            raise RuntimeError("The workers are shut down.")
        if self.room < min_workers:
            raise InsufficientResourcesError("no room")
        return min(num_workers, self.room)

    def begin(self, member):
        """Record a worker that starts."""
        self.workers.append(member)
        for change in self.on_new_worker:
            change(member)
