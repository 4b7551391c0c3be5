"""Remove old submissions with their runs, and count the disk space that is freed.

A submission is renamed before any of it is removed: from then on no command sees it, and the next
prune completes an interrupted removal. Two prunes may run at the same time.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError, RecordError
from hpml_orchestrator.records.files import names_in, read_json
from hpml_orchestrator.records.ids import stamp, stamp_of
from hpml_orchestrator.records.run import Run, is_own, owner_name
from hpml_orchestrator.records.submission import Submission
from hpml_orchestrator.runs.status import UNREADABLE, states
from hpml_orchestrator.scheduler.model import JobState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from pathlib import Path

    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.runs.backend import Backends
    from hpml_orchestrator.runs.state import State

OVER = (*(state.value for state in JobState if state.over), "REFUSED", "NOT SUBMITTED")
"""States in which a run may be removed."""

_UNDECIDED = (JobState.UNKNOWN.value, UNREADABLE, "SUBMITTING")
_HIDDEN = re.compile(r"\.(.+)\.pruned")
_BLOCK_BYTES = 512  # of st_blocks, whatever the file system's own block size


@dataclass(frozen=True)
class Removed:
    """A submission that was removed, or would be."""

    id: str
    state: str  # how it ended; `LEFT OVER` where an earlier removal was interrupted
    ended: float | None  # seconds since the epoch
    runs: int  # number of its run directories
    bytes: int  # freed disk space; a file with several hard links counts when the last is removed


@dataclass
class Pruned:
    """What a prune did, or would do."""

    removed: list[Removed] = field(default_factory=list)  # newest first
    kept: list[tuple[str, str]] = field(default_factory=list)  # id, and why it must stay
    bytes: int = 0  # freed disk space, all together
    interrupted: bool = False  # by Ctrl-C; the next prune completes it

    def to_json(self) -> dict[str, object]:
        """Return it for programs."""
        kept = [{"id": sid, "reason": reason} for sid, reason in self.kept]
        removed = [asdict(submission) for submission in self.removed]
        return {"bytes": self.bytes, "removed": removed, "kept": kept}


def prune(
    store: Store,
    named: Sequence[Submission] = (),
    *,
    older_seconds: float | None = None,
    in_states: Sequence[str] = (),
    keep: int = 0,
    dry_run: bool = True,
    backends: Backends | None = None,
    now: Callable[[], float] = time.time,
) -> Pruned:
    """Remove submissions that are over, with all of their runs.

    Submissions that may not be over, and those of other users, are never removed.

    Args:
        store: where records live.
        named: which ones; all of the caller's own when left out.
        older_seconds: only those that ended so long ago.
        in_states: only those that ended in one of these states of `OVER`; any when empty.
        keep: number of the newest to keep, of those that the other arguments choose.
        dry_run: whether to report only and remove nothing.
        backends: the schedulers; the real ones when left out.
        now: the clock.

    Raises:
        RecordError: the records cannot be read.
    """
    before = None if older_seconds is None else now() - older_seconds
    remover = _Remover(store, dry_run=dry_run)
    mine = []
    for submission in dict.fromkeys(named) or store.submissions():
        # The id's own time decides without a read: most submissions of a large store are out of the
        # range.
        if before is not None and stamp_of(submission.sid) > stamp(before):
            continue  # it cannot have ended before it was made
        if is_own(submission.directory):
            mine.append(submission)
        elif named and submission.directory.exists():
            owner = owner_name(submission.directory)
            remover.done.kept.append((submission.sid, f"belongs to {owner}"))
    over = []
    for state in states(store, mine, backends=backends, now=now):
        if in_states and state.state not in (*in_states, *_UNDECIDED):
            continue
        if before is not None and (state.ended or state.created) > before:
            continue
        reason = _stays(state, remover.runs[state.submission.sid])
        if reason:
            remover.done.kept.append((state.submission.sid, reason))
        else:
            over.append(state)
    over.sort(key=lambda state: stamp_of(state.submission.sid), reverse=True)
    chosen = over[keep:]
    # A continued run may keep its checkpoints in the directory of the run that it continues.
    # Removing the old one would end the new one's training.
    used = _saved_to(store, {state.submission.sid for state in chosen}) if chosen else {}
    for sid, user in used.items():
        remover.done.kept.append((sid, f"has the checkpoints of {user}, which continues it"))
    remover.remove_all(state for state in chosen if state.submission.sid not in used)
    return remover.done


def _saved_to(store: Store, chosen: Collection[str]) -> dict[str, str]:
    used = {}
    for submission in store.submissions():
        with contextlib.suppress(HpmlError):
            if submission.sid in chosen:
                continue
            own = submission.requested_job().checkpoint
            if own.enabled:
                run = os.path.relpath(own.directory, store.runs_dir).partition(os.sep)[0]
                used[re.sub(r"\.(\d+|\{array\.index\})$", "", run)] = submission.sid
    return {sid: used[sid] for sid in chosen if sid in used}


def _stays(state: State, runs: Iterable[Path]) -> str:
    if not state.over:
        return f"has not ended: {state.text}"
    try:
        # The state may be a recorded end, while somebody has requeued the run by hand since. More
        # attempts than that end counted prove it.
        attempts = sum(len(Run(directory).attempts()) for directory in runs)
    except RecordError as error:
        return str(error)
    return "was started again after its end" if attempts > state.attempts else ""


class _Remover:
    """Removes submissions, or only adds up what that would free.

    Attributes:
        done: what it did.
        runs: the directories of runs by submission, including submissions that no longer exist.
    """

    def __init__(self, store: Store, *, dry_run: bool) -> None:
        self.done = Pruned()
        self.runs: dict[str, list[Path]] = defaultdict(list)
        self._store = store
        self._dry_run = dry_run
        self._links: Counter[tuple[int, int]] = Counter()
        for name in names_in(store.runs_dir):
            self.runs[re.sub(r"\.\d+$", "", name)].append(store.runs_dir / name)

    def remove_all(self, over: Iterable[State]) -> None:
        """Complete interrupted removals, and remove these submissions."""
        try:
            for name in names_in(self._store.submissions_dir):
                hidden = _HIDDEN.fullmatch(name)
                directory = self._store.submissions_dir / name
                if hidden and is_own(directory):
                    self._remove(hidden[1], directory)
            for state in over:
                self._remove(state.submission.sid, state.submission.directory, state)
            # the store's shared files that no submission links to
            for name in names_in(self._store.archives_dir):
                with contextlib.suppress(OSError):
                    self._remove_shared(self._store.archives_dir / name)
        except KeyboardInterrupt:
            self.done.interrupted = True

    def _remove(self, sid: str, directory: Path, state: State | None = None) -> None:
        """Remove a submission with its runs; rename it first, so that nobody sees half of it."""
        runs = self.runs[sid]
        # Local jobs first: only the submission's own record leads to them, and it is removed last.
        local = self._local_jobs(sid, directory)
        try:
            if not self._dry_run:
                hidden = directory.with_name(f".{sid}.pruned")
                os.rename(directory, hidden)
                directory = hidden
                # Renamed in one step: a half-removed task without its state file would count as one
                # that waits, and would be started again.
                local = [path.rename(path.with_name(f".tmp-{path.name}")) for path in local]
                # Earlier removals have lowered the files' own link counts already.
                self._links.clear()
            paths = (*local, *runs, directory)
            freed = sum(self._freed(path) for path in paths)
            for path in () if self._dry_run else paths:
                while os.path.lexists(path):  # another prune may be removing it too
                    with contextlib.suppress(FileNotFoundError):
                        shutil.rmtree(path)
        except FileNotFoundError:
            return  # another prune was faster
        except OSError as error:
            self.done.kept.append((sid, f"cannot be removed: {error.strerror}: {error.filename}"))
            return
        self.done.bytes += freed
        end = (state.state, state.ended) if state else ("LEFT OVER", None)
        self.done.removed.append(Removed(sid, *end, runs=len(runs), bytes=freed))

    def _local_jobs(self, sid: str, directory: Path) -> list[Path]:
        submission, found = Submission(directory), []
        with contextlib.suppress(HpmlError, KeyError, TypeError):
            record = submission.record()
            if record["backend"] == "local":
                home = self._store.local_home(str(record["host"]))
                for job_id in sorted(submission.job_ids()):
                    path = home / "jobs" / job_id
                    with contextlib.suppress(HpmlError, KeyError, TypeError):
                        # If the directory of local jobs was removed, their ids begin at 1 again.
                        # The submission's directory proves that this is the same job.
                        if os.path.basename(read_json(path / "job.json")["directory"]) == sid:
                            found.append(path)
        return found

    def _remove_shared(self, path: Path) -> None:
        info = os.lstat(path)
        links = info.st_nlink
        if self._dry_run:
            links -= self._links[info.st_dev, info.st_ino]
        # The store's own link is the last one: no submission uses the file any more. A new
        # submission that links to it now keeps the inode alive, whatever is unlinked here.
        if links == 1 and is_own(path) and path.suffix in (".pyz", ".sh"):
            if not self._dry_run:
                os.unlink(path)
            self.done.bytes += info.st_blocks * _BLOCK_BYTES

    def _freed(self, top: Path) -> int:
        freed = 0
        for folder, _, files in os.walk(top):
            for path in (folder, *(os.path.join(folder, name) for name in files)):
                with contextlib.suppress(OSError):
                    info = os.lstat(path)
                    self._links[info.st_dev, info.st_ino] += 1
                    links = self._links[info.st_dev, info.st_ino]
                    if path == folder or links >= info.st_nlink:  # a file's last name
                        freed += info.st_blocks * _BLOCK_BYTES
        return freed
