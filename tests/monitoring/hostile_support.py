"""Clients that mean no good, in threads of the test: silent, slow, half-way through TLS."""

from __future__ import annotations

import contextlib
import datetime as dt
import socket
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# The first bytes of a TLS record: a handshake of 512 bytes, which never come.
HALF_A_HELLO = b"\x16\x03\x01\x02\x00\x01"
_LOOK_SECONDS = 0.2


class Crowd(NamedTuple):
    """So many connections that send some bytes at once, and then some more again and again."""

    size: int
    first: bytes = b""
    more: bytes = b""


SILENT = Crowd(200)
SLOW_LORIS = Crowd(20, b"GET /metrics HTTP/1.1\r\nHost: node\r\n", b"X-Again: 1\r\n")
HALF_TLS = Crowd(20, HALF_A_HELLO)


@contextlib.contextmanager
def crowded(address: str, *crowds: Crowd) -> Iterator[None]:
    """Keep the crowds connected until the block ends: whoever is thrown out comes again."""
    host, _, port = address.rpartition(":")
    ended = threading.Event()
    full = threading.Event()

    def press() -> None:
        there: list[tuple[socket.socket, Crowd]] = []
        missing = [crowd for crowd in crowds for _ in range(crowd.size)]
        while not ended.is_set():
            for crowd in missing:
                with contextlib.suppress(OSError):
                    one = socket.create_connection((host, int(port)), timeout=60)
                    one.setblocking(False)
                    one.sendall(crowd.first)
                    there.append((one, crowd))
            full.set()
            ended.wait(_LOOK_SECONDS)
            alive = [(one, crowd) for one, crowd in there if _is_open(one, crowd)]
            missing = [crowd for one, crowd in there if one.fileno() < 0]
            there = alive
        for one, _ in there:
            one.close()

    thread = threading.Thread(target=press)
    thread.start()
    try:
        assert full.wait(240)
        yield
    finally:
        ended.set()
        thread.join(240)
        assert not thread.is_alive()


def _is_open(one: socket.socket, crowd: Crowd) -> bool:
    """Send some more; a connection that the other side ended is closed here too."""
    try:
        if crowd.more:
            one.send(crowd.more)
        if one.recv(4096):
            return True
    except BlockingIOError:
        return True
    except OSError:
        pass
    one.close()
    return False


def answer_to(address: str, request: bytes, seconds: float = 60.0) -> bytes:
    """Send raw bytes; returns all that comes until the other side ends the connection."""
    host, _, port = address.rpartition(":")
    answer = b""
    end = time.monotonic() + seconds
    with socket.create_connection((host, int(port)), timeout=seconds) as one:
        with contextlib.suppress(OSError):
            one.sendall(request)
        with contextlib.suppress(OSError):
            while time.monotonic() < end and (part := one.recv(65536)):
                answer += part
    return answer


def certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate of 127.0.0.1 that signs itself; returns the files of it and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "node")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("node")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "node.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "node.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return folder / "node.crt", folder / "node.key"
