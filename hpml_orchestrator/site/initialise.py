"""`hpml init`: ask the cluster, probe its nodes if asked to, and write the site profile."""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from hpml_orchestrator import __version__
from hpml_orchestrator.errors import InputError, NotFoundError, RecordError, SchedulerError
from hpml_orchestrator.records.files import write_text
from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.scheduler.command import (
    CommandMissing,
    ConfigurationMissing,
    job_environment,
)
from hpml_orchestrator.scheduler.slurm.cluster import read_cluster
from hpml_orchestrator.site.model import Site
from hpml_orchestrator.site.node_probe import NodeProbe
from hpml_orchestrator.site.nodes import gpu_text, group_nodes
from hpml_orchestrator.site.probe import probe
from hpml_orchestrator.site.profile import PROJECT_NAME, user_path
from hpml_orchestrator.site.profile_text import Origin, profile_text, release

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpml_orchestrator.scheduler.cluster import Cluster
    from hpml_orchestrator.scheduler.command import Runner
    from hpml_orchestrator.site.nodes import NodeGroup

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
