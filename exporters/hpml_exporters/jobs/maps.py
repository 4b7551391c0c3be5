"""The prolog's map: `{run}/jobs/<jobid>.json`, believed only where root or we wrote it."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable

from hpml_exporters.jobs.board import JobFacts, facts_of

__all__ = ["LARGEST", "JobMaps"]

LARGEST = 16384  # bytes; templates/prolog writes less than 4 KiB
_SCHEMA = 1
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class JobMaps:
    """Reads the files of jobs that are here, each one once per change.

    A file counts when it and its directory belong to root or to our own user, nobody else may
    write to either, it is regular, small, valid, written since the machine booted, and about that
    very job. Files of other jobs are never opened.

    Args:
        run: directory that holds `jobs`.
        booted: says when the machine started, seconds since the epoch; 0: unknown. That moves
            with the clock, so it is asked again before a file is found too old.
    """

    def __init__(self, run: str, booted: Callable[[], float]) -> None:
        self._directory = f"{run}/jobs"
        self._ask_booted = booted
        self._booted = booted()
        self._asked = False
        self._known: dict[str, tuple[tuple[int, int, int], JobFacts | None]] = {}

    def facts(self, jobid: str) -> JobFacts | None:
        """Return what the map says of a job; None without one that can be believed."""
        path = f"{self._directory}/{jobid}.json"
        try:
            descriptor = os.open(path, _FLAGS)
        except OSError:
            self._known.pop(jobid, None)
            return None
        try:
            about = os.fstat(descriptor)
            mark = (about.st_ino, about.st_mtime_ns, about.st_size)
            known = self._known.get(jobid)
            if known is None or known[0] != mark:
                if self._too_old(about):
                    return None  # and not for good: the clock may be set back
                believed = self._believed(about)
                data = os.read(descriptor, LARGEST + 1) if believed else b""
                known = self._known[jobid] = (mark, _parse(data, jobid))
        except OSError:
            return None
        finally:
            os.close(descriptor)
        return known[1]

    def keep(self, jobids: set[str]) -> None:
        """Forget all jobs but these; another look begins."""
        self._asked = False
        for jobid in self._known.keys() - jobids:
            del self._known[jobid]

    def _too_old(self, about: os.stat_result) -> bool:
        if self._booted and about.st_mtime < self._booted - 1 and not self._asked:
            self._booted, self._asked = self._ask_booted(), True
        return bool(self._booted) and about.st_mtime < self._booted - 1

    def _believed(self, about: os.stat_result) -> bool:
        if not stat.S_ISREG(about.st_mode) or about.st_size > LARGEST:
            return False
        try:
            directory = os.stat(self._directory)
        except OSError:
            return False
        return all(
            one.st_uid in {0, os.geteuid()} and not one.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            for one in (about, directory)
        )


def _parse(data: bytes, jobid: str) -> JobFacts | None:
    try:
        # A name that was cut may end within a character.
        values = json.loads(data.decode("utf-8", "replace"))
        if values.get("schema_version") != _SCHEMA:
            return None
        facts = facts_of(values)
    except (ValueError, AttributeError, RecursionError):
        return None
    return facts if facts.jobid == jobid else None
