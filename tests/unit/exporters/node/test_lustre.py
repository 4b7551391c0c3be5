"""Lustre's llite stats, in the forms of old and new versions.

OLD is the form of Lustre 2.5, as telegraf's lustre2 plugin reads it; NEW that of later versions:
the figures of `read_bytes` are those of lustre-discuss, 5 April 2018, a sum of squares after them,
and LU-18950 shows lines of "samples [usecs]".
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hpml_exporters.core.collector import NotHereError
from hpml_exporters.node.lustre import make

from tests.unit.exporters.collectors.reading import context, sampled, write

OLD = """\
snapshot_time             1410281463.427823 secs.usecs
dirty_pages_hits          20 samples [regs]
read_bytes                10 samples [bytes] 1 4096 40000
write_bytes               3 samples [bytes] 100 1048576 2000000
open                      7 samples [regs]
close                     6 samples [regs]
getattr                   11 samples [regs]
inode_permission          500 samples [regs]
"""
NEW = """\
snapshot_time             1523008010.817348638 secs.nsecs
elapsed_time              8010.486137167 secs.nsecs
read_bytes                25673 samples [bytes] 1 3366225 145121869 88812345678
write_bytes               13641 samples [bytes] 1 3366225 468230469 99912345678
read                      25673 samples [usecs] 2 385149 80065680 5387531243688
open                      2 samples [usecs] 14 134 148 18152
close                     2 samples [usecs] 9 19 28 442
getattr                   2 samples [usecs] 3 6 9 45
statfs                    16977 samples [usecs] 2 3904 16809097 16988546393
setxattr                  1 samples [usecs] 1 1 1 1
"""
TORN = "read_bytes 5 samples [bytes] 1\nopen -5 samples\nwrite_bytes samples [bytes]\n\n"
OLD_PLACE = "fs/lustre/llite/scratch-ffff880fe2d0c000/stats"
NEW_PLACE = "kernel/debug/lustre/llite/my-work-ffff9bc043537800/stats"
SECOND = "fs/lustre/llite/scratch-ffff880fe2d0c400/stats"
CASES = {
    # files, file system, then bytes read and written, and calls by operation
    "procfs, without durations": ({OLD_PLACE: OLD}, "scratch", (40000, 2000000, 10, 3, 7, 11, 6)),
    "debugfs": ({NEW_PLACE: NEW}, "my-work", (145121869, 468230469, 25673, 13641, 2, 2, 16980)),
    "torn": ({OLD_PLACE: TORN}, "scratch", (0, 0, 5, 0, 0, 0, 0)),
}


@pytest.mark.parametrize(("files", "system", "values"), CASES.values(), ids=CASES)
def test_stats(tmp_path: Path, files: dict[str, str], system: str, values: tuple[int, ...]) -> None:
    """A file system's bytes and calls, of all its mounts together."""
    write(tmp_path, files)
    ops = ("read", "write", "open", "getattr", "metadata")
    expected: dict[tuple[str, ...], int] = {
        ("hpml_lustre_operations_total", system, op): value
        for op, value in zip(ops, values[2:], strict=True)
    }
    expected["hpml_lustre_read_bytes_total", system] = values[0]
    expected["hpml_lustre_written_bytes_total", system] = values[1]
    assert sampled(make(context(proc=tmp_path, sys=tmp_path))) == expected


def test_an_unmount_is_no_fall(tmp_path: Path) -> None:
    """The sum of two mounts stays when one goes; when all are gone, there is nothing here."""
    write(tmp_path, {OLD_PLACE: OLD, SECOND: OLD})
    collector = make(context(proc=tmp_path, sys=tmp_path))
    series = ("hpml_lustre_read_bytes_total", "scratch")
    assert sampled(collector)[series] == 80000
    (tmp_path / SECOND).unlink()
    write(tmp_path, {OLD_PLACE: OLD.replace("40000", "45000")})
    assert sampled(collector)[series] == 85000
    (tmp_path / OLD_PLACE).unlink()
    with pytest.raises(NotHereError):
        collector.sample(0.0)
