"""Shards hold the tree: for tar, for tarfile, for webdataset, and always the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import webdataset
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hpml_orchestrator.errors import CapacityError, InputError, NotFoundError, StagingError
from hpml_orchestrator.staging import pack as shards
from hpml_orchestrator.staging.pack import PackRequest, PackResult, pack
from hpml_orchestrator.staging.plan import TreeEntry
from hpml_orchestrator.staging.request import StagingStopped
from tests.unit.staging.packs import contents, finished, grow, left, untar


def packed(tree: Path, dest: Path, size: int = 1 << 20, **more: object) -> PackResult:
    return pack(PackRequest(str(tree), str(dest), size, **more))  # type: ignore[arg-type]


def members(pack: Path) -> dict[str, list[tarfile.TarInfo]]:
    """The members of each shard of files."""
    found = {}
    for path in sorted(pack.glob("data-*.tar")):
        with tarfile.open(path) as tar:
            found[path.name] = tar.getmembers()
    return found


def test_a_sample_is_never_torn_apart(tmp_path: Path) -> None:
    """Files of one base name are neighbours in one archive; only a sample can exceed the size."""
    root = tmp_path / "tree"
    root.mkdir()
    for number in range(40):
        for ending, size in (("jpg", 9000), ("cls", 3), ("seg.png", 4000)):
            (root / f"{number:04d}.{ending}").write_bytes(bytes(size))
        (root / f"{number:04d}-other").write_bytes(bytes(300))
    (root / "large.bin").write_bytes(bytes(200_000))
    packed(root, tmp_path / "pack", 1 << 16)
    found = members(tmp_path / "pack")
    where: dict[str, set[str]] = {}
    for shard, infos in found.items():
        stems = [info.name.partition(".")[0] for info in infos]
        for stem in stems:
            where.setdefault(stem, set()).add(shard)
        runs = [stem for at, stem in enumerate(stems) if at == 0 or stem != stems[at - 1]]
        assert len(runs) == len(set(runs))
    assert {len(shards) for shards in where.values()} == {1}
    (large,) = where["large"]
    sizes = {shard: (tmp_path / "pack" / shard).stat().st_size for shard in found}
    assert len(sizes) > 8
    assert sizes.pop(large) > 200_000
    assert max(sizes.values()) <= 1 << 16


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it closes nothing
def test_webdataset_reads_samples(tmp_path: Path) -> None:
    """Each sample has a key and one entry for each of its files, as webdataset groups them."""
    root = tmp_path / "tree"
    (root / "train").mkdir(parents=True)
    for number in range(50):
        (root / "train" / f"{number:04d}.cls").write_text(str(number))
        (root / "train" / f"{number:04d}.seg.png").write_bytes(bytes(3000))
    packed(root, tmp_path / "pack", 1 << 16)
    urls = sorted(map(str, tmp_path.glob("pack/data-*.tar")))
    assert len(urls) > 2
    samples = list(webdataset.WebDataset(urls, shardshuffle=False))
    assert [sample["__key__"] for sample in samples] == [f"train/{n:04d}" for n in range(50)]
    assert [int(sample["cls"]) for sample in samples] == list(range(50))
    assert {len(sample["seg.png"]) for sample in samples} == {3000}


def test_pax_only_where_it_is_needed(tmp_path: Path) -> None:
    """Ordinary names cost one block; nobody's name or number is in the archive."""
    root = grow(tmp_path / "tree", 3)
    (root / ("n" * 120)).write_text("x")
    packed(root, tmp_path / "pack")
    data = (tmp_path / "pack" / "data-00000.tar").read_bytes()
    assert data.count(b"PaxHeader") == 1
    for info in members(tmp_path / "pack")["data-00000.tar"]:
        assert (info.uid, info.gid, info.uname, info.gname) == (0, 0, "", "")


def test_a_file_beyond_ustar(tmp_path: Path) -> None:
    """More than 8 GiB take an extended header, which tarfile and GNU tar read."""
    size = 9 << 30
    head = shards._header("large", TreeEntry("large", 0o644, 5_000_000_000, size))
    path = tmp_path / "head.tar"
    with open(path, "wb") as stream:
        stream.write(head)
        stream.truncate(len(head) + size + 1024)
    with tarfile.open(path) as tar:
        member = tar.next()
    assert member is not None
    assert (member.name, member.size, member.mtime, member.mode) == ("large", size, 5, 0o644)
    listed = subprocess.run(["tar", "tvf", path], capture_output=True, text=True, check=True)
    assert str(size) in listed.stdout


