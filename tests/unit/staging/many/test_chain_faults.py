"""Whatever ends one node ends all, soon, with its reason; nothing is published, nothing is left."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.patience import eventually
from tests.unit.staging.many.nodes import SLOW_SOURCE, Nodes, begun
from tests.unit.staging.many.proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def tmpfs(root: Path) -> Iterator[Callable[[Path, int], None]]:
    """Mount small file systems; skips if that is not allowed."""
    mounted: list[Path] = []

    def mount(point: Path, size: int) -> None:
        point.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "hpml-test", str(point)]
        if subprocess.run(words, check=False, capture_output=True).returncode:
            pytest.skip("mounting needs root")
        mounted.append(point)

    yield mount
    for point in mounted:
        subprocess.run(["umount", point], check=True)


def assert_nothing_is_there(nodes: Nodes, *indices: int) -> None:
    """Nothing published, no part of a copy, no process, no secret."""
    for index in indices or range(nodes.count):
        assert not nodes.data(index).exists()
    eventually(lambda: nodes.leftovers() == [])


def assert_next_run_works(nodes: Nodes) -> None:
    """The same nodes stage the same data in the next attempt."""
    nodes.attempt += "+"
    nodes.start()
    ends = nodes.ends()
    assert [end["status"] for end in ends] == [0] * nodes.count, ends
    assert all(nodes.data(index).exists() for index in range(nodes.count))
    assert nodes.leftovers() == []


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_killed_node_ends_all(job: Callable[..., Nodes], big: Path, lost: int) -> None:
    """SIGKILL of the first, middle or last agent: the others name it within seconds."""
    nodes = job(big, 3)
    nodes.start(before=SLOW_SOURCE)
    eventually(begun(nodes, 2))
    nodes.signal(lost, signal.SIGKILL)
    began = time.monotonic()
    others = [index for index in range(3) if index != lost]
    ends = nodes.ends(*others)
    assert time.monotonic() - began < 60  # a second; by the time-out it would be more
    for end in ends:
        assert end["status"] == 8, end
        assert f"n{lost} was lost" in end["error"], end
    nodes.ends(lost)
    assert not any(nodes.data(index).exists() for index in range(3))
    assert_next_run_works(nodes)


@pytest.mark.parametrize("hung", [0, 1, 2])
def test_a_hung_node_ends_all(job: Callable[..., Nodes], big: Path, hung: int) -> None:
    """A stopped agent gives no sign of life: after the timeout the others name it."""
    nodes = job(big, 3, timeout=2.0)
    nodes.start(before=SLOW_SOURCE)
    eventually(begun(nodes, 2))
    nodes.signal(hung, signal.SIGSTOP)
    others = [index for index in range(3) if index != hung]
    ends = nodes.ends(*others)
    assert all(end["status"] == 8 and f"n{hung} hangs" in end["error"] for end in ends), ends
    nodes.signal(hung, signal.SIGCONT)
    end = nodes.ends(hung)[0]
    assert end["status"] == 8, end
    assert_nothing_is_there(nodes)


def test_a_job_that_was_suspended_continues(job: Callable[..., Nodes], big: Path) -> None:
    """All its nodes were stopped for longer than the timeout: none of them hangs."""
    nodes = job(big, 3, timeout=1.0)
    nodes.start(before=SLOW_SOURCE)
    eventually(begun(nodes, 2))
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for index in range(3):
            nodes.signal(index, number)
        time.sleep(3 if number == signal.SIGSTOP else 0)
    ends = nodes.ends()
    assert [end["status"] for end in ends] == [0] * 3, ends


def test_a_slow_disk_slows_the_whole_chain(job: Callable[..., Nodes], big: Path) -> None:
    """No node reads further ahead of the slowest one than connections hold."""
    slow = (
        "real = os.write\ndef write(fd, data):\n    import time\n"
        "    time.sleep(len(data) / 40e6)\n    return real(fd, data)\nos.write = write\n"
        "real2 = os.pwrite\ndef pwrite(fd, data, at):\n    import time\n"
        "    time.sleep(len(data) / 40e6)\n    return real2(fd, data, at)\nos.pwrite = pwrite\n"
    )
    nodes = job(big, 3)
    nodes.start(0, 1)
    nodes.start(2, before=slow)

    def arrived(index: int) -> int:
        found = nodes.base(index).glob("hpml-*/*/.data.partial-*/*")
        return sum(path.stat().st_size for path in found)

    eventually(lambda: arrived(2) >= 8 << 20)
    assert arrived(0) - arrived(2) < 40 << 20
    ends = nodes.ends()
    assert [end["status"] for end in ends] == [0] * 3, ends


def test_a_node_that_is_told_to_stop_ends_all(job: Callable[..., Nodes], big: Path) -> None:
    """SIGTERM, as at the time limit, on one node; the others say which."""
    nodes = job(big, 3)
    nodes.start(before=SLOW_SOURCE)
    eventually(begun(nodes, 2))
    nodes.signal(1, signal.SIGTERM)
    ends = nodes.ends()
    assert "stopped" in ends[1]["error"]
    assert all("n1: was stopped" in ends[index]["error"] for index in (0, 2)), ends
    assert_nothing_is_there(nodes)


def test_a_node_that_never_comes(job: Callable[..., Nodes], tree: Path) -> None:
    """Both its neighbours name it, the others hear of it, and stopping does not have to wait."""
    nodes = job(tree, 4, join_seconds=2.0)
    nodes.start(0, 1, 3)
    ends = nodes.ends()
    assert [end["status"] for end in ends] == [8, 8, 8], ends
    assert "node 2 of 4 did not come within 2 s" in ends[0]["error"]
    assert "node 2 of 4 did not come within 2 s" in ends[1]["error"]
    assert "node 2 of 4 did not come within 2 s" in ends[2]["error"]
    assert all("name the interfaces" in end["hint"] for end in ends)
    assert_nothing_is_there(nodes, 0, 1, 3)


def test_a_node_that_is_busy_with_other_data_is_waited_for(
    job: Callable[..., Nodes], tree: Path
) -> None:
    """Nodes that have come are reached soon; one that has not yet come may take its time."""
    nodes = job(tree, 4, join_seconds=2.0, come_seconds=600.0)
    nodes.start(0, 1, 3)
    with pytest.raises(subprocess.TimeoutExpired):
        nodes.started[0].wait(4)
    nodes.start(2)
    ends = nodes.ends()
    assert [end["status"] for end in ends] == [0] * 4, ends
    assert len({end["digest"] for end in ends}) == 1


def test_nodes_with_one_directory_do_not_wait_for_each_other(
    job: Callable[..., Nodes], tree: Path
) -> None:
    """A shared file system that looks like a node's own: one has the lock, the other reports it."""
    nodes = job(tree, 2, base=str(tree.parent / "base0"), join_seconds=10.0)
    soon = "import hpml_orchestrator.staging.stage as S\nS._BUSY_SECONDS = 0.5\n"
    nodes.start(before=soon)
    ends = nodes.ends(0, 1)
    told = [end["error"] for end in ends]
    assert any("another process of this job stages data in" in one for one in told), ends
    assert all(end["status"] == 8 for end in ends)
    assert_nothing_is_there(nodes)


