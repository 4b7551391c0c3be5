"""From a complete job to the text of its batch script: a pure function, no command is run."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator import __version__
from hpml_orchestrator.assets import own_interpreter
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.jobfile.text import PLACEHOLDER
from hpml_orchestrator.records.job import NodeJob, SiteLimits
from hpml_orchestrator.records.units import MIB
from hpml_orchestrator.script import template
from hpml_orchestrator.script.directives import can_requeue, directives

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpml_orchestrator.records.job import Job
    from hpml_orchestrator.site.model import ResolvedSite

CODE_DIRECTORY = "code"
"""Name of the snapshot in the submission's directory."""

MAX_SCRIPT_BYTES = 4 * 1024 * 1024
"""Slurm's default limit for a batch script (`SchedulerParameters=max_script_size`)."""

_SUBMISSION = template.Raw('"$hpml_submission"')
_BASES = ("shm", "local")


@dataclass(frozen=True)
class Capabilities:
    """Facts about this installation, gathered before rendering.

    Attributes:
        interpreter: absolute path of the Python that runs hpml's own parts on the nodes.
    """

    interpreter: str = dataclasses.field(default_factory=own_interpreter)


@dataclass(frozen=True)
class SnapshotPaths:
    """The files of a job in its snapshot.

    Attributes:
        workdir: the working directory, relative to the snapshot; empty for its top.
        script: the script, relative to the snapshot; None if it is outside.
    """

    workdir: str
    script: str | None = None


def render(
    job: Job,
    capabilities: Capabilities,
    site: ResolvedSite | None = None,
    *,
    snapshot: SnapshotPaths | None = None,
    targets: Mapping[str, str] | None = None,
) -> str:
    """Return the batch script of a job; equal input gives equal bytes.

    Args:
        job: the job, complete.
        capabilities: facts about this installation.
        site: the site profile, if there is one.
        snapshot: files of the job in the submission's copy of the code, if it has one.
        targets: why each `target: auto` became what it is now, by the name of its entry.

    Raises:
        InputError: the job asks for what the site forbids, or the script grows over Slurm's limit.
    """
    context = _context(job, capabilities, site, snapshot, targets or {})
    name = f"{job.launcher}.sh.j2"
    text = template.render_template(name, context, site.site.templates if site else None)
    size = len(text.encode("utf-8"))
    if size > MAX_SCRIPT_BYTES:
        raise InputError(
            f"the script would have {size} bytes; Slurm takes at most {MAX_SCRIPT_BYTES}",
            field="args",
            hint="put long values into a file and pass the file's path",
        )
    return text


def render_agent(job: Job, site: ResolvedSite | None = None) -> str:
    """Return the text of `agent.json`: what the nodes read; equal input gives equal bytes."""
    if site is None:
        return NodeJob(job).text()
    staging = site.site.staging
    limits = SiteLimits(
        opens_per_second=staging.opens_per_second or 0,
        opens_per_second_per_job=staging.opens_per_second_per_job or 0,
        metadata_rate=staging.metadata_rate or 0,
        shared_rate=(staging.shared_rate or 0) * MIB,
        link_rate=(staging.link_rate or 0) * MIB,
        disk_rate=(staging.disk_rate or 0) * MIB,
        array_jitter=staging.array_jitter or 0,
        interfaces=tuple(site.site.interfaces_of(job.resources.partition)),
        can_requeue=can_requeue(site.site),
    )
    return NodeJob(job, limits).text()


def render_environment(job: Job) -> str:
    """Return the part of the batch script that loads the software and sets the variables."""
    base = template.environment().get_template("base.sh.j2")
    context = base.new_context(_context(job, Capabilities(), None, None, {}))
    blocks = [base.blocks[name](context) for name in ("environment", "variables")]
    return template.Raw("".join(text for block in blocks for text in block))


def _context(
    job: Job,
    capabilities: Capabilities,
    site: ResolvedSite | None,
    snapshot: SnapshotPaths | None,
    targets: Mapping[str, str],
) -> dict[str, object]:
    """Return the templates' variables."""
    resources, environment = job.resources, job.environment
    workdir = template.quote(job.workdir) if snapshot is None else _in_code(snapshot.workdir)
    script = _in_code(snapshot.script) if snapshot and snapshot.script else job.script
    program = ["-m", job.module] if job.module is not None else [script]
    apptainer, pyxis = _container(job, workdir, is_copy=snapshot is not None)
    command = [*(job.command or [environment.python, *program]), *job.args]
    context = {
        "version": __version__,
        "job": job,
        "directives": directives(job, site),
        "interpreter": capabilities.interpreter,
        "ranks_per_node": resources.ranks,
        "cpus_per_rank": resources.cpus_per_rank,
        "variables": list(environment.variables.items()),
        "needed": _needed_variables(job),
        "stages": [
            {"name": one.name, "target": one.target, "why": targets.get(one.name, "")}
            for one in job.stage
        ],
        "bases": _bases(job),
        "checkpoint": _checkpoint_directory(job),
        "collect": [
            (template.word(one.source, late="stage."), template.word(one.target))
            for one in job.collect
        ],
        "own": [(name, template.variable(f"{name}.dir")) for name in _own_directories(job)],
        **_places(job, site),
        "apptainer": template.words_before(apptainer),
        "pyxis": template.words_before(pyxis),
        "setup": template.Raw((environment.setup or "").rstrip("\n")),
        "activates": bool(environment.modules or environment.venv or environment.conda),
        "workdir": workdir,
        "command": template.fill(map(template.word, command)),
    }
    words = [*command, *environment.variables.values()]
    placeholders = {name for word in words for name in PLACEHOLDER.findall(str(word))}
    context["points"] = any(name.startswith("point.") for name in placeholders)
    return context


