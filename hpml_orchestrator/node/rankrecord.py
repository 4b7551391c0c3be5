"""One rank's line in `binding/<node>.jsonl`: small JSON, written in one piece.

Imports `os` alone: the module json costs a third of an interpreter's start.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["append_record", "json_line"]

_BMP_END = 0x10000


def append_record(path: str, record: Mapping[str, object]) -> None:
    """Append a line to a node's file.

    All ranks of the node share the file: one write each, so that none comes into another's line.

    Raises:
        OSError: the file cannot be written.
    """
    line = json_line(record).encode("ascii")
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if os.write(descriptor, line) != len(line):
            raise OSError(f"{path}: a line could be written in part only")
    finally:
        os.close(descriptor)


def json_line(record: Mapping[str, object]) -> str:
    r"""Return a flat record as a line of JSON in ASCII.

    >>> json_line({"rank": 3, "bound": True, "nic": None, "program": 'a"\u00e9'})
    '{"rank": 3, "bound": true, "nic": null, "program": "a\\"\\u00e9"}\n'
    """
    pairs = ", ".join(f'"{key}": {_value(value)}' for key, value in record.items())
    return f"{{{pairs}}}\n"


def _value(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    return '"' + "".join(map(_letter, str(value))) + '"'


def _letter(letter: str) -> str:
    if " " <= letter <= "~" and letter not in '"\\':
        return letter
    if letter in '"\\':
        return "\\" + letter
    code = ord(letter)
    if code < _BMP_END:
        return f"\\u{code:04x}"
    code -= _BMP_END
    return f"\\u{0xD800 + (code >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
