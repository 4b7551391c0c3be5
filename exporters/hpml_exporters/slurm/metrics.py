"""The metrics of a cluster, with what each means."""

from __future__ import annotations

from hpml_exporters.core.metric import MetricSpec, MetricType

_UNITS = ("seconds", "bytes", "ratio")
_TYPES: dict[str, MetricType] = {"total": "counter", "info": "info"}


def _spec(
    source: str, name: str, labels: str, text: str, kind: MetricType | None = None
) -> MetricSpec:
    end = name.rpartition("_")[2]
    unit = end if end in _UNITS else ""
    kind = kind or _TYPES.get(end, "gauge")
    return MetricSpec(f"hpml_slurm_{name}", kind, text, tuple(labels.split()), unit, source)


_OWN, _SQUEUE, _SINFO, _SCONTROL = "exporter", "squeue", "sinfo", "scontrol"

AGE = _spec(_OWN, "last_refresh_timestamp_seconds", "", "When the figures shown here were read.")

QUEUE = _spec(
    *(_SQUEUE, "queue_jobs", "state reason"),
    "Jobs that have not ended, each once, and why pending ones wait.",
)
JOBS = _spec(
    *(_SQUEUE, "jobs", "state partition qos"),
    "Jobs that have not ended; one that waits in several partitions counts in each.",
)
REASONS = _spec(
    *(_SQUEUE, "jobs_pending", "partition reason"),
    "Pending jobs by the reason that Slurm gives; those of several partitions count in each.",
)
USER_JOBS = _spec(
    _SQUEUE, "user_jobs", "user state", "Jobs of a user that have not ended (--users)."
)
ENDED_JOBS = _spec(_SQUEUE, "jobs_ended_total", "partition state", "Jobs that ended.")
WAIT = _spec(
    *(_SQUEUE, "job_wait_seconds", "partition"),
    "Time from being eligible to the start, of jobs that started.",
    "histogram",
)

NODES = _spec(_SINFO, "nodes", "state", "Nodes by state.")
REASON = _spec(
    *(_SINFO, "node_reason_info", "node state reason"),
    "Nodes that are away (down, drained, maintenance, rebooting, powered_down) or have a reason.",
)
CPUS = _spec(_SINFO, "cpus", "state", "CPUs: allocated; else idle, powered_down or down.")
GPUS = _spec(_SINFO, "gpus", "type state", "GPUs: allocated; else idle, powered_down or down.")
PARTITION_GPUS = _spec(
    _SINFO, "partition_gpus", "partition type state", "GPUs of a partition's nodes."
)
NODE_GPUS = _spec(_SINFO, "node_gpus", "node", "GPUs of a node by its Gres in slurm.conf.")

LICENSES = _spec(_SCONTROL, "licenses", "license", "Licences that there are.")
LICENSES_USED = _spec(_SCONTROL, "licenses_used", "license", "Licences in use.")
RESERVATION_NODES = _spec(
    _SCONTROL, "reservation_nodes", "reservation state", "Nodes of a reservation."
)
RESERVATION_START = _spec(
    *(_SCONTROL, "reservation_start_timestamp_seconds", "reservation"),
    "When a reservation begins.",
)
RESERVATION_END = _spec(
    _SCONTROL, "reservation_end_timestamp_seconds", "reservation", "When a reservation ends."
)
FAIRSHARE = _spec(
    *("sshare", "user_fairshare_ratio", "account user"),
    "Fairshare factor of a user, 0 to 1 (--users).",
)

STATISTICS = {
    statistic: _spec("sdiag", f"scheduler_{name}", "", text)
    for statistic, name, text in (
        ("server_thread_count", "threads", "Threads of slurmctld."),
        ("agent_queue_size", "agent_queue", "Messages that wait to be sent."),
        ("dbd_agent_queue_size", "dbd_queue", "Messages that wait for slurmdbd."),
        ("schedule_cycle_last", "cycle_seconds", "Length of the last main cycle."),
        ("backfill_cycle_last", "backfill_cycle_seconds", "Length of the last backfill."),
    )
}
"""Metrics of Slurm's statistics by pyslurm's names; Slurm gives times in microseconds."""

SPECS: tuple[MetricSpec, ...] = (
    *(AGE, QUEUE, JOBS, REASONS, USER_JOBS, ENDED_JOBS, WAIT, NODES, REASON, CPUS),
    *(GPUS, PARTITION_GPUS, NODE_GPUS, LICENSES, LICENSES_USED, RESERVATION_NODES),
    *(RESERVATION_START, RESERVATION_END, FAIRSHARE, *STATISTICS.values()),
)
