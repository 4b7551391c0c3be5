"""A node is planned from what its kernel tells, what it lets open, and what the job may see."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.node.options import BindOptions
from hpml_orchestrator.node.planning import Prepared, list_instances, prepare, publish, unbound
from hpml_orchestrator.placement import planfile
from hpml_orchestrator.placement.cpulist import cpu_numbers
from hpml_orchestrator.topology.recognise import read_topology
from tests.unit.topology.machines import Device, Machine, write_sysfs

AMD = 0x1002
UUID = "GPU-0000000{}-aaaa-bbbb-cccc-000000000000"


def reversed_node(vendor: int = 0x10DE) -> Machine:
    """Four domains of 4 cores, with GPU n next to domain 3 - n."""
    cores = [(0, n // 4, (n,)) for n in range(16)]
    devices = [
        Device("gpu", f"GPU{n}", f"0000:{n + 1}1:00.0", (f"pci0000:{n + 1}0",), 3 - n,
               UUID.format(n), vendor)
        for n in range(4)
    ]  # fmt: skip
    rows = {one: [10 if one == other else 12 for other in range(4)] for one in range(4)}
    return Machine(cores, rows, devices)


class Node:
    """A node as a tree of files; its cgroup, which no test can have, refuses to open some."""

    def __init__(self, root: Path, machine: Machine) -> None:
        self.root = root
        self.sys_root, self.proc_root = write_sysfs(root, machine)
        self.dev_root = str(root / "dev")
        (root / "dev").mkdir()
        for number in range(4):
            (root / "dev" / f"nvidia{number}").touch()
        self.refused: set[str] = set()
        self.opened: list[str] = []
        self.listed = 0

    def fake_open(self, path: str, flags: int) -> int:
        """Answer as the device cgroup does: EPERM for what is not the job's."""
        name = os.path.relpath(path, self.dev_root)
        self.opened.append(name)
        if name in self.refused:
            raise OSError(errno.EPERM, "Operation not permitted", path)
        assert flags & os.O_NONBLOCK
        return os.open(path, flags)

    def prepare(self, wish: BindOptions, listing: str = "", **environment: str) -> Prepared:
        def told() -> str:
            self.listed += 1
            return listing

        return prepare(
            wish,
            environment,
            node="n1",
            allowed=frozenset(range(16)),
            sys_root=self.sys_root,
            proc_root=self.proc_root,
            dev_root=self.dev_root,
            opener=self.fake_open,
            listing=told,
        )


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Node]:
    """Make the tree of a machine."""
    return lambda machine=None: Node(tmp_path, machine or reversed_node())


def gpus(made: Prepared) -> list[str | None]:
    return [one.gpu for one in made.plan.ranks]


def cpus(made: Prepared) -> list[str]:
    return [one.cpu_list() for one in made.plan.ranks]


ALL = [f"0000:{n + 1}1:00.0" for n in range(4)]


