"""The states of a group of workers, and the driver's actions for each event.

The controller executes the actions in order. The last one may return the next event. Workers send
no events: the driver derives them from the outcomes of attempts, and from losses of workers.
`docs/architecture.md` lists the transitions. After the loss of a worker, for example::

    WorkersLost → RemoveLost, CHECK_GROUP → GroupChecked → REJOIN → GroupFormed
                → CHECK_GROUP → GroupChecked → RUN_CALL
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from raysgd.cluster.worker import Outcome
from raysgd.cluster.worker_handle import WorkerHandle
from raysgd.elastic.policies import Policy
from raysgd.errors import CollectiveError

LostWorkers = Mapping[WorkerHandle, BaseException]
"""Lost workers with their causes."""

_MAX_FAILED_REJOINS = 2
"""Maximum number of consecutive failures to form a process group while all workers are alive."""
_NO_SNAPSHOT = (
    "and there is no snapshot to restart from (snapshot_every=None). To continue, load a "
    "checkpoint: trainer.load(path)"
)


@dataclass(frozen=True, kw_only=True)
class CallBudget:
    """The losses of workers that a call, or a start, tolerates, and those so far."""

    in_call: bool = False
    """False if the group starts or restarts without a call."""
    min_workers: int = 1
    max_failures: float = 0
    replaces_state: bool = False
    """Whether the call loads another state, so that a restart needs no snapshot."""
    num_failures: int = 0
    num_early_failures: int = 0
    """Failures before the call began. They do not count as retries."""
    has_begun: bool = False
    """Whether the first attempt that is no replay has begun. All later losses count as retries."""


# ---- states


@dataclass(frozen=True)
class GroupState:
    """A state of the group."""

    budget: CallBudget = field(default_factory=CallBudget)


class Starting(GroupState):
    """The started workers will become the group."""


class Ready(GroupState):
    """The next call can begin immediately."""


class Running(GroupState):
    """A call is running."""


@dataclass(frozen=True)
class Broken(GroupState):
    """Workers or their process group are missing. The next call repairs the group."""

    num_failed_rejoins: int = 0
    """Number of consecutive failures to form a process group while all workers are alive."""


# ---- events


class GroupEvent:
    """What happened to the group."""


@dataclass(frozen=True, kw_only=True)
class StartRequested(GroupEvent):
    """`start` was called, or `grow` found free resources."""

    min_workers: int


@dataclass(frozen=True, kw_only=True)
class CallRequested(GroupEvent):
    budget: CallBudget


@dataclass(frozen=True, kw_only=True)
class GroupChecked(GroupEvent):
    """The driver has counted the members, and the workers that join and leave now."""

    num_workers: int
    num_joining: int = 0
    num_leaving: int = 0
    must_replay: bool = False
    """Whether to repeat steps that were lost with all workers."""


@dataclass(frozen=True, kw_only=True)
class SnapshotChecked(GroupEvent):
    """The driver has looked for a state from which all workers can restart."""

    can_restart: bool


class GroupFormed(GroupEvent):
    """The workers share one process group and one state."""


@dataclass(frozen=True, kw_only=True)
class FormingFailed(GroupEvent):
    """The workers could not form a process group, although no member is lost."""

    error: BaseException | None = None
    """Why it failed. None if the cause may be workers that are not members yet."""


@dataclass(frozen=True, kw_only=True)
class StateLost(GroupEvent):
    """No worker has the state of the last step."""

    why: str


@dataclass(frozen=True, kw_only=True)
class WorkersLost(GroupEvent):
    """Members are lost."""

    lost: LostWorkers


@dataclass(frozen=True, kw_only=True)
class CallReturned(GroupEvent):
    """All workers have returned."""

    outcomes: Sequence[Outcome] = ()
    is_complete: bool
    """False if the call paused, or repeated earlier steps."""


@dataclass(frozen=True, kw_only=True)
class CallFailed(GroupEvent):
    """The call has failed although all workers are alive."""

    error: BaseException | None = None
    """What `Controller.run` raises. None to repeat the call: the driver interrupted it, or smaller
    micro-batches can save memory."""


@dataclass(frozen=True, kw_only=True)
class Aborted(GroupEvent):
    """An exception, such as Ctrl-C, ended an action."""

    reached_workers: bool = True


class StopRequested(GroupEvent):
    """`stop` was called: work outside of calls ends."""


# ---- actions


class Action(Enum):
    """An action without arguments."""

    CHECK_GROUP = "let the components observe, and count the members that stay, join, and leave"
    AWAIT_WORKERS = "wait until enough workers are ready"
    REJOIN = "wait for workers that are still busy, and form the next generation"
    INTERRUPT = "interrupt the workers after an exception on the driver"
    RESCUE_STATE = "replace the snapshot with the state of the workers"
    CHECK_SNAPSHOT = "look whether new workers would have a state"
    RESTART = "stop the members, start all workers, and load the snapshot"
    COLLECT_METRICS = "collect the metrics of all workers before they stop"
    RUN_CALL = "send the call to the workers, and wait for its end"
    REPLAY = "run the call that repeats steps lost with all workers"


@dataclass(frozen=True)
class RemoveLost:
    """Remove lost workers from the group."""

    lost: LostWorkers


@dataclass(frozen=True)
class DiscardWorkers:
    """Stop all members and replacement workers. Warn with `why` if none has a usable state."""

    why: str = ""


@dataclass(frozen=True)
class Fail:
    """End the call with a WorkerLostError."""

    why: str
    lost: LostWorkers = field(default_factory=dict)


GroupAction = Action | RemoveLost | DiscardWorkers | Fail
Transition = tuple[GroupState, tuple[GroupAction, ...]]


def format_shortage(num_workers: int, min_workers: int) -> str:
    return f"{num_workers} worker{'s' * (num_workers != 1)} left, but min_workers={min_workers}"


def transition(state: GroupState, event: GroupEvent, policy: Policy) -> Transition:
    """Return the next state and the actions that follow from an event.

    Raises:
        ValueError: if the event cannot happen in the state.
    """
    budget = state.budget
    match state, event:
        case _, StopRequested():
            return _broken(state), ()
        case Running(), Aborted(reached_workers=reached_workers):
            return (Broken(budget), (Action.INTERRUPT,)) if reached_workers else (Ready(budget), ())
        case Starting(), Aborted():
            return Broken(budget), (DiscardWorkers(),)
        case Ready() | Broken(), Aborted():
            return state, ()
        case Ready() | Broken(), StartRequested(min_workers=min_workers):
            return Starting(CallBudget(min_workers=min_workers)), (Action.RESTART,)
        case Ready() | Broken(), CallRequested(budget=budget):
            return replace(state, budget=budget), (Action.CHECK_GROUP,)
        case Ready() | Broken(), GroupChecked():
            return _after_group_check(state, event, policy)
        case Broken(), SnapshotChecked(can_restart=can_restart):
            if not can_restart:
                return state, (Fail(f"all workers are lost, {_NO_SNAPSHOT}"),)
            return Starting(budget), (Action.RESTART,)
        case Starting() | Broken(), GroupFormed():
            return Ready(budget), (Action.CHECK_GROUP,) if budget.in_call else ()
        case Broken(num_failed_rejoins=number), FormingFailed(error=error):
            if error is None:
                return state, (Action.CHECK_GROUP,)
            if number == _MAX_FAILED_REJOINS or not isinstance(error, CollectiveError):
                return state, ()
            return Broken(budget, number + 1), (Action.CHECK_GROUP,)
        case Broken(), StateLost(why=why):
            if not (policy.keeps_snapshots or budget.replaces_state):
                return state, (Fail(f"{why}, {_NO_SNAPSHOT}"),)
            return state, (DiscardWorkers(why), Action.CHECK_GROUP)
        case Broken() | Running(), WorkersLost(lost=lost):
            return _after_worker_failure(_broken(state), lost, policy)
        case Running(), CallReturned(is_complete=is_complete):
            return Ready(budget), () if is_complete else (Action.CHECK_GROUP,)
        case Running(), CallFailed(error=error):
            return Broken(budget), (Action.CHECK_GROUP,) if error is None else ()
    raise ValueError(f"{event} cannot happen in the state {type(state).__name__}.")


def _broken(state: GroupState) -> Broken:
    return state if isinstance(state, Broken) else Broken(state.budget)


def _after_group_check(state: GroupState, event: GroupChecked, policy: Policy) -> Transition:
    budget = state.budget
    if not event.num_workers:
        return _broken(state), (Action.CHECK_SNAPSHOT,)
    if event.num_workers + event.num_joining < budget.min_workers:
        if policy.may_grow:
            return state, (Action.AWAIT_WORKERS, Action.CHECK_GROUP)
        number = format_shortage(event.num_workers, budget.min_workers)
        return state, (Fail(f"{number}, and grow=False starts no replacements"),)
    if isinstance(state, Broken) or event.num_joining or event.num_leaving:
        if policy.process_can_rejoin and event.num_leaving < event.num_workers:
            return _broken(state), (Action.REJOIN,)
        collect = [Action.COLLECT_METRICS] if event.num_leaving else []
        if event.num_leaving or policy.rescues_state:
            return _broken(state), (*collect, Action.RESCUE_STATE, Action.CHECK_SNAPSHOT)
        return Starting(budget), (Action.RESTART,)
    running = Running(replace(budget, has_begun=budget.has_begun or not event.must_replay))
    return running, (Action.REPLAY if event.must_replay else Action.RUN_CALL,)


def _after_worker_failure(state: Broken, lost: LostWorkers, policy: Policy) -> Transition:
    budget = state.budget
    actions: list[GroupAction] = [RemoveLost(lost)]
    if not policy.survivors_stay:
        actions += [Action.RESCUE_STATE] if policy.rescues_state else []
        actions += [DiscardWorkers()]
    why = ""
    if budget.has_begun:
        budget = replace(budget, num_failures=budget.num_failures + 1)
        if budget.num_failures > budget.max_failures:
            why = f"workers were lost in one call more often than max_retries={budget.max_failures}"
    else:
        budget = replace(budget, num_early_failures=budget.num_early_failures + 1)
        if budget.num_early_failures > policy.max_early_failures:
            why = f"workers were lost {budget.num_early_failures} times before the call began"
    actions += [Fail(why, lost) if why else Action.CHECK_GROUP]
    return replace(state, budget=budget), tuple(actions)
