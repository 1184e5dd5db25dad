"""The driver's copy of the state, for the case that all workers are lost."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from raysgd.cluster.members import Member
from raysgd.context import Progress

__all__ = ["SnapshotKeeper"]


class SnapshotKeeper:
    """Fetches snapshots while training goes on, and keeps the newest that has arrived.

    It has to be here: what a worker keeps, in its memory or in Ray's store, dies with it.

    Args:
        of_driver: whether to fetch them also from a worker in the driver's process.
    """

    def __init__(self, of_driver: bool = False) -> None:
        self._of_driver = of_driver
        self._pickled: bytes | None = None
        self._state: Mapping[str, Any] | None = None
        self._step = -1
        self._coming: tuple[int, Future[bytes | None]] | None = None

    def set(self, state: Mapping[str, Any], step: int = -1) -> None:
        """Keep a state that the driver has anyway: one that was loaded, or that of so many steps.

        Snapshots of fewer steps are no newer ones.
        """
        self._state, self._pickled, self._coming = state, None, None
        self._step = step

    def follow(self, member: Member, progress: Progress) -> None:
        """Fetch the snapshot that `member` holds, if it is a newer one.

        Does not wait, but that of the driver's own worker is pickled here.
        """
        self._receive()
        if progress.snapshot is None:  # the one it had is out of date, at whatever step it was
            self._step = -1
        newer = progress.snapshot is not None and progress.snapshot > self._step
        if self._coming is None and newer and (member.remote or self._of_driver):
            assert progress.snapshot is not None
            self._coming = (progress.snapshot, member.control("snapshot"))

    def state(self) -> Mapping[str, Any] | None:
        """Return the newest snapshot; None if there has been none."""
        self._receive()
        if self._pickled is not None:
            state: Mapping[str, Any] = pickle.loads(self._pickled)
            return state
        return self._state

    def _receive(self) -> None:
        if self._coming is None or not self._coming[1].done():
            return
        step, future = self._coming
        self._coming = None
        if future.exception() is None and (pickled := future.result()) is not None:
            self._pickled, self._step = pickled, step
