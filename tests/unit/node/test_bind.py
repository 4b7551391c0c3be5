"""`hpml-bind` becomes one rank, and writes down where it runs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.node.bind import rank_variables
from hpml_orchestrator.node.names import attempt_channel, job_key

if TYPE_CHECKING:
    from tests.unit.node.conftest import Node

BIND = Path(sys.executable).parent / "hpml-bind"
SHOW = (
    "import json, os, signal; print(json.dumps({'env': dict(os.environ), 'pid': os.getpid(), "
    "'ignored': [l for l in open('/proc/self/status') if l.startswith('SigIgn')][0].split()[1]}))"
)
STEP = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
}


def claimed(node: Node) -> str:
    status, out, err = node.claim("1")
    assert status == 0, err
    return out.strip()


def records(attempt: str) -> list[dict[str, Any]]:
    text = Path(attempt, "binding", "n1.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {}),
        ({"RANK": "3", **STEP}, {}),
        (
            STEP,
            {
                "RANK": "5",
                "LOCAL_RANK": "1",
                "WORLD_SIZE": "8",
                "LOCAL_WORLD_SIZE": "4",
                "GROUP_RANK": "1",
            },
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "6", "SLURM_NNODES": "3"},
            {
                "RANK": "0",
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "6",
                "LOCAL_WORLD_SIZE": "2",
                "GROUP_RANK": "0",
            },
        ),
    ],
)
def test_rank_variables(environment: dict[str, str], expected: dict[str, str]) -> None:
    """A task of srun gets what torchrun would give it; a rank of torchrun keeps its own."""
    assert rank_variables(environment) == expected


def test_a_task_becomes_a_rank(node: Node) -> None:
    """The command replaces hpml-bind in the same process and finds its rank and its agent."""
    attempt = claimed(node)
    process = node.start("bind", attempt, "--", sys.executable, "-c", SHOW, "x", **STEP)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    seen = json.loads(out)
    assert seen["pid"] == process.pid
    assert (seen["env"]["RANK"], seen["env"]["WORLD_SIZE"]) == ("5", "8")
    environment = node.environment("1")
    assert seen["env"]["HPML_CHANNEL"] == attempt_channel(environment, attempt)
    assert seen["env"]["HPML_STOP_FILE"] == f"{attempt}/stop"


def test_where_it_ran_is_written_down(node: Node) -> None:
    """One line per rank: node, host, process, CPUs, GPUs, program."""
    attempt = claimed(node)
    process = node.start("bind", attempt, "--", "true", CUDA_VISIBLE_DEVICES="3", **STEP)
    process.communicate(timeout=60)
    (record,) = records(attempt)
    assert record == {
        "schema_version": 1,
        "rank": 5,
        "local_rank": 1,
        "world_size": 8,
        "node": "n1",
        "host": socket.gethostname(),
        "pid": process.pid,
        "cpus": sorted(os.sched_getaffinity(0)),
        "visible_gpus": "3",
        "bound": False,
        "program": "true",
    }
    node.call("bind", attempt, "--", "true", RANK="1")
    assert [line["rank"] for line in records(attempt)] == [5, 1]


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
    assert (status, err) == (2, "usage: hpml-bind [ATTEMPT] -- COMMAND [ARGUMENT]…\n")


@pytest.mark.parametrize("rank", ["0", "nonsense"])
def test_a_record_that_cannot_be_written_stops_nobody(
    node: Node, tmp_path: Path, rank: str
) -> None:
    """The rank runs all the same, and says so."""
    status, out, err = node.call("bind", str(tmp_path / "none"), "--", "echo", "hi", RANK=rank)
    assert (status, out) == (0, "hi\n")
    assert err.startswith("hpml-bind: cannot record the binding: ")
    assert err.count("\n") == 1


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
            timeout=60,
            check=True,
        )
        assert (done.stdout, done.stderr) == ("5\n", "")
        assert len(records(attempt)) == lines
    done = subprocess.run([BIND, "--help"], capture_output=True, text=True, timeout=60, check=True)
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
