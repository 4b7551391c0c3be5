"""Subcommands of `stage`: ls, verify, clean."""

from __future__ import annotations

import os
import time
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
from hpml_orchestrator.jobfile.ages import parse_age
from hpml_orchestrator.records.texts import exact_bytes, human_bytes
from hpml_orchestrator.site.profile import node_paths
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
    bases = _bases(context, directories)
    staged = list_staged(bases)
    if as_json:
        print_json([asdict(data) for data in staged])
    elif not staged:
        typer.echo(f"nothing is staged in {', '.join(map(shown, bases))}", err=True)
    else:
        print_table(
            ("NAME", "SIZE", "FILES", "STATE", "STAYS", "IN USE", "LAST USED", "SOURCE", "PATH"),
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
    places: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH",
            help="Remove only these: paths printed by `hpml stage`, or shm, local or a directory "
            "given to --to.",
            show_default="shm and local",
        ),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option("--all", help="Also remove all unused data that you staged or jobs kept."),
    ] = False,
    older: Annotated[
        str | None,
        typer.Option(
            "--older",
            metavar="AGE",
            help="Also remove data that you staged or jobs kept and that were not used for so "
            "long: 90m, 12h, 7d, 2w.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be removed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what is staged here, and remove what killed jobs left behind.

    What you staged by hand, and what a job with `keep: true` left, is removed only by its path,
    with --older or with --all; data in use is never removed.
    """
    if older is not None:
        refuse_with("--older", {"--all": everything})
    given = map(os.path.abspath, filter(None, places or []))
    only = [path for path in given if base_above(os.path.dirname(path))]
    if only:
        refuse_with("PATH", {"--all": everything, "--older": older is not None})
        if len(only) < len(places or []):
            raise InputError("must all be staged data, or all directories", field="PATH")
        _refuse_unknown(only)
        bases = list(dict.fromkeys(map(base_above, only)))
    else:
        bases = _bases(context, places)
    done = clean_bases(
        bases,
        only=only,
        everything=everything,
        older_seconds=None if older is None else parse_age(older, field="--older"),
        now=time.time(),
        dry_run=dry_run,
    )
    if as_json:
        print_json(
            {
                "dry_run": dry_run,
                "bytes": done.bytes,
                "removed": [asdict(data) for data in done.removed],
                "kept": [{**asdict(data), "reason": reason} for data, reason in done.kept],
                "failed": [{"path": path, "reason": reason} for path, reason in done.failed],
            }
        )
    else:
        _print_cleaned(done, bases, dry_run=dry_run)
    if done.failed or (only and done.kept):
        raise typer.Exit(StagingError.exit_code)


def _refuse_unknown(paths: list[str]) -> None:
    staged = [data.path for data in list_staged([*map(base_above, paths)])]
    known = {*staged, *map(os.path.dirname, staged)}
    for path in paths:
        if path not in known:
            hint = "`hpml stage ls` shows what is staged"
            raise NotFoundError(f"nothing is staged at {shown(path)}", hint=hint)


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
                hint="give shm, local or a directory that was given to --to",
            )
        paths.append(base_above(path) or path)
    return list(dict.fromkeys(paths))


def _row(data: StoredData) -> tuple[str, ...]:
    stays = "with its job" if data.job else "until cleaned" if data.by_hand else "while room"
    stays = stays if data.job or data.state == "ok" else "-"
    return (
        data.name,
        human_bytes(data.bytes),
        str(data.files),
        data.state,
        stays,
        shown(data.in_use) or "-",
        _minute(data.last_used),
        shown(data.source) or "-",
        shown(data.path),
    )


def _minute(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")


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


def _print_cleaned(done: Cleaned, bases: list[str], *, dry_run: bool) -> None:
    verb = "would remove" if dry_run else "removed"
    for data in done.removed:
        typer.echo(f"{verb} {_described(data)}")
    for data, reason in done.kept:
        typer.echo(f"kept {_described(data)}: {shown(reason)}")
    for path, reason in done.failed:
        typer.echo(f"not removed: {shown(path)}: {shown(reason)}", err=True)
    if not (done.removed or done.kept or done.failed):
        typer.echo(f"nothing is staged in {', '.join(map(shown, bases))}", err=True)


def _described(data: StoredData) -> str:
    source = f", copy of {shown(data.source)}" if data.source else f", {data.state}"
    size = f"{human_bytes(data.bytes)}, since {_minute(data.since)}"
    return f"{shown(data.path)} ({size}{source})"
