"""From a complete job to the text of its batch script: a pure function, no command is run."""

from __future__ import annotations

import dataclasses
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpml_orchestrator import __version__
from hpml_orchestrator.errors import InputError, nearest
from hpml_orchestrator.script import template
from hpml_orchestrator.script.agent_argv import agent_argv
from hpml_orchestrator.script.archive import BIND_CODE
from hpml_orchestrator.script.site_rules import apply_rules
from hpml_orchestrator.script.static_form import static_form

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpml_orchestrator.spec import Job, Stage
    from hpml_orchestrator.spec.site_load import ResolvedSite
    from hpml_orchestrator.topology import Topology

__all__ = [
    "CODE_DIRECTORY",
    "MAX_SCRIPT_BYTES",
    "Capabilities",
    "SnapshotPaths",
    "directives",
    "render",
]

CODE_DIRECTORY = "code"
"""Name of the snapshot in the submission's directory."""

MAX_SCRIPT_BYTES = 4 * 1024 * 1024
"""Slurm's default limit for a batch script (`SchedulerParameters=max_script_size`)."""


def own_interpreter() -> str:
    """Return the path of the Python that runs hpml, the same however hpml was started.

    A virtual environment has its Python under several names; `sys.executable` is the one that was
    used, and a script should not depend on that.
    """
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    usual = os.path.join(sys.prefix, "bin", name)
    return usual if os.access(usual, os.X_OK) else sys.executable


@dataclass(frozen=True)
class Capabilities:
    """What was found out about this installation before rendering.

    Attributes:
        interpreter: absolute path of the Python that runs hpml's own parts on the nodes.
    """

    interpreter: str = dataclasses.field(default_factory=own_interpreter)


@dataclass(frozen=True)
class SnapshotPaths:
    """What of a job lies in its snapshot.

    Attributes:
        workdir: the working directory, relative to the snapshot; empty for its top.
        script: the script, relative to the snapshot; None where it lies outside of it.
    """

    workdir: str
    script: str | None = None


def render(
    job: Job,
    capabilities: Capabilities,
    site: ResolvedSite | None = None,
    *,
    snapshot: SnapshotPaths | None = None,
    topologies: Mapping[str, Topology] | None = None,
    targets: Mapping[str, str] | None = None,
) -> str:
    """Return the batch script of a job; equal input gives equal bytes.

    Args:
        job: the job, complete.
        capabilities: what was found out about this installation.
        site: the site profile, if there is one.
        snapshot: what of the job lies in the submission's copy of the code, if it takes one.
        topologies: of the site profile's node types that have one, by the type's name.
        targets: why each `target: auto` became what it is now, by the name of its entry.

    Raises:
        InputError: a placeholder names nothing, the job asks for what the site forbids, wants its
            launcher to bind where that cannot be, or the script grows over Slurm's limit.
    """
    _check_placeholders(job)
    resources, environment = job.resources, job.environment
    container_words, container_mounts = _container(job, snapshot)
    context = {
        "version": __version__,
        "job": job,
        "directives": directives(job, site),
        "interpreter": capabilities.interpreter,
        "ranks_per_node": resources.ranks,
        "cpus_per_rank": resources.cpus_per_rank,
        "agent_argv": agent_argv(job, site),
        "binder": BIND_CODE,
        "static": static_form(job, site, topologies or {}),
        "variables": list(environment.variables.items()),
        "stages": [_stage(stage, (targets or {}).get(stage.name, "")) for stage in job.stage],
        **_places(job, site),
        "container_words": container_words,
        "container_mounts": container_mounts,
        "setup": template.Raw((environment.setup or "").rstrip("\n")),
        "activates": bool(environment.modules or environment.venv or environment.conda),
        "workdir": _workdir(job, snapshot),
        "command": _command(job, snapshot),
    }
    name = f"{job.launcher}.sh.j2"
    if site is not None and site.site.templates:
        from hpml_orchestrator.script.user_template import (  # noqa: PLC0415 - few have such
            render_user_template,
        )

        text = render_user_template(site.site.templates, name, context)
    else:
        text = template.environment().get_template(name).render(context)
    size = len(text.encode("utf-8"))
    if size > MAX_SCRIPT_BYTES:
        raise InputError(
            f"the script would have {size} bytes; Slurm takes at most {MAX_SCRIPT_BYTES}",
            field="args",
            hint="put long values into a file and pass the file's path",
        )
    return text


def directives(job: Job, site: ResolvedSite | None = None) -> list[str]:
    """Return the `#SBATCH` options of a job, in a fixed order, as the site wants them.

    Raises:
        InputError: the job asks for one that the site forbids.
    """
    lines = _own_directives(job)
    if site is None or not site.site.directives:
        return lines
    files = {str(site.origin(f"directives.{name}")) for name in site.site.directives}
    return apply_rules(lines, job, site.site.directives, origin=", ".join(sorted(files)))


def _own_directives(job: Job) -> list[str]:
    resources = job.resources
    # mpirun counts the tasks of a node as the slots that it has there.
    one_per_rank = job.launcher != "torchrun"
    tasks = resources.ranks if one_per_rank else 1
    lines = [
        f"--job-name={job.name}",
        f"--nodes={resources.nodes}",
        f"--ntasks-per-node={tasks}",
        f"--cpus-per-task={resources.ranks * resources.cpus_per_rank // tasks}",
    ]
    if resources.gpu_count:
        lines.append(f"--gpus-per-node={resources.gpus}")
    if resources.memory:
        lines.append(f"--mem={memory_mebibytes(job)}M")
    lines.append(f"--time={resources.time}")
    for name in ("partition", "account", "qos", "constraint"):
        value = getattr(resources, name)
        if value is not None:
            lines.append(f"--{name}={value}")
    if resources.exclusive:
        lines.append("--exclusive")
    if resources.mail is not None:
        lines.append(f"--mail-user={resources.mail.to}")
        lines.append(f"--mail-type={','.join(event.upper() for event in resources.mail.on)}")
    if job.array is not None:
        lines.append(f"--array={job.array}")
    lines.append("--open-mode=append")
    lines.extend(resources.extra)
    return lines


