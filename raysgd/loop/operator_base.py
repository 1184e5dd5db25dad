"""What operators are, whatever the framework: their place, their data, what a batch returns."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from raysgd._internal.arguments import closest
from raysgd.data.source import BatchSource
from raysgd.loop.step_iterator import StepIterator
from raysgd.loop.train_state import TrainState
from raysgd.metrics import NUM_SAMPLES, AverageMeterCollection, is_number

__all__ = [
    "OperatorBase",
    "check_operator",
    "check_registered",
    "checked_metrics",
    "checked_result",
    "class_from_creators",
    "create_operator",
    "created_loaders",
    "warn_of_misspelling",
    "with_logged",
]

logger = logging.getLogger(__name__)

_OF_OTHERS = {
    "training_step": "train_batch",
    "validation_step": "validate_batch",
    "test_step": "validate_batch",
    "predict_step": "predict_batch",
    "training_epoch_end": "train_epoch",
    "validation_epoch_end": "validate",
}
"""What Lightning calls, and what does the same here."""
_HINTS = {
    "model": "a single model",
    "optimizer": "a single optimizer",
    "criterion": "a criterion",
}


class OperatorBase:
    """What the operators of all frameworks offer to the methods that users write."""

    _train_state: TrainState

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = dict(config)

    @property
    def config(self) -> dict[str, Any]:
        """The trainer's config; ``config[BATCH_SIZE]`` is this worker's share."""
        return self._config

    @property
    def world_rank(self) -> int:
        """Rank of this worker among all."""
        return self._train_state.context.world_rank

    @property
    def local_rank(self) -> int:
        """Rank of this worker among those of its node."""
        return self._train_state.context.local_rank

    @property
    def world_size(self) -> int:
        """Number of workers, now."""
        return self._train_state.context.world_size

    @property
    def preemption(self) -> float | None:
        """When workers of the group are going to be taken away, in seconds since the epoch.

        None: none is, as far as was announced; ``math.inf``: no time was named. Training moves to
        other nodes by itself, or goes on with fewer workers; look at it where you have something
        of your own to save.
        """
        preemption = self._train_state.preemption
        if preemption is None:
            return None
        return math.inf if preemption.deadline is None else preemption.deadline

    @property
    def use_fp16(self) -> bool:
        """Whether training runs in mixed precision."""
        return self._train_state.settings.options.use_fp16 is not False

    @property
    def use_tqdm(self) -> bool:
        """Whether the trainer shows a progress bar."""
        return self._train_state.settings.options.use_tqdm

    @property
    def global_step(self) -> int:
        """Training steps that are done, over all epochs and calls: batches of this worker.

        With gradient accumulation it grows by a whole group at each update; each batch has a
        number of its own in ``batch_info["global_step"]``. Steps are counted for you. What a loop
        makes of it by itself holds until it asks for the next batch; it counts where the loop has
        asked for none, since it has batches of its own.
        """
        step = self._train_state.global_step
        return self._train_state.counted.get(step, step)

    @global_step.setter
    def global_step(self, value: int) -> None:
        self._train_state.counted = {self._train_state.global_step: value}

    @property
    def timers(self) -> Any:
        """Timers of this call, see :class:`raysgd.utils.TimerCollection`."""
        return self._train_state.timers

    if TYPE_CHECKING:
        train_batch: Callable[..., Any]
        train_loader: Any
        """This worker's part of the registered train loader, unless you set it yourself."""
        validation_loader: Any
        """This worker's part of the registered validation loader, unless you set it yourself."""
        steps_per_epoch: int
        """Training steps in an epoch, once the train loader is registered: the same however many
        workers there are, where it is shared out. With gradient accumulation several of them make
        one update. (Unless you set it yourself.)"""

    def __getattr__(self, name: str) -> Any:
        if name in ("train_loader", "validation_loader"):
            return self._train_state.data.source(name.removesuffix("_loader"))
        if name == "steps_per_epoch":
            return self._count_steps()
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def log(self, name: str, value: Any) -> None:
        """Add a metric to those that `train_batch` or `validate_batch` is about to return.

        Args:
            name: of the metric; what the method returns by that name counts instead.
            value: as in what the method returns, and averaged alike: weighted by ``num_samples``.

        Raises:
            RuntimeError: elsewhere, also below a `train_epoch` or `validate` of your own: these
                return what they have measured.
        """
        if self._train_state.logged is None:
            raise RuntimeError(
                f"self.log({name!r}, ...) can be called in train_batch and validate_batch, below "
                "the default train_epoch and validate. A loop of your own returns its metrics."
            )
        self._train_state.logged[name] = value

    def on_world_change(self) -> None:
        """Called on every worker whenever the group is a new one; override it as you need.

        It runs after `setup`, and again after each loss, growth or replacement: `world_rank`,
        `world_size` and ``config[BATCH_SIZE]`` may have changed, and the process group is another.
        All workers run it at the same time, with the same state of training, before the next
        step. So make here what depends on them: process groups of your own
        (``torch.distributed.new_group``), or loaders that select a part by rank, which you
        register by ``register_data``. (`setup` of a replacement worker runs alone, in a group of
        one.) It may call collectives. With one worker it is called once.
        """

    # ---- helpers

    @contextlib.contextmanager
    def _collecting_logged(self) -> Iterator[dict[str, Any]]:
        """Return a context that collects the metrics that `log` gets for a batch."""
        train_state, logged = self._train_state, dict[str, Any]()
        train_state.logged = logged
        try:
            yield logged
        finally:
            train_state.logged = None

    def _new_meters(self) -> AverageMeterCollection:
        """Return fresh meters, which the runner can read while an epoch is in progress."""
        self._train_state.meters = AverageMeterCollection()
        return self._train_state.meters

    def _epoch_is_over(self) -> bool:
        """Return whether a loop that has come to the end of its batches is at the end of an epoch.

        The loop may have wrapped the iterator that it was given, in tqdm say. One that has drawn
        nothing from it has batches of its own, and these count as a whole epoch.
        """
        segment = self._train_state.segment
        return segment is None or not segment.drawn_from or segment.loop_ends_epoch

    def _info_of_epoch(self, info: dict[str, Any], num_steps: int | None) -> dict[str, Any]:
        return info

    def _count_steps(self) -> int:
        source: BatchSource = self._train_state.data.source("train")
        steps = source.steps_left(0)
        if steps is None:
            raise RuntimeError(
                f"steps_per_epoch: the train loader, a {type(source.loader).__name__}, does not "
                "say how many batches it has. Give it a __len__, or count by epochs."
            )
        return steps

    def _in_parts(self, iterator: Iterable[Any]) -> Iterable[Any]:
        """Return the batches of an iterator, of which large ones may come in parts."""
        return iterator.in_parts() if isinstance(iterator, StepIterator) else iterator

    def _batch_info(
        self, info: dict[str, Any] | None, batch_idx: int, epoch_idx: int
    ) -> dict[str, Any]:
        return {
            **(info or {}),
            "batch_idx": batch_idx,
            "global_step": self._train_state.global_step + self._train_state.step.place.step,
            "epoch_idx": epoch_idx,
            "info": info,
        }

    def _measure(self, meters: AverageMeterCollection, returned: Any) -> None:
        """Add what ``train_batch`` returned for a batch, or a part of one, once its update is made.

        Until then it may be taken back, and trained again.
        """
        place = self._train_state.step.place
        metrics, weight = checked_metrics(self.train_batch, returned, place.weight)
        if not place.weight:  # its samples count in another part, or for another worker
            metrics, weight = {}, 0
        meters.hold(metrics, weight, place.ends_step)
        if place.is_last:
            meters.settle()

    def _check_single(self) -> None:
        """Refuse to train one of several models or optimizers and leave out the others."""
        for what, held in (
            ("models", self._train_state.given_models),
            ("optimizers", self._train_state.optimizers),
        ):
            if len(held) > 1:
                kind = type(self).__name__
                raise RuntimeError(
                    f"{kind} registered {len(held)} {what}, and the default train_batch trains one "
                    f"model with one optimizer. Override train_batch in {kind}."
                )

    def _default(self, name: str) -> Any:
        """Return ``self.model``, ``self.optimizer`` or ``self.criterion`` for a default method."""
        value = getattr(self, name, None)
        if value is not None and not isinstance(value, list | tuple):
            return value
        kind = type(self).__name__
        if isinstance(value, list | tuple):
            raise RuntimeError(
                f"{kind}.{name} holds {len(value)} objects, and the default train_batch and "
                f"validate_batch work with {_HINTS[name]}. Override them in {kind}."
            )
        raise RuntimeError(
            f"{kind} has no self.{name}, which the default train_batch and validate_batch need. "
            f"Set it in setup, for example: self.model, self.optimizer, self.criterion = "
            f"self.register(models=..., optimizers=..., criterion=...); or override them in {kind}."
        )


