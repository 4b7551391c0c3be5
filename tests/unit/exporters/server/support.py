"""What the tests of the server share: pages, certificates, clients, and a server in a process.

`python -m tests.unit.exporters.server.support LISTEN WEB_CONFIG LIMITS` serves until its input
ends, and answers each line of input with its counters.
"""

from __future__ import annotations

import base64
import gzip
import http.client
import ipaddress
import json
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, Self

from hpml_exporters.server import Limits, Server

ROOT = Path(__file__).parents[4]
HTTP_END = b"\r\n\r\n"
GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
ENDING = b"# EOF\n"
SERIES = 1300
WAIT_SECONDS = 60
# The server's own times are for bad clients; one of a test that stands still for some seconds, with
# the whole machine, is none.
PATIENT = Limits(
    handshake_seconds=600,
    header_seconds=600,
    check_seconds=600,
    write_seconds=600,
    linger_seconds=600,
)


def _series() -> bytes:
    lines = ["# HELP hpml_gpu_busy_seconds_total Seconds with a kernel.\n"]
    lines += ["# TYPE hpml_gpu_busy_seconds_total counter\n"]
    lines += [
        f'hpml_gpu_busy_seconds_total{{uuid="GPU-{i:08x}-77aa-4e09-b1ff",n="{i}"}} {i * 1.5}\n'
        for i in range(SERIES)
    ]
    return "".join(lines).encode()


class StaticPages:
    """1,300 series, always the same."""

    def __init__(self, body: bytes | None = None) -> None:
        self.body = _series() if body is None else body
        self.healthy = (True, "all is well")
        self._made: dict[tuple[bool, bool], bytes] = {}

    def metrics(self, *, openmetrics: bool, gzip: bool) -> bytes:
        if (openmetrics, gzip) not in self._made:
            body = self.body + ENDING if openmetrics else self.body
            self._made[openmetrics, gzip] = _gzip(body) if gzip else body
        return self._made[openmetrics, gzip]

    def health(self) -> tuple[bool, str]:
        return self.healthy


def _gzip(body: bytes) -> bytes:
    return gzip.compress(body, 6)


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float


def scrape(
    address: tuple[str, int],
    path: str = "/metrics",
    *,
    method: str = "GET",
    context: ssl.SSLContext | None = None,
    timeout: float = WAIT_SECONDS,
    **headers: str,
) -> Answer:
    """One request by the standard library's client, in a connection of its own."""
    begun = time.perf_counter()
    made = (
        http.client.HTTPSConnection(*address, context=context, timeout=timeout)
        if context
        else http.client.HTTPConnection(*address, timeout=timeout)
    )
    with closing(made) as client:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        client.request(method, path, headers=named)
        with client.getresponse() as response:
            body = response.read()
            got = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, got, body, time.perf_counter() - begun)


def basic(name: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


def connect(address: tuple[str, int]) -> socket.socket:
    made = socket.create_connection(address, timeout=WAIT_SECONDS)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


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


def read_to_end(client: socket.socket) -> bytes:
    """All that comes until the other side ends or breaks the connection."""
    found = b""
    while True:
        try:
            part = client.recv(65536)
        except ConnectionResetError:
            return found
        if not part:
            return found
        found += part


def exchange(address: tuple[str, int], sent: bytes) -> bytes:
    """Send bytes as they are, and return all that comes back until the end."""
    with connect(address) as client:
        client.sendall(sent)
        return read_to_end(client)


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


class Certificates(NamedTuple):
    """Files of a little authority: a server, a client, and a client of another authority."""

    folder: Path
    ca: str
    cert: str
    key: str
    client: str
    client_key: str
    stranger: str
    stranger_key: str

    def client_context(self, cert: str = "", key: str = "") -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.folder / self.ca)
        if cert:
            context.load_cert_chain(self.folder / cert, self.folder / key)
        return context


def make_certificates(folder: Path, *, serial: str = "") -> Certificates:
    """Write an authority, its server and client, and a stranger signed by himself."""
    from cryptography import x509  # noqa: PLC0415 - not for the process that serves
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415 - as above
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415 - as above
    from cryptography.x509.oid import NameOID  # noqa: PLC0415 - as above

    def name(words: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, words + serial)])

    def write(file: str, words: str, signer: Any = None, *names: x509.GeneralName) -> Any:
        key = ec.generate_private_key(ec.SECP256R1())
        issuer, issuer_key = signer or (name(words), key)
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder(issuer, name(words), key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(
                x509.BasicConstraints(ca=signer is None, path_length=None), critical=True
            )
        )
        # Python 3.13 and later are strict about these two.
        own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        signed = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
        builder = builder.add_extension(own, critical=False).add_extension(signed, critical=False)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        made = builder.sign(issuer_key, hashes.SHA256())
        (folder / f"{file}.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))
        (folder / f"{file}.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return name(words), key

    folder.mkdir(parents=True, exist_ok=True)
    authority = write("ca", "authority")
    local = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    write("server", "server", authority, *local)
    write("client", "client", authority, x509.DNSName("prometheus.example"))
    write("stranger", "stranger", None, x509.DNSName("stranger.example"))
    files = [f"{one}.{end}" for one in ("server", "client", "stranger") for end in ("crt", "key")]
    return Certificates(folder, "ca.crt", *files)


class Process:
    """A server in a process of its own, as the exporter is one."""

    def __init__(self, web_config: str = "", limits: Limits | None = None) -> None:
        self.child = subprocess.Popen(
            [
                sys.executable, "-m", "tests.unit.exporters.server.support",
                "127.0.0.1:0", web_config, json.dumps(asdict(limits or Limits())),
            ],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        host, port = self._line()
        self.address = (str(host), int(port))
        self.pid = self.child.pid

    def _line(self) -> Any:
        assert self.child.stdout is not None
        return json.loads(self.child.stdout.readline())

    def counters(self) -> dict[str, Any]:
        assert self.child.stdin is not None
        self.child.stdin.write("\n")
        self.child.stdin.flush()
        found: dict[str, Any] = self._line()
        return found

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def memory_kib(self) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1])
        raise AssertionError(self.pid)

    def cpu_seconds(self) -> float:
        """Of the process so far, by its scheduler statistics in nanoseconds."""
        return sum(
            int((task / "schedstat").read_text().split()[0]) / 1e9
            for task in Path(f"/proc/{self.pid}/task").iterdir()
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.child.communicate(timeout=WAIT_SECONDS)


def main() -> None:
    listen, web_config, limits = sys.argv[1:]
    server = Server(listen, web_config, StaticPages(), Limits(**json.loads(limits)))
    print(json.dumps(server.start()), flush=True)
    for _ in sys.stdin:
        print(json.dumps(asdict(server.counters)), flush=True)
    server.stop()


if __name__ == "__main__":
    main()