def memory_mebibytes(job: Job) -> int:
    """Return the memory to ask for per node in MiB: the job's own, and what is staged into RAM."""
    own = int((job.resources.memory or "0M").removesuffix("M"))
    staged = sum(
        int(stage.size.removesuffix("M"))
        for stage in job.stage
        if stage.target == "shm" and stage.size is not None
    )
    return own + staged


def _places(job: Job, site: ResolvedSite | None) -> dict[str, Any]:
    """Return where the nodes keep what is staged, and how they reach one another."""
    if site is None:
        return {"ram": None, "scratch": None, "interfaces": ""}
    partition = job.resources.partition
    ram, scratch = (site.site.path(which, partition) for which in ("ram", "scratch"))
    return {
        "ram": ram and template.node_path(ram),
        "scratch": scratch and template.node_path(scratch),
        "interfaces": ",".join(site.site.interfaces_of(partition)),
    }


def _workdir(job: Job, snapshot: SnapshotPaths | None) -> template.Raw:
    """Return the shell word of the directory that the ranks run in."""
    return template.quote(job.workdir) if snapshot is None else _in_snapshot(snapshot.workdir)


def _program(job: Job, snapshot: SnapshotPaths | None) -> template.Raw | str | None:
    """Return the script as a word of the ranks' command."""
    if snapshot is None or snapshot.script is None:
        return job.script
    return _in_snapshot(snapshot.script)


def _in_snapshot(path: str) -> template.Raw:
    """Return the word of a path in the snapshot; it names no submission, as the script must not."""
    rest = f"/{template.quote(path)}" if path else ""
    return template.Raw(f'"$hpml_submission"/{CODE_DIRECTORY}{rest}')


def _command(job: Job, snapshot: SnapshotPaths | None) -> list[Any]:
    if job.command is not None:
        return [*job.command, *job.args]
    script = _program(job, snapshot)
    program = ["-m", job.module] if job.module is not None else [script]
    return [job.environment.python, *program, *job.args]


def _stage(stage: Stage, why: str) -> dict[str, Any]:
    bases = {"shm": template.Raw('"$hpml_shm"'), "local": template.Raw('"$hpml_local"')}
    return {
        "name": stage.name,
        "target": stage.target,
        "variable": template.variable(f"stage.{stage.name}"),
        "base": bases.get(stage.target, stage.target),
        "why": why,
    }


def _container(job: Job, snapshot: SnapshotPaths | None) -> tuple[list[Any], list[Any]]:
    """Return the words before the ranks' command, and what pyxis shall mount."""
    container = job.environment.container
    if container is None:
        return [], []
    _check_mounted(job, snapshot)
    workdir = _workdir(job, snapshot)
    own = [template.Raw('"$hpml_submission"'), template.Raw('"$hpml_run"')]
    if container.engine == "apptainer":
        words: list[Any] = ["apptainer", "exec"]
        if job.resources.gpu_count:
            words.append("--nv")
        mounts = [*own, *([] if snapshot else [workdir]), *container.mounts]
        mounts += [template.Raw(f'"${template.variable(f"stage.{s.name}")}"') for s in job.stage]
        for mount in mounts:
            words += ["--bind", mount]
        return [*words, "--pwd", workdir, container.image], []
    mounts = [template.Raw(f'"{name}:{name}"') for name in ("$hpml_submission", "$hpml_run")]
    if not snapshot:  # which lies in the submission
        mounts.append(template.quote(f"{job.workdir}:{job.workdir}"))
    for stage in job.stage:
        name = template.variable(f"stage.{stage.name}")
        mounts.append(template.Raw(f'"${name}:${name}"'))
    mounts += [
        template.quote(mount if ":" in mount else f"{mount}:{mount}") for mount in container.mounts
    ]
    return [], mounts


def _check_mounted(job: Job, snapshot: SnapshotPaths | None) -> None:
    """Refuse paths that a container cannot mount: colons and commas divide the options' parts."""
    places = [] if snapshot else [("workdir", job.workdir)]
    places += [(f"stage.{index}.target", stage.target) for index, stage in enumerate(job.stage)]
    for field, path in places:
        if ":" in path or "," in path:
            raise InputError(
                "must have neither colon nor comma where the ranks run in a container",
                field=field,
                value=path,
            )


def _check_placeholders(job: Job) -> None:
    known = {f"stage.{stage.name}" for stage in job.stage} | {"run.dir"}
    if job.array is not None:
        known.add("array.index")
    places = [(f"args.{index}", value) for index, value in enumerate(job.args)]
    places += [(f"command.{index}", value) for index, value in enumerate(job.command or [])]
    places += [
        (f"environment.variables.{name}", value)
        for name, value in job.environment.variables.items()
    ]
    for field, value in places:
        for found in template.placeholders(value, array=job.array is not None):
            if found == "array.index" and job.array is None:
                raise InputError(
                    "{array.index} is the index of an array's task, and the job is no array",
                    field=field,
                    value=value,
                    hint="give the job its tasks, such as `array: 0-9`, or leave it out",
                )
            if found not in known:
                near = nearest(found, known)
                raise InputError(
                    f"{{{found}}} names nothing{' that is staged' * found.startswith('stage.')}",
                    field=field,
                    value=value,
                    hint=f"did you mean {{{near}}}?"
                    if near
                    else "stage data under that name, or write the path itself",
                )
