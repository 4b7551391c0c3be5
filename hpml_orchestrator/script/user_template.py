"""Templates of a user's own: in Jinja2's sandbox, with faults told by file and line.

What they make is compared with what every job needs, and read by `bash -n`; nothing of it is run.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import BaseModel

from hpml_orchestrator.errors import InputError, nearest
from hpml_orchestrator.script.template import OPTIONS, Raw, add_filters, own_directory
from hpml_orchestrator.spec.site import NEEDED_DIRECTIVES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

__all__ = [
    "OWN",
    "UserEnvironment",
    "check_script",
    "check_setup",
    "fault_of",
    "render_user_template",
]

OWN = "hpml"
"""`hpml/torchrun.sh.j2` is always hpml's own template."""

_HINT = "`hpml template list` shows which templates are used"
_SUPER = "write {{ super() }} in the block"
_BASH_SECONDS = 10.0
_NEEDED_LINES = {
    "setup": '"${hpml_python[@]}" claim "$hpml_submission"',
    "finish": "trap hpml_finish EXIT",
    "agent": '"${hpml_python[@]}" agent "$hpml_attempt"',
    "ready": '"${hpml_python[@]}" wait-ready "$hpml_attempt"',
}
"""What a script must hold, by the block that brings it."""

_HPML_OPTIONS = NEEDED_DIRECTIVES | set(
    "comment cpus-per-task error export-file get-user-env gpus gpus-per-node gpus-per-task input "
    "nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket test-only wait "
    "wrap".split()
)
"""Options that a template may not set: hpml finds the job by them, or counts its ranks."""

# A block that ends in the middle of a line: Jinja2 would glue hpml's next line to it.
_INNER_END = re.compile(r"(?<!\s)(?<!%\})(?<!super\(\) \}\})(?=\{%[-+]?[ \t]*endblock\b)")


class _UserLoader(jinja2.FileSystemLoader):
    """Reads templates of the user's directory; each block ends its last line."""

    def get_source(
        self, environment: jinja2.Environment, template: str
    ) -> tuple[str, str, Callable[[], bool]]:
        text, file, fresh = super().get_source(environment, template)
        return _INNER_END.sub("{{ hpml_line_end }}", text), file, fresh


class UserEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox for a user's templates, which are looked up before hpml's own.

    Raises:
        InputError: there is no such directory.
    """

    def __init__(self, directory: str) -> None:
        if not os.path.isdir(directory) or not os.access(directory, os.R_OK | os.X_OK):
            raise InputError(
                "there is no such directory, or it is not readable",
                field="templates",
                value=directory,
                hint="`hpml template eject` creates one",
            )
        own = jinja2.FileSystemLoader(own_directory())
        loaders = [jinja2.PrefixLoader({OWN: own}), _UserLoader(directory), own]
        super().__init__(loader=jinja2.ChoiceLoader(loaders), **OPTIONS)
        self.directory = directory
        self.globals["hpml_line_end"] = Raw("\n")
        # What super(), a macro or a set block returns is shell code: its values are quoted already.
        self.concat = lambda parts: Raw("".join(parts))  # type: ignore[method-assign]
        add_filters(self)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Of a job only fields and properties: a model's methods read files."""
        if isinstance(obj, BaseModel):
            is_property = isinstance(getattr(type(obj), attr, None), property)
            return attr in type(obj).model_fields or (is_property and not attr.startswith("model_"))
        return super().is_safe_attribute(obj, attr, value)

    def check_blocks(self, name: str) -> None:
        """Refuse what Jinja2 leaves out silently: unknown blocks, and text outside of blocks.

        Raises:
            InputError: names the file and the line.
        """
        tree, file = self._tree(name)
        if next(tree.find_all(nodes.Extends), None) is None:
            return
        others = [other for other in self.list_templates(["j2"]) if other != name]
        known = {block.name for one in others for block in self._tree(one)[0].find_all(nodes.Block)}
        for node in tree.body:
            if isinstance(node, nodes.Block) and node.name not in known:
                hint = f"blocks are {', '.join(sorted(known))}"
                near = nearest(node.name, known)
                hint = f"did you mean {near!r}?" if near else hint
                raise _fault(f"{file}:{node.lineno}", f"there is no block {node.name!r}", hint)
            if isinstance(node, nodes.Output) and any(
                not isinstance(part, nodes.TemplateData) or part.data.strip() for part in node.nodes
            ):
                hint = "write it into a block, such as {% block user %}…{% endblock %}"
                raise _fault(f"{file}:{node.lineno}", "text outside of the blocks", hint)

    def _tree(self, name: str) -> tuple[nodes.Template, str]:
        assert self.loader is not None  # noqa: S101 - made above
        text, file, _ = self.loader.get_source(self, name)
        return self.parse(text, name, file), file or name


