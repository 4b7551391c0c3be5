"""The dashboard of one node: its GPUs, jobs, disks and networks."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from hpml_dashboards.panels import (
    Panel,
    bars,
    build_dashboard,
    figure,
    lines,
    listing,
    or_zero,
    select,
    variable,
)

_NODE = '{cluster="$cluster", node="$node"}'
_GPU = "GPU {{index}}"


def _own(metric: str, **labels: str) -> str:
    # By instance, not by node: a job's own exporter on this node shows some of the same figures,
    # which would count twice.
    return select(metric, instance="$instance", **labels)


def _rate(counter: str, by: str, of: str = "sum", **labels: str) -> str:
    return f"{of} by ({by}) (rate({_own(f'hpml_{counter}_total', **labels)}[$__rate_interval]))"


def _both(metric: str, label: str) -> dict[str, str]:
    """Return the bytes read and written per second."""
    return {
        f"{{{{{label}}}}} {way}": _rate(f"{metric}_{way}_bytes", label)
        for way in ("read", "written")
    }


def _gpu(metric: str, **labels: str) -> str:
    return f"max by (uuid) ({_own(metric, **labels)})"


_JOBS = "hpml:job_info * on (cluster, jobid) group_left () max by (cluster, jobid) "
_TEMPERATURE = _own("hpml_gpu_temperature_celsius")
_NVLINK = f"{_gpu('hpml_gpu_nvlink_links_active')} / ({_gpu('hpml_gpu_nvlink_links')} > 0)"
_XID_LAST = _own("hpml_gpu_xid_last_timestamp_seconds")
_INDEX = f" * on (uuid) group_left (index) hpml:gpu_info{_NODE}"
_FREE = f"{_own('hpml_filesystem_free_bytes')} / ({_own('hpml_filesystem_size_bytes')} > 0)"
_UNCORRECTED = _own("hpml_gpu_ecc_errors_total", error="uncorrected")
_BAD_ROWS = "hpml_gpu_remapped_rows_failed", "hpml_gpu_remapped_rows_pending"

_ABOUT = """
GPUs: GPUs that answer, and lost ones. Good: none lost. Otherwise drain the node, see its XIDs.
GPU active: Share of time with a kernel. Good: above 60 % with jobs here. Else open them below.
GPUs of jobs: GPUs that jobs have, and those without a process. Good: none unused. Ask the owner.
Hottest GPU: Good: below 75 °C. From 84 °C on GPUs slow down: look at fans, filters and the inlet.
GPU power: Power that all GPUs draw. Compare with what the rack may draw.
Shm full: How full /dev/shm is. Good: below 80 %. When full, loader workers die of bus
    errors: find the job below; leftovers of ended jobs can be deleted.
Fullest disk: How full the fullest local file system is. Good: below 80 %. When full, jobs fail.
GPU errors: XID and uncorrected memory errors since the driver's start. Good: 0. Else see below.
GPU memory: Memory in use on each GPU. Memory without activity is a hung or waiting process.
Jobs on this node: Jobs that run here. Open one to see what it waits for. Foreign GPUs were
    allocated to somebody else: constrain devices in Slurm's cgroup.conf.
Clocks held down: Time in which GPUs ran slower, by reason. power is the power limit, normal under
    full load; hw_thermal, hw_slowdown and power_brake are faults of cooling or supply.
Link and memory errors: Repaired ones in each second. Good: 0. A rising rate announces a failure;
    NFS requests that are sent again point to the network or the server.
GPU errors (XID): 48, 62, 64, 74, 79, 95, 119 and 120 come from hardware: drain the node. 13, 31
    and 43 mostly come from programs.
Local disks: Bytes in each second. Steady reads: the data staged to disk fits into no cache.
Disks busy: Above 90 % a disk limits the jobs: stage into memory, or read larger pieces.
Local file systems: How full each is. Good: below 80 %. Otherwise delete leftovers of ended jobs.
NFS and Lustre: Bytes in each second. The same reads in each epoch: stage the data.
Requests to file servers: In each second. Thousands of opens and other requests: many small files.
    Pack them, or stage the data.
