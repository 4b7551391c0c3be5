"""`hpml topo --ranks`: where ranks would run on a machine, and wrong options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.unit.cli.conftest import Result

Hpml = Callable[..., "Result"]
MACHINES = Path(__file__).parents[1] / "topology" / "data"
V100 = next(MACHINES.rglob("v100-sxm2-8gpu-2socket.txt"))


def test_every_rank_gets_its_gpu_and_cores_next_to_it(hpml: Hpml) -> None:
    """Eight V100: four on CPUs 0-23,48-71 and four on 24-47,72-95, as the file says."""
    told = hpml("topo", str(V100), "--ranks", "8", "--json").json()
    ranks = told["ranks"]
    assert [one["gpu"] for one in ranks] == [f"GPU{number}" for number in range(8)]
    assert [one["numa"] for one in ranks] == [[0]] * 4 + [[1]] * 4
    cpus = [set(_numbers(one["cpus"])) for one in ranks]
    first, second = set(_numbers("0-23,48-71")), set(_numbers("24-47,72-95"))
    assert all(mine <= first for mine in cpus[:4])
    assert all(mine <= second for mine in cpus[4:])
    assert sum(len(mine) for mine in cpus) == len(set().union(*cpus)) == 96
    assert told["warnings"]


def test_a_part_of_the_node_is_planned_alone(hpml: Hpml) -> None:
    """Only the allowed CPUs are given out."""
    words = ("topo", str(V100), "--ranks", "2", "--allowed-cpus", "4-7", "--json")
    ranks = hpml(*words).json()["ranks"]
    given = sorted(cpu for one in ranks for cpu in _numbers(one["cpus"]))
    assert given == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "numa"], "--policy: needs --ranks N"),
        (["--allowed-cpus", "0"], "--allowed-cpus: needs --ranks N"),
        (["--ranks", "2", "--policy", "sockets"], "--policy: must be one of gpu-local, numa"),
        (["--ranks", "2", "--allowed-cpus", "a-b"], "--allowed-cpus: must be CPU numbers"),
        (["--ranks", "2", "--allowed-cpus", "900"], "--allowed-cpus: names none of the node's"),
        (["--ranks", "0"], "--ranks"),
        (["--ranks", "2", "--svg", "x.svg"], "--svg: cannot be given together with --ranks"),
    ],
)
def test_wrong_options_are_refused(hpml: Hpml, words: list[str], message: str) -> None:
    """With the option's name, what would be right, and exit status 2."""
    result = hpml("topo", str(V100), *words)
    assert result.code == 2
    assert message in result.err


def _numbers(text: str) -> list[int]:
    spans = [part.split("-") for part in text.split(",")]
    return [cpu for span in spans for cpu in range(int(span[0]), int(span[-1]) + 1)]
