"""Command `usage`: how jobs used their GPUs over weeks, as a table or as JSON."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hpml_orchestrator.cli.common import (
    JsonOption,
    PrometheusAuthOption,
    PrometheusOption,
    chosen_prometheus,
    print_json,
    print_table,
    refuse_empty,
    refuse_with,
    store_of,
)
from hpml_orchestrator.errors import HpmlError, InputError, counted
from hpml_orchestrator.jobfile.text import parse_since
from hpml_orchestrator.records.run import user_name
from hpml_orchestrator.runs.prometheus import PrometheusError
from hpml_orchestrator.runs.reporting.usage import (
    GROUPS,
    GpuHoursUsage,
    Selection,
    recorded_usage,
    stored_usage,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


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
        float,
        typer.Option(
            "--min-unused",
            metavar="GPU-HOURS",
            min=0,
            help="Only rows with at least this many unused GPU-hours.",
        ),
    ] = 0,
    prometheus: PrometheusOption = "",
    prometheus_auth: PrometheusAuthOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show GPU-hours, waste and energy of jobs over weeks, ended ones too.

    With a Prometheus this covers all your jobs with GPUs, else the runs in your records. Rows with
    the most unused GPU-hours come first.
    """
    for option, values in {"--since": [since], "--user": user, "--account": account}.items():
        for value in values:
            refuse_empty({option: value})
    if everybody:
        refuse_with("--all-users", {"--user": user})
    now = time.time()
    server = chosen_prometheus(context, prometheus, prometheus_auth)
    if server is None:
        for option, given in {"--all-users": everybody, "--user": user}.items():
            if given:
                raise InputError("needs a Prometheus", field=option, hint="--prometheus URL")
    own = [] if everybody or account or server is None else [user_name(os.getuid())]
    selection = Selection(
        by=by,
        since=parse_since(since, field="--since", now=now),
        until=now,
        users=user or own,
        accounts=account,
        min_unused_hours=min_unused,
        number=number,
    )
    try:
        if server is None:
            rows, total = recorded_usage(store_of(context), selection)
        else:
            rows, total = stored_usage(server, selection)
    except PrometheusError as error:
        raise HpmlError(str(error), hint="--prometheus none reads your records") from error
    _print(rows, total, selection, as_json=as_json)
    if not (total.jobs or server or as_json):
        typer.echo("hint: jobs that hpml did not submit need --prometheus URL", err=True)


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
    """Return header and cells; drop users, accounts and clusters if all rows share them."""
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
