"""Real `submit.json` of 30 earlier commits: each submitted a job with many fields, by its own code.

A line of `old_submissions.jsonl.gz` has the commit, its date, the job file (`wanted`), the record
(`submit`) and the table of runs. Paths and names of the machine were replaced.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from hpml_orchestrator.records.submission import Submission

OLD: list[dict[str, Any]] = [
    json.loads(line)
    for line in gzip.decompress(Path(__file__).with_suffix(".jsonl.gz").read_bytes()).splitlines()
]


def restored(old: dict[str, Any], records: Path) -> Submission:
    """Put the records of a submission, and the directories of its runs, below another root."""
    directory = records / "submissions" / old["submit"]["sid"]
    directory.mkdir(parents=True)
    (directory / "submit.json").write_text(json.dumps(old["submit"]))
    (directory / "runs.tsv").write_text(old["table"])
    for _, run in Submission(directory).runs():
        (records / "runs" / run).mkdir(parents=True)
    return Submission(directory)
