"""Copies of data to the node's own disk become `stage`, copies of results from it `collect`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.convert.values import HOLE, has_hole, hole_names, shown
from hpml_orchestrator.jobfile.text import NODE_DIRECTORIES
from hpml_orchestrator.records.job import Collect, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

LOCAL = re.compile(
    r"TMPDIR|LOCAL_?SCRATCH|LSCRATCH|JOBFS|/tmp\b|/dev/shm|(?<!\w)/local(scratch)?\b"
)
"""Matches a line that works on the node's own disk or in its RAM."""

_ROOT = re.compile(r"/(tmp|dev/shm|local|localscratch|var/tmp)(?=/|$)")
_HOLE_OF_JOB = re.compile(  # has no blanks, so that quotes do not matter
    f'\0"?\\$\\{{?({"|".join(sorted(NODE_DIRECTORIES))}|SLURM_JOB_?ID)\\}}?"?\0'
)
_OF_JOB = re.compile(
    rf"(\0\"\$TMPDIR\"\0|{_ROOT.pattern})(/[^/]+)*?/[^/]*\0\"?\$\{{?SLURM_JOB_?ID[^/]*"
)
_SHARED = '\0"$TMPDIR"\0'  # on many clusters /tmp; other variables name a directory of the job
_RECURSIVE = re.compile(r"-[a-zA-Z]*[rRa]|--rec|--arch")
_FILE = re.compile(r"\.(tar|tgz|zip|gz|bz2|xz|h5|hdf5|npz|pt|pth|ckpt|csv|json|txt|log)$")
_ARCHIVE = re.compile(r"\.(tar|tgz|tar\.\w+)$")
_UNPACK = re.compile(r"tar -?[a-z]*x[a-z]*f (\S+)(?: (?:-C |--directory[ =])(\S+))?")
_PLAIN_OPTION = re.compile(  # copies all of the source, as it is
    r"-[arRvzhPLtlpogdDWuHf]+|--(progress|archive|recursive|info=\S+|stats|partial|verbose)"
)
_OUTPUT = re.compile(  # options and variables whose values a program usually writes to
    r"-{0,2}([\w-]*[_-])?(out|outputs?|saves?|ckpts?|checkpoints?|logs?|results?|cache|tmp|temp|work)"
    r"([_-]?(dir|directory|path|folder|root|to))?",
    re.IGNORECASE,
)


@dataclass
class _Entry:
    """One entry of `stage`.

    Attributes:
        place: the directory on the node that the script uses.
        file: its name there if the source is one file, else empty.
        line: of the copy.
        is_used: whether an argument or a variable names it.
    """

    name: str
    source: str
    kind: Any
    place: str
    file: str
    line: int
    is_used: bool = False


@dataclass(frozen=True)
class _Result:
    """A file or directory on the node that the script copies back."""

    place: str
    target: str
    line: int
    text: str


