"""Local disks: /proc/diskstats in the kernel's form (Documentation/admin-guide/iostats), mounts."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hpml_exporters.core.collector import NotHereError
from hpml_exporters.node.disks import local_mounts, make

from tests.patience import eventually
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
DISKS = ("nvme0n1", "sr0", "cciss!c0d0")
HEAD = "20 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"


def machine(root: Path, mountinfo: str = HEAD) -> dict[str, Path]:
    write(root / "proc", {"diskstats": DISKSTATS, "self/mountinfo": mountinfo})
    for name in DISKS:
        (root / "sys/block" / name / "device").mkdir(parents=True)
    (root / "sys/block/dm-0/slaves").mkdir(parents=True)
    return {"proc": root / "proc", "sys": root / "sys"}


def test_disks(tmp_path: Path) -> None:
    """Whole devices with hardware behind them; sectors have 512 bytes, times are milliseconds."""
    found = sampled(make(context(**machine(tmp_path))))
    found = {series: value for series, value in found.items() if "_disk_" in series[0]}
    assert found == {
        ("hpml_disk_read_bytes_total", "nvme0n1"): 1048576,
        ("hpml_disk_written_bytes_total", "nvme0n1"): 2097152,
        ("hpml_disk_busy_seconds_total", "nvme0n1"): 1.5,
        ("hpml_disk_io_time_seconds_total", "nvme0n1"): 1.65,
        ("hpml_disk_read_bytes_total", "cciss/c0d0"): 8192,
        ("hpml_disk_written_bytes_total", "cciss/c0d0"): 16384,
        ("hpml_disk_busy_seconds_total", "cciss/c0d0"): 0.003,
        ("hpml_disk_io_time_seconds_total", "cciss/c0d0"): 0.004,
    }


def test_this_machine() -> None:
    """What was written is in the counter, and the root's size is what df says."""
    collector = make(context())

    def df() -> list[str]:
        words = ["df", "--output=fstype,size,avail", "-B1", "/"]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()[-3:]

    kind, size, free = df()
    if kind != "ext4":
        pytest.skip("the root is no ext4 here")
    seen = sampled(collector)
    frees = sorted((int(free), int(df()[2])))  # others write and delete meanwhile
    assert seen["hpml_filesystem_size_bytes", "/", kind] == int(size)
    found = seen["hpml_filesystem_free_bytes", "/", kind]
    assert isinstance(found, int)
    assert frees[0] * 0.99 <= found <= frees[1] * 1.01


def test_written_bytes_of_this_machine() -> None:
    """Eight MiB that reached the disk are in its counter."""
    if in_memory():
        pytest.skip(f"{FOLDER} is on no disk that can be told")
    collector = make(context())
    name = "hpml_disk_written_bytes_total"
    before = {one: value for one, value in sampled(collector).items() if one[0] == name}
    with stored_folder() as folder, (folder / "data").open("wb") as stream:
        stream.write(os.urandom(8 << 20))
        stream.flush()
        os.fsync(stream.fileno())
    after = sampled(collector)
    grown = [after[one] - value for one, value in before.items()]  # type: ignore[operator]
    if not grown:
        pytest.skip("no disk here")
    assert max(grown) >= 8 << 20


def test_no_diskstats_is_nothing_here(tmp_path: Path) -> None:
    """A container may hide it."""
    with pytest.raises(NotHereError):
        make(context(proc=tmp_path)).sample(0.0)


