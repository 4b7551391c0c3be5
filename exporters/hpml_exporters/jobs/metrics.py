"""Metrics of jobs: who they are, and what their control groups and processes used."""

from __future__ import annotations

from hpml_exporters.core.metric import MetricSpec

__all__ = [
    "CPUS",
    "CPU_SECONDS",
    "INFO",
    "IO_READ",
    "IO_SYSCALL_READ",
    "IO_SYSCALL_WRITE",
    "IO_WRITE",
    "MEMORY",
    "MEMORY_LIMIT",
    "MEMORY_PEAK",
    "OOM_EVENTS",
    "PRESSURE",
    "PROCESSES",
    "RUN",
    "SPECS",
    "THREADS",
    "UNREADABLE",
]

_INHERITED = "ended ones' included; a new exporter begins with those that live then, each in full"

INFO = MetricSpec(
    "hpml_job_info",
    "info",
    "Who a job on this node belongs to; what is not known is left out.",
    ("jobid", "user", "account", "partition", "name"),
    source="prolog map, control group, owner and environment of the job's processes",
)
RUN = MetricSpec(
    "hpml_run_info",
    "info",
    "The run of hpml that a job is, and the point of a sweep where it is one.",
    ("jobid", "run", "sweep", "point"),
    source="node agent; HPML_RUN_DIR of the job's processes",
)
CPUS = MetricSpec(
    "hpml_job_cpus",
    "gauge",
    "CPUs that Slurm bound the job to; absent where Slurm does not constrain cores.",
    ("jobid",),
    source="cpuset.cpus of the job's control group",
)
CPU_SECONDS = MetricSpec(
    "hpml_job_cpu_seconds_total",
    "counter",
    "CPU time of all processes of the job since it began on this node, ended ones included.",
    ("jobid", "mode"),
    "seconds",
    "cpu.stat (v2), cpuacct.stat (v1), else /proc/PID/stat",
)
MEMORY = MetricSpec(
    "hpml_job_memory_bytes",
    "gauge",
    "Memory of the job: rss is anonymous, shmem is /dev/shm and the like, cache is other files'.",
    ("jobid", "kind"),
    "bytes",
    "memory.stat; without control groups rss alone, from /proc/PID/statm and smaps_rollup",
)
MEMORY_LIMIT = MetricSpec(
    "hpml_job_memory_limit_bytes",
    "gauge",
    "Memory at which the kernel ends processes of the job; absent without a limit.",
    ("jobid",),
    "bytes",
    "memory.max (v2), memory.limit_in_bytes (v1)",
)
MEMORY_PEAK = MetricSpec(
    "hpml_job_memory_peak_bytes",
    "gauge",
    "Most memory the job ever had on this node, cache included.",
    ("jobid",),
    "bytes",
    "memory.peak (v2, Linux 5.19 on), memory.max_usage_in_bytes (v1)",
)
OOM_EVENTS = MetricSpec(
    "hpml_job_oom_events_total",
    "counter",
    "Processes of the job that the kernel ended for want of memory, as seen while it ran.",
    ("jobid",),
    source="oom_kill in memory.events (v2), memory.oom_control (v1)",
)
PRESSURE = MetricSpec(
    "hpml_job_pressure_seconds_total",
    "counter",
    "Time in which at least one task of the job waited for a resource (v2 only).",
    ("jobid", "resource"),
    "seconds",
    "`some` in cpu.pressure, memory.pressure, io.pressure",
)
IO_READ = MetricSpec(
    "hpml_job_io_read_bytes_total",
    "counter",
    f"Bytes that the job's processes caused to be fetched from storage, {_INHERITED}.",
    ("jobid",),
    "bytes",
    "read_bytes in /proc/PID/io",
)
IO_WRITE = MetricSpec(
    "hpml_job_io_write_bytes_total",
    "counter",
    f"Bytes that the job's processes caused to be sent to storage, {_INHERITED}.",
    ("jobid",),
    "bytes",
    "write_bytes in /proc/PID/io",
)
IO_SYSCALL_READ = MetricSpec(
    "hpml_job_io_syscall_read_bytes_total",
    "counter",
    f"Bytes that read calls returned, from caches, RAM disks and pipes too, {_INHERITED}.",
    ("jobid",),
    "bytes",
    "rchar in /proc/PID/io",
)
IO_SYSCALL_WRITE = MetricSpec(
    "hpml_job_io_syscall_write_bytes_total",
    "counter",
    f"Bytes given to write calls, to RAM disks and pipes too, {_INHERITED}.",
    ("jobid",),
    "bytes",
    "wchar in /proc/PID/io",
)
PROCESSES = MetricSpec(
    "hpml_job_processes",
    "gauge",
    "Processes of the job, without slurmstepd.",
    ("jobid",),
    source="cgroup.procs, else SLURM_JOB_ID in /proc/PID/environ",
)
THREADS = MetricSpec(
    "hpml_job_threads",
    "gauge",
    "Threads of the job's processes.",
    ("jobid",),
    source="/proc/PID/stat",
)
UNREADABLE = MetricSpec(
    "hpml_job_unreadable_processes",
    "gauge",
    "Processes whose I/O the exporter may not read; the job's I/O is absent while there are any.",
    ("jobid",),
    source="/proc/PID/io; CAP_SYS_PTRACE with CAP_DAC_READ_SEARCH opens it",
)

SPECS: tuple[MetricSpec, ...] = (
    INFO,
    RUN,
    CPUS,
    CPU_SECONDS,
    MEMORY,
    MEMORY_LIMIT,
    MEMORY_PEAK,
    OOM_EVENTS,
    PRESSURE,
    IO_READ,
    IO_WRITE,
    IO_SYSCALL_READ,
    IO_SYSCALL_WRITE,
    PROCESSES,
    THREADS,
    UNREADABLE,
)
"""All of them."""
