"""Where the models and the states of optimizers are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raysgd._internal.context import Holdings
from raysgd.loop.feature import StepFeature


class Replication:
    """Knows which worker has which part of the models and of the states of optimizers.

    In this class, every worker has all of both. Subclasses shard them over the workers.
    """

    holdings = Holdings()
    """What this worker has, if no step has damaged it."""
    replicates = True
    """Whether the workers keep the models equal."""
    features: Sequence[StepFeature] = ()
    """Features with the hooks of this mode, such as `self`. Their `receive` comes last, because
    shards are valid from then on."""
    in_sync = True
    """Whether all shards belong to the last committed step."""

    def is_unsharded(self, each: Any) -> bool:
        """Return whether every worker has all of a model, or of the state of an optimizer."""
        return True

    def follows(self, is_leader: bool, is_new: bool) -> bool:
        """Return whether this worker loads the state of the leader of a new generation."""
        return not is_leader and (is_new or self.replicates)

    def wrap_steps(self) -> None:
        """Shard the state and the later steps of optimizers, after other hooks are registered."""

    # ---- a worker leaves

    def export_shards(self) -> Any:
        """Return the shards that the remaining workers need, before this worker leaves."""

    def import_shards(self, shards: Any) -> None:
        """Store the shards of a worker that leaves until the next generation."""

    # ---- files, snapshots, and exports

    def own_state(self) -> dict[str, Any]:
        """Return the entries of a state that each worker adds. `gather_state` merges them."""
        return {}

    def unsharded_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a complete state without what `load` takes, for all workers to load first."""
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Load this worker's shards from a complete state, after its other parts."""

    def export_models(self, count: int) -> list[Any] | None:
        """Return complete copies of the first `count` models on rank 0. All ranks must call it.

        Return None if every worker has complete models.
        """
        return None
