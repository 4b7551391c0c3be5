"""What a copy keeps, refuses and retries."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import socket
import stat
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.errors import InputError, StagingError
from hpml_orchestrator.records.job import Stage
from hpml_orchestrator.staging.copy import CopyOptions, CopyProgress, copy
from hpml_orchestrator.staging.request import Bases, Kind, Retry
from hpml_orchestrator.staging.source import TreeSource
from hpml_orchestrator.staging.stage import CopyStager, LocalSupply, open_source
from hpml_orchestrator.staging.store import list_staged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


Node = tuple[str, int, int, object]


def picture(top: Path) -> dict[str, Node]:
    """Describe a tree: kind, permissions, mtime in ns, and contents or link text."""
    result: dict[str, Node] = {}
    for parent, directories, files in os.walk(top):
        for name in [*directories, *files]:
            path = os.path.join(parent, name)
            info = os.lstat(path)
            what: object = None
            if stat.S_ISLNK(info.st_mode):
                what = os.readlink(path)
            elif stat.S_ISREG(info.st_mode):
                what = Path(path).read_bytes()
            kind = stat.S_IFMT(info.st_mode)
            relative = os.path.relpath(path, top)
            result[relative] = (str(kind), info.st_mode & 0o777, info.st_mtime_ns, what)
    return result


def shm(source: Path, kind: Kind = "auto") -> Stage:
    return Stage("data", str(source), kind=kind, target="shm")


def around_reading(
    monkeypatch: pytest.MonkeyPatch, wrap: Callable[[Callable[[], int]], int]
) -> None:
    """Let something happen around every call that reads a source, with and without hashing."""
    for name in ("readv", "preadv"):
        real = getattr(os, name)

        def instead(*arguments: Any, real: Callable[..., int] = real) -> int:
            return wrap(lambda: real(*arguments))

        monkeypatch.setattr(os, name, instead)


def nothing_published(stager: CopyStager) -> bool:
    return not list_staged([stager.store("shm").base])


def test_a_file_lies_in_a_directory(stager: CopyStager, source: Path) -> None:
    """A single file keeps its name, and a link's name when the source is one."""
    (source / "link.bin").symlink_to("one.bin")
    result = stager.stage(shm(source / "link.bin"))
    staged = Path(result.path) / "link.bin"
    assert not staged.is_symlink()
    assert staged.read_bytes() == b"1" * 5000
    assert os.listdir(result.path) == ["link.bin"]


@pytest.mark.parametrize("kind", ["tree", "tar"])
def test_modes_lose_set_bits_and_umask(
    stager: CopyStager, source: Path, tmp_path: Path, kind: str
) -> None:
    """No setuid, setgid or sticky; the umask holds; the owner can write to directories."""
    (source / "one.bin").chmod(0o6777)
    (source / "a" / "two.txt").chmod(0o444)
    (source / "a").chmod(0o3777)
    (source / "empty").chmod(0o555)
    source.chmod(0o7755)
    given = source
    if kind == "tar":
        given = tmp_path / "x.tar"
        subprocess.run(["tar", "cf", given, "-C", source, "."], check=True)
    old = os.umask(0o027)
    try:
        path = Path(stager.stage(shm(given)).path)
    finally:
        os.umask(old)
    modes = {name: node[1] for name, node in picture(path).items()}
    assert modes["one.bin"] == 0o750
    assert modes["a/two.txt"] == 0o440
    assert modes["a"] == 0o750
    assert modes["empty"] == 0o750
    for top in (path, path / "a"):
        assert stat.S_IMODE(os.stat(top).st_mode) == 0o750


def test_links_inside_are_kept(stager: CopyStager, source: Path) -> None:
    """Relative links within the tree stay links, dangling ones too; hard links stay one inode."""
    (source / "a" / "up").symlink_to("../one.bin")
    (source / "dangling").symlink_to("a/not/there")
    (source / "top").symlink_to(".")
    os.link(source / "one.bin", source / "a" / "again")
    result = stager.stage(shm(source))
    path = Path(result.path)
    assert picture(path) == picture(source)
    assert os.path.samefile(path / "one.bin", path / "a" / "again")
    assert (result.bytes, result.files) == (5003, 4)
    assert stager.stage(shm(source)).reused


@pytest.mark.parametrize("target", ["/etc/passwd", "..", "../x", "a/../../x", "a/back/../../x"])
def test_links_outside_are_refused(stager: CopyStager, source: Path, target: str) -> None:
    """A link that leaves the tree is refused by name, also when it climbs through another link."""
    (source / "a" / "back").symlink_to("..")
    (source / "bad\nlink").symlink_to(target)
    with pytest.raises(StagingError, match=r"1 path\n  bad\\nlink: symbolic link"):
        stager.stage(shm(source))
    assert nothing_published(stager)


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """Give a snapshot of the Hugging Face cache: a tree of links to files beside it."""
    root = tmp_path / "models--a" / "snapshots" / "1f"
    blobs = root.parents[1] / "blobs"
    for directory in (root, blobs / "shards"):
        directory.mkdir(parents=True)
    (blobs / "weights").write_bytes(b"w" * 3_000_000)
    (blobs / "shards" / "0").write_text("shard")
    with (blobs / "sparse").open("wb") as file:
        file.truncate(1 << 20)
    for name in ("weights", "shards", "sparse"):
        (root / name).symlink_to(f"../../blobs/{name}")
    return root


