"""How much of everything one client, and all of them together, may take."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """Bounds of the server; times in seconds, sizes in bytes.

    Attributes:
        connections: open at one time; one more takes the place of the least promising one.
        backlog: connections that the kernel completes before they are accepted.
        header_bytes: of a request line with all its headers.
        headers: lines of headers in a request.
        handshake_seconds: from the connection to the end of the TLS handshake.
        header_seconds: from the connection, or the first byte of a later request, to its end.
        idle_seconds: between two requests of a connection.
        check_seconds: a password waits for its check.
        write_seconds: from the answer's first byte to its last.
        linger_seconds: an ended connection waits for the client to end it too.
        checks: passwords that wait for their check.
        remembered: checked passwords that are known for a while.
        remembered_seconds: from the last use of a right password to its next check.
        wrong_seconds: from a wrong password's check to its next one.
        watch_seconds: between two looks at the web-config file and those that it names.
        send_buffer_bytes: of one connection in the kernel.
        receive_buffer_bytes: of one connection in the kernel.
    """

    connections: int = 256
    backlog: int = 256
    header_bytes: int = 8192
    headers: int = 64
    handshake_seconds: float = 5.0
    header_seconds: float = 5.0
    idle_seconds: float = 150.0
    check_seconds: float = 10.0
    write_seconds: float = 10.0
    linger_seconds: float = 1.0
    checks: int = 32
    remembered: int = 128
    remembered_seconds: float = 300.0
    wrong_seconds: float = 60.0
    watch_seconds: float = 2.0
    send_buffer_bytes: int = 256 * 1024
    receive_buffer_bytes: int = 32 * 1024
