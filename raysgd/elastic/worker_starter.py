"""Starts a worker for each vacant rank. The first start is a scale-up from zero workers."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal

from raysgd._internal.runner import WorkerContext
from raysgd.cluster.actor_group import AnySlot
from raysgd.cluster.group_options import PROCESS_START_S, START_ADVICE
from raysgd.cluster.worker import Outcome, Worker
from raysgd.cluster.worker_handle import WorkerHandle, cause_of, is_worker_failure
from raysgd.elastic.group_record import GroupRecord
from raysgd.elastic.policies import assign_contexts, backoff_s
from raysgd.elastic.preemption import PreemptionMonitor
from raysgd.errors import CheckpointError, WorkerLostError, WorkerTimeoutError

logger = logging.getLogger(__name__)

_GRACE_S = PROCESS_START_S
"""Seconds that a start waits for late workers once ``min_workers`` are ready."""
_SHORT_GRACE_S = 0.5
"""The same limit in seconds if late workers can join later: in a restart, or if all of them replace
lost workers."""
_MAX_SETUP_CRASHES = 3
"""Number of consecutive crashes in the ``setup`` of one slot that raises an error."""
_CHECK_SLOT_EVERY_S = 0.25
"""Seconds between two checks for free resources."""

StartStage = Literal["come up", "start", "set up", "ready"]
"""What a pending worker does. In the last stage, it can join."""


@dataclass(eq=False)
class PendingWorker:
    """A worker from its start until it joins the group."""

    starter: WorkerStarter
    slot: AnySlot
    rank: int
    size: int
    replaces_lost: bool
    context: WorkerContext | None = None
    handle: WorkerHandle | None = None
    stage: StartStage = "come up"
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.group = self.starter.group
        self._stages = self._run_stages()

    def advance(self) -> None:
        if self.error is not None:
            return
        try:
            next(self._stages)
        except StopIteration:
            self.stage = "ready"
        except BaseException as error:
            self.error = error  # also store it after Ctrl-C, because the generator has ended
            if not isinstance(error, Exception):
                raise

    def _run_stages(self) -> Iterator[None]:
        """Take the stages. Yield while a stage must wait."""
        while not self.slot.is_ready:
            check_at = self.group.clock.monotonic() + _CHECK_SLOT_EVERY_S
            while self.group.clock.monotonic() < check_at:
                yield
        self.handle = handle = self.group.start_worker(self.slot)
        if not handle.location.node_ip:  # the driver's own worker knows its location
            location = handle.submit_control(Worker.locate)
            limit_s = max(self.group.options.start_timeout_s, PROCESS_START_S)
            yield from self._wait_for(location, "come up", limit_s)
            handle.start_watching(location.result())
        created = handle.submit_work(Worker.create_runner, *self.starter.runner_arguments)
        setup = None if self.starter.sets_up_together else self._submit_setup(handle)  # queues both
        yield from self._await_outcome(created, "start")
        while self.starter.sets_up_together:
            self.stage = "ready"
            yield
        yield from self._await_outcome(setup or self._submit_setup(handle), "set up")

    def _submit_setup(self, handle: WorkerHandle) -> Future[Outcome]:
        if self.context is None:
            (alone,) = assign_contexts(
                [handle.location],
                generation=0,
                has_process_group=self.group.options.num_workers > 1,
                num_cpus=self.group.options.num_cpus,
            )
            self.context = replace(alone, world_rank=self.rank, world_size=self.size, is_alone=True)
        # A process cannot change which GPUs it sees.
        context = self.context = replace(self.context, generation=self.starter.record.generation)
        return handle.submit_work(Worker.setup, context, None)

    def _await_outcome(self, future: Future[Outcome], stage: StartStage) -> Iterator[None]:
        yield from self._wait_for(future, stage, self.starter.timeout_s)
        outcome = future.result()
        if outcome.kind != "ok":
            self.error = outcome.exception()  # a generator cannot raise StopIteration
            yield

    def _wait_for(self, future: Future[Any], stage: StartStage, timeout_s: float) -> Iterator[None]:
        self.stage = stage
        deadline = self.group.clock.monotonic() + timeout_s
        while not future.done():
            if self.group.clock.monotonic() > deadline:
                advice = START_ADVICE if stage == "come up" else "To wait longer, raise timeout_s."
                raise WorkerTimeoutError(
                    f"Worker {self.rank} took longer than {timeout_s:g} s to {stage}. {advice}"
                )
            yield


@dataclass(eq=False)
class WorkerStarter:
    """Starts a worker for each vacant rank."""

    record: GroupRecord
    preemption: PreemptionMonitor
    runner_arguments: Sequence[Any]
    """Arguments of `Worker.create_runner`."""
    timeout_s: float
    """Timeout in seconds for each stage of a pending worker from ``create_runner`` on."""
    error: BaseException | None = None
    """Error of the newest worker, if another worker would fail in the same way."""

    def __post_init__(self) -> None:
        self.group, self.policy = self.record.group, self.record.policy
        self.config = self.policy.elastic
        self._pending: list[PendingWorker] = []
        self._lost_slots: set[AnySlot | None] = set()
        """Slots that lost a member or a pending worker, until a worker of the slot joins."""
        self._crashes_in_row: dict[AnySlot | None, tuple[StartStage, int]] = {}
        """By slot: the stage of the newest crashes of pending workers, and their number."""
        self.starts_left = self.config.max_start_attempts
        """Number of failed starts until no more workers start. A reset restores it."""
        self._next_starts: dict[AnySlot, float] = {}
        """When the slots that have failed may start another worker."""
        self._resized_at = self.group.clock.monotonic()

    @property
    def sets_up_together(self) -> bool:
        """Whether the workers set up together in one process group, in a start of all workers.

        If survivors stay, only the first start does so, until a worker is lost. Later, each worker
        sets up alone.
        """
        return not self.policy.survivors_stay or self.record.generation == 0

    @property
    def may_join_later(self) -> bool:
        """Whether late workers can join after a start."""
        return self.policy.survivors_stay and self.policy.replaces_workers

    def advance_if_allowed(self) -> None:
        """Advance the pending workers. Start missing ones if the policy replaces workers."""
        if self.policy.replaces_workers and self.policy.supports_live_join:
            self.advance()

    def expect_replacement(self, member: WorkerHandle) -> None:
        """Let the replacement of a lost member join without the cooldown, which begins now."""
        slot = self.group.slot_of(member)
        self._lost_slots.add(slot)
        self._crashes_in_row.pop(slot, None)
        self._resized_at = self.group.clock.monotonic()
        self.reset_failures()

    def reset_failures(self) -> None:
        """Reset the failures of pending workers, because their cause may be gone."""
        self.starts_left, self._next_starts = self.config.max_start_attempts, {}
        self.error = None

    def request_slots(self) -> bool:
        """Request the missing slots if the policy replaces workers. Return whether one is free."""
        is_full = len(self.group.members) >= self.group.options.num_workers
        if is_full or not (self.policy.replaces_workers and self._has_cooled_down()):
            return False
        self.group.request_slots()
        return any(slot.is_ready for slot in self.group.find_vacant_slots())

    def _has_cooled_down(self) -> bool:
        return self.group.clock.monotonic() - self._resized_at >= self.config.resize_cooldown_s

    def advance(self, starting: bool = False) -> None:
        """Advance the pending workers, and start missing ones, without waiting.

        With `starting`, pending workers form the group in the reserved slots. While the Ray head
        node does not respond, do nothing, because requests would block the driver.
        """
        if self.group.notices.is_ray_silent():
            return
        self._advance_each(self._pending)
        if self._num_missing() <= 0:
            in_order = sorted(self._pending, key=lambda w: w.handle is None)
            for worker in in_order[self._num_vacant_ranks() :]:
                self._remove(worker)  # other workers took the rank, or all members stay
            if not self._pending:
                self.group.cancel_extra_requests()
        elif self.starts_left > 0:
            self._advance_each(self._start_missing(starting))

    def _num_vacant_ranks(self) -> int:
        num_staying = len(self.group.members) - len(self.group.preempted())
        return self.group.options.num_workers - num_staying

    def _num_missing(self) -> int:
        """Return the number of vacant ranks without a worker that starts."""
        return self._num_vacant_ranks() - self.num_started()

    def _advance_each(self, workers: Sequence[PendingWorker]) -> None:
        for worker in list(workers):
            if worker.handle is None and self._num_missing() <= 0:
                continue  # another worker took the last rank
            worker.advance()
            if worker.error is not None:
                self._handle_failure(worker, worker.error)

    def _start_missing(self, starting: bool) -> list[PendingWorker]:
        taken = [worker.slot for worker in self._pending]
        self.group.request_slots(only_if_lost=starting)
        vacant = [slot for slot in self.group.find_vacant_slots() if slot not in taken]
        now, num_workers = self.group.clock.monotonic(), self.group.options.num_workers
        num_staying = num_workers - self._num_vacant_ranks()
        size = min(num_staying + len(taken) + len(vacant), num_workers)
        replaces = starting or num_staying < len(self.group.members)
        for slot in vacant:
            if now < self._next_starts.get(slot, now):
                continue
            ranks = {worker.rank for worker in self._pending}
            rank = next((r for r in range(num_staying, size) if r not in ranks), size - 1)
            replaces_lost = replaces or slot in self._lost_slots
            self._pending.append(PendingWorker(self, slot, rank, size, replaces_lost))
        return self._pending[len(taken) :]

    def discard_failed(self, handle: WorkerHandle, error: BaseException) -> bool:
        """Discard a worker if it is pending, so that another one starts. Return whether it was."""
        worker = next((w for w in self._pending if w.handle is handle), None)
        if worker is not None:
            self._handle_failure(worker, error)
        return worker is not None

    def _handle_failure(self, worker: PendingWorker, error: BaseException) -> None:
        """Discard a worker, and decide when its slot starts another one.

        After a crash, the slot does so immediately. After an exception, or several crashes in a row
        in one stage, it waits, longer each time, up to `max_start_attempts` times until a reset.
        An exception and repeated crashes in user code set `error`, which ends a start. A timeout
        does so only in the first start.
        """
        self._remove(worker)
        handle, slot, stage = worker.handle, worker.slot, worker.stage
        cause = cause_of(handle, error)
        self.record.add_event("replacement_failed", [] if handle is None else [handle], cause=cause)
        if is_worker_failure(error):
            self._lost_slots.add(slot)
            before, count = self._crashes_in_row.get(slot, (stage, 0))
            count = count + 1 if stage == before else 1
            self._crashes_in_row[slot] = stage, count
            most = _MAX_SETUP_CRASHES if stage == "set up" else self.config.max_start_attempts
            if count < most:
                return
            if handle is not None and stage in ("start", "set up"):  # these run user code
                where = "setup" if stage == "set up" else "initialization_hook or an import"
                self.error = WorkerLostError(
                    f"Worker {worker.rank} died {count} times in a row in {where}, the last "
                    f"time on {handle.node_name}: {cause}",
                    rank=worker.rank,
                    node_id=handle.location.node_id,
                    cause=cause,
                )
        elif self.record.is_first_start or not isinstance(error, WorkerTimeoutError):
            self.error = error  # a repeated attempt may not time out
        wait_s = backoff_s(self.config.max_start_attempts - self.starts_left, self.config)
        self._next_starts[slot] = self.group.clock.monotonic() + wait_s
        # No worker can load a damaged state.
        uses_all = isinstance(error, CheckpointError) and self.starts_left > 0
        self.starts_left = 0 if uses_all else self.starts_left - 1
        if self.starts_left == 0:
            logger.warning("No more replacement workers start in this call.")

    def _remove(self, worker: PendingWorker) -> None:
        if worker not in self._pending:
            return  # `shutdown` in another thread has done this
        self._pending.remove(worker)
        if worker.handle is not None:
            self.group.discard(worker.handle)

    def discard_pending(self, handles: Collection[WorkerHandle] | None = None) -> None:
        """Discard some or all pending workers, although they have not failed."""
        for worker in list(self._pending):
            if handles is None or worker.handle in handles:
                self._remove(worker)

    def ready_workers(self) -> list[WorkerHandle]:
        """Return the pending workers that can join now."""
        if not self.policy.survivors_stay and self.group.notices.is_ray_silent():
            return []  # a restart could not start the other workers
        is_short = len(self.group.members) < self.group.options.min_workers
        may_resize = is_short or self._has_cooled_down()
        ready = [w for w in self._pending if w.stage == "ready" and (may_resize or w.replaces_lost)]
        return [worker.handle for worker in ready if worker.handle is not None]

    def membership_changes(self) -> tuple[list[WorkerHandle], list[WorkerHandle]]:
        """Return the replacements that join at the next step, and the members that leave."""
        ready = self.ready_workers()
        leaving = self.preemption.due_to_leave(len(ready))
        num_vacant = self.group.options.num_workers - len(self.group.members) + len(leaving)
        return ready[:num_vacant], leaving

    def num_started(self) -> int:
        """Return the number of pending workers with a process. The others wait for room."""
        return sum(worker.handle is not None for worker in self._pending)

    def begin_start(self) -> None:
        """Prepare for a start, which makes the started workers the group."""
        self.reset_failures()
        # Crashes in `setup` while other workers trained do not count.
        crashes = self._crashes_in_row.items()
        self._crashes_in_row = {slot: each for slot, each in crashes if each[0] != "set up"}

    def grace_s(self) -> float:
        """Return how many seconds a start waits for late workers when there are enough.

        It always waits for a worker in the driver's process.
        """
        late = {w.slot: w.handle for w in self._pending if w.handle and w.stage != "ready"}
        if self.group.members or not late:
            return 0.0
        if not all(handle.is_remote for handle in late.values()):
            return math.inf
        replace_lost = self._lost_slots.issuperset(late)
        has_short_grace = self.may_join_later and (replace_lost or not self.record.is_first_start)
        return _SHORT_GRACE_S if has_short_grace else _GRACE_S

    def record_set_up(self, contexts: Mapping[WorkerHandle, WorkerContext]) -> None:
        """Record that pending workers set up together, in these contexts."""
        for worker in self._pending:
            if (handle := worker.handle) is not None and handle in contexts:
                worker.context, worker.stage = replace(contexts[handle], is_alone=True), "set up"

    def forget_joined(self, handles: Collection[WorkerHandle]) -> None:
        for worker in [each for each in self._pending if each.handle in handles]:
            self._pending.remove(worker)
            self._lost_slots.discard(worker.slot)
            self._crashes_in_row.pop(worker.slot, None)
        if handles:
            self.reset_failures()
        self._resized_at = self.group.clock.monotonic()