def test_links_are_followed_if_asked_for(stager: CopyStager, snapshot: Path) -> None:
    """Files and directories stand where links led to them; the copy holds no link."""
    with pytest.raises(StagingError, match="3 paths") as refused:
        stager.stage(shm(snapshot))
    assert "follow_links: true" in refused.value.hint
    assert f"; {snapshot.parents[1]} is above the links" in refused.value.hint
    asked = dataclasses.replace(shm(snapshot), follow_links=True)
    result = stager.stage(asked)
    path = Path(result.path)
    assert (result.files, result.bytes, result.broken_links) == (3, 3_000_005 + (1 << 20), 0)
    assert (path / "weights").read_bytes() == b"w" * 3_000_000
    assert not any(each.is_symlink() for each in path.rglob("*"))
    assert stager.stage(asked).reused
    (snapshot / "shards").resolve().joinpath("0").write_text("other")
    again = stager.stage(asked)
    assert not again.reused
    assert Path(again.path, "shards", "0").read_text() == "other"
    (snapshot / "shards").resolve().joinpath("up").symlink_to("..")
    with pytest.raises(StagingError, match="shards/up/shards: symbolic link to a directory above"):
        stager.stage(asked)


def test_links_that_lead_nowhere_are_counted(stager: CopyStager, snapshot: Path) -> None:
    """Those that were taken as they are, and those of which nothing is left to follow."""
    asked = dataclasses.replace(shm(snapshot), outside_links=True)
    assert stager.stage(asked).broken_links == 3
    assert stager.stage(asked).warning.startswith("data: links that lead nowhere in the copy: 3;")
    (snapshot / "gone").symlink_to("../../blobs/none")
    assert stager.stage(dataclasses.replace(asked, follow_links=True)).broken_links == 1


def test_devices_fifos_and_sockets_are_refused(stager: CopyStager, source: Path) -> None:
    """What is neither file, directory nor link is refused, with all paths named."""
    os.mkfifo(source / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(source / "sock"))
    with pytest.raises(StagingError, match=r"2 paths\n  fifo: is a device.*\n  sock: "):
        stager.stage(shm(source))


