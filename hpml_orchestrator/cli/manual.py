"""The manual of every command, made from what `--help` is made from; how it is set is not here.

Texts are marked in two ways: `literal` stands between backticks and, in terms and synopses alone,
*placeholder* between asterisks.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from hpml_orchestrator.cli.examples import EXAMPLES
from hpml_orchestrator.cli.statuses import exit_statuses

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Block", "Code", "Item", "Page", "Section", "Synopsis", "manual"]


@dataclass(frozen=True)
class Item:
    """A term and what there is to say about it; both are marked text."""

    term: str
    text: str


@dataclass(frozen=True)
class Code:
    """Lines to be shown as they are."""

    lines: tuple[str, ...]


@dataclass(frozen=True)
class Synopsis:
    """How a command is called; marked text."""

    text: str


Block = str | Item | Code | Synopsis


@dataclass(frozen=True)
class Section:
    """A part of a page, with its title in capitals."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Page:
    """What there is to say about one command.

    Attributes:
        command: as it is typed, such as `hpml template list`.
        summary: one line, without a full stop.
        sections: in the order of a manual page, without NAME.
        related: titles of other pages, such as `hpml` or `sbatch`.
    """

    command: str
    summary: str
    sections: tuple[Section, ...]
    related: tuple[str, ...]

    @property
    def title(self) -> str:
        """The page's name: `hpml-template-list`."""
        return self.command.replace(" ", "-")


_ABOUT = """\
The job file says what to train, with which data, and what to ask of the cluster. hpml turns it into
one sbatch script that can be read, submits it, and keeps a record of every run.

A run is named by its id, a unique beginning or end of its id, its job's id, or `last`. Commands
that print data take `--json`. Options of `hpml` itself stand before the command.
"""
_ENVIRONMENT = (
    Item(
        "`XDG_STATE_HOME`", "Where records live, in its directory `hpml`, without `HPML_HOME` set."
    ),
    Item(
        "`HPML_LOCAL_KILL_WAIT`",
        "Seconds between SIGTERM and SIGKILL for jobs on this machine; 30 without it.",
    ),
    Item("`NO_COLOR`", "When set, nothing is printed in colour."),
)
_FILES = (
    Item(
        "`$HPML_HOME`, `$XDG_STATE_HOME/hpml` or `~/.local/state/hpml`",
        "Records of all runs: the first of these that is set. The compute nodes must see it.",
    ),
    Item(
        "`hpml.toml`",
        "The project's site profile: the nearest one in the job file's directory or above it.",
    ),
    Item(
        "`$XDG_CONFIG_HOME/hpml/site.toml` or `~/.config/hpml/site.toml`",
        "The user's site profile, which the project's lies over.",
    ),
    Item("`/etc/hpml/site.toml`", "The system's site profile, which both lie over."),
)


def manual(app: typer.Typer) -> list[Page]:
    """Return a page for the application and for each of its commands, those of groups included."""
    root = typer.main.get_command(app)
    context = typer.Context(root, info_name="hpml", **root.context_settings)
    return list(_pages(root, context, "hpml"))


def _pages(command: Any, context: Any, path: str) -> Iterator[Page]:
    children = {
        name: one for name, one in getattr(command, "commands", {}).items() if not one.hidden
    }
    yield _page(command, context, path, children)
    for name, child in children.items():
        below = typer.Context(child, parent=context, info_name=name, **child.context_settings)
        yield from _pages(child, below, f"{path} {name}")


