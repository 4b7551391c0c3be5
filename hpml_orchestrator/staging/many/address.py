"""The address at which the other nodes of a job reach this one."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence

__all__ = ["interface_address", "own_address"]

_SIOCGIFADDR = 0x8915
_IFREQ = struct.Struct("256s")
_GLOBAL_SCOPE = "00"
_NOWHERE = "192.0.2.1"  # RFC 5737: an address for documentation; only the route to it is asked for


def own_address(interfaces: Sequence[str] = (), *, towards: str = "") -> str:
    """Return the address to listen at.

    That of the first given interface which has one; else what the host's name stands for, if that
    is not the loopback; else the one that packets to the other node would leave with; else that
    of any interface.

    Args:
        interfaces: names of network interfaces, the best first.
        towards: name or address of another node.
    """
    for name in interfaces:
        found = interface_address(name)
        if found:
            return found
    for one in [*_resolved(socket.gethostname()), _route(towards), _route(_NOWHERE)]:
        if one and not _is_local(one):
            return one
    for _, name in socket.if_nameindex():
        found = interface_address(name)
        if found and not _is_local(found):
            return found
    return "127.0.0.1"


def interface_address(name: str, *, inet6: str = "/proc/net/if_inet6") -> str:
    """Return an interface's first address, IPv4 before global IPv6; "" where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        asked = _IFREQ.pack(name.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, asked)[20:24])
    with contextlib.suppress(OSError, ValueError), open(inet6, encoding="ascii") as stream:
        for line in stream:
            digits, _, _, scope, _, device = line.split()
            if device == name and scope == _GLOBAL_SCOPE:
                return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return ""


def _resolved(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(one[4][0]) for one in found]


def _route(towards: str) -> str:
    """Return the address that packets to another node leave with; none is sent."""
    for one in _resolved(towards)[:1] if towards else []:
        family = socket.AF_INET6 if ":" in one else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect((one, 9))
            return str(probe.getsockname()[0])
    return ""


def _is_local(address: str) -> bool:
    """Say whether no other machine can use an address: loopback, or of one link alone."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return True
    return found.is_loopback or found.is_link_local or found.is_unspecified
