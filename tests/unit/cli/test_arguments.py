"""Words after `--` are arguments of the program, for every command that takes a job file."""

from __future__ import annotations

import pytest

from hpml_orchestrator.testing.scheduler import FakeScheduler
from tests.unit.cli.support import Hpml, Shell


def test_words_are_appended_as_they_are(shell: Shell, hpml: Hpml, slurm: FakeScheduler) -> None:
    """After those of the job file and --set, with placeholders; the origin is the command line."""
    job = shell.job(command=["echo"], args=["--lr=1", "--seed=1"])
    words = ["--epochs=3", "--out={run.dir}", "a b", "--set", "007", "-h", "--"]
    args = ["--lr=2", "--seed=1", *words]
    rendered = hpml("render", job, "--json", "--set", "args.0=--lr=2", "--", *words)
    assert rendered.json()["job"]["args"] == args
    explained = hpml("render", job, "--explain", "--json", "--", *words).json()
    (origin,) = [row["origin"] for row in explained if row["field"] == "args"]
    assert origin == "command line"
    submitted = hpml("submit", "--no-check", "--json", job, "--", *words[:2])
    (record,) = [hpml("show", submitted.json()["id"], "--json").json()]
    assert record["record"]["job"]["args"] == ["--lr=1", "--seed=1", *words[:2]]
    assert record["command"] == ["echo", "--lr=1", "--seed=1", *words[:2]]
    assert len(slurm.jobs) == 1
    assert hpml("render", job, "--json", "--").json()["job"]["args"] == ["--lr=1", "--seed=1"]
    plain = shell.job("plain", command=["echo"])
    assert hpml("render", plain, "--json", "--", "x").json()["job"]["args"] == ["x"]


def test_the_program_receives_them(shell: Shell) -> None:
    """As they were typed, placeholders filled in."""
    job = shell.job("words", command=["printf", "<%s>\\n"])
    ended = shell.hpml("run", "--local", job, "--", "--epochs=3", "a  b", "{run.dir}/x", "*")
    assert ended.code == 0, ended.err
    assert "<--epochs=3>\n<a  b>\n<" in ended.out
    assert "/x>\n<*>\n" in ended.out
    assert (
        f"\ncommand    srun: printf '<%s>\\n' --epochs=3 'a  b' {shell.records}/runs" in ended.out
    )


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("run JOB --epochs=3", "No such option: --epochs", "run JOB_FILE -- --epochs …"),
        ("submit JOB --lr 3", "No such option: --lr", "submit JOB_FILE -- --lr …"),
        ("check JOB epochs", "unexpected extra argument", "check JOB_FILE -- ARGUMENT …"),
        ("render JOB -- {stage.x}", "args.0: {stage.x} names nothing", ""),
        ("render JOB -- {run.dri}", "args.0: {run.dri} names nothing; did you mean {run.dir}?", ""),
        ("submit --resume last -- x", "arguments after --: cannot be given together", ""),
        ("run -- JOB", "Missing argument 'JOB_FILE'", "hpml run job.yaml"),
    ],
)
@pytest.mark.usefixtures("slurm")
def test_what_cannot_be_an_argument_is_refused(
    shell: Shell, hpml: Hpml, line: str, message: str, hint: str
) -> None:
    """An option of the program without `--` names the way to pass it."""
    job = shell.job(command=["echo"])
    words = [job if word == "JOB" else word for word in line.split()]
    assert hpml(*words).refuses(2, message, hint)
