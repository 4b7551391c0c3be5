"""Users' templates: rendered, compared with what every job needs, and checked by `bash -n`."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jinja2
from jinja2 import nodes

from hpml_orchestrator.errors import InputError, did_you_mean
from hpml_orchestrator.script.template import Raw, ScriptEnvironment, own_directory
from hpml_orchestrator.spec.site import NEEDED_DIRECTIVES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_HINT = "`hpml template list` shows the templates in use; hpml's own are hpml/NAME.sh.j2"
_SUPER = "write {{ super() }} in the block"
_BASH_SECONDS = 10.0
_NEEDED_CALLS = {
    "setup": "hpml_begin",
    "agent": "hpml_agents",
    "ready": "hpml_wait_ready",
    "ranks": "hpml_run",
}
"""What a script must call, by the block that does."""

_HPML_OPTIONS = NEEDED_DIRECTIVES | {"comment", "error", "gpus", "gpus-per-node", "ntasks", "wrap"}
"""Options that a template may not set: hpml finds the job by them, or counts its ranks."""

# The end of a block in the middle of a line: Jinja2 would glue hpml's next line to it.
_INNER_END = re.compile(r"(?<=\S)(?<!%\})(?<!super\(\) \}\})(?=\{%[-+]?[ \t]*endblock\b)")


class _UserLoader(jinja2.FileSystemLoader):
    """Reads templates of the user's directory; each block ends its last line."""

    def get_source(
        self, environment: jinja2.Environment, template: str
    ) -> tuple[str, str, Callable[[], bool]]:
        text, file, is_fresh = super().get_source(environment, template)
        return _INNER_END.sub("{{ hpml_line_end }}", text), file, is_fresh


class UserEnvironment(ScriptEnvironment):
    """Finds a user's templates before hpml's own.

    Raises:
        InputError: the directory does not exist.
    """

    def __init__(self, directory: str) -> None:
        if not os.access(directory, os.R_OK | os.X_OK) or not os.path.isdir(directory):
            raise InputError(
                "does not exist, or is not readable",
                field="templates",
                value=directory,
                hint="`hpml template eject` creates one",
            )
        own = jinja2.FileSystemLoader(own_directory())
        loaders = [jinja2.PrefixLoader({"hpml": own}), _UserLoader(directory), own]
        self.sources = jinja2.ChoiceLoader(loaders)
        super().__init__(self.sources)
        self.globals["hpml_line_end"] = Raw("\n")

    def check_blocks(self, name: str) -> None:
        """Refuse what Jinja2 leaves out silently: unknown blocks, and text outside of blocks.

        Raises:
            InputError: names the file and the line.
        """
        tree, file = self._tree(name)
        if tree.find(nodes.Extends) is None:
            return
        others = [self._tree(other)[0] for other in self.list_templates(["j2"]) if other != name]
        known = {block.name for other in others for block in other.find_all(nodes.Block)}
        for node in tree.body:
            place = f"{file}:{node.lineno}"
            if isinstance(node, nodes.Block) and node.name not in known:
                hint = did_you_mean(node.name, known) or f"blocks are {', '.join(sorted(known))}"
                raise _fault(place, f"unknown block {node.name!r}", hint)
            if isinstance(node, nodes.Output) and any(
                not isinstance(part, nodes.TemplateData) or part.data.strip() for part in node.nodes
            ):
                hint = "write it into a block, such as {% block user %}…{% endblock %}"
                raise _fault(place, "text outside of the blocks", hint)

    def _tree(self, name: str) -> tuple[nodes.Template, str]:
        text, file, _ = self.sources.get_source(self, name)
        return self.parse(text, name, file), file or name


def render_user_template(directory: str, name: str, context: Mapping[str, object]) -> str:
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
    code = "\n".join(line for line in text.split("\n") if not line.lstrip().startswith("#"))
    for block, call in _NEEDED_CALLS.items():
        if not re.search(rf"\b{call}\b", code):
            message = f"the script lacks what every job needs of the block {block!r}: {call}"
            hint = f"{_SUPER} {block!r}, or leave the block out"
            if block == "ranks":
                hint = "start the ranks by `hpml_run COMMAND` in the block: it waits for them"
            raise _fault(directory, message, hint)
    return text


def fault_of(error: Exception, directory: str, name: str) -> InputError:
    """Return the error of a user's template, with the file and line that it is at."""
    place = os.path.join(directory, name)
    if isinstance(error, jinja2.TemplateSyntaxError):
        return _fault(f"{error.filename or place}:{error.lineno}", str(error.message))
    frame = error.__traceback__
    while frame is not None:  # the innermost line of a template
        file = frame.tb_frame.f_code.co_filename
        if file.startswith(os.path.join(directory, "")):
            place = f"{file}:{frame.tb_lineno}"
        frame = frame.tb_next
    kind = "" if isinstance(error, jinja2.UndefinedError) else f"{type(error).__name__}: "
    return _fault(place, f"{kind}{error}")


def check_script(script: str, own: Sequence[str], directory: str) -> None:
    """Refuse a script whose templates changed hpml's own directives, or that bash cannot read.

    Args:
        script: what the templates made.
        own: sbatch options as hpml writes them.
        directory: of the user's templates.

    Raises:
        InputError: names the line.
    """
    head, _, body = script.partition("\nset -euo pipefail\n")  # the first command
    lines = [line for line in head.split("\n") if line.startswith("#SBATCH")]
    options = [line.removeprefix("#SBATCH ").partition(" #")[0].strip() for line in lines]
    fixed = _HPML_OPTIONS | {_name(option) for option in own}
    for option in options:
        # one --name=value per line: others are not compared
        if option not in own and (not re.fullmatch(r"--\S+", option) or _name(option) in fixed):
            message = f"#SBATCH {option}: a template cannot set this option, or not in this form"
            raise _fault(directory, message, "one --name=value per line; the job file sets others")
    missing = next((option for option in own if option not in options), None)
    if missing is not None:
        hint = f"{_SUPER} 'directives'; [directives] of the site profile drops an option"
        raise _fault(directory, f"the script lacks `#SBATCH {missing}`", hint)
    late = re.search(r"^#SBATCH.*", body, re.MULTILINE)
    if late:
        message = f"sbatch reads no directive after the first command: {late[0]}"
        raise _fault(directory, message, "write it in the block 'directives'")
    complaint = _bash_complaint(script)
    if complaint:
        raise _fault(directory, f"bash cannot read the script: {complaint}")


def _name(option: str) -> str:
    return option.removeprefix("--").partition("=")[0]


def check_setup(lines: str, origin: str) -> None:
    """Refuse an `environment.setup` that bash cannot parse by itself: it must leave nothing open.

    Args:
        lines: the user's shell lines.
        origin: their source, for the hint.

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


def _fault(place: str, message: str, hint: str = _HINT) -> InputError:
    return InputError(f"{place}: {message}", field="templates", hint=hint)
