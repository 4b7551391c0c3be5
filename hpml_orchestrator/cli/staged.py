"""Subcommands of `stage`: ls, verify, clean."""

from __future__ import annotations

import os
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpml_orchestrator.cli.common import (
    JsonOption,
    chosen_site,
    print_json,
    print_table,
    refuse_with,
)
from hpml_orchestrator.cli.copying import count_option, stoppable
from hpml_orchestrator.errors import InputError, NotFoundError, StagingError, counted
from hpml_orchestrator.records.texts import exact_bytes, human_bytes
from hpml_orchestrator.site.profile import node_paths
from hpml_orchestrator.spec.ages import parse_age
from hpml_orchestrator.staging.area import JobArea
from hpml_orchestrator.staging.caller import calling_process, shell_key
from hpml_orchestrator.staging.faults import is_directory, shown, why
from hpml_orchestrator.staging.inventory import clean as clean_bases
from hpml_orchestrator.staging.inventory import list_staged
from hpml_orchestrator.staging.manifest import verify as verify_staged
from hpml_orchestrator.staging.request import Bases
from hpml_orchestrator.staging.store import base_above

if TYPE_CHECKING:
    from hpml_orchestrator.site.profile import NodePaths
    from hpml_orchestrator.staging.inventory import Cleaned, StoredData
    from hpml_orchestrator.staging.manifest import VerifyReport

_Directories = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="DIR",
        help="Where it was staged: shm, local or a directory given to --to.",
        show_default="shm and local",
    ),
]


def paths_here(site: str) -> NodePaths:
    """Return this node's staging directories and limits, from the site profile."""
    return node_paths(Path.cwd(), os.environ, chosen=site)


def bases_of(paths: NodePaths, local_dir: str | None = None) -> Bases:
    """Return the directories of shm and local; `--local-dir` overrides the site profile."""
    local = os.path.abspath(local_dir) if local_dir else paths.scratch
    return Bases(shm=paths.ram, local=local)


def ls(
    context: typer.Context, directories: _Directories = None, as_json: JsonOption = False
) -> None:
    """List your staged data on this node and what uses it."""
    staged = list_staged(_bases(context, directories))
    if as_json:
        print_json([asdict(data) for data in staged])
    elif not staged:
        typer.echo("nothing is staged", err=True)
    else:
        print_table(
            ("NAME", "SIZE", "FILES", "STATE", "KEPT", "IN USE", "LAST USED", "SOURCE", "PATH"),
            [_row(data) for data in staged],
        )


