"""The dashboard of one job, over all of its nodes."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from hpml_dashboards.panels import (
    FAULTS,
    HIGH_IS_BAD,
    HIGH_IS_GOOD,
    LOW_IS_GOOD,
    Column,
    build_dashboard,
    each,
    figure,
    lines,
    link,
    listing,
    select,
    variable,
)

__all__ = ["job"]

_THIS = '{cluster="$cluster", jobid="$jobid"}'
_GPU = "{{node}} {{index}}"
_RATE = "[$__rate_interval]"


def _here(series: str, keep: str = "node") -> str:
    """Return series of the job's exporters, one of two where both the node's and its own count."""
    join = f"on (instance, job, cluster, jobid) group_left ({keep}) hpml:job_exporter{_THIS}"
    return f"{series} * {join}"


def _of_gpus(metric: str, by: str) -> str:
    """Return a metric of the job's GPUs, each once."""
    return f"max by ({by}) ({metric}) * on (uuid) group_left (node, index) hpml:gpu_info{_THIS}"


def _of_nodes(rule: str) -> str:
    """Return a recorded figure of the job's nodes."""
    nodes = f"max by (cluster, node) (hpml:job_exporter{_THIS})"
    return f'{rule}{{cluster="$cluster"}} and on (cluster, node) {nodes}'


def _this(metric: str, **labels: str) -> str:
    return select(metric, cluster="$cluster", jobid="$jobid", **labels)


def _named(series: str) -> str:
    return f"max by (jobid, user, account, partition, qos, name) ({series})"


_WHAT = [
    listing(
        "Job $jobid",
        "What the job is. Follow the sweep to compare its runs, the user to see their other jobs.",
        [
            _named(f"last_over_time(hpml:job_info{_THIS}[$__range])"),
            f"max by (jobid, run, sweep, point) (last_over_time(hpml:run_info{_THIS}[$__range]))",
            f"1000 * min by (jobid) (last_over_time(hpml_job_start_timestamp_seconds{_THIS}[$__range]))",
            f"max by (jobid) (last_over_time(hpml_job_ranks{_THIS}[$__range]))",
            f"count by (jobid) (last_over_time(hpml:job_exporter{_THIS}[$__range]))",
        ],
        [
            Column("name", "Name"),
            Column("user", "User", link=link("hpml-user", user="${__value.raw}")),
            Column("account", "Account"),
            Column("partition", "Partition"),
            Column("qos", "QOS"),
            Column("C", "Started", unit="dateTimeAsIso"),
            Column("E", "Nodes"),
            Column("D", "Ranks"),
            Column("run", "Run"),
            Column("sweep", "Sweep", link=link("hpml-sweep", sweep="${__value.raw}")),
            Column("point", "Point"),
        ],
        height=3,
        none="No such job in this time range",
    ),
    figure(
        "GPU active",
        "Share of time in which the job's GPUs ran a kernel, mean over the time range. Good: above "
        "60 %. If lower, look at data wait and CPU first, then at the batch size.",
        "percentunit",
        f"avg(hpml:gpu_busy:rate5m{_THIS})",
        steps=HIGH_IS_GOOD,
        calc="mean",
    ),
    figure(
        "Tensor active",
        "Share of time in which tensor cores worked, mean over the time range (Hopper and later). "
        "Good: above 20 %. If low while GPUs are active: mixed precision, larger batches.",
        "percentunit",
        f"avg(hpml:gpu_tensor_active:ratio{_THIS})",
        steps=((None, "red"), (0.05, "orange"), (0.2, "green")),
        calc="mean",
    ),
    figure(
        "GPUs allocated",
        "GPUs that the job was allocated, and those of them without a process of it. Good: none "
        "unused. If some are, ask for fewer, or check that one rank per GPU starts.",
        "short",
        {
            "allocated": f"sum({_here(f'hpml_job_gpus_allocated{_THIS}')}) "
            f"or max(hpml:job_gpus:count{_THIS})",
            "unused": f"sum({_here(f'(hpml_job_gpus_allocated{_THIS} - hpml_job_gpus_used{_THIS})')})",
        },
        spark=False,
    ),
    figure(
        "Data wait",
        "Share of a step in which ranks wait for their next batch, mean over the time range. Good: "
        "below 20 %. If higher: stage the data, use more loader workers, pack small files.",
        "percentunit",
        f"max(hpml:job_data_wait:ratio{_THIS})",
        steps=LOW_IS_GOOD,
        calc="mean",
    ),
    figure(
        "CPU",
        "CPUs that are busy, of those that the job is bound to, mean over the time range. High is "
        "good unless data wait is high too: then ask for more CPUs per GPU.",
        "percentunit",
        f"sum(hpml:job_cpus_busy:rate5m{_THIS}) / sum({_here(f'hpml_job_cpus{_THIS}')})",
        calc="mean",
    ),
    figure(
        "Memory",
        "Most memory used on a node against its limit, without the page cache. Above 95 % the "
        "kernel ends processes: ask for more memory or use fewer loader workers.",
        "percentunit",
        f"max(hpml:job_memory_used:ratio{_THIS})",
        steps=HIGH_IS_BAD,
        calc="max",
        none="no limit",
    ),
    figure(
        "Speed",
        "Samples that all ranks train on in a second, now. Compare with other runs of the sweep.",
        "samples/s",
        f"sum(hpml:train_samples:rate5m{_THIS})",
        none="not reported",
    ),
    figure(
        "Faults",
        "Processes ended for want of memory, GPU errors (XID) since the job began, and ranks that "
        "do not run where planned. Good: 0. Otherwise see Events below.",
        "short",
        f"(sum(max by (jobid) (hpml_job_oom_events_total{_THIS})) or vector(0)) + "
        f"(count({_of_gpus('hpml_gpu_xid_last_timestamp_seconds', 'uuid, xid')} "
        f"> on () group_left () min(hpml_job_start_timestamp_seconds{_THIS})) or vector(0)) + "
        f"(sum({_here(f'hpml_rank_binding_wrong_ranks{_THIS}')}) or vector(0))",
        steps=FAULTS,
        spark=False,
    ),
]

