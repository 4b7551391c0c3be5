"""Runs whose diagnosis proposes a change, for the tests of `--apply` and `--try`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpml_orchestrator.diagnosis.apply import Chosen, choose_changes
from hpml_orchestrator.diagnosis.model import Change, Diagnosis, Facts, Finding
from hpml_orchestrator.jobfile.load import parse_setting
from hpml_orchestrator.records.store import Store
from hpml_orchestrator.records.submission import Submission
from hpml_orchestrator.runs.apply import ChangedFile, changed_file, write_changed
from hpml_orchestrator.runs.load import load_job
from hpml_orchestrator.runs.prepare import prepare, render_job
from hpml_orchestrator.script.render import Capabilities


class Desk:
    """A directory of jobs, and the records of their runs."""

    def __init__(self, root: Path) -> None:
        self.root, self.data = root, root / "data"
        self.data.mkdir()
        (self.data / "a").write_text("a")
        (root / "train.py").write_text("")
        self.store = Store(root / "records")

    def ran(self, text: str, *settings: str, name: str = "job.yaml", **record: Any) -> Submission:
        """Write a job file, and a run of it."""
        path = self.root / name
        path.write_text(text.replace("{data}", str(self.data)))
        points = record.pop("placeholders", ())
        job = load_job(path, [*map(parse_setting, settings)], points=points, backend="local")
        return prepare(
            self.store,
            render_job(job, Capabilities("/usr/bin/python3")),
            cluster="",
            argv=["hpml", "run"],
            environment={"PATH": "/bin"},
            record=record,
        )

    def tuned(self, run: Submission, *changes: Change, to: str = "tuned.yaml") -> ChangedFile:
        """The new job file, written, with the changes that were chosen."""
        made = changed_file(run, chosen(run, *changes), self.root / to)
        write_changed(made)
        return made


def chosen(run: Submission, *changes: Change) -> Chosen:
    """One finding for each change."""
    findings = [
        Finding("slow", "warning", f"fault {n}", changes=[c]) for n, c in enumerate(changes)
    ]
    facts = Facts(run.label, "COMPLETED", over=True, job=run.requested_job())
    return choose_changes(Diagnosis(facts, findings))
