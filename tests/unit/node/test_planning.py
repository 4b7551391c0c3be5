"""A node is planned from the files of its kernel, by what a cgroup lets it open."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.node.planning import (
    BindOptions,
    NodePlan,
    NodeRoots,
    is_bound,
    plan_node,
    publish,
    unbound,
)
from hpml_orchestrator.placement import planfile
from hpml_orchestrator.topology.cpulist import parse_list
from hpml_orchestrator.topology.sysfs import read_sysfs, read_topology
from tests.unit.node.conftest import CODE, ROOT
from tests.unit.node.plans import MINE
from tests.unit.topology.machines import Device, write_sysfs
from tests.unit.topology.machines import Machine as Description

if TYPE_CHECKING:
    from tests.unit.node.conftest import Node

AMD = 0x1002
UUID = "GPU-0000000{}-aaaa-bbbb-cccc-000000000000"


def reversed_node(vendor: int = 0x10DE) -> Description:
    """Four domains of 4 cores, with GPU n next to domain 3 - n."""
    cores = [(0, n // 4, (n,)) for n in range(16)]
    devices = [
        Device("gpu", f"GPU{n}", f"0000:{n + 1}1:00.0", (f"pci0000:{n + 1}0",), 3 - n,
               UUID.format(n), vendor)
        for n in range(4)
    ]  # fmt: skip
    rows = {one: [10 if one == other else 12 for other in range(4)] for one in range(4)}
    return Description(cores, rows, devices)


class Machine:
    """A node as a tree of files; its cgroup, which no test can have, refuses to open some."""

    def __init__(self, root: Path, sysfs: Description) -> None:
        sys_root, proc_root = write_sysfs(root, sysfs)
        self.roots = NodeRoots(sys_root, proc_root, str(root / "dev"), self.fake_open)
        (root / "dev").mkdir()
        for number in range(4):
            (root / "dev" / f"nvidia{number}").touch()
        self.refused: set[str] = set()
        self.opened: list[str] = []
        self.listed = 0

    def fake_open(self, path: str, flags: int) -> int:
        """Answer as the device cgroup does: EPERM for what is not the job's."""
        name = os.path.relpath(path, self.roots.dev)
        self.opened.append(name)
        if name in self.refused:
            raise OSError(errno.EPERM, "Operation not permitted", path)
        assert flags & os.O_NONBLOCK
        return os.open(path, flags)

    def prepare(self, options: BindOptions, listing: str = "", **environment: str) -> NodePlan:
        def list_gpus() -> str:
            self.listed += 1
            return listing

        return plan_node(
            options,
            environment,
            node="n1",
            allowed=frozenset(range(16)),
            roots=self.roots,
            listing=list_gpus,
        )


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Machine]:
    """Make the tree of a machine."""
    return lambda machine=None: Machine(tmp_path, machine or reversed_node())


def gpus(made: NodePlan) -> list[str | None]:
    return [one.gpu for one in made.plan.ranks]


def cpus(made: NodePlan) -> list[str]:
    return [one.cpu_list() for one in made.plan.ranks]


ALL = [f"0000:{n + 1}1:00.0" for n in range(4)]