_FIRST_SCREEN = [
    lines(
        "GPU active",
        "Share of time in which each GPU ran a kernel. Good: above 60 % and alike. One low line is "
        "a slow or unused rank; all low together wait for data or for each other.",
        "percentunit",
        {_GPU: each(f"hpml:gpu_busy:rate5m{_THIS}")},
        width=12,
        top=1,
    ),
    lines(
        "Tensor cores active",
        "Share of time in which tensor cores worked (Hopper and later). GPUs that are active "
        "without them compute in full precision, copy data or wait in communication.",
        "percentunit",
        {_GPU: each(f"hpml:gpu_tensor_active:ratio{_THIS}")},
        width=12,
        top=1,
        none="These GPUs do not report it",
    ),
    lines(
        "Samples per second",
        "Speed of the training on each node. Good: steady. Dips are checkpoints, evaluation, or "
        "storage that others use too.",
        "samples/s",
        {"{{node}}": each(f"hpml:train_samples:rate5m{_THIS}")},
        none="The training does not report samples",
    ),
    lines(
        "Step time",
        "Mean time of a step on the fastest and the slowest rank. Good: alike. A gap of more than "
        "20 % means that ranks wait for one: look at its node, GPU clock and binding.",
        "s",
        {
            "fastest": f"min({_this('hpml_train_rank_step_duration_seconds', which='fastest')})",
            "slowest": f"max({_this('hpml_train_rank_step_duration_seconds', which='slowest')})",
        },
        none="The training does not report steps",
    ),
    lines(
        "Data wait per step",
        "Mean time that ranks wait for a batch. Good: near 0 and alike. If all wait, the storage or "
        "the loader is slow; if one does, it is that rank's node.",
        "s",
        {
            "shortest": f"min({_this('hpml_train_rank_data_wait_seconds', which='shortest')})",
            "longest": f"max({_this('hpml_train_rank_data_wait_seconds', which='longest')})",
        },
        none="The training does not report data wait",
    ),
]

