"""A pack that was killed goes on; what goes wrong leaves nothing that looks finished."""

from __future__ import annotations

import errno
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.errors import CapacityError, HpmlError, InputError, StagingError
from hpml_orchestrator.packing import PackRequest, PackResult, pack, verify
from hpml_orchestrator.packing import layout as layout_module
from hpml_orchestrator.packing import pack as pack_function
from hpml_orchestrator.packing import shards as shards_module
from hpml_orchestrator.packing.dest import stripe
from hpml_orchestrator.packing.workers import Tell, in_parallel
from tests.patience import eventually
from tests.unit.packing.conftest import contents, finished, grow, left, untar

pack_module = sys.modules[pack_function.__module__]
HPML = Path(sys.executable).parent / "hpml"
QUICK_KILLS, ALL_KILLS = 5, 60
SIZE = 1 << 18
QUIET = [sys.executable, "-c", "from hpml_orchestrator.cli.__main__ import run; run()", "pack"]


def packed(tree: Path, dest: Path, **more: Any) -> PackResult:
    return pack(PackRequest(str(tree), str(dest), **{"shard_bytes": SIZE, **more}))


def same_bytes(one: Path, other: Path) -> bool:
    names = left(one)
    return names == left(other) and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names
    )


def begun(dest: Path, process: subprocess.Popen[bytes]) -> bool:
    return (dest / ".packing.json").exists() or process.poll() is not None


@pytest.mark.parametrize("kills", [QUICK_KILLS, pytest.param(ALL_KILLS, marks=pytest.mark.slow)])
def test_a_killed_pack_goes_on(tmp_path: Path, kills: int) -> None:
    """SIGKILL at random moments: no index before all is there, and in the end the same bytes."""
    tree = grow(tmp_path / "tree", 2000)
    begin = time.monotonic()
    packed(tree, tmp_path / "undisturbed")
    seconds = time.monotonic() - begin
    dest = tmp_path / "pack"
    dice = random.Random(7)
    words = [*QUIET, str(tree), str(dest), "--shard-size", "256K", "--workers", "2", "--resume"]
    killed = 0
    while killed < kills:
        with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            eventually(partial(begun, dest, process), pause=0.005)
            time.sleep(dice.random() * seconds * 1.2)
            process.kill()
            process.wait()
        killed += 1
        if "pack.index" in left(dest):
            assert verify(str(dest)).damaged == ()
            for name in left(dest):
                (dest / name).unlink()
    there = [name for name in left(dest) if name.endswith(".tar")]
    result = packed(tree, dest, resume=True)
    assert finished(dest)
    assert same_bytes(dest, tmp_path / "undisturbed")
    assert result.kept_shards <= len(there)
    untar(dest, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tree)


