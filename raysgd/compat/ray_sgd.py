"""Names of RaySGD v1 on operators, trainers, and data sets."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from raysgd.compat.creators import creator_class

logger = logging.getLogger(__name__)

NUM_STEPS = "__num_steps__"
"""Key of ``info``: requested number of batches; None for the whole epoch."""
SCHEDULER_STEP = "scheduler_step"
"""Key of ``info``: the trainer's ``scheduler_step_freq``."""
USE_FP16 = "__use_fp16__"
"""Key of ``info``: whether training runs in mixed precision."""
_INFO_KEYS = (NUM_STEPS, SCHEDULER_STEP, USE_FP16)

_OLD_ARGUMENTS = {
    "model_creator": "training_operator_cls=TrainingOperator.from_creators(model_creator, ...)",
    "data_creator": "training_operator_cls=TrainingOperator.from_creators(..., data_creator=...)",
    "optimizer_creator": "training_operator_cls=TrainingOperator.from_creators(...)",
    "scheduler_creator": "TrainingOperator.from_creators(..., scheduler_creator=...)",
    "loss_creator": "TrainingOperator.from_creators(..., loss_creator=...)",
    "num_replicas": "num_workers",
    "batch_size": "config={raysgd.utils.BATCH_SIZE: ...}",
    "apex_args": "the arguments of self.register(...) in setup",
    "data_loader_args": "the arguments of the DataLoader that you make in setup",
}

_Method = TypeVar("_Method", bound=Callable[..., object])


def override(overridden: type) -> Callable[[_Method], _Method]:
    """Mark a method that overrides a method of `overridden`, for older scripts."""

    def marked(method: _Method) -> _Method:
        getattr(overridden, method.__name__)
        return method

    return marked


# ---- operators


def epoch_arguments(
    operator: Any, info: Mapping[str, Any], num_steps: int | None, epoch_idx: int
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments that ``train_epoch`` takes. Older overrides end at ``info``."""
    info = {
        **info,
        NUM_STEPS: num_steps,
        SCHEDULER_STEP: getattr(operator, "scheduler_step_freq", None),
        USE_FP16: operator.use_fp16,
    }
    parameters = inspect.signature(operator.train_epoch).parameters
    kinds = [each.kind for each in parameters.values()]
    named: dict[str, Any] = {"num_steps": num_steps, "epoch_idx": epoch_idx}
    positional = []
    # Older overrides may give the second parameter another name.
    if len(kinds) > 1 and kinds[1] <= inspect.Parameter.VAR_POSITIONAL:
        positional = [info]
    else:
        named["info"] = info
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        named = {name: value for name, value in named.items() if name in parameters}
    return positional, named


def info_of_user(info: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the info of an epoch without the keys that `epoch_arguments` adds."""
    return {name: value for name, value in (info or {}).items() if name not in _INFO_KEYS}


class OldOperator:
    """Creator functions, and errors for attributes that are gone."""

    @classmethod
    def from_creators(
        cls,
        model_creator: Callable[..., Any],
        optimizer_creator: Callable[..., Any],
        data_creator: Callable[..., Any] | None = None,
        loss_creator: Callable[..., Any] | type | None = None,
        scheduler_creator: Callable[..., Any] | None = None,
        serialize_data_creation: bool = True,
    ) -> type[Any]:
        """Return an operator class made of creator functions, see :class:`CreatorOperator`."""
        creators = {
            "model_creator": model_creator,
            "optimizer_creator": optimizer_creator,
            "data_creator": data_creator,
            "loss_creator": loss_creator,
            "scheduler_creator": scheduler_creator,
        }
        own = importlib.import_module("raysgd.torch.operator").CreatorOperator
        combined = (own,) if issubclass(own, cls) else (cls, own)
        bases = (cls,) if issubclass(cls, own) else combined
        required = ("model_creator", "optimizer_creator")
        operator_cls: type[Any] = creator_class("from_creators", bases, creators, required)
        operator_cls._serialize_data_creation = serialize_data_creation
        return operator_cls

    def __getattr__(self, name: str) -> Any:
        if name in ("_amp", "_amp_scaler"):
            raise AttributeError(
                f"{type(self).__name__} has no {name}. Use self.autocast(), self.backward(loss), "
                "and self.optimizer_step(optimizer) instead."
            )
        return super().__getattr__(name)  # type: ignore[misc]


# ---- trainers


class OldTorchTrainer:
    """Attributes of the old TorchTrainer."""

    max_workers: int

    @property
    def max_replicas(self) -> int:
        """Older name of ``max_workers``."""
        return self.max_workers

    @functools.cached_property
    def temp_dir(self) -> str:
        """A temporary folder on the driver for older scripts, which delete it themselves."""
        return tempfile.mkdtemp(prefix="raysgd")


def without_old_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a TorchTrainer without old ones that have no effect."""
    left = {
        n: value for n, value in arguments.items() if n not in _OLD_ARGUMENTS or value is not None
    }
    for name in (name for name in _OLD_ARGUMENTS if name in left):
        raise DeprecationWarning(
            f"TorchTrainer({name}=...) is no longer supported. Use {_OLD_ARGUMENTS[name]} instead."
        )
    if left.pop("serialize_data_creation", None):
        logger.warning(
            "TorchTrainer(serialize_data_creation=True) does nothing. Pass it to "
            "TrainingOperator.from_creators(...)."
        )
    return left


# ---- data sets


def items_of(data: Any) -> Sequence[Any]:
    """Return data as a sequence. It may be an iterator of ``ray.util.iter``."""
    if hasattr(data, "gather_sync"):
        if "repeat=True" in repr(data):
            raise ValueError(f"Dataset(data={data!r}): must end. Leave out repeat=True.")
        data = data.gather_sync()
    return data if isinstance(data, Sequence) else list(data)


class OldDataset:
    """Errors for methods of the old Dataset."""

    def __getattr__(self, name: str) -> Any:
        hint = ""
        if name in ("set_num_shards", "get_shard"):
            hint = ": trainer.train(dataset=...) partitions the items across the workers"
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")
