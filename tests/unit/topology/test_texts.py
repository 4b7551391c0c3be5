"""Files by other hands: recognised by content, odd ones read right, damaged ones refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpml_orchestrator.errors import InputError, NotFoundError
from hpml_orchestrator.topology.cpulist import format_list, parse_list, parse_mask
from hpml_orchestrator.topology.model import Topology, format_names, topology_json
from hpml_orchestrator.topology.sysfs import read_topology, topology_of_text
from tests.unit.topology.machines import hwloc_xml, two_sockets

DATA = Path(__file__).parent / "data"
FILES = sorted(DATA.glob("*/*"))
MACHINE = two_sockets()


@pytest.mark.parametrize("path", sorted(DATA.glob("*/*.xml")), ids=lambda path: path.name)
def test_xml_cut_anywhere_is_refused(path: Path) -> None:
    """A copy that ends too early is reported as cut off."""
    text = path.read_text()
    for part in range(1, 40):
        with pytest.raises(InputError, match="cut off"):
            topology_of_text(text[: len(text.rstrip()) * part // 40])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ("hello\n", "is not a topology in a known format"),
        ("GPU0 fell off the bus\n", "is not a topology in a known format"),
        ("<html><body/></html>", "is XML but not a machine's topology: <html>"),
        ("<topology/>", "<object> is missing"),
        ("<topology><object type='Machine' cpuset='0x1'", "cut off: it ends at line 1"),
        ("<topology><object type='Machine'></topology>", "not valid XML: mismatched tag"),
        ("<topology><object type='Machine' os_index='0'/></topology>", "it has no CPUs"),
        ("<topology><object type='PU' os_index='9999999'/></topology>", "too large"),
        ("<!--" * 500_000, "not valid XML"),
    ],
)
def test_what_is_wrong_is_told(text: str, message: str) -> None:
    """One message per fault."""
    with pytest.raises(InputError) as caught:
        topology_of_text(text, name="node.txt")
    assert message in str(caught.value)
    assert str(caught.value).startswith("node.txt: ")


def test_entities_are_refused() -> None:
    """The laughs that grow a file to gigabytes are not read, nor are files of this machine."""
    bomb = (
        '<!DOCTYPE topology [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;">]>'
        "<topology><object>&b;</object></topology>"
    )
    outside = '<!DOCTYPE topology [<!ENTITY a SYSTEM "/etc/passwd">]><topology>&a;</topology>'
    for text in (bomb, outside):
        with pytest.raises(InputError, match="entities"):
            topology_of_text(text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file, a directory, and a file that is not text; each is named."""
    with pytest.raises(NotFoundError, match="no such file: .*none.xml"):
        read_topology(tmp_path / "none.xml")
    with pytest.raises(InputError, match="is a directory without devices"):
        read_topology(tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="bytes: is not UTF-8 text"):
        read_topology(str(tmp_path / "bytes"))
    with pytest.raises(InputError, match="cannot be read"):
        read_topology("a\0b")


def test_hwloc_cpus_outside_of_the_domains() -> None:
    """They count to the first domain with a warning that names them; the JSON is read again."""
    text = hwloc_xml(MACHINE)
    node = text[text.index('<object type="NUMANode" os_index="1"') :].partition("/>")[0] + "/>"
    got = topology_of_text(text.replace(node, "").replace("distances2", "unused"))
    assert [(one.number, len(one.cpus)) for one in got.domains] == [(0, 16)]
    assert "CPUs 4-7,12-15 is unknown: they count as domain 0" in got.warnings[0]
    assert topology_of_text(json.dumps(topology_json(got))) == got


@pytest.mark.parametrize(
    ("home", "domain", "cpus"),
    [
        # a group of memory alone: its own node is 20 away from domain 1, 40 from domain 0
        ('Group" cpuset="0x0" nodeset="0x4', 1, "2-3"),
        ('Group" nodeset="0x4', 1, "2-3"),
        ('NUMANode" os_index="2" cpuset="0x0" nodeset="0x4', 1, "2-3"),
        ('Group" cpuset="0x0" nodeset="0x2', 1, "2-3"),
        # a group without CPUs and domains: the object above it counts
        ('Group" cpuset="0x0" nodeset="0x0', 0, "0-1"),
        ('Group" cpuset="0x0', 0, "0-1"),
        ('Group" cpuset="0x2', 0, "1"),
        ('Group" cpuset="0xf', None, ""),
    ],
)
def test_hwloc_gpus_below_a_group_without_cpus(home: str, domain: int | None, cpus: str) -> None:
    """The NUMA domains of the group, or the object above it, say where a GPU is."""
    gpu = '<object type="PCIDev" pci_busid="0000:01:00.0" pci_type="0302 [10de:2342] [0:0] a1 03"/>'
    own = '<object type="NUMANode" os_index="2" cpuset="0x0" nodeset="0x4"/>'
    if home.startswith("NUMANode"):
        own = ""
    packages = ""
    for number, inside in enumerate((f'<object type="{home}">{own}{gpu}</object>', "")):
        packages += f'<object type="Package" os_index="{number}" cpuset="{hex(3 << 2 * number)}">'
        packages += f'<object type="NUMANode" os_index="{number}" cpuset="{hex(3 << 2 * number)}"/>'
        for cpu in (2 * number, 2 * number + 1):
            packages += f'<object type="PU" os_index="{cpu}" cpuset="{hex(1 << cpu)}"/>'
        packages += f"{inside}</object>"
    got = topology_of_text(
        '<topology version="2.0"><object type="Machine" os_index="0" cpuset="0xf" nodeset="0x7">'
        f'{packages}</object><distances2 type="NUMANode" nbobjs="3" kind="5" name="NUMALatency">'
        '<indexes length="6">0 1 2</indexes><u64values>10 20 40 20 10 20 40 20 10</u64values>'
        "</distances2></topology>"
    )
    assert (got.gpus[0].domain, format_list(got.gpus[0].cpus)) == (domain, cpus)


