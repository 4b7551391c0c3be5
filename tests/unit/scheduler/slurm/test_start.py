"""When Slurm would start a job, by `sbatch --test-only`; the answers are those of 22.05.8."""

from __future__ import annotations

import time

import pytest

from hpml_orchestrator.records.texts import clock_text
from hpml_orchestrator.scheduler.command import Completed
from hpml_orchestrator.scheduler.slurm.client import start_of
from hpml_orchestrator.testing.runner import FakeRunner

NOW = 1_800_000_000
AFTER = f"waits for the end of maint, {clock_text(NOW + 5400)}"
POLICY = (
    "allocation failure: Job violates accounting/QOS policy (job submit limit, user's size and/or "
    "time limits)\n"
)


def planned(start: int) -> Completed:
    """Slurm's answer for a job that it would start then."""
    words = "using 2 processors on nodes node[1-2] in partition main"
    return Completed(0, "", f"sbatch: Job 8 to start at {start} {words}\n")


def maintenance(begin: int, end: int) -> Completed:
    """`scontrol show reservation`."""
    line = f"ReservationName=maint StartTime={begin} EndTime={end} Duration=01:00:00\n"
    return Completed(0, f"{line}   Nodes=node[1-2] NodeCnt=2 Flags=MAINT,SPEC_NODES\n")


@pytest.mark.parametrize(
    ("answers", "reservation", "text"),
    [
        ([planned(NOW + 3)], maintenance(NOW + 9, NOW + 99), "can start now"),
        (
            [planned(NOW + 7200)],
            maintenance(NOW + 600, NOW + 3600),
            f"expected start {clock_text(NOW + 7200)}",
        ),
        (
            [planned(NOW + 5400), planned(NOW)],
            maintenance(NOW + 1530, NOW + 5400),
            f"{AFTER}; with at most 00:25:00 it can start now",
        ),
        (  # the nodes are in use until then
            [planned(NOW + 5400)],
            maintenance(NOW + 1530, NOW + 5400),
            AFTER,
        ),
        (  # it has begun
            [planned(NOW + 5400)],
            maintenance(NOW - 9, NOW + 5400),
            AFTER,
        ),
    ],
)
def test_a_start_in_words(
    monkeypatch: pytest.MonkeyPatch, answers: list[Completed], reservation: Completed, text: str
) -> None:
    """Now, later, or after a reservation, with the time limit that would fit before it."""
    monkeypatch.setattr(time, "time", lambda: float(NOW))
    runner = FakeRunner({"sbatch": answers, "scontrol": [reservation]})
    assert start_of("#!/bin/sh\n", runner, {}) == (text, "")


@pytest.mark.parametrize(
    ("messages", "refused"),
    [
        (f"sbatch: error: QOSMaxSubmitJobPerUserLimit\n{POLICY}", True),
        ("allocation failure: Requested node configuration is not available\n", False),  # drained
        ("allocation failure: Unable to contact slurm controller (connect failure)\n", False),
    ],
)
def test_a_refusal_is_one_that_sbatch_would_give_too(messages: str, refused: bool) -> None:
    """Slurm takes a job for nodes that are down, and a lost answer says nothing."""
    runner = FakeRunner({"sbatch": [Completed(1, "", messages)]})
    assert start_of("#!/bin/sh\n", runner, {}) == ("", messages * refused)
