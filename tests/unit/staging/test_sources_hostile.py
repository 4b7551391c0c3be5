"""Archives made by hand to do harm, and what somebody planted: nothing is written."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import re
import shutil
import stat
import struct
import tarfile
import time
import tracemalloc
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.errors import InputError, StagingError
from hpml_orchestrator.records.job import Stage
from hpml_orchestrator.staging import archives, plan
from hpml_orchestrator.staging.archives import TarSource
from hpml_orchestrator.staging.copy import CopyOptions, CopyProgress, copy
from hpml_orchestrator.staging.pack import PackRequest, pack
from hpml_orchestrator.staging.request import Retry
from hpml_orchestrator.staging.stage import CopyStager, open_source
from hpml_orchestrator.staging.store import list_staged

if TYPE_CHECKING:
    from collections.abc import Callable

ZERO = bytes(512)
RETRY = Retry(time.sleep, lambda: False)


def refused(stager: CopyStager, path: Path, match: str, *, outside_links: bool = False) -> None:
    """Check that an archive is refused and that nothing of it is left."""
    request = Stage("data", str(path), target="shm", outside_links=outside_links)
    with pytest.raises((StagingError, InputError), match=match):
        stager.stage(request)
    found = list_staged([stager.store("shm").base])
    assert [one for one in found if one.name != "fine"] == []


def member(name: bytes, data: bytes = b"", kind: bytes = b"0", **fields: bytes) -> bytes:
    """A member of a tar with any bytes in its fields; the check sum is right."""
    info = tarfile.TarInfo(name.decode())
    info.mtime, info.size = 1, len(data)
    block = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    block[156:157] = kind
    places = {"mode": 100, "size": 124, "mtime": 136, "link": 157, "magic": 257, "prefix": 345}
    for field, value in fields.items():
        at = places[field]
        block[at : at + len(value)] = value
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + data + bytes(-len(data) % 512)


def pax(**records: str) -> bytes:
    text = b""
    for key, value in records.items():
        rest = f" {key.replace('__', '.')}={value}\n".encode()
        length = len(rest)
        while length != len(rest) + len(str(length)):
            length = len(rest) + len(str(length))
        text += str(length).encode() + rest
    return member(b"PaxHeader", text, b"x")


ONE = member(b"one", b"1" * 600)


@pytest.mark.parametrize(
    ("said", "data"),
    [
        ("sparse member", member(b"x", b"1", b"S")),
        ("sparse member", pax(GNU__sparse__major="1") + member(b"x", b"1")),
        ("unknown type", member(b"x", b"1", b"?")),
        ("negative size", member(b"x", size=b"\xff" * 12)),
        ("unexpected end of data", member(b"x", size=b"77777777777\0")),
        ("negative size", pax(size="-5") + member(b"x")),
        ("absurd size", member(b"x", kind=b"L", size=b"77777777777\0")),
        ("not a whole tar", member(b"p", b"0 path=x\n", b"x") + ONE),
        ("not a whole tar", ONE + pax(path="x")),
        ("absolute name", member(b"././@LongLink", b"/etc/passwd\0", b"L") + ONE),
        ("`..` in the name", member(b"x", prefix=b"../..")),
        ("absolute name", member(b"x", prefix=b"/etc")),
        ("has no name", member(b"")),
        ("twice", member(b"x/") + member(b"x/", b"", b"5") + member(b"x")),
        ("has no name", member(b"/", b"", b"5")),
        ("leaves the tree", member(b"a/x", b"", b"2", link=b"../../y")),
        ("damaged header", ONE + b"x" * 512),
    ],
)
def test_hostile_tars_are_refused(
    stager: CopyStager, tmp_path: Path, said: str, data: bytes
) -> None:
    """Headers that lie, that are not supported, or that would write elsewhere."""
    path = tmp_path / "x.tar"
    path.write_bytes(data + ZERO * 2)
    refused(stager, path, said)


def test_records_for_all_members_take_no_memory(stager: CopyStager, tmp_path: Path) -> None:
    """A small compressed archive can hold any number of large records, which tarfile keeps."""
    path = tmp_path / "x.tar.gz"
    with gzip.open(path, "wb", compresslevel=1) as stream:
        for number in range(10):
            size = 8 << 20
            head = b"%d k%d=" % (size, number)
            stream.write(member(b"g", head + bytes(size - len(head) - 1) + b"\n", b"g"))
        stream.write(ONE + ZERO * 2)
    tracemalloc.start()
    try:
        refused(stager, path, "a header of absurd size")
        assert tracemalloc.get_traced_memory()[1] < 60 << 20
    finally:
        tracemalloc.stop()


def test_a_tar_cut_in_a_member_is_refused(stager: CopyStager, tmp_path: Path) -> None:
    """In its header, its extended header, its contents or their padding."""
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w:", format=tarfile.PAX_FORMAT) as tar:
        for name, size in [("a", 5), ("d" * 150, 600), ("empty", 0), ("ü", 1024)]:
            info = tarfile.TarInfo(name)
            info.size = size
            tar.addfile(info, io.BytesIO(os.urandom(size)))
        end = tar.offset
    with tarfile.open(path) as tar:
        between = {one.offset for one in tar.getmembers()} - {0}
    whole = path.read_bytes()
    for at in set(range(0, end, 128)) - between:
        path.write_bytes(whole[:at])
        refused(stager, path, "not a whole tar archive")


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz"])
def test_a_compressed_tar_cut_anywhere_is_refused(
    stager: CopyStager, tmp_path: Path, kind: str
) -> None:
    """Also behind the last member, where only the decompressor notices."""
    path = make(tmp_path / "x.tar", ("f", {"data": os.urandom(9000)}), mode=f"w:{kind}")
    whole = path.read_bytes()
    for at in [*range(0, len(whole), 700), len(whole) - 40, len(whole) - 1]:
        path.write_bytes(whole[:at])
        refused(stager, path, "not a whole tar archive")


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


SYMBOLIC, HARD = {"type": tarfile.SYMTYPE}, {"type": tarfile.LNKTYPE}


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
        ("below x, which is no", [("x", {**SYMBOLIC, "linkname": "a"}), ("x/y", {"data": b"2"})]),
        ("twice", [("x", {**SYMBOLIC, "linkname": "y"}), ("x", {"data": b"2"})]),
        ("absolute path", [("x", {**SYMBOLIC, "linkname": "/etc"})]),
        ("leaves the tree", [("x", {**SYMBOLIC, "linkname": ".."})]),
        ("leaves the tree", [("a/x", {**SYMBOLIC, "linkname": "../../y"})]),
        ("leaves the tree", [("a/x", {**SYMBOLIC, "linkname": "b/../../../y"})]),
        ("leaves the tree", [("a/x", {**SYMBOLIC, "linkname": "b/../y"})]),
        ("link to nothing", [("x", {**SYMBOLIC, "linkname": ""})]),
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
    for path in Path(plan.__file__).parent.rglob("*.py"):
        text = path.read_text("utf-8")
        assert not re.findall(r"\.extract(?:all)?\(|extractfile|unpack_archive", text), path


def test_too_many_members_are_refused(
    stager: CopyStager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count of members has a limit."""
    monkeypatch.setattr(archives, "MOST_MEMBERS", 3)
    refused(stager, make(tmp_path / "x.tar", *[(f"f{n}", {}) for n in range(4)]), "more than 3")


def zipped(
    path: Path, change: Callable[[zipfile.ZipInfo], object], data: bytes = b"1" * 50
) -> Path:
    with zipfile.ZipFile(path, "w") as target:
        info = zipfile.ZipInfo("x")
        info.compress_type = zipfile.ZIP_DEFLATED
        info.create_system = 3
        info.external_attr = 0o100644 << 16
        change(info)
        target.writestr(info, data)
    return path


def set_to(field: str, value: object) -> Callable[[zipfile.ZipInfo], object]:
    return lambda info: setattr(info, field, value)


LINK = (stat.S_IFLNK | 0o777) << 16


@pytest.mark.parametrize(
    ("said", "change", "data"),
    [
        ("absolute name", set_to("filename", "/etc/x"), b"1"),
        ("`..` in the name", set_to("filename", "a/../../x"), b"1"),
        ("device, a fifo", set_to("external_attr", (stat.S_IFCHR | 0o666) << 16), b"1"),
        ("device, a fifo", set_to("external_attr", (stat.S_IFIFO | 0o666) << 16), b"1"),
        ("absolute path", set_to("external_attr", LINK), b"/etc/passwd"),
        ("leaves the tree", set_to("external_attr", LINK), b"../x"),
        ("NUL in a link", set_to("external_attr", LINK), b"a\0b"),
        ("link to nothing", set_to("external_attr", LINK), b""),
        ("absurd length", set_to("external_attr", LINK), b"a" * 5000),
        ("method 12", set_to("compress_type", zipfile.ZIP_BZIP2), b"1" * 500),
    ],
)
def test_hostile_members_of_a_zip_are_refused(
    stager: CopyStager,
    tmp_path: Path,
    said: str,
    change: Callable[[zipfile.ZipInfo], object],
    data: bytes,
) -> None:
    """Names and links that lead out, devices, and what cannot be read here."""
    refused(stager, zipped(tmp_path / "x.zip", change, data), said)


