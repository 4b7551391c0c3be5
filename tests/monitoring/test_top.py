"""`hpml top` shows the jobs in a real Prometheus with hpml's recording rules."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hpml_exporters.app import ALL

from hpml_orchestrator.records.store import Store
from hpml_orchestrator.runs.live import LiveJobs
from hpml_orchestrator.runs.prometheus import Prometheus
from tests.monitoring.prometheus_support import booted_prometheus, of_jobs
from tests.patience import eventually
from tests.unit.local_runs import Desk

if TYPE_CHECKING:
    from tests.monitoring.prometheus_support import BootPrometheus, Promtool

ROOT = Path(__file__).parents[2]
RULES: dict[str, Any] = {
    "rule_files": [str(ROOT / "deploy/prometheus/rules/hpml.yml")],
    "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
}
GIB = 1 << 30
# rules may write samples that are older than those made before
LATE: dict[str, Any] = {"storage": {"tsdb": {"out_of_order_time_window": "1h"}}}
PAST, FUTURE, STEP = 900, 600, 15  # seconds of data before and after now, and between samples
KNOWN = {spec.name for spec in ALL} | {"hpml_train_step_duration_seconds_sum"}

RANK = """
import sys, time
sys.path.insert(0, sys.argv[1])
from hpml_channel import Channel
channel = Channel.from_env()
while True:
    time.sleep(0.1)
    channel.count(samples=10, steps=1, data_wait_seconds=0.08, step_seconds=0.1)
