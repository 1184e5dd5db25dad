"""How workers average gradients and agree on numbers: with gloo or Horovod."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from raysgd._internal import step_timing
from raysgd._internal.collectives import Collectives
from raysgd.comm.horovod import check_dtypes
from raysgd.tf.options import KerasSettings


class KerasCollectives(Collectives):
    """The collectives of a training step. This class implements them for a single worker."""

    def __init__(self, size: int = 1, rank: int = 0) -> None:
        self.size, self.rank = size, rank

    def all_reduce_mean(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the mean of each tensor over the workers."""
        return list(tensors)

    def fill_missing(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Replace missing gradients with zeros if other workers have gradients of the variables.

        Batches of one step may take different branches. Every worker must call this.
        """
        missing = self.all_reduce_min(*(int(gradient is None) for gradient in gradients))
        return [
            tf.zeros_like(variable.value) if gradient is None and not is_missing else gradient
            for is_missing, gradient, variable in zip(missing, gradients, variables, strict=True)
        ]

    def all_reduce_min(self, *values: int) -> list[int]:
        return list(values)

    def broadcast(self, make: Callable[[], Any], src: int) -> Any:
        return make()


class GlooCollectives(KerasCollectives):
    """Workers that use the process group of PyTorch.

    A group of TensorFlow needs a server without authentication, and a process can join only one.
    """

    def __init__(self) -> None:
        import torch

        self._torch, self._dist = torch, torch.distributed
        # During setup, a replacement worker is alone in its group, whatever its context says.
        super().__init__(self._dist.get_world_size(), self._dist.get_rank())

    def all_reduce_mean(self, tensors: Sequence[Any]) -> list[Any]:
        arrays = [tensor.numpy() for tensor in tensors]
        # PyTorch cannot read arrays of bfloat16.
        dtype = np.float64 if any(array.dtype == np.float64 for array in arrays) else np.float32
        flat: Any = np.concatenate([array.ravel() for array in arrays], dtype=dtype)
        self._dist.all_reduce(self._torch.from_numpy(flat))
        flat /= self.size
        means = np.split(flat, np.cumsum([array.size for array in arrays])[:-1])
        return [
            tf.constant(mean.reshape(array.shape), array.dtype)
            for mean, array in zip(means, arrays, strict=True)
        ]

    def all_reduce_min(self, *values: int) -> list[int]:
        minima = self._torch.tensor(values)
        self._dist.all_reduce(minima, op=self._dist.ReduceOp.MIN)
        return [int(number) for number in minima]

    def broadcast(self, make: Callable[[], Any], src: int) -> Any:
        box = [make() if self.rank == src else None]
        self._dist.broadcast_object_list(box, src=src)
        return box[0]


class HorovodCollectives(KerasCollectives):
    """The workers of a Horovod group."""

    def __init__(self, size: int, rank: int) -> None:
        import horovod.tensorflow as hvd

        super().__init__(size, rank)
        self._hvd = hvd
        self._mean = tf.function(lambda tensors: hvd.grouped_allreduce(tensors, op=hvd.Average))

    def all_reduce_mean(self, tensors: Sequence[Any]) -> list[Any]:
        check_dtypes([tensor.dtype.name for tensor in tensors])
        phase = step_timing.begin_phase(step_timing.WAIT)
        means: list[Any] = self._mean(list(tensors))
        step_timing.resume_phase(phase)
        return means

    def all_reduce_min(self, *values: int) -> list[int]:
        of_all = self._hvd.allgather(tf.constant([values], tf.int64)).numpy()
        return [int(number) for number in of_all.min(axis=0)]

    def broadcast(self, make: Callable[[], Any], src: int) -> Any:
        return self._hvd.broadcast_object(make() if self.rank == src else None, root_rank=src)


def create_collectives(settings: KerasSettings) -> KerasCollectives:
    context = settings.context
    if not context.has_process_group:
        return KerasCollectives()
    if settings.options.use_horovod:
        return HorovodCollectives(context.world_size, context.world_rank)
    return GlooCollectives()
