"""`hpml init`: ask the cluster, probe its nodes if asked to, and write the site profile."""

from __future__ import annotations

import os
import string
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import tomlkit
from pydantic import BaseModel, ValidationError
from tomlkit.items import Array

from hpml_orchestrator import assets
from hpml_orchestrator.errors import InputError, NotFoundError, RecordError, SchedulerError
from hpml_orchestrator.records import units
from hpml_orchestrator.records.files import write_text
from hpml_orchestrator.records.texts import first_few, printable
from hpml_orchestrator.scheduler.command import (
    CommandMissing,
    ConfigurationMissing,
    job_environment,
)
from hpml_orchestrator.scheduler.slurm.cluster import read_cluster
from hpml_orchestrator.site import model as models
from hpml_orchestrator.site.model import Site
from hpml_orchestrator.site.node_probe import NodeProbe
from hpml_orchestrator.site.probe import fold, gpu_text, group_nodes, probe
from hpml_orchestrator.site.profile import PROJECT_NAME, user_path
from hpml_orchestrator.version import __version__

if TYPE_CHECKING:
    from hpml_orchestrator.scheduler.cluster import Cluster, Partition
    from hpml_orchestrator.scheduler.command import Runner
    from hpml_orchestrator.site.probe import NodeGroup

# The text of a site profile: a pure function of what a cluster reports and probes found.
#
# `templates/site-profile.txt` is what every profile has; this fills it with sections in TOML.

_WIDTH = 98
_SHOWN_OUT = 5
_WHOLE_NODES = """\
# Jobs get whole nodes here (select/linear): GPUs only by --gres.
[directives.gpus-per-node]
rename = "--gres=gpu:{item}"
"""


@dataclass(frozen=True)
class Origin:
    """What a profile is written from, besides the cluster."""

    version: str = "(unknown)"  # of hpml
    writer: str = "(unknown)"  # such as `ada@login1`
    when: str = "(unknown)"
    # By kind of node, what a probe found, or why there is none; empty without probes.
    probes: Mapping[str, NodeProbe | str] = field(default_factory=dict)
    # By kind of node, its topology file, relative to the profile.
    topologies: Mapping[str, str] = field(default_factory=dict)


def profile_text(
    cluster: Cluster, origin: Origin | None = None, groups: Sequence[NodeGroup] | None = None
) -> str:
    """Return a site profile in TOML that `site.model.Site` accepts, with comments.

    Equal input gives equal text. Values that the profile's model refuses, such as names with
    spaces, are left out.
    """
    origin = origin or Origin()
    groups = group_nodes(cluster) if groups is None else groups
    slurm, default = release(cluster.limits.version), cluster.default_partition
    probes = [probe for probe in origin.probes.values() if isinstance(probe, NodeProbe)]
    looked = f" and a probe of {len(probes)} of {len(origin.probes)} kinds of nodes"
    modules = list(dict.fromkeys(name for probe in probes for name in probe.modules or ()))
    head = {
        "cluster": cluster.limits.cluster,
        "slurm": slurm,
        "requeue": None if cluster.limits.job_requeue is None else "auto",
        "modules": modules or None,
    }
    remarks = {
        "requeue": f"JobRequeue={cluster.limits.job_requeue:d}; jobs with `checkpoint` ask for it"
        if cluster.limits.job_requeue is not None
        else "",
        "modules": "on the nodes, for reference",
    }
    partitions = [partition for partition in cluster.partitions if _is_word(partition.name)]
    limit = _duration(default.max_seconds) if default else None
    skeleton = string.Template(assets.path("templates/site-profile.txt").read_text("utf-8"))
    text = skeleton.substitute(
        cluster=printable(cluster.limits.cluster) or "a cluster",
        version=printable(origin.version),
        writer=printable(origin.writer),
        when=printable(origin.when),
        slurm=slurm,
        looked=looked if origin.probes else "",
        head=_toml(models.Site, head, remarks),
        limits=_limits(cluster),
        paths=_paths(cluster, origin),
        partitions="".join(
            _partition(partition, groups, default=partition is default) for partition in partitions
        ),
        node_types="".join(_node_type(group, origin) for group in groups) + _hidden(cluster),
        resources=_resources(cluster) + _account(cluster),
        time_limit=f" # {printable(default.name)} allows {limit}" if default and limit else "",
        directives=_WHOLE_NODES if cluster.limits.whole_nodes else "",
    )
    return text.encode("utf-8", "replace").decode()


