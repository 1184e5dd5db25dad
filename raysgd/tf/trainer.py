"""The trainer for TensorFlow operators: its arguments, and what they mean."""

from __future__ import annotations

import importlib
import inspect
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

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
    suggests,
    unknown_argument,
)
from raysgd.backends import Backend, create_backend
from raysgd.callbacks.base import Callback
from raysgd.callbacks.run_folder import checked_logdir, trainer_callbacks
from raysgd.cluster.controller import Controller
from raysgd.cluster.worker_group import GroupOptions, WorkerGroup
from raysgd.comm.horovod import HorovodBackend, check_horovod
from raysgd.comm.tensorflow import check_tensorflow, keras_environment
from raysgd.config import check_batch_size, env_seconds
from raysgd.data import Dataset
from raysgd.elastic.config import ElasticConfig
from raysgd.loop.operator_base import warn_of_misspelling
from raysgd.tf.creators import CreatorOperator, creator_operator, fit_plan, renamed
from raysgd.tf.operator import TrainingOperator
from raysgd.tf.runner import TFRunner, TFRunnerOptions
from raysgd.trainer import OperatorTrainer

__all__ = ["TFTrainer"]

_PRECISIONS = (False, True, "mixed_float16", "mixed_bfloat16")


class TFTrainer(OperatorTrainer):
    """Trains a Keras model on one or several workers.

    Runs on the driver. It takes a :class:`raysgd.tf.TrainingOperator`::

        trainer = TFTrainer(training_operator_cls=Classifier, config={"lr": 0.1}, num_workers=4)

    or, as older scripts do, functions of the config that return a compiled model and data::

        trainer = TFTrainer(model_creator, data_creator, config=config, num_replicas=4)

    Methods, metrics, events and errors are those of :class:`raysgd.TorchTrainer`. Several workers
    are the replicas of a ``MultiWorkerMirroredStrategy``, whose members cannot change: after a
    loss, and to grow, all workers start anew with the state that those which are left have, or
    from the newest snapshot.

    Args:
        model_creator: function of the config that returns a compiled Keras model.
        data_creator: function of the config that returns a training and a validation data set.
            Their batches are those of the whole group; each worker gets its share of each.
        config: handed to the operator or the functions; may hold ``BATCH_SIZE``, and for the
            functions ``fit_config`` and ``evaluate_config``.
        num_replicas: ``num_workers``, as older scripts call it.
        num_cpus_per_worker: CPUs that each worker reserves, and threads that TensorFlow gets there.
        use_gpu: True: one GPU a worker; "auto": so if the cluster has GPUs.
        verbose: show a progress bar, as older scripts call ``use_tqdm``.
        training_operator_cls: a TrainingOperator subclass.
        initialization_hook: function of no arguments that every worker runs before anything else.
            With several workers it must not import TensorFlow.
        num_workers: the most workers. With 1 there is no strategy.
        min_workers: the fewest to start with, and to go on with after losses.
        resources_per_worker: further Ray resources of each worker.
        backend: "tensorflow", the strategy, or "horovod".
        timeout_s: bound, in seconds, of each collective (Horovod knows none) and of the workers'
            setup.
        use_fp16: mixed precision by Keras's policies. True: float16 on GPUs, bfloat16 on CPUs; or
            "mixed_float16", "mixed_bfloat16". With float16 the loss is scaled.
        use_tqdm: whether to show a progress bar.
        add_dist_sampler: whether to share a registered ``tf.data.Dataset`` out over the workers;
            arrays always are.
        use_local: whether the only worker lives in this process; Ray is not started then.
        elastic: what to do about workers that are lost or come back; the defaults need none.
        callbacks: observe every call of this trainer, see :class:`raysgd.callbacks.Callback`.
        logdir: folder of the run. None: nothing is written.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument has a value that is not allowed.
        ImportError: if TensorFlow, or Horovod where it is asked for, is not installed.
        InsufficientResourcesError: if the cluster has no room for `min_workers` in time.
        BaseException: what ``setup`` of the operator raised on a worker.
    """

    @suggests
    def __init__(
        self,
        model_creator: Callable[[dict[str, Any]], Any] | None = None,
        data_creator: Callable[[dict[str, Any]], Any] | None = None,
        config: Mapping[str, Any] | None = None,
        num_replicas: int | None = None,
        num_cpus_per_worker: float = 1,
        use_gpu: bool | str = False,
        verbose: bool = False,
        *,
        training_operator_cls: type[TrainingOperator] | None = None,
        initialization_hook: Callable[[], None] | None = None,
        num_workers: int | None = None,
        min_workers: int = 1,
        resources_per_worker: Mapping[str, float] | None = None,
        backend: str = "tensorflow",
        timeout_s: float = 1800,
        use_fp16: bool | str = False,
        use_tqdm: bool = False,
        add_dist_sampler: bool = True,
        use_local: bool = False,
        elastic: ElasticConfig | None = None,
        callbacks: Iterable[Callback] = (),
        logdir: str | os.PathLike[str] | None = None,
    ) -> None:
        name = "TFTrainer"
        check_tensorflow(name)
        environment = keras_environment()
        if backend == "horovod":
            check_horovod()
        config = checked_config(name, config)
        workers = _number_of_workers(num_workers, num_replicas)
        operator_cls = _operator(training_operator_cls, model_creator, data_creator)
        self._plan = fit_plan(config) if issubclass(operator_cls, CreatorOperator) else None
        check_hook(name, initialization_hook)
        check_workers(name, workers, min_workers)
        check_batch_size(config, workers)
        resources = checked_resources(name, resources_per_worker, num_cpus_per_worker)
        check_choice(name, "use_gpu", use_gpu, (True, False, "auto"))
        check_choice(name, "backend", backend, ("tensorflow", "horovod"))
        check_choice(name, "use_fp16", use_fp16, _PRECISIONS)
        check_flags(
            name,
            verbose=verbose,
            use_tqdm=use_tqdm,
            add_dist_sampler=add_dist_sampler,
            use_local=use_local,
        )
        check_timeout(name, timeout_s)
        if use_local and workers > 1:
            raise ValueError(
                f"TFTrainer(use_local=True, num_workers={workers}): a strategy has to be set up "
                "before TensorFlow is first used in a process, and the driver's has used it. Use "
                "one worker, or leave use_local out."
            )
        elastic = checked_elastic(name, elastic, workers)
        folder = checked_logdir(logdir)
        attached = trainer_callbacks(name, callbacks, use_tqdm or verbose, folder)
        gpu = decide_gpu(name, use_gpu, resources, _own_gpus if use_local else None)
        options = GroupOptions(
            num_workers=workers,
            min_workers=elastic.min_workers or min_workers,
            num_cpus=num_cpus_per_worker,
            num_gpus=resources.pop("GPU", 1) if gpu else 0,
            resources=resources,
            use_local=use_local,
            start_timeout_s=env_seconds("SGD_PLACEMENT_GROUP_TIMEOUT_S", 100.0),
        )
        runner = TFRunner(
            TFRunnerOptions(
                operator_cls=operator_cls,
                config=config,
                seed=secrets.randbelow(2**31),
                use_gpu=gpu,
                use_horovod=backend == "horovod",
                use_fp16=use_fp16,
                add_dist_sampler=add_dist_sampler,
                use_tqdm=use_tqdm,
                splits_batches=self._plan is not None,
                timeout_s=timeout_s,
                snapshot_every=elastic.snapshot_every,
                environment=environment,
            )
        )
        controller = Controller(
            WorkerGroup(options, runner.imports),
            runner,
            _backend(backend, timeout_s) if workers > 1 else None,
            initialization_hook,
            timeout_s,
            elastic,
            rejoins=workers == 1,
        )
        super().__init__(config, controller, operator_cls.__qualname__, attached, folder)

    @suggests
    def train(
        self,
        num_steps: int | None = None,
        profile: bool = False,
        reduce_results: bool = True,
        max_retries: int = 3,
        info: dict[str, Any] | None = None,
        dataset: Dataset | None = None,
    ) -> Any:
        """Train for one epoch, or for the rest of one; see :meth:`raysgd.TorchTrainer.train`.

        Made from functions, the trainer trains for ``fit_config["epochs"]`` epochs of
        ``fit_config["steps_per_epoch"]`` steps, and returns the metrics of the last one.
        """
        arguments: dict[str, Any] = {
            "profile": profile,
            "reduce_results": reduce_results,
            "max_retries": max_retries,
            "info": info,
            "dataset": dataset,
        }
        if self._plan is None or num_steps is not None:
            return super().train(num_steps, **arguments)
        result: Any = None
        for _ in range(self._plan.epochs):
            result = super().train(self._plan.steps_per_epoch, **arguments)
        return result

    @suggests
    def validate(
        self,
        num_steps: int | None = None,
        profile: bool = False,
        reduce_results: bool = True,
        info: dict[str, Any] | None = None,
    ) -> Any:
        """Evaluate on the validation data; see :meth:`raysgd.TorchTrainer.validate`.

        Made from functions, the trainer calls the metrics ``validation_<name>``, and evaluates
        ``evaluate_config["steps"]`` steps.
        """
        if self._plan is None:
            return super().validate(num_steps, profile, reduce_results, info)
        steps = self._plan.evaluate_steps if num_steps is None else num_steps
        result = super().validate(steps, profile, reduce_results, info)
        return renamed(result) if reduce_results else [renamed(each) for each in result]

    def get_model(self, to_cpu: bool = False) -> Any:
        """Return a copy of the model, or of the list of models, in this process.

        Args:
            to_cpu: there for scripts that train with PyTorch as well; the copy is where
                TensorFlow puts it.

        Raises:
            TypeError: if Keras cannot tell how the model is made (``get_config``).
        """
        del to_cpu
        from raysgd.tf.models import assembled

        portable = self._call("models", rank=0, max_losses=3, any_size=True)[0]
        models = [assembled(each) for each in portable]
        return models[0] if len(models) == 1 else models

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Take over the state in a file; `load`, as older scripts call it."""
        self.load(path)

    def _saved_weights(self) -> Any:
        weights: list[dict[str, Any]] = self._call("weights", rank=0, max_losses=3, any_size=True)[
            0
        ]
        if len(weights) == 1:
            return weights[0]
        return {f"{n}.{key}": a for n, arrays in enumerate(weights) for key, a in arrays.items()}

    @classmethod
    def as_trainable(
        cls,
        *,
        override_tune_step: Callable[[Any, dict[str, Any]], dict[str, Any]] | None = None,
        **trainer_kwargs: Any,
    ) -> type[Any]:
        """Return a ``ray.tune.Trainable`` subclass that trains with such a trainer.

        See :meth:`raysgd.TorchTrainer.as_trainable`.

        Args:
            override_tune_step: function of two arguments, the trainer and ``{"iteration": n}``,
                that returns the metrics of one step.
            trainer_kwargs: arguments of the trainer, by name.

        Raises:
            RuntimeError: if Ray Tune is not installed.
            TypeError: if an argument is unknown.
            ValueError: if `override_tune_step` does not take two arguments.
        """
        known = inspect.signature(cls).parameters
        for name in trainer_kwargs:
            if name not in known:
                raise unknown_argument("TFTrainer", name, known)
        if "num_replicas" in trainer_kwargs:
            trainer_kwargs["num_workers"] = trainer_kwargs.pop("num_replicas")
        tune = importlib.import_module("raysgd.tune")  # a layer above
        trainable: type[Any] = tune.trainable_class(
            tune.TFTrainable, cls, override_tune_step, trainer_kwargs
        )
        return trainable


def _number_of_workers(num_workers: int | None, num_replicas: int | None) -> int:
    if num_workers is not None and num_replicas is not None and num_workers != num_replicas:
        raise ValueError(
            f"TFTrainer(num_workers={num_workers}, num_replicas={num_replicas}): two names of one "
            "argument; pass num_workers alone."
        )
    given = num_replicas if num_workers is None else num_workers
    return 1 if given is None else given


def _operator(operator_cls: Any, model_creator: Any, data_creator: Any) -> type[TrainingOperator]:
    if operator_cls is None and model_creator is not None:
        return creator_operator(model_creator, data_creator)
    if model_creator is not None or data_creator is not None:
        raise TypeError(
            "TFTrainer takes training_operator_cls, or model_creator and data_creator, not both."
        )
    if not (isinstance(operator_cls, type) and issubclass(operator_cls, TrainingOperator)):
        raise TypeError(
            "TFTrainer(training_operator_cls=...) must be a subclass of "
            f"raysgd.tf.TrainingOperator (the class, not an instance), but it is {operator_cls!r}."
        )
    if operator_cls.setup is TrainingOperator.setup:
        raise NotImplementedError(
            f"{operator_cls.__name__} does not override setup(self, config), in which the model "
            "and the data are registered."
        )
    warn_of_misspelling(operator_cls, TrainingOperator)
    return operator_cls


def _backend(name: str, timeout_s: float) -> Backend:
    if name == "horovod":
        return HorovodBackend(name, timeout_s, framework="tensorflow")
    return create_backend(name, timeout_s)


def _own_gpus() -> bool:
    import tensorflow as tf

    return bool(tf.config.list_physical_devices("GPU"))
