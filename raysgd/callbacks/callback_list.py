"""The callbacks of one trainer: call order, error handling, and saved state."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysgd._internal.context import Progress
from raysgd._internal.nested import deep_copied, loading, map_leaves
from raysgd._internal.paths import without_secrets
from raysgd.callbacks.base import Callback, Trainer
from raysgd.errors import CallbackError, RemoteTraceback

__all__ = ["CallbackList", "checked_callbacks"]

logger = logging.getLogger(__name__)

_HOOKS = {name: member for name, member in vars(Callback).items() if inspect.isfunction(member)}


@dataclass(eq=False)
class _Entry:
    callback: Callback
    key: str
    """Key of the callback in the trainer's state."""
    num_seen: int
    """Number of the trainer's events that the callback has received or skipped."""
    started: bool = False
    begun: bool = False
    """Whether the callback has ever started. From then on it receives events, even after its
    end."""
    pause: int | None = None
    """Step at which the callback wants the current call to pause."""


class CallbackList:
    """Calls the callbacks of one trainer.

    An error of a callback is raised at the end of the trainer's call. The trainer is an argument
    of the methods, because a reference would keep a dropped trainer and its workers alive.

    Args:
        callbacks: what `checked_callbacks` returned, for the life of the trainer.
    """

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self._entries: list[_Entry] = []
        self._failures: list[CallbackError] = []
        self._inside: list[str] = []
        self._depth = 0
        self._loaded: dict[str, Any] = {}
        """States that wait for their callbacks."""
        self._detached: dict[str, Any] = {}
        """States of the callbacks of earlier calls of `fit`."""
        self.callbacks: Sequence[Callback] = callbacks
        """The attached callbacks, and those of the newest `fit`."""
        self._attach(callbacks, num_seen=0)

    def __iter__(self) -> Iterator[Callback]:
        return (entry.callback for entry in self._entries)

    @property
    def inside(self) -> Sequence[str]:
        """The hooks that are running, outermost first."""
        return tuple(self._inside)

    def _attach(self, callbacks: Sequence[Callback], num_seen: int) -> list[_Entry]:
        everyone = [*self, *callbacks]
        for callback in callbacks:
            if sum(other is callback for other in everyone) > 1:
                raise ValueError(f"The same {type(callback).__name__} is given twice.")
        added = []
        for callback in callbacks:
            name, taken = type(callback).__name__, [entry.key for entry in self._entries]
            number = next(n for n in range(1, len(taken) + 2) if _key(name, n) not in taken)
            added.append(_Entry(callback, _key(name, number), num_seen))
            self._entries.append(added[-1])
        self._entries.sort(key=lambda entry: entry.callback.stage)
        return added

    @contextlib.contextmanager
    def attached(self, trainer: Trainer, callbacks: Sequence[Callback]) -> Iterator[None]:
        """Attach callbacks for a call of `fit`. Start those that have not started, and end them."""
        before = [entry for entry in self._entries if entry.started]
        added = self._attach(callbacks, num_seen=len(trainer.events))
        self.callbacks = [entry.callback for entry in self._entries]
        try:
            self._load(added)
            with self.calling(trainer):
                yield
        except BaseException as error:
            self._detach(trainer, added, before)
            self.note_failures(error)
            raise
        self._detach(trainer, added, before)
        self.raise_failures()

    def _detach(self, trainer: Trainer, added: Sequence[_Entry], before: Sequence[_Entry]) -> None:
        try:
            self._end(trainer, [entry for entry in self._entries if entry not in before])
        finally:
            self._entries = [entry for entry in self._entries if entry not in added]
            for entry in added:
                if entry.key not in self._loaded:  # no saved state is pending
                    with contextlib.suppress(CallbackError):  # nothing is saved now
                        self._detached[entry.key] = self._state_of(entry)

    def end(self, trainer: Trainer) -> None:
        """End all callbacks, because the trainer shuts down."""
        self._end(trainer, list(self._entries))

    def _start(self, trainer: Trainer) -> None:
        # Callbacks that save come first, because they may load a state.
        new = [entry for entry in self._entries if not entry.started]
        for entry in sorted(new, key=lambda entry: -entry.callback.stage):
            entry.started = self._call_one(entry, "on_train_start", trainer)
        for entry in new:
            entry.begun = entry.begun or entry.started
        self.tell_events(trainer)

    def _end(self, trainer: Trainer, entries: Sequence[_Entry]) -> None:
        interrupt: BaseException | None = None
        for entry in entries:
            if not entry.started:
                continue
            entry.started = False
            try:
                self._call_one(entry, "on_train_end", trainer)
            except BaseException as error:  # after Ctrl-C, the others still close their files
                interrupt = error
        if interrupt is not None:
            raise interrupt

    @contextlib.contextmanager
    def calling(self, trainer: Trainer) -> Iterator[None]:
        """Surround a call of the trainer: start callbacks, and report and raise errors.

        An inner call, such as ``train()`` in ``fit()``, leaves ``on_exception`` to the outer one.
        """
        self._depth += 1
        try:
            if self._depth == 1:
                self._start(trainer)
                self.raise_failures()
            yield
            if not self._inside:  # otherwise the outer call raises them
                self.raise_failures()
        except BaseException as error:
            if self._depth > 1:
                raise
            shown = _with_position(trainer, error)
            self.call("on_exception", trainer, shown)
            self.note_failures(shown)
            if shown is not error:
                raise shown from None  # the traceback only shows how the driver waits for workers
            raise
        finally:
            self._depth -= 1

    @contextlib.contextmanager
    def silenced(self) -> Iterator[None]:
        """Call no callbacks within the context. They receive the events afterwards."""
        entries, self._entries = self._entries, []
        try:
            yield
        finally:
            self._entries = entries

    def call(self, hook: str, trainer: Trainer, *arguments: Any) -> None:
        """Call a hook of all started callbacks."""
        for entry in list(self._entries):
            if entry.started:
                self._call_one(entry, hook, trainer, *arguments)

    def _call_one(self, entry: _Entry, hook: str, *arguments: Any) -> bool:
        """Call a hook of one callback, and return whether it succeeded."""
        self._inside.append(hook)
        try:
            getattr(entry.callback, hook)(*arguments)
        except Exception as error:
            self._fail(entry, hook, error)
            return False
        finally:
            self._inside.pop()
        return True

    def tell_events(self, trainer: Trainer) -> None:
        """Call `on_event` for the events that callbacks have not received yet."""
        events = trainer.events
        for entry in list(self._entries):
            while entry.begun and entry.num_seen < len(events):
                entry.num_seen += 1
                self._call_one(entry, "on_event", trainer, events[entry.num_seen - 1])

    def watcher(self, trainer: Trainer, kind: str) -> Callable[[Sequence[Progress]], None] | None:
        """Return a function that passes progress to callbacks; None if no callback uses it."""
        wanting = [e for e in self._entries if e.started and _overrides(e.callback, "on_progress")]
        if not wanting:
            return None

        def tell(progress: Sequence[Progress]) -> None:
            for entry in list(wanting):
                if not self._call_one(entry, "on_progress", trainer, kind, progress):
                    wanting.remove(entry)  # report one failure per call

        tell([])
        return tell

    def next_pause(self, global_step: int, at_once: bool = False) -> int | None:
        """Return the next step at which a callback wants training to pause.

        With `at_once`, callbacks that save get the next step.
        """
        for entry in self._entries:
            entry.pause = None
            if not entry.started:
                continue
            try:
                step = entry.callback.next_pause(global_step)
                if at_once and entry.callback.saves_state:
                    step = global_step + 1
                if step is not None and step <= global_step:
                    raise ValueError(
                        f"It returned {step!r}, but must return a step above "
                        f"global_step={global_step}."
                    )
                entry.pause = step
            except Exception as error:
                self._fail(entry, "next_pause", error)
        return min((e.pause for e in self._entries if e.pause is not None), default=None)

    def pause(self, trainer: Trainer) -> None:
        """Call `on_pause` of the callbacks that asked for this step."""
        for entry in list(self._entries):
            if entry.started and entry.pause is not None and entry.pause <= trainer.global_step:
                entry.pause = None
                self._call_one(entry, "on_pause", trainer)

    def _fail(self, entry: _Entry, hook: str, error: Exception) -> None:
        failure = _failure(entry, hook, error)
        self._failures.append(failure)
        if hook != "on_train_start":  # the call raises other errors only at its end
            logger.error(
                "The callback %s failed in %s: %s", failure.callback, hook, _format_error(error)
            )

    def raise_failures(self) -> None:
        """Raise the first error of a callback, with the others as notes.

        Raises:
            CallbackError: if a callback failed.
        """
        if self._failures:
            first = self._failures.pop(0)
            self.note_failures(first)
            raise first

    def note_failures(self, error: BaseException) -> None:
        """Add the errors of callbacks to another error as notes."""
        failures, self._failures = self._failures, []
        for failure in failures:
            error.add_note(f"Also: {failure}")

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the callbacks' states, and of the states that no callback has."""
        states: dict[str, Any] = map_leaves({**self._loaded, **self._detached}, deep_copied)
        states |= {entry.key: self._state_of(entry) for entry in self._entries}
        return {key: state for key, state in states.items() if state}

    @contextlib.contextmanager
    def loading(self, state: Mapping[str, Any]) -> Iterator[None]:
        """Load the callbacks' states. States of other callbacks wait for ``fit(callbacks=...)``.

        If a callback or the block raises, all callbacks load their earlier states.

        Raises:
            CheckpointError: if a callback raised.
        """
        claimed = {entry.key: entry for entry in self._entries if entry.key in state}
        with contextlib.ExitStack() as undoing:
            for key, entry in claimed.items():
                own = self._state_of(entry)
                undoing.enter_context(
                    loading(entry.callback, own, state[key], f"callbacks[{key!r}]")
                )
            yield
        self._loaded = {key: part for key, part in state.items() if key not in claimed}
        self._detached = {}

    def _state_of(self, entry: _Entry) -> dict[str, Any]:
        try:
            state: dict[str, Any] = map_leaves(entry.callback.state_dict(), deep_copied)
        except Exception as error:
            raise _failure(entry, "state_dict", error) from error
        return state

    def _load(self, entries: Sequence[_Entry]) -> None:
        """Load the pending states of these callbacks. If one fails, all of them stay pending."""
        claiming = [entry for entry in entries if entry.key in self._loaded]
        for entry in claiming:
            try:
                entry.callback.load_state_dict(map_leaves(self._loaded[entry.key], deep_copied))
            except Exception as error:
                raise _failure(entry, "load_state_dict", error) from error
        for entry in claiming:
            del self._loaded[entry.key]


