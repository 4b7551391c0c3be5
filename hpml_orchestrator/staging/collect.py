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
"""Suffix of the name of results from which something is missing."""

_TIME_STEP_NS = 10**9  # some file systems store modification times in whole seconds


@dataclass(frozen=True)
class Collected:
    """The result for one file or directory.

    Attributes:
        path: of the result; "" if nothing was copied.
        bytes: of the files there.
        files: their number.
        seconds: that it took.
        digest: of names, sizes and contents, as of staged data; empty where something is missing.
        problem: what is missing and why; empty when all is there.
    """

    path: str = ""
    bytes: int = 0
    files: int = 0
    seconds: float = 0.0
    digest: str = ""
    problem: str = ""


def collect(source: str, directory: str, retry: Retry) -> Collected:
    """Copy a file or directory into another directory, by its own name.

    It appears when it is complete. If a part cannot be read, or time runs out, the rest gets a name
    that ends with `INCOMPLETE`, and each of its files is complete.

    Args:
        source: its path; it may be missing.
        directory: an existing one, in which nothing has that name yet.
        retry: calls again after faults that pass, and has the condition to stop.
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
    """Collects what cannot be read, except devices, fifos and sockets: they hold no results."""

    def add(
        self, path: str, reason: str, cause: BaseException | None = None, *, hint: str = ""
    ) -> None:
        """Note one path; see `Problems.add`."""
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
        # The copier sets a file's time last, so one with another time is unfinished even if it has
        # its full size, as a file with holes has from the start.
        late = abs(info.st_mtime_ns - entry.mtime_ns) >= _TIME_STEP_NS
        if info.st_size != entry.size or late:
            os.unlink(path)
        else:
            files, size = files + 1, size + entry.size
    return files, size


def _publish(partial: str, target: str, *, is_file: bool) -> str:
    if is_file:  # the copier always fills a directory
        (name,) = os.listdir(partial)
        os.rename(f"{partial}/{name}", target)
        os.rmdir(partial)
    else:
        os.rename(partial, target)
    fsync_dir(os.path.dirname(target))
    return target
