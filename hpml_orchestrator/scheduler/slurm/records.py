"""Parse the output of Slurm's commands: jobs, nodes, partitions, limits and accounts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.ids import row_covers_task
from hpml_orchestrator.records.units import MIB, parse_time_limit, read_bytes, read_count, read_gres
from hpml_orchestrator.scheduler.cluster import (
    Association,
    ClusterLimits,
    Gres,
    Node,
    Partition,
    Qos,
)
from hpml_orchestrator.scheduler.model import JobStatus, expand, parse_state, representative

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

# What squeue, sacct and sbatch print, as job statuses.
#
# Rows of squeue and of sacct have the same twelve columns, in this order:
#
#     raw id, id, state, exit, restarts, submitted, started, ended, nodes, reason, name, directory
#
# They are separated by the control character US (0x1f), so that a `|` in a job's name does no harm;
# squeue's rows end with RS (0x1e) and a newline, so that neither does a newline. The directory is
# the last column and holds the remainder. sacct has no count of restarts that works with 22.05, so
# its column holds another numeric field, which is ignored.
#
# `id` is the array or heterogeneous form: `25_3`, `25_[4-9%2]` for pending tasks, `28+1`. Times are
# epoch seconds (`SLURM_TIME_FORMAT=%s`) or, if a site's wrapper drops that variable, ISO 8601 in
# local time. Exit codes are `3:0` (code:signal) from sacct, and the plain wait status (768 for
# code 3) from squeue.

TASK = "%a"
"""Placeholder of a task's index in `--output`."""

UNIT = "\x1f"
RECORD = "\x1e"

# Size 0 means unlimited (the default cuts at 20 bytes); what follows the size is a suffix.
_SQUEUE_FIELDS = (
    "JobID JobArrayID State exit_code RestartCnt SubmitTime StartTime EndTime NodeList Reason "
    "Name WorkDir"
).split()
SQUEUE_FORMAT = f":0{UNIT},".join(_SQUEUE_FIELDS) + f":0{RECORD}"
"""Value for `squeue --Format`."""

SACCT_FIELDS = (
    "JobIDRaw,JobID,State,ExitCode,AllocCPUS,Submit,Start,End,NodeList,Reason,JobName,WorkDir"
)
"""Value for `sacct --format`; AllocCPUS only fills the column of restarts."""

_NO_VALUE = frozenset({"", "(null)", "none", "n/a", "unknown", "none assigned", "null"})
_SIGNAL_MASK = 0x7F
_CODE_SHIFT = 8
_YEAR_SECONDS = 365 * 86400.0


@dataclass(frozen=True)
class QueueEntry:
    """One row: a job, one task of an array, or all of its pending tasks.

    Attributes:
        raw_id: the controller's own number.
        shown_id: `25`, `25_3`, `25_[4-9%2]` or `28+1`.
        status: everything else, under the shown id.
    """

    raw_id: str
    shown_id: str
    status: JobStatus


def escape_output(path: str) -> str:
    r"""Return a path escaped so that sbatch's `--output` writes to exactly that file.

    A backslash anywhere disables all `%` patterns and is itself removed (observed with 22.05;
    `remove_path_slashes` in Slurm's source, also in the newest version): then only backslashes
    must be doubled. Without one, `%` must be doubled.
    >>> escape_output("/data/100%/out.log")
    '/data/100%%/out.log'
    >>> print(escape_output("/data/a\\b/100%j.log"))
    /data/a\\b/100%j.log
    """
    if "\\" in path:
        return path.replace("\\", "\\\\")
    return path.replace("%", "%%")


def escape_task_output(path: str) -> str:
    """Return an `--output` that gives each task of an array its own file, for a path with `%a`.

    Raises:
        ValueError: it has a backslash, which disables `%a`.
    >>> escape_task_output("/100%/run.%a/out.log")
    '/100%%/run.%a/out.log'
    """
    if "\\" in path:
        raise ValueError(f"{path!r} has a backslash, which keeps sbatch from naming a task's file")
    before, pattern, after = path.rpartition(TASK)
    return escape_output(before) + pattern + escape_output(after)


def parse_time(text: str) -> float | None:
    """Return seconds since the epoch; None for Slurm's words for no time.

    >>> parse_time("1795217201")
    1795217201.0
    >>> parse_time("Unknown") is None
    True
    """
    text = text.strip()
    if text.lower() in _NO_VALUE:
        return None
    if _number(text):
        return float(text) or None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def parse_exit(text: str) -> tuple[int, int] | None:
    """Return (exit code, signal) for `3:0` or a plain wait status; None for other text.

    >>> parse_exit("0:15"), parse_exit("768"), parse_exit("9"), parse_exit("")
    ((0, 15), (3, 0), (0, 9), None)
    """
    first, colon, second = text.strip().partition(":")
    if not _number(first) or (colon and not _number(second)):
        return None
    if colon:
        return int(first), int(second)
    status = int(first)
    if status == 1:  # the controller's "failed before it began"; accounting prints it as 1:0
        return 1, 0
    signal = status & _SIGNAL_MASK
    return (0, signal) if signal else (status >> _CODE_SHIFT, 0)


def parse_version(text: str) -> tuple[int, ...]:
    """Return the version in a text such as `slurm-wlm 22.05.8` or `26.05.0-0rc1`; () if none.

    >>> parse_version("slurm 24.11.5-1.el9")
    (24, 11, 5)
    """
    match = re.search(r"\d{2}\.\d{1,2}(?:\.\d{1,4})?", text, re.ASCII)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def parse_squeue(text: str) -> list[QueueEntry]:
    """Return the rows of `squeue --Format=SQUEUE_FORMAT`, without other lines."""
    rows = (_row(record.lstrip("\r\n"), restarts=True) for record in text.split(RECORD))
    return [row for row in rows if row]


def parse_sacct(text: str) -> list[QueueEntry]:
    """Return the rows of `sacct --format=SACCT_FIELDS`, without other lines."""
    # A job's name may contain newlines; only an id and a separator start a row.
    records = re.split(rf"\n(?=\d+{UNIT})", text.removesuffix("\n"))
    rows = (_row(record, restarts=False) for record in records)
    return [row for row in rows if row]


def match(rows: Iterable[QueueEntry], job_ids: Sequence[str]) -> dict[str, JobStatus]:
    """Return the status of each requested id that the rows contain.

    An array's own id gets the `representative` status of its tasks.
    """
    by_id: dict[str, list[QueueEntry]] = {}
    several: dict[str, list[QueueEntry]] = {}
    for row in rows:
        base, _, task = row.shown_id.partition("_")
        # A task of an array has two ids: its own number once it runs, and ARRAY_INDEX. Users and
        # our records use the second, a job's script sees the first; match both.
        for key in {row.shown_id, _base(row.shown_id), row.raw_id}:
            by_id.setdefault(key, []).append(row)
        # One row may stand for many pending tasks. Match it last, because a task that has started
        # has its own row with more details.
        if not task or task.startswith("["):
            several.setdefault(base, []).append(row)
    statuses = {}
    for job_id in job_ids:
        known = by_id.get(job_id) or [
            row for row in several.get(_base(job_id), ()) if row_covers_task(row.shown_id, job_id)
        ]
        if known:
            statuses[job_id] = representative(job_id, [row.status for row in known])
    return statuses


def _base(job_id: str) -> str:
    return re.split(r"[_+]", job_id, maxsplit=1)[0]


def _row(text: str, *, restarts: bool) -> QueueEntry | None:
    fields = text.split(UNIT, len(_SQUEUE_FIELDS) - 1)
    if len(fields) != len(_SQUEUE_FIELDS) or not _number(fields[0].strip()):
        return None
    shown_id, raw_state, count = fields[1].strip(), fields[2].strip(), fields[4].strip()
    state, nodes = parse_state(raw_state), _text(fields[8])
    code, signal = parse_exit(fields[3]) or (None, 0)
    # Before a job is over, Slurm prints predicted values as its exit code, start and end; the end
    # of a running job is its time limit. A job that was cancelled while pending has a start time
    # but no nodes.
    started = parse_time(fields[6]) if nodes and not state.waiting else None
    limit_at = parse_time(fields[7])
    if started and not limit_at:  # squeue prints NONE without a limit; the controller uses a year
        limit_at = started + _YEAR_SECONDS
    # A held job that was requeued still shows its begin time as its start.
    planned = state.waiting and not nodes and not re.search(r"h[eo]ld", fields[9], re.IGNORECASE)
    status = JobStatus(
        job_id=shown_id,
        state=state,
        raw_state=raw_state,
        reason=_text(fields[9]),
        exit_code=code if state.over else None,
        signal=signal if state.over else 0,
        nodes=nodes,
        submitted=parse_time(fields[5]),
        started=started,
        ended=parse_time(fields[7]) if state.over else None,
        limit_at=limit_at if started and restarts and not state.over else None,
        expected_start=parse_time(fields[6]) if planned else None,
        restarts=int(count) if restarts and _number(count) else 0,
        name=fields[10],
        directory=fields[11],
    )
    return QueueEntry(fields[0].strip(), shown_id, status)


