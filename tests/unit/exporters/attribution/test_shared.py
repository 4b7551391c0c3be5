"""What processes share is divided at a bounded cost; real processes are measured elsewhere."""

from __future__ import annotations

from pathlib import Path

from hpml_exporters.jobs.shared import LEAST, SharedPages

GIB = 1 << 30
ROLLUP = """\
557144ac8000-7ffe6d771000 ---p 00000000 00:00 0                          [rollup]
Rss:             1048600 kB
Pss_Anon:         {own} kB
Anonymous:       {whole} kB
"""


class Walks:
    """A fake procfs and a clock: each walk through a process's pages takes a fixed CPU time."""

    def __init__(self, root: Path, seconds: float) -> None:
        self.root, self.seconds, self.time, self.walking = root, seconds, 0.0, False
        self.pages = SharedPages(str(root), self.clock)

    def clock(self) -> float:
        self.time += self.seconds * self.walking  # asked before and after each walk
        self.walking = not self.walking
        return self.time

    def process(self, pid: int, own: int, whole: int) -> None:
        (self.root / str(pid)).mkdir(exist_ok=True)
        (self.root / f"{pid}/smaps_rollup").write_text(ROLLUP.format(own=own, whole=whole))


def test_each_has_its_part(tmp_path: Path) -> None:
    """Scaled to what it has now; small ones, old kernels and those that hide count whole."""
    walks = Walks(tmp_path, 0.0)
    walks.process(1, own=250, whole=1000)
    walks.process(2, own=500, whole=1000)
    (tmp_path / "3").mkdir()
    (tmp_path / "3/smaps_rollup").write_text("Rss: 12 kB\n")
    sizes = {1: GIB, 2: GIB, 3: GIB, 4: GIB, 5: LEAST - 1}
    parts = {1: GIB // 4, 2: GIB // 2, 3: GIB, 4: GIB, 5: LEAST - 1}
    assert walks.pages.parts(sizes, 0.0) == parts


def test_one_large_process_is_not_walked_through(tmp_path: Path) -> None:
    """It has nobody to share with."""
    walks = Walks(tmp_path, 1.0)
    walks.process(1, own=500, whole=1000)
    assert walks.pages.parts({1: GIB, 2: 4096}, 0.0) == {1: GIB, 2: 4096}
    assert walks.time == 0


def test_the_walks_take_a_small_share_of_a_core(tmp_path: Path) -> None:
    """Forty of 0.1 s: some at once, then one now and then; those that wait keep their share."""
    walks = Walks(tmp_path, 0.1)
    sizes = dict.fromkeys(range(1, 41), GIB)
    for pid in sizes:
        walks.process(pid, own=500, whole=1000)
    first = walks.pages.parts(sizes, 0.0)
    assert 0 < sum(size < GIB for size in first.values()) < 10
    for look in range(1, 361):
        parts = walks.pages.parts(sizes, 10.0 * look)
        assert all(parts[pid] < GIB for pid, size in first.items() if size < GIB)
    assert walks.time <= 0.005 * 3600 + 1
    assert all(size < GIB for size in parts.values())
    walks.pages.keep(())
    assert walks.pages.parts(sizes, 3600.0) == sizes
