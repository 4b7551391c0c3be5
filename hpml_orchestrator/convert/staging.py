"""Recognise copies of data to the node's own disk, and the arguments that use them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.convert.values import has_hole, holes

if TYPE_CHECKING:
    from hpml_orchestrator.convert.report import Report
    from hpml_orchestrator.convert.values import Values

__all__ = ["Staged", "Staging", "is_local"]

_LOCAL = re.compile(r"/(tmp|dev/shm|local|localscratch|var/tmp)(/|$)")
_FILE = re.compile(r"\.(tar|tgz|zip|gz|bz2|xz|h5|hdf5|npz|pt|csv|json|txt)$")
_ARCHIVE = re.compile(r"\.(tar|tgz|tar\.\w+)$")


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
    target: str
    place: str
    line: int
    text: str
    file: str = ""
    used: bool = False


def is_local(path: str) -> bool:
    """Whether a path lies on the node's own disk or in its RAM."""
    kinds = [kind for kind, _ in holes(path)]
    return kinds[:1] == ["local"] if path.startswith("\0") else bool(_LOCAL.match(path))


class Staging:
    """The data that a script copies to its nodes."""

    def __init__(self, values: Values, report: Report) -> None:
        self.values = values
        self.report = report
        self.entries: list[Staged] = []
        self.made: set[str] = set()  # directories that the script makes

    def path(self, text: str) -> str:
        """Return an absolute path; all spellings of the local disk become one."""
        if text.startswith("\0") and is_local(text):
            text = re.sub("\0[^\0]*\0", "\x01", text, count=1)
        elif not text.startswith(("/", "\0", "\x01")):
            return self.path(os.path.join(self.values.directory, text))
        return os.path.normpath(text)

    def take(self, words: list[str], line: int, text: str) -> bool:
        """Make entries of a copy to the node; False for any other command."""
        name = os.path.basename(words[0])
        options = [word for word in words[1:] if word.startswith("-")]
        paths = [word for word in words[1:] if not word.startswith("-")]
        if name == "tar":
            return self._tar(words[1:], line, text)
        if name == "mkdir":
            self.made |= {self.path(path) for path in paths}
        if name not in ("cp", "rsync") or len(paths) < 2:  # noqa: PLR2004 - from and to
            return False
        *sources, destination = paths
        if not is_local(self.path(destination).replace("\x01", '\0"$TMPDIR"\0')) or any(
            has_hole(source) or "://" in source or is_local(source) for source in sources
        ):
            return False
        tree = name == "rsync" or any(re.match(r"-[a-zA-Z]*[rRa]|--rec|--arch", o) for o in options)
        place = self.path(destination)
        into = len(sources) > 1 or destination.endswith(("/", "/.")) or place in self.made
        into = into or place == "\x01" or bool(re.fullmatch(_LOCAL.pattern, place))
        for source in sources:
            base = os.path.basename(source.rstrip("/"))
            if tree and not _FILE.search(base):
                contents = source.endswith("/.") or (name == "rsync" and source.endswith("/"))
                inside = os.path.join(place, base) if into and not contents else place
                self._add(source.removesuffix("/."), "auto", inside, line, text)
                continue
            file = base if into else os.path.basename(place)
            if file != base:
                why = f"the file keeps its name on the node: {base}, not {file}"
                self.report.changed(line, text, why)
            directory = place if into else os.path.dirname(place)
            kind = "file" if _ARCHIVE.search(base) else "auto"
            self._add(source, kind, directory, line, text, file=file)
        return True

    def _tar(self, words: list[str], line: int, text: str) -> bool:
        archive, directory = _extraction(words)
        place = self.path(directory or self.values.directory)
        if not archive or not (place.startswith("\x01") or is_local(place)):
            return False
        held = self.path(archive)
        for entry in self.entries:
            if entry.file and os.path.join(entry.place, entry.file) == held:
                entry.kind, entry.file, entry.place = "tar", "", place
                return True
        if archive == "-" or has_hole(archive):
            return False
        self._add(archive, "auto" if _ARCHIVE.search(archive) else "tar", place, line, text)
        return True

    def _add(
        self, source: str, kind: str, place: str, line: int, text: str, *, file: str = ""
    ) -> None:
        source = os.path.normpath(os.path.join(self.values.directory, source))
        stem = re.sub(r"\.(tar|gz|tgz|xz|bz2|zip|h5|csv)\b", "", os.path.basename(source))
        name = re.sub(r"[^a-z0-9_]+", "_", stem.lower()).strip("_")[:28] or "data"
        name = name if name[0].isalpha() else f"d_{name}"
        taken = {entry.name for entry in self.entries}
        unique = next(n for n in (name, *(f"{name}_{i}" for i in range(2, 999))) if n not in taken)
        target = "shm" if place.startswith("/dev/shm") else "local"  # noqa: S108
        self.entries.append(Staged(unique, source, kind, target, place, line, text, file))

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


def _extraction(words: list[str]) -> tuple[str, str]:
    """Return archive and directory of a tar that extracts a whole archive; empty for others."""
    archive, directory, extracts = "", "", False
    rest = list(words)
    while rest:
        word = rest.pop(0)
        option, equals, value = word.partition("=")
        if word in ("-C", "--directory") and rest:
            directory = rest.pop(0)
        elif equals and option in ("--directory", "--file"):
            directory, archive = (value, archive) if option == "--directory" else (directory, value)
        elif re.fullmatch(r"--extract|--get|-?[a-zA-Z]+", word) and (
            word.startswith("-") or len(rest) == len(words) - 1
        ):
            extracts = extracts or "x" in word or word == "--get"
            if word.endswith("f") and rest:
                archive = rest.pop(0)
        else:
            return "", ""
    return (archive, directory) if extracts else ("", "")
