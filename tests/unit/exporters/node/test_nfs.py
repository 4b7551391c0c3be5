"""NFS from mountstats, in the form of the kernel's fs/nfs/super.c and net/sunrpc/stats.c."""

from __future__ import annotations

from pathlib import Path

import pytest
from hpml_exporters.core.collector import NotHereError
from hpml_exporters.node.nfs import make

from tests.unit.exporters.collectors.reading import context, sampled, write

MOUNTSTATS = """\
device rootfs mounted on / with fstype rootfs
device /dev/vda1 mounted on /odd with fstype ext4
\tbytes:\t9 9 9 9 9 9 9 9
device n1:/export/data\\040sets mounted on /data\\040sets with fstype nfs4 statvers=1.1
\topts:\trw,vers=4.2,rsize=1048576,wsize=1048576,namlen=255,hard,proto=tcp,timeo=600,retrans=2
\tage:\t86034
\tsec:\tflavor=1,pseudoflavor=1
\tevents:\t1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27
\tbytes:\t700 800 10 20 5242880 4096 1280 1
\tRPC iostats version: 1.1  p/v: 100003/4 (nfs)
\txprt:\ttcp 940 0 2 0 1 938505 938504 0 12756069 0 32 254729 10823602
\tper-op statistics
\t        NULL: 1 1 0 44 24 0 0 7000 0
\t        READ: 1000 1003 1 224000 5300000 2272 46484 467945 0
\t       WRITE: 50 50 0 6000000 7000 1 400 410 0
\t        OPEN: 9 9 0 1800 2700 0 11 12 0
\t OPEN_NOATTR: 1 1 0 200 300 0 9 10 0
\t     GETATTR: 500 502 2 70000 56000 10 300 320 0
\t      ACCESS: 2 2 0 300 200 0 1 1
\t      LOOKUP: 3 3 0 400 600 1 2 3 1

device old:/home mounted on /home with fstype nfs statvers=1.0
\tbytes:\t0 0 0 0 1000000 500000
\tper-op statistics
\t        READ: 10 10 0 1400 104800 0 90 92
device fs2 mounted on /local with fstype xfs
"""
READ = "hpml_nfs_read_bytes_total"
PLAIN = ("read_bytes", "written_bytes", "retransmissions", "timeouts")


def node(root: Path, mounts: str) -> dict[str, Path]:
    """A machine with these mounts: lines of export, mount point, device and bytes read."""
    stats, info = "", "20 1 254:0 / / rw - ext4 /dev/vda rw\n"
    for line in mounts.splitlines():
        export, path, device, read = line.split()
        stats += f"device {export} mounted on {path} with fstype nfs4 statvers=1.1\n"
        stats += f"\tbytes:\t0 0 0 0 {read} 20 0 0\n"
        info += f"31 20 {device} / {path} rw shared:1 - nfs4 {export} rw,vers=4.2\n"
    write(root, {"self/mountstats": stats, "self/mountinfo": info})
    return {"proc": root}


def test_mounts(tmp_path: Path) -> None:
    """Bytes are those of the server, times become seconds, transmissions above requests count."""
    write(tmp_path, {"self/mountstats": MOUNTSTATS, "self/mountinfo": ""})
    expected = {
        # bytes read and written, retransmissions, time-outs; requests and their seconds by op
        ("n1", "/export/data sets"): (
            *(5242880, 4096, 5, 3, (1000, 50, 10, 505)),
            (46.484, 0.4, 0.02, 0.303),
        ),
        ("old", "/home"): (1000000, 500000, 0, 0, (10, 0, 0, 0), (0.09, 0, 0, 0)),
    }
    series: dict[tuple[str, ...], float] = {}
    for export, (*plain, operations, seconds) in expected.items():
        for name, value in zip(PLAIN, plain, strict=True):
            series[f"hpml_nfs_{name}_total", *export] = value
        for number, op in enumerate(("read", "write", "open", "other")):
            series["hpml_nfs_operations_total", *export, op] = operations[number]
            series["hpml_nfs_round_trip_seconds_total", *export, op] = seconds[number]
    assert sampled(make(context(proc=tmp_path))) == pytest.approx(series)


