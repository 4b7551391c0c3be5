"""Command `usage`: what jobs did with their GPUs over weeks, as a table or as letters."""

from __future__ import annotations

import os
import re
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hpml_orchestrator.cli.common import (
    JsonOption,
    PrometheusAuthOption,
    PrometheusOption,
    print_json,
    print_table,
    refuse_empty,
    refuse_with,
    store_of,
)
from hpml_orchestrator.cli.process import notice
from hpml_orchestrator.cli.prometheus import chosen_prometheus
from hpml_orchestrator.errors import HpmlError, InputError, counted
from hpml_orchestrator.records.files import write_text
from hpml_orchestrator.records.run import user_name
from hpml_orchestrator.runs.prometheus import Prometheus, PrometheusError
from hpml_orchestrator.runs.reporting.usage import (
    GROUPS,
    GpuHoursUsage,
    Selection,
    recorded_usage,
    stored_usage,
)
from hpml_orchestrator.spec.ages import parse_since

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LETTER_JOBS = 5
_LETTER_HOURS = 100.0
_MOST_LETTERS = 1000
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_ADVICE = {
    "gpu-unused": "ask for fewer GPUs, or start a rank on each; end notebooks that nobody uses",
    "waits-for-data": "stage the data to the node (`stage`), or use more loader workers",
    "slow-rank": "`hpml report RUN` names the rank that the others wait for",
    "tensor-cores-idle": "train with bfloat16 (autocast)",
    "memory-pressure": "ask for more memory per node before the kernel ends the job",
    "throttled": "report the node to the administrators; this is not your fault",
}


