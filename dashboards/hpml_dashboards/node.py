"""The dashboard of one node: its GPUs, jobs, disks and networks."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from hpml_dashboards.panels import (
    BYTES,
    COUNT,
    FAULTS,
    FULL,
    HEAT,
    RATE,
    SECONDS,
    SHARE,
    TIME,
    USE,
    WATTS,
    WHOLE,
    Kind,
    bars,
    build_dashboard,
    figure,
    lines,
    listing,
    select,
    variable,
)

__all__ = ["node"]

_NODE = '{cluster="$cluster", node="$node"}'
_GPU = "GPU {{index}}"


def _own(metric: str, **labels: str) -> str:
    """Return a metric of the node's own exporter."""
    return select(metric, instance="$instance", **labels)


def _rate(metric: str, by: str, **labels: str) -> str:
    return f"sum by ({by}) (rate({_own(metric, **labels)}[$__rate_interval]))"


def _gpu(metric: str, **labels: str) -> str:
    return f"max by (uuid) ({_own(metric, **labels)})"


_JOBS = "hpml:job_info * on (cluster, jobid) group_left () max by (cluster, jobid) "
_TEMPERATURE = _own("hpml_gpu_temperature_celsius")
_FREE = f"{_own('hpml_filesystem_free_bytes')} / ({_own('hpml_filesystem_size_bytes')} > 0)"
_UNCORRECTED = _own("hpml_gpu_ecc_errors_total", error="uncorrected")
_BAD_ROWS = "hpml_gpu_remapped_rows_failed", "hpml_gpu_remapped_rows_pending"
_NO_SHARES = "No network file systems"
_NO_PORTS = "No InfiniBand on this node"

