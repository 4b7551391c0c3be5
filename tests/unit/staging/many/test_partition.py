"""Each node stages a part: equal numbers of whole samples, all of them somewhere."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as some

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.staging.faults import Retry
from hpml_orchestrator.staging.many.partition import PartitionSource, part_numbers
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


def linked(top: Path) -> Path:
    """Seven names of four files: a data set that repeats some of its samples."""
    (top / "sub").mkdir(parents=True)
    for name in "abcd":
        (top / name).write_text(name * 3)
    (top / "sub" / "a2").hardlink_to(top / "a")
    (top / "sub" / "to_a").symlink_to("../a")
    (top / "e_to_to_a").symlink_to("sub/to_a")
    return top


def test_links_to_files_are_samples_too(tmp_path: Path) -> None:
    """Else one part has five names and another two, and ranks wait for each other for ever."""
    parts = [PartitionSource(TreeSource(str(linked(tmp_path / "s")), RETRY), 0, 2)]
    parts.append(PartitionSource(TreeSource(str(tmp_path / "s"), RETRY), 1, 2))
    plans = [part.plan() for part in parts]
    assert [plan.file_count for plan in plans] == [4, 4]
    assert all(not plan.symlinks and not plan.hard_links for plan in plans)
    names = {entry.path for plan in plans for entry in plan.files}
    assert names == {"a", "b", "c", "d", "sub/a2", "sub/to_a", "e_to_to_a"}
    for source, plan in zip(parts, plans, strict=True):
        reader = source.reader(plan)
        for number, entry in enumerate(plan.files):
            read = b"".join(map(bytes, reader.read(number, 0, entry.size)))
            assert read == (tmp_path / "s" / entry.path).read_bytes()
        reader.close()


def test_links_of_an_archive(job: Callable[..., Nodes], root: Path) -> None:
    """Their contents are read where the file's are."""
    linked(root / "s")
    subprocess.run(["tar", "-cf", root / "s.tar", "-C", root / "s", "."], check=True)
    nodes = job(root / "s.tar", 2, method="partition")
    nodes.start()
    ends = nodes.ends()
    assert [(end["status"], end["files"]) for end in ends] == [(0, 4), (0, 4)], ends
    for index in range(2):
        for path in nodes.data(index).rglob("*"):
            relative = path.relative_to(nodes.data(index))
            assert path.is_dir() or path.read_bytes() == (root / "s" / relative).read_bytes()


def test_links_out_of_the_tree_are_dealt_out(tmp_path: Path) -> None:
    """They stay links."""
    for number in range(4):
        (tmp_path / f"{number}").symlink_to(f"/elsewhere/{number}")
    source = PartitionSource(TreeSource(str(tmp_path), RETRY, outside_links=True), 0, 2)
    assert [link.path for link in source.plan().symlinks] == ["0", "2"]


def test_a_link_to_a_directory_is_refused(tmp_path: Path) -> None:
    """The files below it are dealt out where they are; through the link they would count twice."""
    (linked(tmp_path) / "d2").symlink_to("sub")
    with pytest.raises(InputError, match="d2 is a link to a directory"):
        PartitionSource(TreeSource(str(tmp_path), RETRY), 0, 2).plan()


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
