"""The dashboard of a cluster: its queue, how its GPUs are used, and by whom they are wasted."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from hpml_dashboards.panels import (
    FAULTS,
    HIGH_IS_GOOD,
    Column,
    build_dashboard,
    figure,
    lines,
    link,
    listing,
    select,
)

__all__ = ["cluster"]

_ALL = '{cluster="$cluster"}'
_WORST = f"topk(25, hpml:job_gpus_wasted:sum{_ALL} > 0.5)"
_NOT_IN_USE = "~down|drained|draining|fail.*|error|maint|reboot.*|unknown|no_respond.*"


def _slurm(metric: str, **labels: str) -> str:
    """Return a metric of the Slurm exporter, whose targets may have no label for the cluster."""
    return select(metric, cluster="~$cluster|", **labels)


def _wait(share: float, by: str = "le") -> str:
    """Return the wait that this share of the jobs stayed below, of those that started lately."""
    return f"histogram_quantile({share}, sum by ({by}) (rate({_slurm('hpml_slurm_job_wait_seconds_bucket')}[30m])))"


_FIRST_SCREEN = [
    figure(
        "GPUs allocated",
        "Share of the GPUs that jobs have. High is good. Low with pending jobs: look at the "
        "reasons for pending and at nodes that are down.",
        "percentunit",
        f"sum(hpml:node_gpus_allocated:count{_ALL}) / sum(hpml:node_gpus:count{_ALL})",
    ),
    figure(
        "Allocated GPUs active",
        "Share of time in which GPUs that jobs have ran a kernel. Good: above 60 %. If lower, ask "
        "the owners of the jobs below, the largest waste first.",
        "percentunit",
        f"sum(hpml:job_gpus_busy:rate5m{_ALL}) / sum(hpml:job_gpus:count{_ALL})",
        steps=HIGH_IS_GOOD,
    ),
    figure(
        "GPUs wasted",
        "Allocated GPUs less those that are busy, in whole GPUs. Good: near 0.",
        "short",
        f"sum(hpml:job_gpus_wasted:sum{_ALL})",
        steps=((None, "text"),),
    ),
    figure(
        "Jobs running",
        "Jobs that run now, in all partitions.",
        "short",
        f"sum({_slurm('hpml_slurm_jobs', state='~running|completing')})",
    ),
    figure(
        "Jobs pending",
        "Jobs that wait. Some are healthy; a growing number with idle GPUs is not.",
        "short",
        f"sum({_slurm('hpml_slurm_jobs', state='pending')}) or vector(0)",
    ),
    figure(
        "Median wait",
        "Half of the jobs that started in the last 30 minutes waited less than this.",
        "s",
        _wait(0.5),
        none="none started",
    ),
    figure(
        "Nodes out of use",
        "Nodes that are down or drained. Good: 0. The reasons stand below.",
        "short",
        f"sum({_slurm('hpml_slurm_nodes', state=_NOT_IN_USE)}) or vector(0)",
        steps=FAULTS,
    ),
    figure(
        "GPU power",
        "Power that all GPUs draw.",
        "watt",
        f"sum(hpml:node_gpu_power_watts:sum{_ALL})",
    ),
    lines(
        "GPUs",
        "GPUs that are busy, allocated but not busy, and idle. Good: mostly busy. Much unused: see "
        "the table; much idle with pending jobs: see the reasons.",
        "short",
        {
            "busy": f"sum(hpml:job_gpus_busy:rate5m{_ALL})",
            "unused": f"sum(hpml:job_gpus_wasted:sum{_ALL})",
            "idle": f"sum(hpml:node_gpus:count{_ALL}) - sum(hpml:node_gpus_allocated:count{_ALL})",
        },
        width=12,
        stacked=True,
    ),
    lines(
        "Queue",
        "Jobs that run and that wait.",
        "short",
        {
            "running": f"sum({_slurm('hpml_slurm_jobs', state='~running|completing')})",
            "pending": f"sum({_slurm('hpml_slurm_jobs', state='pending')}) or vector(0)",
        },
        width=6,
    ),
    lines(
        "Wait for the start",
        "Waits that 50 % and 90 % of the jobs stayed below, of those that started in the last 30 "
        "minutes. Rising waits with idle GPUs: look at limits and priorities.",
        "s",
        {"50 %": _wait(0.5), "90 %": _wait(0.9)},
        width=6,
        none="No job started",
    ),
    listing(
        "Jobs that waste most GPUs",
        "Running jobs by the GPUs that they have but keep idle. Open one to see what it waits for.",
        [
            f"{_WORST} * on (cluster, jobid) group_left (user, account, partition, name) "
            "hpml:job_info",
            f"hpml:job_gpus:count{_ALL} and on (cluster, jobid) {_WORST}",
            f"hpml:job_gpus_busy:rate5m{_ALL} / hpml:job_gpus:count{_ALL} "
            f"and on (cluster, jobid) {_WORST}",
            f"hpml:job_data_wait:ratio{_ALL} and on (cluster, jobid) {_WORST}",
        ],
        [
            Column("jobid", "Job", link=link("hpml-job", jobid="${__value.raw}"), width=90),
            Column("user", "User", link=link("hpml-user", user="${__value.raw}")),
            Column("account", "Account"),
            Column("partition", "Partition"),
            Column("name", "Name"),
            Column("B", "GPUs", width=70),
            Column("C", "GPU active", "percentunit", HIGH_IS_GOOD, bar=True),
            Column("D", "Data wait", "percentunit", width=100),
            Column("A", "Wasted", width=90),
        ],
        width=16,
        height=10,
        sort="Wasted",
        none="No job wastes GPUs",
    ),
    listing(
        "Partitions",
        "GPUs of each partition. A node may be in several partitions, which all count it.",
        [
            f"sum by (partition) ({_slurm('hpml_slurm_partition_gpus', state='allocated')})",
            f"sum by (partition) ({_slurm('hpml_slurm_partition_gpus', state='idle')})",
            f"sum by (partition) ({_slurm('hpml_slurm_partition_gpus', state='down')})",
            f"sum by (partition) (hpml:partition_gpus_wasted:sum{_ALL})",
            f"sum by (partition) ({_slurm('hpml_slurm_jobs', state='pending')})",
        ],
        [
            Column("partition", "Partition"),
            Column("A", "Allocated", width=90),
            Column("B", "Idle", width=60),
            Column("C", "Down", steps=FAULTS, width=70),
            Column("D", "Wasted", width=80),
            Column("E", "Pending jobs", width=100),
        ],
        width=8,
        height=10,
    ),
]

_NODES = [
    "Nodes",
    listing(
        "Nodes with the most idle GPUs",
        "Allocated GPUs less busy ones, on each node. Open one to see its jobs.",
        [
            f"topk(25, hpml:node_gpus_allocated:count{_ALL} - hpml:node_gpus_busy:sum{_ALL})",
            f"hpml:node_gpus_allocated:count{_ALL}",
            f"hpml:node_gpus:count{_ALL}",
            f"hpml:node_gpus_busy:sum{_ALL} / hpml:node_gpus:count{_ALL}",
            f"hpml:node_gpu_power_watts:sum{_ALL}",
        ],
        [
            Column("node", "Node", link=link("hpml-node", node="${__value.raw}")),
            Column("C", "GPUs", width=70),
            Column("B", "Allocated", width=100),
            Column("D", "GPU active", "percentunit", HIGH_IS_GOOD, bar=True),
            Column("E", "GPU power", "watt", width=110),
            Column("A", "Wasted", width=90),
        ],
        width=12,
        height=8,
        sort="Wasted",
    ),
    listing(
        "Nodes that need somebody",
        "Why nodes are down or drained, in the words of whoever drained them.",
        [_slurm("hpml_slurm_node_reason_info")],
        [
            Column("node", "Node", link=link("hpml-node", node="${__value.raw}"), width=140),
            Column("state", "State", width=120),
            Column("reason", "Reason"),
        ],
        width=12,
        height=8,
        none="No node is down or drained",
    ),
    lines(
        "Nodes by state",
        "Nodes as Slurm sees them. Good: allocated, mixed or idle.",
        "short",
        {"{{state}}": f"sum by (state) ({_slurm('hpml_slurm_nodes')})"},
    ),
    lines(
        "CPUs",
        "CPUs that are allocated, idle, and down with their node.",
        "short",
        {
            name: f"sum({_slurm('hpml_slurm_cpus', state=name)})"
            for name in ("allocated", "idle", "down")
        },
        stacked=True,
    ),
    lines(
        "Memory",
        "Memory that is allocated, idle, and down with its node.",
        "bytes",
        {
            name: f"sum({_slurm('hpml_slurm_memory_bytes', state=name)})"
            for name in ("allocated", "idle", "down")
        },
        stacked=True,
    ),
]

_QUEUE = [
    "Queue and scheduler",
    lines(
        "Pending by reason",
        "Why jobs wait. Resources and Priority are normal; others are limits, dependencies or "
        "mistakes of the users.",
        "short",
        {"{{reason}}": f"sum by (reason) ({_slurm('hpml_slurm_jobs_pending')})"},
        none="No job is pending",
    ),
    lines(
        "Wait by partition",
        "Wait that 90 % of the jobs stayed below, of those that started in the last 30 minutes.",
        "s",
        {"{{partition}}": _wait(0.9, "le, partition")},
        none="No job started",
    ),
    lines(
        "Jobs ended",
        "Jobs that ended in each minute, by how. Many failed or timed out at once: a file system "
        "or a node is ill.",
        "short",
        {
            "{{state}}": "60 * sum by (state) (rate("
            + _slurm("hpml_slurm_jobs_ended_total")
            + "[$__rate_interval]))"
        },
    ),
    lines(
        "Scheduler cycles",
        "How long the last main and backfill cycles took. Good: seconds. Minutes: too many pending "
        "jobs or partitions, see bf_max_job_test.",
        "s",
        {
            "main": _slurm("hpml_slurm_scheduler_cycle_seconds"),
            "backfill": _slurm("hpml_slurm_scheduler_backfill_cycle_seconds"),
        },
    ),
    lines(
        "Controller load",
        "Threads of slurmctld and messages that wait, also for slurmdbd. Good: small and steady.",
        "short",
        {
            "threads": _slurm("hpml_slurm_scheduler_threads"),
            "messages": _slurm("hpml_slurm_scheduler_agent_queue"),
            "for slurmdbd": _slurm("hpml_slurm_scheduler_dbd_queue"),
        },
    ),
    listing(
        "Licences and reservations",
        "Licences in use, and reservations with their nodes.",
        [
            f"sum by (license) ({_slurm('hpml_slurm_licenses_used')})",
            f"sum by (license) ({_slurm('hpml_slurm_licenses')})",
            f"sum by (reservation) ({_slurm('hpml_slurm_reservation_nodes')})",
            f"1000 * max by (reservation) "
            f"({_slurm('hpml_slurm_reservation_start_timestamp_seconds')})",
            f"1000 * max by (reservation) "
            f"({_slurm('hpml_slurm_reservation_end_timestamp_seconds')})",
        ],
        [
            Column("license", "Licence"),
            Column("A", "Used"),
            Column("B", "Of"),
            Column("reservation", "Reservation"),
            Column("C", "Nodes"),
            Column("D", "From", "dateTimeAsIso"),
            Column("E", "To", "dateTimeAsIso"),
        ],
        width=8,
        none="No licences or reservations",
    ),
]


def cluster() -> Dashboard:
    """Return the dashboard."""
    return build_dashboard(
        "hpml-cluster",
        "Cluster",
        "The whole cluster: GPUs allocated, busy and wasted, the queue, and nodes in trouble.",
        [],
        [*_FIRST_SCREEN, *_NODES, *_QUEUE],
        since="now-3h",
    )
