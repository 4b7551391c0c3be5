"""What the commands share: options, records, refusals, output for people and for programs."""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from typing import TYPE_CHECKING, Annotated

import typer

from hpml_orchestrator.cli.process import APPENDED, notice
from hpml_orchestrator.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.records.submission import Submission
    from hpml_orchestrator.runs.prometheus import Prometheus

STANDARD_OUTPUT = "-"
"""Stands for standard output where a file is expected."""

_MAKE_RECORDS = frozenset({"run", "submit", "check", "doctor", "bench", "advise", "init"})
"""Commands that may create a directory of records; `hpml sweep run` counts as `run`."""


def completion(ids: Callable[[Store], Iterable[str]]) -> Callable[..., list[str]]:
    """Return a completion function for the shell: `last` and the ids in the store."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        try:
            ctx.obj = {"records": ctx.find_root().params.get("records")}
            names = ["last", *ids(store_of(ctx))]
        except Exception:  # noqa: BLE001 - completion never disturbs the command line
            return []
        return [name for name in names if name.startswith(incomplete)]

    return complete


JobFile = Annotated[str, typer.Argument(metavar="JOB_FILE", help="Job file, YAML 1.2 or TOML.")]
SetOption = Annotated[
    list[str],
    typer.Option(
        "--set",
        "-s",
        metavar="FIELD=VALUE",
        help="Override a field of the job file, e.g. resources.nodes=4; may be repeated.",
    ),
]
AfterOption = Annotated[
    list[str],
    typer.Option(
        "--after",
        metavar="RUN|any:RUN|notok:RUN",
        help="Start after that run has completed (any: ended, notok: failed). "
        "May be repeated; overrides `after` of the job file.",
    ),
]
PrometheusOption = Annotated[
    str,
    typer.Option(
        "--prometheus",
        metavar="URL",
        help="Prometheus with hpml's metrics and rules; `none` reads records only.",
        envvar="PROMETHEUS_URL",
        show_default="the site profile's",
    ),
]
PrometheusAuthOption = Annotated[
    str,
    typer.Option(
        "--prometheus-auth",
        metavar="FILE",
        help="File of mode 600 with user:password or a token for Prometheus.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
BackendOption = Annotated[
    str,
    typer.Option(
        "--backend",
        metavar="NAME",
        help="slurm, local (this machine), or auto: as set by HPML_BACKEND or the site profile, "
        "else Slurm if sbatch is on PATH.",
    ),
]
LocalOption = Annotated[bool, typer.Option("--local", help="Run on this machine: --backend local.")]
_RUN = typer.Argument(
    metavar="RUN",
    help="Run id, name of the job, job id or `last`; RUN.INDEX is one task.",
    autocompletion=completion(lambda store: (submission.sid for submission in store.submissions())),
)
RunWord = Annotated[str, _RUN]
RunWords = Annotated[list[str], _RUN]
NameOption = Annotated[
    str | None,
    typer.Option(
        "--name",
        metavar="NAME",
        help="Only runs of this name; a pattern such as 'digits-*' matches several names.",
        autocompletion=completion(lambda store: set(map(_run_name, store.submissions()))),
    ),
]


def _run_name(submission: Submission) -> str:
    from hpml_orchestrator.runs.select import run_name  # noqa: PLC0415 - completion only

    return run_name(submission)


def store_of(context: typer.Context) -> Store:
    """Return the store that `--records` or the environment names.

    Raises:
        NotFoundError: the directory does not exist, and the command only reads records.
    """
    from hpml_orchestrator.records.store import (  # noqa: PLC0415 - `hpml stage` has no records
        Store,
        open_store,
    )
    from hpml_orchestrator.runs.backend import cluster_here  # noqa: PLC0415 - as above

    chosen = (context.obj or {}).get("records") or ""
    store = open_store(chosen, must_exist=context.info_name not in _MAKE_RECORDS)
    store.cluster = cluster_here
    root = store.root
    # A common mistake is `--records DIR/runs`. It would create a second store inside the first, and
    # find no runs in it.
    if Store(root.parent).submissions_dir.is_dir() and Store(root.parent).runs_dir.is_dir():
        raise InputError(
            f"is inside the records of {root.parent}",
            field="--records",
            value=str(root),
            hint=f"--records {root.parent}",
        )
    source = context.find_root().get_parameter_source("records")
    typed = source is not None and source.name == "COMMANDLINE"
    if typed and context.info_name != "check" and not os.path.lexists(root):
        _notice_once(f"new directory of records: {root}")
    return store


@cache
def _notice_once(text: str) -> None:
    notice(text)


def chosen_site(context: typer.Context) -> str:
    """Return the value of `--site` or `HPML_SITE`: a file, `none`, or an empty string."""
    return (context.find_root().obj or {}).get("site") or ""


def appended_arguments(context: typer.Context) -> list[str]:
    """Return the words after `--`, which are appended to the job's `args`."""
    return list(context.meta.get(APPENDED, ()))


def refuse_empty(options: Mapping[str, str | None]) -> None:
    """Refuse options with an empty value, as from an unset shell variable; None means not given.

    Raises:
        InputError: one of them is empty.
    """
    for option, value in options.items():
        if value is not None and not value.strip():
            raise InputError(
                "must not be empty", field=option, value=value, hint="is a shell variable unset?"
            )


def refuse_with(option: str, others: Mapping[str, object]) -> None:
    """Refuse options that cannot be combined with a given one.

    Args:
        option: the given option.
        others: options that it excludes, with their values.

    Raises:
        InputError: one of the others was also given.
    """
    for other, value in others.items():
        if value:
            raise InputError(
                f"cannot be given together with {option}", field=other, hint="give only one"
            )


def print_json(value: object) -> None:
    """Print a value as one JSON document."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:  # a file name is not text, or the terminal lacks Unicode
        text = json.dumps(value, indent=2, default=str)
    typer.echo(text)


def print_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, optional: Sequence[str] = ()
) -> None:
    """Print a table: drawn by rich on a terminal, as tab-separated lines elsewhere.

    Args:
        header: name of each column.
        rows: cells of each row.
        optional: columns to drop on a narrow terminal, least important first.
    """
    if not sys.stdout.isatty():
        lines = ("\t".join(" ".join(cell.split()) for cell in row) for row in [header, *rows])
        typer.echo("\n".join(lines))
        return
    from hpml_orchestrator.cli.terminal import draw_table  # noqa: PLC0415 - rich takes long

    draw_table(header, rows, optional)


# The Prometheus that commands query for figures of jobs.


def chosen_prometheus(context: typer.Context, url: str, credentials: str) -> Prometheus | None:
    """Return the Prometheus of the command line, else that of the site; None if there is none.

    Args:
        context: context of the command, for the site profile.
        url: its address; `none` for no Prometheus, empty for that of the site.
        credentials: file with `user:password` or a token; read only if there is a Prometheus.

    Raises:
        InputError: the address, the file or the site profile is wrong.
    """
    from hpml_orchestrator.jobfile.text import read_credentials  # noqa: PLC0415 - few commands ask
    from hpml_orchestrator.runs.prometheus import Prometheus  # noqa: PLC0415 - as above
    from hpml_orchestrator.site.profile import prometheus_of_site  # noqa: PLC0415 - as above

    url = url or prometheus_of_site(os.environ, chosen=chosen_site(context)) or "none"
    return None if url == "none" else Prometheus(url, read_credentials(credentials))
