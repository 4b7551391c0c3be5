"""Where the ranks meet: the head node's address as all nodes resolve it, and a port free there."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.records.files import read_json
from hpml_orchestrator.records.store import Attempt

__all__ = ["candidate_ports", "ephemeral_range", "rendezvous", "resolve"]

_LOW, _HIGH = 10_000, 32_000


def rendezvous(attempt: str) -> int:
    """Print `ADDRESS PORT` for the ranks of this attempt; runs on the head node.

    Raises:
        HpmlError: a node cannot resolve the head node's name, or no port is free.
    """
    directory = Path(attempt)
    nodes = int(os.environ.get("SLURM_NNODES") or 1)
    address = "127.0.0.1" if nodes == 1 else _common_name(directory)
    # A port is free until its job's ranks have started: two jobs must not begin at the same one.
    # Job ids do not tell jobs of the local backend apart, which count from 1 in every HPML_HOME.
    for port in candidate_ports(str(directory.resolve()), ephemeral_range()):
        if _free(port):
            sys.stdout.write(f"{address} {port}\n")
            return 0
    raise HpmlError(f"no port between {_LOW} and {_HIGH} is free on this node")


def resolve(names: list[str]) -> dict[str, str]:
    """Return the address of each name that this node can resolve."""
    found = {}
    for name in names:
        try:
            found[name] = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
        except (OSError, UnicodeError):
            continue
    return found


def candidate_ports(key: str, ephemeral: tuple[int, int]) -> Iterator[int]:
    """Yield ports from 10000 to 31999 in an order made from a key, those outside a range first.

    The kernel gives ports of the ephemeral range to anybody's connections; on nodes where it was
    widened over all of these, a port in it that is free now is better than none.

    >>> next(candidate_ports("/r/17", (32768, 60999))) == next(candidate_ports("/r/17", (32768, 1)))
    True
    """
    span = _HIGH - _LOW
    digest = hashlib.sha256(key.encode()).digest()
    start = int.from_bytes(digest[:8], "big") % span
    stride = 7919  # a prime that does not divide the span: every port comes up once
    for wanted in (False, True):
        for step in range(span):
            port = _LOW + (start + step * stride) % span
            if (ephemeral[0] <= port <= ephemeral[1]) is wanted:
                yield port


def ephemeral_range(path: str = "/proc/sys/net/ipv4/ip_local_port_range") -> tuple[int, int]:
    """Return the first and last port that the kernel gives to outgoing connections."""
    try:
        with open(path, encoding="ascii") as stream:
            low, high = stream.read().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 32_768, 60_999


def _free(port: int) -> bool:
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
        except OSError as error:
            if family == socket.AF_INET6 and error.errno != 98:  # noqa: PLR2004 - EADDRINUSE
                continue  # no IPv6 here
            return False
    return True


def _common_name(attempt: Path) -> str:
    """Return the first name of the head node that every node resolves."""
    head: dict[str, Any] = read_json(attempt / "head.json")
    ready = Attempt(attempt).markers("ready")
    for name in head["names"]:
        if all(name in one.get("resolves", {}) for one in ready):
            return str(name)
    lost = [
        str(one.get("node"))
        for one in ready
        if not set(head["names"]) & set(one.get("resolves", {}))
    ]
    if not lost:
        known = "; ".join(
            f"{one.get('node')} knows {', '.join(one['resolves'])}"
            for one in ready
            if set(one["resolves"]) != set(head["names"])
        )
        raise HpmlError(
            f"no one name of the head node is known to all nodes: {known}",
            hint="the nodes' /etc/hosts or DNS must know each other's names",
        )
    raise HpmlError(
        f"node{'s' * (len(lost) > 1)} {', '.join(lost)} cannot resolve the head node "
        f"({', '.join(head['names'])})",
        hint="the nodes' /etc/hosts or DNS must know each other's names",
    )
