"""A job on this machine is monitored from inside: found, scraped and summed up."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.patience import eventually
from tests.unit.exporters.web.support import held_port
from tests.unit.local_runs import Desk, kill_agent_for_good

ROOT = Path(__file__).parents[2]
MEBIBYTE = 1 << 20
HELD, WRITTEN, SAMPLES = 200, 24, 64

# What the rank does, to the byte: holds memory, writes a file, counts samples, keeps a core busy.
RANK = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT / "training_jobs")!r})
from hpml_channel import Channel
channel = Channel.from_env()
channel.event("rendezvous")
held = b"x" * ({HELD} << 20)
directory = os.environ["HPML_RUN_DIR"]
with open(os.path.join(directory, "big"), "wb") as stream:
    for _ in range({WRITTEN}):
        stream.write(b"y" * (1 << 20))
    os.fsync(stream.fileno())
began, steps = time.process_time(), 0
while not os.path.exists(os.path.join(directory, "go")):
    until = time.monotonic() + 0.25
    while time.monotonic() < until:
        pass
    steps += 1
    channel.count(samples={SAMPLES}, steps=1, data_wait_seconds=0.125, step_seconds=0.25)
with open(os.path.join(directory, "truth"), "w") as stream:
    stream.write("%d %f" % (steps, time.process_time()))
time.sleep(1.1)
channel.count(samples=0, steps=0)
channel.close()
"""


