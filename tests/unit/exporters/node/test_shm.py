"""Whose memory /dev/shm is: real files, data that hpml's own stager staged, real FUSE mounts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hpml_exporters.core.collector import NotHereError
from hpml_exporters.jobs.board import JobFacts
from hpml_exporters.node import shm
from hpml_exporters.node.shm import make

from hpml_orchestrator.records.job import Stage
from hpml_orchestrator.staging.stage import CopyStager
from tests.unit.exporters.collectors.reading import context, post, sampled

UID = os.getuid()
OTHER = 12345
MIB = 1 << 20
ROOT = f"hpml-{UID}"
JOB = f"{ROOT}/data@cluster-41"
as_root = pytest.mark.skipif(UID != 0, reason="needs root to make files of others, and mounts")


@pytest.fixture
def place() -> Iterator[Path]:
    """A new directory in the real /dev/shm."""
    path = Path("/dev/shm") / f"hpml-test-{uuid.uuid4().hex}"
    path.mkdir()
    yield path
    shutil.rmtree(path)


def job_bytes(place: Path, *users: int, samples: int = 1, **options: object) -> dict[str, float]:
    """Bytes of the jobs 41, 42, ... of these users after this number of samples."""
    given = context(shm=place, **options)
    post(given.jobs, {str(41 + number): (uid, []) for number, uid in enumerate(users)})
    collector = make(given)
    for _ in range(samples):
        found = sampled(collector)
    collector.close()
    return {series[2]: n for series, n in found.items() if series[0] == "hpml_job_shm_bytes"}


def put(path: Path, size: int = MIB, owner: int = UID) -> None:
    """Write a file of that many bytes, and the directories on the way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    os.chown(path, owner, owner)


def stage(place: Path, key: str = "", *, keep: bool = False) -> Path:
    """Stage three files, of 3 MiB together, with the real stager; returns the entry."""
    source = place.with_name(f"{place.name}-source")
    for number in range(3):
        put(source / f"{number}")
    try:
        stager = CopyStager(key)
        path = stager.stage(Stage("data", str(source), target=str(place), keep=keep)).path
        stager.leave()
    finally:
        shutil.rmtree(source)
    return Path(path).parent


def link(place: Path, name: str, target: str) -> None:
    """Make a link, and the directories on the way."""
    (place / name).parent.mkdir(parents=True, exist_ok=True)
    (place / name).symlink_to(target)


def linked(place: Path, name: str, target: str) -> None:
    """A link in a job's entry, or in place of it, to 9 MB that another program published."""
    put(place / "elsewhere/data/x", 0)
    (place / "elsewhere/.data.manifest").write_text('{"bytes": 9000000}\n')
    link(place, f"{ROOT}/{name}", f"{place}/elsewhere{target}")


def several_names(place: Path) -> None:
    """A file of four names, one of them in the job's directory."""
    put(place / "a", 4 * MIB)
    put(place / JOB / "data/x", 0)
    for name in ("b", "c", f"{JOB}/data/d"):
        os.link(place / "a", place / name)


def deep(place: Path) -> None:
    """Directories in directories, deeper than descriptors may be open; a file near the top."""
    (place / ("d/" * 200)).mkdir(parents=True)
    put(place / "d/x")


def another_s_root(place: Path) -> None:
    """A directory of another user that pretends to be ours."""
    put(place / JOB / "data/x", owner=OTHER)
    for path in (place / ROOT, place / JOB):
        os.chown(path, OTHER, OTHER)


def theirs(place: Path) -> None:
    """Files of two users."""
    put(place / "a")
    put(place / "sub/b")
    put(place / "theirs", owner=OTHER)


