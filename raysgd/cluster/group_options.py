"""Resources that a group of workers reserves, and its start timeout."""

from collections.abc import Mapping
from dataclasses import dataclass, field

PROCESS_START_S = 60.0  # seconds that processes may take to start in their reserved resources
START_ADVICE = (
    "To wait longer, set SGD_PLACEMENT_GROUP_TIMEOUT_S (raysgd.train: "
    "TRAIN_PLACEMENT_GROUP_TIMEOUT_S) to more seconds."
)


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    num_workers: int
    min_workers: int = 1
    num_cpus: float = 1
    num_gpus: float = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    use_local: bool = False
    start_timeout_s: float = 100.0
    placement_strategy: str = "SPREAD"  # how Ray places the workers on nodes

    @property
    def bundle(self) -> dict[str, float]:
        bundle = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: amount for name, amount in bundle.items() if amount}

    @property
    def is_inline(self) -> bool:
        """Whether the only worker runs in the caller's thread, without a Ray actor."""
        return self.use_local and self.num_workers == 1


def workers_that_fit(resources: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    """Return an upper bound of the bundles that fit: all resources could be on one node."""
    return min((int(resources.get(name, 0) / n + 1e-6) for name, n in bundle.items()), default=0)
