"""Every query of the dashboards and rules, on a real Prometheus of a real cluster with jobs."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pwd
import re
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hpml_dashboards import JSON
from ruamel.yaml import YAML

from deploy.demo.monitoring import submit_jobs
from deploy.demo.stack import ROOT, Stack, missing
from tests.cluster.user import HPML, PYTHON, UID, hand_over, install
from tests.dashboardcheck import queries
from tests.patience import eventually

pytestmark = pytest.mark.alone  # load that is known needs CPUs that nobody else takes
NODES = 2
NOT_HERE = {
    r"infiniband|node_network": "no RDMA device",
    r"hpml_nfs|node_nfs": "no NFS mount",
    r"hpml_lustre": "no Lustre mount",
    r"hpml_disk|hpml_filesystem": "a container may have no disk",
    r"xid|(?<!and on \(uuid\) )hpml_gpu_up\S* == 0|lost": "no GPU has failed",
    r"^ALERTS\b": "no alert fires within the first minutes",
    r"hpml_exporter_up == 0|^up == 0|code!=|dropped_total|_failures_total|errors_total|stuck": (
        "nothing has failed"
    ),
    r"exporter_down": "all exporters are up",
    r'state="(powered_)?down"': "no node is down",
    r"_limit_bytes|pressure|oom_events|memory_peak|job_memory_used:ratio|hpml_job_cpus\b": (
        "jobs of this cluster are in no control group"
    ),
    r'kind="(cache|shmem)"': "the same",
    r"reservation|licenses|node_reason": "Slurm has none",
    r"min\(max by": "all runs of the sweep have as many ranks",
    r"jobs_ended|job_run_seconds|job_wait": "needs jobs that end",
    r"train_accuracy|train_mfu|comm_seconds|train_feed_refused": "the training reports none",
    r"mig|parent": "no GPU is split",
    r"job_gpus_unused": "a GPU is unused after ten minutes",
    r":increase1h": "stored once per hour",
    r"train_(transfer|save|evaluation|wait)_seconds_total": "the training reports none",
    r"node_(temperature|memory_errors)|network_link": "a virtual machine has no such hardware",
}
"""What a query may name to be allowed to return nothing here, and why."""


@dataclass
class Live:
    """The cluster, and what the dashboards' variables are here."""

    stack: Stack
    ids: dict[str, str]

    def ask(self, query: str) -> list[dict[str, Any]]:
        address = urllib.parse.urlsplit(self.stack.prometheus)
        connection = http.client.HTTPConnection(address.netloc, timeout=30)
        connection.request("GET", f"/api/v1/query?query={urllib.parse.quote(query)}")
        answer = json.load(connection.getresponse())
        connection.close()
        assert answer["status"] == "success", (query, answer)
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def value(self, query: str) -> float:
        series = self.ask(query)
        return float(series[0]["value"][1]) if series else float("nan")

    def filled(self, query: str) -> str:
        """A query as a dashboard would send it; empty while a variable has no value yet."""
        values = {
            "cluster": "devcluster",
            "node": "node1",
            "jobid": self.ids["waits-for-data" if "holdback" in query else "train-well"],
            "user": pwd.getpwuid(UID).pw_name,
        }
        for name, series in (
            ("sweep", "hpml:run_info{sweep!=''}"),
            ("instance", "hpml_node_info{node='node1'}"),
        ):
            if f"${name}" in query:
                found = self.ask(series)
                if not found:
                    return ""
                values[name] = found[0]["metric"][name]
        return re.sub(r"\$\{?(\w+)(?::\w+)?\}?", lambda name: values[name[1]], query)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    if lacks := missing():
        pytest.skip(f"NO LIVE DASHBOARDS: {lacks}")
    directory = install() / "live"
    directory.mkdir()
    hand_over(directory)
    with Stack(directory, NODES, HPML, PYTHON, install()) as stack:
        hand_over(directory)
        yield Live(stack, submit_jobs(stack, NODES))


def excused(expression: str) -> bool:
    return any(re.search(pattern, expression) for pattern in NOT_HERE)


def test_every_query_returns_data(live: Live) -> None:
    """Those of panels and variables, and every recording rule; what is excused has a reason."""
    rules = YAML(typ="safe").load(ROOT / "deploy/prometheus/rules/hpml.yml")["groups"]
    wanted = {
        query.expression: f"{query.dashboard}: {query.panel}"
        for path in JSON.glob("*.json")
        for query in queries(path.stem, json.loads(path.read_text("utf-8")))
    }
    wanted |= {rule["record"]: rule["record"] for group in rules for rule in group["rules"]}
    empty = dict(wanted)

    def unexplained() -> list[str]:
        for expression in list(empty):
            if (text := live.filled(expression)) and live.ask(text):
                del empty[expression]
        return sorted(f"{where}: {text}" for text, where in empty.items() if not excused(text))

    with contextlib.suppress(AssertionError):  # the assertion below shows the queries
        eventually(lambda: not unexplained(), seconds=150, pause=0.2)
    assert unexplained() == []


def test_known_load_shows(live: Live) -> None:
    """GPUs of the job that computes are busy, those of the forgotten one are not."""
    busy = "avg by (jobid) (hpml:gpu_busy:rate2m{jobid='%s'})"
    well, forgotten = live.ids["train-well"], live.ids["forgotten"]
    eventually(lambda: live.value(busy % well) > 0.3, seconds=90)
    eventually(lambda: live.value("sum(hpml_slurm_jobs{state='pending'})") == 2, seconds=90)
    assert not live.value(busy % forgotten) > 0.05
    wait = "hpml:job_data_wait:ratio{jobid='%s'}"
    assert live.value(wait % live.ids["waits-for-data"]) > 0.5 > live.value(wait % well)
    longest = "max by (rank) (hpml_train_longest_data_wait_info{jobid='%s'})"
    slow = live.ask(longest % live.ids["one-slow-rank"])
    assert "0" in {series["metric"]["rank"] for series in slow}


def test_the_demo_prints_one_address(tmp_path: Path) -> None:
    """Without Slurm, as users without root get it; Ctrl-C ends all of it."""
    if lacks := missing():
        pytest.skip(f"NO LIVE DASHBOARDS: {lacks}")
    demo = subprocess.Popen(
        [sys.executable, "-m", "deploy.demo.monitoring", "--local"],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    lines = demo.stdout
    assert lines is not None
    try:
        address = next(line for line in lines if line.startswith("http://")).strip()
        keeps_cookies = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        keeps_cookies.open(address, timeout=60).close()  # turns the token into a cookie
        with keeps_cookies.open(address.partition("?")[0], timeout=60) as page:
            assert "<script" in page.read().decode()
        assert list(tmp_path.iterdir())
    finally:
        os.killpg(demo.pid, signal.SIGINT)
        assert demo.wait(120) == 0
        lines.close()
    assert list(tmp_path.iterdir()) == []