@pytest.mark.parametrize("dest", ["full", "file", "tree/inside", "here"])
def test_places_that_are_refused(tmp_path: Path, dest: str) -> None:
    """What is not empty or no directory, or in the source; an empty directory is fine."""
    root = grow(tmp_path / "tree", 3)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "file").touch()
    (tmp_path / "here").mkdir()
    before = left(tmp_path)
    if dest == "here":
        packed(root, tmp_path / dest)
        assert finished(tmp_path / dest)
    else:
        with pytest.raises(
            InputError, match=r"DEST: (is not empty|is not a dir|must not be inside)"
        ):
            packed(root, tmp_path / dest)
    assert left(tmp_path) == before


def test_sources_that_are_refused(tmp_path: Path) -> None:
    """One that is not there, a file, links that leave, and a size that is too small."""
    (tmp_path / "file").touch()
    root = grow(tmp_path / "tree", 1)
    (root / "out").symlink_to("/etc")
    with pytest.raises(NotFoundError, match="no such directory"):
        packed(tmp_path / "none", tmp_path / "pack")
    with pytest.raises(InputError, match="SOURCE: must be a directory"):
        packed(tmp_path / "file", tmp_path / "pack")
    with pytest.raises(StagingError, match="out: symbolic link to an absolute path"):
        packed(root, tmp_path / "pack")
    with pytest.raises(InputError, match="--shard-size: must be at least 64K"):
        packed(root, tmp_path / "pack", 5)
    assert packed(root, tmp_path / "pack", outside_links=True).symbolic_links == 1


def change(path: Path) -> None:
    path.write_bytes(b"other")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda root: change(root / "3" / "00003.bin"), "00003.bin: changed while it was packed"),
        (lambda root: (root / "3" / "00003.bin").unlink(), "00003.bin: No such file"),
        (lambda root: (root / "3" / "new").touch(), "3: changed while"),
    ],
)
def test_a_source_that_changes_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], object], said: str
) -> None:
    """Between the look at the tree and the reading of it: nothing is left of the pack."""
    root = grow(tmp_path / "tree", 30)
    real = os.makedirs

    def makedirs(name: str, *arguments: object, **more: object) -> None:
        if ".packing-" in name:
            harm(root)
        real(name, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "makedirs", makedirs)
    with pytest.raises(StagingError, match=said):
        packed(root, tmp_path / "pack")
    assert left(tmp_path) == {"tree"}


def test_nothing_is_written_that_does_not_fit(
    tmp_path: Path,
    small_tmpfs: Callable[[str], Path],
) -> None:
    """The room is counted before; a stop leaves nothing either."""
    point = small_tmpfs("size=1m")
    root = grow(tmp_path / "tree", 600)
    with pytest.raises(CapacityError, match="DEST: needs"):
        packed(root, point / "pack")
    assert left(point) == set()
    with pytest.raises(StagingStopped):
        pack(PackRequest(str(root), str(tmp_path / "pack")), should_stop=lambda: True)
    assert left(tmp_path) == {"tree", point.name}


def test_what_a_killed_one_left_is_told(tmp_path: Path) -> None:
    """Nobody can know whether it runs on another host; the pack is made all the same."""
    root = grow(tmp_path / "tree", 3)
    (tmp_path / ".pack.packing-1-x").mkdir()
    result = packed(root, tmp_path / "pack")
    assert f"remove what a killed one left: {tmp_path}/.pack.packing-1-x" in result.note


part = st.binary(min_size=1, max_size=110).filter(
    lambda name: name not in {b".", b".."} and not set(name) & {0, 47}
)
paths = st.lists(part, min_size=1, max_size=4).map(b"/".join)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@example(files={}, directories=[b"a", b"a-b", b"a/x"], links={}, size=1 << 16)
@given(
    files=st.dictionaries(paths, st.binary(max_size=2000), max_size=12),
    directories=st.lists(paths, max_size=3),
    links=st.dictionaries(paths, paths, max_size=3),
    size=st.sampled_from([1 << 16, 1 << 20]),
)
def test_any_tree_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    files: dict[bytes, bytes],
    directories: list[bytes],
    links: dict[bytes, bytes],
    size: int,
) -> None:
    """Whatever names and contents: tar makes the same tree."""
    home = tmp_path_factory.mktemp("any")
    root = os.fsencode(home / "tree")
    os.mkdir(root)
    for kind, name, data in [
        *(("file", name, data) for name, data in files.items()),
        *(("directory", name, b"") for name in directories),
        *(("link", name, target) for name, target in links.items()),
    ]:
        path = os.path.join(root, name)
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if kind == "file":
                with open(path, "xb") as stream:
                    stream.write(data)
            elif kind == "directory":
                os.makedirs(path, exist_ok=True)
            else:
                os.symlink(data, path)
        except OSError:  # the names do not go together
            continue
    for parent, _, _ in os.walk(root, topdown=False):
        os.utime(parent, (10**9, 10**9))  # any time but that of unpacking
    packed(home / "tree", home / "pack", size, workers=1, outside_links=True)
    untar(home / "pack", home / "out")
    assert contents(home / "out") == contents(home / "tree")
    shutil.rmtree(home)
