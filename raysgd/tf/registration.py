"""Check and wrap what a Keras operator registers."""

from itertools import compress
from typing import Any

import keras
import tensorflow as tf

from raysgd._internal.arguments import as_dict
from raysgd._internal.nonfinite import nonfinite_arrays
from raysgd.loop.operator_base import as_list, in_shape_of
from raysgd.tf.features import KerasOptimization, ReplicaSync
from raysgd.tf.keras import arrays_of, policy_name
from raysgd.tf.layer_state import flat_layers
from raysgd.tf.losses import BatchLosses, compiled_objects, losses_without_means
from raysgd.tf.train_state import KerasTrainState


def register(
    train_state: KerasTrainState,
    models: Any,
    optimizers: Any,
    criterion: Any,
    metrics: Any,
    class_weight: Any,
) -> Any:
    """See :meth:`TrainingOperator.register`."""
    if train_state.is_registered:
        raise RuntimeError("register() was called twice. Pass lists to register several models.")
    train_state.models = _as_models(models, train_state.settings.options.num_workers)
    if any(model.run_eagerly for model in train_state.models):
        tf.config.run_functions_eagerly(True)
    model = train_state.models[0]
    of_model = [each is None for each in (optimizers, criterion, metrics)]
    train_state.get_compiled_objects = lambda: [*compress(compiled_objects(model), of_model)]
    train_state.compiled_objects_at_register = train_state.get_compiled_objects()
    if optimizers is None:
        optimizers = getattr(model, "optimizer", None)
        if optimizers is None or isinstance(models, list | tuple):
            raise ValueError(
                "register(models=..., optimizers=None) needs one compiled model. Call "
                "model.compile(optimizer=..., loss=...) before, or pass optimizers."
            )
    train_state.optimizers = [_as_optimizer(train_state, each) for each in as_list(optimizers)]
    class_weights = as_dict("register", "class_weight", class_weight)
    if texts := [key for key in class_weights if isinstance(key, str)]:
        raise TypeError(
            f"register(class_weight={class_weight!r}): keys must be numbers of classes, such as 0, "
            f"but {texts[0]!r} is text."
        )
    train_state.losses = BatchLosses(model, criterion, metrics, class_weights)
    losses = getattr(model, "loss", None) if criterion is None else criterion
    for loss in losses_without_means(losses):
        train_state.warn_of_loss(f"The loss {loss} is not a mean over samples.")
    train_state.optimization = KerasOptimization(train_state)
    sync, micro_batching = ReplicaSync(train_state), train_state.micro_batching
    train_state.set_features([sync, train_state.optimization, micro_batching])
    train_state.is_registered = True
    registered = (
        in_shape_of(models, train_state.models),
        in_shape_of(optimizers, train_state.optimizers),
        train_state.losses.criterion,
        metrics,
    )
    return tuple(each for each in registered if each is not None)


def _as_models(models: Any, num_workers: int) -> list[keras.Model]:
    given = as_list(models)
    if not given:
        raise ValueError("register(models=...) is empty. Pass at least one.")
    for model in given:
        if not isinstance(model, keras.Model):
            raise TypeError(
                f"register(models=...) takes one or a list of Keras 3 models, not {model!r:.200}."
            )
        for layer in flat_layers(model) if num_workers > 1 else ():
            if getattr(layer, "synchronized", False):
                raise NotImplementedError(
                    f"TFTrainer does not synchronize the statistics of {layer.name!r} over the "
                    "workers. Pass synchronized=False to this layer."
                )
            if getattr(layer, "stateful", False):
                raise NotImplementedError(
                    f"{layer.name!r} keeps states of rows from batch to batch, but several workers "
                    "divide batches. Pass stateful=False to this layer, or use one worker."
                )
    return given


def _as_optimizer(train_state: KerasTrainState, optimizer: Any) -> Any:
    optimizer = keras.optimizers.get(optimizer)
    if type(optimizer).__module__.startswith("horovod"):
        raise TypeError(
            "register(optimizers=...) got Horovod's DistributedOptimizer, but TFTrainer averages "
            "the gradients. Pass the inner optimizer, and backend='horovod' to the trainer."
        )
    scaling = keras.mixed_precision.LossScaleOptimizer
    is_float16 = policy_name(train_state.settings.options.use_fp16) == "mixed_float16"
    return scaling(optimizer) if is_float16 and not isinstance(optimizer, scaling) else optimizer


def build_registered(train_state: KerasTrainState) -> None:
    """Build unbuilt models and optimizers, with the shapes of the data."""
    models, data = train_state.models, train_state.data
    if train_state.get_compiled_objects() != train_state.compiled_objects_at_register:
        raise RuntimeError(
            "setup compiled a model after register(), which had taken its optimizer, loss, or "
            "metrics. Call compile() first."
        )
    # `build` of a subclassed model may leave its layers unbuilt.
    if len(models) == 1 and not (models[0].built and models[0].weights):
        sources = map(data.source, filter(data.has, ("train", "validation")))
        spec = next((source.batch_spec() for source in sources if source.is_partitioned), None)
        if spec is not None:
            features, *_ = keras.utils.unpack_x_y_sample_weight(spec)
            sample = tf.nest.map_structure(
                lambda spec: tf.zeros([1, *(n or 1 for n in spec.shape[1:])], spec.dtype), features
            )
            train_state.models[0](sample)
    for model in train_state.models:
        if not model.built:
            raise RuntimeError(
                f"The model {model.name!r} is not built. Add an Input layer, or call the model "
                "once in setup."
            )
    for optimizer, variables in train_state.list_trained():
        if not optimizer.built:
            optimizer.build(variables)
    names = ("model", "optimizer", "criterion", "metrics")
    given = {name: train_state.attributes.get(name) for name in names}
    train_state.registered_at_setup = {k: v for k, v in given.items() if v is not None}
    train_state.compile_arguments_at_setup = train_state.compile_arguments()
    train_state.nonfinite_weights = _find_nonfinite(train_state.models)


def _find_nonfinite(models: list[Any]) -> list[str]:
    """Return the names of weights that are not trained and not finite, such as masks."""
    untrained = []
    for model in models:
        named = zip(arrays_of(model.weights).items(), model.weights, strict=True)
        untrained.append({name: array for (name, array), w in named if not w.trainable})
    return [*nonfinite_arrays({"models": untrained})]