def release(version: Sequence[int]) -> str:
    """Return Slurm's version as Slurm writes it.

    >>> release((22, 5, 8))
    '22.05.8'
    """
    return ".".join(
        f"{part:02d}" if place == 1 else f"{part}" for place, part in enumerate(version)
    )


def _remark(text: str) -> str:
    lines = textwrap.wrap(printable(text), _WIDTH, break_long_words=False)
    return "".join(f"# {line}\n" for line in lines)


def _toml(
    model: type[BaseModel], given: Mapping[str, object], remarks: Mapping[str, str] | None = None
) -> str:
    known = {name: value for name, value in given.items() if value is not None}
    refused: set[object] = set()
    try:
        model.model_validate(known)
    except ValidationError as error:
        # Leave out single values that the model refuses, such as a feature with a blank, rather
        # than the whole section.
        refused = {problem["loc"][0] for problem in error.errors()}
    document = tomlkit.document()
    for name, value in known.items():
        if name not in refused:
            item = tomlkit.item(value)
            if isinstance(item, Array) and len(item.as_string()) > _WIDTH:
                item.multiline(True)
            if remarks and name in remarks:
                item.comment(remarks[name])
            document.add(name, item)
    return tomlkit.dumps(document)


def _off(name: str, value: str, remark: str = "") -> str:
    return f"{_remark(remark)}#{name} = {tomlkit.item(value).as_string()}\n"


def _is_word(name: str) -> bool:
    return bool(_toml(models.Site, {"cluster": name}))


def _hidden(cluster: Cluster) -> str:
    if "nodes" not in cluster.hidden:
        return ""
    return "\n" + _remark(
        "The cluster shows its nodes to administrators only (PrivateData), so the node types, "
        "[node_types.NAME], are missing."
    )


def _limits(cluster: Cluster) -> str:
    limits = cluster.limits
    remarks = {
        "max_array_size": "array indices end one below",
        "max_script_bytes": "longest batch script",
    }
    text = _toml(models.Limits, {name: getattr(limits, name) for name in remarks}, remarks)
    if limits.submit_plugins:
        plugins = first_few(limits.submit_plugins)
        text += _remark(f"This site changes jobs at submission (job_submit plugins: {plugins}).")
    if not limits.memory_consumable:
        text += _remark("Slurm does not track memory here: --mem is accepted and not enforced.")
    return text


def _paths(cluster: Cluster, origin: Origin) -> str:
    tmp_fs = cluster.limits.tmp_fs
    is_plain = "%" not in tmp_fs and tmp_fs.rstrip("/") not in ("", "/tmp")  # noqa: S108 - default
    text = _toml(models.Paths, {"scratch": tmp_fs}, {"scratch": "Slurm's TmpFS"})
    if not is_plain or not text:
        return _off("scratch", "$LOCAL_SCRATCH")
    has_disk = any(node.tmp_disk_mib for node in cluster.nodes)
    # A probe knows the disks better than TmpFS, and without TmpDisk nothing says that there is a
    # disk: then it is only proposed, in a comment.
    return text if has_disk and not origin.probes else f"#{text}"


def _partition(partition: Partition, groups: Sequence[NodeGroup], *, default: bool) -> str:
    state = partition.state
    most = partition.max_memory_per_cpu_mib
    per_cpu, per_node = partition.default_memory_per_cpu_mib, partition.default_memory_per_node_mib
    remarks = {
        f"{state} when this was written.": state != "UP",
        "Only root may use it.": partition.root_only,
        "Only jobs in a reservation may use it: add --reservation.": partition.reservation_only,
        f"Jobs must ask for at least {partition.min_nodes} nodes.": partition.min_nodes > 1,
        f"It has a QOS, {partition.qos}, with more limits.": partition.qos,
        f"Not for accounts {first_few(partition.deny_accounts)}.": partition.deny_accounts,
        f"Not with QOS {first_few(partition.deny_qos)}.": partition.deny_qos,
        f"Only for groups {first_few(partition.allow_groups or ())}.": partition.allow_groups,
        f"At most {most} MiB of memory per CPU.": most,
        f"Jobs that ask for no memory get {per_cpu} MiB per CPU.": per_cpu,
        f"Jobs that ask for no memory get {per_node} MiB per node.": per_node,
    }
    members = set(partition.nodes)
    default_seconds = partition.default_seconds
    limits = {
        "default": default or None,
        "node_types": [
            group.name
            for group in groups
            if partition.name in group.partitions or members & {node.name for node in group.nodes}
        ],
        "nodes": partition.total_nodes,
        "max_nodes": partition.max_nodes,
        "max_time": _duration(partition.max_seconds),
        "default_time": None if default_seconds is None else _duration(default_seconds),
        "max_cpus_per_node": partition.max_cpus_per_node,
        "max_memory_per_node": _memory(partition.max_memory_per_node_mib),
        "exclusive": partition.exclusive or None,
        "accounts": partition.allow_accounts and list(partition.allow_accounts),
        "qos": partition.allow_qos and list(partition.allow_qos),
    }
    return (
        f"\n[partitions.{tomlkit.key(partition.name).as_string()}]\n"
        + "".join(_remark(remark) for remark, applies in remarks.items() if applies)
        + _toml(models.SitePartition, limits, {"exclusive": "jobs get whole nodes"})
    )


