"""Whose a job is: the prolog's map, the user of its processes, and their environment."""

from __future__ import annotations

import json
import os
import pwd
import re
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace

from hpml_exporters.core import procfs
from hpml_exporters.jobs.board import JobFacts, facts_of
from hpml_exporters.jobs.cgroups import FoundJob
from hpml_exporters.options import Roots
from hpml_orchestrator.records.files import names_in

LARGEST_MAP = 16384  # bytes; templates/prolog writes less than 4 KiB
# Whatever is in the place of a map, a link must not lead elsewhere and a FIFO must not block.
_MAP_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MAP_NAME = re.compile(r"[1-9][0-9]{0,9}\.json", re.ASCII)
_MOST_MAPS = 4096
_OVERTIME_SECONDS = 86400.0
_SCHEMA = 1
_VARIABLES = {
    "account": "SLURM_JOB_ACCOUNT",
    "partition": "SLURM_JOB_PARTITION",
    "qos": "SLURM_JOB_QOS",
    "name": "SLURM_JOB_NAME",
    "array_job": "SLURM_ARRAY_JOB_ID",
    "array_task": "SLURM_ARRAY_TASK_ID",
    "sweep": "HPML_SWEEP",
    "point": "HPML_POINT",
}
_NUMBERS = {"start": "SLURM_JOB_START_TIME", "end": "SLURM_JOB_END_TIME", "ranks": "WORLD_SIZE"}
_NAME_WAIT_SECONDS = 0.2
_NAME_RETRY_SECONDS = 600.0


@dataclass
class _Known:
    """What is kept of a job from one look to the next.

    Attributes:
        whose: its user as it was found: without control groups the next job of this number may be
            another's.
        uid: of its user as its processes show it; -1 unknown.
        looks: since this user was known.
        told: the job by the environment of its processes.
        pids: its processes at the last look that found any.
    """

    whose: int
    uid: int = -1
    looks: int = 0
    told: JobFacts | None = None
    pids: frozenset[int] = frozenset()


class Identities:
    """Finds out and remembers each job's user, account, run and GPUs.

    Args:
        roots: where procfs and the prolog's maps are.
        own: the node agent's facts about the only job to export; None: all jobs.
        names: names of users; by default the system's.
    """

    def __init__(
        self, roots: Roots, own: JobFacts | None = None, names: UserNames | None = None
    ) -> None:
        self._roots, self._own = roots, own
        self._names = names or UserNames()
        self._known: dict[str, _Known] = {}

    def keep(self, keys: Collection[str]) -> None:
        """Forget all jobs but these, by their `FoundJob.key`."""
        for key in self._known.keys() - set(keys):
            del self._known[key]

    def facts(self, job: FoundJob, now: float) -> JobFacts:
        """Return what is known of a job.

        The environment, which users can change, only completes the map's or the agent's facts.

        Args:
            job: as it was found, of all slurmd of this machine.
            now: monotonic seconds.
        """
        known = self._known.get(job.key)
        if known is None or known.whose != job.uid:
            known = self._known[job.key] = _Known(job.uid, job.uid)
        is_certain = job.uid >= 0
        if not is_certain and known.uid <= 0:
            self._find_user(job, known)
        pids = frozenset(pid for step in job.steps.values() for pid in step)
        if pids and known.pids.isdisjoint(pids):
            # New or requeued: its start, its end and its GPUs have changed.
            known.looks, known.told = 0, None
        known.pids = pids or known.pids
        known.looks += 1
        # A rank may begin long after its job: look again after 1, 2, 4, 8, … looks.
        if known.uid >= 0 and known.looks & (known.looks - 1) == 0:
            self._ask(job, known)
        facts = self._own
        if facts is None and not job.cluster:
            facts = read_map(self._roots.run, job.jobid)
        is_settled = is_certain or known.uid > 0
        if facts is not None and is_settled and facts.uid not in {-1, known.uid}:
            facts = None  # left behind by another job of this number
        facts = facts or JobFacts(job.jobid)
        uid = known.uid if is_settled or facts.uid < 0 else facts.uid
        facts = _completed(facts, known.told)
        return replace(facts, uid=uid, user=facts.user or self._names.name(uid, now))

    def _find_user(self, job: FoundJob, known: _Known) -> None:
        """Take the user from the job's processes.

        A task is root's until slurmstepd's child becomes its user, and Slurm's own process in the
        extern step always is: so root counts only as long as nobody else is seen.
        """
        users = [(step, procfs.uid(self._roots.proc, pid)) for step, pid in _first(job)]
        root = 0 if any(uid == 0 and step != "extern" for step, uid in users) else -1
        uid = next((uid for _, uid in users if uid > 0), root)
        if uid != known.uid:
            known.uid, known.looks, known.told = uid, 0, None

    def _ask(self, job: FoundJob, known: _Known) -> None:
        for step, pid in _first(job):
            if procfs.uid(self._roots.proc, pid) == known.uid:
                values = procfs.environment(self._roots.proc, pid)
                if values.get("SLURM_JOB_ID") == job.jobid:
                    told = _told(job.jobid, values)
                    # Prefer the agent's list: it has read the devices.
                    if self._own is None:
                        told = replace(told, gpus=_gpus(step, values))
                    known.told = _completed(known.told or told, told)


