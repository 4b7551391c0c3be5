"""Where ranks were seen, from records written by hand: right, wrong, missing and damaged ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpml_orchestrator.placement.proof import NodeProof, RankProof, proof_json
from hpml_orchestrator.records.files import append_line, write_json
from hpml_orchestrator.records.store import Attempt
from hpml_orchestrator.runs.bound import Bound, bound_of
from hpml_orchestrator.topology.record import topology_json
from tests.unit.placement.machines import milan

LOCAL = {"policy": "gpu-local", "verify": "warn"}


def rank(number: int, local: int, *wrong: str, live: bool = True) -> RankProof:
    """A rank of a milan node, where it should be unless something is said to be wrong."""
    domain = 3 - local
    return RankProof(
        rank=number,
        local_rank=local,
        pid=100 + number,
        gpu=f"0000:0{local + 1}:00.0",
        uuid=f"GPU-{local}",
        cpus=f"{16 * domain}-{16 * domain + 15}",
        cores=16,
        numa=(domain,),
        memory=f"prefer:{domain}",
        nic="mlx5_0",
        distance=10,
        threads=16,
        live=live,
        wrong=wrong,
    )


def node(number: int, *wrong: str, **values: Any) -> NodeProof:
    """The proof of node n<number>, with four ranks."""
    ranks = tuple(rank(4 * number + local, local) for local in range(4))
    proof = NodeProof(f"n{number}", "gpu-local", "warn", 4, ranks, wrong, (), 3, 1e9)
    return replace(proof, **values)


def record(number: int, **values: Any) -> dict[str, Any]:
    """What hpml-bind writes of a rank of node n0."""
    return {
        "schema_version": 2,
        "rank": number,
        "local_rank": number,
        "world_size": 4,
        "node": "n0",
        "cpus": f"{16 * number}-{16 * number + 15},{64 + 16 * number}-{79 + 16 * number}",
        "visible": "0,1,2,3",
        "threads": 16,
        "nic": "mlx5_1",
        "bound": True,
        "error": "",
        **values,
    }


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    """An attempt whose ranks have not started."""
    directory = tmp_path / "attempts" / "0"
    for name in ("binding", "nodes"):
        (directory / name).mkdir(parents=True)
    return Attempt(directory)


def prove(attempt: Attempt, *proofs: NodeProof) -> None:
    for proof in proofs:
        write_json(attempt.directory / "binding" / f"{proof.node}.proof.json", proof_json(proof))


def bind(attempt: Attempt, *records: dict[str, Any]) -> None:
    for one in records:
        append_line(attempt.directory / "binding" / "n0.jsonl", json.dumps(one))


def end(attempt: Attempt, code: int, reason: str) -> None:
    write_json(attempt.directory / "ended.json", {"exit_code": code, "reason": reason, "time": 1e9})


def test_every_rank_is_where_it_should_be(attempt: Attempt) -> None:
    """The line counts all nodes' ranks, and each of them has a place."""
    prove(attempt, node(1), node(0))
    told = bound_of(attempt, LOCAL)
    assert told.line == "gpu-local, 8 of 8 ranks where they should be"
    assert [(one.rank, one.node, one.right) for one in told.places] == [
        (number, f"n{number // 4}", True) for number in range(8)
    ]
    assert (told.places[5].cpus, told.places[5].numa) == ("32-47", (2,))


def test_nothing_is_told_of_what_did_not_start(attempt: Attempt) -> None:
    """Without any record there is no line."""
    assert bound_of(attempt, LOCAL) == Bound()


def test_records_that_are_lost_are_no_proof(attempt: Attempt) -> None:
    """A job that is over, and whose ranks had begun, is not passed over in silence."""
    (attempt.directory / "plan").mkdir()
    (attempt.directory / "plan" / "n0.txt").write_text("")
    assert bound_of(attempt, LOCAL).line == "", "they may be about to start"
    end(attempt, 1, "failed")
    lost = "not proven: gpu-local, there is no record of any rank"
    assert bound_of(attempt, LOCAL).line == lost
    assert bound_of(attempt, {**LOCAL, "verify": "off"}).line == (
        f"{lost}, and with verify: off nobody looked"
    )
    assert bound_of(attempt, "none").line == "none: nothing was bound"
    (attempt.directory / "plan" / "n0.txt").unlink()
    assert bound_of(attempt, LOCAL).line == "", "it failed before any rank was to start"
    end(attempt, 79, "binding")
    assert bound_of(attempt, LOCAL).line == f"{lost}; the job failed for it (verify: strict)"
    end(attempt, 0, "completed")
    assert bound_of(attempt, LOCAL).line == lost