def _number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _text(field: str) -> str:
    field = field.strip()
    return "" if field.lower() in _NO_VALUE else field


ASSOCIATION_FIELDS = (
    "defaultaccount,cluster,account,partition,qos,defaultqos,maxwall,maxjobs,"
    "maxtres,maxtresmins,maxtrespernode,grptres,grpjobs"
)
"""Value for `sacctmgr show user … withassoc format=…`, which alone shows the default account."""

QOS_FIELDS = (
    "name,flags,maxwall,mintres,maxtres,maxtresmins,maxtrespernode,maxtresperuser,"
    "maxjobsperuser,maxjobsperaccount,grptres,grpjobs"
)
"""Value for `sacctmgr show qos format=…`."""

_START = re.compile(r"(?:License|Node|Partition|Reservation)Name=", re.ASCII)
_KEY = re.compile(r"(?:(?<=\s)|^)([A-Za-z][A-Za-z0-9_/:.\-\[\]]*)=", re.ASCII)
_FREE_TEXT = frozenset({"OS", "Reason", "Comment", "Extra"})  # each starts its own line
_NO_LIMIT = frozenset(
    "(null) null none n/a n/s unknown unlimited infinite infinity invalid not_set partition_limit "
    "-1 notset".split()
)
_MARKS = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "!": "POWER_DOWN",
    "%": "POWERING_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
}
_DEFAULTS = ClusterLimits()


class Fields(dict[str, str]):
    """Values by name, as printed; a missing name has an empty value."""

    def __missing__(self, name: str) -> str:
        return ""


def parse_records(text: str) -> list[Fields]:
    """Return the records printed by commands such as `scontrol show node`; ignore other lines."""
    records: list[Fields] = []
    last = ""
    for line in text.splitlines():
        if _START.match(line):
            records.append(Fields())
        elif not records or not line.strip():
            continue
        # A reason or a comment may contain newlines, and its lines may look like anything, even
        # like the start of a field.
        elif not line[0].isspace() or not _KEY.match(line.lstrip()):
            if last:  # continues the free text above
                records[-1][last] += f"\n{line.strip()}"
            continue
        for name, value in _pairs(line.strip()):
            # The first occurrence wins: free text further down may contain a word that looks like a
            # field.
            records[-1].setdefault(name, value)
            last = name
    return records


def _pairs(line: str) -> Iterator[tuple[str, str]]:
    match = _KEY.match(line)
    while match:
        free = match[1] in _FREE_TEXT and match.start() == 0
        following = None if free else _KEY.search(line, match.end())
        yield match[1], line[match.end() : following.start() if following else len(line)].strip()
        match = following


def parse_config(text: str) -> Fields:
    r"""Return the values of `scontrol show config`; the first if a name appears twice.

    >>> parse_config("Configuration data as of now\nMaxArraySize    = 1001\n")
    {'MaxArraySize': '1001'}
    """
    config = Fields()
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        name = name.strip()
        if equals and name and not re.search(r"\s", name):
            config.setdefault(name, value.strip())
    return config


def limits_from(config: Fields) -> ClusterLimits:
    """Return the limits of the whole cluster, from `scontrol show config`."""
    script = re.search(r"\bmax_script_size=(\d{1,12})\b", config["SchedulerParameters"], re.ASCII)
    enforce = config["EnforcePartLimits"].upper()
    preempts = config["PreemptType"].rpartition("/")[2] not in ("", "none", "(null)")
    return ClusterLimits(
        version=parse_version(config["SLURM_VERSION"]),
        cluster=_plain(config["ClusterName"]),
        max_array_size=read_count(config["MaxArraySize"]) or _DEFAULTS.max_array_size,
        max_script_bytes=int(script[1]) if script else _DEFAULTS.max_script_bytes,
        max_tasks_per_node=read_count(config["MaxTasksPerNode"]) or _DEFAULTS.max_tasks_per_node,
        enforce_partition_limits={"YES": "ALL", "": "NO"}.get(enforce, enforce),
        accounting=config["AccountingStorageType"].endswith("slurmdbd"),
        accounting_enforce=frozenset(_names(config["AccountingStorageEnforce"].lower())),
        memory_consumable="MEMORY" in config["SelectTypeParameters"].upper(),
        whole_nodes=config["SelectType"].endswith("linear"),
        default_memory_per_node_mib=_limit(config["DefMemPerNode"]),
        default_memory_per_cpu_mib=_limit(config["DefMemPerCPU"]),
        max_memory_per_node_mib=_limit(config["MaxMemPerNode"]),
        max_memory_per_cpu_mib=_limit(config["MaxMemPerCPU"]),
        tmp_fs=_plain(config["TmpFS"]) or _DEFAULTS.tmp_fs,
        job_requeue={"1": True, "0": False}.get(config["JobRequeue"]),
        preemption=config["PreemptMode"].upper() if preempts else "",
        submit_plugins=_names(config["JobSubmitPlugins"]),
    )


