"""Archives as other tools write them, seldom but rightly, and packs that were made anew."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.packing.shards import PackRequest, pack
from hpml_orchestrator.staging.request import Bases, StageRequest, StageResult
from hpml_orchestrator.staging.stage import CopyStager


def stage(stager: CopyStager, path: Path, name: str = "data") -> StageResult:
    """Stage into RAM."""
    return stager.stage(StageRequest(name, str(path), target="shm"))


@pytest.mark.parametrize("keep", [False, True])
def test_a_pack_made_anew_is_staged_anew(base: Path, tmp_path: Path, keep: bool) -> None:
    """Of the same size within the same second: its times are no finer, only the digests differ."""
    tree, packed = tmp_path / "tree", tmp_path / "packed"
    for text in ("first", "later"):
        tree.mkdir()
        (tree / "x").write_text(text)
        os.utime(tree / "x", (1e9, 1e9))
        pack(PackRequest(str(tree), str(packed), workers=1))
        stager = CopyStager("1.0", bases=Bases(shm=str(base)))
        result = stager.stage(StageRequest("data", str(packed), target="shm", keep=keep))
        assert (Path(result.path) / "x").read_text() == text
        assert not result.reused
        stager.leave()
        shutil.rmtree(tree)
        shutil.rmtree(packed)
    CopyStager("1.0", bases=Bases(shm=str(base))).area("shm").cleanup()


def test_a_hard_link_to_a_symbolic_link_arrives(stager: CopyStager, tmp_path: Path) -> None:
    """So tar writes further names of a symbolic link; one that would lead outside is refused."""
    tree = tmp_path / "tree"
    (tree / "below").mkdir(parents=True)
    (tree / "file").write_text("file")
    (tree / "1").symlink_to("file")
    os.link(tree / "1", tree / "below" / "2", follow_symlinks=False)
    os.link(tree / "1", tree / "3", follow_symlinks=False)
    path = tmp_path / "x.tar"
    names = ["file", "1", "3", "below/2"]
    subprocess.run(["tar", "-cf", path, "-C", tree, *names], check=True)
    result = Path(stage(stager, path).path)
    assert [os.readlink(result / name) for name in names[1:]] == ["file"] * 3
    (tree / "below" / "up").symlink_to("../file")
    os.link(tree / "below" / "up", tree / "up", follow_symlinks=False)
    subprocess.run(["tar", "-cf", path, "-C", tree, "file", "below/up", "up"], check=True)
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
    assert modes == {"closed": 0o600, "unsaid": 0o644}


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
