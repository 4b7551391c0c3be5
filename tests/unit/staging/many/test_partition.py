"""Each node stages a part: equal numbers of whole samples, all of them somewhere."""

from __future__ import annotations

import stat
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as some

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.staging.faults import Retry
from hpml_orchestrator.staging.many.partition import PartitionSource, part_numbers, part_of
from hpml_orchestrator.staging.plan import Entry, HardLink, Plan, Symlink
from hpml_orchestrator.staging.sources import FileSource, TreeSource

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.staging.many.nodes import Nodes

RETRY = Retry(lambda _seconds: None, lambda: False)


@given(some.integers(1, 200), some.integers(1, 40), some.integers(1, 3))
def test_every_sample_is_somewhere(samples: int, parts: int, each: int) -> None:
    """All parts have equally many samples, whole ones, and together all of them."""
    names = [f"c{n % 7}/{n:04}.{ending}" for n in range(samples) for ending in range(each)]
    found = [part_numbers(names, part, parts) for part in range(parts)]
    assert {len(numbers) for numbers in found} == {-(-samples // parts) * each}
    assert {number for numbers in found for number in numbers} == set(range(len(names)))
    for numbers in found:
        assert set(Counter(number // each for number in numbers).values()) == {each}
        assert numbers == sorted(numbers)


def test_every_directory_is_in_every_part() -> None:
    """Directories are classes, often: no node sees one alone."""
    names = [f"{label}/{n}.jpg" for label in "abc" for n in range(40)]
    for part in range(4):
        labels = Counter(names[number][0] for number in part_numbers(names, part, 4))
        assert labels == {"a": 10, "b": 10, "c": 10}


def test_links_stay_where_they_lead_on() -> None:
    """A link to a file of another part is not made."""
    files = [Entry(name, stat.S_IFREG | 0o644, 0, 1, 1) for name in ("a", "b")]
    plan = Plan("/s", Entry("", 0o755, 0), [Entry("d", 0o755, 0)], files)
    plan.hard_links = [HardLink("d/a2", "a"), HardLink("b2", "b")]
    plan.symlinks = [Symlink("d/to_a", "../a", 0), Symlink("to_b", "b", 0), Symlink("to_d", "d", 0)]
    plan.expected = [b"A" * 16, b"B" * 16]
    part = part_of(plan, [0])
    assert [link.path for link in part.hard_links] == ["d/a2"]
    assert [link.path for link in part.symlinks] == ["d/to_a", "to_d"]
    assert part.expected == [b"A" * 16]
    assert part.directories == plan.directories


def test_reads_the_files_of_its_part(tmp_path: Path) -> None:
    """Numbers are those of the part's plan."""
    for name in "abcdef":
        (tmp_path / name).write_text(name * 3)
    source = PartitionSource(TreeSource(str(tmp_path), RETRY), 1, 2)
    plan = source.plan()
    reader = source.reader(plan)
    found = {
        entry.path: b"".join(bytes(part) for part in reader.read(number, 0, entry.size))
        for number, entry in enumerate(plan.files)
    }
    reader.close()
    assert found == {"b": b"bbb", "d": b"ddd", "f": b"fff"}


def test_what_is_one_whole_is_not_divided(tmp_path: Path) -> None:
    """Neither a file nor a pack."""
    (tmp_path / "pack.index").write_text("x")
    with pytest.raises(InputError, match="a pack is read as a whole"):
        PartitionSource(TreeSource(str(tmp_path), RETRY), 0, 2).plan()
    with pytest.raises(InputError, match="this is one file"):
        PartitionSource(FileSource(str(tmp_path / "pack.index"), RETRY), 0, 2).plan()


def test_nodes_stage_their_parts(job: Callable[..., Nodes], root: Path) -> None:
    """Three nodes, ten samples: four each, and all ten somewhere."""
    source = root / "samples"
    for number in range(10):
        path = source / str(number % 2) / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(number))
    nodes = job(source, 3, method="partition")
    nodes.start()
    ends = nodes.ends()
    assert [end["status"] for end in ends] == [0, 0, 0], ends
    assert [(end["files"], end["method"]) for end in ends] == [(4, "partition")] * 3
    parts = [{path.name for path in nodes.data(index).glob("*/*")} for index in range(3)]
    assert set.union(*parts) == {f"{number}.txt" for number in range(10)}
