"""`finish` finds what ended a job in the output of Slurm and the launchers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpml_orchestrator.node.finish import ending, verify_binding
from hpml_orchestrator.placement import planfile
from hpml_orchestrator.placement.model import Plan, RankPlan
from hpml_orchestrator.placement.verify import NodeProof, RankProof, proof_json
from hpml_orchestrator.records import feed
from tests.unit.node.conftest import CODE, ROOT

if TYPE_CHECKING:
    from tests.unit.node.conftest import Node

# Seen on Slurm 22.05.8, Open MPI 4.1.4, PyTorch 2.13 and Horovod 0.28.1.
STEP = "slurmstepd-node1: error: *** STEP 5.0 ON node1 CANCELLED AT 2026-11-22T11:04:23{} ***\n"
JOB = "slurmstepd-node1: error: *** JOB 5 ON node1 CANCELLED AT 2026-11-22T11:04:23{} ***\n"
SRUN = "srun: error: node2: task {}: {}\n"
TORCHRUN = """\
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_11:24:44
  host      : vm
  rank      : 1 (local_rank: 1)
  exitcode  : {} (pid: 25431)
"""
MPIRUN = """\
mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[41466,1],1]
  Exit code:    7
"""
MPIRUN_SIGNAL = "mpirun noticed that process rank 1 with PID 0 on node n1 exited on signal 11 (x)."
CHILD_FAILED = (
    "Traceback (most recent call last):\n  File\n"
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
)
CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."
TWO_RANKS = """\
[rank1]: Traceback (most recent call last):
[rank0]: Traceback (most recent call last):
[rank1]:   File "train.py", line 3, in <module>
[rank1]: ValueError: lr < 0
epoch: 3
[rank0]: RuntimeError: pair.cc:553] Connection closed by peer
"""
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n'
EXCEEDED = (
    "slurmstepd-n2: error: StepId=5.1 exceeded memory limit (427667456 > 157286400), being killed\n"
)
HOROVOD = "The first process to do so was:\nProcess name: 1\nExit code: 7\n"


@pytest.mark.parametrize(
    ("status", "output", "launcher", "told"),
    [
        (0, JOB.format(""), "srun", (0, "COMPLETED", "completed")),
        (3, "", "srun", (3, "FAILED", "failed")),
        (143, STEP.format("") + JOB.format(""), "srun", (143, "CANCELLED", "cancelled")),
        (143, JOB.format(" DUE to SIGNAL Terminated"), "srun", (143, "CANCELLED", "cancelled")),
        (5, STEP.format(" DUE TO TIME LIMIT"), "srun", (5, "TIMEOUT", "time limit")),
        (143, JOB.format(" DUE TO PREEMPTION"), "torchrun", (143, "PREEMPTED", "preempted")),
        (143, JOB.format(" DUE TO JOB REQUEUE"), "srun", (143, "REQUEUED", "requeued")),
        (
            143,
            JOB.format(" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS"),
            "srun",
            (143, "NODE_FAIL", "a node failed"),
        ),
        (0, STEP.format(" DUE TO NODE FAILURE, SEE"), "srun", (1, "NODE_FAIL", "a node failed")),
        (
            143,
            "srun: error: Node failure on n2\n" + JOB.format(" DUE TO NODE FAILURE, SEE SLURMCTLD"),
            "srun",
            (143, "NODE_FAIL", "node n2 failed"),
        ),
        (  # all ranks are killed, and the first one that srun reports is innocent
            137,
            EXCEEDED + STEP.format("") + SRUN.format(0, "Killed") + EXCEEDED,
            "srun",
            (137, "OUT_OF_MEMORY", "out of memory on n2, 407.9 MiB of at most 150.0 MiB"),
        ),
        (
            137,
            EXCEEDED.replace("-n2", "") + JOB.format(""),
            "torchrun",
            (137, "OUT_OF_MEMORY", "out of memory, 407.9 MiB of at most 150.0 MiB"),
        ),
        (137, EXCEEDED.replace("=5.1", "=55.1"), "torchrun", (137, "FAILED", "failed")),
        (
            1,
            "slurmstepd: error: Detected 1 oom_kill event in StepId=5.0. Some of the step tasks "
            "have been OOM Killed.\n" + TORCHRUN.format(1),
            "torchrun",
            (1, "OUT_OF_MEMORY", "out of memory"),
        ),
        (
            143,  # the others get SIGTERM from srun, whose status is the highest
            SRUN.format(3, "Exited with exit code 7") + SRUN.format(0, "Terminated"),
            "srun",
            (7, "FAILED", "rank 3 exited with code 7"),
        ),
        (
            139,
            SRUN.format("2-3", "Segmentation fault (core dumped)"),
            "srun",
            (139, "FAILED", "rank 2 ended by SIGSEGV"),
        ),
        (
            1,
            SRUN.format(0, "Out Of Memory"),
            "srun",
            (1, "OUT_OF_MEMORY", "rank 0 ran out of memory"),
        ),
        (  # of another job, and of an srun in a rank
            5,
            JOB.replace("5 ON", "55 ON").format("")
            + SRUN.format(1, "Exited with exit code 42")
            + SRUN.format("0-1", "Exited with exit code 5"),
            "srun",
            (5, "FAILED", "rank 0 exited with code 5"),
        ),
        (1, SRUN.format(0, "Exited with exit code 1"), "torchrun", (1, "FAILED", "failed")),
        (1, TORCHRUN.format(7), "torchrun", (7, "FAILED", "rank 1 exited with code 7")),
        (
            1,
            TORCHRUN.format(-9),
            "torchrun",
            (137, "FAILED", "rank 1 ended by SIGKILL, as when memory runs out"),
        ),
        (
            1,
            "slurmstepd: error: Detected 1 oom_kill event in StepId=5.0. Some of the step tasks "
            "have been OOM Killed.\n" + TORCHRUN.format(-9),
            "torchrun",
            (137, "OUT_OF_MEMORY", "rank 1 ran out of memory"),
        ),
        (
            1,
            TWO_RANKS + CHILD_FAILED + TORCHRUN.format(1).replace(": 1 (l", ": 0 (l"),
            "torchrun",
            (1, "FAILED", "rank 0 exited with code 1: rank 1 raised ValueError: lr < 0"),
        ),
        (
            1,
            " 5%|█  | 1/9\rTraceback (most recent call last):\r\n  File\r\nmine.Broken\r\n"
            "\nDuring handling of the above exception, another exception occurred:\n\n"
            "Traceback (most recent call last):\n  File\n\x1b[1mKeyError\x1b[0m: 'a\x07'\nbye\n"
            + SRUN.format(0, "Exited with exit code 1"),
            "srun",
            (1, "FAILED", "rank 0 exited with code 1: KeyError: 'a'"),
        ),
        (  # the exception was logged, and did not end the program
            7,
            f"{TRACEBACK}ValueError: no\n" + SRUN.format(0, "Exited with exit code 7"),
            "srun",
            (7, "FAILED", "rank 0 exited with code 7"),
        ),
        (
            1,
            f"{TRACEBACK}{CUDA}\n",
            "torchrun",
            (
                1,
                "FAILED",
                f"GPU memory is full, use a smaller batch per rank: {CUDA}",
            ),
        ),
        (
            2,
            "usage: train.py\ntrain.py: error: unrecognized arguments: --lr\n"
            + SRUN.format(0, "Exited with exit code 2"),
            "srun",
            (
                2,
                "FAILED",
                "rank 0 exited with code 2: train.py: error: unrecognized arguments: --lr",
            ),
        ),
        (
            8,
            "hpml: error: the node agents ended\nhpml: hint: see the messages\n",
            "srun",
            (8, "FAILED", "hpml: error: the node agents ended"),
        ),
        (
            134,
            "terminate called after throwing an instance of 'c10::Error'\n  what():  no peer\n"
            + SRUN.format(0, "Aborted"),
            "srun",
            (134, "FAILED", "rank 0 ended by SIGABRT: what():  no peer"),
        ),
        (  # SIGRTMIN + 3 by the C library's count; most real-time signals have no name in Python
            165,
            SRUN.format(0, "Real-time signal 3"),
            "srun",
            (165, "FAILED", "rank 0 ended by signal 37"),
        ),
        (
            1,
            MPIRUN_SIGNAL.replace("signal 11", "signal 35"),
            "mpirun",
            (163, "FAILED", "rank 1 ended by signal 35"),
        ),
        (1, TORCHRUN.format(-64), "torchrun", (192, "FAILED", "rank 1 ended by SIGRTMAX")),
        (1, TORCHRUN.format(-350), "torchrun", (1, "FAILED", "failed")),
        (7, MPIRUN, "mpirun", (7, "FAILED", "rank 1 exited with code 7")),
        (139, MPIRUN_SIGNAL, "mpirun", (139, "FAILED", "rank 1 ended by SIGSEGV")),
        (1, HOROVOD, "horovodrun", (7, "FAILED", "rank 1 exited with code 7")),
    ],
)
def test_what_ended_the_job(status: int, output: str, launcher: str, told: Any) -> None:
    """Slurm's own word first, then the rank that failed first, with its own status."""
    assert ending(status, f"epoch 1\n{output}", job_id="5", launcher=launcher) == told
    if told[2] == "failed":
        known = "environment.setup, line 2, exited with 3"
        given = ending(status, output, job_id="5", launcher=launcher, reason=known)
        assert given.reason == known


