"""Trees to pack, and what tests ask about trees and packs."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest


def contents(root: Path, *, more_mode: int = 0) -> dict[bytes, tuple[object, ...]]:
    """Return what a pack keeps of a tree by name: mode, seconds, bytes and links."""
    found: dict[bytes, tuple[object, ...]] = {}
    inodes: dict[int, bytes] = {}
    top = os.fsencode(root)
    for parent, directories, files in os.walk(top):
        for name in sorted(directories + files):
            path = os.path.join(parent, name)
            info = os.lstat(path)
            key = os.path.relpath(path, top)
            mode, seconds = info.st_mode & 0o777 | more_mode, info.st_mtime_ns // 1_000_000_000
            if stat.S_ISLNK(info.st_mode):
                found[key] = ("link", os.readlink(path), seconds)
            elif stat.S_ISDIR(info.st_mode):
                found[key] = ("directory", mode, seconds)
            else:
                with open(path, "rb") as stream:
                    found[key] = ("file", mode, seconds, info.st_nlink, stream.read())
                first = inodes.setdefault(info.st_ino, key)
                found[key] += (first,)
    return found


def untar(pack: Path, target: Path) -> None:
    """Unpack all archives in their order, as in the documentation."""
    target.mkdir()
    for archive in sorted(pack.glob("*.tar")):
        done = subprocess.run(
            ["tar", "--no-same-owner", "-xpf", archive, "-C", target],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), archive


def left(directory: Path) -> set[str]:
    return set(os.listdir(directory)) if directory.exists() else set()


def finished(pack: Path) -> bool:
    """Return whether a directory has only shards, and no incomplete pack is next to it."""
    names = left(pack)
    shards = {name for name in names if name.startswith("data-") and name.endswith(".tar")}
    beside = {name for name in left(pack.parent) if ".packing-" in name}
    return names == shards | {"tree.tar"} and not beside


def grow(root: Path, files: int, size: int = 3000) -> Path:
    """Write so many files of different contents."""
    for number in range(files):
        path = root / f"{number % 7}" / f"{number:05d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(number.to_bytes(4, "big") * (size // 4))
    return root


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with one of everything that a pack keeps."""
    root = tmp_path / "tree"
    (root / "train" / "a.d").mkdir(parents=True)
    (root / "empty" / "deeper").mkdir(parents=True)
    (root / "train" / "a.jpg").write_bytes(b"jpg" * 700)
    (root / "train" / "a.cls").write_text("7")
    (root / "train" / "a.d" / "x").write_bytes(b"between, in plain order")
    (root / "train" / "none").touch()
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o750)
    (root / "ends").write_bytes(b"e" * 512)
    (root / ("long" * 30)).mkdir()
    (root / ("long" * 30) / ("name" * 40)).write_text("pax")
    (root / "prefix" / ("p" * 90)).mkdir(parents=True)
    (root / "prefix" / ("p" * 90) / ("q" * 90)).write_text("ustar prefix")
    os.link(root / "train" / "a.jpg", root / "also.jpg")
    os.link(root / "train" / "a.jpg", root / "zz.jpg")
    (root / "train" / "link.jpg").symlink_to("a.jpg")
    (root / "up").symlink_to("train/a.d")
    (root / "dangling").symlink_to("nothing/there")
    (root / "far").symlink_to(("x" * 60 + "/") * 3)
    (root / "grüße").write_text("utf-8")
    odd = os.fsencode(root) + b"/odd-\xff\n name"
    with open(odd, "wb") as stream:
        stream.write(b"no utf-8")
    with open(os.fsencode(root) + b"/" + b"\xfe" * 150, "wb") as stream:
        stream.write(b"long and no utf-8")
    with open(root / "sparse", "wb") as stream:
        stream.truncate(3_000_000)
        stream.seek(1_500_000)
        stream.write(b"island")
    (root / "setuid").write_text("s")
    (root / "setuid").chmod(0o755)
    for number, path in enumerate(sorted(root.rglob("*"))):
        when = (1_600_000_000 + number) * 1_000_000_000 + 123_456_789
        os.utime(path, ns=(when, when), follow_symlinks=False)
    (root / "empty").chmod(0o555)
    return root
