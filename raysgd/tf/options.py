"""The arguments of a TFTrainer."""

import importlib.util
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from raysgd.backends import CollectiveBackend, create_backend
from raysgd.comm.horovod import HorovodBackend
from raysgd.comm.tensorflow import keras_environment
from raysgd.loop.options import Options, WorkerSettings


@dataclass(frozen=True, kw_only=True)
class KerasOptions(Options):
    """See :class:`raysgd.loop.options.Options`."""

    backend: str = "gloo"
    divides_batches: bool = False
    """Whether the group shares each batch of a ``tf.data.Dataset``."""
    seed: int = field(default_factory=lambda: secrets.randbelow(2**31))
    """Seed of all workers."""
    environment: Mapping[str, str] = field(default_factory=keras_environment)
    """The driver's choice of Keras."""

    trainer_name = "TFTrainer"
    precisions = (False, True, "mixed_float16", "mixed_bfloat16")

    def allowed_backends(self) -> tuple[str, ...]:
        return ("gloo", "horovod", "tensorflow")

    def has_gpus(self) -> bool:
        import tensorflow as tf

        return bool(tf.config.list_physical_devices("GPU"))

    def make_backend(self) -> CollectiveBackend:
        if self.use_horovod:
            return HorovodBackend(self.backend, self.timeout_s, framework="tensorflow")
        if importlib.util.find_spec("torch") is None:
            raise ImportError(
                f"TFTrainer(num_workers={self.num_workers}) needs PyTorch, because several workers "
                'communicate through PyTorch. Run pip install "raysgd[torch]".'
            )
        return create_backend("gloo", self.timeout_s)


@dataclass
class KerasSettings(WorkerSettings):
    """The trainer's arguments, and the rank and resources of this worker."""

    options: KerasOptions = field(default_factory=KerasOptions)
