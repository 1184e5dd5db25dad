"""Workers on their way into a group: started for each place that is missing, each by itself.

A start is a scale-up from none. So one that is lost meanwhile is replaced alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Literal

from raysgd._internal.context import Progress, WorkerContext
from raysgd.cluster.group_options import COME_UP_S, WAIT_LONGER
from raysgd.cluster.host_monitor import HostLostError
from raysgd.cluster.worker import Outcome
from raysgd.cluster.worker_group import WorkerGroup
from raysgd.cluster.worker_handle import WorkerHandle, cause_of, is_loss
from raysgd.elastic.config import ElasticConfig
from raysgd.elastic.feature import Feature
from raysgd.elastic.policies import assign_contexts, backoff_s, may_resize
from raysgd.errors import RemoteTraceback, WorkerLostError, WorkerTimeoutError

__all__ = ["Replacement", "ScaleUp"]

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.25
"""How often to ask whether there is room for a worker."""
_SAID_S = 10.0
"""After how long a silence of Ray's head the log tells of it."""
_GRACE_S = COME_UP_S
"""How long a start waits for late workers once ``min_workers`` are ready."""
_SHORT_GRACE_S = 0.5
"""The same if late workers can join later, in a restart or if all of them replace lost workers."""
_MAX_SETUP_CRASHES = 3
"""How many crashes in a row in the ``setup`` of one slot are an error."""


Goal = Literal["room", "process", "setup"]
Step = Literal["come up", "start", "set up", "join"]


