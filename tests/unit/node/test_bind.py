"""`hpml-bind` binds one rank, records the binding and executes the rank's command."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.node.bind import rank_variables
from hpml_orchestrator.node.kernel import memory_policy
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
    assert "TORCH_NCCL_TRACE_BUFFER_SIZE" not in seen["env"]


@pytest.mark.parametrize(("here", "path"), [("n1", "/own/d"), ("n2", "/data/d")])
def test_a_node_that_has_data_elsewhere(node: Node, here: str, path: str) -> None:
    """Its ranks find them at its own path, in arguments and variables."""
    attempt = claimed(node)
    given = {"HPML_STAGE_D": "/data/d", "D": "/data/d/x", "HPML_STAGE_ELSEWHERE": ""}
    given["HPML_STAGE_ELSEWHERE"] = json.dumps({here: {"/data/d": "/own/d"}})
    process = node.start("bind", attempt, "--", "sh", "-c", 'echo "$0 $D"', "--d=/data/d", **given)
    assert process.communicate(timeout=PATIENCE_SECONDS)[0] == f"--d={path} {path}/x\n"


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


def test_rank_0_records_its_command(node: Node) -> None:
    """Word by word as it received them; other ranks do not repeat it, nor is a huge one kept."""
    attempt = claimed(node, *one_each(2))
    words = ["true", "--lr=0.1", 'a "b"\n\x1b é']
    node.call("bind", attempt, "--", *words, RANK="0", LOCAL_RANK="0")
    node.call("bind", attempt, "--", *words, RANK="1", LOCAL_RANK="1")
    node.call("bind", attempt, "--", "true", "x" * 70_000, RANK="0", LOCAL_RANK="0")
    assert [record.get("command") for record in records(attempt)] == [words, None, None]


def kernel_list(cpus: list[int]) -> str:
    """CPUs of this test in /proc's format."""
    text = Path("/proc/self/status").read_text().partition("Cpus_allowed_list:")[2].split()[0]
    assert sorted(os.sched_getaffinity(0)) == cpus
    return text


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


@pytest.mark.parametrize(
    "words",
    [[], ["--"], ["true"], ["a", "b", "--", "true"], ["a", "--"], ["--shwo", "--", "true"]],
)
def test_wrong_usage(node: Node, words: list[str]) -> None:
    """Anything but [ATTEMPT] -- COMMAND prints the usage."""
    status, _, err = node.call("bind", *words)
    usage = "usage: hpml-bind [--show] [ATTEMPT] -- COMMAND [ARGUMENT]…\n"
    unknown = "hpml-bind: unknown option --shwo\n"
    assert (status, err) == (2, f"{unknown if words[:1] == ['--shwo'] else ''}{usage}")


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


def test_each_rank_is_bound_as_its_line_says(node: Node) -> None:
    """The kernel reports that for the command and for its threads."""
    attempt = claimed(node)
    put_plan(attempt, *one_each())
    for rank in (0, 1):
        more = {**STEP, "SLURM_LOCALID": str(rank), "OMP_NUM_THREADS": "99"}
        _, out, err = node.call("bind", attempt, "--", sys.executable, "-c", SHOW, **more)
        seen = json.loads(out)
        assert (seen["cpus"], err) == ([MINE[rank % len(MINE)]], "")
        assert seen["env"]["OMP_NUM_THREADS"] == str(rank + 3)
        assert "HPML_NIC" not in seen["env"]


@pytest.fixture
def attempt(node: Node) -> str:
    """A claimed attempt without a plan."""
    return node.claim("1")[1].strip()


NOWHERE = 8000  # no machine of the tests has that many CPUs


def strictly(
    node: Node, attempt: str, *command: str, **more: str
) -> tuple[int, str, dict[str, Any]]:
    """Run a rank; return its status, its one line of output, and its record."""
    status, out, err = node.call("bind", attempt, "--", *(command or ("echo", "ran")), **more)
    assert (out, err.count("\n")) == ("ran\n" if status == 0 else "", 1)
    return status, err, records(attempt)[-1]


