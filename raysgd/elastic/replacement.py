"""A replacement worker, from its start until it can join the group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal

from raysgd._internal.context import WorkerContext
from raysgd.cluster.group_options import COME_UP_S, WAIT_LONGER
from raysgd.cluster.worker import Outcome
from raysgd.cluster.worker_group import WorkerGroup
from raysgd.cluster.worker_handle import WorkerHandle
from raysgd.elastic.policies import assign_contexts
from raysgd.errors import RemoteTraceback, WorkerTimeoutError

_LOOK_EVERY_S = 0.25
"""Seconds between two checks for free resources."""

Goal = Literal["room", "process", "setup"]
Step = Literal["come up", "start", "set up", "join"]


@dataclass(eq=False)
class Replacement:
    group: WorkerGroup
    slot: Any
    rank: int
    size: int
    generation: int
    created: Sequence[Any]
    timeout_s: float
    """Timeout in seconds for each step from ``create`` on."""
    replaces_lost: bool
    goal: Goal = "setup"
    """Step after which the replacement is ready: "process" if all workers set up together; "room"
    (free resources, but no process) if all workers will restart."""
    context: WorkerContext | None = None
    member: WorkerHandle | None = None
    step: Step = "come up"
    is_ready: bool = False
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self._life = self._live()

    def advance(self) -> None:
        if self.is_ready or self.error is not None:
            return
        try:
            next(self._life)
        except StopIteration:
            self.is_ready, self.step = True, "join"
        except BaseException as error:
            self.error = error  # also store it after Ctrl-C, because the generator has ended
            from_worker = isinstance(error.__cause__, RemoteTraceback)
            if not isinstance(error, Exception) and not from_worker:
                raise

    def set_up_alone(self, generation: int) -> None:
        self.goal, self.generation = "setup", generation
        if self.is_ready:
            self.is_ready, self._life = False, self._results(self._asked_to_set_up())

    def _wait_for_slot(self) -> Iterator[None]:
        looked = 0.0
        while True:
            if self.group.clock.monotonic() - looked >= _LOOK_EVERY_S:
                looked = self.group.clock.monotonic()
                if self.slot.is_ready:
                    return
            yield

    def _live(self) -> Iterator[None]:
        """Take the steps up to the goal. Yield while a step must wait."""
        yield from self._wait_for_slot()
        if self.goal == "room":
            return
        self.member = member = self.group.new_member(self.slot)
        if not member.info.node_ip:  # the driver's own worker knows its location
            place = member.control("info")
            limit_s = max(self.group.options.start_timeout_s, COME_UP_S)
            yield from self._until(place, "come up", limit_s)
            member.locate(place.result())
        asked: list[tuple[Step, Future[Outcome]]]
        asked = [("start", member.work("create", *self.created))]
        if self.goal == "process":
            yield from self._results(asked)
            asked = []
        if self.goal == "setup":  # the worker queues all calls
            yield from self._results(asked + self._asked_to_set_up())

    def _asked_to_set_up(self) -> list[tuple[Step, Future[Outcome]]]:
        assert self.member is not None
        if self.context is None:
            (alone,) = assign_contexts(
                [self.member.info],
                generation=self.generation,
                distributed=self.group.options.num_workers > 1,
                num_cpus=self.group.options.num_cpus,
            )
            self.context = replace(alone, world_rank=self.rank, world_size=self.size)
        # A process cannot change which GPUs it sees.
        context = self.context = replace(self.context, generation=self.generation)
        # Send both calls together: a process that dies in the second may lose both answers.
        return [
            ("set up", self.member.work("prepare", context)),
            ("set up", self.member.work("enter", context, None, None, True)),
        ]

    def _results(self, asked: Sequence[tuple[Step, Future[Outcome]]]) -> Iterator[None]:
        for step, answer in asked:
            yield from self._until(answer, step, self.timeout_s)
            outcome = answer.result()
            if outcome.kind != "ok":
                raise outcome.exception()

    def _until(self, answer: Future[Any], step: Step, timeout_s: float) -> Iterator[None]:
        self.step = step
        deadline = self.group.clock.monotonic() + timeout_s
        while not answer.done():
            if self.group.clock.monotonic() > deadline:
                advice = WAIT_LONGER if step == "come up" else "To wait longer, raise timeout_s."
                raise WorkerTimeoutError(
                    f"Worker {self.rank} took longer than {timeout_s:g} s to {step}. {advice}",
                    ranks=[self.rank],
                    waited_s=timeout_s,
                )
            yield
