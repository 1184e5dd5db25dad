"""The trainer for TensorFlow operators."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from raysgd._internal.arguments import as_dict, as_int, check_flags
from raysgd._internal.forwarding import forward_to
from raysgd._internal.imports import load_triton_first
from raysgd._internal.tracebacks import fold_tracebacks
from raysgd.callbacks.base import Callback
from raysgd.comm.tensorflow import check_tensorflow
from raysgd.driver.operator_trainer import OperatorTrainer
from raysgd.driver.properties import option_property
from raysgd.elastic.config import ElasticConfig
from raysgd.loop.creators import Creators, creator_class
from raysgd.loop.operator_base import check_operator
from raysgd.tf.operator import TrainingOperator
from raysgd.tf.options import KerasOptions
from raysgd.tf.runner import KerasRunner

_LIMIT_KEYS = {
    "fit_config": ("epochs", "steps_per_epoch", "class_weight", "verbose"),
    "evaluate_config": ("steps", "verbose"),
}


@fold_tracebacks
class TFTrainer(OperatorTrainer):
    """Trains a Keras model on one or several workers.

    The trainer runs on the driver, and takes a :class:`raysgd.tf.TrainingOperator`::

        trainer = TFTrainer(training_operator_cls=Classifier, config={"lr": 0.1}, num_workers=4)

    Older scripts pass functions of the config that return a compiled model and data::

        trainer = TFTrainer(model_creator, data_creator, config=config, num_replicas=4)

    Methods, metrics, events, and other arguments are those of :class:`raysgd.TorchTrainer`. With
    Horovod, all workers restart if a worker is lost or added.

    Args:
        model_creator: Function of the config that returns a compiled Keras model.
        data_creator: Function of the config that returns a training and a validation data set. All
            workers share each batch of these data sets.
        config: Config of the operator or the functions. It can have ``BATCH_SIZE``, and for the
            functions ``fit_config`` and ``evaluate_config``.
        num_replicas: Older name of ``num_workers``.
        verbose: Older name of ``use_tqdm``.
        training_operator_cls: A TrainingOperator subclass.
        backend: "gloo" or "horovod". "tensorflow" means "gloo".
        use_fp16: Mixed precision by Keras policies: "mixed_float16", "mixed_bfloat16", or True for
            float16 on GPUs and bfloat16 on CPUs. With float16, the loss is scaled.
        add_dist_sampler: Whether the workers divide a registered ``tf.data.Dataset``. They always
            divide arrays.

    Raises:
        ImportError: If TensorFlow, or Horovod for ``backend="horovod"``, is not installed.
    """

    _options_cls = KerasOptions

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
        backend: str = "gloo",
        timeout_s: float = 1800,
        use_fp16: bool | str = False,
        use_tqdm: bool = False,
        add_dist_sampler: bool = True,
        use_local: bool = False,
        elastic: ElasticConfig | None = None,
        callbacks: Iterable[Callback] = (),
        logdir: str | os.PathLike[str] | None = None,
    ) -> None:
        check_tensorflow("TFTrainer")
        load_triton_first()
        check_flags("TFTrainer", verbose=verbose, use_tqdm=use_tqdm)
        operator_cls = _resolve_operator(training_operator_cls, model_creator, data_creator)
        has_creators = issubclass(operator_cls, KerasCreators)
        options = KerasOptions.from_arguments(
            locals(),
            training_operator_cls=operator_cls,
            num_workers=number_of_workers(num_workers, num_replicas),
            use_tqdm=use_tqdm or verbose,
            divides_batches=has_creators,
        )
        self._limits = fit_limits(options.config) if has_creators else None
        super().__init__(options, KerasRunner, initialization_hook, callbacks, logdir)

    def train(  # type: ignore[override]  # without data sets of raysgd
        self,
        num_steps: int | None = None,
        profile: bool = False,
        reduce_results: bool = True,
        max_retries: int = 3,
        info: dict[str, Any] | None = None,
    ) -> Any:
        """Train for one epoch, or for the rest of it. See :meth:`raysgd.TorchTrainer.train`.

        With creator functions, train ``fit_config["epochs"]`` epochs of
        ``fit_config["steps_per_epoch"]`` steps, and return the metrics of the last epoch. The
        epochs of ``fit(num_epochs)`` are those of the data.
        """
        arguments = (profile, reduce_results, max_retries, info)
        if self._limits is None or num_steps is not None or self.num_epochs is not None:
            return super().train(num_steps, *arguments)
        last_step = self._reporter.fit_arguments.max_steps  # None outside of fit
        for _ in range(self._limits["epochs"] or 1):
            result = super().train(self._limits["steps_per_epoch"], *arguments)
            if last_step and (self.global_step == last_step or self.stop_reason is not None):
                break
        return result

    def validate(
        self,
        num_steps: int | None = None,
        profile: bool = False,
        reduce_results: bool = True,
        info: dict[str, Any] | None = None,
    ) -> Any:
        """Evaluate on the validation data. See :meth:`raysgd.TorchTrainer.validate`.

        With creator functions, evaluate the first ``evaluate_config["steps"]`` steps, and name
        metrics ``validation_<name>``.
        """
        if self._limits is None:
            return super().validate(num_steps, profile, reduce_results, info)
        steps = self._limits["steps"] if num_steps is None else num_steps
        run = self._dispatcher.validate(info, steps, profile, from_start=num_steps is None)
        if not reduce_results:
            return [use_old_names(each) for each in run.by_worker]
        return use_old_names(run.metrics)

    def get_model(self, to_cpu: bool = False) -> Any:
        """Return a copy of the model, or of the list of models, in this process.

        `to_cpu` is ignored. Raise TypeError if Keras cannot serialize the model (``get_config``).
        """
        from raysgd.tf.keras import from_portable

        models = [from_portable(each) for each in self._transfer.models()]
        return models[0] if len(models) == 1 else models

    # ---- older names

    num_replicas: int = forward_to("max_workers", "Older name of ``max_workers``.")
    verbose: bool = forward_to("use_tqdm", "Older name of ``use_tqdm``.")
    model_creator = option_property("training_operator_cls._model_creator")
    data_creator = option_property("training_operator_cls._data_creator")

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Load a file of `save`. This is the older name of `load`."""
        self.load(path)

    @classmethod
    def _trial_arguments(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        arguments = super()._trial_arguments(arguments)
        creators = (arguments.get("model_creator"), arguments.get("data_creator"))
        _resolve_operator(arguments.get("training_operator_cls"), *creators)
        if "num_replicas" in arguments:
            arguments["num_workers"] = arguments.pop("num_replicas")
        return arguments


# ---- creator functions, and their config and metrics, as in older scripts


class KerasCreators(Creators):
    """The methods of an operator whose creators return a compiled model and data sets."""

    def setup(self, config: dict[str, Any]) -> None:
        class_weight = (config.get("fit_config") or {}).get("class_weight")
        model = self._model_creator(config)
        self.model, self.optimizer, *_ = self.register(model, class_weight=class_weight)
        self._create_data(config)


def number_of_workers(num_workers: int | None, num_replicas: int | None) -> int:
    """Return the number that an argument with two names asks for."""
    number = num_replicas if num_workers is None else num_workers
    if num_replicas not in (None, number):
        raise ValueError(
            f"TFTrainer(num_workers={num_workers}, num_replicas={num_replicas}) got two values for "
            "one argument with two names. Pass only num_workers."
        )
    return 1 if number is None else number


def fit_limits(config: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the numbers of epochs and steps in ``fit_config`` and ``evaluate_config``."""
    limits: dict[str, int | None] = {}
    for name, known in _LIMIT_KEYS.items():
        settings = as_dict("config", name, config.get(name))
        if unknown := [key for key in settings if key not in known]:
            raise ValueError(
                f"config[{name!r}] has unknown keys: {', '.join(map(repr, unknown))}. It can have "
                f"{', '.join(map(repr, known))}. Set the batch size in data_creator, and pass "
                "callbacks to TFTrainer(callbacks=...)."
            )
        for key in ("epochs", "steps_per_epoch", "steps"):
            if key in known:
                count = settings.get(key)
                limits[key] = None if count is None else as_int(name, key, count, lowest=1)
    return limits


def use_old_names(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a validation with the names of older scripts, including ``loss``."""
    renamed = {
        f"validation_{name.removeprefix('val_')}" if name.startswith("val_") else name: value
        for name, value in metrics.items()
    }
    if "validation_loss" in renamed:
        renamed["loss"] = renamed["validation_loss"]
    return renamed


def _resolve_operator(operator_cls: Any, model_creator: Any, data_creator: Any) -> Any:
    if operator_cls is None and model_creator is not None:
        creators = {"model_creator": model_creator, "data_creator": data_creator}
        bases = (KerasCreators, TrainingOperator)
        return creator_class("TFTrainer", bases, creators, required=("model_creator",))
    if model_creator is not None or data_creator is not None:
        raise TypeError(
            "TFTrainer takes training_operator_cls, or model_creator and data_creator, not both."
        )
    check_operator("TFTrainer", operator_cls, TrainingOperator, "raysgd.tf.TrainingOperator")
    return operator_cls
