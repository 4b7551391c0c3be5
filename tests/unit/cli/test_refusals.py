"""What is wrong is named, with what would be right: one error, its status, and nothing done."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.records.store import Store
from tests.unit.cli.support import Hpml, Result, Shell, as_anybody

GOOD = "name: good\nlauncher: srun\ncommand: ['true']\n"
OLD = ("probe-20240101-000000-aaaaaa", "probe-20240102-000000-bbbbbb")
MARK = "sbatch-was-called"

# command line, exit status, message, hint
LINES = [
    ("sumbit x", 2, "COMMAND: hpml has no such command (got 'sumbit')", "hpml submit?"),
    ("LIST", 2, "COMMAND: hpml has no such command (got 'LIST')", "did you mean hpml list?"),
    ("good.yaml", 2, "COMMAND: hpml has no such command (got 'good.yaml')", "hpml run good.yaml"),
    ("frobnicate", 2, "COMMAND: hpml has no such command", "commands: run, submit"),
    ("template ejct", 2, "COMMAND: hpml template has no such command", "hpml template eject?"),
    ("--records x", 2, "COMMAND: must be given", "hpml --help"),
    ("render j --jsn", 2, "--jsn: hpml render has no such option", "did you mean --json?"),
    ("--recods x list", 2, "--recods: hpml has no such option", "did you mean --records?"),
    ("list --zzz", 2, "--zzz: hpml list has no such option", "hpml list --help"),
    ("stage ls --frob", 2, "--frob: hpml stage ls has no such option", "hpml stage ls --help"),
    ("list --records x", 2, "--records: goes before the command: hpml --records … list", ""),
    ("submit --set", 2, "--set: needs a value", "see the command's --help"),
    ("list -n", 2, "-n: needs a value", ""),
    ("show --json=x", 2, "--json: takes no value", ""),
    ("list -n 0", 2, "--number: must be a whole number, 1 or more (got '0')", ""),
    ("logs -n many", 2, "--lines: must be a whole number, 0 or more (got 'many')", ""),
    ("render a b", 2, "hpml render: unexpected argument (got 'b')", "hpml render --help"),
    ("run j nodes=3", 2, "hpml run: unexpected argument", "set a field with --set nodes=3"),
    ("run", 2, "JOB_FILE: must be given", "hpml run job.yaml"),
    ("submit", 2, "JOB_FILE: must be given", "hpml submit job.yaml"),
    ("cancel", 2, "RUN: must be given", "hpml cancel last"),
    ("run j --backend slrum", 2, "--backend: must be auto, slurm or local", "did you mean slurm?"),
    ("submit good.yaml --local --backend slurm", 2, "--backend: cannot be given together", ""),
    ("submit good.yaml --resume last", 2, "JOB_FILE: cannot be given together with --r", ""),
    ("submit --resume last --set name=x", 2, "--set: cannot be given together with --r", ""),
    ("submit --resume nothing", 3, "no run 'nothing' under ", "`hpml list`"),
    ("submit good.yaml --set x", 2, "--set: must be FIELD=VALUE, such as resources.nodes=4", ""),
    ("submit good.yaml --set resource.nodes=2", 2, "resource: there is no such field; did you", ""),
    ("submit good.yaml --set resources.nodes=two", 2, "resources.nodes: must be a whole num", ""),
    ("submit none.yaml", 3, "no such job file: ", ""),
    ("submit directory", 2, "directory is not a regular file", ""),
    ("submit pipe", 2, "pipe is not a regular file", ""),
    ("submit /dev/zero", 2, "/dev/zero is not a regular file", ""),
    ("submit closed.yaml", 2, "closed.yaml: Permission denied", ""),
    ("check none.yaml", 3, "no such job file: ", ""),
    ("render good.yaml --explain -o out", 2, "--explain: cannot be given together with --o", ""),
    ("render good.yaml --force", 2, "--force: needs --output DIR", ""),
    ("render good.yaml -o good.yaml/x", 2, "--output: cannot be written", ""),
    ("schema sweep", 2, "WHAT: must be job or site (got 'sweep')", ""),
    ("show nothing", 3, "no run 'nothing' under ", ""),
    ("show probe", 2, "RUN: names 2 runs: probe-20240102-000000-bbbbbb, probe-2024010", ""),
    ("show lsat", 3, "no run 'lsat' under", "did you mean last?"),
    ("status nothing", 3, "no run 'nothing' under ", ""),
    ("logs nothing", 3, "no run 'nothing' under ", ""),
    ("wait 99999", 3, "no run '99999' under ", ""),
    ("cancel last nothing", 3, "no run 'nothing' under ", "nothing was cancelled; "),
    ("--records nowhere show last", 3, "no runs under ", "hpml run"),
    ("--records good.yaml list", 7, "cannot read ", ""),
    ("--records sealed submit --no-check good.yaml", 7, "cannot write records under ", "HPML_HOME"),
    ("prune --yes", 2, "say which runs: RUN, --older-than, --state or --keep", ""),
    ("prune --state running", 2, "--state: must be final states (got 'running')", "COMPLETED"),
    ("prune --older-than 3", 2, "--older-than: must be a number with a unit", ""),
    ("prune probe-20240101-000000-aaaaaa.0", 2, "RUN: names a task, but the run is no ", ""),
    ("pack", 2, "SOURCE: must be given", "hpml pack SOURCE DEST"),
    ("pack directory", 2, "DEST: must be given", ""),
    ("pack nowhere x", 3, "no such directory: nowhere", ""),
    ("pack good.yaml x", 2, "SOURCE: must be a directory", ""),
    ("pack directory directory/x", 2, "DEST: must not be inside SOURCE", ""),
    ("pack directory x --shard-size 1Q", 2, "--shard-size: must be a size", ""),
    ("pack directory x --shard-size 1K", 2, "--shard-size: must be at least 64K", ""),
    ("pack directory --list x", 2, "SOURCE: cannot be given together with --list", ""),
    ("pack --resume --verify x", 2, "--resume: cannot be given together with --verify", ""),
    ("pack --verify directory", 3, "", ""),
    ("stage", 2, "SRC: must be given", "hpml stage data --to shm"),
    ("stage nowhere", 3, "no such file or directory: ", "commands ls, verify, clean"),
    ("stage verfy x", 3, "no such file or directory: ", "did you mean `hpml stage verify`?"),
    ("stage directory --to smh", 2, "--to: must be auto, shm, local or the path", "--to ./smh"),
    ("stage directory --to ./none", 2, "--to: no such directory on this node", ""),
    ("stage directory --to local --local-dir /nosuch", 2, "--local-dir: no such directory on", ""),
    ("stage directory --to ./directory", 2, "SRC: source and target lie in one another", ""),
    ("stage directory bin --name x", 2, "--name: names one source, and there are 2", ""),
    ("stage directory --name No", 2, "--name: must be a small letter", ""),
    ("stage directory --kind rar", 2, "--kind: must be one of auto, ", ""),
    ("stage directory --kind file", 2, "SRC: kind file but a directory", ""),
    ("stage directory --print size", 2, "--print: must be one of path, ", ""),
    ("stage directory --print path --json", 2, "--json: cannot be given together with --p", ""),
    ("stage directory --to shm --epochs 3", 2, "--epochs: cannot be given together", ""),
    ("stage directory --processes 0", 2, "--processes: must be a whole number, 1 or more", ""),
    ("stage verify", 2, "PATH: must be given", "hpml stage verify"),
    ("stage verify directory", 3, "", "hpml stage ls"),
    ("stage clean --older soon", 2, "--older: must be a number with a unit", ""),
    ("stage clean --older 1d --all", 2, "--all: cannot be given together with --older", ""),
    ("stage clean nowhere", 3, "no such directory: ", "DIR is shm, local or a directory"),
    ("export node there", 2, "hpml export node: unexpected argument (got 'there')", ""),
    ("export node --no-gpus", 2, "--no-gpus: hpml export node has no such option", "--no-gpu?"),
    ("export node --listen localhost", 2, "--listen: no address with a port", "9445"),
    ("export node --listen :99999", 2, "--listen: no port (got ':99999')", "a port is a number"),
    ("export node --gpu-interval 0", 2, "--gpu-interval: must be 0.1 to 3600 seconds", ""),
    ("export node --job-interval nan", 2, "--job-interval: must be 0.1 to 3600 seconds", ""),
    ("export node --process-interval x", 2, "--process-interval: must be a number (got 'x')", ""),
    ("export node --exit-seconds 9", 2, "--exit-seconds: must be more than --stuck-seconds", ""),
    ("export node --web-config none.yml", 2, "--web-config: cannot be read: No such file", ""),
    ("export node --root dev=/x", 2, "--root: must be NAME=DIR (got 'dev=/x')", "NAME is one of"),
]
# as above, for options that are given without a word, as by an unset variable of the shell
EMPTY = [
    ("render good.yaml --output", "--output"),
    ("template eject srun --output", "--output"),
    ("stage directory --name", "--name"),
    ("stage directory --local-dir", "--local-dir"),
    ("export node --web-config", "--web-config"),
    ("export node --address-file", "--address-file"),
]
# content of a job file, part of the message
FILES: dict[str, tuple[str | bytes, str]] = {
    "unknown key": (f"{GOOD}resorces: {{}}\n", "resorces: there is no such field; did you mean r"),
    "wrong type": (f"{GOOD}resources: {{nodes: many}}\n", "resources.nodes: must be a whole num"),
    "a directive": (f'{GOOD}resources: {{partition: "a\\n#SBATCH -x"}}\n', "resources.partition: "),
    "two programs": (f"{GOOD}script: x.py\n", "give exactly one of script, module and command"),
    "duplicate keys": (f"{GOOD}name: again\n", "is not YAML: while constructing a mapping in line"),
    "a tag that runs Python": (
        "name: !!python/object/apply:os.system ['touch pwned']\n",
        "could not determine a constructor for the tag",
    ),
    "empty": ("", "job.yaml holds no fields"),
    "binary": (bytes(range(256)) * 8, "job.yaml is not UTF-8 text (byte 128)"),
    "five megabytes": (b"#" * 5_000_000, "job.yaml is over 4194304 bytes"),
}
# fields of a job that is in order and cannot run here, the field of the error
CANNOT_RUN: list[tuple[dict[str, Any], str]] = [
    ({"command": None, "script": "nowhere.py"}, "script"),
    ({"workdir": "nowhere"}, "workdir"),
    ({"environment": {"venv": "nowhere"}}, "environment.venv"),
    ({"environment": {"conda": "./nowhere"}}, "environment.conda"),
    ({"stage": [{"name": "d", "source": "nowhere"}]}, "stage.0.source"),
    ({"resources": {"nodes": 2}}, "resources.nodes"),
    ({"resources": {"gpus": 64}}, "resources.gpus"),
    ({"resources": {"ranks_per_node": 9000, "cpus_per_rank": 9}}, "resources.cpus_per_rank"),
    ({"resources": {"memory": "900T"}}, "resources.memory"),
    ({"mpi": "pmix"}, "mpi"),
    ({"snapshot": True}, "snapshot"),
    (
        {"environment": {"container": {"engine": "apptainer", "image": "nowhere.sif"}}},
        "environment.container.image",
    ),
]


@pytest.fixture(scope="module")
def place(shell: Shell) -> Path:
    """A directory of good and bad things, two old runs, and a fake sbatch.

    The sbatch here is a FAKE: all it does is to leave a mark that it was called, which the real
    one cannot do.
    """
    root = shell.root
    (root / "good.yaml").write_text(GOOD)
    (root / "directory").mkdir()
    os.mkfifo(root / "pipe")
    (root / "closed.yaml").write_text(GOOD)
    (root / "closed.yaml").chmod(0)
    (root / "sealed").mkdir(mode=0o500)
    store = Store(shell.records)
    for sid in OLD:
        store.prepare(sid, script="", archive=b"", submit={}, runs={0: {}})
    (root / "bin").mkdir()
    fake = root / "bin" / "sbatch"
    fake.write_text(
        f'#!/bin/sh\n# FAKE\n: > "{root}/{MARK}"\necho "sbatch: error: fake" >&2\nexit 1\n'
    )
    fake.chmod(0o755)
    shell.variables["PATH"] = f"{root / 'bin'}:{os.environ['PATH']}"
    return root


def refused(ended: Result, place: Path, code: int, message: str, hint: str = "") -> None:
    """One message that says what is wrong, the right status, and nothing left behind."""
    lines = ended.err.splitlines()
    assert (ended.code, ended.out) == (code, ""), ended
    assert lines[0].startswith(f"hpml: error: {message}") or message in lines[0], ended.err
    assert [line for line in lines if line.startswith("hpml: ")] == lines[:1], ended.err
    assert "Traceback" not in ended.err
    assert hint in "".join(line for line in lines if line.startswith("hint: ")), ended.err
    assert sorted(os.listdir(place / "records" / "submissions")) == sorted(OLD)
    assert not (place / MARK).exists(), "sbatch was called"
    assert not {"nowhere", "out", "pwned", "x"} & set(os.listdir(place))
    assert os.listdir(place / "sealed") == []


@pytest.mark.parametrize(("line", "code", "message", "hint"), LINES, ids=[one[0] for one in LINES])
def test_a_wrong_command_line(
    hpml: Hpml, shell: Shell, place: Path, line: str, code: int, message: str, hint: str
) -> None:
    """Field, value and what would be right; nothing is written down and nothing submitted."""
    if "closed" in line or "sealed" in line:  # root passes over modes
        if as_anybody() and shutil.which("setpriv") is None:
            pytest.fail("root needs util-linux's setpriv here")
        ended = shell.bash('"$@"', *line.split())
    else:
        ended = hpml(*line.split())
    refused(ended, place, code, message, hint)


@pytest.mark.parametrize(("line", "option"), EMPTY)
def test_an_option_without_a_word(hpml: Hpml, place: Path, line: str, option: str) -> None:
    """An unset variable of the shell is not taken for no option."""
    refused(hpml(*line.split(), " "), place, 2, f"{option}: must not be empty")
    refused(hpml(*line.split(), ""), place, 2, f"{option}: must not be empty")


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_job_file(hpml: Hpml, place: Path, name: str) -> None:
    """Its field, or the file, is named."""
    content, message = FILES[name]
    data = content.encode("utf-8") if isinstance(content, str) else content
    (place / "job.yaml").write_bytes(data)
    refused(hpml("submit", "job.yaml"), place, 2, message)


def test_several_faults_are_named_at_once(hpml: Hpml, place: Path) -> None:
    """Each field on a line of its own."""
    (place / "job.yaml").write_text("name: a b\nscript: x\nresources: {nodes: 0}\n")
    ended = hpml("render", "job.yaml")
    assert (ended.code, ended.out) == (2, "")
    assert "             resources.nodes: must be at least 1" in ended.err
    assert "name: " in ended.err


@pytest.mark.parametrize(("fields", "field"), CANNOT_RUN, ids=[one[1] for one in CANNOT_RUN])
def test_a_job_that_cannot_run_here(
    shell: Shell, hpml: Hpml, place: Path, fields: dict[str, Any], field: str
) -> None:
    """One error that names the field, exit status 2, no record; `check` finds the same."""
    job = shell.job("cannot", **fields)
    ended = hpml("submit", job, "--local")
    refused(ended, place, 2, field)
    if field in {"mpi", "snapshot"}:  # of the submission, not of the job
        return
    checked = hpml("check", job, "--local", "--json")
    assert checked.code == 2
    errors = [one["field"] for one in checked.json()["findings"] if one["level"] == "error"]
    assert any(field in name for name in errors)


@pytest.mark.parametrize("words", [["{}"], ["directory", "--to", "{}"], ["x", "--name", "{}"]])
def test_a_word_of_absurd_length_is_cut(hpml: Hpml, place: Path, words: list[str]) -> None:
    """A word of 100,000 characters is an error that fits a page."""
    ended = hpml("stage", *(word.format("x" * 100_000) for word in words))
    assert ended.code in {2, 3}
    assert len(ended.err) < 10_000


def test_the_fake_sbatch_would_be_seen(hpml: Hpml, place: Path, tmp_path: Path) -> None:
    """A good job file gets as far as sbatch, so the tests above can fail."""
    ended = hpml("--records", str(tmp_path), "submit", "--no-check", "good.yaml")
    assert (ended.code, (place / MARK).exists()) == (4, True)
    (place / MARK).unlink()
    assert len(os.listdir(tmp_path / "submissions")) == 1
