"""What holds running jobs back: the rules find what a report finds, with the same limits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ruamel.yaml import YAML

from hpml_orchestrator.diagnosis.thresholds import JUDGED_SECONDS, THRESHOLDS

if TYPE_CHECKING:
    from tests.monitoring.prometheus_support import Promtool

RULES = Path(__file__).parents[2] / "deploy/prometheus/rules/hpml.yml"
GROUP: list[dict[str, Any]] = next(
    group["rules"]
    for group in YAML(typ="safe").load(RULES.read_text("utf-8"))["groups"]
    if group["name"] == "hpml-findings"
)
HOLDBACK = "hpml:job_holdback:ratio"
FINDINGS = {rule["labels"]["finding"]: rule["expr"] for rule in GROUP if rule["record"] == HOLDBACK}
ON = 'instance="n1:9445",job="hpml-node"'
JOB = f'{ON},cluster="main",jobid="1"'
WELL = {  # of a job with two GPUs; counters: what they grow by in a minute
    f'hpml_node_info{{{ON},cluster="main",node="n1",scope="node"}}': "1",
    f"hpml_job_info{{{JOB}}}": "1",
    f"hpml_job_start_timestamp_seconds{{{JOB}}}": "0",
    f"hpml_train_data_wait_seconds_total{{{JOB}}}": "0+5",
    f"hpml_train_step_duration_seconds_sum{{{JOB}}}": "0+60",
    f'hpml_train_rank_wait_seconds{{{JOB},which="shortest"}}': "0.01",
    f'hpml_train_rank_wait_seconds{{{JOB},which="longest"}}': "0.02",
    f'hpml_train_rank_step_duration_seconds{{{JOB},which="slowest"}}': "0.5",
    f"hpml_job_memory_limit_bytes{{{JOB}}}": "100",
    f'hpml_job_memory_bytes{{{JOB},kind="rss"}}': "80",
    f'hpml_job_memory_bytes{{{JOB},kind="cache"}}': "20",
    **{
        f"{name}{{{labels}}}": value
        for uuid in "AB"
        for name, labels, value in (
            ("hpml_gpu_info", f'{ON},uuid="{uuid}",index="0",name="H100"', "1"),
            ("hpml_job_gpu_info", f'{JOB},uuid="{uuid}",allocated="1",owner="1"', "1"),
            ("hpml_job_gpu_processes", f'{JOB},uuid="{uuid}"', "1"),
            ("hpml_gpu_busy_seconds_total", f'{ON},uuid="{uuid}"', "0+55"),
            ("hpml_gpu_sm_active_ratio", f'{ON},uuid="{uuid}"', "0.8"),
            ("hpml_gpu_tensor_active_ratio", f'{ON},uuid="{uuid}"', "0.4"),
            ("hpml_gpu_throttled_seconds_total", f'{ON},uuid="{uuid}",reason="power"', "0+60"),
            ("hpml_gpu_throttled_seconds_total", f'{ON},uuid="{uuid}",reason="hw_thermal"', "0+1"),
        )
    },
}
FAULTS = {  # part of the name and labels of series, what they say instead, and what is found
    "waits-for-data": ({"data_wait": "0+15"}, 0.25),
    "slow-rank": ({'rank_wait_seconds{.*"longest"': "0.2"}, 0.38),
    "tensor-cores-idle": ({"tensor_active": "0.02"}, 0.02),
    "throttled": ({'uuid="B",reason="hw_thermal"': "0+12"}, 0.2),
    "memory-pressure": ({'memory_bytes.*"rss"': "95"}, 0.95),
    "gpu-unused": ({'busy_seconds_total.*"B"': "0+0"}, 0.5),
}


def test_the_limits_are_those_of_reports() -> None:
    """The numbers stand in two places, and are the same; so do the kinds."""
    for finding, expression in FINDINGS.items():
        limit = re.search(r"(>=|<=) ([0-9.]+)", expression)
        assert limit is not None
        assert float(limit[2]) == THRESHOLDS[finding].warn, finding
        assert (limit[1] == "<=") == THRESHOLDS[finding].below, finding
    (unused,) = (rule["expr"] for rule in GROUP if rule["record"] == "hpml:job_gpus_unused:count")
    assert float(unused.rpartition("> ")[2]) == JUDGED_SECONDS


def test_every_finding_of_the_rules_is_tested() -> None:
    """Each has a job here that is held back by it alone."""
    assert {*FINDINGS} == {*FAULTS}


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_one_fault_gives_one_series(promtool: Promtool, tmp_path: Path, fault: str) -> None:
    """With the figure that a report would compare; a job that is well gives none."""
    changes, figure = FAULTS[fault] if fault else ({}, 0.0)
    written = dict(WELL)
    for pattern, values in changes.items():
        matching = [name for name in WELL if re.search(pattern, name)]
        assert matching
        written |= dict.fromkeys(matching, values)
    sample = {"labels": f'{{cluster="main", finding="{fault}", jobid="1"}}', "value": figure}
    test = {
        "interval": "1m",
        "input_series": [
            {"series": name, "values": f"{values}x40"} for name, values in written.items()
        ],
        "promql_expr_test": [
            {
                "expr": f"round({HOLDBACK}, 0.001)",
                "eval_time": "35m",
                "exp_samples": [sample] if fault else [],
            }
        ],
    }
    path = tmp_path / "test.yml"
    path.write_text(json.dumps({"rule_files": [str(RULES)], "tests": [test]}), encoding="utf-8")
    done = promtool("test", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr
