"""`hpml top`: live on a real terminal, once elsewhere."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from hpml_orchestrator.cli.top import draw
from hpml_orchestrator.runs.live import LiveJob
from tests.patience import eventually
from tests.unit.cli.support import HPML, Hpml, Shell

pytestmark = pytest.mark.xdist_group("local runs")


@pytest.fixture(scope="module")
def job(shell: Shell) -> Iterator[str]:
    """The id of a running run."""
    file = shell.job("endless", command=["sleep", "600"], resources={"time": "20:00"})
    run = shell.hpml("submit", "--local", "--json", file).json()["id"]
    eventually(lambda: shell.hpml("status", run, "--json").json()[0]["attempts"], pause=0.2)
    yield run
    shell.hpml("cancel", run)


class Screen:
    """hpml in its own terminal."""

    def __init__(self, shell: Shell, *words: str, width: int = 100) -> None:
        self.leader, follower = pty.openpty()
        self.before = termios.tcgetattr(self.leader)
        self.resize(width)
        environment = {n: v for n, v in shell.environment().items() if n != "COLUMNS"}
        self.process = subprocess.Popen(
            [HPML, *words],
            env={**environment, "TERM": "xterm-256color"},
            cwd=shell.root,
            stdin=follower,
            stdout=follower,
            stderr=follower,
            start_new_session=True,
        )
        os.close(follower)
        os.set_blocking(self.leader, False)
        self.printed = ""

    def resize(self, width: int) -> None:
        """Change the terminal's width; it has ten lines."""
        fcntl.ioctl(self.leader, termios.TIOCSWINSZ, struct.pack("HHHH", 10, width, 0, 0))

    def shows(self, *parts: str) -> bool:
        """Whether all of these were drawn since the last call that returned True."""
        with contextlib.suppress(OSError):  # nothing new, or its end
            self.printed += os.read(self.leader, 1 << 16).decode()
        if all(part in self.printed for part in parts):
            self.last, self.printed = self.printed, ""
            return True
        return False

    def end(self) -> int:
        """Wait for its end, and return its status."""
        code = self.process.wait(60)
        eventually(lambda: self.shows("\x1b[?1049l", "\x1b[?25h"), "the screen is given back")
        assert termios.tcgetattr(self.leader) == self.before
        os.close(self.leader)
        return code


@pytest.mark.parametrize("end", ["q", "Ctrl-C", "SIGTERM"])
def test_the_screen(shell: Shell, job: str, end: str) -> None:
    """It is drawn, follows the terminal's size, and is given back at the end."""
    assert job
    screen = Screen(shell, "top", "--prometheus", "none", "--interval", "600")
    eventually(lambda: screen.shows("1 job, 1 running", "LEFT", "endless", "RUNNING", "19:"))
    screen.resize(24)
    eventually(lambda: screen.shows("JOB", "NAME", "endless"))
    assert "LEFT" not in screen.last
    if end == "SIGTERM":
        screen.process.send_signal(signal.SIGTERM)
    elif end == "q":
        os.write(screen.leader, b"q")
    else:
        os.killpg(screen.process.pid, signal.SIGINT)
    assert screen.end() == 0


@pytest.mark.parametrize(
    ("width", "left_out", "words"),
    [
        pytest.param(100, "", "input-bound: 65% waiting for data", id="all"),
        pytest.param(96, "", "input-bound: 65%", id="shorter words"),
        pytest.param(80, "", "input-bound: 65%", id="80 columns"),
        pytest.param(67, "GPU GiB", "input-bound", id="one less"),
        pytest.param(40, "GPU GiB SAMPLES/S LEFT BUSY", "input-bound", id="least"),
    ],
)
def test_columns(width: int, left_out: str, words: str) -> None:
    """Words get shorter, then the least important columns are left out, only as far as needed."""
    figures = {"gpus": 4.0, "gpus_busy": 1.0, "gpus_allocated": 4.0, "gpus_used": 4.0}
    figures |= {"samples_per_second": 1110.0, "gpu_memory_used_bytes": 2.0**40}
    job = LiveJob("4711", "images", "ada", "RUNNING", "", left_seconds=14212)
    job.add({**figures, "data_wait_ratio": 0.65}, "prometheus", 1.0)
    header, row = drawn(job, width)
    names = ("JOB", "NAME", "STATE", "LEFT", "GPUS", "BUSY", "GPU GiB", "SAMPLES/S", "BOTTLENECK")
    assert [name for name in names if name not in header] == [n for n in names if n in left_out]
    assert row.rstrip().endswith(words)