LINES = [
    *(JOB, STEP, SRUN, TORCHRUN, MPIRUN, MPIRUN_SIGNAL, HOROVOD, TRACEBACK, CHILD_FAILED),
    *("Root Cause ", "   rank      : 1 ", "Process name: [", "a: error: ", "python: ", "what(): "),
    *("[rank1]: ", "\n", " ", "9" * 5000, "*** JOB 5", "A." * 500, "srun: error: ", "\x1b[", "\0"),
]


@given(
    st.lists(st.sampled_from(LINES) | st.text(max_size=9), max_size=20).map("".join),
    st.sampled_from(["srun", "torchrun", "mpirun", "horovodrun"]),
    st.integers(0, 255),
)
@settings(max_examples=300)
def test_no_output_prevents_the_record(output: str, launcher: str, status: int) -> None:
    """Whatever a program prints, there is an ending of one printable line."""
    end = ending(status, output, job_id="5", launcher=launcher)
    assert 0 <= end.exit_code <= 255
    assert (end.exit_code == 0) == (end.state == "COMPLETED")
    assert end.reason.isprintable()
    assert 0 < len(end.reason) < 400


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("launcher", ["srun", "torchrun", "mpirun"])
def test_a_mebibyte_of_the_same_is_read_in_no_time(line: str, launcher: str) -> None:
    """No pattern backtracks through the output once per line."""
    output = line * (2**20 // len(line))  # at the square of that, pytest's timeout would end it
    assert ending(1, output, job_id="5", launcher=launcher).exit_code != 0


def test_only_what_this_attempt_wrote_counts(node: Node, tmp_path: Path) -> None:
    """A requeued job appends to the same file, which has the messages of the first start."""
    output = tmp_path / "output.log"
    output.write_text(JOB.format(" DUE TO PREEMPTION"))
    claim, finish = ["claim", str(node.submission.directory)], ["finish", *node.places, "9"]
    with output.open("ab") as stream:
        for words in (claim, finish):
            subprocess.run(
                [sys.executable, "-I", "-S", "-c", CODE, ROOT, *words],
                env=node.environment("1"),
                stdout=subprocess.DEVNULL,
                stderr=stream,
                check=True,
            )
    assert json.loads((node.attempt / "ended.json").read_text())["reason"] == "failed"


@pytest.mark.parametrize(
    ("code", "reason", "told"),
    [
        ("0", "", "completed"),
        ("3", "", "failed"),
        ("143", "the script got SIGTERM", "the script got SIGTERM"),
    ],
)
def test_the_end_is_written_down(node: Node, code: str, reason: str, told: str) -> None:
    """Exit status and reason stand in the record and in the event; secrets go with the job."""
    node.claim("17")
    (node.attempt / "chain").mkdir()
    (node.attempt / "chain" / "data.secret").write_text("of an agent that was killed")
    assert node.call("finish", *node.places, code, reason) == (0, f"{code}\n", "")
    assert not (node.attempt / "chain").exists()
    (attempt,) = node.store.run(node.run_directory.name).attempts()
    assert attempt.ended is not None
    assert (attempt.ended["exit_code"], attempt.ended["reason"]) == (int(code), told)
    ended = list(attempt.events())[-1]
    state = "FAILED" if int(code) else "COMPLETED"
    expected = {"exit_code": int(code), "state": state, "reason": told}
    assert (ended.event, dict(ended.data)) == ("ended", expected)


@pytest.mark.parametrize("how", ["channel", "file", "earlier file", "nothing"])
def test_a_crash_after_the_result(node: Node, how: str) -> None:
    """Python may crash at its end, after the training's result; the reason mentions that."""
    result = node.run_directory / "result.json"
    if how == "earlier file":
        result.write_text("{}")
        os.utime(result, (1, 1))
    node.claim("17")
    if how == "file":
        result.write_text("{}")
    if how == "channel":
        log = node.attempt / "events" / "n1.jsonl"
        feed.append(log, "evaluation", node="n1", rank=0, final=True, accuracy=0.9)
    assert node.call("finish", *node.places, "134", "rank 0 ended by SIGABRT")[0] == 0
    (attempt,) = node.store.run(node.run_directory.name).attempts()
    assert attempt.ended is not None
    told = attempt.ended["reason"].removeprefix("rank 0 ended by SIGABRT")
    assert told.startswith(" after the result was recorded (") == (how in ("channel", "file"))


ELSEWHERE = "runs on CPUs 0-15 (NUMA 0), its GPU 0000:b7:00.0 is next to NUMA 7"


def plan(verify: str = "strict", policy: str = "gpu-local", ranks: int = 8) -> str:
    """The text of a node's plan."""
    ranks_of_it = tuple(RankPlan(rank, cpus=(rank,)) for rank in range(ranks))
    return planfile.write(Plan(ranks_of_it, policy), {"verify": verify})


def proof(node: str, first: int, ranks: int, *wrong: str) -> dict[str, Any]:
    """A node's proof, the faults with its last rank."""
    judged = [
        RankProof(
            first + rank,
            rank,
            gpu="0000:b7:00.0",
            cpus="0-15",
            numa=(0,),
            wrong=wrong if rank == ranks - 1 else (),
        )
        for rank in range(ranks)
    ]
    return proof_json(NodeProof(node, "gpu-local", "warn", 8, tuple(judged)))


NOTHING: tuple[list[str], bool] = ([], False)
ROWS = [
    "RANK  NODE  GPU           CPUS  NUMA  WRONG",
    f"15    n2    0000:b7:00.0  0-15  0     {ELSEWHERE}",
    "                                      shares",
]


@pytest.mark.parametrize(
    ("verify", "second", "completed", "lines", "failed"),
    [
        pytest.param("strict", proof("n2", 8, 8), True, [], False, id="all right"),
        pytest.param(
            "strict",
            proof("n2", 8, 8, ELSEWHERE, "shares"),
            False,
            ["binding: 1 of 16 ranks WRONG", *ROWS],
            True,
            id="a rank elsewhere",
        ),
        pytest.param(  # the agents have reported it while the ranks ran
            "warn",
            proof("n2", 8, 8, ELSEWHERE),
            False,
            ["binding: 1 of 16 ranks WRONG"],
            False,
            id="warned of before",
        ),
        pytest.param(
            "strict",
            proof("n2", 8, 7),
            True,
            [
                "binding: 15 of 16 ranks bound as planned",
                "RANK  NODE  GPU  CPUS  NUMA  WRONG",
                "-     n2    -    -     -     7 of its 8 ranks recorded their binding",
            ],
            True,
            id="a rank never recorded",
        ),
        pytest.param("strict", proof("n2", 8, 7), False, [], False, id="the job failed before"),
        pytest.param("off", {"node": "n2", "ranks": 3}, True, [], False, id="not judged"),
    ],
)
def test_the_binding_over_all_nodes(
    verify: str, second: dict[str, Any], completed: bool, lines: list[str], failed: bool
) -> None:
    """A line with the count and the table of who is wrong, or nothing."""
    plans = {"n1": plan(verify), "n2": plan(verify)}
    proofs: Any = [proof("n1", 0, 8), second]
    assert verify_binding(plans, proofs, completed=completed) == (lines, failed)


def test_nodes_without_a_proof() -> None:
    """What nobody saw is not proven; a policy that binds nothing and a damaged plan need none."""
    damaged: Any = [{"node": "n1", "ranks": 3}]
    nobody: Any = []
    for proofs in (nobody, damaged):
        lines, failed = verify_binding({"n1": plan()}, proofs, completed=True)
        assert failed
        assert lines[-1].endswith("0 of its 8 ranks recorded their binding")
    for text in (plan("warn", "none"), "hello\n"):
        assert verify_binding({"n1": text}, [], completed=True) == NOTHING
