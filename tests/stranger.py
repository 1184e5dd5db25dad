"""A stranger: a process that attacks each port on which a trainer listens.

It opens a hundred silent connections, and sends garbage, the start of a raysgd message byte by
byte, and 64 MiB in one go. Any host in the network could do this.
"""

import asyncio
import contextlib
import json
import os
import random
import resource
import socket
import subprocess
import sys
import time

import psutil

NUM_SILENT = 100
NUM_GARBAGE = 20
NUM_SLOW = 10
FLOOD_BYTES = 64 << 20
POLL_S = 0.005
LOOK_S = 0.2
SLOW_S = 0.05
HELLO = b"sgd2"
GARBAGE = (
    b"\0",
    b"\xff" * 200,
    b"GET / HTTP/1.1\r\n\r\n",
    HELLO + bytes(200),
    (1 << 62).to_bytes(8, "big") + b'["get", ',  # a message that never ends
    b"[" * 100_000,
)


@contextlib.contextmanager
def stranger():
    """Attack this process and its workers in the `with` block. Spare ports that are open before.

    The block gets a list, which has the process ID of each attacked port when the stranger ends.
    """
    command = [sys.executable, __file__, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"here\n"
            yield (attacked := [])
        finally:
            said, _ = process.communicate(b"", timeout=30)
        attacked += json.loads(said)


def main(driver):
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(attack_all(driver))


async def attack_all(driver):
    known = {inode for inode, _ in listening()}
    print("here", flush=True)
    left = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    attacks, attacked, pids, looked, of_others = set(), [], [], 0.0, set()
    while not left.done():
        if time.monotonic() - looked > LOOK_S:
            looked = time.monotonic()
            pids = [driver, *workers_of(driver)]
            of_others = set()  # look again: some may belong to a new worker
        if new := {i: port for i, port in listening() if i not in known and i not in of_others}:
            owners = sockets_of(pids)
            of_others |= new.keys() - owners.keys()
            for inode in new.keys() & owners.keys():
                known.add(inode)
                attacked.append(owners[inode])
                for parts in attacks_on_a_port():
                    attacks.add(asyncio.create_task(attack(new[inode], parts)))
        await asyncio.sleep(POLL_S)
    for each in attacks:
        each.cancel()
    await asyncio.gather(*attacks, return_exceptions=True)
    print(json.dumps(attacked))


def listening():
    """Yield the inode and port of each listening socket of this machine.

    They come first in the table. To read the connections after them would take milliseconds.
    """
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as lines:
            next(lines)
            for _, local, _, state, _, _, _, _, _, inode, *_ in map(str.split, lines):
                if state != "0A":
                    break
                yield inode, int(local.rpartition(":")[2], 16)


def workers_of(driver):
    """Yield the process IDs of the Ray workers of a driver."""
    for process in psutil.Process(driver).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            if "".join(process.cmdline()).startswith("ray::"):
                yield process.pid


def sockets_of(pids):
    """Return the process IDs by the inodes of their sockets."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # closed meanwhile
                    kind, _, inode = os.readlink(f"/proc/{pid}/fd/{name}").partition(":")
                    if kind == "socket":
                        found.setdefault(inode.strip("[]"), pid)
    return found


def attacks_on_a_port():
    """Yield the parts that each connection sends."""
    yield from [()] * NUM_SILENT
    for _ in range(NUM_SLOW):
        yield [bytes([byte]) for byte in HELLO + random.randbytes(1000)]
    for _ in range(NUM_GARBAGE):
        yield [random.choice([*GARBAGE, random.randbytes(100)])]
    yield [random.randbytes(1 << 20)] * (FLOOD_BYTES >> 20)


async def attack(port, parts):
    """Connect to a port, send the parts, and stay until the other side closes the connection."""
    loop = asyncio.get_running_loop()
    with socket.socket() as connection, contextlib.suppress(OSError):
        connection.setblocking(False)
        await loop.sock_connect(connection, ("127.0.0.1", port))
        for part in parts:
            await loop.sock_sendall(connection, part)
            if len(part) == 1:
                await asyncio.sleep(SLOW_S)
        while await loop.sock_recv(connection, 1 << 16):
            pass


if __name__ == "__main__":
    main(int(sys.argv[1]))