def _memory(mebibytes: int | None) -> str | None:
    return units.size_text(mebibytes) if mebibytes else None


def _duration(seconds: int | None) -> str | None:
    if seconds is None:
        return "unlimited"
    return units.format_time(seconds) if seconds > 0 else None


def _node_type(group: NodeGroup, origin: Origin) -> str:
    node, probe = group.sample, origin.probes.get(group.name)
    text = f"\n[node_types.{group.name}]\n"
    if group.uneven:
        text += _remark(f"Nodes differ in {', '.join(group.uneven)}: these are the least values.")
    hardware = {
        "nodes": fold(node.name for node in group.nodes),
        "count": len(group.nodes),
        "cpus": node.cpus,
        "sockets": node.sockets,
        "cores_per_socket": node.cores_per_socket,
        "threads_per_core": node.threads_per_core,
        "memory": _memory(node.memory_mib),
        "gpus": gpu_text(group.gpus) if group.gpus else None,
        "local_disk": _memory(node.tmp_disk_mib),
        "features": sorted(node.features) or None,
        "topology": origin.topologies.get(group.name),
    }
    if isinstance(probe, NodeProbe):
        hardware["interfaces"] = list(probe.network[:1]) or None
        scratch = probe.scratch
        if scratch is not None:
            hardware["scratch"] = scratch.name if scratch.name[0] == "$" else scratch.path
    text += _toml(models.NodeType, hardware)
    others = [
        ":".join(filter(None, (gres.name, gres.kind, str(gres.count))))
        for gres in node.gres
        if gres.name != "gpu"
    ]
    if others:
        text += _remark(f"Other generic resources: {first_few(others)}.")
    out = [f"{node.name}: {node.reason}" for node in group.nodes if not node.up]
    if out:
        text += _remark(f"Out of service when this was written: {len(out)} of {len(group.nodes)}.")
        text += _remark(first_few(out, _SHOWN_OUT))
    if isinstance(probe, str):
        text += _remark(f"Not probed: {probe}.")
    elif probe is not None:
        text += _probe_remark(probe)
    return text


def _probe_remark(probe: NodeProbe) -> str:
    lines = [f"Found on {probe.host}:"]
    if not any(place.name == "ram" and place.writable for place in probe.places):
        lines.append("- no writable /dev/shm: stage with `target: local`")
    for place in probe.places:
        path = f"{place.name} = {place.path}" if place.name[0] == "$" else place.path
        kind = "RAM" if place.in_ram else "shared" if place.shared else "local"
        free = f"{place.free_kib / 1024**2:.1f} of {place.total_kib / 1024**2:.1f} GiB free"
        closed = "" if place.writable else ", not writable"
        lines.append(f"- {path}: {place.filesystem} ({kind}), {free}{closed}")
    for interface in probe.interfaces:
        speed = interface.speed_mbps
        parts = [f"{speed / 1000:g} Gbit/s" if speed else "speed unknown"]
        parts += ["IP over InfiniBand"] * interface.infiniband
        parts += ["no IPv4 address"] * (not interface.addressed)
        lines.append(f"- {interface.name}: {', '.join(parts)}")
    return "".join(map(_remark, lines))


