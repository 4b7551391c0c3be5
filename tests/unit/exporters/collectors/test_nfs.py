"""NFS from mountstats, in the form of the kernel's fs/nfs/super.c and net/sunrpc/stats.c."""

from __future__ import annotations

from pathlib import Path

import pytest
from hpml_exporters.core.collector import NotHereError
from hpml_exporters.node.nfs import make, parse
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.exporters.collectors.reading import context, sampled, write

MOUNTSTATS = """\
device rootfs mounted on / with fstype rootfs
device /dev/vda1 mounted on /odd with fstype ext4
\tbytes:\t9 9 9 9 9 9 9 9
device n1:/export/data sets mounted on /data\\040sets with fstype nfs4 statvers=1.1
\topts:\trw,vers=4.2,rsize=1048576,wsize=1048576,namlen=255,hard,proto=tcp,timeo=600,retrans=2
\tage:\t86034
\timpl_id:\tname='',domain='',date='0,0'
\tcaps:\tcaps=0x3ffbffff,wtmult=512,dtsize=1048576,bsize=0,namlen=255
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
\t     READDIR: 4 4 0 400 600 1 1000 1003 1

device n1:/export/data sets mounted on /again with fstype nfs4 statvers=1.1
\tbytes:\t700 800 10 20 5242880 4096 1280 1
device old:/home mounted on /home with fstype nfs statvers=1.0
\tbytes:\t0 0 0 0 1000000 500000
\tper-op statistics
\t        READ: 10 10 0 1400 104800 0 90 92
device fs2 mounted on /local with fstype xfs
"""


def test_mounts(tmp_path: Path) -> None:
    """Bytes are those of the server, times become seconds, transmissions above requests count."""
    write(tmp_path, {"self/mountstats": MOUNTSTATS})
    found = sampled(make(context(proc=tmp_path)))
    data = "/data sets"
    assert found["hpml_nfs_mounts",] == 2
    assert found["hpml_nfs_read_bytes_total", data] == 5242880
    assert found["hpml_nfs_written_bytes_total", data] == 4096
    assert found["hpml_nfs_operations_total", data, "read"] == 1000
    assert found["hpml_nfs_round_trip_seconds_total", data, "read"] == pytest.approx(46.484)
    assert found["hpml_nfs_operations_total", data, "open"] == 10
    assert found["hpml_nfs_round_trip_seconds_total", data, "open"] == pytest.approx(0.020)
    assert found["hpml_nfs_operations_total", data, "getattr"] == 500
    assert found["hpml_nfs_operations_total", data, "lookup"] == 3
    assert found["hpml_nfs_operations_total", data, "other"] == 6, "ACCESS of old kernels too"
    assert found["hpml_nfs_retransmissions_total", data] == 5
    assert found["hpml_nfs_timeouts_total", data] == 3
    assert found["hpml_nfs_read_bytes_total", "/home"] == 1000000
    assert found["hpml_nfs_round_trip_seconds_total", "/home", "read"] == pytest.approx(0.090)
    assert {series[1] for series in found if len(series) > 1} == {data, "/home"}


HOMES = """\
device n1:/home/ann mounted on /home/ann with fstype nfs4 statvers=1.1
\tbytes:\t0 0 0 0 1000 20 0 0
device n1:/home/bob mounted on /home/bob with fstype nfs4 statvers=1.1
\tbytes:\t0 0 0 0 1000 20 0 0
device n1:/data mounted on /data with fstype nfs4 statvers=1.1
\tbytes:\t0 0 0 0 5 0 0 0
device n1:/data mounted on /data-ro with fstype nfs4 statvers=1.1
\tbytes:\t0 0 0 0 70 0 0 0
"""
HOMES_INFO = """\
21 1 0:20 / / rw,relatime - ext4 /dev/vda1 rw
31 21 0:50 / /home/ann rw,relatime shared:1 - nfs4 n1:/home/ann rw,vers=4.2
32 21 0:50 / /home/bob rw,relatime shared:2 - nfs4 n1:/home/bob rw,vers=4.2
33 21 0:51 / /data rw,relatime - nfs4 n1:/data rw,vers=4.2
34 21 0:52 / /data-ro ro,relatime - nfs4 n1:/data ro,vers=4.2
"""


