"""What lstopo itself exports is read, in the XML of hwloc 1 and of hwloc 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpml_orchestrator.topology import format_list
from hpml_orchestrator.topology.recognise import read_topology

EXPORTS = Path(__file__).parent / "lstopo"


@pytest.mark.parametrize("version", [1, 2])
def test_two_sockets_of_two_domains(version: int) -> None:
    """Three cores of two threads in each domain; hwloc 1 hangs cores into domains, hwloc 2 not."""
    got = read_topology(EXPORTS / f"four-domains-v{version}.xml")
    assert [format_list(one.cpus) for one in got.domains] == ["0-5", "6-11", "12-17", "18-23"]
    assert [core.cpus for core in got.cores] == [(n, n + 1) for n in range(0, 24, 2)]
    assert [core.socket for core in got.cores] == [0] * 6 + [1] * 6
    assert [core.domain for core in got.cores] == [n // 3 for n in range(12)]
    assert {one.memory_bytes for one in got.domains} == {1024**3}
    assert got.warnings == ()


def test_a_cpu_has_one_domain() -> None:
    """Of two domains of memory near to the same CPUs the first has these, the second none."""
    got = read_topology(EXPORTS / "near-memory-v2.xml")
    assert [format_list(one.cpus) for one in got.domains] == ["0-5", "", "6-11", ""]
    assert [core.domain for core in got.cores] == [0, 0, 0, 2, 2, 2]
