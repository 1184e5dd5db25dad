"""What stays as ``setup`` made it: frozen parameters, and the modes of models with only these."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch

from raysgd._internal.collectives import Collectives
from raysgd._internal.nonfinite import nonfinite_arrays
from raysgd.errors import CheckpointError
from raysgd.loop.feature import UpdateFeature
from raysgd.torch.modules import uncompiled
from raysgd.torch.tensors import is_readable, tensor_digest, version_of

FROZEN_KEY = "frozen"
"""Entry of a state that lacks parameters: their digests by name, for each model."""


class FrozenParameters(UpdateFeature):
    """The parameters of the models that are frozen at the end of ``setup``.

    Models without other parameters keep their train or eval modes from ``register``.

    A state that lacks some of them has their digests instead, and is completed with the parameters
    that ``setup`` of the receiver has made.
    """

    def __init__(self, models: Sequence[torch.nn.Module], collectives: Collectives) -> None:
        self._collectives = collectives
        self._models = list(map(uncompiled, models))
        self._digest_cache: dict[torch.Tensor, tuple[int, int]] = {}
        """The newest version of each parameter whose digest is known, and this digest."""
        self._digests_at_setup = list(map(self._digests_of, self._models))
        self.are_reproducible = False
        """Whether ``setup`` of all workers has made the same."""
        untrained = [
            {k: v for k, v in (*m.named_parameters(), *m.named_buffers()) if not v.requires_grad}
            for m in models
        ]
        self._nonfinite_arrays = [*nonfinite_arrays({"models": untrained})]  # such as masks
        frozen = [model for model in models if _is_frozen(model)]
        self._modes = [(model, [(m, m.training) for m in model.modules()]) for model in frozen]

    def state_dict(self) -> dict[str, Any]:
        return {"not_finite": self._nonfinite_arrays} if self._nonfinite_arrays else {}

    def restore_modes(self) -> None:
        """Set the modes from ``register`` in models that are still frozen."""
        for model, modes in self._modes:
            for module, mode in modes if _is_frozen(model) else ():
                module.training = mode

    def sync_initial_state(self, leader_rank: int = 0) -> None:
        """Find out whether ``setup`` of all workers, also of new ones, has made the same."""
        digests, group = self._digests_of_unchanged(), self._collectives
        pairs = zip(group.broadcast(lambda: digests, leader_rank), digests, strict=True)
        has_all = all(leaders.items() <= mine.items() for leaders, mine in pairs)
        self.are_reproducible = group.all_reduce_min(has_all)[0] > 0

    def remove_unchanged(self, state: dict[str, Any], for_workers: bool = False) -> dict[str, Any]:
        """Return a state with digests in place of the parameters that ``setup`` makes again.

        With `for_workers`, trust known versions, and remove only what all workers make alike.
        """
        digests = self._digests_of_unchanged(trusts_versions=for_workers)
        if not any(digests) or (for_workers and not self.are_reproducible):
            return state
        models = [
            {name: value for name, value in model.items() if name not in known}
            for model, known in zip(state["models"], digests, strict=False)
        ]
        return {**state, FROZEN_KEY: digests, "models": models}

    def _digests_of_unchanged(self, trusts_versions: bool = False) -> list[dict[str, int]]:
        """Return the digests of the parameters that have the bytes of ``setup``, by model.

        Read all of them, 1 GB in 0.13 s on a CPU, because writes to ``parameter.data`` do not count
        as versions. If this `trusts_versions`, read only new versions.
        """
        if not trusts_versions:
            self._digest_cache = {}
        pairs = zip(self._digests_at_setup, map(self._digests_of, self._models), strict=True)
        return [
            {name: digest for name, digest in digests.items() if at_setup.get(name) == digest}
            for at_setup, digests in pairs
        ]

    def can_complete(self, snapshot: Mapping[str, Any]) -> bool:
        is_exact = any(parameter.is_cuda for parameter in [*self._digest_cache])
        if is_exact or not (lacking := snapshot.get(FROZEN_KEY)):
            return True
        self._digest_cache = {}
        pairs = zip(lacking, self._models, strict=True)
        return all(d.items() <= self._digests_of(model, d).items() for d, model in pairs)

    def complete(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state with this worker's parameters for those that it lacks.

        Raises:
            CheckpointError: if ``setup`` has made another parameter.
        """
        lacking, models = state.get(FROZEN_KEY), self._models
        if not lacking:
            return state
        if len(lacking) != len(models) or not all(isinstance(names, Mapping) for names in lacking):
            raise CheckpointError(f"The state's {FROZEN_KEY!r} must have a dict for each model.")
        known, full = self._digests_of_unchanged(), []
        for index, digests in enumerate(lacking):
            for name, digest in digests.items():
                if known[index].get(name) != digest:
                    raise CheckpointError(
                        f"The state was saved without frozen parameters, and {name!r} of model "
                        f"{index} is not the one that setup() made then. Load the same pretrained "
                        "weights in setup, and freeze the same parameters, or save with "
                        "frozen=True."
                    )
            local = models[index].state_dict()
            full.append({name: local[name] for name in digests} | state["models"][index])
        return {**state, "models": full}

    def after_user_function(self) -> None:
        self._digest_cache = {}

    def _digests_of(self, model: torch.nn.Module, also: Container[str] = ()) -> dict[str, int]:
        return {
            name: self.digest_of(parameter)
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if (name in also or not parameter.requires_grad) and is_readable(parameter)
        }

    def digest_of(self, parameter: torch.Tensor) -> int:
        """Return the digest of a parameter. A CPU reads it only if it has another version."""
        cache, now = self._digest_cache, version_of(parameter)  # other threads may change both
        version, digest = cache.get(parameter, (None, 0))
        if version != now or parameter.is_cuda:  # a GPU takes 1 ms per GB
            digest = int(tensor_digest([parameter.detach()], parameter.device)) >> 1  # fits 64 bits
            cache[parameter] = now, digest
        return digest


def _is_frozen(model: torch.nn.Module) -> bool:
    return not any(parameter.requires_grad for parameter in model.parameters())
