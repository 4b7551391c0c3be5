"""Trees to pack, and what tests ask about trees and packs."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path


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
