"""The base class of trainers of operators, with the methods that users call."""

import inspect
import itertools
import operator
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from raysgd._internal.arguments import (
    as_dict,
    as_int,
    check_function,
    is_number,
    unknown_argument,
)
from raysgd._internal.config import env_seconds
from raysgd._internal.nested import cat_outputs
from raysgd._internal.runner import Runner
from raysgd._internal.tracebacks import fold_tracebacks
from raysgd.callbacks.base import Callback, History
from raysgd.callbacks.callback_list import CallbackList, as_logdir, trainer_callbacks
from raysgd.cluster.actor_group import ActorGroup
from raysgd.cluster.worker_handle import LocalHandle
from raysgd.data import Dataset
from raysgd.driver.dispatcher import Dispatcher
from raysgd.driver.fit import FitLoop
from raysgd.driver.properties import TrainerProperties
from raysgd.driver.result_reporter import FitArguments, ResultReporter
from raysgd.driver.state_transfer import StateTransfer
from raysgd.elastic.controller import Controller
from raysgd.errors import CallbackError
from raysgd.loop.options import Options
from raysgd.loop.requests import (
    ApplyOperatorRequest,
    ApplyRequest,
    PredictRequest,
    UpdateSchedulersRequest,
    ValidateRequest,
)
from raysgd.metrics import as_test_metrics, merge_worker_metrics


