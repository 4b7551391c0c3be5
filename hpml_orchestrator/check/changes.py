"""The diagnosis of a run: the facts of what it did, and the limits of a changed job."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from hpml_orchestrator.bench.results import peaks_of_run
from hpml_orchestrator.check.stages import check_stages
from hpml_orchestrator.diagnosis.diagnose import diagnose
from hpml_orchestrator.diagnosis.model import DataArgument
from hpml_orchestrator.diagnosis.profile import DIRECTORY, ProfileError, read_profile
from hpml_orchestrator.errors import HpmlError, NotFoundError
from hpml_orchestrator.records.job import Job, Stage
from hpml_orchestrator.records.store import Store
from hpml_orchestrator.records.units import MIB
from hpml_orchestrator.runs.applied import with_results
from hpml_orchestrator.runs.facts import gather
from hpml_orchestrator.runs.prometheus import Prometheus, PrometheusError
from hpml_orchestrator.runs.reporting.summary import node_topology
from hpml_orchestrator.scheduler.local.processes import cpu_ids, memory_mb
from hpml_orchestrator.site.profile import site_for
from hpml_orchestrator.staging.request import SUFFIXES, kind_at

if TYPE_CHECKING:
    from hpml_orchestrator.diagnosis.model import Diagnosis, Facts
    from hpml_orchestrator.runs.state import State
    from hpml_orchestrator.site.model import Site

_DATA = re.compile(r"data\w*|train\w*|imagenet\w*|root|inputs?|images?")
_NOT_DATA = re.compile(
    r"(out|output|log|save|saved|result|run|ckpt|checkpoint|model|weight|cache|tmp|temp|config|conf"
    r"|export|snapshot|experiment|exp|venv|env|src|code|script|bin)s?(dir|path|file)?"
    r"|resume|pretrained|pth|pt|wandb|tensorboard"
)
_INTERPRETER = re.compile(r"python|pypy|(ba|da|z)?sh$|perl$|torchrun$")
_SYSTEM = ("/dev/", "/proc/", "/sys/")
_SMALL_BYTES = 1 << 20  # smaller files are lists of names, or settings
_WALK_SECONDS = 1.0
_RESERVED = 0.1  # share of a node's memory that the scheduler reserves for the system


def diagnose_run(
    state: State,
    *,
    site: str,
    notice: Callable[[str], None],
    prometheus: Prometheus | None = None,
) -> Diagnosis:
    """Return the diagnosis of a run, using the peaks that `hpml bench` measured.

    Args:
        state: state of the run.
        site: the value of `--site` or `HPML_SITE`.
        notice: called with each line to show, such as a warning.
        prometheus: queried for what the record lacks.

    Raises:
        NotFoundError: the run has not started.
        RecordError: its records cannot be read.
    """
    label = state.submission.label
    if state.run.newest() is None:
        ended = "it never started" if state.over else f"it is {state.state} and has not started"
        because = f": {state.reason}" if state.reason else ""
        message = f"{label}: nothing to report, {ended}{because}"
        raise NotFoundError(message, hint=f"hpml show {label}")
    if not state.over:
        notice(f"{label} is {state.text}: this is what is known so far")
    try:
        facts = gather(state, prometheus=prometheus)
    except PrometheusError as error:
        notice(f"warning: {error}; figures are from records")
        facts = gather(state)
    try:
        traced = read_profile(state.run.directory / DIRECTORY)
    except ProfileError as error:
        notice(f"warning: {error}")
        traced = None
    profile, records = site_for("job.yaml", os.environ, chosen=site), state.run.directory.parents[1]
    facts = with_limits(facts, state, profile.site if profile else None)
    peaks = peaks_of_run(facts, records=records, site=profile)
    diagnosis = diagnose(replace(facts, profile=traced, peaks=peaks))
    return with_results(diagnosis, Store(records))


def with_limits(facts: Facts, state: State, site: Site | None) -> Facts:
    """Return facts with the known limits on what a changed job may request.

    Args:
        facts: facts about a run.
        state: state of the same run.
        site: the site profile that applies to it.
    """
    cpus, memory = _nodes(state, site)
    started = next((one.started for one in state.run.attempts()), None)
    data = data_argument(facts.job, before=started.time if started else None)
    return replace(facts, node_cpus=cpus, node_memory_bytes=memory, data=data)


def _nodes(state: State, site: Site | None) -> tuple[int | None, float | None]:
    """Return CPUs and bytes of memory that jobs can use on the smallest node of a run.

    The record has what a node's kernel reports, a site profile what its scheduler gives to jobs.
    """
    record, attempt = state.submission.record(), state.run.newest()
    ending = ".topology.json"
    paths = (attempt.directory / "nodes").glob(f"*{ending}") if attempt is not None else ()
    seen = [node_topology(attempt, path.name.removesuffix(ending)) for path in paths if attempt]
    nodes = [node for node in seen if node is not None]
    cpus = [len(node.cpus) for node in nodes]
    sizes = [sum(domain.memory_bytes for domain in node.domains) for node in nodes]
    memory = [(1 - _RESERVED) * size for size in sizes if size]
    if record["backend"] == "local":
        cpus.append(len(cpu_ids()))
        memory = [memory_mb() * float(MIB)] if memory_mb() else memory
    elif site is not None:
        wanted = state.submission.requested_job().resources.partition
        kinds = site.node_types_of(wanted)
        parts = [
            site.partitions[one] for one in site.partitions_of(wanted) if one in site.partitions
        ]
        cpus += [
            *_most(kind.cpus for kind in kinds),
            *_most(one.max_cpus_per_node for one in parts),
        ]
        given = _most(kind.memory for kind in kinds)
        memory = [float(MIB * one) for one in given] or memory
        memory += [float(MIB * one) for one in _most(one.max_memory_per_node for one in parts)]
    return min(cpus, default=None), min(memory, default=None)


def _most(values: Iterable[int | None]) -> list[int]:
    known = list(values)
    return [max(filter(None, known))] if known and all(known) else []


def data_argument(job: Job, *, before: float | None = None) -> DataArgument | None:
    """Return the argument that names a job's data; None if none does, or several might.

    An option must have a name such as `--data-dir`; the path must be a directory or an archive that
    can be staged. A word without an option must also look like a path.

    Args:
        job: a complete job.
        before: seconds since the epoch. The run itself may have written later files.
    """
    named: list[DataArgument] = []
    bare: list[DataArgument] = []
    for field, option, prefix, value in _arguments(job):
        tokens = _tokens(option)
        if option and (not any(map(_DATA.fullmatch, tokens)) or _is_not_data(option)):
            continue
        is_archive = value.lower().endswith(tuple(SUFFIXES))
        # `train` may be a subcommand of the program, and `--dataset imagenet` a name that it knows
        is_path = "/" in value or is_archive
        if not is_path and (not option or {*tokens} & {"dataset", "datasets"}):
            continue
        if not option and not value.startswith("/") and _is_not_data(value):
            continue
        path = os.path.normpath(os.path.join(job.workdir, os.path.expanduser(value)))
        entry = _entry(job, path, before, file_is_data=bool(option) or is_archive)
        if entry is not None:
            inner = f"/{os.path.basename(path)}" if entry.get("kind") == "file" else ""
            found = DataArgument(field, f"{prefix}{{stage.data}}{inner}", entry)
            (named if option else bare).append(found)
    candidates = named[:1] or bare
    # Two candidates mean a guess. A wrong one would stage results or checkpoints, so propose none.
    return _checked(job, candidates[0]) if len(candidates) == 1 else None


def _arguments(job: Job) -> Iterator[tuple[str, str, str, str]]:
    """Yield field, option, prefix of the value, and value of each argument of a job's program.

    It is unknown which options take a value, so a path after an option counts as its value.
    """
    command = job.command or ()
    words = [(f"command.{place}", word) for place, word in enumerate(command)][1:]
    words += [(f"args.{place}", word) for place, word in enumerate(job.args)]
    is_script = bool(command) and bool(_INTERPRETER.match(os.path.basename(command[0])))
    option = ""
    for field, word in words:
        name, equals, value = word.partition("=")
        if equals and re.fullmatch(r"-{0,2}[A-Za-z][\w.-]*", name):
            yield field, name, f"{name}=", value
        elif word.startswith("-"):
            option = "" if is_script else word.strip("-")
            continue
        elif is_script:
            is_script = False  # the first word that is not an option is the program
        else:
            yield field, option, "", word
        option = ""


def _tokens(name: str) -> list[str]:
    return re.split(r"[^a-z0-9]+", name.strip("-").lower())


def _is_not_data(name: str) -> bool:
    return any(map(_NOT_DATA.fullmatch, _tokens(name)))


def _entry(
    job: Job, path: str, before: float | None, *, file_is_data: bool
) -> dict[str, str] | None:
    """Return the entry of `stage` for a path; None if it is not data.

    Archives are copied unchanged: the program expects an archive.
    """
    if _is_not_data(os.path.basename(path)) or path.startswith(_SYSTEM):
        return None
    environment = job.environment
    others = [environment.conda, environment.venv, job.checkpoint.directory]
    if environment.container:
        others.append(environment.container.image)
    if any(_is_in(one, path) for one in (job.workdir, job.script, *others) if one):
        return None
    if any(_is_in(path, one) for one in others if one):
        return None
    try:
        info = os.stat(path)
        # A file that changed after the start may be the run's own result; staging it would copy it
        # to every node and lose the results written there.
        if before is not None and info.st_mtime >= before:
            return None
        entry = {"name": "data", "source": path}
        if os.path.isdir(path):
            names = os.listdir(path)
            if not names or "__main__.py" in names:
                return None
            return entry | ({"kind": "tree"} if kind_at(path, "auto") == "pack" else {})
        is_archive = path.lower().endswith(tuple(SUFFIXES))
        if not os.path.isfile(path) or not file_is_data:
            return None
        return entry | {"kind": "file"} if is_archive or info.st_size >= _SMALL_BYTES else None
    except (HpmlError, OSError, ValueError):
        return None


def _is_in(path: str, directory: str) -> bool:
    return f"{path}/".startswith(f"{directory.rstrip('/')}/")


def _checked(job: Job, found: DataArgument) -> DataArgument | None:
    staged = replace(job, stage=(Stage.from_json({**found.entry, "target": "shm"}),))
    findings, sizes = check_stages(staged, seconds=_WALK_SECONDS)
    if any(finding.level == "error" for finding in findings):
        return None
    if any(finding.code == "stage.partly" for finding in findings):
        return found
    return replace(found, size_bytes=float(sizes.get("shm", 0) * MIB))