def partition_from(record: Fields) -> Partition:
    """Return one partition of `scontrol show partition`."""
    return Partition(
        name=record["PartitionName"],
        state=record["State"].upper() or "UP",
        default=_yes(record["Default"]),
        nodes=_nodes(record["Nodes"]),
        total_nodes=read_count(record["TotalNodes"]) or 0,
        preemption=record["PreemptMode"].upper(),
        priority_tier=read_count(record.get("PriorityTier", "1")) or 0,
        grace_seconds=read_count(record["GraceTime"]) or 0,
        max_seconds=_seconds(record["MaxTime"]),
        default_seconds=_seconds(record["DefaultTime"]),
        min_nodes=read_count(record["MinNodes"]) or 0,
        max_nodes=read_count(record["MaxNodes"]),
        max_cpus_per_node=read_count(record["MaxCPUsPerNode"]),
        max_memory_per_node_mib=_limit(record["MaxMemPerNode"]),
        max_memory_per_cpu_mib=_limit(record["MaxMemPerCPU"]),
        default_memory_per_node_mib=_limit(record["DefMemPerNode"]),
        default_memory_per_cpu_mib=_limit(record["DefMemPerCPU"]),
        allow_accounts=_allowed(record["AllowAccounts"]),
        deny_accounts=_names(record["DenyAccounts"]),
        allow_qos=_allowed(record["AllowQos"]),
        deny_qos=_names(record["DenyQos"]),
        allow_groups=_allowed(record["AllowGroups"]),
        exclusive=record["OverSubscribe"].upper().startswith("EXCLUSIVE"),
        qos=_plain(record["QoS"]),
        root_only=_yes(record["RootOnly"]),
        reservation_only=_yes(record["ReqResv"]),
    )


def node_from(record: Fields) -> Node:
    """Return one node of `scontrol show node`."""
    memory = (parse_memory(record["RealMemory"]) or 1) - (parse_memory(record["MemSpecLimit"]) or 0)
    return Node(
        name=record["NodeName"],
        states=node_states(record["State"]),
        partitions=_names(record["Partitions"]),
        sockets=read_count(record["Sockets"]) or 1,
        cores_per_socket=read_count(record["CoresPerSocket"]) or 1,
        threads_per_core=read_count(record["ThreadsPerCore"]) or 1,
        # Versions before 21.08 do not print the number of CPUs without specialised cores.
        cpus=read_count(record["CPUEfctv"]) or read_count(record["CPUTot"]) or 1,
        memory_mib=max(memory, 1),
        tmp_disk_mib=parse_memory(record["TmpDisk"]) or 0,
        gres=parse_gres(record["Gres"]),
        features=frozenset(_names(record["AvailableFeatures"])),
        # without its author and time: `bad disk [root@2026-11-20T19:45:34]`
        reason=re.sub(r"\s*\[[^\[\]@]*@[^\[\]]*\]$", "", _plain(record["Reason"])),
    )


def parse_associations(text: str, cluster: str) -> tuple[Association, ...]:
    """Return a user's associations on one cluster; see `ASSOCIATION_FIELDS`."""
    return tuple(
        Association(
            account=row["account"],
            partition=row["partition"],
            default=row["account"] == row["defaultaccount"],
            # A sign means that the name was added to or removed from the account's list.
            qos=tuple(name.lstrip("+") for name in _names(row["qos"]) if name[0] != "-"),
            default_qos=row["defaultqos"],
            max_seconds=_seconds(row["maxwall"]),
            max_tres_per_job=parse_tres(row["maxtres"]),
            max_tres_minutes_per_job=parse_tres(row["maxtresmins"]),
            max_tres_per_node=parse_tres(row["maxtrespernode"]),
            max_tres_per_user=parse_tres(f"job={row['maxjobs']}"),
            group_tres=parse_tres(f"{row['grptres']},job={row['grpjobs']}"),
        )
        for row in parse_rows(text, ASSOCIATION_FIELDS)
        if row["account"] and row["cluster"] in ("", cluster)
    )


