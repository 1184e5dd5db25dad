"""Tracebacks show only the frames of user code."""

import json
import linecache
import traceback

import pytest

from raysgd._internal.arguments import suggests
from raysgd._internal.tracebacks import shortened_stacks, shortened_text
from raysgd.callbacks.callback_list import checked_callbacks


class Trainer:
    """Calls a function from a frame of the library."""

    @suggests
    def fit(self, function):
        return function()


def files(error):
    return {frame.filename for frame in traceback.extract_tb(error.__traceback__)}


def test_ctrl_c_shows_no_frame_of_the_library():
    def interrupted():
        raise KeyboardInterrupt("Interrupted at step 3.")

    nested = interrupted
    for _ in range(4):
        nested = (lambda inner: lambda: Trainer().fit(inner))(nested)
    with pytest.raises(KeyboardInterrupt, match="step 3") as caught:
        nested()
    assert files(caught.value) == {__file__}


def test_an_error_of_raysgd_shows_no_frame_of_the_library():
    with pytest.raises(TypeError, match="takes a list of callbacks") as caught:
        Trainer().fit(lambda: checked_callbacks("T", 7, None))
    assert files(caught.value) == {__file__}
    assert not hasattr(caught.value, "__notes__")


def test_nested_calls_add_one_note_of_hidden_frames():
    def inner(_):
        return Trainer().fit(lambda: json.loads("{"))  # four frames, one of ours

    with pytest.raises(json.JSONDecodeError) as caught:
        Trainer().fit(lambda: json.dumps(object(), default=inner))
    (note,) = caught.value.__notes__
    assert int(note[1:].split()[0]) >= 4
    assert files(caught.value) == {__file__}


def test_a_cause_shows_no_frame_of_the_library():
    def fail():
        try:
            checked_callbacks("T", 7, None)
        except TypeError as error:
            raise ValueError("outer") from error

    with pytest.raises(ValueError, match="outer") as caught:
        Trainer().fit(fail)
    assert files(caught.value.__cause__) == {__file__}


@pytest.mark.parametrize("num_hidden", [0, 4])
def test_the_source_line_of_a_notebook_cell_is_shown(monkeypatch, num_hidden):
    monkeypatch.setitem(linecache.cache, "/tmp/cell.py", (9, None, ["a = 1\n", "    b()\n"], ""))
    frame = '  File "/tmp/cell.py", line 2, in train_batch\n'
    text = shortened_text(frame + num_hidden * LIBRARY + "AttributeError: b\n")
    assert text.startswith(f"{frame}    b()\nAttributeError: b\n")
    assert shortened_text(frame + "    b(2)\n") == frame + "    b(2)\n"


LIBRARY = '  File "/lib/python3/site-packages/x.py", line 3, in wait\n    self.waiter.acquire()\n'
USERS = '  File "/home/me/train.py", line 29, in train_batch\n    barrier()\n'


def test_stacks_are_shortened_to_threads_with_user_code(monkeypatch):
    monkeypatch.delenv("RAYSGD_FULL_TRACEBACK", raising=False)
    pulse, main = f"Thread pulse:\n{LIBRARY}", f"Thread main:\n{LIBRARY}{USERS}{LIBRARY}"
    text = f"{pulse}\n{main}\n{pulse}"
    shown = f"In train_batch, /home/me/train.py:29:\n{USERS}{LIBRARY}".rstrip()
    assert shortened_stacks(text) == shown
    assert shortened_stacks(pulse) == pulse  # nothing of the user's
    monkeypatch.setenv("RAYSGD_FULL_TRACEBACK", "1")
    assert shortened_stacks(text) == text
