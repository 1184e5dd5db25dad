"""Replacement workers: started and set up in the background, for each place that is missing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from raysgd.cluster.members import Member
from raysgd.cluster.worker import Outcome
from raysgd.cluster.worker_group import WorkerGroup
from raysgd.elastic.config import ElasticConfig
from raysgd.elastic.policies import assign_contexts, backoff_s, may_resize

__all__ = ["Replacement", "ScaleUp"]

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.25
"""How often to ask whether there is room for a worker."""
_SETTLED_S = 10.0
"""How long a group has to have its full size before it gets spares."""


class ScaleUp:
    """Keeps a replacement worker on its way for each place that is missing.

    Args:
        group: the group to fill.
        config: whether and how often to try.
        created: arguments of a worker's ``create``.
        draw: returns a random number in 0..1, for the jitter.
        on_failure: told of a replacement worker that failed, and why.
        can_join: whether replacement workers can join a group that is at work; without that none
            are started.
        starts_early: whether replacement workers start and set up before they join; else all are
            started anew when there is room.
    """

    def __init__(
        self,
        group: WorkerGroup,
        config: ElasticConfig,
        created: Sequence[Any],
        draw: Callable[[], float],
        on_failure: Callable[[Member | None, BaseException], None],
        can_join: bool = True,
        starts_early: bool = True,
    ) -> None:
        self._group = group
        self._config = config
        self._created = created
        self._draw = draw
        self._on_failure = on_failure
        self._can_join = can_join
        self._starts_early = starts_early
        self._replacements: list[Replacement] = []
        self._lost_slots: list[Any] = []
        self._failures = 0
        self._retry_at = 0.0
        self._resized_at = self._group.clock.monotonic()

    @property
    def under_way(self) -> bool:
        """Whether there are replacement workers."""
        return bool(self._replacements)

    def lost(self, slot: Any) -> None:
        """Note that a worker was lost in `slot`: its successor need not wait to join."""
        self._lost_slots.append(slot)
        self.try_again()

    def try_again(self) -> None:
        """Forget the replacement workers that failed: the reason may be another one, or mended."""
        self._failures, self._retry_at = 0, 0.0

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

    def tend(self, generation: int) -> None:
        """Bring replacements forward, and start those that are missing; never waits for long."""
        options = self._group.options
        if not self._config.grow or not self._can_join or options.inline:
            return
        missing = options.num_workers - len(self._group.members) - len(self._replacements)
        if missing <= 0 and self._may_have_spares():
            self._group.spares.keep_on(list({member.node_id for member in self._group.members}))
        if missing > 0 and self._group.clock.monotonic() >= self._retry_at:
            self._start(generation)
        for replacement in self._replacements:
            replacement.advance()
        for replacement in [r for r in self._replacements if r.error is not None]:
            self.fail(replacement)

    def _may_have_spares(self) -> bool:
        # A spare comes too late for a short run, and would only slow it down. It gets no GPU, since
        # Ray assigns those to a process as it starts.
        settled = self._group.clock.monotonic() - self._resized_at >= _SETTLED_S
        return settled and self._config.warm_spares and not self._group.options.num_gpus

    def _start(self, generation: int) -> None:
        taken = [replacement.slot for replacement in self._replacements]
        for slot in self._group.vacant_slots():
            if slot in taken:
                continue
            self._replacements.append(
                Replacement(
                    self._group,
                    slot,
                    len(self._group.members) + len(self._replacements),
                    generation,
                    self._created,
                    replaces_lost=slot in self._lost_slots,
                    starts_early=self._starts_early,
                )
            )

    def fail(self, replacement: Replacement, error: BaseException | None = None) -> None:
        """Give a replacement worker up, and start another after a while."""
        error = error or replacement.error or RuntimeError("it did not join")
        self._replacements.remove(replacement)
        self._on_failure(replacement.member, error)
        if replacement.member is not None:
            self._group.discard(replacement.member)
        self._retry_at = self._group.clock.monotonic() + backoff_s(
            self._failures, self._config, self._draw()
        )
        self._failures += 1
        if self._failures >= self._config.max_attempts:
            logger.warning("Giving up on replacement workers after %d failures.", self._failures)
            self._retry_at = float("inf")

    def fail_member(self, member: Member, error: BaseException) -> bool:
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
        return sum(replacement.member is not None for replacement in self._replacements)

    def joined(self, replacements: Sequence[Replacement]) -> None:
        """Note that replacement workers are members now."""
        for replacement in replacements:
            self._replacements.remove(replacement)
            if replacement.slot in self._lost_slots:
                self._lost_slots.remove(replacement.slot)
        self.try_again()
        self.resized()

    def stop(self) -> None:
        """End all replacement workers."""
        replacements, self._replacements = self._replacements, []
        for replacement in replacements:
            if replacement.member is not None:
                self._group.discard(replacement.member)


class Replacement:
    """One replacement worker, from a slot to a worker that waits to join.

    Args:
        group: starts the worker.
        slot: where it shall run.
        rank: that it will have in the group, most likely; it sets up alone.
        generation: the newest.
        created: arguments of the worker's ``create``.
        replaces_lost: whether it takes the place of a worker that was lost.
        starts_early: whether it starts in its slot. Otherwise it is ready when the slot is: all
            workers will be started anew then.
    """

    def __init__(
        self,
        group: WorkerGroup,
        slot: Any,
        rank: int,
        generation: int,
        created: Sequence[Any],
        replaces_lost: bool,
        starts_early: bool = True,
    ) -> None:
        self._group = group
        self.slot = slot
        self._rank = rank
        self._generation = generation
        self._created = created
        self._life = self._live() if starts_early else self._wait_for_slot()
        self.replaces_lost = replaces_lost
        self.member: Member | None = None
        self.is_ready = False
        self.error: BaseException | None = None

    def advance(self) -> None:
        """Take the next step towards the group if it can be taken; never waits."""
        if self.is_ready or self.error is not None:
            return
        try:
            next(self._life)
        except StopIteration:
            self.is_ready = True
        except BaseException as error:
            self.error = error  # also after Ctrl-C: it is not ready, and cannot go on
            if not isinstance(error, Exception):
                raise

    def _wait_for_slot(self) -> Iterator[None]:
        looked = 0.0
        while True:
            if self._group.clock.monotonic() - looked >= _LOOK_EVERY_S:
                looked = self._group.clock.monotonic()
                if self.slot.is_ready:
                    return
            yield

    def _live(self) -> Iterator[None]:
        """Live up to the join; yields where there is something to wait for."""
        yield from self._wait_for_slot()
        self.member = self._group.new_member(self.slot)
        info = self.member.control("info")
        yield from _until(info)
        self.member.info = info.result()
        (alone,) = assign_contexts(
            [self.member.info],
            generation=self._generation,
            distributed=True,
            num_cpus=self._group.options.num_cpus,
        )
        context = replace(alone, world_rank=self._rank, world_size=self._rank + 1)
        # one after the other, without waiting for us in between
        for answer in [
            self.member.work("create", *self._created),
            self.member.work("prepare", context),
            self.member.work("enter", context, None, None, True),
        ]:
            yield from _until(answer)
            outcome: Outcome = answer.result()
            if outcome.kind != "ok":
                raise outcome.exception()


def _until(future: Future[Any]) -> Iterator[None]:
    while not future.done():
        yield
