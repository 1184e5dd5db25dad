"""What trainers of operators share, whatever the framework: the calls that users make."""

from __future__ import annotations

import copy
import itertools
import os
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from raysgd import checkpoint
from raysgd.config import rounded_config, warn_of_rounding
from raysgd.context import Progress
from raysgd.data import Dataset
from raysgd.elastic.events import Event
from raysgd.errors import CheckpointError
from raysgd.execution.supervisor import State, Supervisor
from raysgd.metrics import NUM_SAMPLES, merge_workers
from raysgd.progress_bar import ProgressBar

__all__ = ["OperatorTrainer"]


class OperatorTrainer:
    """Trains an operator on a group of workers. Use a subclass, such as TorchTrainer."""

    def __init__(
        self,
        config: Mapping[str, Any],
        supervisor: Supervisor,
        use_tqdm: bool,
        operator_name: str = "",
    ) -> None:
        self._user_config = dict(config)
        self._operator_name = operator_name
        self._writer = checkpoint.BackgroundWriter()
        self._supervisor = supervisor
        self._use_tqdm = use_tqdm
        self._calls = itertools.count()
        self._latest_metrics: dict[str, Any] = {}
        warn_of_rounding(config, supervisor.max_workers)
        # also when the trainer is dropped without shutdown(), or the driver's script ends
        self._finalizer = weakref.finalize(self, supervisor.shutdown, force=True)
        supervisor.start()

    # ---- training

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
            num_steps: train for that many batches on each worker instead, going on where the last
                call stopped and starting over as the loader ends.
            profile: add ``profile``, the mean seconds of the stages of a step.
            reduce_results: whether to merge the workers' metrics into one dict.
            max_retries: how many workers may be lost in this call. The survivors go on with
                what is left, as long as there are ``min_workers``.
            info: handed to ``train_epoch`` and, in ``batch_info["info"]``, to ``train_batch``.
            dataset: trains on it instead of the registered train loader.

        Returns:
            A dict with ``epoch`` (from 1), ``num_samples``, ``batch_count``, and the mean and the
            last value of what the batches returned; or a list of one such dict a worker.

        Raises:
            ValueError: if `num_steps` is below 1 or `max_retries` below 0.
            WorkerLostError: if more workers are lost than `max_retries`, or too few are left.
            BaseException: what user code raised. The steps that were done stay done, and the
                trainer can be used on.
        """
        _check_count("num_steps", num_steps, 1)
        _check_count("max_retries", max_retries, 0)
        if dataset is not None and not isinstance(dataset, Dataset):
            raise TypeError(f"train(dataset=...) takes a raysgd.data.Dataset, not {dataset!r}.")
        self._check_open()

        def goal(reached: Progress) -> dict[str, Any]:
            # in absolute terms, so that the call can be repeated after a loss
            if num_steps is None:
                return {"until_epoch": reached.epoch + 1}
            return {"until_step": reached.global_step + num_steps}

        results = self._run(
            "train", max_retries, profile, info, dataset=dataset, arguments_from=goal
        )
        return self._finished(results, reduce_results, epoch=self.epoch)

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
        _check_count("num_steps", num_steps, 1)
        self._check_open()
        results = self._run("validate", 3, profile, info, num_steps=num_steps)
        return self._finished(results, reduce_results)

    def update_scheduler(self, metric: float) -> None:
        """Call ``scheduler.step(metric)`` on every registered scheduler of every worker."""
        self._call("update_schedulers", metric=metric)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the state, on CPU: what `save` writes and `load_state_dict` takes.

        It holds ``epoch``, ``global_step``, ``operator`` (what the operator's ``state_dict``
        returned), ``models``, ``optimizers``, ``schedulers`` where there are some, and ``data``:
        the place in the data, and the states of the workers' random number generators.
        """
        self._check_open()
        if not self._supervisor.members and (snapshot := self._supervisor.snapshots.state()):
            # no worker lives; this is what is left, and it may be what the user gave to load
            return copy.deepcopy({k: value for k, value in snapshot.items() if k != "call"})
        generators = self._call("rng_state", max_losses=3, any_size=True)
        state: dict[str, Any] = self._call("state_dict", rank=0, max_losses=3, any_size=True)[0]
        state["data"]["rng"] = generators
        return state

    def load_state_dict(self, state: Mapping[str, Any], blocking: bool = False) -> None:
        """Take over a state, on any number of workers.

        Args:
            state: what `state_dict` returned, or that of an older library, without ``data``.
            blocking: there for older scripts; the workers always have the state on return.

        Raises:
            CheckpointError: if it is no state of a trainer, or of one with other models.
        """
        del blocking
        missing = [
            key
            for key in ("models", "optimizers", "epoch")
            if not isinstance(state, Mapping) or key not in state
        ]
        if missing:
            raise CheckpointError(f"This is no state of a trainer: {', '.join(missing)} missing.")
        self._call("load_state_dict", state=dict(state), max_losses=3)
        self._supervisor.snapshots.set(dict(state))

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
        state = self.state_dict()  # a copy, which nothing but the write uses
        manifest = checkpoint.Manifest(world_size=self.num_workers, operator=self._operator_name)
        write = checkpoint.prepare_write(state, target, manifest)
        if blocking:
            return write()
        self._writer.submit(write, target)
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
        models = self._call("models", rank=0, max_losses=3, any_size=True)[0]
        return checkpoint.save_model(models[0] if len(models) == 1 else models, target)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Take over the state in a file that `save` wrote. No code from the file is run.

        Waits for a write of ``save(blocking=False)`` that is under way.

        Args:
            path: a path or a URL.

        Raises:
            CheckpointError: if the file is missing, damaged, or not a state of this trainer, or
                if that write failed.
        """
        self._check_open()
        self._writer.wait()  # whatever the path: one file may have several
        self.load_state_dict(checkpoint.read_file(path))

    # ---- workers

    def apply_all_workers(self, fn: Callable[[], Any]) -> list[Any]:
        """Call `fn` on every worker and return what it returned, by rank."""
        return self._call("apply", function=_callable("apply_all_workers", fn))

    def apply_all_operators(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Call `fn` with the operator of every worker and return what it returned, by rank."""
        return self._call("apply_operator", function=_callable("apply_all_operators", fn))

    def shutdown(self, force: bool = False) -> None:
        """End the workers and give their resources back; they are free when this returns.

        Waits for a write of ``save(blocking=False)`` that is under way.

        Args:
            force: kill the workers at once instead of letting them clean up first.

        Raises:
            CheckpointError: if that write failed; the workers are ended all the same.
        """
        self._supervisor.shutdown(force)
        self._finalizer.detach()
        self._writer.wait()

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
        except CheckpointError as failure:
            if error is None:
                raise
            error.add_note(str(failure))  # what went wrong first is what the caller shall see

    # ---- properties

    @property
    def config(self) -> dict[str, Any]:
        """The config; ``BATCH_SIZE`` is the global batch that the workers there are now share."""
        return rounded_config(self._user_config, max(1, self.num_workers))

    @property
    def num_workers(self) -> int:
        """Workers there are now."""
        return len(self._supervisor.members)

    @property
    def max_workers(self) -> int:
        """The most workers, ``num_workers`` of the constructor."""
        return self._supervisor.max_workers

    @property
    def epoch(self) -> int:
        """The epoch that training is in or has just finished, from 1; 0 before the first."""
        progress = self._supervisor.progress
        return progress.epoch + progress.in_epoch

    @property
    def global_step(self) -> int:
        """Training steps that are done, over all calls."""
        return self._supervisor.progress.global_step

    @property
    def events(self) -> list[Event]:
        """What happened to the group of workers: start, losses, resizes, errors; oldest first."""
        return list(self._supervisor.events)

    @property
    def latest_metrics(self) -> dict[str, Any]:
        """The newest metrics of `train` and `validate`, merged over workers, in one dict."""
        return dict(self._latest_metrics)

    # ---- helpers

    def _run(
        self, method: str, max_losses: int, profile: bool, info: Any, **arguments: Any
    ) -> list[dict[str, Any]]:
        if info is not None and not isinstance(info, Mapping):
            raise TypeError(f"{method}(info=...) must be a dict, but it is {info!r}.")
        bar = ProgressBar(method, self.max_workers) if self._use_tqdm else None
        try:
            results = self._call(
                method,
                max_losses=max_losses,
                on_wait=None if bar is None else bar.update,
                call=next(self._calls),
                profile=profile,
                info=dict(info or {}),
                **arguments,
            )
            if bar is not None:
                bar.finish(merge_workers(results), self.num_workers)
            return results
        finally:
            if bar is not None:
                bar.close()

    def _finished(self, results: list[dict[str, Any]], reduce: bool, **extra: Any) -> Any:
        merged = {**extra, **merge_workers(results), **extra}
        covered = self._supervisor.progress.num_covered
        if self._supervisor.losses_in_call and covered is not None:
            # the steps are done, though what a lost worker measured of them is gone with it
            merged[NUM_SAMPLES] = covered
        self._latest_metrics.update(merged)
        return merged if reduce else [{**extra, **result, **extra} for result in results]

    def _call(self, method: str, **arguments: Any) -> list[Any]:
        self._check_open()
        outcomes = self._supervisor.call(method, **arguments)
        return [outcome.value() for outcome in outcomes]

    def _check_open(self) -> None:
        if self._supervisor.state is State.CLOSED:
            raise RuntimeError(
                f"This {type(self).__name__} is shut down; create a new one to train on."
            )
        self._writer.raise_failure()


def _check_count(name: str, value: Any, lowest: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, but it is {value!r}.")
    if value < lowest:
        raise ValueError(f"{name}={value}: must be at least {lowest}.")


def _callable(method: str, function: Any) -> Any:
    if not callable(function):
        raise TypeError(f"{method}() takes a function, but got {function!r}.")
    return function
