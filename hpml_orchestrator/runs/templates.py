"""Templates of batch scripts: which are used, and a start for one of the user's own."""

from __future__ import annotations

import os
import string
from dataclasses import dataclass
from pathlib import Path

import jinja2
import jinja2.nodes

from hpml_orchestrator import __version__, assets
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.files import write_text
from hpml_orchestrator.runs.prepare import output_directory
from hpml_orchestrator.script import template
from hpml_orchestrator.script.template import own_directory
from hpml_orchestrator.script.user_template import UserEnvironment, fault_of

_SUFFIX = ".sh.j2"
_BASE = "base"


@dataclass(frozen=True)
class Template:
    """One template of batch scripts."""

    name: str  # such as `torchrun`
    purpose: str
    origin: str  # `hpml`, or the user's directory that it is in
    file: str
    blocks: tuple[str, ...]  # that it writes


def templates(directory: str | None = None) -> list[Template]:
    """Return the templates that are used: the user's, and hpml's where the user has none.

    Raises:
        InputError: a user's template cannot be parsed, or the directory does not exist.
    """
    environment = UserEnvironment(directory) if directory else template.environment()
    listed: dict[str, Template] = {}
    for folder in filter(None, (directory, own_directory())):
        for path in sorted(Path(folder).rglob("*" if folder == directory else f"*{_SUFFIX}")):
            name = path.relative_to(folder).as_posix()
            if not path.is_file() or name in listed:
                continue
            origin = "hpml" if folder == own_directory() else folder
            try:
                if isinstance(environment, UserEnvironment) and name.endswith(_SUFFIX):
                    environment.check_blocks(name)
                tree = environment.parse(path.read_text("utf-8"), name, str(path))
            except InputError:
                raise
            except (jinja2.TemplateError, OSError, ValueError) as error:
                raise fault_of(error, folder, name) from error
            blocks = tuple(block.name for block in tree.find_all(jinja2.nodes.Block))
            plain = name.removesuffix(_SUFFIX)
            listed[name] = Template(plain, _purpose(plain), origin, str(path), blocks)
    order = {name: index for index, name in enumerate(own_names())}
    return sorted(
        listed.values(),
        key=lambda template: (order.get(template.name, len(order)), template.name),
    )


def own_names() -> list[str]:
    """Return the names of hpml's own templates, the base first."""
    paths = Path(own_directory()).glob(f"*{_SUFFIX}")
    names = sorted(path.name.removesuffix(_SUFFIX) for path in paths)
    return sorted(names, key=lambda name: name != _BASE)


def eject(name: str, directory: str | Path, *, whole: bool = False, force: bool = False) -> Path:
    """Write a template of the user's own: a child of hpml's with nothing changed, or all of it.

    Args:
        name: such as `torchrun`.
        directory: where to; is created.
        whole: copy hpml's template instead of extending it.
        force: whether an existing file may be replaced.

    Raises:
        InputError: no template has that name, the file exists, or it cannot be written.
    """
    plain = name.removesuffix(_SUFFIX)
    if plain not in own_names():
        raise InputError("must be one of " + ", ".join(own_names()), field="NAME", value=name)
    path = Path(os.path.abspath(os.path.expanduser(directory))) / f"{plain}{_SUFFIX}"
    if os.path.lexists(path) and not force:
        raise InputError(f"{path} already exists", field="--output", hint="--force replaces it")
    if whole:
        text = (Path(own_directory()) / f"{plain}{_SUFFIX}").read_text("utf-8")
    else:
        child = string.Template(assets.path("templates/eject.txt").read_text("utf-8"))
        text = child.substitute(name=plain, purpose=_purpose(plain), version=__version__)
    with output_directory(path.parent, value=str(directory)):
        write_text(path, text)
    return path


def _purpose(plain: str) -> str:
    if plain not in own_names():
        return "a part, for others to include"
    return "every launcher" if plain == _BASE else f"launcher {plain}"
