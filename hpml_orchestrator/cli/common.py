"""What the command groups share: options, the store, printing for people and for programs."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.runs.submit import Rendered

__all__ = [
    "STANDARD_OUTPUT",
    "AfterOption",
    "BackendOption",
    "JobFile",
    "JsonOption",
    "LocalOption",
    "RunWord",
    "RunWords",
    "SetOption",
    "backend_name",
    "chosen_site",
    "complete_run",
    "not_written",
    "print_json",
    "print_table",
    "refuse_gone_directory",
    "rendered_of",
    "store_of",
]

STANDARD_OUTPUT = "-"
"""What names standard output where a file is wanted."""


def complete_run(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the runs that a word may be the beginning of, for the shell."""
    try:
        ctx.obj = {"records": ctx.find_root().params.get("records")}
        known = ["last", *(one.sid for one in store_of(ctx).submissions())]
    except Exception:  # noqa: BLE001 - completion never disturbs the command line
        return []
    return [word for word in known if word.startswith(incomplete)]


JobFile = Annotated[
    str, typer.Argument(metavar="JOB_FILE", help="Job file, YAML 1.2 or TOML.", show_default=False)
]
SetOption = Annotated[
    list[str],
    typer.Option(
        "--set",
        "-s",
        metavar="FIELD=VALUE",
        help="Set a field over the job file's, such as resources.nodes=4; may be repeated.",
        show_default=False,
    ),
]
AfterOption = Annotated[
    list[str],
    typer.Option(
        "--after",
        metavar="RUN|any:RUN|notok:RUN",
        help="Start once that run completed; with any: once it is over, with notok: once it "
        "failed. May be repeated: all of them. Replaces `after` of the job file.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
BackendOption = Annotated[
    str,
    typer.Option(
        "--backend",
        metavar="NAME",
        help="Where to run: slurm, local, or auto: Slurm where sbatch is found.",
    ),
]
LocalOption = Annotated[
    bool, typer.Option("--local", help="Run on this machine; short for --backend local.")
]
RunWord = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Run id, a unique part of it, a job id, or `last`; .INDEX behind it: one task.",
        autocompletion=complete_run,
    ),
]
RunWords = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN…",
        help="Run ids, unique parts of them, job ids, or `last`; .INDEX behind one: one task.",
        autocompletion=complete_run,
    ),
]


def store_of(context: typer.Context) -> Store:
    """Return the store that `--records` or the environment names."""
    from hpml_orchestrator.records.store import Store, default_root  # noqa: PLC0415

    chosen = (context.obj or {}).get("records") or ""
    environment = {**os.environ, "HPML_HOME": chosen} if chosen else dict(os.environ)
    return Store(default_root(environment))


def chosen_site(context: typer.Context) -> str:
    """Return what `--site` or `HPML_SITE` says: a file, `none`, or nothing."""
    return (context.find_root().obj or {}).get("site") or ""


def refuse_gone_directory() -> None:
    """Refuse to run in a directory that was removed: paths below it lead nowhere.

    Raises:
        NotFoundError: says what to do.
    """
    from hpml_orchestrator.errors import NotFoundError  # noqa: PLC0415

    try:
        os.getcwd()
    except OSError:
        raise NotFoundError(
            "the current directory is not there any more", hint="`cd` to another one first"
        ) from None


def rendered_of(
    context: typer.Context,
    job_file: str,
    settings: list[str],
    backend: str,
    after: list[str] | None = None,
) -> Rendered:
    """Load a job file through the site profile that counts for it, and render its script."""
    from hpml_orchestrator.runs.submit import render_job  # noqa: PLC0415
    from hpml_orchestrator.site.profile import site_for  # noqa: PLC0415
    from hpml_orchestrator.spec import load_job, parse_setting  # noqa: PLC0415

    given = [parse_setting(setting) for setting in settings]
    given += [("after", after)] if after else []
    site = site_for(job_file, os.environ, chosen=chosen_site(context), backend=backend)
    return render_job(load_job(job_file, given, site), site=site, here=backend == "local")


def backend_name(backend: str, *, local: bool) -> str:
    """Return `slurm` or `local` for the options `--backend` and `--local`."""
    from hpml_orchestrator.cli.conflicts import refuse_with  # noqa: PLC0415
    from hpml_orchestrator.runs.backend import choose  # noqa: PLC0415

    if local:
        refuse_with("--local", {"--backend": backend not in {"auto", "local"}})
    return choose("local" if local else backend)


def not_written(error: OSError) -> None:
    """Say on standard error that standard output cannot be written, and write there no more."""
    with contextlib.suppress(OSError):
        typer.echo(f"hpml: standard output cannot be written: {error.strerror}", err=True)
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_json(value: Any) -> None:
    """Print a value as JSON, one document."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:  # a file's name that is no text, or a terminal of few letters
        text = json.dumps(value, indent=2, default=str)
    typer.echo(text)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: drawn by rich on a terminal, tab-separated lines elsewhere."""
    if not sys.stdout.isatty():
        for row in [header, *rows]:
            typer.echo("\t".join(" ".join(cell.split()) for cell in row))
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=None, pad_edge=False)
    for column in header:
        whole = column in _WHOLE_COLUMNS
        table.add_column(column, no_wrap=whole, overflow="ignore" if whole else "fold")
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    Console().print(table)


_WHOLE_COLUMNS = frozenset({"RUN", "TASK", "JOB", "STATE", "TIME", "RANK", "STATUS"})
"""Columns that are never broken: what stands there is copied."""

_STYLES = {
    "COMPLETED": "green",
    "RUNNING": "cyan",
    "PENDING": "yellow",
    "FAILED": "red",
    "TIMEOUT": "red",
    "OUT_OF_MEMORY": "red",
    "NODE_FAIL": "red",
    "CANCELLED": "magenta",
    "REFUSED": "red",
    "NOT SUBMITTED": "red",
    "yes": "green",
    "ok": "green",
    "WRONG": "bold red",
}
