"""The store of a node: whose it is, who holds an entry, and that nothing is left in the end."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.errors import InputError, RecordError, StagingError
from hpml_orchestrator.records.job import Stage
from hpml_orchestrator.staging.manifest import Listing, Manifest, manifest_path
from hpml_orchestrator.staging.request import Bases, Retry
from hpml_orchestrator.staging.stage import CopyStager
from hpml_orchestrator.staging.store import BusyError, Entry, NodeStore, clean
from tests.patience import eventually
from tests.unit.staging.conftest import entries, partials

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from multiprocessing.context import ForkProcess

RETRY = Retry(time.sleep, lambda: False)


def job(base: Path, key: str = "1.0") -> CopyStager:
    return CopyStager(key, bases=Bases(shm=str(base)))


def fill(entry: Entry, text: str = "text") -> Manifest:
    """Publish one small file, as a copy does."""
    partial = Path(entry.path, ".data.partial-1-aa")
    partial.mkdir()
    (partial / "file").write_text(text)
    listing = Listing(["file"], [len(text)])
    made = Manifest("data", "/source", "tree", "copy", len(text), 1, listing=listing)
    made.write(manifest_path(entry.data))
    partial.rename(entry.data)
    return made


def obtained(store: NodeStore, name: str) -> Entry:
    """An entry with data, as several processes use it."""
    claimed = store.claim(name, RETRY, make=True)
    assert claimed is not None
    entry, manifest = claimed
    if manifest is None:
        fill(entry)
        entry.trust()
        assert entry.share()
    return entry


def fill_for_long(store: NodeStore, name: str) -> None:
    """Begin a copy that ends only when it is killed."""
    claimed = store.claim(name, RETRY, make=True)
    assert claimed is not None
    Path(claimed[0].path, ".data.partial-1-aa").mkdir()
    time.sleep(600)
    raise AssertionError


def test_a_store_is_private(base: Path) -> None:
    """Store and entry are 0700 whatever the umask."""
    old = os.umask(0)
    try:
        entry = NodeStore(str(base)).lock("a-1", exclusive=True, create=True)
    finally:
        os.umask(old)
    assert entry is not None
    assert entry.path == f"{base}/hpml-{os.getuid()}/a-1"
    for path in (entry.path, os.path.dirname(entry.path)):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
    entry.remove()
    entry.release()
    assert os.listdir(base) == []


@pytest.mark.parametrize("fault", ["link", "file", "writable", "owner"])
def test_stores_that_are_not_ours_are_refused(
    base: Path, tmp_path: Path, source: Path, fault: str
) -> None:
    """Links, files and other users' directories are neither used nor emptied."""
    root = base / f"hpml-{os.getuid()}"
    if fault == "link":
        (tmp_path / "elsewhere").mkdir()
        root.symlink_to(tmp_path / "elsewhere")
    elif fault == "file":
        root.touch()
    if fault != "file":
        (root / "a@1.0" / "data").mkdir(parents=True)
        (root / "a@1.0" / ".lease").touch()
        root.chmod(0o770 if fault == "writable" else 0o700)
    if fault == "owner":
        if os.getuid() != 0:
            pytest.skip("NOT TESTED: needs root to give a directory away")
        os.chown(root, 65534, 65534)
    store = NodeStore(str(base))
    for call in (
        store.entries,
        store.sweep,
        lambda: store.lock("b@1.0", exclusive=True, create=True),
        lambda: store.remove("a@1.0"),
        lambda: job(base).stage(Stage("a", str(source), target="shm")),
        lambda: job(base).directory("shm"),
    ):
        with pytest.raises(StagingError, match="not used"):
            call()
    ((path, reason),) = clean([str(base)], everything=True).failed
    assert (path, reason.endswith("not used")) == (str(root), True)
    assert fault == "file" or os.listdir(root) == ["a@1.0"]
    assert fault == "file" or (root / "a@1.0" / "data").is_dir()


