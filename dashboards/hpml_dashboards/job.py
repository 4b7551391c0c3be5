"""The dashboard of one job, over all of its nodes."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from hpml_dashboards.panels import (
    Panel,
    build_dashboard,
    each,
    figure,
    lines,
    listing,
    or_zero,
    select,
    variable,
)

_JOB = '{cluster="$cluster", jobid="$jobid"}'
_GPU = "{{node}} GPU {{index}}"


def _this(metric: str, **labels: str) -> str:
    return select(metric, cluster="$cluster", jobid="$jobid", **labels)


def _once(metric: str, **labels: str) -> str:
    """Return the job's series with their node, from one exporter per node."""
    # On a node two exporters may show the job, the node's and its own. The rule names one of them;
    # without this join every sum would be double.
    return f"{_this(metric, **labels)} * {_ON_NODE} hpml:job_exporter{_JOB}"


def _of_gpus(metric: str, by: str) -> str:
    return f"max by ({by}) ({metric}) * on (uuid) group_left (node, index) hpml:gpu_info{_JOB}"


def _of_nodes(rule: str) -> str:
    nodes = f"max by (cluster, node) (hpml:job_exporter{_JOB})"
    return f'{rule}{{cluster="$cluster"}} and on (cluster, node) {nodes}'


def _each(rule: str) -> str:
    return each(f"{rule}{_JOB}")


def _ranks(metric: str, least: str, most: str) -> dict[str, str]:
    return {
        name: f"{of}({_this(f'hpml_train_rank_{metric}_seconds', which=name)})"
        for name, of in ((least, "min"), (most, "max"))
    }


def _ever(series: str, by: str) -> str:
    # Some labels become known only after a job has begun, which makes a second series of it. Take
    # the one that lasted longest: the head of the page is a single row.
    return f"topk by (jobid) (1, sum by (jobid, {by}) (count_over_time({series}{_JOB}[$__range])))"


def _last(series: str) -> str:
    # A job that has ended has no series now, but still has figures in the time range.
    return f"last_over_time({series}{_JOB}[$__range])"


_ON_NODE = "on (instance, job, cluster, jobid) group_left (node)"
# Of all ranks; a node's exporter and the job's own count the same steps.
_STEPS = (
    "sum by (jobid) (max by (jobid, node) "
    f"({_last('hpml_train_steps_total')} * {_ON_NODE} {_last('hpml:job_exporter')}))"
)
_XID = _of_gpus("hpml_gpu_xid_last_timestamp_seconds", "uuid, xid")
_UNBOUND = _once("hpml_rank_binding_wrong_ranks")
_FAULTS = (
    f"sum({_once('hpml_job_oom_events_total')})",
    # A GPU's last XID error may be older than the job.
    f"count({_XID} > on () group_left () min(hpml_job_start_timestamp_seconds{_JOB}))",
    f"sum({_UNBOUND})",
)
_BEGAN = f"on () group_left () max(hpml_job_start_timestamp_seconds{_JOB})"
_GPUS = f"hpml:job_gpus:count{_JOB}"
_CPUS = _once("hpml_job_cpus")
_HOLDBACK = f"hpml:job_holdback:ratio{_JOB}"


def _whose(finding: str, info: str, waits: str) -> str:
    # Some rank always waits longest. Name it only if the wait was a finding in this range.
    rank = (
        f"{_once(info)} * on (cluster, jobid, instance, job) group_left () {waits}"
        f" and on () count_over_time({_this('hpml:job_holdback:ratio', finding=finding)}[$__range])"
    )
    return f'label_replace({rank}, "finding", "{finding}", "", "")'


