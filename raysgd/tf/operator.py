"""The class that users subclass to train Keras models: one epoch and one batch of it.

A worker runs, for each ``trainer.train()``::

    operator.train_epoch(iterator, info, num_steps, epoch_idx)
        for batch in iterator:                  # this worker's share of the training data
            operator.train_batch(batch, batch_info)
                self.minimize(loss_of, batch)       # gradients are averaged over the workers

and for each ``trainer.validate()`` ``operator.validate`` with ``operator.validate_batch``.
Override any of these, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from raysgd._internal.arguments import suggests
from raysgd._internal.nested import map_leaves
from raysgd.loop.operator_base import OperatorBase, checked_metrics, with_logged
from raysgd.metrics import NUM_SAMPLES

if TYPE_CHECKING:
    from raysgd.tf.train_state import KerasTrainState

__all__ = ["TrainingOperator"]


class TrainingOperator(OperatorBase):
    """Defines training for :class:`raysgd.TFTrainer`; one copy lives on each worker.

    Only `setup` must be overridden::

        class Classifier(TrainingOperator):
            def setup(self, config):
                model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
                self.model, self.optimizer, self.criterion = self.register(
                    models=model,
                    optimizers=keras.optimizers.Adam(config["lr"]),
                    criterion=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
                self.register_data(train_loader=..., validation_loader=...)

    The models may be Keras 3's or tf_keras's, on one worker and on several.
    """

    _train_state: KerasTrainState

    def __init__(self, config: Mapping[str, Any], train_state: KerasTrainState) -> None:
        super().__init__(config)
        self._train_state = train_state

    # ---- what users override

    def setup(self, config: dict[str, Any]) -> None:
        """Build models, optimizers and data, and register them. Must be overridden.

        Args:
            config: the trainer's config; ``config[BATCH_SIZE]`` is this worker's share.
        """
        raise NotImplementedError(f"{type(self).__name__} must override setup(self, config).")

    def train_epoch(
        self,
        iterator: Iterator[Any],
        info: dict[str, Any] | None = None,
        num_steps: int | None = None,
        epoch_idx: int = 0,
    ) -> dict[str, Any]:
        """Train on every batch of `iterator` and return the metrics.

        Args:
            iterator: this worker's batches. It ends after `num_steps` batches.
            info: what the caller of ``trainer.train(info=...)`` gave; an empty dict without.
            num_steps: number of batches that were asked for; None for a whole epoch.
            epoch_idx: epochs that were completed before this one.

        Returns:
            Metrics by name. Numbers are averaged over the workers, weighted by ``num_samples``.
        """
        if num_steps is None:
            self._train_state.data.check_end()
        meters = self._new_meters()
        for batch in self._in_parts(iterator):
            batch_info = self._batch_info(info, meters.num_batches, epoch_idx)
            with self._collecting_logged() as logged:
                metrics = self.train_batch(batch, batch_info)
            self._measure(meters, _plain(with_logged(logged, metrics)))
        return meters.summary()

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Train on one batch: forward, loss, gradients, update.

        Args:
            batch: ``(*features, target)`` or ``(features, target, sample_weight)``, tensors or
                arrays. Three parts have sample weights, unless the model has two inputs.
            batch_info: ``batch_idx``, ``global_step``, ``epoch_idx``, ``info``, and what is in it.

        Returns:
            ``train_loss``, the mean over the batch with what layers add to it, ``num_samples``, and
            ``train_<name>`` for each registered metric.

        Raises:
            RuntimeError: if model, optimizer or criterion is missing; operators with several
                models or optimizers need a ``train_batch`` of their own.
        """
        self._check_single()
        self._check_own_steps("train_batch")
        self._criterion()
        parts = self._train_state.unpacked(batch, training=True)
        loss, output, masks = self.minimize(self._loss_and_output, *parts)
        self._train_state.check_masks(masks)
        _, target, weights = parts
        return {
            "train_loss": loss,
            NUM_SAMPLES: _length(parts),
            **self._train_state.measured("train", target, _masked(output, masks), weights),
        }

    def validate(
        self, val_iterator: Iterator[Any], info: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Evaluate on every batch of `val_iterator`.

        The numbers of batches may differ between workers: nothing here may communicate.
        """
        meters = self._new_meters()
        for batch_idx, batch in enumerate(val_iterator):
            batch_info = self._batch_info(info, batch_idx, self._train_state.epoch)
            with self._collecting_logged() as logged:
                metrics = self.validate_batch(batch, batch_info)
            metrics = _plain(with_logged(logged, metrics))
            meters.update(*checked_metrics(self.validate_batch, metrics))
        return meters.summary()

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Evaluate one batch, as in `train_batch`.

        The model's output is in ``batch_info["output"]`` afterwards, for an override that adds
        metrics to those of ``super().validate_batch(batch, batch_info)``.

        Returns:
            ``val_loss``, ``num_samples``, ``val_<name>`` for each registered metric, and
            ``val_accuracy`` where the output is (batch, ..., classes) and the target whole
            numbers (batch, ...).
        """
        from raysgd.tf.losses import accuracy

        self._check_own_steps("validate_batch")
        self._criterion()
        parts = self._train_state.unpacked(batch, training=False)
        with self.timers.record("eval_fwd"):
            loss, output, masks = self.run(self._evaluated, *parts)
        batch_info["output"] = output = _masked(output, masks)
        _, target, weights = parts
        metrics = {"val_loss": loss, NUM_SAMPLES: _length(parts)}
        share = accuracy(target, output)
        if share is not None:
            metrics["val_accuracy"] = share
        return metrics | self._train_state.measured("val", target, output, weights)

    def predict_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        """Return what ``trainer.predict`` returns of a batch.

        Args:
            batch: as in `train_batch`, of which the default takes the features, or features alone:
                a tensor or ``(feature,)``.
            batch_info: as in `validate_batch`.

        Returns:
            The model's output. It has a row for each sample: a tensor, an array or a list, or a
            dict or tuple of them.
        """
        self._check_own_steps("predict_batch")
        features, _, _ = self._train_state.unpacked(batch, training=False)
        return self.run(self._predicted, features)

    def _predictions(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Yield what `predict_batch` returns for each batch, with arrays in place of tensors."""
        for batch_idx, batch in enumerate(iterator):
            batch_info = self._batch_info(None, batch_idx, self._train_state.epoch)
            output = self.predict_batch(batch, batch_info)
            yield map_leaves(output, lambda x: x.numpy() if hasattr(x, "numpy") else x)

    def state_dict(self) -> dict[str, Any]:
        """Return state of your own that is saved with the models: numbers, texts, arrays."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned.

        If it raises, the trainer refuses the state that is being loaded as a whole, and this is
        called once more, with what `state_dict` returned before.
        """

    # ---- what users call

    @suggests
    def register(
        self,
        models: Any,
        optimizers: Any = None,
        criterion: Any = None,
        metrics: Any = None,
        class_weight: Mapping[int, float] | None = None,
    ) -> Any:
        """Hand over what is trained; call it once, in `setup`.

        Args:
            models: a Keras model, or a list or tuple of them; all of one Keras. Of one that is
                compiled the optimizer, the loss and the metrics are taken.
            optimizers: an optimizer of the same Keras, or a list or tuple, one a model. Where there
                are more models or fewer, each is for the variables of all, unless you build it. Its
                learning rate may be a ``LearningRateSchedule``, which counts updates.
            criterion: the loss in any form that ``compile()`` takes: one of Keras, its name, a
                function of (target, output), or a list or dict with one for each output.
            metrics: metrics in any form that ``compile()`` takes; they are reset for each batch.
                They are exact over batches and workers.
            class_weight: weights of the classes in the training loss, as ``fit()`` takes them.

        Returns:
            (models, optimizers) and then criterion and metrics where there are some, each in the
            shape that it was given in. With ``use_fp16`` in float16 the optimizers are wrapped. The
            criterion is called as (target, output) and gives the plain mean over the batch.

        Raises:
            TypeError: if a model is no Keras model, or an optimizer none of Keras, or Horovod's.
            ValueError: if something is missing that the model was not compiled with.
            NotImplementedError: if the model has a ``train_step``, ``test_step`` or
                ``compute_metrics`` of its own, which the operator would not call.
        """
        from raysgd.tf.registration import register

        state = self._train_state
        found = register(state, models, optimizers, criterion, metrics, class_weight)
        if _is_default(self, "train_epoch", "train_batch"):
            self._check_own_steps("train_batch")
        if _is_default(self, "validate", "validate_batch"):
            self._check_own_steps("validate_batch")
        return found

    @suggests
    def register_data(
        self,
        *,
        train_loader: Any = None,
        validation_loader: Any = None,
        batch_size: int | None = None,
        shuffle: bool = True,
    ) -> None:
        """Hand over the data, in `setup`; a later call replaces those that it is given.

        A ``tf.data.Dataset`` of batches is shared out over the workers: at each step they take its
        next batches, one each. It must give the same on every worker; shuffles without a seed do.
        Arrays, ``(features, target)``, are shared out sample by sample. Any other iterable is left
        as it is: let each worker read its own part, by ``self.world_rank``.

        Args:
            train_loader: what to train on; its batches are ``(*features, target)``.
            validation_loader: what to evaluate on. No sample of it counts twice.
            batch_size: samples of a worker's batch of arrays; None: ``config[BATCH_SIZE]``, or 32.
            shuffle: whether to shuffle arrays anew for each epoch of training.
        """
        data = self._train_state.data
        data.batch_size, data.shuffle = batch_size, shuffle
        data.register(train_loader, validation_loader)

    def minimize(
        self,
        loss_of: Callable[..., Any],
        *tensors: Any,
        optimizer: Any = None,
        model: Any = None,
    ) -> Any:
        """Make one update that lowers a loss: the step of a ``train_batch`` of your own.

        The loss is computed in a graph; gradients are averaged over the
        workers, and applied on all of them or, where one fails, on none. Where a batch comes in
        parts, since workers are missing, they are kept until the last part.

        Args:
            loss_of: function of `tensors` that returns the mean loss of the batch, or a tuple that
                begins with it. It is traced: pass a method or a function that stays the same.
            tensors: its arguments; nests of tensors and arrays.
            optimizer: a registered optimizer; None: the only one.
            model: the model, or list of models, whose variables are trained; None: the only one.

        Returns:
            What `loss_of` returned.
        """
        train_state, timers = self._train_state, self.timers
        optimizer = self._the_only("optimizer") if optimizer is None else optimizer
        models = [self._the_only("model")] if model is None else model
        models = models if isinstance(models, list | tuple) else [models]
        variables = [variable for each in models for variable in each.trainable_variables]
        with timers.record("grad"):
            result, gradients = train_state.engine.gradients(loss_of, tensors, optimizer, variables)
        with timers.record("apply"):
            train_state.optimization.update(optimizer, gradients, variables)
        return result

    def run(self, function: Callable[..., Any], *tensors: Any) -> Any:
        """Run a function of tensors in a graph, without an update."""
        return self._train_state.engine.call(function, tensors)

    @property
    def strategy(self) -> Any:
        """The strategy that steps run under: TensorFlow's default one."""
        import tensorflow as tf

        return tf.distribute.get_strategy()

    # ---- helpers

    def _the_only(self, what: str) -> Any:
        held = self._train_state.models if what == "model" else self._train_state.optimizers
        if len(held) != 1:
            raise RuntimeError(
                f"{type(self).__name__} registered {len(held)} {what}s: pass minimize({what}=...)."
            )
        return held[0]

    def _check_own_steps(self, method: str) -> None:
        """Refuse models with a step of their own, which the default `method` does not call."""
        from raysgd.tf.keras import overrides

        for model in self._train_state.models:
            for name in _STEPS[method]:
                if overrides(model, name):
                    raise NotImplementedError(
                        f"{type(model).__name__} overrides {name}(), and the default {method} of "
                        f"{type(self).__name__} does not call it. Override {method} there and do "
                        "the same in it; self.minimize() makes updates. A compute_loss() of the "
                        "model is called."
                    )

    def _criterion(self) -> None:
        """See that there is a loss: one that the operator sets itself, if none was registered."""
        own = getattr(self, "criterion", None)
        if not self._train_state.needs_criterion:
            return
        if own is None:
            self._default("criterion")
        from raysgd.tf.losses import loss_function

        self._train_state.criterion = loss_function(self._train_state.keras, own)

    def _loss_and_output(self, features: Any, target: Any, weights: Any) -> Any:
        return self._forward(features, target, weights, training=True)

    def _evaluated(self, features: Any, target: Any, weights: Any) -> Any:
        return self._forward(features, target, weights, training=False)

    def _forward(self, features: Any, target: Any, weights: Any, training: bool) -> Any:
        """Return the loss, the output, and the masks of the output, which a graph would lose."""
        model = self._the_only("model")
        output = model(features, training=training)
        given = (features, target, output, weights)
        loss = self._train_state.total_loss(model, *given, training=training)
        masks = map_leaves(output, lambda tensor: getattr(tensor, "_keras_mask", None))
        return loss, output, masks

    def _predicted(self, features: Any) -> Any:
        return self._the_only("model")(features, training=False)


_STEPS = {
    "train_batch": ("train_step", "compute_metrics"),
    "validate_batch": ("test_step", "compute_metrics"),
    "predict_batch": ("predict_step",),
}
"""Methods of Keras models that are not called, by the default method that takes their place."""


def _is_default(operator: Any, *names: str) -> bool:
    return all(getattr(type(operator), name).__module__.startswith("raysgd.") for name in names)


def _plain(metrics: Any) -> Any:
    """Return metrics with arrays in place of tensors, which cannot be summed like them."""
    if not isinstance(metrics, Mapping):
        return metrics
    return {
        name: value.numpy() if hasattr(value, "numpy") and hasattr(value, "__array__") else value
        for name, value in metrics.items()
    }


def _masked(output: Any, masks: Any) -> Any:
    """Return an output with the masks that its tensors had in the graph."""
    import tensorflow as tf

    for tensor, mask in zip(tf.nest.flatten(output), tf.nest.flatten(masks), strict=True):
        if mask is not None:
            tensor._keras_mask = mask
    return output


def _length(parts: Any) -> int:
    """Return how many samples a batch has: the length of the target, or else of the features."""
    import tensorflow as tf

    features, target, _ = parts
    leaves = [leaf for leaf in tf.nest.flatten([target, features]) if leaf is not None]
    return int(leaves[0].shape[0])
