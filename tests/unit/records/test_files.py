"""Small files are published in one step and read with care."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpml_orchestrator.errors import NotFoundError, RecordError
from hpml_orchestrator.records.files import (
    SCHEMA_VERSION,
    append_line,
    read_json,
    read_json_lines,
    read_text,
    write_json,
    write_text,
)

WRITER = """
import sys
from hpml_orchestrator.records.files import write_json
number = 0
while True:
    number += 1
    write_json(sys.argv[1], {"number": number, "text": str(number % 10) * 200_000})
"""


def test_a_killed_writer_leaves_a_whole_file(tmp_path: Path) -> None:
    """A reader sees some whole version, whenever the writer is killed with SIGKILL."""
    path = tmp_path / "record.json"
    write_json(path, {"number": 0, "text": "0" * 200_000})
    reads = 0
    for kill in range(5):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
        try:
            before = read_json(path)["number"]
            while read_json(path)["number"] == before:  # until it writes
                assert writer.poll() is None
            until = time.monotonic() + 0.02 * (kill + 1)
            while time.monotonic() < until or reads < 3 * (kill + 1):
                record = read_json(path)
                assert record["text"] == str(record["number"] % 10) * 200_000
                reads += 1
        finally:
            writer.kill()
            assert writer.wait() == -signal.SIGKILL
        assert len(read_json(path)["text"]) == 200_000
    assert reads > 10


def test_a_written_file_has_its_mode_and_no_siblings(tmp_path: Path) -> None:
    """The umask does not change the mode, and no temporary file stays."""
    old = os.umask(0o077)
    try:
        write_text(tmp_path / "a", "x", mode=0o755)
    finally:
        os.umask(old)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o755
    assert os.listdir(tmp_path) == ["a"]


def test_text_survives_a_round_trip(tmp_path: Path) -> None:
    """Bytes that are no UTF-8, as file names may have them, come back as they were."""
    text = os.fsdecode(b"caf\xe9 \xff") + " ü\u2028\r\n"
    write_text(tmp_path / "a", text)
    assert read_text(tmp_path / "a") == text


def test_a_record_carries_its_version(tmp_path: Path) -> None:
    """`schema_version` is first, and what cannot be JSON becomes text."""
    write_json(tmp_path / "a.json", {"path": Path("/x")})
    assert (tmp_path / "a.json").read_text().startswith('{\n  "schema_version": 1,')
    assert read_json(tmp_path / "a.json") == {"schema_version": SCHEMA_VERSION, "path": "/x"}


def test_what_cannot_be_read_or_written(tmp_path: Path) -> None:
    """A missing file is not found; a missing directory and a directory are errors of records."""
    with pytest.raises(NotFoundError, match="no such file"):
        read_json(tmp_path / "none.json")
    with pytest.raises(RecordError, match="cannot write .*No such file or directory"):
        write_text(tmp_path / "none" / "a", "x")
    with pytest.raises(RecordError, match="cannot read .*Is a directory"):
        read_text(tmp_path)
    (tmp_path / "directory").mkdir()
    with pytest.raises(RecordError, match="cannot write"):
        write_text(tmp_path / "directory", "x")
    assert os.listdir(tmp_path) == ["directory"]


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    """A line whose end was not written yet does not count, nor one that is no JSON."""
    path = tmp_path / "a.jsonl"
    append_line(path, '{"n": 1}')
    append_line(path, '{"n": 2, "text": "\u2028 \x85"}')
    append_line(path, "{torn")
    append_line(path, '{"n": 3}')
    with path.open("a") as stream:
        stream.write('{"n": 4}')
    assert [line["n"] for line in read_json_lines(path)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("", "is not JSON"),
        ("[1]", "holds no JSON object"),
        *(
            (json.dumps({"schema_version": version}), "schema_version .* reads up to 1")
            for version in (SCHEMA_VERSION + 1, "2", None, 1.5)
        ),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, content: str, message: str) -> None:
    """Neither anything but a JSON object, nor what a newer hpml wrote; the file is named."""
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(RecordError, match=f"a.json .*{message}"):
        read_json(tmp_path / "a.json")