class Watched(Desk):
    """Somebody who runs monitored jobs on this machine."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        (root / "rank.py").write_text(RANK)
        self.jobs: list[Any] = []  # the last one if none is named

    def submit(self, **monitor: Any) -> None:
        """Submit a job."""
        command = [sys.executable, str(self.root / "rank.py")]
        file = self.job(name="watched", command=command, monitor=monitor or True)
        self.jobs.append(self.json("submit", "--local", file))

    @property
    def last(self) -> Any:
        """The last job."""
        return self.jobs[-1]

    @property
    def run(self) -> Path:
        """The run's directory."""
        return Path(self.last["directory"])

    def targets(self) -> list[dict[str, Any]]:
        """All that Prometheus would find."""
        targets: list[dict[str, Any]] = []
        for file in (self.root / "records" / "targets").glob("*.json"):
            with contextlib.suppress(FileNotFoundError):  # withdrawn since it was listed
                targets += json.loads(file.read_text())
        return targets

    def scrape(self) -> dict[tuple[str, str], float]:
        """Metric and kind, or mode, of this job as it answers now; empty if it does not."""
        try:
            (group,) = self.targets()
            with urllib.request.urlopen(
                f"http://{group['targets'][0]}/metrics", timeout=120
            ) as answer:
                text = answer.read().decode()
        except (OSError, ValueError):
            return {}
        return {
            (
                sample.name,
                sample.labels.get("kind") or sample.labels.get("mode") or "",
            ): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if re.fullmatch(f"local-.{{6}}-{self.last['job_id']}", sample.labels.get("jobid", ""))
        }

    def exporter(self) -> int:
        """The process id of this job's exporter; 0 if none runs."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if any(str(self.run).encode() in word and b"summary_file" in word for word in words):
                return int(path.parent.name)
        return 0

    def summary(self) -> dict[str, float]:
        """What the exporter has written of the job so far."""
        found = list((self.run / "attempts/0/nodes").glob("*.monitor.json"))
        told: dict[str, float] = json.loads(found[0].read_text())["job"] if found else {}
        return told

    def show(self) -> Any:
        """The output of `hpml show --json`."""
        return self.json("show", self.last["id"])

    def end(self) -> None:
        """Let the last job end well."""
        (self.run / "go").touch()
        self.hpml("wait", self.last["id"])


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Watched]:
    """A desk whose jobs are over at the end."""
    made = Watched(tmp_path)
    yield made
    for job in made.jobs:
        made.hpml("cancel", job["id"])
    eventually(lambda: not made.exporter())


def test_a_job_is_scraped_and_summed_up(desk: Watched) -> None:
    """Its figures are what the rank did, though its exporter is killed meanwhile."""
    desk.submit()
    eventually(lambda: desk.scrape().get(("hpml_train_samples_total", "")))
    (group,) = desk.targets()
    assert group["labels"]["run"] == desk.last["id"]
    held = HELD * MEBIBYTE
    eventually(lambda: desk.scrape().get(("hpml_job_memory_bytes", "rss"), 0) > held)
    first = eventually(desk.scrape)
    assert first["hpml_job_memory_bytes", "rss"] < held + 300 * MEBIBYTE
    assert first["hpml_train_samples_total", ""] % SAMPLES == 0
    eventually(lambda: desk.summary().get("memory_peak_bytes", 0) > held)
    killed = desk.exporter()
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: desk.exporter() not in (0, killed))
    samples = ("hpml_train_samples_total", "")
    eventually(lambda: desk.scrape().get(samples, 0) >= first[samples])
    desk.end()
    assert desk.targets() == []
    assert desk.exporter() == 0
    steps, cpu = map(float, (desk.run / "truth").read_text().split())
    told = desk.show()["summary"]["monitor"]
    assert told["training"]["samples"] == steps * SAMPLES
    assert told["training"]["data_wait_seconds"] == pytest.approx(steps * 0.125)
    assert held < told["figures"]["memory_peak_bytes"] < held + 300 * MEBIBYTE
    assert told["figures"]["io_syscall_write_bytes"] >= WRITTEN * MEBIBYTE
    # The exporter, the agent and the scripts have a part in it, too.
    assert cpu * 0.9 < told["figures"]["cpu_seconds"] < cpu + 15
    shown = desk.hpml("show", desk.last["id"])
    (line,) = [one for one in shown.splitlines() if one.startswith("monitor")]
    assert "CPUs busy, 2" in line
    assert "MiB of memory at most" in line
    output = (desk.run / "output.log").read_text()
    assert output.count("the job's monitor ended (by SIGKILL); started again in 1 s") == 1


def test_a_cancelled_job_leaves_no_exporter_and_no_target(desk: Watched) -> None:
    """Both go with the agent; the summary stays."""
    desk.submit()
    eventually(lambda: desk.targets() and desk.summary())
    desk.hpml("cancel", desk.last["id"])
    assert desk.json("wait", desk.last["id"], code=6)["state"] == "CANCELLED"
    assert desk.targets() == []
    assert desk.exporter() == 0
    assert desk.show()["summary"]["monitor"]["nodes"] == 1


def test_an_exporter_that_hangs_does_not_hold_the_job(desk: Watched) -> None:
    """It is stopped as a whole: the job completes, and the process is gone."""
    desk.submit()
    eventually(desk.targets)
    os.kill(eventually(desk.exporter), signal.SIGSTOP)
    desk.end()
    assert desk.exporter() == 0
    assert desk.targets() == []
    assert desk.show()["state"] == "COMPLETED"


def test_two_jobs_of_one_port_are_both_monitored(desk: Watched) -> None:
    """The second takes another port and reports it; both are found, and both have a summary."""
    outputs, ports = [], {}
    with held_port() as port:
        for _ in range(2):
            desk.submit(listen=f"127.0.0.1:{port}")
            eventually(lambda: len(desk.targets()) == len(desk.jobs))
        for target in desk.targets():
            ports[target["labels"]["run"]] = int(target["targets"][0].rpartition(":")[2])
        for job in desk.jobs:
            (Path(job["directory"]) / "go").touch()
            desk.hpml("wait", job["id"])
            outputs.append((Path(job["directory"]) / "output.log").read_text())
    first, second = (ports[job["id"]] for job in desk.jobs)
    assert first == port != second
    assert "the job's monitor" not in outputs[0]
    assert f"monitor listens at 127.0.0.1:{second}: port {port} is in use" in outputs[1]
    for job in desk.jobs:
        training = desk.json("show", job["id"])["summary"]["monitor"]["training"]
        assert training["samples"] >= SAMPLES


def test_what_the_exporter_refuses_is_a_line_in_the_output(desk: Watched) -> None:
    """A wrong web config: reported at submission and by the job, which completes."""
    desk.submit(web_config="none.yml")
    output = desk.run / "output.log"
    words = "the job's monitor ended (status 2: "
    eventually(lambda: output.exists() and words in output.read_text())
    desk.end()
    assert str(desk.root / "none.yml") in output.read_text()


def test_a_dead_agents_target_goes_when_its_end_is_known(desk: Watched) -> None:
    """The agent was killed outright: its exporter ends by itself, its file with the next look."""
    desk.submit()
    eventually(desk.targets)
    (marker,) = eventually(lambda: list((desk.run / "attempts/0/nodes").glob("*.ready.json")))
    kill_agent_for_good(json.loads(marker.read_text())["pid"])
    eventually(lambda: not desk.exporter())
    desk.hpml("cancel", desk.last["id"])
    desk.hpml("wait", desk.last["id"], code=6)
    assert desk.targets() == []