@pytest.fixture
def half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A tree, and a pack of it that was stopped when all but the index was written."""
    tree = grow(tmp_path / "tree", 500)
    with monkeypatch.context() as patch:
        # Stands for a kill at exactly this moment, which a signal does not hit.
        patch.setattr(pack_module, "write_index", _no_index)
        with pytest.raises(KeyboardInterrupt):
            packed(tree, tmp_path / "pack")
    return tree, tmp_path / "pack"


def _no_index(*_: object, **__: object) -> str:
    raise KeyboardInterrupt


def test_finished_shards_are_kept_if_they_are_whole(half: tuple[Path, Path]) -> None:
    """A note and a right digest keep an archive; a flipped bit, or no note, makes it anew."""
    tree, dest = half
    archives = sorted(dest.glob("data-*.tar"))
    with open(archives[0], "r+b") as stream:
        stream.seek(700)
        stream.write(b"damage")
    (dest / f".{archives[1].name}.done").unlink()
    (dest / f".{archives[2].name}.12-ab.writing").write_text("half")
    inodes = {path.name: path.stat().st_ino for path in archives}
    result = packed(tree, dest, resume=True)
    again = {path.name for path in archives if path.stat().st_ino != inodes[path.name]}
    assert again == {archives[0].name, archives[1].name}
    assert result.kept_shards == result.shards - 2
    assert result.written_bytes < result.bytes
    assert verify(str(dest)).damaged == ()
    assert finished(dest)


def test_a_changed_tree_is_packed_as_it_is_now(half: tuple[Path, Path], tmp_path: Path) -> None:
    """Archives of what changed since, and those that are too many, are not kept."""
    tree, dest = half
    (tree / "3" / "00003.bin").write_bytes(b"other")
    for number in (6, 5):
        for path in (tree / f"{number}").iterdir():
            path.unlink()
    result = packed(tree, dest, resume=True)
    assert 0 < result.kept_shards < result.shards
    packed(tree, tmp_path / "fresh")
    assert same_bytes(dest, tmp_path / "fresh")


def test_a_finished_pack_is_found_finished(tmp_path: Path) -> None:
    """--resume says so and writes nothing; of another tree or size it is refused."""
    tree = grow(tmp_path / "tree", 50)
    packed(tree, tmp_path / "pack")
    before = {name: (tmp_path / "pack" / name).stat() for name in left(tmp_path / "pack")}
    result = packed(tree, tmp_path / "pack", resume=True)
    assert (result.kept_shards, result.written_bytes) == (result.shards, 0)
    assert {name: (tmp_path / "pack" / name).stat() for name in before} == before
    with pytest.raises(InputError, match="is a finished pack"):
        packed(tree, tmp_path / "pack")
    with pytest.raises(InputError, match="of another tree"):
        packed(tree, tmp_path / "pack", resume=True, shard_bytes=SIZE * 2)
    (tree / "more").write_text("x")
    with pytest.raises(InputError, match="of another tree"):
        packed(tree, tmp_path / "pack", resume=True)


def test_dest_is_not_anything(tmp_path: Path, half: tuple[Path, Path]) -> None:
    """Inside the source, with other files, of another source, unfinished: refused."""
    tree, dest = half
    other = grow(tmp_path / "other", 3)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    cases: list[tuple[type[HpmlError], str, Path, Path, bool]] = [
        (InputError, "inside SOURCE", tree, tree / "1" / "pack", False),
        (InputError, "inside SOURCE", tree, tree, False),
        (InputError, "is not empty", tree, tmp_path / "full", True),
        (InputError, "is no directory", tree, tmp_path / "full" / "notes.txt", False),
        (InputError, "begun of another tree", other, dest, True),
    ]
    for kind, message, source, target, resume in cases:
        with pytest.raises(kind, match=message):
            packed(source, target, resume=resume)
    with pytest.raises(InputError, match="not finished") as told:
        packed(tree, dest)
    assert "--resume" in told.value.hint
    assert left(tmp_path / "full") == {"notes.txt"}
    assert not (tree / "1" / "pack").exists()


def test_what_cannot_be_packed_is_named(tmp_path: Path) -> None:
    """Fifos, sockets and links that lead outside: all named at once, nothing made."""
    tree = grow(tmp_path / "tree", 3)
    os.mkfifo(tree / "fifo")
    with closing(socket.socket(socket.AF_UNIX)) as plug:
        plug.bind(str(tree / "socket"))
        (tree / "out").symlink_to("/etc/passwd")
        (tree / "up").symlink_to("../tree2")
        with pytest.raises(StagingError) as told:
            packed(tree, tmp_path / "pack")
    for name in ("fifo", "socket", "out", "up"):
        assert f"{name}: " in str(told.value)
    assert "4 paths" in str(told.value)
    assert "--outside-links" in told.value.hint
    assert not (tmp_path / "pack").exists()
    (tree / "fifo").unlink()
    (tree / "socket").unlink()
    packed(tree, tmp_path / "pack", outside_links=True)
    untar(tmp_path / "pack", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tree)


def while_packing(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], None]) -> None:
    """Do something right after a file's header was written: no clock hits that moment."""
    original = layout_module.file_header

    def header(entry: Any) -> bytes:
        if entry.path == name:
            act()
        return original(entry)

    monkeypatch.setattr(shards_module, "file_header", header)


