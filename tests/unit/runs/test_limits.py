"""How large the nodes of a run are, so that no change of its job asks for more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.check.changes import with_limits
from hpml_orchestrator.records.files import write_json
from hpml_orchestrator.runs.facts import gather
from hpml_orchestrator.scheduler.model import JobState
from hpml_orchestrator.site.model import Site

if TYPE_CHECKING:
    from tests.unit.runs.conftest import World

TOPOLOGY = {
    "schema_version": 1,
    "source": "sysfs",
    "domains": [{"number": 0, "cpus": "0-7", "memory_bytes": 100 << 30, "distances": {}}],
    "cores": [{"number": n, "socket": 0, "domain": 0, "cpus": str(n)} for n in range(8)],
    "gpus": [],
    "nics": [],
    "links": [],
    "warnings": [],
}
KINDS = {
    "partitions": {"p": {"node_types": ["a", "b"], "max_cpus_per_node": 6}, "q": {}},
    "node_types": {"a": {"cpus": 4, "memory": "80G"}, "b": {"cpus": 7, "memory": "60G"}},
}


@pytest.mark.parametrize(
    ("nodes", "partition", "site", "cpus", "gigabytes"),
    [
        (1, None, {}, 8, 90),  # the scheduler keeps a part of a node's memory
        (0, None, {}, None, None),
        (1, "p", KINDS, 6, 80),
        (0, "p", KINDS, 6, 80),
        (1, "q", KINDS, 8, 90),
        (1, "unknown", KINDS, 8, 90),
    ],
)
def test_the_size_of_the_nodes(
    world: World,
    nodes: int,
    partition: str | None,
    site: dict[str, Any],
    cpus: int | None,
    gigabytes: int | None,
) -> None:
    """By what each of them recorded, and by the site profile's node types and limits."""
    submission = world.submit(resources={"partition": partition} if partition else {})
    world.scheduler.move("1", JobState.RUNNING)
    attempt = world.starts(submission, "1")
    if nodes:
        write_json(attempt / "nodes" / "n1.topology.json", TOPOLOGY)
    state = world.state(submission)
    facts = with_limits(gather(state), state, Site.model_validate(site) if site else None)
    assert facts.node_cpus == cpus
    assert facts.node_memory_bytes == (gigabytes and pytest.approx(gigabytes * (1 << 30)))