Case = tuple[Callable[[Path], object], tuple[int, ...], tuple[int, ...]]
CASES: dict[str, Case] = {
    # files there, users of the jobs 41, 42, ..., whole MiB of each job
    "files of one": (lambda place: put(place / "x"), (UID,), (1,)),
    "of a user with two jobs": (lambda place: put(place / "x"), (UID, UID), (0, 0)),
    "staged": (lambda place: stage(place, "cluster-41"), (UID, UID), (3, 0)),
    "staged by hand": (stage, (UID, UID), (0, 0)),
    "staged by hand, of the only job's user": (stage, (UID,), (3,)),
    "kept, used by nobody": (lambda place: stage(place, "c-41", keep=True), (UID, UID), (0, 0)),
    "what a job writes": (lambda place: put(place / ROOT / "@c-41/shm.dir/x"), (UID, UID), (1, 0)),
    "no entry": (lambda place: put(place / ROOT / "x"), (UID,), (1,)),
    "a cluster named local": (lambda place: stage(place, "local-hpc-41"), (UID, UID), (3, 0)),
    "no job's number": (lambda place: stage(place, "cluster-41.0"), (UID, UID), (0, 0)),
    "a link": (lambda place: link(place, "x", "/usr/bin"), (UID,), (0,)),
    "a linked entry": (lambda place: linked(place, "data@c-41", ""), (UID, UID), (0, 0)),
    "a linked manifest": (
        lambda place: linked(place, "data@c-41/.data.manifest", "/.data.manifest"),
        (UID, UID),
        (0, 0),
    ),
    "several names": (several_names, (UID,), (4,)),
    "one of several names": (several_names, (UID, UID), (1, 0)),
    "a deep tree": (deep, (UID,), (1,)),
}
AS_ROOT: dict[str, Case] = {
    "users": (theirs, (UID, OTHER), (2, 1)),
    "another's root": (another_s_root, (UID, OTHER), (0, 1)),
}


