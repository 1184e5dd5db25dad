"""Fork the Ray workers of the shared cluster from processes that have imported PyTorch.

Ray starts this script for each worker instead of its own, which imports PyTorch again each time. A
fork saves more than half of the CPU time of the tests on Ray. It takes over the arguments, the
environment, the folder, the group, and the blocked signals that Ray gave to the script. There are
two processes to fork, so that the hashes of strings differ between workers.
"""

import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = "RAYSGD_TEST_FORKS"
PRELOADED = "raysgd.torch", "pytest", "google.protobuf.struct_pb2", "jsonschema", "requests", "yaml"
"""What workers import, except Ray, which reads the environment of a worker at its import."""


@contextlib.contextmanager
def forked_workers():
    """Fork the workers of a Ray cluster that starts in this `with` block and ends before it."""
    import pytest
    from ray._private import parameter

    params = functools.partial(parameter.RayParams, worker_path=__file__)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.ExitStack() as stack,
        pytest.MonkeyPatch.context() as patch,
    ):
        for number in range(2):
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(f"{folder}/{number}")
            listener.listen()
            fd = listener.fileno()
            # A group of its own: Ctrl-C is for the tests. The same session: forks change group.
            command = [sys.executable, __file__, str(fd)]
            process = subprocess.Popen(command, stdin=-1, pass_fds=[fd], process_group=0)
            stack.enter_context(process)
        patch.setenv(FOLDER, folder)
        patch.setattr(parameter, "RayParams", params)  # ray.init() has no such argument
        yield


def _fork_for_each(listener):
    """Fork a worker for each connection until the process of the tests closes the input."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    for name in PRELOADED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # leave no zombies
    gc.freeze()
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        script, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _become_worker(script)  # the script waits until the worker ends and `script` closes
        script.close()


def _become_worker(script):
    with script.makefile() as lines:
        sys.argv[1:], sys.path[:], environment, folder, group, blocked = json.loads(next(lines))
    os.chdir(folder)
    os.setpgid(0, group)  # Ray kills it after the end of the worker
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    os.environ.clear()
    os.environ.update(environment)
    sys.modules["numpy"].random.seed()  # `random` does so by itself
    _run_ray_worker()
    sys.exit()


def _run_ray_worker():
    runpy.run_module("ray._private.workers.default_worker", run_name="__main__", alter_sys=True)


def _ask_for_worker():
    blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
    place = dict(os.environ), os.getcwd(), os.getpgrp(), blocked
    with socket.socket(socket.AF_UNIX) as forks:
        forks.connect(f"{os.environ[FOLDER]}/{os.getpid() % 2}")
        forks.sendall(json.dumps([sys.argv[1:], sys.path, *place]).encode() + b"\n")
        forks.recv(1)


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file
    if "--runtime-env-hash=0" in sys.argv:
        _ask_for_worker()
    elif len(sys.argv) > 2:  # the modules may depend on the runtime environment of the worker
        _run_ray_worker()
    else:
        _fork_for_each(socket.socket(fileno=int(sys.argv[1])))
