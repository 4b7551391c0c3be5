"""Metrics of a node as a whole: /dev/shm, local disks, InfiniBand, NFS and Lustre as a client."""

from __future__ import annotations

from hpml_exporters.core.metric import MetricSpec

__all__ = [
    "DISK_BUSY",
    "DISK_IO_TIME",
    "DISK_READ",
    "DISK_WRITTEN",
    "FS_FREE",
    "FS_SIZE",
    "IB_EVENTS",
    "IB_INFO",
    "IB_RECEIVED",
    "IB_SPEED",
    "IB_TRANSMITTED",
    "IB_UP",
    "JOB_SHM",
    "LUSTRE_OPERATIONS",
    "LUSTRE_READ",
    "LUSTRE_WRITTEN",
    "NFS_MOUNTS",
    "NFS_OPERATIONS",
    "NFS_READ",
    "NFS_RETRANSMISSIONS",
    "NFS_RTT",
    "NFS_TIMEOUTS",
    "NFS_WRITTEN",
    "SHM_SIZE",
    "SHM_USED",
    "SPECS",
]

_SHM = "statvfs(2) of /dev/shm"
_DISKSTATS = "/proc/diskstats"
_STATVFS = "/proc/self/mountinfo, statvfs(2) of local file systems"
_IB = "/sys/class/infiniband/*/ports/*"
_MOUNTSTATS = "/proc/self/mountstats"
_LLITE = "llite/*/stats in /proc/fs/lustre, /sys/kernel/debug/lustre or /sys/fs/lustre"

SHM_SIZE = MetricSpec(
    "hpml_shm_size_bytes", "gauge", "Size of /dev/shm.", unit="bytes", source=_SHM
)
SHM_USED = MetricSpec(
    "hpml_shm_used_bytes", "gauge", "Memory that files in /dev/shm take.", unit="bytes", source=_SHM
)
JOB_SHM = MetricSpec(
    "hpml_job_shm_bytes",
    "gauge",
    "Memory of files in /dev/shm that are a job's: what hpml staged for it,"
    " and files of its user where that user has no other job here.",
    ("jobid",),
    "bytes",
    "a bounded walk of /dev/shm, manifests of hpml's staged data",
)

DISK_READ = MetricSpec(
    "hpml_disk_read_bytes_total",
    "counter",
    "Bytes read from a local disk since boot.",
    ("device",),
    "bytes",
    _DISKSTATS,
)
DISK_WRITTEN = MetricSpec(
    "hpml_disk_written_bytes_total",
    "counter",
    "Bytes written to a local disk since boot.",
    ("device",),
    "bytes",
    _DISKSTATS,
)
DISK_BUSY = MetricSpec(
    "hpml_disk_busy_seconds_total",
    "counter",
    "Time in which a local disk had requests to serve.",
    ("device",),
    "seconds",
    _DISKSTATS,
)
DISK_IO_TIME = MetricSpec(
    "hpml_disk_io_time_seconds_total",
    "counter",
    "Time that requests have spent in a disk and its queue, summed over requests.",
    ("device",),
    "seconds",
    _DISKSTATS,
)
FS_SIZE = MetricSpec(
    "hpml_filesystem_size_bytes",
    "gauge",
    "Size of a local file system.",
    ("mountpoint", "fstype"),
    "bytes",
    _STATVFS,
)
FS_FREE = MetricSpec(
    "hpml_filesystem_free_bytes",
    "gauge",
    "Space of a local file system that users can still take.",
    ("mountpoint", "fstype"),
    "bytes",
    _STATVFS,
)

