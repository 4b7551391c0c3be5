"""Lustre as its client sees it: bytes and calls by file system, from llite's stats.

The file is `llite/<file system>-<address>/stats`, in /proc/fs/lustre with older versions of Lustre
and in debugfs (/sys/kernel/debug/lustre, for root and CAP_DAC_READ_SEARCH) with newer ones; a line
is

    read_bytes    25673 samples [bytes] 1 3366225 145121869
    open          12 samples [usecs] 3 80 411 20011

which is the number of calls, their unit, and minimum, maximum and sum of it (newer versions add the
sum of squares; older ones count calls as [regs] or [reqs], without more). `read_bytes` counts what
programs read, the client's cache included (Andreas Dilger, lustre-discuss, April 2018). The other
files of a mount are left alone: some of them ask the servers, which may hang.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from prometheus_client.core import Metric

from hpml_exporters.core.collector import NotHereError
from hpml_exporters.core.metric import MetricSpec, Row, families
from hpml_exporters.node import metrics as node
from hpml_exporters.node.files import read
from hpml_exporters.options import Context

__all__ = ["Lustre", "make", "parse"]

_OPS = ("read", "write", "open", "getattr", "metadata")
_OP_OF = {
    "read_bytes": "read",
    "write_bytes": "write",
    "open": "open",
    "getattr": "getattr",
    **dict.fromkeys(
        "close readdir setattr truncate fsync statfs alloc_inode setxattr getxattr "
        "listxattr removexattr create mknod link unlink symlink mkdir rmdir rename".split(),
        "metadata",
    ),
}
_MAX_FILE_SYSTEMS = 16
_MAX_MOUNTS = 256
_SUM = 6


def make(context: Context) -> Lustre:
    """Return the collector of this machine's Lustre mounts."""
    return Lustre(context)


class Lustre:
    """The collector `lustre`."""

    name = "lustre"
    specs: Sequence[MetricSpec] = (node.LUSTRE_READ, node.LUSTRE_WRITTEN, node.LUSTRE_OPERATIONS)

    def __init__(self, context: Context) -> None:
        roots = context.options.roots
        self.interval = context.options.node_interval
        self._places = (
            f"{roots.proc}/fs/lustre/llite",
            f"{roots.sys}/kernel/debug/lustre/llite",
            f"{roots.sys}/fs/lustre/llite",
        )

    def sample(self, now: float) -> list[Metric]:  # noqa: ARG002
        """Return the families as they are now; see `Collector.sample`."""
        totals: dict[str, dict[str, int]] = {}
        for system, path in self._files():
            try:
                text = read(path).decode("ascii", "replace")
            except (FileNotFoundError, PermissionError):  # unmounted a moment ago; not for us
                continue
            mine = totals.setdefault(system, {})
            for name, value in parse(text).items():
                mine[name] = mine.get(name, 0) + value
        if not totals:
            raise NotHereError("no Lustre file system is mounted, or its stats are not for us")
        shown: dict[MetricSpec, list[Row]] = {spec: [] for spec in self.specs}
        for system in sorted(totals)[:_MAX_FILE_SYSTEMS]:
            told = totals[system]
            shown[node.LUSTRE_READ].append(((system,), told.get("read_sum", 0)))
            shown[node.LUSTRE_WRITTEN].append(((system,), told.get("write_sum", 0)))
            for op in _OPS:
                shown[node.LUSTRE_OPERATIONS].append(((system, op), told.get(op, 0)))
        return families(shown)

    def close(self) -> None:
        """Nothing is open."""

    def _files(self) -> list[tuple[str, str]]:
        """Return (file system, its stats) of all mounts, each once."""
        found: dict[str, tuple[str, str]] = {}
        for place in self._places:
            try:
                names = os.listdir(place)
            except OSError:  # not there, or debugfs, for another user than root
                continue
            for name in sorted(names)[:_MAX_MOUNTS]:
                system, dash, _ = name.rpartition("-")
                path = f"{place}/{name}/stats"
                # Opening it is the only way to find out whether we may read it: access(2) asks for
                # the real user, and leaves capabilities (CAP_DAC_READ_SEARCH) out.
                if dash and name not in found and os.path.lexists(path):
                    found[name] = system, path
        return list(found.values())


def parse(text: str) -> dict[str, int]:
    """Return calls by operation, and `read_sum` and `write_sum` in bytes.

    Lines of another form are passed over.
    """
    found: dict[str, int] = {}
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 4 or fields[2] != "samples" or not fields[1].isdecimal():  # noqa: PLR2004
            continue
        op = _OP_OF.get(fields[0])
        if op is None:
            continue
        found[op] = found.get(op, 0) + int(fields[1])
        if op in {"read", "write"} and len(fields) > _SUM and fields[_SUM].isdecimal():
            found[f"{op}_sum"] = found.get(f"{op}_sum", 0) + int(fields[_SUM])
    return found
