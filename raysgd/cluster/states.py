"""What a group of workers is doing.

::

    New ──start──▶ Ready ──call──▶ Running ──all done──▶ Ready
                    ▲ ▲               │
                    │ │        a failure: the other workers are interrupted
               join │ │ rejoin        ▼
    (replacements) ─┘ └──────────── Broken ──none is left──▶ those that come up ──▶ Ready

A group begins at its start as it does there, of those that come up, without a snapshot.

    (any state) ──shutdown──▶ Closed, for good

Broken means that the workers are alive but their process group is not, or that members are missing.
The next call, or the repetition of the one that lost a worker, first makes a new generation: new
ranks, a new process group, the state of the worker with most committed steps.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from raysgd.cluster.members import Member
from raysgd.cluster.worker import Outcome

__all__ = ["Broken", "Closed", "Generation", "New", "Ready", "Running", "State"]


class State:
    """A state of a group."""


class New(State):
    """No worker was started yet."""


class Ready(State):
    """The next call can begin at once."""


class Running(State):
    """A call is under way."""


@dataclass(eq=False)
class Broken(State):
    """The group has to be mended before the next call."""

    busy: dict[Member, Future[Outcome]] = field(default_factory=dict)
    """Workers that had not returned when their call was given up."""
    num_failed_rejoins: int = 0
    """How often in a row workers that are all alive failed to make a process group."""
    has_state: bool = False
    """Whether the snapshot to restart from is the state of a worker that was left, just taken."""


class Closed(State):
    """The workers are ended, or being ended."""


@dataclass(eq=False)
class Generation:
    """One membership of the group, from one rendezvous to the next."""

    number: int
    pause: int | None = None
    """Committed steps at which its members were told to pause."""