IB_RECEIVED = MetricSpec(
    "hpml_infiniband_received_bytes_total",
    "counter",
    "Bytes that a port has received (InfiniBand, or RDMA over Ethernet).",
    ("device", "port"),
    "bytes",
    f"{_IB}/counters/port_rcv_data, which counts words of 4 bytes",
)
IB_TRANSMITTED = MetricSpec(
    "hpml_infiniband_transmitted_bytes_total",
    "counter",
    "Bytes that a port has sent (InfiniBand, or RDMA over Ethernet).",
    ("device", "port"),
    "bytes",
    f"{_IB}/counters/port_xmit_data, which counts words of 4 bytes",
)
IB_EVENTS = MetricSpec(
    "hpml_infiniband_events_total",
    "counter",
    "Errors, retries and signs of congestion at a port, by the kernel's name of the counter.",
    ("device", "port", "event"),
    source=f"{_IB}/counters and hw_counters",
)
IB_UP = MetricSpec(
    "hpml_infiniband_up",
    "gauge",
    "Whether a port's state is ACTIVE.",
    ("device", "port"),
    source=f"{_IB}/state",
)
IB_SPEED = MetricSpec(
    "hpml_infiniband_link_speed_bytes",
    "gauge",
    "Bytes per second that a port's link is rated at, in each direction.",
    ("device", "port"),
    "bytes",
    f"{_IB}/rate",
)
IB_INFO = MetricSpec(
    "hpml_infiniband_info",
    "info",
    "What a port is: its link layer, and the rate in the kernel's words.",
    ("device", "port", "link_layer", "rate"),
    source=f"{_IB}/link_layer",
)

NFS_MOUNTS = MetricSpec(
    "hpml_nfs_mounts", "gauge", "NFS file systems that are mounted here.", source=_MOUNTSTATS
)
NFS_READ = MetricSpec(
    "hpml_nfs_read_bytes_total",
    "counter",
    "Bytes that came from the server (reads from the page cache are not in).",
    ("mountpoint",),
    "bytes",
    _MOUNTSTATS,
)
NFS_WRITTEN = MetricSpec(
    "hpml_nfs_written_bytes_total",
    "counter",
    "Bytes that went to the server.",
    ("mountpoint",),
    "bytes",
    _MOUNTSTATS,
)
NFS_OPERATIONS = MetricSpec(
    "hpml_nfs_operations_total",
    "counter",
    "Requests to the server by operation: read, write, getattr, lookup, open, and the others.",
    ("mountpoint", "op"),
    source=_MOUNTSTATS,
)
NFS_RTT = MetricSpec(
    "hpml_nfs_round_trip_seconds_total",
    "counter",
    "Time from sending requests to their replies; over the operations it is the mean round trip.",
    ("mountpoint", "op"),
    "seconds",
    _MOUNTSTATS,
)
NFS_RETRANSMISSIONS = MetricSpec(
    "hpml_nfs_retransmissions_total",
    "counter",
    "Requests that had to be sent again.",
    ("mountpoint",),
    source=_MOUNTSTATS,
)
NFS_TIMEOUTS = MetricSpec(
    "hpml_nfs_timeouts_total",
    "counter",
    "Requests that met a major time-out: the server did not answer any try.",
    ("mountpoint",),
    source=_MOUNTSTATS,
)

LUSTRE_READ = MetricSpec(
    "hpml_lustre_read_bytes_total",
    "counter",
    "Bytes that programs here have read from a Lustre file system, the client's cache included.",
    ("filesystem",),
    "bytes",
    _LLITE,
)
LUSTRE_WRITTEN = MetricSpec(
    "hpml_lustre_written_bytes_total",
    "counter",
    "Bytes that programs here have written to a Lustre file system.",
    ("filesystem",),
    "bytes",
    _LLITE,
)
LUSTRE_OPERATIONS = MetricSpec(
    "hpml_lustre_operations_total",
    "counter",
    "Calls of programs here by operation: read, write, open, getattr, and other metadata.",
    ("filesystem", "op"),
    source=_LLITE,
)

SPECS: tuple[MetricSpec, ...] = (
    SHM_SIZE,
    SHM_USED,
    JOB_SHM,
    DISK_READ,
    DISK_WRITTEN,
    DISK_BUSY,
    DISK_IO_TIME,
    FS_SIZE,
    FS_FREE,
    IB_RECEIVED,
    IB_TRANSMITTED,
    IB_EVENTS,
    IB_UP,
    IB_SPEED,
    IB_INFO,
    NFS_MOUNTS,
    NFS_READ,
    NFS_WRITTEN,
    NFS_OPERATIONS,
    NFS_RTT,
    NFS_RETRANSMISSIONS,
    NFS_TIMEOUTS,
    LUSTRE_READ,
    LUSTRE_WRITTEN,
    LUSTRE_OPERATIONS,
)