_RESOURCES = [
    "GPU memory and power",
    lines(
        "GPU memory",
        "Memory in use on each GPU. Much free memory allows larger batches; above 95 % a slightly "
        "larger model or batch fails.",
        "percentunit",
        {_GPU: each(f"hpml:gpu_memory_used:ratio{_THIS}")},
        top=1,
    ),
    lines(
        "GPU power",
        "Power drawn by each GPU. Busy GPUs draw near their limit; active but cool ones mostly wait "
        "in communication.",
        "watt",
        {_GPU: each(f"hpml:gpu_power_watts:max{_THIS}")},
    ),
    lines(
        "Multiprocessors active",
        "Share of multiprocessors that were busy (Hopper and later). If much lower than GPU active, "
        "kernels are too small: larger batches, fused kernels, CUDA graphs.",
        "percentunit",
        {_GPU: each(f"hpml:gpu_sm_active:ratio{_THIS}")},
        top=1,
        none="These GPUs do not report it",
    ),
    "CPU and memory",
    lines(
        "CPUs busy",
        "CPUs that work for the job on each node, and those it is bound to.",
        "short",
        {
            "{{node}}": each(f"hpml:job_cpus_busy:rate5m{_THIS}"),
            "allocated": f"max({_here(f'hpml_job_cpus{_THIS}')})",
        },
    ),
    lines(
        "Memory by kind",
        "Memory on all nodes: of processes, of /dev/shm and the like, and the page cache, which the "
        "kernel gives back when needed. The first two must stay below the limit.",
        "bytes",
        {
            "processes": f"sum({_here(_this('hpml_job_memory_bytes', kind='rss'))})",
            "shmem": f"sum({_here(_this('hpml_job_memory_bytes', kind='shmem'))})",
            "cache": f"sum({_here(_this('hpml_job_memory_bytes', kind='cache'))})",
            "limit": f"sum({_here(f'hpml_job_memory_limit_bytes{_THIS}')})",
        },
    ),
    lines(
        "Waiting for resources",
        "Share of time in which some task of the job waited for a CPU, memory or I/O. Good: below "
        "10 %. CPU: ask for more; memory: near the limit; I/O: stage the data.",
        "percentunit",
        {
            "{{resource}}": "max by (resource) "
            f"(rate(hpml_job_pressure_seconds_total{_THIS}{_RATE}))"
        },
    ),
    "Input, output and network",
    lines(
        "Storage",
        "Bytes that the job reads from and writes to storage. Reads in every epoch mean that the "
        "data fits in no cache: stage it. High writes: checkpoints.",
        "Bps",
        {
            "read": f"sum(hpml:job_io_read_bytes:rate5m{_THIS})",
            "written": f"sum(hpml:job_io_write_bytes:rate5m{_THIS})",
        },
        width=6,
    ),
    lines(
        "Staged data and /dev/shm",
        "Files in memory that are the job's, such as what hpml staged, and how full /dev/shm of its "
        "nodes is at most. They count as the job's memory; a full /dev/shm kills loader workers.",
        "bytes",
        {"{{node}}": each(_here(f"hpml_job_shm_bytes{_THIS}"))},
        width=6,
    ),
    lines(
        "Network of the nodes",
        "InfiniBand or RoCE traffic of the job's nodes, with that of other jobs there. Steady "
        "traffic is gradients; compare with the link rate on the Node dashboard.",
        "Bps",
        {
            "received": f"sum({_of_nodes('hpml:node_network_received_bytes:rate5m')})",
            "sent": f"sum({_of_nodes('hpml:node_network_transmitted_bytes:rate5m')})",
        },
        width=6,
        none="No InfiniBand on these nodes",
    ),
    lines(
        "NVLink and PCIe",
        "Bytes between the job's GPUs over NVLink, and to the host over PCIe. Gradients over PCIe "
        "although there is NVLink point at a wrong NCCL setting.",
        "Bps",
        {"{{link}}": f"sum by (link) (hpml:gpu_link_bytes:rate5m{_THIS})"},
        width=6,
    ),
]

_EVENTS = [
    "Nodes, binding and events",
    listing(
        "Nodes of the job",
        "What the job does on each of its nodes. One that differs is the one to look at.",
        [
            f"max by (node) (hpml:job_exporter{_THIS})",
            f"avg by (node) (hpml:gpu_busy:rate5m{_THIS})",
            f"sum by (node) (hpml:job_cpus_busy:rate5m{_THIS})",
            f"sum by (node) (hpml:job_memory_bytes:sum{_THIS})",
            f"max by (node) ({_here(f'hpml_rank_binding_wrong_ranks{_THIS}')})",
            f"max by (node) ({_of_nodes('hpml:node_shm_used:ratio')})",
        ],
        [
            Column("node", "Node", link=link("hpml-node", node="${__value.raw}")),
            Column("B", "GPU active", "percentunit", HIGH_IS_GOOD, bar=True),
            Column("C", "CPUs busy"),
            Column("D", "Memory", "bytes"),
            Column("F", "/dev/shm full", "percentunit", HIGH_IS_BAD),
            Column("E", "Ranks bound wrongly", steps=FAULTS),
        ],
        width=12,
    ),
    lines(
        "Clocks held down",
        "Share of time in which a GPU had to run slower, by its node. Good: 0; the power limit "
        "alone is normal under full load. Heat or power brakes: tell the administrators.",
        "percentunit",
        {_GPU: each(f"hpml:gpu_throttled:rate5m{_THIS}")},
        width=6,
    ),
    lines(
        "Memory events",
        "Processes that the kernel ended for want of memory. Good: 0. Otherwise ask for more "
        "memory, or use fewer loader workers.",
        "short",
        {"OOM": f"sum({_here(f'hpml_job_oom_events_total{_THIS}')})"},
        width=6,
    ),
    listing(
        "GPU errors (XID)",
        "Errors that the driver reported for the job's GPUs. 13, 31 and 43 come from the program; "
        "48, 62, 64, 74, 79, 95, 119 and 120 from the hardware: tell the administrators.",
        [
            "1000 * " + _of_gpus("hpml_gpu_xid_last_timestamp_seconds", "uuid, xid"),
            _of_gpus("hpml_gpu_xid_errors_total", "uuid, xid"),
        ],
        [
            Column("node", "Node"),
            Column("index", "GPU"),
            Column("xid", "XID"),
            Column("A", "Last", "dateTimeAsIso"),
            Column("B", "Errors"),
        ],
        width=12,
        none="No GPU errors",
    ),
    listing(
        "Slowest reader",
        "On each node, the rank that waits longest for data. The same rank again and again: look at "
        "its node's storage and at its CPUs.",
        [
            _here(
                f"hpml_train_longest_data_wait_info{_THIS} * on (cluster, jobid, instance, job) "
                'group_left () hpml_train_rank_data_wait_seconds{which="longest"}'
            )
        ],
        [
            Column("node", "Node"),
            Column("rank", "Rank"),
            Column("A", "Wait per step", "s"),
        ],
        width=12,
        sort="Wait per step",
        none="The training does not report data wait",
    ),
    "Learning",
    lines(
        "Loss",
        "Training loss as it was reported last, mean over ranks. Good: falling. A jump or NaN after "
        "a change of scale: learning rate and warm-up.",
        "short",
        {"loss": f"avg(hpml_train_loss{_THIS})"},
        none="The training does not report it",
    ),
    lines(
        "Accuracy",
        "Accuracy of the last evaluation, mean over ranks.",
        "percentunit",
        {"accuracy": f"avg(hpml_train_accuracy_ratio{_THIS})"},
        none="The training does not report it",
    ),
    lines(
        "Model FLOP/s and communication",
        "Model FLOP/s against the GPUs' peak (MFU), and the share of time in communication where "
        "the training measures it. Good: MFU above 30 %.",
        "percentunit",
        {
            "MFU": f"avg(hpml_train_mfu_ratio{_THIS})",
            "communication ({{method}})": "sum by (method) "
            f"(rate(hpml_train_comm_seconds_total{_THIS}{_RATE})) / on () group_left () "
            f"sum(hpml_train_ranks{_THIS})",
        },
        none="The training does not report it",
    ),
]


def job() -> Dashboard:
    """Return the dashboard."""
    return build_dashboard(
        "hpml-job",
        "Job",
        "One job over its nodes: how well it uses what it was allocated, and what holds it up.",
        [
            variable(
                "jobid",
                "Job",
                'label_values(hpml:job_info{cluster="$cluster"}, jobid)',
                newest=True,
            )
        ],
        [*_WHAT, *_FIRST_SCREEN, *_RESOURCES, *_EVENTS],
    )
