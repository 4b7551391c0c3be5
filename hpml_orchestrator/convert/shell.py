"""Read a batch script, and parse it with tree-sitter's bash grammar.

Nothing is evaluated. Loops, conditions and functions stay whole; the commands inside them are only
searched for launch lines. Text that the grammar cannot read is a statement of its own, too.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from hpml_orchestrator.errors import InputError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_MAX_BYTES = 256 * 1024  # bounds the time that an import takes

_BLOCKS = {
    **dict.fromkeys(("for_statement", "c_style_for_statement", "while_statement"), "a loop"),
    **dict.fromkeys(("if_statement", "case_statement"), "a condition"),
    "function_definition": "a function",
    "compound_statement": "a group of commands",
    "subshell": "a subshell",
}
_COMMANDS = frozenset(
    "command declaration_command unset_command test_command variable_assignment "
    "variable_assignments".split()
)
_EXPANSIONS = frozenset(
    "simple_expansion expansion command_substitution arithmetic_expansion process_substitution "
    "ansi_c_string translated_string".split()
)
_MARK = "\x01"  # stands for the `$` of such a name while the grammar reads the script
_INNER_NAME = re.compile(r"(\(\(.*?\)\))|(?<=[\w/.:,=@%~}-])\$(?=[A-Za-z_])", re.ASCII)
_NOT_ASCII = re.compile("[^\0-\x7f]|\x02")
_STAND_IN = re.compile("\x02([0-9a-f]+)\x02")  # of a character that is not ASCII
_LITERAL = re.compile(  # text in which the grammar may have missed expansions
    r"(?P<expansion>\$[A-Za-z_]\w*|\$[\d({@*#?$!-][^\\]*)|\\(?P<escaped>.)|[^\\$]+|[\\$]",
    re.ASCII | re.DOTALL,
)
_OPEN_DOLLAR = re.compile(r"(?<!\\)(?:\\\\)*\$\Z")  # not escaped, at the end of a part
_BLANKS = re.compile(r"(?:[ \t\r]|\\\n)+")
_REDIRECT = re.compile(r"[<>]")
_ARRAY_BLANKS = re.compile(r"(?:\s|\\\n|#.*)+")
_BLANK_AFTER_BACKSLASH = re.compile(r"(?<!\\)\\[ \t]+\n|(?<=[\s\"'`)}])\\[ \t]")
_ASSIGNMENTS = re.compile(r"^[ \t]*[A-Za-z_]\w*=.*[ \t][A-Za-z_]\w*=", re.ASCII | re.MULTILINE)
UNREADABLE = "text that hpml cannot read"
"""The block of a statement that the grammar does not know, or reads wrongly."""


@dataclass(frozen=True)
class Part:
    """A part of a word: literal text without its quotes, or the source of an expansion."""

    text: str
    is_expansion: bool = False
    quoted: bool = False


@dataclass(frozen=True)
class ShellWord:
    """A word of a command; `source` is as written."""

    source: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Assignment:
    """`NAME=VALUE`; `items` are the words of an array's value, None for any other value."""

    name: str
    appends: bool
    value: ShellWord
    items: tuple[ShellWord, ...] | None


@dataclass
class Command:
    """A simple command of a statement.

    Attributes:
        operator: what precedes it: `&&`, `||`, `|` or `|&`; empty for the first command.
        line: of its first word, from 1.
        source: as written, without here-documents.
        words: the command's name and arguments.
        assignments: those before the name, or of `export` and `declare`.
        redirects: as written.
    """

    operator: str
    line: int
    source: str
    words: tuple[ShellWord, ...] = ()
    assignments: tuple[Assignment, ...] = ()
    redirects: list[str] = field(default_factory=list)


@dataclass
class Statement:
    """Commands joined by `&&`, `||` and `|`, or a compound command as a whole, or a comment.

    Attributes:
        line: of its first word, from 1.
        end: its last line.
        source: as written, here-documents and a final `&` included.
        commands: its simple commands, including those inside compound commands.
        block: the kind of the first compound command in it, such as "a loop"; else empty.
        background: whether `&` ends it.
    """

    line: int
    end: int
    source: str
    commands: list[Command]
    block: str = ""
    background: bool = False


def read_script(path: Path) -> str:
    """Return the text of a script.

    Raises:
        NotFoundError: the file does not exist.
        InputError: it cannot be read, or is not a text that sbatch accepts.
    """
    hint = "name the script that you give to sbatch"
    if not path.exists():
        raise NotFoundError(f"no such script: {path}", hint=hint)
    if not path.is_file():
        raise InputError(f"{path} is not a regular file", hint=hint)
    try:
        with path.open("rb") as stream:
            raw = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", hint=hint) from error
    if not raw.strip() or len(raw) > _MAX_BYTES:
        problem = f"is larger than {_MAX_BYTES // 1024} KiB" if raw else "is empty"
        raise InputError(f"{path} {problem}", hint=hint)
    if b"\0" in raw:
        raise InputError(f"{path} holds a NUL byte: it is a binary file", hint=hint)
    if b"\r\n" in raw:
        line = raw.count(b"\n", 0, raw.index(b"\r\n")) + 1
        raise InputError(
            f"{path} has DOS line ends (line {line}), which sbatch refuses, too",
            hint="`sed -i 's/\\r$//' FILE` removes them",
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path} is not UTF-8 text (line {line})",
            hint="`iconv -f latin1 -t utf-8` converts the text of older editors",
        ) from None


