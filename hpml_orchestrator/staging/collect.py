"""Bring results back from a node's own disk or memory to the shared file system."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.records.files import fsync_dir
from hpml_orchestrator.staging.copy import CopyOptions, CopyProgress, copy
from hpml_orchestrator.staging.manifest import Listing, hashing, tree_digest
from hpml_orchestrator.staging.plan import NO_FILE, scan_file, scan_tree
from hpml_orchestrator.staging.request import Problems, StagingStopped, shown, why
from hpml_orchestrator.staging.source import TreeSource
from hpml_orchestrator.staging.store import remove_tree

if TYPE_CHECKING:
    from hpml_orchestrator.staging.plan import CopyPlan
    from hpml_orchestrator.staging.request import Retry

INCOMPLETE = ".incomplete"
"""Suffix of the name of incomplete results."""

_TIME_STEP_NS = 10**9  # some file systems store modification times in whole seconds


@dataclass(frozen=True)
class Collected:
    """Outcome for one file or directory.

    Attributes:
        path: path of the result; "" if nothing was copied.
        bytes: total size of its files.
        files: number of files.
        seconds: duration.
        digest: digest of names, sizes and contents, as for staged data; empty if incomplete.
        problem: what is missing and why; empty if complete.
    """

    path: str = ""
    bytes: int = 0
    files: int = 0
    seconds: float = 0.0
    digest: str = ""
    problem: str = ""


def collect(source: str, directory: str, retry: Retry) -> Collected:
    """Copy a file or directory into another directory under its own name.

    It appears only when it is complete. If a part cannot be read or time runs out, the name ends
    with `INCOMPLETE`, and each file in it is complete.

    Args:
        source: path of the file or directory; it may be missing.
        directory: existing directory without an entry of that name.
        retry: retries calls after transient faults, and holds the stop condition.
    """
    begin = time.monotonic()
    if not os.path.exists(source):
        return Collected(problem="is a link to nothing" if os.path.islink(source) else "")
    name = os.path.basename(source)
    target = f"{directory}/{name}"
    partial = f"{directory}/.{name}.partial-{os.getpid()}-{secrets.token_hex(4)}"
    left_out = _Unread("not all could be read")
    plan, digest, problem = None, "", ""
    try:
        is_directory = os.path.isdir(source)
        reader = TreeSource(source, retry, "tree" if is_directory else "file")
        if is_directory:
            plan = scan_tree(source, retry, outside_links=True, problems=left_out)
        else:
            plan = scan_file(source, retry)
        os.mkdir(partial, 0o700 | (plan.top.mode & 0o777))
        digests = copy(
            plan,
            reader,
            partial,
            options=CopyOptions(goes_on=True),
            retry=retry,
            progress=CopyProgress(None),
        )
        left_out.raise_any()
        digest = tree_digest(Listing.of(plan, digests), hashing())
    except StagingStopped:
        problem = "time ran out"
    except HpmlError as error:
        problem = "; ".join(line.strip() for line in str(error).splitlines())
    except OSError as error:
        problem = f"{shown(error.filename or source)}: {why(error)}"
    if plan is None:
        return Collected(problem=problem)
    try:
        files, size = _whole_files(plan, partial) if problem else (plan.file_count, plan.bytes)
        if problem and not files:
            with contextlib.suppress(OSError):
                remove_tree(partial)
            return Collected(seconds=time.monotonic() - begin, problem=problem)
        path = _publish(partial, target + INCOMPLETE * bool(problem), is_file=not is_directory)
    except OSError as error:
        return Collected(problem=f"{problem or shown(target)}: {why(error)}")
    seconds = time.monotonic() - begin
    return Collected(path, size, files, seconds, digest, problem)


class _Unread(Problems):
    """Collects unreadable files, except devices, fifos and sockets, which hold no results."""

    def add(
        self, path: str, reason: str, cause: BaseException | None = None, *, hint: str = ""
    ) -> None:
        """Add the fault of a path; see `Problems.add`."""
        if reason != NO_FILE:
            super().add(path, reason, cause, hint=hint)


def _whole_files(plan: CopyPlan, partial: str) -> tuple[int, int]:
    """Remove unfinished files; return the number and bytes of the finished ones."""
    files = size = 0
    for entry in plan.files:
        path = f"{partial}/{entry.path}"
        try:
            info = os.lstat(path)
        except OSError:
            continue
        # The copier sets a file's time last, so a different time marks an unfinished file, even if
        # its size is right, as it is from the start for a file with holes.
        late = abs(info.st_mtime_ns - entry.mtime_ns) >= _TIME_STEP_NS
        if info.st_size != entry.size or late:
            os.unlink(path)
        else:
            files, size = files + 1, size + entry.size
    return files, size


def _publish(partial: str, target: str, *, is_file: bool) -> str:
    if is_file:  # the copier always writes into a directory
        (name,) = os.listdir(partial)
        os.rename(f"{partial}/{name}", target)
        os.rmdir(partial)
    else:
        os.rename(partial, target)
    fsync_dir(os.path.dirname(target))
    return target
