"""Check a job before submission: collect the facts, apply the rules."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from site import ENABLE_USER_SITE, getusersitepackages
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.check.memory import check_memory
from hpml_orchestrator.check.paths import (
    check_collect,
    check_program,
    check_records,
    check_shared,
    check_software,
    unwritable,
)
from hpml_orchestrator.check.request import (
    CheckFinding,
    NodeShape,
    check_binding,
    cpus_field,
    error,
    errors_first,
    memory_field,
    shape_of_kind,
    shape_of_node,
    warning,
)
from hpml_orchestrator.check.rules import ClusterAnswer, check, check_room
from hpml_orchestrator.errors import HpmlError, InputError, SchedulerUnavailable, extra_hint
from hpml_orchestrator.records.job import Checkpoint
from hpml_orchestrator.records.mounts import private_directory
from hpml_orchestrator.records.run import lead_seconds
from hpml_orchestrator.records.store import Store
from hpml_orchestrator.records.targets import is_loopback
from hpml_orchestrator.records.texts import first_few
from hpml_orchestrator.records.units import MIB, format_time, size_text
from hpml_orchestrator.runs.backend import check_backend, refuse_other_clusters
from hpml_orchestrator.runs.requeue import refuse_shared_checkpoints
from hpml_orchestrator.runs.select import pending_dependencies
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
from hpml_orchestrator.script.render import (
    can_requeue,
    effective_job,
    whole_nodes,
    without_time,
)
from hpml_orchestrator.site.profile import node_paths

if TYPE_CHECKING:
    from hpml_orchestrator.records.job import Job, Monitor
    from hpml_orchestrator.scheduler.cluster import Cluster, Partition
    from hpml_orchestrator.site.model import ResolvedSite, Site
    from hpml_orchestrator.topology.model import Topology

# Warn about valid requests that are rarely intended, using the job file and the program's source.

_MOST_FILES, _MOST_BYTES = 30, 2**18
_LITTLE_MEMORY_MIB = 256  # PyTorch alone needs more
_TRAINS = re.compile(
    r"^\s*(import|from)\s+(torch|tensorflow|keras|sklearn|xgboost|lightgbm|numpy|pandas)\b",
    re.MULTILINE,
)
_DISTRIBUTED = re.compile(
    r"distributed|DataParallel|accelerat|lightning|deepspeed|horovod|mpi4py|composer|fairscale"
    r"|megatron|nemo|Trainer|Fabric|Strategy|RANK|PROCID|LOCALID|hpml_ch|submitit",
    re.IGNORECASE,
)
_IMPORT = re.compile(r"^\s*(?:from\s+\.*([\w.]*)\s+)?import\s+([\w*(][\w., \t]*)", re.MULTILINE)
_INDEX = re.compile(r"\{array\.index\}|\{point\.|ARRAY_TASK_ID|HPML_POINT")
_CHECKPOINT = re.compile(r"\{checkpoint\.dir\}|HPML_CHECKPOINT_DIR|hpml_ch(annel|eckpoint)\b")


def check_intent(job: Job) -> Iterator[CheckFinding]:
    """Yield warnings about a job that would run, but probably not as the user intends."""
    resources, memory = job.resources, job.resources.memory
    if memory and memory <= _LITTLE_MEMORY_MIB and (job.script or job.module):
        message = f"is {size_text(memory)}iB per node: a number without a unit is MiB"
        hint = f"write {memory}G for GiB"
        yield warning("memory.little", "resources.memory", memory, message, None, hint)
    files = _program_files(job)
    if not files:
        return
    program, fields = os.path.basename(next(iter(files))), job.environment
    own = job.checkpoint
    named = [*job.args, *(job.command or ()), *fields.variables.values(), fields.setup or ""]
    named.append(own.directory)
    text = "\n".join([*named, *files.values()])
    neither = f"neither the job file nor {program} names"
    total = resources.nodes * resources.ranks
    is_known = _TRAINS.search(text) or _imported(files) <= sys.stdlib_module_names
    if total > 1 and program.endswith(".py") and is_known and not _DISTRIBUTED.search(text):
        place = "ranks_per_node" if resources.ranks_per_node else "gpus"
        place = place if resources.ranks > 1 else "nodes"
        message = f"{total} ranks would do the same and write the same files: {program} has no "
        message += "distributed code"
        hint = "give one rank, or use torch.distributed; an `array` runs it with several settings"
        value = resources.written(place)
        yield warning("ranks.alone", f"resources.{place}", value, message, 1, hint)
    if job.array and len(job.array.indices) > 1 and not _INDEX.search(text):
        message = f"all tasks would do the same: {neither} the task's index"
        hint = "pass {array.index}, for example as --seed={array.index}"
        yield warning("array.unused", "array", str(job.array), message, None, hint)
    # An absolute directory was chosen for the program: it may be set in a configuration file.
    is_named = own.is_shared or f"{{run.dir}}/{own.directory}" in text or _CHECKPOINT.search(text)
    if own.enabled and not is_named:
        message = f"{neither} the directory of checkpoints: the next attempt would begin anew"
        hint = "pass {checkpoint.dir}, or set `checkpoint.directory` to where the program saves"
        yield warning("checkpoint.unused", "checkpoint", True, message, None, hint)


def _imported(files: Mapping[str, str]) -> set[str]:
    """Return the third-party packages that a program imports: their behaviour is unknown."""
    names = {dotted.partition(".")[0] for text in files.values() for dotted in _imports(text)}
    return names - {part for path in files for part in path.removesuffix(".py").split("/")}


def _program_files(job: Job) -> dict[str, str]:
    """Return the texts of a job's program, starting with itself, and of its imports, by path."""
    module = (job.module or ".").replace(".", "/")
    words = [word for word in job.command or () if word.endswith((".py", ".sh"))]
    names = [job.script or "", f"{module}.py", f"{module}/__main__.py", *words]
    paths = [os.path.join(job.workdir, name) for name in names]
    found: dict[str, str] = {}
    for path in paths:  # grows during the loop
        if path in found or len(found) == _MOST_FILES or not os.path.isfile(path):
            continue
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as stream:
            found[path] = stream.read(_MOST_BYTES)
        for dotted in _imports(found.get(path, "")):
            inner = dotted.replace(".", "/")
            for top in (os.path.dirname(path), job.workdir):
                paths += [f"{top}/{inner}.py", f"{top}/{inner}/__init__.py"]
    return found


