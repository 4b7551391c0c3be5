"""Command `report`: why a run is slow, and what to change."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from hpml_orchestrator.check.changes import diagnose_run
from hpml_orchestrator.cli.common import (
    JsonOption,
    PrometheusAuthOption,
    PrometheusOption,
    RunWords,
    chosen_prometheus,
    chosen_site,
    print_json,
    refuse_empty,
    refuse_with,
    store_of,
)
from hpml_orchestrator.cli.process import notice
from hpml_orchestrator.diagnosis.report import Report
from hpml_orchestrator.errors import InputError, RecordError
from hpml_orchestrator.records.files import write_text
from hpml_orchestrator.runs.select import one_run
from hpml_orchestrator.runs.status import state_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpml_orchestrator.sweeps.reporting import RunsReport

_PAGE_BYTES = 100
_COMPARED = 2


def report(
    context: typer.Context,
    runs: RunWords = [],
    as_json: JsonOption = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Write a page to this file.")
    ] = None,
    prometheus: PrometheusOption = "",
    prometheus_auth: PrometheusAuthOption = "",
    apply: Annotated[
        str | None,
        typer.Option("--apply", metavar="FILE", help="Write a job file with the changes."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="With --apply: replace an existing file.")
    ] = False,
    try_: Annotated[
        bool, typer.Option("--try", help="Run the job and the changed one in turn, and compare.")
    ] = False,
    repeats: Annotated[
        int | None,
        typer.Option("--repeats", min=1, help="With --try: runs of each job.", show_default="6"),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            "--minutes",
            min=0,
            help="With --try: training after which a run is stopped; 0 for whole runs.",
            show_default="2",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --try: do not ask.")] = False,
) -> None:
    """Report why a run is slow, and what to change in its job file.

    One RUN gives a report, by default of the last run; two are compared. Of a job array, name one
    task: RUN.INDEX. A run that has not ended is reported as far as it is known.
    """
    refuse_empty({"--html": html, "--apply": apply})
    wanted = _Wanted(apply, try_, force=force, repeats=repeats, minutes=minutes, yes=yes)
    wanted.refuse_others(
        {"--markdown": as_markdown, "--html": html, "RUN RUN": len(runs) > 1}, as_json=as_json
    )
    if as_json:
        refuse_with("--json", {"--markdown": as_markdown, "--html": html})
    if as_markdown:
        refuse_with("--markdown", {"--html": html})
    if len(runs) > _COMPARED:
        raise InputError("one run is reported, two are compared", field="RUN", value=" ".join(runs))
    if len(runs) == _COMPARED:
        from hpml_orchestrator.sweeps.plan import check_extra  # noqa: PLC0415 - seldom needed

        check_extra()
    store = store_of(context)
    site = chosen_site(context)
    server = chosen_prometheus(context, prometheus, prometheus_auth)
    submissions = [
        one_run(store.resolve(word, newest=True), field="RUN", has="report")
        for word in runs or ["last"]
    ]
    diagnoses = [
        diagnose_run(state_of(store, submission), site=site, notice=notice, prometheus=server)
        for submission in submissions
    ]
    if len(diagnoses) == _COMPARED:
        from hpml_orchestrator.sweeps.reporting import RunsReport  # noqa: PLC0415 - loads scipy

        _show(RunsReport(*diagnoses), as_json=as_json, as_markdown=as_markdown, html=html)
        return
    (submission,), (diagnosis,) = submissions, diagnoses
    if wanted.anything:
        from hpml_orchestrator.cli import tuning  # noqa: PLC0415 - loads checks and sweeps

        if apply is not None:
            tuning.apply_changes(context, submission, diagnosis, apply, force=force)
        else:
            tuning.try_changes(
                context,
                submission,
                diagnosis,
                repeats=repeats,
                minutes=minutes,
                yes=yes,
                as_json=as_json,
            )
        return
    _show(Report(diagnosis), as_json=as_json, as_markdown=as_markdown, html=html)


def _show(
    shown: Report | RunsReport, *, as_json: bool, as_markdown: bool, html: str | None
) -> None:
    if html is not None:
        _write(html, shown.html())
    elif as_json:
        print_json(shown.to_dict())
    else:
        typer.echo((shown.markdown() if as_markdown else str(shown)).rstrip("\n"))


def _write(path: str, page: str) -> None:
    try:
        if os.path.isfile(path):
            with open(path, "rb") as before:
                if not before.read(_PAGE_BYTES).lower().startswith(b"<!doctype html"):
                    message = "exists and is not a page: name another file"
                    raise InputError(message, field="--html", value=path)
        write_text(path, page)
    except (OSError, RecordError) as error:
        message = "cannot be written: is its directory there and writable?"
        raise InputError(message, field="--html", value=path) from error
    notice(f"wrote {path}")


@dataclass(frozen=True)
class _Wanted:
    """What to do with the changes: `--apply`, `--try` and their options."""

    apply: str | None
    try_: bool
    force: bool = False
    repeats: int | None = None
    minutes: float | None = None
    yes: bool = False

    @property
    def anything(self) -> bool:
        """Whether they are written or tried, and no report is printed."""
        return self.apply is not None or self.try_

    def refuse_others(self, printed: Mapping[str, object], *, as_json: bool) -> None:
        """Refuse options that cannot be combined, or need another one.

        Raises:
            InputError: names one.
        """
        if self.try_:
            refuse_with("--try", {**printed, "--apply": self.apply, "--force": self.force})
            return
        of_trial = {"--repeats": self.repeats, "--minutes": self.minutes, "--yes": self.yes or None}
        needs = [(option, "--try") for option, value in of_trial.items() if value is not None]
        if self.apply is not None:
            refuse_with("--apply", {**printed, "--json": as_json})
        elif self.force:
            needs.append(("--force", "--apply FILE"))
        for option, other in needs:
            raise InputError(f"needs {other}", field=option, hint=f"hpml report last {other}")
