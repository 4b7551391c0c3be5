"""The address of an interface that a site names."""

from __future__ import annotations

from pathlib import Path

from hpml_orchestrator.staging.chain import interface_address

IF_INET6 = """\
fe800000000000000a0027fffe8d1234 02 40 20 80     ib0
20010db8000000000000000000000007 02 40 00 80     ib0
00000000000000000000000000000001 01 80 10 80       lo
"""


def test_an_interface_has_an_address_or_none() -> None:
    """One that was named may be the loopback."""
    assert interface_address("lo") == "127.0.0.1"
    assert interface_address("nosuch0") == ""


def test_an_interface_may_have_ipv6_alone(tmp_path: Path) -> None:
    """Its global address, not the one of the link."""
    table = tmp_path / "if_inet6"
    table.write_text(IF_INET6)
    assert interface_address("ib0", inet6=str(table)) == "2001:db8::7"
    assert interface_address("ib1", inet6=str(table)) == ""
