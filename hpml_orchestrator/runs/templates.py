"""Templates of batch scripts: which there are, and a start for one of the user's own."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.nodes

from hpml_orchestrator import __version__
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.files import write_text
from hpml_orchestrator.runs.output import output_directory
from hpml_orchestrator.script import template
from hpml_orchestrator.script.template_blocks import chain, check_blocks
from hpml_orchestrator.script.user_template import OWN, own_directory

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BLOCKS", "Template", "eject", "templates"]

_SUFFIX = ".sh.j2"
_BASE = "base"

BLOCKS = {
    "directives": "the #SBATCH lines",
    "setup": "hpml's own parts, and the claim of this attempt; needed",
    "finish": "what happens at the end, however it comes; needed",
    "agent": "one agent per node, which stages the data; needed",
    "environment": "what the ranks find: activate, variables, user",
    "activate": "modules, virtual environment, conda",
    "user": "empty: for lines of your own, run before the ranks start",
    "ready": "waits until every node is ready; needed",
    "rendezvous": "chooses address and port of the process group",
    "launch": "the command, its container, and ranks",
    "ranks": "the srun that starts the ranks",
}
"""Every block of hpml's templates, in the order of the script."""

_CHILD = """\
{{% extends "{own}/{name}{suffix}" %}}
{{#
  {what}, with changes of your own. Made by `hpml template eject` of hpml {version}.

  What is not changed here is hpml's own, in this version and the next. To change a block, write it
  below this remark; {{{{ super() }}}} stands for what hpml has there:

    {{% block user %}}
    ulimit -n 65536
    export SITE_JOB={{{{ job.name }}}}
    {{% endblock %}}

  {{{{ value }}}} is quoted for the shell by itself. `hpml render JOB_FILE` shows the script.

  Blocks, in the order of the script:

{blocks}
#}}
"""


@dataclass(frozen=True)
class Template:
    """One template.

    Attributes:
        name: such as `torchrun`.
        purpose: what it is for.
        origin: `hpml`, or the directory of the user's that it lies in.
        file: its path.
        blocks: blocks that it writes.
    """

    name: str
    purpose: str
    origin: str
    file: str
    blocks: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it for programs."""
        return asdict(self)


def templates(directories: Sequence[str] = ()) -> list[Template]:
    """Return the templates that count: the user's, and hpml's where the user has none.

    Raises:
        InputError: one of the user's has no right form, or there is no such directory.
    """
    found: dict[str, Template] = {}
    for directory in [*directories, own_directory()]:
        origin = "hpml" if directory == own_directory() else directory
        for path in sorted(Path(directory).rglob("*")):
            name = path.relative_to(directory).as_posix()
            if path.is_file() and name not in found:
                found[name] = _template(name, path, origin, tuple(directories))
    order = {name: index for index, name in enumerate(_own_names())}
    return sorted(found.values(), key=lambda one: (order.get(one.name, len(order)), one.name))


def eject(name: str, directory: str | Path, *, whole: bool = False, force: bool = False) -> Path:
    """Write a template of the user's own: a child of hpml's with nothing changed, or all of it.

    Args:
        name: such as `torchrun`.
        directory: where to; is made.
        whole: copy hpml's template instead of extending it.
        force: whether a file that is there may be replaced.

    Raises:
        InputError: there is no such template, there is such a file, or it cannot be written.
    """
    known = _own_names()
    plain = name.removesuffix(_SUFFIX)
    if plain not in known:
        raise InputError("must be one of " + ", ".join(known), field="NAME", value=name)
    path = Path(os.path.abspath(os.path.expanduser(directory))) / f"{plain}{_SUFFIX}"
    if os.path.lexists(path) and not force:
        raise InputError(f"{path} is there already", field="--output", hint="--force replaces it")
    text = _source(plain) if whole else _child(plain)
    with output_directory(path.parent, value=str(directory)):
        write_text(path, text)
    return path


def _own_names() -> list[str]:
    names = sorted(path.name.removesuffix(_SUFFIX) for path in Path(own_directory()).iterdir())
    return sorted(names, key=lambda name: name != _BASE)


def _source(name: str) -> str:
    return (Path(own_directory()) / f"{name}{_SUFFIX}").read_text("utf-8")


def _purpose(name: str) -> str:
    plain = name.removesuffix(_SUFFIX)
    if plain not in _own_names() or plain == name:
        return "a part, for others to include"
    return "every launcher" if plain == _BASE else f"launcher {plain}"


def _template(name: str, path: Path, origin: str, directories: tuple[str, ...]) -> Template:
    environment = template.environment(directories)
    try:
        source = path.read_text("utf-8")
        blocks = tuple(
            dict.fromkeys(
                block.name for block in environment.parse(source).find_all(jinja2.nodes.Block)
            )
        )
        if name.endswith(_SUFFIX):
            check_blocks(chain(environment, name))
    except jinja2.TemplateSyntaxError as error:
        raise InputError(f"{path}:{error.lineno}: {error.message}", field="templates") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text", field="templates") from error
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}", field="templates") from error
    order = list(BLOCKS)
    return Template(
        name.removesuffix(_SUFFIX),
        _purpose(name),
        origin,
        str(path),
        tuple(sorted(blocks, key=lambda one: order.index(one) if one in order else len(order))),
    )


def _child(name: str) -> str:
    width = max(map(len, BLOCKS))
    return _CHILD.format(
        own=OWN,
        name=name,
        suffix=_SUFFIX,
        version=__version__,
        what="Hpml's script of every launcher" if name == _BASE else f"Hpml's script of {name}",
        blocks="\n".join(f"    {block:<{width}}  {what}" for block, what in BLOCKS.items()),
    )
