"""A tree comes back the same from every kind of archive, and damage is named."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import random
import shutil
import stat
import subprocess
import tarfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpml_orchestrator.errors import CapacityError, InputError, StagingError
from hpml_orchestrator.records.job import Stage
from hpml_orchestrator.staging.copy import CopyOptions
from hpml_orchestrator.staging.pack import PackRequest, pack
from hpml_orchestrator.staging.request import Bases, Kind, StageResult, kind_of
from hpml_orchestrator.staging.stage import CopyStager
from hpml_orchestrator.staging.store import list_staged
from tests.unit.staging.packs import contents as pack_contents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOOLS = {"tar.zst": "zstd", "zip": "zip"}


def contents(root: Path) -> dict[bytes, tuple[object, ...]]:
    """Return what staging keeps of a tree; the owner may always write."""
    return pack_contents(root, more_mode=0o700)


def archived(kind: str, source: Path, path: Path) -> Path:
    """Make an archive of a tree with the tool that users take."""
    tool = TOOLS.get(kind, "tar")
    if shutil.which(tool) is None:
        pytest.skip(f"NOT TESTED: {tool} is not installed")
    target = path / f"data.{kind}"
    if kind == "pack":
        pack(PackRequest(str(source), str(target), shard_bytes=1 << 16, workers=2))
    elif kind == "zip":
        subprocess.run(["zip", "-qryX", "-X", target, "."], cwd=source, check=True)
    elif kind == "tar.zst":
        subprocess.run(["tar", "--zstd", "-cf", target, "-C", source, "."], check=True)
    else:
        subprocess.run(
            ["tar", "--format", kind.partition(".")[2], "-cf", target, "-C", source, "."],
            check=True,
        )
    return target


def stage(stager: CopyStager, path: Path, kind: Kind = "auto", name: str = "data") -> StageResult:
    return stager.stage(Stage(name, str(path), kind=kind, target="shm"))


def refused(stager: CopyStager, path: Path, match: str, kind: Kind = "auto") -> None:
    """Check that an archive is refused and that nothing of it is left."""
    with pytest.raises((StagingError, InputError), match=match):
        stage(stager, path, kind)
    assert list_staged([stager.store("shm").base]) == []


@pytest.fixture(params=[1, 2])
def engine(base: Path, request: pytest.FixtureRequest) -> Iterator[CopyStager]:
    """Give a stager that works with one process, and with two."""
    options = CopyOptions(processes=request.param)
    stager = CopyStager("8.0", bases=Bases(shm=str(base)), options=options)
    yield stager
    stager.cleanup()


@pytest.mark.parametrize("kind", ["pack", "tar.gnu", "tar.posix", "tar.zst"])
def test_a_tree_comes_back_the_same(
    engine: CopyStager,
    tree: Path,
    tmp_path: Path,
    kind: str,
) -> None:
    """Names, modes, times, contents, all links and empty directories; and the same digest."""
    copied = stage(engine, tree, "tree", "copied")
    path = archived(kind, tree, tmp_path)
    if kind.startswith("tar.") and kind != "tar.zst":
        path = path.rename(tmp_path / "data.tar")
    result = stage(engine, path)
    assert contents(Path(result.path)) == contents(tree)
    assert (result.bytes, result.files, result.method) == (copied.bytes, copied.files, "unpack")
    assert result.digest == copied.digest != ""


def test_a_pack_is_staged_as_it_is_when_asked(
    stager: CopyStager,
    tree: Path,
    tmp_path: Path,
) -> None:
    """With kind tree the shards are copied, which is quickest; auto unpacks."""
    path = archived("pack", tree, tmp_path)
    result = stage(stager, path, "tree")
    assert sorted(os.listdir(result.path)) == sorted(os.listdir(path))
    assert stage(stager, path, name="unpacked").method == "unpack"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("x.tar", "tar"),
        ("x.TAR.ZST", "tar"),
        ("x.tgz", "tar"),
        ("x.zip", "zip"),
        ("x.sqfs", "file"),
        ("x.npz", "file"),
        ("x.zst", "file"),
        ("tar", "file"),
    ],
)
def test_kinds_are_recognised(tmp_path: Path, name: str, kind: str) -> None:
    """By the suffix alone; .npz, which is a zip archive, stays a file."""
    (tmp_path / name).touch()
    assert kind_of(Stage("x", str(tmp_path / name))) == kind


def test_a_directory_is_a_pack_by_its_names(tmp_path: Path) -> None:
    """Of `hpml pack`; other shards are unpacked with kind pack, and never with other files."""
    assert kind_of(Stage("x", str(tmp_path))) == "tree"
    with pytest.raises(InputError, match="not a directory of tar shards alone: it is empty"):
        kind_of(Stage("x", str(tmp_path), kind="pack"))
    (tmp_path / "train-000000.tar").touch()
    assert kind_of(Stage("x", str(tmp_path))) == "tree"
    assert kind_of(Stage("x", str(tmp_path), kind="pack")) == "pack"
    (tmp_path / "train-000000.tar").rename(tmp_path / "data-00000.tar")
    (tmp_path / "tree.tar").touch()
    assert kind_of(Stage("x", str(tmp_path))) == "pack"
    (tmp_path / "README").touch()
    with pytest.raises(InputError, match="looks like a pack, but also holds README"):
        kind_of(Stage("x", str(tmp_path)))
    assert kind_of(Stage("x", str(tmp_path), kind="tree")) == "tree"
    with pytest.raises(InputError, match="it holds README"):
        kind_of(Stage("x", str(tmp_path), kind="pack"))
    with pytest.raises(InputError, match="has kind zip, but is a directory"):
        kind_of(Stage("x", str(tmp_path), kind="zip"))


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0\\"), min_size=1, max_size=20)
PATHS = st.lists(NAMES.filter(lambda name: name not in {".", ".."}), min_size=1, max_size=4)
TREES = st.dictionaries(
    PATHS.map(tuple), st.one_of(st.none(), st.binary(max_size=3000)), max_size=12
)


def grow(root: Path, wanted: dict[tuple[str, ...], bytes | None]) -> None:
    """Make a tree; None makes a directory, and what cannot be made is left out."""
    root.mkdir()
    for number, (parts, data) in enumerate(wanted.items()):
        path = root.joinpath(*parts)
        with contextlib.suppress(OSError):
            if data is None:
                path.mkdir(parents=True, exist_ok=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                path.chmod((0o600, 0o644, 0o755)[number % 3])


def zipped(source: Path, path: Path) -> None:
    """Write a zip, members by turns stored and deflated, directories listed and implied."""
    with zipfile.ZipFile(path, "w") as target:
        for number, one in enumerate(sorted(source.rglob("*"))):
            info = zipfile.ZipInfo(str(one.relative_to(source)) + "/" * one.is_dir())
            info.external_attr = one.stat().st_mode << 16
            info.compress_type = zipfile.ZIP_DEFLATED if number % 2 else zipfile.ZIP_STORED
            target.writestr(info, b"" if one.is_dir() else one.read_bytes())


@given(wanted=TREES)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_tree_is_the_same_from_everything(
    base: Path, tmp_path: Path, wanted: dict[tuple[str, ...], bytes | None]
) -> None:
    """Copied, from a pack, a tar, a compressed tar and a zip: one tree, one digest."""
    place = tmp_path / str(time.monotonic_ns())
    place.mkdir()
    source = place / "source"
    grow(source, wanted)
    pack(PackRequest(str(source), str(place / "packed"), shard_bytes=1 << 16, workers=1))
    with tarfile.open(place / "x.tar", "w:", format=random.choice([1, 2])) as tar:
        tar.add(source, ".")
    with tarfile.open(place / "x.tgz", "w:gz") as tar:
        tar.add(source, ".")
    zipped(source, place / "x.zip")
    stager = CopyStager("9.0", bases=Bases(shm=str(base)))
    try:
        found = {
            name: stage(stager, place / name, name=f"n{number}")
            for number, name in enumerate(["source", "packed", "x.tar", "x.tgz", "x.zip"])
        }
        assert len({result.digest for result in found.values()}) == 1
        expected = {key: value[:2] for key, value in contents(source).items()}
        for name, result in found.items():
            made = contents(Path(result.path))
            assert {key: value[:2] for key, value in made.items()} == expected, name
    finally:
        stager.cleanup()
        shutil.rmtree(place)


def packed(tmp_path: Path, files: int = 40) -> Path:
    """A pack of several shards."""
    source = tmp_path / "many"
    source.mkdir()
    for number in range(files):
        (source / f"{number:03d}.bin").write_bytes(random.Random(number).randbytes(4000))
    pack(PackRequest(str(source), str(tmp_path / "packed"), shard_bytes=1 << 16, workers=1))
    return tmp_path / "packed"


def test_damaged_and_compressed_shards_are_named(stager: CopyStager, tmp_path: Path) -> None:
    """Nothing is written before all shards were looked at."""
    path = packed(tmp_path)
    os.truncate(path / "data-00002.tar", 5000)
    refused(stager, path, r"data-00002\.tar: not a whole tar archive")
    shutil.copy(path / "data-00001.tar", path / "data-00002.tar")
    refused(stager, path, r"is in data-00001.tar and in data-00002.tar(.|\n)*")
    with gzip.open(path / "data-00002.tar", "wb") as stream:
        stream.write((path / "data-00001.tar").read_bytes())
    refused(stager, path, r"data-00002\.tar: is compressed")


def test_shards_on_a_server_are_read_at_the_same_time(
    stager: CopyStager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is the same as of one after the other; damage is reported, too."""
    path = packed(tmp_path)
    plain = stage(stager, path)
    # FAKE: this machine's disk counts as a file server
    monkeypatch.setattr("hpml_orchestrator.staging.space.is_served_type", lambda _kind: True)
    assert stage(stager, path, name="again").digest == plain.digest
    os.truncate(path / "data-00001.tar", 5000)
    with pytest.raises(StagingError, match=r"data-00001\.tar: not a whole tar archive"):
        stage(stager, path, name="third")