"""


def node(
    name: str, jobid: str, gpus: Mapping[str, float], scope: str = "node", memory: int = 50
) -> dict[str, tuple[float, float]]:
    """What an exporter shows of one job on a node: value now and growth per second, by series.

    Args:
        name: of the node.
        jobid: of the job.
        gpus: how busy each of the job's GPUs is, by UUID; one that is not has no process.
        scope: `node`, or `job` for the exporter of the job alone.
        memory: of the job, in GiB; its limit is 100.
    """
    own = f'instance="{name}:{scope}",job="hpml",cluster="main"'
    job = f'{own},jobid="{jobid}"'
    user = {"18": "bob"}.get(jobid, "ada")
    waits = (("shortest", 0.1), ("longest", 0.4))
    steps = (("fastest", 0.9), ("slowest", 1.0))
    series: dict[str, tuple[float, float]] = {
        f'hpml_node_info{{{own},node="{name}",scope="{scope}"}}': (1, 0),
        f'hpml_job_info{{{job},user="{user}",name="train"}}': (1, 0),
        f'hpml_run_info{{{job},run="run-{jobid}"}}': (1, 0),
        f"hpml_job_start_timestamp_seconds{{{job}}}": (time.time() - PAST, 0),
        f"hpml_job_end_timestamp_seconds{{{job}}}": (time.time() + 3600, 0),
        f'hpml_job_cpu_seconds_total{{{job},mode="user"}}': (3e3, 3),
        f'hpml_job_cpu_seconds_total{{{job},mode="system"}}': (1e3, 1),
        f"hpml_job_cpus{{{job}}}": (8, 0),
        f'hpml_job_memory_bytes{{{job},kind="rss"}}': (memory * GIB, 0),
        f'hpml_job_memory_bytes{{{job},kind="cache"}}': (30 * GIB, 0),
        f"hpml_job_memory_limit_bytes{{{job}}}": (100 * GIB, 0),
        f"hpml_job_io_read_bytes_total{{{job}}}": (1e9, 1e6),
        f"hpml_job_io_write_bytes_total{{{job}}}": (2e9, 2e6),
        f"hpml_train_samples_total{{{job}}}": (1e5, 100),
        f"hpml_train_data_wait_seconds_total{{{job}}}": (1e3, 1.4),
        f"hpml_train_step_duration_seconds_sum{{{job}}}": (2e3, 2),
        f"hpml_job_gpus_allocated{{{job}}}": (len(gpus), 0),
        f"hpml_job_gpus_used{{{job}}}": (sum(map(bool, gpus.values())), 0),
    }
    series[f'hpml_train_longest_data_wait_info{{{job},rank="3"}}'] = (1, 0)
    for which, seconds in waits:
        series[f'hpml_train_rank_data_wait_seconds{{{job},which="{which}"}}'] = (seconds, 0)
    for which, seconds in steps:
        series[f'hpml_train_rank_step_duration_seconds{{{job},which="{which}"}}'] = (seconds, 0)
    for uuid, busy in gpus.items():
        gpu = f'{own},uuid="{uuid}"'
        info = f'{job},uuid="{uuid}",allocated="1",owner="1"'
        series[f"hpml_job_gpu_info{{{info}}}"] = (1, 0)
        series[f'hpml_gpu_info{{{gpu},index="{uuid[1:]}",name="H100"}}'] = (1, 0)
        series[f"hpml_gpu_busy_seconds_total{{{gpu}}}"] = (1e3, busy)
        series[f"hpml_gpu_utilization_ratio{{{gpu}}}"] = (busy, 0)
        series[f"hpml_gpu_memory_used_bytes{{{gpu}}}"] = (40 * GIB, 0)
        series[f"hpml_gpu_memory_total_bytes{{{gpu}}}"] = (80 * GIB, 0)
        for reason, share in (("hw_thermal", 0.1), ("power", 0.5)):
            name = f'hpml_gpu_throttled_seconds_total{{{gpu},reason="{reason}"}}'
            series[name] = (1e3, share)
    return series


@pytest.fixture
def server(tmp_path: Path, promtool: Promtool) -> Iterator[Prometheus]:
    """A Prometheus of three jobs: 17 is on two nodes, one of which is scraped twice."""
    n1 = {"G1": 0.9, "G2": 0.9}
    series = node("n1", "17", n1) | node("n1", "17", n1, "job") | node("n3", "18", {"G4": 1.0})
    series |= node("n2", "17", {"G3": 0.0}, memory=95) | node("n4", "19", {})
    now, lines = time.time(), list[str]()
    for name, (value, growth) in sorted(series.items()):
        assert name.partition("{")[0] in KNOWN
        lines += [
            f"{name} {value + growth * offset} {now + offset:.3f}"
            for offset in range(-PAST, FUTURE, STEP)
        ]
    raw, folder = tmp_path / "raw.om", tmp_path / "prometheus"
    raw.write_text("\n".join([*lines, "# EOF\n"]))
    done = promtool("tsdb", "create-blocks-from", "openmetrics", raw, folder / "data")
    assert done.returncode == 0, done.stderr
    with booted_prometheus(folder, [], **RULES, **LATE) as booted:
        yield Prometheus(booted.url)


def test_a_proxy_is_for_other_machines(server: Prometheus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Login nodes name one in the environment; a Prometheus on this machine is asked directly."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    eventually(lambda: Prometheus(server.url).jobs("ada"))


def test_figures_and_bottlenecks_of_jobs(server: Prometheus, tmp_path: Path) -> None:
    """Nothing counts twice if a node is scraped twice, and other users' jobs are left out."""
    jobs = LiveJobs(Store(tmp_path), prometheus=server, user="ada")

    def complete() -> dict[str, Any]:
        found = {job.job_id: job for job in jobs.look()}
        return found if found.keys() == {"17", "19"} and len(found["17"].figures) > 19 else {}

    found = eventually(complete, pause=0.2)
    assert jobs.problem == ""
    assert found["17"].figures == pytest.approx(
        {
            "gpus": 3,
            "gpus_allocated": 3,
            "gpus_used": 2,
            "gpus_unused": 1,
            "gpus_busy": 1.8,
            "gpu_busy_ratio": 0.6,
            "gpu_memory_used_bytes": 120 * GIB,
            "gpu_memory_total_bytes": 240 * GIB,
            "gpu_throttled_ratio": 0.1,
            "cpus": 16,
            "cpus_busy": 8,
            "cpu_busy_ratio": 0.5,
            "memory_bytes": 95 * GIB,
            "memory_ratio": 0.95,
            "read_bytes_per_second": 2e6,
            "write_bytes_per_second": 4e6,
            "samples_per_second": 200,
            "data_wait_ratio": 0.7,
            "wait_spread_ratio": 0.3,
            "longest_waiting_rank": 3,
            "step_spread_ratio": 0.1,
        },
        rel=0.02,
    )
    assert 3500 < found["17"].left_seconds < 3600
    assert found["17"].bottlenecks == [
        "GPU unused: 1 without a process",
        "memory: 95% of the limit",
        "throttled: 10% of the time",
        "input-bound: 70% waiting for data",
        "slow rank 3: waits 30% of a step longer",
    ]
    assert (found["17"].run, found["17"].name, found["17"].user) == ("run-17", "train", "ada")
    everybody = LiveJobs(Store(tmp_path), prometheus=server)
    assert sorted(job.job_id for job in everybody.look()) == ["17", "18", "19"]


