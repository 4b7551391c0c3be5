"""The dashboard of a cluster: its queue, the use of its GPUs, and who wastes them."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from hpml_dashboards.panels import (
    Panel,
    build_dashboard,
    figure,
    lines,
    listing,
    or_zero,
    select,
    unmeasured,
)

_ALL = '{cluster="$cluster"}'
_NOT_IN_USE = "~down|drained|draining|fail.*|error|maint|reboot.*|unknown|no_respond.*"


def _slurm(metric: str, **labels: str) -> str:
    # The Slurm exporter sets no label `cluster`; Prometheus may add one. The empty alternative
    # matches series without it.
    return select(f"hpml_slurm_{metric}", cluster="~$cluster|", **labels)


def _sum(metric: str, by: str = "", **labels: str) -> str:
    return f"sum by ({by}) ({_slurm(metric, **labels)})"


def _wait(share: float, by: str = "le") -> str:
    """Return this quantile of the waiting times of recently started jobs.

    If no job started, use all jobs since the exporter started: a partition's first jobs have no
    rate.
    """
    waits = _slurm("job_wait_seconds_bucket")
    of = (f"rate({waits}[30m])", waits)
    # A quantile of no observations is NaN, which is a value: without the comparison `or` would
    # never reach the second operand.
    waited = (f"histogram_quantile({share}, sum by ({by}) ({one})) >= 0" for one in of)  # not NaN
    return " or ".join(waited)


_NODES = _slurm("nodes")
_REMEDY = "start hpml export slurm"
_NO_SLURM = unmeasured(_REMEDY)
_RULES = "hpml:alerts_loaded"
_NO_RULES = "load hpml-alerts.yml in Prometheus"
_PENDING = or_zero(_sum("queue_jobs", state="pending"), _NODES)
_RUNNING = or_zero(_sum("queue_jobs", state="~running|completing"), _NODES)
# Use recorded sums: the cost of this dashboard must not grow with the number of nodes.
_GPUS = f"hpml:cluster_gpus:count{_ALL}"
_BUSY = f"sum(hpml:cluster_gpus_busy:sum{_ALL})"
_ALLOCATED = or_zero(f"sum(hpml:cluster_gpus_allocated:sum{_ALL})", _GPUS)
_WASTED = or_zero(f"sum(hpml:cluster_gpus_wasted:sum{_ALL})", _GPUS)
_TOTAL = f"sum({_GPUS})"
# A job cannot use a failed GPU, so that is not waste.
_BROKEN = f"hpml:gpu_job{_ALL} and on (uuid) hpml_gpu_up == 0"
_WORST = f"topk(25, hpml:job_gpus_wasted:sum{_ALL} > 0.5 unless on (cluster, jobid) ({_BROKEN}))"
_OF_WORST = f"and on (cluster, jobid) {_WORST}"
_WHOSE = "* on (cluster, jobid) group_left (array, user, partition, name) hpml:job_info"
_HELD = f"hpml:job_holdback:ratio{_ALL}"
_GPUS_OF = f"hpml:job_gpus:count{_ALL}"
_NODE_WASTE = f"hpml:node_gpus_allocated:count{_ALL} - hpml:node_gpus_busy:sum{_ALL}"
_OF_NODES = f"and on (cluster, node) topk(25, {_NODE_WASTE})"

_FIRING = {"alertstate": "firing", "cluster": "~$cluster|"}
_ABOUT = """
Allocated: Share of the GPUs that jobs have. High is good. Low with pending jobs: look at the
    reasons for pending and at nodes that are down.
GPU active: Share of time with a kernel on the GPUs that jobs have. Good: above 60 %. If lower,
    ask the owners of the jobs below, the largest waste first.
GPUs wasted: Allocated GPUs less busy ones, in whole GPUs. Good: near 0. The table has the jobs.
Jobs running: Jobs that run, in all partitions. A sudden drop: a file system or a switch.
Jobs pending: Jobs that wait. Some are healthy; a growing number while GPUs are idle is not.
Median wait: Half of the jobs that started in the last 30 minutes waited less; if none did, of those
    since the exporter started. Rising: see the queue. -: none has started.
Nodes down: Nodes that are down or drained. Good: 0. The reasons stand below.
GPU power: Power that all GPUs draw. Compare with what cooling and supply allow.
Hardware faults: Alerts that fire in Prometheus: lost, hot and failing GPUs, links, full disks.
    Good: none. Drain the node first; each alert's runbook has the next step.
Other alerts: The rest of hpml-alerts.yml. They need the rules in Prometheus, not only in Grafana.
GPUs: GPUs that are busy, allocated but unused, and idle. Good: mostly busy. Much unused: see the
    table. Many idle while jobs are pending: see the reasons for pending.