def _imports(text: str) -> Iterator[str]:
    """Yield the dotted names of modules that a program may import."""
    for package, names in _IMPORT.findall(text):
        for name in names.split(","):
            module = name.split()[0] if name.strip() else ""
            yield from filter(None, (package, f"{package}.{module}".strip(".")))


# Check that a job's monitor will start, that Prometheus can scrape it, and that it is protected.

_OPEN = "everybody who can reach the nodes"
_READ_SECONDS = 10.0


def check_monitor(
    job: Job, *, on_nodes: bool, installed: Callable[[str], bool] | None = None
) -> list[CheckFinding]:
    """Return warnings about a job's monitor; the job runs in any case.

    Args:
        job: a complete job.
        on_nodes: whether the job runs on other machines than this one.
        installed: whether the interpreter that runs hpml has a module; detected by default.
    """
    if not job.monitor.enabled:
        return []
    return [*_software(job, installed or _installed), *_listening(job.monitor, on_nodes)]


def _installed(name: str) -> bool:
    """Return whether an isolated interpreter, like the exporter's, has a module: no `--user`."""
    spec = find_spec(name)
    path = (spec.origin if spec else None) or ""
    return bool(path) and not (ENABLE_USER_SITE and path.startswith(getusersitepackages()))


def _warning(code: str, field: str, value: object, message: str, hint: str) -> CheckFinding:
    return warning(f"monitor.{code}", f"monitor.{field}", value, message, None, hint)


