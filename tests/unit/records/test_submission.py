"""Of many processes that want to call sbatch for a submission, one may."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpml_orchestrator.errors import RecordError
from hpml_orchestrator.records.submission import STARTED_MARKER, Submission

RACER = """
import sys, time
from pathlib import Path
from hpml_orchestrator.records.submission import Submission
submission, at = Submission(Path(sys.argv[1])), float(sys.argv[2])
won = ""
for number in range(1, 41):
    time.sleep(max(at + number * 0.02 - time.time(), 0))
    won += "01"[submission.mark_started(number=number, now=time.time())]
print(won)
"""


def test_one_of_several_processes_gets_each_start(tmp_path: Path) -> None:
    """Four processes race for 40 starts: each has one winner, whose record it holds."""
    script = "import time; print(time.time() + 0.5)"
    at = subprocess.check_output([sys.executable, "-c", script], text=True).strip()
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(tmp_path), at], stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    won = [racer.communicate(timeout=120)[0].strip() for racer in racers]
    assert [column.count("1") for column in map("".join, zip(*won, strict=True))] == [1] * 40
    newest = Submission(tmp_path).newest_start()
    assert newest is not None
    assert newest.number == 40
    assert newest.owner is not None
    assert newest.owner.pid == racers[[row[-1] for row in won].index("1")].pid
    assert len(list(tmp_path.iterdir())) == 40, "nothing temporary stays"


def test_a_start_is_never_taken_back(tmp_path: Path) -> None:
    """A start is never replaced; the next number is free; the last one is returned."""
    assert Submission(tmp_path).newest_start() is None
    assert Submission(tmp_path / "nowhere").newest_start() is None
    assert Submission(tmp_path).mark_started(number=1, now=5.0)
    assert not Submission(tmp_path).mark_started(number=1, now=6.0)
    first = Submission(tmp_path).newest_start()
    assert first is not None
    assert (first.number, first.time) == (1, 5.0)
    for number in range(2, 11):
        assert Submission(tmp_path).mark_started(number=number, now=float(number))
    tenth = Submission(tmp_path).newest_start()
    assert tenth is not None
    assert (tenth.number, tenth.time) == (10, 10.0)


def test_a_link_whose_answer_was_lost_is_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake for NFS, which repeats a request and then gets the error that the name exists."""
    real = os.link

    def link(source: str, target: str) -> None:
        real(source, target)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    monkeypatch.setattr(os, "link", link)
    assert Submission(tmp_path).mark_started(number=1, now=5.0)


def test_a_start_that_is_half_written_counts_from_its_file(tmp_path: Path) -> None:
    """Killed while it wrote in place: there was a start, at the time when the file changed."""
    (tmp_path / STARTED_MARKER).write_text('{"time": 12')
    os.utime(tmp_path / STARTED_MARKER, (77.0, 77.0))
    newest = Submission(tmp_path).newest_start()
    assert newest is not None
    assert (newest.number, newest.time, newest.owner) == (1, 77.0, None)


def test_a_directory_that_cannot_be_written_is_no_lost_race(tmp_path: Path) -> None:
    """It is an error, and not taken for a start of somebody else's."""
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError):
        Submission(tmp_path / "nowhere").mark_started(number=1, now=5.0)
    with pytest.raises(RecordError):
        Submission(tmp_path / "file").newest_start()