def test_every_rank_goes_to_its_gpu(make: Callable[..., Machine]) -> None:
    """The GPUs' order is reversed to that of the domains: the CPUs follow the GPUs."""
    made = make().prepare(BindOptions(4), CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert (gpus(made), cpus(made)) == (ALL, ["12-15", "8-11", "4-7", "0-3"])
    assert (made.plan.warnings, made.context.hidden) == ((), frozenset())


def test_gpus_that_a_cgroup_hides(make: Callable[..., Machine]) -> None:
    """They are listed by the kernel; index 0 is the first that can be opened all the same."""
    node = make()
    node.refused = {"nvidia0", "nvidia2"}
    made = node.prepare(BindOptions(2), CUDA_VISIBLE_DEVICES="0,1", SLURM_STEP_GPUS="1,3")
    assert gpus(made) == [ALL[1], ALL[3]]
    assert made.context.hidden == {ALL[0], ALL[2]}
    assert made.plan.warnings == ()
    without = node.prepare(BindOptions(2))
    assert gpus(without) == [ALL[1], ALL[3]], "no list: all allowed GPUs"


def test_uuids_need_no_device_to_be_opened(make: Callable[..., Machine]) -> None:
    """They mean one device, whatever is hidden; opening may wake a GPU."""
    node = make()
    made = node.prepare(BindOptions(2), CUDA_VISIBLE_DEVICES=f"{UUID.format(3)},{UUID.format(0)}")
    assert (gpus(made), node.opened) == ([ALL[3], ALL[0]], [])


def test_amd_s_device_files(make: Callable[..., Machine]) -> None:
    """Their render nodes stand below the device in /sys."""
    node = make(reversed_node(AMD))
    for number, address in enumerate(ALL):
        place = Path(node.roots.sys, "bus/pci/devices", address, "drm", f"renderD{128 + number}")
        place.mkdir(parents=True)
    node.refused = {"dri/renderD128"}
    made = node.prepare(BindOptions(3), ROCR_VISIBLE_DEVICES="0,1,2")
    assert gpus(made) == ALL[1:]


LISTING = f"""GPU 0: NVIDIA A100 (UUID: {UUID.format(0)})
  MIG 3g.20gb     Device  0: (UUID: MIG-aaaaaaaa-0000-5555-8888-000000000001)
  MIG 3g.20gb     Device  1: (UUID: MIG-aaaaaaaa-0000-5555-8888-000000000002)
GPU 1: NVIDIA A100 (UUID: {UUID.format(1)})
GPU 2: NVIDIA A100 (UUID: {UUID.format(2)})
GPU 3: NVIDIA A100 (UUID: {UUID.format(3)})
"""


def test_mig_instances_by_uuid(make: Callable[..., Machine]) -> None:
    """nvidia-smi alone knows them, and it is asked for them alone."""
    node = make()
    node.prepare(BindOptions(4), CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert node.listed == 0
    uuid = "MIG-aaaaaaaa-0000-5555-8888-00000000000"
    made = node.prepare(BindOptions(2), LISTING, CUDA_VISIBLE_DEVICES=f"{uuid}2,{uuid}1")
    assert node.listed == 1
    assert [one.gpu_uuid for one in made.plan.ranks] == [f"{uuid}2", f"{uuid}1"]
    assert all(3 in one.numa for one in made.plan.ranks)
    assert "a CUDA process can use only the first of its list" in made.plan.warnings[-1]


def test_what_is_written(make: Callable[..., Machine], tmp_path: Path) -> None:
    """The plan that hpml-bind reads, with the agent's settings; and the topology."""
    node = make()
    cpuinfo = "processor\t: 0\nmodel name\t: AMD EPYC 7763  64-Core\nprocessor\t: 1\n"
    Path(node.roots.proc, "cpuinfo").write_text(cpuinfo)
    made = node.prepare(BindOptions(2, keep_threads=True), CUDA_VISIBLE_DEVICES="0,3")
    for name in ("plan", "nodes"):
        (tmp_path / "a" / name).mkdir(parents=True)
    publish(tmp_path / "a", BindOptions(2, keep_threads=True), made, channel="hpml-0-abc")
    text = (tmp_path / "a/plan/n1.txt").read_text()
    head = planfile.header(text)
    assert (head["verify"], head["allowed"], head["visible"]) == ("warn", "0-15", "0,3")
    assert (head["omp"], head["channel"], head["policy"]) == ("keep", "hpml-0-abc", "gpu-local")
    assert parse_list(planfile.find(text, 0)["cpus"]) == made.plan.ranks[0].cpus
    assert read_topology(tmp_path / "a/nodes/n1.topology.json") == made.topology
    recorded = json.loads((tmp_path / "a/nodes/n1.topology.json").read_text())
    assert (recorded["schema_version"], recorded["cpu_model"]) == (1, "AMD EPYC 7763 64-Core")


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        (BindOptions(4), {"CUDA_VISIBLE_DEVICES": ""}),
        (BindOptions(4), {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}),
        (BindOptions(4, no_gpus=True), {}),
    ],
)
def test_a_job_without_gpus(
    make: Callable[..., Machine], options: BindOptions, environment: dict[str, str]
) -> None:
    """Its ranks share the cores evenly, whatever GPUs the node has."""
    made = make().prepare(options, **environment)
    assert (gpus(made), cpus(made)) == ([None] * 4, ["0-3", "4-7", "8-11", "12-15"])
    assert made.plan.warnings == ()