def test_a_node_that_takes_long_to_make_links_does_not_hang(
    job: Callable[..., Nodes], root: Path
) -> None:
    """It shows signs of life also after the last byte; those before and behind it wait."""
    top = root / "links"
    top.mkdir()
    (top / "file").write_bytes(b"x")
    for number in range(40):
        (top / str(number)).symlink_to("file")
    slow = (
        "real = os.symlink\ndef link(*a, **b):\n    import time; time.sleep(0.1); real(*a, **b)\n"
    )
    nodes = job(top, 3, timeout=1.0)
    nodes.start(1, before=slow + "os.symlink = link\n")
    nodes.start(0, 2)
    ends = nodes.ends()
    assert [end["status"] for end in ends] == [0, 0, 0], ends


def test_one_node_without_room_ends_all_before_a_byte(
    job: Callable[..., Nodes], tree: Path
) -> None:
    """The last node has too little room: all nodes report it, and nothing was copied."""
    nodes = job(tree, 3)
    nodes.start(0, 1, before=SLOW_SOURCE)
    nodes.start(2, room=10_000)
    ends = nodes.ends()
    assert [end["status"] for end in ends] == [8, 8, 2], ends
    for index in (0, 1):
        assert "n2: data: needs" in ends[index]["error"]
        assert ends[index]["hint"] == ends[2]["hint"] != ""
    assert_nothing_is_there(nodes)


def test_a_full_disk_ends_all(
    job: Callable[..., Nodes], big: Path, tmpfs: Callable[[Path, int], None]
) -> None:
    """The room that was there goes while data comes (a real tmpfs that is too small)."""
    nodes = job(big, 3)
    tmpfs(nodes.base(1), 40 << 20)
    nodes.start(0, 2)
    nodes.start(1, room=1 << 40)  # more than there is
    ends = nodes.ends()
    assert [end["status"] for end in ends] == [8, 8, 8], ends
    assert "No space left on device" in ends[1]["error"]
    assert all("n1: cannot write" in ends[index]["error"] for index in (0, 2)), ends
    assert_nothing_is_there(nodes)


@pytest.mark.parametrize(("at", "told"), [(5_000_000, "not what was read"), (140, "damaged")])
def test_a_flipped_bit_is_found(job: Callable[..., Nodes], big: Path, at: int, told: str) -> None:
    """A fake network flips one bit of the data, or of a control message: all end."""
    nodes = job(big, 3)
    proxy = Proxy(nodes.root / "attempt" / "chain" / "data.1", at=at)
    try:
        nodes.start(0, before=proxy.before)
        nodes.start(1, 2)
        ends = nodes.ends()
    finally:
        proxy.close()
    assert proxy.flipped >= 1
    assert [end["status"] for end in ends] == [8, 8, 8], ends
    assert all(told in end["error"] for end in ends), ends
    assert_nothing_is_there(nodes)
    assert_next_run_works(nodes)


def test_a_source_that_changes_ends_all(job: Callable[..., Nodes], big: Path) -> None:
    """Node 0 sees it, and nobody publishes."""
    nodes = job(big, 3)
    nodes.start(before=SLOW_SOURCE)
    eventually(begun(nodes, 2))
    (big / "9").write_bytes(b"other")
    ends = nodes.ends()
    assert [end["status"] for end in ends] == [8, 8, 8], ends
    assert all("changed while it was copied" in end["error"] for end in ends)
    assert_nothing_is_there(nodes)