def patched(path: Path, magic: bytes, at: int, value: bytes) -> Path:
    """Overwrite a field of the first header of a kind."""
    data = bytearray(path.read_bytes())
    begin = data.index(magic) + at
    data[begin : begin + len(value)] = value
    path.write_bytes(data)
    return path


CENTRAL, LOCAL, END = b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06"


@pytest.mark.parametrize(
    ("said", "magic", "at", "value"),
    [
        ("is encrypted", CENTRAL, 8, b"\x01"),
        ("is damaged: Bad CRC", CENTRAL, 16, b"\x00\x00\x00\x00"),
        ("is damaged", CENTRAL, 24, struct.pack("<L", 5000)),
        ("is damaged: Bad CRC", CENTRAL, 24, struct.pack("<L", 2999)),
        ("is damaged", LOCAL, 30 + 1, b"\xff\xff\xff\xff"),
        ("Bad magic number", LOCAL, 0, b"PK\x09\x09"),
        ("is damaged", LOCAL, 26, struct.pack("<H", 30000)),
        ("not a whole zip archive", CENTRAL, 0, b"PK\x09\x09"),
        ("not a whole zip archive", END, 12, struct.pack("<L", 1 << 20)),
        ("not a whole zip archive", END, 0, b"PK\x09\x09"),
    ],
)
def test_damaged_zips_are_refused(
    stager: CopyStager, tmp_path: Path, said: str, magic: bytes, at: int, value: bytes
) -> None:
    """Every field that is relied on is checked."""
    path = zipped(tmp_path / "x.zip", lambda _: None, b"12345" * 600)
    refused(stager, patched(path, magic, at, value), said)


@pytest.mark.parametrize("kind", ["gz", "zip"])
def test_absurd_ratios_are_refused(
    stager: CopyStager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """An archive of zeros is given up though there is room for all of it; a small one is not."""
    monkeypatch.setattr(plan, "_HARMLESS_BYTES", 4 << 20)
    for size, fine in ((4 << 20, True), ((4 << 20) + 1, False)):
        path = tmp_path / f"{size}.{'tar.gz' if kind == 'gz' else 'zip'}"
        if kind == "gz":
            with tarfile.open(path, "w:gz") as tar:
                info = tarfile.TarInfo("zeros")
                info.size = size
                tar.addfile(info, io.BytesIO(bytes(size)))
        else:
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
                target.writestr("zeros", bytes(size))
        if fine:
            assert stager.stage(Stage("fine", str(path), target="shm")).bytes == size
            stager.cleanup()
        else:
            refused(stager, path, "bytes.? would become 4.0 MiB or more")


def test_a_bomb_of_one_member_is_not_read(tmp_path: Path) -> None:
    """Its header is enough: what follows need not even be there."""
    path = tmp_path / "x.tar.gz"
    path.write_bytes(gzip.compress(member(b"x", size=b"77777777777\0")))
    with pytest.raises(StagingError, match=r"would become 8.0 GiB or more"):
        TarSource(str(path), "tar", RETRY, most_bytes=1 << 50).plan()


def test_a_zip_cut_anywhere_is_refused(stager: CopyStager, tmp_path: Path) -> None:
    """The directory is at the end and lists all members."""
    path = zipped(tmp_path / "x.zip", lambda _: None, os.urandom(500))
    whole = path.read_bytes()
    for at in range(0, len(whole), 19):
        path.write_bytes(whole[:at])
        refused(stager, path, "not a whole zip archive")


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
    opened = open_source(Stage("data", str(path), target="shm"), retry, 1 << 40)
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