def verify(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH", help="Paths printed by `hpml stage`.")
    ],
    processes: Annotated[int | None, count_option("--processes", "Reading processes.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Verify staged data against the digests computed while it was copied.

    The exit status is 8 if anything differs; the files that differ are listed.
    """
    reports: list[VerifyReport] = []
    with stoppable(lambda: "not everything was compared") as stop:
        for path in paths:
            try:
                report = verify_staged(os.path.abspath(path), workers=processes, should_stop=stop)
            except OSError as error:
                raise StagingError(f"cannot read {shown(path)}: {why(error)}") from error
            reports.append(report)
            if not as_json and not report.count:
                _print_intact(report)
    if as_json:
        print_json([_report_json(report) for report in reports])
    damaged = [report for report in reports if report.count]
    if damaged:
        raise StagingError(
            "\n".join(line for report in damaged for line in _damage(report)),
            hint="stage it again for a new copy; `hpml stage clean` removes this one once it is "
            "unused",
        )


def clean(
    context: typer.Context,
    directories: _Directories = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also remove all unused data staged with --keep.")
    ] = False,
    older: Annotated[
        str | None,
        typer.Option(
            "--older",
            metavar="AGE",
            help="Also remove data staged with --keep and unused for this long: 90m, 12h, 7d, 2w.",
        ),
    ] = None,
    mine: Annotated[
        bool, typer.Option("--mine", help="Also remove what this shell or script staged.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be removed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove your unused staged data.

    This removes data of finished jobs and shells, and incomplete copies. Data staged with --keep is
    removed only with --older or --all; data in use is never removed.
    """
    if older is not None:
        refuse_with("--older", {"--all": everything})
    if mine:
        refuse_with("--mine", {"--dry-run": dry_run})
    seconds = None if older is None else parse_age(older, field="--older")
    bases = _bases(context, directories)
    own = _leave(bases) if mine else []
    done = clean_bases(bases, everything=everything, older_seconds=seconds, dry_run=dry_run)
    done.removed[:0] = own
    if as_json:
        print_json(
            {
                "dry_run": dry_run,
                "bytes": done.bytes,
                "removed": [asdict(data) for data in done.removed],
                "leftovers": done.leftovers,
                "kept": [{"path": path, "reason": reason} for path, reason in done.kept],
            }
        )
    else:
        _print_cleaned(done, dry_run=dry_run)


def _bases(context: typer.Context, directories: list[str] | None) -> list[str]:
    here = bases_of(paths_here(chosen_site(context)))
    by_word = {"shm": here.shm, "local": here.local}
    if not directories:
        return [base for base in dict.fromkeys(by_word.values()) if os.path.isdir(base)]
    paths = []
    for word in directories:
        base = by_word.get(word, word)
        path = os.path.abspath(base) if base else ""
        if not is_directory(path):
            raise NotFoundError(
                f"no such directory: {shown(path) or word or 'the empty path'}",
                hint="DIR is shm, local or a directory that was given to --to",
            )
        above = base_above(path)
        if above:
            raise InputError(
                "is staged data; DIR is the directory it was staged to",
                field="DIR",
                value=shown(path),
                hint=f"use {shown(above)}; --mine removes what this shell staged",
            )
        paths.append(path)
    return list(dict.fromkeys(paths))


def _leave(bases: list[str]) -> list[StoredData]:
    """Remove what the calling shell staged; data in the cache only loses this user.

    The last command of `bash -c` replaces the shell: then this process is the one that staged.
    """
    keys = {shell_key(calling_process()), shell_key(os.getpid())}
    own = [data for data in list_staged(bases) if data.owner in keys and not data.kept]
    for base in bases:
        for key in keys:
            JobArea(base, key).cleanup()
    return own


def _row(data: StoredData) -> tuple[str, ...]:
    used = datetime.fromtimestamp(data.last_used).astimezone()
    return (
        data.name,
        human_bytes(data.bytes),
        str(data.files),
        data.state,
        "yes" if data.kept else "no",
        shown(data.in_use) or "-",
        used.strftime("%Y-%m-%d %H:%M"),
        shown(data.source) or "-",
        shown(data.path),
    )


def _print_intact(report: VerifyReport) -> None:
    files = counted(report.files, "file")
    if not report.hashed:
        typer.echo(f"{shown(report.path)}: names and sizes of {files} match; no digests to compare")
        return
    rate = report.bytes / report.seconds if report.seconds else 0.0
    typer.echo(
        f"{shown(report.path)} is intact: {files}, {exact_bytes(report.bytes)} "
        f"read in {report.seconds:.2f} s, {human_bytes(int(rate))}/s"
    )


def _damage(report: VerifyReport) -> list[str]:
    lines = [f"{shown(report.path)} differs from its source in {counted(report.count, 'path')}"]
    lines += [f"{shown(path)}: {reason}" for path, reason in report.problems]
    more = report.count - len(report.problems)
    return [*lines, f"and {more} more"] if more else lines


def _report_json(report: VerifyReport) -> dict[str, object]:
    problems = [{"path": path, "reason": reason} for path, reason in report.problems]
    return {**asdict(report), "problems": problems}


def _print_cleaned(done: Cleaned, *, dry_run: bool) -> None:
    verb = "would remove" if dry_run else "removed"
    for data in done.removed:
        source = f" (copy of {shown(data.source)})" if data.source else ""
        typer.echo(f"{verb} {shown(data.path)}{source}: {human_bytes(data.bytes)}")
    for path in done.leftovers:
        typer.echo(f"{verb} {shown(path)}")
    for path, reason in done.kept:
        typer.echo(f"kept: {shown(path)}: {shown(reason)}")
    if not (done.removed or done.leftovers or done.kept):
        typer.echo("nothing is staged", err=True)
