"""Processes that have imported what a worker needs, and wait to take the place of a lost one.

Starting a process and importing torch takes most of the time until a group is whole again. A
spare reserves nothing but memory: the room that it moves into is that of the worker that was lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

from raysgd.cluster.members import Member

__all__ = ["Spares"]

logger = logging.getLogger(__name__)

_ANSWER_S = 0.5
"""How long a spare may take to show that it is alive."""


class Spares:
    """At most one spare a node.

    Args:
        start: starts a worker on a node, outside of the group's room.
        imports: names of the modules to import there; without any there are no spares.
    """

    def __init__(self, start: Callable[[str], Member], imports: Sequence[str]) -> None:
        self._start = start
        self._imports = list(imports)
        self._held: dict[str, tuple[Member, Future[Any]]] = {}

    def keep_on(self, node_ids: Sequence[str]) -> None:
        """Have a spare on each of these nodes, and on no other; never waits."""
        if not self._imports:
            return
        for node_id in [*self._held]:
            if node_id not in node_ids or _has_failed(self._held[node_id][1]):
                self._held.pop(node_id)[0].kill()
        for node_id in node_ids:
            if node_id not in self._held:
                logger.debug("Starting a spare process on node %s.", node_id[:8])
                member = self._start(node_id)
                self._held[node_id] = (member, member.work("import_ahead", self._imports))

    def take(self, node_id: str | None) -> Member | None:
        """Return the spare of a node; it is none any more.

        One that has not come up yet is as good: it is further than another one would be.
        """
        if node_id not in self._held:
            return None
        member, ready = self._held.pop(node_id)
        # it may have died since: whoever killed the worker may have killed all that looked like it
        if ready.done():
            answer = member.control("progress")
            wait([answer], timeout=_ANSWER_S)
            if not answer.done() or _has_failed(answer) or _has_failed(ready):
                member.kill()
                return None
        return member

    def __len__(self) -> int:
        return len(self._held)

    def stop(self) -> None:
        """End all spares."""
        while self._held:
            self._held.popitem()[1][0].kill()


def _has_failed(future: Future[Any]) -> bool:
    return future.done() and future.exception() is not None