def test_wrong_ranks_are_counted(attempt: Attempt) -> None:
    """Two ranks on one node are wrong, and one node as a whole."""
    ranks = (rank(0, 0, "first", "second"), rank(1, 1, "first"), rank(2, 2), rank(3, 3))
    prove(attempt, node(0, ranks=ranks), node(1))
    told = bound_of(attempt, LOCAL)
    assert told.line == "gpu-local, 2 of 8 ranks WRONG"
    assert [one.right for one in told.places] == [False, False, *[True] * 6]
    prove(attempt, node(1, "rank 3 was never seen"))
    assert bound_of(attempt, LOCAL).line == "gpu-local, 2 of 8 ranks WRONG, node n1 WRONG"


def test_a_strict_job_is_told_to_have_been_ended(attempt: Attempt) -> None:
    """The line says that the binding ended the job, and only if it did."""
    prove(attempt, node(0, ranks=(rank(0, 0, "off"),), verify="strict", expected=1))
    assert bound_of(attempt).line == "gpu-local, 1 of 1 rank WRONG"
    end(attempt, 79, "binding")
    assert bound_of(attempt).line == (
        "gpu-local, 1 of 1 rank WRONG; the job failed for it (verify: strict)"
    )
    end(attempt, 143, "terminated")
    assert bound_of(attempt).line == "gpu-local, 1 of 1 rank WRONG"


def test_nothing_was_bound(attempt: Attempt) -> None:
    """With the policy `none`, by proof and without one."""
    prove(attempt, node(0, policy="none"))
    told = bound_of(attempt, LOCAL)
    assert told.line == "none: nothing was bound"
    assert [one.right for one in told.places] == [None] * 4, "there is nothing to be right about"
    (attempt.directory / "binding" / "n0.proof.json").unlink()
    bind(attempt, record(0))
    assert bound_of(attempt, {"policy": "none"}).line == "none: nothing was bound"
    assert bound_of(attempt, "none").line == "none: nothing was bound"


def test_what_nobody_looked_at_is_not_proven(attempt: Attempt) -> None:
    """No proof yet, none at the end, a part of the ranks, and `verify: off`."""
    bind(attempt, record(0), record(1))
    assert bound_of(attempt, LOCAL).line == "not proven: gpu-local, no rank was looked at so far"
    prove(attempt, node(0, ranks=(rank(0, 0),)))
    told = bound_of(attempt, LOCAL)
    assert told.line == (
        "not proven: gpu-local, 1 of 4 ranks seen so far, which is where it should be"
    )
    assert [one.right for one in told.places] == [True, None]
    prove(attempt, node(0, ranks=(rank(0, 0), rank(1, 1))))
    end(attempt, 0, "completed")
    assert bound_of(attempt, LOCAL).line == (
        "not proven: gpu-local, 2 of 4 ranks seen, which are where they should be"
    )
    (attempt.directory / "binding" / "n0.proof.json").unlink()
    assert bound_of(attempt, LOCAL).line == "not proven: gpu-local, no rank was looked at"
    end(attempt, 79, "binding")
    assert bound_of(attempt, {**LOCAL, "verify": "strict"}).line == (
        "not proven: gpu-local, no rank was looked at; the job failed for it (verify: strict)"
    )
    off = {**LOCAL, "verify": "off"}
    assert bound_of(attempt, off).line == "not proven: gpu-local, with verify: off nobody looked"


def test_a_node_without_a_proof_is_missed(attempt: Attempt) -> None:
    """A rank knows how many there are: those of a node that wrote nothing are not forgotten."""
    prove(attempt, node(0))
    bind(attempt, record(0, world_size=8))
    assert bound_of(attempt, LOCAL).line == (
        "not proven: gpu-local, 4 of 8 ranks seen so far, which are where they should be"
    )


def test_ranks_that_ended_before_a_look(attempt: Attempt) -> None:
    """What only hpml-bind's own record tells is called that."""
    ranks = tuple(rank(one, one, live=one > 0) for one in range(4))
    prove(attempt, node(0, ranks=ranks))
    assert bound_of(attempt, LOCAL).line == (
        "gpu-local, 4 of 4 ranks where they should be (1 by their own record alone)"
    )


def test_warnings_are_counted(attempt: Attempt) -> None:
    """Ranks that got no CPU next to their GPU are on their own cores; the line does not hide it."""
    far = "GPU 0000:01:00.0 is next to NUMA domain 3, where no CPU is allowed"
    prove(attempt, replace(node(0), warnings=(far,)), replace(node(1), warnings=(far,)))
    assert bound_of(attempt, LOCAL).line == (
        "gpu-local, 8 of 8 ranks where they should be; 1 warning"
    )
    prove(attempt, replace(node(0), warnings=(far, "cold")))
    assert bound_of(attempt, LOCAL).line.endswith("; 2 warnings")


