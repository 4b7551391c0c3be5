"""Command `stage bench`: compare ways of copying on a site's file systems."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from hpml_orchestrator.cli.common import JsonOption, chosen_site, print_json, print_table
from hpml_orchestrator.cli.copying import parse_size, stoppable
from hpml_orchestrator.cli.stageheld import bases_of, paths_here
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
            show_default="the node's disk and RAM, as local and shm",
        ),
    ] = None,
    origin: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="DIR",
            help="Where to copy from: a directory on the file system in question, such as the "
            "shared one.",
            show_default="the current directory",
        ),
    ] = ".",
    files: Annotated[
        int,
        typer.Option("--files", metavar="N", min=1, max=10_000_000, help="Small files, at most."),
    ] = 5000,
    size: Annotated[
        str, typer.Option("--size", metavar="SIZE", help="Size of each of them.")
    ] = "16K",
    large: Annotated[
        str, typer.Option("--large", metavar="SIZE", help="Size of the large file, at most.")
    ] = "256M",
    runs: Annotated[
        int,
        typer.Option(
            "--runs", metavar="N", min=1, max=100, help="Runs of each way; the median is told."
        ),
    ] = 3,
    as_json: JsonOption = False,
) -> None:
    """Print how fast each way of copying is here: cp, rsync, tar, and hpml's own.

    It makes files in --from and in each DIR, copies them for some seconds, and removes all of it
    again. The cache is warm: what is read was written a moment before.
    """
    sizes = Sizes(files, parse_size("--size", size), parse_size("--large", large), runs)
    targets = [("DIR", one) for one in directories or []]
    if not targets:
        bases = bases_of(paths_here(chosen_site(context)))
        targets = [("local", bases.local), ("shm", bases.shm)]
    with stoppable(lambda: "what was made for it is removed") as stop:
        found = run_bench(origin, targets, sizes, stop, say=_say)
    if as_json:
        print_json(_json(found))
    else:
        _tell(found, sizes)


def _say(text: str) -> None:
    if sys.stderr.isatty():
        typer.echo(f"hpml: {text}", err=True)


def _tell(found: Bench, sizes: Sizes) -> None:

    data = found.data
    typer.echo(
        f"from {shown(found.origin)} ({found.origin_type}): {data.files} files of "
        f"{human_bytes(sizes.file_bytes)}, one of {human_bytes(data.large_bytes)}, packed in "
        f"{found.pack_seconds:.2f} s; {found.machine}; warm cache"
    )
    typer.echo(
        f"open, read, close: {found.latency.median * 1e6:.0f} µs, "
        f"the slowest {found.latency.worst * 1e6:.0f} µs"
    )
    rows = []
    for target in found.targets:
        place = f"{shown(target.place)} ({target.type})"
        rows += [(place, *_row(one)) for one in target.rungs]
    print_table(("TO", "WAY", "DIGESTS", "FILES/S", "MB/S", "SECONDS"), rows)
    for place, why in found.skipped:
        typer.echo(f"note: {shown(place)}: {why}", err=True)


def _row(rung: Rung) -> Sequence[str]:
    if rung.fault:
        return (rung.way, "-", "-", "-", rung.fault)
    files = f"{rung.files_per_second:.0f}" if rung.data == "small" else "-"
    digests = "yes" if rung.checked else "no"
    return (rung.way, digests, files, f"{rung.bytes_per_second / 1e6:.0f}", f"{rung.seconds:.3f}")


def _json(found: Bench) -> dict[str, Any]:

    told = asdict(found)
    told["data"] = found.data._asdict()
    told["latency"] = found.latency._asdict()
    for one, target in zip(told["targets"], found.targets, strict=True):
        for row, rung in zip(one["rungs"], target.rungs, strict=True):
            row["files_per_second"] = round(rung.files_per_second, 1)
            row["bytes_per_second"] = round(rung.bytes_per_second, 1)
    return told