@pytest.mark.parametrize(
    ("lay_out", "users", "mebibytes"),
    [
        *(pytest.param(*case, id=name) for name, case in CASES.items()),
        *(pytest.param(*case, id=name, marks=as_root) for name, case in AS_ROOT.items()),
    ],
)
def test_whose_it_is(
    place: Path, lay_out: Callable[[Path], object], users: tuple[int, ...], mebibytes: tuple[int]
) -> None:
    """The memory of each job, to some pages of directories, locks and manifests."""
    lay_out(place)
    assert [size // MIB for size in job_bytes(place, *users).values()] == list(mebibytes)


LOCKS = """
import fcntl, sys
lease = open(sys.argv[1])
fcntl.flock(lease, fcntl.LOCK_SH)
print(flush=True)
sys.stdin.read()
"""


def test_kept_data_counts_for_the_jobs_that_use_it(place: Path) -> None:
    """By the locks of their processes, until these end; not for the user's other jobs."""
    lease = stage(place, "cluster-41", keep=True) / ".lease"
    command, pipe = [sys.executable, "-c", LOCKS, str(lease)], subprocess.PIPE
    users = [subprocess.Popen(command, stdin=pipe, stdout=pipe) for _ in range(2)]
    for process in users:
        assert process.stdout is not None
        process.stdout.readline()
    given = context(shm=place)
    post(given.jobs, {"41": (UID, [users[0].pid]), "42": (UID, [users[1].pid]), "43": (UID, [])})
    collector = make(given)

    def seen() -> list[float]:
        found = sampled(collector)
        assert found["hpml_shm_staged_bytes",] // MIB == 3, "once, with a job or without"
        return [found["hpml_job_shm_bytes", "", str(job)] // MIB for job in (41, 42, 43)]

    assert seen() == [3, 3, 0]
    users[0].communicate()
    assert seen() == [0, 3, 0]
    users[1].communicate()
    assert seen() == [0, 0, 0]


def test_a_local_run_has_its_own_data(place: Path) -> None:
    """Not those of a job of Slurm of the same user and number."""
    stage(place, "local-3fa9c1-41")
    given = context(shm=place, cluster="main")
    post(given.jobs, {"41": (UID, []), "local-3fa9c1-41": (UID, [])})
    found = sampled(make(given))
    sizes = {series[1:]: n // MIB for series, n in found.items() if "job" in series[0]}
    assert sizes == {("main", "41"): 0, ("main", "local-3fa9c1-41"): 3}


def test_jobs_that_are_not_fully_known(place: Path) -> None:
    """No value if the user is unknown; a job's own exporter counts only staged data."""
    put(place / "loose", 5 * MIB)
    stage(place, "cluster-41")
    assert set(job_bytes(place, UID, -1)) == {"41"}
    own = job_bytes(place, -1, job=JobFacts("41"))
    assert {jobid: size // MIB for jobid, size in own.items()} == {"41": 3}


def test_a_manifest_is_read_with_care(place: Path) -> None:
    """It cannot claim more than the total; a pipe or a link in its place does not block.

    If it is invalid, the files themselves are counted.
    """
    texts = '{"bytes": 1e300};{"bytes": -5};{"bytes": true};[1];é'
    lines = [*texts.encode("latin-1").split(b";"), b"[" * 60000]
    for number, line in enumerate(lines):
        put(place / f"{ROOT}/{number}@cluster-41/data/x")
        (place / f"{ROOT}/{number}@cluster-41/.data.manifest").write_bytes(line)
    total = job_bytes(place, UID)["41"]
    assert total // MIB == len(lines)
    manifests = [place / ROOT / f"{name}@cluster-41/.data.manifest" for name in "abc"]
    for manifest in manifests:
        put(manifest.parent / "data/x", 0)
    manifests[0].write_text('{"bytes": 1000000000000000000}\n')
    os.mkfifo(manifests[1])
    manifests[2].symlink_to("/dev/zero")
    size = sampled(make(context(shm=place)))["hpml_shm_size_bytes",]
    assert job_bytes(place, UID) == {"41": size + total + 4096}


def test_size_use_and_absence(place: Path, tmp_path: Path) -> None:
    """The same as in df, except for other processes' files; a missing /dev/shm is not a failure."""
    put(place / "x")
    found = sampled(make(context(shm=place)))
    usage = shutil.disk_usage("/dev/shm")
    assert found["hpml_shm_size_bytes",] == usage.total
    assert MIB <= found["hpml_shm_used_bytes",] <= usage.total
    with pytest.raises(NotHereError):
        make(context(shm=tmp_path / "none")).sample(0.0)


def test_many_files_are_looked_at_in_pieces(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is shown is a whole walk; one that is given up leaves nothing open."""
    monkeypatch.setattr(shm, "ENTRIES", 100)
    for number in range(25):
        for name in range(9):
            put(place / f"{number}/{name}", 1)
    before = len(os.listdir("/proc/self/fd"))
    seen = [job_bytes(place, UID, samples=samples) for samples in (1, 2, 3, 4, 5)]
    assert seen == [{}, {}, {"41": 225 * 4096}, {"41": 225 * 4096}, {"41": 225 * 4096}]
    assert len(os.listdir("/proc/self/fd")) == before


HANGING = r"""
import ctypes, os, sys
from hpml_exporters.node import disks, shm
from tests.unit.exporters.collectors.reading import context, post, sampled

place, kind, when, name = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
name = name.encode().decode("unicode_escape")
make = os.mkdir if kind != "file" else os.mknod
os.mkdir(f"{place}/held")
make(f"{place}/held/{name}")
for number in range(20):
    os.mknod(f"{place}/held/{number}")
make(f"{place}/held/{name}2")  # one of them is among the last to be looked at

def mount(path):
    options = b"size=16m"
    if kind != "tmpfs":
        fuse = os.open("/dev/fuse", os.O_RDWR)  # nobody ever answers
        mode = b"100644" if kind == "file" else b"40755"
        options = b"fd=%d,rootmode=%s,user_id=0,group_id=0,allow_other" % (fuse, mode)
    system = b"tmpfs" if kind == "tmpfs" else b"fuse"
    if libc.mount(b"x", os.fsencode(path), system, 0, options):
        raise OSError(ctypes.get_errno(), "mount")
    if kind == "tmpfs":
        with open(f"{path}/x", "wb") as file:
            file.write(b"x" * (1 << 20))

given = context(shm=place)
post(given.jobs, {"41": (os.getuid(), [])})
collector = shm.make(given)
shm.ENTRIES = 5
folder = "held"
if when != "before":
    sampled(collector)
if when == "renamed":
    folder = "other"
    os.rename(f"{place}/held", f"{place}/other")
mount(f"{place}/{folder}/{name}")
mount(f"{place}/{folder}/{name}2")
for _ in range(20):
    found = sampled(collector)
sampled(disks.make(context()))
print(found["hpml_job_shm_bytes", "", "41"])
"""
WHEN = ("before", "meanwhile", "renamed")


@as_root
@pytest.mark.skipif(not shutil.which("unshare"), reason="needs unshare")
@pytest.mark.parametrize(
    ("kind", "when", "name"),
    [
        *((kind, when, "x") for kind in ("tmpfs", "fuse", "file") for when in WHEN),
        *(("fuse", "before", name) for name in (r"a\rb", r"a\u2028b")),
    ],
)
def test_no_other_file_system_is_looked_at(place: Path, kind: str, when: str, name: str) -> None:
    """Whatever its name, and whenever it is mounted; one that never answers holds nobody up."""
    if kind != "tmpfs" and not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("needs FUSE")
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", HANGING, str(place), kind, when, name],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,  # and then it is killed, which ends FUSE's wait too
    )
    assert (done.stdout, done.stderr) == ("0.0\n", "")
