"""Tables of squeue and sacct with any of their columns, as records.

`slurm_parse` reads the columns that hpml's own status asks for, and nothing else. Here a table is
read by the names of its columns, such as `JobID` or `SubmitTime` (upper or lower case does not
matter), so that what a site or a person has printed can be read too.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from hpml_orchestrator.scheduler.accounting import (
    AccountedJob,
    AccountedStep,
    count_restarts,
    with_ended_start,
)
from hpml_orchestrator.scheduler.slurm_parse import Row, make_status, parse_exit, parse_time
from hpml_orchestrator.scheduler.slurm_states import parse_state
from hpml_orchestrator.scheduler.slurm_values import (
    parse_bytes,
    parse_count,
    parse_duration,
    parse_tres,
    plain,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hpml_orchestrator.scheduler.model import JobStatus

__all__ = ["parse_accounted", "parse_queued", "table"]

_ID = re.compile(
    r"(?P<base>\d+)(?:_(?P<task>\d+|\[[\d,:%\-]*\]))?(?:\+(?P<offset>\d+))?(?:\.(?P<step>\S+))?",
    re.ASCII,
)
_MEMORY_KINDS = frozenset({"mem", "vmem", "gres/gpumem"})


def table(text: str, columns: Sequence[str], separator: str = "|") -> Iterator[dict[str, str]]:
    r"""Yield the rows as values by column name in lower case; what is no row is left out.

    A row begins with a job's id and a separator, so that a newline in a name begins none. The
    last column holds whatever is left.

    >>> list(table("7|a\nb|RUNNING\nnoise\n", ["JobID", "JobName", "State"]))
    [{'jobid': '7', 'jobname': 'a\nb', 'state': 'RUNNING\nnoise'}]
    """
    names = [column.lower() for column in columns]
    start = rf"\n(?=\d+(?:[_+.][^\s{re.escape(separator)}]*)?{re.escape(separator)})"
    for record in re.split(start, text.removesuffix("\n"), flags=re.ASCII):
        values = record.split(separator, max(len(names) - 1, 0))
        if names and len(values) == len(names):
            yield dict(zip(names, values, strict=True))


def parse_queued(text: str, columns: Sequence[str], separator: str = "|") -> list[Row]:
    """Return the jobs of a table of squeue's; the column JobID or JobArrayID has to be there."""
    found = []
    for row in table(text, columns, separator):
        shown = (row.get("jobarrayid") or row.get("jobid") or "").strip()
        raw = row.get("jobidraw") or row.get("jobid") or shown
        if _ID.fullmatch(shown):
            found.append(Row(raw.strip(), shown, _status(shown, row)))
    return found


def parse_accounted(
    text: str, columns: Sequence[str], separator: str = "|"
) -> tuple[AccountedJob, ...]:
    """Return the jobs of a table of sacct's with their steps.

    The column JobID has to be there. A step belongs to the last job above it, as sacct prints
    them; the starts of a requeued job (`sacct --duplicates`) are numbered.
    """
    jobs: list[tuple[Mapping[str, str], list[AccountedStep]]] = []
    for row in table(text, columns, separator):
        found = _ID.fullmatch(row.get("jobid", "").strip())
        if not found:
            continue
        if found["step"] is None:
            jobs.append((row, []))
        elif jobs and jobs[-1][0]["jobid"].strip() == row["jobid"].strip().partition(".")[0]:
            jobs[-1][1].append(_step(found["step"], row))
    return count_restarts(_job(row, steps) for row, steps in jobs)


def _status(shown: str, row: Mapping[str, str]) -> JobStatus:
    def first(*names: str) -> str:
        return next((row[name].strip() for name in names if row.get(name)), "")

    started = parse_time(first("starttime", "start"))
    status = make_status(
        shown,
        first("state"),
        reason=first("reason"),
        code=parse_exit(first("exitcode", "exit_code")),
        nodes=first("nodelist"),
        submitted=parse_time(first("submittime", "submit")),
        started=started,
        ended=parse_time(first("endtime", "end")),
        restarts=parse_count(first("restartcnt", "restarts")) or 0,
        name=row.get("jobname", row.get("name", "")),
        directory=row.get("workdir", ""),
    )
    # Without a column of nodes nobody can tell a job that was cancelled while it waited from one
    # that began; one that runs has begun.
    if "nodelist" not in row and not status.state.waiting and not status.state.over:
        return replace(status, started=started)
    return status


def _job(row: Mapping[str, str], steps: list[AccountedStep]) -> AccountedJob:
    shown = row["jobid"].strip()
    parts = _ID.fullmatch(shown)
    task = parse_count(parts["task"] or "") if parts else None
    base = parts["base"] if parts else ""
    offset = parts["offset"] if parts else None
    cpu = _span(row, "totalcpu")
    return AccountedJob(
        status=with_ended_start(
            _status(shown, row), parse_time(row.get("start", "")), parse_time(row.get("end", ""))
        ),
        raw_id=row.get("jobidraw", shown).strip(),
        array_job_id=base if parts and parts["task"] else "",
        array_task=task,
        het_job_id=base if offset else "",
        het_offset=int(offset) if offset else None,
        user=plain(row.get("user", "")),
        account=plain(row.get("account", "")),
        partition=plain(row.get("partition", "")),
        qos=plain(row.get("qos", "")),
        cluster=plain(row.get("cluster", "")),
        elapsed_seconds=_span(row, "elapsed"),
        time_limit_seconds=_span(row, "timelimit") or _span(row, "timelimitraw"),
        cpu_seconds=cpu or sum(step.cpu_seconds or 0 for step in steps),
        requested_tres=parse_tres(row.get("reqtres", "")),
        allocated_tres=parse_tres(row.get("alloctres", "")),
        steps=tuple(steps),
    )


def _step(step_id: str, row: Mapping[str, str]) -> AccountedStep:
    raw = row.get("state", "").strip()
    state = parse_state(raw)
    code = parse_exit(row.get("exitcode", "")) if state.over else None
    rss = parse_bytes(row.get("maxrss", ""), "")
    return AccountedStep(
        step_id=step_id,
        name=row.get("jobname", ""),
        state=state,
        raw_state=raw,
        exit_code=code[0] if code else None,
        signal=code[1] if code else 0,
        nodes=plain(row.get("nodelist", "")),
        started=parse_time(row.get("start", "")),
        ended=parse_time(row.get("end", "")) if state.over else None,
        elapsed_seconds=_span(row, "elapsed"),
        tasks=parse_count(row.get("ntasks", "")),
        cpu_seconds=_span(row, "totalcpu"),
        user_seconds=_span(row, "usercpu"),
        system_seconds=_span(row, "systemcpu"),
        max_rss_bytes=rss,
        max_rss_node=plain(row.get("maxrssnode", "")),
        average_rss_bytes=parse_bytes(row.get("averss", ""), ""),
        allocated_tres=parse_tres(row.get("alloctres", "")),
        usage_max=_usage(row.get("tresusageinmax", "")),
        usage_total=_usage(row.get("tresusageintot", "")),
        output_total=_usage(row.get("tresusageouttot", "")),
    )


def _span(row: Mapping[str, str], name: str) -> float | None:
    return parse_duration(row.get(name, ""))


def _usage(text: str) -> dict[str, int]:
    """Sizes in bytes; CPU time is left out, user and system time say it better."""
    found: dict[str, int] = {}
    for part in text.split(","):
        kind, _, value = part.strip().rpartition("=")
        amount = parse_bytes(value, "") if kind in _MEMORY_KINDS else parse_count(value)
        if kind and kind != "cpu" and amount is not None:
            found[kind] = amount
    return found
