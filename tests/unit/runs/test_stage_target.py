"""Where `target: auto` leads."""

from __future__ import annotations

import pytest

from hpml_orchestrator.runs.measure import NodeRoom, choose_target, room_of_site
from hpml_orchestrator.script.template import directive
from hpml_orchestrator.spec import Job
from hpml_orchestrator.spec.site import Site

GIB = 1024


@pytest.mark.parametrize(
    ("size", "own", "in_ram", "room", "target", "why"),
    [
        (30 * GIB, 4 * GIB, 0, NodeRoom(64 * GIB), "shm", "at most half of the 60G"),
        (31 * GIB, 4 * GIB, 0, NodeRoom(64 * GIB), "local", "more than half of the 60G"),
        (30 * GIB, 4 * GIB, 1, NodeRoom(64 * GIB), "local", "with 1M of other data"),
        (40 * GIB, 4 * GIB, 0, NodeRoom(64 * GIB, 20 * GIB), "shm", "not on a disk of 20G"),
        (61 * GIB, 4 * GIB, 0, NodeRoom(64 * GIB, 20 * GIB), "local", "more than half"),
        (1, 64 * GIB, 0, NodeRoom(32 * GIB), "local", "more than half of the 0M"),
        (None, 4 * GIB, 0, NodeRoom(64 * GIB), "local", "its size is not known"),
        (1, 0, 0, NodeRoom(64 * GIB), "local", "the job asks for no memory"),
        (1, 4 * GIB, 0, NodeRoom(), "local", "the memory of the nodes is not known"),
    ],
)
def test_ram_where_it_fits_well(
    size: int | None, own: int, in_ram: int, room: NodeRoom, target: str, why: str
) -> None:
    """Half of what a node has beside the job; and the reason can stand in a script as it is."""
    found = choose_target(size, own_mib=own, in_ram_mib=in_ram, room=room)
    assert found.target == target
    assert why in found.why
    assert directive(found.why) == found.why


def test_the_least_node_of_the_partition_counts() -> None:
    """Memory and disk of the smallest node, the partition's own limit, and whether it is known."""
    site = Site.model_validate(
        {
            "partitions": {
                "small": {"default": True, "node_types": ["a", "b"]},
                "capped": {"node_types": ["a"], "max_memory_per_node": "32G"},
                "vague": {"node_types": ["a", "c"]},
            },
            "node_types": {
                "a": {"memory": "128G", "local_disk": "1T", "scratch": "/local"},
                "b": {"memory": "64G", "local_disk": "2T", "scratch": "/local"},
                "c": {},
            },
        }
    )

    def room(partition: str | None) -> NodeRoom:
        resources = {} if partition is None else {"partition": partition}
        job = Job.model_validate({"name": "a", "command": ["x"], "resources": resources})
        return room_of_site(job, site)

    assert room(None) == NodeRoom(64 * GIB, 1024 * GIB, scratch=True)
    assert room("capped") == NodeRoom(32 * GIB, 1024 * GIB, scratch=True)
    assert room("vague") == NodeRoom(None, None, scratch=False)
    assert room("unknown") == NodeRoom()
    assert room_of_site(Job.model_validate({"name": "a", "command": ["x"]}), None) == NodeRoom()
