"""The base of operators of all frameworks."""

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from raysgd._internal.arguments import check_number
from raysgd._internal.forwarding import forward_to
from raysgd._internal.nested import try_copy
from raysgd._internal.timers import TimerCollection
from raysgd.loop.metrics_recorder import optimizer_metrics
from raysgd.loop.segment import Segment, allow_split
from raysgd.loop.train_state import TrainState
from raysgd.loop.update import MicroBatchMetrics
from raysgd.metrics import NUM_SAMPLES, AverageMeterCollection, to_cpu_value

logger = logging.getLogger(__name__)

NUM_STEPS = "__num_steps__"
"""Key of ``info``: requested number of batches; None for the whole epoch."""
SCHEDULER_STEP = "scheduler_step"
"""Key of ``info``: the trainer's ``scheduler_step_freq``."""
USE_FP16 = "__use_fp16__"
"""Key of ``info``: whether training runs in mixed precision."""
_INFO_KEYS = (NUM_STEPS, SCHEDULER_STEP, USE_FP16)


class OperatorBase:
    """The properties and methods that operators of all frameworks offer to users."""

    _train_state: TrainState
    scheduler_step_freq: str | None = None
    step_schedulers: Callable[[], None]
    train_batch: Callable[..., Any]
    validate_batch: Callable[..., Any]
    predict_batch: Callable[..., Any]

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = dict(config)

    config: dict[str, Any] = forward_to(
        "_config", "The trainer's config; ``config[BATCH_SIZE]`` is this worker's part."
    )
    world_rank: int = forward_to(
        "_train_state.context.world_rank", "Rank of this worker among all workers."
    )
    local_rank: int = forward_to(
        "_train_state.context.local_rank", "Rank of this worker among the workers of its node."
    )
    world_size: int = forward_to("_train_state.context.world_size", "Current number of workers.")
    use_tqdm: bool = forward_to(
        "_train_state.settings.options.use_tqdm", "Whether the trainer shows a progress bar."
    )
    timers: TimerCollection = forward_to(
        "_train_state.timers", "Timers of this call, see :class:`raysgd.utils.TimerCollection`."
    )

    @property
    def use_fp16(self) -> bool:
        """Whether training runs in mixed precision."""
        return self._train_state.settings.options.use_fp16 is not False

    @property
    def global_step(self) -> int:
        """Number of finished training steps, over all epochs and calls.

        With gradient accumulation, the number grows by a whole group at each update, and
        ``batch_info["global_step"]`` numbers each batch. Set the number only in a loop that draws
        no batch from its iterator.
        """
        step = self._train_state.position.global_step
        at_step, value = self._train_state.user_set_step or (step, step)
        return value if at_step == step else step

    @global_step.setter
    def global_step(self, value: int) -> None:
        self._train_state.user_set_step = self._train_state.position.global_step, value

    if TYPE_CHECKING:
        train_loader: Any
        """This worker's part of the registered train loader."""
        validation_loader: Any
        """This worker's part of the registered validation loader."""
        steps_per_epoch: int
        """Training steps per epoch, available after `register_data`. With gradient accumulation,
        several steps make one update."""

    def __getattr__(self, name: str) -> Any:
        if name in ("train_loader", "validation_loader"):
            return self._train_state.data.source(name.removesuffix("_loader"))
        if name == "steps_per_epoch":
            source = self._train_state.data.source("train")
            if (steps := source.steps_left(0)) is not None:
                return steps
            raise RuntimeError(
                f"steps_per_epoch: the train loader, a {type(source.loader).__name__}, has no "
                "length. Define its __len__, or do not use steps_per_epoch."
            )
        if isinstance(of_user := getattr(type(self), name, None), property):
            return of_user.__get__(self)  # raises the AttributeError that led here
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # ---- methods to override

    def setup(self, config: dict[str, Any]) -> None:
        """Create models, optimizers, and data, and register them.

        ``config[BATCH_SIZE]`` is this worker's part of the global batch.
        """
        raise NotImplementedError(f"{type(self).__name__} must override setup(self, config).")

    def state_dict(self) -> dict[str, Any]:
        """Return state of your own, which raysgd saves with the models and sends to new workers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`.

        If this raises, the trainer loads nothing, and calls this method again with the previous
        state.
        """

    def on_world_change(self) -> None:
        """Create objects that depend on the group of workers. Override this method if you need it.

        All workers call it together after `setup` and after each change of the group, before the
        next step. Create your own process groups here (``torch.distributed.new_group``). Register
        loaders that select a part by rank here, with ``register_data``. This method may call
        collectives. (`setup` of a replacement worker runs alone, in a group of one.)
        """

    def describe_data(self) -> dict[str, str]:
        """Return how the workers read each registered loader, and where a resumed run begins."""
        return self._train_state.data.describe()

    def train_epoch(
        self,
        iterator: Iterator[Any],
        info: dict[str, Any] | None = None,
        num_steps: int | None = None,
        epoch_idx: int = 0,
    ) -> dict[str, Any]:
        """Train on every batch of `iterator`, and return the metrics by name.

        An override must step the schedulers of PyTorch. It may have the older signature ``(self,
        iterator, info)``.

        Args:
            iterator: This worker's batches, or parts of them. It ends after `num_steps` batches.
            info: The `info` of ``trainer.train``, and the keys of ``raysgd.torch.constants``.
            num_steps: Requested number of batches. None for a whole epoch.
            epoch_idx: Number of completed epochs.
        """
        self._begin_epoch(num_steps)
        train_state = self._train_state
        meters = train_state.meters = AverageMeterCollection()
        step, start_step = train_state.position.global_step, train_state.call.start_step
        batch_idx = 0 if train_state.segment is None else step - start_step
        per_batch = self.scheduler_step_freq == "batch"
        for batch in allow_split(iterator):
            batch_info = self._batch_info(info, batch_idx, epoch_idx, iterator)
            try:
                self._hold_metrics(self.train_batch(batch, batch_info))
            except BaseException:
                if per_batch and train_state.update.should_commit(raised=True):
                    self.step_schedulers()  # the step counts as done
                raise
            if not batch_idx:
                self._check_first_batch(batch)
            batch_idx += train_state.update.micro_batch.ends_step
            if per_batch and train_state.update.in_last_micro_batch:
                self.step_schedulers()
        if self.scheduler_step_freq == "epoch" and self._loop_ends_epoch():
            self.step_schedulers()
        return self._finish_epoch(meters)

    def validate(
        self, val_iterator: Iterator[Any], info: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Evaluate on every batch of `val_iterator`, in eval mode without gradients.

        If `train_epoch` calls this method, training continues in the modes of before. Workers may
        have different numbers of batches, so do not call collectives in this method.
        """
        train_state = self._train_state
        before, meters = train_state.meters, AverageMeterCollection()
        is_training = train_state.segment is not None  # `train_epoch` may call this method
        if not is_training:
            train_state.meters = meters
        # Within an epoch of training, the loop has not prepared the evaluation.
        evaluating = train_state.evaluating if is_training else contextlib.nullcontext
        try:
            with train_state.step_timing.paused(), evaluating(), self._eval_mode():
                for batch_idx, batch in enumerate(val_iterator):
                    batch_info = self._batch_info(info, batch_idx, iterator=val_iterator)
                    result = self.validate_batch(batch, batch_info)
                    metrics = as_metrics(self.validate_batch, result)
                    meters.update(metrics, metrics.get(NUM_SAMPLES, 1))
        finally:
            if is_training:
                train_state.restore_modes()
            elif before is not None:  # user code calls `train_epoch`, which may call this method
                train_state.meters = before
        return meters.summary()

    # ---- for callbacks and trials

    _registered_models: list[Any] = forward_to("_train_state.registered_models")
    _initial_hyperparameters: Callable[[], Any] = forward_to("_train_state.initial_hyperparameters")
    _rescale_hyperparameters: Callable[..., None] = forward_to(
        "_train_state.rescale_hyperparameters"
    )

    def _learning_rates(self) -> dict[str, float]:
        return optimizer_metrics(self._train_state.optimizers, {})

    # ---- for subclasses

    def _begin_epoch(self, num_steps: int | None) -> None:
        """Prepare an epoch of the default `train_epoch`."""

    def _check_first_batch(self, batch: Any) -> None:
        """Check the first batch of a call, after its step."""

    def _eval_mode(self) -> contextlib.AbstractContextManager[object]:
        """Set eval mode, and return a context for evaluating batches."""
        return contextlib.nullcontext()

    def _loop_ends_epoch(self) -> bool:
        # A loop that drew nothing from its iterator has its own batches. They count as an epoch.
        segment = self._train_state.segment
        return segment is None or not segment.was_read or segment.ends_epoch

    def _batch_info(
        self, info: dict[str, Any] | None, batch_idx: int, epoch_idx: int = 0, iterator: Any = None
    ) -> dict[str, Any]:
        return {
            **(info or {}),
            "batch_idx": batch_idx,
            NUM_SAMPLES: getattr(
                iterator, "num_collated_samples", None
            ),  # None if user code wraps it
            "global_step": self._train_state.position.global_step
            + self._train_state.update.micro_batch.step_index,
            "epoch_idx": epoch_idx or self._train_state.position.epoch,  # which overrides may omit
            "info": info and {k: v for k, v in info.items() if k not in _INFO_KEYS},
        }

    def _hold_metrics(self, metrics: Any) -> None:
        """Add the metrics of a micro-batch. They count if its update counts."""
        update = self._train_state.update
        micro_batch = update.micro_batch
        num_samples = as_metrics(self.train_batch, metrics).get(NUM_SAMPLES)
        weight = micro_batch.weight if num_samples is None else num_samples
        if micro_batch.is_repeated:
            metrics, weight, num_samples = {}, 0, None
        update.hold_metrics([MicroBatchMetrics(metrics, weight, micro_batch.ends_step)])
        self._train_state.step_timing.num_samples += float(num_samples or 0)  # 0 is unknown
        if not update.is_open:  # train_epoch has its own batches
            self._train_state.add_metrics(update.pop_metrics())

    def _finish_epoch(self, meters: AverageMeterCollection) -> dict[str, Any]:
        """Commit the last update if an epoch stopped early. Return the metrics of the epoch."""
        train_state = self._train_state
        if train_state.segment is not None:
            train_state.segment.commit_if_done()
        if held := train_state.update.pop_metrics():  # another call continues the update, or fails
            train_state.meters = try_copy(meters)
            for metrics in held:
                meters.update(*metrics)
        return meters.summary()

    def _check_single(self) -> None:
        """Raise an error if the default `train_batch` gets several models or optimizers."""
        models, optimizers = self._registered_models, self._train_state.optimizers
        registered, kind = {"models": models, "optimizers": optimizers}, type(self).__name__
        for what, objects in registered.items():
            if len(objects) > 1:
                raise RuntimeError(
                    f"{kind} registered {len(objects)} {what}, and the default train_batch trains "
                    f"one model with one optimizer. Override train_batch in {kind}."
                )

    def _get_single(self, name: str, method: str) -> Any:
        """Return the model, optimizer, or criterion that a default `method` uses."""
        value, kind = getattr(self, name, None), type(self).__name__
        if value is None or isinstance(value, list | tuple):
            has = "has no" if value is None else f"has {len(value)} objects in"
            raise RuntimeError(
                f"{kind} {has} self.{name}, but the default {method} uses a single {name}. Set "
                "it in setup: self.model, self.optimizer, self.criterion = self.register("
                f"models=..., optimizers=..., criterion=...). Or override {method} in {kind}."
            )
        return value


def bind_epoch(
    operator: OperatorBase, iterator: Segment, info: Mapping[str, Any], epoch_idx: int
) -> Callable[[], Any]:
    """Return ``train_epoch`` with the arguments it takes. Older overrides end at ``info``."""
    info = {
        **info,
        NUM_STEPS: iterator.max_steps,
        SCHEDULER_STEP: operator.scheduler_step_freq,
        USE_FP16: operator.use_fp16,
    }
    train_epoch: Callable[..., Any] = operator.train_epoch
    parameters = inspect.signature(train_epoch).parameters
    kinds = [parameter.kind for parameter in parameters.values()]
    named: dict[str, Any] = {"num_steps": iterator.max_steps, "epoch_idx": epoch_idx}
    positional = []
    # Older overrides may give the second parameter another name.
    if len(kinds) > 1 and kinds[1] <= inspect.Parameter.VAR_POSITIONAL:
        positional = [info]
    else:
        named["info"] = info
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        named = {name: value for name, value in named.items() if name in parameters}
    return functools.partial(train_epoch, iterator, *positional, **named)


def as_metrics(method: Callable[..., Any], result: Any) -> Mapping[str, Any]:
    """Check that a method of an operator returned a dict of metrics, and return it."""
    name = method.__qualname__
    if not isinstance(result, Mapping):
        raise TypeError(
            f"{name} returned {type(result).__name__}; it must return a dict of metrics, which may "
            "be empty."
        )
    for key in result:
        if not isinstance(key, str):
            raise TypeError(f"{name} named a metric {key!r}. The name must be a string.")
    count = result.get(NUM_SAMPLES, 1)
    if (type(count) is not int or count < 0) and not isinstance(count := to_cpu_value(count), bool):
        check_number(f"{name} returned ", NUM_SAMPLES, count)
    return result


def create_operator(operator_cls: type[Any], *arguments: Any) -> Any:
    """Create an operator, and run its ``setup``."""
    operator = operator_cls(*arguments)
    if "_config" not in vars(operator):
        raise TypeError(
            f"{operator_cls.__name__}.__init__ must take *args and call super().__init__(*args). "
            "Or remove it, and use setup(self, config), which runs on the worker."
        )
    operator.setup(operator.config)
    if not operator._train_state.is_registered:
        raise RuntimeError(
            f"{operator_cls.__name__}.setup did not register anything. Call "
            "self.register(models=..., optimizers=...) in it."
        )
    return operator


def has_validation_loader(operator: OperatorBase) -> bool:
    """Return whether `setup` has registered validation data. Runs on a worker."""
    return operator._train_state.data.has("validation")


def check_operator(caller: str, operator_cls: Any, base: type[Any], public_name: str) -> None:
    """Check a trainer's operator class. `public_name` is the public name of its base class."""
    fits = isinstance(operator_cls, type) and issubclass(operator_cls, base)
    if not fits:
        raise TypeError(
            f"{caller}(training_operator_cls=...) must be a subclass of {public_name} (the class, "
            f"not an instance), but it is {operator_cls!r:.200}."
        )
    if operator_cls.setup is base.setup:
        raise NotImplementedError(
            f"{operator_cls.__name__} must override setup(self, config), and register models, "
            "optimizers, and loaders there."
        )
    loads_nothing = operator_cls.load_state_dict is base.load_state_dict
    if loads_nothing and operator_cls.state_dict is not base.state_dict:
        text = "%s overrides state_dict, but not load_state_dict, so a resume loses its state."
        logger.warning(text, operator_cls.__name__)


def as_list(registered: Any) -> list[Any]:
    """Return registered objects as a new list."""
    return list(registered) if isinstance(registered, list | tuple) else [registered]


def in_shape_of(registered: Any, members: list[Any]) -> Any:
    """Return `members` in the shape of `registered`: a single one, a list, or a tuple."""
    if isinstance(registered, tuple):
        return tuple(members)
    return members if isinstance(registered, list) else members[0]
