"""Copies of data to the node's own disk become `stage`, copies of results from it `collect`."""

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
_UNPACK = re.compile(r"tar -?[a-z]*x[a-z]*f (\S+)(?: (?:-C |--directory[ =])(\S+))?")
_PLAIN_OPTION = re.compile(  # copies all of the source, as it is
    r"-[arRvzhPLtlpogdDWuHf]+|--(progress|archive|recursive|info=\S+|stats|partial|verbose)"
)
_OUTPUT = re.compile(  # options and variables whose values a program usually writes to
    r"-{0,2}([\w-]*[_-])?(out|outputs?|saves?|ckpts?|checkpoints?|logs?|results?)"
    r"([_-]?(dir|directory|path|folder|root|to))?",
    re.IGNORECASE,
)


@dataclass
class Staged:
    """One entry of `stage`.

    Attributes:
        place: the directory on the node that the script uses.
        file: its name there if the source is one file, else empty.
        is_used: whether an argument or a variable names it.
    """

    name: str
    source: str
    kind: str
    place: str
    file: str = ""
    is_used: bool = False

    def entry(self, source: str) -> dict[str, str]:
        """Return it as the job file has it."""
        entry = {"name": self.name, "source": source}
        entry |= {"kind": self.kind} if self.kind != "auto" else {}
        return entry | ({"target": "shm"} if self.place.startswith("/dev/shm") else {})  # noqa: S108


@dataclass(frozen=True)
class _Result:
    """A file or directory on the node that the script copies back."""

    place: str
    target: str
    line: int
    text: str

    @property
    def source(self) -> str:
        """Its path as `collect` has it."""
        return HOLE.sub(lambda match: f"{{env.{match[1].strip(chr(34))[1:]}}}", self.place)


class Copies:
    """What a script copies to its nodes and back.

    Attributes:
        staged: entries of `stage`.
        results: what is copied back.
        directory: the script's current directory if that is on the node's own disk, else empty.
    """

    def __init__(self, values: Values) -> None:
        self.values = values
        self.staged: list[Staged] = []
        self.results: list[_Result] = []
        self.directory = ""
        self._made: set[str] = set()  # directories that the script makes

    def path(self, text: str) -> str:
        """Return an absolute path; it may start with the variable of a node's directory."""
        if not text.startswith(("\0", "/")):
            text = os.path.join(self.directory or self.values.directory, text)
        text = re.sub('^\0"?\\$\\{?(\\w+)\\}?"?\0', '\0"$\\1"\0', text)
        return os.path.normpath(text)

    def is_local(self, text: str) -> bool:
        """Whether a path is on the node's own disk or in its RAM."""
        path = self.path(text)
        return bool(_ROOT.match(path) or _root_variable(path))

    def take(self, words: Sequence[str]) -> bool:
        """Add entries for a copy to the node; return False for any other command."""
        name = os.path.basename(words[0])
        if name == "tar":
            return self._unpack(" ".join(words))
        options = [word for word in words[1:] if word.startswith("-")]
        paths = [word for word in words[1:] if not word.startswith("-")] or [""]
        *sources, target = map(self.values.at_submission, paths)
        if name == "mkdir":
            self._made |= {self.path(path) for path in (*sources, target)}
        if name not in ("cp", "rsync") or not sources or not self.is_local(target):
            return False
        if any(has_hole(word) or ":" in word or _ROOT.match(word) for word in sources):
            return False
        known = self.values.directory or all(word.startswith("/") for word in sources)
        if not (known and all(map(_PLAIN_OPTION.fullmatch, options))):
            return False
        place = self.path(target)
        tree = name == "rsync" or any(re.match(r"-[a-zA-Z]*[rRa]|--rec|--arch", o) for o in options)
        into = len(sources) > 1 or target.endswith(("/", "/.")) or place in self._made
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

    def _unpack(self, command: str) -> bool:
        """Read `tar -xf ARCHIVE -C DIRECTORY`, and nothing else."""
        match = _UNPACK.fullmatch(self.values.at_submission(command))
        place = match[2] or self.values.directory if match else ""
        if match is None or not self.is_local(place):
            return False
        place, archive = self.path(place), self.path(match[1])
        for entry in self.staged:  # an archive that was copied first
            if entry.file and os.path.join(entry.place, entry.file) == archive:
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

    def decline_unless_used(self, values: Iterable[str]) -> None:
        """Stage nothing unless arguments and exports name all of it, and only it.

        A program may also find data by a parent directory, or write results to the same directory.
        """
        values = list(values)
        for value in values:
            self.replaced(value)
        paths = [value.partition("=")[2] or value for value in values if value[:1] != "-"]
        results = [result.place for result in self.results]
        others = [*(self.path(path) for path in paths if self.is_local(path)), *results]
        around = any(e.place.startswith(f"{one}/") for e in self.staged for one in others)
        options = ["", *values]
        outputs = [
            self.path(path)
            for before, value in zip(options, values, strict=False)
            for option, path in [(before, value), value.partition("=")[::2]]
            if path and _OUTPUT.fullmatch(option)
        ]
        written = any(
            f"{one}/".startswith(f"{e.place}/") for e in self.staged for one in (*results, *outputs)
        )
        if around or written or not all(entry.is_used for entry in self.staged):
            self.staged.clear()

    def take_back(self, words: list[str], line: int, text: str) -> None:
        """Add a copy of results.

        Raises:
            InputError: `collect` cannot copy the same.
        """
        options = [word for word in words[1:] if word.startswith("-")]
        *sources, target = [word for word in words[1:] if not word.startswith("-")] or [""]
        # A directory that is named after the job: collect makes one for each run.
        target = re.sub("/[^/]*\0[^\0]*JOB_?ID[^/]*", "", target.rstrip("/")) or "."
        target = self.values.at_submission(target)
        plain = words[0] in ("cp", "rsync", "mv") and all(map(_PLAIN_OPTION.fullmatch, options))
        known = target.startswith("/") or self.values.directory
        if not (plain and known and sources) or has_hole(target) or ":" in target:
            raise _lost_results(line, text)
        for source in sources:
            place = self.path(self.values.at_submission(source).removesuffix("/."))
            variable = _root_variable(place)
            is_root = place == variable or _ROOT.fullmatch(place)  # with all else on the disk
            changed = {*hole_names(variable)} & self.values.variables.keys()
            if is_root or changed or not self.is_local(place) or has_hole(place[len(variable) :]):
                raise _lost_results(line, text)
            target = os.path.normpath(os.path.join(self.values.directory, target))
            self.results.append(_Result(place, target, line, text))

    def replaced(self, value: str) -> str:
        """Return a value with a placeholder in place of the path of staged data."""
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
        best.is_used = True
        rest = f"/{os.path.basename(best.source)}" if exact else path[len(best.place) :]
        return f"{{stage.{best.name}}}{rest}"


def _root_variable(path: str) -> str:
    """Return the variable of a node's directory that a path starts with; empty if none."""
    match = HOLE.match(path)
    return match[0] if match and hole_names(match[0])[0] in NODE_DIRECTORIES else ""


def _lost_results(line: int, text: str) -> InputError:
    problem = f"line {line}: {shown(text)}: `collect` cannot copy back the same files"
    hint = "copy a file or directory below $TMPDIR, /tmp or /dev/shm with cp -r or rsync -a"
    return InputError(problem, hint=hint)
