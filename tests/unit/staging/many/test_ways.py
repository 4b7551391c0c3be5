"""From what a job asks for to what each node does."""

from __future__ import annotations

import os
import signal
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.packing.pack import PackRequest, pack
from tests.patience import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.staging.many.nodes import Nodes

SBCAST = """#!/bin/sh
# A labelled fake of Slurm's sbcast, for faults that the real one cannot make on demand: it writes
# to a directory per node of one machine, and does what $FAKE_SBCAST says.
source=$2
dest=$3
count=0
for base in "$FAKE_ROOT"/base*; do
  to=$base/${dest#*/base0/}
  case $FAKE_SBCAST in
    partial) [ "$count" = 1 ] && { head -c 1000 "$source" >"$to"; \
      echo "sbcast: error: REQUEST_FILE_BCAST(n1): No space left on device" >&2; exit 1; } ;;
    short) [ "$count" = 1 ] && { head -c 1000 "$source" >"$to"; count=2; continue; } ;;
    damaged) [ "$count" = 1 ] && { tr a b <"$source" >"$to"; count=2; continue; } ;;
    slow) sleep 30 ;;
  esac
  cp -p "$source" "$to" || exit 1
  count=$((count + 1))
done
"""
ONE_PATH = """
# nodes of one machine have their own directories, where real ones have one path for all
import hpml_orchestrator.staging.many.sbcast as B
def check(self, told):
    told["directory"] = self._directory
    real(self, told)
real = B.Broadcast._check_room
B.Broadcast._check_room = check
os.environ["SLURM_JOB_ID"] = "1"
"""


@pytest.fixture
def sbcast(root: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Give what puts the fake in front of the real command."""

    def put(does: str) -> None:
        program = root / "bin" / "sbcast"
        program.parent.mkdir(exist_ok=True)
        program.write_text(SBCAST)
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        monkeypatch.setenv("FAKE_ROOT", str(root))
        monkeypatch.setenv("FAKE_SBCAST", does)

    return put


@pytest.fixture
def file(root: Path) -> Path:
    """Give one file of 300 kB."""
    path = root / "weights.bin"
    path.write_bytes(b"a" * 300_000)
    path.chmod(0o640)
    return path


@pytest.mark.parametrize(("rate", "method"), [(1e5, "chain"), (1e12, "copy")])
def test_the_first_node_chooses_for_all(
    job: Callable[..., Nodes], big: Path, rate: float, method: str
) -> None:
    """By the model; one sentence says what and why."""
    nodes = job(big, 3, method="auto", rates={"shared_rate": rate, "metadata_rate": 1e9})
    nodes.start()
    ends = nodes.ends()
    assert [end["status"] for end in ends] == [0, 0, 0], ends
    assert {end["method"] for end in ends} == {method}
    assert ends[0]["tell"].startswith("data: ")
    assert "64.0 MiB in 16 files to 3 nodes, by the model shared" in ends[0]["tell"]
    assert "tell" not in ends[1]


def test_one_node_reads_for_itself(job: Callable[..., Nodes], tree: Path) -> None:
    """Whatever was asked for; nothing is said."""
    for method in ("auto", "chain"):
        nodes = job(tree, 1, method=method)
        nodes.attempt = method
        nodes.start()
        end = nodes.ends()[0]
        assert end["status"] == 0
        assert "tell" not in end


def test_a_choice_that_fails_is_told(job: Callable[..., Nodes], tree: Path) -> None:
    """The others do not wait for a first node that cannot look at the source."""
    os.mkfifo(tree / "fifo")
    nodes = job(tree, 2, method="auto")
    nodes.start()
    ends = nodes.ends()
    assert [end["status"] for end in ends] == [8, 8], ends
    assert "is a device, fifo or socket" in ends[1]["error"]


def test_a_tree_is_not_broadcast(job: Callable[..., Nodes], tree: Path) -> None:
    """One file is what sbcast sends: the hint says what to do."""
    nodes = job(tree, 2, method="sbcast")
    nodes.start()
    ends = nodes.ends()
    assert [end["status"] for end in ends] == [2, 2]
    assert "make a tar archive" in ends[0]["hint"]


def test_a_pack_is_a_directory_and_not_broadcast(
    job: Callable[..., Nodes], root: Path, sbcast: Callable[[str], None]
) -> None:
    """Asked for, it is refused before anything; `auto` does not choose it, however it pays."""
    sbcast("well")
    (root / "small").mkdir()
    for number in range(10):
        (root / "small" / f"{number}").write_bytes(b"x" * 10_000)
    pack(PackRequest(str(root / "small"), str(root / "pack")))
    for method in ("sbcast", "auto"):
        nodes = job(root / "pack", 2, method=method, before=ONE_PATH)
        nodes.attempt = method
        nodes.start(rates={"shared_rate": 1e4, "link_rate": 1e5})
        ends = nodes.ends()
        if method == "sbcast":
            assert [end["status"] for end in ends] == [2, 2], ends
            assert "sbcast sends one file" in ends[0]["error"]
        else:
            assert [end["status"] for end in ends] == [0, 0], ends
            assert {end["method"] for end in ends} == {"unpack"}
            assert "sbcast" not in ends[0]["tell"]


def test_a_file_is_broadcast(
    job: Callable[..., Nodes], file: Path, sbcast: Callable[[str], None]
) -> None:
    """To all nodes, with the source's mode and time, and no copy is left."""
    sbcast("well")
    link = file.parent / "link" / file.name
    link.parent.mkdir()
    link.symlink_to(file)  # as data often are, on file systems of several volumes
    nodes = job(link, 3, method="sbcast", before=ONE_PATH, umask=0o027)
    nodes.start()
    ends = nodes.ends()
    assert [end["status"] for end in ends] == [0, 0, 0], ends
    assert {end["method"] for end in ends} == {"sbcast"}
    assert len({end["digest"] for end in ends}) == 1
    for index in range(3):
        copy = nodes.data(index) / "weights.bin"
        assert copy.read_bytes() == file.read_bytes()
        assert copy.stat().st_mtime_ns == file.stat().st_mtime_ns
        assert copy.stat().st_mode & 0o777 == 0o640
    assert nodes.leftovers() == []


def test_an_archive_is_broadcast_and_unpacked(
    job: Callable[..., Nodes], tree: Path, root: Path, sbcast: Callable[[str], None]
) -> None:
    """Each node unpacks its own copy."""
    sbcast("well")
    archive = root / "data.tar"
    with tarfile.open(archive, "w") as made:
        made.add(tree / "a", ".")
    nodes = job(archive, 2, method="sbcast", before=ONE_PATH)
    nodes.start()
    ends = nodes.ends()
    assert [end["status"] for end in ends] == [0, 0], ends
    assert (nodes.data(1) / "7.bin").read_bytes() == (tree / "a" / "7.bin").read_bytes()
    assert nodes.leftovers() == []


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("partial", "sbcast ended with 1: sbcast: error: REQUEST_FILE_BCAST(n1)"),
        ("short", "n1: sbcast brought 1000 bytes of 300000"),
        ("damaged", "n1: sbcast brought other bytes than those of"),
    ],
)
def test_a_broadcast_that_goes_wrong_ends_all(
    job: Callable[..., Nodes], file: Path, sbcast: Callable[[str], None], does: str, told: str
) -> None:
    """Its exit code counts, and so does every node's copy; what it left is removed."""
    sbcast(does)
    nodes = job(file, 3, method="sbcast", before=ONE_PATH)
    nodes.start()
    ends = nodes.ends()
    assert [end["status"] for end in ends] == [8, 8, 8], ends
    assert told in ends[0]["error"]
    assert told in ends[2]["error"]
    assert not any(nodes.data(index).exists() for index in range(3))
    assert nodes.leftovers() == []


