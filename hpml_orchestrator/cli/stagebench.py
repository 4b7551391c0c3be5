"""Command `stage bench`: compare ways of copying on a site's file systems."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from hpml_orchestrator.cli.common import JsonOption, chosen_site, print_json, print_table
from hpml_orchestrator.cli.copying import parse_size, stoppable
from hpml_orchestrator.cli.process import notice
from hpml_orchestrator.cli.staged import bases_of, paths_here
from hpml_orchestrator.packing.bench import Sizes, run_bench
from hpml_orchestrator.records.texts import human_bytes
from hpml_orchestrator.staging.faults import shown

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from hpml_orchestrator.packing.bench import Bench
    from hpml_orchestrator.staging.ladder import Rung

__all__ = ["bench"]


def bench(
    context: typer.Context,
    directories: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DIR",
            help="Where to copy to.",
            show_default="local and shm: the node's disk and memory",
        ),
    ] = None,
    origin: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="DIR",
            help="Where to copy from, such as a directory on the shared file system.",
            show_default="the current directory",
        ),
    ] = ".",
    files: Annotated[
        int,
        typer.Option("--files", metavar="N", min=1, max=10_000_000, help="Small files, at most."),
    ] = 5000,
    size: Annotated[
        str, typer.Option("--size", metavar="SIZE", help="Size of each small file.")
    ] = "16K",
    large: Annotated[
        str, typer.Option("--large", metavar="SIZE", help="Maximum size of the large file.")
    ] = "256M",
    runs: Annotated[
        int,
        typer.Option(
            "--runs", metavar="N", min=1, max=100, help="Runs of each method; the median is shown."
        ),
    ] = 3,
    as_json: JsonOption = False,
) -> None:
    """Measure how fast cp, rsync, tar and hpml copy data here.

    Writes test files to --from, copies them to each DIR, and removes everything at the end. It
    reads with a warm cache: the files were written a moment before.
    """
    sizes = Sizes(files, parse_size("--size", size), parse_size("--large", large), runs)
    targets = [("DIR", directory) for directory in directories or []]
    if not targets:
        bases = bases_of(paths_here(chosen_site(context)))
        targets = [("local", bases.local), ("shm", bases.shm)]
    with stoppable(lambda: "the test files were removed") as stop:
        bench = run_bench(origin, targets, sizes, stop, say=_progress)
    if as_json:
        print_json(_json(bench))
    else:
        _print(bench, sizes)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        notice(text)


def _print(bench: Bench, sizes: Sizes) -> None:
    data = bench.data
    typer.echo(
        f"from {shown(bench.origin)} ({bench.origin_type}): {data.files} files of "
        f"{human_bytes(sizes.file_bytes)}, one of {human_bytes(data.large_bytes)}, packed in "
        f"{bench.pack_seconds:.2f} s; {bench.machine}; warm cache"
    )
    typer.echo(
        f"open, read, close: {bench.latency.median * 1e6:.0f} µs, "
        f"slowest {bench.latency.worst * 1e6:.0f} µs"
    )
    rows = []
    for target in bench.targets:
        place = f"{shown(target.place)} ({target.type})"
        rows += [(place, *_row(rung)) for rung in target.rungs]
    print_table(("TO", "WAY", "DIGESTS", "FILES/S", "MB/S", "SECONDS"), rows)
    for place, why in bench.skipped:
        typer.echo(f"note: {shown(place)}: {why}", err=True)


def _row(rung: Rung) -> Sequence[str]:
    if rung.fault:
        return (rung.way, "-", "-", "-", rung.fault)
    files = f"{rung.files_per_second:.0f}" if rung.data == "small" else "-"
    digests = "yes" if rung.checked else "no"
    return (rung.way, digests, files, f"{rung.bytes_per_second / 1e6:.0f}", f"{rung.seconds:.3f}")


def _json(bench: Bench) -> dict[str, Any]:
    document = asdict(bench)
    document.update(data=bench.data._asdict(), latency=bench.latency._asdict())
    for rows, target in zip(document["targets"], bench.targets, strict=True):
        for row, rung in zip(rows["rungs"], target.rungs, strict=True):
            row["files_per_second"] = round(rung.files_per_second, 1)
            row["bytes_per_second"] = round(rung.bytes_per_second, 1)
    return document