def test_every_rank_goes_to_its_gpu(make: Callable[..., Node]) -> None:
    """The GPUs' order is reversed to that of the domains: the CPUs follow the GPUs."""
    made = make().prepare(BindOptions(4), CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert (gpus(made), cpus(made)) == (ALL, ["12-15", "8-11", "4-7", "0-3"])
    assert (made.plan.warnings, made.around.hidden) == ((), frozenset())


def test_gpus_that_a_cgroup_hides(make: Callable[..., Node]) -> None:
    """They are listed by the kernel; index 0 is the first that can be opened all the same."""
    node = make()
    node.refused = {"nvidia0", "nvidia2"}
    made = node.prepare(BindOptions(2), CUDA_VISIBLE_DEVICES="0,1", SLURM_STEP_GPUS="1,3")
    assert gpus(made) == [ALL[1], ALL[3]]
    assert made.around.hidden == {ALL[0], ALL[2]}
    assert made.plan.warnings == ()
    without = node.prepare(BindOptions(2))
    assert gpus(without) == [ALL[1], ALL[3]], "no list: all that are admitted"


def test_the_device_file_has_the_driver_s_number(make: Callable[..., Node]) -> None:
    """The number in its name is none of the PCI order: /proc has it."""
    node = make()
    for number, address in enumerate(reversed(ALL)):
        path = Path(node.proc_root, "driver/nvidia/gpus", address, "information")
        path.write_text(f"GPU UUID: \t {UUID.format(3 - number)}\nDevice Minor: \t {number}\n")
    node.refused = {"nvidia0"}
    assert node.prepare(BindOptions(1)).around.hidden == {ALL[3]}


def test_a_device_file_that_says_nothing(make: Callable[..., Node]) -> None:
    """Missing, or refused for another reason: the GPU counts as admitted."""
    node = make()
    Path(node.dev_root, "nvidia1").unlink()
    assert node.prepare(BindOptions(4)).around.hidden == frozenset()
    assert "nvidia1" in node.opened


def test_uuids_need_no_device_to_be_opened(make: Callable[..., Node]) -> None:
    """They mean one device, whatever is hidden; opening may wake a GPU."""
    node = make()
    made = node.prepare(BindOptions(2), CUDA_VISIBLE_DEVICES=f"{UUID.format(3)},{UUID.format(0)}")
    assert (gpus(made), node.opened) == ([ALL[3], ALL[0]], [])


def test_amd_s_device_files(make: Callable[..., Node]) -> None:
    """Their render nodes stand below the device in /sys."""
    node = make(reversed_node(AMD))
    for number, address in enumerate(ALL):
        place = Path(node.sys_root, "bus/pci/devices", address, "drm", f"renderD{128 + number}")
        place.mkdir(parents=True)
    node.refused = {"dri/renderD128"}
    made = node.prepare(BindOptions(3), ROCR_VISIBLE_DEVICES="0,1,2")
    assert gpus(made) == ALL[1:]


@pytest.mark.parametrize("text", ["", "NoDevFiles"])
def test_a_list_that_shows_no_gpu(make: Callable[..., Node], text: str) -> None:
    """Ranks without a GPU share the cores evenly."""
    made = make().prepare(BindOptions(4), CUDA_VISIBLE_DEVICES=text)
    assert (gpus(made), cpus(made)) == ([None] * 4, ["0-3", "4-7", "8-11", "12-15"])


def test_a_job_that_asked_for_no_gpu(make: Callable[..., Node]) -> None:
    """The node's GPUs are nothing to it, whether Slurm says so in a variable or not."""
    made = make().prepare(BindOptions(4, no_gpus=True))
    assert (gpus(made), cpus(made)) == ([None] * 4, ["0-3", "4-7", "8-11", "12-15"])
    assert made.around.visible == ""
    assert made.plan.warnings == ()


LISTING = f"""GPU 0: NVIDIA A100 (UUID: {UUID.format(0)})
  MIG 3g.20gb     Device  0: (UUID: MIG-aaaaaaaa-0000-5555-8888-000000000001)
  MIG 3g.20gb     Device  1: (UUID: MIG-aaaaaaaa-0000-5555-8888-000000000002)
GPU 1: NVIDIA A100 (UUID: {UUID.format(1)})
GPU 2: NVIDIA A100 (UUID: {UUID.format(2)})
GPU 3: NVIDIA A100 (UUID: {UUID.format(3)})
"""


def test_mig_instances_by_uuid(make: Callable[..., Node]) -> None:
    """nvidia-smi alone knows them, and it is asked for them alone."""
    node = make()
    node.prepare(BindOptions(4), CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert node.listed == 0
    uuid = "MIG-aaaaaaaa-0000-5555-8888-00000000000"
    made = node.prepare(BindOptions(2), LISTING, CUDA_VISIBLE_DEVICES=f"{uuid}2,{uuid}1")
    assert node.listed == 1
    assert [one.gpu_uuid for one in made.plan.ranks] == [f"{uuid}2", f"{uuid}1"]
    assert all(3 in one.numa for one in made.plan.ranks)
    assert "CUDA shows a process the first of its list alone" in made.plan.warnings[-1]


def test_mig_that_no_list_names(make: Callable[..., Node]) -> None:
    """The driver's directory of instances tells that there are some."""
    node = make()
    (Path(node.proc_root) / "driver/nvidia/capabilities/gpu0/mig/gi1/ci0").mkdir(parents=True)
    node.prepare(BindOptions(1), LISTING)
    assert node.listed == 1


def test_slurm_s_own_list_is_a_cross_check(make: Callable[..., Node]) -> None:
    """Where it differs from what was understood, that is told, and no more."""
    node = make()
    made = node.prepare(BindOptions(2), CUDA_VISIBLE_DEVICES="0,1", SLURM_STEP_GPUS="2-3")
    assert gpus(made) == ALL[:2]
    (warning,) = made.plan.warnings
    assert warning == (
        "Slurm gave this step the GPUs 2-3; its list of visible devices 0,1 means /dev/nvidia0-1 "
        "here"
    )
    made = node.prepare(BindOptions(2), CUDA_VISIBLE_DEVICES="NoDevFiles", SLURM_STEP_GPUS="2")
    assert made.plan.warnings[0].endswith("devices NoDevFiles means none of them here")


def test_the_job_s_list_counts_on_a_single_node(make: Callable[..., Node]) -> None:
    """SLURM_JOB_GPUS is that of the first node: with more nodes it says nothing of this one."""
    node = make()
    job = {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_JOB_GPUS": "2,3"}
    assert node.prepare(BindOptions(2), **job, SLURM_NNODES="2").plan.warnings == ()
    assert len(node.prepare(BindOptions(2), **job, SLURM_NNODES="1").plan.warnings) == 1
    local = {"SLURM_JOB_GPUS": UUID.format(1), "CUDA_VISIBLE_DEVICES": UUID.format(1)}
    assert node.prepare(BindOptions(1), **local, SLURM_NNODES="1").plan.warnings == ()


def test_options_reach_the_planner(make: Callable[..., Node]) -> None:
    """Policy, ranks per GPU, loader workers and hardware threads."""
    node = make()
    made = node.prepare(
        BindOptions(8, "numa", "strict", ranks_per_gpu=2, loader_workers=1),
        CUDA_VISIBLE_DEVICES="0,1,2,3",
    )
    assert cpus(made)[:2] == ["12-13", "8-9"]
    assert {one.threads for one in made.plan.ranks} == {1}
    assert made.around.ranks_per_gpu == 2
    assert made.around.verify == "strict"


def test_what_is_written(make: Callable[..., Node], tmp_path: Path) -> None:
    """The plan that hpml-bind reads, with what the agent tells it; and the topology."""
    made = make().prepare(BindOptions(2, keep_threads=True), CUDA_VISIBLE_DEVICES="0,3")
    for name in ("plan", "nodes"):
        (tmp_path / "a" / name).mkdir(parents=True)
    publish(tmp_path / "a", BindOptions(2, keep_threads=True), made, channel="hpml-0-abc")
    text = (tmp_path / "a/plan/n1.txt").read_text()
    head = planfile.header(text)
    assert (head["verify"], head["allowed"], head["visible"]) == ("warn", "0-15", "0,3")
    assert (head["omp"], head["channel"], head["policy"]) == ("keep", "hpml-0-abc", "gpu-local")
    assert cpu_numbers(planfile.find(text, 0)["cpus"]) == made.plan.ranks[0].cpus
    assert read_topology(tmp_path / "a/nodes/n1.topology.json") == made.topology
    assert json.loads((tmp_path / "a/nodes/n1.topology.json").read_text())["schema_version"] == 1


def test_a_node_that_tells_nothing(tmp_path: Path) -> None:
    """No CPUs in /sys: an error, of which a plan is made that binds nothing."""
    none = str(tmp_path / "none")
    with pytest.raises(InputError, match="no CPUs are told"):
        prepare(BindOptions(2), {}, node="n1", allowed={0}, sys_root=none, proc_root=none)
    made = unbound(BindOptions(2), {}, node="n1", allowed=range(8), why="no CPUs are told")
    text = planfile.write(made.plan)
    assert planfile.find(text, 1)["bind"] == "no"
    assert planfile.find(text, 1)["threads"] == "4"
    assert made.plan.warnings == ("no CPUs are told",)


def test_cpus_that_the_node_does_not_have(make: Callable[..., Node]) -> None:
    """A mask and a kernel that disagree cannot be planned for."""
    node = make()
    roots: dict[str, Any] = {"sys_root": node.sys_root, "proc_root": node.proc_root}
    with pytest.raises(InputError, match="none of these CPUs is online"):
        prepare(BindOptions(1), {}, node="n1", allowed={99}, opener=node.fake_open, **roots)


def script(path: Path, text: str) -> str:
    path.write_text(f"#!{sys.executable}\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_the_listing_of_a_real_program(tmp_path: Path) -> None:
    """What it prints counts where it names instances and exits with 0."""
    works = script(tmp_path / "works", f"print({LISTING!r}, end='')")
    assert list_instances(lambda: False, works) == LISTING
    assert list_instances(lambda: False, script(tmp_path / "x", "print('GPU 0')")) == ""
    fails = script(tmp_path / "fails", f"print({LISTING!r}); raise SystemExit(9)")
    assert list_instances(lambda: False, fails) == ""
    assert list_instances(lambda: False, str(tmp_path / "none")) == ""
