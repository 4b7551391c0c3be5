"""Whose memory /dev/shm is: real files, and data that hpml's own stager staged."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hpml_exporters.core.collector import NotHereError
from hpml_exporters.jobs.board import JobFacts
from hpml_exporters.node import held, shm
from hpml_exporters.node.shm import make

from hpml_orchestrator.staging import CopyStager, StageRequest
from tests.unit.exporters.collectors.reading import context, post, sampled

UID = os.getuid()
OTHER = 12345
MIB = 1 << 20


def test_a_walk_that_breaks_off_shows_nothing_new(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no descriptor is left (injected): an error, none is lost by it, and no figure is 0."""
    (place / "file").write_bytes(bytes(MIB))
    told = context(shm=place)
    post(told.jobs, {"7": (UID, [])})
    collector = make(told)
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(held.Held, "mount", lambda _: os.open("/nowhere", os.O_RDONLY))
        for _ in range(3):
            with pytest.raises(FileNotFoundError):
                collector.sample(0.0)
            assert len(os.listdir("/proc/self/fd")) == before
    assert job_bytes(sampled(collector)) == {"7": MIB}
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A directory on another file system; a link to a longer path takes a page of /dev/shm."""
    with tempfile.TemporaryDirectory(prefix="hpml-") as folder:
        yield Path(folder)


def stage(place: Path, tmp_path: Path, key: str, *, keep: bool = False) -> None:
    """Stage three files, of 3 MiB together, with the real stager."""
    source = tmp_path / "source"
    if not source.exists():
        source.mkdir()
        for number in range(3):
            (source / f"{number}").write_bytes(os.urandom(MIB))
    stager = CopyStager(key)
    stager.stage(StageRequest("data", str(source), target=str(place), keep=keep))
    stager.leave()


def job_bytes(found: Mapping[tuple[str, ...], object]) -> dict[str, object]:
    return {
        series[1]: value for series, value in found.items() if series[0] == "hpml_job_shm_bytes"
    }


def test_size_and_use_are_those_of_the_file_system(place: Path) -> None:
    """The same as df says, to the files that come and go beside."""
    (place / "x").write_bytes(b"x" * MIB)
    found = sampled(make(context(shm=place)))
    told = os.statvfs("/dev/shm")
    assert found["hpml_shm_size_bytes",] == told.f_blocks * told.f_frsize
    used = found["hpml_shm_used_bytes",]
    assert isinstance(used, int)
    assert MIB <= used <= told.f_blocks * told.f_frsize


def test_no_shm_is_nothing_here(tmp_path: Path) -> None:
    """A machine without it has no series, and no failure."""
    with pytest.raises(NotHereError):
        make(context(shm=tmp_path / "none")).sample(0.0)


def test_staged_data_are_their_job_s(place: Path, tmp_path: Path) -> None:
    """By the manifest; files of a user with two jobs here are nobody's."""
    stage(place, tmp_path, "cluster-41")
    (place / "loose").write_bytes(b"x" * MIB)
    told = context(shm=place)
    post(told.jobs, {"41": (UID, []), "42": (UID, [])})
    found = job_bytes(sampled(make(told)))
    assert found["42"] == 0
    assert isinstance(found["41"], int)
    assert 3 * MIB <= found["41"] < 3.1 * MIB, "its manifest and locks take pages too"


def test_a_job_of_an_unknown_user_has_no_figure(place: Path) -> None:
    """What it has there is not known, which is not the same as nothing."""
    (place / "loose").write_bytes(b"x" * MIB)
    told = context(shm=place)
    post(told.jobs, {"41": (UID, []), "42": (-1, [])})
    assert job_bytes(sampled(make(told))) == {"41": MIB}


def test_a_cached_dataset_counts_with_each_job_that_uses_it(place: Path, tmp_path: Path) -> None:
    """Two jobs of one user on one copy."""
    for key in ("cluster-41", "cluster-42"):
        stage(place, tmp_path, key, keep=True)
    assert (place / f"hpml-{UID}" / "cluster-41" / "data").is_symlink()
    told = context(shm=place)
    post(told.jobs, {"41": (UID, []), "42": (UID, []), "43": (UID, [])})
    found = job_bytes(sampled(make(told)))
    assert {jobid: int(str(value)) // MIB for jobid, value in found.items()} == {
        "41": 3,
        "42": 3,
        "43": 0,
    }


