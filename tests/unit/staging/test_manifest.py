"""The manifest keeps every name and digest, and finds what is not as it says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from xxhash import xxh3_128

from hpml_orchestrator.staging import CopyStager, Manifest, StageRequest
from hpml_orchestrator.staging.hashing import hashing
from hpml_orchestrator.staging.manifest import Listing, tree_digest


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


def test_it_holds_every_name_and_digest(stager: CopyStager, odd: Path) -> None:
    """What was staged can be read back, whatever bytes its names are made of."""
    _, manifest = staged(stager, odd)
    found = dict(zip(manifest.listing.files, manifest.listing.digests, strict=True))
    # of two hard links the first by the scan's order is the file
    assert sorted(found) == ["a/deep/none", "a/two.txt", "new\nline", "one.bin", "\udcff"]
    for name, digest in found.items():
        assert digest == xxh3_128((odd / name).read_bytes()).digest()
    assert manifest.listing.hard_links == [("a/again", "one.bin")]
    assert manifest.listing.symlinks == [("link", os.fsdecode(b"a/\xfe\n"))]
    assert sorted(manifest.listing.directories) == ["a", "a/deep", "empty"]
    assert (manifest.files, manifest.bytes) == (6, 5005)


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


def test_the_tree_digest_tells_trees_apart() -> None:
    """A name, a size, a content, a type or a link text that differs gives another one."""
    how = hashing()
    trees = [
        Listing(["a"], [1], [bytes(16)]),
        Listing(["b"], [1], [bytes(16)]),
        Listing(["a"], [2], [bytes(16)]),
        Listing(["a"], [1], [b"1" * 16]),
        Listing(directories=["a"]),
        Listing(symlinks=[("a", "x")]),
        Listing(symlinks=[("a", "y")]),
        Listing(["a"], [1], [bytes(16)], directories=["b"]),
    ]
    assert len({tree_digest(tree, how) for tree in trees}) == len(trees)
    one = Listing(["a", "b"], [1, 1], [bytes(16)] * 2)
    linked = Listing(["b"], [1], [bytes(16)], hard_links=[("a", "b")])
    assert tree_digest(one, how) == tree_digest(linked, how)
    assert tree_digest(Listing(["a"], [1], []), how) == ""


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