def _with_position(trainer: Trainer, error: BaseException) -> BaseException:
    """Return the exception of the call. After Ctrl-C, add the current epoch and step to it."""
    from_worker = isinstance(error.__cause__, RemoteTraceback)
    if not isinstance(error, KeyboardInterrupt) or error.args or from_worker:
        return error
    return KeyboardInterrupt(
        f"Interrupted at epoch {trainer.epoch}, step {trainer.global_step}. No finished step is "
        "lost as long as this trainer lives: the next call continues from here."
    )


def checked_callbacks(where: str, callbacks: Any, logdir: Path | None) -> list[Callback]:
    """Return a list of callbacks, after checking them.

    Raises:
        TypeError: if one is not an instance of Callback, or a hook takes other arguments.
        ValueError: if one needs a folder, and the trainer has no `logdir`.
    """
    if isinstance(callbacks, Callback | str) or not isinstance(callbacks, Iterable):
        raise TypeError(f"{where} takes a list of callbacks, not {callbacks!r}.")
    found = list(callbacks)
    for callback in found:
        if isinstance(callback, type) and issubclass(callback, Callback):
            raise TypeError(
                f"{where} takes instances, but {callback.__name__} is a class: write "
                f"{callback.__name__}(...)."
            )
        if not isinstance(callback, Callback):
            raise TypeError(
                f"{where}: {callback!r} is not a callback. Derive its class from "
                "raysgd.callbacks.Callback."
            )
        _check_hooks(where, callback)
        if callback.needs_logdir and logdir is None:
            raise ValueError(
                f"{type(callback).__name__} needs a folder. Pass one to it, or a folder for the "
                "whole run to the trainer: logdir='runs/1'."
            )
    return found


