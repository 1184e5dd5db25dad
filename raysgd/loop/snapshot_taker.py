"""A worker's snapshots for the driver."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from raysgd._internal.nested import map_leaves
from raysgd._internal.step_timing import SAVE
from raysgd.loop.train_state import TrainState

_BUDGET = 0.01
"""Fraction of the training time that snapshots may take."""
_SMALL_BYTES = 16 * 2**20
"""Size of a state that has a snapshot at each epoch, because it costs milliseconds."""
_S_PER_BYTE = 2e-9
"""Expected cost of a snapshot, until one was measured."""
_INTERVAL_S = 60.0
"""Seconds between two snapshots within an epoch."""


class SnapshotTaker:
    """Holds the newest copy of one worker's state, in case all workers are lost.

    The training thread copies the state to the memory of the host. Another thread sends the copy to
    the driver while training continues, and releases it.

    By default, the cost of snapshots has a limit. The cost is the time to copy the state and to
    send it, although training continues meanwhile. The next snapshot is due when the cost is at
    most `_BUDGET` of the training time since the last one.
    """

    def __init__(self, train_state: TrainState, read_state: Callable[[], dict[str, Any]]) -> None:
        self.clock = time.monotonic
        self._train_state, self._read_state = train_state, read_state
        self._every = train_state.settings.options.elastic.snapshot_every
        self._newest: tuple[int, int] | None = None  # epoch and committed steps of the newest copy
        self._copy: dict[str, Any] | None = None  # until it is sent
        self._is_sending = False
        self._is_needed = self._every != "auto"  # whether a snapshot is due in any case
        self.num_invalidations = 0
        self._copy_s, self._s_per_byte = 0.0, _S_PER_BYTE
        self._trained_s = self._checked_at = 0.0
        self._wait_s = 0.0  # training time that pays for the next snapshot

    @property
    def takes_between_steps(self) -> bool:
        """Whether this worker may take a copy after a step, and not only before a segment."""
        return self._keeps_copy and (self._every == "auto" or isinstance(self._every, int))

    @property
    def _has_shards(self) -> bool:
        context = self._train_state.context
        ends_with_driver = context.is_in_driver and context.world_size == 1
        return not (self._train_state.state_status.is_complete or ends_with_driver)

    @property
    def _keeps_copy(self) -> bool:
        context = self._train_state.context
        return self._has_shards or (context.world_rank == 0 and not context.is_in_driver)

    @property
    def newest_step(self) -> int | None:
        newest = self._newest  # the training thread may clear it
        return None if newest is None else newest[1]

    def take_if_due(self, is_collective: bool = False) -> None:
        """Copy the state if a snapshot is due.

        Rank 0 holds the copy, unless it runs in the driver's process and ends with the driver. If
        the state is sharded, every rank copies its shards. `is_collective`: whether all ranks call
        this together, as when a segment begins.
        """
        train_state, context, now = self._train_state, self._train_state.context, self.clock()
        if not is_collective:
            self._trained_s += now - self._checked_at
        self._checked_at = now
        if not self._keeps_copy:
            self._trained_s = 0.0
            return
        has_shards = self._has_shards
        must_agree = has_shards and self._every == "auto" and not self._is_needed
        if self._every is None or (must_agree and not is_collective):
            return
        due = train_state.placement.is_in_sync and (self._is_needed or self._decide_due())
        if must_agree and context.has_process_group:
            # The clocks of the ranks differ, but all shards must be of one step.
            due = bool(train_state.collectives.all_reduce_min(int(due))[0])
        if due and (has_shards or not self._is_sending):
            with train_state.step_timing.within(SAVE):
                self._take()

    @contextlib.contextmanager
    def before_validation(self) -> Iterator[None]:
        """Take a snapshot that is due before a validation, and another one after it.

        The validation may be long, and may change the operator.
        """
        before = self._newest
        self.take_if_due(is_collective=True)
        has_taken = self._newest is not before
        yield
        if has_taken:
            self.clear(is_outdated=True)

    def _decide_due(self) -> bool:
        epoch, step = self._newest or (-1, 0)
        if isinstance(self._every, int):
            return self._train_state.position.global_step - step >= self._every
        is_new_epoch = epoch != self._train_state.position.epoch
        if self._every == "epoch":
            return is_new_epoch
        if self._trained_s < max(self._wait_s, 0.0 if is_new_epoch else _INTERVAL_S):
            return False
        self._set_wait(_num_bytes(self._read_state()))
        return self._trained_s >= self._wait_s

    def _set_wait(self, size: int) -> None:
        self._wait_s = 0.0 if size <= _SMALL_BYTES else size * self._s_per_byte / _BUDGET

    def _take(self) -> None:
        train_state, began = self._train_state, self.clock()
        self._copy, self._trained_s = None, 0.0  # release its memory first
        self._is_sending = self._is_needed = False
        try:
            state = self._read_state()
            copy = map_leaves(state, lambda leaf: train_state.copy_leaf(leaf, on_host=True))
        except Exception as error:
            if not train_state.micro_batching.is_recoverable(error):
                raise
            train_state.settings.warn_once(
                "snapshot",
                "Memory is too small for a snapshot at step %d: %r. If all workers are lost, "
                "training restarts from an older state.",
                train_state.position.global_step,
                error,
            )
            return
        self._checked_at = self.clock()
        self._copy, self._copy_s = copy, self._checked_at - began
        self._newest = train_state.position.epoch, train_state.position.global_step

    def clear(self, is_outdated: bool = False) -> None:
        """Discard the copy, because the state was replaced or resharded.

        If it `is_outdated`, the next snapshot is due immediately: the driver has no newer state.
        """
        self._newest = self._copy = None
        self._is_sending = False
        self._is_needed = is_outdated or self._every != "auto"
        self.num_invalidations += is_outdated

    def acquire(self, num_invalidations: int | None = None) -> dict[str, Any] | None:
        """Return the newest copy, or None if it was sent or is wrong. Called from another thread.

        Return None too if `num_invalidations` is another number: the driver has asked for an older
        copy, and may discard this one.
        """
        if num_invalidations not in (None, self.num_invalidations):
            return None
        copy = self._copy
        self._is_sending = copy is not None
        if not self._train_state.can_complete(copy or {}):
            if self._copy is copy:
                self.clear()
            return None
        return copy

    def release(self, copy: dict[str, Any], seconds: float) -> None:
        """Release a copy after it was sent within `seconds`. Called from another thread."""
        if self._copy is copy:
            self._copy, self._is_sending, size = None, False, _num_bytes(copy)
            self._s_per_byte = (self._copy_s + seconds) / max(size, 1)
            self._set_wait(size)


def _num_bytes(state: Any) -> int:
    sizes: list[int] = []

    def count(leaf: Any) -> None:
        with contextlib.suppress(RuntimeError):  # PyTorch does not know it for sparse tensors
            sizes.append(getattr(leaf, "nbytes", 0))

    map_leaves(state, count)
    return sum(sizes)
