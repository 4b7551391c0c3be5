"""Git repositories on disk for tests, and what a tree holds."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
from pathlib import Path


class Repository:
    """A git repository on disk."""

    def __init__(self, top: Path) -> None:
        self.top = top

    def git(self, *words: str | Path) -> str:
        """Call git in it."""
        command = ["git", "-C", self.top, *words]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def write(self, name: str | bytes, content: str | bytes = b"") -> Path:
        """Write a file and its directories."""
        path = self.top / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def commit(self) -> str:
        """Commit everything and return the commit."""
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "x")
        return self.git("rev-parse", "HEAD").strip()


def init(top: Path) -> Repository:
    top.mkdir(parents=True)
    made = Repository(top)
    made.git("init", "--quiet")
    return made


def contents(root: Path) -> dict[str, tuple[str, bytes, bool]]:
    """What a tree holds but for .git: name -> kind, bytes or target, whether it may be run."""
    found = {}
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name != ".git"]
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for name in [*files, *links]:
            path = Path(folder, name)
            mode = path.lstat().st_mode
            shown = str(path.relative_to(root))
            if stat.S_ISLNK(mode):
                found[shown] = ("link", os.fsencode(os.readlink(path)), False)
            elif stat.S_ISREG(mode) and name != ".git":
                found[shown] = ("file", path.read_bytes(), bool(mode & stat.S_IXUSR))
    return found


def digest(root: Path) -> str:
    """A hash of everything below a directory: names, modes, bytes."""
    found = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        found.update(f"{path.relative_to(root)} {path.lstat().st_mode}".encode())
        if path.is_file() and not path.is_symlink():
            found.update(path.read_bytes())
    return found.hexdigest()