@pytest.mark.parametrize(
    ("environment", "warning"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_STEP_GPUS": "2-3"}, "0,1 means /dev/nvidia0-1 "),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles", "SLURM_STEP_GPUS": "2"}, "means none of them "),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_JOB_GPUS": "2,3", "SLURM_NNODES": "2"}, ""),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_JOB_GPUS": "2,3", "SLURM_NNODES": "1"}, "means"),
        ({"CUDA_VISIBLE_DEVICES": UUID.format(1), "SLURM_STEP_GPUS": UUID.format(1)}, ""),
    ],
)
def test_slurms_own_list_is_a_cross_check(
    make: Callable[..., Machine], environment: dict[str, str], warning: str
) -> None:
    """Where it differs there is a warning; of several nodes the job's list is the first one's."""
    warnings = make().prepare(BindOptions(1), **environment).plan.warnings
    crossed = [text for text in warnings if text.startswith("Slurm allocated the GPUs")]
    assert len(crossed) == bool(warning)
    assert all(warning in text for text in crossed)


def test_a_node_that_cannot_be_read(tmp_path: Path) -> None:
    """No CPUs in /sys: an error, of which a plan is made that binds nothing."""
    none = NodeRoots(str(tmp_path / "none"), str(tmp_path / "none"))
    with pytest.raises(InputError, match="no CPUs found"):
        plan_node(BindOptions(2), {}, node="n1", allowed={0}, roots=none)
    made = unbound(BindOptions(2), {}, node="n1", allowed=range(8), why="no CPUs found")
    text = planfile.write(made.plan)
    assert planfile.find(text, 1)["bind"] == "no"
    assert planfile.find(text, 1)["threads"] == "4"
    assert made.plan.warnings == ("no CPUs found",)


CPUS = "import os; print(*sorted(os.sched_getaffinity(0)), os.environ.get('OMP_NUM_THREADS'))"
CORES = [core for core in read_sysfs().cores if set(core.cpus) & set(MINE)]
needs_two = pytest.mark.skipif(len(CORES) < 2, reason="one core alone cannot be shared out")


def task(rank: int, ranks: int = 2, **more: str) -> dict[str, str]:
    """The variables of a task of an srun."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(ranks),
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_CPUS_ON_NODE": str(len(MINE)),
        "CUDA_VISIBLE_DEVICES": "",
        **more,
    }


@needs_two
def test_ranks_without_an_agent_share_the_node(node: Node) -> None:
    """Each plans for itself: together they have all CPUs, and none twice."""
    seen = [node.call("bind", "--", sys.executable, "-c", CPUS, **task(rank)) for rank in (0, 1)]
    assert [(status, err) for status, _, err in seen] == [(0, ""), (0, "")]
    sets = [[int(cpu) for cpu in out.split()[:-1]] for _, out, _ in seen]
    assert sorted(sets[0] + sets[1]) == MINE
    assert all(sets)
    assert sum(int(out.split()[-1]) for _, out, _ in seen) == len(CORES)


def test_it_shows_where_a_rank_runs_when_asked(node: Node) -> None:
    """In one line; the user's own threads are kept."""
    command = ("bind", "--show", "--", "sh", "-c", "echo $RANK")
    status, out, err = node.call(*command, **task(0, 1), OMP_NUM_THREADS="5")
    assert (status, out, err.count("\n")) == (0, "0\n", 1)
    assert err.startswith(f"hpml-bind: rank 0 on {os.uname().nodename}: CPUs {MINE[0]}")
    assert ", OMP_NUM_THREADS 5" in err
    assert "GPU" not in err


