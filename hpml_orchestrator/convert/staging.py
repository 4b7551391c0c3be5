"""Recognise copies of data to a node's own disk, and where in arguments they are used."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.convert.values import has_hole

if TYPE_CHECKING:
    from hpml_orchestrator.convert.findings import Report
    from hpml_orchestrator.convert.values import Expander

__all__ = ["Staged", "Staging", "is_local"]

_LOCAL_DIRECTORIES = ("/tmp", "/dev/shm", "/local", "/localscratch", "/var/tmp")  # noqa: S108
_COPIES = frozenset({"cp", "rsync", "tar", "unzip", "mv", "ln"})


@dataclass
class Staged:
    """One entry of `stage`.

    Attributes:
        place: the path on the node that the script uses, normalised; a directory.
        entry: file name within it where the source is one file, else empty.
    """

    name: str
    source: str
    kind: str
    target: str
    place: str
    line: int
    entry: str = ""
    used: bool = False


def is_local(path: str, expander: Expander) -> bool:
    """Whether a path lies on the node's own disk or in its RAM."""
    holes = expander.holes_of(path)
    if holes and path.startswith("\0"):
        return holes[0].kind == "local"
    return path.startswith(tuple(f"{one}/" for one in _LOCAL_DIRECTORIES)) or (
        path in _LOCAL_DIRECTORIES
    )


