"""Recorded runs with one thing wrong, or two, or nothing: the report finds that, and nothing else.

tests/faultmatrix has the table, and makes the records: real runs, with real faults.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hpml_orchestrator.diagnosis.diagnose import diagnose
from hpml_orchestrator.diagnosis.model import Diagnosis
from hpml_orchestrator.records.store import Store
from hpml_orchestrator.runs.facts import gather
from hpml_orchestrator.runs.status import states
from tests.faultmatrix.conductor import ALL, recorded_cases, restore
from tests.faultmatrix.matrix import CASES, HEALTHY, SEEDS

FAULTS = [one for one in recorded_cases() if one[0] in CASES]
WELL = [one for one in recorded_cases() if one[0] in HEALTHY]
# Other programs kept the machine busy, and so now and then the other rank was the slowest.
UNCERTAIN = {("ddp-slow-rank-quota", 1), ("ddp-slow-rank-quota", 2)}
RIGHT = 0.9  # of the first findings
WITHOUT_DATA = {"slow-start", "slow-staging", "wrong-binding", "time-over-asked"}
"""Findings for which the record of a training that reports nothing is enough."""


def diagnosis(home: Path, run: str) -> Diagnosis:
    """The diagnosis of a run, from its record."""
    store = Store(home)
    return diagnose(gather(states(store, [store.resolve(run)])[0]))


def is_right(found: Diagnosis, name: str, seed: int) -> bool:
    """Whether the first finding is the fault, and the slow rank the one that was slowed down."""
    for first in found.findings[:1]:
        if first.kind == "slow-rank" and "slow-rank" in CASES[name].expected:
            return f"rank {CASES[name].slow_rank(seed)} " in first.verdict
        return first.kind in CASES[name].expected
    return False


def kinds(found: Diagnosis) -> list[str]:
    return [finding.kind for finding in found.findings]


def test_every_case_is_recorded_with_two_seeds() -> None:
    """Whoever adds a case records it."""
    assert {*recorded_cases()} == {(name, seed) for name in ALL for seed in SEEDS}


def test_the_first_finding_is_right(tmp_path: Path) -> None:
    """In nine of ten runs with faults at least."""
    wrong = {}
    for name, seed in FAULTS:
        run = restore(name, seed, tmp_path / f"{name}-{seed}" / "records")
        found = diagnosis(tmp_path / f"{name}-{seed}" / "records", run)
        if not is_right(found, name, seed):
            wrong[name, seed] = [finding.verdict for finding in found.findings]
    assert len(wrong) <= (1 - RIGHT) * len(FAULTS), wrong


@pytest.mark.parametrize(("name", "seed"), FAULTS)
def test_all_faults_are_found(tmp_path: Path, name: str, seed: int) -> None:
    """Two faults are two findings, whatever else is found; or a fault could not be judged."""
    run = restore(name, seed, tmp_path / "records")
    found = diagnosis(tmp_path / "records", run)
    judged = {*CASES[name].expected} - {one.kind for one in found.unknown}
    assert judged <= {*kinds(found)}
    assert judged or (name, seed) in UNCERTAIN


@pytest.mark.parametrize(("name", "seed"), WELL)
def test_nothing_holds_a_healthy_run_back(tmp_path: Path, name: str, seed: int) -> None:
    """Whatever it uses: staging, checkpoints, a monitor, simulated GPUs, PyTorch."""
    run = restore(name, seed, tmp_path / "records")
    found = diagnosis(tmp_path / "records", run)
    assert kinds(found) == []
    assert found.healthy or name == "silent"
    if name == "silent":
        assert len(found.unknown) >= 1


def test_an_older_copy_of_the_waits_file_compares_no_ranks(tmp_path: Path) -> None:
    """It does not count how many steps it measured; all else of the record is judged."""
    found = diagnosis(tmp_path / "records", restore("ddp", 1, tmp_path / "records"))
    (needs,) = (one.needs for one in found.unknown if one.kind == "slow-rank")
    assert "newest `hpml_waits.py`" in needs
    assert any(line.startswith("communication takes") for line in found.healthy)


@pytest.mark.parametrize(("name", "seed"), FAULTS)
def test_without_data_nobody_is_accused(tmp_path: Path, name: str, seed: int) -> None:
    """The same runs, had their training reported nothing and nobody monitored them."""
    run = restore(name, seed, tmp_path / "records", reported=False)
    found = diagnosis(tmp_path / "records", run)
    assert {*kinds(found)} <= WITHOUT_DATA & {*CASES[name].expected}
    assert found.unknown
    assert all(finding.needs for finding in found.unknown)
