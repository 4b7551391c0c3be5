"""From the text of a shell script to its commands: bash's grammar as far as batch scripts use it.

    script   = (pipeline (";" | "&" | "&&" | "||" | newline))*
    pipeline = ["!"] node ("|" node)*
    node     = command | if | for | while | until | case | { script } | ( script ) | name() node
             | [[ … ]] | (( … ))

Words are read by `lexer`. What is inside `$(…)` is kept as text and parsed where it matters.
"""

from __future__ import annotations

import re

from hpml_orchestrator.convert.lexer import Lexer, ShellError
from hpml_orchestrator.convert.syntax import (
    Assignment,
    Branches,
    Command,
    Function,
    Item,
    Literal,
    Loop,
    Node,
    Opaque,
    Pipeline,
    Redirect,
    Script,
    Word,
)

__all__ = ["parse"]

_MAX_DEPTH = 40
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\[[^\]\s]*\])?(\+?)=")
_FUNCTION = re.compile(r"[A-Za-z_][\w.:-]*")
_DECLARES = frozenset("export declare typeset local readonly".split())
_ENDS = frozenset("then else elif fi do done esac } in".split())


def parse(text: str, first_line: int = 1) -> Script:
    """Return the commands of a script.

    Args:
        text: the script; nothing of it is run.
        first_line: number of its first line, for messages.

    Raises:
        ShellError: bash would refuse it, or it is nested over 40 levels deep.
    """
    parser = _Parser(Lexer(text, first_line))
    script = parser.script(frozenset())
    if not parser.lexer.over:
        raise parser.unexpected()
    return script