def _resources(cluster: Cluster) -> str:
    """Return the default partition of jobs: set if there is only one, else proposed."""
    names = [partition.name for partition in cluster.partitions if _is_word(partition.name)]
    if cluster.default_partition is not None or not names:
        return ""
    if len(cluster.partitions) == 1:
        return f'partition = "{names[0]}" # the only one; Slurm has no default\n'
    remark = f"Slurm has no default partition: every job must name one of {first_few(names)}."
    return _off("partition", names[0], remark)


def _account(cluster: Cluster) -> str:
    """Return the default account of jobs: set if there is only one, else proposed."""
    user = cluster.user or "this user"
    if cluster.associations is None:
        return _remark("Accounts: Slurm's accounting did not answer.")
    known = [association for association in cluster.associations if _is_word(association.account)]
    accounts = list(dict.fromkeys(association.account for association in known))
    default = next((association.account for association in known if association.default), "")
    if not accounts:
        enforced = "associations" in cluster.limits.accounting_enforce
        support = ", and Slurm refuses jobs without one: ask the site's support" * enforced
        return _remark(f"Accounts: {user} has none{support}.")
    if len(accounts) == 1 and not default:
        return f'account = "{accounts[0]}" # the only one of {printable(user)}\n'
    charged = f"; {default} is charged when none is given" if default else ""
    remark = f"Accounts of {user}: {first_few(accounts)}{charged}."
    return _off("account", default or accounts[0], remark)


_REFUSALS_SHOWN = 4


@dataclass(frozen=True)
class ProfileDraft:
    """A site profile, written or to be written."""

    cluster: Cluster  # what it was made of
    groups: Sequence[NodeGroup]
    text: str
    # By kind of node, what a probe found, or why there is none.
    probes: Mapping[str, NodeProbe | str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)  # topologies: relative path -> text

    def to_json(self) -> dict[str, object]:
        """Return what was found, for programs."""
        limits, default = self.cluster.limits, self.cluster.default_partition
        return {
            "cluster": limits.cluster,
            "slurm": release(limits.version),
            "default_partition": default.name if default else None,
            "partitions": [partition.name for partition in self.cluster.partitions],
            "node_types": [
                {
                    "name": group.name,
                    "count": len(group.nodes),
                    "gpus": gpu_text(group.gpus) if group.gpus else "0",
                    "looked_at": getattr(self.probes.get(group.name), "host", None),
                    "sees_records": getattr(self.probes.get(group.name), "sees_records", None),
                }
                for group in self.groups
            ],
            "accounts": self._accounts(),
            "text": self.text,
        }

    def _accounts(self) -> list[str] | None:
        found = self.cluster.associations
        return None if found is None else list(dict.fromkeys(one.account for one in found))

    def lines(self) -> list[str]:
        """Return what was found, for people: a few lines."""
        cluster, limits = self.cluster, self.cluster.limits
        partitions = [
            partition.name if partition.state == "UP" else f"{partition.name} ({partition.state})"
            for partition in cluster.partitions
        ]
        kinds = first_few([f"{len(group.nodes)} {group.name}" for group in self.groups])
        nodes = f"{len(cluster.nodes)}: {kinds}"
        if "nodes" in cluster.hidden:
            nodes = "not shown by the cluster (PrivateData)"
        accounts = "unknown: Slurm's accounting did not answer"
        names = self._accounts()
        if names is not None:
            accounts = first_few(names, none="none of yours")
        out = sum(not node.up for node in cluster.nodes)
        default = cluster.default_partition
        probed = [kind for kind, one in self.probes.items() if isinstance(one, NodeProbe)]
        refused = [
            f"not {kind}: {one}" for kind, one in self.probes.items() if isinstance(one, str)
        ]
        blind = [kind for kind in probed if getattr(self.probes[kind], "sees_records", 1) is False]
        unseen = f"{first_few(blind)} cannot see records: set HPML_HOME to a shared directory"
        rows = [
            (
                "cluster",
                f"{limits.cluster or '(without a name)'}, Slurm {release(limits.version) or '?'}",
            ),
            (
                "partitions",
                f"{first_few(partitions)}; default: {default.name if default else 'none'}",
            ),
            ("nodes", nodes),
            *[("", f"{out} out of service")] * bool(out),
            ("accounts", accounts),
            *[("probed", first_few(probed, none="no kind of node"))] * bool(self.probes),
            *[("", reason) for reason in refused[:_REFUSALS_SHOWN]],
            *[("", unseen)] * bool(blind),
        ]
        return [f"{name:<11} {text}" for name, text in rows]