@pytest.mark.parametrize("what", ["grow", "shrink", "touch", "replace"])
def test_a_file_that_changes_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """While it is read: it is named, there is no index, and --resume packs what is there then."""
    tree = grow(tmp_path / "tree", 300)
    victim = tree / "2" / "00002.bin"

    def change() -> None:
        if what == "grow":
            with open(victim, "ab") as stream:
                stream.write(b"more")
        elif what == "shrink":
            os.truncate(victim, 10)
        elif what == "touch":
            os.utime(victim)
        else:
            (tree / "2" / "00009.bin").write_bytes(b"also changed, found by looking on")
            victim.write_bytes(victim.read_bytes()[::-1])

    with monkeypatch.context() as patch:
        while_packing(patch, "2/00002.bin", change)
        with pytest.raises(StagingError, match=r"2/00002\.bin: changed") as told:
            packed(tree, tmp_path / "pack")
    assert ("2/00009.bin" in str(told.value)) == (what == "replace")
    assert "pack.index" not in left(tmp_path / "pack")
    assert not [name for name in left(tmp_path / "pack") if name.endswith(".writing")]
    packed(tree, tmp_path / "pack", resume=True)
    untar(tmp_path / "pack", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tree)


def test_names_that_come_and_go_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is gone when its turn comes, and one that appeared after the tree was read."""
    tree = grow(tmp_path / "tree", 100)
    with monkeypatch.context() as patch:
        while_packing(patch, "2/00002.bin", (tree / "2" / "00009.bin").unlink)
        with pytest.raises(StagingError, match=r"2/00009\.bin: No such file"):
            packed(tree, tmp_path / "pack")
    with monkeypatch.context() as patch:
        while_packing(patch, "2/00002.bin", (tree / "2" / "new").touch)
        with pytest.raises(StagingError, match="2: changed while"):
            packed(tree, tmp_path / "other")
    assert "pack.index" not in left(tmp_path / "pack") | left(tmp_path / "other")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    point = tmp_path / "small"
    point.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=600k", "hpml-test", str(point)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root")
    yield point
    subprocess.run(["umount", str(point)], check=True)


def test_too_little_room_is_told_before(tmp_path: Path, small_disk: Path) -> None:
    """What does not fit is refused with the figures; nothing is written."""
    tree = grow(tmp_path / "tree", 500)
    with pytest.raises(CapacityError, match="DEST: needs 1"):
        packed(tree, small_disk / "pack")
    assert left(small_disk) == set()


def test_a_full_disk_loses_nothing(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The room that somebody else takes meanwhile: finished archives stay, --resume goes on."""
    tree = grow(tmp_path / "tree", 500)
    # As if the disk had had the room when it was looked at.
    monkeypatch.setattr(pack_module, "_check_room", lambda *_: None)
    with pytest.raises(StagingError, match="No space left") as told:
        packed(tree, small_disk / "pack", workers=1)
    assert "--resume" in told.value.hint
    names = left(small_disk / "pack")
    assert "pack.index" not in names
    assert not [name for name in names if name.endswith(".writing")]
    assert len([name for name in names if name.startswith("data-")]) == 2
    subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)
    assert packed(tree, small_disk / "pack", resume=True).kept_shards == 2
    assert verify(str(small_disk / "pack")).damaged == ()


