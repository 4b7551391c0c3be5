"""Recognise copies of data to the node's own disk, and the arguments that use them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.convert.values import has_hole, hole_kinds

if TYPE_CHECKING:
    from hpml_orchestrator.convert.values import Values

__all__ = ["LOCAL", "Staged", "Staging"]

LOCAL = re.compile(r"TMPDIR|LOCAL_?SCRATCH|JOBFS|/tmp\b|/dev/shm")
"""What a line says that works on the node's own disk or in its RAM."""

_ROOT = re.compile(r"/(tmp|dev/shm|local|localscratch|var/tmp)(/|$)")
_FILE = re.compile(r"\.(tar|tgz|zip|gz|bz2|xz|h5|hdf5|npz|pt|csv|json|txt)$")
_ARCHIVE = re.compile(r"\.(tar|tgz|tar\.\w+)$")
_DISK = '\0"$TMPDIR"\0'


@dataclass
class Staged:
    """One entry of `stage`.

    Attributes:
        place: the directory on the node that the script uses.
        file: its name there where the source is one file, else empty.
        used: whether an argument or a variable names it.
    """

    name: str
    source: str
    kind: str
    place: str
    line: int
    text: str
    file: str = ""
    used: bool = False

    @property
    def target(self) -> str:
        """Where hpml stages it to."""
        return "shm" if self.place.startswith("/dev/shm") else "local"  # noqa: S108


class Staging:
    """The data that a script copies to its nodes."""

    def __init__(self, values: Values) -> None:
        self.values = values
        self.entries: list[Staged] = []
        self.made: set[str] = set()  # directories that the script makes

    def path(self, text: str) -> str:
        """Return an absolute path; all spellings of the node's own disk become one."""
        if hole_kinds(text)[:1] == ["local"] and text.startswith("\0"):
            text = re.sub("\0[^\0]*\0", _DISK, text, count=1)
        elif not text.startswith(("/", "\0")):
            text = os.path.join(self.values.directory, text)
        return os.path.normpath(text)

    def take(self, words: list[str], line: int, text: str) -> bool:
        """Make entries of a copy to the node; False for any other command."""
        name = os.path.basename(words[0])
        if name == "tar":
            return self._tar(words[1:], line, text)
        options = [word for word in words[1:] if word.startswith("-")]
        *sources, target = [word for word in words[1:] if not word.startswith("-")] or [""]
        if name == "mkdir":
            self.made |= {self.path(path) for path in (*sources, target)}
        if name not in ("cp", "rsync") or not sources or not _is_local(self.path(target)):
            return False
        if any(has_hole(source) or "://" in source or _ROOT.match(source) for source in sources):
            return False
        place = self.path(target)
        tree = name == "rsync" or any(re.match(r"-[a-zA-Z]*[rRa]|--rec|--arch", o) for o in options)
        into = len(sources) > 1 or target.endswith(("/", "/.")) or place in (*self.made, _DISK)
        into = into or _ROOT.fullmatch(place) is not None
        names = [os.path.basename(source.rstrip("/")) for source in sources]
        files = [not tree or bool(_FILE.search(base)) for base in names]
        if any(files) and not into and names != [os.path.basename(place)]:
            return False  # staged files keep their names
        for source, base, is_file in zip(sources, names, files, strict=True):
            if is_file:
                directory = place if into else os.path.dirname(place)
                kind = "file" if _ARCHIVE.search(base) else "auto"
                self._add(source, kind, directory, line, text, file=base)
            else:
                contents = source.endswith("/.") or (name == "rsync" and source.endswith("/"))
                inside = os.path.join(place, base) if into and not contents else place
                self._add(source.removesuffix("/."), "auto", inside, line, text)
        return True

    def _tar(self, words: list[str], line: int, text: str) -> bool:
        """Read `tar -xf ARCHIVE -C DIRECTORY`, and nothing else."""
        match = re.fullmatch(
            r"-?[a-z]*x[a-z]*f (\S+)(?: (?:-C |--directory[ =])(\S+))?", " ".join(words)
        )
        place = self.path(match[2] or self.values.directory) if match else ""
        if match is None or not _is_local(place):
            return False
        held = self.path(match[1])
        for entry in self.entries:  # an archive that was copied first
            if entry.file and os.path.join(entry.place, entry.file) == held:
                entry.kind, entry.file, entry.place = "tar", "", place
                return True
        if match[1] == "-" or has_hole(match[1]):
            return False
        self._add(match[1], "auto" if _ARCHIVE.search(match[1]) else "tar", place, line, text)
        return True

    def _add(
        self, source: str, kind: str, place: str, line: int, text: str, *, file: str = ""
    ) -> None:
        source = os.path.normpath(os.path.join(self.values.directory, source))
        stem = re.sub(r"\.(tar|gz|tgz|xz|bz2|zip|h5|csv)\b", "", os.path.basename(source))
        name = re.sub(r"[^a-z0-9_]+", "_", stem.lower()).strip("_")[:28] or "data"
        name = name if name[0].isalpha() else f"d_{name}"
        taken = {entry.name for entry in self.entries}
        unique = next(n for n in (name, *(f"{name}_{i}" for i in range(2, 99))) if n not in taken)
        self.entries.append(Staged(unique, source, kind, place, line, text, file))

    def replaced(self, value: str) -> str:
        """Return a value with the path of staged data as `{stage.NAME}`."""
        option, equals, path = value.partition("=")
        if equals and re.fullmatch(r"-{0,2}[\w.-]+", option):
            return f"{option}={self.replaced(path)}"
        if "/" not in value and not value.startswith(("\0", ".")):
            return value
        path = self.path(value)
        inside = [e for e in self.entries if f"{path}/".startswith(f"{e.place}/")]
        exact = [e for e in inside if e.file and path == os.path.join(e.place, e.file)]
        trees = [e for e in inside if not e.file or path == e.place]
        best = max(exact or trees, key=lambda entry: len(entry.place), default=None)
        if best is None:
            return value
        best.used = True
        rest = f"/{os.path.basename(best.source)}" if exact else path[len(best.place) :]
        return f"{{stage.{best.name}}}{rest}"


def _is_local(path: str) -> bool:
    """Whether an absolute path lies on the node's own disk or in its RAM."""
    return path.startswith(_DISK) or _ROOT.match(path) is not None