@fold_tracebacks
class OperatorTrainer(TrainerProperties):
    """Trains an operator on a group of workers. Use a subclass, such as TorchTrainer."""

    _options_cls: type[Options]
    _concatenate: Callable[[Sequence[Any]], Any] = staticmethod(np.concatenate)

    def __init__(
        self,
        options: Options,
        runner_cls: Callable[[Any], Runner],
        initialization_hook: Callable[[], None] | None,
        callbacks: Iterable[Callback],
        logdir: str | os.PathLike[str] | None,
    ) -> None:
        if initialization_hook is not None:
            check_function(options.trainer_name, "initialization_hook", initialization_hook)
        name, self._logdir = options.trainer_name, as_logdir(logdir)
        attached = trainer_callbacks(name, callbacks, options.use_tqdm, self._logdir)
        start_timeout_s = env_seconds("SGD_PLACEMENT_GROUP_TIMEOUT_S", 100.0)
        self._options = options = options.resolve()  # may start Ray
        self._controller = controller = Controller(
            ActorGroup(options.group_options(start_timeout_s)),
            runner_cls(options),
            options.make_backend() if options.num_workers > 1 else None,
            initialization_hook,
            options.timeout_s,
            options.elastic,
        )
        self._callback_list = CallbackList(self, attached)
        self._callback_list.around_saving = controller.speed.saving
        self._reporter = reporter = ResultReporter(controller, self._callback_list)
        self._dispatcher = dispatcher = Dispatcher(controller, self._callback_list, name, reporter)
        self._transfer = StateTransfer(options, dispatcher)
        # Shut down even if the script never calls shutdown().
        self._finalizer = weakref.finalize(self, controller.shutdown, force=True)
        controller.record.on_event = weakref.WeakMethod(self._callback_list.notify_events)
        controller.start()

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
        """Train for one epoch, or for the rest of an epoch that has begun.

        Args:
            num_steps: number of steps to train instead. The next call continues after these steps.
                At the end of the loader, training continues at its start.
            profile: whether to add ``profile``, the mean seconds of the stages of a step.
            reduce_results: whether to merge the metrics of the workers into one dict.
            max_retries: how often workers may be lost in this call. Workers that are lost together
                count once.
            info: passed to ``train_epoch`` and, in ``batch_info["info"]``, to ``train_batch``.
            dataset: data to train on instead of the registered train loader.

        Returns:
            A dict with ``epoch`` (from 1), ``num_samples``, ``batch_count``, and the mean and last
            value of each metric. Or a list with a dict for each worker.

        Raises:
            ValueError: if a number is too small, or for a `dataset` with equal bits.
            WorkerLostError: if workers are lost more often than `max_retries`, or too few are left.
            BaseException: an error of user code. Finished steps stay done, and the trainer remains
                usable.
        """
        if num_steps is not None:
            num_steps = as_int("train", "num_steps", num_steps, 1)
        max_retries = as_int("train", "max_retries", max_retries, 0)
        info = as_dict("train", "info", info)
        if dataset is not None and not isinstance(dataset, Dataset):
            raise TypeError(f"train(dataset=...) takes a raysgd.data.Dataset, not {dataset!r}.")
        if dataset is not None and (argument := self._options.layout.logical_workers_argument):
            raise ValueError(f"train(dataset=...) does not work with {argument}. Leave it out.")
        result = self._dispatcher.train(
            num_steps, max_retries, info=info, profile=profile, dataset=dataset
        )
        return result.metrics if reduce_results else result.by_worker

    def validate(
        self,
        num_steps: int | None = None,
        profile: bool = False,
        reduce_results: bool = True,
        info: dict[str, Any] | None = None,
    ) -> Any:
        """Evaluate on the validation loader.

        Args:
            num_steps: number of batches on each worker; None for the rest of the loader. The next
                call continues after these batches, and at the end of the loader with the first one.
            profile: as in `train`.
            reduce_results: as in `train`.
            info: passed to ``validate`` and, in ``batch_info["info"]``, to ``validate_batch``.

        Returns:
            The metrics as in `train`, without ``epoch``.

        Raises:
            ValueError: if `num_steps` is below 1.
            WorkerLostError: if workers are lost more than three times, or too few are left.
        """
        result = self._dispatcher.validate(info, num_steps, profile)
        return result.metrics if reduce_results else result.by_worker

    def test(self, loader: Any, *, info: dict[str, Any] | None = None) -> dict[str, Any]:
        """Evaluate on another loader, without callbacks and `latest_metrics`.

        Args:
            loader: a loader, as for ``register_data``, or a function of the config that creates it.
            info: as in `validate`.

        Returns:
            The metrics of `validate`, with names such as ``test_loss``, without ``last_`` metrics.

        Raises:
            TypeError: if `loader` is not a loader, or cannot be partitioned for several workers.
        """
        info, number = as_dict("test", "info", info), next(self._dispatcher.call_numbers)
        request = ValidateRequest(call_number=number, loader=loader, info=info)
        results = self._dispatcher.run(request, changes_state=True, method="test", has_batches=True)
        return as_test_metrics(merge_worker_metrics(results))

    def predict(self, loader: Any) -> Any:
        """Return the results of ``predict_batch`` for a loader, in the order of its samples.

        Args:
            loader: as in `test`. It must not shuffle.

        Returns:
            The results, joined along their first dimension, on CPU: a tensor, an array (TFTrainer),
            or a dict or tuple of these. If rows differ in shape, a list of rows.

        Raises:
            TypeError: as in `test`, or if ``predict_batch`` returns another type.
            ValueError: if the loader shuffles.
        """
        request = PredictRequest(loader=loader)
        outputs = self._dispatcher.run(request, changes_state=True, has_batches=True)
        in_order = sorted(itertools.chain.from_iterable(outputs), key=operator.itemgetter(0))
        return cat_outputs([output for _, output in in_order], self._concatenate)

    def fit(
        self,
        num_epochs: int | None = None,
        validate_every: int | None = 1,
        callbacks: Iterable[Callback] = (),
        *,
        max_retries: int = 3,
        info: dict[str, Any] | None = None,
        log_every: int | None = None,
        verbose: bool = True,
        max_steps: int | None = None,
    ) -> History:
        """Train until `num_epochs` epochs are completed, with validations in between.

        `num_epochs` counts from the very first epoch: a trainer that was loaded or resumed at epoch
        3 trains 7 more for ``fit(10)``. An epoch that has begun, or that lacks its validation, is
        finished first. The first `fit` tries the validation on two batches before it trains.

        Args:
            num_epochs: number of completed epochs at which to end. Optional with `max_steps`.
            validate_every: number of epochs between validations; epoch `num_epochs` is always
                validated. None for no validation.
            callbacks: called in this `fit` only, after the callbacks of the trainer.
            log_every: number of steps between two logs. Loggers get the means since the last log or
                the start of the epoch, the learning rates, and the norm of the gradients.
            verbose: print a line for each epoch, and show a bar in a terminal or a notebook.
            max_retries: how often workers may be lost in one epoch.
            info: passed to the operator, as in `train`.
            max_steps: number of steps at which to end, counted from the very first step. Steps are
                batches, also with accumulation. An epoch that ends early is not validated.

        Returns:
            A list with the metrics of each epoch. Its ``stop_reason`` says why `fit` ended early.

        Raises:
            ValueError: if a number is below 1, or a callback has no folder to write to.
            CallbackError: if a callback raised.
        """
        given = FitArguments(num_epochs, validate_every, max_retries, info, log_every, max_steps)
        return FitLoop(self, self._options, self._dispatcher, given).run(callbacks, verbose)

    def request_stop(self, reason: str) -> None:
        """Ask `fit` to end after the current epoch. The first reason becomes `stop_reason`."""
        if self._dispatcher.stop_reason is None:
            self._dispatcher.stop_reason = str(reason)

    def update_scheduler(self, metric: float) -> None:
        """Call ``scheduler.step(metric)`` on every registered scheduler of every worker, once."""
        number = next(self._dispatcher.call_numbers)
        self._dispatcher.run(UpdateSchedulersRequest(call_number=number, metric=metric))

    # ---- state

    def state_dict(self, copy: bool = True, *, frozen: bool = True) -> dict[str, Any]:
        """Return the state, on CPU: the content of the files of `save`.

        Its keys are ``epoch``, ``global_step``, ``operator`` (the ``state_dict`` of the operator),
        ``models``, ``optimizers``, ``schedulers``, ``data`` (the position in the data, and the
        states of random number generators), ``callbacks``, and ``config`` (its numbers and
        strings), and ``provenance``.
        Some states also have ``averages`` (of weights), ``amp_native`` or ``amp_apex`` (a loss
        scaler), and ``validation_due`` (the newest metrics, before a validation of `fit`).

        Args:
            copy: for older scripts; without effect.
            frozen: as in `save`.

        Raises:
            CallbackError: if the ``state_dict`` of a callback raised.
        """
        self._dispatcher.check_open()
        return self._transfer.collect(frozen)

    def load_state_dict(self, state: Mapping[str, Any], blocking: bool = False) -> None:
        """Load a state on any number of workers.

        Args:
            state: a result of `state_dict`, or a state of RaySGD v1, which has no ``data``.
            blocking: for older scripts; without effect.

        Raises:
            CheckpointError: if the state is from another trainer, or the operator or a callback
                cannot load it. If so, the trainer is unchanged.
        """
        self._transfer.load(state)

    def save(
        self, path: str | os.PathLike[str], *, provenance: bool = True, frozen: bool = True
    ) -> str:
        """Write the state to one file, completely or not at all.

        Args:
            path: a path, or a URL such as ``s3://bucket/state.pt``.
            provenance: whether the manifest says where the state came from, as far as it is known:
                ``started``, ``command`` (without secrets), ``commit`` of the script's repository,
                ``dirty``, ``seed``, ``loaders`` (``samples``, ``fingerprint``), and ``parent``, the
                checkpoint that was loaded.
            frozen: False (for PyTorch) leaves out frozen parameters that still are as ``setup``
                made them, and keeps their digests. `load` compares these with the parameters of the
                new ``setup``.

        Returns:
            The absolute path, or the URL.

        Raises:
            CheckpointError: if the file cannot be written there, or models, optimizers, or averages
                have NaN or infinity.
            WorkerLostError: if all workers are lost, and there is no snapshot.
        """
        return self._transfer.save(path, provenance, frozen)

    def save_model(self, path: str | os.PathLike[str], *, frozen: bool = True) -> str:
        """Write the weights of the models to a ``.safetensors`` file, as `save` writes the state.

        With several models the keys begin with ``0.``, ``1.``, …. With ``frozen=False``, the file
        lacks the same parameters as a file of ``save(frozen=False)``.

        Raises:
            CheckpointError: if the file cannot be written there.
            ImportError: if safetensors is not installed.
        """
        return self._transfer.save_model(path, frozen)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load a file that `save` wrote, from a path or a URL. Loading runs no code from the file.

        If all workers are lost, new ones start. They need no snapshot.

        Raises:
            CheckpointError: if the file is missing, damaged, or not a state of this trainer.
        """
        self._transfer.load_file(path)

    # ---- workers

    def apply_all_workers(self, fn: Callable[[], Any]) -> list[Any]:
        """Call `fn` on every worker, and return the results by rank.

        Raises:
            TypeError: if `fn` is not a function, or if `fn` or its result cannot be pickled.
            WorkerLostError: if a worker is lost. The call is not repeated.
        """
        check_function("apply_all_workers", "fn", fn)
        return self._dispatcher.run(ApplyRequest(function=fn), max_retries=0)

    def apply_all_operators(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Call `fn(operator)` on every worker. See `apply_all_workers`.

        New workers receive its changes of learning rates, parameters, ``requires_grad``, and batch
        sizes (``register_data``), but of other attributes only what ``state_dict`` returns.
        """
        check_function("apply_all_operators", "fn", fn)
        return self._dispatcher.run(ApplyOperatorRequest(function=fn), max_retries=0)

    def describe_data(self) -> dict[str, str]:
        """Return how the workers read each registered loader, and where a resumed run begins."""
        return dict(self.apply_all_operators(operator.methodcaller("describe_data"))[0])

    def drain(
        self,
        *,
        node_id: str | None = None,
        rank: int | None = None,
        deadline_s: float | None = None,
    ) -> None:
        """Announce the preemption of a node or a worker. Any thread may call this.

        A replacement starts on another node, and takes over at a step. If none fits, the group
        becomes smaller shortly before the deadline. No step is repeated. You need not announce
        nodes that Ray drains, or workers that receive SIGTERM.

        Args:
            node_id: the ID of a node in Ray, as in the ``node_ids`` of events.
            rank: the current rank of one worker instead.
            deadline_s: seconds until the preemption; None to wait for a replacement.

        Raises:
            ValueError: unless one of `node_id` and `rank` is given, and exists; or if `deadline_s`
                is below 0.
        """
        if (node_id is None) == (rank is None):
            raise ValueError(f"drain(node_id={node_id!r}, rank={rank!r}): pass one of the two.")
        if deadline_s is not None and not (is_number(deadline_s) and deadline_s >= 0):
            raise ValueError(f"drain(deadline_s={deadline_s!r}): must be at least 0, or None.")
        if rank is not None:
            rank = as_int("drain", "rank", rank)
        elif not isinstance(node_id, str):
            raise TypeError(f"drain(node_id={node_id!r}): must be the ID of a node, a str.")
        self._controller.drain(node_id, rank, deadline_s)

    def get_local_operator(self) -> Any:
        """Return the operator in this process.

        Raises:
            NotImplementedError: unless the trainer was created with ``use_local=True``.
        """
        self._dispatcher.check_open()
        member = self._controller.members[0]
        if not isinstance(member, LocalHandle):
            raise NotImplementedError(
                f"get_local_operator() needs {type(self).__name__}(use_local=True). Use "
                "apply_all_operators(fn) to reach operators in other processes."
            )
        runner: Any = member.worker.runner
        return runner.operator

    def shutdown(self, force: bool = False) -> None:
        """Stop callbacks and workers, and release the resources.

        Args:
            force: whether to kill the workers without letting them clean up.

        Raises:
            CallbackError: if a callback failed in ``on_train_end``, after the workers have stopped.
        """
        try:
            if not self._controller.is_shut_down:
                self._callback_list.end()
        finally:  # also if Ctrl-C ends the callbacks
            self._controller.shutdown(force)
            self._finalizer.detach()
        self._callback_list.raise_failure()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            self.shutdown(force=kind is not None)
        except CallbackError as failure:
            if error is None:
                raise
            error.add_note(str(failure))  # the caller must see the first error

    def __reduce__(self) -> Any:
        raise TypeError(f"A {type(self).__name__} cannot be pickled or copied. Use state_dict().")

    # ---- Ray Tune

    @classmethod
    def as_trainable(
        cls,
        *,
        override_tune_step: Callable[[Any, dict[str, Any]], dict[str, Any]] | None = None,
        **trainer_kwargs: Any,
    ) -> type[Any]:
        """Return a ``ray.tune.Trainable`` subclass that trains with this kind of trainer.

        The config of a trial is merged over `config`, key by key. Its ``num_workers``,
        ``num_cpus_per_worker`` and ``use_gpu`` are also arguments of the trainer.

        Args:
            override_tune_step: a function of the trainer and ``{"iteration": n}`` (the number of
                earlier results) that returns the metrics of one step. By default a step is one
                ``train()`` and, if there is a validation loader, one ``validate()``.
            trainer_kwargs: arguments of the trainer.

        Raises:
            RuntimeError: if Ray Tune is not installed.
            TypeError: if an argument is unknown, or `training_operator_cls` is not a
                TrainingOperator.
            ValueError: if `override_tune_step` does not take two arguments.
        """
        arguments = cls._trial_arguments(trainer_kwargs)
        from raysgd.trials import trainable_class

        return trainable_class(cls, override_tune_step, arguments)

    @classmethod
    def _trial_arguments(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        """Check the arguments for trials without a trainer. Subclasses check more."""
        known = known_arguments(cls)
        for name in arguments:
            if name not in known:
                raise unknown_argument(cls.__name__, name, known)
        return arguments


def known_arguments(trainer_cls: type[OperatorTrainer]) -> list[str]:
    """Return the arguments of a trainer class, and of the base class that it passes them to."""
    kinds = [kind for kind in trainer_cls.__mro__ if OperatorTrainer in kind.__mro__[1:]]
    return [name for kind in kinds for name in inspect.signature(kind).parameters]
