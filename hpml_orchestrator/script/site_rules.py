"""A site's rules for sbatch options: rename, default, omit, forbid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.spec import Resources

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpml_orchestrator.spec import Job
    from hpml_orchestrator.spec.site import DirectiveRule, Site

__all__ = ["apply_rules", "as_asked", "leaves_out", "whole_nodes", "without_time"]

_FIELDS = {
    "nodes": "nodes",
    "ntasks-per-node": "ranks_per_node",
    "cpus-per-task": "cpus_per_rank",
    "gpus-per-node": "gpus",
    "mem": "memory",
    "time": "time",
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "constraint": "constraint",
    "exclusive": "exclusive",
    "mail-user": "mail",
    "mail-type": "mail",
}
"""Options of `directives()` and the field of `resources` that asks for them."""

_TEXTS = {name: _FIELDS[name] for name in ("partition", "account", "qos", "constraint", "mem")}
"""Those whose field may be left out."""


def apply_rules(
    lines: Sequence[str], job: Job, rules: Mapping[str, DirectiveRule], *, origin: str = ""
) -> list[str]:
    """Return sbatch options as the site's rules change them.

    Args:
        lines: options such as `--mem=4096M`, in order.
        job: whose they are.
        rules: by option name, without dashes.
        origin: file of the rules, for messages.

    Raises:
        InputError: the job asks for an option that the site forbids.
    """
    changed = []
    for line in lines:
        name, value = _split(line)
        rule = rules.get(name)
        if rule is None or (rule.forbid is None and not rule.omit and rule.rename is None):
            changed.append(line)
        elif rule.rename is not None:
            changed.append(_renamed(rule.rename, value))
        elif rule.forbid is not None:
            field = _asked(job, name, line)
            if field:
                given = getattr(job.resources, field.removeprefix("resources."))
                given = given if isinstance(given, (str, int)) else None
                raise InputError(
                    f"asks for --{name}, which this site forbids: {rule.forbid}",
                    field=field,
                    value=line if field == "resources.extra" else given,
                    hint=f"leave it out{'; the rule is in ' + origin if origin else ''}",
                )
    there = {_split(line)[0] for line in lines}
    for name, rule in rules.items():
        if rule.default is not None and name not in there:
            line = f"--{name}={rule.default}" if rule.default else f"--{name}"
            changed.append(_renamed(rule.rename, rule.default) if rule.rename is not None else line)
    return changed


def as_asked(job: Job, rules: Mapping[str, DirectiveRule]) -> Job:
    """Return the job as Slurm will see it: without what the rules drop, with what they add.

    GPUs and numbers of nodes, ranks and CPUs count as what they were under another name, too. All
    else counts as what it became: a constraint that became a preference keeps no job out.
    """
    changes: dict[str, object] = {}
    extra = [line for line in job.resources.extra if not leaves_out(rules, _split(line)[0])]
    for name, rule in rules.items():
        field = _FIELDS.get(name, "")
        if rule.rename is not None and name in _TEXTS:
            value = changes.get(field) or getattr(job.resources, field) or rule.default
            changes.setdefault(field, None)
            if value:
                changes[field] = None
                other, text = _split(_renamed(rule.rename, str(value)))
                if other in _TEXTS:
                    changes[_TEXTS[other]] = _as_field(other, text)
                else:
                    extra.append(f"--{other}={text}")
        elif rule.rename is not None and name == "exclusive":
            line = _renamed(rule.rename, rule.default or "")
            asked = job.resources.exclusive or rule.default is not None
            changes[field] = asked and line == "--exclusive"
            if asked and line != "--exclusive":  # such as --exclusive=user: no whole nodes
                extra.append(line)
        elif rule.rename is None and leaves_out(rules, name) and field not in ("", "mail"):
            changes[field] = Resources.model_fields[field].default
        elif rule.default is not None and name in _TEXTS:
            changes[field] = getattr(job.resources, field) or _as_field(name, rule.default)
        elif rule.default is not None and not any(_split(line)[0] == name for line in extra):
            extra.append(f"--{name}={rule.default}" if rule.default else f"--{name}")
    resources = job.resources.model_copy(update={**changes, "extra": extra})
    return job.model_copy(update={"resources": resources})


def whole_nodes(asked: Job, site: Site | None) -> bool:
    """Return whether a job gets whole nodes: it asks for them, or its partitions give no others.

    Args:
        asked: the job as Slurm will see it (`as_asked`).
        site: the site profile, if there is one.
    """
    if asked.resources.exclusive or "--exclusive" in asked.resources.extra:
        return True
    names = site.partitions_of(asked.resources.partition) if site else []
    known = site.partitions if site else {}
    return bool(names) and all(name in known and known[name].exclusive for name in names)


def _as_field(name: str, value: str) -> str | None:
    """Return an option's value as the field of `resources` has it; None for what it cannot have."""
    try:
        field: str | None = getattr(Resources.model_validate({_TEXTS[name]: value}), _TEXTS[name])
    except ValueError:
        return None
    return field


def leaves_out(rules: Mapping[str, DirectiveRule], name: str) -> bool:
    """Return whether the rules drop an option that hpml would write."""
    rule = rules.get(name)
    return rule is not None and (rule.omit or rule.forbid is not None)


def without_time(rules: Mapping[str, DirectiveRule]) -> bool:
    """Return whether the script sets no time limit, so that the partition's default applies."""
    rule = rules.get("time")
    return leaves_out(rules, "time") or (rule is not None and rule.rename is not None)


def _split(line: str) -> tuple[str, str]:
    name, _, value = line.removeprefix("--").partition("=")
    return name, value


def _renamed(pattern: str, value: str) -> str:
    """Return `--gres=gpu:{item}` with each part of the value, or `{value}` with all of it."""
    option, separator, text = pattern.partition("=")
    if "{item}" in text:
        text = ",".join(text.replace("{item}", item) for item in value.split(","))
    return f"{option}{separator}{text.replace('{value}', value)}"


def _asked(job: Job, name: str, line: str) -> str:
    """Return the field that asks for an option; empty where hpml itself adds it."""
    if line in job.resources.extra:
        return "resources.extra"
    field = _FIELDS.get(name, "")
    if not field:
        return ""
    default = Resources.model_fields[field].default
    return f"resources.{field}" if getattr(job.resources, field) != default else ""