def with_logged(logged: Mapping[str, Any], metrics: Any) -> Any:
    """Return the metrics of a batch with those that it logged."""
    return {**logged, **metrics} if logged and isinstance(metrics, Mapping) else metrics


def checked_metrics(
    method: Callable[..., Any], metrics: Any, weight: float = 1
) -> tuple[Mapping[str, Any], float]:
    """Return what a batch returned, and its weight, which is `weight` unless it says another."""
    return metrics, checked_result(method, metrics).get(NUM_SAMPLES, weight)


def checked_result(method: Callable[..., Any], result: Any) -> Mapping[str, Any]:
    """Return what an operator's method returned, if it is a dict of metrics."""
    if not isinstance(result, Mapping):
        raise TypeError(
            f"{method.__qualname__} returned {type(result).__name__}; it must return a dict of "
            "metrics (which may be empty)."
        )
    for name in result:
        if not isinstance(name, str):
            raise TypeError(f"{method.__qualname__} named a metric {name!r}; names must be texts.")
    num_samples = result.get(NUM_SAMPLES, 1)
    said = f"{method.__qualname__} returned {NUM_SAMPLES}={num_samples!r}; it must be"
    if not is_number(num_samples):
        raise TypeError(f"{said} a number.")
    if not 0 <= float(num_samples) < math.inf:
        raise ValueError(f"{said} at least 0, and finite.")
    return result


