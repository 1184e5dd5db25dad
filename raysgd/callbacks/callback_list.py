"""The callbacks of one trainer: call order, error handling, and saved state."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysgd._internal.nested import load_or_restore, map_leaves, try_copy
from raysgd._internal.paths import as_path, without_secrets
from raysgd._internal.worker_status import BatchProgress
from raysgd.callbacks.base import AnyTrainer, Callback
from raysgd.callbacks.loggers import JsonlLogger
from raysgd.callbacks.progress import ProgressBar
from raysgd.callbacks.report import RunReport
from raysgd.errors import CallbackError

logger = logging.getLogger(__name__)


_SHARED = "{} save into {}, and would remove checkpoints of each other. Give each its own folder."
_FOLDER_OWNERS: dict[str, CallbackList] = {}
"""Folders of checkpoints, with the callbacks of the trainer whose call saves into it."""


@dataclass(eq=False)
class _AttachedCallback:
    callback: Callback
    key: str
    """Key of the callback in the trainer's state."""
    num_events: int
    """Number of the trainer's events that the callback has received or skipped."""
    is_started: bool = False
    pause_step: int | None = None
    """Step at which the callback wants the current call to pause."""


class CallbackList:
    """Calls the callbacks of one trainer.

    Errors of callbacks are logged. The first one is raised at the end of the trainer's call.
    """

    def __init__(self, trainer: AnyTrainer, callbacks: Sequence[Callback] = ()) -> None:
        # A strong reference would keep a dropped trainer and its workers alive.
        self._trainer = weakref.ref(trainer)
        self._entries: list[_AttachedCallback] = []
        self._failure: CallbackError | None = None
        self.running_hooks: list[str] = []
        """The hooks that are running, outermost first."""
        self._depth = 0
        self.around_saving: Callable[..., Any] = contextlib.nullcontext
        """Surrounds the hooks of callbacks that save."""
        self._unclaimed: dict[str, Any] = {}
        """States that wait for their callbacks."""
        self._detached: dict[str, Any] = {}
        """States of the callbacks of earlier calls of `fit`."""
        self._claim_states(self._add(callbacks, num_events=0))

    def __iter__(self) -> Iterator[Callback]:
        return (entry.callback for entry in self._entries)

    @property
    def trainer(self) -> AnyTrainer:
        return self._trainer()

    # ---- start and end

    def _add(self, callbacks: Sequence[Callback], num_events: int) -> list[_AttachedCallback]:
        entries = list(self._entries)
        for callback in callbacks:
            if any(entry.callback is callback for entry in entries):
                raise ValueError(f"The same {type(callback).__name__} is in the callbacks twice.")
            number = sum(type(e.callback).__name__ == type(callback).__name__ for e in entries) + 1
            key = type(callback).__name__ + (f"-{number}" if number > 1 else "")
            entries.append(_AttachedCallback(callback, key, num_events))
        added = entries[len(self._entries) :]
        self._entries = sorted(entries, key=lambda entry: entry.callback.order)
        return added

    @contextlib.contextmanager
    def attach(self, callbacks: Sequence[Callback]) -> Iterator[None]:
        """Attach callbacks for a call of `fit`: start the new ones, and end them afterwards."""
        before = [entry for entry in self._entries if entry.is_started]
        added = self._add(callbacks, num_events=len(self.trainer.events))
        try:
            with contextlib.ExitStack() as ending:
                ending.callback(self._detach, added)
                ending.callback(self.end, before)
                self._claim_states(added)
                with self.within_call():
                    yield
        except BaseException:
            self._failure = None
            raise
        self.raise_failure()

    def _detach(self, added: Sequence[_AttachedCallback]) -> None:
        self._entries = [entry for entry in self._entries if entry not in added]
        for entry in added:
            if entry.key not in self._unclaimed:  # no saved state is pending
                with contextlib.suppress(CallbackError):  # nothing is saved now
                    self._detached[entry.key] = _state_of(entry)

    def _start(self) -> None:
        # Callbacks that save come first, because they may load a state.
        new = [entry for entry in self._entries if not entry.is_started]
        for entry in sorted(new, key=lambda entry: -entry.callback.order):
            entry.is_started = self._call_hook_of(entry, "on_train_start")
        self.notify_events()

    def end(self, kept: Sequence[_AttachedCallback] = ()) -> None:
        """End the callbacks, except those in `kept`."""
        with contextlib.ExitStack() as ending:  # after Ctrl-C, the others still close their files
            for entry in reversed(self._entries):
                if entry.is_started and entry not in kept:
                    entry.is_started = False
                    ending.callback(self._call_hook_of, entry, "on_train_end")

    @contextlib.contextmanager
    def within_call(self) -> Iterator[None]:
        """Surround a call of the trainer: start callbacks, and report and raise errors.

        An inner call, such as ``train()`` in ``fit()``, leaves ``on_exception`` to the outer one.

        Raises:
            ValueError: if a trainer in another thread saves into the same folder meanwhile.
        """
        with contextlib.ExitStack() as ending:
            for callback in () if self._depth else self:
                if (location := callback.save_location(self.trainer.logdir)) is not None:
                    folder = os.path.realpath(location.path)
                    if _FOLDER_OWNERS.setdefault(folder, self) is not self:
                        raise ValueError(_SHARED.format("Two trainers", folder))
                    ending.callback(_FOLDER_OWNERS.pop, folder, None)
            self._depth += 1
            try:
                if self._depth == 1:
                    self._start()
                    self.raise_failure()
                yield
                if not self.running_hooks:  # otherwise the outer call raises it
                    self.raise_failure()
            except BaseException as error:
                if self._depth == 1:
                    self.call_hook("on_exception", error)
                    self._failure = None
                raise
            finally:
                self._depth -= 1

    # ---- hooks

    def call_hook(self, hook: str, *arguments: Any) -> None:
        """Call a hook of all started callbacks."""
        with contextlib.ExitStack() as calls:  # after Ctrl-C, the others still get the results
            for entry in reversed(self._entries):
                if entry.is_started:
                    calls.callback(self._call_hook_of, entry, hook, *arguments)

    def _call_hook_of(self, entry: _AttachedCallback, hook: str, *arguments: Any) -> bool:
        """Call a hook of one callback, and return whether it succeeded."""
        self.running_hooks.append(hook)
        around = self.around_saving if entry.callback.saves_state else contextlib.nullcontext
        try:
            with around():
                getattr(entry.callback, hook)(self.trainer, *arguments)
        except Exception as error:
            self._record_failure(entry, hook, error)
            return False
        finally:
            self.running_hooks.pop()
        return True

    def notify_events(self) -> None:
        """Call `on_event` for the events that callbacks have not received yet."""
        events = self.trainer.events
        for entry in list(self._entries):
            while entry.is_started and entry.num_events < len(events):
                entry.num_events += 1
                self._call_hook_of(entry, "on_event", events[entry.num_events - 1])

    def notifier(self, kind: str) -> Callable[[Sequence[BatchProgress]], None] | None:
        """Return a function that passes progress to callbacks; None if no callback uses it."""
        unused = Callback.on_progress
        listeners = [
            entry
            for entry in self._entries
            if entry.is_started and type(entry.callback).on_progress is not unused
        ]
        if not listeners:
            return None

        def notify(progress: Sequence[BatchProgress]) -> None:
            for entry in list(listeners):
                if not self._call_hook_of(entry, "on_progress", kind, progress):
                    listeners.remove(entry)  # report one failure per call

        notify([])
        return notify

    def schedule_pause(self, global_step: int, immediately: bool = False) -> int | None:
        """Ask the callbacks for their next pauses, and return the first step.

        With `immediately`, callbacks that save pause at the next step.
        """
        for entry in self._entries:
            entry.pause_step = None
            if not entry.is_started:
                continue
            try:
                step = entry.callback.next_pause(global_step)
                if immediately and entry.callback.saves_state:
                    step = global_step + 1
                if step is not None and step <= global_step:
                    raise ValueError(f"{step!r} is not above the current step, {global_step}")
                entry.pause_step = step
            except Exception as error:
                self._record_failure(entry, "next_pause", error)
        return min((e.pause_step for e in self._entries if e.pause_step is not None), default=None)

    def notify_pause(self, at_end: bool = False) -> None:
        """Call `on_pause` of callbacks that asked for this step. `at_end`, those that save wait."""
        global_step = self.trainer.global_step
        for entry in list(self._entries):
            step, waits = entry.pause_step, at_end and entry.callback.saves_state
            if entry.is_started and not waits and step is not None and step <= global_step:
                entry.pause_step = None
                self._call_hook_of(entry, "on_pause")

    # ---- errors

    def _record_failure(self, entry: _AttachedCallback, hook: str, error: Exception) -> None:
        failure = _callback_error(entry, hook, error)
        self._failure = self._failure or failure
        if hook != "on_train_start" or self._failure is not failure:  # else it is raised next
            logger.error("%s", failure)

    def raise_failure(self) -> None:
        """Raise the first error of a callback."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the callbacks' states, and of loaded states without a callback."""
        states: dict[str, Any] = map_leaves({**self._unclaimed, **self._detached}, try_copy)
        states |= {entry.key: _state_of(entry) for entry in self._entries}
        return {key: state for key, state in states.items() if state}

    @contextlib.contextmanager
    def load_states(self, state: Mapping[str, Any]) -> Iterator[None]:
        """Load the callbacks' states. States of other callbacks wait for ``fit(callbacks=...)``.

        If a callback or the block raises, all callbacks load their earlier states.

        Raises:
            CheckpointError: if a callback raised.
        """
        claimed = {entry.key: entry for entry in self._entries if entry.key in state}
        with contextlib.ExitStack() as undoing:
            for key, entry in claimed.items():
                path = f"callbacks[{key!r}]"
                undoing.enter_context(
                    load_or_restore(entry.callback, _state_of(entry), state[key], path)
                )
            yield
        self._unclaimed = {key: own for key, own in state.items() if key not in claimed}
        self._detached = {}
        self._claim_states([entry for entry in self._entries if entry.key not in claimed])

    def _claim_states(self, entries: Sequence[_AttachedCallback]) -> None:
        """Load their pending states, or forget earlier runs. If one fails, all stay pending."""
        for entry in entries:
            try:
                if entry.key in self._unclaimed:
                    entry.callback.load_state_dict(map_leaves(self._unclaimed[entry.key], try_copy))
                elif entry.key not in self._detached:
                    entry.callback._forget_run()
            except Exception as error:
                raise _callback_error(entry, "load_state_dict", error) from error
        for entry in entries:
            self._unclaimed.pop(entry.key, None)


