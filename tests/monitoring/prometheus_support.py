"""A real Prometheus for the tests of this folder: booted on a free port, asked in PromQL."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import pytest
from ruamel.yaml import YAML

from tests.patience import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_SHIPPED = Path(__file__).parents[2] / "deploy/prometheus/prometheus.yml"
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_BOOT_SECONDS = 240.0
_END_SECONDS = 60.0

_LATE = "(up == 0) and on (job, instance) (scrape_duration_seconds > 0.9)"
"""Scrapes that ran out of their second: the machine was busy with something else."""


class Series(NamedTuple):
    """One element of an instant vector."""

    labels: dict[str, str]  # `__name__` too, if the expression keeps it
    value: float


class Line(NamedTuple):
    """One series of a range: its (Unix seconds, value) pairs in order."""

    labels: dict[str, str]
    points: list[tuple[float, float]]


@dataclass(frozen=True)
class Prometheus:
    """A Prometheus that is up."""

    url: str
    pid: int
    folder: Path

    def api(self, path: str, **parameters: str) -> Any:
        """The data that its HTTP API answers; a refusal fails with Prometheus' own words."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=120) as answer:  # noqa: S310 - our own server
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from error

    def query(self, promql: str, seconds: float = 240.0) -> list[Series]:
        """Evaluate an expression now, but not if the last scrape of a target came too late.

        A late scrape makes all series of its target stale, and the result would miss them.
        """
        series: list[Series] = []

        def in_time() -> bool:
            now = time.time()
            series[:] = self._evaluated(promql, now)
            return not self._evaluated(_LATE, now)

        with contextlib.suppress(AssertionError):
            eventually(in_time, seconds=seconds, pause=0.2)
        return series

    def _evaluated(self, promql: str, at: float) -> list[Series]:
        """Evaluate an expression at a moment, in Unix seconds."""
        data = self.api("query", query=promql, time=repr(at))
        if data["resultType"] == "scalar":
            return [Series({}, float(data["result"][1]))]
        return [Series(one["metric"], float(one["value"][1])) for one in data["result"]]

    def value(self, promql: str) -> float:
        """The one value of an expression that has exactly one."""
        found = self.query(promql)
        assert len(found) == 1, f"{promql}: {found}"
        return found[0].value

    def query_range(self, promql: str, start: float, end: float, step: float = 1.0) -> list[Line]:
        """Evaluate an expression from start to end (Unix seconds)."""
        data = self.api(
            "query_range", query=promql, start=repr(start), end=repr(end), step=repr(step)
        )
        return [
            Line(one["metric"], [(float(when), float(value)) for when, value in one["values"]])
            for one in data["result"]
        ]

    def targets(self) -> list[dict[str, Any]]:
        """What it scrapes: each with `labels`, `health`, `lastError`, `lastScrapeDuration`."""
        targets: list[dict[str, Any]] = self.api("targets", state="active")["activeTargets"]
        return targets

    def counters_that_fell(self, window: str, job: str, jobs: str = ".*") -> list[Series]:
        """Series of a scrape job's counters that went back within a window such as "5m".

        Args:
            window: up to now.
            job: of the scrape config.
            jobs: expression for the `jobid` of those meant, besides series of no job; other tests'
                jobs on this machine may have the same numbers as others before them.
        """
        names: list[str] = self.api("label/__name__/values")
        meant = f'{{job="{job}", jobid=~"|{jobs}"}}'
        return [
            Series({"__name__": name, **one.labels}, one.value)
            for name in names
            if name.endswith("_total")
            for one in self.query(f"resets({name}{meant}[{window}]) > 0")
        ]

    def was_refused(self, job: str, window: str) -> bool:
        """Whether a scrape of a job failed otherwise than by coming too late, within a window."""
        of_job = f'{{job="{job}"}}'
        quick = f"on (job, instance) (scrape_duration_seconds{of_job} < bool 0.9)"
        found = self.query(f"max_over_time(((up{of_job} == bool 0) * {quick})[{window}:1s]) > 0")
        return bool(found)

    def wait_for(
        self, promql: str, good: Callable[[list[Series]], bool] = bool, seconds: float = 240.0
    ) -> list[Series]:
        """Ask until the answer is good; fails with the last one."""
        last: list[list[Series]] = []

        def is_good() -> bool:
            last[:] = [self.query(promql)]
            return good(last[0])

        try:
            eventually(is_good, seconds=seconds, pause=0.2)
        except AssertionError:
            targets = [(target["health"], target["lastError"]) for target in self.targets()]
            pytest.fail(f"{promql} stays {last[0][:20]} for {seconds:g} s; targets: {targets}")
        return last[0]

    def log(self) -> str:
        """What it has written so far."""
        return (self.folder / "prometheus.log").read_text("utf-8")


