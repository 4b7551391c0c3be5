"""Unpacking with a digest of every file against the tools that unpack without one.

    python tests/bench/bench_unpack.py [--quick] [--files N] [--size BYTES] [--runs N] [--into DIR]

The same files as a pack, a tar and a zip (stored, and deflated at level 1), from and into RAM
(--into: another place), with a warm cache. hpml runs as it does in a job: in a process that is
there already, planning included, with as many workers as there are CPUs, making digests. Peers,
none of which makes any: GNU `tar xf` of all archives one after the other, and of one for each CPU
at a time (`xargs -P`: the fair one, as hpml uses all CPUs); `unzip -q`; Python's zipfile in a
separate process. Ways take turns; medians of RUNS (5).
CPU seconds are a better measure than the clock if others use the machine. After the last run each
tree is compared with the source by SHA-256, which hpml does not use.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from hpml_orchestrator.records.job import Stage
from hpml_orchestrator.staging.copy import CopyOptions, CopyProgress, copy
from hpml_orchestrator.staging.pack import PackRequest, pack
from hpml_orchestrator.staging.request import Retry
from hpml_orchestrator.staging.stage import open_source

CPUS = len(os.sched_getaffinity(0))
Way = Callable[[Path], None]
ZIPFILE = "import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extractall(sys.argv[2])"


def hpml(source: Path) -> Way:
    """Unpacking by the copier."""

    def run(target: Path) -> None:
        retry = Retry(time.sleep, lambda: False)
        request = Stage("data", str(source), target=str(target.parent))
        opened = open_source(request, retry, 1 << 40)
        try:
            plan = opened.plan()
            done = copy(
                plan,
                opened,
                str(target),
                options=CopyOptions(),
                retry=retry,
                progress=CopyProgress(None),
            )
            assert len(done) == len(plan.files)
        finally:
            opened.close()

    return run


def tool(*words: str | Path) -> Way:
    """A program whose last argument is the target."""

    def run(target: Path) -> None:
        subprocess.run([*words, target], check=True)

    return run


def tars(archives: list[Path]) -> Way:
    """GNU tar, archive by archive."""

    def run(target: Path) -> None:
        for archive in archives:
            subprocess.run(["tar", "-xf", archive, "-C", target], check=True)

    return run


def tars_at_once(archives: list[Path]) -> Way:
    """GNU tar, an archive for each CPU at a time."""

    def run(target: Path) -> None:
        words: list[str | Path]
        words = ["xargs", "-d", "\\n", "-n", "1", "-P", str(CPUS), "tar", "-C", target, "-xf"]
        subprocess.run(words, input="\n".join(map(str, archives)), text=True, check=True)

    return run


def sums(root: Path) -> dict[str, str]:
    """SHA-256 of every file."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file()
    }


def grow(root: Path, files: int, size: int) -> None:
    """Files that compress a little, 250 in a directory."""
    noise = random.Random(1).randbytes(1 << 20)
    for number in range(files):
        path = root / f"n{number // 250:05d}" / f"image_{number:07d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        at = number * 977 % ((1 << 20) - size // 2)
        path.write_bytes(noise[at : at + size // 2] + noise[: size - size // 2])


def measure(ways: dict[str, Way], home: Path, runs: int, expected: dict[str, str]) -> bool:
    """Let ways take turns, print their medians, and say whether all trees are right."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    cpu: dict[str, list[float]] = {way: [] for way in ways}
    right = True
    for turn in range(runs):
        for way, work in ways.items():
            target = home / "out"
            target.mkdir()
            used, begin = sum(os.times()[:4]), time.perf_counter()
            work(target)
            seconds[way].append(time.perf_counter() - begin)
            cpu[way].append(sum(os.times()[:4]) - used)
            if turn == runs - 1 and sums(target) != expected:
                print(f"  {way}: WRONG")
                right = False
            shutil.rmtree(target)
    ours = statistics.median(next(iter(seconds.values())))
    for way, times in seconds.items():
        middle = statistics.median(times)
        print(
            f"  {way:<26} {middle:7.3f} s ({min(times):.3f} to {max(times):.3f}) "
            f"{len(expected) / middle:8.0f} files/s   "
            f"CPU {statistics.median(cpu[way]):6.2f} s   hpml is {middle / ours:5.2f}x"
        )
    return right


def main() -> int:
    """Measure and print; the status is 1 when a tree is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few files and runs: does it work?")
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--size", type=int, default=16 << 10)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--into", default="/dev/shm")
    given = parser.parse_args()
    if given.quick:
        given.files, given.runs = 2000, 3
    version = subprocess.run(["tar", "--version"], capture_output=True, text=True, check=True)
    print(
        f"Linux {platform.release()}, {CPUS} CPUs, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, {version.stdout.splitlines()[0]}"
    )
    right = True
    with tempfile.TemporaryDirectory(prefix="hpml-bench-", dir=given.into) as name:
        home = Path(name)
        source = home / "source"
        grow(source, given.files, given.size)
        total = given.files * given.size
        pack(PackRequest(str(source), str(home / "packed"), shard_bytes=max(1 << 20, total // 8)))
        subprocess.run(["tar", "-cf", home / "x.tar", "-C", source, "."], check=True)
        print(f"{given.files} files of {given.size} bytes; median of {given.runs}")
        expected = sums(source)
        shards = sorted((home / "packed").glob("*.tar"))
        rounds: list[dict[str, Way]] = [
            {
                "hpml, pack": hpml(home / "packed"),
                "tar xf, all shards": tars(shards),
                f"tar xf, {CPUS} at a time": tars_at_once(shards),
            },
            {"hpml, tar": hpml(home / "x.tar"), "tar xf": tars([home / "x.tar"])},
        ]
        if shutil.which("zip") and shutil.which("unzip"):
            for level, kind in [("-0", "stored"), ("-1", "deflated")]:
                path = home / f"{kind}.zip"
                subprocess.run(["zip", "-qr", level, path, "."], cwd=source, check=True)
                rounds.append(
                    {
                        f"hpml, zip {kind}": hpml(path),
                        "unzip": tool("unzip", "-q", path, "-d"),
                        "python -m zipfile": tool(sys.executable, "-c", ZIPFILE, path),
                    }
                )
        else:
            print("  zip and unzip are not installed: not measured")
        for ways in rounds:
            right &= measure(ways, home, given.runs, expected)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