def test_records_alone_are_completed_by_the_nodes_topology(attempt: Attempt) -> None:
    """Rank 1 of a milan node has the GPU of domain 2 and runs on domain 1: distance 20."""
    bind(attempt, record(1))
    (bare,) = bound_of(attempt, LOCAL).places
    assert (bare.gpu, bare.cores, bare.numa, bare.distance) == ("1", None, (), None)
    write_json(attempt.directory / "nodes" / "n0.topology.json", topology_json(milan()))
    (told,) = bound_of(attempt, LOCAL).places
    assert (told.gpu, told.cores, told.numa, told.distance) == ("0000:02:00.0", 16, (1,), 20)
    assert (told.nic, told.threads, told.right) == ("mlx5_1", 16, None)
    assert told.cpus == "16-31,80-95"
    untold = tuple(replace(one, distances=()) for one in milan().domains)
    bare_node = topology_json(replace(milan(), domains=untold))
    write_json(attempt.directory / "nodes" / "n0.topology.json", bare_node)
    assert bound_of(attempt, LOCAL).places[0].distance is None


def test_old_records_are_readable(attempt: Attempt) -> None:
    """Version 1 of a rank's record has its CPUs as a list of numbers."""
    old = {
        "schema_version": 1,
        "rank": 0,
        "local_rank": 0,
        "world_size": 1,
        "node": "n0",
        "cpus": [0, 1, 2, 8],
        "visible_gpus": None,
        "bound": False,
    }
    bind(attempt, old)
    told = bound_of(attempt, "none")
    assert told.line == "none: nothing was bound"
    assert (told.places[0].cpus, told.places[0].gpu) == ("0-2,8", None)


def damaged(**values: Any) -> str:
    """The text of a proof with some values in the place of good ones."""
    return json.dumps({"node": "n", "policy": "", "verify": "", "expected": 1, **values})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is not JSON"),
        ("[]", "holds no JSON object"),
        ('{"schema_version": 99}', "has schema_version 99"),
        ("{}", "no proof of a node's binding"),
        (damaged(node=5), "node is 5"),
        (damaged(wrong="x"), "wrong is 'x'"),
        (damaged(ranks=[{"rank": "1", "local_rank": 0}]), "rank is '1'"),
        (
            damaged(ranks=[{"rank": 1, "local_rank": 0, "cpus": "0-9999999999"}]),
            "not a list of CPUs",
        ),
        ("[" * 100_000, ""),
    ],
)
def test_a_damaged_proof_is_told(attempt: Attempt, text: str, why: str) -> None:
    """The other nodes' proofs count, and the line says that one cannot be read."""
    prove(attempt, node(0))
    (attempt.directory / "binding" / "n1.proof.json").write_text(text)
    told = bound_of(attempt, LOCAL)
    assert told.line.startswith("not proven: the proof of n1 cannot be read (")
    assert why in told.unreadable[0].why
    assert str(attempt.directory) not in told.line
    assert len(told.places) == 4


def test_fields_of_a_later_version_are_passed_over(attempt: Attempt) -> None:
    """A proof with more in it than this hpml knows is read."""
    data = proof_json(node(0))
    data["later"] = data["ranks"][0]["later"] = {"a": 1}
    write_json(attempt.directory / "binding" / "n0.proof.json", data)
    assert bound_of(attempt).line == "gpu-local, 4 of 4 ranks where they should be"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([[float("inf")], float("inf"), float("nan"), 10**400, "9" * 5000]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@given(st.data())
@settings(deadline=None)
def test_no_record_breaks_it(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any value in any field of a proof, a rank's record or a topology: told or passed over."""
    directory = tmp_path_factory.mktemp("any") / "0"
    for name in ("binding", "nodes"):
        (directory / name).mkdir(parents=True)
    proof = json.loads(json.dumps(proof_json(node(0))))
    target = data.draw(st.sampled_from([proof, proof["ranks"][1]]))
    target[data.draw(st.sampled_from(sorted(target)))] = data.draw(JSON)
    (directory / "binding" / "n0.proof.json").write_text(json.dumps(proof))
    line = record(1, node="n1")
    line[data.draw(st.sampled_from(sorted(set(line) - {"rank"})))] = data.draw(JSON)
    (directory / "binding" / "n1.jsonl").write_text(f"{json.dumps(line)}\n[]\n7\n")
    nodes = json.loads(json.dumps(topology_json(milan())))
    target = data.draw(st.sampled_from([nodes, nodes["cores"][0], nodes["gpus"][1]]))
    target[data.draw(st.sampled_from(sorted(target)))] = data.draw(JSON)
    (directory / "nodes" / "n1.topology.json").write_text(json.dumps(nodes))
    told = bound_of(Attempt(directory), LOCAL)
    assert told.line
    assert json.dumps(told.to_json())
