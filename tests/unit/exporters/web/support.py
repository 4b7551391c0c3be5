"""What the tests of the web server share: pages, certificates, clients, a server in a process.

`python -m tests.unit.exporters.web.support WEB_CONFIG LIMITS` serves until its input ends, and
answers each line of input with its counters.
"""

from __future__ import annotations

import base64
import gzip
import http.client
import ipaddress
import json
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, Self

from hpml_exporters.web.server import RequestLimits, Server

ROOT = Path(__file__).parents[4]
GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
SERIES = 1300
WAIT_SECONDS = 60
# A machine that stalls for some seconds must not turn a good client into a slow one.
PATIENT = RequestLimits(request_seconds=600)
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
Address = tuple[str, int]


class StaticPages:
    """1,300 time series, always the same."""

    def __init__(self, body: bytes | None = None) -> None:
        lines = (f'hpml_gpu_busy_seconds_total{{gpu="{i}"}} {i * 1.5}\n' for i in range(SERIES))
        kind = "# TYPE hpml_gpu_busy_seconds_total counter\n"
        self.body = (kind + "".join(lines)).encode() if body is None else body
        self.healthy = (True, "ok")

    def metrics(self, accept: str, names: Sequence[str], *, gzip: bool) -> tuple[bytes, str]:
        body = f"only {' '.join(names)}\n".encode() if names else self.body
        if "openmetrics" in accept:
            return compressed(body + b"# EOF\n", gzip), OPENMETRICS
        return compressed(body, gzip), "text/plain; version=0.0.4; charset=utf-8"

    def health(self) -> tuple[bool, str]:
        return self.healthy


def compressed(body: bytes, wanted: bool) -> bytes:
    return gzip.compress(body, 1) if wanted else body


@contextmanager
def serving(
    web_config: Path | str = "", limits: RequestLimits = PATIENT, pages: StaticPages | None = None
) -> Iterator[tuple[Server, Address]]:
    server = Server("127.0.0.1:0", str(web_config), pages or StaticPages(), limits)
    address = server.start()
    try:
        yield server, address
    finally:
        server.stop()


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


def scrape(
    address: Address,
    path: str = "/metrics",
    *,
    context: ssl.SSLContext | None = None,
    **headers: str,
) -> Answer:
    """One request by the standard library's client, over a new connection."""
    made = (
        http.client.HTTPSConnection(*address, context=context, timeout=WAIT_SECONDS)
        if context
        else http.client.HTTPConnection(*address, timeout=WAIT_SECONDS)
    )
    with closing(made) as client:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        client.request("GET", path, headers=named)
        with client.getresponse() as response:
            got = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, got, response.read())


def status(address: Address, context: ssl.SSLContext | None = None, **headers: str) -> int:
    """The status of a scrape; 0 if the connection fails."""
    try:
        return scrape(address, context=context, **headers).status
    except (OSError, http.client.HTTPException):
        return 0


def basic(name: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


def connect(address: Address, source: str = "127.0.0.1") -> socket.socket:
    made = socket.create_connection(address, timeout=WAIT_SECONDS, source_address=(source, 0))
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def read_to_end(client: socket.socket) -> bytes:
    """All that comes until the other side ends or breaks the connection."""
    found = b""
    with suppress(ConnectionResetError):
        while part := client.recv(65536):
            found += part
    return found


def exchange(address: Address, sent: bytes) -> bytes:
    """Send bytes as they are, and return the complete response."""
    with connect(address) as client:
        client.sendall(sent)
        return read_to_end(client)


def statuses(answers: bytes) -> list[int]:
    return [
        int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) \S+[^\n]*\r\nServer", answers)
    ]


@contextmanager
def held_port() -> Iterator[int]:
    """A port of 127.0.0.1 for whoever asks for it by number: nobody else is given it meanwhile.

    A socket is bound to it and does not listen. Servers with SO_REUSEADDR, as all here have it, may
    bind to it too; the kernel gives it to none that takes any port.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port: int = holder.getsockname()[1]
        yield port


class Certificates(NamedTuple):
    """A folder with ca.crt and certificates and keys of server, client and stranger."""

    folder: Path

    def context(self, client: str = "") -> ssl.SSLContext:
        """For a client that trusts the authority and shows a certificate, or none."""
        context = ssl.create_default_context(cafile=self.folder / "ca.crt")
        if client:
            context.load_cert_chain(self.folder / f"{client}.crt", self.folder / f"{client}.key")
        return context

    def write(self, name: str, text: str) -> Path:
        (self.folder / name).write_text(text)
        return self.folder / name


def make_certificates(folder: Path, *, serial: str = "") -> Certificates:
    """Write an authority, its server and client, and a stranger signed by himself."""
    from cryptography import x509  # noqa: PLC0415 - not for the process that serves
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415 - as above
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415 - as above
    from cryptography.x509.oid import NameOID  # noqa: PLC0415 - as above

    def write(file: str, signer: Any = None, *names: x509.GeneralName) -> Any:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, file + serial)])
        issuer, issuer_key = signer or (name, key)
        now = datetime.now(UTC)
        ca = x509.BasicConstraints(ca=signer is None, path_length=None)
        own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        signed = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
        made = (
            x509.CertificateBuilder(issuer, name, key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(ca, critical=True)
            .add_extension(own, critical=False)
            .add_extension(signed, critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(issuer_key, hashes.SHA256())
        )
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        (folder / f"{file}.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))
        (folder / f"{file}.key").write_bytes(private)
        return name, key

    folder.mkdir(parents=True, exist_ok=True)
    ca = write("ca", None, x509.DNSName("authority"))
    local = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    write("server", ca, x509.DNSName("localhost"), local)
    write("client", ca, x509.DNSName("prometheus.example"))
    write("stranger", None, x509.DNSName("prometheus.example"))
    return Certificates(folder)


class Process:
    """A server in a separate process, like the exporter."""

    def __init__(self, web_config: Path | str = "", limits: RequestLimits = PATIENT) -> None:
        module = "tests.unit.exporters.web.support"
        argv = [sys.executable, "-m", module, str(web_config), json.dumps(asdict(limits))]
        self._child = subprocess.Popen(
            argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        host, port = self._line()
        self.address = (str(host), int(port))
        self.pid = self._child.pid

    def _line(self) -> Any:
        assert self._child.stdout is not None
        return json.loads(self._child.stdout.readline())

    def counters(self) -> dict[str, Any]:
        assert self._child.stdin is not None
        self._child.stdin.write("\n")
        self._child.stdin.flush()
        found: dict[str, Any] = self._line()
        return found

    def memory_kib(self) -> int:
        text = Path(f"/proc/{self.pid}/status").read_text()
        return int(text.partition("VmRSS:")[2].split()[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.communicate(timeout=WAIT_SECONDS)


def main() -> None:
    web_config, limits = sys.argv[1:]
    server = Server("127.0.0.1:0", web_config, StaticPages(), RequestLimits(**json.loads(limits)))
    print(json.dumps(server.start()), flush=True)
    for _ in sys.stdin:
        print(json.dumps(asdict(server.counters)), flush=True)
    server.stop()


if __name__ == "__main__":
    main()
