"""Local disks: /proc/diskstats in the kernel's form (Documentation/admin-guide/iostats), mounts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hpml_exporters.core.collector import NotHereError
from hpml_exporters.node.disks import local_mounts, make

from hpml_orchestrator.records.mounts import parse_mounts
from tests.storage import FOLDER, in_memory, stored_folder
from tests.unit.exporters.collectors.reading import context, sampled, write

# A disk, its partition, a loop device, one of md and dm each, a CD, a disk of a kernel before 4.18.
DISKSTATS = """\
 259       0 nvme0n1 1000 5 2048 700 300 20 4096 900 0 1500 1650 7 0 8 1 9 49
 259       1 nvme0n1p1 1000 5 2048 700 300 20 4096 900 0 1500 1650 0 0 0 0 0 0
   7       0 loop0 49 0 2090 5 0 0 0 0 0 4 5 0 0 0 0 0 0
   9       0 md0 10 0 80 0 10 0 80 0 0 0 0 0 0 0 0 0 0
 253       0 dm-0 10 0 80 0 10 0 80 0 0 0 0 0 0 0 0 0 0
  11       0 sr0 1 0 8 0 0 0 0 0 0 0 0 0 0 0 0 0 0
 104       0 cciss/c0d0 2 0 16 1 4 0 32 2 0 3 4
   8      16
"""
ROOT = "20 1 254:0 / / rw,relatime - ext4 /dev/vda rw"


def test_disks(tmp_path: Path) -> None:
    """Whole devices with hardware behind them; sectors have 512 bytes, times are milliseconds."""
    write(tmp_path / "proc", {"diskstats": DISKSTATS, "self/mountinfo": ""})
    for name in ("nvme0n1", "sr0", "cciss!c0d0"):
        (tmp_path / "sys/block" / name / "device").mkdir(parents=True)
    (tmp_path / "sys/block/dm-0/slaves").mkdir(parents=True)
    found = sampled(make(context(proc=tmp_path / "proc", sys=tmp_path / "sys")))
    assert found == pytest.approx(
        {
            ("hpml_disk_read_bytes_total", "nvme0n1"): 1048576,
            ("hpml_disk_written_bytes_total", "nvme0n1"): 2097152,
            ("hpml_disk_busy_seconds_total", "nvme0n1"): 1.5,
            ("hpml_disk_read_bytes_total", "cciss/c0d0"): 8192,
            ("hpml_disk_written_bytes_total", "cciss/c0d0"): 16384,
            ("hpml_disk_busy_seconds_total", "cciss/c0d0"): 0.003,
        }
    )


def test_this_machine() -> None:
    """Eight MiB that reached the disk are in its counters, and the root's size agrees with df."""
    if in_memory():
        pytest.skip(f"cannot determine the disk of {FOLDER}")
    collector = make(context())
    before = sampled(collector)
    with stored_folder() as folder, (folder / "data").open("wb") as stream:
        stream.write(os.urandom(8 << 20))
        stream.flush()
        os.fsync(stream.fileno())
    after = sampled(collector)
    grown = {one: value - before[one] for one, value in after.items() if one in before}
    if not any(name == "hpml_disk_written_bytes_total" for name, *_ in grown):
        pytest.skip("no disk here")
    assert (
        max(n for one, n in grown.items() if one[0] == "hpml_disk_written_bytes_total") >= 8 << 20
    )
    roots = [one for one in after if one[:2] == ("hpml_filesystem_size_bytes", "/")]
    assert [after[one] for one in roots] in ([], [shutil.disk_usage("/").total])


def test_no_diskstats_is_nothing_here(tmp_path: Path) -> None:
    """A container may hide it."""
    with pytest.raises(NotHereError):
        make(context(proc=tmp_path)).sample(0.0)


def test_mount_points_over_time(tmp_path: Path) -> None:
    """Private mounts of ever new jobs do not add series without limit; the first ones stay."""
    write(tmp_path, {"diskstats": ""})
    collector = make(context(proc=tmp_path))
    seen = set()
    for job in range(100):
        (tmp_path / f"{job}").mkdir()
        line = f"{ROOT}\n30 20 8:{job} / {tmp_path}/{job} rw - xfs /dev/sda1 rw\n"
        write(tmp_path, {"self/mountinfo": line})
        found = {one[1] for one in sampled(collector)}
        assert "/" in found
        seen |= found
    assert len(seen) == 32


HOME = "30 20 0:50 / /home rw shared:1 - nfs4 s:/home rw"
SCRATCH = "31 30 8:1 / /home/scratch rw - xfs /dev/b rw"
ODD = "/a\r\x1c\x85\u2028b"
TMPFS = [
    f"{number} 20 0:{number} / {path} rw - tmpfs t rw"
    for number, path in enumerate(("/dev/shm", "/run/user/1", "/tmp"))
]
MOUNTS: dict[str, tuple[list[str], list[str]]] = {
    # lines of mountinfo, fields as in proc(5), and the mount points that may be asked
    "nfs": ([ROOT, HOME], ["/"]),
    "fuse": ([ROOT, "30 20 0:50 / /m rw - fuse.sshfs x rw"], ["/"]),
    "autofs": ([ROOT, "30 20 0:50 / /m rw - autofs systemd-1 rw"], ["/"]),
    "a space": ([ROOT, "30 20 8:1 / /a\\040b rw - xfs /dev/sda1 rw"], ["/", "/a b"]),
    # Of the characters that may end a line the kernel escapes only the newline; users may choose
    # such names.
    "ends of lines": ([ROOT, f"30 20 8:1 / {ODD} rw - xfs /dev/sda1 rw"], ["/", ODD]),
    # The way to a local disk below a network's directory would wait for the server,
    "below nfs": ([ROOT, HOME, SCRATCH], ["/"]),
    # also if the network's came later, and so is not a parent in the kernel's tree.
    "below a later nfs": ([ROOT, SCRATCH, HOME], ["/"]),
    "a name that begins alike": (
        [ROOT, HOME, "31 20 8:1 / /home2 rw - xfs /dev/b rw"],
        ["/", "/home2"],
    ),
    "mounted twice": (
        [ROOT, HOME, SCRATCH, "32 20 8:1 / /scratch/long rw - xfs /dev/b rw"],
        ["/", "/scratch/long"],
    ),
    "RAM file systems": ([ROOT, *TMPFS], ["/", "/tmp"]),
    "a root over the network": (
        ["20 1 0:50 / / rw - nfs s:/ rw", "31 20 8:1 / /d rw - xfs /dev/b rw"],
        [],
    ),
    "torn": (["garbage", "", "20 1"], []),
}


@pytest.mark.parametrize(("mountinfo", "expected"), MOUNTS.values(), ids=MOUNTS)
def test_local_mounts(mountinfo: list[str], expected: list[str]) -> None:
    """No server is asked, and none is met on the way."""
    assert [one.point for one in local_mounts(parse_mounts("\n".join(mountinfo)))] == expected
