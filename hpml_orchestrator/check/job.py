"""Say before a submission whether the job will be taken: gather the facts, apply the rules."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.check.binding import (
    Shape,
    check_binding,
    shape_of_kind,
    shape_of_node,
)
from hpml_orchestrator.check.closed import with_closed
from hpml_orchestrator.check.data import Sizes, check_stages, check_targets
from hpml_orchestrator.check.files import check_files
from hpml_orchestrator.check.finding import Finding, errors_of
from hpml_orchestrator.check.local import check_local, this_machine
from hpml_orchestrator.check.modules import check_modules
from hpml_orchestrator.check.monitor import check_monitor, check_port
from hpml_orchestrator.check.records import check_records, one_machine
from hpml_orchestrator.check.rules import check
from hpml_orchestrator.check.stage import check_staging_room, target_notes
from hpml_orchestrator.check.topology import check_topology
from hpml_orchestrator.errors import HpmlError, InputError, SchedulerUnavailable
from hpml_orchestrator.records.store import Store
from hpml_orchestrator.runs.after import outstanding
from hpml_orchestrator.scheduler.command import Completed, Runner, SubprocessRunner
from hpml_orchestrator.script.site_rules import as_asked, whole_nodes, without_time
from hpml_orchestrator.script.static_form import static_form

if TYPE_CHECKING:
    from hpml_orchestrator.scheduler.cluster import Cluster
    from hpml_orchestrator.spec import Job
    from hpml_orchestrator.spec.site import Site
    from hpml_orchestrator.spec.site_load import ResolvedSite
    from hpml_orchestrator.topology import Topology

__all__ = ["Report", "check_job", "refusal"]

CLUSTER_SECONDS = 8.0
"""Patience with a controller that stands still."""


@dataclass(frozen=True)
class Report:
    """What was found.

    Attributes:
        findings: errors first.
        not_asked: why the cluster was not asked, or what it does not show; empty where all was
            seen that the job is compared with.
        notes: what was decided for the job, a line each.
    """

    findings: list[Finding] = field(default_factory=list)
    not_asked: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def errors(self) -> list[Finding]:
        """Those that keep the job from running."""
        return errors_of(self.findings)

    @property
    def warnings(self) -> list[Finding]:
        """The others."""
        return [finding for finding in self.findings if finding.level == "warning"]

    def to_json(self) -> dict[str, Any]:
        """Return the report for programs."""
        return {
            "ok": not self.errors and not self.not_asked,
            "not_asked": self.not_asked,
            "findings": [finding.to_json() for finding in self.findings],
            "notes": self.notes,
        }


class _Hasty:
    """A `Runner` whose commands all end by one moment, however long they might want to wait."""

    def __init__(self, run: Runner, ends: float) -> None:
        self._run = run
        self._ends = ends

    def run(self, argv: Sequence[str], *, env: Mapping[str, str], timeout: float) -> Completed:
        left = self._ends - time.monotonic()
        if left <= 0:
            raise SchedulerUnavailable(f"no time was left for {argv[0]}")
        return self._run.run(argv, env=env, timeout=min(timeout, round(left, 1) or left))

    def run_detached(self, *_: Any, **__: Any) -> int:
        """Nothing is submitted here."""
        raise SchedulerUnavailable("a check starts nothing that outlives it")


def check_job(
    job: Job,
    *,
    backend: str,
    records: Path,
    environment: Mapping[str, str],
    script: str = "",
    run: Runner | None = None,
    cluster_seconds: float = CLUSTER_SECONDS,
    walk_seconds: float = 3.0,
    now: float | None = None,
    site: ResolvedSite | None = None,
    topologies: Mapping[str, Topology] | None = None,
    targets: Mapping[str, str] | None = None,
) -> Report:
    """Return what keeps a job from being taken, or may; nothing is submitted.

    Files, modules and the cluster are asked side by side, so that it takes as long as the slowest
    of them.

    Args:
        job: a complete job.
        backend: `slurm` or `local`.
        records: where records will live.
        environment: of the submitting process.
        script: the rendered script; its length has a limit.
        run: starts commands.
        cluster_seconds: patience with the cluster, and with the module system.
        walk_seconds: after which the walk through the data ends.
        now: seconds since the epoch; the clock when left out.
        site: the site profile, whose rules change what Slurm is asked for.
        topologies: of the site profile's node types that have one, by the type's name.
        targets: why each `target: auto` became what it is, by the name of its entry.
    """
    hasty = _Hasty(run or SubprocessRunner(), time.monotonic() + cluster_seconds)
    on_slurm = backend == "slurm"
    profile = site.site if site else None
    notes = target_notes(job, targets or {})
    with ThreadPoolExecutor(max_workers=3, thread_name_prefix="hpml-check") as pool:
        cluster_answer = pool.submit(_ask, hasty, environment) if on_slurm else None
        stages_answer = pool.submit(check_stages, job, seconds=walk_seconds)
        modules_answer = pool.submit(
            check_modules, job.environment.modules, hasty, environment, timeout=cluster_seconds
        )
        found = with_closed(check_files(job, environment), job.workdir)
        stages, sizes = stages_answer.result()
        found += stages
        on_nodes = on_slurm and not one_machine(environment)
        found += check_records(records, on_nodes=on_nodes)
        try:
            outstanding(Store(records), job.after, backend=backend)
        except HpmlError as error:
            found.append(_as_finding(error))
        found += check_monitor(job, on_nodes=on_nodes)
        found += modules_answer.result()
        if cluster_answer is None:
            found += check_local(job, this_machine())
            found += check_targets(job)
            found += check_port(job, whole=False)
            found += check_binding(job)
            return Report(_sorted(found), notes=notes)
        cluster, not_asked = cluster_answer.result()
    if cluster is not None:
        moment = time.time() if now is None else now
        try:
            found += _compared(job, cluster, sizes, script, moment, profile)
            found += _described(job, cluster, site, topologies or {})
        except InputError as error:
            found.append(_as_finding(error))
        not_asked = _hidden(cluster)
    found += _bound(job, cluster, profile, topologies or {})
    told = {finding.code for finding in found}
    if not told & {"disk.most", "memory.most"}:  # which say the same of the live cluster
        found += check_staging_room(job, profile, disk_mib=sizes.disk_mib)
    return Report(_sorted(found), not_asked, notes)


def refusal(errors: Sequence[Finding]) -> InputError:
    """Return the error for a job that would not run: every finding, each with what would do."""
    lines = []
    for finding in errors:
        lines.append(str(finding))
        if finding.hint:
            lines.append(f"  {finding.hint}")
    error = InputError(
        "\n".join(lines), hint="nothing was submitted; `--no-check` submits it as it is"
    )
    error.field = errors[0].field
    error.value = errors[0].value
    return error


def _ask(run: Runner, environment: Mapping[str, str]) -> tuple[Cluster | None, str]:
    from hpml_orchestrator.scheduler.slurm.cluster import (  # noqa: PLC0415
        read_cluster,
        with_group_limits,
    )

    try:
        return with_group_limits(read_cluster(run, env=environment), run, env=environment), ""
    except SchedulerUnavailable as error:
        return None, str(error)
    except Exception as error:  # noqa: BLE001 - a submission must not fail because of its check
        return None, f"its answer was not understood ({type(error).__name__}: {error})"


def _hidden(cluster: Cluster) -> str:
    """Return what the cluster does not show, and what nobody knows therefore; empty for nothing."""
    if not cluster.hidden:
        return ""
    unknown = "CPUs, memory, GPUs and features"
    if "partitions" in cluster.hidden:
        unknown = f"limits on time and nodes, {unknown}"
    return f"it shows you no {' or '.join(cluster.hidden)} (PrivateData), so {unknown} are unknown"


def _compared(
    job: Job, cluster: Cluster, sizes: Sizes, script: str, now: float, site: Site | None
) -> list[Finding]:
    found: list[Finding] = []
    disk_mib = sizes.disk_mib
    if site is not None:
        job = as_asked(job, site.directives)
        found += _other_cluster(site, cluster)
        if site.path("scratch", job.resources.partition) is not None:
            disk_mib = 0  # Slurm's TmpDisk is the size of another directory
    told = check(
        job,
        cluster,
        script_bytes=len(script.encode("utf-8")),
        now=now,
        required=_nodes(job, "--nodelist="),
        excluded=_nodes(job, "--exclude="),
        disk_mib=disk_mib,
        shm_mib=sizes.shm_mib,
    )
    if site is not None and without_time(site.directives):
        told = [finding for finding in told if finding.field != "resources.time"]
    return found + told


def _described(
    job: Job, cluster: Cluster, site: ResolvedSite | None, topologies: Mapping[str, Topology]
) -> list[Finding]:
    """Compare the topologies that the launcher binds by with the nodes as Slurm has them.

    Raises:
        InputError: a list of nodes is none, or the form that the job wants cannot be.
    """
    if site is None or not static_form(job, site, topologies).name:
        return []
    asked = as_asked(job, site.site.directives)
    kinds = site.site.kinds_of(asked.resources.partition)
    names = site.site.partitions_of(asked.resources.partition)
    partitions = [one for one in map(cluster.partition, names) if one is not None]
    nodes = {node.name: node for one in partitions for node in cluster.nodes_of(one)}
    wanted = _nodes(asked, "--nodelist=") or frozenset(nodes)
    for name in nodes.keys() - (wanted - _nodes(asked, "--exclude=")):
        del nodes[name]
    found: list[Finding] = []
    for name, kind in kinds.items():
        field_name = f"node_types.{name}.topology"
        own = _members(f"node_types.{name}.nodes", kind.nodes)
        found += check_topology(
            name,
            topologies[name],
            [node for node in nodes.values() if own is None or node.name in own],
            # Without a list of its nodes, others of the partition may be of another kind.
            strict=own is not None or (len(kinds) == 1 and not asked.resources.constraint),
            origin=f"{kind.topology} (named in {site.origin(field_name)})",
        )
    return found


def _members(field_name: str, told: str | None) -> frozenset[str] | None:
    """Return the nodes that a site profile counts to a kind; None where it does not say.

    Raises:
        InputError: it is no list of nodes.
    """
    from hpml_orchestrator.scheduler.nodelist import expand  # noqa: PLC0415

    if told is None:
        return None
    try:
        return frozenset(expand(told))
    except InputError as error:
        raise InputError(error.message, field=field_name, value=told, hint=error.hint) from error


def _bound(
    job: Job, cluster: Cluster | None, site: Site | None, topologies: Mapping[str, Topology]
) -> list[Finding]:
    """Compare the binding with the nodes, as the site profile or else Slurm tells of them."""
    asked = as_asked(job, site.directives) if site else job
    wanted = asked.resources.partition
    kinds = site.kinds_of(wanted) if site else {}
    whole = whole_nodes(asked, site)
    shapes: list[Shape] = [
        shape_of_kind(name, kind, topologies.get(name)) for name, kind in kinds.items()
    ]
    if cluster is not None:
        chosen = [cluster.partition(name) for name in wanted.split(",")] if wanted else []
        partitions = [one for one in chosen or [cluster.default_partition] if one is not None]
        whole = whole or cluster.limits.whole_nodes
        whole = whole or (bool(partitions) and all(one.exclusive for one in partitions))
        if not shapes:
            nodes = [node for one in partitions for node in cluster.nodes_of(one)]
            by_shape = {dataclasses.replace(shape_of_node(node), name=""): node for node in nodes}
            shapes = [shape_of_node(node) for node in by_shape.values()]
    return check_binding(asked, shapes, whole=whole) + check_port(asked, whole=whole)


def _other_cluster(site: Site, cluster: Cluster) -> list[Finding]:
    """Return a warning where the profile was written for another cluster than this."""
    here = cluster.limits.cluster
    if site.cluster is None or not here or site.cluster == here:
        return []
    message = f"the site profile is about cluster {site.cluster}; this is {here}"
    hint = "`hpml init` writes one for this cluster; `--site FILE` takes another, or `none`"
    return [Finding("warning", "site.cluster", "site profile", site.cluster, message, here, hint)]


def _nodes(job: Job, option: str) -> frozenset[str]:
    """Return the nodes that an option names.

    Raises:
        InputError: its value is no list of nodes.
    """
    from hpml_orchestrator.scheduler.nodelist import expand  # noqa: PLC0415

    names: list[str] = []
    for index, word in enumerate(job.resources.extra):
        if not word.startswith(option):
            continue
        try:
            names += expand(word.removeprefix(option))
        except InputError as error:
            raise InputError(
                error.message, field=f"resources.extra.{index}", value=word, hint=error.hint
            ) from error
    return frozenset(names)


def _as_finding(error: HpmlError) -> Finding:
    field_name = getattr(error, "field", "") or "job"
    message = error.message.removeprefix(f"{field_name}: ")
    return Finding("error", "job.wrong", field_name, None, message, hint=error.hint)


def _sorted(found: list[Finding]) -> list[Finding]:
    key: Callable[[Finding], bool] = lambda finding: finding.level != "error"  # noqa: E731
    return sorted(found, key=key)