def test_device_nodes_are_refused(stager: CopyStager, source: Path) -> None:
    """Those of characters and of blocks; nothing is published."""
    try:
        os.mknod(source / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        os.mknod(source / "loop", 0o660 | stat.S_IFBLK, os.makedev(7, 0))
    except PermissionError:
        pytest.skip("NOT TESTED: making devices needs root")
    with pytest.raises(StagingError, match=r"2 paths\n  loop: is a device.*\n  null: is a device"):
        stager.stage(shm(source))
    assert nothing_published(stager)


def test_source_and_target_stay_apart(stager: CopyStager, base: Path) -> None:
    """A source that contains the target, or is in it, is refused."""
    with pytest.raises(InputError, match="contains the other"):
        stager.stage(shm(base))
    inside = Path(stager.store("shm").path) / "x"
    inside.mkdir(parents=True)
    with pytest.raises(InputError, match="contains the other"):
        stager.stage(shm(inside))


def _during(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Do something once, just after the first bytes were read."""
    todo = [action]

    def after(call: Callable[[], int]) -> int:
        count = call()
        if todo:
            todo.pop()()
        return count

    around_reading(monkeypatch, after)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("change", ["grow", "shrink", "touch", "replace", "remove next", "add"])
def test_a_source_that_changes_is_an_error(
    stager: CopyStager,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
    processes: int,
) -> None:
    """Size, time, inode and directory are compared before and after; nothing is published."""
    for name in ("first", "next"):
        (source / name).write_bytes(b"x" * (3 << 20))
    actions: dict[str, Callable[[], object]] = {
        "grow": lambda: os.truncate(source / "first", 4 << 20),
        "shrink": lambda: os.truncate(source / "first", 10),
        "touch": (source / "first").touch,
        "replace": lambda: os.replace(shutil.copy2(source / "next", source / "~"), source / "next"),
        "remove next": lambda: (source / "next").unlink(missing_ok=True),
        "add": (source / "new").touch,
    }
    _during(monkeypatch, actions[change])
    stager.options = CopyOptions(processes=processes, threads=1)
    with pytest.raises(StagingError, match=r"changed while it was copied|No such file"):
        stager.stage(shm(source))
    assert nothing_published(stager)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EAGAIN])
def test_faults_that_pass_are_tried_again(
    source: Path, base: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """EIO, ESTALE and EAGAIN are retried with a growing wait, and the file is whole then."""
    naps: list[float] = []
    faults = [code, code, code]

    def failing(call: Callable[[], int]) -> int:
        if faults:
            raise OSError(faults.pop(), "injected")
        return call()

    around_reading(monkeypatch, failing)
    told: list[tuple[int, int, int, int]] = []
    stager = CopyStager(
        "1",
        bases=Bases(shm=str(base)),
        sleep=naps.append,
        on_progress=lambda *figures: told.append(figures),
    )
    assert picture(Path(stager.stage(shm(source)).path)) == picture(source)
    assert naps == [0.1, 0.2, 0.4]
    assert told == [(5003, 3, 5003, 3)]


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EDQUOT])
def test_faults_that_stay_end_it(
    stager: CopyStager, source: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A fault that does not pass, or cannot, is an error that names path and reason."""

    def failing(_call: Callable[[], int]) -> int:
        raise OSError(code, os.strerror(code))

    around_reading(monkeypatch, failing)
    with pytest.raises(StagingError, match=os.strerror(code)):
        stager.stage(shm(source))
    assert nothing_published(stager)


def test_unreadable_files_are_named(base: Path) -> None:
    """As an ordinary user, files and directories without permission are listed."""
    if os.getuid() != 0:
        pytest.skip("needs root to become somebody else")
    base.chmod(0o755)
    for name, mode in [("to", 0o777), ("from", 0o755), ("from/closed", 0o700)]:
        (base / name).mkdir()
        (base / name).chmod(mode)
    (base / "from" / "secret").touch(mode=0o600)
    (base / "from" / "secret").write_text("x")
    (base / "from" / "fine").write_text("x")

    def texts() -> Iterator[str]:
        """Stage twice: the first time the closed directory hides the closed file."""
        stager = CopyStager("1", bases=Bases(shm=str(base / "to")))
        for path in (base / "from", base / "from" / "secret"):
            try:
                yield str(stager.stage(shm(path)))
            except StagingError as error:
                yield str(error)
        stager.cleanup()

    said = as_nobody(lambda: "\n".join(texts()))
    assert "closed/.: Permission denied" in said
    assert "secret: Permission denied" in said
    assert os.listdir(base / "to") == []


def as_nobody(call: Callable[[], str]) -> str:
    """Return the result of a call in a process of an ordinary user."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:  # pragma: no cover - another process
        text = "died"
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            text = call()
        finally:
            os.write(writing, text.encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        text = stream.read()
    os.waitpid(pid, 0)
    return text


RETRY = Retry(lambda _seconds: None, lambda: False)


@pytest.mark.parametrize("processes", [1, 2])
def test_files_that_only_say_that_they_are_empty_are_refused(
    stager: CopyStager, processes: int
) -> None:
    """Those of /proc have no size but contents: they would arrive empty."""
    stager.options = CopyOptions(processes=processes)
    with pytest.raises(StagingError, match="boot_id: has size 0 but is not empty"):
        stager.stage(Stage("data", "/proc/sys/kernel/random", target="shm"))
    with pytest.raises(StagingError, match="version: has size 0 but is not empty"):
        stager.stage(Stage("data", "/proc/version", target="shm"))
    assert list_staged([stager.store("shm").base]) == []


def copy_file(path: Path, base: Path, before: Callable[[], object] = bool) -> None:
    """Plan, let something happen, and copy."""
    source = TreeSource(str(path), RETRY, "file")
    plan = source.plan()
    before()
    copy(
        plan,
        source,
        str(base),
        options=CopyOptions(),
        retry=RETRY,
        progress=CopyProgress(None),
    )


@pytest.mark.parametrize("size", [100, 3 << 19, 5 << 20])
def test_a_change_behind_the_last_read_is_noticed(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """What changes between the last byte and the last look is not the state that was planned."""
    file = tmp_path / "file"
    file.write_bytes(os.urandom(size))
    left = [size]
    for name in ("readv", "preadv"):
        real = getattr(os, name)

        def read(*words: object, real: Callable[..., int] = real) -> int:
            count = real(*words)
            left[0] -= count
            if left[0] == 0:
                file.touch()
            return count

        monkeypatch.setattr(os, name, read)
    with pytest.raises(StagingError, match="file: changed while it was copied"):
        copy_file(file, base)
    assert left == [0]


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz", "x.zip"])
def test_an_archive_that_changes_behind_the_last_read_is_noticed(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """While its last bytes are read, after it was opened and looked at."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "file").write_bytes(os.urandom(300))
    kind = {"x.tar": "tar", "x.tar.gz": "gztar", "x.zip": "zip"}[name]
    archive = Path(shutil.make_archive(str(tmp_path / "x"), kind, tmp_path / "in"))
    stager = CopyStager("1", bases=Bases(shm=str(base)))
    request = Stage("data", str(archive), target="shm")
    supply = LocalSupply(request, open_source(request, RETRY, 1 << 40))
    supply.plan()
    planned = supply.plan()
    monkeypatch.setattr(supply, "plan", lambda: planned)
    for call in ("readv", "preadv"):
        real = getattr(os, call)

        def read(*words: object, real: Callable[..., int] = real) -> int:
            count = real(*words)
            archive.touch()
            return count

        monkeypatch.setattr(os, call, read)
    with pytest.raises(StagingError, match="changed while it was copied"):
        stager.stage(request, supply)
    assert list_staged([stager.store("shm").base]) == []
    stager.cleanup()
