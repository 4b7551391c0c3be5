"""`hpml-bind` becomes one rank, and writes down where it runs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.node.channel import attempt_channel
from hpml_orchestrator.node.options import job_key
from hpml_orchestrator.placement.model import RankPlan
from tests.patience import PATIENCE_SECONDS
from tests.unit.node.plans import CHANNEL, MINE, one_each, put_plan, records

if TYPE_CHECKING:
    from tests.unit.node.conftest import Node

BIND = Path(sys.executable).parent / "hpml-bind"
SHOW = (
    "import json, os; print(json.dumps({'env': dict(os.environ), 'pid': os.getpid(), "
    "'cpus': sorted(os.sched_getaffinity(0))}))"
)
STEP = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
}


def claimed(node: Node, *ranks: RankPlan) -> str:
    """A claimed attempt with a plan, of two ranks unless others are given."""
    status, out, err = node.claim("1")
    assert status == 0, err
    put_plan(out.strip(), *(ranks or one_each()))
    return out.strip()


def test_a_task_becomes_a_rank(node: Node) -> None:
    """The command replaces hpml-bind in the same process and finds its rank and its agent."""
    attempt = claimed(node)
    process = node.start("bind", attempt, "--", sys.executable, "-c", SHOW, "x", **STEP)
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, err) == (0, "")
    seen = json.loads(out)
    assert seen["pid"] == process.pid
    assert (seen["env"]["RANK"], seen["env"]["WORLD_SIZE"]) == ("5", "8")
    assert seen["env"]["HPML_CHANNEL"] == CHANNEL
    assert seen["env"]["HPML_STOP_FILE"] == f"{attempt}/stop"


def test_a_rank_learns_which_part_of_the_data_its_node_has(node: Node) -> None:
    """For each entry of the node's own part, in capitals; nothing where the plan says nothing."""
    attempt = claimed(node)
    show = "echo [$HPML_PART_TRAIN] [$HPML_PART_A_B]"
    assert node.call("bind", attempt, "--", "sh", "-c", show)[1] == "[] []\n"
    put_plan(attempt, *one_each(), parts="2/4:train,a_b")
    assert node.call("bind", attempt, "--", "sh", "-c", show)[1] == "[2/4] [2/4]\n"


def test_each_rank_runs_on_the_cpus_of_its_line(node: Node) -> None:
    """The kernel says so of the command itself, and the threads are those of the plan."""
    attempt = claimed(node)
    for rank in ("0", "1"):
        _, out, err = node.call(
            "bind",
            attempt,
            "--",
            sys.executable,
            "-c",
            SHOW,
            **{**STEP, "SLURM_LOCALID": rank, "OMP_NUM_THREADS": "99"},
        )
        seen = json.loads(out)
        assert (seen["cpus"], err) == ([MINE[int(rank) % len(MINE)]], "")
        assert seen["env"]["OMP_NUM_THREADS"] == str(int(rank) + 3)
        assert "HPML_NIC" not in seen["env"]


def test_where_it_ran_is_written_down(node: Node) -> None:
    """One line per rank: place, process, what it inherited, got, and passes on to a child."""
    attempt = claimed(node, *one_each(1), RankPlan(1, cpus=(MINE[0],), nic="mlx5_3", threads=7))
    began = time.time() - 0.001  # the record has microseconds
    process = node.start("bind", attempt, "--", "true", CUDA_VISIBLE_DEVICES="3,1", **STEP)
    ticks = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    process.communicate(timeout=PATIENCE_SECONDS)
    (record,) = records(attempt)
    assert began <= record.pop("time") <= time.time()
    assert record.pop("memory") in ("default", None)
    assert record == {
        "schema_version": 2,
        "rank": 5,
        "local_rank": 1,
        "world_size": 8,
        "node": "n1",
        "host": socket.gethostname(),
        "pid": process.pid,
        "start_ticks": ticks,
        "inherited": kernel_list(MINE),
        "cpus": str(MINE[0]),
        "child_cpus": str(MINE[0]),
        "visible": "3,1",
        "threads": 7,
        "nic": "mlx5_3",
        "bound": True,
        "error": "",
        "note": "",
        "program": "true",
    }
    node.call("bind", attempt, "--", "true", RANK="1", ROCR_VISIBLE_DEVICES="0")
    assert [(line["rank"], line["visible"]) for line in records(attempt)] == [(5, "3,1"), (1, "0")]


