"""Command `pack`: pack many small files into a few tar archives."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpml_orchestrator.cli.common import JsonOption, print_json, print_table, refuse_with
from hpml_orchestrator.cli.copying import Meter, count_option, outside_links_option, parse_size
from hpml_orchestrator.cli.process import EXIT_INTERRUPTED
from hpml_orchestrator.errors import InputError, StagingError, counted
from hpml_orchestrator.packing import KINDS, PackRequest, read_index
from hpml_orchestrator.packing import pack as make_pack
from hpml_orchestrator.packing import verify as verify_pack
from hpml_orchestrator.records.texts import exact_bytes, human_bytes
from hpml_orchestrator.staging.faults import shown

if TYPE_CHECKING:
    from hpml_orchestrator.packing import Row

__all__ = ["pack"]

_DEFAULT_SHARD_SIZE = "1G"
_DAMAGE_SHOWN = 20


def pack(
    source: Annotated[
        str | None, typer.Argument(metavar="SOURCE", help="Directory to pack.")
    ] = None,
    dest: Annotated[
        str | None,
        typer.Argument(
            metavar="DEST", help="Directory for the pack, new or empty.", show_default=False
        ),
    ] = None,
    shard_size: Annotated[
        str,
        typer.Option(
            "--shard-size",
            metavar="SIZE",
            help="Maximum size of an archive; a single larger sample gets its own.",
            show_default=_DEFAULT_SHARD_SIZE,
        ),
    ] = "",
    workers: Annotated[int, count_option("--workers", "Processes, one archive each.", least=0)] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted pack.")] = False,
    outside_links: Annotated[bool, outside_links_option("Pack")] = False,
    verify: Annotated[
        str | None,
        typer.Option(
            "--verify",
            metavar="PACK",
            help="Verify all digests of a pack instead, and list damaged files.",
        ),
    ] = None,
    listed: Annotated[
        str | None,
        typer.Option(
            "--list", metavar="PACK", help="List the files of a pack instead.", show_default=False
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Pack many small files into a few tar archives.

    Use it on file systems that are slow with small files. The archives are plain tar: webdataset
    reads them directly, and `hpml_packed.py` reads single files in any order.
    """
    if verify is not None or listed is not None:
        others = {"SOURCE": source, "--shard-size": shard_size, "--resume": resume}
        others["--outside-links"] = outside_links
        if verify is None:
            refuse_with("--list", {**others, "--workers": workers})
            _print_list(listed or "", as_json=as_json)
        else:
            refuse_with("--verify", {**others, "--list": listed is not None})
            _print_verified(verify, workers, as_json=as_json)
        return
    request = PackRequest(
        _given("SOURCE", source),
        _given("DEST", dest),
        parse_size("--shard-size", shard_size or _DEFAULT_SHARD_SIZE),
        workers,
        resume,
        outside_links,
    )
    _print_packed(request, as_json=as_json)


def _given(field: str, path: str | None) -> str:
    if path is None:
        raise InputError("must be given", field=field, hint="hpml pack SOURCE DEST")
    if not path or "\0" in path:
        raise InputError("must name a directory", field=field, value=path)
    return path


def _print_packed(request: PackRequest, *, as_json: bool) -> None:
    try:
        with Meter("packed") as meter:
            result = make_pack(request, meter)
    except KeyboardInterrupt:
        typer.echo("\nhpml: interrupted; run again with --resume to continue", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    rate = result.written_bytes / result.seconds if result.seconds else 0.0
    if as_json:
        print_json({**asdict(result), "bytes_per_second": round(rate, 1)})
        return
    if result.note:
        typer.echo(f"note: {result.note}", err=True)
    kept = f", {result.kept_shards} of them kept" if result.kept_shards else ""
    typer.echo(
        f"packed {counted(result.files, 'file')}, {exact_bytes(result.bytes)} in "
        f"{result.seconds:.2f} s, {human_bytes(int(rate))}/s: "
        f"{counted(result.shards, 'archive')}{kept} in {shown(result.pack)}"
    )


def _print_verified(directory: str, workers: int, *, as_json: bool) -> None:
    with Meter("verified") as meter:
        report = verify_pack(_given("--verify", directory), workers=workers, on_verify=meter)
    if as_json:
        print_json({"pack": shown(directory), **asdict(report)})
    if report.damaged:
        lines = [
            ": ".join(filter(None, (damage.shard, damage.name, damage.reason)))
            for damage in report.damaged[:_DAMAGE_SHOWN]
        ]
        more = len(report.damaged) - len(lines)
        if more:
            lines.append(f"and {more} more; --json lists all")
        places = counted(len(report.damaged), "place")
        raise StagingError(
            "\n".join([f"{shown(directory)} is damaged in {places}", *lines]),
            hint="pack the tree again into a new directory",
        )
    if not as_json:
        rate = report.bytes / report.seconds if report.seconds else 0.0
        typer.echo(
            f"{shown(directory)} is intact: {counted(report.files, 'file')} in "
            f"{counted(report.shards, 'archive')}, "
            f"{exact_bytes(report.bytes)} read in {report.seconds:.2f} s, "
            f"{human_bytes(int(rate))}/s"
        )


def _print_list(directory: str, *, as_json: bool) -> None:
    index = read_index(_given("--list", directory))
    files = [archive.file for archive in index.archives]

    def row_json(row: Row) -> dict[str, Any]:
        # A name need not be text: JSON keeps its odd bytes as lone surrogates.
        return {
            "name": row.name.decode("utf-8", "surrogateescape"),
            "kind": KINDS[row.kind],
            "shard": files[row.shard],
            "offset": row.offset,
            "bytes": row.size,
            "xxh3_128": row.digest.hex(),
        }

    if as_json:  # line by line: there may be millions
        typer.echo("[", nl=False)
        between = "\n"
        for row in index.rows():
            typer.echo(between + json.dumps(row_json(row)), nl=False)
            between = ",\n"
        typer.echo("\n]")
        return
    print_table(
        ("NAME", "KIND", "SHARD", "OFFSET", "BYTES", "XXH3-128"),
        [tuple(shown(str(cell)) for cell in row_json(row).values()) for row in index.rows()],
    )
