"""Write TOML with comments: keys, values and comments that read back as what went in.

TOML 1.0, and only what a site profile needs of it: text, whole numbers, true and false, and lists
of these, one value per line. Wide lists are broken into several lines.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

__all__ = ["Scalar", "comment", "entry", "header", "key", "value"]

Scalar = str | int | bool

WIDTH = 100
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f"}
_ESCAPES["\r"] = "\\r"


def value(one: Scalar | Sequence[Scalar]) -> str:
    r"""Return a value as TOML writes it.

    >>> value('say "hi"\n'), value(True), value(["a", 1])
    ('"say \\"hi\\"\\n"', 'true', '["a", 1]')
    """
    if isinstance(one, bool):
        return "true" if one else "false"
    if isinstance(one, int):
        return str(one)
    if isinstance(one, str):
        return f'"{"".join(map(_character, one))}"'
    return f"[{', '.join(value(item) for item in one)}]"


def key(name: str) -> str:
    """Return a key, in quotes where it must be.

    >>> key("gpu-a100"), key("gpu.a100")
    ('gpu-a100', '"gpu.a100"')
    """
    return name if _BARE.fullmatch(name) else value(name)


def header(*path: str) -> str:
    """Return the line that begins a table.

    >>> header("partitions", "gpu.a100")
    '[partitions."gpu.a100"]'
    """
    return f"[{'.'.join(key(part) for part in path)}]"


def entry(
    name: str, one: Scalar | Sequence[Scalar], *, remark: str = "", active: bool = True
) -> list[str]:
    """Return the lines of `name = value`, with a remark behind it or above it.

    Args:
        name: the key.
        one: its value.
        remark: comment in plain words.
        active: whether it counts; else each line gets a `#` in front, to be taken away.
    """
    lines = [f"{key(name)} = {value(one)}"]
    if len(lines[0]) > WIDTH - 2 and not isinstance(one, (str, int)):
        inner = textwrap.wrap(
            ", ".join(value(item).replace(" ", "\0") for item in one),
            WIDTH - 6,
            break_long_words=False,
            break_on_hyphens=False,
        )
        indent = "    " if active else ""  # `#name` is a setting, `# text` is prose
        lines = [f"{key(name)} = [", *(f"{indent}{part}" for part in inner), "]"]
        lines = [line.replace("\0", " ") for line in lines]
    if remark:
        plain = _plain(remark)
        if len(lines) == 1 and len(lines[0]) + len(plain) + 4 < WIDTH:
            lines = [f"{lines[0]}  # {plain}"]
        else:
            return [*comment(remark), *_said(lines, active=active)]
    return _said(lines, active=active)


def _said(lines: list[str], *, active: bool) -> list[str]:
    return lines if active else [f"#{line}" for line in lines]


def comment(text: str) -> list[str]:
    """Return a text as comment lines; characters that are not printable show as `?`."""
    wrapped = textwrap.wrap(_plain(text), WIDTH - 2, break_long_words=False, break_on_hyphens=False)
    return [f"# {line}" for line in wrapped or [""]]


def _plain(text: str) -> str:
    blank = " ".join(text.split())
    return "".join(one if one.isprintable() else "?" for one in blank)


def _character(one: str) -> str:
    if one in _ESCAPES:
        return _ESCAPES[one]
    if one.isprintable():
        return one
    if "\ud800" <= one <= "\udfff":  # no character at all: a byte that was not UTF-8
        return "\\uFFFD"
    return f"\\u{ord(one):04X}" if one <= "\uffff" else f"\\U{ord(one):08X}"
