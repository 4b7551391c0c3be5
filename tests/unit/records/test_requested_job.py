"""The job of a submission, as this and other versions of hpml recorded it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from hpml_orchestrator.errors import RecordError
from hpml_orchestrator.records.job import Job, Stage, with_unknown
from hpml_orchestrator.records.submission import Submission
from tests.unit.records.old_submissions import OLD, restored

NEWER = {"colour": "red", "resources": {"watts": 300}, "stage": [{"tape": "a"}]}


def asked_part(value: Any, wanted: Any) -> Any:
    """The part of a value that a job file names; what is measured at the submission is left out."""
    if isinstance(value, dict) and isinstance(wanted, dict):
        names = [name for name, one in wanted.items() if (name, one) != ("target", "auto")]
        return {name: asked_part(value[name], wanted[name]) for name in names}
    if isinstance(value, list) and isinstance(wanted, list) and len(value) == len(wanted):
        return [asked_part(*pair) for pair in zip(value, wanted, strict=True)]
    return value


@pytest.mark.parametrize("old", OLD, ids=[old["commit"] for old in OLD])
def test_a_record_of_an_earlier_version_is_the_job_that_was_asked_for(
    old: dict[str, Any], tmp_path: Path
) -> None:
    """Each field has the value of the job file; what the version did not know has its default."""
    wanted, job = old["wanted"], restored(old, tmp_path).requested_job()
    today = TypeAdapter(Job).validate_python(wanted)
    assert asked_part(job.to_json(), wanted) == asked_part(today.to_json(), wanted)
    for name, default in Job.written_defaults().items():
        assert name in old["submit"]["job"] or job.written(name) == default


def test_they_are_of_the_whole_history() -> None:
    """Thirty commits, of which the first knew no arrays, and the last knew checkpoints."""
    assert len({old["commit"] for old in OLD}) == 30
    assert "array" not in OLD[0]["submit"]["job"]
    assert "checkpoint" in OLD[-1]["submit"]["job"]


def recorded(directory: Path, job: object) -> Submission:
    """A submission with this job in its record."""
    record = {"name": "a", "backend": "slurm", "created": 1.0, "job": job, "schema_version": 1}
    (directory / "submit.json").write_text(json.dumps(record))
    return Submission(directory)


def test_fields_of_a_newer_version_are_kept_and_not_fatal(tmp_path: Path) -> None:
    """Also those of a part, and of an entry of a list."""
    job = Job(name="a", script="/a.py", stage=(Stage(name="data", source="/data"),))
    written = job.to_json()
    newer = {
        **written,
        **NEWER,
        "resources": {**written["resources"], **NEWER["resources"]},  # type: ignore[dict-item]
        "stage": [{**written["stage"][0], "tape": "a"}],
    }
    assert recorded(tmp_path, newer).requested_job() == job
    assert with_unknown(written, newer) == newer


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"name": 7}, "name: 7 is not of type str"),
        ({"resources": []}, "resources: [] is not a mapping"),
        ({"resources": {"nodes": "two"}}, "resources: nodes: 'two' is not of type int"),
        ({"resources": {"nodes": True}}, "resources: nodes: True is not of type int"),
        ({"resources": {"time": "soon"}}, "resources: time: must be a time limit"),
        ({"args": "--fast"}, "args: '--fast' is not of type list"),
        ({"stage": [{"name": "data"}]}, "stage: "),
        ({"environment": {"variables": []}}, "environment: variables: [] is not of type dict"),
    ],
)
def test_a_damaged_job_is_named(fields: dict[str, Any], why: str, tmp_path: Path) -> None:
    """The file, the field and what is there; nothing fails later, where the value is used."""
    submission = recorded(tmp_path, {"name": "a", **fields})
    with pytest.raises(RecordError) as caught:
        submission.requested_job()
    start = f"{tmp_path}/submit.json is damaged: its job cannot be read ({why}"
    assert str(caught.value).startswith(start)