class Staging:
    """The data that a script brings to its nodes.

    Args:
        expander: knows the holes of paths.
        report: takes what cannot be carried.
    """

    def __init__(self, expander: Expander, report: Report) -> None:
        self.expander = expander
        self.report = report
        self.entries: list[Staged] = []
        self.made: set[str] = set()  # directories that the script made

    def path(self, text: str) -> str:
        """Return a path in one form: absolute, variables of the local disk told as one."""
        marked = text
        for hole in self.expander.holes_of(text):
            if hole.kind == "local":
                marked = re.sub("\0\\d+\0", "\x01", marked, count=1)
                break
        if not marked.startswith(("/", "\x01", "\0")):
            marked = os.path.join(self.expander.directory, marked)
            return self.path(marked) if "\0" in marked and "\x01" not in marked else marked
        return os.path.normpath(marked)

    def directory(self, text: str) -> None:
        """Remember a directory that the script makes."""
        self.made.add(self.path(text))

    def take(self, words: list[str], line: int, source: str) -> bool:
        """Make entries of a copy to the node; False where the command is none."""
        name = os.path.basename(words[0])
        if name not in _COPIES:
            return False
        if name == "tar":
            return self._tar(words[1:], line, source)
        if name not in ("cp", "rsync"):
            return self._refused(words, line, source)
        options = [word for word in words[1:] if word.startswith("-")]
        paths = [word for word in words[1:] if not word.startswith("-")]
        if len(paths) < 2:  # noqa: PLR2004 - a source and a destination
            return False
        *sources, destination = paths
        if not is_local(destination, self.expander):
            if any(is_local(one, self.expander) for one in sources):
                self.report.lost(
                    line,
                    source,
                    "what is left on the node is removed with the job",
                    "have the program write to {run.dir}, which stays and all nodes see",
                )
                return True
            return False
        tree = name == "rsync" or any(
            re.match(r"-[a-zA-Z]*[rRa]|--rec|--arch", one) for one in options
        )
        for one in sources:
            self._copied(name, one, destination, line, source, tree=tree, many=len(sources) > 1)
        return True

    def _refused(self, words: list[str], line: int, source: str) -> bool:
        if not any(is_local(word, self.expander) for word in words[1:]):
            return False
        self.report.lost(
            line,
            source,
            f"hpml brings files, trees and tar archives to a node; this is {words[0]}",
            "make a tar archive of it once, and an entry of stage with it",
        )
        return True

    def _copied(
        self,
        program: str,
        origin: str,
        destination: str,
        line: int,
        source: str,
        *,
        tree: bool,
        many: bool,
    ) -> None:
        if has_hole(origin) or "://" in origin:
            self.report.lost(
                line,
                source,
                f"{self.expander.source(origin)} is known in the job only",
                "name the directory that holds it in an entry of stage",
            )
            return
        place = self.path(destination)
        base = os.path.basename(origin.rstrip("/"))
        into = (
            many
            or destination.endswith(("/", "/."))
            or place in self.made
            or place in ("\x01", *_LOCAL_DIRECTORIES)
        )
        contents = origin.endswith("/.") or (program == "rsync" and origin.endswith("/"))
        if tree and not re.search(r"\.(tar|tgz|zip|gz|bz2|xz|h5|hdf5|npz|pt|csv|json|txt)$", base):
            if into and not contents:
                place = os.path.join(place, base)
            self._add(origin.removesuffix("/.").rstrip("/") or "/", "auto", place, line, "")
            return
        entry = base if into else os.path.basename(place)
        if entry != base:
            self.renamed(entry, base, line, source)
        place = place if into else os.path.dirname(place)
        archive = re.search(r"\.(tar|tgz|tar\.\w+)$", base)
        self._add(origin, "file" if archive else "auto", place, line, entry, file=base)

    def renamed(self, entry: str, base: str, line: int, source: str) -> None:
        """Say that a file keeps its name."""
        self.report.changed(
            line, source, f"the file keeps its name on the node: {base}, not {entry}"
        )

    def _tar(  # noqa: C901, PLR0912 - one branch per option of tar
        self, words: list[str], line: int, source: str
    ) -> bool:
        archive = directory = ""
        extracts = False
        position = 0
        members: list[str] = []
        while position < len(words):
            word = words[position]
            position += 1
            following = words[position] if position < len(words) else ""
            if word in ("-C", "--directory"):
                directory, position = following, position + 1
            elif word.startswith("--directory="):
                directory = word.partition("=")[2]
            elif word.startswith("--file="):
                archive = word.partition("=")[2]
            elif word in ("-f", "--file"):
                archive, position = following, position + 1
            elif word in ("--extract", "--get"):
                extracts = True
            elif re.fullmatch(r"-?[a-zA-Z]+", word) and (word.startswith("-") or position == 1):
                extracts = extracts or "x" in word
                if word.rstrip().endswith("f"):
                    archive, position = following, position + 1
            elif word.startswith("--strip") or not word.startswith("-"):
                members.append(word)
        directory = directory or self.expander.directory
        if not extracts or not self._on_node(directory):
            return False
        if members or not archive or archive == "-":
            self.report.lost(
                line,
                source,
                "hpml unpacks an archive as a whole, from a file",
                "write an entry of stage with kind: tar",
            )
            return True
        place = self.path(directory)
        held = self.path(archive)
        for one in self.entries:
            if one.entry and os.path.join(one.place, one.entry) == held:
                one.kind, one.entry, one.place = "tar", "", place
                return True
        if has_hole(archive):
            self.report.lost(
                line,
                source,
                "the archive is known in the job only",
                "write an entry of stage with kind: tar",
            )
            return True
        kind = "auto" if re.search(r"\.(tar|tar\.gz|tgz|tar\.xz|tar\.bz2)$", archive) else "tar"
        self._add(archive, kind, place, line, "")
        return True

    def _on_node(self, directory: str) -> bool:
        path = self.path(directory)
        return path.startswith("\x01") or is_local(path, self.expander)

    def _add(
        self, origin: str, kind: str, place: str, line: int, entry: str, *, file: str = ""
    ) -> None:
        origin = os.path.normpath(os.path.join(self.expander.directory, origin))
        if any(one.source == origin and one.place == place for one in self.entries):
            return
        stem = re.sub(r"\.(tar|gz|tgz|xz|bz2|zip|h5|csv)\b", "", file or os.path.basename(origin))
        name = re.sub(r"[^a-z0-9_]+", "_", stem.lower()).strip("_")[:28] or "data"
        name = name if name[0].isalpha() else f"d_{name}"
        taken = {one.name for one in self.entries}
        unique, number = name, 2
        while unique in taken:
            unique, number = f"{name}_{number}", number + 1
        target = "shm" if place.startswith("/dev/shm") else "local"  # noqa: S108
        self.entries.append(Staged(unique, origin, kind, target, place, line, entry))

    def replaced(self, value: str) -> str:
        """Return an argument with paths of staged data told as `{stage.NAME}`."""
        option, equals, rest = value.partition("=")
        if equals and re.fullmatch(r"-{0,2}[\w.-]+", option) and "\0" not in option:
            return f"{option}={self._replaced(rest)}"
        return self._replaced(value)

    def _replaced(self, value: str) -> str:
        if not value or not (value.startswith(("/", "\0", ".")) or "/" in value):
            return value
        path = self.path(value)
        found = [
            one for one in self.entries if path == one.place or path.startswith(f"{one.place}/")
        ]
        found.sort(key=lambda one: (len(one.place), path == os.path.join(one.place, one.entry)))
        exact = [one for one in found if one.entry and path == os.path.join(one.place, one.entry)]
        if not found:
            return value
        best = exact[-1] if exact else found[-1]
        if not exact and best.entry and path != best.place:
            return value
        best.used = True
        rest = path[len(best.place) :]
        if best.entry and rest.lstrip("/") == best.entry:
            rest = f"/{os.path.basename(best.source)}"
        return f"{{stage.{best.name}}}{rest}"