HOMES = "".join(f"n1:/home/u{n} /home/u{n} 0:{50 + n} 100\n" for n in range(32))
SHAPES = {
    # one file system at several places counts once; one export with two sets of counters twice
    "parts of one file system": (
        "n1:/vol/a /a 0:50 1000\nn1:/vol/b /b 0:50 1000\nn1:/d /d 0:51 5\nn1:/d /ro 0:52 70\n",
        {("n1", "/vol/a"): 1000, ("n1", "/d"): 75},
    ),
    "one mounted over another": (
        "n:/a /m 0:50 1\nn:/b /m 0:51 2\n",
        {("n", "/a"): 1, ("n", "/b"): 2},
    ),
    # many exported directories: series for 32 of them, and one for the rest
    "a thousand exports": (
        "".join(f"s:/{n}/data /{n} 0:{n} 1\n" for n in range(1000)),
        {**{("s", f"/{n}/data"): 1 for n in range(32)}, ("s", "*"): 1000 - 32},
    ),
    "homes of an automounter": (
        HOMES + "n1:/data /data 0:99 7\nn2:/home/x /x 0:98 8\n",
        {("n1", "/home/*"): 3200, ("n1", "/data"): 7, ("n2", "/home/x"): 8},
    ),
}


@pytest.mark.parametrize(("mounts", "read"), SHAPES.values(), ids=SHAPES)
def test_what_is_one_series(tmp_path: Path, mounts: str, read: dict[tuple[str, ...], int]) -> None:
    """Bytes read by server and export; each file system counts once."""
    found = sampled(make(context(**node(tmp_path, mounts))))
    assert {series[1:]: value for series, value in found.items() if series[0] == READ} == read


def test_homes_that_come_and_go(tmp_path: Path) -> None:
    """Their sum never falls, and their number of series stays the same for months."""
    collector = make(context(**node(tmp_path, HOMES)))
    shown = set(sampled(collector))
    total = 3200
    for day in range(1, 9):
        node(tmp_path, HOMES.replace("/u", f"/{day}u").replace(" 0:", f" {day}:"))
        total += 3200
        found = sampled(collector)
        assert found[READ, "n1", "/home/*"] == total
        assert set(found) == shown


def test_a_mount_point_cannot_pretend_to_be_a_line(tmp_path: Path) -> None:
    """The kernel escapes only the newline, not other line ends; users may choose such names.

    Torn lines are skipped.
    """
    fake = (
        r"device x mounted on /a{0}device\040n9:/x\040mounted\040on\040/b with fstype fuse" + "\n"
    )
    stats = "".join(fake.format(end) for end in "\r\x0b\x0c\x1c\x85\u2028")
    stats += "device n1:/h mounted on /h\r\u2028n with fstype nfs\n\tbytes: 0 0 0 0 1000 20\n"
    torn = "\tper-op statistics\n\tREAD: 1 -1 ٣ x\n\tWRITE: 5\ndevice n2:/t mounted on"
    write(tmp_path, {"self/mountstats": stats + torn, "self/mountinfo": ""})
    found = sampled(make(context(proc=tmp_path)))
    assert found[READ, "n1", "/h"] == 1000
    assert found["hpml_nfs_operations_total", "n1", "/h", "read"] == 0


@pytest.mark.parametrize("stats", [{}, {"self/mountstats": "device proc mounted on /proc with"}])
def test_a_node_without_nfs(tmp_path: Path, stats: dict[str, str]) -> None:
    """A node without NFS mounts is not a failure."""
    write(tmp_path, stats)
    with pytest.raises(NotHereError):
        make(context(proc=tmp_path)).sample(0.0)
