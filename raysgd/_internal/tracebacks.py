"""Tracebacks without the frames of libraries."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import sysconfig
from pathlib import Path
from types import TracebackType

_SWITCH = "RAYSGD_FULL_TRACEBACK"
_FRAME = re.compile(r'  File "(.*)", line (\d+), in (.*)\n(?:    .*\n)*')
_HIDDEN_NOTE = f"({{}} frames of libraries are hidden; {_SWITCH}=1 shows them.)"
_HIDDEN = re.compile(r"\(\d+ frames of libraries are hidden;")
_PACKAGE = str(Path(__file__).parents[1])
_MANY = 4


def is_the_users(filename: str) -> bool:
    """Return whether a file is user code: not raysgd, Python, or an installed library."""
    folders = {sysconfig.get_path("stdlib"), _PACKAGE}
    if filename.startswith(
        ("<frozen", "<string", "<eval_with_key", *(f + os.sep for f in folders))
    ):
        return False
    return not {"site-packages", "dist-packages"} & set(Path(filename).parts)


def is_wanted() -> bool:
    return os.environ.get(_SWITCH, "") in ("", "0")


def shortened_text(text: str) -> str:
    r"""Return a printed traceback with only the frames of user code.

    The environment variable ``RAYSGD_FULL_TRACEBACK=1`` disables this.

    >>> folders = "/home/me", _PACKAGE
    >>> own, ours = (f'  File "{folder}/x.py", line 1, in f\n' for folder in folders)
    >>> print(shortened_text(own + 4 * ours + "ValueError\n"), end="")
      File "/home/me/x.py", line 1, in f
    ValueError
    (4 frames of libraries are hidden; RAYSGD_FULL_TRACEBACK=1 shows them.)
    """
    hidden = 0

    def kept(match: re.Match[str]) -> str:
        nonlocal hidden
        if is_the_users(match[1]):
            return _with_source(match)
        hidden += 1
        return ""

    short = _FRAME.sub(kept, text)
    if not is_wanted() or hidden < _MANY:
        return _FRAME.sub(_with_source, text)
    return f"{short}{_HIDDEN_NOTE.format(hidden)}\n"


def _with_source(frame: re.Match[str]) -> str:
    """Add a source line that the worker could not read, for example of a notebook cell."""
    source = linecache.getline(frame[1], int(frame[2])).strip()
    is_bare = frame[0].count("\n") == 1
    return f"{frame[0]}    {source}\n" if is_bare and source else frame[0]


def shortened_stacks(text: str) -> str:
    """Return the stacks of threads, each from its first frame of user code on, if it has one."""
    found = []
    for thread in re.split(r"^(?=Thread )", text, flags=re.MULTILINE):
        own = [frame for frame in _FRAME.finditer(thread) if is_the_users(frame[1])]
        if own:
            path, line, function = own[-1].groups()
            found.append(f"In {function}, {path}:{line}:\n{thread[own[0].start() :].rstrip()}")
    return "\n".join(found) if found and is_wanted() else text


def shorten(error: BaseException) -> None:
    """Remove the frames of libraries from the traceback of an error and of its causes.

    An error that raysgd raises is always shortened, because its message explains the problem.
    """
    seen: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in seen:
        seen.append(each)
        _shorten_one(each)
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _shorten_one(error: BaseException) -> None:
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    if not frames:  # the traceback of a worker, or already shortened
        return
    own = [each for each in frames if is_the_users(each.tb_frame.f_code.co_filename)]
    is_ours = frames[-1].tb_frame.f_code.co_filename.startswith(_PACKAGE + os.sep)
    hidden = len(frames) - len(own)
    if not is_wanted() or (hidden < _MANY and not is_ours):
        return
    if not is_ours and isinstance(error, Exception):  # for Ctrl-C, the place does not matter
        with contextlib.suppress(Exception):  # user classes may refuse notes
            if not any(map(_HIDDEN.match, getattr(error, "__notes__", []))):
                error.add_note(_HIDDEN_NOTE.format(hidden))
    following: TracebackType | None = None
    for each in reversed(own):
        following = TracebackType(following, each.tb_frame, each.tb_lasti, each.tb_lineno)
    error.__traceback__ = following