def _software(job: Job, installed: Callable[[str], bool]) -> Iterator[CheckFinding]:
    if not installed("hpml_exporters"):
        message = "hpml_exporters is not installed with hpml: the job will not be monitored"
        yield _warning("missing", "enabled", True, message, extra_hint("export"))
    elif job.resources.gpu_count:
        missing = [name for name in ("nvitop", "pynvml") if not installed(name)]
        if missing:
            message = f"{' and '.join(missing)} not installed: GPUs will not be monitored"
            yield _warning("no_gpus", "enabled", True, message, extra_hint("export"))


def _listening(monitor: Monitor, on_nodes: bool) -> Iterator[CheckFinding]:
    alone = is_loopback(monitor.listen.rpartition(":")[0].strip("[]"))
    if alone and on_nodes:
        message = "is reachable from the node itself only: Prometheus elsewhere cannot scrape it"
        hint = "`listen: 0.0.0.0:0` with a `web_config`; the summary in the record needs neither"
        yield _warning("alone", "listen", monitor.listen, message, hint)
    if monitor.web_config is not None:
        yield from _web_config(monitor.web_config, alone=alone)
    elif not alone:
        message = f"{_OPEN} can read the job's metrics"
        hint = "name a `web_config` with TLS and users, or a loopback address"
        yield _warning("open", "listen", monitor.listen, message, hint)


def _web_config(path: str, *, alone: bool) -> Iterator[CheckFinding]:
    """Yield the exporter's error about the file; nothing if the exporter cannot be started."""
    if not os.access(path, os.R_OK):
        message = "is not readable by you: the job will not be monitored"
        yield _warning("web_config", "web_config", path, message, "create it, or name another")
        return
    answer = _read(path)
    if "error" in answer:
        message = f"{answer['error']}: the job will not be monitored"
        hint = answer.get("hint") or "`hpml export node --web-config FILE` reads the same format"
        yield _warning("web_config", "web_config", path, message, hint)
    elif alone or not answer:
        return
    elif not answer["locked"]:
        message = f"requires neither users nor verified client certificates: {_OPEN} can read all"
        hint = "`basic_auth_users`, or `client_auth_type: RequireAndVerifyClientCert` with TLS"
        yield _warning("open", "web_config", path, message, hint)
    elif not answer["tls"]:
        message = "has no TLS: passwords and metrics cross the network unencrypted"
        hint = "`tls_server_config` with `cert_file` and `key_file`, which the nodes can read"
        yield _warning("unencrypted", "web_config", path, message, hint)


