"""From a complete job to the text of its batch script: a pure function, no command is run."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpml_orchestrator.assets import own_interpreter
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.jobfile.text import PLACEHOLDER
from hpml_orchestrator.records.job import Json, NodeJob, Resources, SiteLimits
from hpml_orchestrator.records.units import ALL_MEMORY, MIB, format_time
from hpml_orchestrator.script import template
from hpml_orchestrator.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpml_orchestrator.records.job import Job
    from hpml_orchestrator.site.model import DirectiveRule, ResolvedSite, Site

# The `#SBATCH` options of a job, as the site's rules rename, add, omit and forbid them.

_COUNTS = {
    "nodes": "nodes",
    "ntasks-per-node": "ranks_per_node",
    "cpus-per-task": "cpus_per_rank",
    "gpus-per-node": "gpus",
    "time": "time",
}
_TEXTS = {
    "mem": "memory",
    "mem-per-cpu": "memory_per_cpu",
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "constraint": "constraint",
}
_DEFAULTS = Resources()
_FIELDS = {**_COUNTS, **_TEXTS, "exclusive": "exclusive", "mail-user": "mail", "mail-type": "mail"}
"""Options that hpml writes, and the field of `resources` that asks for them."""


def directives(job: Job, site: ResolvedSite | None = None) -> list[str]:
    """Return the sbatch options of a job, such as `--mem=4096M`, in a fixed order.

    Raises:
        InputError: the job asks for one that the site forbids.
    """
    options = _own_options(job, site.site if site else None)
    if site is None:
        return options
    rules = site.site.directives
    for option in options:
        name, _ = _split(option)
        field = _field_of(job, name, option)
        if name in rules and rules[name].forbid is not None and field:
            given: object = option
            if field != "resources.extra":
                given = job.resources.written(field.removeprefix("resources."))
            raise InputError(
                f"asks for --{name}, which this site forbids: {rules[name].forbid}",
                field=field,
                value=given if isinstance(given, (str, int)) else None,
                hint=f"leave it out; the rule is in {site.origin(f'directives.{name}')}",
            )
    return _apply(rules, options)


def can_requeue(site: Site | None) -> bool:
    """Return whether the site profile permits that a job is requeued."""
    return site is None or (site.requeue != "no" and not leaves_out(site.directives, "requeue"))


def _own_options(job: Job, site: Site | None = None) -> list[str]:
    resources = job.resources
    tasks = job.tasks_per_node
    options = [
        f"--job-name={job.name}",
        f"--nodes={resources.nodes}",
        f"--ntasks-per-node={tasks}",
        f"--cpus-per-task={resources.cores // tasks}",
    ]
    if resources.gpu_count:
        options.append(f"--gpus-per-node={resources.gpus}")
    options += _memory(job)
    options.append(f"--time={format_time(resources.time)}")
    for name in ("partition", "account", "qos", "constraint"):
        value = getattr(resources, name)
        if value is not None:
            options.append(f"--{name}={value}")
    if resources.exclusive:
        options.append("--exclusive")
    if resources.mail is not None:
        options.append(f"--mail-user={resources.mail.to}")
        options.append(f"--mail-type={','.join(event.upper() for event in resources.mail.on)}")
    if job.array is not None:
        options.append(f"--array={job.array}")
    if job.checkpoint.enabled:
        # JobRequeue is only the cluster's default; the job's option counts.
        is_asked = bool(job.checkpoint.requeue) and can_requeue(site)
        options.append("--requeue" if is_asked else "--no-requeue")
    return [*options, "--open-mode=append", *resources.extra]


def _memory(job: Job) -> list[str]:
    resources = job.resources
    if resources.memory_per_cpu:
        return [f"--mem-per-cpu={-(-job.memory_mib // resources.cores)}M"]
    if resources.memory == ALL_MEMORY:
        return ["--mem=0"]
    return [f"--mem={job.memory_mib}M"] if resources.memory else []


def _apply(rules: Mapping[str, DirectiveRule], options: Sequence[str]) -> list[str]:
    changed = []
    for option in options:
        name, value = _split(option)
        rule = rules.get(name)
        if rule is not None and rule.rename is not None:
            changed.append(_renamed(rule.rename, value))
        elif not leaves_out(rules, name):
            changed.append(option)
    names = {_split(option)[0] for option in options}
    for name, rule in rules.items():
        if rule.default is not None and name not in names:
            pattern = rule.rename or (f"--{name}={{value}}" if rule.default else f"--{name}")
            changed.append(_renamed(pattern, rule.default))
    return changed


def effective_job(job: Job, rules: Mapping[str, DirectiveRule]) -> Job:
    """Return the job as Slurm will see it: without what the rules drop, with what they add.

    GPUs and numbers of nodes, ranks and CPUs count even under another name. Everything else counts
    as what it became: a constraint that was renamed to a preference keeps no job out.
    """
    # A renamed count is still the same request, for example GPUs by --gres. Keep it under its own
    # name, or the check would see a job without GPUs.
    kept = {
        name: rule for name, rule in rules.items() if name not in _COUNTS or rule.rename is None
    }
    own = _own_options(job)
    options = [(option, *_split(option)) for option in _apply(kept, own)]
    before = dict(map(_split, own))
    after = {name: value for _, name, value in options}
    changes: Json = {
        field: getattr(_DEFAULTS, field)
        for name, field in _COUNTS.items()
        if leaves_out(rules, name)
    }
    for name, field in _TEXTS.items():
        if after.get(name) != before.get(name):
            changes[field] = _as_field(field, after.get(name))
    changes["exclusive"] = after.get("exclusive") == ""
    fields = {*_FIELDS, "job-name", "array", "open-mode", "requeue", "no-requeue"} - {"exclusive"}
    changes["extra"] = tuple(
        option for option, name, _ in options if name not in fields and option != "--exclusive"
    )
    return replace(job, resources=replace(job.resources, **changes))


def whole_nodes(asked: Job, site: Site | None) -> bool:
    """Return whether a job gets whole nodes, by its request or by the rule of its partitions.

    Args:
        asked: the job as Slurm will see it (`effective_job`).
        site: the site profile, if there is one.
    """
    if asked.resources.exclusive or "--exclusive" in asked.resources.extra:
        return True
    names = site.partitions_of(asked.resources.partition) if site else []
    known = site.partitions if site else {}
    return bool(names) and all(name in known and known[name].exclusive for name in names)


def leaves_out(rules: Mapping[str, DirectiveRule], name: str) -> bool:
    """Return whether the rules drop an option that hpml would write."""
    rule = rules.get(name)
    return rule is not None and (rule.omit or rule.forbid is not None)


def without_time(rules: Mapping[str, DirectiveRule]) -> bool:
    """Return whether the script sets no time limit, so that the partition's default applies."""
    rule = rules.get("time")
    return leaves_out(rules, "time") or (rule is not None and rule.rename is not None)


def _as_field(field: str, value: str | None) -> object:
    """Return an option's value in the form of the field of `resources`; None if it does not fit."""
    try:
        return getattr(Resources.from_json({field: value}), field)
    except ValueError:
        return None


def _split(option: str) -> tuple[str, str]:
    name, _, value = option.removeprefix("--").partition("=")
    return name, value


def _renamed(pattern: str, value: str) -> str:
    option, separator, text = pattern.partition("=")
    if "{item}" in text:
        text = ",".join(text.replace("{item}", item) for item in value.split(","))
    return f"{option}{separator}{text.replace('{value}', value)}"


def _field_of(job: Job, name: str, option: str) -> str:
    if option in job.resources.extra:
        return "resources.extra"
    field = _FIELDS.get(name, "")
    if not field or getattr(job.resources, field) == getattr(_DEFAULTS, field):
        return ""
    return f"resources.{field}"


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
