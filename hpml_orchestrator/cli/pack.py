"""Command that makes few large files of many small ones: pack."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from hpml_orchestrator.cli.common import JsonOption, print_json, print_table
from hpml_orchestrator.cli.conflicts import refuse_with
from hpml_orchestrator.cli.dataoptions import count_option, outside_links_option, parse_size
from hpml_orchestrator.cli.interrupt import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from typing import Any

    from hpml_orchestrator.packing import PackRequest, Row

__all__ = ["register"]

_DEFAULT_SHARD_SIZE = "1G"
_DAMAGE_TOLD = 20


def register(app: typer.Typer) -> None:
    """Add this group's command to the application."""
    app.command()(pack)


def pack(
    source: Annotated[
        str | None,
        typer.Argument(metavar="SOURCE", help="Directory to pack.", show_default=False),
    ] = None,
    dest: Annotated[
        str | None,
        typer.Argument(
            metavar="DEST", help="Directory of the pack, empty or not there.", show_default=False
        ),
    ] = None,
    shard_size: Annotated[
        str,
        typer.Option(
            "--shard-size",
            metavar="SIZE",
            help="How large an archive grows; larger only where one sample alone does.",
            show_default=_DEFAULT_SHARD_SIZE,
        ),
    ] = "",
    workers: Annotated[
        int, count_option("--workers", "Processes, each at an archive of its own.", least=0)
    ] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Complete a pack that was not finished.")
    ] = False,
    outside_links: Annotated[bool, outside_links_option("Pack")] = False,
    verify: Annotated[
        str | None,
        typer.Option(
            "--verify",
            metavar="PACK",
            help="Check all digests of a pack instead, and name what is damaged.",
            show_default=False,
        ),
    ] = None,
    listed: Annotated[
        str | None,
        typer.Option(
            "--list",
            metavar="PACK",
            help="List the files of a pack instead.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Pack a tree into a few tar archives and an index, for file systems that hate small files.

    Any `tar` unpacks the archives, webdataset reads them as they are, and `hpml_packed.py` reads
    single files out of them in any order. A pack that was killed goes on with `--resume`.
    """
    if verify is not None or listed is not None:
        others = {"SOURCE": source, "--shard-size": shard_size, "--resume": resume}
        others["--outside-links"] = outside_links
        if verify is None:
            refuse_with("--list", {**others, "--workers": workers})
            _tell_list(listed or "", as_json=as_json)
        else:
            refuse_with("--verify", {**others, "--list": listed is not None})
            _tell_verified(verify, workers, as_json=as_json)
        return
    from hpml_orchestrator.packing import PackRequest  # noqa: PLC0415

    request = PackRequest(
        _given("SOURCE", source),
        _given("DEST", dest),
        parse_size("--shard-size", shard_size or _DEFAULT_SHARD_SIZE),
        workers,
        resume,
        outside_links,
    )
    _tell_packed(request, as_json=as_json)


def _given(field: str, path: str | None) -> str:
    from hpml_orchestrator.errors import InputError  # noqa: PLC0415

    if path is None:
        raise InputError("must be given", field=field, hint="hpml pack SOURCE DEST")
    if not path or "\0" in path:
        raise InputError("must name a directory", field=field, value=path)
    return path


def _tell_packed(request: PackRequest, *, as_json: bool) -> None:
    from dataclasses import asdict  # noqa: PLC0415

    from hpml_orchestrator.cli.meter import Meter  # noqa: PLC0415
    from hpml_orchestrator.errors import counted  # noqa: PLC0415
    from hpml_orchestrator.packing import pack as make_pack  # noqa: PLC0415
    from hpml_orchestrator.staging.capacity import exact_bytes, human_bytes  # noqa: PLC0415

    try:
        with Meter("packed") as meter:
            result = make_pack(request, meter)
    except KeyboardInterrupt:
        typer.echo("\nhpml: stopped; the same command with --resume goes on", err=True)
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
        f"{counted(result.shards, 'archive')}{kept} in {_shown(result.pack)}"
    )


def _tell_verified(directory: str, workers: int, *, as_json: bool) -> None:
    from dataclasses import asdict  # noqa: PLC0415

    from hpml_orchestrator.cli.meter import Meter  # noqa: PLC0415
    from hpml_orchestrator.errors import StagingError, counted  # noqa: PLC0415
    from hpml_orchestrator.packing import verify as check  # noqa: PLC0415
    from hpml_orchestrator.staging.capacity import exact_bytes, human_bytes  # noqa: PLC0415

    with Meter("verified") as meter:
        found = check(_given("--verify", directory), workers=workers, on_verify=meter)
    if as_json:
        print_json({"pack": _shown(directory), **asdict(found)})
    if found.damaged:
        told = [
            ": ".join(filter(None, (one.shard, one.name, one.reason)))
            for one in found.damaged[:_DAMAGE_TOLD]
        ]
        more = len(found.damaged) - len(told)
        if more:
            told.append(f"and {more} more; --json tells all")
        places = counted(len(found.damaged), "place")
        raise StagingError(
            "\n".join([f"{_shown(directory)} is damaged in {places}", *told]),
            hint="pack the tree again into a new directory",
        )
    if not as_json:
        rate = found.bytes / found.seconds if found.seconds else 0.0
        typer.echo(
            f"{_shown(directory)} is whole: {counted(found.files, 'file')} in "
            f"{counted(found.shards, 'archive')}, "
            f"{exact_bytes(found.bytes)} read in {found.seconds:.2f} s, "
            f"{human_bytes(int(rate))}/s"
        )


def _tell_list(directory: str, *, as_json: bool) -> None:
    from hpml_orchestrator.packing import KINDS, read_index  # noqa: PLC0415

    index = read_index(_given("--list", directory))
    files = [archive.file for archive in index.archives]

    def told(row: Row) -> dict[str, Any]:
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
            typer.echo(between + json.dumps(told(row)), nl=False)
            between = ",\n"
        typer.echo("\n]")
        return
    print_table(
        ("NAME", "KIND", "SHARD", "OFFSET", "BYTES", "XXH3-128"),
        [
            (
                _shown(row.name.decode("utf-8", "surrogateescape")),
                KINDS[row.kind],
                files[row.shard],
                str(row.offset),
                str(row.size),
                row.digest.hex(),
            )
            for row in index.rows()
        ],
    )


def _shown(path: str) -> str:
    from hpml_orchestrator.staging.faults import shown  # noqa: PLC0415

    return shown(path)
