"""The `#SBATCH` options of a job, as the site's rules rename, add, omit and forbid them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.job import Json, Resources
from hpml_orchestrator.records.units import ALL_MEMORY, format_time

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpml_orchestrator.records.job import Job
    from hpml_orchestrator.site.model import DirectiveRule, ResolvedSite, Site

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