def parse_qos(text: str) -> tuple[Qos, ...]:
    """Return all QOS; see `QOS_FIELDS`."""
    return tuple(
        Qos(
            name=row["name"],
            flags=frozenset(_names(row["flags"])),
            max_seconds=_seconds(row["maxwall"]),
            min_tres_per_job=parse_tres(row["mintres"]),
            max_tres_per_job=parse_tres(row["maxtres"]),
            max_tres_minutes_per_job=parse_tres(row["maxtresmins"]),
            max_tres_per_node=parse_tres(row["maxtrespernode"]),
            max_tres_per_user=parse_tres(
                "{maxtresperuser},job={maxjobsperuser},job={maxjobsperaccount}".format_map(row)
            ),
            group_tres=parse_tres(f"{row['grptres']},job={row['grpjobs']}"),
        )
        for row in parse_rows(text, QOS_FIELDS)
        if row["name"]
    )


def parse_rows(text: str, fields: str) -> Iterator[Mapping[str, str]]:
    """Yield the rows of `sacctmgr -nP show … format=FIELDS` by field; other lines are left out."""
    wanted = fields.split(",")
    for line in text.splitlines():
        values = line.split("|")
        if len(values) == len(wanted):
            yield dict(zip(wanted, (value.strip() for value in values), strict=True))


def parse_memory(text: str) -> int | None:
    """Return a size in MiB; None if unlimited or not a size.

    >>> parse_memory("62.50G"), parse_memory("1000Mc"), parse_memory("16000")
    (64000, 1000, 16000)
    """
    size = read_bytes(text)
    return None if size is None else size // MIB


def parse_tres(text: str) -> dict[str, int]:
    """Return the smallest count of each kind that has a limit, memory in MiB.

    >>> parse_tres("cpu=16,mem=62.50G,gres/gpu:a100=4")
    {'cpu': 16, 'mem': 64000, 'gres/gpu:a100': 4}
    """
    counts: dict[str, int] = {}
    for part in text.split(","):
        kind, _, value = part.strip().rpartition("=")
        count = parse_memory(value) if kind == "mem" else read_count(value)
        if kind and count is not None:
            counts[kind] = min(count, counts.get(kind, count))
    return counts


def parse_gres(text: str) -> tuple[Gres, ...]:
    """Return the generic resources of one node; entries of the same kind are added up.

    >>> parse_gres("gpu:a100:4(S:0-1),gpu:2")
    (Gres(name='gpu', kind='a100', count=4), Gres(name='gpu', kind='', count=2))
    """
    return tuple(Gres(*resource) for resource in read_gres(text))


def node_states(text: str) -> frozenset[str]:
    """Return a node's base state and flags in upper case, including those shown as suffixes.

    >>> sorted(node_states("DOWN*+CLOUD")), sorted(node_states("idle~"))
    (['CLOUD', 'DOWN', 'NOT_RESPONDING'], ['IDLE', 'POWERED_DOWN'])
    """
    states: set[str] = set()
    for part in re.split(r"[+,\s]+", text.strip().upper()):
        state = part.rstrip("".join(_MARKS))
        states |= {_MARKS[mark] for mark in part[len(state) :]} | {state}
    return frozenset(states - {""})


def _plain(text: str) -> str:
    text = text.strip()
    return "" if text.lower() in _NO_LIMIT else text


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in _plain(text).split(",") if name.strip())


def _nodes(text: str) -> tuple[str, ...]:
    try:
        return expand(_plain(text))
    except InputError:
        return ()


def _allowed(text: str) -> tuple[str, ...] | None:
    # If there is a list of denied names, Slurm prints no list of allowed ones.
    return None if text.upper() == "ALL" else _names(text) or None


def _yes(text: str) -> bool:
    return text.upper() in {"YES", "1", "TRUE"}


def _seconds(text: str) -> int | None:
    try:
        return parse_time_limit(text)
    except ValueError:
        return None


def _limit(text: str) -> int | None:
    """Parse memory; some forms print 0 for unlimited."""
    return parse_memory(text) or None
