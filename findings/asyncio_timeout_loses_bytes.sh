#!/usr/bin/env bash
# asyncio and uvloop: a timeout of sock_recv or sock_accept can discard what has arrived.
#
# Versions: Python 3.11.7, uvloop 0.23.0, trio 0.35.0
# Expected: A receive either returns the bytes, or leaves them to the next receive. The same holds
#   for accepted connections. trio does so.
# Seen: If the bytes arrive and the time is up in the same iteration of the loop, for example because
#   a callback kept the loop busy, sock_recv raises TimeoutError, and the bytes are gone. sock_accept
#   drops the accepted connection, and its peer reads the end of the stream.
# Output:
#   asyncio: the receives return timeout and b', bias'; the peer of an accept reads b''
#   uvloop: the receives return timeout and b', bias'; the peer of an accept reads b''
#   trio: the receives return b'weights' and b', bias'; the peer of an accept reads b'hello'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
packages=(uvloop==0.23.0 trio==0.35.0)
if command -v uv > /dev/null; then
    uv venv --quiet --python 3.11 venv
    timeout 1800 uv pip install --quiet --python venv "${packages[@]}"
else
    "${PYTHON:-python3}" -m venv venv
    timeout 1800 venv/bin/python -m pip install --quiet --no-compile "${packages[@]}"
fi
cat > check.py <<'PYTHON'
import asyncio
import socket
import sys
import time
import warnings

import trio
import uvloop

warnings.simplefilter("ignore", ResourceWarning)  # of the dropped connection
BUSY_S = 0.2
TIMEOUT_S = 0.1


def connect(listener):
    client = socket.create_connection(listener.getsockname())
    client.settimeout(10)
    return client


async def with_asyncio():
    loop = asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", 0))
    client, (server, _) = connect(listener), listener.accept()
    listener.setblocking(False)
    server.setblocking(False)
    late = []

    async def busy(action):
        action()
        time.sleep(BUSY_S)

    async def within_timeout(receive, action):
        acting = asyncio.create_task(busy(action))
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await receive
        except TimeoutError:
            return "timeout"
        finally:
            await acting

    first = await within_timeout(loop.sock_recv(server, 100), lambda: client.send(b"weights"))
    client.send(b", bias")
    second = await loop.sock_recv(server, 100)
    accepted = await within_timeout(
        loop.sock_accept(listener), lambda: late.append(connect(listener))
    )
    if accepted == "timeout":
        try:
            async with asyncio.timeout(1):
                accepted = await loop.sock_accept(listener)
        except TimeoutError:
            return first, second, late[0].recv(100)
    accepted[0].send(b"hello")
    return first, second, late[0].recv(100)


async def with_trio():
    listener = socket.create_server(("127.0.0.1", 0))
    client, (server, _) = connect(listener), listener.accept()
    late = []
    server = trio.socket.from_stdlib_socket(server)
    listening = trio.socket.from_stdlib_socket(listener)

    async def busy(action):
        action()
        time.sleep(BUSY_S)

    async def within_timeout(receive, action):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(busy, action)
            with trio.move_on_after(TIMEOUT_S):
                return await receive()
        return "timeout"

    first = await within_timeout(lambda: server.recv(100), lambda: client.send(b"weights"))
    client.send(b", bias")
    second = await server.recv(100)
    accepted = await within_timeout(listening.accept, lambda: late.append(connect(listener)))
    if accepted == "timeout":
        accepted = await listening.accept()
    await accepted[0].send(b"hello")
    return first, second, late[0].recv(100)


seen = {
    "asyncio": asyncio.run(with_asyncio()),
    "uvloop": uvloop.run(with_asyncio()),
    "trio": trio.run(with_trio),
}
for name, (first, second, peer) in seen.items():
    first = first if first == "timeout" else repr(first)
    print(
        f"{name}: the receives return {first} and {second!r}; the peer of an accept reads {peer!r}"
    )
lost, whole = ("timeout", b", bias", b""), (b"weights", b", bias", b"hello")
if seen != {"asyncio": lost, "uvloop": lost, "trio": whole}:
    sys.exit("The behavior has changed.")
PYTHON
timeout 120 venv/bin/python check.py
