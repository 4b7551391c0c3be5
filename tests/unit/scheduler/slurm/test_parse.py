"""The words, times, ids and rows that Slurm's commands print."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpml_orchestrator.records.ids import parse_answer
from hpml_orchestrator.scheduler.model import STATE_FLAGS, JobState, parse_state
from hpml_orchestrator.scheduler.slurm.records import (
    escape_output,
    match,
    parse_exit,
    parse_sacct,
    parse_squeue,
    parse_time,
)

DATA = Path(__file__).parent / "data"
VERSIONS = ("24.11.5", "25.11.7", "26.05.5")


def read(name: str) -> str:
    return (DATA / name).read_bytes().decode()


def test_real_squeue_of_22_05() -> None:
    """Every job of a real queue is read: state, exit code, times, nodes, restarts."""
    rows = parse_squeue(read("22.05.8/squeue.txt"))
    asked = [str(n) for n in range(1, 19)]
    found = match(rows, asked)
    assert list(found) == asked
    assert {key: (s.state.value, s.exit_code, s.signal) for key, s in found.items()} == {
        "1": ("COMPLETED", 0, 0),
        "2": ("COMPLETED", 0, 0),
        "3": ("FAILED", 3, 0),
        "4": ("FAILED", 0, 9),
        "5": ("RUNNING", None, 0),
        "6": ("RUNNING", None, 0),
        "7": ("PENDING", None, 0),
        "8": ("PENDING", None, 0),
        "9": ("CANCELLED", 0, 15),
        "10": ("CANCELLED", 0, 0),
        "11": ("TIMEOUT", 0, 15),
        "12": ("RUNNING", None, 0),
        "13": ("RUNNING", None, 0),
        "14": ("COMPLETED", 0, 0),
        "15": ("RUNNING", None, 0),
        "16": ("PENDING", None, 0),
        "17": ("RUNNING", None, 0),
        "18": ("RUNNING", None, 0),
    }
    assert found["5"].name == "pipe|in name"
    assert found["5"].nodes == "node[1-2]"
    assert found["5"].started == 1795218518.0
    assert found["5"].ended is None, "a running job's end is a prediction"
    assert found["5"].limit_at == 1795218518.0 + 365 * 86400, "without a limit: a year"
    assert (found["1"].limit_at, found["7"].limit_at) == (None, None)
    assert found["7"].started is None, "a waiting job's start is a prediction"
    assert found["7"].reason == "BeginTime"
    assert found["7"].expected_start is not None
    assert found["5"].expected_start is None
    assert found["10"].started is None, "cancelled while it waited"
    assert found["11"].ended == 1795218607.0
    assert found["14"].name == "two\nlines"
    assert found["14"].directory == "/tmp/hpml-capture/with\nnewline"
    assert found["15"].restarts == 1


def test_real_sacct_of_22_05() -> None:
    """Accounting's rows give the same records as squeue's, in other words."""
    rows = parse_sacct(read("22.05.8/sacct.txt"))
    found = match(rows, ["3", "4", "8", "9", "11", "6_1", "12+1", "14", "777"])
    assert "777" not in found
    assert (found["3"].exit_code, found["4"].signal) == (3, 9)
    assert found["8"].nodes == ""
    assert (found["9"].state, found["9"].raw_state) == (JobState.CANCELLED, "CANCELLED by 0")
    assert found["11"].state is JobState.TIMEOUT
    assert found["6_1"].nodes == "node1"
    assert found["12+1"].nodes == "node2"
    assert found["14"].directory == "/tmp/hpml-capture/with\nnewline"
    assert all(status.restarts == 0 for status in found.values())


@pytest.mark.parametrize("version", VERSIONS)
def test_newer_versions(version: str) -> None:
    """Words, states and id forms of newer versions are all known."""
    rows = parse_squeue(read(f"{version}/squeue-from-json.txt"))
    rows += parse_sacct(read(f"{version}/sacct-from-json.txt"))
    lines = read(f"{version}/squeue-from-json.txt") + read(f"{version}/sacct-from-json.txt")
    assert len(rows) == lines.count("\n")
    for row in rows:
        assert row.status.state is not JobState.UNKNOWN
        assert row.status.submitted
        assert row.status.state.over == (row.status.ended is not None)
        assert row.status.state.over == (row.status.exit_code is not None)
        assert match(rows, [row.shown_id, row.raw_id]).keys() == {row.shown_id, row.raw_id}


def test_real_text_of_25_11() -> None:
    """The state words, times and exit codes of a real 25.11's text output are known."""
    for line in read("25.11.7/squeue.txt").splitlines():
        fields = line.split("|")
        assert parse_state(fields[2]) in (JobState.PENDING, JobState.RUNNING)
        assert parse_time(fields[8])
    for line in read("25.11.7/sacct.txt").splitlines():
        fields = line.split("|")
        assert parse_state(fields[2]) is not JobState.UNKNOWN
        assert parse_exit(fields[3]) in ((0, 0), (3, 0))


def test_array_tasks_that_wait_are_found_by_their_own_id() -> None:
    """`6_[2-5%2]` means 6_2 to 6_5, and nothing else."""
    rows = parse_squeue(read("22.05.8/squeue.txt"))
    found = match(rows, ["6_0", "6_2", "6_5", "6_6", "60_2"])
    assert {key: s.state.value for key, s in found.items()} == {
        "6_0": "RUNNING",
        "6_2": "PENDING",
        "6_5": "PENDING",
    }
    assert [s.job_id for s in found.values()] == ["6_0", "6_2", "6_5"]


