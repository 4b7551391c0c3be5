"""`hpml init`: ask the cluster, look at its nodes if asked to, and write the site profile."""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpml_orchestrator import __version__
from hpml_orchestrator.errors import (
    HpmlError,
    InputError,
    NotFoundError,
    RecordError,
    SchedulerError,
)
from hpml_orchestrator.records.files import write_text
from hpml_orchestrator.site import words
from hpml_orchestrator.site.environment import travelling
from hpml_orchestrator.site.look import Look
from hpml_orchestrator.site.node_text import Surroundings
from hpml_orchestrator.site.nodes import group_nodes
from hpml_orchestrator.site.output_directory import reason_of
from hpml_orchestrator.site.probe import here, probe
from hpml_orchestrator.site.text import profile_text
from hpml_orchestrator.spec.site import Site
from hpml_orchestrator.spec.site_find import PROJECT_NAME, user_path

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpml_orchestrator.scheduler.cluster import Cluster
    from hpml_orchestrator.scheduler.command import Runner
    from hpml_orchestrator.site.nodes import NodeGroup

__all__ = ["Plan", "Profile", "initialise", "plan", "save"]

_TOPOLOGY = "topology"


@dataclass(frozen=True)
class Plan:
    """Where a profile shall go, and whether what is there may be replaced."""

    path: Path
    force: bool = False


@dataclass(frozen=True)
class Profile:
    """A site profile, written or to be written.

    Attributes:
        cluster: what it was made of.
        groups: its kinds of nodes.
        text: of the file.
        looks: per kind what a look found, or why there was none.
        files: topology files beside it: relative path -> text.
    """

    cluster: Cluster
    groups: Sequence[NodeGroup]
    text: str
    looks: Mapping[str, Look | str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return what was found, for programs."""
        limits = self.cluster.limits
        default = self.cluster.default_partition
        return {
            "cluster": limits.cluster,
            "slurm": words.release(limits.version),
            "default_partition": default.name if default else None,
            "partitions": [one.name for one in self.cluster.partitions],
            "node_types": [
                {
                    "name": group.name,
                    "count": len(group.nodes),
                    "gpus": words.gpus(group.gpus)[0] if group.gpus else "0",
                    "looked_at": self._looked(group.name),
                }
                for group in self.groups
            ],
            "accounts": None
            if self.cluster.associations is None
            else list(dict.fromkeys(one.account for one in self.cluster.associations)),
            "text": self.text,
        }

    def _looked(self, kind: str) -> str | None:
        one = self.looks.get(kind)
        return one.host if isinstance(one, Look) else None

    def lines(self) -> list[str]:
        """Return what was found, for people: a few lines."""
        limits, cluster = self.cluster.limits, self.cluster
        version = words.release(limits.version)
        told = [f"cluster     {limits.cluster or '(without a name)'}, Slurm {version or '?'}"]
        names = [
            one.name + ("" if one.state == "UP" else f" ({one.state})")
            for one in cluster.partitions
        ]
        default = cluster.default_partition
        told.append(
            f"partitions  {words.shorten(names)}; "
            + (f"default: {default.name}" if default else "none is the default")
        )
        kinds = [f"{len(group.nodes)} {group.name}" for group in self.groups]
        nodes = f"{len(cluster.nodes)}: {words.shorten(kinds)}"
        if "nodes" in cluster.hidden:
            nodes = "the cluster shows you none (PrivateData)"
        told.append(f"nodes       {nodes}")
        out = sum(not node.up for node in cluster.nodes)
        if out:
            told.append(f"            {out} out of service")
        if cluster.associations is None:
            told.append("accounts    accounting could not be asked")
        else:
            accounts = list(dict.fromkeys(one.account for one in cluster.associations))
            told.append(f"accounts    {words.shorten(accounts) or 'none of yours'}")
        if self.looks:
            seen = [kind for kind in self.looks if self._looked(kind)]
            told.append(f"looked at   {words.shorten(seen) or 'no kind of node'}")
            told += [
                f"            not at {kind}: {one}"
                for kind, one in list(self.looks.items())
                if isinstance(one, str)
            ][:4]
        return told


def plan(output: str, *, user: bool, force: bool, environment: Mapping[str, str]) -> Plan:
    """Return where the profile shall go.

    Args:
        output: a path; empty for `hpml.toml` in the current directory.
        user: whether it is the user's own, for all projects.
        force: whether a file that is there may be replaced.
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
                "there is no home directory to write to",
                field="--user",
                hint="set HOME, or XDG_CONFIG_HOME to an absolute path, or give --output FILE",
            )
        path = own
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot(path, error.strerror or str(error)) from error
    try:
        is_directory = path.is_dir()
    except OSError as error:
        raise _cannot(path, error.strerror or str(error)) from error
    if is_directory:
        raise InputError("is a directory: give the file", field="--output", value=str(path))
    if os.path.lexists(path) and not force:
        raise InputError(
            f"{path} is there already",
            field="--output",
            hint="--force replaces it; -o FILE writes another",
        )
    if not path.parent.is_dir():
        raise _cannot(path, "there is no such directory")
    return Plan(path, force)


