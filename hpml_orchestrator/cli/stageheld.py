"""Commands about what is staged on this node: stage ls, stage verify, stage clean."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from hpml_orchestrator.cli.common import (
    JsonOption,
    chosen_site,
    print_json,
    print_table,
)
from hpml_orchestrator.cli.conflicts import refuse_with
from hpml_orchestrator.cli.dataoptions import count_option

if TYPE_CHECKING:
    from typing import Any

    from hpml_orchestrator.site.profile import NodePaths
    from hpml_orchestrator.staging import Bases
    from hpml_orchestrator.staging.held import Cleaned, Staged
    from hpml_orchestrator.staging.verify import Report

__all__ = ["bases_of", "paths_here", "register"]

_Directories = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="DIR…",
        help="What was given to --to: shm, local or directories.",
        show_default="what shm and local stand for here",
    ),
]


def register(group: typer.Typer) -> None:
    """Add the commands to the group."""
    group.command("ls")(ls)
    group.command()(verify)
    group.command()(clean)


def paths_here(site: str) -> NodePaths:
    """Return where this node keeps what is staged and how gently it asks, by the site profile.

    Raises:
        HpmlError: something is wrong with the profile.
    """
    from pathlib import Path  # noqa: PLC0415

    from hpml_orchestrator.site.profile import node_paths  # noqa: PLC0415

    return node_paths(Path.cwd(), os.environ, chosen=site)


def bases_of(paths: NodePaths, local_dir: str | None = None) -> Bases:
    """Return what shm and local stand for: `--local-dir`, else what the site profile says."""
    from hpml_orchestrator.staging import Bases  # noqa: PLC0415

    local = os.path.abspath(local_dir) if local_dir else paths.scratch
    return Bases(shm=paths.ram, local=local)


def ls(
    context: typer.Context, directories: _Directories = None, as_json: JsonOption = False
) -> None:
    """List what you have staged on this node, and what uses it."""
    from hpml_orchestrator.staging.held import list_staged  # noqa: PLC0415

    found = list_staged(_bases(context, directories))
    if as_json:
        print_json([_json(one) for one in found])
        return
    if not found:
        typer.echo("nothing is staged", err=True)
        return
    print_table(
        ("NAME", "SIZE", "FILES", "STATE", "KEPT", "IN USE", "LAST USED", "SOURCE", "PATH"),
        [_row(one) for one in found],
    )


def verify(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH…", help="What `hpml stage` printed.", show_default=False),
    ],
    processes: Annotated[int | None, count_option("--processes", "Processes that read.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare staged data with the digests that were made when it came.

    The exit status is 8 when anything differs; the names are told.
    """
    from hpml_orchestrator.cli.stopping import stoppable  # noqa: PLC0415
    from hpml_orchestrator.errors import StagingError  # noqa: PLC0415
    from hpml_orchestrator.staging.faults import shown, why  # noqa: PLC0415
    from hpml_orchestrator.staging.verify import verify as compare  # noqa: PLC0415

    reports: list[Report] = []
    with stoppable(lambda: "not all was compared") as stop:
        for path in paths:
            try:
                report = compare(os.path.abspath(path), workers=processes, should_stop=stop)
            except OSError as error:
                raise StagingError(f"cannot read {shown(path)}: {why(error)}") from error
            reports.append(report)
            if not as_json and not report.count:
                _tell_whole(report)
    if as_json:
        print_json([_report_json(one) for one in reports])
    damaged = [one for one in reports if one.count]
    if damaged:
        raise StagingError(
            "\n".join(line for one in damaged for line in _damage(one)),
            hint="stage it again: it is brought anew; `hpml stage clean` removes it when nothing "
            "uses it",
        )