@pytest.mark.parametrize(
    ("shown", "known"),
    [
        # squeue 22.05 without SLURM_BITSTR_LEN=0, cut between two numbers
        ("9_[5,9,12,22,26,28-31,", ["9_5", "9_9", "9_12", "9_28", "9_31", "9_40"]),
        # what accounting keeps of a long list
        ("9_[5,9,12,...%2]", ["9_5", "9_9", "9_12", "9_28", "9_31", "9_40"]),
        # what is left of an array that was cancelled while it waited
        ("9", ["9_1", "9_5", "9_9", "9_12", "9_28", "9_31", "9_40"]),
    ],
)
def test_a_list_that_was_cut_short_stands_for_the_rest(shown: str, known: list[str]) -> None:
    """Jobs that may have been cut off count; those before the cut and not named do not."""
    row = f"9\x1f{shown}\x1fCANCELLED" + "\x1f" * 9 + "\x1e\n"
    asked = [f"9_{n}" for n in (1, 5, 9, 12, 28, 31, 40)]
    assert list(match(parse_squeue(row), asked)) == known
    assert match(parse_squeue(row), ["7_5"]) == {}


def test_a_tasks_own_row_counts_more_than_the_rest_of_its_array() -> None:
    """A task that ran is not taken for one of those that were cancelled while they waited."""
    rows = "9\x1f9\x1fCANCELLED" + "\x1f" * 9 + "\x1e\n"
    rows += "10\x1f9_1\x1fCOMPLETED" + "\x1f" * 9 + "\x1e\n"
    found = match(parse_squeue(rows), ["9_1", "9_2"])
    assert [status.state.value for status in found.values()] == ["COMPLETED", "CANCELLED"]


def test_an_array_is_as_well_as_its_worst_task() -> None:
    """The id of an array has the state of running, then waiting, then failed tasks."""

    def array(*states: str) -> str:
        rows = [
            f"{n + 10}\x1f7_{n}\x1f{state}" + "\x1f" * 9 + "\x1e\n"
            for n, state in enumerate(states)
        ]
        return match(parse_squeue("".join(rows)), ["7"])["7"].state.value

    assert array("COMPLETED", "RUNNING", "PENDING") == "RUNNING"
    assert array("FAILED", "PENDING") == "PENDING"
    assert array("COMPLETED", "TIMEOUT", "COMPLETED") == "TIMEOUT"
    assert array("COMPLETED", "COMPLETED") == "COMPLETED"


@pytest.mark.parametrize("word", [*JobState, *STATE_FLAGS])
def test_every_state(word: str) -> None:
    """Every state and flag of Slurm has a state of ours, with any suffix and in any case."""
    state = STATE_FLAGS.get(word) or JobState(word)
    for text in (word, f" {word.lower()} ", f"{word}+", f"{word} by 1000"):
        assert parse_state(text) is state


@given(st.text())
def test_any_text_is_a_state(text: str) -> None:
    """What is not known is UNKNOWN, never an error."""
    assert isinstance(parse_state(text), JobState)


@given(st.text(alphabet=st.sampled_from("0123456789\x1f\x1e\n_[]-%:+ aN/PENDING|")))
def test_parsers_never_fail(text: str) -> None:
    """No output of a command makes a parser raise."""
    rows = parse_squeue(text) + parse_sacct(text)
    match(rows, ["1", "1_1", "1+1"])
    parse_time(text)
    parse_exit(text)
    parse_answer(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1795217201", 1795217201.0),
        (" 1795217201 ", 1795217201.0),
        # Slurm's standard form is this machine's local time
        ("2026-11-01T12:00:00", datetime(2026, 11, 1, 12).astimezone().timestamp()),
        *((word, None) for word in ("0", "", "Unknown", "N/A", "NONE", "None", "(null)")),
        ("yesterday", None),
        ("²", None),
    ],
)
def test_times(text: str, expected: float | None) -> None:
    """Epoch seconds and local times are read; every word for nothing is None."""
    assert parse_time(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0:0", (0, 0)),
        ("3:0", (3, 0)),
        ("0:15", (0, 15)),
        ("768", (3, 0)),
        ("9", (0, 9)),
        ("137", (0, 9)),
        ("0", (0, 0)),
        ("1", (1, 0)),
        ("", None),
        ("x", None),
        ("1:", None),
        (":1", None),
    ],
)
def test_exit_codes(text: str, expected: tuple[int, int] | None) -> None:
    """Both forms of an exit code are read: accounting's and the plain wait status."""
    assert parse_exit(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4711\n", ("4711", "")),
        ("4711;Box\n", ("4711", "box")),
        ("hello from a wrapper\n4711\n", ("4711", "")),
        ("4711", ("", "")),
        ("hello\nSubmitted batch job 4711\n", ("4711", "")),
        ("sbatch: Submitted batch job 4711 on cluster Box\n", ("4711", "box")),
        ("Submitted batch job 4711", ("", "")),
        ("Submitted batch job 47x\n", ("", "")),
        ("0\n", ("", "")),
        ("", ("", "")),
        ("4711 4712\n", ("", "")),
    ],
)
def test_answer_of_sbatch(text: str, expected: tuple[str, str]) -> None:
    """A complete line with an id is an answer, also of a wrapper; a torn one is not."""
    assert parse_answer(text) == expected


def slurms_reading(pattern: str) -> str:
    """What Slurm makes of an output pattern: a backslash ends patterns, else %% is %."""
    if "\\" in pattern:
        return pattern.replace("\\\\", "\0").replace("\\", "").replace("\0", "\\")
    return pattern.replace("%%", "%")


@given(st.text(alphabet=st.sampled_from("/a%j\\b x'\"é")))
def test_output_path_survives_sbatch(path: str) -> None:
    """Whatever is in a path, sbatch writes to that very file."""
    assert slurms_reading(escape_output(path)) == path
    if "\\" not in path:
        assert "%" not in escape_output(path).replace("%%", "")
