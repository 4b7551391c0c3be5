"""From `scontrol`'s and `sacctmgr`'s text to the records of `cluster.model`; pure functions."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.scheduler.cluster import (
    Association,
    Limits,
    Node,
    Partition,
    Qos,
    Reservation,
)
from hpml_orchestrator.scheduler.nodelist import expand
from hpml_orchestrator.scheduler.slurm.parse import parse_time
from hpml_orchestrator.scheduler.slurm.values import (
    names,
    node_states,
    parse_count,
    parse_duration,
    parse_gres,
    parse_memory,
    parse_tres,
    parse_version,
    plain,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hpml_orchestrator.scheduler.slurm.scontrol import Record

__all__ = [
    "ASSOCIATION_FIELDS",
    "QOS_FIELDS",
    "expand_known",
    "limits_from",
    "node_from",
    "parse_associations",
    "parse_qos",
    "partition_from",
    "reservation_from",
]

ASSOCIATION_FIELDS = (
    "defaultaccount,cluster,account,partition,qos,defaultqos,maxwall,maxsubmit,"
    "maxtres,maxtrespernode,grptres"
)
"""For `sacctmgr show user … withassoc format=…`, which alone also tells the default account."""

QOS_FIELDS = (
    "name,flags,maxwall,maxsubmitjobsperuser,mintres,maxtres,maxtrespernode,maxtresperuser,grptres"
)
"""For `sacctmgr show qos format=…`."""

_SCRIPT_SIZE = re.compile(r"(?:^|,)max_script_size=(\d{1,12})(?:,|$)", re.ASCII)
_UNIQUE = Limits()


def limits_from(config: Mapping[str, str]) -> Limits:
    """Return what holds everywhere, from `scontrol show config`."""
    chosen = config.get("SelectType", "")
    script = _SCRIPT_SIZE.search(config.get("SchedulerParameters", ""))
    enforce = config.get("EnforcePartLimits", "").upper()
    accounting = config.get("AccountingStorageType", "").endswith("slurmdbd")
    enforced = (word.lower() for word in names(config.get("AccountingStorageEnforce", "")))
    return Limits(
        version=parse_version(config.get("SLURM_VERSION", "")),
        cluster=plain(config.get("ClusterName", "")),
        max_array_size=_or(parse_count(config.get("MaxArraySize", "")), _UNIQUE.max_array_size),
        max_script_bytes=int(script[1]) if script else _UNIQUE.max_script_bytes,
        max_tasks_per_node=_or(
            parse_count(config.get("MaxTasksPerNode", "")), _UNIQUE.max_tasks_per_node
        ),
        enforce_partition_limits={"YES": "ALL", "": "NO"}.get(enforce, enforce),
        accounting=accounting,
        accounting_enforce=frozenset(enforced),
        memory_consumable="MEMORY" in config.get("SelectTypeParameters", "").upper(),
        whole_nodes=chosen.endswith("linear"),
        default_memory_per_node_mib=_limit(config.get("DefMemPerNode", "")),
        default_memory_per_cpu_mib=_limit(config.get("DefMemPerCPU", "")),
        max_memory_per_node_mib=_limit(config.get("MaxMemPerNode", "")),
        max_memory_per_cpu_mib=_limit(config.get("MaxMemPerCPU", "")),
        tmp_fs=plain(config.get("TmpFS", "")) or _UNIQUE.tmp_fs,
        gres_names=names(config.get("GresTypes", "")),
        submit_plugins=names(config.get("JobSubmitPlugins", "")),
    )


def partition_from(record: Record) -> Partition:
    """Return one partition of `scontrol show partition`."""
    return Partition(
        name=record["PartitionName"],
        state=record["State"].upper() or "UP",
        default=_yes(record["Default"]),
        nodes=expand_known(record["Nodes"]),
        total_nodes=parse_count(record["TotalNodes"]) or 0,
        total_cpus=parse_count(record["TotalCPUs"]) or 0,
        max_seconds=_seconds(record["MaxTime"]),
        default_seconds=_seconds(record["DefaultTime"]),
        min_nodes=parse_count(record["MinNodes"]) or 0,
        max_nodes=parse_count(record["MaxNodes"]),
        max_cpus_per_node=parse_count(record["MaxCPUsPerNode"]),
        max_memory_per_node_mib=_limit(record["MaxMemPerNode"]),
        max_memory_per_cpu_mib=_limit(record["MaxMemPerCPU"]),
        default_memory_per_node_mib=_limit(record["DefMemPerNode"]),
        default_memory_per_cpu_mib=_limit(record["DefMemPerCPU"]),
        allow_accounts=_allowed(record["AllowAccounts"]),
        deny_accounts=names(record["DenyAccounts"]),
        allow_qos=_allowed(record["AllowQos"]),
        deny_qos=names(record["DenyQos"]),
        allow_groups=_allowed(record["AllowGroups"]),
        exclusive=record["OverSubscribe"].upper().startswith("EXCLUSIVE"),
        qos=plain(record["QoS"]),
        root_only=_yes(record["RootOnly"]),
        reservation_only=_yes(record["ReqResv"]),
    )


def node_from(record: Record) -> Node:
    """Return one node of `scontrol show node`."""
    # Versions before 21.08 do not tell how many CPUs are left beside specialised ones.
    cpus = parse_count(record["CPUEfctv"]) or parse_count(record["CPUTot"]) or 1
    memory = (parse_memory(record["RealMemory"]) or 1) - (parse_memory(record["MemSpecLimit"]) or 0)
    return Node(
        name=record["NodeName"],
        states=node_states(record["State"]),
        partitions=names(record["Partitions"]),
        sockets=parse_count(record["Sockets"]) or 1,
        cores_per_socket=parse_count(record["CoresPerSocket"]) or 1,
        threads_per_core=parse_count(record["ThreadsPerCore"]) or 1,
        cpus=cpus,
        memory_mib=max(memory, 1),
        tmp_disk_mib=parse_memory(record["TmpDisk"]) or 0,
        gres=parse_gres(record["Gres"]),
        features=frozenset(names(record["AvailableFeatures"])),
        reason=_reason(record["Reason"]),
    )


def reservation_from(record: Record) -> Reservation:
    """Return one reservation of `scontrol show reservation`."""
    users, accounts = names(record["Users"]), names(record["Accounts"])
    return Reservation(
        name=record["ReservationName"],
        users=users or None,
        accounts=accounts or None,
        partition=plain(record["PartitionName"]),
        nodes=expand_known(record["Nodes"]),
        started=parse_time(record["StartTime"]),
        ended=parse_time(record["EndTime"]),
    )


def parse_associations(text: str, cluster: str) -> tuple[Association, ...]:
    """Return a user's associations on one cluster; see `ASSOCIATION_FIELDS`."""
    found = []
    for row in _rows(text, ASSOCIATION_FIELDS):
        if not row["account"] or row["cluster"] not in ("", cluster):
            continue
        found.append(
            Association(
                account=row["account"],
                partition=row["partition"],
                default=row["account"] == row["defaultaccount"],
                # A sign says that the name was added to, or taken from, what the account has.
                qos=tuple(name.lstrip("+") for name in names(row["qos"]) if name[0] != "-"),
                default_qos=row["defaultqos"],
                max_seconds=_seconds(row["maxwall"]),
                max_submit_jobs=parse_count(row["maxsubmit"]),
                max_tres_per_job=parse_tres(row["maxtres"]),
                max_tres_per_node=parse_tres(row["maxtrespernode"]),
                group_tres=parse_tres(row["grptres"]),
            )
        )
    return tuple(found)


