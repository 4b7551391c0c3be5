"""The rules behind the dashboards count nothing twice, and no figure is 0 of what is not known."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hpml_dashboards import JSON

from tests.monitoring.backfill_support import END, backfill, openmetrics, panels, resolved
from tests.monitoring.prometheus_support import Prometheus, booted_prometheus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.monitoring.prometheus_support import Promtool

RULES = Path(__file__).parents[2] / "deploy/prometheus/rules/hpml.yml"
NODE = 'instance="n1:9445",job="hpml-node"'
OWN = 'instance="n1:7001",job="hpml-job"'  # job 1's own exporter, on the same node
FAR = 'instance="n2:7001",job="hpml-job"'  # and on a node that has no other
ONE, TWO = 'cluster="main",jobid="1"', 'cluster="main",jobid="2"'
ONCE = {  # seen by the node's exporter only
    f'hpml_node_info{{{NODE},cluster="main",node="n1",scope="node"}}': "1",
    f'hpml_node_info{{{OWN},cluster="main",node="n1",scope="job"}}': "1",
    f'hpml_node_info{{{FAR},cluster="main",node="n2",scope="job"}}': "1",
    f'hpml_job_info{{{NODE},{TWO},user="bob",partition="train"}}': "1",
    f'hpml_job_gpu_info{{{NODE},{TWO},uuid="A",allocated="0",owner="0"}}': "1",
    f'hpml_gpu_info{{{NODE},uuid="B",index="1",name="H100"}}': "1",
    f'hpml_gpu_info{{{FAR},uuid="C",index="0",name="H100"}}': "1",
    f"hpml_shm_used_bytes{{{NODE}}}": "25",
    f"hpml_shm_size_bytes{{{NODE}}}": "100",
    f'hpml_infiniband_received_bytes_total{{{NODE},device="mlx5_0",port="1"}}': "0+6000",
    f'hpml_infiniband_received_bytes_total{{{NODE},device="mlx5_1",port="1"}}': "0+6000",
    f'hpml_infiniband_transmitted_bytes_total{{{NODE},device="mlx5_0",port="1"}}': "0+60",
}
TWICE = {  # seen by the node's exporter and by the job's own; {on} is one of the two
    '{on},{one},user="ada",partition="train"': ("hpml_job_info", "1"),
    '{on},{one},run="r",sweep="s",point="p"': ("hpml_run_info", "1"),
    '{on},{one},uuid="A",allocated="1",owner="1"': ("hpml_job_gpu_info", "1"),
    '{on},uuid="A",index="0",name="H100"': ("hpml_gpu_info", "1"),
}
FIGURES = {  # likewise, by the labels
    '{on},uuid="A"': {
        "hpml_gpu_busy_seconds_total": "0+30",
        "hpml_gpu_sm_active_ratio": "0.4",
        "hpml_gpu_tensor_active_ratio": "0.3",
        "hpml_gpu_memory_used_bytes": "20",
        "hpml_gpu_memory_total_bytes": "80",
        "hpml_gpu_power_watts": "300",
    },
    '{on},uuid="A",reason="power"': {"hpml_gpu_throttled_seconds_total": "0+6"},
    '{on},uuid="A",reason="hw_thermal"': {"hpml_gpu_throttled_seconds_total": "0+3"},
    '{on},uuid="A",direction="tx"': {"hpml_gpu_nvlink_bytes_total": "0+600"},
    '{on},uuid="A",direction="rx"': {
        "hpml_gpu_nvlink_bytes_total": "0+1200",
        "hpml_gpu_pcie_bytes_total": "0+60",
    },
    "{on},{one}": {
        "hpml_train_samples_total": "0+600",
        "hpml_train_data_wait_seconds_total": "0+15",
        "hpml_train_step_duration_seconds_sum": "0+60",
        "hpml_job_memory_limit_bytes": "100",
        "hpml_job_ranks": "8",
    },
    '{on},{one},kind="rss"': {"hpml_job_memory_bytes": "40"},
    '{on},{one},kind="shmem"': {"hpml_job_memory_bytes": "10"},
    '{on},{one},kind="cache"': {"hpml_job_memory_bytes": "50"},
}
A = 'cluster="main", index="0", jobid="1", node="n1", uuid="A"'
RUN = f'{{{ONE}, point="p", run="r", sweep="s"}}'
N1, N2 = '{cluster="main", node="n1"}', '{cluster="main", node="n2"}'
ANSWERS = {  # with labels as promtool writes them
    "hpml:gpu_info": {
        f'{{{A}, name="H100"}}': 1.0,
        '{cluster="main", index="1", node="n1", uuid="B", name="H100"}': 1.0,
        '{cluster="main", index="0", node="n2", uuid="C", name="H100"}': 1.0,
    },
    "hpml:gpu_busy:rate2m": {f"{{{A}}}": 0.5},
    "hpml:gpu_sm_active:ratio": {f"{{{A}}}": 0.4},
    "hpml:gpu_tensor_active:ratio": {f"{{{A}}}": 0.3},
    "hpml:gpu_memory_used:ratio": {f"{{{A}}}": 0.25},
    "hpml:gpu_power_watts:max": {f"{{{A}}}": 300.0},
    "hpml:gpu_throttled:rate2m": {f"{{{A}}}": 0.15},
    "hpml:gpu_link_bytes:rate2m": {f'{{{A}, link="NVLink"}}': 30.0, f'{{{A}, link="PCIe"}}': 1.0},
    "hpml:node_gpus:count": {N1: 2.0, N2: 1.0},
    "hpml:node_gpus_allocated:count": {N1: 1.0, N2: 0.0},
    "hpml:node_gpus_busy:sum": {N1: 0.5},
    "hpml:node_gpu_power_watts:sum": {N1: 300.0},
    "hpml:cluster_gpus:count": {'{cluster="main"}': 3.0},
    "hpml:cluster_gpu_power_watts:sum": {'{cluster="main"}': 300.0},
    "hpml:node_shm_used:ratio": {f'{{{NODE}, cluster="main", node="n1"}}': 0.25},
    "hpml:node_network_received_bytes:rate5m": {N1: 200.0},
    "hpml:node_network_transmitted_bytes:rate5m": {N1: 1.0},
    "hpml:job_gpus_wasted:sum": {f"{{{ONE}}}": 0.5},
    "hpml:partition_gpus_wasted:sum": {'{cluster="main", partition="train"}': 0.5},
    "hpml:job_data_wait:ratio": {f"{{{ONE}}}": 0.25},
    "hpml:job_memory_used:ratio": {f"{{{ONE}}}": 0.5},
    "hpml:run_info": {RUN: 1.0},
    "hpml:run_samples:rate5m": {RUN: 10.0},
    "hpml:run_ranks:max": {RUN: 8.0},
}


def series() -> dict[str, str]:
    written = dict(ONCE)
    for on in (NODE, OWN):
        for labels, (name, values) in TWICE.items():
            written[f"{name}{{{labels.format(on=on, one=ONE)}}}"] = values
        for labels, metrics in FIGURES.items():
            for name, values in metrics.items():
                written[f"{name}{{{labels.format(on=on, one=ONE)}}}"] = values
    return written


def test_what_is_seen_twice_counts_once(promtool: Promtool, tmp_path: Path) -> None:
    """Every rule of the group, after fifteen minutes of even load."""
    test = {
        "interval": "1m",
        "input_series": [
            {"series": name, "values": f"{values}x20"} for name, values in series().items()
        ],
        "promql_expr_test": [
            {
                "expr": f"round({rule}, 0.001)",  # extrapolated rates end in many digits
                "eval_time": "15m",
                "exp_samples": [{"labels": at, "value": value} for at, value in answer.items()],
            }
            for rule, answer in ANSWERS.items()
        ],
    }
    path = tmp_path / "test.yml"
    path.write_text(json.dumps({"rule_files": [str(RULES)], "tests": [test]}), encoding="utf-8")
    done = promtool("test", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_rule_of_the_group_is_tested() -> None:
    """But hpml:gpu_place, which hpml:gpu_info is made of."""
    text = RULES.read_text("utf-8").partition("- name: hpml-dashboards")[2]
    text = text.partition("- name: hpml-findings")[0]  # test_holdbacks.py has those
    assert set(re.findall(r"record: (\S+)", text)) == {*ANSWERS, "hpml:gpu_place"}


DASHBOARDS = {path.stem: json.loads(path.read_text("utf-8")) for path in JSON.glob("*.json")}
FAULTY = r"oom_events|xid|wrong_ranks|ecc_errors|unopened|slurm_queue_jobs{"
FAULTY += r"|slurm_nodes.*state=\"(?!down)"
ZERO = {  # if nothing is wrong and nothing waits
    ("hpml-job", "Faults", ""),
    ("hpml-job", "GPUs", "unused"),
    ("hpml-node", "GPU errors", ""),
    ("hpml-cluster", "Nodes down", ""),
    ("hpml-cluster", "Jobs running", ""),
    ("hpml-cluster", "Jobs pending", ""),
    ("hpml-health", "Targets down", ""),
    ("hpml-health", "Failing", ""),
}
Figures = dict[tuple[str, str, str], list[float]]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus with all series that the dashboards query, except faults and the queue."""
    folder = tmp_path_factory.mktemp("healthy")
    lines = openmetrics(DASHBOARDS.values()).splitlines()
    kept = "\n".join(line for line in lines if not re.search(FAULTY, line))
    backfill(folder, kept.replace('state="down"', 'state="idle"') + "\n")
    with booted_prometheus(folder, []) as booted:
        yield booted


