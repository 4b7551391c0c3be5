"""The fault matrix with real runs, made now; tests/unit/diagnosis replays recorded ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from deploy.gpusim.gpusim import Simulator
from tests.faultmatrix.conductor import ALL, FaultDesk
from tests.faultmatrix.matrix import SEEDS
from tests.monitoring.gpusim_support import gpusim_library
from tests.storage import stored_folder

__all__ = ["gpusim_library"]

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(3600)]

AT_ONCE = 6  # of the light ones, which mostly sleep
LIGHT = [(name, seed) for seed in SEEDS for name, case in ALL.items() if not case.ddp]
PYTORCH = [(name, seed) for seed in SEEDS for name, case in ALL.items() if case.ddp]


def kinds_found(name: str, seed: int) -> list[str]:
    """Run a case, and return what `hpml report` finds."""
    with stored_folder() as root:
        desk = FaultDesk(root)
        report = desk.json("report", desk.carry_out(ALL[name], seed))
    return [finding["kind"] for finding in report["findings"]]


def check(name: str, found: list[str]) -> None:
    """The fault comes first, both of two are there, and nothing is found of a healthy run."""
    expected = ALL[name].expected
    assert {*found[:1]} <= {*expected}
    assert {*found} >= {*expected}


def need_root(name: str) -> None:
    """Skip what needs control groups or a network namespace on machines without them."""
    case = ALL[name]
    if case.link or case.disk or "quota" in case.faults:
        if os.geteuid() != 0:
            pytest.skip("makes control groups and a network namespace: needs root")
        if not Path("/sys/fs/cgroup/cpu").is_dir():
            pytest.skip("HARDWARE: no control groups of version 1")


@pytest.mark.parametrize(("name", "seed"), PYTORCH)
def test_the_report_of_a_pytorch_training_says_what_is_wrong(name: str, seed: int) -> None:
    """One after the other: each has the machine for itself."""
    need_root(name)
    check(name, kinds_found(name, seed))


@pytest.fixture(scope="module")
def reports(gpusim_library: Simulator) -> Iterator[dict[tuple[str, int], Future[list[str]]]]:
    """All other cases, while they run; the longest begin first."""
    ordered = sorted(LIGHT, key=lambda one: -ALL[one[0]].options.get("steps", 0))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {one: pool.submit(kinds_found, *one) for one in ordered}


@pytest.mark.parametrize(("name", "seed"), LIGHT)
def test_the_report_says_what_is_wrong(
    name: str, seed: int, reports: dict[tuple[str, int], Future[list[str]]]
) -> None:
    """As `hpml report` prints it."""
    need_root(name)
    check(name, reports[name, seed].result())
