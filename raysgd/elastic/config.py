"""How a trainer reacts when workers are lost or can be added."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from raysgd._internal.arguments import (
    as_int,
    check_choice,
    check_flags,
    check_number,
    set_fields,
)

__all__ = ["ElasticConfig"]


@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """How to react to lost workers. The defaults suit most runs.

    Raises:
        TypeError: if a value has the wrong type.
        ValueError: if a value is out of its range.
    """

    max_start_attempts: int = 10
    """Limit of waits for workers, of failed replacements in a row, and of losses before a call."""
    backoff_initial_s: float = 1.0
    """Seconds before the second attempt. Each further wait is twice as long."""
    backoff_max_s: float = 60.0
    """Maximum duration of a wait, in seconds."""
    resize_cooldown_s: float = 10.0
    """Seconds between two changes of the group size when resources become free. Replacements of
    lost workers join without this wait."""
    driver_grace_s: float = 60.0
    """Seconds that driver and workers wait for each other when the driver can reach no worker."""
    replace_workers: bool = True
    """Whether to replace lost workers, and to add missing ones when resources become free."""
    snapshot_every: Literal["auto", "epoch"] | int | None = "auto"
    """How often the driver copies the state, in case all workers are lost. ``"auto"``: as often as
    1 % of the training time allows, and at the start of each epoch if the state is small (16 MiB).
    Otherwise at the start of each epoch, after a number of steps, or never (None)."""
    global_batch: Literal["keep", "scale"] = "keep"
    """``"keep"``: steps have the global batch size of the full group. ``"scale"``: steps have one
    batch for each present worker."""
    shares: Literal["even", "measured"] | Mapping[str, float] = "even"
    """How the workers share the global batch. ``"even"``: equally. ``"measured"``: in proportion to
    the samples that each computes per second (`TorchTrainer` only). A mapping: relative shares by
    node label (``"zone=a"``), accelerator type, or resource; other nodes have 1."""

    def __post_init__(self) -> None:
        caller = "ElasticConfig"
        most = as_int(caller, "max_start_attempts", self.max_start_attempts, 1)
        set_fields(self, max_start_attempts=most)
        for name in ("backoff_initial_s", "backoff_max_s", "resize_cooldown_s", "driver_grace_s"):
            check_number(caller, name, getattr(self, name))
        check_flags(caller, replace_workers=self.replace_workers)
        check_choice(caller, "global_batch", self.global_batch, ("keep", "scale"))
        if isinstance(self.shares, Mapping) and self.shares:
            for name, share in self.shares.items():
                check_number(caller, f"shares[{name!r}]", share, above=0)
        elif self.shares not in ("even", "measured"):
            raise ValueError(
                f'{caller}(shares={self.shares!r}): must be "even", "measured", or a mapping of '
                "names of nodes to relative shares."
            )
        every = self.snapshot_every
        if isinstance(every, str) and every not in ("auto", "epoch"):
            raise ValueError(
                f'{caller}(snapshot_every={every!r}): must be "auto", "epoch", a number of steps, '
                "or None."
            )
        if not isinstance(every, str | None):
            set_fields(self, snapshot_every=as_int(caller, "snapshot_every", every, 1))


def as_elastic_config(
    caller: str, elastic: Any, supports_measured_shares: bool = False
) -> ElasticConfig:
    """Return the ElasticConfig, or the default one for None."""
    elastic = ElasticConfig() if elastic is None else elastic
    if not isinstance(elastic, ElasticConfig):
        raise TypeError(f"{caller}(elastic={elastic!r}): must be an ElasticConfig.")
    if elastic.shares == "measured" and not supports_measured_shares:
        raise ValueError(
            f'{caller} does not support ElasticConfig(shares="measured"). Use "even", or give '
            "relative shares by node label, accelerator type, or resource."
        )
    return elastic
