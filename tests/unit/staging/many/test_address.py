"""The address that a node publishes for the others."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hpml_orchestrator.staging import link
from hpml_orchestrator.staging.link import interface_address, own_address

IF_INET6 = """\
fe800000000000000a0027fffe8d1234 02 40 20 80     ib0
20010db8000000000000000000000007 02 40 00 80     ib0
00000000000000000000000000000001 01 80 10 80       lo
"""


def test_the_first_interface_with_an_address_counts() -> None:
    """Names that are not there are passed over; one that was named may be the loopback."""
    assert own_address(["nosuch0", "lo"]) == "127.0.0.1"
    assert interface_address("nosuch0") == ""


def test_an_interface_may_have_ipv6_alone(tmp_path: Path) -> None:
    """Its global address, not the one of the link."""
    table = tmp_path / "if_inet6"
    table.write_text(IF_INET6)
    assert interface_address("ib0", inet6=str(table)) == "2001:db8::7"
    assert interface_address("ib1", inet6=str(table)) == ""


def test_a_host_name_that_is_the_loopback_is_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian gives hosts 127.0.1.1 by name: the route to another node decides instead."""
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.1.1")
    monkeypatch.setattr(link, "_route", lambda towards: "10.1.2.3" if towards == "n0" else "")
    assert own_address(towards="n0") == "10.1.2.3"
