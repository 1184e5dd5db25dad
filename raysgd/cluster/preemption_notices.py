"""Notices from Ray, SIGTERM, or the user that workers or nodes will be preempted."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Iterable
from typing import NamedTuple

from raysgd.cluster.clock import Clock
from raysgd.cluster.worker_handle import WorkerHandle

logger = logging.getLogger(__name__)

_POLL_RAY_EVERY_S = 1.0  # seconds between two requests to Ray
_HEAD_SILENT_S = 2.0  # seconds without an answer after which the Ray head node counts as silent
_SIGTERM_GRACE_S = 10.0  # seconds that a process usually survives after SIGTERM


class Notice(NamedTuple):
    cause: str
    deadline: float = math.inf  # in seconds since the Unix epoch


class PreemptionNotices:
    """Collects preemption notices, and polls Ray for them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._of_ray: dict[str, Notice] = {}
        self._by_target: dict[WorkerHandle | str, Notice] = {}  # by worker or node ID
        self._is_over: threading.Event | None = None
        self._asked_at: float | None = None  # time of the request that Ray has not answered
        self._logged_at: float | None = None  # time of the last one that was logged

    # ---- notices of the user

    def drain(self, target: WorkerHandle | str, deadline_s: float | None) -> None:
        deadline = self._clock.time() + (math.inf if deadline_s is None else deadline_s)
        self._by_target[target] = Notice("drain() was called", deadline)

    def record_sigterm(self, member: WorkerHandle, since_s: float) -> None:
        deadline = self._clock.time() + _SIGTERM_GRACE_S - since_s
        self._by_target.setdefault(member, Notice("its process was sent SIGTERM", deadline))

    # ---- notices of Ray

    def poll_ray(self) -> None:
        """Poll Ray in a thread until `stop`, because a request can block."""
        if self._is_over is None:
            self._is_over = over = threading.Event()
            name = "raysgd-notices"
            threading.Thread(target=self._ask, args=(over,), name=name, daemon=True).start()

    def stop(self) -> None:
        if self._is_over is not None:
            self._is_over.set()
            self._is_over = self._asked_at = None

    def _ask(self, is_over: threading.Event) -> None:
        while not is_over.wait(_POLL_RAY_EVERY_S):
            self._asked_at = self._clock.monotonic()
            with contextlib.suppress(Exception):  # Ray is shut down
                from ray._private.state import state  # Ray 2.60 has no public API for this

                self._of_ray = {
                    node: Notice("Ray drains its node", deadline_ms / 1000 or math.inf)
                    for node, deadline_ms in state.get_draining_nodes().items()
                }
            self._asked_at = None

    def detect_ray_silence(self) -> bool:
        """Return whether the Ray head node is unresponsive, so that requests to it would block.

        Log the start of the silence.
        """
        asked_at = self._asked_at
        if asked_at is None or self._clock.monotonic() - asked_at <= _HEAD_SILENT_S:
            return False
        if self._logged_at != asked_at:
            self._logged_at = asked_at
            logger.warning("The Ray head does not answer. Replacement workers wait for it.")
        return True

    # ---- all notices

    @property
    def nodes(self) -> dict[str, Notice]:
        known = list(self._by_target.items())  # another thread may change the dict
        return {key: notice for key, notice in known if isinstance(key, str)} | self._of_ray

    def preempted(self, members: Iterable[WorkerHandle]) -> dict[WorkerHandle, Notice]:
        """Return the workers that will be preempted."""
        nodes, known = self.nodes, self._by_target
        found = {m: known.get(m) or nodes.get(m.location.node_id) for m in members if m.is_remote}
        return {member: notice for member, notice in found.items() if notice is not None}