def clean(
    context: typer.Context,
    directories: _Directories = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also all that is kept and not in use.")
    ] = False,
    older: Annotated[
        str | None,
        typer.Option(
            "--older",
            metavar="AGE",
            help="Also what is kept and was not used for so long: 90m, 12h, 7d, 2w.",
            show_default=False,
        ),
    ] = None,
    mine: Annotated[
        bool,
        typer.Option(
            "--mine", help="Also what this shell or script staged, though it is still running."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove what you staged on this node and nothing uses any more.

    That is what dead jobs and shells left, and what was never completed. What is kept stays without
    --older or --all; what is in use stays in any case.
    """
    from hpml_orchestrator.cli.ages import parse_age  # noqa: PLC0415
    from hpml_orchestrator.staging.held import clean as remove  # noqa: PLC0415

    if older is not None:
        refuse_with("--older", {"--all": everything})
    if mine:
        refuse_with("--mine", {"--dry-run": dry_run})
    seconds = None if older is None else parse_age(older, field="--older")
    bases = _bases(context, directories)
    left = _leave(bases) if mine else []
    done = remove(bases, everything=everything, older_seconds=seconds, dry_run=dry_run)
    done.removed[:0] = left
    if as_json:
        print_json(_cleaned_json(done, dry_run=dry_run))
    else:
        _tell_cleaned(done, dry_run=dry_run)


def _bases(context: typer.Context, directories: list[str] | None) -> list[str]:
    """Return existing directories to look in, each once.

    Raises:
        NotFoundError: one that was given is not there.
        StagingError: one cannot be looked at.
        InputError: one that was given is the data, and not what they were staged to.
    """
    from hpml_orchestrator.errors import NotFoundError  # noqa: PLC0415
    from hpml_orchestrator.staging.faults import is_directory, shown  # noqa: PLC0415

    here = bases_of(paths_here(chosen_site(context)))
    words = {"shm": here.shm, "local": here.local}
    if not directories:
        return [one for one in dict.fromkeys(words.values()) if os.path.isdir(one)]
    found = []
    for one in directories:
        path = os.path.abspath(words.get(one, one)) if words.get(one, one) else ""
        if not is_directory(path):
            raise NotFoundError(
                f"no such directory: {shown(path) or one or 'the empty path'}",
                hint="DIR is shm, local or a directory that was given to --to",
            )
        _refuse_data(path)
        found.append(path)
    return list(dict.fromkeys(found))


def _refuse_data(path: str) -> None:
    """Refuse the path of staged data, in which nothing is staged.

    Raises:
        InputError: says which directory was meant.
    """
    from hpml_orchestrator.errors import InputError  # noqa: PLC0415
    from hpml_orchestrator.staging.faults import shown  # noqa: PLC0415

    base, root, _ = f"{path}/".partition(f"/hpml-{os.getuid()}/")
    if root:
        raise InputError(
            "is staged data, and DIR is the directory that they were staged to",
            field="DIR",
            value=shown(path),
            hint=f"that is {shown(base) or '/'}; what this shell staged goes with --mine",
        )


def _leave(bases: list[str]) -> list[Staged]:
    """Remove what the calling shell or script staged; what it kept only loses its user.

    The last command of `bash -c` takes the shell's place: then this process is who staged.
    """
    from hpml_orchestrator.staging import StagingArea  # noqa: PLC0415
    from hpml_orchestrator.staging.caller import calling_process  # noqa: PLC0415
    from hpml_orchestrator.staging.held import list_staged, shell_key  # noqa: PLC0415

    keys = {shell_key(calling_process()), shell_key(os.getpid())}
    own = [one for one in list_staged(bases) if one.owner in keys and not one.kept]
    for base in bases:
        for key in keys:
            StagingArea(base, key).cleanup()
    return own


def _row(one: Staged) -> tuple[str, ...]:
    from datetime import datetime  # noqa: PLC0415

    from hpml_orchestrator.staging import human_bytes  # noqa: PLC0415
    from hpml_orchestrator.staging.faults import shown  # noqa: PLC0415

    used = datetime.fromtimestamp(one.last_used).astimezone()
    return (
        one.name,
        human_bytes(one.bytes),
        str(one.files),
        one.state,
        "yes" if one.kept else "no",
        shown(one.in_use) or "-",
        used.strftime("%Y-%m-%d %H:%M"),
        shown(one.source) or "-",
        shown(one.path),
    )


def _json(one: Staged) -> dict[str, Any]:
    from dataclasses import asdict  # noqa: PLC0415

    return asdict(one)


def _tell_whole(report: Report) -> None:
    from hpml_orchestrator.errors import counted  # noqa: PLC0415
    from hpml_orchestrator.staging.capacity import exact_bytes, human_bytes  # noqa: PLC0415
    from hpml_orchestrator.staging.faults import shown  # noqa: PLC0415

    files = counted(report.files, "file")
    if not report.hashed:
        typer.echo(
            f"{shown(report.path)}: names and sizes of {files} are right; there are no digests to "
            "compare contents with"
        )
        return
    rate = report.bytes / report.seconds if report.seconds else 0.0
    typer.echo(
        f"{shown(report.path)} is whole: {files}, {exact_bytes(report.bytes)} "
        f"read in {report.seconds:.2f} s, {human_bytes(int(rate))}/s"
    )


def _damage(report: Report) -> list[str]:
    from hpml_orchestrator.errors import counted  # noqa: PLC0415
    from hpml_orchestrator.staging.faults import shown  # noqa: PLC0415

    lines = [
        f"{shown(report.path)} differs in {counted(report.count, 'path')} from what was staged"
    ]
    lines += [f"{shown(path)}: {reason}" for path, reason in report.problems]
    more = report.count - len(report.problems)
    return [*lines, f"and {more} more"] if more else lines


def _report_json(report: Report) -> dict[str, Any]:
    return {
        "path": report.path,
        "files": report.files,
        "bytes": report.bytes,
        "seconds": report.seconds,
        "hashed": report.hashed,
        "count": report.count,
        "problems": [{"path": path, "reason": reason} for path, reason in report.problems],
    }


def _cleaned_json(done: Cleaned, *, dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "bytes": done.bytes,
        "removed": [_json(one) for one in done.removed],
        "leftovers": done.leftovers,
        "kept": [{"path": path, "reason": reason} for path, reason in done.kept],
    }


def _tell_cleaned(done: Cleaned, *, dry_run: bool) -> None:
    from hpml_orchestrator.staging import human_bytes  # noqa: PLC0415
    from hpml_orchestrator.staging.faults import shown  # noqa: PLC0415

    word = "would remove" if dry_run else "removed"
    for one in done.removed:
        whose = f" of {shown(one.source)}" if one.source else ""
        typer.echo(f"{word} {shown(one.path)}{whose}: {human_bytes(one.bytes)}")
    for path in done.leftovers:
        typer.echo(f"{word} {shown(path)}")
    for path, reason in done.kept:
        typer.echo(f"stays: {shown(path)}: {shown(reason)}")
    if not (done.removed or done.leftovers or done.kept):
        typer.echo("nothing is staged", err=True)
