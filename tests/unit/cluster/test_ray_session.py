"""Connecting to Ray clusters that do not answer."""

import socket

import pytest

from raysgd.cluster import ray_session
from tests.conftest import RAY, assert_names, run_python


@pytest.fixture(autouse=True)
def _outside(monkeypatch, tmp_path):
    monkeypatch.setattr(ray_session, "_CONNECT_S", 0.3)
    monkeypatch.setattr(ray_session, "_HEAD_ANSWER_S", 0.3)
    monkeypatch.setattr(ray_session.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_session.ray, "init", lambda *a, **k: pytest.fail("asks Ray"))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_that_drops_connections_is_an_error(monkeypatch, scheme):
    with socket.create_server(("", 0), backlog=0) as server:
        port = server.getsockname()[1]
        fill = [socket.socket() for _ in range(3)]
        for each in fill:
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", port))
        monkeypatch.setenv("RAY_ADDRESS", f"{scheme}127.0.0.1:{port}")
        with pytest.raises(ConnectionError) as caught:
            ray_session.connect()
        for each in fill:
            each.close()
    assert_names(caught.value, [f"RAY_ADDRESS={scheme}127.0.0.1:{port}", "timed out", "=local"])


@pytest.fixture(params=["given", "found"])
def refused(request, monkeypatch, tmp_path):
    """A function that checks the error for a port, of a given address or a cluster found here."""

    def check(port, *words):
        if request.param == "given":
            monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
            words += (f"RAY_ADDRESS=127.0.0.1:{port}",)
        else:
            (tmp_path / "ray").mkdir()
            (tmp_path / "ray" / "ray_current_cluster").write_text(f"127.0.0.1:{port}")
            words += ("the newest cluster of this machine", f":{port}: ")
        with pytest.raises(ConnectionError) as caught:
            ray_session.connect()
        assert_names(caught.value, [*words, "=local"])

    return check


def test_a_silent_server_is_an_error(refused):
    with socket.create_server(("", 0)) as server:
        refused(server.getsockname()[1], "not answer")


def test_an_address_without_a_server_is_an_error(refused):
    refused(1, "refused")


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.1:", "127.0.0.1:6379 ", "host:abc"])
def test_a_malformed_address_is_an_error(monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ValueError, match=r'RAY_ADDRESS=.*: must be "HOST:PORT"'):
        ray_session.connect()


TOKEN_IS_MISSING = """
from raysgd.cluster import ray_session
try:
    ray_session.connect()
except ConnectionError as error:
    print(error)
"""


@pytest.mark.skipif(RAY < (2, 60), reason="this Ray has no tokens")
@pytest.mark.parametrize("missing", [{}, {"RAY_AUTH_TOKEN_PATH": "/no/such/file"}])
def test_a_missing_token_is_an_error(tmp_path, missing):
    """Ray itself would end the process."""
    with socket.create_server(("", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        own = {"HOME": str(tmp_path), "RAY_AUTH_MODE": "token", "RAY_ADDRESS": address}
        run = run_python("-c", TOKEN_IS_MISSING, **own, **missing)
    assert "RAY_AUTH_TOKEN" in run.stdout, run.stderr
    assert "get-auth-token" in run.stdout


@pytest.mark.parametrize("address", [None, "", "local"])
def test_ray_starts_if_no_cluster_is_meant(monkeypatch, address):
    started = []
    monkeypatch.setattr(ray_session.ray, "init", lambda address, **k: started.append(address))
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    ray_session.connect()
    assert started == [address or None]
