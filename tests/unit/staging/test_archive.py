"""Archives: honest ones arrive whole, malicious and damaged ones not at all."""

from __future__ import annotations

import io
import os
import re
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator import staging
from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging import (
    CopyStager,
    StageRequest,
    StageResult,
    archives,
)
from hpml_orchestrator.staging.inventory import list_staged

Member = tuple[str, dict[str, Any]]


def make(path: Path, *members: Member, mode: Any = "w:") -> Path:
    """Write an archive of (name, fields); `data` is a member's contents."""
    with tarfile.open(path, mode, format=tarfile.PAX_FORMAT) as tar:
        for name, given in members:
            fields = dict(given)
            data = fields.pop("data", b"")
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for field, value in fields.items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(data))
    return path


def stage(stager: CopyStager, path: Path) -> StageResult:
    return stager.stage(StageRequest("data", str(path), kind="tar", target="shm"))


def refused(stager: CopyStager, path: Path, match: str) -> None:
    """Check that an archive is refused and that nothing of it is left."""
    with pytest.raises(StagingError, match=match):
        stage(stager, path)
    assert list_staged([stager.area("shm").store.base]) == []


def test_implied_directories_and_odd_names(stager: CopyStager, tmp_path: Path) -> None:
    """Directories that are not listed, repeated ones, `./` and odd bytes are all fine."""
    path = make(
        tmp_path / "x.tar",
        ("./a//b/\udcff\n-rf", {"data": b"1"}),
        ("a/b", {"type": tarfile.DIRTYPE, "mode": 0o750}),
        ("a/b/", {"type": tarfile.DIRTYPE, "mode": 0o700, "mtime": 77}),
        ("empty", {"data": b""}),
    )
    staged = Path(stage(stager, path).path)
    assert (staged / "a" / "b" / "\udcff\n-rf").read_bytes() == b"1"
    assert stat.S_IMODE(os.stat(staged / "a" / "b").st_mode) == 0o700
    assert os.stat(staged / "a" / "b").st_mtime == 77


LINK, HARD = {"type": tarfile.SYMTYPE}, {"type": tarfile.LNKTYPE}


@pytest.mark.parametrize(
    ("said", "members"),
    [
        ("absolute name", [("/etc/x", {"data": b"1"})]),
        ("`..` in the name", [("../x", {"data": b"1"})]),
        ("`..` in the name", [("a/../../x", {"data": b"1"})]),
        ("`..` in the name", [("a/..", {"type": tarfile.DIRTYPE})]),
        ("NUL in the name", [("é", {"pax_headers": {"path": "a\0b"}})]),
        ("twice", [("x", {"data": b"1"}), ("./x", {"data": b"2"})]),
        ("twice", [("x/y", {"data": b"1"}), ("x", {"data": b"2"})]),
        ("below x, which is no", [("x", {"data": b"1"}), ("x/y", {"data": b"2"})]),
        ("below x, which is no", [("x", {**LINK, "linkname": "a"}), ("x/y", {"data": b"2"})]),
        ("twice", [("x", {**LINK, "linkname": "y"}), ("x", {"data": b"2"})]),
        ("absolute path", [("x", {**LINK, "linkname": "/etc"})]),
        ("leaves the tree", [("x", {**LINK, "linkname": ".."})]),
        ("leaves the tree", [("a/x", {**LINK, "linkname": "../../y"})]),
        ("leaves the tree", [("a/x", {**LINK, "linkname": "b/../../../y"})]),
        ("leaves the tree", [("a/x", {**LINK, "linkname": "b/../y"})]),
        ("link to nothing", [("x", {**LINK, "linkname": ""})]),
        (
            "not a file before it",
            [("x", {**HARD, "linkname": "later"}), ("later", {"data": b"1"})],
        ),
        ("absolute name", [("x", {**HARD, "linkname": "/etc/passwd"})]),
        ("`..` in the name", [("x", {**HARD, "linkname": "../../etc/passwd"})]),
        ("device, a fifo", [("x", {"type": tarfile.CHRTYPE})]),
        ("device, a fifo", [("x", {"type": tarfile.BLKTYPE})]),
        ("device, a fifo", [("x", {"type": tarfile.FIFOTYPE})]),
        ("device, a fifo", [("x", {"type": b"Z"})]),
        ("nested deeper", [("/".join("a" * 300), {"data": b"1"})]),
    ],
)
def test_malicious_members_are_refused(
    stager: CopyStager, tmp_path: Path, said: str, members: list[Member]
) -> None:
    """What could write or point outside, or overwrite, is refused before anything is written."""
    refused(stager, make(tmp_path / "x.tar", *members), said)


def test_damaged_compressed_data_is_noticed(stager: CopyStager, tmp_path: Path) -> None:
    """A checksum that does not fit is an error even when all members could be read."""
    path = make(tmp_path / "x.tar", ("f", {"data": b"1" * 512}), mode="w:gz")
    with open(path, "r+b") as stream:
        stream.seek(-8, os.SEEK_END)
        stream.write(b"\0\0\0\0")
    refused(stager, path, "CRC check failed")


@pytest.mark.parametrize("content", [b"", b"no archive at all", b"\x1f\x8bnonsense", b"x" * 4096])
def test_what_is_no_archive_is_refused(stager: CopyStager, tmp_path: Path, content: bytes) -> None:
    """Any other file is an error that names it."""
    path = tmp_path / "x.tar"
    path.write_bytes(content)
    refused(stager, path, r"x\.tar")


def test_tarfile_is_not_relied_on() -> None:
    """Its filters have been got round before: it reads headers, and never writes a member."""
    for path in Path(staging.__file__).parent.rglob("*.py"):
        text = path.read_text("utf-8")
        assert not re.findall(r"\.extract(?:all)?\(|extractfile|unpack_archive", text), path


def test_too_many_members_are_refused(
    stager: CopyStager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count of members has a limit."""
    monkeypatch.setattr(archives, "MOST_MEMBERS", 3)
    refused(stager, make(tmp_path / "x.tar", *[(f"f{n}", {}) for n in range(4)]), "more than 3")