class UserNames:
    """Names of users; their directory service may be slow or down.

    A separate thread looks them up, and is waited for only briefly.

    Args:
        lookup: name by number; raises KeyError for an unknown user, OSError if that is unclear.
    """

    def __init__(self, lookup: Callable[[int], str] | None = None) -> None:
        self._lookup = lookup or _system_name
        self._known: dict[int, str] = {}
        self._retry_at: dict[int, float] = {}
        self._thread: threading.Thread | None = None

    def name(self, uid: int, now: float) -> str:
        """Return the name of a user; empty as long as it is unknown.

        Args:
            uid: of the user; negative: unknown.
            now: monotonic seconds.
        """
        if uid < 0 or uid in self._known or now < self._retry_at.get(uid, now):
            return self._known.get(uid, "")
        # One lookup at a time: a directory service that hangs must not collect threads.
        if self._thread is None or not self._thread.is_alive():
            self._retry_at[uid] = now + _NAME_RETRY_SECONDS
            self._thread = threading.Thread(target=self._ask, args=(uid,), daemon=True)
            self._thread.start()
            self._thread.join(_NAME_WAIT_SECONDS)
        return self._known.get(uid, "")

    def _ask(self, uid: int) -> None:
        try:
            self._known[uid] = self._lookup(uid)
        except KeyError:
            self._known[uid] = str(uid)
        except OSError:
            pass  # asked again after `_NAME_RETRY_SECONDS`


def _system_name(uid: int) -> str:
    return pwd.getpwuid(uid).pw_name


def read_map(run: str, jobid: str) -> JobFacts | None:
    """Return the facts in the prolog's map `{run}/jobs/<jobid>.json`; None if it is not trusted.

    It is trusted if it and its directory belong to root or to this process's user, nobody else may
    write to them, it is a small regular file, was written since boot, and is about that job.
    """
    directory = f"{run}/jobs"
    try:
        descriptor = os.open(f"{directory}/{jobid}.json", _MAP_FLAGS)
    except OSError:
        return None
    with open(descriptor, "rb") as stream:
        # Of the open file: its name could point to another one by now.
        about = os.fstat(descriptor)
        is_trusted = stat.S_ISREG(about.st_mode) and all(
            one.st_uid in {0, os.geteuid()} and not one.st_mode & _OTHERS_WRITE
            for one in (about, os.stat(directory))
        )
        # Job ids may start over, and where /run is on a disk it survives a reboot.
        is_old = about.st_mtime < time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) - 1
        if not is_trusted or is_old or about.st_size > LARGEST_MAP:
            return None
        # A name that was cut may end within a character.
        text = stream.read(LARGEST_MAP).decode("utf-8", "replace")
    try:
        values = json.loads(text)
        facts = facts_of(values) if values["schema_version"] == _SCHEMA else None
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return facts if facts and facts.jobid == jobid else None


def mapped_jobs(run: str, seen: Collection[str]) -> list[str]:
    """Return the ids of further jobs that the prolog's maps in `{run}/jobs` name.

    The epilog removes a job's map. One that it left behind ends with the next job on its GPUs, or
    a day after its time limit, which may have been extended.

    Args:
        run: directory of the node's maps.
        seen: ids of the jobs that were found by their processes.
    """
    names = sorted(names_in(f"{run}/jobs"))[:_MOST_MAPS]
    jobids = [name.removesuffix(".json") for name in names if _MAP_NAME.fullmatch(name)]
    maps = [facts for jobid in jobids if (facts := read_map(run, jobid)) is not None]
    newest: dict[str, JobFacts] = {}
    for facts in sorted(maps, key=lambda one: (one.jobid in seen, one.start, int(one.jobid))):
        newest.update(dict.fromkeys(facts.gpus or (), facts))
    now = time.time()
    return [
        facts.jobid
        for facts in maps
        if facts.jobid not in seen
        and (not facts.end or now < facts.end + _OVERTIME_SECONDS)
        and all(newest[gpu] is facts for gpu in facts.gpus or ())
    ]


def _first(job: FoundJob) -> Iterable[tuple[str, int]]:
    """Yield two processes of each step, with its name; the extern step, which is Slurm's, last."""
    for step, pids in sorted(job.steps.items(), key=lambda one: one[0] == "extern"):
        yield from ((step, pid) for pid in sorted(pids)[:2])


def _told(jobid: str, values: Mapping[str, str]) -> JobFacts:
    known: dict[str, object] = {
        field: values[name] for field, name in _VARIABLES.items() if name in values
    }
    known["run"] = os.path.basename(values.get("HPML_RUN_DIR", "").rstrip("/"))
    for field, name in _NUMBERS.items():
        if re.fullmatch(r"[0-9]{1,10}", values.get(name, "")):
            known[field] = int(values[name])
    return facts_of({"jobid": jobid, **known})


def _gpus(step: str, values: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the names of this node's GPUs in the environment of a process; None: unknown.

    A step inherits the batch script's variables, which name the GPUs of the job's first node.
    Numbers are places in Slurm's list, which `/etc/hpml/gpus` translates, as for the prolog.
    """
    names = tuple(values.get("SLURM_JOB_GPUS", "").split(","))
    nodes = values.get("SLURM_JOB_NUM_NODES") or values.get("SLURM_NNODES")
    if step != "batch" and nodes != "1":
        return None
    if all(name.startswith(("GPU-", "MIG-")) for name in names):
        return names
    if not all(re.fullmatch(r"[0-9]{1,4}", name) for name in names):
        return None
    lines = procfs.text(os.environ.get("HPML_GPUS", "/etc/hpml/gpus")).splitlines()
    table = [line.split()[0] for line in lines if line.strip() and line.lstrip()[0] != "#"]
    places = tuple(map(int, names))
    if not table:
        return tuple(map(str, places))
    return tuple(table[place] for place in places) if max(places) < len(table) else None


def _completed(facts: JobFacts, more: JobFacts | None) -> JobFacts:
    unknown = [one.name for one in fields(facts) if getattr(facts, one.name) == one.default]
    return replace(facts, **{name: getattr(more, name) for name in unknown}) if more else facts