def parse_qos(text: str) -> tuple[Qos, ...]:
    """Return all QOS; see `QOS_FIELDS`."""
    return tuple(
        Qos(
            name=row["name"],
            flags=frozenset(names(row["flags"])),
            max_seconds=_seconds(row["maxwall"]),
            max_submit_jobs_per_user=parse_count(row["maxsubmitjobsperuser"]),
            min_tres_per_job=parse_tres(row["mintres"]),
            max_tres_per_job=parse_tres(row["maxtres"]),
            max_tres_per_node=parse_tres(row["maxtrespernode"]),
            max_tres_per_user=parse_tres(row["maxtresperuser"]),
            group_tres=parse_tres(row["grptres"]),
        )
        for row in _rows(text, QOS_FIELDS)
        if row["name"]
    )


def expand_known(text: str) -> tuple[str, ...]:
    """Return the names in Slurm's own list of nodes; none where it is none."""
    try:
        return expand(plain(text))
    except InputError:
        return ()


def _rows(text: str, fields: str) -> Iterator[dict[str, str]]:
    wanted = fields.split(",")
    for line in text.splitlines():
        values = line.split("|")
        if len(values) == len(wanted):
            yield dict(zip(wanted, (value.strip() for value in values), strict=True))


def _reason(text: str) -> str:
    """The reason without who gave it and when: `bad disk [root@2026-11-20T19:45:34]`."""
    return re.sub(r"\s*\[[^\[\]@]*@[^\[\]]*\]$", "", plain(text))


def _allowed(text: str) -> tuple[str, ...] | None:
    # A list of denied names takes the place of the list of allowed ones.
    return None if text.upper() == "ALL" else names(text) or None


def _yes(text: str) -> bool:
    return text.upper() in {"YES", "1", "TRUE"}


def _seconds(text: str) -> int | None:
    seconds = parse_duration(text)
    return None if seconds is None else int(seconds)


def _limit(text: str) -> int | None:
    """Memory; 0 stands for no limit in some forms."""
    return parse_memory(text) or None


def _or(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value
