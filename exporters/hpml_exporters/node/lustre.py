"""Lustre client: bytes and calls by file system, from llite's stats.

The file is `llite/<file system>-<address>/stats`, in /proc/fs/lustre with older versions of Lustre
and in debugfs (/sys/kernel/debug/lustre, for root and CAP_DAC_READ_SEARCH) with newer ones. Its
lines are:

    read_bytes    25673 samples [bytes] 1 3366225 145121869
    open          12 samples [usecs] 3 80 411 20011

They have the number of calls, their unit, and its minimum, maximum and sum (newer versions add the
sum of squares; older ones only count calls, as [regs] or [reqs]). The other files of a mount are
not read: some of them query the servers, which may hang.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial

from prometheus_client.core import Metric

from hpml_exporters.core.collector import MetricSpec, NotHereError, Part, Totals, families, metric
from hpml_exporters.core.procfs import read
from hpml_exporters.options import Context

_SOURCE = "llite/*/stats in /proc/fs/lustre, /sys/kernel/debug/lustre or /sys/fs/lustre"
_of_system = partial(metric, labels="filesystem", source=_SOURCE)
_READ = _of_system(
    "hpml_lustre_read_bytes_total",
    "Bytes that programs here have read from a Lustre file system, also from its cache.",
)
_WRITTEN = _of_system(
    "hpml_lustre_written_bytes_total",
    "Bytes that programs here have written to a Lustre file system.",
)
_OPERATIONS = _of_system(
    "hpml_lustre_operations_total",
    "Calls of programs here by operation: read, write, open, getattr, and other metadata.",
    labels="filesystem op",
)
SPECS = (_READ, _WRITTEN, _OPERATIONS)

_OPS = ("read", "write", "open", "getattr", "metadata")
_COLUMNS = ((_READ, ()), (_WRITTEN, ()), *((_OPERATIONS, (op,)) for op in _OPS))
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
_MAX_MOUNTS = 256


class Lustre:
    """The collector `lustre`."""

    name = "lustre"
    specs: Sequence[MetricSpec] = SPECS

    def __init__(self, context: Context) -> None:
        roots = context.options.roots
        self.interval = context.options.node_interval
        self._places = (
            f"{roots.proc}/fs/lustre/llite",
            f"{roots.sys}/kernel/debug/lustre/llite",
            f"{roots.sys}/fs/lustre/llite",
        )
        self._totals = Totals(_COLUMNS)

    def sample(self, now: float) -> list[Metric]:  # noqa: ARG002
        """Return the families as they are now; see `Collector.sample`."""
        rows = self._totals.update(self._mounts())
        if not rows:
            raise NotHereError("no Lustre file system is mounted, or its stats are not for us")
        return families(rows)

    def close(self) -> None:
        """Do nothing: no file is open."""

    def _mounts(self) -> Iterator[Part]:
        for place in self._places:
            try:
                names = os.listdir(place)
            except OSError:  # missing, or debugfs, which only root may read
                continue
            for name in sorted(names)[:_MAX_MOUNTS]:
                try:
                    text = os.fsdecode(read(f"{place}/{name}/stats"))
                except OSError:  # elsewhere, just unmounted, or not readable
                    continue
                yield (name.rpartition("-")[0],), name, _counted(text)


make = Lustre


def _counted(text: str) -> list[int]:
    calls = dict.fromkeys(_OPS, 0)
    sums = {"read": 0, "write": 0}
    for line in text.splitlines():
        match line.split():
            case [name, number, "samples", _, *more] if name in _OP_OF and number.isdecimal():
                op = _OP_OF[name]
                calls[op] += int(number)
                if op in sums and len(more) >= 3 and more[2].isdecimal():  # noqa: PLR2004
                    sums[op] += int(more[2])
    return [*sums.values(), *calls.values()]
