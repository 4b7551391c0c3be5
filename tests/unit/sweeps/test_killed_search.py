"""A search on this machine, by the commands that a user types."""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from tests.patience import eventually
from tests.unit.local_runs import Desk

TRIALS = 20 if os.environ.get("HPML_LONG") == "1" else 10
PROGRAM = """\
import json, os, sys
rate, decay = (float(word.partition("=")[2]) for word in sys.argv[1:])
with open(os.environ["HPML_RUN_DIR"] + "/result.json", "w") as file:
    json.dump({"test_accuracy": 1 - abs(rate - 0.5) - decay}, file)
"""
SWEEP = {
    "base": "job.yaml",
    "mode": "bayes",
    "axes": {"--rate": {"low": 0.0, "high": 1.0}, "--decay": [0.0, 0.25]},
    "search": {"trials": TRIALS},
    "budget": {"parallel": 5},
}


def test_a_search_killed_twice_has_all_trials(tmp_path: Path) -> None:
    """By SIGKILL, in `run` and in `resume`: each of the trials ran once and is in the study."""
    desk = Desk(tmp_path)
    desk.job(
        name="probe", script="objective.py", launcher="srun", environment={"python": sys.executable}
    )
    (tmp_path / "objective.py").write_text(PROGRAM)
    (tmp_path / "sweep.yaml").write_text(json.dumps(SWEEP))

    def ran(least: int) -> bool:
        return len([*tmp_path.glob("records/runs/*/result.json")]) >= least

    for ended, words in ((3, ["run", "sweep.yaml", "--local"]), (TRIALS // 2, ["resume", "last"])):
        with desk.launch("sweep", *words) as process:
            eventually(partial(ran, ended))
            process.kill()
        assert process.returncode == -signal.SIGKILL
    desk.hpml("sweep", "resume", "last")

    (journal,) = tmp_path.glob("records/sweeps/*/study.journal")
    storage = JournalStorage(JournalFileBackend(str(journal)))
    trials = optuna.load_study(study_name=journal.parent.name, storage=storage).trials
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * TRIALS
    assert len({trial.user_attrs["run"] for trial in trials}) == TRIALS
    assert not ran(TRIALS + 1)
    for trial in trials:
        assert trial.value == 1 - abs(trial.params["--rate"] - 0.5) - trial.params["--decay"]