class Copies:
    """What a script copies to its nodes and back.

    Args:
        own: variables that the script sets.

    Attributes:
        staged: entries of `stage`.
        results: what is copied back.
        directory: current directory of the script on the shared file system; empty if only the job
            can compute it.
        on_node: the same if it is on the node's own disk, else empty.
        line: the line that is being read, with its `text`.
    """

    def __init__(self, own: Collection[str]) -> None:
        self._own = own
        self.staged: list[_Entry] = []
        self.results: list[_Result] = []
        self.directory = self.on_node = ""
        self.line, self.text = 0, ""
        self._moved: list[str] = []  # results that the program writes to the job's own directory
        self._made: set[str] = set()  # what the script makes or removes before the launch
        self._copied: set[str] = set()  # directories that it copies there

    def path(self, text: str) -> str:
        """Return an absolute path; it may start with the variable of a node's directory."""
        if not text.startswith(("\0", "/")):
            text = os.path.join(self.on_node or self.directory, text)
        return os.path.normpath(_HOLE_OF_JOB.sub('\0"$\\1"\0', text))

    def is_local(self, text: str) -> bool:
        """Whether a path is on the node's own disk or in its RAM."""
        return _root(self.path(text)) != ""

    def take(self, words: Sequence[str]) -> bool:
        """Add entries for a copy to the node; return False for any other command."""
        name = os.path.basename(words[0])
        if name == "tar":
            return self._unpack(" ".join(words))
        options = [word for word in words[1:] if word.startswith("-")]
        paths = [word for word in words[1:] if not word.startswith("-")] or [""]
        *sources, target = paths
        if name in ("mkdir", "rm"):
            self._made |= {self.path(path) for path in (*sources, target)}
        if name not in ("cp", "rsync") or not sources or not self.is_local(target):
            return False
        # An entry of `stage` must be a path that is known now: not the output of a command,
        # `HOST:PATH` or something on the node itself.
        if any(has_hole(word) or ":" in word or _ROOT.match(word) for word in sources):
            return False
        known = self.directory or all(word.startswith("/") for word in sources)
        if not (known and all(map(_PLAIN_OPTION.fullmatch, options))):
            return False
        place = self.path(target)
        tree = name == "rsync" or any(map(_RECURSIVE.match, options))
        # `cp -r DATA PLACE` copies into PLACE if that exists and creates it otherwise. It exists
        # if the script has made it, or if it is the node's directory itself.
        into = len(sources) > 1 or target.endswith(("/", "/.")) or place in self._made
        into = into or place == _root(place)
        names = [os.path.basename(source.rstrip("/")) for source in sources]
        files = [not tree or bool(_FILE.search(base)) for base in names]
        if any(files) and not into and names != [os.path.basename(place)]:
            return False  # staged files keep their names
        for source, base, is_file in zip(sources, names, files, strict=True):
            if is_file:
                directory = place if into else os.path.dirname(place)
                self._add(source, "file" if _ARCHIVE.search(base) else "auto", directory, base)
            else:
                # `cp -r dir/.` and `rsync dir/` copy what is in the directory, without its name.
                contents = source.endswith("/.") or (name == "rsync" and source.endswith("/"))
                inside = os.path.join(place, base) if into and not contents else place
                self._add(source.removesuffix("/."), "auto", inside)
        return True

    def _unpack(self, command: str) -> bool:
        """Read `tar -xf ARCHIVE -C DIRECTORY`, and nothing else."""
        match = _UNPACK.fullmatch(command)
        place = match[2] or self.directory if match else ""
        if match is None or not self.is_local(place):
            return False
        place, archive = self.path(place), self.path(match[1])
        for entry in self.staged:  # an archive that was copied first
            if entry.file and os.path.join(entry.place, entry.file) == archive:
                entry.kind, entry.file, entry.place = "tar", "", place
                return True
        if match[1] == "-" or has_hole(match[1]) or not self.directory:
            return False
        self._add(match[1], "auto" if _ARCHIVE.search(match[1]) else "tar", place)
        return True

    def _add(self, source: str, kind: str, place: str, file: str = "") -> None:
        source = os.path.normpath(os.path.join(self.directory, source))
        stem = re.sub(r"\.(tar|gz|tgz|xz|bz2|zip|h5|csv)\b", "", os.path.basename(source))
        name = re.sub(r"[^a-z0-9_]+", "_", stem.lower()).strip("_")[:28] or "data"
        name = name if name[0].isalpha() else f"d_{name}"
        taken = {entry.name for entry in self.staged}
        unique = next(n for n in (name, *(f"{name}_{i}" for i in range(2, 99))) if n not in taken)
        self.staged.append(_Entry(unique, source, kind, place, file, self.line))
        if not file:
            self._copied.add(place)

    def decline_unless_used(self, values: Sequence[str]) -> None:
        """Stage nothing unless arguments and exports name all of it, and only it.

        A program may also find data by a parent directory, or write results to the same directory.
        """
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
            one == e.place or _contains(os.path.join(e.place, e.file).rstrip("/"), one)
            for e in self.staged
            for one in (*results, *outputs)
        )
        if around or written or not all(entry.is_used for entry in self.staged):
            self.staged.clear()

    def move_results(self, values: Sequence[str], *, shell_works_there: bool) -> list[str]:
        """Move results that other jobs may also write to the job's own directory.

        `/tmp` and often `$TMPDIR` are shared by the jobs of a node, so `collect` of a directory
        that the script never makes could bring the files of others. Results stay in their place if
        lines of the shell work on the node's disk, too, or no argument names them.

        Returns:
            The places that stay though other jobs may write there.
        """
        made = {path for path in self._made if path != _root(path)}
        doubtful = []
        for result in self.results:
            place = result.place
            is_own = _OF_JOB.match(place) is not None  # such as /tmp/$SLURM_JOB_ID
            is_shared = place.startswith(("/", _SHARED))
            if not is_shared or (not is_own and any(map(_holds(place), made | self._copied))):
                continue
            self._moved.append(place)
            moved = [self.replaced(value) for value in values]
            named = moved != [*values] and not any(shown(place) in shown(value) for value in moved)
            if shell_works_there or not named or (is_own and made):
                self._moved.remove(place)
                doubtful.append(place)
        return doubtful

    def take_back(self, words: Sequence[str]) -> str | None:
        """Add a copy of results on the node.

        Returns:
            Empty if `collect` copies the same; else the reason why it cannot. None if the results
            are on shared storage.
        """
        options = [word for word in words[1:] if word.startswith("-")]
        paths = [word for word in words[1:] if not word.startswith("-")] or [""]
        *sources, target = paths
        name = os.path.basename(words[0])
        if not any(map(self._may_be_local, paths if name == "tar" else sources)):
            return None
        is_tree = any(map(_RECURSIVE.match, options))
        if len(sources) == 1 and not is_tree and _is_file_name(sources[0], target):
            target = os.path.dirname(target)  # collect names a directory
        # A directory that is named after the job: collect makes one for each run.
        target = re.sub("(^|/)[^/]*\0[^\0]*JOB_?ID[^/]*", "", target.rstrip("/")) or "."
        plain = name in ("cp", "rsync", "mv") and all(map(_PLAIN_OPTION.fullmatch, options))
        if has_hole(target) or not (target.startswith("/") or self.directory):
            return "only the job can compute where the results go"
        if not plain or ":" in target:
            return f"{name} does more than copy a file or directory"
        target = os.path.normpath(os.path.join(self.directory, target))
        places = [self.path(source.removesuffix("/.")) for source in sources]
        for place in places:
            root = _root(place)
            if place == root:
                return "other files are there, too"
            own = {*hole_names(root)} & {*self._own}
            if own or not root or has_hole(place[len(root) :]) or re.search(r"[*?]", place):
                return "only the job can compute where the results are"
        self.results += [_Result(place, target, self.line, self.text) for place in places]
        return ""

    def _may_be_local(self, path: str) -> bool:
        """Whether a path is on the node's own disk, or only the job can compute where it is."""
        hole = HOLE.match(path)
        unknown = hole is not None and hole_names(hole[0])[0] not in ("HOME", "USER")
        if not path.startswith(("\0", "/")):
            unknown = not (self.on_node or self.directory)
        return self.is_local(path) or unknown

    def stages(self, relative: Callable[[str], str]) -> tuple[Stage, ...]:
        """Return the field `stage`.

        Args:
            relative: makes a path as it is in the job file.
        """
        return tuple(
            Stage(
                name=one.name,
                source=relative(one.source),
                kind=one.kind,
                target="shm" if one.place.startswith("/dev/shm") else "local",  # noqa: S108
            )
            for one in self.staged
        )

    def collected(self, result: _Result, relative: Callable[[str], str]) -> Collect:
        """Return an entry of `collect`."""
        source = HOLE.sub(
            lambda m: f"{{env.{m[1].strip(chr(34))[1:]}}}", self.replaced(result.place)
        )
        return Collect(source=source, target=relative(result.target))

    def replaced(self, value: str) -> str:
        """Return a value with a placeholder in place of the path of staged data."""
        option, equals, path = value.partition("=")
        if equals and re.fullmatch(r"[-+~]{0,2}[\w./@-]+", option):
            return f"{option}={self.replaced(path)}"
        if "/" not in value and not value.startswith(("\0", ".")):
            return value
        path = self.path(value)
        for place in self._moved:
            if _contains(path, place) or _contains(place, path):
                own = "shm.dir" if path.startswith("/dev/shm") else "local.dir"  # noqa: S108
                return f"{{{own}}}{path[len(_root(path)) :]}"
        inside = [e for e in self.staged if f"{path}/".startswith(f"{e.place}/")]
        exact = [e for e in inside if e.file and path == os.path.join(e.place, e.file)]
        trees = [e for e in inside if not e.file or path == e.place]
        best = max(exact or trees, key=lambda entry: len(entry.place), default=None)
        if best is None:
            return value
        best.is_used = True
        rest = f"/{os.path.basename(best.source)}" if exact else path[len(best.place) :]
        return f"{{stage.{best.name}}}{rest}"


def _holds(path: str) -> Callable[[str], bool]:
    return lambda directory: _contains(directory, path)


def _contains(directory: str, path: str) -> bool:
    return f"{path}/".startswith(f"{directory}/")


def _is_file_name(source: str, target: str) -> bool:
    names = os.path.basename(source), os.path.basename(target)
    endings = [os.path.splitext(name)[1] for name in names]
    return names[0] == names[1] or (endings[0] == endings[1] != "")


def _root(path: str) -> str:
    """Return the part of a path that names the node's own disk or RAM; empty if it is elsewhere.

    A directory there that has the job's id in its name is a part of it.
    """
    if match := _OF_JOB.match(path) or _ROOT.match(path):
        return match[0]
    match = HOLE.match(path)
    return match[0] if match and hole_names(match[0])[0] in NODE_DIRECTORIES else ""