def _own_directories(job: Job) -> list[str]:
    """Return which of `shm` and `local` have a directory of the job."""
    used = [*(job.command or ()), *job.args, *job.environment.variables.values()]
    used += [entry.source for entry in job.collect]
    names = {name for text in used for name in PLACEHOLDER.findall(text)}
    return [name for name in _BASES if f"{name}.dir" in names]


def _bases(job: Job) -> list[str]:
    """Return which of `shm` and `local` the nodes need."""
    used = {stage.target for stage in job.stage} | {*_own_directories(job)}
    return [name for name in _BASES if name in used]


def _checkpoint_directory(job: Job) -> template.Raw | None:
    own = job.checkpoint
    if not own.enabled:
        return None
    return template.word(own.directory if own.is_shared else f"{{run.dir}}/{own.directory}")


def _needed_variables(job: Job) -> list[str]:
    """Return the variables of `{env.NAME}` that `environment.variables` has not set by then."""
    needed: dict[str, None] = {}
    known: set[str] = set()
    words = [*(job.command or ()), *job.args]
    for variable, text in [*job.environment.variables.items(), ("", " ".join(words))]:
        names = [
            name.removeprefix("env.")
            for name in PLACEHOLDER.findall(text)
            if name.startswith("env.")
        ]
        # Variables are exported in order: one may use `{env.NAME}` of an earlier one, while its own
        # name and those of later ones must come from the environment.
        needed |= dict.fromkeys(name for name in names if name not in known)
        known.add(variable)
    return list(needed)


def _in_code(path: str) -> template.Raw:
    rest = f"/{template.quote(path)}" if path else ""
    return template.Raw(f"{_SUBMISSION}/{CODE_DIRECTORY}{rest}")


def _places(job: Job, site: ResolvedSite | None) -> dict[str, object]:
    if site is None:
        return {"ram": None, "scratch": None, "interfaces": ""}
    partition = job.resources.partition
    ram, scratch = (site.site.path(which, partition) for which in ("ram", "scratch"))
    return {
        "ram": ram and template.node_path(ram),
        "scratch": scratch and template.node_path(scratch),
        "interfaces": ",".join(site.site.interfaces_of(partition)),
    }


def _container(
    job: Job, workdir: template.Raw, *, is_copy: bool
) -> tuple[list[template.Raw], list[template.Raw]]:
    """Return the words of apptainer or enroot before the ranks' command, and srun's for pyxis."""
    container = job.environment.container
    if container is None:
        return [], []
    code = [] if is_copy else [("workdir", job.workdir)]
    targets = [(f"stage.{index}.target", stage.target) for index, stage in enumerate(job.stage)]
    saved = job.checkpoint
    shared = [("checkpoint.directory", saved.directory)] * (saved.enabled and saved.is_shared)
    # Colons and commas separate the parts of a mount option: such a path would be cut apart.
    for field, path in code + targets + shared:
        if ":" in path or "," in path:
            message = "must have neither colon nor comma if the ranks run in a container"
            raise InputError(message, field=field, value=path)
        if container.engine == "enroot" and re.search(r"\s", path):
            message = "must have no blank: enroot cannot mount such paths"
            raise InputError(message, field=field, value=path)
    names = [f"stage.{stage.name}" for stage in job.stage]
    names += [f"{name}.dir" for name in _own_directories(job)]
    names += ["checkpoint.dir"] * bool(shared)  # any other is in the run's directory
    # Mounted at the same paths inside, so that an argument with a path means the same with and
    # without a container.
    staged = [f"${template.variable(name)}" for name in names]
    own = ["$hpml_submission", "$HPML_RUN_DIR"]
    if container.engine == "apptainer":
        mounts = [
            *(template.Raw(f'"{name}"') for name in own),
            *(path for _, path in code),
            *container.mounts,
            *(template.Raw(f'"{name}"') for name in staged),
        ]
        words = ["apptainer", "exec", *(["--nv"] if job.resources.gpu_count else [])]
        for mount in mounts:
            words += ["--bind", mount]
        return [template.quote(word) for word in (*words, "--pwd", workdir, container.image)], []
    mounts = [*own, *(template.in_quotes(path) for _, path in code), *staged]
    mounts = [f"{path}:{path}" for path in mounts]
    for mount in map(template.in_quotes, container.mounts):
        mounts.append(mount if ":" in mount else f"{mount}:{mount}")
    if container.engine == "enroot":
        words = [
            "enroot",
            "start",
            "--rw",
            "--conf",
            template.Raw('"$HPML_ATTEMPT_DIR/enroot.conf"'),
        ]
        for source, target, *flags in (mount.split(":") for mount in mounts):
            options = ",".join(["x-create=auto", "rbind", *flags])
            words += ["--mount", template.Raw(f'"{source}:{target}:none:{options}"')]
        return [template.quote(word) for word in (*words, container.image, workdir)], []
    return [], [
        template.Raw(f"--container-image={template.quote(container.image)}"),
        template.Raw(f'--container-mounts="{",".join(mounts)}"'),
        template.Raw(f"--container-workdir={workdir}"),
    ]
