"""Copy the git repository of a job's code, so that later edits do not change what the job runs.

Git lists the names, and the files are copied as they are on disk: `git archive` would leave out
what `export-ignore` names, and a checkout would run filters.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.provenance import run_git
from hpml_orchestrator.records.texts import first_few, human_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpml_orchestrator.records.job import Job
    from hpml_orchestrator.records.schema import ScriptRecord, SnapshotRecord

MAX_UNTRACKED_BYTES = 100 * 1024**2
"""Largest size of all files that git neither tracks nor ignores: more is hardly code."""

_NOTICE_FILES = 20_000
_NOTICE_BYTES = 512 * 1024**2
_SHOWN = 5


class _Entry(NamedTuple):
    """A file, a symbolic link, or the empty directory of a submodule that is not initialised."""

    tracked: bool
    info: os.stat_result


@dataclass(frozen=True)
class Snapshot:
    """The repository to take a snapshot of."""

    top: str  # of its working tree, without symbolic links
    workdir: str  # the job's working directory, relative to the top; empty for the top
    script: str | None = None  # the job's script, relative to the top; None if outside

    def holds(self, path: str | Path) -> bool:
        """Whether a path is the top of the repository or below it."""
        return os.path.realpath(path) == self.top or bool(_relative(path, self.top))

    def take(
        self,
        target: Path,
        *,
        leave_out: Sequence[Path] = (),
        notice: Callable[[str], None] = lambda _: None,
    ) -> SnapshotRecord:
        """Copy the working tree into a new directory that only its owner may read.

        Args:
            target: the directory to make.
            leave_out: places whose untracked files are not code, such as hpml's records.
            notice: takes one line to show before a large copy.

        Returns:
            For the record: `top`; `commit` and `branch`, empty without one; the number of `files`
            (links included), their `bytes`, and how many of them are `untracked`.

        Raises:
            InputError: the script or working directory is ignored, untracked files are too large,
                a file cannot be read, or tracked files change while they are copied.
            OSError: the target cannot be written.
        """
        entries, version = self._read(leave_out)
        self._check(entries)
        total = sum(entry.info.st_size for entry in entries.values())
        if len(entries) > _NOTICE_FILES or total > _NOTICE_BYTES:
            notice(f"copying {len(entries)} files, {human_bytes(total)}, of {self.top}")
        target.mkdir(mode=0o700)
        sizes = [self._copy(path, entries, target) for path in entries]
        (target / self.workdir).mkdir(parents=True, exist_ok=True)  # it may be empty
        # No lock can stop an editor or a `git checkout`. Compare what git tracks before and after
        # the copy instead, so that a snapshot is one state of the code and not a mixture of two.
        changes = {name for name, _ in version.items() ^ self._read(leave_out)[1].items()}
        if changes:
            raise _refused(
                f"the code changes while it is copied: {first_few(sorted(changes), _SHOWN)}",
                "submit again once nothing writes to it; git should not track what programs write",
            )
        copied = [size for size in sizes if size is not None]
        return {
            "top": self.top,
            "commit": str(version["commit"]),
            "branch": str(version["branch"]),
            "files": len(copied),
            "bytes": sum(copied),
            "untracked": sum(not entry.tracked for entry in entries.values()),
        }

    def _read(self, leave_out: Sequence[Path]) -> tuple[dict[str, _Entry], dict[str, object]]:
        """Return the entries, and what a copy must be consistent with: HEAD and tracked files.

        Other files may be written to meanwhile, such as a log.
        """
        commit = _git(self.top, "rev-parse", "--verify", "--quiet", "HEAD", check=False)
        branch = _git(self.top, "symbolic-ref", "--short", "--quiet", "HEAD", check=False)
        version: dict[str, object] = {"commit": commit.strip(), "branch": branch.strip()}
        records = tuple(f"{place}/" for path in leave_out if (place := _relative(path, self.top)))
        entries = {}
        for path, entry in sorted(_list_entries(self.top).items()):
            info = entry.info
            if entry.tracked:
                # Untracked files do not count: a log that a running program writes must not fail
                # the submission.
                version[f"./{path}"] = (info.st_mode, info.st_ino, info.st_size, info.st_mtime_ns)
            if entry.tracked or not path.startswith(records):
                entries[path] = entry
        return entries, version

    def _check(self, entries: dict[str, _Entry]) -> None:
        ignored = ""
        if self.script is not None and self.script not in entries:
            ignored = f"script {os.path.join(self.top, self.script)!r}"
            if not os.path.lexists(os.path.join(self.top, self.script)):
                raise _refused(f"no such {ignored}")
        elif not any(_is_within(path, self.workdir) for path in entries) and _git(
            self.top, "check-ignore", "--", f"./{self.workdir}", check=False
        ):
            ignored = f"workdir {os.path.join(self.top, self.workdir)!r}"
        if ignored:
            raise _refused(
                f"git ignores the {ignored}, so the snapshot would not contain it",
                "remove it from .gitignore, or `git add --force` it",
            )
        sizes = {path: entry.info.st_size for path, entry in entries.items() if not entry.tracked}
        total = sum(sizes.values())
        if total > MAX_UNTRACKED_BYTES:
            largest = sorted(sizes.items(), key=lambda item: -item[1])
            named = [f"{path!r} ({human_bytes(size)})" for path, size in largest]
            raise _refused(
                f"the repository {self.top!r} has {human_bytes(total)} in {len(sizes)} files that "
                f"git neither tracks nor ignores, over {human_bytes(MAX_UNTRACKED_BYTES)}: "
                f"{first_few(named, _SHOWN)}",
                "list what is not code in .gitignore, or commit it",
            )

    def _copy(self, path: str, entries: dict[str, _Entry], target: Path) -> int | None:
        """Copy one entry and return its bytes; None for a directory, and for what is gone."""
        source, copy = os.path.join(self.top, path), os.path.join(target, path)
        mode = entries[path].info.st_mode
        os.makedirs(copy if stat.S_ISDIR(mode) else os.path.dirname(copy), exist_ok=True)
        try:
            if stat.S_ISDIR(mode):
                return None
            if stat.S_ISLNK(mode):
                os.symlink(self._link(path, os.readlink(source), entries), copy)
                return 0
            shutil.copy2(source, copy, follow_symlinks=False)
            # Writable by the owner, so that a read-only file can be pruned; no setuid bits.
            os.chmod(copy, stat.S_IMODE(mode) & 0o777 | stat.S_IRUSR | stat.S_IWUSR)
        except FileNotFoundError:
            return None
        except PermissionError as error:
            raise _refused(
                f"cannot copy {source!r}: {error.strerror}",
                "make it readable, or list it in .gitignore if it is not code",
            ) from error
        return os.path.getsize(copy)

    def _link(self, path: str, text: str, entries: dict[str, _Entry]) -> str:
        """Return the target of a copied link: a file in the tree becomes its copy, others stay."""
        folder = os.path.dirname(path)
        inside = os.path.relpath(os.path.join(self.top, folder, text), self.top)
        # From the copy, a relative link that leaves the tree would lead elsewhere. An absolute link
        # into the tree would let the job run files that are edited later.
        if not os.path.isabs(text):
            return os.path.join(self.top, folder, text) if _is_within(inside, "..") else text
        copied = any(_is_within(name, "" if inside == "." else inside) for name in entries)
        return os.path.relpath(inside, folder or ".") if copied else text


def keep_script(script: str, directory: Path, *, beside: bool) -> ScriptRecord | None:
    """Copy a script into `directory`/script, and with `beside` what it may import there.

    Returns:
        its digest; None if it cannot be read.
    """
    source, kept = Path(script), directory / "script"
    try:
        digest = hashlib.sha256(source.read_bytes()).hexdigest()
        same = [one for one in source.parent.glob(f"*{source.suffix}") if one.is_file()]
        small = beside and sum(one.stat().st_size for one in same) <= MAX_UNTRACKED_BYTES
        kept.mkdir(mode=0o700)
        for one in {source, *(same if source.suffix and small else ())}:
            shutil.copyfile(one, kept / one.name)
    except OSError:
        return None
    return {"path": script, "sha256": digest, "copy": f"script/{source.name}"}


def find(job: Job) -> Snapshot:
    """Return the repository that holds a job's working directory; nothing is copied yet.

    Raises:
        InputError: there is none, or git cannot read it.
    """
    if not os.path.isdir(job.workdir):
        raise _refused(f"no such workdir: {job.workdir!r}")
    top = _git(job.workdir, "rev-parse", "--show-toplevel").removesuffix("\n")
    workdir = _git(job.workdir, "rev-parse", "--show-prefix").removesuffix("\n").rstrip("/")
    script = None
    if job.script is not None:
        # The directories may be links; the script itself may be one, and stays one.
        folder = os.path.realpath(os.path.dirname(job.script))
        if Snapshot(top, workdir).holds(folder):
            script = os.path.join(_relative(folder, top), os.path.basename(job.script))
    for path in (workdir, script or ""):
        if any("\ud800" <= letter <= "\udfff" for letter in path):
            raise _refused(f"{path!r} must be valid Unicode text")
    return Snapshot(top, workdir, script)


def _relative(path: str | Path, top: str) -> str:
    real, start = os.path.realpath(path), top.rstrip("/") + "/"
    return real.removeprefix(start) if real.startswith(start) else ""


def _is_within(path: str, folder: str) -> bool:
    """Whether a relative path is a directory or is below it; the top's own path is empty."""
    return not folder or path == folder or path.startswith(f"{folder}/")