def test_bases_must_be_there_and_local(base: Path, tmp_path: Path) -> None:
    """A missing base and one on a shared file system are the caller's error."""
    with pytest.raises(InputError, match="no such directory"):
        NodeStore(str(base / "none")).check_base()
    (base / "file").touch()
    with pytest.raises(InputError, match="is not a directory"):
        NodeStore(str(base / "file")).check_base()
    inside = base / f"hpml-{os.getuid()}" / "sub"
    inside.mkdir(parents=True)
    with pytest.raises(InputError, match="must not be in a directory of staged data"):
        NodeStore(str(inside)).check_base()
    with pytest.raises(StagingError, match="cannot use /proc/hpml-"):
        NodeStore("/proc").lock("a-1", exclusive=True, create=True)
    with pytest.raises(InputError, match="absolute"):
        NodeStore("relative")
    (tmp_path / "self").mkdir()
    device = os.stat(base).st_dev
    line = f"1 0 {os.major(device)}:{os.minor(device)} / / rw - nfs4 server:/ rw\n"
    (tmp_path / "self" / "mountinfo").write_text(line)
    with pytest.raises(InputError, match="nfs4, which nodes share"):
        NodeStore(str(base), proc_root=str(tmp_path)).check_base()


def test_a_new_directory_is_made_in_one_that_is_there(base: Path, source: Path) -> None:
    """A mistyped path is refused all the same."""
    stager = job(base)
    with pytest.raises(InputError, match="no such directory"):
        stager.stage(Stage("a", str(source), target=f"{base}/none/new"))
    path = stager.stage(Stage("a", str(source), target=f"{base}/new")).path
    assert path.startswith(f"{base}/new/hpml-")
    stager.cleanup()
    assert os.listdir(base / "new") == []


def test_a_lease_is_of_one_that_fills_or_of_all_that_use(base: Path) -> None:
    """What is used is neither filled nor removed; nothing is made by looking for it."""
    store = NodeStore(str(base))
    assert store.lock("a-1", exclusive=False) is None
    assert store.claim("a-1", RETRY, make=False) is None
    assert not store.remove("a-1")
    assert os.listdir(base) == []
    found = [obtained(store, "a-1") for _ in range(2)]
    manifests = [one.manifest() for one in found]
    assert all(one is not None and one.source == "/source" for one in manifests)
    with pytest.raises(BusyError):
        store.lock("a-1", exclusive=True)
    assert not store.remove("a-1")
    for one in found:
        one.release()
    assert not store.remove("a-1", lambda _path: False)
    assert store.remove("a-1")
    assert os.listdir(base) == []