Queue: Jobs that run and that wait. Pending rises while running stays: the cluster is full.
Wait for the start: Waits that half and nine tenths of the jobs stayed below, of those that
    started in the last 30 minutes; if none did, of those since the exporter started. Rising while
    GPUs are idle: look at limits and priorities.
Jobs by what holds them back: Running jobs with each finding of hpml report, and the GPUs that
    they have; a job may have several. Many with one: storage, a node type or a habit to look at.
Jobs that waste most GPUs: Running jobs by GPUs that they keep idle. Open one to see why.
Partitions: GPUs of each partition's nodes, and its jobs. A node in several partitions counts in
    each. Off: powered down, Slurm starts them when a job needs them. By its jobs is what the
    partition's own jobs have. Idle and pending: look at limits.
Nodes with the most waste: Allocated GPUs less busy ones, on each node. Open one to see its jobs.
Nodes that need somebody: Nodes that are down, and the reason that Slurm reports. Good: none.
Nodes by state: Nodes as Slurm sees them. Good: allocated, mixed or idle.
Pending by reason: Resources and Priority are normal; others are limits, dependencies, mistakes.
Jobs ended: In each minute. Many failed or timed out at once: a file system or a node.
GPUs in Slurm: GPUs by what Slurm has of them. Idle with pending jobs: see the reasons. Down: see
    the nodes that need somebody.
CPUs in Slurm: CPUs likewise. None idle with idle GPUs: jobs ask for too many CPUs per GPU.
Scheduler cycles: Good: seconds. Minutes: too many pending jobs, see bf_max_job_test.
Controller: Threads of slurmctld at work, and messages that wait. Good: few. Those to slurmdbd grow
    while it is away: start it before jobs' records are lost.
