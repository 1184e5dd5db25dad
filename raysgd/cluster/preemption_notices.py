"""Notices from Ray, SIGTERM, or the user that workers or nodes will be preempted."""

import contextlib
import logging
import math
import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

from raysgd.cluster.clock import Clock
from raysgd.cluster.worker_handle import WorkerHandle

logger = logging.getLogger(__name__)

_POLL_RAY_EVERY_S = 1.0  # seconds between two requests to Ray
_HEAD_SILENT_S = 2.0  # seconds without an answer after which the Ray head node counts as silent
_SIGTERM_GRACE_S = 10.0  # seconds that a process usually survives after SIGTERM


class PreemptionNotice(NamedTuple):
    cause: str
    deadline: float = math.inf  # in seconds since the Unix epoch


class PreemptionNotices:
    """Collects preemption notices, and polls Ray for them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._from_ray: dict[str, PreemptionNotice] = {}
        self._from_sigterm: dict[WorkerHandle, PreemptionNotice] = {}
        self._by_target: dict[WorkerHandle | str, PreemptionNotice] = {}  # by worker or node ID
        self._stop_polling: threading.Event | None = None
        self._unanswered_since: float | None = None  # when Ray got a request without an answer
        self._logged_silence: float | None = None  # the last such time that was logged

    # ---- notices of the user

    def drain(self, target: WorkerHandle | str, deadline_s: float | None) -> None:
        deadline = self._clock.time() + (math.inf if deadline_s is None else deadline_s)
        self._by_target[target] = PreemptionNotice("drain() was called", deadline)

    def record_sigterm(self, member: WorkerHandle, since_s: float) -> None:
        deadline = self._clock.time() + _SIGTERM_GRACE_S - since_s
        notice = PreemptionNotice("its process was sent SIGTERM", deadline)
        self._from_sigterm.setdefault(member, notice)

    # ---- notices of Ray

    def poll_ray(self) -> None:
        """Poll Ray in a thread until `stop`, because a request can block."""
        if self._stop_polling is None:
            self._stop_polling = event = threading.Event()
            name = "raysgd-notices"
            threading.Thread(target=self._poll, args=(event,), name=name, daemon=True).start()

    def stop(self) -> None:
        if self._stop_polling is not None:
            self._stop_polling.set()
            self._stop_polling = self._unanswered_since = None

    def _poll(self, stop_polling: threading.Event) -> None:
        while not stop_polling.wait(_POLL_RAY_EVERY_S):
            self._unanswered_since = self._clock.monotonic()
            with contextlib.suppress(Exception):  # Ray is shut down
                from ray._private.state import state  # Ray 2.60 has no public API for this

                self._from_ray = {
                    node: PreemptionNotice("Ray drains its node", deadline_ms / 1000 or math.inf)
                    for node, deadline_ms in state.get_draining_nodes().items()
                }
            self._unanswered_since = None

    def is_ray_silent(self) -> bool:
        """Return whether the Ray head node is unresponsive, so that requests to it would block.

        Log the start of the silence.
        """
        since = self._unanswered_since
        if since is None or self._clock.monotonic() - since <= _HEAD_SILENT_S:
            return False
        if self._logged_silence != since:
            self._logged_silence = since
            logger.warning("The Ray head does not answer. Replacement workers wait for it.")
        return True

    # ---- all notices

    @property
    def nodes(self) -> dict[str, PreemptionNotice]:
        known = list(self._by_target.items())  # another thread may change the dict
        return {key: notice for key, notice in known if isinstance(key, str)} | self._from_ray

    def preempted(self, members: Iterable[WorkerHandle]) -> dict[WorkerHandle, PreemptionNotice]:
        """Return the workers that will be preempted, each with its earliest notice."""
        sources: list[Any] = [self._by_target, self._from_sigterm, self._from_ray]
        found = {
            m: [each[key] for each in sources for key in (m, m.location.node_id) if key in each]
            for m in members
            if m.is_remote
        }
        return {m: min(each, key=lambda n: n.deadline) for m, each in found.items() if each}
