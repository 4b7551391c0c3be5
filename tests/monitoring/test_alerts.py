"""Every alert fires on what it is for, not on what is well, and not before its time."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ruamel.yaml import YAML

from hpml_orchestrator.diagnosis.thresholds import THRESHOLDS

if TYPE_CHECKING:
    from tests.monitoring.prometheus_support import Promtool

RULES = Path(__file__).parents[2] / "deploy/prometheus/rules"
GROUPS = YAML(typ="safe").load(RULES / "hpml-alerts.yml")["groups"]
ALERTS = {rule["alert"]: rule for group in GROUPS for rule in group["rules"] if "alert" in rule}
STEPS = 130  # minutes that the series below last
ON = 'instance="n1:9445",job="hpml-node"'
JOB = f'{ON},cluster="main",jobid="7"'
GPU = f'{ON},uuid="G1"'
CONSTANT = {  # what the others are joined with
    f'hpml_node_info{{{ON},cluster="main",node="n1",scope="node"}}': "1",
    f'hpml_job_info{{{JOB},user="ada",partition="gpu",name="images"}}': "1",
    f'hpml_job_gpu_info{{{JOB},uuid="G1",allocated="1",owner="1"}}': "1",
}
# Alert -> series, with their values when it has to fire and when it must not. Values as promtool
# expands them: "start+step" for each minute. The last item is what has to hold before it fires.
CASES: dict[str, dict[str, tuple[str, str]]] = {
    "GpuAllocatedWithoutProcess": {
        f'hpml_job_gpu_processes{{{JOB},uuid="G1"}}': ("0", "1"),
        f"hpml_job_io_syscall_write_bytes_total{{{JOB}}}": ("0+6e3", "0"),  # its log
    },
    "JobGpusIdle": {f"hpml_gpu_busy_seconds_total{{{GPU}}}": ("5+0", "0+2")},
    "JobGpusStillIdle": {f"hpml_gpu_busy_seconds_total{{{GPU}}}": ("5+0", "0+2")},
    "JobGpusUnderused": {
        f"hpml_gpu_sm_active_ratio{{{GPU}}}": ("0.1", "0.6"),
        f"hpml_gpu_busy_seconds_total{{{GPU}}}": ("0+60", "0+60"),
    },
    "TrainingWaitsForData": {
        f"hpml_train_data_wait_seconds_total{{{JOB}}}": ("0+15", "0+9"),
        f"hpml_train_step_duration_seconds_sum{{{JOB}}}": ("0+60", "0+60"),
    },
    "TrainingRanksUneven": {
        f'hpml_train_rank_data_wait_seconds{{{JOB},which="longest"}}': ("0.4", "0.1"),
        f'hpml_train_rank_data_wait_seconds{{{JOB},which="shortest"}}': ("0.1", "0.05"),
        f'hpml_train_rank_step_duration_seconds{{{JOB},which="slowest"}}': ("1", "1"),
        f'hpml_train_rank_step_duration_seconds{{{JOB},which="fastest"}}': ("1", "1"),
    },
    "RankBindingWrong": {f"hpml_rank_binding_ok{{{JOB}}}": ("0", "1")},
    "JobUsesForeignGpu": {f"hpml_job_gpus_foreign{{{JOB}}}": ("1", "0")},
    "GpuUsedByStranger": {
        f'hpml_gpu_processes{{{GPU},owner="none"}}': ("2", "0"),
        f'hpml_gpu_processes{{{ON},uuid="G2",owner="none"}}': ("1", "1"),  # of no job
    },
    "JobOutOfMemory": {f"hpml_job_oom_events_total{{{JOB}}}": ("_x9 1", "3+0")},
    "JobsEndedOutOfMemory": {
        'hpml_slurm_jobs_ended_total{partition="a",state="out_of_memory"}': ("0+1", "5+0"),
        'hpml_slurm_jobs_ended_total{partition="a",state="completed"}': ("0+1", "0+1"),
    },
    "JobMemoryNearLimit": {
        f'hpml_job_memory_bytes{{{JOB},kind="rss"}}': ("98", "96"),
        f'hpml_job_memory_bytes{{{JOB},kind="cache"}}': ("0", "4"),
        f"hpml_job_memory_limit_bytes{{{JOB}}}": ("100", "100"),
    },
    "GpuLost": {f"hpml_gpu_up{{{GPU}}}": ("0", "1")},
    "GpuXid": {
        f'hpml_gpu_xid_last_timestamp_seconds{{{GPU},xid="149"}}': ("0+0", "-90000+0"),
        f'hpml_gpu_xid_last_timestamp_seconds{{{GPU},xid="13"}}': ("0+60", "0+60"),
    },
    "GpuNeedsRecovery": {f"hpml_gpu_recovery_action{{{GPU}}}": ("1", "0")},
    "GpuUncorrectedMemoryErrors": {
        f'hpml_gpu_ecc_errors_total{{{GPU},error="uncorrected"}}': ("0x9 1", "7"),
        f'hpml_gpu_ecc_errors_total{{{GPU},error="corrected"}}': ("0+9", "0+9"),
    },
    "GpuRowRemapPending": {f"hpml_gpu_remapped_rows_pending{{{GPU}}}": ("1", "0")},
    "GpuDriverGone": {f'hpml_exporter_up{{{ON},collector="gpu"}}': ("0", "1")},
    "GpusMissing": {
        f'hpml_gpus{{{ON},state="up"}}': ("8x9 7", "7"),
        f'hpml_gpus{{{ON},state="lost"}}': ("0", "1"),
    },
    "GpusFewerThanInSlurm": {
        'hpml_slurm_node_gpus{node="n1",instance="s1"}': ("8", "7"),
        'hpml_slurm_node_gpus{node="n2",instance="s1"}': ("8", "8"),  # its exporter is elsewhere
        # One GPU that is split into two, and five others.
        **{
            f'hpml_gpu_info{{{ON},uuid="G{number}",mig="{mig}"}}': ("1", "1")
            for number, mig in enumerate(["enabled", "1g.10gb", "1g.10gb", *[""] * 5])
        },
    },
    "GpuNvlinkDown": {
        f"hpml_gpu_nvlink_links{{{GPU}}}": ("18", "18"),
        f"hpml_gpu_nvlink_links_active{{{GPU}}}": ("18x5 17", "18"),
    },
    "GpuPcieDegraded": {
        f"hpml_gpu_pcie_link_width{{{GPU}}}": ("16x5 8", "8"),
        f"hpml_gpu_pcie_link_width_max{{{GPU}}}": ("16", "8"),
    },
    "GpuRowRemapFailed": {f"hpml_gpu_remapped_rows_failed{{{GPU}}}": ("1", "0")},
    "GpuThrottled": {
        f'hpml_gpu_throttled_seconds_total{{{GPU},reason="sw_thermal"}}': ("0+5", "0+1"),
        f'hpml_gpu_throttled_seconds_total{{{GPU},reason="power"}}': ("0+50", "0+50"),
    },
    "GpuHot": {
        f"hpml_gpu_temperature_celsius{{{GPU}}}": ("87", "88"),
        f'hpml_gpu_temperature_limit_celsius{{{GPU},sensor="core"}}': ("_", "92"),
        f"hpml_gpu_memory_temperature_celsius{{{GPU}}}": ("60", "101"),
        f'hpml_gpu_temperature_limit_celsius{{{GPU},sensor="memory"}}': ("105", "105"),
    },
    "ShmNearlyFull": {
        f"hpml_shm_used_bytes{{{ON}}}": ("95", "50"),
        f"hpml_shm_size_bytes{{{ON}}}": ("100", "100"),
        f"hpml_shm_staged_bytes{{{ON}}}": ("_", "0"),  # unknown before the first walk
    },
    "DiskNearlyFull": {
        f'hpml_filesystem_free_bytes{{{ON},mountpoint="/tmp"}}': ("4", "6"),
        f'hpml_filesystem_size_bytes{{{ON},mountpoint="/tmp"}}': ("100", "100"),
    },
    "InfinibandDown": {
        f'hpml_infiniband_up{{{ON},device="mlx5_0",port="1"}}': ("1x5 0", "0"),
        f'hpml_infiniband_up{{{ON},device="mlx5_1",port="1"}}': ("1", "1"),
    },
    "LinkFlaps": {
        f'hpml_network_link_down_total{{{ON},device="eth0"}}': ("0+1", "2+0"),
        f'hpml_infiniband_events_total{{{ON},device="mlx5_0",event="link_downed"}}': ("3+0", "3+0"),
    },
    "NodeFileSystemReadOnly": {
        f'hpml_filesystem_read_only{{{ON},mountpoint="/local",fstype="xfs"}}': ("1", "0"),
    },
    "NodeMemoryErrors": {
        f'hpml_node_memory_errors_total{{{ON},error="uncorrected"}}': ("1", "0"),
        f'hpml_node_memory_errors_total{{{ON},error="corrected"}}': ("0+5", "0+5"),
    },
    "NodeHot": {
        f'hpml_node_temperature_celsius{{{ON},chip="coretemp"}}': ("100", "99"),
        f'hpml_node_temperature_limit_celsius{{{ON},chip="coretemp"}}': ("100", "100"),
    },
    "NodeClockOff": {
        f"hpml_node_clock_synchronized{{{ON}}}": ("0", "1"),
        f"hpml_node_clock_error_seconds{{{ON}}}": ("16", "0.5"),
    },
    "NodeStuckProcesses": {f"hpml_node_stuck_processes{{{ON}}}": ("1", "1x4 0 1x4 0 1x4 0")},
    "NfsTimeouts": {
        f'hpml_nfs_timeouts_total{{{ON},server="nas",export="/data"}}': ("0+1", "9+0"),
    },
    "NodeUnavailable": {
        'hpml_slurm_node_reason_info{node="n1",state="down",reason="fan"}': ("1", "_"),
        'hpml_slurm_node_reason_info{node="n2",state="drained",reason="plan"}': ("1", "1"),
    },
    "ManyNodesUnavailable": {
        f'hpml_slurm_node_reason_info{{node="n{node}",state="down",reason="Not responding"}}': (
            "1",
            "1" if node < 5 else "_",
        )
        for node in range(6)
    },
    "NodesDrained": {
        'hpml_slurm_node_reason_info{node="n1",state="drained",reason="fan"}': ("1", "_"),
        'hpml_slurm_node_reason_info{node="n2",state="maintenance",reason="plan"}': ("1", "1"),
    },
    "ManyJobsPending": {
        'hpml_slurm_queue_jobs{state="pending",reason="Priority"}': ("100x12 600", "600"),
        'hpml_slurm_queue_jobs{state="pending",reason="Resources"}': ("10x12 60", "600"),
        'hpml_slurm_queue_jobs{state="running",reason=""}': ("900", "900"),
    },
    "ExporterDown": {f"up{{{ON}}}": ("0", "1"), 'up{instance="x",job="other"}': ("0", "0")},
    "ManyExportersDown": {
        f'up{{instance="n{node}:9445",job="hpml-node"}}': ("0", "0" if node < 5 else "1")
        for node in range(6)
    },
    "CollectorFailing": {
        f'hpml_exporter_up{{{ON},collector="nfs"}}': ("0", "1"),
        # A Slurm that does not answer is SlurmFiguresOld's.
        'hpml_exporter_up{instance="s1",job="hpml-slurm",collector="slurm"}': ("1", "0"),
        'hpml_slurm_last_refresh_timestamp_seconds{instance="s1",job="hpml-slurm"}': (
            "0+60",
            "0+0",
        ),
        'hpml_slurm_refresh_interval_seconds{instance="s1",job="hpml-slurm"}': ("30", "30"),
    },
    "SlurmFiguresOld": {
        "hpml_slurm_last_refresh_timestamp_seconds": ("0+0", "0+60"),
        "hpml_slurm_refresh_interval_seconds": ("30", "30"),
    },
}


# Alerts about a job, which have its user, partition and name.
OF_JOBS = {name for name, rule in ALERTS.items() if "$labels.jobid" in str(rule["annotations"])}
OF_JOBS.discard("GpuUsedByStranger")

DOWN = 'state="down",reason="Not responding"'
# What happens on ordinary days, with the alerts that stayed silent only after somebody was woken.
QUIET: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "64 loaders read from a busy file server": (
        ("NodeStuckProcesses",),
        {f"hpml_node_stuck_processes{{{ON}}}": "0"},
    ),
    "chrony without rtcsync": (
        ("NodeClockOff",),
        {
            f"hpml_node_clock_synchronized{{{ON}}}": "1",
            f"hpml_node_clock_error_seconds{{{ON}}}": "0.02",
        },
    ),
    "no update of the clock for an hour": (
        ("NodeClockOff",),
        {
            f"hpml_node_clock_synchronized{{{ON}}}": "1",
            f"hpml_node_clock_error_seconds{{{ON}}}": "0.01+0.03",
        },
    ),
    "a planned reboot": (
        ("ExporterDown", "NodeUnavailable"),
        {
            f"up{{{ON}}}": "1x5 0x13 1",
            'hpml_slurm_node_reason_info{node="n1",state="rebooting",reason=""}': "_x5 1x13 stale",
        },
    ),
    "a reboot that Slurm was not told of": (
        ("ExporterDown", "NodeUnavailable"),
        {
            f"up{{{ON}}}": "1x5 0x13 1",
            f'hpml_slurm_node_reason_info{{node="n1",{DOWN}}}': "_x7 1x11 stale",
        },
    ),
    "a rolling reboot of the cluster": (
        ("ExporterDown", "ManyExportersDown", "ManyNodesUnavailable"),
        {f'up{{instance="n{node}:9445",job="hpml-node"}}': "1x5 0x14 1" for node in range(9)}
        | {
            f'hpml_slurm_node_reason_info{{node="n{node}",{DOWN}}}': "_x7 1x12 stale"
            for node in range(9)
        },
    ),
    "nodes that Slurm has switched off": (
        ("ExporterDown", "ManyExportersDown", "NodeUnavailable", "ManyNodesUnavailable"),
        {f'up{{instance="n{node}:9445",job="hpml-node"}}': "0" for node in range(4)}
        # the address is not the name: `hpml targets` gives both
        | {
            f'up{{instance="10.0.0.{node}:9445",job="hpml-node",node="n{node}"}}': "0"
            for node in range(4, 9)
        }
        | {
            f'hpml_slurm_node_reason_info{{node="n{node}",state="powered_down",reason=""}}': "1"
            for node in range(9)
        },
    ),
    "six nodes in repair": (
        ("ExporterDown", "ManyExportersDown", "NodeUnavailable", "ManyNodesUnavailable"),
        {f'up{{instance="n{node}:9445",job="hpml-node"}}': "0" for node in range(6)}
        | {
            f'hpml_slurm_node_reason_info{{node="n{node}",state="drained",reason="fan"}}': "1"
            for node in range(6)
        },
    ),
    "GPUs in slots with 8 lanes": (
        ("GpuPcieDegraded",),
        {
            f'hpml_gpu_pcie_link_{name}{{{ON},uuid="G{gpu}"}}': lanes
            for name, lanes in (("width", "8"), ("width_max", "16"))
            for gpu in range(8)
        },
    ),
    "a workstation with one wide slot": (
        ("GpuPcieDegraded",),
        {f'hpml_gpu_pcie_link_width{{{ON},uuid="G{gpu}"}}': str(8 * gpu) for gpu in (1, 2)},
    ),
    "PCIe GPUs without a bridge": (
        ("GpuNvlinkDown",),
        {
            f"hpml_gpu_nvlink_links{{{GPU}}}": "12",
            f"hpml_gpu_nvlink_links_active{{{GPU}}}": "0",
        },
    ),
    "staging fills /dev/shm": (
        ("ShmNearlyFull",),
        {
            f"hpml_shm_used_bytes{{{ON}}}": "95",
            f"hpml_shm_size_bytes{{{ON}}}": "100",
            f"hpml_shm_staged_bytes{{{ON}}}": "90",
        },
    ),
    "GPUs were removed on purpose": (
        ("GpusMissing", "GpusFewerThanInSlurm"),
        {
            f'hpml_gpus{{{ON},state="up"}}': "2x9 1",
            'hpml_slurm_node_gpus{node="n1",instance="s1"}': "2x9 1",
            f'hpml_gpu_info{{{ON},uuid="G1"}}': "1",
            f'hpml_gpu_info{{{ON},uuid="G2"}}': "1x9 stale",
        },
    ),
    "Slurm is asked every ten minutes": (
        ("SlurmFiguresOld",),
        {
            "hpml_slurm_last_refresh_timestamp_seconds": " ".join(
                [*(f"{600 * number}x9" for number in range(13)), "7800"]
            ),
            "hpml_slurm_refresh_interval_seconds": "600",
        },
    ),
    "a new Prometheus finds jobs that ended yesterday": (
        ("JobsEndedOutOfMemory",),
        {
            'hpml_slurm_jobs_ended_total{partition="a",state="out_of_memory"}': "3",
            "hpml_slurm_last_refresh_timestamp_seconds": "0+60",
        },
    ),
    "a job stages 2 TB": (
        ("GpuAllocatedWithoutProcess",),
        {
            f'hpml_job_gpu_processes{{{JOB},uuid="G1"}}': "0",
            f"hpml_job_io_syscall_write_bytes_total{{{JOB}}}": "0+60e9",
        },
    ),
}


def minutes(duration: str) -> int:
    return int(duration.removesuffix("m") or 0)


def scene(alert: str, which: int) -> dict[str, Any]:
    """One promtool test; each alert has to fire, or not, once, and all others are looked at too."""
    values = CONSTANT | {name: pair[which] for name, pair in CASES[alert].items()}
    wait = minutes(ALERTS[alert].get("for", "0m"))
    whose = ',user="ada",partition="gpu",name="images"' if alert in OF_JOBS else ""
    firing = f'count(ALERTS{{alertname="{alert}",alertstate="firing"{whose}}}) or vector(0)'
    times = {f"{wait + 15}m": 1 - which}
    if wait > 5:
        times[f"{wait - 5}m"] = 0
    return {
        "interval": "1m",
        "input_series": [
            {"series": name, "values": f"{value}x{STEPS}" if value != "_" else "_"}
            for name, value in values.items()
        ],
        "promql_expr_test": [
            {"expr": firing, "eval_time": time, "exp_samples": [{"labels": "{}", "value": count}]}
            for time, count in times.items()
        ],
    }


def test_alerts_fire_when_they_should(promtool: Promtool, tmp_path: Path) -> None:
    """On a value that calls for somebody, after their time, and never on a good one."""
    assert set(CASES) == set(ALERTS)
    files = [str(path) for path in sorted(RULES.glob("hpml*.yml"))]
    tests = [scene(alert, which) for alert in CASES for which in (0, 1)]
    path = tmp_path / "test.yml"
    path.write_text(json.dumps({"rule_files": files, "tests": tests}))
    done = promtool("test", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


def quiet(alerts: tuple[str, ...], series: dict[str, str]) -> dict[str, Any]:
    """One promtool test: none of these alerts fires in two hours of an ordinary day."""
    names = "|".join(alerts)
    fired = f'count_over_time(ALERTS{{alertname=~"{names}",alertstate="firing"}}[130m])'
    return {
        "interval": "1m",
        "input_series": [
            {"series": name, "values": f"{values}x{STEPS}" if values[-1].isdigit() else values}
            for name, values in (CONSTANT | series).items()
        ],
        "promql_expr_test": [
            {
                "expr": f"count({fired}) or vector(0)",
                "eval_time": "130m",
                "exp_samples": [{"labels": "{}", "value": 0}],
            }
        ],
    }


def test_alerts_are_silent_on_ordinary_days(promtool: Promtool, tmp_path: Path) -> None:
    """Nobody is called for what is planned, usual or already explained."""
    files = [str(path) for path in sorted(RULES.glob("hpml*.yml"))]
    path = tmp_path / "test.yml"
    tests = [quiet(*day) for day in QUIET.values()]
    path.write_text(json.dumps({"rule_files": files, "tests": tests}))
    done = promtool("test", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


FIRST_SEEN: dict[str, dict[str, str]] = {
    "GpuPcieDegraded": {  # one of eight: a riser that does not sit
        f'hpml_gpu_pcie_link_width{{{ON},uuid="G{gpu}"}}': "8" if gpu == 3 else "16"
        for gpu in range(8)
    },
    "JobsEndedOutOfMemory": {  # the counter appears with the first such job of its partition
        'hpml_slurm_jobs_ended_total{partition="a",state="out_of_memory"}': "_x60 1",
        "hpml_slurm_last_refresh_timestamp_seconds": "0+60",
    },
}


@pytest.mark.parametrize("alert", FIRST_SEEN)
def test_what_was_so_when_it_was_first_seen(alert: str, promtool: Promtool, tmp_path: Path) -> None:
    """Values without a change, which nothing before them shows to be new."""
    test = quiet((alert,), FIRST_SEEN[alert])
    test["promql_expr_test"][0]["exp_samples"][0]["value"] = 1
    path = tmp_path / "test.yml"
    path.write_text(json.dumps({"rule_files": [str(RULES / "hpml-alerts.yml")], "tests": [test]}))
    done = promtool("test", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("looks", [True, False], ids=["looks", "--no-gpu"])
def test_a_node_without_any_gpu_has_fewer_than_slurm(
    *, looks: bool, promtool: Promtool, tmp_path: Path
) -> None:
    """A node whose exporter looks for GPUs in vain lacks all of them."""
    expected = [{"labels": '{cluster="main",node="n1"}', "value": 8}] if looks else []
    series = CONSTANT | {
        'hpml_slurm_node_gpus{node="n1",instance="s1"}': "8",
        f'hpml_exporter_collector_present{{{ON},collector="gpu"}}': "0" if looks else "_",
    }
    test = {
        "input_series": [{"series": name, "values": value} for name, value in series.items()],
        "promql_expr_test": [
            {
                "expr": ALERTS["GpusFewerThanInSlurm"]["expr"],
                "eval_time": "0m",
                "exp_samples": expected,
            }
        ],
    }
    path = tmp_path / "test.yml"
    path.write_text(json.dumps({"tests": [test]}))
    done = promtool("test", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("alert", "finding", "level"),
    [
        ("TrainingWaitsForData", "waits-for-data", "critical"),
        ("TrainingRanksUneven", "slow-rank", "critical"),
        ("JobMemoryNearLimit", "memory-pressure", "critical"),
        ("GpuThrottled", "throttled", "warn"),  # for administrators, not for the user
    ],
)
def test_the_limits_are_those_of_reports(alert: str, finding: str, level: str) -> None:
    """A figure that reports judge too has its limit from their table, in each part of the rule."""
    limits = re.findall(r"(?<=[>=] )(0\.[0-9]+)\b", ALERTS[alert]["expr"])
    assert {float(limit) for limit in limits} == {getattr(THRESHOLDS[finding], level)}


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_says_what_to_do(alert: str) -> None:
    """Its severity, what happened in one sentence, and what to do first."""
    rule = ALERTS[alert]
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert set(rule["annotations"]) == {"summary", "runbook"}
    assert all(text.endswith(".") for text in rule["annotations"].values())