_READER = _this("hpml_train_rank_data_wait_seconds", which="longest")
_SLOWEST = _this("hpml_train_rank_wait_seconds", which="shortest")
# A slow reader waits longest for its data. A slow rank waits least before gradients are averaged,
# since all others wait for it.
_RANK = (
    f"topk(1, {_whose('waits-for-data', 'hpml_train_longest_data_wait_info', _READER)}) or "
    f"bottomk(1, {_whose('slow-rank', 'hpml_train_shortest_wait_info', _SLOWEST)})"
)
_PARTS = {
    "data": "hpml_train_data_wait_seconds_total",
    "transfer": "hpml_train_transfer_seconds_total",
    "other ranks": "hpml_train_wait_seconds_total",
    "checkpoints": "hpml_train_save_seconds_total",
    "evaluation": "hpml_train_evaluation_seconds_total",
}


def _mounts(metric: str) -> str:
    """Return the bytes per second that each node reads or writes on shared file systems."""
    node = 'on (instance, job) group_left (cluster, node) hpml_node_info{scope="node"}'
    return f"rate({metric}[$__rate_interval]) * {node}"


def _shared(direction: str) -> str:
    either = " or ".join(
        _mounts(f"hpml_{name}_{direction}_bytes_total") for name in ("nfs", "lustre")
    )
    return f"sum by (node) ({either}) and on (node) (hpml:job_exporter{_JOB})"


_ABOUT = """
Job $jobid: What the job is, and the steps that each rank has taken. Open the sweep to compare its
    runs, the user for their other jobs.
GPU active: Share of time with a kernel on the GPUs, mean of the time range. Good: above 60 %. If
    lower, look at data wait and CPU first, then at the batch size.
Tensor active: Share of time with tensor cores at work, mean of the time range (Hopper and later).
    Good: above 20 %. If low while GPUs are active: mixed precision, larger batches.
GPUs: GPUs that the job was allocated, and those without a process of it. Good: none unused.
    Otherwise ask for fewer, or check that a rank starts for each.
Data wait: Share of a step in which ranks wait for a batch, mean of the time range. Good: below 10
    %. Otherwise stage the data, pack small files, use more loader workers.
CPU: Share of the job's CPUs that are busy, mean of the time range. High is good unless data wait
    is high too: then ask for more CPUs per GPU.
Memory: Most memory used on a node against its limit, without the page cache. Above 95 % the
    kernel soon ends processes: ask for more, or use fewer loader workers.
Time limit: Time since the start against the job's time limit. Near 100 % Slurm ends the job:
    see that it writes checkpoints. Far below at its end: ask for less, and wait less in the queue.
Faults: Processes ended for want of memory, GPU errors (XID) since the job's start, and ranks on
    wrong CPUs or GPUs. Good: 0. Otherwise see the tables of nodes and errors below.
Tensor cores active: Share of time with tensor cores at work (Hopper and later). GPUs that are
    active without them compute in full precision, copy data or wait in communication.
What holds it back: Findings as hpml report has them, each with the rank that it is about, with its
    mean figure while it was over its limit, and with the share of the time range in which it was.
    Good: none. Otherwise run `hpml report`: it has the remedies.
Samples per second: Speed of the training on each node. Good: steady and alike. Dips are
    checkpoints, evaluation, or storage that others use too.
Step time: Mean step of the fastest and the slowest rank. Good: alike. A gap above 20 % means that
    all wait for one: look at its node, GPU clock and binding.
Data wait per step: Mean wait for a batch of the ranks that wait least and most. Good: near 0 and
    alike. If all wait, storage or loader are slow; if one does, its node is.
GPU memory: Much free memory allows larger batches; above 95 % a slightly larger batch fails.
GPU power: GPUs at work draw near their limit; active but cool ones mostly communicate.
Multiprocessors active: Share of multiprocessors at work (Hopper and later). If much lower than
    GPU active, kernels are too small: larger batches, fused kernels, CUDA graphs.
Temperature: Of the GPU's core. When it nears the limit of the device, clocks go down.
SM occupancy: Resident warps against the most that fit (Hopper and later). Low with active
    multiprocessors: kernels that need many registers, or too little work in each.
Memory bandwidth: Bandwidth of GPU memory against its peak (Hopper and later). Near 100 %: the
    kernels wait for memory: fuse them, or use smaller types.
CPUs busy: CPUs at work on each node, and those that the job is bound to. All busy with data wait:
    ask for more CPUs. Few busy: others could use them.
Memory by kind: Memory of processes, of shared memory (/dev/shm), and the page cache, which the
    kernel gives back when needed. The first two together must stay below the limit.
Waiting for resources: Share of time in which a task waited for a CPU, memory or I/O. Good: below
    10 %. CPU: ask for more; memory: near the limit; I/O: stage the data.
Storage: Bytes in each second. Reads in every epoch: stage the data. High writes: checkpoints.
Staged data, /dev/shm: The job's files in memory, such as what hpml staged for it. They count as
    its memory; a full /dev/shm ends loader workers.
Shared file systems: NFS and Lustre on the job's nodes, with other jobs there. Reads in every epoch:
    stage the data.
Network of the nodes: InfiniBand and RoCE of the job's nodes, with other jobs there. Compare with
    the link rate on the Node dashboard: near it, communication limits the job.
NVLink and PCIe: Bytes between GPUs over NVLink, and to the host over PCIe. Gradients over PCIe
    although there is NVLink: check NCCL's settings.
Nodes of the job: The job on each of its nodes: the one that differs is the one to look at.
    Many more threads than CPUs: set OMP_NUM_THREADS or fewer loader workers. Misbound are ranks on
    other CPUs or GPUs than planned; good: 0, else see hpml show.
Clocks held down: Share of time in which a GPU had to run slower. The power limit is normal under
    full load; for heat and power brakes, see the node and inform the administrators.
Learning: Last loss, mean over ranks. Good: falling. A jump after a change of scale: warm-up.
GPU errors (XID): Errors of the job's GPUs, also from before it. 13, 31 and 43 come from programs;
    48, 62, 64, 74, 79, 95, 119 and 120 from hardware: inform the administrators.
Where the time goes: Mean share of a rank's time that is not computation: waiting for data, copying
    it to the device, waiting for other ranks, checkpoints, evaluation. The largest is the first to
    look at.
MFU, communication, accuracy: Model FLOP/s against the peak (good: above 30 %), the share of time
    in communication, and the last accuracy. Much communication: larger batches, fewer nodes.
"""

