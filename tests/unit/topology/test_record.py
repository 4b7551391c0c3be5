"""`hpml topo --json` is read back as it was, and anything else is refused."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.placement.planner import plan
from hpml_orchestrator.topology.model import Gpu, Topology, topology_json
from hpml_orchestrator.topology.sysfs import read_sysfs, read_topology, topology_of_text
from tests.unit.placement.machines import dgx_a100

FILES = sorted((Path(__file__).parent / "data").glob("*/*"))
MIG = replace(
    dgx_a100(),
    gpus=(*dgx_a100().gpus, Gpu(8, "GPU0 MIG 1g.5gb", uuid="MIG-a", parent="GPU-0", cpus=(1, 5))),
)
MACHINES = [*(read_topology(path) for path in FILES), MIG, read_sysfs()]


@pytest.mark.parametrize("machine", MACHINES, ids=[*(one.name for one in FILES), "mig", "here"])
def test_what_was_printed_is_read_again(machine: Topology, tmp_path: Path) -> None:
    """Real machines, MIG instances and this node: by recognition of the file, nothing is lost."""
    path = tmp_path / "node.json"
    path.write_text(json.dumps(topology_json(machine), indent=2))
    assert read_topology(path) == machine


def changed(where: str, place: int, **values: Any) -> str:
    data = json.loads(json.dumps(topology_json(dgx_a100())))
    data[where][place].update(values)
    return json.dumps(data)


def told(**values: Any) -> str:
    return json.dumps({**topology_json(dgx_a100()), **values})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ("{}", "is not a topology from `hpml topo --json`: the field "),
        (changed("cores", 3, cpus=""), "core 3 does not fit"),
        (changed("cores", 3, cpus="2,131"), "core 3 does not fit"),
        (changed("cores", 3, domain=77), "core 3 does not fit"),
        (changed("cores", 3, number=4), "two cores have the same number"),
        (changed("cores", 3, cpus="0-99999999999"), "not a list of CPUs"),
        (changed("cores", 0, socket=-1), "socket is negative: -1"),
        (changed("domains", 0, distances=[1, 2]), "is not a topology"),
        (changed("domains", 1, distances={"0": -5}), "distance is negative: -5"),
        (changed("gpus", 1, index=0), "two GPUs have the same number"),
        (changed("gpus", 1, index=1e999), "is not a topology"),
        (changed("gpus", 1, domain=8), "next to domain 8, which is missing"),
        (changed("nics", 2, name=None), "name=None"),
        (told(warnings="none"), "warnings must be a list"),
    ],
)
def test_what_is_none_is_refused(text: str, message: str) -> None:
    """With what is wrong, as every other format."""
    with pytest.raises(InputError, match="topology: is not ") as caught:
        topology_of_text(text)
    assert message in caught.value.message


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_no_value_crashes_the_reader_or_the_planner(data: st.DataObject) -> None:
    """Any value in any place: an InputError, or a machine that can be planned."""
    record = json.loads(json.dumps(topology_json(MIG)))
    where = data.draw(st.sampled_from(sorted(record)))
    target = record
    if isinstance(record[where], list) and record[where]:
        target = data.draw(st.sampled_from(record[where]))
        where = data.draw(st.sampled_from(sorted(target))) if isinstance(target, dict) else ""
    if where:
        target[where] = data.draw(VALUES)
    with contextlib.suppress(InputError):
        machine = topology_of_text(json.dumps(record))
        assert len(plan(machine, 8).ranks) == 8
