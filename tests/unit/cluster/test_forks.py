"""What a process has forked ends when that one is killed, and lets go of its connections."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from raysgd.cluster.forks import end_forks_with_this_process

PARENT = """
import os, socket, sys, time
from raysgd.cluster.forks import end_forks_with_this_process

connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
if sys.argv[2] == "ends":
    end_forks_with_this_process()
    end_forks_with_this_process()
if os.fork() == 0:
    if len(sys.argv) > 3 and os.fork():
        os._exit(0)  # as daemons begin; what is left is a child of the parent no more
    connection.sendall(b"%d " % os.getpid())
    time.sleep(60)
time.sleep(60)
"""


tells_of_deaths = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="not on this system")


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        yield server


def forked(listening, *arguments):
    """Return a process, the id of one that it has forked, and their connection to here."""
    port = str(listening.getsockname()[1])
    parent = subprocess.Popen([sys.executable, "-c", PARENT, port, *arguments])
    connection, _ = listening.accept()
    connection.settimeout(30)
    return parent, int(connection.recv(100)), connection


@tells_of_deaths
@pytest.mark.parametrize("daemon", [[], ["daemon"]])
def test_who_waits_for_a_killed_process_does_not_wait_for_what_it_forked(listening, daemon):
    parent, _, connection = forked(listening, "ends", *daemon)
    with connection:
        parent.kill()
        parent.wait()
        assert connection.recv(1) == b""  # all who had it open are gone


def test_without_it_the_connection_stays_open(listening):
    parent, pid, connection = forked(listening, "lives")
    with connection:
        parent.kill()
        parent.wait()
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        os.kill(pid, signal.SIGKILL)


def test_a_signal_that_a_child_blocks_is_not_taken_by_the_thread_that_watches():
    """Its default action would end the child in the middle of what it must not be disturbed in."""
    script = """
import os, signal
from raysgd.cluster.forks import end_forks_with_this_process

end_forks_with_this_process()
child = os.fork()
if child == 0:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "7\n"


def test_where_the_system_tells_of_no_death_nothing_changes(monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    registered = []
    monkeypatch.setattr(os, "register_at_fork", lambda **hooks: registered.append(hooks))
    end_forks_with_this_process.__wrapped__()
    assert not registered
