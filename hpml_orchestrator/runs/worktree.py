"""Ask git about a working tree, without changing anything in it or in the repository.

No index is written, no object is made, no hook, filter or file system monitor is started: git only
lists names, and the files themselves are looked at directly.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError, SchedulerUnavailable
from hpml_orchestrator.scheduler.command import CommandMissing, SubprocessRunner

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from hpml_orchestrator.scheduler.command import Completed, Runner

__all__ = ["FIELD", "Entry", "Git"]

FIELD = "snapshot"
_TIMEOUT_SECONDS = 300.0
_SUBMODULE = b"160000"
_QUIET = ("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=")
# Of the caller's GIT_ variables only those that are settings: the others, as they are set inside
# of hooks, name another repository than the job's.
_SETTINGS = frozenset(
    "GIT_CONFIG_GLOBAL GIT_CONFIG_SYSTEM GIT_CONFIG_NOSYSTEM GIT_CONFIG_COUNT "
    "GIT_CEILING_DIRECTORIES GIT_DISCOVERY_ACROSS_FILESYSTEM".split()
)
_NUMBERED = ("GIT_CONFIG_KEY_", "GIT_CONFIG_VALUE_")


@dataclass(frozen=True)
class Entry:
    """Something in a working tree.

    Attributes:
        path: relative to the top, as the file system has it.
        tracked: whether git knows it already; what it would only add is not.
        info: what `lstat` said: a file, a symbolic link, or the empty directory of a submodule.
    """

    path: bytes
    tracked: bool
    info: os.stat_result


class Git:
    """The git of this machine.

    Args:
        runner: starts it.
        environment: of the caller; this process's when left out.
    """

    def __init__(
        self, runner: Runner | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self._runner = runner or SubprocessRunner()
        variables = os.environ if environment is None else environment
        self._environment = {
            **{
                name: value
                for name, value in variables.items()
                if not name.startswith("GIT_") or name in _SETTINGS or name.startswith(_NUMBERED)
            },
            "LC_ALL": "C",
            "GIT_OPTIONAL_LOCKS": "0",
            "GIT_TERMINAL_PROMPT": "0",
        }

    def top(self, directory: str) -> tuple[str, str]:
        """Return the top of a directory's working tree, and the directory's path relative to it.

        Both are free of symbolic links; the second is empty for the top itself.

        Raises:
            InputError: there is none, or git refuses it.
        """
        top = self._line(directory, "rev-parse", "--show-toplevel")
        prefix = self._line(directory, "rev-parse", "--show-prefix")
        return top, prefix.removesuffix("/")

    def commit(self, top: str) -> tuple[str, str]:
        """Return the current commit and branch; either is empty where there is none."""
        commit = self._run(top, "rev-parse", "--verify", "--quiet", "HEAD")
        branch = self._run(top, "symbolic-ref", "--short", "--quiet", "HEAD")
        return (
            commit.stdout.strip() if commit.returncode == 0 else "",
            branch.stdout.strip() if branch.returncode == 0 else "",
        )

    def ignores(self, top: str, path: str) -> bool:
        """Whether a path relative to the top is ignored."""
        return self._run(top, "check-ignore", "--quiet", "--", f"./{path}").returncode == 0

    def entries(self, top: str, leave_out: Collection[str] = ()) -> list[Entry]:
        """Return all that a snapshot of the working tree consists of, by path.

        That is what is tracked and there, and what is neither tracked nor ignored; the same of its
        submodules, and of other repositories inside of it, all of whose files count as untracked.

        Args:
            top: of the working tree.
            leave_out: paths relative to the top whose untracked files are not wanted.

        Raises:
            InputError: git cannot read it, or one of the repositories inside.
        """
        unwanted = [os.fsencode(path) for path in leave_out]
        found: dict[bytes, Entry] = {}
        for entry in self._walk(os.fsencode(top), b"", tracked=True):
            if entry.tracked or not any(_within(entry.path, path) for path in unwanted):
                found.setdefault(entry.path, entry)
        return [found[path] for path in sorted(found)]

    def _walk(self, top: bytes, below: bytes, *, tracked: bool) -> Iterator[Entry]:
        """Yield the entries of the repository at `top`/`below`; their paths begin with `below`."""
        directory = os.fsdecode(os.path.join(top, below))
        real: dict[bytes, bool] = {b"": True}
        for line in self._names(directory, "ls-files", "-z", "--stage"):
            details, _, name = line.partition(b"\t")
            entry = _look(top, below + name, real, tracked=tracked)
            if entry is None:
                continue
            if not stat.S_ISDIR(entry.info.st_mode):
                yield entry
            elif details.startswith(_SUBMODULE):
                if os.path.lexists(os.path.join(top, entry.path, b".git")):
                    yield from self._inner(top, entry.path, tracked=tracked)
                else:
                    yield entry
        for name in self._names(directory, "ls-files", "-z", "--others", "--exclude-standard"):
            if name.endswith(b"/"):  # so it lists a repository that is no submodule
                yield from self._inner(top, below + name.rstrip(b"/"), tracked=False)
                continue
            entry = _look(top, below + name, real, tracked=False)
            if entry is not None and not stat.S_ISDIR(entry.info.st_mode):
                yield entry

    def _inner(self, top: bytes, path: bytes, *, tracked: bool) -> Iterator[Entry]:
        directory = os.fsdecode(os.path.join(top, path))
        asked = self._run(directory, "rev-parse", "--show-prefix")
        if "not a git repository" in asked.stderr or asked.stdout.rstrip("\n"):
            raise InputError(
                f"{directory!r} has a .git that is no repository",
                field=FIELD,
                hint="for a submodule: git submodule update --init; else remove it",
            )
        yield from self._walk(top, path + b"/", tracked=tracked)

    def _names(self, directory: str, *arguments: str) -> list[bytes]:
        output = self._checked(directory, *arguments)
        return output.encode("utf-8", "surrogateescape").split(b"\0")[:-1]

    def _line(self, directory: str, *arguments: str) -> str:
        """Return output that is one name; it may hold newlines itself."""
        return self._checked(directory, *arguments).removesuffix("\n")

    def _checked(self, directory: str, *arguments: str) -> str:
        done = self._run(directory, *arguments)
        if done.returncode != 0:
            raise _refusal(directory, done.stderr)
        return done.stdout

    def _run(self, directory: str, *arguments: str) -> Completed:
        try:
            return self._runner.run(
                ["git", "-C", directory, *_QUIET, *arguments],
                env=self._environment,
                timeout=_TIMEOUT_SECONDS,
            )
        except CommandMissing as error:
            raise InputError(
                "there is no command git on this machine, which a snapshot is taken with",
                field=FIELD,
                hint="put git on PATH (`module load git`?), or leave out `snapshot: true`",
            ) from error
        except SchedulerUnavailable as error:
            raise InputError(
                f"git cannot list {directory!r}: {error}",
                field=FIELD,
                hint="is that the repository you mean, and does its file system answer?",
            ) from error


def _refusal(directory: str, words: str) -> InputError:
    """Return the error for what git said on standard error, in the words of the user's task."""
    if "dubious ownership" in words or "unsafe repository" in words:
        return InputError(
            f"the git repository of {directory!r} belongs to somebody else, and git refuses it",
            field=FIELD,
            hint=f"if you trust it: git config --global --add safe.directory {_owned(words)}",
        )
    if "not a git repository" in words:
        return InputError(
            f"{directory!r} lies in no git repository",
            field=FIELD,
            hint="make one with `git init`, or leave out `snapshot: true`",
        )
    if "must be run in a work tree" in words:
        return InputError(
            f"{directory!r} lies in a git repository, but in no working tree",
            field=FIELD,
            hint="let `workdir` be a directory of a checkout",
        )
    lines = [line for line in words.splitlines() if line.strip()] or ["no reason given"]
    return InputError(
        f"git cannot read {directory!r}: {lines[0].removeprefix('fatal: ')}", field=FIELD
    )


