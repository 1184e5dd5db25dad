"""Workers on their way into the group: started and set up while the others train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from raysgd.context import WorkerContext
from raysgd.execution.group import WorkerGroup
from raysgd.execution.members import Member
from raysgd.execution.worker import Outcome

__all__ = ["Recruit"]

_LOOK_EVERY_S = 0.25


class Recruit:
    """One newcomer, from a slot to a worker that waits to join.

    Args:
        group: starts the worker.
        slot: where it shall run.
        context: its place as it will be in the group, most likely; it sets up alone.
        created: arguments of the worker's ``create``.
        replaces_lost: whether it takes the place of a worker that was lost.
        starts: whether it starts in its slot. Otherwise it is ready when the slot is: all workers
            will be started anew then.
    """

    def __init__(
        self,
        group: WorkerGroup,
        slot: Any,
        context: WorkerContext,
        created: Sequence[Any],
        replaces_lost: bool,
        starts: bool = True,
    ) -> None:
        self._group = group
        self.slot = slot
        self._context = context
        self._created = created
        self._life = self._live() if starts else self._wait_for_slot()
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
        place = self.member.control("place")
        yield from _until(place)
        found = self.member.place = place.result()
        context = replace(
            self._context,
            node_ip=found.node_ip,
            visible_gpus=found.gpu_ids,
            gpu_index=0 if found.gpu_ids else None,
        )
        # one after the other, without waiting for us in between
        for outcome in [
            self.member.work("create", *self._created),
            self.member.work("prepare", context),
            self.member.work("enter", context, None, None, True),
        ]:
            yield from _until(outcome)
            _check(outcome)


def _until(future: Future[Any]) -> Iterator[None]:
    while not future.done():
        yield


def _check(future: Future[Outcome]) -> None:
    outcome = future.result()
    if outcome.kind != "ok":
        raise outcome.exception()
