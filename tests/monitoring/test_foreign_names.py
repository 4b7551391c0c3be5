"""The optional rules give dcgm-exporter's and jobstats' series, each GPU and job once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ruamel.yaml import YAML

if TYPE_CHECKING:
    from tests.monitoring.prometheus_support import Promtool

RULES = Path(__file__).parents[2] / "deploy/prometheus/rules"


def exporter(scope: str) -> dict[str, str]:
    """What an exporter of node n1 shows of GPU G1 and of job 7, which has it."""
    own = f'instance="n1:{scope}",job="hpml-{scope}"'
    gpu, job = f'{own},uuid="G1"', f'{own},cluster="main",jobid="7"'
    gauges = dict.fromkeys(
        (
            "utilization_ratio memory_utilization_ratio encoder_utilization_ratio "
            "decoder_utilization_ratio sm_active_ratio sm_occupancy_ratio tensor_active_ratio "
            "dram_active_ratio"
        ).split(),
        "0.5",
    )
    gauges |= {
        "memory_used_bytes": "1048576",
        "memory_total_bytes": "3145728",
        "power_watts": "300",
        "energy_joules_total": "7",
        "temperature_celsius": "60",
        "memory_temperature_celsius": "70",
        "pcie_replays_total": "2",
        "remapped_rows_failed": "0",
    }
    series = {f"hpml_gpu_{name}{{{gpu}}}": value for name, value in gauges.items()}
    for kind in ("sm", "memory"):
        series[f'hpml_gpu_clock_hertz{{{gpu},type="{kind}"}}'] = "1.5e9"
    for error in ("corrected", "uncorrected"):
        series[f'hpml_gpu_remapped_rows{{{gpu},error="{error}"}}'] = "1"
    for link in ("pcie", "nvlink"):
        for direction in ("receive", "transmit"):
            series[f'hpml_gpu_{link}_bytes_total{{{gpu},direction="{direction}"}}'] = "0+6000"
    for mode in ("user", "system"):
        series[f'hpml_job_cpu_seconds_total{{{job},mode="{mode}"}}'] = "40"
    for kind, value in (("rss", "5"), ("shmem", "2"), ("cache", "3")):
        series[f'hpml_job_memory_bytes{{{job},kind="{kind}"}}'] = value
    return {
        f'hpml_node_info{{{own},cluster="main",node="n1",scope="{scope}"}}': "1",
        f'hpml_gpu_info{{{gpu},index="0",minor="3",name="H100",parent=""}}': "1",
        f"hpml_job_info{{{job}}}": "1",
        f'hpml_job_gpu_info{{{job},uuid="G1",owner="1"}}': "1",
        f"hpml_job_cpus{{{job}}}": "4",
        f"hpml_job_memory_limit_bytes{{{job}}}": "100",
        **series,
    }


DCGM = '{gpu="0",UUID="G1",device="nvidia3",modelName="H100",Hostname="n1"}'
NVIDIA = '{cluster="main",host="n1",jobid="7",minor_number="3",uuid="G1",name="H100"}'
CGROUP = '{cluster="main",instance="n1:node",host="n1",jobid="7"}'
ANSWERS = {
    f"DCGM_FI_DEV_GPU_UTIL{DCGM}": 50,
    f"DCGM_FI_DEV_FB_FREE{DCGM}": 2,
    f"DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{DCGM}": 7000,
    f"DCGM_FI_DEV_SM_CLOCK{DCGM}": 1500,
    f"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{DCGM}": 0.5,
    f"DCGM_FI_PROF_PCIE_RX_BYTES{DCGM}": 100,
    f"nvidia_gpu_duty_cycle{NVIDIA}": 50,
    f"nvidia_gpu_power_usage_milliwatts{NVIDIA}": 300_000,
    f"cgroup_cpu_total_seconds{CGROUP}": 80,
    f"cgroup_memory_rss_bytes{CGROUP}": 7,
    f"cgroup_memory_total_bytes{CGROUP}": 100,
}


@pytest.mark.parametrize("name", ["dcgm-exporter", "jobstats"])
def test_foreign_names(promtool: Promtool, tmp_path: Path, name: str) -> None:
    """Every rule has one series, although two exporters of the node show the GPU and the job."""
    path = RULES / "optional" / f"{name}.yml"
    groups = YAML(typ="safe").load(path)["groups"]
    records = [rule["record"] for group in groups for rule in group["rules"]]
    records = [record for record in records if not record.startswith("hpml:")]
    answers = {
        labels: value for labels, value in ANSWERS.items() if labels.split("{")[0] in records
    }
    tests = [
        {"expr": f"count({record})", "exp_samples": [{"labels": "{}", "value": 1}]}
        for record in records
    ] + [
        {"expr": labels.split("{")[0], "exp_samples": [{"labels": labels, "value": value}]}
        for labels, value in answers.items()
    ]
    scene = {
        "interval": "1m",
        "input_series": [
            {"series": series, "values": f"{value}x20"}
            for series, value in (exporter("node") | exporter("job")).items()
        ],
        "promql_expr_test": [{"eval_time": "15m", **test} for test in tests],
    }
    test = tmp_path / "test.yml"
    test.write_text(
        json.dumps({"rule_files": [str(RULES / "hpml.yml"), str(path)], "tests": [scene]})
    )
    done = promtool("test", "rules", test)
    assert answers
    assert done.returncode == 0, done.stdout + done.stderr