def test_files_of_a_user_with_one_job(place: Path) -> None:
    """They are that job's, in directories too; another user's are not."""
    if UID != 0:
        pytest.skip("needs root to make files of others")
    (place / "sub").mkdir()
    for name, owner in (("a", 0), ("sub/b", 0), ("theirs", OTHER)):
        (place / name).write_bytes(b"x" * MIB)
        os.chown(place / name, owner, owner)
    told = context(shm=place)
    post(told.jobs, {"41": (0, []), "42": (OTHER, [])})
    assert job_bytes(sampled(make(told))) == {"41": 2 * MIB, "42": MIB}


def test_a_link_adds_nothing(place: Path, elsewhere: Path) -> None:
    """What a user links to is not in /dev/shm."""
    (elsewhere / "big").write_bytes(b"x" * MIB)
    (place / "link").symlink_to(elsewhere / "big")
    (place / "directory").symlink_to(elsewhere)
    told = context(shm=place)
    post(told.jobs, {"41": (UID, [])})
    assert job_bytes(sampled(make(told))) == {"41": 0}


def test_a_file_of_several_names_counts_once(place: Path) -> None:
    """Its pages are there once, wherever its names are; each name stands for its share."""
    job = place / f"hpml-{UID}" / "cluster-41" / "data"
    job.mkdir(parents=True)
    (place / "a").write_bytes(b"x" * 4 * MIB)
    for link in (place / "b", place / "c", job / "d"):
        os.link(place / "a", link)
    told = context(shm=place)
    post(told.jobs, {"41": (UID, []), "42": (OTHER, [])})
    assert job_bytes(sampled(make(told))) == {"41": 4 * MIB, "42": 0}
    post(told.jobs, {"41": (UID, []), "42": (UID, [])})
    assert job_bytes(sampled(make(told))) == {"41": MIB, "42": 0}, "one of four names is the job's"


def test_another_s_root_is_no_job_s(place: Path) -> None:
    """A directory that pretends to be a user's root counts with its real owner, as other files."""
    if UID != 0:
        pytest.skip("needs root to make files of others")
    fake = place / "hpml-0" / "cluster-41"
    fake.mkdir(parents=True)
    (fake / "x").write_bytes(b"x" * MIB)
    for path in (place / "hpml-0", fake, fake / "x"):
        os.chown(path, OTHER, OTHER)
    told = context(shm=place)
    post(told.jobs, {"41": (0, []), "42": (OTHER, [])})
    assert job_bytes(sampled(make(told))) == {"41": 0, "42": MIB}


HOSTILE = [
    b'{"bytes": 1e300}',
    b'{"bytes": -5}',
    b'{"bytes": true}',
    b'{"bytes": "1"}',
    b"[1]",
    b"\xff\xfe",
    b"[" * 60000,
]


@pytest.mark.parametrize("line", HOSTILE)
def test_a_manifest_that_is_none(place: Path, line: bytes) -> None:
    """The files themselves are counted then."""
    job = place / f"hpml-{UID}" / "cluster-41"
    (job / "data").mkdir(parents=True)
    (job / "data" / "x").write_bytes(b"x" * MIB)
    (job / ".data.manifest").write_bytes(line)
    told = context(shm=place)
    post(told.jobs, {"41": (UID, [])})
    manifest = (job / ".data.manifest").stat().st_blocks * 512
    assert job_bytes(sampled(make(told))) == {"41": MIB + manifest}


def test_a_manifest_cannot_claim_more_than_there_is(place: Path) -> None:
    """A user's false claim has a bound."""
    job = place / f"hpml-{UID}" / "cluster-41"
    (job / "data").mkdir(parents=True)
    (job / ".data.manifest").write_text(json.dumps({"bytes": 1 << 60}) + "\n")
    told = context(shm=place)
    post(told.jobs, {"41": (UID, [])})
    found = sampled(make(told))
    size = found["hpml_shm_size_bytes",]
    assert found["hpml_job_shm_bytes", "41"] == size + 4096  # type: ignore[operator]


