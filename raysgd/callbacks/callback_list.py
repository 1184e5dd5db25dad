"""The callbacks of one trainer: who is called, when, and what follows if one of them raises."""

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
_PLACES = {"folder": "runs/1", "path": "runs/1/metrics.csv"}
"""What callbacks call the place that they write to, and an example of one."""


@dataclass(eq=False)
class _Entry:
    """A callback that is attached."""

    callback: Callback
    key: str
    """Its name in the trainer's state."""
    num_seen: int
    """Events that it was told of, counted from the trainer's first."""
    started: bool = False
    begun: bool = False
    """Whether it has ever started: it is told of events from then on, also after its end."""
    pause: int | None = None
    """The step at which it wants the call under way to pause."""


class CallbackList:
    """Calls the callbacks of one trainer.

    What a callback raises is kept until the trainer's call is over, and raised then. The trainer
    is handed in with each call, since what refers to it here would keep it from being collected.

    Args:
        callbacks: for as long as the trainer lives; checked ones.
    """

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self._entries: list[_Entry] = []
        self._failures: list[CallbackError] = []
        self._inside: list[str] = []
        self._depth = 0
        self._loaded: dict[str, Any] = {}
        self._detached: dict[str, Any] = {}
        self.callbacks: Sequence[Callback] = callbacks
        """Those that are attached, and those that the newest `fit` had."""
        self._attach(callbacks, num_seen=0)

    def __iter__(self) -> Iterator[Callback]:
        """Iterate over those that are attached."""
        return (entry.callback for entry in self._entries)

    @property
    def inside(self) -> Sequence[str]:
        """The hooks that are being called now, the outermost first."""
        return tuple(self._inside)

    # ---- attaching, starting, ending

    def _attach(self, callbacks: Sequence[Callback], num_seen: int) -> list[_Entry]:
        everyone = [*(entry.callback for entry in self._entries), *callbacks]
        for callback in callbacks:
            # before the first is attached: those of a call that is refused are to be gone
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
        """Attach callbacks for a while, start all that are not, and end those in the end."""
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
            for entry in added:
                self._entries.remove(entry)
                if entry.key in self._loaded:
                    continue  # it could not be loaded, and waits for the next fit
                with contextlib.suppress(CallbackError):  # nothing is saved now
                    self._detached[entry.key] = self._state_of(entry)

    def end(self, trainer: Trainer) -> None:
        """End all that were started: the trainer is shut down."""
        self._end(trainer, list(self._entries))

    def _start(self, trainer: Trainer) -> None:
        # those that save resume first, so that the others start with what was restored
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
            except BaseException as error:  # Ctrl-C: the others still have files to close
                interrupt = error
        if interrupt is not None:
            raise interrupt

    # ---- calling

    @contextlib.contextmanager
    def calling(self, trainer: Trainer) -> Iterator[None]:
        """Surround a call of the trainer: start callbacks, tell of exceptions, raise failures.

        A call within a call, as of ``train()`` in ``fit()``, leaves telling to the outer one.

        After Ctrl-C the traceback ends here: it would be of how the driver waits for workers.
        """
        self._depth += 1
        try:
            if self._depth == 1:
                self._start(trainer)
                self.raise_failures()
            yield
            if not self._inside:  # else it is the outer call that raises them
                self.raise_failures()
        except BaseException as error:
            if self._depth == 1:
                self.call("on_exception", trainer, error)
                self.note_failures(error)
                from_worker = isinstance(error.__cause__, RemoteTraceback)
                if isinstance(error, KeyboardInterrupt) and not error.args and not from_worker:
                    raise _interrupted(trainer, error) from None
            raise
        finally:
            self._depth -= 1

    @contextlib.contextmanager
    def silenced(self) -> Iterator[None]:
        """Call no callback meanwhile; of events they are told afterwards."""
        entries, self._entries = self._entries, []
        try:
            yield
        finally:
            self._entries = entries

    def call(self, hook: str, trainer: Trainer, *arguments: Any) -> None:
        """Call a hook of every callback that has started."""
        for entry in list(self._entries):
            if entry.started:
                self._call_one(entry, hook, trainer, *arguments)

    def _call_one(self, entry: _Entry, hook: str, *arguments: Any) -> bool:
        """Call a hook of one callback; returns whether all went well."""
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
        """Call `on_event` for every event that a callback has not been told of yet."""
        events = trainer.events
        for entry in list(self._entries):
            while entry.begun and entry.num_seen < len(events):
                entry.num_seen += 1
                self._call_one(entry, "on_event", trainer, events[entry.num_seen - 1])

    def watcher(self, trainer: Trainer, kind: str) -> Callable[[Sequence[Progress]], None] | None:
        """Return what to call with the workers' progress; None if nobody wants to know."""
        wanting = [e for e in self._entries if e.started and _overrides(e.callback, "on_progress")]
        if not wanting:
            return None

        def tell(progress: Sequence[Progress]) -> None:
            for entry in list(wanting):
                if not self._call_one(entry, "on_progress", trainer, kind, progress):
                    wanting.remove(entry)  # once a call is enough

        tell([])
        return tell

    # ---- pauses

    def next_pause(self, global_step: int, at_once: bool = False) -> int | None:
        """Return the next step at which a callback wants training to pause.

        With `at_once` those that save want the next one.
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
                        f"It returned {step!r}, and must be above global_step={global_step}."
                    )
                entry.pause = step
            except Exception as error:
                self._fail(entry, "next_pause", error)
        return min((e.pause for e in self._entries if e.pause is not None), default=None)

    def pause(self, trainer: Trainer) -> None:
        """Call `on_pause` where it is due."""
        for entry in list(self._entries):
            if entry.started and entry.pause is not None and entry.pause <= trainer.global_step:
                entry.pause = None
                self._call_one(entry, "on_pause", trainer)

    # ---- failures

    def _fail(self, entry: _Entry, hook: str, error: Exception) -> None:
        failure = _failure(entry, hook, error)
        self._failures.append(failure)
        if hook == "on_train_start":
            return  # raised at once
        # said now, since it may take long until it can be raised; the traceback comes with that
        logger.error(
            "The callback %s failed in %s: %s", failure.callback, hook, _format_error(error)
        )

    def raise_failures(self) -> None:
        """Raise what callbacks raised, the first of them with the others as its notes.

        Raises:
            CallbackError: if one did.
        """
        if self._failures:
            first = self._failures.pop(0)
            self.note_failures(first)
            raise first

    def note_failures(self, error: BaseException) -> None:
        """Note on an error what callbacks raised besides."""
        failures, self._failures = self._failures, []
        _note(error, failures)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the callbacks' states by key, also of those that are not attached (any more).

        They are copies, which do not change as callbacks go on.
        """
        states: dict[str, Any] = map_leaves({**self._loaded, **self._detached}, deep_copied)
        states |= {entry.key: self._state_of(entry) for entry in self._entries}
        return {key: state for key, state in states.items() if state}

    @contextlib.contextmanager
    def loading(self, state: Mapping[str, Any]) -> Iterator[None]:
        """Give the callbacks their states; what nobody claims waits for ``fit(callbacks=...)``.

        If one of them raises, or what is done within, they are given back what they had.

        Raises:
            CheckpointError: if one of them raised.
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
        """Give these the states that wait for them, and raise then what one of them raised.

        If one did, the states wait on: a `fit` that it keeps from beginning is called once again.
        """
        claiming = [entry for entry in entries if entry.key in self._loaded]
        failures = []
        for entry in claiming:
            try:
                entry.callback.load_state_dict(map_leaves(self._loaded[entry.key], deep_copied))
            except Exception as error:
                failures.append(_failure(entry, "load_state_dict", error))
        if failures:
            first, *others = failures
            _note(first, others)
            raise first
        for entry in claiming:
            del self._loaded[entry.key]


def _interrupted(trainer: Trainer, error: KeyboardInterrupt) -> KeyboardInterrupt:
    """Return what Ctrl-C raises, with how far training is and the notes of callbacks."""
    told = KeyboardInterrupt(
        f"Interrupted at epoch {trainer.epoch}, step {trainer.global_step}. No finished step is "
        "lost as long as this trainer lives: the next call goes on from here."
    )
    for note in getattr(error, "__notes__", ()):
        told.add_note(note)
    return told


def checked_callbacks(where: str, callbacks: Any, logdir: Path | None) -> list[Callback]:
    """Return callbacks as a list, if all of them are.

    Raises:
        TypeError: if one is no instance of Callback, or a hook of it takes other arguments.
        ValueError: if one was given no folder, and the trainer has no `logdir`.
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
                f"{where}: {callback!r} is no callback. Derive its class from "
                "raysgd.callbacks.Callback."
            )
        _check_hooks(where, callback)
        if callback.needs_logdir and logdir is None:
            raise _no_folder(callback)
    return found