class ScaleUp(Feature):
    """Keeps a replacement worker on its way for each place that is missing.

    Args:
        group: the group to fill.
        config: whether and how often to try.
        created: arguments of a worker's ``create``.
        draw: returns a random number in 0..1, for the jitter.
        on_failure: told of a replacement worker that failed, and why.
        timeout_s: bound of each step of a worker's way, from its ``create`` on.
        can_join: whether replacement workers can join a group that is at work; without that none
            are started for it.
        rejoins: whether a process can be in another process group than its first one: what sets up
            alone, and joins, can. Where it cannot, all are started anew when there is room.
    """

    def __init__(
        self,
        group: WorkerGroup,
        config: ElasticConfig,
        created: Sequence[Any],
        draw: Callable[[], float],
        on_failure: Callable[[WorkerHandle | None, BaseException], None],
        timeout_s: float,
        can_join: bool = True,
        rejoins: bool = True,
    ) -> None:
        self._group = group
        self._config = config
        self._created = created
        self._draw = draw
        self._on_failure = on_failure
        self._timeout_s = timeout_s
        self._can_join = can_join
        self._rejoins = rejoins
        self.together = True
        """Whether the workers of a start set up in one process group. Those of the first do, and
        where a loss breaks that, each sets up alone, which is done when it is done."""
        self._replacements: list[Replacement] = []
        self._lost_slots: list[Any] = []
        self._crashes: dict[Any, tuple[Step, int]] = {}
        """In which step the newest workers of a slot were lost, and how many in a row."""
        self._failures = 0
        self._retry_at: dict[Any, float] = {}
        self._resized_at = self._group.clock.monotonic()
        self._enough_at: float | None = None
        self._is_first = True
        self._generation = 0
        self._says_silent = False
        self.error: BaseException | None = None
        """Why the newest worker failed, where another one would fail in the same way."""

    @property
    def under_way(self) -> bool:
        """Whether there are replacement workers."""
        return bool(self._replacements)

    def on_generation(self, number: int) -> None:
        """Note the newest generation."""
        self._generation = number

    def poll(self, progress: Mapping[WorkerHandle, Progress]) -> None:
        """Bring replacements forward, and start those that are missing."""
        self.tick(self._generation)

    def on_loss(self, member: WorkerHandle, error: BaseException) -> None:
        """Note that a member was lost: its successor need not wait to join."""
        # on a silent host another worker may never come up: one is started elsewhere as well
        self.lost(self._group.slot_of(member), isinstance(error, HostLostError))

    def lost(self, slot: Any, is_suspect: bool = False) -> None:
        """Note that a worker was lost in `slot`: its successor need not wait to join.

        Args:
            slot: its place.
            is_suspect: whether another worker there may never come up, so that one is started
                elsewhere as well, if there is room.
        """
        self._lost_slots.append(slot)
        self.try_again()
        if is_suspect and slot not in self._group.suspects:
            self._group.suspects.append(slot)

    def try_again(self) -> None:
        """Forget the replacement workers that failed: the reason may be another one, or mended."""
        self._failures, self._retry_at, self.error = 0, {}, None

    def has_room(self) -> bool:
        """Whether there is room for a worker that is missing, and the group may grow now.

        The room is requested if it has not been.
        """
        options, now = self._group.options, self._group.clock.monotonic()
        if not self._config.grow or len(self._group.members) >= options.num_workers:
            return False
        if not may_resize(now, self._resized_at, False, self._config):
            return False
        return any(slot.is_ready for slot in self._group.vacant_slots())

    def resized(self) -> None:
        """Note that the group has changed its size now."""
        self._resized_at = self._group.clock.monotonic()

    def tick(self, generation: int, starting: bool = False) -> None:
        """Bring replacements forward, and start those that are missing; never waits for long.

        Nothing is done while Ray's head stands still: its answers would be waited for.

        Args:
            generation: the newest.
            starting: whether they are to be the group, in the room that was reserved for it.
        """
        options = self._group.options
        if not starting and (not self._config.grow or not self._can_join or options.inline):
            return
        drains = self._group.drains
        if self._says_silent and not drains.is_ray_silent:
            self._says_silent = False
            logger.warning("Ray's head answers again.")
        elif not self._says_silent and drains.silence_s > _SAID_S:
            self._says_silent = True
            logger.warning(
                "Ray's head has not answered for %.0f s: workers that are lost are replaced when "
                "it does.",
                drains.silence_s,
            )
        if drains.is_ray_silent:
            return
        self._advance(self._replacements)
        num_staying = len(self._group.members) - len(self._group.leaving())
        missing = self._num_missing()
        if missing <= 0:
            in_order = sorted(self._replacements, key=self._is_sure, reverse=True)
            for replacement in in_order[options.num_workers - num_staying :]:
                self.drop(replacement)  # others were the first to have room, or all stay after all
            if not self._replacements:
                self._group.give_back()
        if missing > 0 and self._failures < self._config.max_attempts:
            self._advance(self._started(generation, starting, num_staying))

    def _is_sure(self, replacement: Replacement) -> bool:
        return replacement.member is not None and replacement.slot not in self._group.suspects

    def _num_missing(self) -> int:
        """Return how many places nobody stays in, or is sure to come to."""
        num_staying = len(self._group.members) - len(self._group.leaving())
        num_sure = sum(map(self._is_sure, self._replacements))
        return self._group.options.num_workers - num_staying - num_sure

    def _advance(self, replacements: Sequence[Replacement]) -> None:
        missing = self._num_missing()
        for replacement in list(replacements):
            if (waits := replacement.member is None) and missing <= 0:
                continue  # another was the first to have room
            replacement.advance()
            missing -= waits and self._is_sure(replacement)
            if replacement.error is not None:
                self.fail(replacement)

    def _started(self, generation: int, starting: bool, num_staying: int) -> list[Replacement]:
        """Start those that are missing beside the members that stay."""
        taken = [replacement.slot for replacement in self._replacements]
        vacant = [s for s in self._group.vacant_slots(request=not starting) if s not in taken]
        now, num_workers = self._group.clock.monotonic(), self._group.options.num_workers
        size = min(num_staying + len(taken) + len(vacant), num_workers)
        replaces = starting or num_staying < len(self._group.members) or bool(self._group.suspects)
        goal: Goal = "setup" if self._rejoins else "room"
        if starting and self.together:
            goal = "process"
        for slot in vacant:
            if now < self._retry_at.get(slot, 0.0):
                continue
            ranks = {replacement.rank for replacement in self._replacements}
            self._replacements.append(
                Replacement(
                    self._group,
                    slot,
                    next((r for r in range(num_staying, size) if r not in ranks), size - 1),
                    size,
                    generation,
                    self._created,
                    self._timeout_s,
                    replaces_lost=replaces or slot in self._lost_slots,
                    goal=goal,
                )
            )
        return self._replacements[len(taken) :]

    def fail(self, replacement: Replacement, error: BaseException | None = None) -> None:
        """Drop a replacement worker, and start another: immediately if it was lost.

        There is a wait after an exception, and if a slot loses its workers again and again in the
        same step.
        """
        error = error or replacement.error or RuntimeError("it did not join")
        self.drop(replacement)
        self._on_failure(replacement.member, error)
        slot, step = replacement.slot, replacement.step
        if is_loss(error):
            self._lost_slots.append(slot)
            before, count = self._crashes.get(slot, (step, 0))
            count = count + 1 if step == before else 1
            self._crashes[slot] = step, count
            if count < (_MAX_SETUP_CRASHES if step == "set up" else self._config.max_attempts):
                return
            if step in ("start", "set up"):  # where the user's code runs
                self.error = _died_in_a_row(replacement, error, count)
        elif self._is_first or not isinstance(error, WorkerTimeoutError):
            self.error = error  # what took too long may have been stopped by chance
        wait_s = backoff_s(self._failures, self._config, self._draw())
        self._retry_at[slot] = self._group.clock.monotonic() + wait_s
        self._failures += 1
        if self._failures == self._config.max_attempts:
            logger.warning("Giving up on replacement workers after %d failures.", self._failures)

    def drop(self, replacement: Replacement) -> None:
        """End a replacement worker."""
        if replacement not in self._replacements:
            return  # a call that `shutdown` in another thread ends has done it
        self._replacements.remove(replacement)
        if replacement.member is not None:
            self._group.discard(replacement.member)

    def fail_member(self, member: WorkerHandle, error: BaseException) -> bool:
        """Give the replacement worker up that `member` is, if it is one."""
        for replacement in [r for r in self._replacements if r.member is member]:
            self.fail(replacement, error)
            return True
        return False

    def ready(self) -> list[Replacement]:
        """Return the replacement workers that may join now."""
        now = self._group.clock.monotonic()
        urgent = len(self._group.members) < self._group.options.min_workers
        return [
            replacement
            for replacement in self._replacements
            if replacement.is_ready
            and may_resize(now, self._resized_at, urgent or replacement.replaces_lost, self._config)
        ]

    def coming(self) -> int:
        """Return how many replacement workers have room, and come up or are ready."""
        return sum(map(self._is_sure, self._replacements))

    def begin(self) -> None:
        """Note that a group is to begin, of those that come up."""
        self.try_again()
        self._enough_at = None
        # those while others trained were no reason to end a call
        self._crashes = {slot: c for slot, c in self._crashes.items() if c[0] != "set up"}

    def are_enough(self, min_workers: int) -> bool:
        """Whether members and those that may join are so many.

        A start gives late workers some time. It does not begin without the driver's own worker.
        """
        num_members, now = len(self._group.members), self._group.clock.monotonic()
        if num_members + len(self.ready()) < min_workers:
            return False
        late = {r.slot: r.member for r in self._replacements if r.member and not r.is_ready}
        if num_members or not late:
            return True
        if self._enough_at is None:
            self._enough_at = now
        may_join_later = self._can_join and self._rejoins and self._config.grow
        replace_lost = all(slot in self._lost_slots for slot in late)
        is_short = may_join_later and (replace_lost or not self._is_first)
        grace_s = _SHORT_GRACE_S if is_short else _GRACE_S
        return now >= self._enough_at + grace_s and all(member.remote for member in late.values())

    def set_up_alone(self, generation: int) -> None:
        """Let those that are left set up alone, where they can: the first try together is over."""
        if self.together and self._can_join and self._rejoins:
            self.together, self._enough_at = False, None
            for replacement in self._replacements:
                replacement.set_up_alone(generation)

    def joined(self, replacements: Sequence[Replacement]) -> None:
        """Note that replacement workers are members now."""
        for replacement in replacements:
            self._replacements.remove(replacement)
            self._crashes.pop(replacement.slot, None)
            self._lost_slots = [slot for slot in self._lost_slots if slot is not replacement.slot]
        self._is_first = False
        self.try_again()
        self.resized()

    def stop(self) -> None:
        """End all replacement workers."""
        for replacement in list(self._replacements):
            self.drop(replacement)


