"""The recording rules, and the queries of docs/monitoring.md, give the answers they promise."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.monitoring.prometheus_support import Promtool

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/rules/hpml.yml"
BY_USER, GPUS, THREADS, _HOLDBACK, HELD_UP, WHO, WAITED_FOR = re.findall(
    r"^```text promql\n(.*?)^```$",
    (ROOT / "docs/monitoring.md").read_text("utf-8"),
    re.DOTALL | re.MULTILINE,
)
Labels = dict[str, str]
Series = dict[str, str]  # series as they are written -> values as promtool expands them


def written(name: str, labels: Labels) -> str:
    return name + "{" + ",".join(f'{key}="{value}"' for key, value in labels.items()) + "}"


def exporter(
    cluster: str, node: str, jobs: dict[str, Labels], *, scope: str = "node", **gpus: Labels
) -> Series:
    """What an exporter shows: its jobs by id with their further labels, and GPUs by UUID.

    Each job has 7 threads, writes 100 B/s and trains on 10 samples/s; each GPU takes 100 W, is
    busy for a half of the time and holds 20 B of each of its jobs.
    """
    instance = f"{cluster}-{node}:{scope}" + (f":{'-'.join(jobs)}" if scope == "job" else "")
    own = {"instance": instance, "job": f"hpml-{scope}"}
    series = {
        written("hpml_node_info", {**own, "cluster": cluster, "node": node, "scope": scope}): "1x20"
    }
    for jobid, more in jobs.items():
        labels = {**own, "cluster": cluster, "jobid": jobid}
        series[written("hpml_job_info", {**labels, **more})] = "1x20"
        series[written("hpml_job_threads", labels)] = "7x20"
        series[written("hpml_job_io_write_bytes_total", labels)] = "0+6000x20"
        series[written("hpml_train_samples_total", labels)] = "0+600x20"
        for mode in ("user", "system"):
            series[written("hpml_job_cpu_seconds_total", {**labels, "mode": mode})] = "0+30x20"
        for kind in ("rss", "shmem", "cache"):
            series[written("hpml_job_memory_bytes", {**labels, "kind": kind})] = "5x20"
    for uuid, owners in gpus.items():
        info = {**own, "uuid": uuid, "index": uuid[1:], "name": "H100"}
        series[written("hpml_gpu_info", info)] = "1x20"
        series[written("hpml_gpu_power_watts", {**own, "uuid": uuid})] = "100x20"
        series[written("hpml_gpu_busy_seconds_total", {**own, "uuid": uuid})] = "0+30x20"
        for jobid, owner in owners.items():
            labels = {**own, "cluster": cluster, "jobid": jobid, "uuid": uuid}
            more = {"allocated": "1", "owner": owner}
            series[written("hpml_job_gpu_info", {**labels, **more})] = "1x20"
            series[written("hpml_job_gpu_memory_used_bytes", labels)] = "20x20"
            # The job that owns a GPU has it open; the other one only has it allocated.
            series[written("hpml_job_gpu_processes", labels)] = f"{owner}x20"
    return series


def ask(
    promtool: Promtool, tmp_path: Path, series: Series, query: str, answers: dict[str, float]
) -> None:
    """Have promtool evaluate a query after 15 minutes; answers are by their labels as written."""
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": query,
                "eval_time": "15m",
                "exp_samples": [
                    {"labels": labels, "value": value} for labels, value in answers.items()
                ],
            }
        ],
    }
    path = tmp_path / "test.yml"
    path.write_text(json.dumps({"rule_files": [str(RULES)], "tests": [test]}))  # JSON is YAML
    done = promtool("test", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


LOW, HIGH = {"user": "ada", "partition": "low"}, {"user": "bob", "partition": "high"}
ADA, BOB = {"user": "ada", "name": "train"}, {"user": "bob", "name": "tune"}
SHARED = exporter("main", "n1", {"7": ADA, "8": BOB}, G1={"7": "1", "8": "0"}, G2={"8": "1"})
TWICE = exporter("main", "n1", {"7": ADA}, G1={"7": "1"}) | exporter(
    "main", "n1", {"7": {**ADA, "account": "vision"}}, scope="job", G1={"7": "1"}
)
JOBS_ONLY = exporter("main", "n1", {"7": ADA}, scope="job", G1={"7": "1"}) | exporter(
    "main", "n1", {"8": BOB}, scope="job", G1={"8": "1"}, G2={"8": "1"}
)
TWO_NODES = exporter("main", "n1", {"7": ADA}, G1={"7": "1"}) | exporter(
    "main", "n2", {"7": {**ADA, "account": "vision"}}, G2={"7": "1"}
)
TWO_CLUSTERS = exporter("main", "n1", {"7": ADA}, G1={"7": "1"}) | exporter(
    "test", "n1", {"7": BOB}, G2={"7": "1"}
)
# Each of two jobs' exporters takes the GPU that they share for its own.
RIVALS = exporter("main", "n1", {"7": ADA}, scope="job", G1={"7": "1"}) | exporter(
    "main", "n1", {"8": BOB}, scope="job", G1={"8": "1"}
)
RIVALS_ON_A_NODE = RIVALS | exporter("main", "n1", {"7": ADA, "8": BOB}, G1={"7": "0", "8": "1"})
LOCAL_RUN = {  # job 7 of the local backend, whose GPUs were not allocated
    name.replace('jobid="7"', 'jobid="local-3fa9c1-7"')
    .replace('allocated="1"', 'allocated=""')
    .replace("G1", "G2"): shown
    for name, shown in exporter("main", "n1", {"7": BOB}, G1={"7": "1"}).items()
}
BESIDE = exporter("main", "n1", {"7": ADA}, G1={"7": "1"}) | LOCAL_RUN
SPLIT = exporter("main", "n1", {"7": ADA}, G1={"7": "1"}, G2={}) | {
    'hpml_gpu_info{instance="main-n1:node",job="hpml-node",'
    f'uuid="{uuid}",index="1",name="H100",mig="1g.10gb",parent="G2"}}': "1x20"
    for uuid in ("M1", "M2")
}
ARRAY = exporter("main", "n1", {"7": ADA, "19": {**ADA, "array_job": "17", "array_task": "2"}})
MAIN_7 = '{cluster="main",jobid="7"}'
MAIN_8 = '{cluster="main",jobid="8"}'
TEST_7 = '{cluster="test",jobid="7"}'
ON_N1 = '{cluster="main",node="n1",jobid="7"}'
SCENES: dict[str, tuple[Series, str, dict[str, float]]] = {
    "busy GPUs where jobs share one": (SHARED, BY_USER, {'{user="ada"}': 0.5, '{user="bob"}': 0.5}),
    "power where jobs share a GPU": (
        SHARED,
        GPUS,
        {
            '{uuid="G1",cluster="main",jobid="7",name="train"}': 100,
            '{uuid="G2",cluster="main",jobid="8",name="tune"}': 100,
        },
    ),
    "busy GPUs of a node with two exporters": (TWICE, BY_USER, {'{user="ada"}': 0.5}),
    "threads of a node with two exporters": (TWICE, THREADS, {MAIN_7: 7}),
    "samples of a node with two exporters": (
        TWICE,
        "hpml:train_samples:rate5m",
        {f"hpml:train_samples:rate5m{ON_N1}": 10},
    ),
    "CPUs of a node with two exporters": (TWICE, "sum(hpml:job_cpus_busy:rate5m)", {"{}": 1}),
    "memory of a node with two exporters": (TWICE, "sum(hpml:job_memory_bytes:sum)", {"{}": 10}),
    "writes of a node with two exporters": (
        TWICE,
        "sum(hpml:job_io_write_bytes:rate5m)",
        {"{}": 100},
    ),
    "power of a node with two exporters": (
        TWICE,
        "sum(hpml:job_gpu_power_watts:sum)",
        {"{}": 100},
    ),
    "threads of jobs with their own exporters": (JOBS_ONLY, THREADS, {MAIN_7: 7, MAIN_8: 7}),
    "GPUs of jobs with their own exporters": (
        JOBS_ONLY,
        "sum(hpml:job_gpus:count)",
        {"{}": 2},
    ),
    "power of a GPU with two owners": (RIVALS, "sum(hpml:job_gpu_power_watts:sum)", {"{}": 100}),
    "owner by the node's exporter": (
        RIVALS_ON_A_NODE,
        "hpml:job_gpus:count",
        {f"hpml:job_gpus:count{MAIN_8}": 1},
    ),
    "GPUs of a node with three exporters": (
        RIVALS_ON_A_NODE,
        "sum(hpml:gpu_busy:rate2m)",
        {"{}": 0.5},
    ),
    "threads of a job on two nodes": (TWO_NODES, THREADS, {MAIN_7: 14}),
    "busy GPUs of a job on two nodes": (TWO_NODES, BY_USER, {'{user="ada"}': 1}),
    "one information on a job on two nodes": (TWO_NODES, "count(hpml:job_info)", {"{}": 1}),
    "threads in two clusters": (TWO_CLUSTERS, THREADS, {MAIN_7: 7, TEST_7: 7}),
    "threads of a local run of the same number": (
        BESIDE,
        THREADS,
        {MAIN_7: 7, '{cluster="main",jobid="local-3fa9c1-7"}': 7},
    ),
    "busy GPUs of a local run of the same number": (
        BESIDE,
        BY_USER,
        {'{user="ada"}': 0.5, '{user="bob"}': 0.5},
    ),
    "GPUs of a node whose second GPU is split": (
        SPLIT,
        "hpml:node_gpus:count",
        {'hpml:node_gpus:count{cluster="main",node="n1"}': 3},
    ),
    "name of a task of an array": (
        ARRAY,
        "sum by (jobid, array) (hpml:job_info)",
        {'{jobid="7"}': 1, '{jobid="19",array="17_2"}': 1},
    ),
    "busy GPUs in two clusters": (
        TWO_CLUSTERS,
        BY_USER,
        {'{user="ada"}': 0.5, '{user="bob"}': 0.5},
    ),
}


WHOLE = (
    exporter("main", "n1", {"7": LOW, "8": HIGH}, G1={"7": "1", "8": "0"}, G2={"8": "1"})
    | exporter("main", "n1", {"7": LOW}, scope="job", G1={"7": "1"})
    | exporter("main", "n2", {"7": LOW}, G3={"7": "1"})
)
MAIN, LOW_PART, HIGH_PART = '{cluster="main"}', 'partition="low"', 'partition="high"'
RECORDED: dict[str, dict[str, float]] = {  # of 7 on both nodes and 8 on one, G1 shared
    "hpml:job_gpu_busy:avg": {MAIN_7: 0.5, MAIN_8: 0.5},
    "hpml:job_gpu_memory_used_bytes:sum": {MAIN_7: 40, MAIN_8: 40},
    "hpml:job_gpus_unopened:count": {MAIN_8: 1},
    "hpml:job_samples:rate5m": {MAIN_7: 20, MAIN_8: 10},
    "hpml:partition_gpus_allocated:sum": {LOW_PART: 2, HIGH_PART: 1},
    "hpml:partition_gpus_busy:sum": {LOW_PART: 1, HIGH_PART: 0.5},
    "hpml:partition_gpus_wasted:sum": {LOW_PART: 1, HIGH_PART: 0.5},
    "hpml:partition_gpus_unopened:sum": {HIGH_PART: 1},
    "hpml:node_gpus:count": {'node="n1"': 2, 'node="n2"': 1},
    "hpml:node_gpus_allocated:count": {'node="n1"': 2, 'node="n2"': 1},
    "hpml:node_gpus_busy:sum": {'node="n1"': 1, 'node="n2"': 0.5},
    "hpml:node_gpu_power_watts:sum": {'node="n1"': 200, 'node="n2"': 100},
    "hpml:cluster_gpus_allocated:sum": {MAIN: 3},
    "hpml:cluster_gpus_busy:sum": {MAIN: 1.5},
    "hpml:cluster_gpus_wasted:sum": {MAIN: 1.5},
    "hpml:cluster_gpus_unopened:sum": {MAIN: 1},
    "hpml:cluster_samples:rate5m": {MAIN: 30},
}


@pytest.mark.parametrize(("rule", "answers"), RECORDED.items(), ids=RECORDED)
def test_rules_of_whole_clusters(
    promtool: Promtool, tmp_path: Path, rule: str, answers: dict[str, float]
) -> None:
    """Each sum over jobs, partitions, nodes and the cluster, if a node is scraped twice."""
    exact = {
        rule + (labels if labels.startswith("{") else f'{{cluster="main",{labels}}}'): value
        for labels, value in answers.items()
    }
    ask(promtool, tmp_path, WHOLE, rule, exact)


@pytest.mark.parametrize(("series", "query", "answers"), SCENES.values(), ids=SCENES)
def test_joins(
    promtool: Promtool, tmp_path: Path, series: Series, query: str, answers: dict[str, float]
) -> None:
    """Nothing is counted twice, nothing is left out, and no join is many-to-many."""
    ask(promtool, tmp_path, series, query, answers)


def waits() -> Series:
    """Two jobs of four ranks on two nodes: in job 7, rank 3 waits 0.4 s of each second."""
    series = {}
    for node, jobid, shortest, longest, rank in (
        ("n1", "7", 0.01, 0.02, 1),
        ("n2", "7", 0.02, 0.4, 3),
        ("n1", "8", 0.01, 0.05, 0),
        ("n2", "8", 0.03, 0.04, 2),
    ):
        labels = {"instance": node, "job": "hpml", "cluster": "main", "jobid": jobid}
        for name, which, value in (
            ("hpml_train_rank_data_wait_seconds", "shortest", shortest),
            ("hpml_train_rank_data_wait_seconds", "longest", longest),
            # The others wait for rank 3, and it for nobody.
            ("hpml_train_rank_wait_seconds", "shortest", round(0.4 - longest, 2)),
            ("hpml_train_rank_wait_seconds", "longest", round(0.4 - shortest, 2)),
            ("hpml_train_rank_step_duration_seconds", "fastest", 1.0),
            ("hpml_train_rank_step_duration_seconds", "slowest", 1.0),
        ):
            series[written(name, {**labels, "which": which})] = f"{value}x20"
        info = {**labels, "rank": str(rank)}
        for name in ("longest_data_wait", "shortest_wait"):
            series[written(f"hpml_train_{name}_info", info)] = "1x20"
    return series


SLOWEST: dict[str, Any] = {
    '{instance="n2",job="hpml",cluster="main",jobid="7",which="longest",rank="3"}': 0.4,
    '{instance="n1",job="hpml",cluster="main",jobid="8",which="longest",rank="0"}': 0.05,
}
SLOW: dict[str, Any] = {
    '{instance="n2",job="hpml",cluster="main",jobid="7",which="shortest",rank="3"}': 0.0,
    '{instance="n1",job="hpml",cluster="main",jobid="8",which="shortest",rank="0"}': 0.35,
}


@pytest.mark.parametrize(
    ("query", "answers"),
    [(HELD_UP, {MAIN_7: 0.39}), (WHO, SLOWEST), (WAITED_FOR, SLOW)],
    ids=["jobs", "ranks", "waited for"],
)
def test_the_slowest_reader(
    promtool: Promtool, tmp_path: Path, query: str, answers: dict[str, float]
) -> None:
    """The job that one rank holds up, over both of its nodes; in each job the rank that waits."""
    ask(promtool, tmp_path, waits(), query, answers)


def test_the_example_loads_the_rules(promtool: Promtool) -> None:
    """Prometheus' own check of both files."""
    done = promtool("check", "config", ROOT / "deploy/prometheus/prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("rules found") == 2