def render_user_template(directory: str, name: str, context: Mapping[str, Any]) -> str:
    """Return the script that a user's templates make.

    Args:
        directory: of the user's templates.
        name: of the template, such as `torchrun.sh.j2`.
        context: its variables.

    Raises:
        InputError: a template is at fault, or leaves out what every job needs.
    """
    environment = UserEnvironment(directory)
    try:
        environment.check_blocks(name)
        text = environment.get_template(name).render(context)
    except InputError:
        raise
    except Exception as error:
        raise fault_of(error, directory, name) from error
    lines = [line for line in text.split("\n") if not line.lstrip().startswith("#")]
    for block, needed in _NEEDED_LINES.items():
        if not any(needed in line for line in lines):
            message = f"the script lacks what every job needs of the block {block!r}: {needed}"
            raise _fault(directory, message, f"{_SUPER} {block!r}, or leave the block out")
    return text


def fault_of(error: Exception, directory: str, name: str) -> InputError:
    """Return the error of a user's template, with the file and line that it is at."""
    place = _last_line(error.__traceback__, directory) or os.path.join(directory, name)
    hint, message = _HINT, f"{type(error).__name__}: {error}"
    if isinstance(error, jinja2.TemplateSyntaxError):
        place, message = f"{error.filename or place}:{error.lineno}", str(error.message)
    elif isinstance(error, jinja2.TemplateNotFound):
        message = f"there is no template {error.name!r} in {directory}, nor among hpml's own"
        hint = f"templates can include their own directory only; hpml's are {OWN}/NAME.sh.j2"
    elif isinstance(error, RecursionError):
        message = "the template includes or extends itself"
        hint = f'extend hpml\'s own template as {{% extends "{OWN}/NAME.sh.j2" %}}'
    elif isinstance(error, jinja2.UndefinedError):
        message = str(error)
    elif isinstance(error, UnicodeDecodeError):
        message = "is not UTF-8 text"
    return _fault(place, message, hint)


def check_script(script: str, own: Sequence[str], directory: str) -> None:
    """Refuse a script whose templates took away, changed or broke what hpml needs.

    Args:
        script: what the templates made.
        own: sbatch options as hpml writes them.
        directory: of the user's templates.

    Raises:
        InputError: names the line.
    """
    needed = _HPML_OPTIONS | {_name(option) for option in own}
    found, commands = set(), False
    for line in script.split("\n"):
        option = line.removeprefix("#SBATCH ").partition(" #")[0].strip()
        if not line.startswith("#SBATCH"):
            commands = commands or not (not line.strip() or line.startswith("#"))
        elif commands:
            message = f"sbatch reads no directive after the first command: {line}"
            raise _fault(directory, message, f"{_SUPER} 'directives', and the line below it")
        elif option in own:
            found.add(option)
        elif not option.startswith("--") or _name(option) in needed or " " in option:
            message = f"{line}: a template cannot set this option, or not in this form"
            raise _fault(directory, message, "one --name=value per line; the job file sets others")
    for option in own:
        if option not in found:
            hint = f"{_SUPER} 'directives'; [directives] of the site profile drops an option"
            raise _fault(directory, f"the script lacks `#SBATCH {option}`", hint)
    complaint = _bash_complaint(script)
    if complaint:
        raise _fault(directory, f"bash cannot read the script: {complaint}")


def _name(option: str) -> str:
    return option.removeprefix("--").partition("=")[0]


def check_setup(lines: str, origin: str) -> None:
    """Refuse an `environment.setup` that bash cannot parse by itself: it must leave nothing open.

    Args:
        lines: the user's shell lines.
        origin: where they come from, for the hint.

    Raises:
        InputError: names the line.
    """
    complaint = _bash_complaint(lines)
    if complaint:
        message = f"bash cannot read it: {complaint}"
        raise InputError(message, field="environment.setup", hint=f"fix it in the {origin}")


def _bash_complaint(script: str) -> str:
    """Return the complaint of `bash -n` about a script; nothing of it is run."""
    environment = {key: value for key, value in os.environ.items() if key != "BASH_ENV"}
    options = ["-O", "extglob"] if "extglob" in script else []  # which -n does not switch on
    try:
        process = subprocess.run(
            ["bash", "--norc", "--noprofile", *options, "-n"],
            input=script.encode("utf-8", "surrogateescape"),
            env={**environment, "LC_ALL": "C"},
            capture_output=True,
            timeout=_BASH_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""  # no bash here: the nodes have one
    lines = process.stderr.decode("utf-8", "replace").strip().split("\n")
    # A here-document without its end is a warning, and swallows the rest of the script.
    if process.returncode == 0 and "here-document" not in lines[0]:
        return ""
    return " ".join(line.removeprefix("bash: ") for line in lines[:2])


def _last_line(traceback: TracebackType | None, directory: str) -> str:
    """Return the last line of a user's template that was at work, as `FILE:LINE`."""
    place = ""
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if file.startswith(os.path.join(directory, "")):
            place = f"{file}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place


def _fault(place: str, message: str, hint: str = _HINT) -> InputError:
    return InputError(f"{place}: {message}", field="templates", hint=hint)