class Replacement:
    """One worker on its way into a group, from a slot to a worker that waits to join.

    Args:
        group: starts the worker.
        slot: where it shall run.
        rank: that it will have in the group, most likely.
        size: of the group then.
        generation: the newest.
        created: arguments of the worker's ``create``.
        timeout_s: bound of each step from ``create`` on.
        replaces_lost: whether it takes the place of a worker that was lost.
        goal: what makes it ready: its ``setup``, which it makes alone; a process that has created
            what it hosts, where all set up together; or the room for one, where all workers will be
            started anew.
    """

    def __init__(
        self,
        group: WorkerGroup,
        slot: Any,
        rank: int,
        size: int,
        generation: int,
        created: Sequence[Any],
        timeout_s: float,
        replaces_lost: bool,
        goal: Goal = "setup",
    ) -> None:
        self._group = group
        self.slot = slot
        self.rank = rank
        self._size = size
        self._generation = generation
        self._created = created
        self._timeout_s = timeout_s
        self._goal = goal
        self._life = self._live()
        self.replaces_lost = replaces_lost
        self.context: WorkerContext | None = None
        """For which its process was prepared; None before that."""
        self.member: WorkerHandle | None = None
        self.step: Step = "come up"
        """What it is at, or was at when it failed."""
        self.is_ready = False
        self.error: BaseException | None = None

    def advance(self) -> None:
        """Take the next step towards the group if it can be taken; never waits."""
        if self.is_ready or self.error is not None:
            return
        try:
            next(self._life)
        except StopIteration:
            self.is_ready, self.step = True, "join"
        except BaseException as error:
            self.error = error  # also after Ctrl-C: it is not ready, and cannot go on
            from_worker = isinstance(error.__cause__, RemoteTraceback)
            if not isinstance(error, Exception) and not from_worker:
                raise

    def set_up_alone(self, generation: int) -> None:
        """Set up alone after all, also where the process is prepared for a group."""
        self._goal, self._generation = "setup", generation
        if self.is_ready:
            self.is_ready, self._life = False, self._results(self._asked_to_set_up())

    def _wait_for_slot(self) -> Iterator[None]:
        looked = 0.0
        while True:
            if self._group.clock.monotonic() - looked >= _LOOK_EVERY_S:
                looked = self._group.clock.monotonic()
                if self.slot.is_ready:
                    return
            yield

    def _live(self) -> Iterator[None]:
        """Live up to the goal; yields where there is something to wait for."""
        yield from self._wait_for_slot()
        if self._goal == "room":
            return
        self.member = member = self._group.new_member(self.slot)
        if not member.info.node_ip:  # of the driver's own worker it is known
            place = member.control("info")
            limit_s = max(self._group.options.start_timeout_s, COME_UP_S)
            yield from self._until(place, "come up", limit_s)
            member.locate(place.result())
            if self.slot in self._group.suspects:
                self._group.suspects.remove(self.slot)
        asked: list[tuple[Step, Future[Outcome]]]
        asked = [("start", member.work("create", *self._created))]
        if self._goal == "process":
            yield from self._results(asked)
            asked = []
        if self._goal == "setup":  # one after the other, without waiting for us in between
            yield from self._results(asked + self._asked_to_set_up())

    def _asked_to_set_up(self) -> list[tuple[Step, Future[Outcome]]]:
        assert self.member is not None
        if self.context is None:
            (alone,) = assign_contexts(
                [self.member.info],
                generation=self._generation,
                distributed=self._group.options.num_workers > 1,
                num_cpus=self._group.options.num_cpus,
            )
            self.context = replace(alone, world_rank=self.rank, world_size=self._size)
        # which GPUs a process sees is for good
        context = self.context = replace(self.context, generation=self._generation)
        # one step: where a process dies in the second call, the first one's answer may die with it
        return [
            ("set up", self.member.work("prepare", context)),
            ("set up", self.member.work("enter", context, None, None, True)),
        ]

    def _results(self, asked: Sequence[tuple[Step, Future[Outcome]]]) -> Iterator[None]:
        for step, answer in asked:
            yield from self._until(answer, step, self._timeout_s)
            outcome = answer.result()
            if outcome.kind != "ok":
                raise outcome.exception()

    def _until(self, answer: Future[Any], step: Step, timeout_s: float) -> Iterator[None]:
        self.step = step
        deadline = self._group.clock.monotonic() + timeout_s
        while not answer.done():
            if self._group.clock.monotonic() > deadline:
                advice = WAIT_LONGER if step == "come up" else "To wait longer, raise timeout_s."
                raise WorkerTimeoutError(
                    f"Waited {timeout_s:g} s for a worker to {step}, in vain for worker "
                    f"{self.rank}. {advice}",
                    ranks=[self.rank],
                    waited_s=timeout_s,
                )
            yield


def _died_in_a_row(replacement: Replacement, error: BaseException, count: int) -> WorkerLostError:
    member = replacement.member
    assert member is not None
    cause = cause_of(member, error)
    where = "setup" if replacement.step == "set up" else "initialization_hook or an import"
    return WorkerLostError(
        f"The process of worker {replacement.rank} died {count} times in a row in {where} while "
        f"the workers were starting, the last time on {member.name}: {cause}",
        rank=replacement.rank,
        node_id=member.node_id,
        cause=cause,
    )