NFS answer time: Good: below 10 ms. Slow on all nodes: the server; on this one: its network.
Host temperatures: Hottest sensor of each chip. Near its critical temperature, drain the node.
Links lost: Losses in the last hour. More than one or two: exchange the cable.
Host health: Stuck processes wait for a disk or a file server and cannot be ended. A clock that
    is not synchronised: is chronyd running? Memory errors are uncorrected ones. Good: 0 of each.
InfiniBand: Bytes through each port. Compare with the rate of the link.
Ports: Good: all up at the same rate. A slow one slows every job across nodes: see its cable. Waits
    are ticks in which the port had data but could not send: other traffic fills the fabric.
"""

_CONTENT: list[Panel | str] = [
    figure(
        "GPUs",
        "count",
        {"up": _own("hpml_gpus", state="up"), "lost": _own("hpml_gpus", state="lost")},
    ),
    figure("GPU active", "use", f"avg(hpml:gpu_busy:rate2m{_NODE})"),
    figure(
        "GPUs of jobs",
        "count",
        {
            "allocated": f"max(hpml:node_gpus_allocated:count{_NODE})",
            "unused": or_zero(
                f"sum({_own('hpml_job_gpus_allocated')} - {_own('hpml_job_gpus_used')})",
                f"hpml:node_gpus_allocated:count{_NODE}",
            ),
        },
    ),
    figure("Hottest GPU", "heat", f"max({_TEMPERATURE})"),
    figure("GPU power", "watts", f"sum(hpml:node_gpu_power_watts:sum{_NODE})"),
    figure("Shm full", "full", f"max(hpml:node_shm_used:ratio{_NODE})"),
    figure("Fullest disk", "full", f"1 - min({_FREE})"),
    figure(
        "GPU errors",
        "faults",
        " + ".join(
            or_zero(f"sum({errors})", _own("hpml_gpus"))
            for errors in (_own("hpml_gpu_xid_errors_total"), _UNCORRECTED)
        ),
    ),
    lines("GPU active", "share", {_GPU: f"max by (index) (hpml:gpu_busy:rate2m{_NODE})"}, width=12),
    lines(
        "GPU memory",
        "share",
        {_GPU: f"max by (index) (hpml:gpu_memory_used:ratio{_NODE})"},
        width=12,
    ),
    listing(
        "Jobs on this node",
        "jobid array user partition name",
        {
            "-": "max by (jobid, array, user, name, partition) "
            f"({_JOBS}(hpml:job_exporter{_NODE}))",
            "GPUs": f'count by (jobid) (hpml:gpu_info{_NODE[:-1]}, jobid!=""}})',
            "GPU active": f'avg by (jobid) (hpml:gpu_busy:rate2m{_NODE[:-1]}, jobid!=""}})',
            "CPUs busy": f"sum by (jobid) (hpml:job_cpus_busy:rate5m{_NODE})",
            "Memory": f"sum by (jobid) (hpml:job_memory_bytes:sum{_NODE})",
            "GPU memory": f"sum by (jobid) ({_own('hpml_job_gpu_memory_used_bytes')})",
            "Processes": f"max by (jobid) ({_own('hpml_job_processes')})",
            "Shm": f"max by (jobid) ({_own('hpml_job_shm_bytes')})",
            "Foreign GPUs": f"max by (jobid) ({_own('hpml_job_gpus_foreign')})",
        },
        width=24,
        sort="GPUs",
        none="No job",
    ),
    "GPU health",
    listing(
        "GPUs",
        "index name mig",
        {
            # The hidden uuid joins all columns of a GPU into one row.
            "-": f"max by (uuid, index, name, mig) ({_own('hpml_gpu_info')})",
            "Core": _gpu("hpml_gpu_temperature_celsius"),
            "HBM": _gpu("hpml_gpu_memory_temperature_celsius"),
            "Power": _gpu("hpml_gpu_power_watts"),
            "Power limit": _gpu("hpml_gpu_power_limit_watts"),
            "Clock": _gpu("hpml_gpu_clock_hertz", type="sm"),
            "Processes": f"sum by (uuid) ({_own('hpml_gpu_processes')})",
            "ECC errors": f"max by (uuid) ({_UNCORRECTED})",
            "Remapped": f"sum by (uuid) ({_own('hpml_gpu_remapped_rows')})",
            "Bad rows": f"max by (uuid) ({' + '.join(map(_own, _BAD_ROWS))})",
            "PCIe": f"{_gpu('hpml_gpu_pcie_link_width')} / " + _gpu("hpml_gpu_pcie_link_width_max"),
            "NVLink": _NVLINK,
        },
        width=24,
        height=10,
    ),
    lines(
        "Clocks held down",
        "share",
        {"{{reason}}": _rate("gpu_throttled_seconds", "reason", "avg")},
        width=8,
    ),
    lines(
        "Link and memory errors",
        "count",
        {
            "NVLink {{type}}": _rate("gpu_nvlink_errors", "type"),
            "PCIe replays": _rate("gpu_pcie_replays", ""),
            "ECC corrected": _rate("gpu_ecc_errors", "", error="corrected"),
            "NFS sent again": _rate("nfs_retransmissions", ""),
        },
        width=8,
    ),
    listing(
        "GPU errors (XID)",
        "index xid",
        {
            "Last": f"1000 * {_XID_LAST}{_INDEX}",
            "Errors": f"{_own('hpml_gpu_xid_errors_total')}{_INDEX}",
        },
        width=8,
        none="No errors",
    ),
    "Storage",
    lines("Local disks", "rate", _both("disk", "device"), width=6),
    lines("Disks busy", "full", {"{{device}}": _rate("disk_busy_seconds", "device")}, width=6),
    bars("Local file systems", "full", {"{{mountpoint}}": f"1 - {_FREE}"}, width=6),
    lines(
        "NFS and Lustre",
        "rate",
        _both("nfs", "server") | _both("lustre", "filesystem"),
        width=6,
        none="No NFS or Lustre here",
    ),
    lines(
        "NFS answer time",
        "seconds",
        {
            "{{server}}": f"{_rate('nfs_round_trip_seconds', 'server')} / "
            f"({_rate('nfs_operations', 'server')} > 0)"
        },
        width=6,
        none="No NFS here",
    ),
    lines(
        "Requests to file servers",
        "count",
        {
            "NFS {{op}}": _rate("nfs_operations", "op"),
            "Lustre {{op}}": _rate("lustre_operations", "op"),
        },
        width=6,
        none="No NFS or Lustre here",
    ),
    lines(
        "InfiniBand",
        "rate",
        {
            "{{device}} received": _rate("infiniband_received_bytes", "device"),
            "{{device}} sent": _rate("infiniband_transmitted_bytes", "device"),
        },
        width=6,
        none="No InfiniBand or RoCE here",
    ),
    lines(
        "Host temperatures",
        "heat",
        {"{{chip}}": _own("hpml_node_temperature_celsius")},
        width=6,
        none="No sensors",
    ),
    lines(
        "Links lost",
        "count",
        {"{{device}}": f"increase({_own('hpml_network_link_down_total')}[1h])"},
    ),
    figure(
        "Host health",
        "faults",
        {
            "stuck": f"max({_own('hpml_node_stuck_processes')})",
            "zombies": f"max({_own('hpml_node_zombies')})",
            "read-only": f"sum({_own('hpml_filesystem_read_only')})",
            "memory errors": f"sum({_own('hpml_node_memory_errors_total', error='uncorrected')})",
            "clock not synchronised": f"1 - max({_own('hpml_node_clock_synchronized')})",
        },
        width=8,
    ),
    listing(
        "Ports",
        "device port",
        {
            "Up": f"max by (device, port) ({_own('hpml_infiniband_up')})",
            "Rate": f"max by (device, port) ({_own('hpml_infiniband_link_rate_bytes_per_second')})",
            "Errors/s": _rate("infiniband_events", "device, port"),
            "Waits/s": _rate("infiniband_transmit_wait_ticks", "device, port"),
        },
        width=8,
        none="No InfiniBand or RoCE here",
    ),
]


def node() -> Dashboard:
    """Return the dashboard."""
    nodes = 'label_values(hpml_node_info{cluster="$cluster"}, node)'
    own = select("hpml_node_info", cluster="$cluster", node="$node", scope="node")
    return build_dashboard(
        "hpml-node",
        "One node: its GPUs and their health, the jobs on it, its disks and networks.",
        _ABOUT,
        [
            variable("node", "Node", nodes),
            variable("instance", "", f"label_values({own}, instance)"),
            variable("jobid", "", f"label_values(hpml:job_exporter{_NODE}, jobid)", newest=True),
        ],
        _CONTENT,
    )