def _read(path: str) -> dict[str, Any]:
    """Parse a file with the exporter's reader; return an empty result if it cannot be started.

    It runs as a separate process, isolated like the job's exporter, because no room imports the
    exporters.
    """
    argv = [sys.executable, "-I", "-m", "hpml_exporters.web.config", path]
    try:
        process = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_READ_SECONDS, check=False
        )
        answer = json.loads(process.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return {}
    return answer if isinstance(answer, dict) else {}


# Compare `checkpoint` with the time limit, its directory, and the cluster.

_SHORT = 30  # too few seconds to save most trainings
_LITTLE_SPACE_MIB = 1024
_LISTED = 1000
_DEFAULTS = Checkpoint()


def check_lifecycle(job: Job, site: Site | None) -> Iterator[CheckFinding]:
    """Yield findings about `checkpoint` that conflict with the rest of the job.

    Args:
        job: the job as Slurm will see it.
        site: the site profile, if any.
    """
    own = job.checkpoint
    if not own.enabled:
        return
    if not (site and without_time(site.directives)):
        yield from _times(own, job.resources.time)
    if own.requeue and own.attempts == 1:
        message = "a run of one attempt never continues after the ends that `requeue` names"
        hint = "give more attempts, or `requeue: []`"
        yield warning("checkpoint.attempts", "checkpoint.attempts", 1, message, None, hint)
    # Only Slurm can act after the loss of the first node, which runs the batch script.
    if "node_failure" in own.requeue and not can_requeue(site):
        message = "this site requeues no jobs, and a job whose first node fails cannot submit its "
        message += "continuation"
        hint = "if that happens, `hpml requeue RUN` continues the run"
        place = "checkpoint.requeue"
        yield warning("checkpoint.node_failure", place, "node_failure", message, None, hint)
    for option in job.resources.extra:
        if own.avoid_failed_nodes and option.startswith("--nodelist="):
            message = f"if a node of {option} fails, the next attempt must not use it and never "
            message += "starts"
            hint = "leave --nodelist out, or set `avoid_failed_nodes: false`"
            place = "checkpoint.avoid_failed_nodes"
            yield warning("checkpoint.nodelist", place, True, message, None, hint)


def _times(own: Checkpoint, limit: int) -> Iterator[CheckFinding]:
    """Yield times that do not fit the time limit, in seconds."""
    shown, lead, given = format_time(limit), own.lead, own.written("lead")
    if lead is not None and lead >= limit:
        message = f"must be below the time limit of {shown}: ranks would be asked to stop when "
        message += "they start"
        hint = "a bare number is minutes; write `90s` for seconds"
        yield error("checkpoint.lead", "checkpoint.lead", given, message, shown, hint)
    seconds = int(lead_seconds(lead, limit))
    if seconds < _SHORT:
        message = f"ranks have {seconds} s to save before the time limit of {shown}"
        hint = "give a longer `resources.time`" if lead is None else "give a longer `lead`"
        yield warning("checkpoint.short", "checkpoint.lead", given, message, _SHORT, hint)
    if own.hang >= limit and own.hang != _DEFAULTS.hang:
        message = f"an attempt ends after {shown}, before it can count as hung"
        hint = "give a shorter time, or `off`"
        given = own.written("hang")
        yield warning("checkpoint.hang", "checkpoint.hang", given, message, shown, hint)


def check_directory(
    job: Job, records: Path, site: Site | None, *, on_nodes: bool
) -> Iterator[CheckFinding]:
    """Yield why checkpoints cannot be saved in their directory, as seen from this machine.

    With `on_nodes` the job runs on other machines than this one.
    """
    own, place = job.checkpoint, "checkpoint.directory"
    if not own.enabled:
        return
    if not own.is_shared:  # `check_records` covers the other case
        yield from _space(records, own.directory)
        return
    fixed = own.directory.partition("{")[0]
    path = Path(fixed if fixed == own.directory else os.path.dirname(fixed))
    reason = _node_local(path, job, site)
    if on_nodes and reason:
        message = f"is local to each node ({reason}): the next attempt may run on another node"
        hint = "give a directory on the shared file system, or a relative path"
        yield error("checkpoint.local", place, own.directory, message, None, hint)
        return
    if path.is_relative_to("/dev/shm"):  # noqa: S108
        message = "is in memory: checkpoints are lost when this machine restarts"
        yield warning("checkpoint.memory", place, own.directory, message)
    closed = unwritable(path)
    if closed:
        what = "is not writable by you" if os.path.isdir(closed) else "is not a directory"
        yield error("checkpoint.unwritable", place, own.directory, f"{closed} {what}")
        return
    yield from _space(path, own.directory)
    # `hpml resubmit` names the directory of the run that it continues
    if fixed != own.directory or path.is_relative_to(records / "runs"):
        return
    if names := _newest(path):
        message = f"holds {first_few(names)} already: the run may continue from what another saved"
        hint = "give an empty directory, or a relative path, if that is not intended"
        yield warning("checkpoint.used", place, own.directory, message, None, hint)


def _node_local(path: Path, job: Job, site: Site | None) -> str:
    partition = job.resources.partition
    staged = [site.path("scratch", partition), site.path("ram", partition)] if site else []
    for top in staged:
        if top and top.startswith("/") and path.is_relative_to(top):
            return top
    return private_directory(str(path))


def _space(path: Path, shown: str) -> Iterator[CheckFinding]:
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        state = os.statvfs(path)
    except OSError:
        return
    if not state.f_blocks:  # some network file systems report no size
        return
    free_mib = state.f_bavail * state.f_frsize // MIB
    no_inodes = bool(state.f_files) and not state.f_favail
    if free_mib == 0 or no_inodes:
        what = "inodes" if no_inodes else "space"
        message = f"the file system of {path} has no {what} left"
        yield error("checkpoint.full", "checkpoint.directory", shown, message, 0)
    elif free_mib < _LITTLE_SPACE_MIB:
        left = size_text(free_mib)
        message = f"the file system of {path} has {left} left"
        hint = "remove what is not needed, or give another directory"
        yield warning("checkpoint.space", "checkpoint.directory", shown, message, left, hint)


def _newest(path: Path) -> list[str]:
    try:
        with os.scandir(path) as entries:
            found = [
                (entry.stat(follow_symlinks=False).st_mtime, entry.name)
                for entry in itertools.islice(entries, _LISTED)
            ]
    except OSError:
        return []
    return [name for _, name in sorted(found, reverse=True)]


def cluster_notes(job: Job, cluster: Cluster, site: Site | None) -> list[str]:
    """Return what a run with `checkpoint` can expect from a cluster, one line each."""
    own = job.checkpoint
    if not own.enabled:
        return []
    notes = []
    if own.requeue and not can_requeue(site):
        notes.append(
            "checkpoint.requeue: the site profile excludes requeueing: the run continues as a new "
            "job, which the old one submits from its node"
        )
    names = (job.resources.partition or "").split(",")
    default = cluster.default_partition
    chosen = [found for name in names if name and (found := cluster.partition(name))]
    chosen = chosen or ([default] if default else [])
    if cluster.limits.preemption and "preemption" in own.requeue:
        notes += [note for partition in chosen if (note := _preemption(partition, cluster))]
    return notes


def _preemption(partition: Partition, cluster: Cluster) -> str:
    """Return what happens to preempted jobs of a partition; empty if none are preempted."""
    modes = set(re.split(r"\W+", partition.preemption or cluster.limits.preemption))
    tiers = {other.priority_tier for other in cluster.partitions}
    if len(tiers) > 1 and partition.priority_tier == max(tiers):
        return ""  # its jobs preempt those of other partitions
    start = f"checkpoint.requeue: a preempted job of partition {partition.name}"
    if not modes & {"REQUEUE", "CANCEL"}:
        return f"{start} is suspended and continues by itself" if "SUSPEND" in modes else ""
    if not partition.grace_seconds:
        return f"{start} has only Slurm's KillWait to save (30 s by default; GraceTime is 0)"
    return f"{start} has {format_time(partition.grace_seconds)} to save (GraceTime)"


CLUSTER_SECONDS = 8.0
"""How long to wait for the controller."""
_LATER = ("--hold", "--dependency")  # ignored by `sbatch --test-only`
_LOCAL_HINT = "submit it to a Slurm cluster"


@dataclass(frozen=True)
class CheckReport:
    """Result of a check.

    Attributes:
        findings: errors first.
        not_asked: why the cluster was not queried, or what it hides; empty if all was visible.
        notes: decisions made for the job, one line each.
        not_checked: parts of the job that were not checked, such as `--signal=USR1@60`.
        answer: which partitions would accept the job; empty for the local backend.
        start: when it would start, in words; empty if unknown or not requested.
    """

    findings: list[CheckFinding] = field(default_factory=list)
    not_asked: str = ""
    notes: list[str] = field(default_factory=list)
    answer: ClusterAnswer = ClusterAnswer()  # noqa: RUF009 - frozen
    not_checked: list[str] = field(default_factory=list)
    start: str = ""

    @property
    def errors(self) -> list[CheckFinding]:
        """Findings that prevent the job from running."""
        return [finding for finding in self.findings if finding.level == "error"]

    @property
    def warnings(self) -> list[CheckFinding]:
        """Findings that do not prevent it from running."""
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
        """Run a command with at most the remaining time."""
        # One deadline for all commands: separate timeouts could add up to a minute, and the user is
        # waiting for the submission.
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise SchedulerUnavailable(f"no time was left for {argv[0]}")
        return self._run.run(argv, env=env, timeout=min(timeout, round(left, 1) or left))

    def run_detached(self, *_: object, **__: object) -> int:
        """Refuse: a check submits nothing."""
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
        environment: environment of the submitting process.
        run: starts commands.
        cluster_seconds: how long to wait for the cluster and the module system.
        walk_seconds: time limit for the walk through the data.
        site: the site profile, whose rules change what Slurm is asked for.
        topologies: topologies of the site profile's node types, by the type's name.
        targets: why each `target: auto` was resolved as it is, by the name of its entry.
        others: whether to look for the runs that it waits for, those that save to the same
            directory, and other clusters; submitting does this by itself.
        script: the job's script; with it, ask Slurm when the job would start if nothing prevents
            it.
    """
    runner = DeadlineRunner(run or SubprocessRunner(), time.monotonic() + cluster_seconds)
    on_slurm = backend == "slurm"
    on_nodes = on_slurm and not is_one_machine(environment)
    notes = [
        f"stage.{index}.target: auto is {stage.target} here: {targets[stage.name]}"
        for index, stage in enumerate(job.stage)
        if targets and stage.name in targets
    ]
    # The cluster, the data and the module system are slow for different reasons and independent of
    # each other: in parallel they take only as long as the slowest.
    with ThreadPoolExecutor(max_workers=3, thread_name_prefix="hpml-check") as pool:
        profile = site.site if site else None
        # Compare what Slurm will get after the site's rules. An option that the site drops cannot
        # exceed a limit.
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
    """Check `stage`; for a job on this machine, whose environment is given, also the targets."""
    if not job.stage:
        return [], {}
    from hpml_orchestrator.check.stages import check_stages, check_targets  # noqa: PLC0415 - loads all of staging

    findings, sizes = check_stages(job, seconds=seconds)
    if here is not None:
        paths = node_paths(Path(job.workdir), here, chosen="none")  # no profile applies
        bases = {"shm": paths.ram, "local": paths.scratch}
        findings += check_targets(job, sizes, bases)
    return findings, sizes


def check_local(job: Job, machine: LocalMachine) -> Iterator[CheckFinding]:
    """Yield requests of a job that this machine cannot meet."""
    for code, limit, shown in shortages(job, machine):
        field_name = {"cpus": cpus_field(job), "memory": memory_field(job)}.get(code, code)
        in_job = code == "array"
        value = str(job.array) if in_job else job.resources.written(field_name)
        message = f"the job asks for {shown}; this machine ({short_hostname()}) has "
        message += f"room for {limit or 'none'}"
        place = field_name if in_job else f"resources.{field_name}"
        yield error(f"local.{code}", place, value, message, limit, _LOCAL_HINT)


def refusal(errors: Sequence[CheckFinding], unchecked: str = "`--no-check`") -> InputError:
    """Return the error for a job that would not run: every finding with its hint.

    `unchecked` is what the user can write to submit the job without the check.
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
        disk_mib = 0  # Slurm's TmpDisk describes another directory
    answer = check(job, cluster, disk_mib=disk_mib, shm_mib=sizes.get("shm", 0))
    if site is None:
        return answer
    findings = answer.findings
    # Without a limit in the script, the job gets the partition's default.
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
    """Compare a job's binding with the nodes of the site profile, or else with Slurm's nodes."""
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
            # Warn once per kind of node: a partition has hundreds that differ only in their names.
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