def test_a_manifest_that_is_a_link(place: Path, elsewhere: Path) -> None:
    """It is not followed, wherever it leads."""
    job = place / f"hpml-{UID}" / "cluster-41"
    (job / "data").mkdir(parents=True)
    (elsewhere / "theirs").write_text('{"bytes": 1000000}\n')
    (job / ".data.manifest").symlink_to(elsewhere / "theirs")
    told = context(shm=place)
    post(told.jobs, {"41": (UID, [])})
    assert job_bytes(sampled(make(told))) == {"41": 0}


@pytest.mark.parametrize("linked", [".cache", ".cache/key"])
def test_a_link_on_the_way_to_a_cached_manifest(place: Path, elsewhere: Path, linked: str) -> None:
    """It is not followed: it may lead to a file system that hangs, or mounts itself."""
    user = place / f"hpml-{UID}"
    (user / "cluster-41").mkdir(parents=True)
    (elsewhere / "key").mkdir()
    (elsewhere / "key" / ".data.manifest").write_text('{"bytes": 1000000}\n')
    (user / linked).parent.mkdir(exist_ok=True)
    (user / linked).symlink_to(elsewhere / linked.removeprefix(".cache").strip("/"))
    (user / "cluster-41" / "data").symlink_to("../.cache/key/data")
    told = context(shm=place)
    post(told.jobs, {"41": (UID, [])})
    assert job_bytes(sampled(make(told))) == {"41": 0}


def test_a_pipe_in_the_place_of_a_manifest_holds_nobody_up(place: Path) -> None:
    """Opening it for reading would wait for a writer."""
    job = place / f"hpml-{UID}" / "cluster-41"
    (job / "data").mkdir(parents=True)
    os.mkfifo(job / ".data.manifest")
    (job / ".other.manifest").symlink_to("/dev/zero")
    (job / "other").mkdir()
    told = context(shm=place)
    post(told.jobs, {"41": (UID, [])})
    began = time.monotonic()
    assert job_bytes(sampled(make(told))) == {"41": 0}
    assert time.monotonic() - began < 60  # it would wait for ever


def test_many_files_are_looked_at_in_pieces(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample looks at so many entries; what is shown is always a whole walk."""
    monkeypatch.setattr(shm, "ENTRIES", 100)
    for number in range(250):
        (place / f"{number}").write_bytes(b"x")
    told = context(shm=place)
    post(told.jobs, {"41": (UID, [])})
    collector = make(told)
    seen = [job_bytes(sampled(collector)).get("41") for _ in range(6)]
    assert seen == [None, None, 250 * 4096, 250 * 4096, 250 * 4096, 250 * 4096]
    before = len(os.listdir("/proc/self/fd"))
    sampled(collector)
    collector.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_deep_tree_ends(place: Path) -> None:
    """Directories in directories, deeper than descriptors may be open."""
    path = place
    for _ in range(200):
        path /= "d"
        path.mkdir()
    (place / "d" / "x").write_bytes(b"x" * MIB)
    told = context(shm=place)
    post(told.jobs, {"41": (UID, [])})
    assert job_bytes(sampled(make(told))) == {"41": MIB}


def test_the_exporter_of_one_job_knows_of_no_others(place: Path, tmp_path: Path) -> None:
    """What its user has there beside may be another job's: only what was staged counts."""
    stage(place, tmp_path, "cluster-41")
    (place / "loose").write_bytes(b"x" * 4 * MIB)
    told = context(shm=place, job=JobFacts("41", uid=UID))
    post(told.jobs, {"41": (UID, [])})
    amount = job_bytes(sampled(make(told)))["41"]
    assert isinstance(amount, int)
    assert 3 * MIB <= amount < 3.1 * MIB


def test_files_that_vanish_meanwhile(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk goes on when what it looks at is removed under it."""
    monkeypatch.setattr(shm, "ENTRIES", 5)
    for number in range(20):
        (place / f"d{number}").mkdir()
        (place / f"d{number}" / "x").write_bytes(b"x")
    told = context(shm=place)
    post(told.jobs, {"41": (UID, [])})
    collector = make(told)
    sampled(collector)
    for path in place.iterdir():
        shutil.rmtree(path)
    for _ in range(10):
        found = job_bytes(sampled(collector))
    assert found == {"41": 0}
