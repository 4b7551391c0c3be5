"""Copies of data to the node's own disk become `stage`, those of results from it `collect`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.convert.values import LOCAL_NAMES, has_hole, hole_names, shown
from hpml_orchestrator.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpml_orchestrator.convert.values import Values

__all__ = ["LOCAL", "Copies", "Staged"]

LOCAL = re.compile(r"TMPDIR|LOCAL_?SCRATCH|LSCRATCH|JOBFS|/tmp\b|/dev/shm|/localscratch")
"""Matches a line that works on the node's own disk or in its RAM."""

_ROOT = re.compile(r"/(tmp|dev/shm|local|localscratch|var/tmp)(/|$)")
_FILE = re.compile(r"\.(tar|tgz|zip|gz|bz2|xz|h5|hdf5|npz|pt|pth|ckpt|csv|json|txt|log)$")
_ARCHIVE = re.compile(r"\.(tar|tgz|tar\.\w+)$")
_DISK = '\0"$TMPDIR"\0'
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

    def path(self, text: str) -> str:
        """Return an absolute path; all spellings of the node's own disk become one."""
        if text.startswith("\0") and hole_names(text)[0] in LOCAL_NAMES:
            text = re.sub("\0[^\0]*\0", _DISK, text, count=1)
        elif not text.startswith("\0"):
            text = os.path.join(self.values.directory, text)
        return os.path.normpath(text)

    def is_local(self, text: str) -> bool:
        """Whether a path is on the node's own disk or in its RAM."""
        path = self.path(text)
        return path.startswith(_DISK) or _ROOT.match(path) is not None

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
        into = len(sources) > 1 or target.endswith(("/", "/.")) or place in (*self.made, _DISK)
        into = into or _ROOT.fullmatch(place) is not None
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

    def decline_unless_used(self, values: Iterable[str]) -> bool:
        """Stage nothing if the program may find data where no value names it; whether it is so."""
        places = []
        for value in values:
            self.replaced(value)
            path = value.partition("=")[2] or value
            if not path.startswith("-") and self.is_local(path):
                places.append(self.path(path))
        around = any(e.place.startswith(f"{place}/") for e in self.staged for place in places)
        if around or not all(entry.used for entry in self.staged):
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
            # The last part may be a pattern, such as *.pt: all of the directory is brought.
            whole = re.sub("\0([^\0$]*/)[^\0/$]*[*?][^\0/]*\0$", r"\1", source).rstrip("/.")
            pattern = re.fullmatch('\0("?\\$\\{?\\w+\\}?"?)(/[^\0]*?)/[^/\0$]*\0', whole)
            whole = f"\0{pattern[1]}\0{pattern[2]}" if pattern else whole
            if not self.is_local(whole) or "\0" in self.path(whole).removeprefix(_DISK):
                raise _lost_results(line, text)
            self.results.append(_Result(self.path(whole), self._target(target), line, text))

    def _target(self, target: str) -> str:
        return os.path.normpath(os.path.join(self.values.directory, target))

    @property
    def base(self) -> str:
        """The directory on the node that becomes `{local.dir}`; empty without results."""
        directories = [
            os.path.dirname(result.place) if _FILE.search(result.place) else result.place
            for result in self.results
        ]
        return os.path.commonpath(directories) if directories else ""

    def check_results(self, values: Iterable[str], lines: Iterable[str]) -> None:
        """Check that the program writes into the directory that becomes `{local.dir}`.

        Raises:
            InputError: no value names it, one names what is around it, or setup works there.
        """
        if not self.results:
            return
        base, first = self.base, self.results[0]
        paths = [self.path(v.partition("=")[2] or v) for v in values if v[:1] != "-" or "=" in v]
        around = any(base.startswith(f"{path}/") for path in paths)
        inside = any(f"{path}/".startswith(f"{base}/") for path in paths)
        name = os.path.basename(base) if base != _DISK else ""
        works = any(LOCAL.search(line) and name in line for line in lines)
        if around or works or not inside or base in ("/tmp", "/dev/shm"):  # noqa: S108
            raise _lost_results(first.line, first.text)

    def collected(self) -> list[tuple[str, str]]:
        """Return source and target of each result, as `collect` has them."""
        return [(self.replaced(r.place), r.target) for r in self.results]

    def replaced(self, value: str) -> str:
        """Return a value with the path of staged data or of results as a placeholder."""
        option, equals, path = value.partition("=")
        if equals and re.fullmatch(r"-{0,2}[\w.-]+", option):
            return f"{option}={self.replaced(path)}"
        if "/" not in value and not value.startswith(("\0", ".")):
            return value
        path = self.path(value)
        if self.base and f"{path}/".startswith(f"{self.base}/"):
            return "{local.dir}" + path[len(self.base) :]
        inside = [e for e in self.staged if f"{path}/".startswith(f"{e.place}/")]
        exact = [e for e in inside if e.file and path == os.path.join(e.place, e.file)]
        trees = [e for e in inside if not e.file or path == e.place]
        best = max(exact or trees, key=lambda entry: len(entry.place), default=None)
        if best is None:
            return value
        best.used = True
        rest = f"/{os.path.basename(best.source)}" if exact else path[len(best.place) :]
        return f"{{stage.{best.name}}}{rest}"


def _lost_results(line: int, text: str) -> InputError:
    problem = f"line {line}: {shown(text)}: hpml cannot see what it brings back, and would lose it"
    hint = "name the directory in an argument, as $TMPDIR/out, and copy it with cp -r or rsync -a"
    return InputError(problem, hint=hint)