_CONTENT = [
    figure(
        "GPUs",
        COUNT,
        {"up": _own("hpml_gpus", state="up"), "lost": _own("hpml_gpus", state="lost")},
        "GPUs that answer, and lost ones. Good: none lost. Otherwise drain the node and look at "
        "the XID errors below.",
    ),
    figure(
        "GPU active",
        USE,
        f"avg(hpml:gpu_busy:rate2m{_NODE})",
        "Share of time with a kernel on the GPUs. Good: above 60 % while jobs have GPUs here. If "
        "lower, open the jobs below.",
    ),
    figure(
        "GPUs of jobs",
        COUNT,
        {
            "allocated": f"max(hpml:node_gpus_allocated:count{_NODE})",
            "unused": f"sum({_own('hpml_job_gpus_allocated')} - {_own('hpml_job_gpus_used')}) "
            "or vector(0)",
        },
        "GPUs that jobs have, and those without a process of their job. Good: none unused. "
        "Otherwise ask the owner of the job.",
    ),
    figure(
        "Hottest GPU",
        HEAT,
        f"max({_TEMPERATURE})",
        "Good: below 75 °C. From 84 °C on GPUs slow down: look at fans, filters and the inlet.",
    ),
    figure(
        "GPU power",
        WATTS,
        f"sum(hpml:node_gpu_power_watts:sum{_NODE})",
        "Power that all GPUs draw. Compare with what the rack may draw.",
    ),
    figure(
        "/dev/shm",
        FULL,
        f"max(hpml:node_shm_used:ratio{_NODE})",
        "How full it is. Good: below 80 %. When full, loader workers die of bus errors: find the "
        "job below; leftovers of ended jobs can be deleted.",
    ),
    figure(
        "Fullest disk",
        FULL,
        f"1 - min({_FREE})",
        "How full the fullest local file system is. Good: below 80 %. When full, jobs fail.",
    ),
    figure(
        "GPU errors",
        FAULTS,
        f"(sum({_own('hpml_gpu_xid_errors_total')}) or vector(0)) + "
        f"(sum({_UNCORRECTED}) or vector(0))",
        "XID and uncorrected memory errors since the exporter and the driver started. Good: 0. "
        "Otherwise see the tables below.",
    ),
    lines(
        "GPU active",
        SHARE,
        {_GPU: f"hpml:gpu_busy:rate2m{_NODE}"},
        "Share of time with a kernel on each GPU. Lines at 0 are GPUs without a job, or of a job "
        "that does not use them.",
        width=12,
        top=1,
    ),
    lines(
        "GPU memory",
        SHARE,
        {_GPU: f"hpml:gpu_memory_used:ratio{_NODE}"},
        "Memory in use on each GPU. Memory without activity is a hung or waiting process.",
        width=12,
        top=1,
    ),
    listing(
        "Jobs on this node",
        "jobid user name partition",
        {
            "": (
                COUNT,
                f"max by (jobid, user, name, partition) ({_JOBS}(hpml:job_exporter{_NODE}))",
            ),
            "GPUs": (COUNT, f'count by (jobid) (hpml:gpu_info{_NODE[:-1]}, jobid!=""}})'),
            "GPU active": (USE, f'avg by (jobid) (hpml:gpu_busy:rate2m{_NODE[:-1]}, jobid!=""}})'),
            "CPUs busy": (COUNT, f"sum by (jobid) (hpml:job_cpus_busy:rate5m{_NODE})"),
            "Memory": (BYTES, f"sum by (jobid) (hpml:job_memory_bytes:sum{_NODE})"),
            "/dev/shm": (BYTES, f"max by (jobid) ({_own('hpml_job_shm_bytes')})"),
            "Foreign GPUs": (FAULTS, f"max by (jobid) ({_own('hpml_job_gpus_foreign')})"),
        },
        "Jobs that run here. Open one to see what it waits for. Foreign GPUs were allocated to "
        "somebody else: constrain devices in Slurm's cgroup.conf.",
        width=24,
        sort="GPUs",
        none="No job runs here",
    ),
    "GPU health",
    listing(
        "GPUs",
        "index name mig",
        {
            "": (COUNT, f"max by (uuid, index, name, mig) ({_own('hpml_gpu_info')})"),
            "Core": (HEAT, _gpu("hpml_gpu_temperature_celsius")),
            "HBM": (HEAT, _gpu("hpml_gpu_memory_temperature_celsius")),
            "Power": (WATTS, _gpu("hpml_gpu_power_watts")),
            "Power limit": (WATTS, _gpu("hpml_gpu_power_limit_watts")),
            "Clock": (Kind("hertz"), _gpu("hpml_gpu_clock_hertz", type="sm")),
            "Processes": (COUNT, f"sum by (uuid) ({_own('hpml_gpu_processes')})"),
            "ECC errors": (FAULTS, f"max by (uuid) ({_UNCORRECTED})"),
            "Bad rows": (FAULTS, f"max by (uuid) ({' + '.join(map(_own, _BAD_ROWS))})"),
            "PCIe": (
                WHOLE,
                f"{_gpu('hpml_gpu_pcie_link_width')} / " + _gpu("hpml_gpu_pcie_link_width_max"),
            ),
            "NVLink": (
                WHOLE,
                f"{_gpu('hpml_gpu_nvlink_links_active')} / ({_gpu('hpml_gpu_nvlink_links')} > 0)",
            ),
        },
        "Uncorrected ECC errors, rows of memory that wait for or cannot have a replacement, and "
        "links below full width are reasons to drain the node and reseat or exchange the GPU.",
        width=24,
        height=9,
        none="No GPUs",
    ),
    lines(
        "Clocks held down",
        SHARE,
        {"{{reason}}": _rate("hpml_gpu_throttled_seconds_total", "reason")},
        "Time in which GPUs ran slower, by reason. power is the power limit, normal under full "
        "load; hw_thermal, hw_slowdown and power_brake are faults of cooling or supply.",
        width=6,
    ),
    lines(
        "GPU temperature",
        HEAT,
        {_GPU: f"{_TEMPERATURE} * on (uuid) group_left (index) hpml:gpu_info{_NODE}"},
        "Good: below 75 °C and alike. One hotter GPU: fan, seat or thermal paste.",
        width=6,
    ),
    lines(
        "Link and memory errors",
        COUNT,
        {
            "NVLink {{type}}": _rate("hpml_gpu_nvlink_errors_total", "type"),
            "PCIe replays": _rate("hpml_gpu_pcie_replays_total", ""),
            "ECC corrected": _rate("hpml_gpu_ecc_errors_total", "", error="corrected"),
        },
        "Errors in each second that were repaired. Good: 0. A rising rate announces a failure.",
        width=6,
    ),
    listing(
        "GPU errors (XID)",
        "uuid xid",
        {
            "Last": (TIME, f"1000 * {_own('hpml_gpu_xid_last_timestamp_seconds')}"),
            "Errors": (COUNT, _own("hpml_gpu_xid_errors_total")),
        },
        "48, 62, 64, 74, 79, 95, 119 and 120 come from hardware: drain the node. 13, 31 and 43 "
        "mostly come from programs.",
        width=6,
        none="No GPU errors",
    ),
    "Storage",
    lines(
        "Local disks",
        RATE,
        {
            "{{device}} read": _rate("hpml_disk_read_bytes_total", "device"),
            "{{device}} written": _rate("hpml_disk_written_bytes_total", "device"),
        },
        "Bytes read from and written to local disks. Steady reads: the data is staged to disk but "
        "fits into no cache.",
        width=6,
    ),
    lines(
        "Disks busy",
        FULL,
        {"{{device}}": _rate("hpml_disk_busy_seconds_total", "device")},
        "Share of time with something to do. Above 90 % a disk limits the jobs: stage into memory, "
        "or read larger pieces.",
        width=6,
        top=1,
    ),
    bars(
        "Local file systems",
        FULL,
        {"{{mountpoint}}": f"1 - {_FREE}"},
        "How full each is. Good: below 80 %. Otherwise delete leftovers of ended jobs.",
        width=6,
        top=1,
    ),
    lines(
        "NFS and Lustre",
        RATE,
        {
            "{{server}} read": _rate("hpml_nfs_read_bytes_total", "server"),
            "{{server}} written": _rate("hpml_nfs_written_bytes_total", "server"),
            "{{filesystem}} read": _rate("hpml_lustre_read_bytes_total", "filesystem"),
            "{{filesystem}} written": _rate("hpml_lustre_written_bytes_total", "filesystem"),
        },
        "Bytes from and to network file systems. The same reads in each epoch: stage the data.",
        width=6,
        none=_NO_SHARES,
    ),
    lines(
        "NFS answer time",
        SECONDS,
        {
            "{{server}}": f"{_rate('hpml_nfs_round_trip_seconds_total', 'server')} / "
            f"({_rate('hpml_nfs_operations_total', 'server')} > 0)"
        },
        "Mean time from request to answer. Good: below 10 ms. Slow on all nodes: the server; on "
        "this one: its network.",
        width=6,
        none=_NO_SHARES,
    ),
    lines(
        "Retries and metadata",
        COUNT,
        {
            "{{server}} sent again": _rate("hpml_nfs_retransmissions_total", "server"),
            "{{server}} timed out": _rate("hpml_nfs_timeouts_total", "server"),
            "{{filesystem}} {{op}}": _rate("hpml_lustre_operations_total", "filesystem, op"),
        },
        "NFS requests sent again or timed out, good: 0, and Lustre's calls, in each second. Many "
        "open and getattr are many small files: pack them.",
        width=6,
        none=_NO_SHARES,
    ),
    lines(
        "InfiniBand",
        RATE,
        {
            "{{device}} received": _rate("hpml_infiniband_received_bytes_total", "device"),
            "{{device}} sent": _rate("hpml_infiniband_transmitted_bytes_total", "device"),
            "{{device}} waits": _rate("hpml_infiniband_transmit_wait_ticks_total", "device"),
        },
        "Bytes through each port, and ticks in which it had data but could not send. Compare with "
        "the rate of the link; many waits: other traffic fills the fabric.",
        width=6,
        none=_NO_PORTS,
    ),
    listing(
        "Ports",
        "device port link_layer",
        {
            "": (COUNT, f"max by (device, port, link_layer) ({_own('hpml_infiniband_info')})"),
            "Up": (WHOLE, f"max by (device, port) ({_own('hpml_infiniband_up')})"),
            "Rate": (
                RATE,
                f"max by (device, port) ({_own('hpml_infiniband_link_rate_bytes_per_second')})",
            ),
            "Errors/s": (COUNT, _rate("hpml_infiniband_events_total", "device, port")),
        },
        "Good: all up at the same rate. One that is down or slower slows every job across nodes: "
        "reseat or exchange its cable.",
        width=6,
        none=_NO_PORTS,
    ),
]


def node() -> Dashboard:
    """Return the dashboard."""
    nodes = 'label_values(hpml_node_info{cluster="$cluster"}, node)'
    own = select("hpml_node_info", cluster="$cluster", node="$node", scope="node")
    return build_dashboard(
        "hpml-node",
        "One node: its GPUs and their health, the jobs on it, its disks and networks.",
        [
            variable("node", "Node", nodes),
            variable("instance", "", f"label_values({own}, instance)"),
        ],
        _CONTENT,
    )
