"""Whether the values of a sweep reach the program; what cannot is refused before anything runs.

Values that are lost on the way make equal runs, and noise would choose the best of them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.script.directives import leaves_out
from hpml_orchestrator.spec.shell import shell_program
from hpml_orchestrator.spec.text import PLACEHOLDER
from hpml_orchestrator.sweeps.scaling import Arguments

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpml_orchestrator.spec.job import Job
    from hpml_orchestrator.spec.site import Site

__all__ = [
    "check_argument",
    "check_base",
    "check_field",
    "check_template",
    "check_values",
    "check_variable",
]

_SWITCHES = frozenset("0 1 false no off on true yes".split())
_DIRECTIVES = {"memory": "mem"} | {
    name: name for name in "account constraint exclusive partition qos time".split()
}
_ON_CLUSTERS = frozenset("account constraint exclusive partition qos".split())


def check_base(job: Job, file: object) -> None:
    """Check that the base job is a single one whose runs do not share their checkpoints.

    Raises:
        InputError: it is not.
    """
    if job.array is not None:
        raise InputError(
            "a sweep makes arrays of its own; the base job must be a single one",
            field="array",
            value=job.array,
            hint=f"remove `array` from {file}",
        )
    if job.checkpoint.enabled and not job.checkpoint.is_per_run:
        raise InputError(
            "would be the directory of every run of the sweep",
            field="checkpoint.directory",
            value=job.checkpoint.directory,
            hint="give a relative path, or put {run.id} into it",
        )


def check_argument(job: Job, name: str, place: str, *, flag: bool = False) -> None:
    """Check that an argument which a sweep sets reaches the job's program.

    Args:
        job: the base job.
        name: of the argument: `--lr`, or `lr=`.
        place: the field of the sweep, for the error.
        flag: whether it is given without a value, or left out.

    Raises:
        InputError: it does not reach it, or not in the way that the job's own arguments do.
    """

    def refused(message: str, hint: str) -> InputError:
        return InputError(message, field=place, value=name, hint=hint)

    program = shell_program(job.command or (), job.workdir)
    text, inline, rest = program.text, program.inline, program.rest
    if program.ignores_arguments:
        what = "the shell text of `command`" if inline else "the shell script of `command`"
        raise refused(
            f"would not reach the program: {what} does not use its arguments",
            "write the program in `command` and its arguments in `args`, or pass them on with "
            '"$@"; a value that comes from a variable is environment.variables.NAME here',
        )
    words = [*rest, *job.args]
    if inline and (not words or words[0].startswith(name)):
        raise refused(
            "would not reach the program: the first word behind the text of `bash -c` is $0",
            f"add a word behind the text: command: [bash, -c, {text!r}, bash]",
        )
    arguments = Arguments(job.args)
    if arguments.value(name) is not None:
        value = arguments.value(name) or ""
        given = any(word.startswith(f"{name}=") for word in job.args)
        if flag and (given or value.lower() in _SWITCHES):
            raise refused(
                f"has the value {value} in the job's args, and true or false would give it none",
                "write the values as texts, such as ['true', 'false']",
            )
        return
    spelled = (_spelling(word) for word in job.args)
    other = next((one for one in spelled if one and _letters(one) == _letters(name)), name)
    if other != name:
        raise refused(
            f"is not among the job's arguments, which have {other}",
            f"name the axis {other}" + " in a sweep file" * other.endswith("="),
        )
    if "--" in words and name not in job.args:
        raise refused(
            "is not among the job's arguments, and behind their `--` it would not be an option",
            f"write {name.removesuffix('=')}=VALUE in the job's args, at its place",
        )


def check_values(values: object, place: str) -> None:
    """Check that the values of an axis are no placeholders, which stand in the base job only.

    Raises:
        InputError: one has a placeholder.
    """
    for value in values if isinstance(values, list) else ():
        if isinstance(value, str) and PLACEHOLDER.search(value):
            raise InputError(
                "has no placeholders: they are replaced in the base job only",
                field=place,
                value=value,
                hint="write it in `args` of the base job",
            )


def check_variable(job: Job, name: str, place: str) -> None:
    """Check that an environment variable which a sweep sets is not set again, or read too early.

    Raises:
        InputError: it is.
    """
    setup = job.environment.setup or ""
    if re.search(rf"\$\{{?{name}\b", setup):
        raise InputError(
            "is used by environment.setup, which runs before the job's variables are set",
            field=place,
            value=name,
            hint="use the variable in the program, or make it an argument",
        )
    program = shell_program(job.command or (), job.workdir)
    words = "\n".join([*(job.command or ()), program.text or ""])
    use = re.search(rf"(?P<set>\b{name}=(?!\S*\$\{{?{name}\b))|\b{name}\b", words)
    if use and use["set"]:
        raise InputError(
            "would not reach the program: the job's command sets this variable itself",
            field=place,
            value=name,
            hint=f"remove {name}=… there, or write {name}=${{{name}:-DEFAULT}}",
        )


def check_field(field: str, place: str, site: Site | None, *, here: bool) -> None:
    """Check that a field of the job which a sweep varies makes a difference.

    Args:
        field: its dotted name.
        place: the field of the sweep, for the error.
        site: the site profile, if there is one.
        here: whether the jobs run on this machine.

    Raises:
        InputError: it makes none: the local backend or the site profile leaves it out.
    """
    top, _, name = field.partition(".")
    if top != "resources" or name not in _DIRECTIVES:
        return
    if here and name in _ON_CLUSTERS:
        message, hint = "makes no difference on this machine", "run the sweep on a cluster"
        raise InputError(message, field=place, value=field, hint=hint)
    if leaves_out(site.directives if site else {}, _DIRECTIVES[name]):
        message = f"makes no difference: the site profile leaves --{_DIRECTIVES[name]} out"
        hint = "`hpml doctor` prints the profile in use"
        raise InputError(message, field=place, value=field, hint=hint)


def check_template(script: str, variables: Mapping[str, str]) -> None:
    """Check that a script of the site's own templates has all values of a point.

    Args:
        script: the batch script.
        variables: the shell variable of each value, by the field of the sweep.

    Raises:
        InputError: it lacks one.
    """
    for place, variable in variables.items():
        if f"${variable}" not in script:
            raise InputError(
                "would not reach the program: the site profile's template does not pass "
                "arguments and variables on",
                field=place,
                value=variable,
                hint="let the block `ranks` start {{ command }}, and keep the others",
            )


def _spelling(word: str) -> str:
    """Return the name of an argument as an axis has it; empty if the word is not an argument.

    >>> _spelling("--lr=1"), _spelling("--lr"), _spelling("lr=1"), _spelling("lr")
    ('--lr', '--lr', 'lr=', '')
    """
    name, equals, _ = word.partition("=")
    return name if word.startswith("-") else name + equals if equals else ""


def _letters(name: str) -> str:
    """Return what spellings of a name have in common: `--batch-size` and `batch_size=`."""
    plain = re.sub(r"[-_=]", "", name)
    return plain if len(plain) == 1 else plain.lower()
