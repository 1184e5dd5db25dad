"""Relative shares of the global batch, for workers of different speeds."""

import logging
import math
from collections.abc import Mapping, Sequence

from raysgd._internal.worker_status import WorkerStatus
from raysgd.cluster.worker_handle import WorkerHandle
from raysgd.elastic.group_record import GroupRecord

logger = logging.getLogger(__name__)

_TOLERANCE = 1.25
"""Factor by which a share must be wrong before the shares change."""
_WRONG_FOR_S = 3.0
"""Seconds that a share must be wrong before it changes, so that shares do not follow noise."""


class ShareBalancer:
    """Chooses the share of each member: equal, set by node, or proportional to measured speed."""

    def __init__(self, record: GroupRecord) -> None:
        self._group, self._record, self._config = record.group, record, record.policy.elastic
        self._speeds: dict[WorkerHandle, float] = {}
        """Newest speeds, in samples per second."""
        self._members: list[WorkerHandle] = []
        """The workers for which shares were last chosen."""
        self._shares: tuple[float, ...] = ()
        """The shares last chosen, with mean 1."""
        self._traits: dict[str, set[str]] = {}
        self._wrong_since = math.inf
        self._changed_at = -math.inf

    @property
    def wants_change(self) -> bool:
        """Whether the call should pause at a step, because shares have been wrong for long."""
        may_change_at = self._changed_at + self._config.resize_cooldown_s
        return self._group.clock.monotonic() >= max(may_change_at, self._wrong_since + _WRONG_FOR_S)

    def choose_for(self, members: Sequence[WorkerHandle]) -> tuple[float, ...] | None:
        """Return the shares of the workers that receive a request. None means equal shares."""
        if not self.wants_change and self._members == list(members):
            return self._shares if _are_uneven(self._shares) else None
        self._speeds = {m: speed for m, speed in self._speeds.items() if m in members}
        old_shares = self._shares or (1.0,) * len(members)
        shares = self.configured_for(members) or (1.0,) * len(members)
        if self._config.shares == "measured":
            measured = self._by_speed(members)
            shares = measured if _differ(shares, measured) else shares
        self._members, self._shares, self._wrong_since = list(members), shares, math.inf
        if shares != old_shares and (_are_uneven(shares) or _are_uneven(old_shares)):
            self._changed_at = self._group.clock.monotonic()
            self._record.add_event(
                "rebalanced",
                members,
                cause=f"shares {_format(shares)}, before {_format(old_shares)}",
                shares=shares,
                old_shares=old_shares,
            )
        return shares if _are_uneven(shares) else None

    def configured_for(self, members: Sequence[WorkerHandle]) -> tuple[float, ...] | None:
        """Return the shares that the user's mapping sets for workers. None means equal shares.

        A node that matches no name in the mapping has share 1.
        """
        shares = self._config.shares
        if not isinstance(shares, Mapping) or len(members) == 1:
            return None  # Ray may not run if the driver is the only worker
        if not self._traits.keys() >= {member.location.node_id for member in members}:
            self._traits = self._group.node_traits()
            known = {name for traits in self._traits.values() for name in traits}
            if missing := [name for name in shares if name not in known]:
                logger.warning(
                    "ElasticConfig(shares=...): no node has the label, accelerator type, or "
                    "resource %s yet. The nodes have %s.",
                    ", ".join(map(repr, missing)),
                    ", ".join(sorted(known)),
                )
        of_nodes = [self._traits.get(member.location.node_id, set()) for member in members]
        by_member = [next((s for n, s in shares.items() if n in each), 1.0) for each in of_nodes]
        return _normalize(by_member) if _are_uneven(by_member) else None

    def observe(self, statuses: Mapping[WorkerHandle, WorkerStatus]) -> None:
        """Record the speeds of workers, and whether the shares of the members are wrong."""
        speeds = {member: each.measured.samples_per_s for member, each in statuses.items()}
        self._speeds |= {member: speed for member, speed in speeds.items() if speed}
        members, now = self._group.members, self._group.clock.monotonic()
        is_known = self._members == members and all(m in self._speeds for m in members)
        is_measured = self._config.shares == "measured" and len(members) > 1
        is_wrong = is_measured and is_known and _differ(self._shares, self._by_speed(members))
        self._wrong_since = min(self._wrong_since, now) if is_wrong else math.inf

    def _by_speed(self, members: Sequence[WorkerHandle]) -> tuple[float, ...]:
        """Return shares proportional to speed. A worker of unknown speed gets the mean."""
        known = [self._speeds[member] for member in members if member in self._speeds]
        mean = sum(known) / len(known) if known else 1.0
        shares = _normalize([self._speeds.get(member, mean) for member in members])
        return tuple(max(0.001, round(share, 3)) for share in shares)


def _format(shares: Sequence[float]) -> str:
    return ", ".join(f"{share:.2f}" for share in shares)


def _normalize(shares: Sequence[float]) -> tuple[float, ...]:
    mean = sum(shares) / len(shares)
    return tuple(share / mean for share in shares)


def _are_uneven(shares: Sequence[float]) -> bool:
    return len(set(shares)) > 1


def _differ(before: Sequence[float], after: Sequence[float]) -> bool:
    """Return whether any share is wrong by more than the tolerance."""
    ratios = [new / old for old, new in zip(before, after, strict=True)]
    return max(ratios) > _TOLERANCE or min(ratios) < 1 / _TOLERANCE
