"""`hpml pack` against `tar cf`, without and with checksums, on the same tree in the same minute.

    python tests/bench/bench_pack.py [SOURCE [DEST [RUNS]]]

SOURCE: a tree, by default this Python's library with all packages; DEST: a directory for the
results, by default a new one in the directory for temporary files; RUNS: 5. Warm cache: the tree is
read once before, and the ways take turns. Every way ends with its archives on the disk (fsync). The
peers are `tar cf` alone, and `tar cf` followed by `find | xargs` with a checksum of each file: with
as many processes as CPUs, xxhsum (XXH3-128) if installed, else sha256sum. hpml is timed as
a process, start of Python and all, with its modules compiled as an installation has them. Digests
of both results are compared with the tree's by unpacking them.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from xxhash import xxh3_128

from hpml_orchestrator.records.mounts import file_system_type

CPUS = len(os.sched_getaffinity(0))
HPML = Path(sys.executable).parent / "hpml"
XXHSUM = shutil.which("xxhsum")
SUM = ["xxhsum", "-H2"] if XXHSUM else ["sha256sum"]


def digests(root: Path) -> dict[bytes, bytes]:
    """XXH3-128 of every regular file, by name."""
    found = {}
    top = os.fsencode(root)
    for parent, _, names in os.walk(top):
        for name in names:
            path = os.path.join(parent, name)
            if not os.path.islink(path):
                with open(path, "rb") as stream:
                    found[os.path.relpath(path, top)] = xxh3_128(stream.read()).digest()
    return found


def tar(source: Path, dest: Path) -> None:
    """One archive of the tree, on the disk."""
    dest.mkdir()
    subprocess.run(["tar", "cf", dest / "all.tar", "-C", source, "."], check=True)
    subprocess.run(["sync", dest / "all.tar"], check=True)


def tar_and_sums(source: Path, dest: Path) -> None:
    """The same, and a checksum of every file."""
    tar(source, dest)
    with (
        open(dest / "sums", "wb") as sums,
        subprocess.Popen(
            ["find", ".", "-type", "f", "-print0"], cwd=source, stdout=subprocess.PIPE
        ) as names,
    ):
        words = ["xargs", "-0", "-n", "500", "-P", str(CPUS), *SUM]
        subprocess.run(words, cwd=source, stdin=names.stdout, stdout=sums, check=True)


def compiled(home: Path) -> dict[str, str]:
    """Variables of a process that keeps compiled modules, whatever those of this one say."""
    kept = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": str(home / "compiled")}


def hpml(workers: int, environment: dict[str, str]) -> Callable[[Path, Path], None]:
    """A pack with this number of processes."""

    def run(source: Path, dest: Path) -> None:
        words: list[str | Path] = [
            "pack",
            source,
            dest,
            "--workers",
            str(workers),
            "--outside-links",
        ]
        size = max(1 << 20, SIZES.get("bytes", 1 << 30) // (4 * CPUS))
        words += ["--shard-size", f"{-(-size >> 20)}M"]
        subprocess.run([HPML, *words], stdout=subprocess.DEVNULL, env=environment, check=True)

    return run


SIZES: dict[str, int] = {}


def same(source: Path, made: dict[str, Path]) -> bool:
    """Whether every way kept every file, by digest."""
    expected = digests(source)
    right = True
    for way, dest in made.items():
        out = dest / "out"
        out.mkdir()
        for archive in sorted(dest.glob("*.tar")):
            subprocess.run(["tar", "xf", archive, "-C", out], check=True)
        right &= digests(out) == expected
        print(f"  {way}: {'every digest is right' if right else 'WRONG'}")
    return right


def main() -> int:
    """Measure and print; the status is 1 when a digest is wrong."""
    words = sys.argv[1:]
    source = Path(words[0] if words else sysconfig.get_path("stdlib"))
    given = words[1] if len(words) > 1 else None
    runs = int(words[2]) if len(words) > 2 else 5
    with contextlib.ExitStack() as stack:
        home = Path(given or stack.enter_context(tempfile.TemporaryDirectory(prefix="hpml-bench-")))
        ways: dict[str, Callable[[Path, Path], None]] = {
            "tar cf": tar,
            f"tar cf, then {SUM[0]}": tar_and_sums,
            "hpml pack --workers 1": hpml(1, compiled(home)),
        }
        if CPUS > 1:
            ways[f"hpml pack --workers {CPUS}"] = hpml(CPUS, compiled(home))
        subprocess.run(
            [HPML, "pack", "--help"], env=compiled(home), capture_output=True, check=True
        )
        warm = digests(source)
        SIZES["bytes"] = sum((source / os.fsdecode(name)).stat().st_size for name in warm)
        version = subprocess.run(["tar", "--version"], capture_output=True, text=True, check=True)
        print(
            f"{platform.node()}, Linux {platform.release()}, {CPUS} CPUs, load "
            f"{os.getloadavg()[0]:.1f}, Python {platform.python_version()}, "
            f"{version.stdout.splitlines()[0]}"
        )
        print(f"{source} ({file_system_type(str(source))}): {len(warm)} files, {SIZES['bytes']} B")
        print(f"into {home} ({file_system_type(str(home))}), warm cache, fsync; median of {runs}:")
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        made: dict[str, Path] = {}
        for _ in range(runs):
            for number, (way, work) in enumerate(ways.items()):
                dest = made[way] = home / str(number)
                shutil.rmtree(dest, ignore_errors=True)
                begin = time.perf_counter()
                work(source, dest)
                seconds[way].append(time.perf_counter() - begin)
        peer = statistics.median(seconds[f"tar cf, then {SUM[0]}"])
        for way, times in seconds.items():
            middle = statistics.median(times)
            print(
                f"  {way:<24} {middle:8.2f} s  ({min(times):.2f} to {max(times):.2f}) "
                f"{len(warm) / middle:8.0f} files/s {SIZES['bytes'] / middle / 2**20:7.0f} MiB/s "
                f"{peer / middle:5.2f}x of tar with sums"
            )
        right = same(source, made)
        for dest in made.values():
            shutil.rmtree(dest)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
