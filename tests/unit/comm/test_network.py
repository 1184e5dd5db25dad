"""Addresses and interfaces of this machine."""

import re

import pytest

from raysgd.comm import network
from raysgd.comm.network import LOOPBACK, driver_address, interface_of

ELSEWHERE = "203.0.113.9"
"""An address of the documentation's network, which no machine has."""


@pytest.mark.parametrize(
    ("addresses", "single"),
    [
        ([LOOPBACK], True),
        ([LOOPBACK] * 3, True),
        ([ELSEWHERE] * 2, False),  # one node, but not this one
        ([LOOPBACK, ELSEWHERE], False),
    ],
)
def test_workers_are_on_one_node_if_it_is_this_one(addresses, single):
    assert network.is_single_node(addresses) is single


def test_workers_elsewhere_are_told_the_address_on_the_way_to_them(monkeypatch):
    asked = []
    monkeypatch.setattr(network, "address_towards", lambda to: asked.append(to) or "10.1.2.3")
    assert driver_address([LOOPBACK, LOOPBACK]) == LOOPBACK
    assert asked == []
    assert driver_address([ELSEWHERE, LOOPBACK]) == "10.1.2.3"
    assert asked == [ELSEWHERE]


def test_unknown_address_error_lists_the_known_ones(monkeypatch):
    monkeypatch.setattr(network, "interfaces", lambda: {"10.1.2.3": "eth0", LOOPBACK: "lo"})
    with pytest.raises(RuntimeError, match=re.escape(ELSEWHERE)) as caught:
        interface_of(ELSEWHERE)
    assert "have 10.1.2.3, 127.0.0.1. Set GLOO_SOCKET_IFNAME" in str(caught.value)
    monkeypatch.setattr(network, "interfaces", dict)
    with pytest.raises(RuntimeError, match="have none"):
        interface_of(ELSEWHERE)