def _list_entries(top: str, below: str = "", *, tracked: bool = True) -> dict[str, _Entry]:
    """Return the files of the repository at `top`/`below`, with submodules and nested ones.

    All files of a nested repository that is not a submodule count as untracked.
    """
    directory = os.path.join(top, below)
    if below and _git(directory, "rev-parse", "--show-cdup", check=False).strip():
        raise _refused(
            f"{directory!r} has a .git that is not a repository",
            "for a submodule: git submodule update --init; else remove it",
        )
    entries: dict[str, _Entry] = {}
    # Two calls, because one with both options does not tell which files are tracked.
    for listed in ("--cached", "--others"):
        known = tracked and listed == "--cached"
        for name in _git(directory, "ls-files", "-z", listed, "--exclude-standard").split("\0"):
            path = below + name.rstrip("/")
            place = os.path.join(top, path)
            try:
                info = os.lstat(place)
            except (FileNotFoundError, NotADirectoryError):
                continue
            if not name or path in entries:
                continue
            if stat.S_ISDIR(info.st_mode) and os.path.lexists(os.path.join(place, ".git")):
                entries |= _list_entries(top, f"{path}/", tracked=known)
            elif stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode) or known:
                entries[path] = _Entry(known, info)
    # A tracked directory may have become a link to another one.
    links = tuple(f"{path}/" for path, entry in entries.items() if stat.S_ISLNK(entry.info.st_mode))
    return {path: entry for path, entry in entries.items() if not path.startswith(links)}


def _git(directory: str, *arguments: str, check: bool = True) -> str:
    try:
        done = run_git(directory, *arguments)
    except FileNotFoundError:
        raise _refused(
            "the command git is not on PATH",
            "install git (or `module load git`), or remove `snapshot: true`",
        ) from None
    if not check or done.returncode == 0:
        return os.fsdecode(done.stdout)
    lines = os.fsdecode(done.stderr).strip().splitlines() or ["no reason given"]
    if "not a git repository" in lines[0]:
        raise _refused(
            f"{directory!r} is not in a git repository",
            "create one with `git init`, or remove `snapshot: true`",
        )
    # The last line of git's message about another user's repository is the command that trusts it.
    hint = f"if you trust it: {lines[-1].strip()}" if "safe.directory" in lines[-1] else ""
    raise _refused(f"git cannot read {directory!r}: {lines[0].removeprefix('fatal: ')}", hint)


def _refused(message: str, hint: str = "") -> InputError:
    return InputError(message, field="snapshot", hint=hint)
