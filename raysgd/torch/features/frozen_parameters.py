"""What stays as ``setup`` made it: frozen parameters, and the modes of models with only these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from raysgd._internal.nonfinite import nonfinite_arrays
from raysgd.errors import CheckpointError
from raysgd.loop.feature import UpdateFeature
from raysgd.torch.digests import digest_of, has_bits
from raysgd.torch.tensors import version_of

FROZEN_KEY = "frozen"
"""Entry of a state that lacks parameters: their digests by name, for each model."""


class FrozenParameters(UpdateFeature):
    """The parameters of the models that are frozen at the end of ``setup``.

    Models without other parameters keep their train or eval modes from ``register``.

    A state that lacks some of them has their digests instead, and is completed with the parameters
    that ``setup`` of the receiver has made.
    """

    def __init__(self, models: Sequence[torch.nn.Module] = ()) -> None:
        self._digest_cache: dict[torch.nn.Parameter, tuple[int, int]] = {}
        """The newest version of each parameter whose digest is known, and this digest."""
        self._digests_at_setup = [self._digests_of(model) for model in models]
        self.are_reproducible = False
        """Whether ``setup`` of all workers has made the same."""
        untrained = [
            {k: v for k, v in (*m.named_parameters(), *m.named_buffers()) if not v.requires_grad}
            for m in models
        ]
        self._not_finite = [*nonfinite_arrays({"models": untrained})]  # such as masks
        frozen = [model for model in models if _is_frozen(model)]
        self._modes = [(model, [(m, m.training) for m in model.modules()]) for model in frozen]

    def state_dict(self) -> dict[str, Any]:
        return {"not_finite": self._not_finite} if self._not_finite else {}

    def restore_modes(self) -> None:
        """Set the modes from ``register`` in models that are still frozen."""
        for model, modes in self._modes:
            for module, mode in modes if _is_frozen(model) else ():
                module.training = mode

    def digests_of_unchanged(self, models: Sequence[torch.nn.Module]) -> list[dict[str, int]]:
        """Return the digests of the parameters that have the bytes of ``setup``, by model."""
        pairs = zip(self._digests_at_setup, map(self._digests_of, models), strict=False)
        return [
            {name: digest for name, digest in digests.items() if at_setup.get(name) == digest}
            for at_setup, digests in pairs
        ]

    def forget(self) -> None:
        """Compute digests again, because writes to ``parameter.data`` do not count as versions."""
        self._digest_cache.clear()

    after_user_function = forget

    def begin_call(self, logs_steps: bool) -> None:
        self.forget()

    def _digests_of(self, model: torch.nn.Module) -> dict[str, int]:
        return {
            name: self._digest_of(parameter)
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if not parameter.requires_grad and has_bits(parameter)
        }

    def _digest_of(self, parameter: torch.nn.Parameter) -> int:
        """Return the digest of a parameter. Compute it only if it may have changed."""
        version, digest = self._digest_cache.get(parameter, (None, 0))
        if version != version_of(parameter):
            digest = int(digest_of([parameter.detach()], parameter.device)) >> 1  # fits 64 bits
            self._digest_cache[parameter] = version_of(parameter), digest
        return digest


def _is_frozen(model: torch.nn.Module) -> bool:
    return not any(parameter.requires_grad for parameter in model.parameters())


def without_frozen(
    state: Mapping[str, Any], digests: Sequence[Mapping[str, int]]
) -> dict[str, Any]:
    """Return a state without the parameters that have digests. The state then has the digests."""
    if not any(digests) or "models" not in state:
        return dict(state)
    models = [
        {name: value for name, value in model.items() if name not in own}
        for model, own in zip(state["models"], digests, strict=False)
    ]
    return {**state, FROZEN_KEY: digests, "models": models}


def with_frozen(
    state: dict[str, Any], known: Sequence[Mapping[str, int]], models: Sequence[torch.nn.Module]
) -> dict[str, Any]:
    """Return a state with this worker's parameters, of `known` digests, for those that it lacks.

    Raises:
        CheckpointError: if ``setup`` has made another parameter.
    """
    lacking = state.get(FROZEN_KEY)
    if not lacking:
        return state
    if len(lacking) != len(models) or not all(isinstance(each, Mapping) for each in lacking):
        raise CheckpointError(f"The state's {FROZEN_KEY!r} must have a dict for each model.")
    full = []
    for index, digests in enumerate(lacking):
        for name, digest in digests.items():
            if known[index].get(name) != digest:
                raise CheckpointError(
                    f"The state was saved without frozen parameters, and {name!r} of model {index} "
                    "is not the one that setup() made then. Load the same pretrained weights in "
                    "setup, and freeze the same parameters, or save with frozen=True."
                )
        own_model = models[index].state_dict()
        full.append({name: own_model[name] for name in digests} | state["models"][index])
    return {**state, "models": full}
