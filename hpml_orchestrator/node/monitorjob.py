"""What an exporter is told of its job, where it can be reached, and where it may run."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from hpml_orchestrator.node.startup import resolve
from hpml_orchestrator.placement.visible import visible_devices

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from hpml_orchestrator.node.planning import Prepared

__all__ = ["allocated_gpus", "free_cpus", "job_facts", "labels_of", "run_of", "target_address"]

_TLS = re.compile(r"^[^#]*\btls_server_config\b", re.MULTILINE)
_EVERYWHERE = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - names them, binds nothing
_MAX_BYTES = 1 << 20


def run_of(attempt: Path) -> str:
    """Return the id of the run that an attempt belongs to."""
    return attempt.parent.parent.name


def job_facts(
    environment: Mapping[str, str],
    attempt: Path,
    gpus: Optional[list[str]],  # noqa: UP045 - runs on Python 3.9
) -> dict[str, Any]:
    """Return what the exporter shall say of its job, in the form of its options.

    `HPML_SWEEP` and `HPML_POINT` are what a sweep gives to its jobs.

    Args:
        environment: the agent's own variables.
        attempt: the attempt's directory.
        gpus: names of the job's GPUs on this node; None where nobody knows.
    """
    uid = environment.get("SLURM_JOB_UID", "")
    return {
        "jobid": environment.get("SLURM_JOB_ID", ""),
        "uid": int(uid) if uid.isdecimal() else os.getuid(),
        "user": environment.get("SLURM_JOB_USER") or environment.get("USER", ""),
        "account": environment.get("SLURM_JOB_ACCOUNT", ""),
        "partition": environment.get("SLURM_JOB_PARTITION", ""),
        "name": environment.get("SLURM_JOB_NAME", ""),
        "gpus": gpus,
        "run": run_of(attempt),
        "sweep": environment.get("HPML_SWEEP", ""),
        "point": environment.get("HPML_POINT", ""),
    }


def labels_of(facts: Mapping[str, Any], node: str, web_config: str) -> dict[str, str]:
    """Return the labels of a job's target; `__scheme__` where it is asked by HTTPS."""
    labels = {name: str(facts[name]) for name in ("jobid", "run", "user")}
    return {**labels, "node": node, "__scheme__": "https" if _has_tls(web_config) else ""}


def allocated_gpus(
    made: Optional[Prepared],  # noqa: UP045
    environment: Mapping[str, str],
    *,
    none: bool,
) -> Optional[list[str]]:  # noqa: UP045
    """Return the names of this node's GPUs that the job has; None where nobody knows.

    Names are UUIDs or PCI addresses as the node's own topology has them, else the UUIDs that the
    local backend gives in place of Slurm's numbers. What the batch script inherited of the first
    node's GPUs means nothing on another node.

    Args:
        made: the node's plan and what it was made of.
        environment: the agent's own variables.
        none: whether the job asked for no GPUs.
    """
    if none:
        return []
    if made is not None and made.topology is not None and made.topology.gpus:
        found = visible_devices(made.topology, made.around.visible, made.around.hidden)
        names = [one.uuid or one.address or one.name for one in found if one is not None]
        if names:
            return names
    told = environment.get("SLURM_STEP_GPUS", "")
    if not told and environment.get("SLURM_NNODES") == "1":
        told = environment.get("SLURM_JOB_GPUS", "")
    names = [word.strip() for word in told.split(",")]
    # Slurm's numbers are places in a list of gres.conf, which names no device.
    return names if all(name.startswith(("GPU-", "MIG-")) for name in names) else None


def free_cpus(made: Optional[Prepared], allowed: Collection[int]) -> frozenset[int]:  # noqa: UP045
    """Return CPUs of the job that no rank has, best on cores of their own; empty where none is.

    Args:
        made: the node's plan; without one, or where it binds nothing, no CPU is a rank's.
        allowed: CPUs that the job may use.
    """
    if made is None:
        return frozenset()
    ranks = {cpu for rank in made.plan.ranks for cpu in rank.cpus}
    free = frozenset(allowed) - ranks
    cores = made.topology.cores if made.topology is not None else ()
    apart = {cpu for core in cores if not ranks & set(core.cpus) for cpu in core.cpus}
    return frozenset(free & apart) or free


def target_address(address: str, environment: Mapping[str, str], node: str, host: str = "") -> str:
    """Return what Prometheus shall ask for an exporter; empty where only its own host could.

    What listens everywhere is reached by the node's name, or the host's, whichever this node
    resolves to an address that is not its own loopback; else by the address that packets leave
    from. A loopback address is a target where the job was submitted from this very host: only
    there may a Prometheus of the same records run.

    Args:
        address: HOST:PORT that it listens at.
        environment: the agent's own variables.
        node: Slurm's name of the node.
        host: this host's name; asked for when left out.
    """
    here = host or socket.gethostname()
    name, _, port = address.rpartition(":")
    name = name.strip("[]")
    if name in _EVERYWHERE:
        names = list(dict.fromkeys([node, socket.getfqdn(), here]))
        known = resolve(names)
        outside = next((one for one in names if not _is_loopback(known.get(one, "127."))), "")
        found = outside or _outgoing()
        if found:
            return f"[{found}]:{port}" if ":" in found else f"{found}:{port}"
        name, address = "127.0.0.1", f"127.0.0.1:{port}"
    if _is_loopback(name):
        asked_from = environment.get("SLURM_SUBMIT_HOST", "")
        return address if asked_from.partition(".")[0] == here.partition(".")[0] else ""
    return address


def _is_loopback(name: str) -> bool:
    return name.startswith("127.") or name in ("::1", "localhost")


def _outgoing() -> str:
    """Return the address that packets to another network would have; empty without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # of a network for documentation; nothing is sent
            found = str(probe.getsockname()[0])
        except OSError:
            return ""
    return "" if _is_loopback(found) else found


def _has_tls(path: str) -> bool:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return _TLS.search(stream.read(_MAX_BYTES)) is not None
    except OSError:
        return False
