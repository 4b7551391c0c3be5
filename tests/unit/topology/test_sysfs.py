"""The kernel's description is read correctly, also if it is odd, incomplete or missing."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from pathlib import Path

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.topology.cpulist import parse_list
from hpml_orchestrator.topology.model import Core, Domain, Topology
from hpml_orchestrator.topology.sysfs import read_sysfs
from tests.unit.topology.machines import (
    AMD,
    MELLANOX,
    Device,
    Machine,
    mask,
    pci,
    two_sockets,
    write,
    write_sysfs,
)

MACHINE = two_sockets()
GPU0 = "devices/pci0000:40/0000:40:01.1/0000:41:00.0/0000:42:00.0/0000:43:00.0"


class Tree:
    """A /sys and a /proc of the machine with two sockets, to be damaged."""

    def __init__(self, root: Path, machine: Machine = MACHINE) -> None:
        self.roots = write_sysfs(root, machine)
        self.sys, self.proc = (Path(one) for one in self.roots)

    def read(self, **more: str) -> Topology:
        return read_sysfs(*self.roots, **more)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_this_machine_is_as_lscpu_says() -> None:
    """Util-linux reads the same /sys on its own: CPUs, cores, sockets and domains are equal."""
    lscpu = shutil.which("lscpu")
    assert lscpu, "util-linux is part of every Linux"
    text = subprocess.run(
        [lscpu, "--parse=CPU,CORE,SOCKET,NODE"], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(",") for line in text.splitlines() if line and not line.startswith("#")]
    got = read_sysfs()
    homes = {cpu: core for core in got.cores for cpu in core.cpus}
    assert sorted(homes) == sorted(int(row[0]) for row in rows)
    together: dict[str, set[int]] = {}
    for cpu, core, socket, node in rows:
        together.setdefault(core, set()).add(int(cpu))
        assert homes[int(cpu)].socket == int(socket or 0)
        assert homes[int(cpu)].domain == int(node or 0)
    assert sorted(map(sorted, together.values())) == [list(core.cpus) for core in got.cores]


def test_offline_cpus_and_holes_are_left_out(tree: Tree) -> None:
    """A core whose second thread is offline has one; a core that is offline is none."""
    write(tree.sys / "devices/system/cpu/online", "0-2,4-10,12,14-15")
    got = tree.read()
    assert got.cpus == frozenset({0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 12, 14, 15})
    assert got.cores[3] == Core(3, 1, 1, (4, 12))
    assert got.cores[4] == Core(4, 1, 1, (5,))
    assert got.domains[1].cpus == (4, 5, 6, 7, 12, 14, 15)
    assert got.gpus[0].cpus == (4, 5, 6, 7, 12, 14, 15)


def test_without_siblings_each_cpu_is_a_core(tree: Tree) -> None:
    """A container that hides the topology gives a warning."""
    for path in tree.sys.glob("devices/system/cpu/cpu*/topology"):
        shutil.rmtree(path)
    got = tree.read()
    assert [core.cpus for core in got.cores] == [(n,) for n in range(16)]
    assert {core.socket for core in got.cores} == {0}
    assert "hardware threads of the CPUs 0-15" in got.warnings[0]


def test_a_kernel_without_numa(tree: Tree) -> None:
    """All CPUs are domain 0, with the memory of /proc/meminfo; GPUs are near to none."""
    shutil.rmtree(tree.sys / "devices/system/node")
    write(tree.proc / "meminfo", "MemTotal:       1024 kB\nMemFree: 1 kB")
    for path in tree.sys.rglob("numa_node"):
        path.unlink()
    for path in tree.sys.rglob("local_cpulist"):
        write(path, "0-15")
    got = tree.read()
    assert got.domains == (Domain(0, tuple(range(16)), 1024**2),)
    assert [gpu.domain for gpu in got.gpus] == [None, None, None]
    assert "no NUMA domains" in got.warnings[0]


def test_a_domain_of_memory_alone(tmp_path: Path) -> None:
    """GPU memory as a domain has no CPUs; a GPU that is there counts to the nearest with CPUs."""
    distances = {0: [10, 40, 80], 1: [40, 10, 20], 8: [80, 20, 10]}
    gpu = Device("gpu", "GPU0", "0004:04:00.0", ("pci0004:00", "0004:00:00.0"), 8, "GPU-000000aa")
    got = Tree(tmp_path, Machine(MACHINE.cores, distances, [gpu])).read()
    assert got.domains[2] == Domain(8, (), 64 * 1024**3, ((0, 80), (1, 20), (8, 10)))
    assert got.gpus[0].domain == 1
    assert got.gpus[0].cpus == (4, 5, 6, 7, 12, 13, 14, 15)
    assert got.warnings == ()


def test_an_unknown_domain_is_never_domain_0(tree: Tree) -> None:
    """A numa_node of -1, with all CPUs as local ones, is unknown: a warning, no guess."""
    write(tree.sys / GPU0 / "numa_node", "-1")
    write(tree.sys / GPU0 / "local_cpulist", "0-15")
    got = tree.read()
    assert (got.gpus[0].domain, got.gpus[0].cpus) == (None, ())
    assert got.warnings == ("The NUMA domain of GPU0 0000:43:00.0 is unknown.",)
    assert ("GPU0", "mlx5_0", "PIX") in got.links  # known from PCI


@pytest.mark.parametrize("kept", ["numa_node", "local_cpulist"])
def test_the_number_of_the_domain_or_its_cpus_are_enough(tree: Tree, kept: str) -> None:
    """Each leads to both."""
    for name in {"numa_node", "local_cpulist", "local_cpus"} - {kept}:
        (tree.sys / GPU0 / name).unlink()
    got = tree.read()
    assert (got.gpus[0].domain, got.gpus[0].cpus) == (1, (4, 5, 6, 7, 12, 13, 14, 15))
    assert got.warnings == ()


def test_gpus_with_and_without_nvidias_driver(tree: Tree) -> None:
    """The driver lists its own GPUs, and hides UUIDs until first use; else PCI classes count.

    A server's VGA chip, an NVSwitch and a virtual function are no GPUs; AMD's graphics part of a
    processor, at a lower address than NVIDIA's card, counts only alone.
    """
    addresses = [gpu.address for gpu in MACHINE.gpus]
    host = tree.sys / "devices/pci0000:00"
    for slot, kind, vendor in ((2, 0x030000, 0x1A03), (3, 0x068000, 0x10DE), (5, 0x030000, AMD)):
        pci(tree.sys, host / f"0000:00:0{slot}.0", kind, vendor)
    pci(tree.sys, host / "0000:00:04.0", 0x030200, 0x10DE)
    (host / "0000:00:04.0/physfn").symlink_to(host)
    assert [gpu.address for gpu in tree.read().gpus] == addresses
    hidden = "GPU UUID: \t GPU-????????-????-????-????-????????????"
    write(tree.proc / f"driver/nvidia/gpus/{addresses[1]}/information", hidden)
    assert [gpu.uuid for gpu in tree.read().gpus] == ["GPU-000000aa", "", "GPU-000000cc"]
    shutil.rmtree(tree.proc / f"driver/nvidia/gpus/{addresses[1]}")  # given to a virtual machine
    assert [gpu.address for gpu in tree.read().gpus] == [addresses[0], addresses[2]]
    shutil.rmtree(tree.proc)
    assert [(gpu.address, gpu.uuid) for gpu in tree.read().gpus] == [(a, "") for a in addresses]


def test_amd_gpus(tmp_path: Path) -> None:
    """They are found by class, have the UUID of their unique_id, and separate bridges."""
    switch = ("pci0000:40", "0000:40:01.1", "0000:41:00.0")
    gpu = Device(
        "gpu",
        "GPU0",
        "0000:4e:00.0",
        (*switch, "0000:42:00.0", "0000:4c:00.0", "0000:4d:00.0"),
        1,
        vendor=AMD,
    )
    nic = Device("nic", "mlx5_0", "0000:4b:00.0", (*switch, "0000:42:04.0"), 1, vendor=MELLANOX)
    tree = Tree(tmp_path, dataclasses.replace(MACHINE, devices=[gpu, nic]))
    place = next(tree.sys.glob("devices/**/0000:4e:00.0"))
    write(place / "class", "0x038000")
    write(place / "unique_id", "18f4a33d8fa0ba5c")
    assert [level for _, _, level in tree.read().links] == ["PXB"]
    for bridge in (place.parent, place.parent.parent):
        write(bridge / "vendor", "0x1022")
    got = tree.read()
    assert got.gpus[0].uuid == "GPU-18f4a33d8fa0ba5c"
    assert got.links == (("GPU0", "mlx5_0", "PIX"),)


def test_how_far_cards_are(tmp_path: Path) -> None:
    """PIX, PXB, PHB, NODE and SYS follow from the paths of both."""
    left = ("pci0000:40", "0000:40:01.1", "0000:41:00.0")
    below = (*left, "0000:42:08.0", "0000:50:00.0")
    devices = [
        Device("gpu", "GPU0", "0000:43:00.0", (*left, "0000:42:00.0"), 1, "GPU-000000aa"),
        Device("nic", "mlx5_0", "0000:44:00.0", (*left, "0000:42:04.0"), 1),
        Device("nic", "mlx5_1", "0000:52:00.0", (*below, "0000:51:00.0"), 1),
        Device("nic", "mlx5_2", "0000:60:00.0", ("pci0000:40", "0000:40:03.1"), 1),
        Device("nic", "mlx5_3", "0000:a1:00.0", ("pci0000:a0", "0000:a0:01.1"), 1),
        Device("nic", "mlx5_10", "0000:c1:00.0", ("pci0000:c0", "0000:c0:01.1"), 0),
    ]
    got = Tree(tmp_path, dataclasses.replace(MACHINE, devices=devices)).read()
    assert [(nic, level) for _, nic, level in got.links] == [
        ("mlx5_0", "PIX"),
        ("mlx5_1", "PXB"),
        ("mlx5_2", "PHB"),
        ("mlx5_3", "NODE"),
        ("mlx5_10", "SYS"),
    ]


IB, ETHERNET = 0x020700, 0x020000
CARDS = {
    # what is in /sys/class: name -> class, vendor, whether it is a virtual function
    "InfiniBand, its IPoIB and VF, and Ethernet with RDMA": (
        {"mlx5_2": (IB, MELLANOX, 0), "mlx5_3": (IB, MELLANOX, 1), "irdma0": (ETHERNET, 0x8086, 0)},
        {"ib0": (IB, MELLANOX, 0), "eno1": (ETHERNET, 0x8086, 0)},
        ["mlx5_2"],
    ),
    "RoCE": (
        {"rocep65s0": (ETHERNET, MELLANOX, 0)},
        {"ens1": (ETHERNET, MELLANOX, 0), "eno1": (ETHERNET, 0x8086, 0)},
        ["rocep65s0"],
    ),
    "EFA": ({"rdmap0s6": (ETHERNET, 0x1D0F, 0)}, {"ens5": (ETHERNET, 0x1D0F, 0)}, ["rdmap0s6"]),
    "Slingshot": (
        {"mlx5_0": (ETHERNET, MELLANOX, 0)},
        {"eno1": (ETHERNET, MELLANOX, 0)}
        | {f"hsn{n}": (ETHERNET, 0x17DB, int(n == 2)) for n in range(3)},
        ["hsn0", "hsn1"],
    ),
    "Omni-Path": ({"hfi1_0": (0x020800, 0x8086, 0)}, {"ib0": (0x020800, 0x8086, 0)}, ["hfi1_0"]),
    "IPoIB alone": ({}, {"ib0": (IB, MELLANOX, 0), "eth0": (ETHERNET, 0x8086, 0)}, ["ib0"]),
    "Ethernet alone": (
        {},
        {"eth10": (ETHERNET, 0x8086, 0), "eth2": (ETHERNET, 0x8086, 0), "usb0": (0x0C0330, 1, 0)},
        ["eth2", "eth10"],
    ),
}


@pytest.mark.parametrize("fabric", CARDS)
def test_the_fabrics_cards_are_offered(fabric: str, tmp_path: Path) -> None:
    """No management Ethernet, IPoIB nor virtual functions if there is something better."""
    rdma, interfaces, offered = CARDS[fabric]
    tree = Tree(tmp_path, dataclasses.replace(MACHINE, devices=MACHINE.devices[:1]))
    for number, (name, (kind, vendor, virtual)) in enumerate({**rdma, **interfaces}.items()):
        place = tree.sys / f"devices/pci0000:00/0000:{number + 1:02x}:00.0"
        pci(tree.sys, place, kind, vendor)
        if virtual:
            (place / "physfn").symlink_to(tree.sys)
        link = tree.sys / "class" / ("infiniband" if name in rdma else "net") / name
        link.mkdir(parents=True)
        (link / "device").symlink_to(place)
    assert [nic.name for nic in tree.read().nics] == offered


LISTING = """GPU 0: NVIDIA A100 (UUID: GPU-000000aa)
  MIG 3g.20gb     Device  0: (UUID: MIG-11111111-0000-0000-0000-000000000000)
  MIG 2g.10gb     Device  1: (UUID: MIG-22222222-0000-0000-0000-000000000000)