def create_operator(operator_cls: type[Any], *arguments: Any) -> Any:
    """Make an operator, whose ``setup`` is still to be called.

    Raises:
        TypeError: if the class has an ``__init__`` that does not fit.
    """
    advice = (
        "Leave __init__ out, and create what the operator needs in setup(self, config), which "
        "runs on the worker."
    )
    try:
        inspect.signature(operator_cls).bind(*arguments)
    except TypeError as error:
        raise TypeError(
            f"{operator_cls.__name__}.__init__ does not take what raysgd makes operators with "
            f"({error}). {advice}"
        ) from None
    operator = operator_cls(*arguments)
    if "_config" not in vars(operator):
        raise TypeError(
            f"{operator_cls.__name__}.__init__ does not call super().__init__(). {advice}"
        )
    return operator


def check_registered(operator: Any) -> None:
    """Check that ``setup`` of the operator has registered something."""
    if not operator._train_state.registered:
        raise RuntimeError(
            f"{type(operator).__name__}.setup did not register anything. Call "
            "self.register(models=..., optimizers=...) in it."
        )


def check_operator(trainer: str, operator_cls: Any, base: type[Any], shown: str) -> None:
    """Check the class given to a trainer: a subclass of `base`, which users know as `shown`."""
    fits = isinstance(operator_cls, type) and issubclass(operator_cls, base)
    if not fits:
        raise TypeError(
            f"{trainer}(training_operator_cls=...) must be a subclass of {shown} (the class, not "
            f"an instance), but it is {operator_cls!r}."
        )
    if operator_cls.setup is base.setup:
        raise NotImplementedError(
            f"{operator_cls.__name__} does not override setup(self, config), in which models, "
            "optimizers and loaders are registered."
        )
    warn_of_misspelling(operator_cls, base)


def warn_of_misspelling(operator_cls: type[Any], base: type[Any]) -> None:
    """Warn of methods with nearly the name of one that `base` would call, or Lightning's."""
    known = [name for name in dir(base) if not name.startswith("_")]
    for name, value in inspect.getmembers(operator_cls, inspect.isfunction):
        if name.startswith("_") or name in known or value.__module__.startswith("raysgd."):
            continue
        close = closest(name, known, cutoff=0.85)
        if (meant := _OF_OTHERS.get(name)) in known:
            if getattr(operator_cls, meant) is not getattr(base, meant):
                continue  # which calls it, most likely
            close = meant
        if close:
            logger.warning(
                "%s.%s is called by nobody but yourself. Is %s meant, which raysgd calls?",
                operator_cls.__name__,
                name,
                close,
            )


def class_from_creators(
    caller: str, bases: tuple[type, ...], creators: Mapping[str, Any], required: Collection[str]
) -> Any:
    """Make an operator class that holds creators as ``_model_creator`` and the like.

    Args:
        caller: whose arguments they are.
        bases: of the class.
        creators: functions by the names of the arguments; None where one was not given.
        required: which of them must be given.
    """
    for name, function in creators.items():
        if not callable(function) and (function is not None or name in required):
            raise TypeError(f"{caller}({name}=...) must be a function, but it is {function!r}.")
    # static: a plain function among the attributes of a class would become a method
    functions = {f"_{name}": staticmethod(f) for name, f in creators.items() if f is not None}
    return type("CustomCreatorOperator", bases, functions)


def created_loaders(created: Any) -> dict[str, Any]:
    """Return what a ``data_creator`` has returned, as arguments of ``register_data``."""
    loaders = created if isinstance(created, tuple | list) else (created,)
    if len(loaders) > 2:
        raise ValueError(
            f"data_creator returned {len(loaders)} loaders; it must return one to train on, or one "
            "to train on and one to validate on."
        )
    return dict(zip(("train_loader", "validation_loader"), loaders, strict=False))
