"""Whether a run continues after an attempt, and in which job."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.node.continuation import Decision, continuation_arguments, decide
from hpml_orchestrator.records import feed
from hpml_orchestrator.records.files import write_json, write_text
from hpml_orchestrator.records.job import Checkpoint
from hpml_orchestrator.records.run import Attempt
from tests.patience import PATIENCE_SECONDS
from tests.unit.node.conftest import CODE, ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.node.conftest import Node

LIMIT = {"asked": "time_limit"}
SAVED = {"channel": True, "stopping": True}


@pytest.mark.parametrize(
    ("known", "goes_on", "why", "stays"),
    [
        # asked to stop: ranks that say so, that cannot say so, that are done, that fail
        ({**LIMIT, **SAVED}, True, "time_limit", ""),
        ({**LIMIT, "signal": "USR1"}, True, "time_limit", ""),
        ({"asked": "preemption"}, True, "preemption", ""),  # Slurm's SIGTERM reached the program
        # that nobody could tell: its 0 means that it is done
        (LIMIT, False, "", ""),
        ({"asked": "requested"}, False, "", ""),
        ({**LIMIT, "exit_code": 137, "state": "FAILED"}, True, "time_limit", ""),
        ({**LIMIT, "channel": True}, False, "", ""),
        ({**LIMIT, "channel": True, "exit_code": 1, "state": "FAILED"}, True, "time_limit", ""),
        ({**LIMIT, "channel": True, "exit_code": 1, "state": "TIMEOUT"}, True, "time_limit", ""),
        ({"asked": "hang", "channel": True, "exit_code": 137, "state": "FAILED"}, True, "hang", ""),
        ({"asked": "requested", **SAVED, "requeue": ()}, True, "requested", ""),
        ({**LIMIT, **SAVED, "requeue": ("hang",)}, False, "time_limit", ""),
        ({**LIMIT, **SAVED, "state": "CANCELLED", "exit_code": 143}, False, "", ""),
        # asked because of a SIGTERM: Slurm knows better why it was sent
        ({"asked": "preemption", **SAVED}, True, "preemption", ""),
        ({"asked": "preemption", **SAVED, "state": "NODE_FAIL"}, True, "node_failure", ""),
        (
            {"asked": "preemption", **SAVED, "state": "NODE_FAIL", "requeue": ("node_failure",)},
            True,
            "node_failure",
            "",
        ),
        # not asked to stop: Slurm's state decides
        ({"state": "TIMEOUT", "exit_code": 143}, True, "time_limit", ""),
        ({"state": "PREEMPTED", "exit_code": 143}, True, "preemption", ""),
        ({"state": "NODE_FAIL", "exit_code": 1}, True, "node_failure", ""),
        ({"state": "NODE_FAIL", "exit_code": 1, "requeue": ("hang",)}, False, "node_failure", ""),
        ({}, False, "", ""),
        ({"state": "FAILED", "exit_code": 1}, False, "", ""),
        ({"state": "OUT_OF_MEMORY", "exit_code": 137}, False, "", ""),
        # limits
        ({**LIMIT, **SAVED, "progress": [True] * 19}, True, "time_limit", ""),
        (
            {**LIMIT, **SAVED, "progress": [True] * 20},
            False,
            "time_limit",
            "20 attempts are used up",
        ),
        ({**LIMIT, **SAVED, "progress": [True, False, False]}, True, "time_limit", ""),
        ({**LIMIT, **SAVED, "progress": [False] * 2}, True, "time_limit", ""),
        (
            {**LIMIT, **SAVED, "progress": [True, False, False, False]},
            False,
            "time_limit",
            "3 attempts saved nothing new in the checkpoint directory",
        ),
    ],
)
def test_whether_a_run_goes_on(known: dict[str, Any], goes_on: bool, why: str, stays: str) -> None:
    """It continues after the ends that the job file names, while it gets any further."""
    given = {"state": "COMPLETED", "exit_code": 0, "progress": [True], **known}
    asked = {name: given.pop(name) for name in ("requeue", "signal") if name in given}
    own = Checkpoint(enabled=True, **asked)
    assert decide(own, **given) == Decision(goes_on, why, stays)
    assert decide(replace(own, enabled=False), **given) == Decision()


def test_the_call_of_a_continuation() -> None:
    """It is the recorded one, without what held for the first job only."""
    recorded = ["sbatch", "--chdir=/s", "--dependency=afterok:1", "--kill-on-invalid-dep=yes", "j"]
    assert continuation_arguments(recorded) == ["sbatch", "--chdir=/s", "j"]
    assert continuation_arguments(recorded, after="5_2", exclude="n1", index=2) == [
        *("sbatch", "--chdir=/s", "--dependency=afterany:5_2", "--exclude=n1", "--array=2", "j"),
    ]


class Site:
    """A job on a site with a scripted Slurm."""

    def __init__(self, node: Node, where: Path) -> None:
        self.node, self.where = node, where
        self.submission = node.submission
        (where / "bin").mkdir()
        self.says("scontrol show", "")
        node.describe(checkpoint=Checkpoint(enabled=True, signal="USR1"))
        node.claim("17")
        self.submission.record_job("17", how="sbatch", now=1.0)
        write_text(self.submission.directory / "arguments", "sbatch\0--parsable\0job.sh\0")
        for program in ("scontrol", "sbatch", "sinfo"):
            path = where / "bin" / program
            path.write_text(
                f'#!/bin/sh\necho {program} "$@" >> {where}/calls\n'
                f"[ {program} != sbatch ] || env >> {where}/environment\n"
                f'case "$2" in show) set -- show;; esac\n'
                f'[ ! -e "{where}/{program} ${{1#--parsable}}" ] ||\n'
                f'  . "{where}/{program} ${{1#--parsable}}"\n'
            )
            path.chmod(0o755)

    def says(self, command: str, text: str, status: int = 0) -> None:
        """Have a command answer."""
        to = 1 if status == 0 else 2
        (self.where / command).write_text(f"echo '{text}' >&{to}; exit {status}\n")

    def call(self, command: str, *words: str, saved: str = "", **more: str) -> tuple[str, str]:
        """Run a command of the node; return what it prints."""
        environment = self.node.environment("17", HPML_CHECKPOINT_DIR=saved, **more)
        environment["PATH"] = f"{self.where / 'bin'}:{os.environ['PATH']}"
        python = [sys.executable, "-I", "-S", "-c", CODE, ROOT, command, *self.node.places]
        done = subprocess.run(
            # The script's shell, whose own variables a continuation begins with.
            ["bash", "-c", 'out=$("$@") && echo "$out"', "bash", *python, *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=True,
        )
        return done.stdout.strip(), done.stderr

    @property
    def calls(self) -> list[str]:
        """What was asked of Slurm, apart from questions."""
        path = self.where / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if " show " not in line]


@pytest.fixture
def site(node: Node, tmp_path: Path) -> Site:
    """A running job, which was asked to stop."""
    made = Site(node, tmp_path)
    Attempt(node.attempt).request_stop("time_limit", by="n1", now=2.0)
    return made


DISABLED = "Requested operation is presently disabled for job 17"


@pytest.mark.parametrize(
    ("requeue", "sbatch", "status", "following", "goes_on"),
    [
        (("", 0), ("", 1), "75", ("requeue", "17"), True),
        # Slurm has requeued it before, after a preemption
        (("Job is pending execution for job 17", 1), ("", 1), "75", ("requeue", "17"), True),
        ((DISABLED, 1), ("18", 0), "75", ("continuation", "18"), True),
        ((DISABLED, 1), ("18;cluster", 0), "75", ("continuation", "18"), True),
        ((DISABLED, 1), ("Submitted batch job 18", 0), "75", ("continuation", "18"), True),
        ((DISABLED, 1), ("18;other", 0), "1", None, False),
        ((DISABLED, 1), ("sbatch: error: QOSMaxSubmit", 1), "1", None, False),
        # no usable answer: whoever asks next looks for the job
        ((DISABLED, 1), ("sbatch: error: Socket timed out", 1), "75", None, True),
    ],
)
def test_the_next_job(
    site: Site,
    requeue: tuple[str, int],
    sbatch: tuple[str, int],
    status: str,
    following: tuple[str, str] | None,
    goes_on: bool,
) -> None:
    """It is the same one, else another; the records say which, and the script does not end with 0.

    If neither is possible, the record has the reason.
    """
    site.says("scontrol requeue", *requeue)
    site.says("sbatch ", *sbatch)
    assert site.call("finish", "0") == ("0", "hpml: time limit: the run continues\n")
    records = Attempt(site.node.attempt)
    assert records.goes_on
    out, err = site.call("go-on", "0", SLURM_CLUSTER_NAME="cluster")
    assert out == status, err
    found = records.next
    assert (found and (found["how"], found["job_id"])) == following
    assert records.goes_on == goes_on
    ended = records.ended or {}
    assert bool(ended.get("stays")) != goes_on
    job = site.submission.job() or {}
    continued = following is not None and following[0] == "continuation"
    assert job["job_id"] == ("18" if continued else "17")
    assert site.submission.job_ids() == {"17", job["job_id"]}
    if requeue[1] and "pending" not in requeue[0]:
        assert site.calls[1] == "sbatch --parsable --dependency=afterany:17 job.sh"
        environment = (site.where / "environment").read_text()
        assert "SLURM_JOB_ID" not in environment
        assert "HPML_CHECKPOINT_DIR" not in environment
        assert "PATH=" in environment
    else:
        assert site.calls == ["scontrol requeue 17"]


def test_a_cancelled_job_is_not_requeued(site: Site) -> None:
    """Slurm would do so (22.05); so its state is looked at first."""
    site.says("scontrol show", "JobId=17 JobName=x\n   JobState=COMPLETING Reason=None")
    site.call("finish", "0")
    assert site.call("go-on", "0")[0] == "1"
    assert site.calls == []
    assert (Attempt(site.node.attempt).ended or {})["stays"] == "the job was cancelled"


def test_a_continuation_is_submitted_once(site: Site) -> None:
    """Where hpml on a login node has marked its call of sbatch, the job makes none."""
    site.says("scontrol requeue", DISABLED, 1)
    site.says("sbatch ", "18")
    site.call("finish", "0")
    assert Attempt(site.node.attempt).mark_start(1, now=3.0)
    assert site.call("go-on", "0")[0] == "75"
    assert site.calls == ["scontrol requeue 17"]


@pytest.mark.parametrize(
    ("others", "steps", "before", "excluded"),
    [
        ("n1 idle\nn4 mixed", (5, 4, 5), [], ["n2", "n3"]),
        ("n1 idle\nn4 drained\nn5 down*\nn6 idle*", (5, 4, 5), [], []),
        ("n1 idle\nn4 idle", (5, 4, 5), ["n4"], []),  # which an earlier attempt left out
        ("n1 idle\nn4 idle", (5, 5, 5), [], ["n2", "n3"]),  # n2's rank wrote no stacks
        ("n1 idle", (5, 4, 5), [], []),
    ],
)
def test_slow_nodes_are_left_out(
    site: Site, others: str, steps: tuple[int, ...], before: list[str], excluded: list[str]
) -> None:
    """Nodes whose agent failed or whose ranks hang, if enough others can start the job."""
    site.says("sinfo --noheader", f"n2 idle\nn3 idle\n{others}")
    Attempt(site.node.attempt).record_next("requeue", "17", exclude=before, now=1.0)
    newest = site.node.attempt.with_name("1")
    variables = {"SLURM_NNODES": "2", "SLURM_JOB_PARTITION": "main", "SLURM_RESTART_COUNT": "1"}
    site.node.claim("17", **variables)
    site.node.attempt = newest
    (newest / "stacks").mkdir()
    write_text(newest / "stop", '{"reason": "hang", "time": 1, "by": "n1"}\n')
    for rank, step in enumerate(steps):
        node = f"n{rank + 1}"
        feed.append(
            newest / "events" / f"{node}.jsonl", "step", node=node, rank=rank, steps_total=step
        )
        stacks = "no stacks: it wrote none in time" if node == "n2" else "in all_reduce"
        write_text(newest / "stacks" / f"{node}.txt", f"rank {rank}, process 7\n{stacks}\n")
    write_json(newest / "nodes" / "n3.failed.json", {"node": "n3"})
    site.says("scontrol requeue", "")
    site.says("scontrol update", "")
    site.says("scontrol show", "JobId=17 JobName=x JobState=RUNNING ExcNodeList=n9 x=y")
    assert site.call("finish", "137")[0] == "137"
    ended = Attempt(newest).ended or {}
    assert (ended["reason"], ended["why"]) == ("ranks hung: failed", "hang")
    _, notice = site.call("go-on", "137", **variables)
    calls = ["scontrol requeue 17", "scontrol update JobId=17 ExcNodeList=n9,n2,n3"]
    assert [call for call in site.calls if "sinfo" not in call] == calls[: 1 + bool(excluded)]
    assert "sinfo --noheader --Node --partition=main" in " ".join(site.calls)
    assert ("may get n2,n3 again" in notice) != bool(excluded)
    assert (Attempt(newest).next or {})["exclude"] == excluded


@pytest.mark.parametrize("attempt", [0, 2])
def test_nothing_was_saved_where_checkpoints_belong(site: Site, attempt: int) -> None:
    """The end of the first attempt says so, and the last one's as well; what to do follows."""
    for number in range(1, attempt + 1):
        site.node.claim("17", SLURM_RESTART_COUNT=str(number))
        site.node.attempt = site.node.run_directory / "attempts" / str(number)
        end = {"exit_code": 0, "time": 1.0, "progress": False}
        write_json(site.node.attempt.with_name(str(number - 1)) / "ended.json", end)
    Attempt(site.node.attempt).request_stop("time_limit", by="n1", now=2.0)
    saved = site.where / "saved"
    saved.mkdir()
    remedy = "have it save to {checkpoint.dir}, or set checkpoint.directory to where it saves"
    said = site.call("finish", "0", saved=str(saved))[1]
    reason = (Attempt(site.node.attempt).ended or {})["reason"]
    assert reason.startswith(f"time limit, nothing was saved below {saved}")
    assert reason.endswith(remedy) == bool(attempt)
    assert remedy in said
    (saved / "step-1").touch()
    os.utime(saved / "step-1", (1, 1))  # by an earlier attempt
    said = site.call("finish", "0", saved=str(saved))[1]
    assert remedy not in said


def test_a_run_that_may_not_go_on_has_not_succeeded(site: Site) -> None:
    """Ranks that saved and ended with 0 leave a run that is not done."""
    for number in (1, 2):
        site.node.claim("17", SLURM_RESTART_COUNT=str(number))
        site.node.attempt = site.node.run_directory / "attempts" / str(number)
        end = {"exit_code": 0, "time": 1.0, "progress": False}
        write_json(site.node.attempt.with_name(str(number - 1)) / "ended.json", end)
        Attempt(site.node.attempt).request_stop("time_limit", by="n1", now=2.0)
    assert site.call("finish", "0")[0] == "75"
    ended = Attempt(site.node.attempt).ended or {}
    assert (ended["state"], ended["stays"]) == (
        "TIMEOUT",
        "3 attempts saved nothing new in the checkpoint directory",
    )
    assert site.call("go-on", "75")[0] == "75"
    assert site.calls == []