class BootPrometheus(Protocol):
    """The fixture `prometheus`."""

    def __call__(self, scrape_configs: Sequence[Mapping[str, Any]], **more: Any) -> Prometheus:
        """Boot one that scrapes these; `more` are other parts of prometheus.yml."""


class Promtool(Protocol):
    """The fixture `promtool`."""

    def __call__(
        self, *words: str | Path, text: bytes | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run it on its standard input; the caller looks at its status."""


def static(job: str, *addresses: str, **more: Any) -> dict[str, Any]:
    """A scrape config of fixed addresses, once per second unless `more` has another interval."""
    return {
        "job_name": job,
        "scrape_interval": "1s",
        "scrape_timeout": "1s",
        "static_configs": [{"targets": list(addresses)}],
    } | more


def files(job: str, *patterns: str | Path, **more: Any) -> dict[str, Any]:
    """A scrape config of addresses that stand in target files."""
    return {
        "job_name": job,
        "scrape_interval": "1s",
        "scrape_timeout": "1s",
        "file_sd_configs": [{"files": list(map(str, patterns)), "refresh_interval": "1s"}],
    } | more


def of_jobs(pattern: str | Path) -> dict[str, Any]:
    """The scrape config of jobs' own exporters as we ship it, with these target files."""
    shipped = YAML(typ="safe").load(_SHIPPED.read_text("utf-8"))["scrape_configs"]
    (config,) = (one for one in shipped if one["job_name"] == "hpml-job")
    return files("hpml-job", pattern) | {
        name: rules for name, rules in config.items() if name.endswith("relabel_configs")
    }


def program(name: str) -> str:
    """Where one of the programs is; skips without it, and fails on CI."""
    found = shutil.which(name, path=_SYSTEM_PATH)
    if found is None:
        pytest.skip(f"NO MONITORING TESTS: {name} is not installed (deploy/prometheus/install.sh)")
    return found


@contextlib.contextmanager
def booted_prometheus(
    folder: Path,
    scrape_configs: Sequence[Mapping[str, Any]],
    *,
    options: Sequence[str] = (),
    **more: Any,
) -> Iterator[Prometheus]:
    """Boot one that keeps its data in a folder, and end it; `options` are of its command line."""
    command = program("prometheus")
    folder.mkdir(parents=True, exist_ok=True)
    # JSON is YAML
    config = {"global": {"scrape_interval": "1s"}} | more | {"scrape_configs": scrape_configs}
    (folder / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                command,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                "--web.listen-address=127.0.0.1:0",
                *options,
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield Prometheus(_wait_ready(process, folder / "prometheus.log"), process.pid, folder)
    finally:
        _end(process)


def _wait_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until it answers queries; returns where."""

    def ready() -> str:
        text = log.read_text("utf-8")
        assert process.poll() is None, f"Prometheus does not start:\n{text}"
        listens = re.search(r'msg="Listening on" address=(\S+)', text)
        return f"http://{listens[1]}" if listens and 'msg="Server is ready' in text else ""

    return eventually(ready, "Prometheus does not start", _BOOT_SECONDS)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it by its id: asked first, then killed."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[BootPrometheus]:
    """Boots a Prometheus with the scrape configs it is called with; all end with the test."""
    with contextlib.ExitStack() as stack:
        booted = 0

        def boot(scrape_configs: Sequence[Mapping[str, Any]], **more: Any) -> Prometheus:
            nonlocal booted
            booted += 1
            folder = tmp_path / f"prometheus-{booted}"
            return stack.enter_context(booted_prometheus(folder, scrape_configs, **more))

        yield boot


@pytest.fixture
def promtool() -> Promtool:
    """Runs promtool."""
    command = program("promtool")

    def run(*words: str | Path, text: bytes | None = None) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [command, *map(str, words)],
            input=b"" if text is None else text,
            capture_output=True,
            timeout=240,
            check=False,
        )
        return subprocess.CompletedProcess(
            done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
        )

    return run