@pytest.mark.parametrize("verify", ["warn", "strict", "off"])
@pytest.mark.parametrize(
    ("cpus", "wished", "problem"),
    [
        ((NOWHERE,), "8000", "the kernel refuses them: Invalid argument"),
        ((MINE[0], NOWHERE), f"{MINE[0]},8000", f"the kernel allows only {MINE[0]}"),
    ],
    ids=["outside", "partly-outside"],
)
def test_cpus_that_the_job_does_not_have(
    node: Node, attempt: str, verify: str, cpus: tuple[int, ...], wished: str, problem: str
) -> None:
    """The line has the rank, the planned and actual CPUs, and a hint; strict ends with 79."""
    put_plan(attempt, RankPlan(0), RankPlan(1, cpus=cpus), verify=verify)
    began = time.monotonic()
    rank = {"RANK": "5", "LOCAL_RANK": "1"}
    status, said, record = strictly(node, attempt, **rank)
    assert status == (79 if verify == "strict" else 0)
    if verify == "strict":  # the others record first
        assert time.monotonic() - began > 1.9
    inherited = record["inherited"]
    assert said.startswith(
        f"hpml-bind: rank 5 (local rank 1) on n1: the plan assigns CPUs {wished}, {problem}; the "
        f"rank was started with {inherited}; "
    )
    assert "; it ends (binding.verify: strict). Hint: give the step all CPUs" in said or (
        verify != "strict" and "; it continues unbound. Hint: give the step all CPUs" in said
    )
    assert (record["bound"], record["cpus"]) == (False, inherited)
    assert problem in record["error"]


@pytest.mark.parametrize(
    ("old", "new", "local_rank", "message", "status"),
    [
        # strict, from the plan's first line if it is readable
        ("hpml-plan 1", "hpml-plan 9", "1", "is damaged: a plan file of another version", 0),
        ("ranks=2", "ranks=x", "1", "is damaged: the plan file's first line is damaged", 0),
        ("rank 1 ", "rank 7 ", "1", "is damaged: the plan has no rank 1", 79),
        ("nic=-", "nic=%zz", "1", "is damaged: a damaged value: '%zz'", 79),
        ("threads=4", "threads=\xe9", "1", "is damaged: 'ascii' codec can't decode", 0),
        ("ranks=2", "ranks=2", "2", "the plan has only 2 ranks for this node", 79),
        ("ranks=2", "ranks=2", "nonsense", "LOCAL_RANK is 'nonsense', not a number", 79),
    ],
)
def test_a_plan_that_does_not_fit(
    node: Node, attempt: str, old: str, new: str, local_rank: str, message: str, status: int
) -> None:
    """One line, no traceback; without a plan the script's variable decides whether to fail."""
    variable = {"HPML_BINDING_VERIFY": "strict"}
    ended, err, record = strictly(node, attempt, **variable)
    assert (ended, record["bound"]) == (79, False)
    assert "plan/n1.txt cannot be read: No such file or directory" in err
    path = put_plan(attempt, *one_each(), verify="strict")
    first, _, rest = path.read_text("ascii").rpartition(old)
    path.write_text(f"{first}{new}{rest}", "utf-8")
    ended, err, record = strictly(node, attempt, RANK="1", LOCAL_RANK=local_rank)
    assert (ended, record["bound"]) == (status, False)
    assert message in err


