"""What hpml-bind does when it cannot do what the plan says."""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.node.kernel import memory_policy
from hpml_orchestrator.placement.model import RankPlan
from tests.patience import PATIENCE_SECONDS
from tests.unit.node.conftest import CODE, ROOT
from tests.unit.node.plans import MINE, one_each, put_plan, records

if TYPE_CHECKING:
    from tests.unit.node.conftest import Node

NOWHERE = 8000  # no machine of the tests has that many CPUs

# A container's filter, as Docker's own: set_mempolicy (238 on x86-64) is refused with an errno.
SECCOMP = """
import ctypes, os, struct, sys
error = int(sys.argv[1])
code = b"".join(struct.pack("HBBI", *one) for one in (
    (0x20, 0, 0, 0), (0x15, 0, 1, 238), (0x06, 0, 0, 0x50000 | error), (0x06, 0, 0, 0x7FFF0000)))
buffer = ctypes.create_string_buffer(code)
program = ctypes.create_string_buffer(struct.pack("HP", 4, ctypes.addressof(buffer)))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):
    sys.exit(f"no seccomp here: {os.strerror(ctypes.get_errno())}")
os.execv(sys.argv[2], sys.argv[2:])
"""


@pytest.fixture
def attempt(node: Node) -> str:
    """A claimed attempt without a plan."""
    status, out, err = node.claim("1")
    assert status == 0, err
    return out.strip()


def strictly(
    node: Node, attempt: str, *command: str, **more: str
) -> tuple[int, str, dict[str, Any]]:
    """Run a rank; returns its status, what it said in one line, and its record."""
    status, out, err = node.call("bind", attempt, "--", *(command or ("echo", "ran")), **more)
    assert (out, err.count("\n")) == ("ran\n" if status == 0 else "", 1)
    return status, err, records(attempt)[-1]


@pytest.mark.parametrize("verify", ["warn", "strict", "off"])
@pytest.mark.parametrize(
    ("cpus", "wished", "told"),
    [
        ((NOWHERE,), "8000", "the kernel refuses them: Invalid argument"),
        ((MINE[0], NOWHERE), f"{MINE[0]},8000", f"the kernel allows only {MINE[0]}"),
    ],
    ids=["outside", "partly-outside"],
)
def test_cpus_that_the_job_does_not_have(
    node: Node, attempt: str, verify: str, cpus: tuple[int, ...], wished: str, told: str
) -> None:
    """The line says which rank, what was wished, what is and what to do; strict ends with 79."""
    put_plan(attempt, RankPlan(0), RankPlan(1, cpus=cpus), verify=verify)
    began = time.monotonic()
    rank = {"RANK": "5", "LOCAL_RANK": "1"}
    status, said, record = strictly(node, attempt, **rank)
    assert status == (79 if verify == "strict" else 0)
    if verify == "strict":  # the others record first
        assert time.monotonic() - began > 1.9
    inherited = record["inherited"]
    assert said.startswith(
        f"hpml-bind: rank 5 (local rank 1) on n1: the plan assigns CPUs {wished}, {told}; the "
        f"rank was started with {inherited}; "
    )
    assert "; it ends (binding.verify: strict). Hint: give the step all CPUs" in said or (
        verify != "strict" and "; it continues unbound. Hint: give the step all CPUs" in said
    )
    assert (record["bound"], record["cpus"]) == (False, inherited)
    assert told in record["error"]


@pytest.mark.parametrize("verify", ["warn", "strict"])
@pytest.mark.parametrize(
    ("local_rank", "told"),
    [
        ("2", "the plan has only 2 ranks for this node"),
        ("nonsense", "LOCAL_RANK is 'nonsense', not a number"),
    ],
)
def test_a_rank_that_is_not_in_the_plan(
    node: Node, attempt: str, verify: str, local_rank: str, told: str
) -> None:
    """More ranks than planned, or none that can be told."""
    put_plan(attempt, *one_each(), verify=verify)
    status, said, record = strictly(node, attempt, RANK="2", LOCAL_RANK=local_rank)
    assert status == (79 if verify == "strict" else 0)
    assert f": {told}; " in said
    assert (record["bound"], record["error"]) == (False, told)
    assert record["cpus"] == record["inherited"]


@pytest.mark.parametrize("verify", ["warn", "strict"])
def test_a_plan_that_is_not_there(node: Node, attempt: str, verify: str) -> None:
    """The plan would say how strict to be; without it the script's own variable does."""
    status, said, record = strictly(node, attempt, HPML_BINDING_VERIFY=verify)
    assert status == (79 if verify == "strict" else 0)
    told = f"the plan {attempt}/plan/n1.txt cannot be read: No such file or directory"
    assert told in said
    assert "see the messages of the node's agent in the output" in said
    assert (record["bound"], record["error"]) == (False, told)


