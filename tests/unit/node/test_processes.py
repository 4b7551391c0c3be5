"""The live processes of a rank as /proc has them, where no machine of a test has as many CPUs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.node.processes import Look

if TYPE_CHECKING:
    from pathlib import Path


def kernel_s_table(root: Path, pid: int, parent: int, ticks: int, *cpus: int) -> None:
    """A fake process in the kernel's words, with a thread on each CPU."""
    name = f"program{pid}"
    place = root / str(pid)
    place.mkdir(parents=True)
    zeros = "0 " * 9
    (place / "stat").write_text(f"{pid} ({name}) S {parent} {zeros}{ticks} 0 {'0 ' * 6}7 0\n")
    (place / "cmdline").write_text(name)
    for number, cpu in enumerate(cpus):
        (place / "task" / str(pid + number)).mkdir(parents=True)
        status = f"Name:\t{name}\nCpus_allowed_list:\t{cpu}\nMems_allowed:\t1\n"
        (place / "task" / str(pid + number) / "status").write_text(status)


def test_threads_that_are_bound_one_by_one_are_all_read(tmp_path: Path) -> None:
    """A part of 256 threads, each on a CPU of its own, is on a part of the CPUs."""
    kernel_s_table(tmp_path, 1000, 1, 5, *range(256))
    look = Look(str(tmp_path))
    found = look.process(look.entries[1000])
    assert found is not None
    assert (found.cpus, found.first) == (tuple(range(256)), (0,))


@pytest.mark.parametrize(
    ("seconds", "of_helper", "main"),
    [
        pytest.param(0.5, 4, 2000, id="a shell that waits"),
        pytest.param(5, 8, 1000, id="a program at work"),
        pytest.param(5, 100, 2000, id="a launcher that began long ago"),
    ],
)
def test_a_helper_that_works_more_than_the_program(
    tmp_path: Path, seconds: float, of_helper: int, main: int
) -> None:
    """What has worked itself is no wrapper, busy as the program may be that it has started."""
    ticks = os.sysconf("SC_CLK_TCK")
    kernel_s_table(tmp_path, 1000, 1, int(seconds * ticks), 0)
    kernel_s_table(tmp_path, 2000, 1000, of_helper * ticks, 0)
    look = Look(str(tmp_path))
    assert look.main_of(look.family(1000)).pid == main
