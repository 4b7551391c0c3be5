"""NFS client: bytes, requests, their round trips, retransmissions, by export.

The collector reads /proc/self/mountstats, which needs no answer of a server (format: the kernel's
fs/nfs/super.c and net/sunrpc/stats.c; nfs-utils' mountstats(8) explains the columns):

    device server:/export mounted on /mnt/data with fstype nfs4 statvers=1.1
        bytes:  <read> <written> <direct read> <direct written> <from server> <to server> ...
        per-op statistics
            READ: <requests> <transmissions> <time-outs> <sent> <received> <queue> <rtt> <total> ...

Times are in milliseconds. A file system of a server, or parts of it, may be mounted at several
places: the kernel repeats their common counts at each. These mounts have the same device number in
/proc/self/mountinfo, and count once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial

from prometheus_client.core import Metric

from hpml_exporters.core.collector import MetricSpec, NotHereError, Totals, families, metric
from hpml_exporters.core.procfs import read
from hpml_exporters.options import Context
from hpml_orchestrator.records.mounts import parse_mounts, plain_path

_SOURCE = "/proc/self/mountstats"
_of_export = partial(metric, labels="server export", source=_SOURCE)
_READ = _of_export(
    "hpml_nfs_read_bytes_total",
    "Bytes that came from the server (without reads from the page cache).",
)
_WRITTEN = _of_export("hpml_nfs_written_bytes_total", "Bytes that went to the server.")
_OPERATIONS = _of_export(
    "hpml_nfs_operations_total",
    "Requests to the server by operation: read, write, open, and the others.",
    labels="server export op",
)
_ROUND_TRIP = _of_export(
    "hpml_nfs_round_trip_seconds_total",
    "Time from requests to their replies; over the operations it is the mean round trip.",
    labels="server export op",
)
_RETRANSMISSIONS = _of_export(
    "hpml_nfs_retransmissions_total", "Requests that had to be sent again."
)
_TIMEOUTS = _of_export(
    "hpml_nfs_timeouts_total",
    "Requests that met a major time-out: the server did not answer any try.",
)
SPECS = (_READ, _WRITTEN, _OPERATIONS, _ROUND_TRIP, _RETRANSMISSIONS, _TIMEOUTS)

_OPS = ("read", "write", "open", "other")
_OP_OF = {"READ:": 0, "WRITE:": 1, "OPEN:": 2, "OPEN_NOATTR:": 2}
_OTHER = 3
_COLUMNS: tuple[tuple[MetricSpec, tuple[str, ...]], ...] = (
    *((spec, ()) for spec in (_READ, _WRITTEN, _RETRANSMISSIONS, _TIMEOUTS)),
    *((_OPERATIONS, (op,)) for op in _OPS),
    *((_ROUND_TRIP, (op,)) for op in _OPS),
)
_TYPES = ("nfs", "nfs4")
_MAX_SIBLINGS = 8
_MAX_EXPORTS = 32


class _Mount:
    """One mount: its server, export, device, and counters in the order of the columns."""

    def __init__(self, server: str, export: str, device: str) -> None:
        self.server, self.export, self.device = server, export, device
        self.values = [0.0] * len(_COLUMNS)

    def add(self, name: str, numbers: Sequence[str]) -> None:
        """Add a line if it holds the total of bytes or an operation."""
        if not all(text.isascii() and text.isdecimal() for text in numbers[:8]):
            return
        if name == "bytes:" and len(numbers) >= 6:  # noqa: PLR2004
            # The bytes exchanged with the server. The columns before have the programs' requests,
            # which the page cache may have answered.
            self.values[:2] = map(int, numbers[4:6])
        elif name.isupper() and name != "NULL:" and len(numbers) >= 8:  # noqa: PLR2004
            requests, sent, timeouts, _, _, _, milliseconds = map(int, numbers[:7])
            op = _OP_OF.get(name, _OTHER)
            self.values[2] += max(0, sent - requests)
            self.values[3] += timeouts
            self.values[4 + op] += requests
            self.values[4 + len(_OPS) + op] += milliseconds / 1000


class _ExportNames:
    """Chooses values of the label `export` so that their number stays bounded.

    An automounter's homes are one series, `/home/*`: more than 8 exports of one directory are
    summed up, from then on and for as long as the exporter runs. After 32 values all further
    exports of a server are `*`.
    """

    def __init__(self) -> None:
        self._siblings: dict[tuple[str, str], set[str]] = {}
        self._names: set[tuple[str, str]] = set()

    def labels(self, exports: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
        """Yield the labels of each (server, export)."""
        # Count all siblings before naming any: the exports of a directory become one series in the
        # same sample, not one after the other.
        for server, export in exports:
            siblings = self._siblings.setdefault((server, export.rpartition("/")[0]), set())
            if len(siblings) <= _MAX_SIBLINGS:
                siblings.add(export)
        for server, export in exports:
            parent = export.rpartition("/")[0]
            many = len(self._siblings[server, parent]) > _MAX_SIBLINGS
            name = server, f"{parent}/*" if many else export
            if name not in self._names and len(self._names) >= _MAX_EXPORTS:
                name = server, "*"
            self._names.add(name)
            yield name


class Nfs:
    """The collector `nfs`."""

    name = "nfs"
    specs: Sequence[MetricSpec] = SPECS

    def __init__(self, context: Context) -> None:
        self.interval = context.options.node_interval
        self._mountstats = f"{context.options.roots.proc}/self/mountstats"
        self._mountinfo = f"{context.options.roots.proc}/self/mountinfo"
        self._names = _ExportNames()
        self._totals = Totals(_COLUMNS)

    def sample(self, now: float) -> list[Metric]:  # noqa: ARG002
        """Return the families as they are now; see `Collector.sample`."""
        try:
            text = os.fsdecode(read(self._mountstats))
        except FileNotFoundError as error:
            raise NotHereError("no /proc/self/mountstats") from error
        mounted = (
            _parse(text, os.fsdecode(read(self._mountinfo))) if " with fstype nfs" in text else []
        )
        if not mounted:
            raise NotHereError("no NFS file system is mounted")
        names = self._names.labels([(mount.server, mount.export) for mount in mounted])
        rows = self._totals.update(
            (name, mount.device, mount.values) for name, mount in zip(names, mounted, strict=True)
        )
        return families(rows)

    def close(self) -> None:
        """Do nothing: no file is open."""


make = Nfs


def _parse(mountstats: str, mountinfo: str) -> list[_Mount]:
    """Return the NFS mounts; skips lines that are torn or unknown."""
    devices: dict[str, list[str]] = {}  # several at one path have the same order in both files
    for info in parse_mounts(mountinfo):
        if info.kind in _TYPES:
            devices.setdefault(info.point, []).append(info.device)
    found: list[_Mount] = []
    mount: _Mount | None = None
    # Not splitlines: users choose the names of mount points, and the kernel escapes only newlines
    # in them. Other line ends must not start a line here.
    for line in mountstats.split("\n"):
        if line.startswith("device "):
            mount = None
            device, _, rest = line[7:].partition(" mounted on ")
            path, _, fstype = rest.rpartition(" with fstype ")
            if fstype.partition(" ")[0] in _TYPES:
                device, known = plain_path(device), devices.get(plain_path(path))
                server, _, export = device.partition(":/")
                mount = _Mount(server, f"/{export}", known.pop(0) if known else device)
                found.append(mount)
        elif mount is not None and (fields := line.split()):
            mount.add(fields[0], fields[1:])
    return found