def test_a_job_over_its_time(server: Prometheus) -> None:
    """Reports get the figures of each node and GPU of one job, and no other job's."""

    def figures() -> dict[tuple[str, ...], float]:
        samples = server.job_over("", "17", seconds=600, ended=time.time())
        names = ("node", "uuid", "reason", "figure")
        found = {tuple(labels.get(one, "") for one in names): value for labels, value in samples}
        return found if {*OVER_TIME} <= {*found} else {}

    found = eventually(figures, pause=0.2)
    assert {node for node, *_ in found} == {"n1", "n2"}
    assert {uuid for _, uuid, *_ in found} == {"", "G1", "G2", "G3"}
    assert {key: found[key] for key in OVER_TIME} == pytest.approx(OVER_TIME, rel=0.05)


OVER_TIME = {
    ("n1", "", "", "mean_cpus"): 4.0,
    ("n1", "", "", "cpus"): 8.0,
    ("n1", "", "", "gpus_used"): 2.0,
    ("n2", "", "", "memory_peak_bytes"): 95 * GIB,
    ("n1", "G1", "", "utilization_ratio"): 0.9,
    ("n2", "G3", "", "memory_total_bytes"): 80 * GIB,
    ("n2", "G3", "hw_thermal", "throttled_seconds"): 60.0,
}


def test_a_real_job_until_prometheus_is_gone(prometheus: BootPrometheus, tmp_path: Path) -> None:
    """A monitored run has Prometheus' figures; when that is gone, those of its records."""
    desk = Desk(tmp_path)
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, str(tmp_path / "rank.py"), str(ROOT / "training_jobs")]
    made = desk.json("submit", "--local", desk.job(name="train", command=command, monitor=True))
    try:
        server = prometheus([of_jobs(tmp_path / "records/targets/*.json")], **RULES)

        def shown(source: str, url: str) -> dict[str, Any]:
            (job,) = desk.json("top", "--prometheus", url)["jobs"]
            return job if job["source"] == source and job["bottlenecks"] else {}

        job = eventually(lambda: shown("prometheus", server.url), pause=0.5)
        assert (job["run"], job["state"], job["name"]) == (made["id"], "RUNNING", "train")
        assert 3500 < job["left_seconds"] < 3600
        assert job["bottlenecks"] == ["input-bound: 80% waiting for data"]
        job = eventually(lambda: shown("records", "http://127.0.0.1:1"), pause=0.5)
        assert job["figures"]["samples_per_second"] == pytest.approx(100, rel=0.3)
        assert job["bottlenecks"] == ["input-bound: 80% waiting for data"]
    finally:
        desk.hpml("cancel", made["id"])
