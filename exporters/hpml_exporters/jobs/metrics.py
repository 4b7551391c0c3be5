"""Metrics of jobs: who they are, and what their control groups and processes used."""

from __future__ import annotations

from hpml_exporters.core.metric import MetricSpec

__all__ = ["GROUP_SPECS", "OF_GROUPS", "PROCESS_SPECS", "SPECS"]

_JOB = ("cluster", "jobid")
_INHERITED = "ended ones' included; a new exporter begins with those that live then, each in full"

INFO = MetricSpec(
    "hpml_job_info",
    "info",
    "Who a job on this node belongs to; what is not known is left out.",
    (*_JOB, "user", "account", "partition", "qos", "name", "array_job", "array_task"),
    source="prolog map, control group, owner and environment of the job's processes",
)
START = MetricSpec(
    "hpml_job_start_timestamp_seconds",
    "gauge",
    "When the job started, since the epoch.",
    _JOB,
    "seconds",
    "prolog map; SLURM_JOB_START_TIME of the job's processes",
)
RANKS = MetricSpec(
    "hpml_job_ranks",
    "gauge",
    "World size of the job, over all of its nodes.",
    _JOB,
    source="WORLD_SIZE of the job's processes",
)
RUN = MetricSpec(
    "hpml_run_info",
    "info",
    "The run of hpml that a job is, and the point of a sweep where it is one.",
    (*_JOB, "run", "sweep", "point"),
    source="node agent; HPML_RUN_DIR of the job's processes",
)
CPUS = MetricSpec(
    "hpml_job_cpus",
    "gauge",
    "CPUs that Slurm bound the job to; absent where Slurm does not constrain cores.",
    _JOB,
    source="cpuset.cpus of the job's control group",
)
CPU_SECONDS = MetricSpec(
    "hpml_job_cpu_seconds_total",
    "counter",
    "CPU time of all processes of the job since it began on this node, ended ones included.",
    (*_JOB, "mode"),
    "seconds",
    "cpu.stat (v2), cpuacct.stat (v1), else /proc/PID/stat",
)
MEMORY = MetricSpec(
    "hpml_job_memory_bytes",
    "gauge",
    "Memory of the job: rss is anonymous, shmem is /dev/shm and the like, cache is other files'.",
    (*_JOB, "kind"),
    "bytes",
    "memory.stat; without control groups rss alone, from /proc/PID/statm and smaps_rollup",
)
MEMORY_LIMIT = MetricSpec(
    "hpml_job_memory_limit_bytes",
    "gauge",
    "Memory at which the kernel ends processes of the job; absent without a limit.",
    _JOB,
    "bytes",
    "memory.max (v2), memory.limit_in_bytes (v1)",
)
MEMORY_PEAK = MetricSpec(
    "hpml_job_memory_peak_bytes",
    "gauge",
    "Most memory the job ever had on this node, cache included.",
    _JOB,
    "bytes",
    "memory.peak (v2, Linux 5.19 on), memory.max_usage_in_bytes (v1)",
)
OOM_EVENTS = MetricSpec(
    "hpml_job_oom_events_total",
    "counter",
    "Processes of the job that the kernel ended for want of memory, as seen while it ran.",
    _JOB,
    source="oom_kill in memory.events (v2), memory.oom_control (v1)",
)
PRESSURE = MetricSpec(
    "hpml_job_pressure_seconds_total",
    "counter",
    "Time in which at least one task of the job waited for a resource (v2 only).",
    (*_JOB, "resource"),
    "seconds",
    "`some` in cpu.pressure, memory.pressure, io.pressure",
)
IO_READ = MetricSpec(
    "hpml_job_io_read_bytes_total",
    "counter",
    f"Bytes that the job's processes caused to be fetched from storage, {_INHERITED}.",
    _JOB,
    "bytes",
    "read_bytes in /proc/PID/io",
)
IO_WRITE = MetricSpec(
    "hpml_job_io_write_bytes_total",
    "counter",
    f"Bytes that the job's processes caused to be sent to storage, {_INHERITED}.",
    _JOB,
    "bytes",
    "write_bytes in /proc/PID/io",
)
IO_SYSCALL_READ = MetricSpec(
    "hpml_job_io_syscall_read_bytes_total",
    "counter",
    f"Bytes that read calls returned, from caches, RAM disks and pipes too, {_INHERITED}.",
    _JOB,
    "bytes",
    "rchar in /proc/PID/io",
)
IO_SYSCALL_WRITE = MetricSpec(
    "hpml_job_io_syscall_write_bytes_total",
    "counter",
    f"Bytes given to write calls, to RAM disks and pipes too, {_INHERITED}.",
    _JOB,
    "bytes",
    "wchar in /proc/PID/io",
)
PROCESSES = MetricSpec(
    "hpml_job_processes",
    "gauge",
    "Processes of the job, without slurmstepd.",
    _JOB,
    source="cgroup.procs, else SLURM_JOB_ID in /proc/PID/environ",
)
THREADS = MetricSpec(
    "hpml_job_threads",
    "gauge",
    "Threads of the job's processes.",
    _JOB,
    source="/proc/PID/stat",
)
UNREADABLE = MetricSpec(
    "hpml_job_unreadable_processes",
    "gauge",
    "Processes whose I/O the exporter may not read; the job's I/O is absent while there are any.",
    _JOB,
    source="/proc/PID/io; CAP_SYS_PTRACE with CAP_DAC_READ_SEARCH opens it",
)

OF_GROUPS = {"cpu": CPU_SECONDS, "pressure": PRESSURE, "oom": OOM_EVENTS}
"""By what `Usage.counters` count."""

GROUP_SPECS = (
    *(INFO, RUN, START, RANKS, PROCESSES, CPUS, CPU_SECONDS, MEMORY, MEMORY_LIMIT, MEMORY_PEAK),
    *(OOM_EVENTS, PRESSURE),
)
"""Metrics of the collector `jobs`."""

PROCESS_SPECS = (
    *(IO_READ, IO_WRITE, IO_SYSCALL_READ, IO_SYSCALL_WRITE, THREADS, UNREADABLE),
    *(CPU_SECONDS, MEMORY),
)
"""Metrics of the collector `processes`; the last two where no control group counts them."""

SPECS = tuple(dict.fromkeys((*GROUP_SPECS, *PROCESS_SPECS)))
"""All of them."""
