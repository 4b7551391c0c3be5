"""Metrics of jobs: who they are, and what their control groups and processes used."""

from __future__ import annotations

from hpml_exporters.core.metric import MetricSpec, metric

_INHERITED = "ended ones' included; a new exporter begins with those that live then, each in full"


def _of_job(name: str, help_: str, labels: str = "", *, source: str) -> MetricSpec:
    return metric(name, help_, f"cluster jobid {labels}", source=source)


INFO = _of_job(
    "hpml_job_info",
    "Who a job on this node belongs to; what is not known is left out.",
    "user account partition qos name array_job array_task",
    source="prolog map, control group, owner and environment of the job's processes",
)
START = _of_job(
    "hpml_job_start_timestamp_seconds",
    "When the job started, since the epoch.",
    source="prolog map; SLURM_JOB_START_TIME of the job's processes",
)
END = _of_job(
    "hpml_job_end_timestamp_seconds",
    "When the job's time limit ends it, since the epoch; absent without a limit.",
    source="prolog map; SLURM_JOB_END_TIME of the job's processes",
)
RANKS = _of_job(
    "hpml_job_ranks",
    "World size of the job, over all of its nodes.",
    source="WORLD_SIZE of the job's processes",
)
RUN = _of_job(
    "hpml_run_info",
    "The run of hpml that a job belongs to, and the point of a sweep if it has one.",
    "run sweep point",
    source="node agent; HPML_RUN_DIR of the job's processes",
)
CPUS = _of_job(
    "hpml_job_cpus",
    "CPUs that Slurm bound the job to; absent where Slurm does not constrain cores.",
    source="cpuset.cpus of the job's control group",
)
CPU_SECONDS = _of_job(
    "hpml_job_cpu_seconds_total",
    "CPU time of all processes of the job since it began on this node, ended ones included.",
    "mode",
    source="cpu.stat (v2), cpuacct.stat (v1), else /proc/PID/stat",
)
MEMORY = _of_job(
    "hpml_job_memory_bytes",
    "Memory of the job: rss is anonymous, shmem is shared (such as /dev/shm), cache is of files.",
    "kind",
    source="memory.stat; without control groups rss alone, from /proc/PID/statm and smaps_rollup",
)
MEMORY_LIMIT = _of_job(
    "hpml_job_memory_limit_bytes",
    "Memory at which the kernel ends processes of the job; absent without a limit.",
    source="memory.max (v2), memory.limit_in_bytes (v1)",
)
MEMORY_PEAK = _of_job(
    "hpml_job_memory_peak_bytes",
    "Most memory the job ever had on this node, cache included.",
    source="memory.peak (v2, Linux 5.19 on), memory.max_usage_in_bytes (v1)",
)
OOM_EVENTS = _of_job(
    "hpml_job_oom_events_total",
    "Processes of the job that the kernel ended for want of memory, as seen while it ran.",
    source="oom_kill in memory.events (v2), memory.oom_control (v1)",
)
PRESSURE = _of_job(
    "hpml_job_pressure_seconds_total",
    "Time in which at least one task of the job waited for a resource (v2 only).",
    "resource",
    source="`some` in cpu.pressure, memory.pressure, io.pressure",
)
IO_READ = _of_job(
    "hpml_job_io_read_bytes_total",
    f"Bytes that the job's processes caused to be fetched from storage, {_INHERITED}.",
    source="read_bytes in /proc/PID/io",
)
IO_WRITE = _of_job(
    "hpml_job_io_write_bytes_total",
    f"Bytes that the job's processes caused to be sent to storage, {_INHERITED}.",
    source="write_bytes in /proc/PID/io",
)
IO_SYSCALL_READ = _of_job(
    "hpml_job_io_syscall_read_bytes_total",
    f"Bytes that read calls returned, from caches, RAM disks and pipes too, {_INHERITED}.",
    source="rchar in /proc/PID/io",
)
IO_SYSCALL_WRITE = _of_job(
    "hpml_job_io_syscall_write_bytes_total",
    f"Bytes given to write calls, to RAM disks and pipes too, {_INHERITED}.",
    source="wchar in /proc/PID/io",
)
PROCESSES = _of_job(
    "hpml_job_processes",
    "Processes of the job, without slurmstepd.",
    source="cgroup.procs, else SLURM_JOB_ID in /proc/PID/environ",
)
THREADS = _of_job("hpml_job_threads", "Threads of the job's processes.", source="/proc/PID/stat")
UNREADABLE = _of_job(
    "hpml_job_unreadable_processes",
    "Processes whose I/O the exporter may not read; the job's I/O is absent while there are any.",
    source="/proc/PID/io; CAP_SYS_PTRACE with CAP_DAC_READ_SEARCH opens it",
)

GROUP_SPECS = (
    *(INFO, RUN, START, END, RANKS, PROCESSES, CPUS, CPU_SECONDS, MEMORY, MEMORY_LIMIT),
    *(MEMORY_PEAK, OOM_EVENTS, PRESSURE),
)
"""Metrics of the collector `jobs`."""

PROCESS_SPECS = (
    *(IO_READ, IO_WRITE, IO_SYSCALL_READ, IO_SYSCALL_WRITE, THREADS, UNREADABLE),
    *(CPU_SECONDS, MEMORY),
)
"""Metrics of the collector `processes`; the last two where no control group counts them."""

SPECS = tuple(dict.fromkeys((*GROUP_SPECS, *PROCESS_SPECS)))
"""All of them."""
