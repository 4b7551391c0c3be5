"""Copy the git repository of a job's code, as it lies there, so that later edits change nothing.

The files are copied byte by byte from the working tree. `git archive` would leave out what
`export-ignore` says, and a checkout would send them through filters: neither gives the code that
the user has just tried out.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.runs.copytree import copy_entries
from hpml_orchestrator.runs.worktree import FIELD, Entry, Git
from hpml_orchestrator.script.render import SnapshotPaths
from hpml_orchestrator.staging.capacity import human_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hpml_orchestrator.spec import Job

__all__ = ["MAX_UNTRACKED_BYTES", "MAX_UNTRACKED_FILE_BYTES", "Snapshot", "Taken", "find"]

MAX_UNTRACKED_FILE_BYTES = 10 * 1024**2
"""How large a file may be that git neither tracks nor ignores: above that it is hardly code."""

MAX_UNTRACKED_BYTES = 200 * 1024**2
"""How large all such files may be together."""

_PATIENCE_SECONDS = 2.0
_TRIES = 3
_NAMED = 5


@dataclass(frozen=True)
class Taken:
    """What a snapshot holds.

    Attributes:
        commit, branch: of the repository; empty where it has none.
        files: number of files and symbolic links.
        bytes: size of the files.
        untracked: how many of them git did not track.
    """

    commit: str
    branch: str
    files: int
    bytes: int
    untracked: int

    def to_json(self) -> dict[str, Any]:
        """Return it for a record."""
        return dict(vars(self))


@dataclass(frozen=True)
class Snapshot:
    """The repository that a snapshot is to be taken of.

    Attributes:
        top: top of its working tree, without symbolic links.
        workdir: the job's working directory, relative to the top; empty for the top.
        script: the job's script, relative to the top; None where it lies outside.
    """

    top: str
    workdir: str
    script: str | None = None

    @property
    def paths(self) -> SnapshotPaths:
        """What the script of the job has to know of it."""
        return SnapshotPaths(self.workdir, self.script)

    def holds(self, path: str | Path) -> bool:
        """Whether a path is the top or lies below it."""
        return os.path.realpath(path) == self.top or bool(relative(path, self.top))

    def take(
        self,
        target: Path,
        *,
        leave_out: Sequence[Path] = (),
        notice: Callable[[str], None] = lambda _: None,
        git: Git | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> Taken:
        """Copy the working tree into a directory, which is made.

        Args:
            target: the directory; only its owner may look into it.
            leave_out: places whose untracked files are no code, such as hpml's records.
            notice: takes one line to show, once it has become slow.
            git: answers questions.
            clock: seconds that never go back.

        Raises:
            InputError: it would not be the job's code: script or working directory are ignored,
                untracked files are too large, a file cannot be read, or they change all the time.
            OSError: the target cannot be written.
        """
        git = git or Git()
        places = [place for path in leave_out if (place := relative(path, self.top))]
        began = clock()
        told: list[str] = []

        def state() -> _State:
            return _State(*git.commit(self.top), git.entries(self.top, places))

        def tick() -> None:
            if not told and clock() - began > _PATIENCE_SECONDS:
                told.append(f"copying the code of {self.top}: {before.size()}")
                notice(told[0])

        before = state()
        for _ in range(_TRIES):
            self._check(before.entries, git)
            files, size = copy_entries(
                os.fsencode(self.top), os.fsencode(target), before.entries, tick=tick
            )
            after = state()
            changed = before.changed(after)
            if not changed:
                (target / self.workdir).mkdir(parents=True, exist_ok=True)  # nothing is in it
                untracked = sum(not entry.tracked for entry in before.entries)
                return Taken(before.commit, before.branch, files, size, untracked)
            shutil.rmtree(target)
            before = after
        raise InputError(
            f"the code changes while it is copied: {_some(changed)}",
            field=FIELD,
            hint="submit again once nothing writes to it; git should not track what programs write",
        )

    def _check(self, entries: list[Entry], git: Git) -> None:
        """Refuse a snapshot that would not be the job's code, or far more than that."""
        paths = [entry.path for entry in entries]
        if self.script is not None and os.fsencode(self.script) not in paths:
            place = os.path.join(self.top, self.script)
            if not os.path.lexists(place):
                raise InputError(f"the script {place!r} is not there", field=FIELD)
            raise _ignored("script", place)
        inside = os.fsencode(f"{self.workdir}/")
        empty = self.workdir and not any(path.startswith(inside) for path in paths)
        if empty and git.ignores(self.top, self.workdir):
            raise _ignored("workdir", os.path.join(self.top, self.workdir))
        untracked = sorted(
            (entry for entry in entries if not entry.tracked), key=lambda one: -one.info.st_size
        )
        large = [one for one in untracked if one.info.st_size > MAX_UNTRACKED_FILE_BYTES]
        total = sum(one.info.st_size for one in untracked)
        if large or total > MAX_UNTRACKED_BYTES:
            unknown = "that git neither tracks nor ignores"
            what = (
                f"files {unknown}, over {human_bytes(MAX_UNTRACKED_FILE_BYTES)}"
                if large
                else f"{human_bytes(total)} in {len(untracked)} files {unknown}, over "
                f"{human_bytes(MAX_UNTRACKED_BYTES)} in all"
            )
            sizes = [
                f"{os.fsdecode(one.path)!r} ({human_bytes(one.info.st_size)})"
                for one in large or untracked
            ]
            raise InputError(
                f"the repository {self.top!r} has {what}: {_some(sizes)}",
                field=FIELD,
                hint="name what is no code in .gitignore, or commit it",
            )


