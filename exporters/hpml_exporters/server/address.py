"""Where the server listens: ADDRESS:PORT read, resolved and bound."""

from __future__ import annotations

import errno
import os
import socket

from hpml_exporters.server.limits import Limits
from hpml_orchestrator.errors import InputError

__all__ = ["listen_on", "split"]

_FIELD = "listen"
_RIGHT = "ADDRESS:PORT, such as 127.0.0.1:9445, [::1]:9445, or :9445 for all addresses"
_LAST_PORT = 65535


def split(listen: str) -> tuple[str, int]:
    """Return host and port of ADDRESS:PORT; an empty host means all addresses.

    >>> split("[::1]:9445"), split("node1:0"), split(":9445")
    (('::1', 9445), ('node1', 0), ('', 9445))

    Raises:
        InputError: it is written otherwise.
    """
    host, colon, port = listen.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if (
        not colon
        or (":" in host) != bracketed
        or (bracketed and not host)
        or set(host) & set("/[] ")
    ):
        raise InputError("no address with a port", field=_FIELD, value=listen, hint=_RIGHT)
    if not (port.isascii() and port.isdigit() and int(port) <= _LAST_PORT):
        hint = f"a port is a number from 0 (any free one) to {_LAST_PORT}"
        raise InputError("no port", field=_FIELD, value=listen, hint=hint)
    return host, int(port)


def listen_on(listen: str, limits: Limits, *, any_port: bool = False) -> socket.socket:
    """Return a socket that listens, non-blocking.

    Args:
        listen: ADDRESS:PORT.
        limits: how much clients may take.
        any_port: take a free port of that address where the given one is another's.

    Raises:
        InputError: the address is none, not of this machine, taken, or not allowed.
    """
    host, port = split(listen)
    failure: OSError | None = None
    for family, address in _resolve(host, port, listen):
        try:
            return _bound(family, address, limits, every=not host)
        except OSError as error:
            failure = failure or error
    if any_port and failure is not None and failure.errno == errno.EADDRINUSE and port:
        return listen_on(f"{listen.rpartition(':')[0]}:0", limits)
    raise _refusal(failure, listen, port)


def _resolve(host: str, port: int, listen: str) -> list[tuple[int, tuple[object, ...]]]:
    """Return the addresses behind a name, those of IPv4 first; both at once for no name.

    Raises:
        InputError: there is no such name.
    """
    if not host:
        return [(socket.AF_INET6, ("::", port)), (socket.AF_INET, ("0.0.0.0", port))]  # noqa: S104 - asked for
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "no host name"
        hint = "an address of this machine, or a name that it knows"
        raise InputError(f"{host}: {why}", field=_FIELD, value=listen, hint=hint) from None
    found.sort(key=lambda one: one[0] != socket.AF_INET)
    return [(one[0], one[4]) for one in found]


def _bound(
    family: int, address: tuple[object, ...], limits: Limits, *, every: bool
) -> socket.socket:
    """Return a socket that listens on one address; `every`: on IPv4 too."""
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(not every))
        # Accepted connections inherit both: what a client leaves unread stays small.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.send_buffer_bytes)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, limits.receive_buffer_bytes)
        made.bind(address)
        made.listen(limits.backlog)
        made.setblocking(False)
    except BaseException:
        made.close()
        raise
    return made


def _refusal(failure: OSError | None, listen: str, port: int) -> InputError:
    """Return why nothing could be bound, and what helps."""
    code = failure.errno if failure else None
    if code == errno.EADDRINUSE:
        words = "something else listens there already"
        hint = f"another port, or 0 for any free one; `ss -ltnp 'sport = :{port}'` names who has it"
    elif code == errno.EADDRNOTAVAIL:
        words, hint = "this machine has no such address", "`ip address` shows those that it has"
    elif code == errno.EACCES:
        words, hint = "ports below 1024 are for root", "a port from 1024 on"
    else:
        words, hint = (os.strerror(code) if code else "it has no address"), _RIGHT
    return InputError(words, field=_FIELD, value=listen, hint=hint)