@pytest.mark.parametrize(
    ("old", "new", "told", "status"),
    [
        ("hpml-plan 1", "hpml-plan 9", "a plan file of another version than 1: 9", 0),
        ("hpml-plan", "{}", "not a plan file of hpml", 0),
        ("ranks=2", "ranks=x", "the plan file's first line is damaged", 0),
        ("rank 1 ", "rank 7 ", "the plan has no rank 1", 79),
        (f"cpus={MINE[1 % len(MINE)]}", "cpus=5-1", "a range that runs backwards: '5-1'", 79),
        ("nic=-", "nic=%zz", "a damaged value: '%zz'", 79),
        ("threads=4", "threads=\xe9", "'ascii' codec can't decode", 0),
    ],
)
def test_a_damaged_plan(
    node: Node, attempt: str, old: str, new: str, told: str, status: int
) -> None:
    """Told without a traceback; as strict as its first line says, where that can be read."""
    path = put_plan(attempt, *one_each(), verify="strict")
    text = path.read_text("ascii")
    assert old in text
    path.write_text("".join(text.rpartition(old)[0] + new + text.rpartition(old)[2]), "utf-8")
    found, said, record = strictly(node, attempt, RANK="1", LOCAL_RANK="1")
    assert found == status
    assert f"is damaged: {told}" in said
    assert record["bound"] is False


def test_memory_is_preferred_where_the_plan_says(node: Node, attempt: str) -> None:
    """The kernel tells it of the command itself."""
    if memory_policy() is None:
        pytest.skip("this kernel tells no memory policy: not tested here")
    put_plan(attempt, RankPlan(0, cpus=(MINE[0],), memory=0))
    maps = ("head", "-1", "/proc/self/numa_maps")
    status, out, err = node.call("bind", attempt, "--", *maps)
    assert (status, out.split()[1], err) == (0, "prefer:0", "")
    assert (records(attempt)[0]["memory"], records(attempt)[0]["error"]) == ("prefer:0", "")


@pytest.mark.parametrize("verify", ["warn", "strict"])
def test_memory_that_the_job_does_not_have_is_only_recorded(
    node: Node, attempt: str, verify: str
) -> None:
    """A preference is no promise: the rank runs, even where binding is strict."""
    put_plan(attempt, RankPlan(0, cpus=(MINE[0],), memory=900), verify=verify)
    assert node.call("bind", attempt, "--", "true") == (0, "", "")
    (record,) = records(attempt)
    assert record["bound"] is True
    assert record["error"] == ""
    assert record["note"].startswith("memory of NUMA domain 900 cannot be preferred: ")


@pytest.mark.parametrize(
    ("error", "told"), [(1, "Operation not permitted"), (38, "Function not implemented")]
)
def test_a_containers_filter_refuses_the_memory_policy(
    node: Node, attempt: str, error: int, told: str
) -> None:
    """A real seccomp filter, such as containers have: CPUs are bound all the same."""
    if platform.machine() != "x86_64":
        pytest.skip("the filter is written for x86-64: not tested here")
    put_plan(attempt, RankPlan(0, cpus=(MINE[0],), memory=0), verify="strict")
    bind = [sys.executable, "-I", "-S", "-c", CODE, ROOT, "bind", attempt, "--", "true"]
    done = subprocess.run(
        [sys.executable, "-c", SECCOMP, str(error), *bind],
        env=node.environment("1"),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    if "no seccomp here" in done.stderr:
        pytest.skip(done.stderr)
    assert (done.returncode, done.stderr) == (0, "")
    (record,) = records(attempt)
    assert record["error"] == ""
    assert record["note"] == f"memory of NUMA domain 0 cannot be preferred: {told}"
    assert (record["bound"], record["cpus"]) == (True, str(MINE[0]))


def test_a_record_that_cannot_be_written_stops_nobody(node: Node, tmp_path: Path) -> None:
    """The rank is bound and runs, and says so."""
    put_plan(tmp_path, *one_each())
    status, out, err = node.call("bind", str(tmp_path), "--", "echo", "hi")
    assert (status, out, err.count("\n")) == (0, "hi\n", 1)
    assert err.startswith("hpml-bind: cannot record the binding: ")


def test_a_container_without_sys(node: Node, attempt: str) -> None:
    """The plan is all that is read: where /sys is empty, a rank is bound as elsewhere."""
    put_plan(attempt, *one_each(), verify="strict")
    bind = [sys.executable, "-I", "-S", "-c", CODE, ROOT, "bind", attempt, "--", "ls", "/sys"]
    hide = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /sys && exec "$@"', "sh"]
    may = subprocess.run(
        [*hide, "true"], capture_output=True, timeout=PATIENCE_SECONDS, check=False
    )
    if may.returncode:
        pytest.skip("no mount namespace of its own may be made here: not tested")
    done = subprocess.run(
        [*hide, *bind],
        env=node.environment("1"),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert records(attempt)[0]["cpus"] == str(MINE[0])