def drawn(job: LiveJob, width: int) -> list[str]:
    """The header and the row of a job."""
    with (console := Console(width=width)).capture() as screen:
        console.print(draw([job], width=width))
    return screen.get().splitlines()[-2:]


def test_80_columns_of_a_large_cluster() -> None:
    """Long ids and names shrink the name: what a job has and does is more important."""
    job = LiveJob("12345678", "llama-3-70b-finetune-v12", "ada", "RUNNING", "", left_seconds=14212)
    figures = {"gpus": 64.0, "gpus_busy": 1.0, "gpus_allocated": 64.0, "gpus_used": 64.0}
    job.add(figures | {"samples_per_second": 123456.0, "data_wait_ratio": 0.65}, "prometheus", 1.0)
    header, row = drawn(job, 80)
    for name in ("LEFT", "GPUS", "BUSY", "SAMPLES/S"):
        assert name in header
    assert "123,456" in row
    assert row.rstrip().endswith("input-bound")


def test_without_a_terminal(hpml: Hpml, job: str) -> None:
    """One line per job, or JSON; of named runs also those that have ended."""
    header, line = (text.split("\t") for text in hpml("top").out.splitlines())
    row = dict(zip(header, line, strict=True))
    assert (row["NAME"], row["STATE"], row["BUSY"]) == ("endless", "RUNNING", "-")
    (shown,) = hpml("top", job, "--json").json()["jobs"]
    assert shown["run"] == job
    assert 600 < shown["left_seconds"] < 1200
    assert shown["dashboard"] is None


def test_refusals_and_problems(hpml: Hpml, shell: Shell, job: str) -> None:
    """What is missing is named in one line; jobs are shown if they can be."""
    assert hpml("top", "--all-users").refuses(2, "--all-users", "needs a Prometheus")
    assert hpml("top", "--prometheus-auth", "nowhere").code == 0  # read for a Prometheus only
    assert hpml("top", "--prometheus", "http://p", "--prometheus-auth", "nowhere").refuses(
        2, "--prometheus-auth", "nowhere"
    )
    assert hpml("top", "--prometheus", "prom:9090").refuses(2, "--prometheus", "http or https")
    down = hpml("top", "--prometheus", "http://u:word@127.0.0.1:1")
    assert (down.code, "endless" in down.out) == (0, True)
    assert down.err == (
        "hpml: warning: http://127.0.0.1:1: no answer: Connection refused; "
        "figures are from records\n"
    )
    site = shell.root / "site.toml"
    site.write_text('[monitoring]\nprometheus = "http://127.0.0.1:1"\n')
    assert hpml("--site", str(site), "top").err == down.err
    site.write_text('[monitoring]\nprometheus = "http://ada:word@127.0.0.1:1"\n')
    assert hpml("--site", str(site), "top").refuses(2, "monitoring.prometheus", "without user")
    assert job


def test_the_dashboard_of_a_run(shell: Shell, hpml: Hpml) -> None:
    """`run`, `show`, `status` and JSON have the same address, `status` without a terminal too."""
    site = shell.root / "dashboards.toml"
    site.write_text('[monitoring]\ndashboards = "https://g.example.org"\n')
    ended: Any = hpml("--site", str(site), "run", "--local", shell.job("short"))
    (line,) = [line for line in ended.out.splitlines() if line.startswith("dashboard")]
    address = line.split()[1]
    assert address.startswith("https://g.example.org/d/hpml-job?var-jobid=local-")
    for words in (("show", "short"), ("status", "short"), ("show", "short", "--json")):
        assert address in hpml(*words).out
    assert hpml("status", "short", "--json").json()[0]["dashboard"] == address
    assert "DASHBOARD" not in hpml("--site", "none", "status", "short").out
