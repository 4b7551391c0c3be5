"""The manifest: the digest of a tree, and damage to the record."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from xxhash import xxh3_128

from hpml_orchestrator.staging.manifest import Manifest
from hpml_orchestrator.staging.request import StageRequest
from hpml_orchestrator.staging.stage import CopyStager


@pytest.fixture
def odd(source: Path) -> Path:
    """Give the small tree with odd names and links of both kinds."""
    (source / "new\nline").write_bytes(b"n")
    (source / os.fsdecode(b"\xff")).write_bytes(b"f")
    (source / "link").symlink_to(os.fsdecode(b"a/\xfe\n"))
    os.link(source / "one.bin", source / "a" / "again")
    return source


def staged(stager: CopyStager, source: Path) -> tuple[Path, Manifest]:
    result = stager.stage(StageRequest("data", str(source), target="shm"))
    path = Path(result.path).resolve()
    manifest = Manifest.read(f"{path.parent}/.data.manifest")
    assert manifest is not None
    assert manifest.digest == result.digest
    return path, manifest


def test_the_tree_digest_is_over_sorted_records(stager: CopyStager, odd: Path) -> None:
    """Anybody can make it: records of names, types, sizes, digests and link texts, by name."""
    _, manifest = staged(stager, odd)
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
    path, manifest = staged(stager, odd)
    record = path.parent / ".data.manifest"
    data = bytearray(record.read_bytes())
    record.write_bytes(data[:-5])
    assert Manifest.read(str(record)) is None
    data[at] ^= 1
    record.write_bytes(data)
    found = Manifest.read(str(record))
    assert found is None or found != manifest