ROOT = "20 1 254:0 / / rw,relatime - ext4 /dev/vda rw"
HOME = "30 20 0:50 / /home rw shared:1 - nfs4 s:/home rw"
ONLY_ROOT = [("/", "ext4")]
MOUNTS: list[tuple[list[str], list[tuple[str, str]]]] = [
    # (lines of mountinfo, what may be asked); fields as in proc(5)
    ([ROOT], ONLY_ROOT),
    ([ROOT, HOME], ONLY_ROOT),
    ([ROOT, "30 20 0:50 / /m rw - fuse.sshfs x rw"], ONLY_ROOT),
    ([ROOT, "30 20 0:50 / /m rw - lustre a@tcp:/m rw"], ONLY_ROOT),
    ([ROOT, "30 20 0:50 / /m rw - autofs systemd-1 rw"], ONLY_ROOT),
    ([ROOT, "30 20 8:1 / /a\\040b rw - xfs /dev/sda1 rw"], [("/", "ext4"), ("/a b", "xfs")]),
    # The kernel escapes the newline alone of all that may end a line: users choose such names.
    (
        [ROOT, "30 20 8:1 / /a\r\x1c\x85\u2028b rw - xfs /dev/sda1 rw"],
        [("/", "ext4"), ("/a\r\x1c\x85\u2028b", "xfs")],
    ),
    # A local disk below a network's directory: the way there would wait for the server.
    ([ROOT, HOME, "31 30 8:1 / /home/scratch rw - xfs /dev/b rw"], ONLY_ROOT),
    # The same, where the network's came later, and so is no parent in the kernel's tree.
    ([ROOT, "31 20 8:1 / /home/scratch rw - xfs /dev/b rw", HOME], ONLY_ROOT),
    # A neighbour whose name begins alike is no way.
    (
        [ROOT, HOME, "31 20 8:1 / /home2 rw - xfs /dev/b rw"],
        [("/", "ext4"), ("/home2", "xfs")],
    ),
    # Mounted twice: shown once, where it can be reached.
    (
        [
            ROOT,
            "30 20 0:50 / /n rw - nfs4 s:/n rw",
            "31 30 8:1 / /n/d rw - xfs /dev/b rw",
            "32 20 8:1 / /scratch/long rw - xfs /dev/b rw",
        ],
        [("/", "ext4"), ("/scratch/long", "xfs")],
    ),
    # RAM file systems: those for data.
    (
        [
            ROOT,
            "30 20 0:9 / /dev/shm rw - tmpfs t rw",
            "31 20 0:8 / /run/user/1 rw - tmpfs t rw",
            "32 20 0:7 / /tmp rw - tmpfs t rw",
        ],
        [("/", "ext4"), ("/tmp", "tmpfs")],
    ),
    # A root over the network: nothing can be asked.
    (["20 1 0:50 / / rw - nfs s:/root rw", "31 20 8:1 / /scratch rw - xfs /dev/b rw"], []),
    (["garbage", "", "20 1"], []),
]


@pytest.mark.parametrize(("mountinfo", "expected"), MOUNTS)
def test_local_mounts(mountinfo: list[str], expected: list[tuple[str, str]]) -> None:
    """No server is asked, and none is met on the way."""
    assert local_mounts("\n".join(mountinfo)) == expected


FROZEN = """
import os, signal, sys, threading, time
sys.path[:0] = sys.argv[1].split(":")
from hpml_exporters.node import disks
from hpml_exporters.node import shm
from tests.unit.exporters.collectors.reading import context, post, sampled

point, place, server = sys.argv[2], sys.argv[3], int(sys.argv[4])
inner = context(shm=place)
post(inner.jobs, {"7": (os.getuid(), [])})
os.statvfs(point)
os.kill(server, signal.SIGSTOP)
asked = threading.Thread(target=lambda: os.statvfs(point), daemon=True)
asked.start()
began = time.monotonic()
sampled(disks.make(context()))
found = sampled(shm.make(inner))
print("took", time.monotonic() - began, found["hpml_job_shm_bytes", "7"], flush=True)
asked.join(0.5)
print("control", "waits" if asked.is_alive() else "answered", flush=True)
os.kill(server, signal.SIGCONT)
asked.join(120)
os._exit(0)
"""


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[tuple[Path, Path, int]]:
    """A mounted file system whose server can be stopped: mount point, its directory, server."""
    if os.getuid() != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("a FUSE file system needs root here")
    if not shutil.which("squashfuse") or not shutil.which("mksquashfs"):
        pytest.skip("squashfuse or mksquashfs is missing")
    content, place = tmp_path / "content", tmp_path / "shm"
    point = place / "their files"
    (content / "inner").mkdir(parents=True)
    point.mkdir(parents=True)
    (place / "mine").write_bytes(b"x" * 4096)
    image = tmp_path / "image"
    subprocess.run(
        ["mksquashfs", content, image, "-quiet", "-no-progress"], check=True, capture_output=True
    )
    with subprocess.Popen(["squashfuse", "-f", image, point]) as server:
        try:
            eventually(lambda: os.path.ismount(point) or server.poll() is not None)
            yield point, place, server.pid
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server.pid, signal.SIGCONT)
            subprocess.run(["umount", "-l", point], check=False, capture_output=True)
            server.terminate()


def test_a_server_that_hangs_holds_nothing_up(frozen: tuple[Path, Path, int]) -> None:
    """With a real file system that answers nobody any more: disks and shm are read all the same.

    The control, a plain statvfs of it, waits as long as the server stands still.
    """
    done = subprocess.run(
        [sys.executable, "-c", FROZEN, ":".join(sys.path), *map(str, frozen)],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    first, second = done.stdout.splitlines()
    assert second == "control waits"
    _, took, amount = first.split()
    assert float(took) < 60
    assert int(amount) == 4096
