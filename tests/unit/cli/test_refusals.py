"""What is wrong is named, with what would be right: one error, its status, and nothing done."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.records.store import Store
from hpml_orchestrator.testing.scheduler import FakeScheduler, Fault
from tests.unit.cli.support import Hpml, Result, Shell

GOOD = "name: good\nlauncher: srun\ncommand: ['true']\n"
OLD = ("probe-20240101-000000-aaaaaa", "probe-20240102-000000-bbbbbb")

# command line, exit status, message, hint
LINES = [
    ("sumbit x", 2, "No such command 'sumbit'. Did you mean 'submit', 'resubmit'?", "hpml --help"),
    ("good.yaml", 2, "No such command 'good.yaml'", "hpml run good.yaml"),
    ("--records x", 2, "Missing command", "hpml --help"),
    ("render j --jsn", 2, "No such option: --jsn (", "hpml render --help"),
    ("list --records x", 2, "No such option: --records", "before the command: hpml --records … li"),
    ("submit --set", 2, "Option '--set' requires an argument", "see the command's --help"),
    ("list -n 0", 2, "Invalid value for '--number' / '-n' / '--limit': ", "hpml list --help"),
    ("logs -n many", 2, "'many' is not a valid int", "hpml logs --help"),
    ("render a b", 2, "Got unexpected extra argument(s) (b)", "hpml render --help"),
    (
        "run j nodes=3",
        2,
        "Got unexpected extra argument(s)",
        "set a field of the job file: --set n",
    ),
    ("run", 2, "Missing argument 'JOB_FILE'", "hpml run job.yaml"),
    ("submit", 2, "JOB_FILE: must be given", "hpml submit job.yaml"),
    ("run j --backend slrum", 2, "--backend: must be auto, slurm or local", "did you mean slurm?"),
    ("submit good.yaml --local --backend slurm", 2, "--backend: cannot be given together", ""),
    ("submit --resume last --set name=x", 2, "--set: cannot be given together with --r", ""),
    ("submit good.yaml --set resource.nodes=2", 2, "resource: unknown field; did you", ""),
    ("submit good.yaml --set lr=0.5", 2, "lr: unknown field", "to the end: -- --lr=0.5; "),
    ("submit none.yaml", 3, "no such job file: ", ""),
    ("advise none.yaml", 3, "no such job file: ", ""),
    ("advise good.yaml", 2, "command: is not a Python program that can be measured", "--model 7B"),
    ("advise good.yaml --device-memory lots", 2, "--device-memory: must be a size such as", ""),
    ("advise good.yaml --device-memory 80G", 2, "--device-memory: the job asks for no GPU", ""),
    ("advise good.yaml --device-memory 0", 2, "--device-memory: must be", ""),
    ("advise good.yaml --time-limit 0", 2, "--time-limit: must be between 1 and 3600", ""),
    ("advise good.yaml --model seven", 2, "--model parameters: must be a number such as 7B", ""),
    ("advise good.yaml --model resnet50", 2, "--model parameters", "needs a measured run"),
    ("advise good.yaml --model=", 2, "--model: must not be empty", ""),
    ("submit closed.yaml", 2, "closed.yaml: Permission denied", ""),
    ("render good.yaml --explain -o out", 2, "--explain: cannot be given together with --o", ""),
    ("render good.yaml --force", 2, "--force: needs --output DIR", ""),
    ("render good.yaml -o good.yaml/x", 2, "--output: cannot be written", ""),
    ("schema cluster", 2, "'cluster' is not one of 'job', 'site', 'sweep'", ""),
    ("show nothing", 3, "no run 'nothing' under ", ""),
    ("show prob", 2, "RUN: names 2 runs: probe-20240102-000000-bbbbbb (2024-01-0", ""),
    ("report prob", 2, "RUN: names 2 runs: probe-20240102-000000-bbbbbb (2024-01-0", "more of"),
    ("cancel last nothing", 3, "no run 'nothing' under ", "nothing was cancelled; "),
    ("--records nowhere show last", 3, "no such directory of records: ", "first `hpml run` there"),
    ("--records nowhere list", 3, "no such directory of records: ", "--records, in Python"),
    ("--records nowhere sweep status", 3, "no such directory of records: ", ""),
    ("run old.sbatch", 2, "old.sbatch is a shell script, not a job file", "hpml import "),
    ("check old.sbatch", 2, "old.sbatch is a shell script, not a job file", "hpml import "),
    ("render train", 2, "train is a shell script, not a job file", "hpml import "),
    ("submit train.py", 2, "train.py is a Python program, not", "`name: train` and `script: train"),
    ("--records sealed submit --no-check good.yaml", 7, "cannot write records under ", "HPML_HOME"),
    ("prune --yes", 2, "choose runs with RUN, --older-than, --state or --k", ""),
    ("prune --state running", 2, "--state: must be final states (got 'running')", "COMPLETED"),
    ("top --prometheus http://[::1", 2, "--prometheus: must be an http or https address", "for ex"),
    ("top --prometheus http://h:99999", 2, "--prometheus: must be an http or https address", "fo"),
    ("top --prometheus http://a..b", 2, "--prometheus: must be an http or https address", "for ex"),
    ("dashboards show --prometheus http://[::1", 2, "--prometheus: must be an http", "for example"),
    ("dashboards show --listen [::1", 2, "--listen: must be a port", "--listen 8080"),
    ("export slurm --source openmetrics", 2, "--source: no such source", "docs/slurm-exporter.md"),
    ("export node --listen [::1", 2, "--listen: not an address with a port", "ADDRESS:PORT"),
    ("export slurm --listen 127.example.org", 2, "--listen: not an address with a port", "ADDR"),
    ("targets --serve [zz]:1", 2, "--serve: zz: unknown host name", "ADDRESS:PORT"),
    ("pack", 2, "SOURCE: must be given", "hpml pack SOURCE DEST"),
    ("pack directory x --shard-size 1Q", 2, "--shard-size: must be a size", ""),
    ("stage", 2, "SRC: must be given", "hpml stage data --to shm"),
    ("stage s3://b/x", 2, "hpml stages files, not URLs", "aws s3 cp --recursive s3://b/x ./x"),
    ("stage nowhere", 3, "no such file or directory: ", "commands ls, verify, clean"),
    ("stage directory --to smh", 2, "--to: must be auto, shm, local or the path", "--to ./smh"),
    ("stage directory --to local --local-dir /nosuch", 2, "--local-dir: no such directory on", ""),
    ("stage directory --keep", 2, "No such option: --keep", "hpml stage --help"),
    ("stage directory --print size", 2, "'size' is not one of 'path', ", ""),
    ("stage verify", 2, "Missing argument 'PATH'", "hpml stage verify"),
    ("stage verify directory", 3, "", "hpml stage ls"),
    ("stage clean --older soon", 2, "--older: must be a number with a unit", ""),
    ("stage clean nowhere", 3, "no such directory: ", "give shm, local or a directory"),
    ("export node --listen localhost", 2, "--listen: not an address with a port", "9445"),
    ("export node --web-config none.yml", 2, "--web-config: cannot be read: No such file", ""),
    ("export node --root dev=/x", 2, "--root: must be NAME=DIR (got 'dev=/x')", "NAME is one of"),
]
# as above, for options that are given without a word, as by an unset variable of the shell
EMPTY = [
    ("render good.yaml --output", "--output"),
    ("cancel --name", "--name"),
    ("list --since", "--since"),
    ("list --name", "--name"),
    ("list --sweep", "--sweep"),
    ("stage directory --local-dir", "--local-dir"),
    ("export node --web-config", "--web-config"),
]
# fields of a job that is in order and cannot run here, the field of the error
CANNOT_RUN: list[tuple[dict[str, Any], str]] = [
    ({"command": None, "script": "nowhere.py"}, "script"),
    ({"workdir": "nowhere"}, "workdir"),
    ({"environment": {"venv": "nowhere"}}, "environment.venv"),
    ({"stage": [{"name": "d", "source": "nowhere"}]}, "stage.0.source"),
    ({"resources": {"nodes": 2}}, "resources.nodes"),
    ({"resources": {"memory": "900T"}}, "resources.memory"),
    ({"mpi": "pmix"}, "mpi"),
    ({"snapshot": True}, "snapshot"),
]


@pytest.fixture(scope="module")
def place(shell: Shell) -> Path:
    """A directory of good and bad things, and two old runs."""
    root = shell.root
    (root / "good.yaml").write_text(GOOD)
    (root / "old.sbatch").write_text("#!/bin/bash -l\n#SBATCH --nodes=2\nsrun python x.py\n")
    (root / "train").write_text("#!/usr/bin/env bash\npython x.py\n")
    (root / "train.py").write_text("import torch\n")
    (root / "directory").mkdir()
    os.mkfifo(root / "pipe")
    (root / "closed.yaml").write_text(GOOD)
    (root / "closed.yaml").chmod(0)
    (root / "sealed").mkdir(mode=0o500)
    store = Store(shell.records)
    for sid in OLD:
        store.prepare(sid, script="", shared={}, submit={}, runs={0: {}})
    return root


@pytest.fixture(autouse=True)
def nothing_done(place: Path, slurm: FakeScheduler) -> Iterator[None]:
    """Whatever is refused leaves no record, no file and no job."""
    before = sorted({*os.listdir(place), "bin", "job.yaml", "cannot.yaml"})
    yield
    assert sorted(os.listdir(place / "records" / "submissions")) == sorted(OLD)
    assert set(os.listdir(place)) <= set(before)
    assert os.listdir(place / "sealed") == []
    assert not slurm.jobs


def refused(ended: Result, code: int, message: str, hint: str = "") -> None:
    """One message that names the mistake, and the right status."""
    assert ended.refuses(code)
    lines = ended.err.splitlines()
    assert message in lines[0], ended.err
    assert "Traceback" not in ended.err
    assert hint in "".join(line for line in lines if line.startswith("hint: ")), ended.err


@pytest.mark.parametrize(("line", "code", "message", "hint"), LINES, ids=[one[0] for one in LINES])
def test_a_wrong_command_line(
    hpml: Hpml, shell: Shell, line: str, code: int, message: str, hint: str
) -> None:
    """Field, value and what would be right; nothing is written down and nothing submitted."""
    if "closed" in line or "sealed" in line:  # root passes over modes
        ended = shell.bash('"$@"', *line.split())
    else:
        ended = hpml(*line.split())
    refused(ended, code, message, hint)


@pytest.mark.parametrize(("line", "option"), EMPTY)
def test_an_option_without_a_word(hpml: Hpml, line: str, option: str) -> None:
    """An unset variable of the shell is not taken for no option."""
    refused(hpml(*line.split(), " "), 2, f"{option}: must not be empty")
    refused(hpml(*line.split(), ""), 2, f"{option}: must not be empty")


def test_several_faults_are_named_at_once(hpml: Hpml, place: Path) -> None:
    """Each field on its own line."""
    (place / "job.yaml").write_text("name: a b\nscript: x\nresorces: {}\nresources: {nodes: 0}\n")
    ended = hpml("render", "job.yaml")
    assert (ended.code, ended.out) == (2, "")
    assert "             resources.nodes: must be at least 1" in ended.err
    assert "resorces: unknown field; did you mean resources?" in ended.err


@pytest.mark.parametrize(("fields", "field"), CANNOT_RUN, ids=[one[1] for one in CANNOT_RUN])
def test_a_job_that_cannot_run_here(
    shell: Shell, hpml: Hpml, fields: dict[str, Any], field: str
) -> None:
    """One error that names the field, exit status 2, no record; `check` finds the same."""
    job = shell.job("cannot", **fields)
    ended = hpml("submit", job, "--local")
    refused(ended, 2, field)
    if field in {"mpi", "snapshot"}:  # of the submission, not of the job
        return
    checked = hpml("check", job, "--local", "--json")
    assert checked.code == 2
    errors = [one["field"] for one in checked.json()["findings"] if one["level"] == "error"]
    assert any(field in name for name in errors)


def test_a_good_job_reaches_slurm(hpml: Hpml, slurm: FakeScheduler, tmp_path: Path) -> None:
    """So the tests above can fail; what Slurm itself refuses is its error, with status 4 or 5."""
    submit = ("--records", str(tmp_path), "submit", "--no-check", "good.yaml")
    assert hpml(*submit).code == 0
    assert len(slurm.jobs) == 1
    slurm.jobs.clear()
    slurm.faults = [Fault.REFUSED]
    assert hpml(*submit).refuses(4, "Invalid account specified")
    slurm.faults = [Fault.UNAVAILABLE]
    assert hpml(*submit).refuses(5, "hpml submit --resume good-")