def initialise(
    run: Runner,
    environment: Mapping[str, str],
    *,
    writer: str,
    when: str,
    look: bool = False,
) -> Profile:
    """Ask the cluster and return its profile; nothing is written yet.

    Args:
        run: starts commands.
        environment: of the process.
        writer: who asks, such as `ada@login1`.
        when: the date, in words.
        look: whether to look at a node of each kind with a short srun.

    Raises:
        NotFoundError: there is no Slurm here.
        SchedulerUnavailable: it does not answer.
        SchedulerError: it does not show this user its partitions.
    """
    from hpml_orchestrator.scheduler.command import (  # noqa: PLC0415
        CommandMissing,
        ConfigurationMissing,
    )
    from hpml_orchestrator.scheduler.slurm.cluster import read_cluster  # noqa: PLC0415

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
            f"the cluster shows you no {' or '.join(cluster.hidden)} (PrivateData): there is "
            "nothing to write a profile from",
            hint="ask an administrator to run `hpml init -o /etc/hpml/site.toml`, which holds for "
            "all users; jobs run without a profile, too",
        )
    plain = travelling(environment, "minimal")
    own = here(run, plain, tmp_fs=cluster.limits.tmp_fs)
    groups = group_nodes(cluster)
    around = Surroundings(__version__, writer, when, own)
    if look:
        around = replace(around, looks=probe(cluster, groups, run, plain))
    files = {
        f"{_TOPOLOGY}/{kind}.xml": one.topology
        for kind, one in around.looks.items()
        if isinstance(one, Look) and one.topology
    }
    around = replace(around, topologies={Path(name).stem: name for name in files})
    text = profile_text(cluster, around, groups)
    Site.model_validate(tomllib.loads(text))  # a fault of ours must not become a file
    return Profile(cluster, groups, text, around.looks, files)


def save(profile: Profile, where: Plan) -> list[Path]:
    """Write the profile, and the topology files before it; return all that was written.

    Raises:
        InputError: something is there already, or cannot be written.
    """
    base = where.path.parent
    written = []
    for name, text in [*profile.files.items(), (where.path.name, profile.text)]:
        path = base / name
        if os.path.lexists(path) and not where.force:
            raise InputError(
                f"{path} is there already", field="--output", hint="--force replaces it"
            )
        try:
            path.parent.mkdir(exist_ok=True)
            write_text(path, text)
        except (OSError, RecordError) as error:
            raise _cannot(path, reason_of(error)) from error
        written.append(path)
    return written


def _cannot(path: Path, why: str) -> HpmlError:
    return InputError(f"cannot be written: {why}", field="--output", value=str(path))