_MEASURED = (
    f"max_over_time(hpml:job_gpus:count{_JOB}[$__range])"
    f" or max_over_time(hpml:job_data_wait:ratio{_JOB}[$__range])"
)

_CONTENT: list[Panel | str] = [
    listing(
        "Job $jobid",
        "name array user account partition run sweep point",
        {
            "-": _ever("hpml:job_info", "user, account, partition, name, array"),
            "-run": _ever("hpml:run_info", "run, sweep, point"),
            "Ranks": f"max by (jobid) ({_last('hpml_job_ranks')})",
            "Nodes": f"count by (jobid) (count by (jobid, node) ({_last('hpml:job_exporter')}))",
            "Steps": f"{_STEPS} / max by (jobid) ({_last('hpml_job_ranks')})",
            "Samples/s": f"sum by (jobid) ({_last('hpml:job_samples:rate5m')})",
            "Started": f"1000 * max by (jobid) ({_last('hpml_job_start_timestamp_seconds')})",
        },
        width=24,
        height=4,
        none="No such job in this time range",
    ),
    figure("GPU active", "use", f"avg(hpml:gpu_busy:rate2m{_JOB})", calc="mean"),
    figure("Tensor active", "tensor", f"avg(hpml:gpu_tensor_active:ratio{_JOB})", calc="mean"),
    figure(
        "GPUs",
        "count",
        {
            # Without Slurm's prolog, a node's allocation to the job may be unknown.
            "allocated": f"(sum({_once('hpml_job_gpus_allocated')}) > max({_GPUS})) "
            f"or max({_GPUS})",
            "unused": or_zero(f"sum(hpml:job_gpus_unopened:count{_JOB})", _GPUS),
        },
        calc="lastNotNull",
    ),
    figure("Data wait", "wait", f"max(hpml:job_data_wait:ratio{_JOB})", calc="mean"),
    figure(
        "CPU",
        "share",
        # Only nodes whose CPUs are known: others would count in the numerator alone.
        f"sum(hpml:job_cpus_busy:rate5m{_JOB} and on (node) {_CPUS}) / (sum({_CPUS}) > 0)",
        calc="mean",
        none="no cgroup",
    ),
    figure("Memory", "full", f"max(hpml:job_memory_used:ratio{_JOB})", calc="max", none="no limit"),
    figure(
        "Time limit",
        "full",
        # The time of the last sample, not time(): an ended job uses up no more of its limit.
        f"max(timestamp(hpml_job_end_timestamp_seconds{_JOB}) - {_BEGAN}) "
        f"/ max(hpml_job_end_timestamp_seconds{_JOB} - {_BEGAN})",
        calc="lastNotNull",
    ),
    figure(
        "Faults",
        "faults",
        # In PromQL a sum with an absent term is absent: each term is 0 once the job is known.
        " + ".join(or_zero(count, f"hpml:job_info{_JOB}") for count in _FAULTS),
        calc="max",
    ),
    lines(
        "GPU active", "share", {_GPU: _each("hpml:gpu_busy:rate2m")}, none="No GPU of it is known"
    ),
    lines(
        "Tensor cores active",
        "share",
        {_GPU: _each("hpml:gpu_tensor_active:ratio")},
        none="Not measured: needs a GPU of Hopper or later",
    ),
    listing(
        "What holds it back",
        "finding rank node",
        {
            "-": f"max by (finding, rank, node) ({_RANK})",
            "Mean": f"max by (finding) (avg_over_time({_HOLDBACK}[$__range]))",
            "Time": f"max by (finding) (count_over_time({_HOLDBACK}[$__range])) "
            f"/ on () group_left () max(count_over_time(hpml:job_info{_JOB}[$__range]))",
        },
        sort="Time",
        width=8,
        none="Nothing found",
        source=_MEASURED,
        remedy="no GPUs known, and no report of the training",
    ),
    lines(
        "Samples per second",
        "count",
        {"{{node}}": _each("hpml:train_samples:rate5m")},
        height=6,
        none="Not reported by the training",
    ),
    lines(
        "Step time",
        "seconds",
        _ranks("step_duration", "fastest", "slowest"),
        height=6,
        none="Not reported by the training",
    ),
    lines(
        "Data wait per step",
        "seconds",
        _ranks("data_wait", "shortest", "longest"),
        height=6,
        none="Not reported by the training",
    ),
    "GPU memory and power",
    lines("GPU memory", "share", {_GPU: _each("hpml:gpu_memory_used:ratio")}),
    lines("GPU power", "watts", {_GPU: _each("hpml:gpu_power_watts:max")}),
    lines("Multiprocessors active", "share", {_GPU: _each("hpml:gpu_sm_active:ratio")}),
    lines("Temperature", "heat", {_GPU: each(_of_gpus("hpml_gpu_temperature_celsius", "uuid"))}),
    lines("SM occupancy", "share", {_GPU: each(_of_gpus("hpml_gpu_sm_occupancy_ratio", "uuid"))}),
    lines(
        "Memory bandwidth", "share", {_GPU: each(_of_gpus("hpml_gpu_dram_active_ratio", "uuid"))}
    ),
    "CPU and memory",
    lines(
        "CPUs busy",
        "count",
        {"{{node}}": _each("hpml:job_cpus_busy:rate5m"), "allocated": f"max({_CPUS})"},
    ),
    lines(
        "Memory by kind",
        "bytes",
        {
            "processes": f"sum({_once('hpml_job_memory_bytes', kind='rss')})",
            "shmem": f"sum({_once('hpml_job_memory_bytes', kind='shmem')})",
            "cache": f"sum({_once('hpml_job_memory_bytes', kind='cache')})",
            "limit": f"sum({_once('hpml_job_memory_limit_bytes')})",
        },
    ),
    lines(
        "Waiting for resources",
        "share",
        {
            "{{resource}}": "max by (resource) "
            f"(rate(hpml_job_pressure_seconds_total{_JOB}[$__rate_interval]))"
        },
        none="Not known: needs control groups v2",
    ),
    "Input, output and network",
    lines(
        "Storage",
        "rate",
        {
            "read": f"sum(hpml:job_io_read_bytes:rate5m{_JOB})",
            "written": f"sum(hpml:job_io_write_bytes:rate5m{_JOB})",
        },
    ),
    lines(
        "Shared file systems",
        "rate",
        {"{{node}} read": each(_shared("read")), "{{node}} written": each(_shared("written"))},
        none="No NFS or Lustre on its nodes",
    ),
    lines("Staged data, /dev/shm", "bytes", {"{{node}}": each(_once("hpml_job_shm_bytes"))}),
    lines(
        "Network of the nodes",
        "rate",
        {
            "received": f"sum({_of_nodes('hpml:node_network_received_bytes:rate5m')})",
            "sent": f"sum({_of_nodes('hpml:node_network_transmitted_bytes:rate5m')})",
        },
        width=12,
        none="No InfiniBand or RoCE on its nodes",
    ),
    lines(
        "NVLink and PCIe",
        "rate",
        {"{{link}}": f"sum by (link) (hpml:gpu_link_bytes:rate2m{_JOB})"},
        width=12,
    ),
    "Nodes, binding and events",
    listing(
        "Nodes of the job",
        "node",
        {
            "-": f"max by (node) (hpml:job_exporter{_JOB})",
            "GPU active": f"avg by (node) (hpml:gpu_busy:rate2m{_JOB})",
            "CPUs busy": f"sum by (node) (hpml:job_cpus_busy:rate5m{_JOB})",
            "Threads": f"sum by (node) ({_once('hpml_job_threads')})",
            "Memory": f"sum by (node) (hpml:job_memory_bytes:sum{_JOB})",
            "Shm full": f"max by (node) ({_of_nodes('hpml:node_shm_used:ratio')})",
            "Misbound": f"max by (node) ({_UNBOUND})",
        },
        width=16,
    ),
    listing(
        "GPU errors (XID)",
        "node index xid",
        {"Last": f"1000 * {_XID}", "Errors": _of_gpus("hpml_gpu_xid_errors_total", "uuid, xid")},
        width=8,
        none="No errors",
    ),
    lines("Clocks held down", "share", {_GPU: _each("hpml:gpu_throttled:rate2m")}, width=6),
    lines(
        "Learning",
        "count",
        {"loss": f"avg(hpml_train_loss{_JOB})"},
        width=6,
        none="Not reported by the training",
    ),
    lines(
        "Where the time goes",
        "share",
        {
            name: f"sum(rate({metric}{_JOB}[$__rate_interval])) / sum(hpml_train_ranks{_JOB})"
            for name, metric in _PARTS.items()
        },
        width=6,
        none="Not reported by the training",
    ),
    lines(
        "MFU, communication, accuracy",
        "share",
        {
            "MFU": f"avg(hpml_train_mfu_ratio{_JOB})",
            "communication ({{method}})": "sum by (method) "
            f"(rate(hpml_train_comm_seconds_total{_JOB}[$__rate_interval])) "
            f"/ on () group_left () sum(hpml_train_ranks{_JOB})",
            "accuracy": f"avg(hpml_train_accuracy_ratio{_JOB})",
        },
        width=6,
        none="Not reported by the training",
    ),
]


def job() -> Dashboard:
    """Return the dashboard."""
    jobs = 'label_values(hpml:job_info{cluster="$cluster"}, jobid)'
    return build_dashboard(
        "hpml-job",
        "One job over its nodes: how well it uses what it was allocated, and what holds it up.",
        _ABOUT,
        [
            variable("jobid", "Job", jobs, newest=True),
            # Hidden: links carry them to the other dashboards.
            variable("user", "", f"label_values(hpml:job_info{_JOB}, user)"),
            variable("sweep", "", f"label_values(hpml:run_info{_JOB}, sweep)"),
            variable("node", "", f"label_values(hpml:job_exporter{_JOB}, node)"),
        ],
        _CONTENT,
    )