Reservations: Jobs whose time limit reaches into one do not start on its nodes.
Licences: All in use with pending jobs: jobs wait for a licence, not for GPUs.
"""

_CONTENT: list[Panel | str] = [
    figure("Allocated", "share", f"{_ALLOCATED} / {_TOTAL}"),
    figure("GPU active", "use", f"{_BUSY} / {_ALLOCATED}"),
    figure("GPUs wasted", "amount", _WASTED),
    figure("Jobs running", "count", _RUNNING, none="not measured"),
    figure("Jobs pending", "count", _PENDING, none="not measured"),
    figure("Median wait", "seconds", _wait(0.5)),
    figure(
        "Nodes down",
        "faults",
        or_zero(_sum("nodes", state=_NOT_IN_USE), _NODES),
        none="not measured",
    ),
    figure("GPU power", "watts", f"sum(hpml:cluster_gpu_power_watts:sum{_ALL})"),
    listing(
        "Hardware faults",
        "alertname node uuid device mountpoint severity",
        {"-": select("ALERTS", category="hardware", **_FIRING)},
        width=12,
        none="No alert fires",
        source=_RULES,
        remedy=_NO_RULES,
    ),
    lines(
        "GPUs",
        "count",
        {"busy": _BUSY, "wasted": _WASTED, "idle": f"{_TOTAL} - {_ALLOCATED}"},
        width=6,
        stacked=True,
    ),
    lines(
        "Queue",
        "count",
        {"running": _RUNNING, "pending": _PENDING},
        width=6,
        none=_NO_SLURM,
    ),
    listing(
        "Jobs that waste most GPUs",
        "jobid array user partition name",
        {
            "GPUs": f"max by (jobid) (hpml:job_gpus:count{_ALL} {_OF_WORST})",
            "GPU active": f"max by (jobid) (hpml:job_gpu_busy:avg{_ALL} {_OF_WORST})",
            "Data wait": f"max by (jobid) (hpml:job_data_wait:ratio{_ALL} {_OF_WORST})",
            "Wasted": f"{_WORST} {_WHOSE}",
        },
        width=16,
        height=10,
        sort="Wasted",
    ),
    listing(
        "Jobs by what holds them back",
        "finding",
        {
            "Jobs": f"count by (finding) ({_HELD})",
            # A job may have several findings. `* 0 +` puts the number of its GPUs in the place of
            # each finding's own figure.
            "GPUs": "sum by (finding) "
            f"({_HELD} * 0 + on (cluster, jobid) group_left () {_GPUS_OF})",
        },
        width=8,
        height=10,
        sort="Jobs",
        none="Nothing found",
        source=_GPUS_OF,
        remedy="no job has GPUs",
    ),
    "Nodes and queue",
    listing(
        "Other alerts",
        "alertname node jobid instance partition severity",
        {"-": select("ALERTS", category="", **_FIRING)},
        none="No alert fires",
        source=_RULES,
        remedy=_NO_RULES,
    ),
    listing(
        "Partitions",
        "partition",
        {
            "Used": _sum("partition_gpus", "partition", state="allocated"),
            "Idle": _sum("partition_gpus", "partition", state="idle"),
            "Down": _sum("partition_gpus", "partition", state="down"),
            "Off": _sum("partition_gpus", "partition", state="powered_down"),
            "By its jobs": f"max by (partition) (hpml:partition_gpus_allocated:sum{_ALL})",
            "Wasted": f"max by (partition) (hpml:partition_gpus_wasted:sum{_ALL})",
            "Pending": _sum("jobs", "partition", state="pending"),
        },
        width=12,
        sort="By its jobs",
    ),
    listing(
        "Nodes with the most waste",
        "node",
        {
            "GPUs": f"max by (node) (hpml:node_gpus:count{_ALL} {_OF_NODES})",
            "Allocated": f"max by (node) (hpml:node_gpus_allocated:count{_ALL} {_OF_NODES})",
            "GPU active": f"hpml:node_gpus_busy:sum{_ALL} / hpml:node_gpus:count{_ALL} {_OF_NODES}",
            "GPU power": f"max by (node) (hpml:node_gpu_power_watts:sum{_ALL} {_OF_NODES})",
            "Wasted": f"topk(25, {_NODE_WASTE})",
        },
        sort="Wasted",
    ),
    listing(
        "Nodes that need somebody",
        "node state reason",
        {"-": _slurm("node_reason_info", state="!~powered_down|rebooting")},
        none="No node is down",
        source=_NODES,
        remedy=_REMEDY,
    ),
    lines(
        "Nodes by state", "count", {"{{state}}": _sum("nodes", "state")}, width=8, none=_NO_SLURM
    ),
    lines(
        "Pending by reason",
        "count",
        {"{{reason}}": _sum("queue_jobs", "reason", state="pending")},
        width=8,
        none="No job is pending",
        source=_NODES,
        remedy=_REMEDY,
    ),
    lines(
        "Jobs ended",
        "count",
        {
            "{{state}}": "60 * sum by (state) "
            f"(rate({_slurm('jobs_ended_total')}[$__rate_interval]))"
        },
        width=8,
        none="None has ended",
        source=_NODES,
        remedy=_REMEDY,
    ),
    "Slurm",
    lines("GPUs in Slurm", "count", {"{{state}}": _sum("gpus", "state")}, width=6, none=_NO_SLURM),
    lines("CPUs in Slurm", "count", {"{{state}}": _sum("cpus", "state")}, width=6, none=_NO_SLURM),
    lines("Wait for the start", "seconds", {"50 %": _wait(0.5), "90 %": _wait(0.9)}, width=6),
    lines(
        "Scheduler cycles",
        "seconds",
        {
            "main": f"max({_slurm('scheduler_cycle_seconds')})",
            "backfill": f"max({_slurm('scheduler_backfill_cycle_seconds')})",
        },
        width=6,
        none=_NO_SLURM,
    ),
    lines(
        "Controller",
        "count",
        {
            "threads": f"max({_slurm('scheduler_threads')})",
            "messages to nodes": f"max({_slurm('scheduler_agent_queue')})",
            "messages to slurmdbd": f"max({_slurm('scheduler_dbd_queue')})",
        },
        none=_NO_SLURM,
    ),
    listing(
        "Reservations",
        "reservation",
        {
            # Grafana takes times in milliseconds, Prometheus has seconds.
            "Nodes": _sum("reservation_nodes", "reservation"),
            "Begins": "1000 * max by (reservation) "
            f"({_slurm('reservation_start_timestamp_seconds')})",
            "Ends": f"1000 * max by (reservation) ({_slurm('reservation_end_timestamp_seconds')})",
        },
        width=10,
        none="No reservation",
        source=_NODES,
        remedy=_REMEDY,
    ),
    listing(
        "Licences",
        "license",
        {"Total": _sum("licenses", "license"), "In use": _sum("licenses_used", "license")},
        width=6,
        none="No licences",
        source=_NODES,
        remedy=_REMEDY,
    ),
]


def cluster() -> Dashboard:
    """Return the dashboard."""
    return build_dashboard(
        "hpml-cluster",
        "The whole cluster: GPUs allocated, busy and wasted, the queue, and nodes in trouble.",
        _ABOUT,
        [],
        _CONTENT,
        since="now-3h",
    )
