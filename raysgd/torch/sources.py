"""The loaders that a PyTorch operator registered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysgd.data.source import BatchSource
from raysgd.loop.sources import DataSources
from raysgd.torch.loading import wrap_loader
from raysgd.torch.register_checks import warn_of_order

__all__ = ["TorchSources"]


class TorchSources(DataSources):
    """Reads DataLoaders, data sets of items, and iterables."""

    def register(self, train_loader: Any, validation_loader: Any) -> None:
        super().register(train_loader, validation_loader)
        context = self._state.context
        is_first = context.world_rank == 0 and context.generation <= 1
        if train_loader is not None and is_first and self._state.settings.options.num_workers > 1:
            warn_of_order(self.source("train"))

    def by_name(self, loader: Any) -> Mapping[str, Any]:
        if not isinstance(loader, Mapping):
            return {"": loader}
        if not loader or not all(isinstance(name, str) and name for name in loader):
            raise TypeError(
                f"Several validation loaders must be a dict by name, such as {{'a': loader_a}}, "
                f"but got {loader!r}."
            )
        return loader

    def wrap(self, loader: Any, training: bool) -> BatchSource:
        settings = self._state.settings
        return wrap_loader(
            loader,
            training=training,
            shard=settings.options.add_dist_sampler,
            seed=self._state.seed,
            batch_share=settings.batch_share,
            **settings.placing,
        )
