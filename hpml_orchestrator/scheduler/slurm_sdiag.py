"""How the controller is doing, from `sdiag`: threads, queues, cycles of the schedulers, calls.

Read from its text, which is all that 22.05 has, or from `sdiag --json`; 26.05's own metrics give
the same record (`slurm_metrics`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from hpml_orchestrator.scheduler.slurm_json import at, listed, load, text, time_of, whole

__all__ = ["Calls", "Diagnostics", "parse_sdiag", "parse_sdiag_json"]


@dataclass(frozen=True)
class Calls:
    """Remote procedure calls of one type or user: how many, and microseconds in all."""

    count: int
    total_microseconds: int

    @property
    def average_microseconds(self) -> int:
        """Rounded down, as sdiag does."""
        return self.total_microseconds // self.count if self.count else 0


@dataclass(frozen=True)
class Diagnostics:
    """What sdiag says; None where that version does not say it.

    Attributes:
        at, since: time of the answer and of the last reset, seconds since the epoch.
        server_threads: at work; many mean that the controller is busy.
        agent_queue, dbd_agent_queue: messages that wait for nodes, and for slurmdbd.
        jobs_submitted, jobs_started, jobs_completed, jobs_canceled, jobs_failed: since `since`.
        jobs_pending, jobs_running: counted now and then.
        main_last_us, main_max_us, main_mean_us, main_cycles, main_queue: of the main scheduler;
            `_us` is microseconds of one cycle.
        backfill_last_us, backfill_max_us, backfill_mean_us, backfill_cycles, backfill_queue: of
            the backfill scheduler.
        backfill_at: when it ran last; None for never.
        backfilled_jobs: jobs that it started since the controller started.
        calls_by_type, calls_by_user: remote procedure calls.
    """

    at: float | None = None
    since: float | None = None
    server_threads: int | None = None
    agent_queue: int | None = None
    dbd_agent_queue: int | None = None
    jobs_submitted: int | None = None
    jobs_started: int | None = None
    jobs_completed: int | None = None
    jobs_canceled: int | None = None
    jobs_failed: int | None = None
    jobs_pending: int | None = None
    jobs_running: int | None = None
    main_last_us: int | None = None
    main_max_us: int | None = None
    main_mean_us: int | None = None
    main_cycles: int | None = None
    main_queue: int | None = None
    backfill_last_us: int | None = None
    backfill_max_us: int | None = None
    backfill_mean_us: int | None = None
    backfill_cycles: int | None = None
    backfill_queue: int | None = None
    backfill_at: float | None = None
    backfilled_jobs: int | None = None
    calls_by_type: Mapping[str, Calls] = field(default_factory=dict)
    calls_by_user: Mapping[str, Calls] = field(default_factory=dict)


_CALL = re.compile(
    r"^\s+(\S+)\s+\(\s*\d+\)\s+count:(\d{1,18})\s+ave_time:\d+\s+total_time:(\d{1,18})", re.ASCII
)
_EPOCH = re.compile(r"\((\d{1,12})\)\s*$", re.ASCII)
_VALUE = re.compile(r"^\s*([^:]+?)\s*:\s*(-?\d{1,18})\s*$", re.ASCII)


def parse_sdiag(said: str) -> Diagnostics:
    """Return what the text of `sdiag` says; what it does not say is None."""
    part = ""
    found: dict[tuple[str, str], int] = {}
    times: dict[tuple[str, str], float] = {}
    calls: dict[str, dict[str, Calls]] = {"type": {}, "user": {}}
    for line in said.splitlines():
        call, value, epoch = _CALL.match(line), _VALUE.match(line), _EPOCH.search(line)
        if call:
            if part in calls:
                calls[part][call[1]] = Calls(int(call[2]), int(call[3]))
        elif value:
            found.setdefault((part, value[1].lower()), int(value[2]))
        elif epoch:
            label = re.split(r":|\s{2,}| at ", line.strip())[0].lower()
            times.setdefault((part, label), float(epoch[1]))
        else:
            part = _part(line, part)
    main, fill = "main", "backfill"
    return Diagnostics(
        at=times.get(("", "sdiag output")),
        since=times.get(("", "data since")),
        server_threads=found.get(("", "server thread count")),
        agent_queue=found.get(("", "agent queue size")),
        dbd_agent_queue=found.get(("", "dbd agent queue size")),
        jobs_submitted=found.get(("", "jobs submitted")),
        jobs_started=found.get(("", "jobs started")),
        jobs_completed=found.get(("", "jobs completed")),
        jobs_canceled=found.get(("", "jobs canceled")),
        jobs_failed=found.get(("", "jobs failed")),
        jobs_pending=found.get(("", "jobs pending")),
        jobs_running=found.get(("", "jobs running")),
        main_last_us=found.get((main, "last cycle")),
        main_max_us=found.get((main, "max cycle")),
        main_mean_us=found.get((main, "mean cycle"), 0 if (main, "max cycle") in found else None),
        main_cycles=found.get((main, "total cycles")),
        main_queue=found.get((main, "last queue length")),
        backfill_last_us=found.get((fill, "last cycle")),
        backfill_max_us=found.get((fill, "max cycle")),
        backfill_mean_us=found.get((fill, "mean cycle")),
        backfill_cycles=found.get((fill, "total cycles")),
        backfill_queue=found.get((fill, "last queue length")),
        backfill_at=times.get((fill, "last cycle when")) or None,
        backfilled_jobs=found.get((fill, "total backfilled jobs (since last slurm start)")),
        calls_by_type=calls["type"],
        calls_by_user=calls["user"],
    )


def parse_sdiag_json(said: str) -> Diagnostics:
    """Return what `sdiag --json` says.

    Raises:
        SchedulerUnavailable: it is no JSON, or holds no statistics.
    """
    (one, *_) = load(said, "statistics") or [{}]

    def count(name: str) -> int | None:
        return whole(at(one, name))

    def calls(name: str, key: str) -> dict[str, Calls]:
        return {
            text(at(call, key)): Calls(
                whole(at(call, "count")) or 0, whole(at(call, "total_time")) or 0
            )
            for call in listed(at(one, name))
            if text(at(call, key))
        }

    return Diagnostics(
        at=time_of(at(one, "req_time")),
        since=time_of(at(one, "req_time_start")),
        server_threads=count("server_thread_count"),
        agent_queue=count("agent_queue_size"),
        dbd_agent_queue=count("dbd_agent_queue_size"),
        jobs_submitted=count("jobs_submitted"),
        jobs_started=count("jobs_started"),
        jobs_completed=count("jobs_completed"),
        jobs_canceled=count("jobs_canceled"),
        jobs_failed=count("jobs_failed"),
        jobs_pending=count("jobs_pending"),
        jobs_running=count("jobs_running"),
        main_last_us=count("schedule_cycle_last"),
        main_max_us=count("schedule_cycle_max"),
        main_mean_us=count("schedule_cycle_mean"),
        main_cycles=count("schedule_cycle_total"),
        main_queue=count("schedule_queue_length"),
        backfill_last_us=count("bf_cycle_last"),
        backfill_max_us=count("bf_cycle_max"),
        backfill_mean_us=count("bf_cycle_mean"),
        backfill_cycles=count("bf_cycle_counter"),
        backfill_queue=count("bf_queue_len"),
        backfill_at=time_of(at(one, "bf_when_last_cycle")),
        backfilled_jobs=count("bf_backfilled_jobs"),
        calls_by_type=calls("rpcs_by_message_type", "message_type"),
        calls_by_user=calls("rpcs_by_user", "user"),
    )


def _part(line: str, part: str) -> str:
    """The part that a heading begins, else the one before."""
    for words, name in (
        ("main schedule statistics", "main"),
        ("backfilling stats", "backfill"),
        ("by message type", "type"),
        ("by user", "user"),
        ("pending rpc", "pending"),
        ("exit", "exit"),
    ):
        if words in line.lower():
            return name
    return part