def _owned(words: str) -> str:
    """Return the repository that git names in its refusal, as a word for the shell."""
    named = re.search(r"repository (?:at )?\('?(.+?)'? is owned|repository at '(.+)'", words)
    return shlex.quote(next(filter(None, named.groups()))) if named else "DIRECTORY"


def _look(top: bytes, path: bytes, real: dict[bytes, bool], *, tracked: bool) -> Entry | None:
    """Return what is there now, if it can be copied; `real` keeps what `_is_real` found."""
    try:
        if not _is_real(top, os.path.dirname(path), real):
            return None  # where a directory was is now a link to another one
        info = os.lstat(os.path.join(top, path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InputError(
            f"cannot look at {os.fsdecode(os.path.join(top, path))!r}: {error.strerror or error}",
            field=FIELD,
        ) from error
    kinds = (stat.S_ISREG, stat.S_ISLNK, stat.S_ISDIR)
    return Entry(path, tracked, info) if any(kind(info.st_mode) for kind in kinds) else None


def _is_real(top: bytes, directory: bytes, known: dict[bytes, bool]) -> bool:
    """Whether a directory below the top is reached without a symbolic link."""
    if directory not in known:
        above = _is_real(top, os.path.dirname(directory), known)
        known[directory] = above and stat.S_ISDIR(os.lstat(os.path.join(top, directory)).st_mode)
    return known[directory]


def _within(path: bytes, directory: bytes) -> bool:
    return path == directory or path.startswith(directory + b"/")
