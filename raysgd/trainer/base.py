"""What trainers of operators share, whatever the framework: the calls that users make."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import itertools
import logging
import operator
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import numpy as np

from raysgd import checkpoint
from raysgd._internal.arguments import check_hook, checked_config, suggests, unknown_argument, whole
from raysgd._internal.config import BATCH_SIZE, env_seconds, rounded_config, warn_of_rounding
from raysgd._internal.context import Runner
from raysgd._internal.nested import joined
from raysgd.callbacks.base import Callback, History, LastCall, adds_metrics
from raysgd.callbacks.callback_list import CallbackList, checked_callbacks
from raysgd.callbacks.checkpoint import CheckpointCallback
from raysgd.callbacks.epoch_lines import EpochLines, is_interactive
from raysgd.callbacks.progress import ProgressBar
from raysgd.callbacks.run_folder import checked_logdir, trainer_callbacks
from raysgd.callbacks.values import numbers_in, scalars, shown_config
from raysgd.checkpoint.location import locate
from raysgd.cluster.worker_group import WorkerGroup
from raysgd.cluster.worker_handle import InlineHandle
from raysgd.data import Dataset
from raysgd.elastic.call import Call
from raysgd.elastic.controller import Controller
from raysgd.elastic.events import Event
from raysgd.elastic.machine import Closed
from raysgd.elastic.requests import LoadRequest
from raysgd.elastic.snapshots import with_shares
from raysgd.errors import CallbackError, CheckpointError, WorkerLostError
from raysgd.loop.options import Options
from raysgd.loop.requests import (
    ApplyOperatorRequest,
    ApplyRequest,
    CanValidateRequest,
    DescribeDataRequest,
    KeepsGlobalBatchRequest,
    ModelsRequest,
    PredictRequest,
    RehearseRequest,
    RngStateRequest,
    StateRequest,
    UpdateSchedulersRequest,
)
from raysgd.metrics import merge_workers, renamed
from raysgd.trainer.calls import CallResult, Calls
from raysgd.trainer.fit import Limits, Validations, check_monitored, run_epochs

__all__ = ["OperatorTrainer"]

logger = logging.getLogger(__name__)


class OperatorTrainer:
    """Trains an operator on a group of workers. Use a subclass, such as TorchTrainer."""

    _trainable: ClassVar[str]
    """The name in `raysgd.tune` of what its trials have in common."""

    def __init__(
        self,
        options: Options,
        runner_cls: Callable[[Any], Runner],
        initialization_hook: Callable[[], None] | None,
        callbacks: Iterable[Callback],
        logdir: str | os.PathLike[str] | None,
    ) -> None:
        check_hook(options.trainer, initialization_hook)
        self._logdir = checked_logdir(logdir)
        attached = trainer_callbacks(options.trainer, callbacks, options.use_tqdm, self._logdir)
        start_timeout_s = env_seconds("SGD_PLACEMENT_GROUP_TIMEOUT_S", 100.0)
        self._options = options = options.decided()  # which may start Ray
        runner = runner_cls(options)
        self._controller = controller = Controller(
            WorkerGroup(options.group(start_timeout_s)),
            runner,
            options.transport() if options.num_workers > 1 else None,
            initialization_hook,
            options.timeout_s,
            options.elastic,
        )
        self._writer = checkpoint.BackgroundWriter()
        self._callback_list = CallbackList(attached)
        self._calls = Calls(controller, self._callback_list)
        self._latest_metrics: dict[str, Any] = {}
        self._shown: dict[str, Any] = {}
        self._last_call: LastCall | None = None
        self._stop_reason: str | None = None
        self._has_validated = False
        self._tried: list[str] = []
        self._validations = Validations(lambda: controller.progress)
        # also when the trainer is dropped without shutdown(), or the driver's script ends
        self._finalizer = weakref.finalize(self, controller.shutdown, force=True)
        controller.journal.on_event = _telling(weakref.ref(self))
        controller.start()
        self._keeps_batch = self._asks_whether_batch_is_kept()
        if not self._keeps_batch:
            warn_of_rounding(options.config, controller.max_workers)

    def _asks_whether_batch_is_kept(self) -> bool:
        """Return whether ``config[BATCH_SIZE]`` is a step's size also where it does not divide.

        It is where steps keep their size and the train loader follows it.
        """
        if self._options.config.get(BATCH_SIZE) is None:
            return True
        call = Call(request=KeepsGlobalBatchRequest(), rank=0, max_losses=3, any_size=True)
        return bool(self._calls.make(call)[0])

    # ---- training

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
        """Train for one epoch, or for the rest of one that is part-finished.

        Args:
            num_steps: train for that many steps instead, a batch on each worker, going on where the
                last call stopped and starting over as the loader ends.
            profile: add ``profile``, the mean seconds of the stages of a step.
            reduce_results: whether to merge the workers' metrics into one dict.
            max_retries: how often workers may be lost in this call; those that are lost together
                count once. The survivors go on with what is left, as long as there are
                ``min_workers``.
            info: handed to ``train_epoch`` and, in ``batch_info["info"]``, to ``train_batch``.
            dataset: trains on it instead of the registered train loader.

        Returns:
            A dict with ``epoch`` (from 1), ``num_samples``, ``batch_count``, and the mean and the
            last value of what the batches returned; with a loss scaler also ``num_skipped_steps``,
            how many updates it skipped after an overflow. Or a list of one such dict a worker.

        Raises:
            ValueError: if `num_steps` is below 1 or `max_retries` below 0.
            WorkerLostError: if workers are lost more often than `max_retries`, or too few are left.
            BaseException: what user code raised. The steps that were done stay done, and the
                trainer can be used on.
        """
        num_steps = _checked_count("num_steps", num_steps, 1)
        max_retries = _checked_count("max_retries", max_retries, 0)
        _check_info("train", info)
        if dataset is not None and not isinstance(dataset, Dataset):
            raise TypeError(f"train(dataset=...) takes a raysgd.data.Dataset, not {dataset!r}.")
        self._check_open(moves=True)
        with self._callback_list.calling(self):
            result = self._calls.train(
                self, num_steps, max_retries, profile=profile, info=info, dataset=dataset
            )
            epoch = self.epoch
            metrics = {"epoch": epoch} | result.merged | {"epoch": epoch}
            if result.completed_epoch and not self._validations.due:
                self._step_by(metrics, is_last=not self._validations.expected)
            hook = "on_epoch_end" if result.completed_epoch else "on_steps_end"
            self._show(hook, metrics, result.call)
        if reduce_results:
            return metrics
        return [{"epoch": epoch} | measured | {"epoch": epoch} for measured in result.by_worker]

    @suggests
    def validate(
        self,
        num_steps: int | None = None,
        profile: bool = False,
        reduce_results: bool = True,
        info: dict[str, Any] | None = None,
    ) -> Any:
        """Evaluate on the validation loader.

        Args:
            num_steps: that many batches on each worker; the next call goes on from there, and
                starts over as the loader ends.
            profile: add ``profile``, the mean seconds of the stages.
            reduce_results: whether to merge the workers' metrics into one dict.
            info: handed to ``validate`` and, in ``batch_info["info"]``, to ``validate_batch``.

        Returns:
            A dict with ``num_samples``, ``batch_count``, and the mean and the last value of what
            the batches returned; or a list of one such dict a worker.

        Raises:
            ValueError: if `num_steps` is below 1.
            WorkerLostError: as in `train`.
            BaseException: what user code raised.
        """
        num_steps = _checked_count("num_steps", num_steps, 1)
        _check_info("validate", info)
        result = self._validate(info, num_steps=num_steps, profile=profile)
        return result.merged if reduce_results else [dict(each) for each in result.by_worker]

    def _validate(
        self,
        info: Mapping[str, Any] | None,
        num_steps: int | None = None,
        profile: bool = False,
        from_start: bool = False,
    ) -> CallResult:
        self._check_open(moves=True)
        with self._callback_list.calling(self):
            result = self._calls.validate(
                self, num_steps, profile=profile, info=info, from_start=from_start
            )
            if from_start and self._validations.missing:
                # before callbacks save, so that what is resumed from has it
                self._step_by({**self._latest_metrics, **result.merged}, is_last=True)
            self._has_validated = True
            self._validations.note_validated()
            self._show("on_validation_end", result.merged, result.call)
        return result

    @suggests
    def test(self, loader: Any, *, info: dict[str, Any] | None = None) -> dict[str, Any]:
        """Evaluate on another loader, as `validate` does on that for validation.

        No callback sees it, and `latest_metrics` stay.

        Args:
            loader: what ``register_data`` takes for validation, or a function of the config that
                returns it on each worker, for what should not travel there.
            info: as in `validate`.

        Returns:
            What `validate` returns, as ``test_loss`` and the like, without the ``last_`` ones.

        Raises:
            TypeError: if `loader` is none, or there are several workers and it cannot be shared
                out.
            WorkerLostError: as in `train`.
            BaseException: what user code raised.
        """
        _check_info("test", info)
        self._check_open(moves=True)
        result = self._calls.validate(
            self, None, profile=False, info=info, from_start=True, loader=loader
        )
        found = renamed(result.merged, "test")
        return {name: value for name, value in found.items() if not name.startswith("last_")}

    @suggests
    def predict(self, loader: Any) -> Any:
        """Return what the operator's ``predict_batch`` gives for a loader, in the loader's order.

        The loader is shared out over the workers as for validation: result *i* is of sample *i*,
        however many workers there are. By default it is the model's output.

        Args:
            loader: as for `test`. It must not shuffle.

        Returns:
            The batches' outputs joined along their first dimension, on CPU: a tensor (an array, for
            TFTrainer), or a dict or tuple of them where that is what the batches give. Where rows
            differ in shape, a list of them.

        Raises:
            TypeError: as in `test`, or if ``predict_batch`` returns something else.
            ValueError: if the loader shuffles.
            WorkerLostError: as in `train`.
            BaseException: what user code raised.
        """
        self._check_open(moves=True)
        call = Call(request=PredictRequest(loader=loader), max_losses=3, has_batches=True)
        parts = itertools.chain.from_iterable(self._calls.make(call))
        in_order = sorted(parts, key=operator.itemgetter(0))
        return joined([output for _, output in in_order], self._concatenate)

    @staticmethod
    def _concatenate(parts: Sequence[Any]) -> Any:
        """Join arrays along their first dimension."""
        return np.concatenate(parts)

    @suggests
    def fit(
        self,
        num_epochs: int | None = None,
        validate_every: int | None = 1,
        callbacks: Iterable[Callback] = (),
        *,
        max_retries: int = 3,
        info: dict[str, Any] | None = None,
        sanity_steps: int = 2,
        log_every: int | None = None,
        verbose: bool = True,
        max_steps: int | None = None,
        max_time_s: float | None = None,
        limit_train_batches: float | None = None,
        limit_val_batches: float | None = None,
        overfit_batches: float | None = None,
        fast_dev_run: bool = False,
    ) -> History:
        """Train until `num_epochs` are completed in all, and validate on the way.

        `num_epochs` counts from the first epoch of all: a trainer that was loaded at epoch 3, or
        that a CheckpointCallback has brought there, trains 7 more for ``fit(10)``. So a script
        that is started again after a crash ends where it would have ended. An epoch that is
        part-finished is finished first, and one that was saved, or ended by an exception, before
        its validation is validated first.

        Args:
            num_epochs: how many epochs shall be completed; None with `max_steps` or `max_time_s`:
                as many as they allow.
            validate_every: validate after each epoch whose number it divides, and after the
                last one; None for never. Without a validation loader there is no validation.
            callbacks: called in this `fit` alone, after those that the trainer was made with.
            sanity_steps: before the first epoch of this trainer's first `fit`, try the validation
                on so many batches, so that what is wrong in it is not found after hours. Nothing is
                measured, and all is as before; 0 for not.
            log_every: show loggers, at each step that it divides, the means since the one before or
                the beginning of the epoch, with learning rates and the norm of the gradients of the
                step. None for not.
            verbose: print a line for each epoch, and show a bar in a terminal or a notebook.
            max_retries: how often workers may be lost in one epoch. (A validation allows three
                losses, as `validate` does.)
            info: handed to the operator, as in `train`.
            max_steps: end when so many steps are done in all, counted from the first of all, also
                in mid-epoch, which is not validated then.
            max_time_s: end, likewise, after so many seconds of this `fit`, at the next step.
            limit_train_batches: an epoch is so many steps, or, as a float, such a share of them.
            limit_val_batches: the same for each validation; of a `predict` or a `test` all counts.
            overfit_batches: both, and every epoch has the batches of the first: a model that learns
                at all can learn these by heart.
            fast_dev_run: train one step and validate one to see that all of it works. No callback
                sees it, and the state is put back.

        Returns:
            A list of one dict an epoch that this call has trained, with the metrics of training and
            validation: an empty one where all were trained before. It ends early where a callback
            asked for it or a limit was reached; ``stop_reason`` of the list says why.

        Raises:
            ValueError: if a number is below 1, or a callback does not know where to write.
            CallbackError: if a callback raised.
            BaseException: what `train` and `validate` raise. The trainer can be used on, also
                after Ctrl-C.
        """
        max_steps = _checked_count("max_steps", max_steps, 1)
        if num_epochs is None and (max_steps or max_time_s or fast_dev_run):
            num_epochs = sys.maxsize
        num_epochs = _checked_count("num_epochs", num_epochs, 1)
        if num_epochs is None:
            raise TypeError(
                "num_epochs must be an int, but it is None: it may be left out with max_steps or "
                "max_time_s."
            )
        limits = Limits(
            limit_train_batches, limit_val_batches, overfit_batches, max_steps, max_time_s
        )
        validate_every = _checked_count("validate_every", validate_every, 1)
        sanity_steps = _checked_count("sanity_steps", sanity_steps, 0)
        log_every = _checked_count("log_every", log_every, 1)
        max_retries = _checked_count("max_retries", max_retries, 0)
        _check_info("fit", info)
        where = f"{type(self).__name__}.fit(callbacks=...)"
        own = checked_callbacks(where, callbacks, self._logdir)
        if verbose and not any(isinstance(c, EpochLines) for c in (*own, *self._callback_list)):
            own.insert(0, ProgressBar() if is_interactive() else EpochLines())
        self._check_open(moves=True)
        if self._callback_list.inside:
            raise RuntimeError(
                f"fit() cannot be called in {self._callback_list.inside[-1]} of a callback."
            )
        self._stop_reason = None
        if fast_dev_run:
            limits = Limits(limit_train_batches=1, limit_val_batches=1)
            with self._on_trial(), self._calls.limited(limits):
                can_validate = validate_every and self._can_validate()
                next_epoch = self._controller.progress.epoch + 1
                with self._validations.of_fit(next_epoch, 1 if can_validate else None):
                    metrics = self.train(max_retries=max_retries, info=info)
                    if can_validate:
                        metrics = {**self._validate(info, from_start=True).merged, **metrics}
                return History([metrics])
        with self._callback_list.attached(self, own), self._calls.limited(limits, log_every):
            if validate_every and not self._can_validate():
                logger.info("fit() does not validate: there is no validation loader.")
                validate_every = None
            if validate_every is None:
                check_monitored(self._monitored(), ())
            with self._validations.of_fit(num_epochs, validate_every):
                if validate_every and sanity_steps and self._controller.progress.epoch < num_epochs:
                    self._rehearse(sanity_steps, info)
                return run_epochs(
                    self,
                    num_epochs,
                    self._validations,
                    completed=lambda: self._controller.progress.epoch,
                    train=lambda: self.train(max_retries=max_retries, info=info),
                    # all of the loader, wherever validate(num_steps=...) has stopped in it
                    validate=lambda: self._validate(info, from_start=True).merged,
                    limits=limits,
                    monitored=self._monitored(),
                    tried=self._tried,
                )

    @contextlib.contextmanager
    def _on_trial(self) -> Iterator[None]:
        """Put the state back in the end, and let no callback see what is trained meanwhile."""
        state, latest, last_call = self.state_dict(), self._latest_metrics, self._last_call
        self._latest_metrics = dict(latest)
        try:
            with self._callback_list.silenced():
                yield
        finally:
            self.load_state_dict(state)
            self._latest_metrics, self._last_call = latest, last_call

    def _rehearse(self, num_steps: int, info: Mapping[str, Any] | None) -> None:
        """Try the validation, unless this trainer has validated, or is about to."""
        if self._has_validated or self._validations.missing or self._stop_reason is not None:
            return
        request = RehearseRequest(num_steps=num_steps, info=dict(info or {}))
        call = Call(request=request, max_losses=3, has_batches=True)
        try:
            # a worker without a batch has no metrics
            parts = [each for each in self._call(call) if each]
            names = dict.fromkeys(itertools.chain.from_iterable([*parts, _tried(parts)]))
            if names:
                check_monitored(self._monitored(), list(names))
                self._tried = list(names)
        except Exception as error:
            error.add_note(f"This was in fit(sanity_steps={num_steps}), before any training.")
            raise
        self._has_validated = True

    def _can_validate(self) -> bool:
        return any(self._call(Call(request=CanValidateRequest(), max_losses=3)))

    def _monitored(self) -> dict[str, str]:
        """Return which metrics are waited for, by who does; none where others may add metrics."""
        given = self._callback_list.callbacks
        if self._own_epochs or any(adds_metrics(each) for each in given):
            return {}
        found = [(type(each).__name__, each.monitor) for each in given]
        found.append((type(self).__name__, getattr(self._options, "monitor", None)))
        return {f"{who}(monitor={name!r})": name for who, name in found if isinstance(name, str)}

    @property
    def _own_epochs(self) -> bool:
        """Whether the operator has a ``train_epoch`` of its own, which may validate by itself."""
        given = getattr(self._options.training_operator_cls, "train_epoch", None)
        return not getattr(given, "__module__", "raysgd.").startswith("raysgd.")

    def request_stop(self, reason: str) -> None:
        """Ask `fit` to end after the epoch under way. Other calls take no notice.

        Args:
            reason: why; the first one counts, and `stop_reason` returns it.
        """
        if self._stop_reason is None:
            self._stop_reason = str(reason)

    def update_scheduler(self, metric: float) -> None:
        """Call ``scheduler.step(metric)`` on every registered scheduler of every worker, once.

        Raises:
            WorkerLostError: if workers are lost more than three times meanwhile.
        """
        self._controller.snapshots.outdate()  # they are without this metric
        request = UpdateSchedulersRequest(call=self._calls.next_number(), metric=metric)
        self._call(Call(request=request, max_losses=3))

    def _step_by(self, metrics: Mapping[str, Any], is_last: bool) -> None:
        """Step the schedulers that wait for a metric; `is_last`: of this epoch no more will come.

        Raises:
            ValueError: if there is no such metric, or it is no number.
        """
        monitor = getattr(self._options, "monitor", None)
        if monitor is None or (monitor not in metrics and not is_last):
            return
        value = numbers_in({"value": metrics.get(monitor)}).get("value")
        if value is None:
            raise ValueError(
                f"{type(self).__name__}(monitor={monitor!r}): fit() has no such number to step the "
                f"schedulers with. There are: {', '.join(numbers_in(metrics))}. (A loop of your "
                'own passes scheduler_step_freq="manual", and calls update_scheduler(metric).)'
            )
        try:
            self.update_scheduler(value)
        except WorkerLostError as error:  # of those that are left one gives its state to all
            logger.warning("Epoch %d: a scheduler may lack %s: %s", self.epoch, monitor, error)

    # ---- state

    def state_dict(self, copy: bool = True) -> dict[str, Any]:
        """Return the state, on CPU: what `save` writes and `load_state_dict` takes.

        It holds ``epoch``, ``global_step``, ``operator`` (what the operator's ``state_dict``
        returned), ``models``, ``optimizers``, ``schedulers`` and ``averages`` (of the weights, by
        EMA or SWA) where there are some, ``amp_native``
        or ``amp_apex``, the state of the loss scaler in mixed precision, ``data``: the place in the
        data, and the states of the workers' random number generators, ``callbacks``, what
        callbacks want to be saved, ``config``, the numbers and texts of the config, and between an
        epoch of `fit` and its validation, also where an exception has ended `fit` there,
        ``validation_due``, the newest metrics.

        Args:
            copy: False leaves large tensors and arrays of workers that are Ray actors in Ray's
                shared memory, which is enough for what is to be written to a file. Do not write
                to them, and let go of them soon: they fill that memory, and end with it.

        Raises:
            CallbackError: if the ``state_dict`` of a callback raised.
        """
        self._check_open()
        return self._state(own=copy)

    def _state(self, own: bool) -> dict[str, Any]:
        return self._with_own(lambda: self._workers_state(own))

    @property
    def _in_rows(self) -> bool:
        return self._controller.progress.is_fully_sharded

    def _sharded_state(self, folder: Path) -> AbstractContextManager[dict[str, Any]]:
        """Return a context with the state, whose tensors workers have written in a folder.

        They lie in a folder in it, and are gone with the context, unless they are moved.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no models that are divided, and saves no state by workers."
        )

    def _with_own(self, workers_state: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        callbacks = self._callback_list.state_dict()
        state = workers_state()
        if callbacks:
            state["callbacks"] = callbacks
        state["config"] = self._shown_config()
        if self._validations.missing:
            # with what was measured before, which callbacks look at when they see a validation
            state["validation_due"] = scalars(self.latest_metrics)
        return state

    def _workers_state(self, own: bool) -> dict[str, Any]:
        if not self._controller.members and (snapshot := self._controller.snapshots.state()):
            # no worker lives; this is what is left, and it may be what the user gave to load
            whole = self._whole(snapshot)
            return copy.deepcopy({k: value for k, value in whole.items() if k != "call"})
        generators = self._rng_states()
        # of a divided state each worker has a share
        rank = None if self._controller.progress.divided else 0
        call = Call(request=StateRequest(), rank=rank, max_losses=3, any_size=True)
        state = self._whole(with_shares(self._call(call, own=own)))
        state["data"]["rng"] = generators
        return state

    def _rng_states(self) -> list[Any]:
        """Return the states of the workers' random number generators, by rank."""
        return self._call(Call(request=RngStateRequest(), max_losses=3, any_size=True))

    @suggests
    def load_state_dict(self, state: Mapping[str, Any], blocking: bool = False) -> None:
        """Take over a state, on any number of workers.

        Args:
            state: what `state_dict` returned, or that of an older library, without ``data``.
            blocking: there for older scripts; the workers always have the state on return.

        Raises:
            CheckpointError: if it is no state of a trainer, or of one with other models, or if the
                ``load_state_dict`` of the operator or of a callback raised. All is as before then.
        """
        del blocking
        self._check_open(moves=True)
        missing = [
            key
            for key in ("models", "optimizers", "epoch")
            if not isinstance(state, Mapping) or key not in state
        ]
        if missing:
            raise CheckpointError(f"This is no state of a trainer: {', '.join(missing)} missing.")
        of_driver = {key: state.get(key, {}) for key in ("callbacks", "config", "validation_due")}
        for key, value in of_driver.items():
            if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
                raise CheckpointError(f"The state's {key!r} must be a dict, but it is {value!r}.")
        # a snapshot's "call" is for the workers of that run
        own = {key: v for key, v in state.items() if key not in (*of_driver, "call")}
        with self._callback_list.loading(copy.deepcopy(of_driver["callbacks"])):
            self._call(Call(request=LoadRequest(state=own), max_losses=3))
        self._controller.snapshots.set(own)
        self._latest_metrics.update(of_driver["validation_due"])
        self._tell_of_changes(of_driver["config"])
        # also where it is empty: saved before anything had been measured
        self._validations.note_owed("validation_due" in state)

    def _whole(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return dict(state)

    def _shown_config(self) -> dict[str, float | int | str]:
        """Return what can be told of the config: numbers and texts, without secrets."""
        return scalars(shown_config(self._options.config))

    def _tell_of_changes(self, saved: Mapping[str, Any]) -> None:
        """Say where the config is another than that of a state which was loaded."""
        own = self._shown_config()
        changed = [
            f"{name} {saved[name]!r} → {own[name]!r}"
            for name in own
            if name in saved and saved[name] != own[name]
        ]
        if changed:
            logger.warning(
                "The config differs from the checkpoint's: %s. Models, optimizers and schedulers, "
                "with their learning rates, come from the checkpoint; all else from the config.",
                ", ".join(changed),
            )

    def save(self, path: str | os.PathLike[str], blocking: bool = True) -> str:
        """Write the state to one file, whole or not at all.

        Args:
            path: where to; a path, or a URL such as ``s3://bucket/state.pt``.
            blocking: False: copy the state, and write it while training goes on. If that fails,
                the next call of the trainer says so. One write at a time: the next save waits.

        Returns:
            The absolute path, or the URL.

        Raises:
            CheckpointError: if it cannot be written there, or the write before it failed.
        """
        self._check_open()
        target = checkpoint.check_writable(path)
        self._writer.wait()  # before the copy, so that there is one at a time
        state = self._state(own=False)  # a copy, which nothing but the write uses
        manifest = checkpoint.Manifest(world_size=self.num_workers, operator=self.operator_name)
        write = checkpoint.prepare_write(state, target, manifest)
        if blocking:
            return write()
        self._writer.submit(write, locate(target).shown)
        return target

    def save_model(self, path: str | os.PathLike[str]) -> str:
        """Write the models' weights alone as a ``.safetensors`` file, whole or not at all.

        With several models the keys begin with ``0.``, ``1.``, ….

        Args:
            path: where to; a path, or a URL.

        Returns:
            The absolute path, or the URL.

        Raises:
            CheckpointError: if it cannot be written there.
            ImportError: if safetensors is not installed.
        """
        self._check_open()
        target = checkpoint.check_writable(path)
        return self._write_weights(target)

    def _write_weights(self, target: str) -> str:
        return checkpoint.save_model(self._saved_weights(), target)

    def _saved_weights(self) -> Any:
        models = self._worker_models()
        return models[0] if len(models) == 1 else models

    def _worker_models(self) -> Any:
        """Return what rank 0 has of the models; those that are divided all workers bring there."""
        rank = None if self._controller.progress.divided else 0
        call = Call(request=ModelsRequest(), rank=rank, max_losses=3, any_size=True)
        return self._call(call)[0]

    @suggests
    def load(self, path: str | os.PathLike[str]) -> None:
        """Take over the state in a file that `save` wrote. No code from the file is run.

        Waits for a write of ``save(blocking=False)`` that is under way.

        Args:
            path: a path or a URL.

        Raises:
            CheckpointError: if the file is missing, damaged, or not a state of this trainer, or
                if that write failed.
        """
        self._check_open(moves=True)
        self._writer.wait()  # whatever the path: one file may have several
        self.load_state_dict(checkpoint.read_file(path))

    def load_best(self) -> str:
        """Take over the state of the best checkpoint of ``CheckpointCallback(monitor=...)``.

        The callback is one of the trainer's, or of its newest `fit`; of several the first that has
        a best checkpoint counts. Training is where it was then: another `fit` would train what came
        after it again.

        Returns:
            The path of the checkpoint, or its URL.

        Raises:
            CheckpointError: if there is none, or it cannot be loaded.
        """
        self._check_open(moves=True)
        with self._callback_list.calling(self):  # which starts those that have not started
            given = self._callback_list.callbacks
            paths = [each.best for each in given if isinstance(each, CheckpointCallback)]
        best = next((path for path in paths if path is not None), None)
        if best is None:
            raise CheckpointError(
                "load_best(): there is no best checkpoint yet. Train with "
                "CheckpointCallback(monitor='val_loss'), which saves when that metric is measured."
            )
        self.load(best)
        return best

    # ---- workers

    def describe_data(self) -> dict[str, str]:
        """Return how the workers divide each registered loader, by its name.

        A loader is "partitioned by raysgd", by Hugging Face datasets, or by your code; or it is
        "read whole by each worker", with the reason.
        """
        descriptions: dict[str, str] = self._call(Call(request=DescribeDataRequest()))[0]
        return descriptions

    def apply_all_workers(self, fn: Callable[[], Any]) -> list[Any]:
        """Call `fn` on every worker and return what it returned, by rank.

        Args:
            fn: function of no arguments. It is pickled, and so is what it returns.

        Raises:
            TypeError: if it cannot be called, or one of the two cannot be pickled.
            WorkerLostError: if a worker is lost; it is not repeated.
            BaseException: what it raised.
        """
        function = _callable("apply_all_workers", fn)
        return self._call(Call(request=ApplyRequest(function=function)))

    def apply_all_operators(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Call `fn` with the operator of every worker and return what it returned, by rank.

        Arguments and errors are those of `apply_all_workers`.
        """
        function = _callable("apply_all_operators", fn)
        return self._call(Call(request=ApplyOperatorRequest(function=function)))

    def drain(
        self,
        *,
        node_id: str | None = None,
        rank: int | None = None,
        deadline_s: float | None = None,
    ) -> None:
        """Announce that a node, or one worker, is going to be taken away; others take over before.

        Returns at once, and can be called from any thread. As training is under way, or with the
        next call, a worker starts elsewhere, gets the state and takes over at a step; where there
        is no room, the group becomes smaller shortly before the time is over. No step is redone.
        What Ray itself drains (``ray drain-node``, its autoscaler), and workers that are sent
        SIGTERM, need no such call.

        Args:
            node_id: Ray's id of a node, as in the ``nodes`` of events.
            rank: of one worker instead, as of now.
            deadline_s: seconds from now after which it is gone; None where that is not known: then
                the worker stays until another has taken over.

        Raises:
            ValueError: unless one of `node_id` and `rank` is given, and is there; or if
                `deadline_s` is below 0.
        """
        if (node_id is None) == (rank is None):
            raise ValueError(
                f"drain(node_id={node_id!r}, rank={rank!r}): must be given one of the two."
            )
        if deadline_s is not None and not deadline_s >= 0:
            raise ValueError(f"drain(deadline_s={deadline_s!r}): must be at least 0, or None.")
        self._controller.drain(node_id, rank, deadline_s)

    def get_local_operator(self) -> Any:
        """Return the operator in this process.

        Raises:
            NotImplementedError: unless the trainer was made with ``use_local=True``.
        """
        self._check_open()
        member = self._controller.members[0]
        if not isinstance(member, InlineHandle):
            raise NotImplementedError(
                f"get_local_operator() needs {type(self).__name__}(use_local=True): all "
                "operators live in worker processes. Use apply_all_operators(fn) to reach them."
            )
        runner: Any = member.worker.runner
        return runner.operator

    def shutdown(self, force: bool = False) -> None:
        """End callbacks and workers and give the resources back; they are free when this returns.

        Waits for a write of ``save(blocking=False)`` that is under way.

        Args:
            force: kill the workers at once instead of letting them clean up first.

        Raises:
            CheckpointError: if that write failed; the workers are ended all the same.
            CallbackError: if a callback failed in ``on_train_end``, likewise.
        """
        try:
            if not isinstance(self._controller.state, Closed):
                self._callback_list.end(self)
        finally:  # also when Ctrl-C ends the callbacks
            self._controller.shutdown(force)
            self._finalizer.detach()
            self._writer.wait()
        self._callback_list.raise_failures()

    def __repr__(self) -> str:
        if isinstance(self._controller.state, Closed):
            where = "shut down"
        else:
            where = f"{self.num_workers} of {self.max_workers} workers"
        progress = self._controller.progress
        within = ", in another" if progress.in_epoch else ""
        done = f"{progress.epoch} epoch{'s' * (progress.epoch != 1)} done{within}"
        return (
            f"<{type(self).__name__} of {self.operator_name}: {where}, {done}, "
            f"step {self.global_step}>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.shutdown(force=kind is not None)
        except (CheckpointError, CallbackError) as failure:
            if error is None:
                raise
            error.add_note(str(failure))  # what went wrong first is what the caller shall see

    # ---- Ray Tune

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
            trainer_kwargs: arguments of the trainer, by name.

        Raises:
            RuntimeError: if Ray Tune is not installed.
            TypeError: if an argument is unknown, or `training_operator_cls` no TrainingOperator.
            ValueError: if `override_tune_step` does not take two arguments.
        """
        known = cls._known_arguments()
        cls._drop_defaults_of_older_ones(trainer_kwargs)
        for name in trainer_kwargs:
            if name not in known:
                raise cls._unknown(name)
        checked_config(cls.__name__, trainer_kwargs.get("config"))
        logdir = checked_logdir(trainer_kwargs.get("logdir"))
        where = f"{cls.__name__}.as_trainable(callbacks=...)"
        checked_callbacks(where, trainer_kwargs.get("callbacks", ()), logdir)
        arguments = cls._trial_arguments(trainer_kwargs)
        tune = importlib.import_module("raysgd.tune")  # a layer above
        trainable: type[Any] = tune.trainable_class(
            getattr(tune, cls._trainable), cls, override_tune_step, arguments
        )
        return trainable

    @classmethod
    def _known_arguments(cls) -> list[str]:
        """Return the arguments of a trainer class, with those that a subclass passes on."""
        kinds = [kind for kind in cls.__mro__ if OperatorTrainer in kind.__mro__[1:]]
        return [name for kind in kinds for name in inspect.signature(kind).parameters]

    @classmethod
    def _drop_defaults_of_older_ones(cls, arguments: dict[str, Any]) -> None:
        """Remove arguments of an older API that ask for nothing."""

    @classmethod
    def _unknown(cls, name: str) -> Exception:
        return unknown_argument(cls.__name__, name, cls._known_arguments())

    @classmethod
    def _trial_arguments(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        """Check the arguments for trials as far as that can be done without a trainer."""
        return arguments

    # ---- properties

    @property
    def config(self) -> dict[str, Any]:
        """The config; ``BATCH_SIZE`` is the global batch that the workers there are now share.

        Where a worker reads batches of its own, that is rounded down to what divides.
        """
        size = 1 if self._keeps_batch else max(1, self.num_workers)
        return rounded_config(self._options.config, size)

    @property
    def num_workers(self) -> int:
        """Workers there are now."""
        return len(self._controller.members)

    @property
    def max_workers(self) -> int:
        """The most workers, ``num_workers`` of the constructor."""
        return self._controller.max_workers

    max_replicas = max_workers

    @property
    def min_workers(self) -> int:
        """The fewest workers to train with."""
        return self._controller.min_workers

    @property
    def use_gpu(self) -> bool:
        """Whether workers use GPUs."""
        return bool(self._options.use_gpu)

    @property
    def backend(self) -> str:
        """What workers communicate through, where there are several."""
        return self._options.backend

    @property
    def use_fp16(self) -> bool | str:
        """The argument of the constructor."""
        return self._options.use_fp16

    @property
    def operator_name(self) -> str:
        """Name of the operator's class."""
        name: str = self._options.training_operator_cls.__qualname__
        return name

    @property
    def epoch(self) -> int:
        """The epoch that training is in or has just finished, from 1; 0 before the first."""
        progress = self._controller.progress
        return progress.epoch + progress.in_epoch

    @property
    def global_step(self) -> int:
        """Training steps that are done, over all calls."""
        return self._controller.progress.global_step

    @property
    def split(self) -> int:
        """In how many parts each batch is trained, since memory ran out; 1: as it is."""
        return self._controller.progress.split

    @property
    def events(self) -> list[Event]:
        """What happened to the group of workers: start, losses, resizes, errors; oldest first."""
        return list(self._controller.events)

    @property
    def latest_metrics(self) -> dict[str, Any]:
        """The newest metrics of `train` and `validate`, merged over workers, in one dict."""
        return {**self._latest_metrics, **self._shown}

    @property
    def last_call(self) -> LastCall | None:
        """Kind, time of the end and seconds of the newest `train` or `validate` that returned."""
        return self._last_call

    @property
    def logdir(self) -> Path | None:
        """The run folder."""
        return self._logdir

    @property
    def num_epochs(self) -> int | None:
        """How many epochs the `fit` under way shall complete; None outside of it."""
        return self._validations.num_epochs

    @property
    def validation_due(self) -> bool:
        """Whether `fit` is still to validate the newest epoch."""
        return self._validations.missing

    @property
    def stop_reason(self) -> str | None:
        """Why `fit` was asked to stop (`request_stop`); None if nobody has since it began."""
        return self._stop_reason

    # ---- helpers

    def _show(self, hook: str, metrics: dict[str, Any], call: LastCall) -> None:
        """Show the result of a call to the callbacks, which may add to it."""
        self._last_call = call
        before, self._shown = self._shown, metrics
        try:
            self._callback_list.call(hook, self, metrics)
        finally:
            self._shown = before
            self._latest_metrics.update(metrics)

    def _call(self, call: Call, own: bool = True) -> list[Any]:
        self._check_open()
        return self._calls.make(call, own)

    def _check_open(self, moves: bool = False) -> None:
        """Check that the workers may be called now; `moves`: by a call that changes the state."""
        for hook in self._callback_list.inside:
            if hook in ("on_event", "on_progress"):
                raise RuntimeError(
                    f"A callback cannot call the workers in {hook}, in the midst of another call. "
                    "Set a mark there, and make the call at the next on_epoch_end."
                )
            if hook in ("on_pause", "on_log") and moves:
                raise RuntimeError(
                    f"In {hook} a callback can read and save the state, but not train, validate "
                    "or load: the call of train() under way would lose its place."
                )
        if isinstance(self._controller.state, Closed):
            raise RuntimeError(
                f"This {type(self).__name__} is shut down, and what its workers held is gone: call "
                "save() or get_model() before, and create a new one to train on."
            )
        self._writer.raise_failure()


def _tried(parts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Merge the metrics of a validation that was tried on some batches."""
    try:
        return merge_workers(parts)
    except (AttributeError, NameError, TypeError):
        raise
    except Exception as error:  # so few may be too few, with all of one class say
        notes = " ".join(getattr(error, "__notes__", ()))
        logger.warning("A metric cannot be computed of the first batches: %r %s", error, notes)
        return {}


def _telling(trainer: weakref.ref[OperatorTrainer]) -> Callable[[], None]:
    """Return a function that tells callbacks of events and does not keep the trainer alive."""

    def tell() -> None:
        alive = trainer()
        if alive is not None:
            alive._callback_list.tell_events(alive)

    return tell


def _checked_count(name: str, value: Any, lowest: int) -> Any:
    if value is None:
        return None
    value = whole(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, but it is {value!r}.")
    if value < lowest:
        raise ValueError(f"{name}={value}: must be at least {lowest}.")
    return value


def _check_info(method: str, info: Any) -> None:
    if info is not None and not isinstance(info, Mapping):
        raise TypeError(f"{method}(info=...) must be a dict, but it is {info!r}.")


def _callable(method: str, function: Any) -> Any:
    if not callable(function):
        raise TypeError(f"{method}() takes a function, but got {function!r}.")
    return function
