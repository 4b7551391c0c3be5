"""`hpml-bind -- command` where no agent ran: in anybody's own script."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.node.planning import is_bound, plan_alone
from hpml_orchestrator.topology.sysfs import read_sysfs
from tests.unit.node.plans import MINE
from tests.unit.node.test_planning import Node as Tree
from tests.unit.node.test_planning import reversed_node

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.node.conftest import Node

CPUS = "import os; print(*sorted(os.sched_getaffinity(0)), os.environ.get('OMP_NUM_THREADS'))"
CORES = [core for core in read_sysfs().cores if set(core.cpus) & set(MINE)]
TWO = pytest.mark.skipif(len(CORES) < 2, reason="one core alone cannot be shared out")
ALL = frozenset(range(8))
PART = frozenset(range(4))
CPUS_HERE = str(len(MINE))


def task(rank: int, ranks: int = 2, **more: str) -> dict[str, str]:
    """The variables of a task of an srun."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(ranks),
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_CPUS_ON_NODE": CPUS_HERE,
        "CUDA_VISIBLE_DEVICES": "",
        **more,
    }


@TWO
def test_ranks_share_the_node_out_without_asking_each_other(node: Node) -> None:
    """Each plans for itself: together they have all CPUs, and none twice."""
    seen = [node.call("bind", "--", sys.executable, "-c", CPUS, **task(rank)) for rank in (0, 1)]
    assert [(status, err) for status, _, err in seen] == [(0, ""), (0, "")]
    sets = [[int(cpu) for cpu in out.split()[:-1]] for _, out, _ in seen]
    assert sorted(sets[0] + sets[1]) == MINE
    assert all(sets)
    threads = [int(out.split()[-1]) for _, out, _ in seen]
    assert sum(threads) == len(CORES)


@pytest.mark.parametrize("nothing", ["", "-1", "NoDevFiles"])
def test_a_list_of_no_devices_names_none(node: Node, nothing: str) -> None:
    """What Slurm and people write where there is no GPU is no GPU that is not known."""
    variables = task(0, 1, CUDA_VISIBLE_DEVICES=nothing)
    status, _, err = node.call("bind", "--show", "--", "true", **variables)
    assert status == 0
    assert "GPU" not in err


def test_gpus_that_a_cgroup_hides_are_not_the_rank_s(tmp_path: Path) -> None:
    """Slurm hides the others' and counts anew: index 0 is the first that can be opened."""
    node = Tree(tmp_path, reversed_node())
    node.refused = {"nvidia0", "nvidia1"}
    made = plan_alone(
        {"CUDA_VISIBLE_DEVICES": "0,1", "LOCAL_WORLD_SIZE": "2"},
        frozenset(range(16)),
        sys_root=node.sys_root,
        proc_root=node.proc_root,
        dev_root=node.dev_root,
        opener=node.fake_open,
    )
    assert [one.gpu for one in made.plan.ranks] == ["0000:31:00.0", "0000:41:00.0"]


def test_it_tells_where_it_runs_when_asked(node: Node) -> None:
    """By --show or by HPML_BINDING_VERBOSE, in one line; the user's own threads are kept."""
    for words, more in ((("--show",), {}), ((), {"HPML_BINDING_VERBOSE": "1"})):
        environment = {**task(0, 1), "OMP_NUM_THREADS": "5", **more}
        status, out, err = node.call("bind", *words, "--", "sh", "-c", "echo $RANK", **environment)
        assert (status, out, err.count("\n")) == (0, "0\n", 1)
        assert err.startswith(f"hpml-bind: rank 0 on {os.uname().nodename}: CPUs {MINE[0]}")
        assert ", OMP_NUM_THREADS 5" in err


@TWO
def test_a_rank_that_its_launcher_bound_is_not_bound_again(node: Node) -> None:
    """The others' CPUs cannot be known: it stays where it is, and says so when asked."""
    mine = str(MINE[-1])
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {MINE[-1]})
    try:
        words = ("bind", "--show", "--", sys.executable, "-c", CPUS)
        status, out, err = node.call(*words, **task(0))
    finally:
        os.sched_setaffinity(0, before)
    assert (status, out.split()[0]) == (0, mine)
    assert f"CPUs {mine} as its launcher bound it, not bound a second time" in err


def test_policy_none_binds_nothing(node: Node) -> None:
    """HPML_BINDING chooses the policy."""
    words = ("bind", "--show", "--", sys.executable, "-c", CPUS)
    _, out, err = node.call(*words, **task(0, HPML_BINDING="none"))
    assert [int(cpu) for cpu in out.split()[:-1]] == MINE
    assert err.endswith(", policy none\n")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"HPML_BINDING": "sideways"}, "policy: must be one of gpu-local, numa, socket"),
        ({"RANK": "3", "LOCAL_RANK": "3"}, "local rank 3 of 1: LOCAL_WORLD_SIZE is wrong"),
    ],
)
def test_no_error_stops_the_command(node: Node, more: dict[str, str], told: str) -> None:
    """Told in a line, whether asked to show or not; the command runs unbound."""
    status, out, err = node.call("bind", "--", sys.executable, "-c", CPUS, **more)
    assert (status, [int(cpu) for cpu in out.split()[:-1]]) == (0, MINE)
    assert err.startswith(f"hpml-bind: not bound: {told}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("environment", "mine", "parent", "expected"),
    [
        ({}, PART, ALL, False),
        ({"LOCAL_WORLD_SIZE": "4"}, ALL, ALL, False),
        ({"LOCAL_WORLD_SIZE": "4"}, PART, PART, True),
        ({"LOCAL_WORLD_SIZE": "4", "SLURM_CPUS_ON_NODE": "8"}, PART, PART, True),
        ({"LOCAL_WORLD_SIZE": "2", "SLURM_CPUS_ON_NODE": "4"}, PART, ALL, False),
        ({"LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x"}, PART, PART, False),
        ({"LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x"}, PART, ALL, True),
        (
            {"LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x", "SLURM_CPUS_ON_NODE": "8"},
            PART,
            PART,
            False,
        ),
    ],
    ids=(
        "alone whole-node bound-by-mpirun bound-by-srun part-of-node torchrun-in-a-part "
        "torchrun-binds torchrun-in-a-narrow-step"
    ).split(),
)
def test_what_counts_as_bound(
    environment: dict[str, str], mine: frozenset[int], parent: frozenset[int], expected: bool
) -> None:
    """CPUs that all ranks of the node have in common are shared out, others are left alone."""
    assert is_bound(environment, mine, parent, ALL) is expected
