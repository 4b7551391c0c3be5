"""What `hpml report --apply` changed in a job, and whether a later run was faster for it.

A report reads one file for the name of the job, and another run's record only if its own job has
every value that was set after that run.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.diagnosis.model import Change
from hpml_orchestrator.diagnosis.shares import doubts, steps_known, training_seconds
from hpml_orchestrator.diagnosis.thresholds import THRESHOLDS
from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.jobfile.load import field_value
from hpml_orchestrator.records.files import SCHEMA_VERSION, append_line, read_json_lines
from hpml_orchestrator.runs.facts import gather
from hpml_orchestrator.runs.status import state_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from hpml_orchestrator.diagnosis.apply import Chosen
    from hpml_orchestrator.diagnosis.model import Diagnosis, Facts, Finding
    from hpml_orchestrator.records.job import Job
    from hpml_orchestrator.records.store import Store

_HELPED = 1.05  # smaller differences may be noise
_BEFORE_TRAINING = ("slow-start", "slow-staging")


def record_applied(store: Store, run: str, chosen: Chosen, job: Job) -> None:
    """Record the changes that should speed up the training of a job, if that can be written.

    Args:
        store: of the run.
        run: its label.
        chosen: the changes that were made for its findings.
        job: the changed one.
    """
    kinds = {
        one.finding.kind: [*one.fields]
        for one in chosen.made
        if THRESHOLDS[one.finding.kind].gain_if and one.finding.kind not in _BEFORE_TRAINING
    }
    # with other arguments a run does other work
    names, document = ("args", "command", *chosen.fields), job.to_json()
    fields = {name: field_value(document, name) for name in names}
    line = {"schema_version": SCHEMA_VERSION, "run": run, "kinds": kinds, "fields": fields}
    with suppress(OSError):
        _file(store, job.name).parent.mkdir(exist_ok=True)
        append_line(_file(store, job.name), json.dumps(line))


def with_results(diagnosis: Diagnosis, store: Store) -> Diagnosis:
    """Return a diagnosis without the changes that its job has already and that did not help."""
    facts, findings = diagnosis.facts, {one.kind: one for one in diagnosis.findings}
    document = facts.job.to_json()
    # nothing was applied, the earlier run is gone, or another version wrote the file
    with suppress(HpmlError, LookupError, TypeError):
        lines = {line["run"]: line for line in read_json_lines(_file(store, facts.job.name))}
        for line in lines.values():
            fields, kinds = line["fields"], {*line["kinds"]} & {*findings}
            if not kinds or not all(
                _has(field_value(document, one), fields[one]) for one in fields
            ):
                continue
            speedup = _speedup(gather(state_of(store, store.resolve(line["run"]))), facts)
            if speedup is None or speedup >= _HELPED:
                continue
            for kind in kinds:
                findings[kind] = _without(findings[kind], line["kinds"][kind], line, speedup)
    return replace(diagnosis, findings=tuple(findings.values()))


def _without(
    finding: Finding, names: Sequence[str], line: Mapping[str, Any], speedup: float
) -> Finding:
    values = {one: line["fields"][one] for one in names}
    words = ", ".join(
        f"`{one}`" if isinstance(value, (list, dict)) else f"`{one}: {value}`"
        for one, value in values.items()
    )
    text = f"{words} was set after {line['run']} and made it {speedup:.2f} times as fast"
    # A list may name other things than before, such as a second node to leave out
    changes = [
        one for one in finding.changes if one.field not in names or isinstance(one.value, list)
    ]
    if speedup < 1 / _HELPED:
        changes.insert(0, Change(f"take {words} back"))
    return replace(finding, evidence=[*finding.evidence, text], changes=changes)


def _has(value: object, wanted: object) -> bool:
    """Whether a job has a value; it may have chosen one where the job file leaves it open."""
    if isinstance(wanted, dict) and isinstance(value, dict):
        return all(_has(value.get(name), inner) for name, inner in wanted.items())
    if isinstance(wanted, list) and isinstance(value, list):
        return len(wanted) == len(value) and all(map(_has, value, wanted))
    return wanted in (value, None, "auto")


def _speedup(earlier: Facts, now: Facts) -> float | None:
    speeds = [
        sum(rank.steps or 0.0 for rank in facts.ranks) / sum(map(training_seconds, facts.ranks))
        for facts in (earlier, now)
        if steps_known(facts)
    ]
    if len(speeds) < len((earlier, now)) or earlier.run == now.run or any(doubts(earlier, now)):
        return None
    return speeds[1] / speeds[0]


def _file(store: Store, name: str) -> Path:
    return store.root / "applied" / f"{name}.jsonl"
