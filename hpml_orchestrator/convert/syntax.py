"""The parts of a shell script: words, commands and what joins them, as plain frozen records."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = [
    "Assignment",
    "Branches",
    "Command",
    "Dynamic",
    "Function",
    "Item",
    "Literal",
    "Loop",
    "Node",
    "Opaque",
    "Parameter",
    "Part",
    "Pipeline",
    "Redirect",
    "Script",
    "Word",
]


@dataclass(frozen=True)
class Literal:
    """Text that stands for itself; unquoted text may still be a pattern or begin with `~`."""

    text: str
    quoted: bool = False


@dataclass(frozen=True)
class Parameter:
    """`$NAME`, `${NAME}` or `${NAME:-word}`.

    Attributes:
        name: of the variable; digits and `@ * # ? $ ! -` are those of the shell.
        operator: what follows the name inside the braces up to its word: `:-`, `[@]`, `` …
        argument: the word behind the operator, as written.
        source: as written.
    """

    name: str
    source: str
    operator: str = ""
    argument: str = ""
    quoted: bool = False


@dataclass(frozen=True)
class Dynamic:
    """`$(…)`, backticks, `$((…))` or `<(…)`: what is known when the script runs.

    Attributes:
        kind: `command`, `arithmetic` or `process`.
        text: what is inside.
        source: as written.
    """

    kind: str
    text: str
    source: str
    quoted: bool = False


Part = Literal | Parameter | Dynamic


@dataclass(frozen=True)
class Word:
    """One word: its parts, as written, and the line it begins on."""

    parts: tuple[Part, ...]
    source: str
    line: int

    @property
    def literal(self) -> str | None:
        """The text where nothing has to be expanded, else None."""
        texts = [part.text for part in self.parts if isinstance(part, Literal)]
        return "".join(texts) if len(texts) == len(self.parts) else None


@dataclass(frozen=True)
class Assignment:
    """`NAME=word`, `NAME+=word` or `NAME=(words)`."""

    name: str
    words: tuple[Word, ...]
    source: str
    line: int
    append: bool = False
    array: bool = False


@dataclass(frozen=True)
class Redirect:
    """`>file`, `2>&1`, `<<EOF`.

    Attributes:
        operator: `<`, `>`, `>>`, `<<`, `<<<`, `>&`, `&>` …
        target: the file, or the here-document's end word.
        document: the text of a here-document, in one piece; it is read after the redirection.
    """

    operator: str
    target: Word
    document: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Command:
    """A simple command: assignments, words, redirections."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    redirects: tuple[Redirect, ...]
    source: str
    line: int


@dataclass(frozen=True)
class Script:
    """A list of commands: a script, a `{ group; }` or a `( subshell )`."""

    items: tuple[Item, ...]
    line: int = 1
    subshell: bool = False


@dataclass(frozen=True)
class Branches:
    """`if`, `case`: one of several lists is run."""

    keyword: str
    conditions: tuple[Script, ...]
    bodies: tuple[Script, ...]
    source: str
    line: int


@dataclass(frozen=True)
class Loop:
    """`for`, `while`, `until`, `select`.

    Attributes:
        variable: of `for NAME in …`, else empty.
        words: what `for` goes through; None where it is not a plain list.
    """

    keyword: str
    variable: str
    words: tuple[Word, ...] | None
    body: Script
    source: str
    line: int


@dataclass(frozen=True)
class Function:
    """`name() { …; }`."""

    name: str
    body: Node
    line: int


@dataclass(frozen=True)
class Opaque:
    """`[[ … ]]`, `(( … ))`: a test or a computation, as written."""

    source: str
    line: int


Node = Command | Script | Branches | Loop | Function | Opaque


@dataclass(frozen=True)
class Pipeline:
    """Commands joined by `|`."""

    nodes: tuple[Node, ...]
    source: str
    line: int


@dataclass(frozen=True)
class Item:
    """A pipeline of a list, and what joins it to the one before.

    Attributes:
        join: `;` for one that is always run, `&&` or `||` for one that depends on the last.
        background: whether an `&` follows.
    """

    pipeline: Pipeline
    join: str = ";"
    background: bool = False
