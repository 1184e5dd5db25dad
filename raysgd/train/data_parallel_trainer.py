"""The trainer with the API of current Ray Train: ``fit()``, and ``restore()`` after an error."""

import copy
import dataclasses
import logging
import os
import pickle
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, Self

import cloudpickle

from raysgd._internal.arguments import as_dict, unknown_argument
from raysgd._internal.nested import try_copy
from raysgd._internal.tracebacks import fold_tracebacks
from raysgd.checkpoint.file import read_pickle, write_pickle
from raysgd.checkpoint.manifest import Manifest
from raysgd.cluster.serialization import find_unpicklable, unpicklable_key
from raysgd.train.arguments import bind_config, make_folder, run_folder
from raysgd.train.backend import BackendConfig
from raysgd.train.callbacks.callback import TrainingCallbackList
from raysgd.train.configs import as_run_config, as_scaling_config, executor_arguments
from raysgd.train.datasets import Datasets
from raysgd.train.executor import BackendExecutor
from raysgd.train.result import REPORTS, Result, append_report, read_reports

logger = logging.getLogger(__name__)

_TRAINER_FILE = "trainer.pkl"


@fold_tracebacks
@dataclasses.dataclass(eq=False, repr=False)
class DataParallelTrainer:
    """Runs a training function on several workers, each with its shard of the data.

    Runs on the driver::

        trainer = DataParallelTrainer(train_loop, scaling_config=ScalingConfig(num_workers=2))
        result = trainer.fit()

    Subclass it to predefine the function, or to use your own Backend.

    Args:
        train_loop_per_worker: a function of no argument, or of the config. Its result is ignored.
        train_loop_config: the config that the function gets.
        backend_config: what to set up on the workers; None for nothing.
        scaling_config: number of workers and their resources: raysgd's or Ray's class, or a dict.
        dataset_config: which data sets to split: a dict of True or False by name, or Ray's
            DataConfig. By default only "train" is split, and every worker gets all rows of the
            other data sets.
        run_config: the folder of the run, the number of allowed losses, and callbacks.
        datasets: Ray Datasets by name (`raysgd.train.get_dataset_shard`).
        metadata: a dict that ``get_context().get_metadata()`` returns on the workers.
        resume_from_checkpoint: checkpoint to start from.
    """

    train_loop_per_worker: Callable[..., Any]
    _: dataclasses.KW_ONLY
    train_loop_config: Any = None
    backend_config: Any = None
    scaling_config: Any = None
    dataset_config: Any = None
    run_config: Any = None
    datasets: Any = None
    metadata: Any = None
    resume_from_checkpoint: Any = None
    _restored_folder: Path | None = dataclasses.field(default=None, init=False)
    """Folder of the run to continue; None for a new run."""

    def __post_init__(self) -> None:
        self.backend_config = self.backend_config or BackendConfig()
        if not isinstance(self.backend_config, BackendConfig):
            raise TypeError(f"backend_config={self.backend_config!r}: must be a BackendConfig.")
        for name in ("train_loop_config", "datasets", "metadata"):
            setattr(self, name, as_dict(type(self).__name__, name, getattr(self, name)))
        if not hasattr(self.dataset_config, "_datasets_to_split"):
            self._check_split()
        self.scaling_config = as_scaling_config(self.scaling_config)
        self.run_config = as_run_config(self.run_config)
        # These two only check the arguments.
        bind_config(self.train_loop_per_worker, self.train_loop_config)
        TrainingCallbackList(self.run_config.callbacks)
        self.create_executor()

    def setup(self) -> None:
        """Prepare the run. `fit` and trials call this method first. Subclasses can override it."""

    # ---- running

    def fit(self) -> Result:
        """Run the function, and return its last metrics, its checkpoints, and its folder.

        Raise the exception of the function, with the worker's traceback as its cause. Raise
        RuntimeError if workers are lost more often than ``max_failures`` allows, or if they do not
        report and save in step. After an error, `restore` continues from the newest checkpoint.
        """
        self.setup()
        folder = self._prepare_folder()
        self._restored_folder = None  # the next fit() is a new run, unless restored
        log = folder / REPORTS
        last = next(reversed(read_reports(log)), None)  # of a run that is restored
        executor, datasets = self.create_executor(), Datasets(self.datasets, self._is_split)
        datasets.materialize()
        executor.start()
        try:
            others = {"run_dir": folder, "dataset": datasets, "name": folder.name}
            for results in self.reports(executor, folder, log, **others):
                last = results[0]
        finally:
            executor.shutdown()
        return Result(
            metrics=last,
            checkpoint=executor.checkpoints.newest_checkpoint(),
            best_checkpoints=executor.checkpoints.best_checkpoints(),
            path=str(folder),
        )

    def reports(
        self,
        executor: BackendExecutor,
        folder: Path,
        log: Path | None = None,
        **others: Any,
    ) -> Generator[list[dict[str, Any]]]:
        """Run the function with callbacks that write to `folder`, and yield the reports by rank.

        Append those of worker 0 to the file `log`. `others` are further arguments of
        `start_training`.
        """
        arguments = {
            "dataset": Datasets(self.datasets, self._is_split),
            "checkpoint": self.resume_from_checkpoint,
            "checkpoint_strategy": self.run_config.checkpoint_config,
            "metadata": self.metadata,
            **others,
        }
        function = bind_config(self.train_loop_per_worker, dict(self.train_loop_config))
        callback_list = TrainingCallbackList(self.run_config.callbacks)
        with callback_list.run(folder, self.train_loop_config):
            executor.start_training(function, resume=True, **arguments)
            while (results := executor.fetch_next_result()) is not None:
                if log is not None:
                    append_report(log, results[0])
                callback_list.handle(results)
                yield results
            executor.finish_training()

    def create_executor(self) -> BackendExecutor:
        """Return a new executor for the workers that the configs describe. It is not started."""
        arguments = executor_arguments(self.scaling_config, self.run_config.failure_config)
        return BackendExecutor(self.backend_config, **arguments)

    def with_config(self, config: Mapping[str, Any]) -> Self:
        """Return a copy with `config` merged over ``train_loop_config``."""
        copied = copy.copy(self)
        copied.train_loop_config = {**self.train_loop_config, **config}
        copied.run_config = try_copy(self.run_config)  # reused actors share the class
        return copied

    def _check_split(self) -> None:
        where = type(self).__name__
        self.dataset_config = as_dict(where, "dataset_config", self.dataset_config)
        for name, choice in self.dataset_config.items():
            is_known = name in (*self.datasets, "*") or not self.datasets
            if choice not in (None, True, False) or not is_known:
                raise ValueError(
                    f"{where}(dataset_config={{{name!r}: {choice!r}}}): must be True or False for "
                    f'names of data sets ({", ".join(self.datasets)}), or for "*".'
                )

    def _is_split(self, name: str) -> bool:
        config = self.dataset_config
        names = getattr(config, "_datasets_to_split", None)  # Ray has no public name
        if names is not None:
            return names == "all" or name in names
        split = config.get(name, config.get("*"))
        return name == "train" if split is None else bool(split)

    # ---- keeping and restoring

    def _prepare_folder(self) -> Path:
        packed, config = self._pickle(), self.run_config  # packing may fail: make no folder yet
        if (folder := self._restored_folder) is None:
            folder = make_folder(run_folder(type(self).__name__, config.name, config.storage_path))
        write_pickle(packed, folder / _TRAINER_FILE, Manifest())
        return folder

    def _pickle(self) -> bytes:
        """Return the pickled trainer, without data sets and callbacks that cannot be pickled."""
        stored = copy.copy(self)
        if unpicklable_key({"datasets": self.datasets}):
            stored.datasets = {}
        if unpicklable_key({"callbacks": self.run_config.callbacks}):
            logger.warning(
                "The callbacks cannot be pickled, so a restored run does not have them. Pass them "
                "again to restore(path, run_config=RunConfig(callbacks=...))."
            )
            stored.run_config = dataclasses.replace(self.run_config, callbacks=None)
        try:
            blob: bytes = cloudpickle.dumps(stored)
        except Exception as error:
            name = find_unpicklable(stored)[0].removeprefix(".")
            raise TypeError(
                f"{type(self).__name__}.fit() saves the trainer for restore(), but {name} cannot "
                f"be pickled: {error}. Create such objects in the training function."
            ) from None
        return blob

    @classmethod
    def can_restore(cls, path: str | os.PathLike[str]) -> bool:
        """Return whether a folder holds a run of ``fit()``."""
        return (Path(path).expanduser() / _TRAINER_FILE).is_file()

    @classmethod
    def restore(cls, path: str | os.PathLike[str], *loop: Any, **changed: Any) -> Self:
        """Return a trainer whose ``fit()`` continues a run from its newest checkpoint.

        Restoring unpickles files of the folder, which can run code.

        Args:
            path: folder of the run: ``Result.path``.
            loop: new values of ``train_loop_per_worker`` and ``train_loop_config``.
            changed: new values for arguments of the trainer, such as ``scaling_config``. Pass
                ``datasets`` if the earlier data sets belong to another cluster.
        """
        folder = Path(path).expanduser().absolute()
        if not cls.can_restore(folder):
            raise ValueError(
                f"{cls.__name__}.restore({os.fspath(path)!r}): this folder contains no "
                f"{_TRAINER_FILE}. Pass the folder of a run, which is Result.path."
            )
        trainer: Self = pickle.loads(read_pickle(folder / _TRAINER_FILE)[0])
        names = ("train_loop_per_worker", "train_loop_config")[: len(loop)]
        changed |= zip(names, loop, strict=True)
        for name in changed:
            if name.startswith("_") or name not in trainer.__dict__:
                raise unknown_argument(f"{cls.__name__}.restore", name, trainer.__dict__)
        trainer.__dict__.update(changed)
        trainer._restored_folder = folder
        trainer.__post_init__()
        return trainer

    def as_trainable(self) -> type[Any]:
        """Return a class of trials for ``ray.tune.Tuner``; each trial is a separate run.

        A trial's ``train_loop_config`` is merged over the trainer's, key by key. Its
        ``scaling_config`` replaces the trainer's. Each trial has copies of the callbacks in
        ``run_config``, which receive the reports of all its workers.
        """
        return function_trainable(type(self).__name__, self.for_trial)

    def for_trial(self, config: Mapping[str, Any]) -> Self:
        if unknown := sorted(config.keys() - {"train_loop_config", "scaling_config"}):
            text = "The config of a trial must have only train_loop_config and scaling_config, not"
            raise ValueError(f"{text} {', '.join(unknown)}.")
        trainer = self.with_config(config.get("train_loop_config", {}))
        if (scaling := config.get("scaling_config")) is not None:
            trainer.scaling_config = as_scaling_config(scaling)
        return trainer

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.train_loop_per_worker!r})"


def function_trainable(
    name: str, trial_trainer: Callable[[Mapping[str, Any]], DataParallelTrainer]
) -> type[Any]:
    """Return a class of trials. `trial_trainer` returns the trainer for the config of a trial."""
    from raysgd.trials import FunctionTrainable

    # Tune names folders and trials after the class, and Tuner.restore looks it up by name.
    return type(name, (FunctionTrainable,), {"trial_trainer": staticmethod(trial_trainer)})
