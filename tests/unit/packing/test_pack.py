"""A pack holds the tree: for tar, for Python's tarfile, for its index, and always the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128

from hpml_orchestrator.errors import NotFoundError, StagingError
from hpml_orchestrator.packing import PackRequest, PackResult, pack, read_index, ustar, verify
from hpml_orchestrator.packing.layout import place, sample
from tests.unit.packing.conftest import contents, finished, grow, left, untar


def packed(tree: Path, dest: Path, size: int = 1 << 20, **more: object) -> PackResult:
    return pack(PackRequest(str(tree), str(dest), size, **more))  # type: ignore[arg-type]


def test_tar_unpacks_the_same_tree(tree: Path, tmp_path: Path) -> None:
    """GNU tar makes the same names, bytes, modes, times in seconds, and links of all kinds."""
    result = packed(tree, tmp_path / "pack")
    untar(tmp_path / "pack", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tree)
    assert finished(tmp_path / "pack")
    assert (result.hard_links, result.symbolic_links, result.kept_shards) == (2, 4, 0)
    regular = [one for one in tree.rglob("*") if one.is_file() and not one.is_symlink()]
    assert result.files + result.hard_links == len(regular)
    assert result.archive_bytes == sum(one.stat().st_size for one in tmp_path.glob("pack/*.tar"))


def test_tarfile_unpacks_the_same_tree(tree: Path, tmp_path: Path) -> None:
    """Python's tarfile does too, where links are taken as they are."""
    packed(tree, tmp_path / "pack")
    (tmp_path / "out").mkdir()
    for archive in sorted((tmp_path / "pack").glob("*.tar")):
        with tarfile.open(archive, errorlevel=2) as tar:
            # `filter=` is not known to older Pythons, Debian 12's among them
            tar.extraction_filter = getattr(tarfile, "tar_filter", None)
            tar.extractall(tmp_path / "out")  # noqa: S202 - made here
    out, expected = contents(tmp_path / "out"), contents(tree)
    assert out.keys() == expected.keys()
    for name, was in expected.items():
        is_now = out[name]
        if was[0] == "link":  # tarfile keeps no times of links
            assert is_now[:2] == was[:2]
        elif was[0] == "file":
            assert is_now == was, name
    (tmp_path / "out" / "empty").chmod(0o755)


def test_equal_trees_give_equal_packs(tree: Path, tmp_path: Path) -> None:
    """Another copy of the tree, with other workers, gives the same bytes in every file."""
    shutil.copytree(tree, tmp_path / "copy", symlinks=True)
    for name in ("also.jpg", "zz.jpg"):
        (tmp_path / "copy" / name).unlink()
        os.link(tmp_path / "copy" / "train" / "a.jpg", tmp_path / "copy" / name)
    for path in tree.rglob("*"):
        os.utime(
            tmp_path / "copy" / path.relative_to(tree),
            ns=(0, path.lstat().st_mtime_ns),
            follow_symlinks=False,
        )
    (tmp_path / "copy" / "empty").chmod(0o555)
    first = packed(tree, tmp_path / "one", 1 << 16, workers=1)
    second = packed(tmp_path / "copy", tmp_path / "two", 1 << 16, workers=3)
    assert first.index_sha256 == second.index_sha256
    names = left(tmp_path / "one")
    assert names == left(tmp_path / "two")
    assert len(names) > 4
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_the_index_leads_to_the_bytes(tree: Path, tmp_path: Path) -> None:
    """Each row's offset, size and digest are those of the file; links lead to their file's."""
    packed(tree, tmp_path / "pack", 1 << 16)
    index = read_index(str(tmp_path / "pack"))
    rows = list(index.rows())
    assert [row.name for row in rows] == sorted((row.name for row in rows), key=place)
    kinds = {row.name: row.kind for row in rows}
    assert (kinds[b"run.sh"], kinds[b"also.jpg"], kinds[b"train/link.jpg"]) == (0, 0, 2)
    assert list(kinds.values()).count(1) == 2
    assert not {b"up", b"dangling", b"far", b"empty"} & set(kinds)
    for row in rows:
        data = (tmp_path / "pack" / index.archives[row.shard].file).read_bytes()
        piece = data[row.offset : row.offset + row.size]
        assert piece == (tree / os.fsdecode(row.name)).read_bytes()
        assert row.digest == xxh3_128(piece).digest()
    for archive in index.archives:
        data = (tmp_path / "pack" / archive.file).read_bytes()
        assert (len(data), xxh3_128(data).hexdigest()) == (archive.bytes, archive.digest)
    assert sum(archive.files for archive in index.archives) == sum(not row.kind for row in rows)


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
    index = read_index(str(tmp_path / "pack"))
    where: dict[tuple[bytes, bytes], set[int]] = {}
    for row in index.rows():
        where.setdefault(sample(row.name), set()).add(row.shard)
    assert {len(shards) for shards in where.values()} == {1}
    large = where[b"", b"large"].pop()
    sizes = [archive.bytes for archive in index.archives]
    assert max(sizes) == sizes[large] > 200_000
    assert all(size <= 1 << 16 for number, size in enumerate(sizes) if number != large)
    assert len(sizes) > 8
    for archive in sorted((tmp_path / "pack").glob("data-*.tar")):
        with tarfile.open(archive) as tar:
            stems = [name.partition(".")[0] for name in tar.getnames()]
        runs = [stem for at, stem in enumerate(stems) if at == 0 or stem != stems[at - 1]]
        assert len(runs) == len(set(runs))


