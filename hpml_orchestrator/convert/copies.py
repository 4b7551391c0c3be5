"""Copies of data to the node's own disk become `stage`, those of results from it `collect`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.convert.values import HOLE, has_hole, hole_names, shown
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.spec.text import NODE_DIRECTORIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpml_orchestrator.convert.values import Values

__all__ = ["LOCAL", "Copies", "Staged"]

LOCAL = re.compile(r"TMPDIR|LOCAL_?SCRATCH|LSCRATCH|JOBFS|/tmp\b|/dev/shm|/localscratch")
"""Matches a line that works on the node's own disk or in its RAM."""

_ROOT = re.compile(r"/(tmp|dev/shm|local|localscratch|var/tmp)(/|$)")
_FILE = re.compile(r"\.(tar|tgz|zip|gz|bz2|xz|h5|hdf5|npz|pt|pth|ckpt|csv|json|txt|log)$")
_ARCHIVE = re.compile(r"\.(tar|tgz|tar\.\w+)$")
_PLAIN_OPTION = re.compile(  # copies all of the source, as it is
    r"-[arRvzhPLtlpogdDWuHf]+|--(progress|archive|recursive|info=\S+|stats|partial|verbose)"
)


@dataclass
class Staged:
    """One entry of `stage`.

    Attributes:
        place: the directory on the node that the script uses.
        file: its name there if the source is one file, else empty.
        used: whether an argument or a variable names it.
    """

    name: str
    source: str
    kind: str
    place: str
    file: str = ""
    used: bool = False

    @property
    def target(self) -> str:
        """Where hpml stages it to."""
        return "shm" if self.place.startswith("/dev/shm") else "local"  # noqa: S108


@dataclass(frozen=True)
class _Result:
    """A file or directory on the node that the script copies back."""

    place: str
    target: str
    line: int
    text: str