def kernel_list(cpus: list[int]) -> str:
    """CPUs as /proc tells those of this test."""
    told = Path("/proc/self/status").read_text().partition("Cpus_allowed_list:")[2].split()[0]
    assert sorted(os.sched_getaffinity(0)) == cpus
    return told


def test_the_job_files_own_threads_are_kept(node: Node) -> None:
    """With `omp=keep` OMP_NUM_THREADS stays as the job file sets it."""
    attempt = claimed(node)
    put_plan(attempt, *one_each(), omp="keep")
    words = ("bind", attempt, "--", "sh", "-c", "echo $OMP_NUM_THREADS")
    assert node.call(*words, OMP_NUM_THREADS="13") == (0, "13\n", "")
    assert records(attempt)[0]["threads"] == 13


def test_policy_none_sets_nothing(node: Node) -> None:
    """Neither CPUs nor threads nor memory; the record is written all the same."""
    attempt = claimed(node)
    put_plan(attempt, RankPlan(0, cpus=(MINE[0],), memory=0, threads=9), policy="none")
    words = ("bind", attempt, "--", sys.executable, "-c", SHOW)
    status, out, err = node.call(*words, OMP_NUM_THREADS="2")
    seen = json.loads(out)
    assert (status, seen["cpus"], seen["env"]["OMP_NUM_THREADS"], err) == (0, MINE, "2", "")
    (record,) = records(attempt)
    assert (record["bound"], record["error"], record["inherited"]) == (False, "", record["cpus"])


def test_no_child_is_forked_where_nobody_looks(node: Node) -> None:
    """With verify off the rank is bound and records what it knows without a child."""
    attempt = claimed(node)
    put_plan(attempt, *one_each(), verify="off")
    assert node.call("bind", attempt, "--", "true") == (0, "", "")
    (record,) = records(attempt)
    assert (record["bound"], record["child_cpus"], record["cpus"]) == (True, None, str(MINE[0]))


def test_many_ranks_at_once_write_whole_lines(node: Node) -> None:
    """64 ranks of one node share a file, and no line is cut or mixed with another."""
    attempt = claimed(node, *one_each(64))
    program = "true" if Path("/bin/true").exists() else sys.executable
    ranks = [
        node.start("bind", attempt, "--", program, RANK=str(rank), LOCAL_RANK=str(rank))
        for rank in range(64)
    ]
    assert [one.communicate(timeout=PATIENCE_SECONDS) for one in ranks] == [("", "")] * 64
    assert sorted(line["rank"] for line in records(attempt)) == list(range(64))
    assert all(line["cpus"] == str(MINE[line["rank"] % len(MINE)]) for line in records(attempt))


def test_odd_text_stays_json(node: Node) -> None:
    """Quotes, line ends, letters of all kinds and bytes that are no text are kept in the record."""
    attempt = claimed(node)
    odd = 'a"b\\c\n\té\U0001f600\udc80'
    node.call("bind", attempt, "--", odd, CUDA_VISIBLE_DEVICES='"x\u2028"')
    (record,) = records(attempt)
    assert (record["program"], record["visible"]) == (odd, '"x\u2028"')


def test_the_command_inherits_no_ignored_signal(node: Node) -> None:
    """A broken pipe ends the command's children quietly, as under a shell."""
    attempt = claimed(node)
    status, out, err = node.call("bind", attempt, "--", sys.executable, "-c", SHOW)
    assert status == 0, err
    # Python itself ignores SIGPIPE (13) and SIGXFSZ (25) once it has started: ask a plain program
    words = ("bind", attempt, "--", "grep", "SigIgn", "/proc/self/status")
    status, out, _ = node.call(*words)
    ignored = int(out.split()[1], 16)
    assert (status, ignored & (1 << 12), ignored & (1 << 24)) == (0, 0, 0)
    words = ("bind", attempt, "--", "bash", "-c", "yes | head -1")
    assert node.call(*words) == (0, "y\n", "")


