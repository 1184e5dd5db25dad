"""The trainer for PyTorch operators."""

import functools
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from raysgd._internal.arguments import unknown_argument
from raysgd._internal.forwarding import forward_to
from raysgd._internal.imports import lazy_names
from raysgd._internal.tracebacks import fold_tracebacks
from raysgd.callbacks.base import Callback
from raysgd.driver.operator_trainer import OperatorTrainer, known_arguments
from raysgd.driver.properties import option_property
from raysgd.elastic.config import ElasticConfig
from raysgd.loop.operator_base import check_operator
from raysgd.torch.operator import CreatorOperator, TrainingOperator
from raysgd.torch.options import BadSteps, EqualBits, Guard, TorchOptions, without_old_arguments
from raysgd.torch.runner import TorchRunner

__all__ = ["TorchTrainer"]

logger = logging.getLogger(__name__)


@fold_tracebacks
class TorchTrainer(OperatorTrainer):
    """Trains a :class:`TrainingOperator` on one or several workers.

    Each worker is a Ray actor with its own copy of the operator. The workers average gradients at
    each step, and metrics at the end of a call::

        trainer = TorchTrainer(
            training_operator_cls=Classifier, config={"lr": 0.1}, num_workers=4)
        for _ in range(10):
            print(trainer.train(), trainer.validate())
        trainer.save("model.pt")
        model = trainer.get_model()
        trainer.shutdown()

    Args:
        training_operator_cls: A TrainingOperator subclass. Required.
        initialization_hook: Function of no arguments that every worker runs before anything else.
        config: Passed to the operator. May hold the global batch size under ``BATCH_SIZE``.
        num_workers: Maximum number of workers. With 1, there is no process group.
        min_workers: Minimum number of workers to start with, and to continue with after losses.
        num_cpus_per_worker: CPUs that each worker reserves, and threads that PyTorch gets there.
        resources_per_worker: Other Ray resources of each worker. ``GPU`` for several GPUs, or for a
            fraction of one.
        use_gpu: True: one GPU per worker. "auto": the same if the cluster has GPUs. With
            `use_local`, a single worker takes the GPU of this process, and several use none.
        backend: "gloo", "nccl", or "horovod". "auto": nccl if each worker has a GPU of its own,
            else gloo.
        wrap_ddp: Whether to wrap registered models in DistributedDataParallel.
        timeout_s: Seconds that each collective (except in Horovod) and ``setup`` may take. For
            nccl, ``NCCL_TIMEOUT_S`` in the environment of the driver overrides it.
        use_fp16: True: mixed precision by ``torch.amp``. "apex": by NVIDIA Apex on every worker.
        amp_dtype: torch.float16 or torch.bfloat16, for ``use_fp16=True``. None: float16 on GPUs,
            bfloat16 on CPUs.
        use_tqdm: Whether to show a progress bar.
        add_dist_sampler: Whether to partition loaders. False if each loader selects the samples of
            its worker.
        scheduler_step_freq: "batch", "epoch", or "manual". Required with schedulers.
        split_on_oom: Whether to repeat a step that runs out of memory with micro-batches.
        exact: "bits", or an :class:`raysgd.EqualBits`: parameters, metrics, and predictions have
            the same bits with any number of workers, kills, and joins. Training takes longer.
        guard: "check": workers compare their replicas, and a difference is an error. None: no
            comparison. Or a :class:`raysgd.Guard`.
        bad_steps: A :class:`raysgd.BadSteps`: an update is not applied if its loss or gradient is
            not finite. `bad_steps` of the trainer, and ``bad_steps.jsonl`` in the run folder, name
            its samples. None: no check.
        use_local: Whether worker 0 lives in this process. With ``num_workers=1``, Ray is neither
            started nor imported, and PyTorch keeps the threads of this process.
        elastic: How to react when workers are lost or can be added.
        callbacks: Objects that observe every call, see :class:`raysgd.callbacks.Callback`.
        logdir: Folder of the run, for ``metrics.jsonl``, ``events.jsonl``, and callbacks without a
            folder of their own. None to write nothing.

    Raises:
        ImportError: If a worker lacks Apex, for ``use_fp16="apex"``.
        InsufficientResourcesError: If the cluster has no room for `min_workers` within the start
            timeout (``SGD_PLACEMENT_GROUP_TIMEOUT_S``, 100 s).
        BaseException: An error of ``setup`` of the operator on a worker.
    """

    _options_cls = TorchOptions

    def __init__(
        self,
        *creators: Any,
        training_operator_cls: type[TrainingOperator] | None = None,
        initialization_hook: Callable[[], None] | None = None,
        config: Mapping[str, Any] | None = None,
        num_workers: int = 1,
        min_workers: int = 1,
        num_cpus_per_worker: float = 1,
        resources_per_worker: Mapping[str, float] | None = None,
        use_gpu: bool | str = "auto",
        backend: str = "auto",
        wrap_ddp: bool = True,
        timeout_s: float = 1800,
        use_fp16: bool | str = False,
        amp_dtype: torch.dtype | None = None,
        use_tqdm: bool = False,
        add_dist_sampler: bool = True,
        scheduler_step_freq: str | None = None,
        split_on_oom: bool = True,
        exact: str | EqualBits | None = None,
        guard: str | Guard | None = "check",
        bad_steps: BadSteps | None = None,
        use_local: bool = False,
        elastic: ElasticConfig | None = None,
        callbacks: Iterable[Callback] = (),
        logdir: str | os.PathLike[str] | None = None,
        **others: Any,
    ) -> None:
        for name in without_old_arguments(others, creators):
            kind = type(self)
            raise unknown_argument(kind.__name__, name, known_arguments(kind))
        _check_operator(training_operator_cls)
        options = TorchOptions.from_arguments(locals())
        super().__init__(options, TorchRunner, initialization_hook, callbacks, logdir)

    wrap_ddp = option_property("wrap_ddp")
    scheduler_step_freq = option_property("scheduler_step_freq")
    max_replicas: int = forward_to("max_workers", "Older name of ``max_workers``.")

    @property
    def bad_steps(self) -> list[dict[str, Any]]:
        """The updates that ``TorchTrainer(bad_steps=...)`` did not apply, oldest first.

        Each has ``step``, ``epoch``, ``reason``, ``value``, and ``samples``: indices in the data
        set; for a `raysgd.data.Stream` [file, record]; for other streams positions in the epoch;
        none if user code selects the samples.
        """
        return [dict(each) for each in self._reporter.bad_steps]

    @functools.cached_property
    def temp_dir(self) -> str:
        """A temporary folder on the driver for older scripts, which delete it themselves."""
        return tempfile.mkdtemp(prefix="raysgd")

    def get_model(self, to_cpu: bool = False) -> Any:
        """Return a copy of the model, or of the list of models, without DistributedDataParallel.

        The copy is on a GPU if the workers use GPUs and this process has one, unless `to_cpu` is
        set.

        Raises:
            TypeError: If a model cannot be pickled. ``state_dict()["models"]`` has its weights.
        """
        if self._options.use_local and self.global_step == 0:
            logger.warning(
                "get_model() returns a copy of the model, as it is now. Call it again after "
                "train(). With use_local=True, RaySGD v1 returned the trained model itself."
            )
        models: list[torch.nn.Module] = self._transfer.models()
        if self._options.use_gpu and not to_cpu and torch.cuda.is_available():
            models = [model.to("cuda") for model in models]
        return models[0] if len(models) == 1 else models

    @staticmethod
    def _concatenate(outputs: Sequence[Any]) -> Any:
        is_tensor = isinstance(outputs[0], torch.Tensor)
        return torch.cat(list(outputs)) if is_tensor else np.concatenate(outputs)

    @classmethod
    def _trial_arguments(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        arguments = super()._trial_arguments(without_old_arguments(arguments))
        _check_operator(arguments.get("training_operator_cls"))
        return arguments


def _check_operator(operator_cls: Any) -> None:
    check_operator("TorchTrainer", operator_cls, TrainingOperator, "raysgd.TrainingOperator")
    if issubclass(operator_cls, CreatorOperator) and not hasattr(operator_cls, "_model_creator"):
        raise TypeError(
            f"{operator_cls.__name__} has no creators. Pass the result of "
            f"{operator_cls.__name__}.from_creators(model_creator, optimizer_creator, ...)."
        )


# Older scripts import it from here. It needs Ray Tune.
__getattr__ = lazy_names("raysgd.torch", {"BaseTorchTrainable": "raysgd.trials:BaseTorchTrainable"})