@pytest.mark.parametrize(
    ("devices", "offered"),
    [
        # name of the card: its PCI class, vendor and id, and hwloc's OS devices
        ({"ConnectX-6": ("0207 [15b3:101b]", "ib0 mlx5_0"), "I350": ("0200 [8086:1521]", "eno1")},
         ["mlx5_0"]),
        ({"ConnectX-6": ("0207 [15b3:101b]", "mlx5_1"),
          "ConnectX-6 Virtual Function": ("0207 [15b3:101c]", "mlx5_0"),
          "ConnectX-5": ("0200 [15b3:1017]", "eth0 mlx5_2")}, ["mlx5_1"]),
        ({"Cassini 1": ("0200 [17db:0501]", "hsn0"), "ConnectX-5": ("0200 [15b3:1017]", "mlx5_0")},
         ["hsn0"]),
        ({"VIC Ethernet": ("0200 [1137:0043]", "eth4 usnic_0"), "VIC Userspace":
          ("0200 [1137:00cf]", ""), "I350": ("0200 [8086:1521]", "eth0")}, ["usnic_0"]),
        ({"X540 Virtual Function": ("0200 [8086:1515]", "eth2"), "X540":
          ("0200 [8086:1528]", "eth10"), "VIC Userspace": ("0200 [1137:00cf]", "")}, ["eth10"]),
        ({"ConnectX-4 Virtual Function": ("0207 [15b3:1014]", "ibp1s0")}, ["ibp1s0"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("version", [2, 3])
def test_hwloc_offers_the_fabrics_cards(
    version: int, devices: dict[str, tuple[str, str]], offered: list[str]
) -> None:
    """By PCI class, kind of OS device (which hwloc 3 numbers anew) and the name of the device."""
    network, rdma = (16, 32) if version > 2 else (2, 3)
    cards = ""
    for number, (model, (kind, names)) in enumerate(devices.items()):
        cards += f'<object type="PCIDev" pci_busid="0000:{number:02x}:00.0" pci_type="{kind} 00">'
        cards += f'<info name="PCIDevice" value="{model}"/>'
        for name in names.split():
            what = network if name.startswith(("eth", "eno", "ib0", "hsn")) else rdma
            cards += f'<object type="OSDev" name="{name}" osdev_type="{what}"/>'
        cards += "</object>"
    got = topology_of_text(
        f'<topology version="{version}.0"><object type="Machine"><object type="PU" os_index="0"/>'
        f"{cards}</object></topology>"
    )
    assert [nic.name for nic in got.nics] == offered


WORDS = [
    *("<topology", "<object type='", "Machine'", "PU'", "NUMANode'", "OSDev'", "os_index='", "1'"),
    *(">", "/>", "</object>", "</topology>", "ff", ",,"),
    *("pci_busid='", "0000:00:00.0", "pci_type='", "0302 [10de:2342]", "'"),
    *("0-3", "\n", "-1", "cpuset='", "0xf...f", "<distances2 type='NUMANode' kind='5'>"),
    *("<indexes>", "<u64values>", "99999999999999999999", "²", "\0"),
]


@given(st.one_of(st.text(), st.lists(st.sampled_from(WORDS)).map("".join)))
@example("<topology><object os_index='²'/></topology>")
@settings(max_examples=400, deadline=None)
def test_no_text_crashes_the_reader(text: str) -> None:
    """Whatever somebody gives: a topology, or an InputError."""
    with contextlib.suppress(InputError):
        assert isinstance(topology_of_text(text), Topology)


@given(st.sampled_from(FILES), st.data())
@settings(max_examples=300, deadline=None)
def test_no_damaged_file_crashes_the_reader(path: Path, data: st.DataObject) -> None:
    """Real files with a piece replaced by another piece or by nonsense."""
    text = path.read_text()
    start = data.draw(st.integers(0, len(text)))
    end = start + data.draw(st.integers(0, 60))
    instead = data.draw(st.one_of(st.text(max_size=20), st.sampled_from(WORDS)))
    with contextlib.suppress(InputError):
        assert isinstance(topology_of_text(text[:start] + instead + text[end:]), Topology)


@given(st.frozensets(st.integers(0, 4000)))
def test_lists_and_masks_of_cpus(cpus: frozenset[int]) -> None:
    """Written text is read again, and a mask means the same as a list."""
    assert parse_list(format_list(cpus)) == tuple(sorted(cpus))
    value = f"{sum(1 << cpu for cpu in cpus):x}"
    padded = value.zfill(-(-len(value) // 8) * 8)
    words = ",".join(padded[n : n + 8] for n in range(0, len(padded), 8))
    assert parse_mask(words) == tuple(sorted(cpus))
    assert parse_mask(value) == tuple(sorted(cpus))


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("GPU0 GPU1 GPU3 a mlx5_9 mlx5_10", "GPU0-1 GPU3 a mlx5_9-10"),
        ("GPU01 GPU02 GPU2 GPU2", "GPU01 GPU02 GPU2 GPU2"),
    ],
)
def test_names_with_consecutive_numbers(names: str, text: str) -> None:
    """They become a range; a number with leading zeros does not."""
    assert format_names(names.split()) == text