def test_one_file_system_at_several_places_counts_once(tmp_path: Path) -> None:
    """Its counters stand at each of them; one export with two sets of counters is two."""
    write(tmp_path, {"self/mountstats": HOMES, "self/mountinfo": HOMES_INFO})
    found = sampled(make(context(proc=tmp_path)))
    name = "hpml_nfs_read_bytes_total"
    assert {series[1]: value for series, value in found.items() if series[0] == name} == {
        "/home/ann": 1000,
        "/data": 5,
        "/data-ro": 70,
    }
    assert found["hpml_nfs_mounts",] == 3


def test_a_mount_over_another_is_what_is_seen(tmp_path: Path) -> None:
    """Both files list them in the order in which they were made; one series each, of the last."""
    stats = HOMES.replace("mounted on /data-ro", "mounted on /data")
    info = HOMES_INFO.replace(" /data-ro ro", " /data ro")
    write(tmp_path, {"self/mountstats": stats, "self/mountinfo": info})
    found = sampled(make(context(proc=tmp_path)))
    assert found["hpml_nfs_read_bytes_total", "/data"] == 70
    assert found["hpml_nfs_mounts",] == 2


def test_a_user_s_mount_point_cannot_pretend_to_be_another_line(tmp_path: Path) -> None:
    """Of all that may end a line the kernel escapes the newline alone."""
    fake = "device x mounted on /a{0}device n9:/x mounted on /b with fstype fuse\n"
    fake = fake.replace("device n9:/x mounted on /b", r"device\040n9:/x\040mounted\040on\040/b")
    lines = "".join(fake.format(end) for end in "\r\x0b\x0c\x1c\x85\u2028")
    stats = HOMES.replace("/home/ann", "/home/\ran\u2028n")
    write(tmp_path, {"self/mountstats": lines + stats})
    found = sampled(make(context(proc=tmp_path)))
    assert found["hpml_nfs_read_bytes_total", "/home/\ran\u2028n"] == 1000
    assert found["hpml_nfs_mounts",] == 3


def test_a_node_without_nfs(tmp_path: Path) -> None:
    """Nothing to show is no failure."""
    write(tmp_path, {"self/mountstats": "device proc mounted on /proc with fstype proc\n"})
    with pytest.raises(NotHereError):
        make(context(proc=tmp_path)).sample(0.0)


def test_a_thousand_mounts_have_a_bound(tmp_path: Path) -> None:
    """A node with an automounter for homes shows 32 of them, and how many there are."""
    line = "device s:/home/{0} mounted on /home/{0} with fstype nfs4 statvers=1.1\n"
    write(tmp_path, {"self/mountstats": "".join(line.format(one) for one in range(1000))})
    found = sampled(make(context(proc=tmp_path)))
    assert found["hpml_nfs_mounts",] == 1000
    assert len(found) == 1 + 32 * 16


def test_this_machine_s_own_file_is_understood() -> None:
    """Whatever is mounted here."""
    parse(Path("/proc/self/mountstats").read_text("utf-8", "replace"))


words = st.sampled_from(
    [*MOUNTSTATS.split(), "device ", " mounted on ", " with fstype nfs ", "\n", "\t", "-1", "٣"]
)


@given(st.lists(words | st.text(max_size=8), max_size=60))
def test_a_torn_file_raises_nothing(parts: list[str]) -> None:
    """What is no line of mountstats is passed over."""
    for mount in parse("".join(parts)):
        assert mount.read_bytes >= 0
        assert min(mount.operations) >= 0
        assert mount.retransmissions >= 0