def _state_of(entry: _AttachedCallback) -> dict[str, Any]:
    try:
        state: dict[str, Any] = map_leaves(entry.callback.state_dict(), try_copy)
    except Exception as error:
        raise _callback_error(entry, "state_dict", error) from error
    return state


def _callback_error(entry: _AttachedCallback, hook: str, error: Exception) -> CallbackError:
    name = type(entry.callback).__name__
    text = str(error) if getattr(error, "filename", None) else repr(error)  # with the path
    # Hide passwords, because a service may repeat its URL.
    failure = CallbackError(f"The callback {name} failed in {hook}: {without_secrets(text)}")
    failure.__cause__ = error
    return failure


def as_callbacks(
    caller: str, callbacks: Any, logdir: Path | None, attached: Iterable[Callback] = ()
) -> list[Callback]:
    """Return a list of callbacks, after checking them and those that are `attached`.

    Raises:
        TypeError: if one is not an instance of Callback.
        ValueError: if one needs a folder, and the trainer has no `logdir`, or if two save into one.
    """
    checked: list[Any] = list(callbacks) if isinstance(callbacks, Iterable) else [None]
    for callback in checked:
        if not isinstance(callback, Callback):
            raise TypeError(
                f"{caller} takes a list of instances of subclasses of raysgd.callbacks.Callback, "
                f"not {callbacks!r}."
            )
        if callback.needs_logdir and logdir is None:
            raise ValueError(
                f"{type(callback).__name__} needs a folder. Pass a folder for the run to the "
                "trainer: logdir='runs/1'."
            )
    found = [each.save_location(logdir) for each in (*attached, *checked)]
    folders = [folder for folder in found if folder is not None]
    if len({os.path.realpath(folder.path) for folder in folders}) < len(folders):
        raise ValueError(_SHARED.format(f"{caller}: two CheckpointCallbacks", folders[-1].label))
    return checked


def as_logdir(logdir: str | os.PathLike[str] | None) -> Path | None:
    """Return the run folder as an absolute path. Raise ValueError for a URL or a file."""
    if logdir is None:
        return None
    advice = "Only checkpoints can go to a URL: CheckpointCallback('s3://...')."
    path = as_path("logdir", logdir, advice).absolute()
    for each in (path, *path.parents):
        if each.exists() and not each.is_dir():
            raise ValueError(f"logdir={str(logdir)!r}: must be a folder, but {each} is a file.")
    return path


def trainer_callbacks(
    trainer_name: str, callbacks: Iterable[Callback], use_tqdm: bool, logdir: Path | None
) -> list[Callback]:
    """Return the user's callbacks, and those that ``use_tqdm`` and ``logdir`` add."""
    attached = as_callbacks(f"{trainer_name}(callbacks=...)", callbacks, logdir)
    if use_tqdm and not any(isinstance(callback, ProgressBar) for callback in attached):
        attached.insert(0, ProgressBar())
    if logdir is not None:
        if not any(isinstance(callback, JsonlLogger) for callback in attached):
            attached.append(JsonlLogger())  # last, to run after callbacks that add metrics
        attached.append(RunReport())
    return attached
