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

__all__ = ["ASSIGNMENT", "Command", "Statement", "array_words", "split_script", "word_parts"]

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?=)(.*)", re.ASCII | re.DOTALL)

_KEYWORDS = frozenset("if then elif else while until do done fi esac ! { } in".split())
_CLOSERS = {"if": "fi", "case": "esac", "{": "}", "(": ")"}
_CLOSERS |= dict.fromkeys(("for", "while", "until", "select"), "done")
_BEFORE_COMMAND = frozenset("do then else elif if while until ! time {".split())
_MAX_NESTING = 30

_BLANK = re.compile(r"(?:[ \t\r]|\\\n)+")
_COMMENT = re.compile(r"#[^\n]*")
_REDIRECT = re.compile(r"(?:\d*(?:<<<|<<-?|>>|>\||<>|[<>]&|[<>](?!\())|&>>?)[ \t]*")
_OPERATOR = re.compile(r"&&|\|\||\|&|;;&|;;|;&|[|;&()]")
_BLANK_AFTER_BACKSLASH = re.compile(r"\\[ \t]+(?=\n)")
_VARIABLE = re.compile(r"\$(?:\w+|[@*#?$!-])", re.ASCII)
_EXPANSION = re.compile(r"\$[\w@*#?$!({-]|`", re.ASCII)


class _OpenError(ValueError):
    """A quote or an expansion is not closed, or too many are in each other."""


def _skip(text: str, at: int, *, quoted: bool = False, depth: int = 0) -> int:
    """Return where the quote, the expansion or the single character that starts at `at` ends."""
    two, inside = text[at : at + 2], depth + 1
    if two[0] == "\\":
        return at + 2
    if two[0] == '"':
        return _until(text, at + 1, '"', quoted=True, depth=inside)
    if two[0] in "'`" and not (quoted and two[0] == "'"):
        return _until(text, at + 1, two[0], quoted=quoted, depth=inside)
    if two == "$'" and not quoted:
        return _until(text, at + 2, "$'", quoted=quoted, depth=inside)
    if two == "${":
        return _until(text, at + 2, "}", quoted=quoted, depth=inside)
    if two == "$(" or (two in ("<(", ">(") and not quoted):
        return _until(text, at + 2, ")", quoted=False, depth=inside)
    match = _VARIABLE.match(text, at)
    return match.end() if match else at + 1


def _until(text: str, at: int, close: str, *, quoted: bool, depth: int) -> int:
    """Return the position behind the next `close` that belongs to what is open."""
    while at < len(text) and depth <= _MAX_NESTING:
        letter = text[at]
        if letter == close[-1]:
            return at + 1
        if close == "'":
            at += 1
        elif close in ("`", "$'"):
            at += 2 if letter == "\\" else 1
        elif close == ")" and letter == "(":
            at = _until(text, at + 1, ")", quoted=False, depth=depth + 1)
        elif close == ")" and letter == "#" and text[at - 1] in " \t\n":
            at = text.find("\n", at) % (len(text) + 1)
        else:
            at = _skip(text, at, quoted=quoted, depth=depth)
    raise _OpenError


def _word_end(text: str, start: int) -> int:
    """Return where the word that starts at `start` ends; `start` itself if there is none."""
    at = start
    while at < len(text):
        if text[at] == "(" and re.fullmatch(r"\w+\+?=", text[start:at]):
            at = _until(text, at + 1, ")", quoted=False, depth=1)
        elif text[at : at + 2] in ("<(", ">(") or text[at] not in " \t\r\n;&|<>()":
            if _BLANK_AFTER_BACKSLASH.match(text, at):
                break
            at = _skip(text, at)
        else:
            break
    return min(at, len(text))


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
            try:
                position = self._token(position)
            except _OpenError:
                raise self._error(position, "a quote or parenthesis is not closed") from None
        if self.open or self.awaits_body:
            missing = f"`{self.open[-1]}`" if self.open else "the body of a function"
            raise self._error(self.tokens[0][2], f"{missing} is missing")
        self._end(len(self.text))
        return self.statements

    def _token(self, at: int) -> int:
        """Read a token; return where the next one starts."""
        text = self.text
        after_for = bool(self.tokens) and self.tokens[-1][1] == "for"
        if match := _BLANK.match(text, at) or _COMMENT.match(text, at):
            return match.end()
        if text[at] == "\n":
            return self._newline(at + 1)
        if text.startswith("((", at) and (self.command or after_for):
            end = _until(text, at + 1, ")", quoted=False, depth=1)
            self._word(text[at:end], at)
            return end
        if match := _REDIRECT.match(text, at):
            end = _word_end(text, match.end())
            if heredoc := re.match(r"\d*<<(-?)(?!<)", match[0]):
                word = re.sub(r"[\\'\"]", "", text[match.end() : end])
                self.documents.append((word, bool(heredoc[1])))
            self.tokens.append(("redirect", text[at:end], at))
            return end
        if match := _OPERATOR.match(text, at):
            self._operator(match[0], at)
            return match.end()
        end = _word_end(text, at)
        if _BLANK_AFTER_BACKSLASH.match(text, end):
            problem = f"line {self._line(end)}: a blank behind the \\ at the end of the line"
            hint = "remove the blank: for bash the command ends here, and the next line is another"
            raise InputError(problem, hint=hint)
        self._word(text[at:end], at)
        return end

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
                source = self.text[first:end].rstrip()
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


def array_words(source: str) -> list[str]:
    """Return the words between the parentheses of an array's value."""
    inner, at, words = source[1:-1], 0, []
    while at < len(inner):
        if match := _BLANK.match(inner, at) or _COMMENT.match(inner, at):
            at = match.end()
            continue
        end = max(_word_end(inner, at), at + 1)
        words.append(inner[at:end])
        at = end
    return [word for word in words if word != "\n"]


def word_parts(source: str) -> Iterator[tuple[bool, str, bool]]:
    """Yield the parts of a word: whether it is an expansion, its text, whether it is quoted."""
    at, quoted = 0, False
    while at < len(source):
        letter = source[at]
        end = at + 1 if letter == '"' else _skip(source, at, quoted=quoted)
        part, at = source[at:end], end
        if letter == '"':
            quoted = not quoted
            yield False, "", True
        elif letter == "\\" and part != "\\\n":
            keeps = quoted and part[1:] not in ("$", "`", '"', "\\")
            yield False, part if keeps else part[1:], True
        elif letter == "'" and len(part) > 1:
            yield False, part[1:-1], True
        elif letter != "\\":
            yield bool(_EXPANSION.match(part)) or part.startswith(("$'", "<(", ">(")), part, quoted