@needs_two
def test_a_rank_that_its_launcher_bound_is_not_bound_again(node: Node) -> None:
    """The others' CPUs are unknown: it keeps its CPUs."""
    cpu = str(MINE[-1])
    command = ["taskset", "-c", cpu, sys.executable, "-I", "-S", "-c", CODE, ROOT, "bind"]
    done = subprocess.run(
        [*command, "--show", "--", sys.executable, "-c", CPUS],
        env=node.environment("1", **task(0)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[0] == cpu
    assert f"CPUs {cpu} as its launcher bound it, not bound a second time" in done.stderr


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"HPML_BINDING": "sideways"}, "not bound: policy: must be one of gpu-local, numa, socket"),
        ({"RANK": "3", "LOCAL_RANK": "3"}, "not bound: local rank 3 of 1: LOCAL_WORLD_SIZE is wr"),
    ],
)
def test_no_error_stops_the_command(node: Node, more: dict[str, str], message: str) -> None:
    """One line; the command runs unbound."""
    status, out, err = node.call("bind", "--", sys.executable, "-c", CPUS, **{**task(0, 1), **more})
    assert (status, [int(cpu) for cpu in out.split()[:-1]]) == (0, MINE)
    assert err.startswith(f"hpml-bind: {message}")
    assert err.count("\n") == 1


def test_policy_none_binds_nothing(node: Node) -> None:
    """The rank keeps the CPUs that it was started with."""
    command = ("bind", "--show", "--", sys.executable, "-c", CPUS)
    status, out, err = node.call(*command, **task(0, 1), HPML_BINDING="none")
    assert (status, [int(cpu) for cpu in out.split()[:-1]]) == (0, MINE)
    assert err.endswith(", policy none\n")


EIGHT, FOUR = frozenset(range(8)), frozenset(range(4))
RUN = {"LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x"}


@pytest.mark.parametrize(
    ("environment", "cpus", "parent", "expected"),
    [
        pytest.param({}, FOUR, EIGHT, False, id="alone"),
        pytest.param({"LOCAL_WORLD_SIZE": "4"}, EIGHT, EIGHT, False, id="whole node"),
        pytest.param({"LOCAL_WORLD_SIZE": "4"}, FOUR, FOUR, True, id="bound by mpirun"),
        pytest.param(
            {"LOCAL_WORLD_SIZE": "4", "SLURM_CPUS_ON_NODE": "8"}, FOUR, FOUR, True, id="by srun"
        ),
        pytest.param(
            {"LOCAL_WORLD_SIZE": "2", "SLURM_CPUS_ON_NODE": "4"}, FOUR, EIGHT, False, id="part"
        ),
        pytest.param(RUN, FOUR, FOUR, False, id="torchrun in a part"),
        pytest.param(RUN, FOUR, EIGHT, True, id="torchrun binds"),
        pytest.param({**RUN, "SLURM_CPUS_ON_NODE": "8"}, FOUR, FOUR, False, id="narrow step"),
    ],
)
def test_what_counts_as_bound(
    environment: dict[str, str], cpus: frozenset[int], parent: frozenset[int], expected: bool
) -> None:
    """CPUs that all ranks of the node have in common are shared out, others are left alone."""
    assert is_bound(environment, cpus, parent, EIGHT) is expected
