"""Relative shares of the global batch, for workers of different speeds."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from raysgd._internal.context import Progress
from raysgd.cluster.worker_group import WorkerGroup
from raysgd.cluster.worker_handle import WorkerHandle
from raysgd.elastic.config import ElasticConfig
from raysgd.elastic.feature import Feature
from raysgd.elastic.journal import Journal

__all__ = ["Shares"]

logger = logging.getLogger(__name__)

_TOLERANCE = 1.25
"""Factor by which a share must be wrong before the shares change."""
_LASTS_S = 3.0
"""Seconds that a share must be wrong before it changes, so that shares do not follow noise."""


class Shares(Feature):
    """Chooses the share of each member: equal, set by node, or proportional to measured speed."""

    def __init__(self, group: WorkerGroup, config: ElasticConfig, journal: Journal) -> None:
        self._group, self._config, self._journal = group, config, journal
        self._speeds: dict[WorkerHandle, float] = {}
        """Newest speeds, in samples per second."""
        self._current: dict[WorkerHandle, float] = {}
        """Shares of the newest attempt, with mean 1. Empty if they are even."""
        self._members: list[WorkerHandle] = []
        """The workers for which shares were last chosen."""
        self._traits: dict[str, set[str]] = {}
        self._wrong_since: float | None = None
        self._changed_at = -math.inf
        self.wants_change = False
        """Whether the call should pause at a step, because shares have been wrong for long."""

    def check(self) -> None:
        """Check that the names of a mapping are those of nodes.

        Raises:
            ValueError: if there is no such node.
        """
        if not isinstance(self._config.shares, Mapping) or self._group.options.inline:
            return
        known = {name for traits in self._group.node_traits().values() for name in traits}
        for name in self._config.shares:
            if name not in known:
                raise ValueError(
                    f"ElasticConfig(shares={{{name!r}: ...}}): no node has this label, accelerator "
                    f"type, or resource. The nodes have {', '.join(sorted(known))}."
                )

    def of(self, members: Sequence[WorkerHandle]) -> tuple[float, ...] | None:
        """Return the shares of the workers that receive a request. None means equal shares."""
        if self._config.shares != "measured" or len(members) < 2:
            return self.given(members)
        if self.wants_change or self._members != list(members):
            self._choose(members)
        return tuple(self._current[member] for member in members) if self._current else None

    def poll(self, progress: Mapping[WorkerHandle, Progress]) -> None:
        """Note the speeds of the members, and whether their shares are wrong."""
        self.note_speeds(progress)
        members, now = self._group.members, self._group.clock.monotonic()
        is_known = len(members) > 1 and all(member in self._speeds for member in members)
        is_wrong = is_known and _differ(self._shares_now(members), self._measured(members))
        if self._config.shares != "measured" or not is_wrong:
            self._wrong_since, self.wants_change = None, False
            return
        if self._wrong_since is None:
            self._wrong_since = now
        may_change = now >= self._changed_at + self._config.resize_cooldown_s
        self.wants_change = may_change and now >= self._wrong_since + _LASTS_S

    def note_speeds(self, progress: Mapping[WorkerHandle, Progress]) -> None:
        """Note the speeds of members, and of replacement workers that are about to join."""
        self._speeds |= {m: p.samples_per_s for m, p in progress.items() if p.samples_per_s}

    def given(self, members: Sequence[WorkerHandle]) -> tuple[float, ...] | None:
        """Return the shares that the user's mapping sets for these workers.

        None means equal shares.
        """
        shares = self._config.shares
        if not isinstance(shares, Mapping) or len(members) < 2:
            return None
        if not self._traits.keys() >= {member.node_id for member in members}:
            self._traits = self._group.node_traits()
        found = []
        for member in members:
            traits = self._traits.get(member.node_id, set())
            found.append(next((share for name, share in shares.items() if name in traits), 1.0))
        return None if len(set(found)) == 1 else tuple(found)

    def _choose(self, members: Sequence[WorkerHandle]) -> None:
        self._speeds = {m: speed for m, speed in self._speeds.items() if m in members}
        before, after = self._shares_now(members), self._measured(members)
        self._members, self._wrong_since, self.wants_change = list(members), None, False
        even = dict.fromkeys(members, 1.0)
        if not _differ(even, after):
            after = even
        self._current = {} if after == even else after
        if before == after:
            return
        self._changed_at = self._group.clock.monotonic()
        old_shares, shares = tuple(before.values()), tuple(after.values())
        self._journal.record(
            "rebalanced",
            members,
            cause=f"shares {_listed(shares)}, before {_listed(old_shares)}",
            shares=shares,
            old_shares=old_shares,
        )

    def _shares_now(self, members: Sequence[WorkerHandle]) -> dict[WorkerHandle, float]:
        """Return the current shares. A new worker has an equal share."""
        return _normalized({member: self._current.get(member, 1.0) for member in members})

    def _measured(self, members: Sequence[WorkerHandle]) -> dict[WorkerHandle, float]:
        """Return shares proportional to speed. A worker of unknown speed gets the mean."""
        known = [self._speeds[member] for member in members if member in self._speeds]
        mean = sum(known) / len(known) if known else 1.0
        return _normalized({member: self._speeds.get(member, mean) for member in members})


def _listed(shares: Sequence[float]) -> str:
    return ", ".join(f"{share:.2f}" for share in shares)


def _normalized(shares: dict[WorkerHandle, float]) -> dict[WorkerHandle, float]:
    mean = sum(shares.values()) / len(shares)
    return {member: max(0.001, round(share / mean, 3)) for member, share in shares.items()}


def _differ(before: Mapping[WorkerHandle, float], after: Mapping[WorkerHandle, float]) -> bool:
    """Return whether any share is wrong by more than the tolerance."""
    ratios = [after[member] / before[member] for member in before]
    return max(ratios) > _TOLERANCE or min(ratios) < 1 / _TOLERANCE
