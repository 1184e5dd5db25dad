"""Checkpoints of a run, and going on from the newest."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from raysgd._internal.nested import map_leaves
from raysgd.callbacks.base import Callback, Trainer
from raysgd.callbacks.logger import folder_for
from raysgd.callbacks.values import suggest_metric
from raysgd.checkpoint import BackgroundWriter, CheckpointStore
from raysgd.checkpoint.location import locate
from raysgd.checkpoint.sharded import UnsharedFolderError
from raysgd.errors import CheckpointError, WorkerLostError

__all__ = ["CheckpointCallback"]

logger = logging.getLogger(__name__)


class CheckpointCallback(Callback):
    """Saves checkpoints into a folder, and resumes from the newest intact one.

    Without `monitor` it saves at the end of each epoch, or every so many steps. With `monitor` it
    saves when the metric is measured: after ``validate()`` for ``val_loss``, in place of the end
    of the epoch. If training has a metric of that name too, it saves at both times, and validated
    checkpoints are kept first. If an exception ends training before the metric is measured, the
    epoch is saved without it.

    Args:
        folder: a path, or a URL of any file system that fsspec knows; None for ``checkpoints`` in
            the trainer's ``logdir``.
        every: "epoch", or a number of steps. Training pauses for the save at multiples of it.
        keep: how many checkpoints to keep; None for all. With `monitor` the best, and the newest
            in addition.
        monitor: name of the metric by which the best are kept, of training or of validation; of
            validation if both have it. Without one the newest are kept.
        mode: "min" if smaller values of the metric are better, or "max".
        blocking: False: copy the state, and write it while training continues.
        resume: whether a trainer that has not trained yet starts from the newest intact checkpoint
            in the folder. A warning names the damaged ones.
        job: name of the job, one for each folder; None for the operator's name.
        sharded: whether each worker writes its rows of models with ``register(sharding="full")``,
            as ``trainer.save(folder, sharded=True)`` does. Then a checkpoint is a folder, and
            training waits for it. False: the driver gathers the state in its memory. None: True
            for such models if `folder` is on a file system that the workers share, else False.
        on_exception: whether to save, also in mid-epoch, if an exception or Ctrl-C ends training,
            unless too few workers are left or the state has NaN in it.

    Raises:
        ValueError: if an argument has a value that is not allowed.
    """

    stage: ClassVar[int] = 1  # after the others note their state, before they start
    saves_state: bool = True

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        every: Literal["epoch"] | int = "epoch",
        keep: int | None = 3,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        blocking: bool = True,
        resume: bool = True,
        job: str | None = None,
        on_exception: bool = False,
        sharded: bool | None = None,
    ) -> None:
        if sharded not in (True, False, None):
            raise ValueError(f"CheckpointCallback(sharded={sharded!r}): must be a bool or None.")
        if sharded and not blocking:
            raise ValueError(
                "CheckpointCallback(sharded=True) waits until all is written: leave blocking out."
            )
        if every != "epoch" and (
            isinstance(every, bool) or not isinstance(every, int) or every < 1
        ):
            raise ValueError(
                f'CheckpointCallback(every={every!r}): must be "epoch" or a number of steps.'
            )
        self._folder = folder
        self.needs_logdir = not folder
        self._every = every
        self.monitor = monitor
        self._blocking = blocking
        self._resume = resume
        self._on_exception = on_exception
        self._sharded = sharded
        self._job = job
        self._new_store = functools.partial(CheckpointStore, keep=keep, monitor=monitor, mode=mode)
        # refuses wrong arguments early
        checked = self._new_store(folder or ".", job=job or "checked here")
        if sharded and not checked.is_local:
            raise ValueError(
                "CheckpointCallback(sharded=True): the workers write into a folder of a file "
                "system that all of them have mounted. Give its path, not a URL."
            )
        self._store: CheckpointStore | None = None
        self._writer = BackgroundWriter()
        self._num_epochs_missing = 0
        self._newest: str | None = None
        self._saved_at = 0
        """The step of the newest."""
        self._unjudged = False
        """Whether an epoch is over, and is saved when its metric is measured."""
        self.restored_from: str | None = None
        """The checkpoint that training went on from."""
        self.passed_over: list[tuple[str, str]] = []
        """Newer ones that could not be loaded, and why."""

    @property
    def best(self) -> str | None:
        """The path or URL of the checkpoint whose monitored metric is best; None without one.

        Raises:
            CheckpointError: if the folder cannot be reached.
        """
        self._writer.wait()
        return None if self._store is None else self._store.best

    def on_train_start(self, trainer: Trainer) -> None:
        """Go on from the newest checkpoint."""
        if self._sharded:
            trainer.apply_all_operators(_check_divided)
        folder = self._folder or folder_for(trainer, None, "checkpoints")
        self._store = self._new_store(folder, job=self._job or trainer.operator_name)
        if not self._resume or trainer.epoch or trainer.global_step:
            return  # what was trained or loaded already is what the user wants
        restored = self._store.restore()  # logs what it passes over
        if restored is None:
            return
        try:
            trainer.load_state_dict(restored.state)
        except CheckpointError as error:
            raise CheckpointError(
                f"{restored.shown} is not of what is trained here. Train with the config that it "
                "was written with, give another folder (or logdir), or empty this one to begin "
                f"anew. {error}"
            ) from error
        self.restored_from, self.passed_over = restored.path, restored.passed_over
        self._newest = restored.shown
        self._saved_at = trainer.global_step
        # seen by default: the script's own learning rate, for one, has no effect now
        logger.warning(
            "Going on from %s, with its optimizers: epoch %d, step %d. (Another folder begins "
            "anew.)",
            restored.shown,
            trainer.epoch,
            trainer.global_step,
        )

    def next_pause(self, global_step: int) -> int | None:
        """Pause at the next multiple."""
        if self._every == "epoch":
            return None
        return (global_step // self._every + 1) * self._every

    def on_pause(self, trainer: Trainer) -> None:
        """Save in mid-epoch."""
        self._save(trainer, {})

    def on_epoch_end(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        """Save, unless the metric that judges it is still to come."""
        if self.monitor in metrics or (self.monitor is None and self._every == "epoch"):
            # a validation that is to come may have the metric too, and then rates
            self._save(trainer, metrics, of_training=True)
        elif self.monitor is not None:
            self._num_epochs_missing += 1
            self._unjudged = self._every == "epoch"
            if self._num_epochs_missing == 2:
                logger.warning(
                    "CheckpointCallback(monitor=%r): two epochs are over without it, and nothing "
                    "is saved before it is measured. There are: %s.",
                    self.monitor,
                    ", ".join(trainer.latest_metrics),
                )

    def on_validation_end(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        """Save with the metric that judges it."""
        if self.monitor is None:
            return
        if self.monitor in metrics:
            self._save(trainer, {**trainer.latest_metrics, **metrics})
        elif self.monitor not in trainer.latest_metrics:
            raise ValueError(
                f"CheckpointCallback(monitor={self.monitor!r}): there is no such metric. There "
                f"are: {', '.join(trainer.latest_metrics)}."
                + suggest_metric(self.monitor, trainer.latest_metrics)
            )

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Save an epoch that waits to be judged, or all, and say where the script would go on."""
        lacks = self._unjudged or (self._on_exception and trainer.global_step != self._saved_at)
        if lacks and not isinstance(error, WorkerLostError):  # who is left may not answer
            self._save(trainer, {}, unless_nan=True)
            self._writer.wait()
        if self._newest is not None and self._resume:
            error.add_note(f"Started again, the script goes on from {self._newest}.")

    def on_train_end(self, trainer: Trainer) -> None:
        """Wait for the write that is under way."""
        self._writer.wait()

    def _save(
        self,
        trainer: Trainer,
        metrics: dict[str, Any],
        of_training: bool = False,
        unless_nan: bool = False,
    ) -> None:
        assert self._store is not None
        self._num_epochs_missing = 0
        self._writer.wait()  # before the state is copied, so that there is one at a time
        if self.monitor is not None:
            metrics = {self.monitor: math.nan, **metrics}  # in mid-epoch it is not known
        with self._state(trainer, self._store, unless_nan) as state:
            if state is None:
                logger.warning("Not saved after an exception: the state has NaN in it.")
                return
            self._unjudged, self._saved_at = False, trainer.global_step
            save = functools.partial(
                self._store.save,
                state,
                metrics,
                trainer.num_workers,
                trainer.operator_name,
                of_training,
            )

            def write() -> None:
                self._newest = locate(save()).shown

            if self._blocking or "tensors" in state:
                write()
            else:
                self._writer.submit(write, f"step {trainer.global_step}")

    @contextlib.contextmanager
    def _state(
        self, trainer: Any, store: CheckpointStore, unless_nan: bool
    ) -> Iterator[dict[str, Any] | None]:
        """Yield the state to save, whose tensors may be in a folder as long as this lasts.

        Or None if it has NaN in it, and `unless_nan`.
        """
        by_itself = self._sharded is None
        if trainer._state.is_fully_sharded and store.is_local if by_itself else self._sharded:
            if unless_nan and any(trainer.apply_all_operators(_rows_have_nan)):
                yield None
                return
            with contextlib.ExitStack() as writing:
                try:
                    yield writing.enter_context(trainer._state.sharded(store.tensors_folder))
                    return
                except UnsharedFolderError as error:
                    if not by_itself:
                        raise
                    self._sharded = False
                    logger.warning("%s The driver saves whole states instead.", error)
        state = trainer.state_dict(copy=False)
        yield None if unless_nan and _has_nan((state["models"], state["optimizers"])) else state


def _check_divided(operator: Any) -> None:
    """Refuse what workers do not write together. Runs on the worker."""
    if getattr(operator._train_state, "sharding", None) != "full":
        raise ValueError(
            "CheckpointCallback(sharded=True) is for models that are divided, by "
            'register(sharding="full"). Leave sharded out.'
        )


def _rows_have_nan(operator: Any) -> bool:
    """Whether what a worker holds has NaN in it. Runs on the worker."""
    train_state = operator._train_state
    return _has_nan((train_state.training_state(), train_state.shards()))


def _has_nan(state: Any) -> bool:
    """Whether there is a NaN among the arrays and tensors of a state. Masks may be infinite."""
    found = []
    map_leaves(state, lambda x: found.append(hasattr(x, "dtype") and bool((x != x).any())))
    return any(found)
