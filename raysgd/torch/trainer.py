"""The trainer for PyTorch operators: its arguments, and what they mean."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from raysgd.arguments import (
    check_choice,
    check_flags,
    check_hook,
    check_timeout,
    check_workers,
    checked_config,
    checked_elastic,
    checked_resources,
    decide_gpu,
    unknown_argument,
)
from raysgd.backends import backend_names, create_backend
from raysgd.callbacks.base import Callback
from raysgd.callbacks.run_folder import checked_logdir, trainer_callbacks
from raysgd.cluster.controller import Controller
from raysgd.cluster.worker_group import GroupOptions, WorkerGroup
from raysgd.comm.horovod import check_horovod
from raysgd.config import check_batch_size, env_seconds
from raysgd.elastic.config import ElasticConfig
from raysgd.loop.operator_base import warn_of_misspelling
from raysgd.torch.creators import CreatorOperator
from raysgd.torch.operator import TrainingOperator
from raysgd.torch.precision import PRECISIONS
from raysgd.torch.runner import TorchRunner, TorchRunnerOptions
from raysgd.trainer import OperatorTrainer

__all__ = ["TorchTrainer"]

logger = logging.getLogger(__name__)

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
_AMP_DTYPES = (torch.float16, torch.bfloat16)
_SCHEDULER_STEP_FREQS = ("batch", "epoch", "manual")


class TorchTrainer(OperatorTrainer):
    """Trains a :class:`TrainingOperator` on one or several workers.

    Runs on the driver. Each worker is a Ray actor with its own copy of the operator; gradients
    are averaged over the workers at each step, metrics when a call ends::

        trainer = TorchTrainer(
            training_operator_cls=Classifier, config={"lr": 0.1}, num_workers=4)
        for _ in range(10):
            print(trainer.train(), trainer.validate())
        trainer.save("model.pt")
        model = trainer.get_model()
        trainer.shutdown()

    Args:
        training_operator_cls: a TrainingOperator subclass; required.
        initialization_hook: function of no arguments that every worker runs before anything else.
        config: handed to the operator; may hold the global batch size under ``BATCH_SIZE``.
        num_workers: the most workers. With 1 there is no process group.
        min_workers: the fewest to start with, and to go on with after losses.
        num_cpus_per_worker: CPUs that each worker reserves, and threads that torch gets there.
        resources_per_worker: further Ray resources of each worker; ``GPU`` for more than one.
        use_gpu: True: one GPU a worker; "auto": so if the cluster has GPUs. With `use_local` the
            only worker takes the GPU that this process is at, and of several none can have one.
        backend: "gloo", "nccl", "horovod", or one that was registered; "auto": nccl with GPUs, else
            gloo. With Horovod models are not wrapped; its DistributedOptimizer averages gradients.
        wrap_ddp: whether to wrap registered models in DistributedDataParallel.
        timeout_s: bound, in seconds, of each collective (Horovod knows none) and of the workers'
            setup; ``NCCL_TIMEOUT_S`` in the driver's environment overrides it for nccl.
        use_fp16: True: mixed precision by ``torch.amp``; "apex": by NVIDIA Apex, which every worker
            needs to have.
        amp_dtype: torch.float16 or torch.bfloat16, for ``use_fp16=True``; None: float16 on GPUs,
            bfloat16 on CPUs. With float16 the loss is scaled.
        use_tqdm: whether to show a progress bar.
        add_dist_sampler: whether to share registered map-style loaders out over the workers.
        scheduler_step_freq: "batch", "epoch" or "manual"; needed where schedulers are registered.
        use_local: whether worker 0 lives in this process. With ``num_workers=1`` Ray is neither
            started nor imported, and torch keeps the threads that this process gave it.
        elastic: what to do about workers that are lost or come back; the defaults need none.
        callbacks: observe every call of this trainer, see :class:`raysgd.callbacks.Callback`.
        logdir: folder of the run, for ``metrics.jsonl``, ``events.jsonl``, and what callbacks write
            that are given no folder of their own. None: nothing is written.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument has a value that is not allowed.
        ImportError: if a worker lacks Apex, where that is asked for.
        InsufficientResourcesError: if the cluster has no room for `min_workers` within the start
            timeout (``SGD_PLACEMENT_GROUP_TIMEOUT_S``, 100 s).
        BaseException: what ``setup`` of the operator raised on a worker.
    """

    def __init__(
        self,
        *,
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
        use_local: bool = False,
        elastic: ElasticConfig | None = None,
        callbacks: Iterable[Callback] = (),
        logdir: str | os.PathLike[str] | None = None,
        **old_arguments: Any,
    ) -> None:
        _refuse(old_arguments, _known_arguments(type(self)))
        operator_cls = _checked_operator(training_operator_cls)
        check_hook("TorchTrainer", initialization_hook)
        config = checked_config("TorchTrainer", config)
        check_workers("TorchTrainer", num_workers, min_workers)
        check_batch_size(config, num_workers)
        resources = checked_resources("TorchTrainer", resources_per_worker, num_cpus_per_worker)
        check_choice("TorchTrainer", "use_gpu", use_gpu, (True, False, "auto"))
        check_choice("TorchTrainer", "backend", backend, ("auto", *_backends()))
        if backend == "horovod":
            check_horovod()
        check_choice(
            "TorchTrainer",
            "scheduler_step_freq",
            scheduler_step_freq,
            (None, *_SCHEDULER_STEP_FREQS),
        )
        _check_precision(use_fp16, amp_dtype)
        check_flags(
            "TorchTrainer",
            wrap_ddp=wrap_ddp,
            use_tqdm=use_tqdm,
            add_dist_sampler=add_dist_sampler,
            use_local=use_local,
        )
        check_timeout("TorchTrainer", timeout_s)
        elastic = checked_elastic("TorchTrainer", elastic, num_workers)
        folder = checked_logdir(logdir)
        attached = trainer_callbacks("TorchTrainer", callbacks, use_tqdm, folder)
        inline = use_local and num_workers == 1
        start_timeout_s = env_seconds("SGD_PLACEMENT_GROUP_TIMEOUT_S", 100.0)
        own_gpus = torch.cuda.is_available if inline else None
        gpu = decide_gpu("TorchTrainer", use_gpu, resources, own_gpus)
        if gpu and use_local and not inline:
            gpu = _local_gpu(use_gpu, resources)
        if backend == "nccl" and not gpu:
            raise ValueError('backend="nccl" needs GPUs: pass use_gpu=True, or backend="gloo".')
        num_gpus = resources.pop("GPU", 1) if gpu else 0
        options = GroupOptions(
            num_workers=num_workers,
            min_workers=elastic.min_workers or min_workers,
            num_cpus=num_cpus_per_worker,
            num_gpus=num_gpus,
            resources=resources,
            use_local=use_local,
            start_timeout_s=start_timeout_s,
        )
        name = ("nccl" if gpu else "gloo") if backend == "auto" else backend
        runner = TorchRunner(
            TorchRunnerOptions(
                operator_cls=operator_cls,
                config=config,
                use_gpu=gpu,
                wrap_ddp=wrap_ddp,
                add_dist_sampler=add_dist_sampler,
                scheduler_step_freq=scheduler_step_freq,
                use_tqdm=use_tqdm,
                use_fp16=use_fp16,
                amp_dtype=amp_dtype,
                use_horovod=name == "horovod",
                snapshot_every=elastic.snapshot_every,
            )
        )
        self._use_gpu = gpu
        controller = Controller(
            # the hook comes before any import
            WorkerGroup(options, () if initialization_hook else runner.imports),
            runner,
            create_backend(name, timeout_s) if num_workers > 1 else None,
            initialization_hook,
            timeout_s,
            elastic,
        )
        super().__init__(config, controller, operator_cls.__qualname__, attached, folder)

    def get_model(self, to_cpu: bool = False) -> Any:
        """Return a copy of the model, or of the list of models, without DistributedDataParallel.

        The workers' own models stay where they are.

        Args:
            to_cpu: keep it on the CPU; otherwise it is on a GPU where the workers use GPUs and this
                process has one.

        Raises:
            TypeError: if a model cannot be pickled; ``state_dict()["models"]`` has its weights.
        """
        models: list[torch.nn.Module] = self._call("models", rank=0, max_losses=3, any_size=True)[0]
        if self._use_gpu and not to_cpu and torch.cuda.is_available():
            models = [model.to("cuda") for model in models]
        return models[0] if len(models) == 1 else models

    @classmethod
    def as_trainable(
        cls,
        *,
        override_tune_step: Callable[[Any, dict[str, Any]], dict[str, Any]] | None = None,
        **trainer_kwargs: Any,
    ) -> type[Any]:
        """Return a ``ray.tune.Trainable`` subclass that trains with such a trainer.

        A trial's config is merged over `config`, key by key. Its ``num_workers``,
        ``num_cpus_per_worker`` and ``use_gpu`` are also arguments of the trainer, and set what
        the trial reserves; the operator finds them in its config like all others. See the guide
        on Ray Tune.

        Args:
            override_tune_step: function of two arguments, the trainer and ``{"iteration": n}`` (the
                results reported before), that returns the metrics of one step. Without it a
                step is one ``train()`` and, where there is a validation loader, one
                ``validate()``, their metrics in one dict.
            trainer_kwargs: arguments of the trainer.

        Raises:
            RuntimeError: if Ray Tune is not installed.
            TypeError: if an argument is unknown, or `training_operator_cls` no TrainingOperator.
            ValueError: if `override_tune_step` does not take two arguments.
        """
        known = _known_arguments(cls)
        _refuse([name for name in trainer_kwargs if name not in known], known)
        _checked_operator(trainer_kwargs.get("training_operator_cls"))
        checked_config("TorchTrainer", trainer_kwargs.get("config"))
        tune = importlib.import_module("raysgd.tune")  # a layer above
        trainable: type[Any] = tune.trainable_class(
            tune.BaseTorchTrainable, cls, override_tune_step, trainer_kwargs
        )
        return trainable


def _known_arguments(cls: type[TorchTrainer]) -> list[str]:
    """Return the arguments of a trainer class, with those that a subclass passes on."""
    return [*inspect.signature(TorchTrainer).parameters, *inspect.signature(cls).parameters]


def _refuse(names: Iterable[str], known: Iterable[str]) -> None:
    """Name the replacement of an argument of the oldest API, or the one that may be meant."""
    for name in names:
        if name in _OLD_ARGUMENTS:
            raise DeprecationWarning(
                f"TorchTrainer({name}=...) is no longer supported. Use {_OLD_ARGUMENTS[name]} "
                "instead."
            )
        raise unknown_argument("TorchTrainer", name, known)


def _checked_operator(operator_cls: Any) -> type[TrainingOperator]:
    if not (isinstance(operator_cls, type) and issubclass(operator_cls, TrainingOperator)):
        raise TypeError(
            "TorchTrainer(training_operator_cls=...) must be a subclass of "
            f"raysgd.TrainingOperator (the class, not an instance), but it is {operator_cls!r}."
        )
    if operator_cls.setup is TrainingOperator.setup:
        raise NotImplementedError(
            f"{operator_cls.__name__} does not override setup(self, config), in which models, "
            "optimizers and loaders are registered."
        )
    if issubclass(operator_cls, CreatorOperator) and not hasattr(operator_cls, "_model_creator"):
        raise TypeError(
            f"{operator_cls.__name__} has no creators yet: pass what "
            f"{operator_cls.__name__}.from_creators(model_creator, optimizer_creator, ...) returns."
        )
    warn_of_misspelling(operator_cls, TrainingOperator)
    return operator_cls


def _local_gpu(use_gpu: bool | str, resources: Mapping[str, float]) -> bool:
    """Say whether workers use GPUs where the first of several lives in the driver's process.

    That has none: Ray assigns GPUs to its own processes, and would give the same one to another.

    Raises:
        ValueError: if GPUs were asked for.
    """
    if use_gpu is True or "GPU" in resources:
        raise ValueError(
            "TorchTrainer(use_local=True, use_gpu=True) needs num_workers=1: of several workers "
            "the one in this process can be assigned no GPU. Leave use_local out, or pass "
            "use_gpu=False."
        )
    logger.warning(
        "Training on CPUs, although the cluster has GPUs: with use_local=True the first of several "
        "workers lives in this process, and can be assigned none."
    )
    return False


def _backends() -> list[str]:
    """Return the backends that torch can use."""
    return [name for name in backend_names() if name != "tensorflow"]


def _check_precision(use_fp16: Any, amp_dtype: Any) -> None:
    check_choice("TorchTrainer", "use_fp16", use_fp16, tuple(PRECISIONS))
    if amp_dtype is None:
        return
    if not isinstance(amp_dtype, torch.dtype) or amp_dtype not in _AMP_DTYPES:
        raise ValueError(
            f"TorchTrainer(amp_dtype={amp_dtype!r}): must be one of "
            f"{', '.join(str(dtype) for dtype in _AMP_DTYPES)}, or None."
        )
    if use_fp16 is not True:
        raise ValueError(
            f"TorchTrainer(amp_dtype={amp_dtype}, use_fp16={use_fp16!r}): amp_dtype is for native "
            "AMP; pass use_fp16=True with it."
        )


def __getattr__(name: str) -> Any:
    if name != "BaseTorchTrainable":  # where older scripts import it from; it needs Ray Tune
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("raysgd.tune").BaseTorchTrainable
