"""NFS as its client sees it: bytes, requests, their round trips, retransmissions, by mount.

Read is /proc/self/mountstats, which the kernel answers without asking any server (format: the
kernel's fs/nfs/super.c and net/sunrpc/stats.c; nfs-utils' mountstats(8) explains the columns):

    device server:/export mounted on /mnt/data with fstype nfs4 statvers=1.1
        bytes:  <read> <written> <direct read> <direct written> <from server> <to server> ...
        per-op statistics
            READ: <requests> <transmissions> <time-outs> <sent> <received> <queue> <rtt> <total> ...

Times there are in milliseconds. One file system of a server may be mounted at several places, also
by parts of it (an automounter's homes): the kernel counts for all of them together, and says so at
each. They have one device number in /proc/self/mountinfo, and are shown at the first place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import Metric

from hpml_exporters.core.collector import NotHereError
from hpml_exporters.core.metric import MetricSpec, Row, families
from hpml_exporters.node import metrics as node
from hpml_exporters.node.files import mounted, plain_path, read
from hpml_exporters.options import Context

__all__ = ["Mount", "Nfs", "devices", "make", "parse"]

_OPS = ("read", "write", "getattr", "lookup", "open", "other")
_OP_OF = {"READ": 0, "WRITE": 1, "GETATTR": 2, "LOOKUP": 3, "OPEN": 4, "OPEN_NOATTR": 4}
_OTHER = 5
_TYPES = ("nfs", "nfs4")
_MAX_MOUNTS = 32
_SERVER_BYTES = slice(5, 7)  # "bytes:" is the field before


@dataclass
class Mount:
    """One NFS file system.

    Attributes:
        path: where it is mounted.
        read_bytes: from the server.
        written_bytes: to the server.
        operations: requests by operation, in the order read, write, getattr, lookup, open, others.
        rtt_seconds: sums of their round trips.
        retransmissions: requests that were sent again.
        timeouts: of all tries of a request.
    """

    path: str
    read_bytes: int = 0
    written_bytes: int = 0
    operations: list[int] = field(default_factory=lambda: [0] * len(_OPS))
    rtt_seconds: list[float] = field(default_factory=lambda: [0.0] * len(_OPS))
    retransmissions: int = 0
    timeouts: int = 0


def make(context: Context) -> Nfs:
    """Return the collector of this machine's NFS mounts."""
    return Nfs(context)


class Nfs:
    """The collector `nfs`."""

    name = "nfs"
    specs: Sequence[MetricSpec] = (
        node.NFS_MOUNTS,
        node.NFS_READ,
        node.NFS_WRITTEN,
        node.NFS_OPERATIONS,
        node.NFS_RTT,
        node.NFS_RETRANSMISSIONS,
        node.NFS_TIMEOUTS,
    )

    def __init__(self, context: Context) -> None:
        self.interval = context.options.node_interval
        self._path = f"{context.options.roots.proc}/self/mountstats"
        self._mountinfo = f"{context.options.roots.proc}/self/mountinfo"

    def sample(self, now: float) -> list[Metric]:  # noqa: ARG002
        """Return the families as they are now; see `Collector.sample`."""
        try:
            text = read(self._path).decode("utf-8", "replace")
        except FileNotFoundError as error:
            raise NotHereError("no /proc/self/mountstats") from error
        mounts = parse(text, self._devices()) if " with fstype nfs" in text else []
        if not mounts:
            raise NotHereError("no NFS file system is mounted")
        shown: dict[MetricSpec, list[Row]] = {spec: [] for spec in self.specs}
        shown[node.NFS_MOUNTS].append(((), len(mounts)))
        for mount in mounts[:_MAX_MOUNTS]:
            label = (mount.path,)
            shown[node.NFS_READ].append((label, mount.read_bytes))
            shown[node.NFS_WRITTEN].append((label, mount.written_bytes))
            for number, op in enumerate(_OPS):
                both = (mount.path, op)
                shown[node.NFS_OPERATIONS].append((both, mount.operations[number]))
                shown[node.NFS_RTT].append((both, mount.rtt_seconds[number]))
            shown[node.NFS_RETRANSMISSIONS].append((label, mount.retransmissions))
            shown[node.NFS_TIMEOUTS].append((label, mount.timeouts))
        return families(shown)

    def close(self) -> None:
        """Nothing is open."""

    def _devices(self) -> dict[str, list[str]]:
        try:
            return devices(read(self._mountinfo).decode("utf-8", "replace"))
        except OSError:
            return {}


def devices(mountinfo: str) -> dict[str, list[str]]:
    """Return the device numbers of NFS file systems by mount point, as both files write it.

    Several at one point cover each other; they stand in the same order in both files.

    Args:
        mountinfo: text of /proc/self/mountinfo, see proc(5).
    """
    found: dict[str, list[str]] = {}
    for device, path, kind in mounted(mountinfo):
        if kind in _TYPES:
            found.setdefault(path, []).append(device)
    return found


def parse(text: str, numbers: Mapping[str, Sequence[str]] | None = None) -> list[Mount]:
    """Return the NFS file systems in the text of mountstats, each once, without what is covered.

    Lines that are torn or unknown are passed over.

    Args:
        text: of mountstats.
        numbers: what `devices` says; of mounts that are not in it, those of one export are one.
    """
    left = {path: list(each) for path, each in (numbers or {}).items()}
    found: dict[str, Mount] = {}
    mount: Mount | None = None
    in_ops = False
    for line in text.split("\n"):  # alone: see `mounted`
        if line.startswith("device "):
            mount, in_ops = None, False
            device, _, rest = line[7:].partition(" mounted on ")
            path, _, kind = rest.rpartition(" with fstype ")
            if kind.partition(" ")[0] not in _TYPES:
                continue
            key = left[path].pop(0) if left.get(path) else device
            if key not in found:
                mount = found[key] = Mount(plain_path(path))
        elif mount is None:
            continue
        elif in_ops:
            _add_operation(mount, line.split())
        elif line.lstrip().startswith("bytes:"):
            fields = line.split()[_SERVER_BYTES]
            if len(fields) == 2 and all(map(str.isdecimal, fields)):  # noqa: PLR2004
                mount.read_bytes, mount.written_bytes = map(int, fields)
        elif line.strip() == "per-op statistics":
            in_ops = True
    return list({one.path: one for one in found.values()}.values())


def _add_operation(mount: Mount, fields: list[str]) -> None:
    if len(fields) < 9 or not all(map(str.isdecimal, fields[1:9])):  # noqa: PLR2004
        return
    name = fields[0].rstrip(":")
    if name == "NULL":
        return
    requests, sent, timeouts, _, _, _, rtt_ms = map(int, fields[1:8])
    number = _OP_OF.get(name, _OTHER)
    mount.operations[number] += requests
    mount.rtt_seconds[number] += rtt_ms / 1000
    mount.retransmissions += max(0, sent - requests)
    mount.timeouts += timeouts
