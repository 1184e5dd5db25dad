"""The frames of user code in stacks and tracebacks."""

import contextlib
import dis
import inspect
import linecache
import os
import re
import sys
import sysconfig
import threading
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from raysgd._internal.arguments import suggest_arguments

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
# Tracebacks of exception groups have a margin.
_FRAME = re.compile(r'^[ |]*File "(.+)", line (\d+), in (.+)\n(?:[ |]{4,}(.+)\n)?', re.M)
# Loader processes, torch.compile, and TensorFlow add tracebacks to the messages of their errors.
_ADDED = re.compile(
    r"\nOriginal Traceback(?s:.*)\n  File .*(\n    .*)*"
    r"|\n+(  Developer debug context:|from user code:\n)(?s:.*)"
    r"|^in user code:\n\n(    .*\n)+\n +|\nDetected at node .*\n(  File .*\n\n)+"
    r"|\s*\n *Arguments received by (?s:.*)"
)

_T = TypeVar("_T", bound=type)


def is_user_file(filename: str) -> bool:
    """Return whether a file is user code: not raysgd, Python, or an installed library."""
    libraries = (sysconfig.get_path("stdlib") + os.sep, _PACKAGE)
    generated = "<frozen", "<string", "<eval_with_key"
    if filename.startswith((*generated, *libraries)) or "__autograph_generated_" in filename:
        return False
    return not {"site-packages", "dist-packages"} & set(Path(filename).parts)


def is_raised_by_user(error: BaseException) -> bool:
    """Return whether a ``raise`` statement of user code raised an error, and no call of it."""
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    if innermost is None:
        return False
    code = innermost.tb_frame.f_code
    is_statement = code.co_code[innermost.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return is_statement and is_user_file(code.co_filename)


def stacks() -> str:
    """Return the stacks of the threads that run user code, from its first frame on.

    Return all stacks if no thread runs user code.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    everything, of_user = [], []
    for ident, frame in sys._current_frames().items():
        frames = traceback.extract_stack(frame)
        own = [n for n, each in enumerate(frames) if is_user_file(each.filename)]
        everything.append(f"Thread {names.get(ident, ident)}:\n{''.join(frames.format())}")
        if own:
            last = frames[own[-1]]
            shown = "".join(traceback.format_list(frames[own[0] :]))
            of_user.append(f"In {last.name}, {last.filename}:{last.lineno}:\n{shown}")
    return "\n".join(of_user or everything)


def release_callers(error: BaseException) -> None:
    """Clear the ended frames that called the frames of a traceback.

    If a worker in this process raised, they refer to its error. This cycle would keep models and
    loaders until Python collects cycles.
    """
    shown = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for frame, _ in traceback.walk_stack(shown[-1]):
        if frame not in shown:
            with contextlib.suppress(RuntimeError):  # it has not ended
                frame.clear()


def last_frame(text: str) -> tuple[str, str]:
    """Return the last location in user code in a traceback, and the frame to show."""
    frames = _FRAME.findall(text)
    own = [frame for frame in frames if is_user_file(frame[0])]
    if not frames:
        return "", ""
    file, line, name, code = (own or frames)[-1]
    location = f"in {name}, {file}:{line}"
    code = code or linecache.getline(file, int(line)).strip()  # cells of notebooks
    return location if own else "", f'  File "{file}", line {line}, in {name}{code and ": " + code}'


class FoldingTracebacks(contextlib.AbstractContextManager["FoldingTracebacks"]):
    """Removes frames from the tracebacks of errors, unless RAYSGD_TRACEBACK=full.

    Only the first error of a chain keeps a frame: the last one of user code, if there is one.
    """

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or os.environ.get("RAYSGD_TRACEBACK") == "full":
            return
        if error.args and isinstance(text := error.args[0], str) and _ADDED.search(text):
            error.args = (type(text)(_ADDED.sub("", text).rstrip()), *error.args[1:])
        elif isinstance(text := vars(error).get("_message"), str):  # TensorFlow has no public name
            vars(error)["_message"] = _ADDED.sub("", text).rstrip()
        errors = [error]
        while (cause := errors[-1].__cause__) is not None and cause not in errors:
            errors.append(cause)
        (error := errors[-1]).__suppress_context__ = True
        entries, entry = [], error.__traceback__
        for each in errors:
            each.__traceback__ = None
        while entry is not None:
            entries.append(entry)
            entry = entry.tb_next
        own = [each for each in entries if is_user_file(each.tb_frame.f_code.co_filename)]
        for kept in (own or entries)[-1:]:
            error.__traceback__ = TracebackType(None, kept.tb_frame, kept.tb_lasti, kept.tb_lineno)


def fold_tracebacks(kind: _T) -> _T:
    """Fold the tracebacks of errors that leave public methods of a class."""
    for name, method in list(vars(kind).items()):
        if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_")):
            setattr(kind, name, suggest_arguments(method, FoldingTracebacks()))
    return kind
