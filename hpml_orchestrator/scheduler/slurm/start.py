"""Ask Slurm when it would start a job: `sbatch --test-only`, which submits nothing.

It regards the queue, reservations, plugins and limits on submissions, but not `--hold`,
`--dependency` and limits on running jobs.
"""

from __future__ import annotations

import re
import tempfile
import time
from typing import TYPE_CHECKING

from hpml_orchestrator.records.texts import clock_text
from hpml_orchestrator.records.units import format_time
from hpml_orchestrator.scheduler.slurm.ask import ask
from hpml_orchestrator.scheduler.slurm.messages import transport_fault
from hpml_orchestrator.scheduler.slurm.parse import parse_time
from hpml_orchestrator.scheduler.slurm.records import parse_records

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpml_orchestrator.scheduler.command import Runner

NOW = "can start now"
_START = re.compile(r"^sbatch: Job \d+ to start at (\S+)", re.MULTILINE)
# Said while nodes are down or drained: sbatch itself takes such a job, which then waits.
_TAKEN = re.compile(r"not available|busy|unavailable", re.IGNORECASE)
_NOW_SECONDS = 60.0  # by which the controller's clock may differ from this machine's


def start_of(script: str, run: Runner, env: Mapping[str, str]) -> tuple[str, str]:
    """Return when Slurm would start a script's job, in words, and sbatch's messages if it refuses.

    Both are empty if Slurm does not say. Each call uses up one or two job ids.

    Raises:
        SchedulerUnavailable: a command does not exist or gave no answer in time.
    """
    with tempfile.NamedTemporaryFile("w", prefix="hpml-check-", suffix=".sh") as file:
        file.write(script)
        file.flush()

        def test(*options: str) -> tuple[float | None, str]:
            done = ask(run, ["sbatch", "--test-only", *options, file.name], env=env)
            answer = _START.search(done.stderr)
            unclear = transport_fault(done.stderr) or _TAKEN.search(done.stderr)
            refused = done.returncode > 0 and not unclear
            return parse_time(answer[1]) if answer else None, done.stderr * refused

        start, refusal = test()
        now = time.time()
        if start is None:
            return "", refusal
        if start <= now + _NOW_SECONDS:
            return NOW, ""
        done = ask(run, ["scontrol", "--all", "show", "reservation"], env=env)
        for record in parse_records(done.stdout):
            begin, end = parse_time(record["StartTime"]), parse_time(record["EndTime"])
            if begin is None or end is None or abs(start - end) > _NOW_SECONDS:
                continue
            text = f"waits for the end of {record['ReservationName']}, {clock_text(end)}"
            minutes = int(begin - now) // 60
            if minutes > 0 and (test(f"--time={minutes}")[0] or start) <= now + _NOW_SECONDS:
                text += f"; with at most {format_time(minutes * 60)} it can start now"
            return text, ""
        return f"expected start {clock_text(start)}", ""
