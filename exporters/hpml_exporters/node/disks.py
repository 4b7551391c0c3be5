"""Local disks: traffic from /proc/diskstats, and the space of local file systems.

Counted are whole devices with hardware behind them (a `device` link in sysfs): no partitions, loop
devices, RAM disks, nor what the kernel builds of other disks (md, dm), whose traffic is counted
there already.

No call may wait for a server: statvfs is only made for file systems of a known local type, with
only such mounted on the way to them, because the way there would hang as well.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from prometheus_client.core import Metric

from hpml_exporters.core.collector import NotHereError
from hpml_exporters.core.metric import MetricSpec, Row, families
from hpml_exporters.node import metrics as node
from hpml_exporters.node.files import mounted, plain_path, read
from hpml_exporters.options import Context

__all__ = ["Disks", "local_mounts", "make"]

_SECTOR_BYTES = 512  # in diskstats always, whatever the disk's own
_FIELDS = 14
_MAX_DISKS = 64
_MAX_MOUNTS = 32
_SMALLEST_BYTES = 16 * 1024**2  # what is smaller is no place for data
_NO_DISKS = ("sr", "fd", "loop", "ram", "zram")
_SPACE = frozenset("ext2 ext3 ext4 xfs btrfs zfs f2fs bcachefs jfs reiserfs tmpfs".split())
_PASSABLE = _SPACE | frozenset("rootfs ramfs devtmpfs overlay squashfs proc sysfs cgroup2".split())
_SYSTEM = ("/dev/", "/proc/", "/run/", "/sys/")  # RAM file systems of the system's own


def make(context: Context) -> Disks:
    """Return the collector of this machine's disks."""
    return Disks(context)


class Disks:
    """The collector `disks`."""

    name = "disks"
    specs: Sequence[MetricSpec] = (
        node.DISK_READ,
        node.DISK_WRITTEN,
        node.DISK_BUSY,
        node.DISK_IO_TIME,
        node.FS_SIZE,
        node.FS_FREE,
    )

    def __init__(self, context: Context) -> None:
        roots = context.options.roots
        self.interval = context.options.node_interval
        self._diskstats = f"{roots.proc}/diskstats"
        self._mountinfo = f"{roots.proc}/self/mountinfo"
        self._block = f"{roots.sys}/block"
        self._is_disk: dict[str, bool] = {}

    def sample(self, now: float) -> list[Metric]:  # noqa: ARG002
        """Return the families as they are now; see `Collector.sample`."""
        try:
            lines = read(self._diskstats).decode("ascii", "replace").splitlines()
        except FileNotFoundError as error:
            raise NotHereError("no /proc/diskstats") from error
        return [*self._disks(lines), *self._spaces()]

    def close(self) -> None:
        """Nothing is open."""

    def _disks(self, lines: list[str]) -> list[Metric]:
        found: tuple[list[Row], ...] = ([], [], [], [])
        before, self._is_disk = self._is_disk, {}
        for line in lines:
            fields = line.split()
            if len(fields) < _FIELDS:
                continue
            name = fields[2]
            known = before.get(name)
            self._is_disk[name] = self._has_hardware(name) if known is None else known
            if not self._is_disk[name] or len(found[0]) >= _MAX_DISKS:
                continue
            label = (name,)
            found[0].append((label, int(fields[5]) * _SECTOR_BYTES))
            found[1].append((label, int(fields[9]) * _SECTOR_BYTES))
            found[2].append((label, int(fields[12]) / 1000))
            found[3].append((label, int(fields[13]) / 1000))
        specs: Sequence[MetricSpec] = self.specs[:4]
        return families(dict(zip(specs, found, strict=True)))

    def _has_hardware(self, name: str) -> bool:
        if name.startswith(_NO_DISKS):
            return False
        return os.path.exists(f"{self._block}/{name.replace('/', '!')}/device")

    def _spaces(self) -> list[Metric]:
        try:
            mountinfo = os.fsdecode(read(self._mountinfo))
        except OSError:
            return []
        sizes: list[Row] = []
        free: list[Row] = []
        for path, kind in local_mounts(mountinfo):
            try:
                told = os.statvfs(path)
            except OSError:  # not for this user, or gone
                continue
            if told.f_blocks * told.f_frsize >= _SMALLEST_BYTES:
                label = (path, kind)
                sizes.append((label, told.f_blocks * told.f_frsize))
                free.append((label, told.f_bavail * told.f_frsize))
        return families({node.FS_SIZE: sizes, node.FS_FREE: free})


def local_mounts(mountinfo: str) -> list[tuple[str, str]]:
    """Return (mount point, type) of local file systems whose space can be asked without a wait.

    Each file system is in it once, where it is mounted at the shortest path.

    Args:
        mountinfo: text of /proc/self/mountinfo, see proc(5).
    """
    found: list[tuple[str, str, str]] = []
    barred: list[str] = []
    for device, written, kind in mounted(mountinfo):
        path = plain_path(written)
        if kind not in _PASSABLE:
            barred.append(path.rstrip("/") + "/")
        elif kind in _SPACE and not (kind == "tmpfs" and f"{path}/".startswith(_SYSTEM)):
            found.append((path, kind, device))
    shortest: dict[str, tuple[str, str]] = {}
    for path, kind, device in sorted(found, key=lambda one: len(one[0])):
        if not f"{path}/".startswith(tuple(barred)):
            shortest.setdefault(device, (path, kind))
    return sorted(shortest.values())[:_MAX_MOUNTS]
