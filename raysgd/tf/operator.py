"""The class that users subclass to train Keras models.

For each ``trainer.train()``, a worker runs::

    operator.train_epoch(iterator, info, num_steps, epoch_idx)
        for batch in iterator:                  # this worker's part of the training data
            operator.train_batch(batch, batch_info)
                self.minimize(loss_fn, batch)       # averages gradients over the workers

For ``trainer.validate()``, a worker runs ``operator.validate`` with ``operator.validate_batch``.
Users can override any of these methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from raysgd._internal.arguments import as_int, check_flags, suggest_arguments
from raysgd._internal.nested import check_rows, map_leaves
from raysgd._internal.step_timing import BACKWARD, OPTIMIZER
from raysgd.loop.operator_base import OperatorBase, as_list

if TYPE_CHECKING:
    from raysgd.tf.train_state import KerasTrainState


class TrainingOperator(OperatorBase):
    """Defines training for :class:`raysgd.TFTrainer`. Each worker has an instance.

    Only `setup` must be overridden::

        class Classifier(TrainingOperator):
            def setup(self, config):
                model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
                self.model, self.optimizer, self.criterion = self.register(
                    models=model,
                    optimizers=keras.optimizers.Adam(config["lr"]),
                    criterion=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
                self.register_data(train_loader=..., validation_loader=...)
    """

    _train_state: KerasTrainState

    def __init__(self, config: Mapping[str, Any], train_state: KerasTrainState) -> None:
        super().__init__(config)
        self._train_state = train_state

    # ---- methods to override

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Train on one batch: forward, loss, gradients, update.

        Args:
            batch: Tensors or arrays ``(features, target)`` or ``(features, target,
                sample_weight)``, as for ``fit()``.
            batch_info: ``batch_idx``, ``global_step``, ``epoch_idx``, ``info``, and the keys of
                ``info``.

        Returns:
            ``train_loss``, the mean over the batch including losses of layers, ``num_samples``, and
            ``train_<name>`` for each registered metric.

        Raises:
            RuntimeError: If the model, optimizer, or criterion is missing, or there are several
                models or optimizers.
        """
        self._check_single()
        self._check_overridden_steps("train_batch")
        self._check_criterion()
        unpacked = self._train_state.losses.unpack(batch, training=True)
        loss, output, masks = self.minimize(self._forward, *unpacked, True)
        output = _set_masks(output, masks)
        return self._train_state.losses.compute_metrics("train", loss, unpacked, output)

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Evaluate one batch, with the arguments of `train_batch`.

        Store the model's output in ``batch_info["output"]``, for overrides that add metrics.

        Returns:
            ``val_loss``, ``num_samples``, and ``val_<name>`` for each registered metric.
        """
        self._check_overridden_steps("validate_batch")
        self._check_criterion()
        if not batch_info.get("batch_idx"):
            self._train_state.accept_changes()
        unpacked = self._train_state.losses.unpack(batch, training=False)
        with self.timers.record("eval_fwd"):
            loss, output, masks = self.run(self._forward, *unpacked, False)
        batch_info["output"] = output = _set_masks(output, masks)
        return self._train_state.losses.compute_metrics("val", loss, unpacked, output)

    def predict_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        """Return a row of output for each sample, for ``trainer.predict``. Lists become tuples.

        `batch` has a format of `train_batch`, or is a tensor or ``(feature,)`` without a target.
        """
        import keras

        from raysgd.tf.losses import count_samples

        self._check_overridden_steps("predict_batch")
        unpacked = self._train_state.losses.unpack(batch, training=False)
        output = keras.tree.lists_to_tuples(self.run(self._predict, unpacked[0]))
        check_rows(output, count_samples(unpacked))
        return output

    # ---- methods for user code

    @suggest_arguments
    def register(
        self,
        models: Any,
        optimizers: Any = None,
        criterion: Any = None,
        metrics: Any = None,
        class_weight: Mapping[int, float] | None = None,
    ) -> Any:
        """Register what to train. Call it once, in `setup`.

        Args:
            models: A Keras model, or a list or tuple of models. A compiled model brings its
                optimizer, loss, and metrics.
            optimizers: An optimizer, or a list or tuple with one per model. With more or fewer
                optimizers than models, each optimizer is built for the variables of all models,
                unless you build it. A ``LearningRateSchedule`` counts updates.
            criterion: Loss in any form that ``compile()`` takes.
            metrics: Metrics in any form that ``compile()`` takes.
            class_weight: Weights of the classes in the training loss, as in ``fit()``.

        Returns:
            (models, optimizers), then criterion and metrics if you passed them. Each is a single
            object, a list, or a tuple, like its argument. With float16, optimizers are wrapped to
            scale the loss. The criterion is a function of (target, output) that returns the mean
            over the batch.

        Raises:
            TypeError: If a model is not a Keras model, or an optimizer comes from Horovod.
            ValueError: If an argument is missing and the model is not compiled.
            NotImplementedError: If the operator would not call a ``train_step``, ``test_step``, or
                ``compute_metrics`` of the model.
        """
        from raysgd.tf.registration import register

        train_state = self._train_state
        registered = register(train_state, models, optimizers, criterion, metrics, class_weight)
        for loop, step in (("train_epoch", "train_batch"), ("validate", "validate_batch")):
            if _is_default(self, loop, step):
                self._check_overridden_steps(step)
        return registered

    @suggest_arguments
    def register_data(
        self,
        *,
        train_loader: Any = None,
        validation_loader: Any = None,
        batch_size: int | None = None,
        shuffle: bool = True,
    ) -> None:
        """Register the data. A later call replaces the data.

        At each step, each worker takes the next batch of a ``tf.data.Dataset``. The data set must
        yield the same batches on every worker. Shuffles without a seed do, because raysgd sets the
        seed. Arrays are partitioned by sample. Every worker reads all of any other iterable, so
        select a part by ``self.world_rank``.

        Args:
            train_loader: Training data, with batches of `train_batch`.
            validation_loader: Validation data. No sample counts twice.
            batch_size: Samples of a worker's batch of arrays, which other data has itself. None for
                ``config[BATCH_SIZE]``, or 32 without that key.
            shuffle: Whether to shuffle arrays in each epoch of training.
        """
        from raysgd.tf.sources import is_arrays

        check_flags("register_data", shuffle=shuffle)
        if batch_size is not None:
            batch_size = as_int("register_data", "batch_size", batch_size, lowest=1)
            if not any(map(is_arrays, (train_loader, validation_loader))):
                self._train_state.settings.warn_once(
                    "batch_size",
                    "register_data(batch_size=%d) does nothing, because only arrays have a batch "
                    "size. Call dataset.batch(n), or yield batches of n samples.",
                    batch_size,
                )
        data = self._train_state.data
        data.batch_size, data.shuffle = batch_size, shuffle
        data.register(train_loader, validation_loader)

    def minimize(
        self,
        loss_fn: Callable[..., Any],
        *tensors: Any,
        optimizer: Any = None,
        model: Any = None,
    ) -> Any:
        """Make one update that lowers a loss, in your own ``train_batch``.

        This method computes gradients in a graph, averages them over the workers, and applies them
        on all workers or on none. If a batch is split, its last micro-batch makes the update.

        Args:
            loss_fn: Function of `tensors` that returns the mean loss of the batch, or a tuple that
                begins with this loss. TensorFlow traces the function, so pass the same function or
                method each time.
            tensors: Arguments of `loss_fn`, which are nests of tensors and arrays.
            optimizer: A registered optimizer. None for the only registered one.
            model: The model, or list of models, to train. None for the only registered one.

        Returns:
            The result of `loss_fn`.
        """
        train_state = self._train_state
        optimizer = self._only_registered("optimizer") if optimizer is None else optimizer
        models = as_list(self._only_registered("model") if model is None else model)
        variables = [variable for each in models for variable in each.trainable_variables]
        with train_state.step_timing.within(BACKWARD):
            result, gradients = train_state.graphs.gradients(loss_fn, tensors, optimizer, variables)
        with train_state.step_timing.within(OPTIMIZER):
            train_state.optimization.step(optimizer, gradients, variables)
        return result

    def run(self, function: Callable[..., Any], *tensors: Any) -> Any:
        """Run a function of tensors in a graph, without an update."""
        return self._train_state.graphs.run(function, tensors)

    # ---- helpers

    def _begin_epoch(self, num_steps: int | None) -> None:
        # An override may call `train_epoch` without `num_steps`.
        if num_steps is None and getattr(self._train_state.segment, "max_steps", None) is None:
            self._train_state.data.check_end()

    def _only_registered(self, what: str) -> Any:
        registered = self._train_state.models if what == "model" else self._train_state.optimizers
        if len(registered) != 1:
            raise RuntimeError(
                f"{type(self).__name__} registered {len(registered)} {what}s. Pass "
                f"minimize({what}=...)."
            )
        return registered[0]

    def _check_overridden_steps(self, method: str) -> None:
        """Raise an error if a model overrides a step that the default `method` does not call."""
        from raysgd.tf.keras import overrides

        for model in self._train_state.models:
            for name in _REPLACED_STEPS[method]:
                if overrides(model, name):
                    raise NotImplementedError(
                        f"{type(model).__name__} overrides {name}(), but the default {method} of "
                        f"{type(self).__name__} does not call it. Override {method}, with "
                        "self.minimize() for updates, or compute_loss() of the model."
                    )

    def _check_criterion(self) -> None:
        losses = self._train_state.losses
        if losses.criterion is None and not losses.uses_model_loss:
            raise RuntimeError(
                f"{type(self).__name__} has no criterion. Pass it to register(criterion=...), or "
                "compile the model with a loss."
            )

    def _forward(self, features: Any, target: Any, weights: Any, training: bool) -> Any:
        """Return the loss, the output, and the masks of the output, which graphs drop."""
        output = self._only_registered("model")(features, training=training)
        loss = self._train_state.losses.compute_loss(features, target, output, weights, training)
        masks = map_leaves(output, lambda tensor: getattr(tensor, "_keras_mask", None))
        if training:  # when TensorFlow traces it
            self._train_state.warn_of_batch(loss, masks)
        return loss, output, masks

    def _predict(self, features: Any) -> Any:
        return self._only_registered("model")(features, training=False)


_REPLACED_STEPS = {
    "train_batch": ("train_step", "compute_metrics"),
    "validate_batch": ("test_step", "compute_metrics"),
    "predict_batch": ("predict_step",),
}
"""Methods of Keras models that a default method replaces."""


def _is_default(operator: Any, *names: str) -> bool:
    return all(getattr(type(operator), name).__module__.startswith("raysgd.") for name in names)


def _set_masks(output: Any, masks: Any) -> Any:
    import tensorflow as tf

    for tensor, mask in zip(tf.nest.flatten(output), tf.nest.flatten(masks), strict=True):
        if mask is not None:
            tensor._keras_mask = mask  # Keras has no public function for it
    return output