class _Parser:
    def __init__(self, lexer: Lexer) -> None:
        self.lexer = lexer
        self.depth = 0

    def unexpected(self) -> ShellError:
        rest = self.lexer.text[self.lexer.position :].split("\n", 1)[0]
        what = f"`{rest[:40]}` is not expected here" if rest.strip() else "something is missing"
        return ShellError(self.lexer.line(), what)

    def script(self, ends: frozenset[str]) -> Script:
        """Read a list up to one of the words that end it, or a closing parenthesis."""
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise ShellError(self.lexer.line(), "commands are nested too deeply")
        line = self.lexer.line()
        items: list[Item] = []
        join = ";"
        while True:
            self.gap()
            if self.lexer.over or self.lexer.peek(")") or self.keyword() in ends:
                break
            if self.lexer.peek(";;") or self.lexer.peek(";&"):
                break
            pipeline = self.pipeline()
            following, background = self.joint()
            items.append(Item(pipeline, join, background))
            join = following
        self.depth -= 1
        return Script(tuple(items), line)

    def gap(self) -> None:
        """Pass over blanks, comments and empty lines."""
        while True:
            self.lexer.skip_blanks()
            if not self.lexer.peek("\n"):
                return
            self.lexer.newline()

    def joint(self) -> tuple[str, bool]:
        """Read what stands behind a pipeline: how the next one is joined, and an `&`."""
        lexer = self.lexer
        lexer.skip_blanks()
        for join in ("&&", "||"):
            if lexer.peek(join):
                lexer.position += 2
                return join, False
        if lexer.peek(";;") or lexer.peek(";&"):
            return ";", False
        if lexer.peek("&"):
            lexer.position += 1
            return ";", True
        if lexer.peek(";"):
            lexer.position += 1
        elif not (lexer.over or lexer.peek("\n") or lexer.peek(")")):
            raise self.unexpected()
        return ";", False

    def keyword(self) -> str:
        """Return the bare word that comes next; empty where something else does."""
        match = re.compile(r"[^\s;&|<>()'\"\\$`]+").match(self.lexer.text, self.lexer.position)
        if match is None:
            return ""
        after = self.lexer.text[match.end() : match.end() + 1]
        return "" if after and after in "'\"\\$`" else match[0]

    def take(self, word: str) -> None:
        """Read a word of the grammar."""
        self.gap()
        if self.keyword() != word:
            raise ShellError(self.lexer.line(), f"`{word}` is missing")
        self.lexer.position += len(word)

    def pipeline(self) -> Pipeline:
        lexer = self.lexer
        start, line = lexer.position, lexer.line()
        nodes: list[Node] = []
        while True:
            self.gap()
            while self.keyword() in ("!", "time"):
                lexer.position += len(self.keyword())
                lexer.skip_blanks()
                for option in ("-p ", "-- "):
                    if lexer.peek(option):
                        lexer.position += len(option)
                        lexer.skip_blanks()
            nodes.append(self.node())
            lexer.skip_blanks()
            end = lexer.position
            if lexer.peek("||") or not lexer.peek("|"):
                return Pipeline(tuple(nodes), lexer.text[start:end].rstrip(), line)
            lexer.position += 2 if lexer.peek("|&") else 1

    def node(self) -> Node:  # noqa: C901 - one branch per kind of command
        lexer = self.lexer
        start, line = lexer.position, lexer.line()
        word = self.keyword()
        if lexer.peek("(("):
            return self.opaque("((", "))")
        if lexer.peek("("):
            lexer.position += 1
            body = self.script(frozenset())
            if not lexer.peek(")"):
                raise ShellError(line, "a ( is not closed")
            lexer.position += 1
            self.redirects()
            return Script(body.items, body.line, subshell=True)
        if word == "[[":
            return self.opaque("[[", "]]")
        if word == "{":
            lexer.position += 1
            body = self.script(frozenset("}"))
            self.take("}")
            self.redirects()
            return body
        if word == "if":
            return self.condition(start, line)
        if word in ("for", "select"):
            return self.counted(word, start, line)
        if word in ("while", "until"):
            lexer.position += len(word)
            self.script(frozenset({"do"}))
            return self.loop(word, "", None, start, line)
        if word == "case":
            return self.case(start, line)
        if word in _ENDS:
            raise ShellError(line, f"`{word}` has no beginning")
        return self.function(word, line) or self.command()

    def redirects(self) -> list[Redirect]:
        found: list[Redirect] = []
        while True:
            self.lexer.skip_blanks()
            one = self.lexer.redirect()
            if one is None:
                return found
            found.append(one)

    def opaque(self, opens: str, closes: str) -> Opaque:
        lexer = self.lexer
        start, line = lexer.position, lexer.line()
        lexer.position += len(opens)
        while not lexer.over:
            if lexer.peek(closes):
                lexer.position += len(closes)
                self.redirects()
                return Opaque(lexer.text[start : lexer.position], line)
            if lexer.word() is None:
                lexer.position += 1
        raise ShellError(line, f"a {opens} is not closed")

    def condition(self, start: int, line: int) -> Branches:
        conditions: list[Script] = []
        bodies: list[Script] = []
        word = "if"
        while word in ("if", "elif"):
            self.lexer.position += len(word)
            conditions.append(self.script(frozenset({"then"})))
            self.take("then")
            bodies.append(self.script(frozenset({"elif", "else", "fi"})))
            word = self.keyword()
        if word == "else":
            self.lexer.position += len(word)
            bodies.append(self.script(frozenset({"fi"})))
        self.take("fi")
        self.redirects()
        source = self.lexer.text[start : self.lexer.position]
        return Branches("if", tuple(conditions), tuple(bodies), source, line)

    def counted(self, keyword: str, start: int, line: int) -> Loop:
        lexer = self.lexer
        lexer.position += len(keyword)
        lexer.skip_blanks()
        if lexer.peek("(("):
            self.opaque("((", "))")
            return self.loop(keyword, "", None, start, line)
        name = self.keyword()
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise self.unexpected()
        lexer.position += len(name)
        self.gap()
        words: list[Word] | None = None
        if self.keyword() == "in":
            lexer.position += 2
            words = []
            lexer.skip_blanks()
            while (word := lexer.word()) is not None:
                words.append(word)
                lexer.skip_blanks()
        lexer.skip_blanks()
        if lexer.peek(";"):
            lexer.position += 1
        return self.loop(keyword, name, None if words is None else tuple(words), start, line)

    def loop(
        self, keyword: str, name: str, words: tuple[Word, ...] | None, start: int, line: int
    ) -> Loop:
        self.lexer.skip_blanks()
        if self.lexer.peek(";"):
            self.lexer.position += 1
        self.take("do")
        body = self.script(frozenset({"done"}))
        self.take("done")
        self.redirects()
        source = self.lexer.text[start : self.lexer.position]
        return Loop(keyword, name, words, body, source, line)

    def case(self, start: int, line: int) -> Branches:  # noqa: C901 - the grammar is so
        lexer = self.lexer
        lexer.position += len("case")
        self.gap()
        if lexer.word() is None:
            raise self.unexpected()
        self.take("in")
        bodies: list[Script] = []
        while True:
            self.gap()
            if self.keyword() == "esac":
                break
            if lexer.over:
                raise ShellError(line, "`esac` is missing")
            if lexer.peek("("):
                lexer.position += 1
            while not lexer.peek(")"):
                lexer.skip_blanks()
                if lexer.over or lexer.peek("\n"):
                    raise ShellError(line, "a pattern of `case` does not end with )")
                if lexer.word() is None and not lexer.peek(")"):
                    lexer.position += 1
            lexer.position += 1
            bodies.append(self.script(frozenset({"esac"})))
            lexer.skip_blanks()
            for end in (";;&", ";;", ";&"):
                if lexer.peek(end):
                    lexer.position += len(end)
                    break
            else:
                if self.keyword() != "esac":
                    raise self.unexpected()
        self.take("esac")
        self.redirects()
        source = lexer.text[start : lexer.position]
        return Branches("case", (), tuple(bodies), source, line)

    def function(self, word: str, line: int) -> Function | None:
        lexer = self.lexer
        named = word == "function"
        start = lexer.position
        if named:
            lexer.position += len(word)
            lexer.skip_blanks()
            word = self.keyword()
        if not _FUNCTION.fullmatch(word):
            lexer.position = start
            return None
        lexer.position += len(word)
        lexer.skip_blanks()
        brackets = re.compile(r"\([ \t]*\)").match(lexer.text, lexer.position)
        if brackets is None and not named:
            lexer.position = start
            return None
        if brackets is not None:
            lexer.position = brackets.end()
        self.gap()
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise ShellError(line, "commands are nested too deeply")
        body = self.node()
        self.depth -= 1
        return Function(word, body, line)

    def command(self) -> Command:
        lexer = self.lexer
        start, line = lexer.position, lexer.line()
        assignments: list[Assignment] = []
        words: list[Word] = []
        redirects: list[Redirect] = []
        while True:
            end = lexer.position
            lexer.skip_blanks()
            if (redirect := lexer.redirect()) is not None:
                redirects.append(redirect)
                continue
            declares = bool(words) and words[0].source in _DECLARES
            if (not words or declares) and (assignment := self.assignment()) is not None:
                assignments.append(assignment)
                continue
            word = lexer.word()
            if word is None:
                break
            words.append(word)
        if not (assignments or words or redirects):
            raise self.unexpected()
        source = lexer.text[start:end]
        return Command(tuple(assignments), tuple(words), tuple(redirects), source, line)

    def assignment(self) -> Assignment | None:
        lexer = self.lexer
        match = _ASSIGNMENT.match(lexer.text, lexer.position)
        if match is None:
            return None
        start, line = lexer.position, lexer.line()
        lexer.position = match.end()
        if match[2] is None and lexer.peek("("):
            lexer.position += 1
            words: list[Word] = []
            while True:
                self.gap()
                word = lexer.word()
                if word is not None:
                    words.append(word)
                elif lexer.peek(")"):
                    lexer.position += 1
                    break
                else:
                    raise ShellError(line, f"the list of {match[1]} is not closed")
            array = True
        else:
            word = lexer.word()
            words = [word or Word((Literal(""),), "", line)]
            array = match[2] is not None
        return Assignment(
            match[1],
            tuple(words),
            lexer.text[start : lexer.position],
            line,
            append=bool(match[3]),
            array=array,
        )
