"""Ports for servers that start later."""

import random
import socket

import pytest

from ampd import child_process as module
from ampd.child_process import reserved_ports
from ampd.errors import RunError

HOST = "127.0.0.1"


def test_ports_are_distinct_such_that_dynamo_can_open_them_and_free_again_at_the_end() -> None:
    with reserved_ports(HOST, 40) as ports:
        assert len(set(ports)) == 40
        assert all(1024 < port <= 32767 for port in ports), "Dynamo reads the port as a signed 16-bit number"
    for port in ports:
        with socket.socket() as probe:
            probe.bind((HOST, port))


def test_nobody_else_finds_them_but_a_server_that_shares_addresses_listens_there() -> None:
    with reserved_ports(HOST, 1) as (port,):
        for host in (HOST, "0.0.0.0"):
            with socket.socket() as probe, pytest.raises(OSError, match="in use"):
                probe.bind((host, port))
        with socket.create_server((HOST, port)), socket.create_connection((HOST, port)):
            pass


def test_a_port_that_is_taken_or_reserved_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserved_ports(HOST, 1) as (reserved,):
        with reserved_ports(HOST, 2) as (taken, free):
            pass
        draws = iter([reserved, taken, free])
        monkeypatch.setattr(random, "randint", lambda _low, _high: next(draws))
        with socket.create_server((HOST, taken)), reserved_ports(HOST, 1) as ports:
            assert ports == (free,)


def test_without_a_free_port_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserved_ports(HOST, 1) as (taken,):
        monkeypatch.setattr(module, "_LOWEST_PORT", taken)
        monkeypatch.setattr(module, "HIGHEST_PORT", taken)
        with pytest.raises(RunError, match="--no-metrics"), reserved_ports(HOST, 1, "serve without: --no-metrics"):
            pass
