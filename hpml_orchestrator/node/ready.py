"""Wait until every node of the job is ready, or say why it will never be."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpml_orchestrator.errors import BindingError, HpmlError, StagingError
from hpml_orchestrator.placement.report import plan_lines
from hpml_orchestrator.records.store import Attempt

__all__ = ["wait_ready"]

_FIRST_POLL_SECONDS = 0.05
_LONGEST_POLL_SECONDS = 1.0
_NOTICE_SECONDS = 30.0


def wait_ready(
    attempt: str,
    nodes: str,
    agent_pid: str,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Return 0 once all nodes are ready.

    Args:
        attempt: the attempt's directory.
        nodes: how many nodes the job has.
        agent_pid: process id of the step that holds the agents, a sibling of this process.
        sleep: how to wait.
        clock: seconds, monotonic.

    Raises:
        StagingError: a node failed; its reason is in the message.
        BindingError: a node cannot place its ranks, and the job wants proof.
        HpmlError: the agents ended without a word.
    """
    directory = Path(attempt)
    wanted = int(nodes)
    pause = _FIRST_POLL_SECONDS
    noticed = clock()
    while True:
        ended = not _alive(int(agent_pid))  # before looking: what it wrote last is then there
        failed = Attempt(directory).markers("failed")
        if failed:
            told = [f"{one.get('node')}: {one.get('message')}" for one in failed]
            hint = next((str(one["hint"]) for one in failed if one.get("hint")), "")
            codes = {one.get("exit_code") for one in failed}
            kind = BindingError if codes == {BindingError.exit_code} else StagingError
            raise kind("; ".join(told), hint=hint)
        ready = Attempt(directory).markers("ready")
        if len(ready) >= wanted:
            _tell(ready)
            return 0
        if ended:
            raise HpmlError(
                f"the node agents ended before all nodes were ready ({len(ready)} of {wanted} are)",
                hint="what srun and the agents said stands above, in this output",
            )
        if clock() - noticed >= _NOTICE_SECONDS:
            noticed = clock()
            sys.stderr.write(f"hpml: {len(ready)} of {wanted} nodes are ready\n")
        sleep(pause)
        pause = min(pause * 1.5, _LONGEST_POLL_SECONDS)


def _tell(ready: list[dict[str, Any]]) -> None:
    total = sum(int(one.get("bytes", 0)) for one in ready)
    files = sum(int(one.get("files", 0)) for one in ready)
    slowest = max(float(one.get("seconds", 0.0)) for one in ready)
    staged = (
        f", staged {files} file{'s' * (files != 1)}, {total} bytes, slowest {slowest:.2f} s"
        if files
        else ""
    )
    placed = [
        (str(one.get("node")), one["placed"])
        for one in ready
        if isinstance(one.get("placed"), dict)
    ]
    lines = [f"{len(ready)} node{'s' * (len(ready) > 1)} ready{staged}", *plan_lines(placed)]
    sys.stderr.write("".join(f"hpml: {line}\n" for line in lines))


def _alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for counts as gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stream:
            return stream.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False
    except OSError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True
