"""How workers average gradients and agree on numbers: by a strategy, by Horovod, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from raysgd.context import WorkerContext

__all__ = ["Communication", "HorovodGroup", "StrategyGroup", "communication_of"]


class Communication:
    """What a step needs of the other workers; this one is that of a worker alone.

    Args:
        strategy: the one that everything runs under; None for TensorFlow's default one.
        size: number of workers.
        rank: of this one.
    """

    def __init__(self, strategy: Any = None, size: int = 1, rank: int = 0) -> None:
        self.strategy = tf.distribute.get_strategy() if strategy is None else strategy
        self.size, self.rank = size, rank

    def mean(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the means over the workers, in a graph and in a replica's context."""
        return list(tensors)

    def gather(self, value: int) -> list[int]:
        """Return the values of all workers, by rank. Every worker must call it."""
        return [value]


class StrategyGroup(Communication):
    """The workers of a ``MultiWorkerMirroredStrategy``."""

    def __init__(self, strategy: Any, size: int, rank: int) -> None:
        super().__init__(strategy, size, rank)

        @tf.function  # type: ignore[untyped-decorator]
        def added(values: Any) -> Any:
            return strategy.run(self._sum, args=(values,))

        self._added = added

    def _sum(self, tensors: Any) -> Any:
        # an argument has no device, and the strategy asks for that of what it reduces
        placed = [tf.identity(tensor) for tensor in tensors]
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, placed)

    def mean(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the means, by one collective for all tensors of a type."""
        return [_scaled(tensor, 1.0 / self.size) for tensor in self._sum(tensors)]

    def gather(self, value: int) -> list[int]:
        """Return the values of all workers: each adds its own at its place to zeros."""
        own = [value if rank == self.rank else 0 for rank in range(self.size)]
        (added,) = self._added([tf.constant(own, tf.int64)])
        return [int(number) for number in added.numpy()]


class HorovodGroup(Communication):
    """The workers of a Horovod group, each under TensorFlow's default strategy."""

    def mean(self, tensors: Sequence[Any]) -> list[Any]:
        import horovod.tensorflow as hvd

        if any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
            return [hvd.allreduce(tensor, op=hvd.Average) for tensor in tensors]
        means: list[Any] = hvd.grouped_allreduce(list(tensors), op=hvd.Average)
        return means

    def gather(self, value: int) -> list[int]:
        import horovod.tensorflow as hvd

        return [int(number) for number in hvd.allgather(tf.constant([value], tf.int64)).numpy()]

    def share(self, make: Callable[[], Any], leader: int) -> Any:
        """Return on every worker what `make` returns on the leader."""
        from horovod.tensorflow.functions import broadcast_object

        return broadcast_object(make() if self.rank == leader else None, root_rank=leader)


def _scaled(tensor: Any, factor: float) -> Any:
    if isinstance(tensor, tf.IndexedSlices):
        values = tensor.values * tf.cast(factor, tensor.values.dtype)
        return tf.IndexedSlices(values, tensor.indices, tensor.dense_shape)
    return tensor * tf.cast(factor, tensor.dtype)


def communication_of(
    context: WorkerContext, use_horovod: bool = False, timeout_s: float = 1800
) -> Communication:
    """Return how this worker talks to the others; their group exists already.

    Raises:
        RuntimeError: if the strategy would train several replicas in this worker.
    """
    if not context.distributed:
        return Communication()
    if use_horovod:
        return HorovodGroup(None, context.world_size, context.world_rank)
    options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=timeout_s)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    if strategy.num_replicas_in_sync != context.world_size:
        raise RuntimeError(
            f"The strategy has {strategy.num_replicas_in_sync} replicas for {context.world_size} "
            "workers; each worker must see one GPU, or none."
        )
    return StrategyGroup(strategy, context.world_size, context.world_rank)
