"""Groups of workers that run functions, for custom backends and users."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from raysgd._internal.arguments import MAX_WORKERS, check_number
from raysgd._internal.config import env_seconds
from raysgd.cluster import remote_functions
from raysgd.cluster.actor_group import ActorGroup
from raysgd.cluster.group_options import GroupOptions
from raysgd.cluster.worker_handle import WorkerHandle
from raysgd.train.arguments import env_flag
from raysgd.train.constants import (
    TRAIN_ENABLE_WORKER_SPREAD_ENV,
    TRAIN_PLACEMENT_GROUP_TIMEOUT_S_ENV,
)


class WorkerGroup:
    """A group of Ray actors that run functions. Creating the object starts it.

    With a fraction in `num_gpus_per_worker`, workers share a GPU.
    """

    def __init__(
        self,
        num_workers: int = 1,
        num_cpus_per_worker: float = 1,
        num_gpus_per_worker: float = 0,
        additional_resources_per_worker: Mapping[str, float] | None = None,
    ) -> None:
        options = group_options(
            num_workers, num_cpus_per_worker, num_gpus_per_worker, additional_resources_per_worker
        )
        self._group = ActorGroup(options)
        self.start()

    @classmethod
    def view_of(cls, group: ActorGroup) -> WorkerGroup:
        """Return a view of the workers that an executor supervises."""
        view = cls.__new__(cls)
        view._group = group
        return view

    # ---- lifecycle

    def start(self) -> None:
        """Start the workers. Raise InsufficientResourcesError if the cluster has no room."""
        if self._group.members:
            raise RuntimeError("The workers are already started. Call shutdown() first.")
        group = self._group
        try:
            group.reserve()
            remote_functions.start(group, len(group.find_vacant_slots()))
            group.members = group.sort_by_node(group.members)
        except BaseException:
            group.shutdown(force=True)
            raise

    def shutdown(self, patience_s: float = 5) -> None:
        """Stop the workers and wait until their resources are free.

        Workers have `patience_s` seconds to finish their work; 0 kills them immediately.
        """
        self._group.shutdown(force=patience_s <= 0, patience_s=patience_s)

    def add_workers(self, num_workers: int) -> None:
        """Start further workers, with the highest ranks."""
        remote_functions.start(self._group, num_workers)

    def remove_workers(self, worker_indexes: Sequence[int]) -> None:
        """Stop some workers, and renumber the others. `add_workers` can use the free resources."""
        self._group.discard(*dict.fromkeys([self._member(index) for index in worker_indexes]))

    def __len__(self) -> int:
        return len(self._group.members)

    @property
    def workers(self) -> list[Any]:
        """The workers, by rank. Each has a Ray handle, ``actor``, and a location, ``metadata``."""
        members: list[Any] = self._group.members
        return [SimpleNamespace(actor=each.actor, metadata=each.location) for each in members]

    # ---- functions

    def execute(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call `func` on every worker and return the results by rank.

        Raise the exception of `func`, or WorkerLostError if a worker died.
        """
        return remote_functions.results(self._members, self.execute_async(func, *args, **kwargs))

    def execute_async(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Start `func` on every worker and return references for ``ray.get``, by rank."""
        return [member.execute(func, *args, **kwargs) for member in self._members]

    def execute_single(
        self, worker_index: int, func: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call `func` on one worker and return its result."""
        member = self._member(worker_index)
        return remote_functions.results([member], [member.execute(func, *args, **kwargs)])[0]

    def execute_single_async(
        self, worker_index: int, func: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Start `func` on one worker and return a reference for ``ray.get``."""
        return self._member(worker_index).execute(func, *args, **kwargs)

    @property
    def _members(self) -> list[WorkerHandle]:
        if not self._group.members:
            raise RuntimeError("There are no workers. Call start() first.")
        return list(self._group.members)

    def _member(self, index: int) -> WorkerHandle:
        members = self._members
        if not 0 <= index < len(members):
            raise ValueError(f"worker_index={index}: must be between 0 and {len(members) - 1}.")
        return members[index]


def group_options(
    num_workers: int | tuple[int, int],
    num_cpus: float = 1,
    num_gpus: float = 0,
    resources: Mapping[str, float] | None = None,
    placement_strategy: str | None = None,
) -> GroupOptions:
    bounds = num_workers if isinstance(num_workers, tuple | list) else (num_workers, num_workers)
    if (
        len(bounds) != 2
        or any(isinstance(n, bool) or not isinstance(n, int) for n in bounds)
        or not 1 <= bounds[0] <= bounds[1] <= MAX_WORKERS
    ):
        raise ValueError(
            f"num_workers={num_workers!r}: must be an int from 1 to {MAX_WORKERS}, or a pair "
            "(min, max) of such ints."
        )
    for name, amount in {"CPU": num_cpus, "GPU": num_gpus, **(resources or {})}.items():
        check_number("resources_per_worker", name, amount)
    spreads = env_flag(TRAIN_ENABLE_WORKER_SPREAD_ENV)
    options = GroupOptions(
        num_workers=bounds[1],
        min_workers=bounds[0],
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        resources=dict(resources or {}),
        start_timeout_s=env_seconds(TRAIN_PLACEMENT_GROUP_TIMEOUT_S_ENV, 100.0),
        placement_strategy="SPREAD" if spreads else placement_strategy or "PACK",
    )
    if not options.bundle:
        raise ValueError("A worker must reserve a CPU, a GPU, or another resource.")
    return options


# ---- a class of the user on every worker

_HOSTED: dict[str, Any] = {}
"""The worker's object of each `TrainWorkerGroup`, by the ID of the group."""


class TrainWorkerGroup(list["HostedObject"]):
    """Objects of a user's class, one on every worker: the result of ``Trainer.to_worker_group``.

    Call methods like those of a Ray actor::

        workers = trainer.to_worker_group(Trainer, config)
        ray.get([worker.train_epoch.remote() for worker in workers])
    """

    def __init__(
        self,
        executor: Any,
        train_cls: type[Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        hosted_id = uuid.uuid4().hex
        self._executor = executor
        executor.run(partial(_create_hosted, hosted_id, train_cls, args, dict(kwargs)))
        group: WorkerGroup = executor.worker_group
        super().__init__(HostedObject(worker.actor, hosted_id) for worker in group.workers)

    def shutdown(self, patience_s: float = 5) -> None:
        """Stop the workers and wait until their resources are free.

        Workers have `patience_s` seconds to finish their work; 0 kills them immediately.
        """
        self.clear()
        self._executor.shutdown(patience_s > 0, patience_s)


@dataclass(eq=False)
class HostedObject:
    """One object of the user's class in a worker. Call its methods with ``.remote(...)``."""

    actor: Any
    """Ray handle of the object's worker, for ``ray.kill``."""
    _hosted_id: str

    def __getattr__(self, name: str) -> Any:
        """Return a method, whose ``remote`` returns a reference."""
        if name.startswith("__"):
            raise AttributeError(name)
        remote = partial(self.actor.execute.remote, _call_hosted, self._hosted_id, name)
        return SimpleNamespace(remote=remote)


def _create_hosted(
    hosted_id: str, train_cls: type[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    _HOSTED[hosted_id] = train_cls(*args, **kwargs)


def _call_hosted(hosted_id: str, name: str, /, *args: Any, **kwargs: Any) -> Any:
    if hosted_id not in _HOSTED:
        raise RuntimeError(
            f"{name}(): the worker has restarted and lost its object. Call to_worker_group() again."
        )
    return getattr(_HOSTED[hosted_id], name)(*args, **kwargs)
