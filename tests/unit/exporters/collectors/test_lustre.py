"""Lustre's llite stats, in the forms of old and new versions.

OLD is the form of Lustre 2.5, as telegraf's lustre2 plugin reads it; NEW that of later versions:
the figures of `read_bytes` are those of lustre-discuss, 5 April 2018, a sum of squares after them,
and LU-18950 shows lines of "samples [usecs]".
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hpml_exporters.core.collector import NotHereError
from hpml_exporters.node.lustre import make, parse
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.exporters.collectors.reading import context, sampled, write

OLD = """\
snapshot_time             1410281463.427823 secs.usecs
dirty_pages_hits          20 samples [regs]
dirty_pages_misses        5 samples [regs]
read_bytes                10 samples [bytes] 1 4096 40000
write_bytes               3 samples [bytes] 100 1048576 2000000
open                      7 samples [regs]
close                     6 samples [regs]
getattr                   11 samples [regs]
inode_permission          500 samples [regs]
"""
NEW = """\
snapshot_time             1523008010.817348638 secs.nsecs
start_time                1523000000.331211471 secs.nsecs
elapsed_time              8010.486137167 secs.nsecs
read_bytes                25673 samples [bytes] 1 3366225 145121869 88812345678
write_bytes               13641 samples [bytes] 1 3366225 468230469 99912345678
read                      25673 samples [usecs] 2 385149 80065680 5387531243688
write                     13641 samples [usecs] 18 18 18 324
open                      2 samples [usecs] 14 134 148 18152
close                     2 samples [usecs] 9 19 28 442
getattr                   2 samples [usecs] 3 6 9 45
statfs                    16977 samples [usecs] 2 3904 16809097 16988546393
setxattr                  1 samples [usecs] 1 1 1 1
"""


def expected(system: str, *values: int) -> dict[tuple[str, ...], int]:
    ops = ("read", "write", "open", "getattr", "metadata")
    return {
        ("hpml_lustre_read_bytes_total", system): values[0],
        ("hpml_lustre_written_bytes_total", system): values[1],
        **{
            ("hpml_lustre_operations_total", system, op): value
            for op, value in zip(ops, values[2:], strict=True)
        },
    }


def test_the_old_place(tmp_path: Path) -> None:
    """The stats lie in procfs, and calls are counted without their duration."""
    write(tmp_path, {"fs/lustre/llite/scratch-ffff880fe2d0c000/stats": OLD})
    found = sampled(make(context(proc=tmp_path, sys=tmp_path / "none")))
    assert found == expected("scratch", 40000, 2000000, 10, 3, 7, 11, 6)


def test_the_new_place(tmp_path: Path) -> None:
    """They lie in debugfs; a duration is not a number of bytes."""
    name = "my-work-ffff9bc043537800"
    write(tmp_path, {f"kernel/debug/lustre/llite/{name}/stats": NEW})
    (tmp_path / f"fs/lustre/llite/{name}").mkdir(parents=True)
    found = sampled(make(context(proc=tmp_path / "none", sys=tmp_path)))
    assert found == expected("my-work", 145121869, 468230469, 25673, 13641, 2, 2, 16980)


def test_a_file_system_mounted_twice_is_one(tmp_path: Path) -> None:
    """Both mounts' calls are the file system's."""
    for address in ("ffff880fe2d0c000", "ffff880fe2d0c400"):
        write(tmp_path, {f"fs/lustre/llite/scratch-{address}/stats": OLD})
    found = sampled(make(context(proc=tmp_path, sys=tmp_path)))
    assert found == expected("scratch", 80000, 4000000, 20, 6, 14, 22, 12)


def test_stats_that_are_not_for_us(tmp_path: Path) -> None:
    """For another user than root, debugfs is closed: nothing here, and no failure."""
    if os.getuid() == 0:
        collector = make(context(proc=tmp_path, sys=tmp_path))
    else:
        write(tmp_path, {"kernel/debug/lustre/llite/scratch-ff/stats": NEW})
        (tmp_path / "kernel/debug").chmod(0)
        collector = make(context(proc=tmp_path, sys=tmp_path))
    with pytest.raises(NotHereError):
        collector.sample(0.0)


@pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv"
)
def test_the_service_s_capability_opens_debugfs() -> None:
    """The unit's user is not root: access(2) would say no where open(2) works."""
    rights = "+dac_read_search"
    code = (
        "import sys\n"
        "from tests.unit.exporters.collectors.reading import context, sampled\n"
        "from hpml_exporters.node.lustre import make\n"
        "print(len(sampled(make(context(proc=sys.argv[1], sys=sys.argv[1])))))"
    )
    with tempfile.TemporaryDirectory() as folder:  # tmp_path is closed to others at its parents
        place = Path(folder) / "kernel/debug"
        write(place / "lustre", {"llite/scratch-ff/stats": NEW})
        place.chmod(0o700)
        Path(folder).chmod(0o755)
        done = subprocess.run(
            [
                *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
                *(f"--inh-caps=-all,{rights}", f"--ambient-caps=-all,{rights}"),
                *(f"--bounding-set=-all,{rights}", sys.executable, "-c", code, folder),
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(one for one in sys.path if one)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.stdout.strip() == "7", done.stderr


words = st.sampled_from([*NEW.split(), "\n", " ", "-5", "9" * 30])


@given(st.lists(words | st.text(max_size=6), max_size=60))
def test_a_torn_file_raises_nothing(parts: list[str]) -> None:
    """What is no line of stats is passed over."""
    assert all(value >= 0 for value in parse(" ".join(parts)).values())
