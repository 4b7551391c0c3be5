r"""What `scontrol show` and `sacctmgr show` print, as the records of `scheduler.cluster`.

    NodeName=node1 Arch=x86_64 CoresPerSocket=8        a record begins in the first column
       CPUAlloc=2 CPUEfctv=16 CPUTot=16                 more fields of it
       OS=Linux 6.1.0 #1 SMP                            free text takes the rest of its line
    Name = value                                        `scontrol show config`

    memory      62.50G  1000M  16000 (MiB)  1000Mc  1000Mn  16?
    TRES        cpu=16,mem=62.50G,node=1,gres/gpu=4,gres/gpu:a100=4
    GRES        gpu:a100:4(S:0-1),gpu:1g.10gb:7(IDX:0,2-6),craynetwork:no_consume:4K
    state       IDLE+DRAIN  DOWN*  idle~  MIXED+CLOUD+POWERING_UP#

Pure functions. Slurm's many words for "nothing" and "no limit" become None or are left out, and so
does anything unreadable: a word that a later version invents must not stop a reader.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.units import MIB, parse_time_limit, read_bytes, read_count, read_gres
from hpml_orchestrator.scheduler.cluster import (
    Association,
    ClusterLimits,
    Gres,
    Node,
    Partition,
    Qos,
)
from hpml_orchestrator.scheduler.nodelist import expand
from hpml_orchestrator.scheduler.slurm.parse import parse_version

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ASSOCIATION_FIELDS = (
    "defaultaccount,cluster,account,partition,qos,defaultqos,maxwall,maxjobs,"
    "maxtres,maxtresmins,maxtrespernode,grptres,grpjobs"
)
"""For `sacctmgr show user … withassoc format=…`, which alone also shows the default account."""

QOS_FIELDS = (
    "name,flags,maxwall,mintres,maxtres,maxtresmins,maxtrespernode,maxtresperuser,"
    "maxjobsperuser,maxjobsperaccount,grptres,grpjobs"
)
"""For `sacctmgr show qos format=…`."""

_START = re.compile(r"(?:License|Node|Partition|Reservation)Name=", re.ASCII)
_KEY = re.compile(r"(?:(?<=\s)|^)([A-Za-z][A-Za-z0-9_/:.\-\[\]]*)=", re.ASCII)
_FREE_TEXT = frozenset({"OS", "Reason", "Comment", "Extra"})  # each begins its line
_NOTHING = frozenset(
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
    """Return the records of commands such as `scontrol show node`, without other lines."""
    records: list[Fields] = []
    last = ""
    for line in text.splitlines():
        if _START.match(line):
            records.append(Fields())
        elif not records or not line.strip():
            continue
        # A reason or a comment may contain newlines, and its lines then look like anything, even
        # like the beginning of a field.
        elif not line[0].isspace() or not _KEY.match(line.lstrip()):
            if last:  # the free text above continues
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
            # With a sign, the name was added to or removed from the account's list.
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
    """Return MiB of a size; None if unlimited or not a size.

    >>> parse_memory("62.50G"), parse_memory("1000Mc"), parse_memory("16000")
    (64000, 1000, 16000)
    """
    size = read_bytes(text)
    return None if size is None else size // MIB


def parse_tres(text: str) -> dict[str, int]:
    """Return the least count of each kind that has a limit, memory in MiB.

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
    """Return the base state and flags of a node in upper case, with its marks as flags.

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
    return "" if text.lower() in _NOTHING else text


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
    """Memory; 0 means unlimited in some forms."""
    return parse_memory(text) or None
