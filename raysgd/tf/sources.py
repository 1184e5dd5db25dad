"""The data that a Keras operator registered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from raysgd.data import Dataset
from raysgd.data.source import BatchSource
from raysgd.loop.sources import DataSources
from raysgd.tf.loading import ArraySource, DatasetSource, ItemSource, check_end, is_arrays

if TYPE_CHECKING:
    from raysgd.tf.train_state import KerasTrainState

__all__ = ["KerasSources"]

_DEFAULT_BATCH_SIZE = 32


class KerasSources(DataSources):
    """Reads data sets of TensorFlow, arrays, and iterables."""

    _state: KerasTrainState
    batch_size: int | None = None
    """Number of samples in a worker's batch of arrays."""
    shuffle = True

    def wrap(self, loader: Any, training: bool) -> BatchSource:
        settings, seed = self._state.settings, self._state.seed
        share, placing = settings.batch_share, settings.placing
        if isinstance(loader, Dataset):
            return ItemSource(loader, **placing)
        if is_arrays(loader):
            return ArraySource(
                loader,
                training=training,
                batch_size=self.batch_size or share or _DEFAULT_BATCH_SIZE,
                shuffle=self.shuffle,
                seed=seed,
                follows_share=share is not None and self.batch_size in (None, share),
                **placing,
            )
        if isinstance(loader, tf.data.Dataset) and settings.options.add_dist_sampler:
            splits = settings.options.splits_batches
            del placing["global_batch"]  # the batches of the data set exist already
            return DatasetSource(loader, training=training, splits=splits, **placing)
        why_whole = "it is neither arrays nor a tf.data.Dataset"
        return BatchSource(
            loader, by_user=not settings.options.add_dist_sampler, why_whole=why_whole
        )

    def check_end(self) -> None:
        if self.has(self.trains_on):
            loader = self.readable(self.trains_on).loader
            check_end(loader, "training", "train(num_steps=...)")
