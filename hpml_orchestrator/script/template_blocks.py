"""Blocks of templates: each must be in a template that is extended, or nobody sees it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jinja2
from jinja2 import nodes

from hpml_orchestrator.errors import InputError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["LINE_END", "Source", "chain", "check_blocks", "starts_something", "with_line_ends"]

LINE_END = "hpml_line_end"
"""Name of the line end in templates; it is put where a block ends in the middle of a line."""

_BEFORE_RANKS = "hpml_before=$!"
_AFTER_RANKS = "hpml_ranks=$!"
_BLOCK_END = re.compile(r"(?<=[^\s])(\{%[-+]?[ \t]*endblock\b[^%]*%\}[ \t]*)$", re.MULTILINE)
_COMPLETE = re.compile(r"(\{%[-+]?[ \t]*block\b[^%]*%\}|\bsuper\(\)[ \t]*[-+]?\}\})\Z")
_NO_CODE = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*"|(?<![^\s;&|()])\#[^\n]*""", re.DOTALL)
_TAG_CHARACTERS = 200  # no tag of a block is longer
_BACKGROUND = re.compile(r"(?<![&<>|])&(?![&>])|\bcoproc\b")


@dataclass(frozen=True)
class Source:
    """One template of those that make a script.

    Attributes:
        file: its path.
        blocks: name -> line, of blocks that are in no other block of this template.
        inner: names of blocks that are.
        stray: line of the first text outside of blocks; 0 where there is none.
        extends: whether it extends another.
    """

    file: str
    blocks: dict[str, int]
    inner: frozenset[str]
    stray: int
    extends: bool


def chain(environment: jinja2.Environment, name: str) -> list[Source]:
    """Return a template and those that it extends, as far as that can be told without rendering.

    Raises:
        jinja2.TemplateSyntaxError: one of them cannot be read.
    """
    found: list[Source] = []
    seen: set[str] = set()
    assert environment.loader is not None  # noqa: S101 - hpml makes no environment without
    while name and name not in seen:
        seen.add(name)
        try:
            text, file, _ = environment.loader.get_source(environment, name)
        except jinja2.TemplateNotFound:
            break  # rendering tells it with its place
        tree = environment.parse(text, name, file)
        parent = next(tree.find_all(nodes.Extends), None)
        outer = {block.name: block.lineno for block in _outer_blocks(tree)}
        every = {block.name for block in tree.find_all(nodes.Block)}
        stray = _stray(tree) if parent is not None else 0
        found.append(
            Source(file or name, outer, frozenset(every - set(outer)), stray, parent is not None)
        )
        name = parent.template.value if parent and isinstance(parent.template, nodes.Const) else ""
    return found


def with_line_ends(text: str) -> str:
    """Return a template each of whose blocks ends its last line, so that none runs into the next.

    `{% block user %}ulimit -n 65536{% endblock %}` stands for a line of the script. Jinja2 takes
    the line end behind a tag away, and would glue hpml's next line to it. No line is added here,
    so that errors name those of the file.
    """

    def ended(match: re.Match[str]) -> str:
        if _COMPLETE.search(text, max(0, match.start() - _TAG_CHARACTERS), match.start()):
            return match[1]
        return "{{ " + LINE_END + " }}" + match[1]

    return _BLOCK_END.sub(ended, text)


def check_blocks(sources: Sequence[Source]) -> None:
    """Refuse what Jinja2 leaves out without a word: blocks that no parent has, text outside.

    Raises:
        InputError: names the file and the line.
    """
    if not sources or sources[-1].extends:
        return  # what the last one extends is not known
    for index, source in enumerate(sources[:-1]):
        parents = sources[index + 1 :]
        known = {name for parent in parents for name in (*parent.blocks, *parent.inner)}
        for name, line in source.blocks.items():
            if name in known:
                continue
            near = nearest(name, known)
            raise InputError(
                f"{source.file}:{line}: there is no block {name!r} in what this template extends, "
                f"{' and '.join(parent.file for parent in parents)}: it would be left out",
                field="templates",
                hint=f"did you mean {near!r}?"
                if near
                else f"the blocks there are {', '.join(sorted(known))}",
            )
        if source.stray:
            raise InputError(
                f"{source.file}:{source.stray}: text outside of the blocks would be left out",
                field="templates",
                hint="write it into a block, such as {% block user %}…{% endblock %}",
            )


def starts_something(script: str) -> bool:
    """Say whether the lines of the block `ranks` start anything in the background.

    A script that does not say where that block begins and ends, because its base is of the user's
    own, gets the benefit of the doubt.
    """
    lines = script.split("\n")
    if _BEFORE_RANKS not in lines or _AFTER_RANKS not in lines:
        return True
    begin = lines.index(_BEFORE_RANKS)
    text = "\n".join(lines[begin + 1 : lines.index(_AFTER_RANKS, begin)])
    return _BACKGROUND.search(_NO_CODE.sub(" ", text)) is not None


def _outer_blocks(node: nodes.Node) -> Iterator[nodes.Block]:
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.Block):
            yield child
        else:
            yield from _outer_blocks(child)


def _stray(tree: nodes.Template) -> int:
    """Return the line of text outside of blocks that a child's parent never shows; 0: none."""
    for node in tree.body:
        if isinstance(node, nodes.Include):
            return node.lineno
        if not isinstance(node, nodes.Output):
            continue
        line = node.lineno
        for part in node.nodes:
            if not isinstance(part, nodes.TemplateData):
                return part.lineno
            blank = part.data[: len(part.data) - len(part.data.lstrip())]
            if len(blank) < len(part.data):
                return line + blank.count("\n")
            line += part.data.count("\n")
    return 0