@cache
def _language() -> Language:
    return Language(tree_sitter_bash.language())


def parse_script(text: str) -> list[Statement]:
    """Return the statements and comments of a script in order.

    Raises:
        InputError: the text is not valid bash.
    """
    _refuse_invalid(text)
    return parse_lines(text)


def parse_lines(text: str) -> list[Statement]:
    """Return the statements and comments of valid bash in order."""
    # The grammar divides a word such as `$A/$B/c`, and not one with a mark in place of a `$`.
    marked = _INNER_NAME.sub(lambda match: match[1] or _MARK, text) if _MARK not in text else text
    root = _tree(marked)
    if root.has_error:  # the grammar does not accept a mark everywhere
        root = _tree(text)
    source, statements = root.text or b"", list[Statement]()
    while _ASSIGNMENTS.search(text) and (gap := _joined_lines(root)):
        # Same length, so that lines and offsets stay those of the script.
        changed = (root.text or b"")[: gap[0]] + b";".ljust(gap[1] - gap[0])
        root = _parse(changed + (root.text or b"")[gap[1] :])
    rows = text.split("\n")
    odd = {text.count("\n", 0, one.start()) + 1 for one in _BLANK_AFTER_BACKSLASH.finditer(text)}
    for node in root.children:
        line = source.count(b"\n", 0, node.start_byte) + 1
        if statements and statements[-1].block == UNREADABLE and statements[-1].end >= line:
            continue  # a part of it
        if node.type == "&" and statements:
            statements[-1].background = True
            statements[-1].source += " &"
        elif node.type == "comment":
            if not statements or statements[-1].end < line:  # not behind a command
                statements.append(Statement(line, line, _text(node), []))
        elif node.is_named:
            statement = _statement(node, line)
            if node.has_error or odd & {*range(line, statement.end + 1)}:
                statement.source = "\n".join(rows[line - 1 : statement.end])
                statement.block = UNREADABLE
            statements.append(statement)
    return statements


def _joined_lines(root: Node) -> tuple[int, int] | None:
    """Return where the grammar joins a line `A=1 B=2` to the command on the next line."""
    stack = [root]
    while stack:
        node = stack.pop()
        stack.extend(node.children)
        words = [child for child in node.children if child.type != "comment"]
        for before, after in pairwise(words if node.type == "command" else ()):
            gap = (root.text or b"")[before.end_byte : after.start_byte]
            if before.type == "variable_assignment" and b"\n" in gap.replace(b"\\\n", b""):
                return before.end_byte, after.start_byte
    return None


def _tree(text: str) -> Node:
    # In ASCII: the grammar's scanner looks up characters in a table of libc without checking its
    # bounds, and may crash on others.
    return _parse(_NOT_ASCII.sub(lambda match: f"\x02{ord(match[0]):x}\x02", text).encode())


def _parse(source: bytes) -> Node:
    return Parser(_language()).parse(source).root_node


def _refuse_invalid(text: str) -> None:
    """Raise InputError for a script that bash cannot parse."""
    try:
        done = subprocess.run(
            ["bash", "-n"],
            env={**os.environ, "LC_ALL": "C", "BASH_ENV": ""},  # `line N:` in English
            input=text.encode(),
            capture_output=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):  # no bash here
        return
    said = done.stderr.decode(errors="replace")
    lines = re.findall(r"line (\d+):", said)
    if done.returncode or lines:  # a here-document without end is a warning of bash
        raise InputError(
            f"line {lines[-1] if lines else 1}: not valid bash", hint="see `bash -n SCRIPT`"
        )


def _text(node: Node) -> str:
    return _decode(node.text or b"")


def _decode(raw: bytes) -> str:
    text = raw.decode("ascii").replace(_MARK, "$")
    return _STAND_IN.sub(lambda match: chr(int(match[1], 16)), text)


