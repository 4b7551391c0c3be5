"""The template layer: Jinja2 with automatic shell quoting of every value."""

from __future__ import annotations

import functools
import os
import re
import shlex
from typing import TYPE_CHECKING

import jinja2

from hpml_orchestrator import assets
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.jobfile.text import PLACEHOLDER, unescaped

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_DIRECTIVE = re.compile(r"[A-Za-z0-9_.,:@/+=%*()\[\]|&<>\- ]*")
_LINE = 100  # maximum width of a command's lines
_EXTENDS_HINT = "{% extends %} knows hpml's own templates as hpml/NAME.sh.j2"
_BREAK = " \\\n  "
_VARIABLES = {
    "run.dir": "HPML_RUN_DIR",
    "run.id": "{HPML_RUN_DIR##*/}",
    "job.id": "SLURM_JOB_ID",
    "array.index": "SLURM_ARRAY_TASK_ID",
}


class Raw(str):
    """Text that already is shell code: from this package, or `environment.setup`."""

    __slots__ = ()


def quote(value: object) -> Raw:
    """Return a value as one shell word that stands for exactly that text."""
    # Quoting twice would pass the quotes to the program as text.
    if isinstance(value, Raw):
        return value
    return Raw(shlex.quote(str(value)))  # str() of an undefined variable raises, naming it


def in_quotes(text: str) -> str:
    """Escape a text for use between double quotes."""
    return re.sub(r'[\\"$`]', r"\\\g<0>", text)


def directive(value: object) -> Raw:
    """Return a text without special characters, as `#SBATCH` lines require.

    Raises:
        ValueError: it contains one.
    """
    text = str(value)
    if not _DIRECTIVE.fullmatch(text):
        raise ValueError(f"{text!r} must not stand unquoted in a script")
    return Raw(text)


def word(value: object, late: str = "\0") -> Raw:
    """Return a value as one shell word; `{stage.NAME}` and `{env.HOME}` become variables.

    Placeholders that begin with `late` stay: their variables are not known yet.
    >>> print(word("--data={stage.digits}/train it"))
    --data="$HPML_STAGE_DIGITS"'/train it'
    >>> print(word("{run.id}{env.HOME}{{run.id}}"))
    "${HPML_RUN_DIR##*/}""$HOME"'{run.id}'
    """
    if isinstance(value, Raw):
        return value
    # `split` with a group alternates: even parts are text, odd parts are placeholders.
    parts = PLACEHOLDER.split(str(value))
    shell = [
        shlex.quote(f"{{{part}}}" if part.startswith(late) else unescaped(part))
        if index % 2 == 0 or part.startswith(late)
        else f'"${variable(part)}"'
        for index, part in enumerate(parts)
        if part or len(parts) == 1
    ]
    return Raw("".join(shell))


def fill(words: Iterable[Raw]) -> Raw:
    """Join shell words to one command, wrapped into lines."""
    lines: list[str] = []
    for text in words:
        if lines and len(lines[-1]) + len(text) < _LINE:
            lines[-1] += f" {text}"
        else:
            lines.append(text)
    return Raw(_BREAK.join(lines))


def words_before(words: Sequence[Raw]) -> Raw:
    """Return shell words followed by a line break; empty if there are none."""
    return Raw(fill(words) + _BREAK if words else "")


def node_path(path: str) -> Raw:
    """Return a path of the site profile as one shell word; it may begin with a variable.

    >>> print(node_path("$LOCAL_SCRATCH/my data"))
    "${LOCAL_SCRATCH:?of the site profile is not set in this job}"'/my data'
    """
    if not path.startswith("$"):
        return quote(path)
    name, slash, rest = path[1:].partition("/")
    start = f'"${{{name}:?of the site profile is not set in this job}}"'
    return Raw(start + (shlex.quote(slash + rest) if rest else ""))


def variable(placeholder: str) -> str:
    """Return the shell variable of a placeholder: `stage.digits` -> `HPML_STAGE_DIGITS`."""
    if placeholder.startswith("env."):
        return placeholder.removeprefix("env.")
    return _VARIABLES.get(placeholder, f"HPML_{placeholder.replace('.', '_').upper()}")


class ScriptEnvironment(jinja2.Environment):
    """Renders sbatch templates, hpml's own and users'."""

    # super(), a macro and a set block return shell code whose values are already quoted. Without
    # this they would return plain text, and be quoted as one word.
    concat = staticmethod(lambda parts: Raw("".join(parts)))

    def __init__(self, loader: jinja2.BaseLoader) -> None:
        super().__init__(
            loader=loader,
            # A misspelt variable in a user's template must fail here. As an empty text it would
            # render a script that runs, but lacks an argument.
            undefined=jinja2.StrictUndefined,
            # Safe by default: this quotes every expression, also in templates of users who never
            # think of quoting.
            finalize=quote,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            autoescape=False,
        )
        self.filters |= {"directive": directive, "word": word}


def own_directory() -> str:
    """Return the directory of hpml's own templates."""
    return str(assets.path("templates") / "sbatch")


@functools.cache
def environment(directory: str | None = None) -> ScriptEnvironment:
    """Return the environment for hpml's own templates, or for a user's directory before them.

    A user's template of the same name wins; `hpml/NAME.sh.j2` is always hpml's, to extend it.

    Raises:
        InputError: the user's directory does not exist.
    """
    own = jinja2.FileSystemLoader(own_directory())
    if directory is None:
        return ScriptEnvironment(own)
    if not os.access(directory, os.R_OK | os.X_OK) or not os.path.isdir(directory):
        raise InputError("does not exist, or is not readable", field="templates", value=directory)
    # A user's `torchrun.sh.j2` hides hpml's file of that name. The prefix keeps the original
    # available, so that it can be extended.
    prefixed = jinja2.PrefixLoader({"hpml": own})
    return ScriptEnvironment(
        jinja2.ChoiceLoader([prefixed, jinja2.FileSystemLoader(directory), own])
    )


def render_template(name: str, context: Mapping[str, object], directory: str | None = None) -> str:
    """Return the text that a template renders to.

    Args:
        name: such as `torchrun.sh.j2`.
        context: its variables.
        directory: directory of the user's templates, if any.

    Raises:
        InputError: a user's template is wrong; names its file and line.
    """
    made = environment(directory)
    try:
        return made.get_template(name).render(context)
    except Exception as error:
        if directory is None:
            raise
        raise _fault(error, directory, name) from error


def _fault(error: Exception, directory: str, name: str) -> InputError:
    place = os.path.join(directory, name)
    kind = "" if isinstance(error, jinja2.UndefinedError) else f"{type(error).__name__}: "
    if isinstance(error, RecursionError):
        return InputError(f"{place}: extends itself", field="templates", hint=_EXTENDS_HINT)
    if isinstance(error, jinja2.TemplateSyntaxError):
        place, kind = f"{error.filename or place}:{error.lineno}", ""
    frame = error.__traceback__
    while frame is not None:  # the last match is the innermost template line
        file = frame.tb_frame.f_code.co_filename
        if file.startswith(os.path.join(directory, "")):
            place = f"{file}:{frame.tb_lineno}"
        frame = frame.tb_next
    return InputError(f"{place}: {kind}{error}", field="templates", hint=_EXTENDS_HINT)
