"""What a job's binding needs of its nodes is looked at before it is submitted."""

from __future__ import annotations

from typing import Any

import pytest

from hpml_orchestrator.check.request import (
    CheckFinding,
    NodeShape,
    check_binding,
    shape_of_kind,
    shape_of_node,
)
from hpml_orchestrator.records.job import Job
from hpml_orchestrator.scheduler.cluster import Node
from hpml_orchestrator.site.model import NodeType
from tests.unit.placement.machines import intel, milan

INTEL = NodeShape("node type cpu", cores=16, cpus_per_core=2, sockets=2, domains=4)


def found(
    *shapes: NodeShape, whole: bool = False, binding: Any = "gpu-local", **resources: Any
) -> list[CheckFinding]:
    one = Job.from_json(
        {"name": "a", "command": ["true"], "resources": resources, "binding": binding}
    )
    return check_binding(one, shapes, whole=whole)


def test_what_fits_is_not_spoken_of() -> None:
    """One rank per GPU with cores for its workers, one per socket or domain."""
    assert found(INTEL) == []
    assert found(gpus=4, cpus_per_rank=4, binding={"loader_workers": 3}) == []
    assert found(INTEL, gpus=2, cpus_per_rank=16, binding={"loader_workers": 7}) == []
    assert found(INTEL, ranks_per_node=2, cpus_per_rank=16, binding="socket") == []
    assert found(INTEL, ranks_per_node=4, cpus_per_rank=8, binding="numa") == []
    assert found(INTEL, gpus=8, cpus_per_rank=4, binding="socket") == [], "a GPU's, to be shared"
    assert found(INTEL, gpus=4, ranks_per_gpu=2, cpus_per_rank=2) == []


@pytest.mark.parametrize(
    ("fields", "code", "message", "hint"),
    [
        (
            {"gpus": 4, "ranks_per_node": 6, "cpus_per_rank": 2},
            "binding.gpus",
            "6 ranks per node share 4 GPUs, up to 2 on one",
            (
                "`ranks_per_node: 4`, for NCCL refuses two ranks on one GPU; `ranks_per_gpu: 2`"
                " where sharing is intended"
            ),
        ),
        (
            {"gpus": 2, "cpus_per_rank": 8, "binding": {"loader_workers": 4}},
            "binding.cores",
            (
                "each rank gets 4 cores on node type cpu and needs 5: its own and those of 4 "
                "loader workers; Slurm counts 2 CPUs for each there"
            ),
            "`cpus_per_rank: 10`",
        ),
        (
            {"ranks_per_node": 4},
            "binding.cores",
            (
                "4 ranks get 2 cores on node type cpu, so that some share one; Slurm counts "
                "2 CPUs for each there"
            ),
            "`cpus_per_rank: 2`",
        ),
        (
            {"gpus": 4, "ranks_per_node": 1, "cpus_per_rank": 16},
            "binding.idle",
            (
                "1 rank per node for 4 GPUs: the cores of NUMA domains that are local only to GPUs "
                "without a rank stay idle"
            ),
            "`binding: spread` for ranks that drive several GPUs each",
        ),
        (
            {"ranks_per_node": 3, "cpus_per_rank": 4, "binding": "socket"},
            "binding.units",
            "policy socket gives each rank a socket; node type cpu has 2 for 3 ranks",
            "`ranks_per_node: 2`, or `binding: spread`",
        ),
        (
            {"ranks_per_node": 5, "cpus_per_rank": 2, "binding": "numa"},
            "binding.units",
            "policy numa gives each rank a NUMA domain; node type cpu has 4 for 5 ranks",
            "`ranks_per_node: 4`, or `binding: spread`",
        ),
    ],
)
def test_what_does_not_fit_is_warned_of(
    fields: dict[str, Any], code: str, message: str, hint: str
) -> None:
    """With the field, the limit and a fix; once for equal nodes."""
    (one,) = found(INTEL, INTEL, **fields)
    assert (one.level, one.code, one.message, one.hint) == ("warning", code, message, hint)


def test_without_a_shape_the_job_alone_is_looked_at() -> None:
    """CPUs count as cores if the cores are unknown."""
    (one,) = found(cpus_per_rank=2, binding={"loader_workers": 3})
    assert one.message == (
        "each rank gets 2 cores and needs 4: its own and those of 3 loader workers"
    )


def test_whole_nodes_have_all_their_cores() -> None:
    """What was asked for does not count then."""
    workers = {"loader_workers": 7}
    assert found(INTEL, whole=True, ranks_per_node=2, binding=workers) == []
    (one,) = found(INTEL, whole=True, ranks_per_node=4, binding=workers)
    assert one.code == "binding.cores"
    assert one.hint == "request fewer ranks or loader workers"


def test_no_binding_has_no_needs() -> None:
    """But ranks that share a GPU do so however they are bound."""
    assert found(INTEL, ranks_per_node=64, binding="none") == []
    assert [one.code for one in found(gpus=1, ranks_per_node=2, binding="none")] == ["binding.gpus"]


def test_shapes_are_those_of_the_nodes() -> None:
    """By the topology if there is one, else by the profile's numbers or Slurm's."""
    threaded = NodeType.model_validate({"cpus": 32})
    assert shape_of_kind("x", threaded, intel(())) == NodeShape("node type x", 16, 2, 2, 2)
    one_each = NodeType.model_validate({"cpus": 16})
    assert shape_of_kind("x", one_each, intel(())).cpus_per_core == 1, "Slurm counts cores there"
    assert shape_of_kind("x", NodeType(), milan()).domains == 4
    numbers = {"sockets": 2, "cores_per_socket": 8, "threads_per_core": 2}
    assert shape_of_kind("x", NodeType.model_validate(numbers), None) == NodeShape(
        "node type x", 16, 2, 2
    )
    assert shape_of_kind("x", NodeType(), None) == NodeShape("node type x")
    node = Node("n1", sockets=2, cores_per_socket=8, threads_per_core=2, cpus=32)
    assert shape_of_node(node) == NodeShape("node n1", 16, 2, 2)