def _page(command: Any, context: Any, path: str, children: dict[str, Any]) -> Page:
    paragraphs = _paragraphs(command.help)
    shown = [one for one in command.get_params(context) if not getattr(one, "hidden", False)]
    arguments = [one for one in shown if one.param_type_name == "argument"]
    options = [one for one in shown if one.param_type_name == "option"]
    root = path == "hpml"
    variables = [] if root else _variables(context.find_root().command.params)
    variables += _variables(options)
    examples = EXAMPLES.get(path.removeprefix("hpml").strip(), [])
    sections = (
        Section("SYNOPSIS", _synopses(path, arguments, group=bool(children))),
        Section("DESCRIPTION", (*paragraphs, *(_paragraphs(_ABOUT) if root else ()))),
        Section("ARGUMENTS", tuple(_argument(one, context) for one in arguments)),
        Section("OPTIONS", tuple(_option(one, context) for one in options)),
        Section(
            "COMMANDS",
            tuple(Item(f"`{path} {name}`", _first(one.help)) for name, one in children.items()),
        ),
        Section(
            "EXIT STATUS",
            tuple(Item(f"`{code}`", _sentence(text)) for code, text in exit_statuses().items()),
        ),
        Section("ENVIRONMENT", (*variables, *_ENVIRONMENT)),
        Section("FILES", _FILES),
        Section(
            "EXAMPLES", tuple(part for text, line in examples for part in (text, Code((line,))))
        ),
    )
    above = path.rpartition(" ")[0].replace(" ", "-")
    related = [above] if above else []
    related += [f"{path} {name}".replace(" ", "-") for name in children]
    return Page(
        command=path,
        summary=_summary(paragraphs),
        sections=tuple(section for section in sections if section.blocks),
        related=(*related, "sbatch"),
    )


def _paragraphs(text: str | None) -> list[str]:
    cleaned = inspect.cleandoc(text or "")
    return [" ".join(part.split()) for part in cleaned.split("\n\n") if part.strip()]


def _first(text: str | None) -> str:
    return next(iter(_paragraphs(text)), "")


def _summary(paragraphs: Sequence[str]) -> str:
    first = paragraphs[0].split(". ")[0].rstrip(".") if paragraphs else ""
    plain = first.replace("`", "")
    return plain[:1].lower() + plain[1:]


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _synopses(path: str, arguments: Sequence[Any], *, group: bool) -> tuple[Synopsis, ...]:
    """Return how a command is called; a group that takes arguments itself is called in two ways."""
    words = [f"`{path}`", "[*OPTION*]…"]
    for one in arguments:
        name = f"*{_metavar(one)}*"
        words.append(name if one.required else f"[{name}]")
    commands = "*COMMAND* [*ARGUMENT*]…"
    if not group:
        return (Synopsis(" ".join(words)),)
    if not arguments:
        return (Synopsis(" ".join([*words, commands])),)
    return (Synopsis(" ".join(words)), Synopsis(f"`{path}` {commands}"))


def _metavar(param: Any) -> str:
    return (param.metavar or str(param.name).upper()).strip("[]")


def _argument(param: Any, context: Any) -> Item:
    return Item(f"*{_metavar(param)}*", _about(param, context))


def _option(param: Any, context: Any) -> Item:
    names = sorted([*param.opts, *param.secondary_opts], key=len)
    term = ", ".join(f"`{name}`" for name in names)
    if not getattr(param, "is_flag", False):
        term += f" *{_metavar(param)}*"
    return Item(term, _about(param, context))


def _about(param: Any, context: Any) -> str:
    """Return the help of a parameter, and what is to be known of its value."""
    parts = [" ".join((param.help or "").split())]
    if param.multiple and "repeated" not in parts[0]:
        parts.append("May be given more than once.")
    default = _default(param, context)
    if default:
        parts.append(f"Default: {default}.")
    if param.envvar:
        parts.append(f"Environment variable: {_names(param.envvar)}.")
    return " ".join(part for part in parts if part)


def _default(param: Any, context: Any) -> str:
    if isinstance(param.show_default, str):
        return param.show_default
    value = param.get_default(context, call=False)
    if not param.show_default or param.required or isinstance(value, bool) or callable(value):
        return ""
    if value is None or value in ("", [], ()):
        return ""
    return str(getattr(value, "value", value))


def _variables(params: Sequence[Any]) -> list[Item]:
    """Return the environment variables that options can be given by."""
    return [
        Item(_names(one.envvar), f"The same as `{max(one.opts, key=len)}`.")
        for one in params
        if one.envvar and not getattr(one, "hidden", False)
    ]


def _names(variables: str | Sequence[str]) -> str:
    listed = [variables] if isinstance(variables, str) else variables
    return ", ".join(f"`{name}`" for name in listed)
