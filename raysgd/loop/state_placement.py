"""Who has which shards of the models and of the states of optimizers."""

from collections.abc import Mapping, Sequence
from typing import Any

from raysgd._internal.worker_status import StateStatus
from raysgd.loop.feature import UpdateFeature


class StatePlacement:
    """Knows which worker has which shards of the models and of the states of optimizers.

    In this class, every worker has all of both. Subclasses shard them over the workers. For a file,
    `read_state` calls `shards_to_save` on each worker, and the driver merges them (`merge_shards`).
    A file has no shards: each worker gets all of it, and `load_shards` keeps the worker's shard.
    """

    state_status = StateStatus()
    """What this worker has, if no step has damaged it."""
    replicates = True
    """Whether the workers keep the models equal."""
    features: Sequence[UpdateFeature] = ()
    """Features with the hooks of this strategy, such as `self`. Their `receive` comes last, because
    shards are valid from then on."""
    is_in_sync = True
    """Whether all shards belong to the last committed step."""

    def is_unsharded(self, owner: Any) -> bool:
        """Return whether every worker has all of a model, or of the state of an optimizer."""
        return True

    def begin_sharding(self) -> None:
        """Shard the state and the later steps of optimizers, after other hooks are registered."""

    # ---- a worker leaves

    def export_shards(self) -> Any:
        """Return the shards that the remaining workers need, before this worker leaves."""

    def import_shards(self, shards: Any) -> None:
        """Store the shards of a worker that leaves until the next generation."""

    # ---- files, snapshots, and exports

    def shards_to_save(self) -> Sequence[Any]:
        """Return the pieces that this worker saves, by optimizer."""
        return ()

    def load_shards(self, state: Mapping[str, Any]) -> None:
        """Load this worker's shards from a complete state, after its other entries."""

    def export_models(self, num_models: int) -> list[Any] | None:
        """Return complete copies of the first models on rank 0. All ranks must call it.

        Return None if every worker has complete models.
        """
        return None
