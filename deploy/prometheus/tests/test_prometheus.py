"""The Prometheus of these tests is a real one, and promtool finds what is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.monitoring import prometheus_support
from tests.monitoring.prometheus_support import files, of_jobs, program, static
from tests.unit.exporters.web.support import held_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.monitoring.prometheus_support import BootPrometheus, Promtool

INSTALL = Path(__file__).parents[2] / "prometheus" / "install.sh"


@pytest.fixture
def node_exporter(tmp_path: Path) -> Iterator[str]:
    """Debian's node exporter on a free port, with nothing but a file of metrics."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.prom").write_text("# TYPE told gauge\ntold 41.5\n", encoding="utf-8")
    process = subprocess.Popen(
        [
            program("prometheus-node-exporter"),
            "--web.listen-address=127.0.0.1:0",
            "--collector.disable-defaults",
            "--collector.textfile",
            f"--collector.textfile.directory={tmp_path / 'texts'}",
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    with process, process.stderr:
        address = next(
            line.rpartition("address=")[2].strip()
            for line in process.stderr
            if "Listening on" in line
        )
        yield address
        process.terminate()


def test_prometheus_reads_what_an_exporter_tells(
    prometheus: BootPrometheus, node_exporter: str
) -> None:
    """A query returns a value of Debian's node exporter, now and over time."""
    began = time.time()
    server = prometheus([static("node", node_exporter)])
    found = server.wait_for("told")
    assert [one.value for one in found] == [41.5]
    assert found[0].labels == {"__name__": "told", "instance": node_exporter, "job": "node"}
    assert server.value("told * 2") == 83.0
    (line,) = server.query_range("told", began, time.time() + 1)
    assert {value for _, value in line.points} == {41.5}
    server.wait_for("up == 1")
    assert not server.was_refused("node", "5m")


def test_a_scrape_that_is_refused_is_told_from_a_late_one(
    prometheus: BootPrometheus, node_exporter: str
) -> None:
    """Nobody listens at the one address, and the other answers."""
    with held_port() as port:
        server = prometheus([static("node", node_exporter), static("gone", f"127.0.0.1:{port}")])
        server.wait_for('up{job="node"} == 1')
        server.wait_for('up{job="gone"} == 0')
        server.wait_for("vector(1)", lambda _: server.was_refused("gone", "1m"))
        assert not server.was_refused("node", "1m")


def tell(folder: Path, text: str) -> None:
    """Change the node exporter's metrics at once: a scrape sees the old text or the new one."""
    new = folder / "one.new"
    new.write_text(text, encoding="utf-8")
    new.replace(folder / "texts" / "one.prom")


def test_a_counter_that_falls_is_found(
    prometheus: BootPrometheus, node_exporter: str, tmp_path: Path
) -> None:
    """Counters that only rise are not reported."""
    text = (
        "# TYPE falls_total counter\nfalls_total {}\n# TYPE rises_total counter\nrises_total {}\n"
    )
    tell(tmp_path, text.format(9, 1))
    server = prometheus([static("node", node_exporter)])
    server.wait_for("falls_total == 9")
    tell(tmp_path, text.format(2, 5))
    server.wait_for("rises_total == 5")
    fell = server.counters_that_fell("5m", "node")
    assert [one.labels["__name__"] for one in fell] == ["falls_total"]


def test_targets_come_and_go_with_their_file(
    prometheus: BootPrometheus, node_exporter: str, tmp_path: Path
) -> None:
    """A target file that appears later is scraped with its labels, and no more when it goes."""
    server = prometheus([files("jobs", tmp_path / "targets" / "*.json")])
    assert server.query("up") == []
    (tmp_path / "targets").mkdir()
    new = tmp_path / "targets" / "new"
    new.write_text(json.dumps([{"targets": [node_exporter], "labels": {"jobid": "7"}}]))
    new.rename(tmp_path / "targets" / "7.json")
    assert server.wait_for('up{job="jobs"} == 1')[0].labels["jobid"] == "7"
    (tmp_path / "targets" / "7.json").unlink()
    server.wait_for("up", lambda found: not found)


def test_a_job_cannot_pass_for_another_target(
    prometheus: BootPrometheus, node_exporter: str, tmp_path: Path
) -> None:
    """Neither its metrics nor its target file decide on `job` and `instance`."""
    forged = 'job="hpml-node",instance="n1:9445"'
    tell(tmp_path, f'# TYPE lost gauge\nlost{{{forged},jobid="8"}} 1\n')
    labels = {"job": "hpml-node", "instance": "n1:9445", "jobid": "7", "user": "ada"}
    target = [{"targets": [node_exporter], "labels": labels}]
    (tmp_path / "7.json").write_text(json.dumps(target), "utf-8")
    server = prometheus([of_jobs(tmp_path / "*.json")])
    (found,) = server.wait_for("lost")
    assert found.labels == {
        "__name__": "lost",
        "job": "hpml-job",
        "instance": node_exporter,
        "jobid": "8",  # of a metric that has it
        "user": "ada",
    }
    (up,) = server.query("up")
    assert (up.labels["job"], up.labels["instance"]) == ("hpml-job", node_exporter)


def test_a_prometheus_ends_with_its_test(tmp_path: Path) -> None:
    """Nothing of it runs on, even when it is stopped hard in between."""
    with prometheus_support.booted_prometheus(tmp_path / "one", []) as server:
        assert Path(f"/proc/{server.pid}").exists()
    assert not Path(f"/proc/{server.pid}").exists()
    with prometheus_support.booted_prometheus(tmp_path / "two", []) as server:
        os.kill(server.pid, signal.SIGKILL)
    assert not Path(f"/proc/{server.pid}").exists()


def test_promtool_finds_a_name_that_breaks_the_rules(promtool: Promtool) -> None:
    """A counter without `_total` is reported; a good one passes without output."""
    bad = promtool("check", "metrics", text=b"# HELP hpml_a A.\n# TYPE hpml_a counter\nhpml_a 1\n")
    assert bad.returncode != 0
    assert "_total" in bad.stderr
    good = promtool(
        *("check", "metrics"),
        text=b"# HELP hpml_a_total A.\n# TYPE hpml_a_total counter\nhpml_a_total 1\n",
    )
    assert (good.returncode, good.stdout, good.stderr) == (0, "", "")


def test_the_installing_script_is_clean_and_does_nothing_twice() -> None:
    """Shellcheck finds nothing in it, and where all is installed it asks no package server."""
    shellcheck = Path(sys.executable).parent / "shellcheck"
    if shellcheck.exists():
        subprocess.run([shellcheck, INSTALL], check=True)
    for name in ("prometheus", "prometheus-node-exporter"):
        program(name)
    again = subprocess.run([INSTALL], capture_output=True, text=True, check=True)
    assert (again.stdout, again.stderr) == ("", "")
