"""Split a batch script into statements and simple commands, and words into their parts.

Compound commands and here-documents stay whole. The reader finds where a command ends; it evaluates
nothing.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ASSIGNMENT", "TOKEN", "Command", "Statement", "split_script", "word_parts"]

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?=)(.*)", re.ASCII | re.DOTALL)

_KEYWORDS = frozenset("if then elif else while until do done fi esac ! { } in".split())
_CLOSERS = {"if": "fi", "case": "esac", "{": "}", "(": ")"}
_CLOSERS |= dict.fromkeys(("for", "while", "until", "select"), "done")
_BEFORE_COMMAND = frozenset("do then else elif if while until ! time {".split())
_MAX_NESTING = 4  # of $( … ) in each other

# No two alternatives of the patterns below begin alike, so that text with an open quote is refused
# in linear time; possessive quantifiers, which would do the same, loop for ever in Python 3.11.2.
_BARE = r"\$(?![({{\w@*#?$!{}-])"
_DOLLAR, _DOLLAR_IN_QUOTES = _BARE.format("'"), _BARE.format("")


def _expansion(depth: int) -> str:
    """Return the pattern of `$NAME`, `${…}`, `$(…)` and backquotes."""
    parentheses = rf"|\((?:{_parentheses(depth - 1)})*\)" if depth else ""
    return (
        r"`(?:[^`\\]|\\.)*`|\$(?:\w+(?!\w)|[@*#?$!-]|'(?:[^'\\]|\\.)*'"
        rf"|\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}}{parentheses})"
    )


def _double(depth: int) -> str:
    return rf'"(?:[^"\\$`]|\\.|(?!\$\'){_expansion(depth)}|{_DOLLAR_IN_QUOTES})*"'


def _parentheses(depth: int) -> str:
    inner = rf"|{_expansion(depth)}|{_double(depth)}" if depth > 0 else ""
    nested = rf"|\((?:{_parentheses(depth - 1)})*\)" if depth > 0 else ""
    return rf"[^()'\"\\$`]|\\.|'[^']*'{inner}{nested}|{_DOLLAR}"


_PARENTHESES = rf"\((?:{_parentheses(_MAX_NESTING)})*\)"
_WORD = (
    rf"(?:[^ \t\r\n;&|<>()'\"\\$`]|\\.|'[^']*'|{_double(_MAX_NESTING)}|{_expansion(_MAX_NESTING)}"
    rf"|{_DOLLAR}|(?<==){_PARENTHESES}|[<>]{_PARENTHESES})+"
)
TOKEN = re.compile(
    rf"""(?P<blank>[ \t\r]+|\\\n)|(?P<comment>\#[^\n]*)|(?P<newline>\n)
    |(?P<redirect>(?:\d*(?:<<<|<<-?|>>|>\||<>|[<>]&|[<>](?!\())|&>>?)[ \t]*(?P<target>{_WORD})?)
    |(?P<operator>&&|\|\||\|&|;;&|;;|;&|[|;&()])|(?P<word>{_WORD})""".replace("\n    ", ""),
    re.DOTALL | re.ASCII,
)
_ARITHMETIC = re.compile(rf"\({_PARENTHESES}\)", re.DOTALL)
_PARTS = re.compile(rf"\\(.)|'([^']*)'|({_expansion(_MAX_NESTING)})|[^\\'\"$`]+|.", re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A simple command of a statement; words and redirections are as written.

    Attributes:
        operator: what stands before it: `&&`, `||`, `|`, …; empty for the first command.
        line: where it starts, from 1.
        source: as written, without here-documents.
    """

    operator: str
    line: int
    source: str
    words: tuple[str, ...]
    redirects: tuple[str, ...]


@dataclass(frozen=True)
class Statement:
    """Commands joined by `&&`, `||` and `|`, or a compound command as a whole.

    Attributes:
        line: where it starts, from 1.
        source: as written, here-documents and a final `&` included.
        commands: its simple commands, those inside of compound commands included.
        block: keyword that starts the first compound command in it; empty for simple commands.
        background: whether `&` ends it.
    """

    line: int
    source: str
    commands: tuple[Command, ...]
    block: str = ""
    background: bool = False


class _Splitter:
    """One pass over a script; `tokens` are kind, text and position of the statement so far."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = [match.end() for match in re.finditer("\n", text)]
        self.statements: list[Statement] = []
        self.documents: list[tuple[str, bool]] = []  # here-documents to come: end, strip tabs
        self._reset()

    def _reset(self) -> None:
        self.tokens: list[tuple[str, str, int]] = []
        self.open: list[str] = []
        self.block = ""
        self.awaits_body = False  # of a function
        self.command = True  # whether a command word may stand here

    def _line(self, position: int) -> int:
        return bisect_right(self.lines, position) + 1

    def _error(self, position: int, message: str) -> InputError:
        hint = "`bash -n SCRIPT` checks the syntax"
        return InputError(f"line {self._line(position)}: {message}", hint=hint)

    def run(self) -> list[Statement]:
        position = 0
        while position < len(self.text):
            match = TOKEN.match(self.text, position)
            after_for = bool(self.tokens) and self.tokens[-1][1] == "for"
            if self.text.startswith("((", position) and (self.command or after_for):
                match = _ARITHMETIC.match(self.text, position)
            if match is None:
                raise self._error(position, "a quote or parenthesis is not closed")
            position = self._take(match.lastgroup or "word", match)
        if self.open or self.awaits_body:
            missing = f"`{self.open[-1]}`" if self.open else "the body of a function"
            raise self._error(self.tokens[0][2], f"{missing} is missing")
        self._end(len(self.text))
        return self.statements

    def _take(self, kind: str, match: re.Match[str]) -> int:
        """Read a token; return where the next one starts."""
        if kind == "newline":
            return self._newline(match.end())
        if kind == "operator":
            self._operator(match[0], match.start())
        elif kind in ("redirect", "target"):
            if heredoc := re.match(r"\d*<<(-?)(?!<)", match[0]):
                word = re.sub(r"[\\'\"]", "", match["target"] or "")
                self.documents.append((word, bool(heredoc[1])))
            self.tokens.append(("redirect", match[0], match.start()))
        elif kind == "word":
            self._word(match[0], match.start())
        return match.end()

    def _newline(self, end: int) -> int:
        start = end
        for delimiter, tabs in self.documents:
            row = ""
            while end < len(self.text) and (row.lstrip("\t") if tabs else row) != delimiter:
                stop = self.text.find("\n", end)
                row = self.text[end : stop if stop >= 0 else None]
                end = stop + 1 if stop >= 0 else len(self.text)
        self.documents.clear()
        last = self.tokens[-1][1] if self.tokens else ""
        if self.open or self.awaits_body or last in ("&&", "||", "|", "|&"):
            self.tokens.append(("operator", "\n", start - 1))
            self.command = True
        else:
            self._end(end)
        return end

    def _operator(self, operator: str, start: int) -> None:
        if operator in (";", "&") and not self.open and not self.documents:
            if not self.tokens:
                raise self._error(start, f"unexpected {operator}")
            self._end(start, background=operator == "&")
            return
        function = operator == "(" and re.match(r"\s*\)", self.text[start + 1 : start + 9])
        if function and self.tokens and self.tokens[-1][0] == "word":
            self.block = self.block or "function"
            self.awaits_body = True
            self.open.append(")")
        elif operator == "(":
            self._begin("(")
        elif operator == ")" and self.open[-1:] == [")"]:
            self.open.pop()
        elif operator == ")" and "esac" not in self.open:
            raise self._error(start, "unexpected )")
        self.tokens.append(("operator", operator, start))
        self.command = operator != ")" or self.awaits_body or "esac" in self.open

    def _begin(self, keyword: str) -> None:
        self.block = self.block or keyword
        self.awaits_body = False
        self.open.append(_CLOSERS[keyword])

    def _word(self, word: str, start: int) -> None:
        if self.command and self.open[-1:] == [word]:
            self.open.pop()
            self.command = False
        elif self.command and word in _CLOSERS:
            self._begin(word)
            self.command = word in _BEFORE_COMMAND
        elif self.command and word == "function":
            self.block = self.block or word
            self.awaits_body = True
        else:
            named = self.awaits_body and self.tokens[-1][1] == "function"
            before = word in _BEFORE_COMMAND or named or ASSIGNMENT.match(word) is not None
            self.command = self.command and before
        self.tokens.append(("word", word, start))

    def _end(self, end: int, *, background: bool = False) -> None:
        if self.tokens:
            start = self.tokens[0][2]
            source = self.text[start:end].rstrip(" \t\r\n") + " &" * background
            commands = tuple(self._commands())
            self.statements.append(
                Statement(self._line(start), source, commands, self.block, background)
            )
        self._reset()

    def _commands(self) -> Iterator[Command]:
        """Yield the simple commands of the statement so far."""
        operator = ""
        command: list[tuple[str, str, int]] = []
        for kind, text, start in [*self.tokens, ("operator", "", len(self.text))]:
            if kind != "operator":
                if command or text not in _KEYWORDS:
                    command.append((kind, text, start))
                continue
            if command:
                first, end = command[0][2], command[-1][2] + len(command[-1][1])
                words, redirects = (
                    tuple(text for kind, text, _ in command if kind == wanted)
                    for wanted in ("word", "redirect")
                )
                source = self.text[first:end]
                yield Command(operator, self._line(first), source, words, redirects)
            if command or text != "\n":  # a line may end behind `&&`
                operator = text
            command = []


def split_script(text: str) -> list[Statement]:
    """Return the statements of a script in order.

    Raises:
        InputError: a quote, a parenthesis or a compound command is not closed.
    """
    return _Splitter(text).run()


def word_parts(source: str) -> Iterator[tuple[bool, str, bool]]:
    """Yield the parts of a word: whether it is an expansion, its text, whether it is quoted."""
    position, quoted = 0, False
    while position < len(source):
        match = _PARTS.match(source, position)
        assert match is not None  # noqa: S101 - the last alternative matches any character
        escaped, single, expansion = match.groups()
        position = match.end()
        if match[0] == '"':
            quoted = not quoted
            yield False, "", True
        elif escaped is not None:
            keeps = quoted and escaped not in '$`"\\'
            if escaped != "\n":
                yield False, match[0] if keeps else escaped, True
        elif quoted and match[0].startswith(("'", "$'")):
            position = match.start() + match[0].index("'") + 1
            yield False, source[match.start() : position], True
        elif single is not None:
            yield False, single, True
        else:
            yield expansion is not None, match[0], quoted