def find(job: Job, git: Git | None = None) -> Snapshot:
    """Return the repository that holds a job's working directory; nothing is copied yet.

    Raises:
        InputError: there is none, or git cannot read it.
    """
    if not os.path.isdir(job.workdir):
        raise InputError(f"the workdir {job.workdir!r} is not there", field=FIELD)
    top, workdir = (git or Git()).top(job.workdir)
    script = None
    if job.script is not None:
        # the directories may be reached through links; the script may be one, and stays one
        folder = os.path.realpath(os.path.dirname(job.script))
        if Snapshot(top, workdir).holds(folder):
            script = os.path.join(relative(folder, top), os.path.basename(job.script))
    for path in (workdir, script or ""):
        try:
            path.encode("utf-8")
        except UnicodeEncodeError:
            raise InputError(f"{path!r} must be valid Unicode text", field=FIELD) from None
    return Snapshot(top, workdir, script)


def relative(path: str | Path, top: str) -> str:
    """Return a path relative to the top of a working tree; empty unless it lies below it."""
    real, start = os.path.realpath(path), top.rstrip("/") + "/"
    return real.removeprefix(start) if real.startswith(start) else ""


@dataclass(frozen=True)
class _State:
    """A working tree at one moment."""

    commit: str
    branch: str
    entries: list[Entry]

    def size(self) -> str:
        total = sum(entry.info.st_size for entry in self.entries)
        return f"{len(self.entries)} files, {human_bytes(total)}"

    def changed(self, later: _State) -> list[str]:
        """Return what of the repository is not as it was: `HEAD`, and tracked files.

        Of the others one may be a log that grows: that the copy has its beginning does no harm.
        """
        mine, theirs = self._tracked(), later._tracked()
        names = sorted(path for path in {*mine, *theirs} if mine.get(path) != theirs.get(path))
        head = (self.commit, self.branch) != (later.commit, later.branch)
        return ["HEAD"] * head + [repr(os.fsdecode(path)) for path in names]

    def _tracked(self) -> dict[bytes, tuple[int, ...]]:
        return {
            entry.path: (
                entry.info.st_mode,
                entry.info.st_ino,
                entry.info.st_size,
                entry.info.st_mtime_ns,
            )
            for entry in self.entries
            if entry.tracked
        }


def _ignored(what: str, place: str) -> InputError:
    return InputError(
        f"git ignores the {what} {place!r}, so that the snapshot would not have it",
        field=FIELD,
        hint="take it out of .gitignore, or `git add --force` it",
    )


def _some(words: Sequence[str]) -> str:
    """Return the first words of a list, and how many more there are."""
    more = len(words) - _NAMED
    return ", ".join(words[:_NAMED]) + (f" and {more} more" if more > 0 else "")
