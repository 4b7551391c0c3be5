"""Staging against cp, rsync, tar and shutil.copytree, on the same data in the same minute.

    python tests/bench/bench_stage.py [--quick] [--cold] [--runs N] [--disk DIR] [SOURCE ...]

SOURCE: trees, by default this Python's site-packages and /usr/share; DIR: where copies on a disk
go, by default a new directory among the temporary files. Copies go to /dev/shm and to DIR; one
large file goes from one to the other; a tree in which each open takes 1 ms longer simulates a busy
metadata server (a test shim, `latency.c`, preloaded for the peers and for us alike).

The ways take turns, N rounds (5), and medians are compared. The tree is read once before (warm), or
dropped from the page cache before every copy (--cold: /proc/sys/vm/drop_caches if it is
writable, else posix_fadvise on every file). Every way is timed as a process on the same CPUs, start
of Python included. Nobody waits for the disk (no fsync) but for hpml's manifest. What every way
made is compared with the source by XXH3-128 of every file, read back by code that is not hpml's.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable, Iterator
from pathlib import Path

from xxhash import xxh3_128

from hpml_orchestrator.records.mounts import file_system_type

Way = Callable[[Path], list[str]]

CPUS = len(os.sched_getaffinity(0))
HERE = Path(__file__).parent
BLOCK_BYTES = 1 << 20
STAGE = """
import sys
from hpml_orchestrator.staging.copy import CopyOptions
from hpml_orchestrator.records.job import Stage
from hpml_orchestrator.staging.stage import CopyStager
source, target, kind, hashed, threads = sys.argv[1:]
options = CopyOptions(hash=hashed == "hash", threads=int(threads) or None)
stager = CopyStager("bench", options=options)
request = Stage("data", source, kind=kind, target=target, outside_links=True)
print(stager.stage(request).files)
"""
COPYTREE = "import shutil, sys; shutil.copytree(sys.argv[1], sys.argv[2] + '/data', symlinks=True)"


def digests(root: Path) -> dict[str, bytes]:
    """XXH3-128 of every regular file, and the text of every link, by name."""
    found = {}
    for parent, _, names in os.walk(root):
        for name in names:
            path = os.path.join(parent, name)
            relative = os.path.relpath(path, root)
            if os.path.islink(path):
                found[relative] = os.fsencode(os.readlink(path))
                continue
            whole = xxh3_128()
            with open(path, "rb") as stream:
                while data := stream.read(BLOCK_BYTES):
                    whole.update(data)
            found[relative] = whole.digest()
    return found


def hpml(source: Path, kind: str, *, hashed: bool, threads: int = 0) -> Way:
    """Staging by a separate process; 0 threads: as many as it chooses."""

    def words(dest: Path) -> list[str]:
        how = "hash" if hashed else "plain"
        return [sys.executable, "-c", STAGE, str(source), str(dest), kind, how, str(threads)]

    return words


def peers(source: Path) -> dict[str, Way]:
    """The programs that people use, by name."""
    tar = 'tar cf - -C "$1" . | tar xf - -C "$2/data"'
    found: dict[str, Way] = {
        "cp -r": lambda dest: ["cp", "-r", f"{source}/.", f"{dest}/data"],
        "tar | tar": lambda dest: [
            "sh",
            "-c",
            f'mkdir "$2/data"; {tar}',
            "-",
            str(source),
            str(dest),
        ],
        "shutil.copytree": lambda dest: [sys.executable, "-c", COPYTREE, str(source), str(dest)],
    }
    if shutil.which("rsync"):
        found["rsync -a -W"] = lambda dest: ["rsync", "-a", "-W", f"{source}/", f"{dest}/data/"]
    return found


def data_of(dest: Path) -> Path:
    """Where a way has put its copy."""
    staged = (*dest.glob("hpml-*/*/data"), dest / "data")
    return staged[0]


def drop(source: Path) -> str:
    """Drop the source from the page cache; returns the method."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3", "ascii")
    except OSError:
        files = [source] if source.is_file() else [p for p in source.rglob("*") if p.is_file()]
        for path in files:
            with contextlib.suppress(OSError), open(path, "rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return "posix_fadvise"
    return "drop_caches"


def timed(words: list[str], env: dict[str, str] | None = None) -> float:
    """Wall seconds of a command; Python may keep compiled modules, as an installed one does."""
    kept = dict(os.environ if env is None else env)
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    begin = time.perf_counter()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=kept)
    return time.perf_counter() - begin


