"""Command `pack`: pack many small files into a few tar archives."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from hpml_orchestrator.cli.common import JsonOption, print_json
from hpml_orchestrator.cli.copying import (
    Meter,
    count_option,
    outside_links_option,
    parse_size,
    stoppable,
)
from hpml_orchestrator.errors import InputError, counted
from hpml_orchestrator.records.texts import exact_bytes, human_bytes
from hpml_orchestrator.staging.pack import PackRequest
from hpml_orchestrator.staging.pack import pack as make_pack
from hpml_orchestrator.staging.request import shown


def pack(
    source: Annotated[
        str | None, typer.Argument(metavar="SOURCE", help="Directory to pack.")
    ] = None,
    dest: Annotated[
        str | None,
        typer.Argument(
            metavar="DEST", help="Directory for the archives, new or empty.", show_default=False
        ),
    ] = None,
    shard_size: Annotated[
        str,
        typer.Option(
            "--shard-size",
            metavar="SIZE",
            help="Maximum size of an archive; a single larger sample gets its own.",
        ),
    ] = "1G",
    workers: Annotated[int, count_option("--workers", "Processes, one archive each.", least=0)] = 0,
    outside_links: Annotated[bool, outside_links_option("Pack")] = False,
    as_json: JsonOption = False,
) -> None:
    """Pack many small files into a few tar archives.

    Use it on file systems that are slow with small files. tar and webdataset read the archives, and
    `hpml stage` unpacks them on the nodes. After an error or Ctrl-C nothing is left.
    """
    request = PackRequest(
        _given("SOURCE", source),
        _given("DEST", dest),
        parse_size("--shard-size", shard_size),
        workers,
        outside_links,
    )
    with stoppable(lambda: "nothing was packed") as stop, Meter("packed") as meter:
        result = make_pack(request, meter, stop)
    rate = result.bytes / result.seconds if result.seconds else 0.0
    if as_json:
        print_json({**asdict(result), "bytes_per_second": round(rate, 1)})
        return
    if result.note:
        typer.echo(f"note: {result.note}", err=True)
    typer.echo(
        f"packed {counted(result.files, 'file')}, {exact_bytes(result.bytes)} in "
        f"{result.seconds:.2f} s, {human_bytes(int(rate))}/s: "
        f"{counted(result.shards, 'archive')} in {shown(result.pack)}"
    )


def _given(field: str, path: str | None) -> str:
    if path is None:
        raise InputError("must be given", field=field, hint="hpml pack SOURCE DEST")
    if not path or "\0" in path:
        raise InputError("must name a directory", field=field, value=path)
    return path
