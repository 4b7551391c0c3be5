"""A change that was applied and did not help is said to be so, and not proposed again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpml_orchestrator.diagnosis.apply import changed_job, choose_changes
from hpml_orchestrator.diagnosis.diagnose import diagnose
from hpml_orchestrator.diagnosis.model import Change, Diagnosis
from hpml_orchestrator.records.store import Store
from hpml_orchestrator.runs.applied import record_applied, with_results
from hpml_orchestrator.runs.facts import gather
from hpml_orchestrator.runs.status import state_of
from tests.faultmatrix.conductor import restore

WORKERS = Change("start 2 loader workers", "args.0", "--workers=2")
MORE = Change("start 4 loader workers", "args.0", "--workers=4")


def ran(store: Store) -> Diagnosis:
    """The diagnosis of a run of the store that waits for data."""
    run = restore("few-loader-workers", 1, store.root)
    return diagnose(gather(state_of(store, store.resolve(run))))


def apply_workers(store: Store, before: Diagnosis) -> None:
    """What `report --apply` does, if the change is more workers."""
    found = replace(before.findings[0], changes=[WORKERS])
    chosen = choose_changes(replace(before, findings=(found,)))
    job = changed_job(before.facts.job, chosen.fields)
    record_applied(store, before.facts.run, chosen, job)


def later(before: Diagnosis, field: str, value: str, seconds: float) -> Diagnosis:
    """The diagnosis of a run with an argument more, which took so many times as long."""
    facts = before.facts
    ranks = [
        replace(one, step_seconds=seconds * (one.step_seconds or 0), seconds=None)
        for one in facts.ranks
    ]
    job = changed_job(facts.job, {field: value})
    (found,) = before.findings
    found = replace(found, changes=[MORE, *found.changes])
    return replace(
        before,
        facts=replace(facts, run="later", job=job, ranks=ranks),
        findings=(found,),
    )


@pytest.mark.parametrize(
    ("argument", "seconds", "text"),
    [
        ("--workers=2", 1.0, "made it 1.00 times as fast"),
        ("--workers=2", 0.97, "made it 1.03 times as fast"),
        ("--workers=2", 1.8, "made it 0.56 times as fast"),
        ("--workers=2", 0.9, ""),  # it helped
        ("--workers=3", 1.0, ""),  # another change than that one
    ],
)
def test_what_did_not_help_is_not_proposed_again(
    tmp_path: Path, argument: str, seconds: float, text: str
) -> None:
    """The next report has the speed beside the finding, and other advice."""
    store = Store(tmp_path / "records")
    before = ran(store)
    given = later(before, "args.0", argument, seconds)
    assert with_results(given, store) == given  # nothing was applied
    apply_workers(store, before)
    (now,) = with_results(given, store).findings
    told = [line for line in now.evidence if "times as fast" in line]
    changed = f"`args.0: --workers=2` was set after {before.facts.run}"
    assert told == ([f"{changed} and {text}"] if text else [])
    assert (MORE in now.changes) == (not text)
    assert any("prepare the data" in one.text for one in now.changes)
    assert now.changes[0].text.startswith("take `args.0") == (seconds > 1.05)
    assert with_results(before, store) == before  # nothing is said about the run itself


def test_other_arguments_are_other_work(tmp_path: Path) -> None:
    """The speed with other data shows nothing about the workers."""
    store = Store(tmp_path / "records")
    before = ran(store)
    apply_workers(store, before)
    given = later(later(before, "args.0", "--workers=2", 1.0), "args.1", "--data=other", 1.0)
    assert with_results(given, store) == given
