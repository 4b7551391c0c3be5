"""Where ranks were seen, from records written by hand: right, wrong, missing and damaged ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.placement.verify import NodeProof, RankProof, proof_json
from hpml_orchestrator.records.files import append_line, write_json
from hpml_orchestrator.records.job import Binding
from hpml_orchestrator.records.run import Attempt
from hpml_orchestrator.runs.reporting.summary import read_binding

LOCAL = Binding(policy="gpu-local", verify="warn")


def rank(number: int, local: int, *wrong: str, live: bool = True) -> RankProof:
    """A rank of a milan node, bound as planned unless a fault is given."""
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


def node(number: int, **values: Any) -> NodeProof:
    """The proof of node n<number>, with four ranks."""
    ranks = tuple(rank(4 * number + local, local) for local in range(4))
    proof = NodeProof(f"n{number}", "gpu-local", "warn", 4, ranks, (), 3, 1e9)
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


def test_every_rank_is_bound_as_planned(attempt: Attempt) -> None:
    """The line counts all nodes' ranks, and each of them has a place."""
    prove(attempt, node(1), node(0))
    bound = read_binding(attempt, LOCAL)
    assert bound.line == "gpu-local, 8 of 8 ranks bound as planned"
    assert [(place.rank, place.node, place.right) for place in bound.places] == [
        (number, f"n{number // 4}", True) for number in range(8)
    ]
    assert (bound.places[5].cpus, bound.places[5].numa) == ("32-47", (2,))


WRONG = (rank(0, 0, "first", "second"), rank(1, 1, "first"), rank(2, 2), rank(3, 3))
OWN = tuple(rank(number, number, live=number > 0) for number in range(4))
FAR = "GPU 0000:01:00.0 is next to NUMA domain 3, where no CPU is allowed"
FAILED = "; the job failed for it (verify: strict)"
OFF = Binding(policy="gpu-local", verify="off")


ONE = node(0, ranks=(rank(0, 0, "off"),), expected=1)
BEHIND = node(0, ranks=(rank(0, 0),))
ODD = node(0, ranks=WRONG)
ALONE = node(0, ranks=OWN)
DONE, FATAL = (0, "completed"), (79, "binding")


@pytest.mark.parametrize(
    ("proofs", "records", "ended", "asked", "line"),
    [
        ([], [], None, LOCAL, ""),
        ([], [], (1, "failed"), LOCAL, ""),  # before the ranks start
        ([ODD, node(1)], [], None, LOCAL, "2 of 8 ranks WRONG"),
        ([ONE], [], FATAL, None, f"1 of 1 rank WRONG{FAILED}"),
        ([node(0, policy="none")], [], None, LOCAL, "none: nothing was bound"),
        ([], [0], None, Binding(policy="none"), "none: nothing was bound"),
        ([], [0], None, OFF, "not proven: gpu-local, verify is off"),
        ([], [0, 1], None, LOCAL, "not proven: gpu-local, no rank verified so far"),
        ([], [0], DONE, LOCAL, "not proven: gpu-local, no rank verified"),
        ([], [0], FATAL, LOCAL, f"not proven: gpu-local, no rank verified{FAILED}"),
        ([BEHIND], [0, 1], None, LOCAL, "not proven: gpu-local, 1 of 4 ranks verified so far"),
        ([ALONE], [], None, LOCAL, "4 of 4 ranks bound as planned (1 checked at their start only)"),
        ([node(0, warnings=(FAR,))], [], None, LOCAL, "4 of 4 ranks bound as planned; 1 warning"),
        ([], [], DONE, LOCAL, "not proven: gpu-local, no rank left a record"),
    ],
)
def test_the_binding_in_one_line(
    attempt: Attempt,
    proofs: list[NodeProof],
    records: list[int],
    ended: tuple[int, str] | None,
    asked: Binding | None,
    line: str,
) -> None:
    """Wrong, unproven, missing and unbound ranks are distinguished."""
    prove(attempt, *proofs)
    bind(attempt, *(record(number) for number in records))
    if ended:
        end(attempt, *ended)
    bound = read_binding(attempt, asked)
    begins = line[:1].isdigit() * "gpu-local, "
    assert bound.line == f"{begins}{line}"
    assert bound.fatal == ("WRONG" in line and FAILED in line)


def test_a_node_without_a_proof_is_missed(attempt: Attempt) -> None:
    """A rank knows the world size: ranks of a node that recorded nothing are not forgotten."""
    prove(attempt, node(0))
    bind(attempt, record(0, world_size=8))
    expected = "not proven: gpu-local, 4 of 8 ranks verified so far"
    assert read_binding(attempt, LOCAL).line == expected
    (attempt.directory / "binding" / "n0.proof.json").unlink()
    (place,) = read_binding(attempt, LOCAL).places
    assert (place.gpu, place.cpus, place.right) == ("0", "0-15,64-79", None)
    assert (place.nic, place.threads, place.cores) == ("mlx5_1", 16, None)


def damaged(**values: Any) -> str:
    """The text of a proof with some values in the place of good ones."""
    return json.dumps({"node": "n", "policy": "", "verify": "", "expected": 1, **values})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is not JSON"),
        ("[]", "holds no JSON object"),
        ('{"schema_version": 99}', "has schema_version 99"),
        ("{}", "not a proof of a node's binding"),
        (
            damaged(ranks=[{"rank": 1, "local_rank": 0, "cpus": "0-9999999999"}]),
            "not a list of CPUs",
        ),
    ],
)
def test_a_damaged_proof_is_told(attempt: Attempt, text: str, why: str) -> None:
    """The proofs of the other nodes count, and the line names the unreadable one."""
    prove(attempt, node(0))
    (attempt.directory / "binding" / "n1.proof.json").write_text(text)
    told = read_binding(attempt, LOCAL)
    assert told.line.startswith("not proven: the proof of n1 cannot be read (")
    assert why in told.unreadable[0].why
    assert str(attempt.directory) not in told.line
    assert len(told.places) == 4