@pytest.mark.parametrize("gone", [[0], [1], [2], [0, 1, 2]])
def test_a_pack_without_one_of_its_shards_is_refused(
    stager: CopyStager, tmp_path: Path, gone: list[int]
) -> None:
    """tree.tar tells how many there are; of older packs, whose does not, a hole in the numbers."""
    path = packed(tmp_path)
    for number in gone:
        (path / f"data-0000{number}.tar").unlink()
    refused(stager, path, rf"data-0000{gone[0]}\.tar is missing: the pack has 3 such shards")
    tarfile.open(path / "tree.tar", "w").close()
    if gone in ([0], [1]):
        refused(stager, path, rf"data-0000{gone[0]}\.tar is missing")


def test_shards_of_two_packs_are_refused(stager: CopyStager, tmp_path: Path) -> None:
    """As when a pack was made anew, of fewer files, in a place where shards of the old one are."""
    path = packed(tmp_path)
    with tarfile.open(path / "data-00003.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("old"))
    refused(stager, path, r"data-00003\.tar is too many: the pack has 3 such shards")


def test_a_shard_that_changes_is_an_error(
    stager: CopyStager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pack that is made anew while it is unpacked is not published."""
    path = packed(tmp_path)
    real = os.mkdir

    def mkdir(name: Any, *arguments: Any, **more: Any) -> None:  # between plan and copy
        if "partial" in str(name):
            os.utime(path / "data-00001.tar", (9, 9))
        real(name, *arguments, **more)

    monkeypatch.setattr(os, "mkdir", mkdir)
    refused(stager, path, "changed while")


def test_a_zstd_archive_needs_the_program(
    stager: CopyStager, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the error says what to install; damage is reported as damage."""
    path = archived("tar.zst", source, tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])
    refused(stager, path, "not a whole")
    path.write_bytes(whole)
    monkeypatch.setenv("PATH", str(tmp_path))
    refused(stager, path, "nothing here can decompress zstd")


def test_zstd_of_several_frames(stager: CopyStager, source: Path, tmp_path: Path) -> None:
    """Parallel compressors write them, here with the longest window; what is cut is refused."""
    if shutil.which("zstd") is None:
        pytest.skip("NOT TESTED: zstd is not installed")
    with tarfile.open(tmp_path / "x.tar", "w:") as tar:
        tar.add(source, ".")
    whole = (tmp_path / "x.tar").read_bytes()
    path = tmp_path / "x.tar.zst"
    frames = [
        subprocess.run(
            ["zstd", "-qc", "--long=31"], input=part, stdout=subprocess.PIPE, check=True
        ).stdout
        for part in (whole[:3000], whole[3000:])
    ]
    path.write_bytes(b"".join(frames))
    assert contents(Path(stage(stager, path).path)) == contents(source)
    for data in (frames[0], frames[0] + frames[1][:20]):
        path.write_bytes(data)
        with pytest.raises(StagingError, match="not a whole"):
            stage(stager, path, name="again")


def test_a_zstd_bomb_is_given_up_early(small_tmpfs: Callable[[str], Path], tmp_path: Path) -> None:
    """Little more is decompressed than the file system holds."""
    if shutil.which("zstd") is None:
        pytest.skip("NOT TESTED: zstd is not installed")
    path = tmp_path / "x.tar.zst"
    with subprocess.Popen(["zstd", "-qo", path], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        with tarfile.open(fileobj=process.stdin, mode="w|") as tar:
            for number in range(64):
                info = tarfile.TarInfo(f"f{number}")
                info.size = 8 << 20
                tar.addfile(info, io.BytesIO(bytes(info.size)))
    assert path.stat().st_size < 1 << 20
    stager = CopyStager("1", bases=Bases(shm=str(small_tmpfs("size=10m"))))
    with pytest.raises(CapacityError, match=r"at least 16\.0 MiB"):
        stage(stager, path)
    stager.cleanup()


@pytest.mark.parametrize("keep", [False, True])
def test_a_pack_made_anew_is_staged_anew(base: Path, tmp_path: Path, keep: bool) -> None:
    """Of the same size within the same second: its times are no finer, only the digests differ."""
    top, packed = tmp_path / "tree", tmp_path / "packed"
    for text in ("first", "later"):
        top.mkdir()
        (top / "x").write_text(text)
        os.utime(top / "x", (1e9, 1e9))
        pack(PackRequest(str(top), str(packed), workers=1))
        stager = CopyStager("1.0", bases=Bases(shm=str(base)))
        result = stager.stage(Stage("data", str(packed), target="shm", keep=keep))
        assert (Path(result.path) / "x").read_text() == text
        assert not result.reused
        stager.leave()
        shutil.rmtree(top)
        shutil.rmtree(packed)
    CopyStager("1.0", bases=Bases(shm=str(base))).cleanup()


def test_a_hard_link_to_a_symbolic_link_arrives(stager: CopyStager, tmp_path: Path) -> None:
    """So tar writes further names of a symbolic link; one that would lead outside is refused."""
    top = tmp_path / "tree"
    (top / "below").mkdir(parents=True)
    (top / "file").write_text("file")
    (top / "1").symlink_to("file")
    os.link(top / "1", top / "below" / "2", follow_symlinks=False)
    os.link(top / "1", top / "3", follow_symlinks=False)
    path = tmp_path / "x.tar"
    names = ["file", "1", "3", "below/2"]
    subprocess.run(["tar", "-cf", path, "-C", top, *names], check=True)
    result = Path(stage(stager, path).path)
    assert [os.readlink(result / name) for name in names[1:]] == ["file"] * 3
    (top / "below" / "up").symlink_to("../file")
    os.link(top / "below" / "up", top / "up", follow_symlinks=False)
    subprocess.run(["tar", "-cf", path, "-C", top, "file", "below/up", "up"], check=True)
    with pytest.raises(StagingError, match="up: symbolic link that leaves the tree"):
        stage(stager, path, name="again")


def test_a_file_that_a_zip_closes_to_all_stays_closed(stager: CopyStager, tmp_path: Path) -> None:
    """Mode 0 with a type is a mode; without one it is none, and then files are for all to read."""
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as target:
        for name, mode in (("closed", stat.S_IFREG), ("unsaid", 0)):
            info = zipfile.ZipInfo(name)
            info.create_system = 3 if mode else 0
            info.external_attr = mode << 16
            target.writestr(info, "x")
    result = Path(stage(stager, path).path)
    modes = {one.name: stat.S_IMODE(one.stat().st_mode) for one in result.iterdir()}
    assert modes == {"closed": 0o400, "unsaid": 0o644}


def test_implied_directories_and_odd_names(stager: CopyStager, tmp_path: Path) -> None:
    """Directories that are not listed, repeated ones, `./` and odd bytes are all accepted."""
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, mode, mtime in (
            ("./a//b/\udcff\n-rf", tarfile.REGTYPE, 0o644, 0),
            ("a/b", tarfile.DIRTYPE, 0o750, 0),
            ("a/b/", tarfile.DIRTYPE, 0o700, 77),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.mode, info.mtime = kind, mode, mtime
            tar.addfile(info)
    below = Path(stage(stager, path).path) / "a" / "b"
    assert (below / "\udcff\n-rf").is_file()
    assert (stat.S_IMODE(below.stat().st_mode), below.stat().st_mtime) == (0o700, 77)
