"""The template layer: Jinja2 in its sandbox, with every value shell-quoted on its way out."""

from __future__ import annotations

import functools
import re
import shlex
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hpml_orchestrator import assets

__all__ = ["OPTIONS", "Raw", "add_filters", "environment", "own_directory", "word"]

_PLACEHOLDER = re.compile(r"\{(stage\.[A-Za-z0-9_]+|run\.[A-Za-z0-9_]+|array\.index)\}")
_ARRAY_PLACEHOLDER = re.compile(r"\{((?:stage|run|array)\.[A-Za-z0-9_]+)\}")
_DIRECTIVE = re.compile(r"[A-Za-z0-9_.,:@/+=%*()\[\]|&<>\- ]*")


_OWN = {"run.dir": "HPML_RUN_DIR", "array.index": "SLURM_ARRAY_TASK_ID"}


class Raw(str):
    """Text that is shell code already: made by this module, or `environment.setup`."""

    __slots__ = ()


def quote(value: Any) -> Raw:
    """Return a value as one shell word that stands for exactly that text."""
    if isinstance(value, Raw):
        return value
    if isinstance(value, jinja2.Undefined):
        str(value)  # raises, naming the variable
    return Raw(shlex.quote(str(value)))


def directive(value: Any) -> Raw:
    """Return text that has no special character at all, as `#SBATCH` lines need it.

    Raises:
        ValueError: it has one.
    """
    text = str(value)
    if not _DIRECTIVE.fullmatch(text):
        raise ValueError(f"{text!r} must not stand unquoted in a script")
    return Raw(text)


def word(value: Any) -> Raw:
    """Return a value as one shell word; `{stage.NAME}`, `{run.dir}` become variables.

    >>> word("--data={stage.digits}/train it")
    '--data='"$HPML_STAGE_DIGITS"'/train it'
    """
    if isinstance(value, Raw):
        return value
    text = str(value)
    parts = []
    end = 0
    for match in _PLACEHOLDER.finditer(text):
        parts.append(shlex.quote(text[end : match.start()]) if match.start() > end else "")
        parts.append(f'"${variable(match[1])}"')
        end = match.end()
    if end < len(text) or not parts:
        parts.append(shlex.quote(text[end:]))
    return Raw("".join(parts))


def node_path(path: str) -> Raw:
    """Return a path of the site profile as one shell word; it may begin with a variable.

    >>> node_path("$LOCAL_SCRATCH/my data")
    '"${LOCAL_SCRATCH:?of the site profile is not set in this job}"'/my data''
    """
    if not path.startswith("$"):
        return quote(path)
    name, slash, rest = path[1:].partition("/")
    start = f'"${{{name}:?of the site profile is not set in this job}}"'
    return Raw(start + (shlex.quote(slash + rest) if rest else ""))


def variable(placeholder: str) -> str:
    """Return the shell variable of a placeholder: `stage.digits` -> `HPML_STAGE_DIGITS`."""
    if placeholder in _OWN:
        return _OWN[placeholder]
    return "HPML_STAGE_" + placeholder.removeprefix("stage.").upper()


def placeholders(text: str, *, array: bool = False) -> list[str]:
    """Return the placeholders of a value, such as `stage.digits`.

    Args:
        text: the value.
        array: whether the job is an array; of other jobs only `{array.index}` counts, so that
            other text in braces stays as it is.
    """
    return (_ARRAY_PLACEHOLDER if array else _PLACEHOLDER).findall(text)


OPTIONS: dict[str, Any] = {
    "undefined": jinja2.StrictUndefined,
    "finalize": quote,
    "trim_blocks": True,
    "lstrip_blocks": True,
    "keep_trailing_newline": True,
    "autoescape": False,
}
"""Options of every environment that sbatch templates are rendered in."""


def own_directory() -> str:
    """Return the directory of hpml's own templates."""
    return str(assets.path("templates") / "sbatch")


def add_filters(environment: jinja2.Environment) -> None:
    """Give an environment the filters that sbatch templates use."""
    environment.filters["directive"] = directive
    environment.filters["word"] = word


@functools.cache
def environment() -> jinja2.Environment:
    """Return the environment of hpml's own templates, one per process."""
    loader = jinja2.FileSystemLoader(own_directory())
    made = ImmutableSandboxedEnvironment(loader=loader, **OPTIONS)
    add_filters(made)
    return made