def test_a_copy_that_fails_leaves_nothing(
    base: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither entry nor store; the first error is the one that is reported."""

    def fail(_self: Manifest, _path: str) -> None:
        raise RecordError("the reason")

    monkeypatch.setattr(Manifest, "write", fail)
    stager = job(base)
    with pytest.raises(StagingError, match="the reason"):
        stager.stage(Stage("data", str(source), target="shm"))
    stager.cleanup()
    assert os.listdir(base) == []


def test_what_a_killed_copier_left_goes_with_whoever_comes_next(
    base: Path, start: Callable[..., ForkProcess]
) -> None:
    """Nobody asks for the same data again: nothing stays all the same, but a living one's copy."""
    store = NodeStore(str(base))
    copiers = [start(fill_for_long, store, name) for name in ("a-1", "b-1")]
    eventually(lambda: len(partials(base)) == 2)
    copiers[0].kill()
    copiers[0].join()
    store.sweep()
    assert [path.name for path in entries(base)] == ["b-1"]
    assert store.claim("b-1", RETRY, make=True, patience=0.3) is None, "it is being copied"
    copiers[1].kill()
    copiers[1].join()
    entry = obtained(store, "b-1")
    assert partials(base) == []
    entry.release()


HOLD = """
import sys, time
from hpml_orchestrator.staging.request import Bases
from hpml_orchestrator.staging.stage import CopyStager
CopyStager(sys.argv[2], bases=Bases(shm=sys.argv[1])).directory("shm")
print("open", flush=True)
time.sleep(600)
"""


def test_what_a_killed_job_left_is_removed(
    base: Path, child: Callable[..., subprocess.Popen[str]]
) -> None:
    """The next job of the user removes it, but not a living one's, nor what has no lease."""
    running, killed = child(HOLD, base, "running.0"), child(HOLD, base, "killed.0")
    for process in (running, killed):
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
    killed.kill()
    killed.wait()
    root = base / f"hpml-{os.getuid()}"
    (root / "no entry@2.0" / "data").mkdir(parents=True)
    (root / "file@2.0").touch()
    (root / "link@2.0").symlink_to(root / "@running.0")
    others = ["file@2.0", "link@2.0", "no entry@2.0"]
    mine = job(base)
    mine.directory("shm")
    assert sorted(os.listdir(root)) == ["@1.0", "@running.0", *others]
    running.kill()
    running.wait()
    mine.cleanup()
    NodeStore(str(base)).sweep()
    clean([str(base)], everything=True)
    assert sorted(os.listdir(root)) == others


def test_cleanup_leaves_the_base_as_it_was(base: Path) -> None:
    """Read-only directories go, too, links are not followed; the store goes with the last job."""
    first, second = job(base), job(base, "2.0")
    outside = base / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    inner = Path(first.directory("shm"), "x", "y")
    inner.mkdir(parents=True)
    (inner / "link").symlink_to(outside)
    inner.chmod(0o500)
    path = second.directory("shm")
    first.cleanup()
    assert os.path.isdir(path)
    second.cleanup()
    second.cleanup()
    assert os.listdir(base) == ["outside"]
    assert os.listdir(outside) == ["kept"]


def test_cleanup_waits_for_the_last_process_of_the_job(base: Path, source: Path) -> None:
    """Two agents of one job on one machine: the second one to end removes the data."""
    first, second = job(base), job(base)
    path = first.stage(Stage("a", str(source), target="shm")).path
    second.hold(path)
    second.hold(first.directory("shm"))
    first.cleanup()
    assert os.path.isdir(path)
    assert len(entries(base, job="1.0")) == 2
    second.cleanup()
    assert os.listdir(base) == []


CHURN = """
import os, sys
from hpml_orchestrator.records.job import Stage
from hpml_orchestrator.staging.request import Bases
from hpml_orchestrator.staging.stage import CopyStager
base, source, name = sys.argv[1:]
for number in range(20):
    job, other = (CopyStager(f"{name}.{number}", bases=Bases(shm=base)) for _ in range(2))
    path = job.directory("shm")
    os.mkdir(f"{path}/own")
    data = job.stage(Stage("data", source, target="shm")).path
    other.hold(path)
    other.hold(data)
    other.store("shm").sweep()
    assert os.path.isdir(f"{path}/own"), "removed under a living job"
    job.cleanup()
    assert os.path.exists(f"{data}/one.bin"), "removed under the other process"
    other.cleanup()
"""


def test_jobs_that_begin_and_end_at_once_do_not_disturb_each_other(
    base: Path, source: Path, child: Callable[..., subprocess.Popen[str]]
) -> None:
    """Four jobs make and remove the common store many times each; none loses its data."""
    processes = [child(CHURN, base, source, name) for name in "abcd"]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0, 0]
    assert os.listdir(base) == []


def test_the_manifest_is_on_disk_before_the_data_have_their_name(
    base: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Manifest written and synced, renamed; only then the data; the directory is synced last."""
    events: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def synced(fd: int) -> None:
        events.append(("fsync", os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def renamed(old: Any, new: Any, **options: Any) -> None:
        events.append(("from", os.fspath(old)))
        events.append(("to", os.fspath(new)))
        rename(old, new, **options)

    stager = job(base)
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "replace", renamed)
    data = stager.stage(Stage("data", str(source), target="shm")).path
    monkeypatch.undo()
    directory = os.path.dirname(data)
    named = events.index(("to", f"{directory}/.data.manifest"))
    (_, written) = events[named - 1]
    published = events.index(("to", data))
    assert events.index(("fsync", written)) < named < published
    assert ("fsync", directory) in events[published:]
    assert ".partial-" in events[published - 1][1]
    stager.cleanup()
