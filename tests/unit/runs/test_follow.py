"""A file that grows is read as it grows."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpml_orchestrator.runs.follow import Tail, start_of_last


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    """The file need not be there at first, and nothing is read twice."""
    path = tmp_path / "log"
    tail = Tail(path)
    assert tail.read() == b""
    path.write_bytes(b"one\ntw")
    assert tail.read() == b"one\ntw"
    assert tail.read() == b""
    with path.open("ab") as stream:
        stream.write(b"o\n")
    assert tail.read() == b"o\n"


def test_the_last_writes_may_be_late(tmp_path: Path) -> None:
    """What comes within the moment of settling belongs to the end."""
    path = tmp_path / "log"
    path.write_bytes(b"a")

    def sleep(_: float) -> None:
        path.write_bytes(b"ab")

    assert Tail(path).read_to_end(sleep=sleep) == b"ab"


@pytest.mark.parametrize(
    ("content", "count", "expected"),
    [
        (b"", 3, b""),
        (b"a\nb\nc\n", 2, b"b\nc\n"),
        (b"a\nb\nc", 2, b"b\nc"),
        (b"a\nb\nc\n", 9, b"a\nb\nc\n"),
        (b"\n\n\n", 2, b"\n\n"),
        (b"x\n 10%\r 50%\r100%\ny\n", 2, b" 10%\r 50%\r100%\ny\n"),
        (b"z" * 200_000 + b"\nlast\n", 1, b"last\n"),
        (b"z" * 200_000 + b"\nlast\n", 2, b"z" * 200_000 + b"\nlast\n"),
    ],
)
def test_the_last_lines(tmp_path: Path, content: bytes, count: int, expected: bytes) -> None:
    """Lines end at line feeds only, so that a progress bar is one of them."""
    path = tmp_path / "log"
    path.write_bytes(content)
    assert Tail(path, position=start_of_last(path, count)).read() == expected
