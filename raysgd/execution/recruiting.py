"""Filling the places that are missing in a group, in the background."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from raysgd.context import WorkerContext
from raysgd.elastic.config import ElasticConfig
from raysgd.elastic.policies import backoff_s, may_resize
from raysgd.execution.group import WorkerGroup
from raysgd.execution.members import Member
from raysgd.execution.recruit import Recruit

__all__ = ["Recruiting"]

logger = logging.getLogger(__name__)

_SETTLED_S = 10.0
"""How long a group has to have its full size before it gets spares."""


class Recruiting:
    """Keeps a newcomer on its way for each place that is missing.

    Args:
        group: the group to fill.
        config: whether and how often to try.
        created: arguments of a worker's ``create``.
        draw: returns a random number in 0..1, for the jitter.
        on_failure: told of a newcomer that failed, and why.
        can_join: whether newcomers can join a group that is at work; without that none are started.
        starts: whether newcomers start before they join.
    """

    def __init__(
        self,
        group: WorkerGroup,
        config: ElasticConfig,
        created: Sequence[Any],
        draw: Callable[[], float],
        on_failure: Callable[[Member | None, BaseException], None],
        can_join: bool = True,
        starts: bool = True,
    ) -> None:
        self._group = group
        self._config = config
        self._created = created
        self._draw = draw
        self._on_failure = on_failure
        self._can_join = can_join
        self._starts = starts
        self._recruits: list[Recruit] = []
        self._lost_slots: list[Any] = []
        self._failures = 0
        self._retry_at = 0.0
        self._resized_at = self._group.clock.monotonic()

    @property
    def under_way(self) -> bool:
        """Whether there are newcomers."""
        return bool(self._recruits)

    def lost(self, slot: Any) -> None:
        """Note that a worker was lost in `slot`: its successor need not wait to join."""
        self._lost_slots.append(slot)
        self.try_again()

    def try_again(self) -> None:
        """Forget the newcomers that failed: the reason may be another one, or mended."""
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
        """Bring newcomers forward, and start those that are missing; never waits for long."""
        options = self._group.options
        if not self._config.grow or not self._can_join or options.inline:
            return
        missing = options.num_workers - len(self._group.members) - len(self._recruits)
        if missing <= 0 and self._may_have_spares():
            self._group.spares.keep_on(list({member.node_id for member in self._group.members}))
        if missing > 0 and self._group.clock.monotonic() >= self._retry_at:
            self._start(generation)
        for recruit in self._recruits:
            recruit.advance()
        for recruit in [r for r in self._recruits if r.error is not None]:
            self.fail(recruit)

    def _may_have_spares(self) -> bool:
        # A spare comes too late for a short run, and would only slow it down. It gets no GPU, since
        # Ray assigns those to a process as it starts.
        settled = self._group.clock.monotonic() - self._resized_at >= _SETTLED_S
        return settled and self._config.warm_spares and not self._group.options.num_gpus

    def _start(self, generation: int) -> None:
        taken = [recruit.slot for recruit in self._recruits]
        for slot in self._group.vacant_slots():
            if slot in taken:
                continue
            rank = len(self._group.members) + len(self._recruits)
            context = WorkerContext(
                world_rank=rank,
                world_size=rank + 1,
                generation=generation,
                distributed=True,
                num_cpus=self._group.options.num_cpus,
            )
            replaces_lost = slot in self._lost_slots
            self._recruits.append(
                Recruit(self._group, slot, context, self._created, replaces_lost, self._starts)
            )

    def fail(self, recruit: Recruit, error: BaseException | None = None) -> None:
        """Give a newcomer up, and start another after a while."""
        error = error or recruit.error or RuntimeError("it did not join")
        self._recruits.remove(recruit)
        self._on_failure(recruit.member, error)
        if recruit.member is not None:
            self._group.discard(recruit.member)
        self._retry_at = self._group.clock.monotonic() + backoff_s(
            self._failures, self._config, self._draw()
        )
        self._failures += 1
        if self._failures >= self._config.max_attempts:
            logger.warning("Giving up on newcomers after %d failures.", self._failures)
            self._retry_at = float("inf")

    def fail_member(self, member: Member, error: BaseException) -> bool:
        """Give the newcomer up that `member` is, if it is one."""
        for recruit in [r for r in self._recruits if r.member is member]:
            self.fail(recruit, error)
            return True
        return False

    def ready(self) -> list[Recruit]:
        """Return the newcomers that may join now."""
        now = self._group.clock.monotonic()
        urgent = len(self._group.members) < self._group.options.min_workers
        return [
            recruit
            for recruit in self._recruits
            if recruit.is_ready
            and may_resize(now, self._resized_at, urgent or recruit.replaces_lost, self._config)
        ]

    def coming(self) -> int:
        """Return how many newcomers have room, and come up or are ready."""
        return sum(recruit.member is not None for recruit in self._recruits)

    def joined(self, recruits: Sequence[Recruit]) -> None:
        """Note that newcomers are members now."""
        for recruit in recruits:
            self._recruits.remove(recruit)
            if recruit.slot in self._lost_slots:
                self._lost_slots.remove(recruit.slot)
        self.try_again()
        self.resized()

    def stop(self) -> None:
        """End all newcomers."""
        recruits, self._recruits = self._recruits, []
        for recruit in recruits:
            if recruit.member is not None:
                self._group.discard(recruit.member)
