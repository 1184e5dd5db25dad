"""Saving checkpoints during a run, and resuming from the newest."""

import functools
import logging
import math
import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, ClassVar, Literal

from raysgd._internal.arguments import check_flags, resolve_mode
from raysgd._internal.values import missing_metric
from raysgd.callbacks.base import AnyTrainer, Callback, CallInfo
from raysgd.checkpoint import CheckpointStore
from raysgd.checkpoint.file import NonFiniteError
from raysgd.checkpoint.location import Location
from raysgd.errors import BadStepsError, CallbackError, CheckpointError, RaySGDError, RemoteError

logger = logging.getLogger(__name__)


class CheckpointCallback(Callback):
    """Saves checkpoints into a folder, and resumes from the newest intact one.

    Without `monitor`, it saves after each epoch, or every few steps. With `monitor`, it saves when
    the metric is measured: for ``val_loss`` after ``validate()`` instead of after the epoch. At the
    end of ``fit()`` or of the trainer, and after an exception, it saves the steps since the last
    save, unless the workers are lost. A state with NaN or infinity is not saved: earlier
    checkpoints stay, and a warning names the array.

    Args:
        folder: a path, or a URL for fsspec; None for ``checkpoints`` in the trainer's ``logdir``.
        every: "epoch", or a number of steps. Training pauses for the save at multiples of it.
        keep: number of checkpoints to keep; None for all. With `monitor`, these are the best, and
            the newest is kept in addition. Only complete validations after training count.
        monitor: name of the metric that selects the best checkpoints. If training and validation
            have a metric of this name, the one of validation counts. None keeps the newest
            checkpoints.
        mode: "min" if smaller values of the metric are better, or "max". None: from the name of the
            metric, as "max" for ``val_accuracy``.
        blocking: False copies the state, and writes it while training continues.
        resume: whether a trainer that has not trained yet starts from the newest intact checkpoint
            in the folder. A warning names damaged checkpoints.
        experiment: name of the experiment, one per folder; None for the operator's name.
        provenance: whether the manifest says where the state came from: see `trainer.save`.
        frozen: False leaves out frozen parameters of ``setup``: see `trainer.save`.

    Raises:
        TypeError: if `blocking`, `resume`, `provenance`, or `frozen` is not a bool.
        ValueError: if an argument has a value that is not allowed.
    """

    order: ClassVar[int] = 1  # run after callbacks that change the state, but start before them
    saves_state: bool = True

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        every: Literal["epoch"] | int = "epoch",
        keep: int | None = 3,
        monitor: str | None = None,
        mode: Literal["min", "max"] | None = None,
        blocking: bool = True,
        resume: bool = True,
        experiment: str | None = None,
        provenance: bool = True,
        frozen: bool = True,
    ) -> None:
        if every != "epoch" and (type(every) is not int or every < 1):
            raise ValueError(
                f'CheckpointCallback(every={every!r}): must be "epoch" or a number of steps.'
            )
        mode = resolve_mode("CheckpointCallback", monitor, mode)
        flags = {"blocking": blocking, "resume": resume, "provenance": provenance, "frozen": frozen}
        check_flags("CheckpointCallback", **flags)
        self._folder = folder
        self.needs_logdir = not folder
        self._every = every
        self.monitor = monitor
        self._blocking = blocking
        self._resume = resume
        self._experiment = experiment
        self._has_provenance, self._has_frozen = provenance, frozen
        self._new_store = functools.partial(CheckpointStore, keep=keep, monitor=monitor, mode=mode)
        self._new_store(folder or ".", experiment=experiment or "any")  # check the arguments early
        self._store: CheckpointStore | None = None
        self._pending_write: Future[None] | None = None
        """The newest write, in a thread."""
        self._newest: str | None = None
        self._saved_at = 0
        """The step of the newest checkpoint, or of one that need not or cannot be saved."""
        self._is_rated = False
        """Whether a complete validation has measured the monitored metric."""
        self.restored_from: str | None = None
        """The checkpoint from which training resumed."""

    @property
    def best(self) -> str | None:
        """The path or URL of the checkpoint with the best monitored metric; None without one."""
        self._wait()
        return None if self._store is None else self._store.best

    def save_location(self, logdir: Path | None) -> Location:
        """Return the folder of the checkpoints of a trainer with this `logdir`."""
        return Location(self._folder or Path(logdir or ".", "checkpoints"))

    def on_train_start(self, trainer: AnyTrainer) -> None:
        self._is_rated = False
        folder = self.save_location(trainer.logdir)
        experiment = self._experiment or trainer.operator_name
        self._store = self._new_store(folder.path, experiment=experiment)
        self._saved_at = trainer.global_step
        if self._resume and not trainer.has_trained:
            self._restore(trainer, self._store)
        if self.restored_from is None:
            folder.make_folder()  # an error before training, not at the first save

    def _restore(self, trainer: AnyTrainer, store: CheckpointStore) -> None:
        self._newest = self.restored_from = None  # forget the run of another trainer
        if (restored := store.restore()) is None:
            return
        try:
            trainer.load_state_dict(restored.state)
        except CheckpointError as error:
            raise CheckpointError(f"{error} Or use another folder (or logdir).") from None
        self.restored_from, self._saved_at = restored.path, trainer.global_step
        self._newest = Location(restored.path).label
        # Warn because, for example, the script's learning rate has no effect now.
        logger.warning(
            "Resuming from %s, with its optimizers: epoch %d, step %d. To start from scratch, use "
            "another folder.",
            self._newest,
            trainer.epoch,
            trainer.global_step,
        )

    def next_pause(self, global_step: int) -> int | None:
        self._saved_at = min(self._saved_at, global_step)  # an earlier state was loaded
        return None if self._every == "epoch" else (global_step // self._every + 1) * self._every

    def on_pause(self, trainer: AnyTrainer) -> None:
        self._save(trainer, {})

    def on_epoch_end(self, trainer: AnyTrainer, metrics: dict[str, Any]) -> None:
        if self.monitor is None and self._every == "epoch" and not trainer.is_epoch_result_due:
            self._save(trainer, metrics)  # before the validation, which may take long

    def on_epoch_result(self, trainer: AnyTrainer, call: CallInfo, metrics: dict[str, Any]) -> None:
        if self.monitor is None:
            if self._every == "epoch" and call.kind == "train":
                self._save(trainer, metrics)
        elif self.monitor in metrics:
            self._is_rated = True
            self._save(trainer, metrics)
        elif call.kind == "validate" and "epoch" in metrics:  # with the metrics of training
            known = trainer.latest_metrics
            raise ValueError(missing_metric("CheckpointCallback", self.monitor, known))
        elif not (trainer.is_fitting or self._is_rated):  # in a loop, keep the newest
            self._save(trainer, metrics)

    def on_exception(self, trainer: AnyTrainer, error: BaseException) -> None:
        # After other errors of raysgd, reading the state could wait for workers that never answer.
        may_answer = BadStepsError | CallbackError | RemoteError
        if isinstance(error, RaySGDError) and not isinstance(error, may_answer):
            self._saved_at = trainer.global_step
        try:
            self._save_unsaved(trainer)
        finally:
            if self._newest is not None and self._resume:
                error.add_note(f"If you start the script again, it resumes from {self._newest}.")

    def _save_unsaved(self, trainer: AnyTrainer) -> None:
        """Save the steps since the last save, if any, and wait until the checkpoint is written."""
        if trainer.global_step > self._saved_at:
            self._save(trainer, {})
        self._wait()

    on_train_end = _save_unsaved

    def _wait(self) -> None:
        """Wait until the write has ended, and raise its error, once."""
        if self._pending_write is not None:
            wait([self._pending_write])  # Ctrl-C ends only the wait, not the write
            write, self._pending_write = self._pending_write, None
            write.result()

    def _save(self, trainer: AnyTrainer, metrics: dict[str, Any]) -> None:
        assert self._store is not None
        self._wait()  # wait before copying the state, to hold one copy at a time
        if self.monitor is not None:
            metrics = {self.monitor: math.nan, **metrics}  # the metric is unknown within an epoch
        try:
            state = trainer.state_dict(frozen=self._has_frozen)
        except Exception as error:
            if not isinstance(error, RaySGDError):  # a second attempt would repeat the error
                self._saved_at = trainer.global_step
            raise
        if not self._has_provenance:
            del state["provenance"]
        self._saved_at = trainer.global_step
        store, labels = self._store, (trainer.num_workers, trainer.operator_name)

        def write() -> None:
            try:
                self._newest = Location(store.save(state, metrics, *labels)).label
            except NonFiniteError as error:
                logger.warning("%s", error)
            except Exception as error:
                if not self._blocking:  # the error is raised later
                    logger.error("Could not write a checkpoint: %s", error)
                raise

        executor = ThreadPoolExecutor(1)  # the interpreter waits for it at exit
        self._pending_write = executor.submit(write)
        executor.shutdown(wait=False)
        if self._blocking:
            self._wait()
