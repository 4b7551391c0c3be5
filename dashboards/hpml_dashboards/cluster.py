"""The dashboard of a cluster: its queue, how its GPUs are used, and by whom they are wasted."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from hpml_dashboards.panels import (
    BYTES,
    COUNT,
    FAULTS,
    SECONDS,
    SHARE,
    TIME,
    USE,
    WAIT,
    WATTS,
    build_dashboard,
    figure,
    lines,
    listing,
    select,
)

__all__ = ["cluster"]

_ALL = '{cluster="$cluster"}'
_NOT_IN_USE = "~down|drained|draining|fail.*|error|maint|reboot.*|unknown|no_respond.*"


def _slurm(metric: str, **labels: str) -> str:
    """Return a metric of the Slurm exporter, whose targets may have no label for the cluster."""
    return select(metric, cluster="~$cluster|", **labels)


def _sum(metric: str, by: str = "", **labels: str) -> str:
    return f"sum by ({by}) ({_slurm(metric, **labels)})"


def _wait(share: float, by: str = "le") -> str:
    """Return the wait that this share of the jobs stayed below, of those that started lately."""
    waits = _slurm("hpml_slurm_job_wait_seconds_bucket")
    return f"histogram_quantile({share}, sum by ({by}) (rate({waits}[30m])))"


_RUNNING = _sum("hpml_slurm_jobs", state="~running|completing")
_PENDING = f"{_sum('hpml_slurm_jobs', state='pending')} or vector(0)"
_JOB_BUSY = f"hpml:job_gpus_busy:rate5m{_ALL} / hpml:job_gpus:count{_ALL}"
_BUSY = f"sum(hpml:job_gpus_busy:rate5m{_ALL})"
_ALLOCATED = f"sum(hpml:node_gpus_allocated:count{_ALL})"
_TOTAL = f"sum(hpml:node_gpus:count{_ALL})"
_WORST = f"topk(25, hpml:job_gpus_wasted:sum{_ALL} > 0.5)"
_OF_WORST = f"and on (cluster, jobid) {_WORST}"
_NODE_WASTE = f"hpml:node_gpus_allocated:count{_ALL} - hpml:node_gpus_busy:sum{_ALL}"
_OF_NODES = f"and on (cluster, node) topk(25, {_NODE_WASTE})"

_CONTENT = [
    figure(
        "GPUs allocated",
        SHARE,
        f"{_ALLOCATED} / {_TOTAL}",
        "Share of the GPUs that jobs have. High is good. Low with pending jobs: look at the "
        "reasons for pending and at nodes that are down.",
    ),
    figure(
        "GPU active",
        USE,
        f"{_BUSY} / sum(hpml:job_gpus:count{_ALL})",
        "Share of time with a kernel on the GPUs that jobs have. Good: above 60 %. If lower, ask "
        "the owners of the jobs below, the largest waste first.",
    ),
    figure(
        "GPUs wasted",
        COUNT,
        f"sum(hpml:job_gpus_wasted:sum{_ALL})",
        "Allocated GPUs less busy ones, in whole GPUs. Good: near 0. The table has the jobs.",
    ),
    figure(
        "Jobs running",
        COUNT,
        _RUNNING,
        "Jobs that run, in all partitions. A sudden drop: a file system or a switch.",
        none="no exporter",
    ),
    figure(
        "Jobs pending",
        COUNT,
        _PENDING,
        "Jobs that wait. Some are healthy; a growing number beside idle GPUs is not.",
    ),
    figure(
        "Median wait",
        SECONDS,
        _wait(0.5),
        "Half of the jobs that started in the last 30 minutes waited less. Rising: see the queue.",
        none="none started",
    ),
    figure(
        "Nodes down",
        FAULTS,
        f"{_sum('hpml_slurm_nodes', state=_NOT_IN_USE)} or vector(0)",
        "Nodes that are down or drained. Good: 0. The reasons stand below.",
    ),
    figure(
        "GPU power",
        WATTS,
        f"sum(hpml:node_gpu_power_watts:sum{_ALL})",
        "Power that all GPUs draw. Compare with what cooling and supply allow.",
    ),
    lines(
        "GPUs",
        COUNT,
        {
            "busy": _BUSY,
            "unused": f"sum(hpml:job_gpus_wasted:sum{_ALL})",
            "idle": f"{_TOTAL} - {_ALLOCATED}",
        },
        "GPUs that are busy, allocated but unused, and idle. Good: mostly busy. Much unused: see "
        "the table. Much idle beside pending jobs: see the reasons for pending.",
        width=12,
        stacked=True,
    ),
    lines(
        "Queue",
        COUNT,
        {"running": _RUNNING, "pending": _PENDING},
        "Jobs that run and that wait. Pending rises while running stays: the cluster is full.",
        width=6,
    ),
    lines(
        "Wait for the start",
        SECONDS,
        {"50 %": _wait(0.5), "90 %": _wait(0.9)},
        "Waits that half and nine tenths of the jobs stayed below, of those that started in the "
        "last 30 minutes. Rising beside idle GPUs: look at limits and priorities.",
        width=6,
        none="No job started",
    ),
    listing(
        "Jobs that waste most GPUs",
        "jobid user partition name",
        {
            "GPUs": (COUNT, f"hpml:job_gpus:count{_ALL} {_OF_WORST}"),
            "GPU active": (USE, f"{_JOB_BUSY} {_OF_WORST}"),
            "Data wait": (WAIT, f"hpml:job_data_wait:ratio{_ALL} {_OF_WORST}"),
            "Wasted": (
                COUNT,
                f"{_WORST} * on (cluster, jobid) group_left (user, partition, name) hpml:job_info",
            ),
        },
        "Running jobs by GPUs that they have but keep idle. Open one to see what it waits for.",
        width=15,
        sort="Wasted",
        none="No job wastes GPUs",
    ),
    listing(
        "Partitions",
        "partition",
        {
            "Allocated": (COUNT, _sum("hpml_slurm_partition_gpus", "partition", state="allocated")),
            "Idle": (COUNT, _sum("hpml_slurm_partition_gpus", "partition", state="idle")),
            "Down": (FAULTS, _sum("hpml_slurm_partition_gpus", "partition", state="down")),
            "Wasted": (COUNT, f"sum by (partition) (hpml:partition_gpus_wasted:sum{_ALL})"),
            "Pending": (COUNT, _sum("hpml_slurm_jobs", "partition", state="pending")),
        },
        "GPUs of each partition, and its pending jobs. A node in several partitions counts in each. "
        "Idle beside pending: look at limits; much wasted: at its jobs.",
        width=9,
        sort="Allocated",
    ),
    "Nodes",
    listing(
        "Nodes with the most waste",
        "node",
        {
            "GPUs": (COUNT, f"hpml:node_gpus:count{_ALL} {_OF_NODES}"),
            "Allocated": (COUNT, f"hpml:node_gpus_allocated:count{_ALL} {_OF_NODES}"),
            "GPU active": (
                USE,
                f"hpml:node_gpus_busy:sum{_ALL} / hpml:node_gpus:count{_ALL} {_OF_NODES}",
            ),
            "GPU power": (WATTS, f"hpml:node_gpu_power_watts:sum{_ALL} {_OF_NODES}"),
            "Wasted": (COUNT, f"topk(25, {_NODE_WASTE})"),
        },
        "Allocated GPUs less busy ones, on each node. Open one to see its jobs.",
        sort="Wasted",
    ),
    listing(
        "Nodes that need somebody",
        "node state reason",
        {"": (COUNT, _slurm("hpml_slurm_node_reason_info"))},
        "Why nodes are down or drained, in the words of whoever drained them. Good: none.",
        none="No node is down or drained",
    ),
    lines(
        "Nodes by state",
        COUNT,
        {"{{state}}": _sum("hpml_slurm_nodes", "state")},
        "Nodes as Slurm sees them. Good: allocated, mixed or idle.",
    ),
    lines(
        "CPUs",
        COUNT,
        {name: _sum("hpml_slurm_cpus", state=name) for name in ("allocated", "idle", "down")},
        "CPUs that are allocated, idle, or down with their node. Idle GPUs without idle CPUs "
        "cannot be allocated: lower the CPUs per GPU.",
        stacked=True,
    ),
    lines(
        "Memory",
        BYTES,
        {
            name: _sum("hpml_slurm_memory_bytes", state=name)
            for name in ("allocated", "idle", "down")
        },
        "Memory that is allocated, idle, or down with its node. As with CPUs, it can run out first.",
        stacked=True,
    ),
    "Queue and scheduler",
    lines(
        "Pending by reason",
        COUNT,
        {"{{reason}}": _sum("hpml_slurm_jobs_pending", "reason")},
        "Why jobs wait. Resources and Priority are normal; others are limits, dependencies or "
        "mistakes.",
        none="No job is pending",
    ),
    lines(
        "Wait by partition",
        SECONDS,
        {"{{partition}}": _wait(0.9, "le, partition")},
        "Wait that nine tenths of the jobs stayed below, of those that started in the last 30 "
        "minutes. One much longer: move nodes, or lower its limits.",
        none="No job started",
    ),
    lines(
        "Jobs ended",
        COUNT,
        {
            "{{state}}": "60 * sum by (state) "
            f"(rate({_slurm('hpml_slurm_jobs_ended_total')}[$__rate_interval]))"
        },
        "Jobs that ended in each minute. Many failed or timed out at once: a file system or node.",
    ),
    lines(
        "Scheduler cycles",
        SECONDS,
        {
            "main": _slurm("hpml_slurm_scheduler_cycle_seconds"),
            "backfill": _slurm("hpml_slurm_scheduler_backfill_cycle_seconds"),
        },
        "How long the last cycles took. Good: seconds. Minutes: too many pending jobs or "
        "partitions, see bf_max_job_test.",
    ),
    lines(
        "Controller",
        COUNT,
        {
            "threads": _slurm("hpml_slurm_scheduler_threads"),
            "messages": _slurm("hpml_slurm_scheduler_agent_queue"),
            "for slurmdbd": _slurm("hpml_slurm_scheduler_dbd_queue"),
        },
        "Threads of slurmctld, and messages that wait. Good: small and steady. Many for slurmdbd: "
        "its database is slow or down.",
    ),
    listing(
        "Licences, reservations",
        "license reservation",
        {
            "Used": (COUNT, _sum("hpml_slurm_licenses_used", "license")),
            "Of": (COUNT, _sum("hpml_slurm_licenses", "license")),
            "Nodes": (COUNT, _sum("hpml_slurm_reservation_nodes", "reservation")),
            "From": (
                TIME,
                "1000 * max by (reservation) ("
                + _slurm("hpml_slurm_reservation_start_timestamp_seconds")
                + ")",
            ),
            "To": (
                TIME,
                "1000 * max by (reservation) ("
                + _slurm("hpml_slurm_reservation_end_timestamp_seconds")
                + ")",
            ),
        },
        "Licences in use, and reservations. A reservation ahead keeps nodes idle before it begins.",
        width=8,
        none="No licences or reservations",
    ),
]


def cluster() -> Dashboard:
    """Return the dashboard."""
    return build_dashboard(
        "hpml-cluster",
        "The whole cluster: GPUs allocated, busy and wasted, the queue, and nodes in trouble.",
        [],
        _CONTENT,
        since="now-3h",
    )