def figures(asked: Prometheus, **values: str) -> Figures:
    """What the figures of all dashboards show: by dashboard, panel and name of the query."""
    return {
        (uid, panel["title"], target["legendFormat"]): [
            line.points[-1][1]
            for line in asked.query_range(resolved(target["expr"], others=values), END, END)
        ]
        for uid, dashboard in DASHBOARDS.items()
        for panel in panels(dashboard)
        if panel["type"] == "stat"
        for target in panel["targets"]
    }


def test_figures_are_zero_of_what_is_known_only(healthy: Prometheus, tmp_path: Path) -> None:
    """Every figure has one value; none of an unknown job or node, or of an empty Prometheus."""
    known = figures(healthy)
    assert [name for name, values in known.items() if len(values) != 1] == []
    assert {name: known[name] for name in ZERO} == {name: [0.0] for name in ZERO}
    unknown = figures(healthy, jobid="404", node="gpu404", instance="")
    shown = {name: values for name, values in unknown.items() if values}
    assert {uid for uid, *_ in shown} == set(DASHBOARDS) - {"hpml-job", "hpml-node"}
    with booted_prometheus(tmp_path, []) as empty:
        shown = {name: values for name, values in figures(empty).items() if values}
    assert shown == {}


@pytest.mark.parametrize(("ranks", "speedup"), [("16", 1.5), ("8", None)], ids=["more", "same"])
def test_speeds_are_compared_where_ranks_differ(
    promtool: Promtool, tmp_path: Path, ranks: str, speedup: float | None
) -> None:
    """Runs of a sweep of other parameters have no speedup."""
    values = {"samples:rate5m": ("100", "150"), "ranks:max": ("8", ranks)}
    run = '{{cluster="main",sweep="scaling",jobid="{}"}}'
    queries = {
        panel["title"]: resolved(panel["targets"][0]["expr"])
        for panel in panels(DASHBOARDS["hpml-sweep"])
    }
    wanted = {"Largest speedup": speedup, "Lowest efficiency": speedup and 0.75}
    test = {
        "interval": "1m",
        "input_series": [
            {"series": f"hpml:run_{name}{run.format(jobid)}", "values": f"{value}x20"}
            for name, pair in values.items()
            for jobid, value in enumerate(pair)
        ],
        "promql_expr_test": [
            {
                "expr": queries[title],
                "eval_time": "15m",
                "exp_samples": [{"labels": "{}", "value": value}] if value else [],
            }
            for title, value in wanted.items()
        ],
    }
    path = tmp_path / "test.yml"
    path.write_text(json.dumps({"tests": [test]}), encoding="utf-8")
    done = promtool("test", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr
