"""The dashboard of one node: its GPUs, jobs, disks and networks."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from hpml_dashboards.panels import (
    FAULTS,
    HIGH_IS_BAD,
    HIGH_IS_GOOD,
    Column,
    bars,
    build_dashboard,
    figure,
    lines,
    link,
    listing,
    select,
    variable,
)

__all__ = ["node"]

_NODE = '{cluster="$cluster", node="$node"}'
_HERE = '{instance="$instance"}'  # the node's own exporter
_GPU = "GPU {{index}}"
_HOT = ((None, "green"), (75, "orange"), (84, "red"))


def _rate(metric: str, **labels: str) -> str:
    return f"rate({_here(metric, **labels)}[$__rate_interval])"


def _here(metric: str, **labels: str) -> str:
    """Return a metric of the node's own exporter."""
    return select(metric, instance="$instance", **labels)


_FIRST_SCREEN = [
    figure(
        "GPUs",
        "GPUs that answer, and those that are lost. Good: none lost. Otherwise drain the node and "
        "look at the XID errors below; a restart brings most of them back.",
        "short",
        {
            "up": _here("hpml_gpus", state="up"),
            "lost": _here("hpml_gpus", state="lost"),
        },
        spark=False,
    ),
    figure(
        "GPU active",
        "Share of time in which the GPUs of the node ran a kernel. Good: above 60 % while jobs "
        "have GPUs here. If lower, open the jobs below.",
        "percentunit",
        f"avg(hpml:gpu_busy:rate5m{_NODE})",
        steps=HIGH_IS_GOOD,
    ),
    figure(
        "GPUs allocated",
        "GPUs that jobs have, and those of them without a process of their job.",
        "short",
        {
            "allocated": f"max(hpml:node_gpus_allocated:count{_NODE})",
            "unused": f"sum(hpml_job_gpus_allocated{_HERE} - hpml_job_gpus_used{_HERE}) or vector(0)",
        },
        spark=False,
    ),
    figure(
        "Hottest GPU",
        "Good: below 75 °C. From 84 °C on GPUs slow down: look at fans, filters and the inlet.",
        "celsius",
        f"max(hpml_gpu_temperature_celsius{_HERE})",
        steps=_HOT,
    ),
    figure(
        "GPU power",
        "Power that all GPUs of the node draw.",
        "watt",
        f"sum(hpml:node_gpu_power_watts:sum{_NODE})",
    ),
    figure(
        "/dev/shm full",
        "Good: below 80 %. When full, loader workers die with bus errors: find the job with "
        "much of it below; leftovers of ended jobs can be deleted.",
        "percentunit",
        f"max(hpml:node_shm_used:ratio{_NODE})",
        steps=HIGH_IS_BAD,
    ),
    figure(
        "Fullest file system",
        "Local file systems. Good: below 80 %. When /tmp or the scratch disk is full, jobs fail.",
        "percentunit",
        f"1 - min(hpml_filesystem_free_bytes{_HERE} / (hpml_filesystem_size_bytes{_HERE} > 0))",
        steps=HIGH_IS_BAD,
    ),
    figure(
        "GPU errors",
        "XID errors and uncorrected memory errors since the exporter or the driver started. "
        "Good: 0. Otherwise see GPU health.",
        "short",
        f"(sum(hpml_gpu_xid_errors_total{_HERE}) or vector(0)) + "
        f"(sum({_here('hpml_gpu_ecc_errors_total', error='uncorrected')}) or vector(0))",
        steps=FAULTS,
        spark=False,
    ),
    lines(
        "GPU active",
        "Share of time in which each GPU ran a kernel. Idle lines are GPUs without a job, or of a "
        "job that does not use them.",
        "percentunit",
        {_GPU: f"hpml:gpu_busy:rate5m{_NODE}"},
        width=12,
        height=8,
        top=1,
    ),
    lines(
        "GPU memory",
        "Memory in use on each GPU. Memory without activity is a hung or waiting process.",
        "percentunit",
        {_GPU: f"hpml:gpu_memory_used:ratio{_NODE}"},
        width=12,
        height=8,
        top=1,
    ),
    listing(
        "Jobs on this node",
        "Jobs that run here, those with most GPUs first. Open one to see what it does.",
        [
            "max by (jobid, user, name, partition) (hpml:job_info * on (cluster, jobid) "
            f"group_left () max by (cluster, jobid) (hpml:job_exporter{_NODE}))",
            f"count by (jobid) (hpml:gpu_info{_NODE})",
            f"avg by (jobid) (hpml:gpu_busy:rate5m{_NODE})",
            f"sum by (jobid) (hpml:job_cpus_busy:rate5m{_NODE})",
            f"sum by (jobid) (hpml:job_memory_bytes:sum{_NODE})",
            f"max by (jobid) (hpml_job_shm_bytes{_HERE})",
            f"max by (jobid) (hpml_job_gpus_foreign{_HERE})",
        ],
        [
            Column("jobid", "Job", link=link("hpml-job", jobid="${__value.raw}")),
            Column("user", "User", link=link("hpml-user", user="${__value.raw}")),
            Column("name", "Name"),
            Column("partition", "Partition"),
            Column("B", "GPUs"),
            Column("C", "GPU active", "percentunit", HIGH_IS_GOOD, bar=True),
            Column("D", "CPUs busy"),
            Column("E", "Memory", "bytes"),
            Column("F", "/dev/shm", "bytes"),
            Column("G", "Foreign GPUs", steps=FAULTS),
        ],
        width=24,
        height=8,
        sort="GPUs",
        none="No jobs in this time range",
    ),
]

_GPUS = [
    "GPU health",
    listing(
        "GPUs",
        "Each GPU now. Uncorrected memory errors, rows that could not be replaced and a PCIe or "
        "NVLink below its maximum under load are reasons to exchange or reseat it.",
        [
            f"max by (uuid, index, name, mig) (hpml_gpu_info{_HERE})",
            f"max by (uuid) (hpml_gpu_temperature_celsius{_HERE})",
            f"max by (uuid) (hpml_gpu_memory_temperature_celsius{_HERE})",
            f"max by (uuid) (hpml_gpu_power_watts{_HERE} / hpml_gpu_power_limit_watts{_HERE})",
            f"max by (uuid) ({_here('hpml_gpu_clock_hertz', type='sm')})",
            f"sum by (uuid) (hpml_gpu_processes{_HERE})",
            f"max by (uuid) ({_here('hpml_gpu_ecc_errors_total', error='uncorrected')})",
            f"max by (uuid) (hpml_gpu_remapped_rows_failed{_HERE} + "
            f"hpml_gpu_remapped_rows_pending{_HERE})",
            f"max by (uuid) (hpml_gpu_pcie_link_width{_HERE} / hpml_gpu_pcie_link_width_max{_HERE})",
            f"max by (uuid) (hpml_gpu_nvlink_links_active{_HERE} / "
            f"(hpml_gpu_nvlink_links{_HERE} > 0))",
        ],
        [
            Column("index", "GPU", width=60),
            Column("name", "Model", width=230),
            Column("mig", "MIG", width=90),
            Column("B", "Core", "celsius", _HOT),
            Column("C", "Memory", "celsius"),
            Column("D", "Power of limit", "percentunit"),
            Column("E", "Clock", "hertz"),
            Column("F", "Processes"),
            Column("G", "ECC uncorrected", steps=FAULTS),
            Column("H", "Bad rows", steps=FAULTS),
            Column("I", "PCIe width", "percentunit", ((None, "red"), (1, "green"))),
            Column("J", "NVLinks", "percentunit", ((None, "red"), (1, "green"))),
        ],
        height=9,
        none="No GPUs",
    ),
    lines(
        "Clocks held down",
        "Time in which GPUs had to run slower, by reason. The power limit (power) is normal under "
        "full load; hw_thermal, hw_slowdown and power_brake are faults of cooling or power.",
        "percentunit",
        {"{{reason}}": f"sum by (reason) ({_rate('hpml_gpu_throttled_seconds_total')})"},
    ),
    lines(
        "GPU temperature",
        "Good: below 75 °C and alike. One hotter GPU has a bad fan or seat.",
        "celsius",
        {
            "GPU {{index}}": f"hpml_gpu_temperature_celsius{_HERE} * on (uuid) group_left (index) "
            f"hpml:gpu_info{_NODE}"
        },
        steps=_HOT,
    ),
    lines(
        "GPU power",
        "Power drawn by each GPU.",
        "watt",
        {_GPU: f"hpml:gpu_power_watts:max{_NODE}"},
    ),
    listing(
        "GPU errors (XID)",
        "48, 62, 64, 74, 79, 95, 119 and 120 come from the hardware: drain the node. 13, 31 and 43 "
        "mostly come from programs.",
        [
            f"1000 * max by (uuid, xid) (hpml_gpu_xid_last_timestamp_seconds{_HERE})",
            f"max by (uuid, xid) (hpml_gpu_xid_errors_total{_HERE})",
        ],
        [
            Column("uuid", "GPU"),
            Column("xid", "XID", width=70),
            Column("A", "Last", "dateTimeAsIso"),
            Column("B", "Errors", width=80),
        ],
        width=12,
        none="No GPU errors",
    ),
    lines(
        "GPU links in error",
        "NVLink errors and PCIe packets that were sent again, in each second. Good: 0.",
        "short",
        {
            "NVLink {{type}}": f"sum by (type) ({_rate('hpml_gpu_nvlink_errors_total')})",
            "PCIe replay": f"sum({_rate('hpml_gpu_pcie_replays_total')})",
        },
        width=6,
    ),
    lines(
        "GPU memory errors corrected",
        "Memory errors that were corrected, in each second. A few are normal; a rising rate "
        "announces uncorrected ones.",
        "short",
        {"corrected": "sum(" + _rate("hpml_gpu_ecc_errors_total", error="corrected") + ")"},
        width=6,
    ),
]

_STORAGE = [
    "Storage",
    lines(
        "Local disks",
        "Bytes read from and written to local disks.",
        "Bps",
        {
            "{{device}} read": _rate("hpml_disk_read_bytes_total"),
            "{{device}} written": _rate("hpml_disk_written_bytes_total"),
        },
    ),
    lines(
        "Disks busy",
        "Share of time in which a disk had something to do. Above 90 % it limits the jobs: stage "
        "data in memory instead, or read larger pieces.",
        "percentunit",
        {"{{device}}": _rate("hpml_disk_busy_seconds_total")},
        top=1,
        steps=HIGH_IS_BAD,
    ),
    bars(
        "Local file systems",
        "How full each is. Good: below 80 %.",
        "percentunit",
        {
            "{{mountpoint}}": f"1 - hpml_filesystem_free_bytes{_HERE} / "
            f"(hpml_filesystem_size_bytes{_HERE} > 0)"
        },
        steps=HIGH_IS_BAD,
    ),
    lines(
        "NFS and Lustre",
        "Bytes read from and written to network file systems by this node.",
        "Bps",
        {
            "{{server}} read": f"sum by (server) ({_rate('hpml_nfs_read_bytes_total')})",
            "{{server}} written": f"sum by (server) ({_rate('hpml_nfs_written_bytes_total')})",
            "{{filesystem}} read": _rate("hpml_lustre_read_bytes_total"),
            "{{filesystem}} written": _rate("hpml_lustre_written_bytes_total"),
        },
        none="No NFS or Lustre mounts",
    ),
    lines(
        "NFS answer time",
        "Mean time from a request to its answer. Good: below 10 ms. Higher on all nodes: the "
        "server is busy; on this one: its network.",
        "s",
        {
            "{{server}}": f"sum by (server) ({_rate('hpml_nfs_round_trip_seconds_total')}) / "
            f"(sum by (server) ({_rate('hpml_nfs_operations_total')}) > 0)"
        },
        none="No NFS mounts",
    ),
    lines(
        "NFS retries and metadata calls",
        "Requests sent again or timed out, and Lustre calls that are neither read nor write, in "
        "each second. Retries: good is 0. Many metadata calls are many small files: pack them.",
        "short",
        {
            "{{server}} sent again": f"sum by (server) ({_rate('hpml_nfs_retransmissions_total')})",
            "{{server}} timed out": f"sum by (server) ({_rate('hpml_nfs_timeouts_total')})",
            "{{filesystem}} metadata": "sum by (filesystem) ("
            + _rate("hpml_lustre_operations_total", op="~open|getattr|other")
            + ")",
        },
        none="No NFS or Lustre mounts",
    ),
]

_NETWORK = [
    "Network and memory",
    lines(
        "InfiniBand",
        "Bytes through each port. Compare with its rate in the next panel.",
        "Bps",
        {
            "{{device}} received": _rate("hpml_infiniband_received_bytes_total"),
            "{{device}} sent": _rate("hpml_infiniband_transmitted_bytes_total"),
        },
        none="No InfiniBand on this node",
    ),
    listing(
        "Ports",
        "Good: all up, at the same rate. A port that is down or slower slows every job that spans "
        "nodes: reseat or exchange its cable.",
        [
            f"max by (device, port, link_layer, rate) (hpml_infiniband_info{_HERE})",
            f"max by (device, port) (hpml_infiniband_up{_HERE})",
            f"max by (device, port) (hpml_infiniband_link_rate_bytes_per_second{_HERE})",
            f"sum by (device, port) ({_rate('hpml_infiniband_events_total')})",
        ],
        [
            Column("device", "Device"),
            Column("port", "Port", width=60),
            Column("link_layer", "Link"),
            Column("B", "Up", steps=((None, "red"), (1, "green")), width=60),
            Column("C", "Rate", "Bps"),
            Column("D", "Errors and retries per s"),
        ],
        width=8,
        none="No InfiniBand on this node",
    ),
    lines(
        "Congestion",
        "Ticks in which a port had data but could not send, in each second. Good: near 0. "
        "Otherwise other traffic fills the fabric.",
        "short",
        {"{{device}}": _rate("hpml_infiniband_transmit_wait_ticks_total")},
        none="No InfiniBand on this node",
    ),
]


def node() -> Dashboard:
    """Return the dashboard."""
    return build_dashboard(
        "hpml-node",
        "Node",
        "One node: its GPUs and their health, the jobs on it, its disks and networks.",
        [
            variable("node", "Node", 'label_values(hpml_node_info{cluster="$cluster"}, node)'),
            variable(
                "instance",
                "",
                'label_values(hpml_node_info{cluster="$cluster", node="$node", scope="node"}, '
                "instance)",
            ),
        ],
        [*_FIRST_SCREEN, *_GPUS, *_STORAGE, *_NETWORK],
    )
