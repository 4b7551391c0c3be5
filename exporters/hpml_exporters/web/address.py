"""Where the server listens: ADDRESS:PORT, parsed, resolved and bound."""

from __future__ import annotations

import errno
import os
import re
import socket

from hpml_orchestrator.errors import InputError

__all__ = ["listen_on", "split"]

_FORM = re.compile(r"(?:\[([^][/ ]+)\]|([^][:/ ]*)):([0-9]{1,5})")
_HINT = "ADDRESS:PORT, such as 127.0.0.1:9445, [::1]:9445, or :9445 for all addresses"
_LAST_PORT = 65535
_BACKLOG = 256
_SEND_BYTES, _RECEIVE_BYTES = 256 * 1024, 32 * 1024


def split(listen: str) -> tuple[str, int]:
    """Return host and port of ADDRESS:PORT; an empty host means all addresses.

    >>> split("[::1]:9445"), split("node1:0"), split(":9445")
    (('::1', 9445), ('node1', 0), ('', 9445))

    Raises:
        InputError: it has another form.
    """
    match = _FORM.fullmatch(listen)
    if not match or int(match[3]) > _LAST_PORT:
        raise InputError("not an address with a port", field="listen", value=listen, hint=_HINT)
    return match[1] or match[2], int(match[3])


def listen_on(listen: str, *, any_port: bool = False) -> socket.socket:
    """Return a non-blocking socket that listens.

    Args:
        listen: ADDRESS:PORT.
        any_port: if the port is in use, listen on a free one.

    Raises:
        InputError: the address is wrong, not of this machine, in use, or not permitted.
    """
    host, port = split(listen)
    failures = []
    for family, address in _resolve(host, port, listen):
        try:
            return _bound(family, address, both_families=not host)
        except OSError as error:
            failures.append(error)
    if any_port and port and failures[0].errno == errno.EADDRINUSE:
        return listen_on(f"{listen.rpartition(':')[0]}:0")
    hint = {
        errno.EADDRINUSE: f"another port; `ss -ltnp 'sport = :{port}'` shows who uses this one",
        errno.EADDRNOTAVAIL: "use an address of this machine; `ip address` lists them",
        errno.EACCES: "use a port from 1024 on",
    }.get(failures[0].errno or 0, _HINT)
    why = os.strerror(failures[0].errno or 0)
    raise InputError(why, field="listen", value=listen, hint=hint)


def _resolve(host: str, port: int, listen: str) -> list[tuple[int, object]]:
    """Return families and addresses behind a name, IPv4 first.

    Raises:
        InputError: the name is unknown.
    """
    if not host:
        return [(socket.AF_INET6, ("::", port)), (socket.AF_INET, ("0.0.0.0", port))]  # noqa: S104 - asked for
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "not a host name"
        raise InputError(f"{host}: {why}", field="listen", value=listen, hint=_HINT) from None
    found.sort(key=lambda info: info[0] != socket.AF_INET)
    return [(info[0], info[4]) for info in found]


def _bound(family: int, address: object, *, both_families: bool) -> socket.socket:
    """Return a socket that listens on one address, or on all of IPv6 and IPv4."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(not both_families))
        # Accepted connections inherit both: what a client leaves unread stays small.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        listener.bind(address)  # type: ignore[arg-type]
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