class Copies:
    """What a script copies to its nodes and back.

    Attributes:
        staged: entries of `stage`.
        results: what is copied back.
    """

    def __init__(self, values: Values) -> None:
        self.values = values
        self.staged: list[Staged] = []
        self.results: list[_Result] = []
        self.made: set[str] = set()  # directories that the script makes
        self.directory = ""  # where the script is, if that is on the node's own disk

    def path(self, text: str) -> str:
        """Return an absolute path; the variable of a node's directory stays in front."""
        if not text.startswith(("\0", "/")):
            text = os.path.join(self.directory or self.values.directory, text)
        text = re.sub('^\0"?\\$\\{?(\\w+)\\}?"?\0', '\0"$\\1"\0', text)
        return os.path.normpath(text)

    def is_local(self, text: str) -> bool:
        """Whether a path is on the node's own disk or in its RAM."""
        path = self.path(text)
        return bool(_ROOT.match(path) or _root_variable(path))

    def take(self, words: list[str]) -> bool:
        """Make entries of a copy to the node; False for any other command."""
        name = os.path.basename(words[0])
        if name == "tar":
            return self._tar(words[1:])
        options = [word for word in words[1:] if word.startswith("-")]
        paths = [word for word in words[1:] if not word.startswith("-")] or [""]
        *sources, target = map(self.values.now, paths)
        if name == "mkdir":
            self.made |= {self.path(path) for path in (*sources, target)}
        if name not in ("cp", "rsync") or not sources or not self.is_local(target):
            return False
        if any(has_hole(word) or ":" in word or _ROOT.match(word) for word in sources):
            return False
        if not all(word.startswith("/") or self.values.directory for word in sources):
            return False  # relative to a directory that only the job knows
        if not all(map(_PLAIN_OPTION.fullmatch, options)):
            return False
        place = self.path(target)
        tree = name == "rsync" or any(re.match(r"-[a-zA-Z]*[rRa]|--rec|--arch", o) for o in options)
        into = len(sources) > 1 or target.endswith(("/", "/.")) or place in self.made
        into = into or bool(_ROOT.fullmatch(place) or HOLE.fullmatch(place))
        names = [os.path.basename(source.rstrip("/")) for source in sources]
        files = [not tree or bool(_FILE.search(base)) for base in names]
        if any(files) and not into and names != [os.path.basename(place)]:
            return False  # staged files keep their names
        for source, base, is_file in zip(sources, names, files, strict=True):
            if is_file:
                directory = place if into else os.path.dirname(place)
                self._add(source, "file" if _ARCHIVE.search(base) else "auto", directory, base)
            else:
                contents = source.endswith("/.") or (name == "rsync" and source.endswith("/"))
                inside = os.path.join(place, base) if into and not contents else place
                self._add(source.removesuffix("/."), "auto", inside)
        return True

    def _tar(self, words: list[str]) -> bool:
        """Read `tar -xf ARCHIVE -C DIRECTORY`, and nothing else."""
        match = re.fullmatch(
            r"-?[a-z]*x[a-z]*f (\S+)(?: (?:-C |--directory[ =])(\S+))?",
            self.values.now(" ".join(words)),
        )
        place = match[2] or self.values.directory if match else ""
        if match is None or not self.is_local(place):
            return False
        place, held = self.path(place), self.path(match[1])
        for entry in self.staged:  # an archive that was copied first
            if entry.file and os.path.join(entry.place, entry.file) == held:
                entry.kind, entry.file, entry.place = "tar", "", place
                return True
        if match[1] == "-" or has_hole(match[1]) or not self.values.directory:
            return False
        self._add(match[1], "auto" if _ARCHIVE.search(match[1]) else "tar", place)
        return True

    def _add(self, source: str, kind: str, place: str, file: str = "") -> None:
        source = os.path.normpath(os.path.join(self.values.directory, source))
        stem = re.sub(r"\.(tar|gz|tgz|xz|bz2|zip|h5|csv)\b", "", os.path.basename(source))
        name = re.sub(r"[^a-z0-9_]+", "_", stem.lower()).strip("_")[:28] or "data"
        name = name if name[0].isalpha() else f"d_{name}"
        taken = {entry.name for entry in self.staged}
        unique = next(n for n in (name, *(f"{name}_{i}" for i in range(2, 99))) if n not in taken)
        self.staged.append(Staged(unique, source, kind, place, file))

    def places(self, values: Iterable[str]) -> list[str]:
        """Return the paths on the node's own disk that arguments or variables name."""
        paths = [value.partition("=")[2] or value for value in values]
        return [self.path(p) for p in paths if not p.startswith("-") and self.is_local(p)]

    def only_staged(self, words: Iterable[str], values: Iterable[str]) -> bool:
        """Whether a command works only where staged data were, which no other value names."""
        paths, staged = self.places(words), [f"{entry.place}/" for entry in self.staged]
        others = [result.place for result in self.results]
        others += self.places(map(self.replaced, values))
        if any(f"{other}/".startswith(f"{path}/") for path in paths for other in others):
            return False
        return all(
            any(place.startswith(f"{path}/") or f"{path}/".startswith(place) for place in staged)
            for path in paths
        )

    def decline_unless_used(self, values: Sequence[str]) -> bool:
        """Stage nothing if the program may find data where no value names it; whether it is so."""
        for value in values:
            self.replaced(value)
        results = [result.place for result in self.results]
        others = [*self.places(values), *results]
        around = any(e.place.startswith(f"{one}/") for e in self.staged for one in others)
        written = any(f"{one}/".startswith(f"{e.place}/") for e in self.staged for one in results)
        if around or written or not all(entry.used for entry in self.staged):
            self.staged.clear()
        return not self.staged

    def take_back(self, words: list[str], line: int, text: str) -> None:
        """Note a copy of results.

        Raises:
            InputError: `collect` cannot bring the same.
        """
        options = [word for word in words[1:] if word.startswith("-")]
        *sources, target = [word for word in words[1:] if not word.startswith("-")] or [""]
        # A directory that is named after the job: collect makes one for each run.
        target = re.sub("/[^/]*\0[^\0]*JOB_?ID[^/]*", "", target.rstrip("/")) or "."
        target = self.values.now(target)
        plain = words[0] in ("cp", "rsync", "mv") and all(map(_PLAIN_OPTION.fullmatch, options))
        known = target.startswith("/") or self.values.directory
        if not (plain and known and sources) or has_hole(target) or ":" in target:
            raise _lost_results(line, text)
        for source in sources:
            place = self.path(re.sub(r"/[*.]$", "", self.values.now(source)))
            variable = _root_variable(place)
            others = place == variable or _ROOT.fullmatch(place)  # all else on the disk, too
            if others or not self.is_local(place) or has_hole(place[len(variable) :]):
                raise _lost_results(line, text)
            if {*hole_names(variable)} & self.values.variables.keys():
                raise _lost_results(line, text)  # its value at the start of the job is another
            target = os.path.normpath(os.path.join(self.values.directory, target))
            self.results.append(_Result(place, target, line, text))

    def collected(self) -> list[tuple[str, str]]:
        """Return source and target of each result, as `collect` has them."""
        return [
            (HOLE.sub(lambda m: f"{{env.{m[1].strip(chr(34))[1:]}}}", r.place), r.target)
            for r in self.results
        ]

    def replaced(self, value: str) -> str:
        """Return a value with the path of staged data as a placeholder."""
        option, equals, path = value.partition("=")
        if equals and re.fullmatch(r"-{0,2}[\w.-]+", option):
            return f"{option}={self.replaced(path)}"
        if "/" not in value and not value.startswith(("\0", ".")):
            return value
        path = self.path(value)
        inside = [e for e in self.staged if f"{path}/".startswith(f"{e.place}/")]
        exact = [e for e in inside if e.file and path == os.path.join(e.place, e.file)]
        trees = [e for e in inside if not e.file or path == e.place]
        best = max(exact or trees, key=lambda entry: len(entry.place), default=None)
        if best is None:
            return value
        best.used = True
        rest = f"/{os.path.basename(best.source)}" if exact else path[len(best.place) :]
        return f"{{stage.{best.name}}}{rest}"


def _root_variable(path: str) -> str:
    """Return the variable of a node's directory that a path begins with; empty if none."""
    match = HOLE.match(path)
    return match[0] if match and hole_names(match[0])[0] in NODE_DIRECTORIES else ""


def _lost_results(line: int, text: str) -> InputError:
    problem = f"line {line}: {shown(text)}: hpml cannot see what it brings back, and would lose it"
    hint = "copy a file or directory below $TMPDIR, /tmp or /dev/shm with cp -r or rsync -a"
    return InputError(problem, hint=hint)
