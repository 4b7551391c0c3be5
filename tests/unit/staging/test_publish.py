"""How data get their name: on disk before, at once, and through nothing that somebody planted."""

from __future__ import annotations

import contextlib
import os
import shutil
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.packing.shards import PackRequest, pack
from hpml_orchestrator.staging.copy import CopyOptions, copy
from hpml_orchestrator.staging.faults import Retry
from hpml_orchestrator.staging.progress import CopyProgress
from hpml_orchestrator.staging.request import Bases, StageRequest
from hpml_orchestrator.staging.stage import CopyStager
from hpml_orchestrator.staging.supply import open_source


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

    stager = CopyStager("1", bases=Bases(shm=str(base)))
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "replace", renamed)
    result = stager.stage(StageRequest("data", str(source), target="shm"))
    monkeypatch.undo()
    data = os.path.realpath(result.path)
    directory = os.path.dirname(data)
    named = events.index(("to", f"{directory}/.data.manifest"))
    (_, written) = events[named - 1]
    published = events.index(("to", data))
    assert events.index(("fsync", written)) < named < published
    assert ("fsync", directory) in events[published:]
    assert ".partial-" in events[published - 1][1]
    stager.cleanup()


def sources(source: Path, tmp_path: Path) -> dict[str, Path]:
    """The same tree as all kinds of sources that are copied."""
    with tarfile.open(tmp_path / "data.tar", "w") as tar:
        tar.add(source, ".")
    with tarfile.open(tmp_path / "data.tar.gz", "w:gz") as tar:
        tar.add(source, ".")
    shutil.make_archive(str(tmp_path / "data"), "zip", source)
    pack(PackRequest(str(source), str(tmp_path / "data.pack"), 1 << 20))
    kinds = ("tar", "tar.gz", "zip", "pack")
    return {"tree": source, **{kind: tmp_path / f"data.{kind}" for kind in kinds}}


def fill(path: Path, target: Path, processes: int) -> None:
    """Copy into a directory as the stager does."""
    retry = Retry(time.sleep, lambda: False)
    opened = open_source(StageRequest("data", str(path), target="shm"), retry, 1 << 40)
    with contextlib.closing(opened):
        copy(
            opened.plan(),
            opened,
            str(target),
            options=CopyOptions(processes=processes),
            retry=retry,
            progress=CopyProgress(None),
        )


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("kind", ["tree", "tar", "tar.gz", "zip", "pack"])
@pytest.mark.parametrize("planted", ["link", "dangling link", "file", "directory link"])
def test_nothing_is_written_through_what_somebody_planted(
    source: Path, tmp_path: Path, kind: str, planted: str, processes: int
) -> None:
    """A link or file in place of a file, a link in place of a directory: all are refused."""
    victim = tmp_path / "victim"
    (victim / "deep").mkdir(parents=True)
    (victim / "file").write_text("precious")
    target = tmp_path / "target"
    target.mkdir()
    if planted == "link":
        (target / "one.bin").symlink_to(victim / "file")
    elif planted == "dangling link":
        (target / "one.bin").symlink_to(victim / "new")
    elif planted == "file":
        os.link(victim / "file", target / "one.bin")
    else:
        (target / "a").symlink_to(victim)
    with pytest.raises((StagingError, FileExistsError), match="File exists"):
        fill(sources(source, tmp_path)[kind], target, processes)
    assert (victim / "file").read_text() == "precious"
    assert sorted(os.listdir(victim)) == ["deep", "file"]
    assert os.listdir(victim / "deep") == []
