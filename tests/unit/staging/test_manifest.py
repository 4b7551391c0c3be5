"""The manifest: the digest of a tree, damage to the record, and to the data."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from xxhash import xxh3_128

from hpml_orchestrator.errors import NotFoundError
from hpml_orchestrator.records.job import Stage
from hpml_orchestrator.staging.copy import CopyOptions
from hpml_orchestrator.staging.manifest import Manifest, is_whole, published_manifest, verify
from hpml_orchestrator.staging.request import Bases
from hpml_orchestrator.staging.stage import CopyStager


@pytest.fixture
def odd(source: Path) -> Path:
    """Give the small tree with odd names and links of both kinds."""
    (source / "new\nline").write_bytes(b"n")
    (source / os.fsdecode(b"\xff")).write_bytes(b"f")
    (source / "link").symlink_to(os.fsdecode(b"a/\xfe\n"))
    os.link(source / "one.bin", source / "a" / "again")
    return source


def made(stager: CopyStager, source: Path) -> tuple[Path, Manifest]:
    result = stager.stage(Stage("data", str(source), target="shm"))
    path = Path(result.path)
    manifest = Manifest.read(f"{path.parent}/.data.manifest")
    assert manifest is not None
    assert manifest.digest == result.digest
    return path, manifest


def test_the_tree_digest_is_over_sorted_records(stager: CopyStager, odd: Path) -> None:
    """Anybody can make it: records of names, types, sizes, digests and link texts, by name."""
    _, manifest = made(stager, odd)
    records = []
    for parent, directories, files in os.walk(os.fsencode(odd)):
        for name in [*directories, *files]:
            path = os.path.join(parent, name)
            relative = os.path.relpath(path, os.fsencode(odd))
            if os.path.islink(path):
                text = os.readlink(path)
                records.append(relative + b"\0l" + len(text).to_bytes(8, "little") + text + b"\0")
            elif os.path.isdir(path):
                records.append(relative + b"\0d")
            else:
                data = Path(os.fsdecode(path)).read_bytes()
                digest = xxh3_128(data).digest()
                records.append(relative + b"\0f" + len(data).to_bytes(8, "little") + digest)
    wanted = xxh3_128(b"".join(sorted(records))).hexdigest()
    assert manifest.digest == f"xxh3_128:{wanted}"


@pytest.mark.parametrize("at", [0, 10, -1])
def test_a_damaged_manifest_is_not_read(stager: CopyStager, odd: Path, at: int) -> None:
    """A changed byte anywhere, and a shorter file, are found."""
    path, manifest = made(stager, odd)
    record = path.parent / ".data.manifest"
    data = bytearray(record.read_bytes())
    record.write_bytes(data[:-5])
    assert Manifest.read(str(record)) is None
    data[at] ^= 1
    record.write_bytes(data)
    found = Manifest.read(str(record))
    assert found is None or found != manifest


@pytest.fixture
def staged(base: Path, source: Path) -> Path:
    """Give kept data that nothing uses; a source with links among files."""
    (source / "again").hardlink_to(source / "one.bin")
    (source / "link").symlink_to("one.bin")
    job = CopyStager("1.0", bases=Bases(shm=str(base)))
    path = Path(job.stage(Stage("data", str(source), target="shm", keep=True)).path)
    job.leave()
    return path


def flip_a_bit(path: Path) -> None:
    """Change one bit and neither size nor time."""
    info = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda d: flip_a_bit(d / "one.bin"), "its contents differ from what was staged"),
        (lambda d: (d / "a" / "two.txt").unlink(), "is missing"),
        (lambda d: (d / "extra").touch(), "was not staged"),
        (lambda d: os.truncate(d / "one.bin", 9), "is not a file of the size that was staged"),
        (lambda d: (d / "empty").rmdir(), "is missing"),
        (lambda d: ((d / "link").unlink(), (d / "link").symlink_to("a")), "is not the directory"),
    ],
    ids=["flip", "missing", "extra", "short", "directory", "link"],
)
def test_damage_is_named(staged: Path, damage: object, problem: str) -> None:
    """Each kind of damage, with the path."""
    damage(staged)  # type: ignore[operator]
    report = verify(str(staged), workers=2)
    assert report.count in {1, 2}, "both names of a hard link are named"
    assert all(problem in fault for _, fault in report.problems)


def test_data_without_digests_is_said_to_be_so(base: Path, source: Path) -> None:
    """Names and sizes are compared; a flipped bit is not found, and the report shows that."""
    options = CopyOptions(hash=False)
    job = CopyStager("1.0", bases=Bases(shm=str(base)), options=options)
    path = Path(job.stage(Stage("data", str(source), target="shm")).path)
    report = verify(str(path))
    assert (report.hashed, report.count, report.bytes) == (False, 0, 0)
    (path / "extra").touch()
    assert verify(str(path)).count == 1
    job.cleanup()


def test_only_what_was_staged_can_be_verified(staged: Path, tmp_path: Path) -> None:
    """Paths without a manifest and missing paths give different errors."""
    with pytest.raises(NotFoundError, match="is not staged data"):
        verify(str(tmp_path))
    with pytest.raises(NotFoundError, match="does not exist"):
        verify(str(staged / "none"))


def test_what_is_damaged_is_not_handed_out_again(staged: Path, base: Path, source: Path) -> None:
    """A bit that size and time do not show: the next job gets new data, and they are whole."""
    flip_a_bit(staged / "one.bin")
    assert verify(str(staged)).count
    job = CopyStager("2.0", bases=Bases(shm=str(base)))
    found = job.stage(Stage("data", str(source), target="shm", keep=True))
    job.leave()
    assert not found.reused
    assert verify(found.path).count == 0
    job = CopyStager("3.0", bases=Bases(shm=str(base)))
    assert job.stage(Stage("data", str(source), target="shm", keep=True)).reused
    job.leave()


def test_what_was_mended_counts_again(staged: Path) -> None:
    """A comparison that finds no fault removes the mark of an earlier one."""
    flip_a_bit(staged / "one.bin")
    assert verify(str(staged)).count
    assert not is_whole(str(staged), published_manifest(str(staged)) or pytest.fail("no manifest"))
    flip_a_bit(staged / "one.bin")
    assert not verify(str(staged)).count
    assert is_whole(str(staged), published_manifest(str(staged)) or pytest.fail("no manifest"))
