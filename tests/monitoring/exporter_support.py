"""The real exporter as its own process, on simulated GPUs, for the tests of this folder."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from deploy.gpusim.gpusim import Simulator
from tests.patience import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tests.monitoring.gpusim_support import Gpusim

HPML = Path(sys.executable).parent / "hpml"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
_START_SECONDS = 240.0
_END_SECONDS = 60.0

Labels = tuple[tuple[str, str], ...]


class Answer:
    """What a scrape gave."""

    def __init__(self, status: int, kind: str, text: str) -> None:
        self.status = status
        self.kind = kind
        self.text = text

    def values(self) -> dict[tuple[str, Labels], float]:
        """All samples by name and labels, as Prometheus' own Python library reads them."""
        read = openmetrics if "openmetrics" in self.kind else plain
        return {
            (one.name, tuple(sorted(one.labels.items()))): float(one.value)
            for family in read(self.text)
            for one in family.samples
        }

    def of(self, name: str, **labels: str) -> list[float]:
        """Values of the samples of this name that have these labels."""
        wanted = set(labels.items())
        return [
            value
            for (other, pairs), value in self.values().items()
            if other == name and wanted <= set(pairs)
        ]


class Exporter:
    """An exporter that runs."""

    def __init__(self, process: subprocess.Popen[bytes], address: str, log: Path) -> None:
        self.process = process
        self.address = address
        self._log = log

    @property
    def pid(self) -> int:
        """Its process id: `hpml export node` becomes the lean process."""
        return self.process.pid

    def scrape(self, *, accept: str = "") -> Answer:
        """Scrape it once, over a new connection."""
        with closing(HTTPConnection(self.address, timeout=60)) as connection:
            connection.request("GET", "/metrics", headers={"Accept": accept} if accept else {})
            response = connection.getresponse()
            kind = response.getheader("Content-Type", "")
            return Answer(response.status, kind, response.read().decode())

    def wait_for(
        self, good: Callable[[Answer], object], seconds: float = 240.0, *, accept: str = ""
    ) -> Answer:
        """Scrape until the answer is good; fails with the last one."""
        last: list[Answer] = []

        def is_good() -> bool:
            with contextlib.suppress(OSError):
                last[:] = [self.scrape(accept=accept)]
                return last[0].status == 200 and bool(good(last[0]))
            return False

        try:
            eventually(is_good, seconds=seconds, pause=0.1)
        except AssertionError:
            text = last[0].text[-6000:] if last else "it never answered"
            pytest.fail(f"not so after {seconds:g} s:\n{text}\n{self.log()}")
        return last[0]

    def log(self) -> str:
        """Its log output so far."""
        return self._log.read_text("utf-8")

    def status(self, field: str) -> int:
        """A number of /proc/PID/status, such as VmRSS in KiB."""
        for line in Path(f"/proc/{self.pid}/status").read_text("utf-8").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1])
        raise AssertionError(f"no {field}")

    def descriptors(self) -> int:
        """How many files and sockets it has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def end(self) -> int:
        """Tell it to end, and return the status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()


class StartExporter(Protocol):
    """The fixture `exporter`."""

    def __call__(self, *options: str | Path, gpus: Gpusim | None = None) -> Exporter:
        """Run `hpml export node` with options on a free port and wait until it answers.

        Without simulated GPUs it finds no NVML, on a machine that has one neither.
        """


@contextlib.contextmanager
def running(
    folder: Path, *options: str | Path, environment: Mapping[str, str]
) -> Iterator[Exporter]:
    """Run one until the block ends."""
    folder.mkdir(parents=True)
    address = folder / "address"
    output = folder / "exporter.log"
    # an empty folder for maps and sockets: a socket's path has 107 bytes, a test's folder more
    with tempfile.TemporaryDirectory(prefix="hpml-run-") as run, output.open("wb") as log:
        listen = ("--listen", "127.0.0.1:0", "--address-file", address)
        process = subprocess.Popen(
            [HPML, "export", "node", "--root", f"run={run}", *listen, *options],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            eventually(lambda: address.exists() or process.poll() is not None)
            assert process.poll() is None, f"it does not start:\n{output.read_text('utf-8')}"
            yield Exporter(process, address.read_text("utf-8").strip(), output)
        finally:
            Exporter(process, "", output).end()


@pytest.fixture
def exporter(tmp_path: Path) -> Iterator[StartExporter]:
    """Starts exporters; all of them end with the test."""
    with contextlib.ExitStack() as stack:
        started = 0

        def start(*options: str | Path, gpus: Gpusim | None = None) -> Exporter:
            nonlocal started
            started += 1
            folder = tmp_path / f"exporter-{started}"
            environment = gpus.environment if gpus else os.environ | Simulator().missing()
            return stack.enter_context(running(folder, *options, environment=environment))

        yield start