def profile_path(output: str, *, user: bool, force: bool, environment: Mapping[str, str]) -> Path:
    """Return where to write the profile.

    Args:
        output: a path; empty for `hpml.toml` in the current directory.
        user: whether it is the user's own, for all projects; its directory is made.
        force: whether an existing file may be replaced.
        environment: of the process.

    Raises:
        InputError: there is a file already, or no directory to write to.
    """
    if user and output:
        raise InputError("give one of --user and --output", field="--output", value=output)
    path = Path(os.path.abspath(os.path.expanduser(output or PROJECT_NAME)))
    if user:
        own = user_path(environment)
        if own is None:
            raise InputError(
                "this account has no home directory to write to",
                field="--user",
                hint="set HOME, or XDG_CONFIG_HOME to an absolute path, or give --output FILE",
            )
        path = own
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_write(path, error.strerror or str(error)) from error
    if path.is_dir():
        raise InputError("is a directory: give a file", field="--output", value=str(path))
    _refuse_existing(path, force=force)
    if not path.parent.is_dir():
        raise _cannot_write(path, "the directory does not exist")
    return path


def initialise(
    run: Runner,
    environment: Mapping[str, str],
    *,
    writer: str,
    when: str,
    look: Path | None = None,
) -> ProfileDraft:
    """Ask the cluster and return its profile; nothing is written yet.

    Args:
        run: starts commands.
        environment: of the process.
        writer: who asks, such as `ada@login1`.
        when: the date, as text.
        look: directory of the records, to probe a node of each kind with a short srun.

    Raises:
        NotFoundError: there is no Slurm here.
        SchedulerUnavailable: it does not answer.
        SchedulerError: it does not show this user its partitions, or has names that no profile
            can hold.
    """
    try:
        cluster = read_cluster(run)
    except ConfigurationMissing:
        raise
    except CommandMissing as error:
        raise NotFoundError(
            f"there is no Slurm here: {error}",
            hint="on a cluster, load Slurm's module first; on a machine without Slurm jobs run "
            "with the local backend, which needs no profile",
        ) from error
    if "partitions" in cluster.hidden:
        raise SchedulerError(
            f"the cluster shows you no {' or '.join(cluster.hidden)} (PrivateData), so there is "
            "nothing to write a profile from",
            hint="ask an administrator to run `hpml init -o /etc/hpml/site.toml`, for all users; "
            "jobs run without a profile, too",
        )
    groups = group_nodes(cluster)
    minimal = job_environment(environment, "minimal")
    probes = probe(cluster, groups, run, minimal, look) if look else {}
    topologies = {
        kind: seen.topology
        for kind, seen in probes.items()
        if isinstance(seen, NodeProbe) and seen.topology
    }
    names = {kind: f"topology/{kind}.xml" for kind in topologies}
    text = profile_text(cluster, Origin(__version__, writer, when, probes, names), groups)
    try:
        # Read back what was written, before anybody relies on it: a cluster may have names that no
        # profile can hold.
        Site.model_validate(tomllib.loads(text))
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(map(str, problem["loc"]))
        raise SchedulerError(f"a profile cannot contain Slurm's value of {field}") from error
    files = {names[kind]: xml for kind, xml in topologies.items()}
    return ProfileDraft(cluster, groups, text, probes, files)


def save(profile: ProfileDraft, path: Path, *, force: bool = False) -> list[Path]:
    """Write the topology files and then the profile; return their paths.

    Raises:
        InputError: a file exists already and `force` is not given, or cannot be written.
    """
    files = {path.parent / name: text for name, text in profile.files.items()}
    # The profile comes last, because it names the topology files: an interrupted write leaves none
    # that points to missing ones.
    files[path] = profile.text
    for place, text in files.items():
        _refuse_existing(place, force=force)
        try:
            place.parent.mkdir(exist_ok=True)
            write_text(place, text)
        except (OSError, RecordError) as error:
            cause = error.__cause__ if isinstance(error, RecordError) else error
            raise _cannot_write(place, getattr(cause, "strerror", None) or str(error)) from error
    return list(files)


def _refuse_existing(path: Path, *, force: bool) -> None:
    if os.path.lexists(path) and not force:
        raise InputError(
            f"{path} is there already",
            field="--output",
            hint="--force replaces it; -o FILE writes another",
        )


def _cannot_write(path: Path, why: str) -> InputError:
    return InputError(f"cannot be written: {why}", field="--output", value=str(path))