BATCH = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "8"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "6",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
HOROVOD = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
}
HYDRA = {"PMI_RANK": "7", "PMI_SIZE": "8", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")


@pytest.mark.parametrize(("domain", "policy"), [(0, "prefer:0"), (900, "default")])
def test_a_preference_for_memory_is_no_promise(
    node: Node, attempt: str, domain: int, policy: str
) -> None:
    """Set where the kernel allows it; else recorded, and the rank runs even where strict."""
    if memory_policy() is None:
        pytest.skip("this kernel shows no memory policy")
    put_plan(attempt, RankPlan(0, cpus=(MINE[0],), memory=domain), verify="strict")
    maps = ("head", "-1", "/proc/self/numa_maps")
    status, out, err = node.call("bind", attempt, "--", *maps)
    assert (status, out.split()[1], err) == (0, policy, "")
    (record,) = records(attempt)
    assert (record["bound"], record["memory"], record["error"]) == (True, policy, "")
    assert record["note"].startswith("memory of NUMA domain 900 cannot be" if domain else "")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ""),
        ({"RANK": "3", **STEP, **OPEN_MPI}, ""),
        (STEP, "5 1 8 4 1"),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "5,3"}, "5 1 8 3 1"),
        ({**STEP, "SLURM_STEP_TASKS_PER_NODE": "2(x2),4"}, "5 1 8 2 1"),
        (BATCH, ""),
        ({**BATCH, **HOROVOD}, "3 1 4 2 1"),
        ({**STEP, **OPEN_MPI}, "6 2 8 4 1"),
        (OPEN_MPI, "6 2 8 4 1"),
        ({**STEP, **HYDRA}, "7 3 8 4 1"),
        ({**STEP, "PMI_RANK": "5", "PMI_SIZE": "8", "PMIX_RANK": "5"}, "5 1 8 4 1"),
        ({"OMPI_COMM_WORLD_RANK": "6"}, ""),
    ],
)
def test_a_rank_gets_what_torchrun_would_give_it(
    environment: dict[str, str], expected: str
) -> None:
    """The nearest launcher counts; the batch script itself is not a rank."""
    assert rank_variables(environment) == dict(zip(NAMES, expected.split(), strict=False))


ASKS = (
    "import json, os, signal; print(json.dumps(["
    "signal.getsignal(15) is signal.SIG_IGN, 15 in signal.pthread_sigmask(signal.SIG_BLOCK, []), "
    "{n: v for n, v in os.environ.items() if n.startswith('TORCH_NCCL')}]))"
)
RECORDER = {
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "{stem}",
}
PIPE = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "{stem}"}


@pytest.mark.parametrize(
    ("head", "given", "ignores", "recorder"),
    [
        ({}, {}, False, {}),
        ({"sigterm": "ignore"}, {}, True, {}),
        ({"recorder": "{attempt}/r_"}, {}, False, {**RECORDER, **PIPE}),
        ({"recorder": "{attempt}/missing/r_"}, {}, False, RECORDER),  # no pipe can be made there
        (
            {"recorder": "{attempt}/r_"},
            {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7"},
            False,
            {**RECORDER, **PIPE, "TORCH_NCCL_TRACE_BUFFER_SIZE": "7"},
        ),
    ],
)
def test_the_agent_prepares_ranks_for_a_stop(
    node: Node, head: dict[str, str], given: dict[str, str], ignores: bool, recorder: dict[str, str]
) -> None:
    """They ignore SIGTERM if the plan has that, never have it blocked, and get NCCL's recorder."""
    attempt = claimed(node)
    head = {name: text.format(attempt=attempt) for name, text in head.items()}
    put_plan(attempt, *one_each(), **head)
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        process = node.start("bind", attempt, "--", sys.executable, "-c", ASKS, **{**STEP, **given})
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert err == ""
    wanted = {name: text.format(stem=head.get("recorder")) for name, text in recorder.items()}
    assert json.loads(out) == [ignores, False, wanted]


def test_a_launcher_is_shielded_from_sigterm(node: Node) -> None:
    """The signal is blocked, also for a program that handles it, and becomes no default."""
    _, out, err = node.call("shield", sys.executable, "-c", ASKS)
    assert (json.loads(out), err) == ([False, True, {}], "")
    assert node.call("shield", "/no/such/program")[0] == 127