def test_a_quota_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake write that answers as a file system with a quota does: one cannot be had here."""

    def refused(_fd: int, _data: bytes) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(shards_module, "write_all", refused)
    with pytest.raises(StagingError, match=r"cannot write .*: Disk quota exceeded") as told:
        packed(grow(tmp_path / "tree", 5), tmp_path / "pack")
    assert "--resume" in told.value.hint
    assert not (tmp_path / "pack").exists()


def test_a_worker_that_is_killed_is_told() -> None:
    """As the kernel does when memory is short: an error, not a wait for ever."""

    def work(number: int, _tell: Tell) -> list[int]:
        if number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.2)
        return [number]

    with pytest.raises(StagingError, match="a worker process died \\(signal 9\\)") as told:
        in_parallel([0, 1, 2, 3], work, workers=2, progress=nothing, done=nothing)
    assert "memory" in told.value.hint


def test_what_helps_after_a_killed_worker_is_what_this_command_can_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--resume goes on with packing; there is no such thing as going on with a look."""

    def killed(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    tree = grow(tmp_path / "tree", 5)
    packed(tree, tmp_path / "whole")
    monkeypatch.setattr(shards_module, "write_all", killed)
    with pytest.raises(StagingError, match="a worker process died") as told:
        packed(tree, tmp_path / "pack")
    assert "--resume" in told.value.hint
    monkeypatch.setattr(sys.modules[verify.__module__], "xxh3_128", killed)
    with pytest.raises(StagingError, match="a worker process died") as told:
        verify(str(tmp_path / "whole"))
    assert "--resume" not in told.value.hint


def test_a_worker_that_is_killed_while_others_work_is_told() -> None:
    """After it has told of something as well: never taken for one that has come to its end."""
    pids: list[int] = []

    def work(_number: int, _tell: Tell) -> list[int]:
        time.sleep(0.05)
        return [os.getpid()]

    def done(pid: int) -> None:
        pids.append(pid)
        if len(pids) == 3:
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(StagingError, match="a worker process died"):
        in_parallel(range(200), work, workers=2, progress=nothing, done=done)


def nothing(*_: object) -> None:
    pass


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    """Nobody goes on writing for a pack that was killed."""
    tree = grow(tmp_path / "tree", 4000, 20_000)
    code = "import time, hpml_orchestrator.packing.shards as s; real = s.file_header\n"
    code += "s.file_header = lambda entry: (time.sleep(1000), real(entry))[1]\n"  # tells nothing
    code += "from hpml_orchestrator.packing import *\n"
    code += f"pack(PackRequest({str(tree)!r}, {str(tmp_path / 'pack')!r}, 1 << 24, 2))"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        eventually(lambda: len(children.read_text().split()) == 2)
        pids = children.read_text().split()
        process.kill()
        process.wait()
    eventually(lambda: not any(running(pid) for pid in pids))


def running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


FAKE_LFS = """#!/bin/sh
# A fake of Lustre's lfs, which no machine of this project has: writes its arguments down.
echo "$@" >> {log}
exit {status}
"""


@pytest.mark.parametrize("status", [0, 1])
def test_lustre_is_striped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """With a fake lfs and a fake table of mounts: the directory is set, a refusal is a note."""
    device = os.stat(tmp_path).st_dev
    (tmp_path / "proc" / "self").mkdir(parents=True)
    line = f"1 0 {os.major(device)}:{os.minor(device)} / / rw - lustre mds:/fs rw\n"
    (tmp_path / "proc" / "self" / "mountinfo").write_text(line)
    (tmp_path / "bin").mkdir()
    lfs = tmp_path / "bin" / "lfs"
    proc = str(tmp_path / "proc")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert "no lfs command" in stripe(str(tmp_path), 1 << 30, proc_root=proc)
    lfs.write_text(FAKE_LFS.format(log=tmp_path / "log", status=status))
    lfs.chmod(0o755)
    told = stripe(str(tmp_path), 1 << 30, proc_root=proc)
    assert (tmp_path / "log").read_text() == f"setstripe -c 4 {tmp_path}\n"
    assert ("failed" in told) == bool(status)
    assert stripe(str(tmp_path), 1 << 30) == ""