def test_kept_data_goes_for_a_broadcast(
    job: Callable[..., Nodes],
    file: Path,
    root: Path,
    sbcast: Callable[[str], None],
    small_tmpfs: Callable[[str], Path],
) -> None:
    """A kept copy that fills most of each node's disk does not refuse the next job."""
    sbcast("well")
    big = root / "big.bin"
    big.write_bytes(b"b" * 600_000)
    for index in range(2):
        (root / f"base{index}").symlink_to(small_tmpfs("size=800k"))
    for source, method, evicted in ((big, "shared", []), (file, "sbcast", [str(big)])):
        nodes = job(source, 2, method=method, before=ONE_PATH, keep=True, clean=True)
        nodes.attempt = method
        nodes.start()
        ends = nodes.ends()
        assert [end["status"] for end in ends] == [0, 0], ends
        assert [end["evicted"] for end in ends] == [evicted, evicted]


@pytest.mark.parametrize(("keep", "method"), [(False, "sbcast"), (True, "chain")])
def test_kept_data_is_not_broadcast_unless_asked_for(
    job: Callable[..., Nodes],
    file: Path,
    sbcast: Callable[[str], None],
    keep: bool,
    method: str,
) -> None:
    """A broadcast sends before a node finds its kept copy: `auto` takes the way that does not."""
    sbcast("well")
    rates = {"shared_rate": 1e3, "link_rate": 1e9, "open_seconds": 10.0}
    nodes = job(file, 2, method="auto", before=ONE_PATH, keep=keep, rates=rates, clean=True)
    for attempt, reused in (("first", False), ("second", keep)):
        nodes.attempt = attempt
        nodes.start()
        ends = nodes.ends()
        assert [end["status"] for end in ends] == [0, 0], ends
        assert [end["reused"] for end in ends] == [reused, reused]
        assert ends[0]["tell"].startswith(f"data: {method}: ")


def test_a_node_without_room_stops_the_broadcast(
    job: Callable[..., Nodes], file: Path, sbcast: Callable[[str], None]
) -> None:
    """Before a byte is sent."""
    sbcast("slow")
    nodes = job(file, 3, method="sbcast", before=ONE_PATH)
    nodes.start(0, 1)
    nodes.start(2, room=1000)
    ends = nodes.ends()
    assert [end["status"] for end in ends] == [8, 8, 2], ends
    assert "n2: data: needs 293.0 KiB" in ends[1]["error"]


def test_a_broadcast_can_be_stopped(
    job: Callable[..., Nodes], file: Path, sbcast: Callable[[str], None], root: Path
) -> None:
    """SIGTERM while sbcast works: it is ended, and the others hear of it."""
    sbcast("slow")
    nodes = job(file, 2, method="sbcast", before=ONE_PATH)
    nodes.start()
    eventually((root / "attempt" / "chain" / "data.1.room").exists)
    nodes.signal(0, signal.SIGTERM)
    ends = nodes.ends()
    assert "stopped" in ends[0]["error"]
    assert "n0: was told to stop" in ends[1]["error"]
    assert nodes.leftovers() == []


def test_a_dead_first_node_is_noticed(
    job: Callable[..., Nodes], file: Path, sbcast: Callable[[str], None], root: Path
) -> None:
    """Its signs of life end, and the others with them."""
    sbcast("slow")
    nodes = job(file, 2, method="sbcast", before=ONE_PATH, timeout=1.0)
    nodes.start()
    eventually((root / "attempt" / "chain" / "data.1.room").exists)
    nodes.signal(0, signal.SIGKILL)
    end = nodes.ends(1)[0]
    assert "node 0 of 2 was lost: no sign of life within 2 s" in end["error"]
