"""How long a thread has been in one call."""

import importlib
import sys
import threading
import time

from raysgd.backends.calls import Calls
from tests.conftest import wait_until


def test_a_thread_that_stays_in_one_call_is_told_from_one_that_makes_many():
    calls, over = Calls("threading"), threading.Event()
    stays = threading.Thread(target=over.wait)
    stays.start()
    wait_until(lambda: calls.longest_s() > 0.2)
    over.set()
    stays.join()
    assert Calls("no such library").longest_s() == 0.0


def test_files_of_the_users_that_are_named_like_a_library_are_none_of_it(tmp_path, monkeypatch):
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").touch()
    script = tmp_path / "elsewhere" / "horovod" / "train.py"
    over, begun = threading.Event(), threading.Event()
    code = compile("begun.set()\nwhile not over.is_set(): pass", str(script), "exec")
    names = {"begun": begun, "over": over}
    user = threading.Thread(target=exec, args=(code, names))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "horovod", raising=False)
    importlib.import_module("horovod")
    user.start()
    try:
        assert begun.wait(30)
        calls = Calls("horovod")
        asked = [calls.longest_s() for _ in range(20)]
    finally:
        over.set()
        user.join()
        del sys.modules["horovod"]
    assert asked == [0.0] * 20


def test_calls_one_after_the_other_are_not_one_long_call():
    """They may use the same frame of memory."""
    calls, stop = Calls("threading"), threading.Event()

    def wait_again_and_again():
        while not stop.wait(0.005):
            pass

    thread = threading.Thread(target=wait_again_and_again)
    thread.start()
    try:
        began, longest = time.monotonic(), 0.0
        while time.monotonic() - began < 0.3:
            longest = max(longest, calls.longest_s())
            time.sleep(0.01)
    finally:
        stop.set()
        thread.join()
    assert longest < 0.2