def test_pax_only_where_it_is_needed(tmp_path: Path) -> None:
    """Ordinary names cost one block; nobody's name or number is in the archive."""
    root = grow(tmp_path / "tree", 3)
    (root / ("n" * 120)).write_text("x")
    packed(root, tmp_path / "pack")
    data = (tmp_path / "pack" / "data-00000.tar").read_bytes()
    assert data.count(b"PaxHeader") == 1
    with tarfile.open(tmp_path / "pack" / "data-00000.tar") as tar:
        for member in tar:
            assert (member.uid, member.gid, member.uname, member.gname) == (0, 0, "", "")


def test_an_empty_tree_is_a_pack(tmp_path: Path) -> None:
    """No files, no archive of data; the index says so."""
    (tmp_path / "tree").mkdir()
    result = packed(tmp_path / "tree", tmp_path / "deep" / "pack")
    assert left(tmp_path / "deep" / "pack") == {"tree.tar", "pack.index"}
    assert (result.files, result.shards) == (0, 1)
    assert list(read_index(str(tmp_path / "deep" / "pack")).rows()) == []
    assert verify(str(tmp_path / "deep" / "pack")).damaged == ()


def test_a_size_beyond_ustar(tmp_path: Path) -> None:
    """A file of more than 8 GiB has a pax header, which tarfile and GNU tar read."""
    size = 9 << 30
    head = ustar.header(b"large", mode=0o644, mtime=5, size=size)
    assert len(head) == ustar.header_bytes(b"large", size) == 1536
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


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte[0] ^ 1]))


def test_verify_names_what_is_damaged(tree: Path, tmp_path: Path) -> None:
    """A flipped bit in a file, a header, an archive cut short, one that is gone."""
    dest = tmp_path / "pack"
    packed(tree, dest, 1 << 16)
    whole = verify(str(dest), workers=2)
    assert whole.damaged == ()
    index = read_index(str(dest))
    assert (whole.shards, whole.files) == (
        len(index.archives),
        sum(row.kind == 0 for row in index.rows()),
    )
    row = next(row for row in index.rows() if row.name == b"train/a.cls")
    shard = index.archives[row.shard].file
    shutil.copytree(dest, tmp_path / "kept")
    flip(dest / shard, row.offset)
    (damage,) = verify(str(dest)).damaged
    assert (damage.shard, damage.name) == (shard, "train/a.cls")
    shutil.copy(tmp_path / "kept" / shard, dest / shard)
    flip(dest / shard, row.offset - 400)
    (damage,) = verify(str(dest)).damaged
    assert (damage.shard, damage.name) == (shard, "")
    assert "header" in damage.reason
    os.truncate(dest / shard, row.offset)
    damaged = verify(str(dest)).damaged
    assert {one.shard for one in damaged} == {shard}
    assert "train/a.cls" in {one.name for one in damaged}
    (dest / shard).unlink()
    (dest / "tree.tar").unlink()
    assert {one.shard for one in verify(str(dest)).damaged} == {shard, "tree.tar"}


@pytest.mark.parametrize("at", [0, 20, 41, 60, -1])
def test_a_damaged_index_is_not_believed(tree: Path, tmp_path: Path, at: int) -> None:
    """One flipped bit anywhere, or a missing end: an error, not a wrong answer."""
    packed(tree, tmp_path / "pack")
    path = tmp_path / "pack" / "pack.index"
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    with pytest.raises(StagingError, match="damaged"):
        read_index(str(tmp_path / "pack"))
    path.write_bytes(data[:30])
    with pytest.raises(StagingError, match="too short"):
        read_index(str(tmp_path / "pack"))


def test_what_is_no_pack_is_told() -> None:
    """A directory without an index, and none at all."""
    with pytest.raises(NotFoundError, match="no finished pack"):
        verify("/usr")
    with pytest.raises(NotFoundError, match="no finished pack"):
        verify("/nowhere")


part = st.binary(min_size=1, max_size=110).filter(
    lambda name: name not in {b".", b".."} and not set(name) & {0, 47}
)
paths = st.lists(part, min_size=1, max_size=4).map(b"/".join)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
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
    """Whatever names and contents: tar makes the same tree, and the index knows each file."""
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
    packed(home / "tree", home / "pack", size, workers=1)
    untar(home / "pack", home / "out")
    expected = contents(home / "tree")
    assert contents(home / "out") == expected
    regular = {name for name, found in expected.items() if found[0] == "file"}
    rows = {row.name for row in read_index(str(home / "pack")).rows() if row.kind == 0}
    assert rows == regular
    assert verify(str(home / "pack"), workers=1).damaged == ()
    shutil.rmtree(home)
