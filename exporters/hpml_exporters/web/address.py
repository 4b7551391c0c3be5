"""Where the server listens: ADDRESS:PORT, parsed, resolved and bound."""

from __future__ import annotations

import errno
import os
import re
import socket

from hpml_orchestrator.errors import InputError

_FORM = re.compile(r"(?:\[([^][/ ]+)\]|([^][:/ ]*)):([0-9]{1,5})")
_HINT = "ADDRESS:PORT, such as 127.0.0.1:9445, [::1]:9445, or :9445 for all addresses"
_PORT_MAX = 65535
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
    if not match or int(match[3]) > _PORT_MAX:
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
    try:
        try:
            return _bound(host, port)
        except OSError as error:
            if not (any_port and error.errno == errno.EADDRINUSE):
                raise
            return _bound(host, 0)
    except (OSError, UnicodeError) as error:
        number = 0 if isinstance(error, (socket.gaierror, UnicodeError)) else error.errno or 0
    hint = {
        errno.EADDRINUSE: f"another port; `ss -ltnp 'sport = :{port}'` shows who uses this one",
        errno.EADDRNOTAVAIL: "use an address of this machine; `ip address` lists them",
        errno.EACCES: "use a port from 1024 on",
    }.get(number, _HINT)
    why = os.strerror(number) if number else f"{host}: unknown host name"
    raise InputError(why, field="listen", value=listen, hint=hint)


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens on one address, IPv4 first, or on all of IPv6 and IPv4."""
    family, address = socket.AF_INET6, ("::", port)
    if host:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = min(addresses, key=lambda one: one[0] != socket.AF_INET)  # type: ignore[assignment]
    elif not socket.has_dualstack_ipv6():
        family, address = socket.AF_INET, ("", port)
    listener = socket.create_server(
        address,
        family=family,
        backlog=_BACKLOG,
        dualstack_ipv6=not host and family == socket.AF_INET6,
    )
    # Accepted connections inherit both: what a client leaves unread stays small.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
    listener.setblocking(False)
    return listener