def _check_hooks(where: str, callback: Callback) -> None:
    """Check what a callback overrides now, and not when it is called after hours of training."""
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
                "%s has %s, which nothing calls. The hooks are: %s.", name, hook, ", ".join(_HOOKS)
            )


def _overrides(callback: Callback, hook: str) -> bool:
    return getattr(getattr(callback, hook), "__func__", None) is not _HOOKS[hook]


def _no_folder(callback: Callback) -> ValueError:
    name, taken = type(callback).__name__, inspect.signature(type(callback)).parameters
    own = [f"{argument}={example!r}" for argument, example in _PLACES.items() if argument in taken]
    advice = f"pass it one, {name}({own[0]}), or give" if own else "give"
    return ValueError(
        f"{name} does not know where to write: {advice} the trainer a folder for the whole run, "
        "logdir='runs/1'."
    )


def _note(error: BaseException, failures: Iterable[CallbackError]) -> None:
    for failure in failures:
        error.add_note(f"Also: {failure}")
        # a note has no traceback, and nothing else will show this one
        logger.error(
            "Where the callback %s failed in %s:",
            failure.callback,
            failure.hook,
            exc_info=failure.__cause__,
        )


def _key(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"


def _failure(entry: _Entry, hook: str, error: Exception) -> CallbackError:
    name = type(entry.callback).__name__
    untrained = ("on_train_start", "state_dict", "load_state_dict")
    trained = "" if hook in untrained else "What was trained is trained. "
    failure = CallbackError(
        f"The callback {name} failed in {hook}: {_format_error(error)}. {trained}"
        "The trainer can be used on.",
        callback=name,
        hook=hook,
    )
    failure.__cause__ = error
    return failure


def _format_error(error: Exception) -> str:
    return without_secrets(repr(error))  # a service may have repeated the URL that it was given