def _statement(node: Node, line: int) -> Statement:
    """Read a statement without recursion: `a && b && …` may be nested thousands of times."""
    text, above = _text(node).rstrip(), node.start_point.row
    found = Statement(line, line + text.count("\n"), text, [])
    raw, first, start = node.text or b"", node.start_byte, 0
    operator, stack = "", [node]
    while stack:
        node = stack.pop()
        if node.type in _COMMANDS:
            found.commands.append(_command(node, operator, line + node.start_point.row - above))
            start = node.start_byte
        elif node.type.endswith("_redirect") and found.commands:
            found.commands[-1].redirects.append(_text(node))
            if node.type == "file_redirect":
                source = raw[start - first : node.end_byte - first]
                found.commands[-1].source = _decode(source)
        elif not node.is_named:
            operator = node.type if node.type in ("&&", "||", "|", "|&") else ""
        else:
            found.block = found.block or _BLOCKS.get(node.type, "")
            stack.extend(reversed(node.children))
            # A failing `! command` is no failure to `set -e`, so the exit status has a meaning of
            # its own, as in a condition.
            if node.type == "negated_command":
                found.block = found.block or "a condition"
    return found


def _command(node: Node, operator: str, line: int) -> Command:
    command = Command(operator, line, _text(node).rstrip())
    words = []
    for child in [node] if node.type == "variable_assignment" else node.children:
        if child.type == "variable_assignment" and child.children[0].type == "variable_name":
            command.assignments += (_assignment(child),)
        elif child.type.endswith("_redirect"):
            command.redirects.append(_text(child))
        elif child.type != "comment":
            words.append(child)
    is_test = node.type == "test_command"
    command.words = tuple(map(_word, words) if is_test else _words(words, _BLANKS))
    return command


def _words(nodes: list[Node], blanks: re.Pattern[str]) -> Iterator[ShellWord]:
    """Yield words; the grammar divides `$"text"`, which becomes one expansion again."""
    word = None
    for before, node in zip([None, *nodes], nodes, strict=False):
        gap = ""
        if before is not None and node.parent is not None:
            start, raw = node.parent.start_byte, node.parent.text or b""
            gap = _decode(raw[before.end_byte - start : node.start_byte - start])
        if word is not None and not blanks.search(gap) and not _REDIRECT.search(gap):
            source = word.source + gap + _text(node)
            word = ShellWord(source, (Part(source, is_expansion=True),))
            continue
        if word is not None:
            yield word
        word = _word(node)
    if word is not None:
        yield word


def _assignment(node: Node) -> Assignment:
    name, sign, *value = node.children
    items = None
    if value and value[0].type == "array":
        inner = [n for n in value[0].children if n.is_named and n.type != "comment"]
        items = tuple(_words(inner, _ARRAY_BLANKS))
    word = _word(value[0]) if value else ShellWord("", ())
    return Assignment(_text(name), sign.type == "+=", word, items)


def _word(node: Node) -> ShellWord:
    return ShellWord(_text(node), tuple(_parts(node)))


def _parts(node: Node) -> Iterator[Part]:
    text = _text(node)
    if node.type in _EXPANSIONS:
        yield from _expansion(node, text, quoted=False)
    elif node.type == "raw_string":
        yield Part(text[1:-1], quoted=True)
    elif node.type == "string":
        yield from _string_parts(node)
    elif node.type in ("concatenation", "command_name"):
        for child, after in zip_longest(node.children, node.children[1:]):
            is_dollar = _OPEN_DOLLAR.search(_text(child)) is not None
            if is_dollar and after is not None and after.type == "string":
                yield Part(f"${_text(after)}", is_expansion=True)  # `$"text"` is translated
            else:
                yield from _parts(child)
    else:
        yield from _literal(text, quoted=False)


def _string_parts(node: Node) -> Iterator[Part]:
    """Yield the parts of a double-quoted string; blanks may belong to no node or to a `$`."""
    raw, start = node.text or b"", node.start_byte
    yield Part("", quoted=True)
    position = 1
    for child in node.children:
        if child.type in _EXPANSIONS:
            source = (child.text or b"").lstrip()
            end = child.end_byte - start
            yield from _literal(_decode(raw[position : end - len(source)]), quoted=True)
            yield from _expansion(child, _decode(source), quoted=True)
            position = end
    yield from _literal(_decode(raw[position:-1]), quoted=True)


def _expansion(node: Node, text: str, *, quoted: bool) -> Iterator[Part]:
    if node.type == "simple_expansion":
        yield from _literal(text, quoted=quoted)  # the grammar adds `é` of `$NAMEé` to the name
    else:
        yield Part(text, is_expansion=True, quoted=quoted)


def _literal(text: str, *, quoted: bool) -> Iterator[Part]:
    for match in _LITERAL.finditer(text.replace("\\\n", "")):
        if match["expansion"]:
            yield Part(match[0], is_expansion=True, quoted=quoted)
        elif match["escaped"]:
            # Within double quotes a backslash escapes only these four; before anything else it is
            # literal.
            is_kept = quoted and match["escaped"] not in '$`"\\'
            yield Part(match[0] if is_kept else match["escaped"], quoted=True)
        else:
            yield Part(match[0], quoted=quoted)