def usage(
    context: typer.Context,
    by: Annotated[
        Literal["job", "user", "account"],
        typer.Option("--by", help="One row per job, user or account."),
    ] = "job",
    since: Annotated[
        str,
        typer.Option("--since", metavar="AGE|DATE", help="Since when, e.g. 1w or 2026-11-01."),
    ] = "4w",
    user: Annotated[
        list[str],
        typer.Option(
            "--user",
            metavar="NAME",
            help="Only this user's jobs, from Prometheus; may be repeated.",
        ),
    ] = [],
    account: Annotated[
        list[str],
        typer.Option("--account", metavar="NAME", help="Only this account's; may be repeated."),
    ] = [],
    everybody: Annotated[bool, typer.Option("--all-users", help="Jobs of all users.")] = False,
    number: Annotated[
        int, typer.Option("--number", "-n", min=1, help="How many rows to print.")
    ] = 20,
    min_unused: Annotated[
        float | None,
        typer.Option(
            "--min-unused",
            metavar="GPU-HOURS",
            min=0,
            help="Only rows with at least as many unused GPU-hours; of --mail 100.",
            show_default="0",
        ),
    ] = None,
    mail: Annotated[
        str | None,
        typer.Option("--mail", metavar="DIR", help="Write a letter to each user there; send none."),
    ] = None,
    prometheus: PrometheusOption = "",
    prometheus_auth: PrometheusAuthOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show GPU-hours, waste and energy of jobs over weeks, ended ones too.

    With a Prometheus these are all your jobs with GPUs, else your runs in the records. Rows with
    the most unused GPU-hours come first.
    """
    _refuse_combinations(
        {"--since": [since], "--user": user, "--account": account, "--mail": [mail]},
        everybody=everybody,
        printed={"--json": as_json, "--by": by if by != "job" else ""},
    )
    now = time.time()
    server = chosen_prometheus(context, prometheus, prometheus_auth)
    if server is None:
        for option, given in {"--all-users": everybody, "--mail": mail, "--user": user}.items():
            if given:
                raise InputError("needs a Prometheus", field=option, hint="--prometheus URL")
    own = [] if everybody or account or server is None else [user_name(os.getuid())]
    selection = Selection(
        by=by,
        since=parse_since(since, field="--since", now=now),
        until=now,
        users=user or own,
        accounts=account,
        min_unused_hours=min_unused or 0.0,
        number=number,
    )
    try:
        if server is None:
            rows, total = recorded_usage(store_of(context), selection)
        elif mail is not None:
            least = _LETTER_HOURS if min_unused is None else min_unused
            _write_letters(server, replace(selection, min_unused_hours=least), Path(mail))
            return
        else:
            rows, total = stored_usage(server, selection)
    except PrometheusError as error:
        raise HpmlError(str(error), hint="--prometheus none reads your records") from error
    _print(rows, total, selection, as_json=as_json)
    if not (total.jobs or server or as_json):
        typer.echo("hint: jobs that hpml did not submit need --prometheus URL", err=True)


def _refuse_combinations(
    words: Mapping[str, Sequence[str | None]], *, everybody: bool, printed: Mapping[str, object]
) -> None:
    for option, values in words.items():
        for value in values:
            refuse_empty({option: value})
    if everybody:
        refuse_with("--all-users", {"--user": words["--user"]})
    if words["--mail"] != [None]:
        refuse_with("--mail", printed)


def _print(
    rows: Sequence[GpuHoursUsage], total: GpuHoursUsage, selection: Selection, *, as_json: bool
) -> None:
    if as_json:
        print_json(
            {
                "since": selection.since,
                "until": selection.until,
                "total": _to_json(total),
                "rows": [_to_json(row) for row in rows],
            }
        )
    elif not total.jobs:
        typer.echo(f"no jobs with GPUs since {_day(selection.since)}", err=True)
    else:
        typer.echo(_summary(total, selection.since) + "\n")
        header, cells = _table(rows, selection.by)
        print_table(header, cells, optional=("ACCOUNT", "KWH"))


def _to_json(row: GpuHoursUsage) -> dict[str, object]:
    return {
        **row.labels,
        **{name: value for name, value in asdict(row).items() if name != "labels"},
        "finding": row.finding or None,
        "unused_hours": row.unused_hours,
        "active": row.active,
    }


def _day(moment: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(moment))


def _hours(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"  # noqa: PLR2004 - digits that matter


def _summary(total: GpuHoursUsage, since: float) -> str:
    hours = (
        "1 GPU-hour" if _hours(total.gpu_hours) == "1" else f"{_hours(total.gpu_hours)} GPU-hours"
    )
    parts = [f"{counted(total.jobs, 'job')} since {_day(since)} had GPUs for {hours}"]
    if total.active is not None:
        parts.append(f"{total.active:.0%} of that time a kernel ran")
        parts.append(f"{_hours(total.unused_hours)} GPU-hours unused")
    if total.energy_kwh is not None:
        parts.append(f"{_hours(total.energy_kwh)} kWh")
    return "; ".join(parts)


def _table(rows: Sequence[GpuHoursUsage], by: str) -> tuple[list[str], list[list[str]]]:
    """Return header and cells; users, accounts and clusters that all rows share are left out."""
    shown = ["jobid", "name", "user", "account", "cluster"] if by == "job" else list(GROUPS[by])
    if by == "job":
        several = {name for name in shown if len({row.labels[name] for row in rows}) > 1}
        shown = [name for name in shown if name in ("jobid", "name") or name in several]
    titles = {"jobid": "JOB"}
    header = [titles.get(name, name.upper()) for name in shown]
    header += [] if by == "job" else ["JOBS"]
    header += ["GPU-HOURS", "ACTIVE", "UNUSED", "KWH", "HELD BACK BY"]
    cells = []
    for row in rows:
        held = row.finding or "-"
        if row.finding and row.finding_hours is not None:
            held += f" {_hours(row.finding_hours)} h"
        cells.append(
            [
                *(row.labels[name] or "-" for name in shown),
                *([] if by == "job" else [str(row.jobs)]),
                _hours(row.gpu_hours),
                "-" if row.active is None else f"{row.active:.0%}",
                _hours(row.unused_hours),
                _hours(row.energy_kwh),
                held,
            ]
        )
    return header, cells


def _write_letters(server: Prometheus, selection: Selection, directory: Path) -> None:
    rows, _ = stored_usage(server, replace(selection, by="user", number=_MOST_LETTERS))
    directory.mkdir(parents=True, exist_ok=True)
    written = 0
    for row in rows:
        name = row.labels["user"]
        if not _FILE_NAME.fullmatch(name):
            notice(f"warning: user {name!r} gets no letter: not a name of a file")
            continue
        only = replace(selection, by="job", users=[name], min_unused_hours=0.0, number=_LETTER_JOBS)
        jobs, _ = stored_usage(server, only)
        write_text(directory / f"{name}.txt", letter(row, jobs, selection))
        written += 1
    least = f"{selection.min_unused_hours:g} unused GPU-hours"
    typer.echo(f"{counted(written, 'letter')} in {directory} to users with at least {least}")


def letter(user: GpuHoursUsage, jobs: Sequence[GpuHoursUsage], selection: Selection) -> str:
    """Return the text to a user about GPU-hours that were not used; the first line is a subject."""
    since, until = _day(selection.since), _day(selection.until)
    header, cells = _table(jobs, "job")
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *cells]
    ]
    kinds = dict.fromkeys(job.finding for job in jobs if job.finding)
    advice = [f"- {kind}: {_ADVICE[kind]}" for kind in kinds if kind in _ADVICE]
    unused, hours = _hours(user.unused_hours), _hours(user.gpu_hours)
    return "\n".join(
        [
            f"Subject: {unused} of your {hours} GPU-hours since {since} were not used",
            "",
            f"Hello {user.labels['user']},",
            "",
            f"from {since} to {until}, {counted(user.jobs, 'job')} of yours had GPUs for {hours}",
            f"GPU-hours. In {unused} of them no kernel ran. Nobody else could use these GPUs",
            "meanwhile, and the hours count towards your fair share.",
            "",
            "The jobs with the most unused GPU-hours:",
            "",
            *lines,
            "",
            *(["What helps:", "", *advice, ""] if advice else []),
            "`hpml usage` shows all of your jobs, `hpml report RUN` what held one back.",
            "",
        ]
    )
