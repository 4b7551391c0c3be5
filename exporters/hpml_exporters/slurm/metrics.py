"""The metrics of a cluster, with what each means."""

from __future__ import annotations

from hpml_exporters.core.metric import MetricSpec, MetricType

__all__ = ["SPECS", "STATISTICS"]


def _spec(
    name: str,
    text: str,
    labels: str = "",
    kind: MetricType = "gauge",
    unit: str = "",
    source: str = "squeue",
) -> MetricSpec:
    return MetricSpec(f"hpml_slurm_{name}", kind, text, tuple(labels.split()), unit, source)


UP = _spec(
    "up", "Whether the last refresh succeeded; if not, older figures are shown.", source="exporter"
)
AGE = _spec(
    "last_refresh_timestamp_seconds",
    "When the figures shown here were read.",
    unit="seconds",
    source="exporter",
)
DURATION = _spec(
    "refresh_duration_seconds",
    "How long the last successful refresh took.",
    unit="seconds",
    source="exporter",
)
FAILURES = _spec("refresh_failures_total", "Refreshes that failed.", "", "counter", "", "exporter")
SOURCE = _spec("source_info", "Where the figures come from.", "source", "info", "", "exporter")

JOBS = _spec("jobs", "Jobs that have not ended.", "state partition qos")
REASONS = _spec("jobs_pending", "Pending jobs by the reason that Slurm gives.", "partition reason")
USER_JOBS = _spec("user_jobs", "Jobs of a user that have not ended (--users).", "user state")
ACCOUNT_JOBS = _spec(
    "account_jobs", "Jobs of an account that have not ended (--accounts).", "account state"
)
ENDED_JOBS = _spec("jobs_ended_total", "Jobs that ended.", "partition state", "counter")
WAIT = _spec(
    "job_wait_seconds",
    "Time from being eligible to the start, of jobs that started.",
    "partition",
    "histogram",
    "seconds",
)
RUN = _spec(
    "job_run_seconds",
    "Time from the start to the end, of jobs that ended.",
    "partition",
    "histogram",
    "seconds",
)

_SINFO = "sinfo"
NODES = _spec("nodes", "Nodes by state.", "state", source=_SINFO)
PARTITION_NODES = _spec(
    "partition_nodes",
    "Nodes of a partition by state; a node may be in several.",
    "partition state",
    source=_SINFO,
)
REASON = _spec(
    "node_reason_info",
    "Why a node is drained or down.",
    "node state reason",
    "info",
    source=_SINFO,
)
CPUS = _spec("cpus", "CPUs: allocated, idle, or down with their node.", "state", source=_SINFO)
PARTITION_CPUS = _spec(
    "partition_cpus", "CPUs of a partition's nodes.", "partition state", source=_SINFO
)
MEMORY = _spec(
    "memory_bytes", "Memory: allocated, idle or down.", "state", unit="bytes", source=_SINFO
)
PARTITION_MEMORY = _spec(
    "partition_memory_bytes",
    "Memory of a partition's nodes.",
    "partition state",
    unit="bytes",
    source=_SINFO,
)
GPUS = _spec("gpus", "GPUs: allocated, idle, or down with their node.", "type state", source=_SINFO)
PARTITION_GPUS = _spec(
    "partition_gpus", "GPUs of a partition's nodes.", "partition type state", source=_SINFO
)

_SCONTROL = "scontrol"
LICENSES = _spec("licenses", "Licences that there are.", "license", source=_SCONTROL)
LICENSES_USED = _spec("licenses_used", "Licences in use.", "license", source=_SCONTROL)
RESERVATION_NODES = _spec(
    "reservation_nodes", "Nodes of a reservation.", "reservation state", source=_SCONTROL
)
RESERVATION_START = _spec(
    "reservation_start_timestamp_seconds",
    "When a reservation begins.",
    "reservation",
    unit="seconds",
    source=_SCONTROL,
)
RESERVATION_END = _spec(
    "reservation_end_timestamp_seconds",
    "When a reservation ends.",
    "reservation",
    unit="seconds",
    source=_SCONTROL,
)
FAIRSHARE = _spec(
    "user_fairshare_ratio",
    "Fairshare factor of a user, 0 to 1 (--users).",
    "account user",
    unit="ratio",
    source="sshare",
)


def _statistic(name: str, text: str, kind: MetricType = "gauge", unit: str = "") -> MetricSpec:
    return _spec(f"scheduler_{name}", text, "", kind, unit, "sdiag")


_MICRO = 1e-6
STATISTICS: dict[str, tuple[MetricSpec, float]] = {
    "server_thread_count": (_statistic("threads", "Threads of slurmctld."), 1),
    "agent_queue_size": (_statistic("agent_queue", "Messages that wait to be sent."), 1),
    "dbd_agent_queue_size": (_statistic("dbd_queue", "Messages that wait for slurmdbd."), 1),
    "jobs_submitted": (
        _statistic("jobs_submitted_total", "Jobs submitted since sdiag's last reset.", "counter"),
        1,
    ),
    "jobs_started": (
        _statistic("jobs_started_total", "Jobs started since sdiag's last reset.", "counter"),
        1,
    ),
    "schedule_cycle_counter": (
        _statistic("cycles_total", "Cycles of the main scheduler since the reset.", "counter"),
        1,
    ),
    "schedule_cycle_last": (
        _statistic("cycle_seconds", "Length of the last main cycle.", unit="seconds"),
        _MICRO,
    ),
    "schedule_cycle_mean": (
        _statistic("cycle_mean_seconds", "Mean length of main cycles.", unit="seconds"),
        _MICRO,
    ),
    "schedule_queue_length": (
        _statistic("queue_length", "Jobs that the last main cycle looked at."),
        1,
    ),
    "backfilled_jobs": (
        _statistic("backfilled_jobs_total", "Jobs started by backfill.", "counter"),
        1,
    ),
    "backfill_cycle_counter": (
        _statistic("backfill_cycles_total", "Backfill cycles since the reset.", "counter"),
        1,
    ),
    "backfill_cycle_last": (
        _statistic("backfill_cycle_seconds", "Length of the last backfill.", unit="seconds"),
        _MICRO,
    ),
    "backfill_cycle_mean": (
        _statistic("backfill_cycle_mean_seconds", "Mean length of backfills.", unit="seconds"),
        _MICRO,
    ),
    "backfill_last_depth": (
        _statistic("backfill_depth", "Jobs that the last backfill considered."),
        1,
    ),
}
"""Metric and factor of each of Slurm's statistics, by the name that pyslurm has for it."""

SPECS: tuple[MetricSpec, ...] = (
    *(UP, AGE, DURATION, FAILURES, SOURCE, JOBS, REASONS, USER_JOBS, ACCOUNT_JOBS, ENDED_JOBS),
    *(WAIT, RUN, NODES, PARTITION_NODES, REASON, CPUS, PARTITION_CPUS, MEMORY, PARTITION_MEMORY),
    *(GPUS, PARTITION_GPUS, LICENSES, LICENSES_USED, RESERVATION_NODES, RESERVATION_START),
    *(RESERVATION_END, FAIRSHARE, *(spec for spec, _ in STATISTICS.values())),
)
