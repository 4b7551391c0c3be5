"""Read the words of a shell script: quotes, expansions, here-documents. Nothing is run."""

from __future__ import annotations

import bisect
import re

from hpml_orchestrator.convert.syntax import Dynamic, Literal, Parameter, Part, Redirect, Word

__all__ = ["Lexer", "ShellError"]

_MAX_DEPTH = 40
_BLANKS = " \t"
_META = " \t\n;&|<>()"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SPECIAL = re.compile(r"[0-9@*#?$!-]")
_PARAMETER = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[@*#?$!-])(?P<rest>.*)", re.DOTALL)
_OPERATOR = re.compile(r"\[[@*]\]|:?[-=?+]")
_REDIRECT = re.compile(r"(?:\d+|\{\w+\})?(<<<|<<-|<<|<>|>>|>\||>&|<&|&>>|&>|<|>)")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|([0-7]{1,3})|(.))", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "f": "\f"}


class ShellError(ValueError):
    """The text is no shell script that bash would take.

    Attributes:
        line: where, from 1.
    """

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


class Lexer:
    """A position in a script, and what can be read from there.

    Args:
        text: the script.
        first_line: number of its first line, for messages.
    """

    def __init__(self, text: str, first_line: int = 1) -> None:
        self.text = text
        self.position = 0
        self._first = first_line
        self._breaks = [match.start() for match in re.finditer("\n", text)]
        self._documents: list[tuple[str, bool, list[str]]] = []  # end word, strip tabs, body
        self._depth = 0

    def line(self, position: int | None = None) -> int:
        """Return the number of the line of a position, of the current one by default."""
        here = self.position if position is None else position
        return self._first + bisect.bisect_left(self._breaks, here)

    def peek(self, text: str) -> bool:
        """Whether that text comes next."""
        return self.text.startswith(text, self.position)

    @property
    def over(self) -> bool:
        """Whether all is read."""
        return self.position >= len(self.text)

    def skip_blanks(self) -> None:
        """Pass over blanks, joined lines and a comment."""
        text = self.text
        while self.position < len(text):
            if text[self.position] in _BLANKS:
                self.position += 1
            elif text.startswith("\\\n", self.position):
                self.position += 2
            elif text[self.position] == "#":
                end = text.find("\n", self.position)
                self.position = len(text) if end < 0 else end
            else:
                return

    def newline(self) -> None:
        """Pass over a line's end and the here-documents that were announced on that line."""
        self.position += 1
        for end_word, strip, body in self._documents:
            lines: list[str] = []
            while True:
                if self.over:
                    break  # bash warns and takes the rest, too
                end = self.text.find("\n", self.position)
                end = len(self.text) if end < 0 else end
                one = self.text[self.position : end]
                self.position = end + 1
                if strip:
                    one = one.lstrip("\t")
                if one == end_word:
                    break
                lines.append(f"{one}\n")
            body.append("".join(lines))
        self._documents.clear()

    def redirect(self) -> Redirect | None:
        """Return a redirection if one comes next; a here-document is read with its line's end."""
        match = _REDIRECT.match(self.text, self.position)
        if match is None or self.text.startswith(("<(", ">("), self.position):
            return None
        operator = match[1]
        self.position = match.end()
        self.skip_blanks()
        target = self.word()
        if target is None:
            raise ShellError(self.line(), f"nothing follows {operator}")
        found = Redirect(operator, target)
        if operator in ("<<", "<<-"):
            plain = re.sub(r"[\"'\\]", "", target.source)
            self._documents.append((plain, operator == "<<-", found.document))
        return found

    def word(self) -> Word | None:  # noqa: C901, PLR0912 - one branch per kind of character
        """Return the next word; None where none begins here."""
        start = self.position
        parts: list[Part] = []
        text = self.text
        while self.position < len(text):
            character = text[self.position]
            if text.startswith(("<(", ">("), self.position):
                parts.append(self._enclosed("process", self.position, 2, ")", quoted=False))
            elif character in _META:
                break
            elif character == "'":
                parts.append(Literal(self._single(), quoted=True))
            elif character == '"':
                parts += self._double()
            elif text.startswith("$'", self.position):
                parts.append(Literal(self._ansi(), quoted=True))
            elif text.startswith('$"', self.position):
                self.position += 1
            elif character == "\\":
                if not text.startswith("\\\n", self.position):
                    parts.append(Literal(text[self.position + 1 : self.position + 2], quoted=True))
                self.position += 2
            elif character in "$`":
                parts.append(self._expansion(quoted=False))
            else:
                end = self.position + 1
                while end < len(text) and text[end] not in "'\"\\$` \t\n;&|<>()":
                    end += 1
                parts.append(Literal(text[self.position : end]))
                self.position = end
        self.position = min(self.position, len(text))
        if self.position == start:
            return None
        return Word(tuple(parts), text[start : self.position], self.line(start))

    def _single(self) -> str:
        start = self.position + 1
        end = self.text.find("'", start)
        if end < 0:
            raise ShellError(self.line(), "a ' is not closed")
        self.position = end + 1
        return self.text[start:end]

    def _ansi(self) -> str:
        start = self.position
        end = start + 2
        while end < len(self.text) and self.text[end] != "'":
            end += 2 if self.text[end] == "\\" else 1
        if end >= len(self.text):
            raise ShellError(self.line(), "a $' is not closed")
        self.position = end + 1

        def one(match: re.Match[str]) -> str:
            if match[1] or match[2]:
                return chr(int(match[1] or match[2], 16))
            if match[3]:
                return chr(int(match[3], 8))
            return _ESCAPES.get(match[4], match[4] if match[4] in "\\'\"?" else f"\\{match[4]}")

        return _ESCAPE.sub(one, self.text[start + 2 : end])

    def _double(self) -> list[Part]:
        opened = self.position
        self.position += 1
        parts: list[Part] = []
        while not self.over:
            character = self.text[self.position]
            if character == '"':
                self.position += 1
                return parts or [Literal("", quoted=True)]
            if character == "\\":
                following = self.text[self.position + 1 : self.position + 2]
                if following in ("$", "`", '"', "\\"):
                    parts.append(Literal(following, quoted=True))
                elif following != "\n":
                    parts.append(Literal(f"\\{following}", quoted=True))
                self.position += 2
            elif character in "$`":
                parts.append(self._expansion(quoted=True))
            else:
                end = self.position + 1
                while end < len(self.text) and self.text[end] not in '"\\$`':
                    end += 1
                parts.append(Literal(self.text[self.position : end], quoted=True))
                self.position = end
        raise ShellError(self.line(opened), 'a " is not closed')

    def _expansion(self, *, quoted: bool) -> Part:
        start = self.position
        text = self.text
        if text[start] == "`":
            return self._backticks(quoted=quoted)
        if text.startswith("$((", start):
            return self._enclosed("arithmetic", start, 3, "))", quoted=quoted)
        if text.startswith("$(", start):
            return self._enclosed("command", start, 2, ")", quoted=quoted)
        if text.startswith("${", start):
            inner = self._enclosed("parameter", start, 2, "}", quoted=quoted)
            return _parameter(inner, self.line(start))
        match = _NAME.match(text, start + 1) or _SPECIAL.match(text, start + 1)
        if match is None:
            self.position = start + 1
            return Literal("$", quoted=quoted)
        self.position = match.end()
        return Parameter(match[0], text[start : match.end()], quoted=quoted)

    def _backticks(self, *, quoted: bool) -> Dynamic:
        start = self.position
        end = start + 1
        while end < len(self.text) and self.text[end] != "`":
            end += 2 if self.text[end] == "\\" else 1
        if end >= len(self.text):
            raise ShellError(self.line(start), "a ` is not closed")
        self.position = end + 1
        inner = re.sub(r"\\([$`\\])", r"\1", self.text[start + 1 : end])
        return Dynamic("command", inner, self.text[start : end + 1], quoted=quoted)

    def _enclosed(self, kind: str, start: int, skip: int, close: str, *, quoted: bool) -> Dynamic:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ShellError(self.line(start), "quotes and parentheses are nested too deeply")
        self.position = start + skip
        self._to_end(kind, start, close)
        self._depth -= 1
        inner = self.text[start + skip : self.position]
        self.position += len(close)
        return Dynamic(kind, inner, self.text[start : self.position], quoted=quoted)

    def _to_end(self, kind: str, start: int, close: str) -> None:
        """Go to what closes an expansion; quotes, inner expansions and comments are passed over."""
        text = self.text
        opens, closes = ("{", "}") if kind == "parameter" else ("(", ")")
        level = 0
        while self.position < len(text):
            character = text[self.position]
            if level == 0 and text.startswith(close, self.position):
                return
            if character == "\\":
                self.position += 2
            elif character == "'" and kind != "arithmetic":
                self._single()
            elif character == '"':
                self._double()
            elif character == "`" or text.startswith(("$(", "${"), self.position):
                self._expansion(quoted=False)
            elif (
                character == "#"
                and kind in ("command", "process")
                and text[self.position - 1] in _META
            ):
                end = text.find("\n", self.position)
                self.position = len(text) if end < 0 else end
            else:
                level += (character == opens) - (character == closes)
                if level < 0:
                    break
                self.position += 1
        raise ShellError(self.line(start), f"a {text[start : start + 3].strip()} is not closed")


def _parameter(inner: Dynamic, line: int) -> Parameter:
    content = inner.text
    length = content.startswith("#") and len(content) > 1
    match = _PARAMETER.fullmatch(content[1:] if length or content.startswith("!") else content)
    if match is None:
        raise ShellError(line, f"{inner.source} is no variable")
    rest = match["rest"]
    if length or content.startswith("!"):
        return Parameter(
            match["name"], inner.source, operator=content[0], argument=rest, quoted=inner.quoted
        )
    operator = _OPERATOR.match(rest)
    if operator is None:
        return Parameter(
            match["name"], inner.source, operator=rest[:1], argument=rest[1:], quoted=inner.quoted
        )
    return Parameter(
        match["name"],
        inner.source,
        operator=operator[0],
        argument=rest[operator.end() :],
        quoted=inner.quoted,
    )
