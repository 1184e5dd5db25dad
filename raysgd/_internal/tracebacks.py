"""The frames of user code in stacks."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import traceback
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[1])


def is_the_users(filename: str) -> bool:
    """Return whether a file is user code: not raysgd, Python, or an installed library."""
    folders = {sysconfig.get_path("stdlib"), _PACKAGE}
    if filename.startswith(
        ("<frozen", "<string", "<eval_with_key", *(f + os.sep for f in folders))
    ):
        return False
    return not {"site-packages", "dist-packages"} & set(Path(filename).parts)


def stacks() -> str:
    """Return the stacks of the threads that run user code, from its first frame on.

    Return all stacks if no thread runs user code.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    everything, of_user = [], []
    for ident, frame in sys._current_frames().items():
        frames = traceback.extract_stack(frame)
        own = [n for n, each in enumerate(frames) if is_the_users(each.filename)]
        everything.append(f"Thread {names.get(ident, ident)}:\n{''.join(frames.format())}")
        if own:
            last = frames[own[-1]]
            shown = "".join(traceback.format_list(frames[own[0] :]))
            of_user.append(f"In {last.name}, {last.filename}:{last.lineno}:\n{shown}")
    return "\n".join(of_user or everything)