GPU 1: NVIDIA A100 (UUID: GPU-000000bb)
GPU 2: NVIDIA A100 (UUID: GPU-000000cc)
"""


def test_mig_instances_of_a_listing(tree: Tree) -> None:
    """They stand behind the GPUs, know their parent and share its place; ranks run on them."""
    got = tree.read(gpu_listing=LISTING)
    assert [gpu.name for gpu in got.gpus[3:]] == ["GPU0 MIG 3g.20gb 0", "GPU0 MIG 2g.10gb 1"]
    first = got.gpus[3]
    assert (first.index, first.address, first.domain) == (3, "0000:43:00.0", 1)
    assert first.uuid == "MIG-11111111-0000-0000-0000-000000000000"
    assert first.parent == "GPU-000000aa"
    assert [gpu.index for gpu in got.devices] == [1, 2, 3, 4]
    assert ("GPU0 MIG 2g.10gb 1", "mlx5_0", "PIX") in got.links


def test_masks_without_lists_are_enough(tree: Tree) -> None:
    """Kernels before 2.6.26, and trees that were copied in part, have only the masks of CPUs."""
    expected = tree.read()
    for name in ("cpulist", "local_cpulist", "thread_siblings_list", "core_cpus_list"):
        for path in tree.sys.rglob(name):
            words = mask(parse_list(path.read_text()))
            mask_name = {"cpulist": "cpumap", "local_cpulist": "local_cpus"}.get(name, name[:-5])
            write(path.with_name(mask_name), words)
            path.unlink()
    for path in tree.sys.rglob("numa_node"):
        path.unlink()
    assert tree.read() == expected


def test_nul_bytes_at_the_end_of_a_file(tree: Tree) -> None:
    """Linux 5.15-rc1 ends the lists of CPUs in a newline and a NUL byte."""
    expected = tree.read()
    for name in ("cpulist", "cpumap", "*_list", "*_siblings", "local_cpu*", "online", "distance"):
        for path in tree.sys.rglob(name):
            path.write_bytes(path.read_bytes() + b"\0")
    assert tree.read() == expected


@pytest.mark.parametrize("online", [None, "", "nonsense"])
def test_without_a_list_of_online_cpus(tree: Tree, online: str | None) -> None:
    """The directories of the CPUs count, but for those that are offline."""
    root = tree.sys / "devices/system/cpu"
    for cpu in range(1, 16):  # the first CPU has no such file: it cannot be taken offline
        write(root / f"cpu{cpu}/online", "0" if cpu in {3, 13} else "1")
    (root / "online").unlink()
    if online is not None:
        write(root / "online", online)
    assert tree.read().cpus == frozenset(range(16)) - {3, 13}


def test_nothing_at_all_is_an_error(tmp_path: Path) -> None:
    """It names the place that was looked at, and what else can be done."""
    with pytest.raises(InputError, match=r"sys/devices/system/cpu: no CPUs") as caught:
        read_sysfs(str(tmp_path / "sys"), str(tmp_path / "proc"))
    assert "hpml topo FILE" in caught.value.hint


def test_garbage_in_files_is_no_crash(tree: Tree) -> None:
    """Each file that holds nonsense counts as if it were not there."""
    for path in tree.sys.rglob("*"):
        if path.is_file() and path.name != "online":
            path.write_bytes(b"\xff\x00nonsense 4-1,,")
    got = tree.read()
    assert len(got.cores) == 16
    assert [gpu.domain for gpu in got.gpus] == [None, None, None]