def race(
    ways: dict[str, Way],
    base: Path,
    source: Path,
    *,
    runs: int,
    cold: bool,
    expected: dict[str, bytes],
    env: dict[str, str] | None = None,
) -> tuple[dict[str, float], bool]:
    """Let the ways take turns; medians, and whether every copy was right."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    right = True
    for number in range(runs):
        for way, words in ways.items():
            dest = Path(tempfile.mkdtemp(prefix="hpml-bench-", dir=base))
            try:
                if cold:
                    drop(source)
                seconds[way].append(timed(words(dest), env))
                if number == 0 and digests(data_of(dest)) != expected:
                    print(f"  {way}: WRONG", flush=True)
                    right = False
            finally:
                shutil.rmtree(dest)
    return {way: statistics.median(times) for way, times in seconds.items()}, right


def table(medians: dict[str, float], files: int, size: int) -> None:
    """Print medians and their ratio to the best peer."""
    best = min(time for way, time in medians.items() if not way.startswith("hpml"))
    for way, median in medians.items():
        print(
            f"  {way:<16} {median:8.3f} s {files / median:9.0f} files/s "
            f"{size / median / 2**20:7.0f} MiB/s {best / median:6.2f}x of the best peer",
            flush=True,
        )


def peak(words: list[str]) -> int:
    """Run a command and return the most memory (PSS) of it and its children at once, in bytes."""
    most = 0
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            most = max(most, sum(map(_pss, _family(process.pid))))
            time.sleep(0.01)
    return most


def _family(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text("ascii").split():
                yield from _family(int(child))


def _pss(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError):
        text = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii")
        return int(text.split("\nPss:")[1].split()[0]) << 10
    return 0


def plant(root: Path, count: int, size: int) -> None:
    """Make a tree of small files, 100 in each directory."""
    for number in range(count):
        path = root / f"{number // 100:04}" / f"{number:06}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size))


def trees(sources: list[Path], bases: list[Path], *, runs: int, cold: bool) -> bool:
    """Race over trees."""
    right = True
    for source in sources:
        expected = digests(source)
        size = sum(p.stat().st_size for p in map(source.joinpath, expected) if not p.is_symlink())
        for base in bases:
            print(
                f"{source} ({file_system_type(str(source))}) to {file_system_type(str(base))}, "
                f"{'cold (' + drop(source) + ')' if cold else 'warm'}, {len(expected)} files, "
                f"{size >> 20} MiB, median of {runs}:"
            )
            ways = peers(source)
            ways["hpml, hashed"] = hpml(source, "tree", hashed=True)
            ways["hpml, no hash"] = hpml(source, "tree", hashed=False)
            medians, good = race(ways, base, source, runs=runs, cold=cold, expected=expected)
            right &= good
            table(medians, len(expected), size)
        with tempfile.TemporaryDirectory(prefix="hpml-bench-", dir=bases[0]) as dest:
            most = peak(hpml(source, "tree", hashed=True)(Path(dest)))
        print(f"  peak memory of hpml and its workers (PSS): {most >> 20} MiB")
    return right


def large(disk: Path, shm: Path, size: int, *, runs: int, cold: bool) -> bool:
    """Race with one large file across file systems."""
    right = True
    for start, end in ((disk, shm), (shm, disk)):
        home = Path(tempfile.mkdtemp(prefix="hpml-bench-", dir=start))
        try:
            source = home / "large"
            block = os.urandom(BLOCK_BYTES)
            with open(source, "wb") as stream:
                stream.writelines(
                    number.to_bytes(8, "little") + block[8:]
                    for number in range(size // BLOCK_BYTES)
                )
            print(
                f"one file of {size >> 20} MiB, {file_system_type(str(start))} to "
                f"{file_system_type(str(end))}, {'cold' if cold else 'warm'}, median of {runs}:"
            )
            ways: dict[str, Way] = {
                "cp": lambda dest, source=source: [  # type: ignore[misc]
                    *("sh", "-c", 'mkdir "$2"; cp "$1" "$2"', "-"),
                    *(str(source), f"{dest}/data"),
                ],
                "hpml, hashed": hpml(source, "file", hashed=True),
                "hpml, no hash": hpml(source, "file", hashed=False),
            }
            expected = digests(home)
            medians, good = race(ways, end, source, runs=runs, cold=cold, expected=expected)
            right &= good
            table(medians, 1, size)
        finally:
            shutil.rmtree(home)
    return right


def slow_opens(shm: Path, count: int, *, runs: int) -> bool:
    """Race over a tree in which each open takes 1 ms longer."""
    home = Path(tempfile.mkdtemp(prefix="hpml-bench-", dir=shm))
    try:
        shim, source = home / "latency.so", home / "tree"
        options = ["-shared", "-fPIC", "-O2", "-o", str(shim), str(HERE / "latency.c"), "-ldl"]
        subprocess.run(["cc", *options], check=True)
        plant(source, count, 4096)
        expected = digests(source)
        print(
            f"{count} files of 4 KiB in RAM to RAM, each open of a source file 1 ms slower "
            f"(a preloaded test shim), median of {runs}:"
        )
        env = {**os.environ, "LD_PRELOAD": str(shim), "HPML_SLOW_ROOT": str(source)}
        ways = {
            "cp -r": peers(source)["cp -r"],
            "tar | tar": peers(source)["tar | tar"],
            # as many as it chooses for a source on a file server
            "hpml, hashed": hpml(source, "tree", hashed=True, threads=-(-32 // CPUS)),
        }
        medians, right = race(ways, shm, source, runs=runs, cold=False, expected=expected, env=env)
        table(medians, count, count * 4096)
    finally:
        shutil.rmtree(home)
    return right


def main() -> int:
    """Measure and print; the status is 1 when a digest is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small data, few runs")
    parser.add_argument("--cold", action="store_true", help="drop the source from the cache")
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--disk", type=Path)
    parser.add_argument("--only", choices=["shm", "disk", "large", "slow"], help="one part")
    parser.add_argument("sources", nargs="*", type=Path)
    given = parser.parse_args()
    runs = given.runs or (3 if given.quick else 5)
    sources = [path.absolute() for path in given.sources] or [
        Path(sysconfig.get_path("purelib")),
        Path("/usr/share"),
    ]
    if given.quick and not given.sources:
        sources = [Path(sysconfig.get_path("stdlib")) / "test"]
    versions = [
        subprocess.run([name, "--version"], capture_output=True, text=True, check=True).stdout
        for name in ("cp", "tar", "rsync")
        if shutil.which(name)
    ]
    print(
        f"{platform.node()}, Linux {platform.release()}, {CPUS} CPUs, load "
        f"{os.getloadavg()[0]:.1f}, Python {platform.python_version()}, "
        + ", ".join(text.splitlines()[0] for text in versions)
    )
    right = True
    with contextlib.ExitStack() as stack:
        disk = given.disk or Path(stack.enter_context(_temporary(None)))
        shm = Path(stack.enter_context(_temporary("/dev/shm")))
        bases = [
            base for word, base in (("shm", shm), ("disk", disk)) if given.only in {None, word}
        ]
        if bases:
            right &= trees(sources, bases, runs=runs, cold=given.cold)
        if given.only in {None, "large"}:
            size = (512 if given.quick else 4096) << 20
            right &= large(disk, shm, size, runs=runs, cold=given.cold)
        if given.only in {None, "slow"} and shutil.which("cc"):
            right &= slow_opens(shm, 1000 if given.quick else 5000, runs=runs)
    print("every digest is right" if right else "WRONG DIGESTS")
    return 0 if right else 1


def _temporary(base: str | None) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="hpml-bench-", dir=base)


if __name__ == "__main__":
    sys.exit(main())