def _check_hooks(where: str, callback: Callback) -> None:
    """Check the signatures of overridden hooks, because they may run only after hours."""
    name = type(callback).__name__
    for hook, original in _HOOKS.items():
        if not _overrides(callback, hook):
            continue
        arguments = list(inspect.signature(original).parameters)[1:]
        try:
            inspect.signature(getattr(callback, hook)).bind(*arguments)
        except TypeError as error:
            raise TypeError(
                f"{where}: {name}.{hook} must take ({', '.join(arguments)}): {error}."
            ) from error
    for hook in dir(type(callback)):
        if hook.startswith("on_") and hook not in _HOOKS:
            logger.warning(
                "%s has %s, which is not a hook. The hooks are: %s.", name, hook, ", ".join(_HOOKS)
            )


def _overrides(callback: Callback, hook: str) -> bool:
    return getattr(getattr(callback, hook), "__func__", None) is not _HOOKS[hook]


def _key(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"


def _failure(entry: _Entry, hook: str, error: Exception) -> CallbackError:
    name = type(entry.callback).__name__
    untrained = ("on_train_start", "state_dict", "load_state_dict")
    trained = "" if hook in untrained else "No training is lost. "
    failure = CallbackError(
        f"The callback {name} failed in {hook}: {_format_error(error)}. {trained}"
        "You can continue to use the trainer.",
        callback=name,
        hook=hook,
    )
    failure.__cause__ = error
    return failure


def _format_error(error: Exception) -> str:
    return without_secrets(repr(error))  # a service may repeat its URL
