"""`squeue --json` and `sacct --json`, of every dialect, as the same records that text gives."""

from __future__ import annotations

from typing import Any

from hpml_orchestrator.scheduler.accounting import (
    AccountedJob,
    AccountedStep,
    count_restarts,
    with_ended_start,
)
from hpml_orchestrator.scheduler.slurm_json import (
    at,
    exit_of,
    job_id_of,
    listed,
    load,
    number,
    state_word,
    text,
    time_of,
    tres_of,
    whole,
)
from hpml_orchestrator.scheduler.slurm_parse import Row, make_status
from hpml_orchestrator.scheduler.slurm_states import parse_state

__all__ = ["parse_sacct_json", "parse_squeue_json"]

_MICROSECONDS = 1_000_000


def parse_squeue_json(said: str) -> list[Row]:
    """Return one row per job of `squeue --json`; what is no job is left out.

    Raises:
        SchedulerUnavailable: it is no JSON, or holds no jobs.
    """
    found = []
    for job in load(said, "jobs"):
        raw = whole(at(job, "job_id"))
        if raw is None:
            continue
        tasks = text(at(job, "array_task_string"))
        het = whole(at(job, "het_job_id"))
        shown = job_id_of(
            raw,
            whole(at(job, "array_job_id")),
            whole(at(job, "array_task_id")),
            tasks,
            het,
            whole(at(job, "het_job_offset")),
        )
        word = state_word(at(job, "job_state"))
        status = make_status(
            shown,
            word,
            reason=text(at(job, "state_reason")),
            code=exit_of(at(job, "exit_code"), parse_state(word)),
            nodes=text(at(job, "nodes")),
            submitted=time_of(at(job, "submit_time")),
            started=time_of(at(job, "start_time")),
            ended=time_of(at(job, "end_time")),
            restarts=whole(at(job, "restart_cnt")) or 0,
            name=_verbatim(at(job, "name")),
            directory=_verbatim(at(job, "current_working_directory")),
        )
        found.append(Row(str(raw), shown, status))
    return found


def parse_sacct_json(said: str) -> tuple[AccountedJob, ...]:
    """Return the jobs of `sacct --json` with their steps; what is no job is left out.

    Raises:
        SchedulerUnavailable: it is no JSON, or holds no jobs.
    """
    jobs = [job for job in load(said, "jobs") if whole(at(job, "job_id")) is not None]
    return count_restarts([_job(job) for job in jobs])


def _job(job: Any) -> AccountedJob:
    raw = whole(at(job, "job_id"))
    array, task = whole(at(job, "array", "job_id")), whole(at(job, "array", "task_id"))
    het, offset = whole(at(job, "het", "job_id")), whole(at(job, "het", "job_offset"))
    shown = job_id_of(raw, array, task, text(at(job, "array", "task")), het, offset)
    word = state_word(at(job, "state", "current"))
    limit = number(at(job, "time", "limit"))
    steps = tuple(_step(step) for step in listed(at(job, "steps")))
    # 22.05 counts no job's CPU time, only that of its steps.
    cpu = _seconds(at(job, "time", "total")) or sum(one.cpu_seconds or 0 for one in steps)
    started, ended = time_of(at(job, "time", "start")), time_of(at(job, "time", "end"))
    status = make_status(
        shown,
        word,
        reason=text(at(job, "state", "reason")),
        code=exit_of(at(job, "exit_code"), parse_state(word)),
        nodes=_nodes(at(job, "nodes")),
        submitted=time_of(at(job, "time", "submission")),
        started=started,
        ended=ended,
        restarts=whole(at(job, "restart_cnt")) or 0,
        name=_verbatim(at(job, "name")),
        directory=_verbatim(at(job, "working_directory")),
    )
    return AccountedJob(
        status=with_ended_start(status, started, ended),
        raw_id=str(raw),
        array_job_id=str(array) if array else "",
        array_task=task if array else None,
        het_job_id=str(het) if het else "",
        het_offset=(offset or 0) if het else None,
        user=text(at(job, "association", "user")) or text(at(job, "user")),
        account=text(at(job, "account")),
        partition=text(at(job, "partition")),
        qos=text(at(job, "qos")),
        cluster=text(at(job, "cluster")),
        elapsed_seconds=number(at(job, "time", "elapsed")),
        time_limit_seconds=None if limit is None else limit * 60,
        cpu_seconds=cpu,
        requested_tres=tres_of(at(job, "tres", "requested")),
        allocated_tres=tres_of(at(job, "tres", "allocated")),
        steps=steps,
    )


def _step(step: Any) -> AccountedStep:
    word = state_word(at(step, "state"))
    state = parse_state(word)
    code = exit_of(at(step, "exit_code"), state) if state.over else None
    most = tres_of(at(step, "tres", "requested", "max"))
    where = {
        text(at(one, "type")): text(at(one, "node"))
        for one in listed(at(step, "tres", "requested", "max"))
    }
    return AccountedStep(
        step_id=_step_id(at(step, "step", "id")),
        name=_verbatim(at(step, "step", "name")),
        state=state,
        raw_state=word,
        exit_code=code[0] if code else None,
        signal=code[1] if code else 0,
        nodes=_nodes(at(step, "nodes")),
        started=time_of(at(step, "time", "start")),
        ended=time_of(at(step, "time", "end")) if state.over else None,
        elapsed_seconds=number(at(step, "time", "elapsed")),
        tasks=whole(at(step, "tasks", "count")),
        cpu_seconds=_seconds(at(step, "time", "total")),
        user_seconds=_seconds(at(step, "time", "user")),
        system_seconds=_seconds(at(step, "time", "system")),
        max_rss_bytes=most.get("mem"),
        max_rss_node=where.get("mem", "") if "mem" in most else "",
        average_rss_bytes=tres_of(at(step, "tres", "requested", "average")).get("mem"),
        allocated_tres=tres_of(at(step, "tres", "allocated")),
        usage_max=_without_cpu(most),
        usage_total=_without_cpu(tres_of(at(step, "tres", "requested", "total"))),
        output_total=_without_cpu(tres_of(at(step, "tres", "consumed", "total"))),
    )


def _step_id(value: Any) -> str:
    """The step's own part: `batch` of `2.batch`, `0` of 0."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return text(value).rpartition(".")[2]


def _nodes(value: Any) -> str:
    return text(value) or text(at(value, "range"))


def _verbatim(value: Any) -> str:
    """A job may be called "none"."""
    return value if isinstance(value, str) else ""


def _seconds(value: Any) -> float | None:
    seconds, micro = number(at(value, "seconds")), number(at(value, "microseconds"))
    if seconds is None and micro is None:
        return None
    return (seconds or 0) + (micro or 0) / _MICROSECONDS


def _without_cpu(usage: dict[str, int]) -> dict[str, int]:
    # Versions differ in its unit, and user and system time say it better.
    return {kind: count for kind, count in usage.items() if kind != "cpu"}
