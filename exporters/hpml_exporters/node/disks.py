"""Local disks: traffic from /proc/diskstats, and the space of local file systems.

Only whole hardware devices count (those with a `device` link in sysfs): no partitions, loop
devices or RAM disks, and no md or dm devices, whose traffic counts at their disks.

No call may wait for a server: statvfs is called only for file systems of a known local type whose
parent mounts are local too, as path lookup could hang as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import partial

from prometheus_client.core import Metric

from hpml_exporters.core.collector import MetricSpec, NotHereError, Row, families, metric
from hpml_exporters.core.procfs import read
from hpml_exporters.options import Context
from hpml_orchestrator.records.mounts import Mount, parse_mounts

_of_disk = partial(metric, labels="device", source="/proc/diskstats")
_READ = _of_disk("hpml_disk_read_bytes_total", "Bytes read from a local disk since boot.")
_WRITTEN = _of_disk("hpml_disk_written_bytes_total", "Bytes written to a local disk since boot.")
_BUSY = _of_disk("hpml_disk_busy_seconds_total", "Time in which a local disk had operations to do.")
_space = partial(
    metric,
    labels="mountpoint fstype",
    source="/proc/self/mountinfo, statvfs(2) of local file systems",
)
_SIZE = _space("hpml_filesystem_size_bytes", "Size of a local file system.")
_FREE = _space(
    "hpml_filesystem_free_bytes", "Space of a local file system that users can still take."
)
SPECS = (_READ, _WRITTEN, _BUSY, _SIZE, _FREE)

_COLUMNS: tuple[tuple[MetricSpec, int, float], ...] = (
    # metric, field of diskstats, unit of the field
    (_READ, 5, 512),  # sectors have 512 bytes here, whatever the disk's own
    (_WRITTEN, 9, 512),
    (_BUSY, 12, 1e-3),
)
_FIELDS = 14
_MAX_DISKS = 64
_MAX_MOUNTS = 32
_SMALLEST_BYTES = 16 * 1024**2  # smaller file systems have no user data
_NO_DISKS = ("sr", "fd", "loop", "ram", "zram")
_SPACE = frozenset("ext2 ext3 ext4 xfs btrfs zfs f2fs bcachefs jfs reiserfs tmpfs".split())
_PASSABLE = _SPACE | frozenset("rootfs ramfs devtmpfs overlay squashfs proc sysfs cgroup2".split())
_SYSTEM = ("/dev/", "/proc/", "/run/", "/sys/")  # RAM file systems of the operating system


class Disks:
    """The collector `disks`."""

    name = "disks"
    specs: Sequence[MetricSpec] = SPECS

    def __init__(self, context: Context) -> None:
        roots = context.options.roots
        self.interval = context.options.node_interval
        self._diskstats = f"{roots.proc}/diskstats"
        self._mountinfo = f"{roots.proc}/self/mountinfo"
        self._block = f"{roots.sys}/block"
        self._mountpoints: set[str] = set()

    def sample(self, now: float) -> list[Metric]:  # noqa: ARG002
        """Return the families as they are now; see `Collector.sample`."""
        try:
            lines = os.fsdecode(read(self._diskstats)).splitlines()
        except FileNotFoundError as error:
            raise NotHereError("no /proc/diskstats") from error
        rows: dict[MetricSpec, list[Row]] = {spec: [] for spec in SPECS}
        disks = [fields for line in lines if self._is_disk(fields := line.split())]
        for fields in disks[:_MAX_DISKS]:
            for spec, column, unit in _COLUMNS:
                rows[spec].append(((fields[2],), int(fields[column]) * unit))
        for mount in local_mounts(parse_mounts(os.fsdecode(read(self._mountinfo)))):
            self._add_space(mount, rows)
        return families(rows)

    def close(self) -> None:
        """Do nothing: no file is open."""

    def _is_disk(self, fields: Sequence[str]) -> bool:
        if len(fields) < _FIELDS or fields[2].startswith(_NO_DISKS):
            return False
        # sysfs writes the slash in a name such as cciss/c0d0 as an exclamation mark.
        return os.path.exists(f"{self._block}/{fields[2].replace('/', '!')}/device")

    def _add_space(self, mount: Mount, rows: dict[MetricSpec, list[Row]]) -> None:
        """Add the space of a file system, if it is among the first mount points since the start.

        Jobs and containers may use ever new mount points, which must not create unlimited series.
        """
        try:
            space = os.statvfs(mount.point)
        except OSError:  # not for this user, or gone
            return
        size = space.f_blocks * space.f_frsize
        if size >= _SMALLEST_BYTES and len(self._mountpoints) < _MAX_MOUNTS:
            self._mountpoints.add(mount.point)
        if size >= _SMALLEST_BYTES and mount.point in self._mountpoints:
            labels = mount.point, mount.kind
            rows[_SIZE].append((labels, size))
            rows[_FREE].append((labels, space.f_bavail * space.f_frsize))


make = Disks


def local_mounts(mounted: Iterable[Mount]) -> list[Mount]:
    """Return the local file systems whose space can be read without waiting for a server.

    Each file system is listed once, at its shortest mount point.
    """
    local: list[Mount] = []
    barred: list[str] = []
    for mount in mounted:
        inside = mount.point.rstrip("/") + "/"
        if mount.kind not in _PASSABLE:
            barred.append(inside)
        elif mount.kind in _SPACE and not (mount.kind == "tmpfs" and inside.startswith(_SYSTEM)):
            local.append(mount)
    shortest: dict[str, Mount] = {}
    for mount in sorted(local, key=lambda mount: len(mount.point)):
        if not f"{mount.point}/".startswith(tuple(barred)):
            shortest.setdefault(mount.device, mount)
    return sorted(shortest.values(), key=lambda mount: mount.point)
