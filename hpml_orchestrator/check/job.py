"""Check a job before it is submitted: collect the facts, apply the rules."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.check.binding import (
    NodeShape,
    check_binding,
    shape_of_kind,
    shape_of_node,
)
from hpml_orchestrator.check.finding import CheckFinding, error, errors_first, warning
from hpml_orchestrator.check.intent import check_intent
from hpml_orchestrator.check.lifecycle import check_directory, check_lifecycle, cluster_notes
from hpml_orchestrator.check.memory import check_memory
from hpml_orchestrator.check.monitor import check_monitor
from hpml_orchestrator.check.nodes import check_room
from hpml_orchestrator.check.paths import (
    check_collect,
    check_program,
    check_records,
    check_shared,
    check_software,
)
from hpml_orchestrator.check.request import cpus_field, memory_field
from hpml_orchestrator.check.rules import ClusterAnswer, check
from hpml_orchestrator.errors import HpmlError, InputError, SchedulerUnavailable
from hpml_orchestrator.records.store import Store
from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.records.units import size_text
from hpml_orchestrator.runs.after import pending_dependencies
from hpml_orchestrator.runs.backend import check_backend, refuse_other_clusters
from hpml_orchestrator.runs.resubmit import refuse_shared_checkpoints
from hpml_orchestrator.scheduler.command import Completed, Runner, SubprocessRunner, job_environment
from hpml_orchestrator.scheduler.local.processes import (
    LocalMachine,
    short_hostname,
    shortages,
    this_machine,
)
from hpml_orchestrator.scheduler.slurm.client import NOW, is_one_machine, start_of
from hpml_orchestrator.scheduler.slurm.cluster import read_cluster, with_group_limits
from hpml_orchestrator.scheduler.slurm.messages import clean, hint_for
from hpml_orchestrator.script.directives import (
    effective_job,
    whole_nodes,
    without_time,
)
from hpml_orchestrator.site.profile import node_paths

if TYPE_CHECKING:
    from hpml_orchestrator.records.job import Job
    from hpml_orchestrator.scheduler.cluster import Cluster
    from hpml_orchestrator.site.model import ResolvedSite, Site
    from hpml_orchestrator.topology.model import Topology

CLUSTER_SECONDS = 8.0
"""How long to wait for the controller."""
_LATER = ("--hold", "--dependency")  # which `sbatch --test-only` does not regard
_LOCAL_HINT = "submit it to a Slurm cluster"


@dataclass(frozen=True)
class CheckReport:
    """What was found.

    Attributes:
        findings: errors first.
        not_asked: why the cluster was not asked, or what it hides; empty if everything was visible.
        notes: what was decided for the job, a line each.
        not_checked: what of the job was not compared with anything, such as `--signal=USR1@60`.
        answer: which partitions would accept the job; empty for the local backend.
        start: when it would start, in words; empty if that is not known or was not asked.
    """

    findings: list[CheckFinding] = field(default_factory=list)
    not_asked: str = ""
    notes: list[str] = field(default_factory=list)
    answer: ClusterAnswer = ClusterAnswer()  # noqa: RUF009 - frozen
    not_checked: list[str] = field(default_factory=list)
    start: str = ""

    @property
    def errors(self) -> list[CheckFinding]:
        """Those that prevent the job from running."""
        return [finding for finding in self.findings if finding.level == "error"]

    @property
    def warnings(self) -> list[CheckFinding]:
        """The others."""
        return [finding for finding in self.findings if finding.level == "warning"]

    def to_json(self) -> dict[str, object]:
        """Return the report for programs."""
        return {
            "ok": not self.errors and not self.not_asked,
            "not_asked": self.not_asked,
            "findings": [finding.to_json() for finding in self.findings],
            "notes": self.notes,
            "not_checked": self.not_checked,
        }


class DeadlineRunner:
    """Runs commands until a shared deadline."""

    def __init__(self, run: Runner, deadline: float) -> None:
        self._run = run
        self._deadline = deadline

    def run(self, argv: Sequence[str], *, env: Mapping[str, str], timeout: float) -> Completed:
        """Run a command with no more time than is left."""
        # One deadline for all commands: each with a timeout of its own could add up to a minute,
        # and a user waits for the submission.
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise SchedulerUnavailable(f"no time was left for {argv[0]}")
        return self._run.run(argv, env=env, timeout=min(timeout, round(left, 1) or left))

    def run_detached(self, *_: object, **__: object) -> int:
        """A check submits nothing."""
        raise NotImplementedError


def check_job(
    job: Job,
    *,
    backend: str,
    records: Path,
    environment: Mapping[str, str],
    run: Runner | None = None,
    cluster_seconds: float = CLUSTER_SECONDS,
    walk_seconds: float = 3.0,
    site: ResolvedSite | None = None,
    topologies: Mapping[str, Topology] | None = None,
    targets: Mapping[str, str] | None = None,
    others: bool = True,
    script: str = "",
) -> CheckReport:
    """Return what prevents a job from running, or may prevent it; nothing is submitted.

    Files, modules and the cluster are checked in parallel.

    Args:
        job: a complete job.
        backend: `slurm` or `local`.
        records: where records will live.
        environment: of the submitting process.
        run: starts commands.
        cluster_seconds: how long to wait for the cluster and the module system.
        walk_seconds: after which the walk through the data ends.
        site: the site profile, whose rules change what Slurm is asked for.
        topologies: of the site profile's node types that have one, by the type's name.
        targets: why each `target: auto` became what it is, by the name of its entry.
        others: whether to look for the runs that it waits for, those that save to the same
            directory, and other clusters; submitting does so by itself.
        script: the job's, to ask Slurm when it would start if nothing prevents it from running.
    """
    runner = DeadlineRunner(run or SubprocessRunner(), time.monotonic() + cluster_seconds)
    on_slurm = backend == "slurm"
    on_nodes = on_slurm and not is_one_machine(environment)
    notes = [
        f"stage.{index}.target: auto is {stage.target} here: {targets[stage.name]}"
        for index, stage in enumerate(job.stage)
        if targets and stage.name in targets
    ]
    # The cluster, the data and the module system are slow in different ways and independent of each
    # other: together they take as long as the slowest.
    with ThreadPoolExecutor(max_workers=3, thread_name_prefix="hpml-check") as pool:
        profile = site.site if site else None
        # Compare what Slurm will get, after the site's rules. An option that the site drops cannot
        # break a limit.
        asked = effective_job(job, profile.directives) if profile else job
        cluster_answer = pool.submit(_read_cluster, runner, environment) if on_slurm else None
        here = None if on_slurm else environment
        stages_answer = pool.submit(_stages, job, walk_seconds, here)
        software_answer = pool.submit(
            check_software,
            job.environment,
            runner,
            environment,
            timeout=cluster_seconds,
            on_nodes=on_slurm,
        )
        findings = [*check_program(job, environment), *check_collect(job), *check_intent(job)]
        staging, sizes = stages_answer.result()
        findings += staging
        findings += check_records(records)
        findings += _fault(check_backend, job, backend)
        waits: list[str] = []
        if others:
            after = partial(pending_dependencies, Store(records), job.after, backend=backend)
            findings += _fault(lambda: waits.extend(run["run"] for run in after()))
            findings += _fault(refuse_shared_checkpoints, Store(records), job)
        findings += check_monitor(job, on_nodes=on_nodes)
        findings += check_memory(job, Store(records))
        findings += check_lifecycle(asked, profile)
        findings += check_directory(job, records, profile, on_nodes=on_nodes)
        software, unseen = software_answer.result()
        findings += software
        cluster, not_asked = cluster_answer.result() if cluster_answer else (None, "")
    hosts = {node.name for node in cluster.nodes} if cluster else set()
    if on_nodes and hosts != {short_hostname()}:
        findings += check_shared(job, records)
    if not on_slurm:
        findings += [*check_local(job, this_machine()), *check_binding(job)]
        return CheckReport(errors_first(findings), notes=notes, not_checked=unseen)
    answer = ClusterAnswer()
    if cluster is not None:
        if others:
            findings += _fault(refuse_other_clusters, cluster.limits.cluster, environment)
        answer = _compare(asked, cluster, sizes, profile)
        findings += answer.findings
        not_asked = _hidden(cluster)
        notes += cluster_notes(asked, cluster, profile)
    findings += _binding(asked, cluster, profile, topologies or {})
    if "disk.most" not in {finding.code for finding in findings}:  # reported already
        findings += check_room(job, profile, disk_mib=sizes.get("local", 0))
    not_checked = [*answer.not_checked, *unseen]
    report = CheckReport(errors_first(findings), not_asked, notes, answer, not_checked)
    if not script or report.errors or not_asked:
        return report
    return _with_start(report, job, script, runner, environment, waits)


def _with_start(
    report: CheckReport,
    job: Job,
    script: str,
    runner: Runner,
    environment: Mapping[str, str],
    waits: Sequence[str],
) -> CheckReport:
    try:
        variables = job_environment(environment, job.environment.inherit)
        start, refused = start_of(script, runner, variables)
    except SchedulerUnavailable:
        return report
    if refused:
        message = f"sbatch refuses the job: {clean(refused)}"
        finding = error("slurm.refused", "resources", None, message, hint=hint_for(refused))
        return dataclasses.replace(report, findings=[finding, *report.findings])
    if waits:
        start = f"waits for {', '.join(waits)}"
    elif any(option.startswith(_LATER) for option in job.resources.extra):
        start = ""
    elif start == NOW and report.answer.shared_limits:
        start += f" unless running jobs fill limits of {first_few(report.answer.shared_limits)}"
    return dataclasses.replace(report, start=start)


def _stages(
    job: Job, seconds: float, here: Mapping[str, str] | None
) -> tuple[list[CheckFinding], dict[str, int]]:
    """Check `stage`; for a job of this machine, whose environment is given, also the targets."""
    if not job.stage:
        return [], {}
    from hpml_orchestrator.check import stages  # noqa: PLC0415 - loads all of staging

    findings, sizes = stages.check_stages(job, seconds=seconds)
    if here is not None:
        paths = node_paths(Path(job.workdir), here, chosen="none")  # no profile describes it
        bases = {"shm": paths.ram, "local": paths.scratch}
        findings += stages.check_targets(job, sizes, bases)
    return findings, sizes


def check_local(job: Job, machine: LocalMachine) -> Iterator[CheckFinding]:
    """Yield what a job requests and this machine does not have."""
    for code, limit, shown in shortages(job, machine):
        field_name = {"cpus": cpus_field(job), "memory": memory_field(job)}.get(code, code)
        in_job = code == "array"
        value = str(job.array) if in_job else job.resources.written(field_name)
        most = size_text(limit) if code == "memory" else limit
        message = f"the job asks for {shown}; this machine ({short_hostname()}) has "
        message += f"room for {most or 'none'}"
        place = field_name if in_job else f"resources.{field_name}"
        yield error(f"local.{code}", place, value, message, most, _LOCAL_HINT)


def refusal(errors: Sequence[CheckFinding], unchecked: str = "`--no-check`") -> InputError:
    """Return the error for a job that would not run: every finding with its hint.

    `unchecked` is what the caller can write to submit the job without the check.
    """
    lines = []
    for finding in errors:
        lines.append(str(finding))
        if finding.hint:
            lines.append(f"  {finding.hint}")
    fault = InputError(
        "\n".join(lines), hint=f"nothing was submitted; {unchecked} submits it as it is"
    )
    fault.field = errors[0].field
    fault.value = errors[0].value
    return fault


def _read_cluster(run: Runner, environment: Mapping[str, str]) -> tuple[Cluster | None, str]:
    try:
        return with_group_limits(read_cluster(run, env=environment), run, env=environment), ""
    except SchedulerUnavailable as fault:
        return None, str(fault)
    except Exception as fault:  # noqa: BLE001 - a submission must not fail because of its check
        return None, f"its answer was not understood ({type(fault).__name__}: {fault})"


def _hidden(cluster: Cluster) -> str:
    if not cluster.hidden:
        return ""
    unknown = "CPUs, memory, GPUs and features"
    if "partitions" in cluster.hidden:
        unknown = f"limits on time and nodes, {unknown}"
    return f"it shows you no {' or '.join(cluster.hidden)} (PrivateData), so {unknown} are unknown"


def _compare(
    job: Job, cluster: Cluster, sizes: Mapping[str, int], site: Site | None
) -> ClusterAnswer:
    disk_mib = sizes.get("local", 0)
    if site is not None and site.path("scratch", job.resources.partition) is not None:
        disk_mib = 0  # Slurm's TmpDisk is the size of another directory
    answer = check(job, cluster, disk_mib=disk_mib, shm_mib=sizes.get("shm", 0))
    if site is None:
        return answer
    findings = answer.findings
    # The script sets no limit then, and the job gets the partition's default.
    if without_time(site.directives):
        findings = [finding for finding in findings if finding.field != "resources.time"]
    return dataclasses.replace(answer, findings=[*_other_cluster(site, cluster), *findings])


def _other_cluster(site: Site, cluster: Cluster) -> list[CheckFinding]:
    here = cluster.limits.cluster
    if site.cluster is None or not here or site.cluster == here:
        return []
    message = f"the site profile is for cluster {site.cluster}; this is {here}"
    hint = "`hpml init` writes one for this cluster; `--site FILE` takes another, or `none`"
    return [warning("site.cluster", "site profile", site.cluster, message, here, hint)]


def _binding(
    job: Job, cluster: Cluster | None, site: Site | None, topologies: Mapping[str, Topology]
) -> list[CheckFinding]:
    """Compare the binding of a job with the nodes of the site profile; without any, of Slurm."""
    wanted = job.resources.partition
    kinds = site.kinds_of(wanted) if site else {}
    whole = whole_nodes(job, site)
    shapes: list[NodeShape] = [
        shape_of_kind(name, kind, topologies.get(name)) for name, kind in kinds.items()
    ]
    if cluster is not None:
        default = [cluster.default_partition] if cluster.default_partition else []
        partitions = (
            [one for one in map(cluster.partition, wanted.split(",")) if one] if wanted else default
        )
        whole = whole or cluster.limits.whole_nodes
        whole = whole or (bool(partitions) and all(part.exclusive for part in partitions))
        if not shapes:
            nodes = [node for part in partitions for node in cluster.nodes_of(part)]
            # A warning once per kind of node: a partition has hundreds that are alike but for their
            # name.
            by_shape = {dataclasses.replace(shape_of_node(node), name=""): node for node in nodes}
            shapes = [shape_of_node(node) for node in by_shape.values()]
    return check_binding(job, shapes, whole=whole)


def invalid_job(fault: InputError) -> CheckReport:
    """Return the report on a job that cannot be loaded or rendered: each problem is a finding."""
    return CheckReport([_as_finding(problem, fault.hint) for problem in fault.problems or [fault]])


def _fault(check: Callable[..., object], *words: object, **options: object) -> list[CheckFinding]:
    try:
        check(*words, **options)
    except HpmlError as fault:
        return [_as_finding(fault)]
    return []


def _as_finding(fault: HpmlError, hint: str = "") -> CheckFinding:
    place, value = getattr(fault, "field", "") or "job", getattr(fault, "value", None)
    shown = value if isinstance(value, (str, int, float)) else None
    return error("job.wrong", place, shown, fault.message, hint=fault.hint or hint)
