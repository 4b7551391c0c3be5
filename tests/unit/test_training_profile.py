"""`--profile` of a training with a slow rank: its report names the rank, its layer and its code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpml_orchestrator.diagnosis.diagnose import diagnose
from hpml_orchestrator.diagnosis.profile import read_profile
from hpml_orchestrator.diagnosis.report import Report
from tests.unit.diagnosis.test_findings import facts, slow
from tests.unit.training_runs import TRAINS, run_forked

# Busy cores make either rank the slow one.
pytestmark = [TRAINS, pytest.mark.alone]

# In its forward pass rank 1 counts; both parse, which is C code that Python calls.
SLOW = """
import json, time
linear = job.torch.nn.Linear.forward
words = json.dumps([*range(30_000)])

def tokenise():
    end = time.thread_time() + 0.04
    while time.thread_time() < end:
        sum([*range(1000)])

def forward(self, inputs):
    if self.out_features == 10:
        json.loads(words)
        rank == 1 and tokenise()
    return linear(self, inputs)

job.torch.nn.Linear.forward = forward
"""


def test_the_report_names_the_slow_rank_and_its_code(tmp_path: Path) -> None:
    """The critical path is rank 1's work, and the functions are rank 1's."""
    where = tmp_path / "profile"
    arguments = ["--epochs=1", "--width=32", "--run-on", "--warm-up-steps=2", f"--profile={where}"]
    run_forked(tmp_path, "communication", [(2, arguments, SLOW)], ["sklearn.datasets"])
    profile = read_profile(where)
    assert profile is not None
    assert profile.path is not None
    first = profile.path.parts[0]
    assert (first.kind, first.rank) == ("work", 1)
    assert first.seconds > 0.035
    assert profile.path.waits.startswith("all-reduce")
    assert profile.path.gain_seconds > 0.01
    python = profile.python
    assert python is not None
    assert (python.rank, python.steps) == (1, 5)
    costs = {one.name: one for one in python.functions}
    assert costs["tokenise"].seconds > 0.03
    assert costs["tokenise"].place == "<string>:6"
    assert costs["raw_decode"].place.startswith("json/decoder.py:")
    assert python.python_seconds + python.waiting_seconds < python.step_seconds
    shown = replace(facts(ranks=slow()), profile=profile)
    printed = str(Report(diagnose(shown)))
    assert len(printed.splitlines()) <= 40
    assert "\npath      of a step of " in printed
    assert "\nthe rest  rank 1 in 5 steps of " in printed
    assert " tokenise  <string>:6\n" in printed
    for line in python.lines(10):
        assert line in Report(diagnose(shown)).markdown()
    (where / "functions-rank1.json").write_text('{"steps": 0}')
    again = read_profile(where)
    assert again is not None
    assert again.python is not None
    assert again.python.rank == 0, "of a rank whose file is whole"