@pytest.mark.parametrize(
    ("command", "status", "told"),
    [
        (["no-such-program"], 127, "hpml-bind: no-such-program: command not found\n"),
        (["/proc/version"], 126, "hpml-bind: /proc/version: Permission denied\n"),
        (["/"], 126, "hpml-bind: /: Permission denied\n"),
        (["/proc/version/x"], 127, "hpml-bind: /proc/version/x: command not found\n"),
        ([""], 127, "hpml-bind: : command not found\n"),
        (["bash", "-c", "exit 42"], 42, ""),
        (["bash", "-c", "kill -9 $$"], -9, ""),
    ],
)
def test_it_ends_as_its_command_ends(
    node: Node, command: list[str], status: int, told: str
) -> None:
    """Exit statuses are the command's, or those of a shell that cannot start it."""
    assert node.call("bind", claimed(node), "--", *command) == (status, "", told)


@pytest.mark.parametrize("words", [[], ["--"], ["true"], ["a", "b", "--", "true"], ["a", "--"]])
def test_wrong_usage(node: Node, words: list[str]) -> None:
    """Anything but [ATTEMPT] -- COMMAND is told with the usage."""
    status, _, err = node.call("bind", *words)
    assert (status, err) == (2, "usage: hpml-bind [--show] [ATTEMPT] -- COMMAND [ARGUMENT]…\n")


@pytest.mark.parametrize("word", ["--shwo", "--Show", "-s", "--show=1"])
def test_a_mistyped_option_is_no_attempt(node: Node, tmp_path: Path, word: str) -> None:
    """The command does not run unbound; a directory of such a name is ./--shwo."""
    done = tmp_path / "done"
    status, out, err = node.call("bind", word, "--", "touch", str(done))
    assert (status, out) == (2, "")
    assert err.startswith(f"hpml-bind: unknown option {word}\nusage: hpml-bind ")
    assert not done.exists()


def test_a_command_is_found_as_a_shell_finds_it(node: Node, tmp_path: Path) -> None:
    """Along PATH, past what may not be executed, and in the working directory only when told."""
    attempt = claimed(node)
    for name, mode in (("first", 0o644), ("second", 0o755)):
        program = tmp_path / name / "tool"
        program.parent.mkdir()
        program.write_text("#!/bin/sh\necho found\n")
        program.chmod(mode)
    path = f"/nowhere:{tmp_path}/first:{tmp_path}/second"
    assert node.call("bind", attempt, "--", "tool", PATH=path) == (0, "found\n", "")
    status, _, err = node.call("bind", attempt, "--", "tool", PATH=f"{tmp_path}/first")
    assert (status, err) == (126, "hpml-bind: tool: Permission denied\n")
    assert node.call("bind", attempt, "--", "tool", PATH="/nowhere")[0] == 127


def test_the_command_hpml_bind(node: Node) -> None:
    """The installed entry point takes the attempt from the environment, or none."""
    if not BIND.exists():
        pytest.skip(f"no {BIND}")
    attempt = claimed(node)
    for extra, lines in (({"HPML_ATTEMPT_DIR": attempt}, 1), ({}, 1)):
        done = subprocess.run(
            [BIND, "--", "sh", "-c", "echo $RANK"],
            env=node.environment("1", **STEP, **extra),
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=True,
        )
        assert (done.stdout, done.stderr) == ("5\n", "")
        assert len(records(attempt)) == lines
    done = subprocess.run(
        [BIND, "--help"], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    )
    assert done.stdout.startswith("usage: hpml-bind")


def test_names_of_different_places_differ() -> None:
    """Node, attempt, job and cluster make different channels, all short enough for a socket."""
    base = {"SLURM_JOB_ID": "1", "SLURM_CLUSTER_NAME": "c", "SLURMD_NODENAME": "n1"}
    names = {
        attempt_channel({**base, **more}, attempt)
        for more in ({}, {"SLURM_JOB_ID": "2"}, {"SLURM_CLUSTER_NAME": "d"})
        for attempt in ("/a/0", "/a/1", "/" + "x" * 4000)
    } | {attempt_channel({**base, "SLURMD_NODENAME": "n2"}, "/a/0")}
    assert len(names) == 10
    assert all(len(name) < 100 for name in names)
    assert job_key(base) == "c-1"
    assert job_key({}) == "slurm-0"
    assert job_key({**base, "HPML_JOB_KEY": "given"}) == "given"
