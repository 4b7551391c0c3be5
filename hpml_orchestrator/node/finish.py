"""The last act of a job: say what ended it, and write that down.

Slurm tells nobody but the job's output why it ends a job, and no launcher's status says which rank
failed first. So both are read from what they wrote there.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpml_orchestrator.errors import BindingError, HpmlError
from hpml_orchestrator.placement import planfile
from hpml_orchestrator.placement.proof import NodeProof, proof_of_json
from hpml_orchestrator.placement.told import table, wrong_rows
from hpml_orchestrator.records import events
from hpml_orchestrator.records.files import read_json, write_json
from hpml_orchestrator.records.run import Attempt

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "Ending",
    "Verdict",
    "ending",
    "finish",
    "note_signal",
    "verdict",
]

_READ_BYTES = 1024**2
_SIGNALLED = 128

# `slurmstepd: error: *** JOB 5 ON node1 CANCELLED AT 2026-11-22T11:04:23 DUE TO TIME LIMIT ***`,
# the same from 22.05 to 26.05; local jobs have the line from their supervisor.
_CANCELLED = r"\*\*\* (JOB|STEP) {}\b\S* ON \S+ CANCELLED AT \S+(?: DUE TO ([A-Z ]+))?"
_CAUSES = {
    "TIME LIMIT": ("TIMEOUT", "time limit"),
    "PREEMPTION": ("PREEMPTED", "preempted"),
    "JOB REQUEUE": ("REQUEUED", "requeued"),
    "NODE FAILURE": ("NODE_FAIL", "a node failed"),
}
# `srun: error: node1: tasks 2-3: Exited with exit code 7`, or what strsignal says of a signal.
_SRUN = (
    r"^srun: error: \S+: tasks? (?P<rank>\d+)[\d,-]*: "
    r"(?:Exited with exit code (?P<code>\d+)|(?P<word>\w[\w ]*))"
)
_MPI = r"Process name: (?:\[.*,)?(?P<rank>\d+)\]?\s+Exit code:\s+(?P<code>\d+)"
_MPI_SIGNAL = (
    r"process rank (?P<rank>\d+) with PID \d+ on node \S+ exited on signal (?P<signal>\d+)"
)
_TORCHRUN = r"^Root Cause [^\0]*?^\s*rank\s+: (?P<rank>\d+) [^\0]*?^\s*exitcode\s+: (?P<code>-?\d+)"
_FAILED_RANK = {
    "srun": (_SRUN,),
    "torchrun": (_TORCHRUN,),
    "mpirun": (_MPI, _MPI_SIGNAL),
    "horovodrun": (_MPI, _MPI_SIGNAL),
}
_SIGNAL_WORDS = {signal.strsignal(number): number for number in range(1, signal.NSIG)}


class Ending(NamedTuple):
    """How an attempt ended.

    Attributes:
        exit_code: what the script shall exit with: the failed rank's own status, or 128 and the
            number of its signal, where that is known.
        state: Slurm's word.
        reason: in words.
    """

    exit_code: int
    state: str
    reason: str


def ending(
    status: int, output: str, *, job_id: str, launcher: str = "", reason: str = ""
) -> Ending:
    """Say how an attempt ended.

    Args:
        status: of the script.
        output: what the job wrote, or the end of it.
        job_id: the job's, for other jobs' output may stand in it.
        launcher: the job's.
        reason: why, where the script knows better than its status.
    """
    if status == 0:
        return Ending(0, "COMPLETED", "completed")
    cancelled = re.finditer(_CANCELLED.format(re.escape(job_id)), output)
    causes = [(match[1], match[2] or "") for match in cancelled]
    for known, (state, words) in _CAUSES.items():
        if any(cause.startswith(known) for _, cause in causes):
            return Ending(status, state, words)
    if any(whole == "JOB" for whole, _ in causes):
        return Ending(status, "CANCELLED", "cancelled")
    return (not reason and _failed_rank(status, output, launcher)) or Ending(
        status, "FAILED", reason or "failed"
    )


def _failed_rank(status: int, output: str, launcher: str) -> Ending | None:
    """Return the ending of a job of which a rank failed: the one that its launcher names first.

    The status of srun is the highest of its ranks', so a line with a higher one is not its own.
    """
    matches = (
        match
        for pattern in _FAILED_RANK.get(launcher, ())
        for match in re.finditer(pattern, output, re.MULTILINE)
    )
    for match in matches:
        named = match.groupdict()
        word = (named.get("word") or "").strip()
        if word.startswith("Out Of Memory"):
            return Ending(status, "OUT_OF_MEMORY", f"rank {match['rank']} ran out of memory")
        code = int(named.get("code") or 0)
        number = int(named.get("signal") or _SIGNAL_WORDS.get(word, 0) or max(0, -code))
        if launcher == "srun" and max(code, number and _SIGNALLED + number) > status:
            continue
        if number:
            words = f"rank {match['rank']} ended by {signal.Signals(number).name}"
            return Ending(_SIGNALLED + number, "FAILED", words)
        if code:
            return Ending(code, "FAILED", f"rank {match['rank']} exited with code {code}")
    return None


def finish(attempt: str, code: str, reason: str = "", launcher: str = "") -> int:
    """Say whether the ranks ran as planned, write down how the attempt ended, print its status.

    What is written are `ended.json` and the event.

    Args:
        attempt: the attempt's directory.
        code: exit status of the script.
        reason: why, where the script knows better than its status.
        launcher: the job's.
    """
    directory = Path(attempt)
    job_id = os.environ.get("SLURM_JOB_ID", "")
    output = _output(directory)
    end = ending(int(code), output, job_id=job_id, launcher=launcher, reason=reason)
    failed = _tell_bindings(Attempt(directory), completed=end.exit_code == 0)
    misplaced = failed or end.exit_code == BindingError.exit_code
    if misplaced and not reason and end.state in ("COMPLETED", "FAILED"):
        end = Ending(BindingError.exit_code, "FAILED", "binding")
    sys.stdout.write(f"{end.exit_code}\n")
    # The agents are gone, also those that were killed: what they told each other is of no use.
    shutil.rmtree(directory / "chain", ignore_errors=True)
    now = time.time()
    write_json(directory / "ended.json", {**end._asdict(), "time": round(now, 6)})
    log = directory / "events" / "batch.jsonl"
    events.append(log, "ended", node="batch", now=now, **end._asdict())
    return 0


def note_signal(attempt: str, name: str) -> int:
    """Put on record that the script passed a signal on to the ranks."""
    log = Path(attempt) / "events" / "batch.jsonl"
    events.append(log, "signal", node="batch", name=f"SIG{name}", count=1)
    return 0


def _output(attempt: Path) -> str:
    """Return what this attempt wrote, its last MiB at most; empty where that is no file."""
    try:
        began = int(read_json(attempt / "head.json")["output_bytes"])
        with open(f"/proc/self/fd/{sys.stderr.fileno()}", "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(began, size - _READ_BYTES))
            return stream.read(_READ_BYTES).decode("utf-8", "replace")
    except (HpmlError, OSError, KeyError, ValueError):
        return ""


def _tell_bindings(attempt: Attempt, *, completed: bool) -> bool:
    """Tell where the ranks of all nodes ran; returns whether the job fails for it."""
    plans = attempt.plans()
    if not plans:
        return False

    found = verdict(plans, attempt.proofs(), completed=completed)
    sys.stderr.write("".join(f"hpml: {line}\n" for line in found.lines))
    return found.failed


@dataclass(frozen=True)
class Verdict:
    """What is told at the end of a job.

    Attributes:
        lines: for people; none where there is nothing to say.
        failed: whether the job wants proof, and something is wrong.
    """

    lines: tuple[str, ...]
    failed: bool


def verdict(
    plans: Mapping[str, str], proofs: Iterable[dict[str, Any]], *, completed: bool
) -> Verdict:
    """Join what the nodes' agents have judged.

    Args:
        plans: the text of each node's plan, by node.
        proofs: what the agents wrote down, as plain data.
        completed: whether the script ended well; else a rank may be missing because the job failed
            before, and is no fault of its own.
    """
    found = _proofs(proofs)
    rows: list[tuple[str, ...]] = []
    ranks = right = wrong = 0
    strict = False
    for node, text in plans.items():
        head = _header(text)
        if head.get("verify", "off") == "off" or head["policy"] == "none":
            continue
        expected = int(head["ranks"])
        proof = found.get(node)
        if proof is None:
            proof = NodeProof(node, head["policy"], head["verify"], expected)
        missing = expected - len(proof.ranks) if completed else 0
        faults = wrong_rows(proof)
        if missing > 0:
            faults.append(("-", node, "-", "-", "-", _missing(missing, expected)))
        if head["verify"] == "strict":  # else the agents have told it while the ranks ran
            rows += faults
        elif missing > 0:
            rows.append(faults[-1])
        ranks += len(proof.ranks) + max(missing, 0)
        faulty = sum(bool(one.wrong) for one in proof.ranks)
        wrong, right = wrong + faulty, right + len(proof.ranks) - faulty
        strict = strict or (head["verify"] == "strict" and bool(faults))
    if not wrong and not rows:
        return Verdict((), strict)
    told = (
        f"{wrong} of {ranks} ranks WRONG"
        if wrong
        else f"{right} of {ranks} ranks where they should be"
    )
    return Verdict((f"binding: {told}", *(table(rows) if rows else ())), strict)


def _proofs(proofs: Iterable[dict[str, Any]]) -> dict[str, NodeProof]:
    found = {}
    for data in proofs:
        try:
            proof = proof_of_json(data)
        except ValueError:
            continue
        found[proof.node] = proof
    return found


def _header(text: str) -> dict[str, str]:
    """Return the first line of a plan; nothing to verify where it is damaged."""
    try:
        return planfile.header(text)
    except ValueError:
        return {}


def _missing(count: int, expected: int) -> str:
    if expected == 1:
        return "its rank was never recorded"
    many = "none" if count == expected else f"{expected - count}"
    return f"{many} of its {expected} ranks {'was' if expected - count == 1 else 'were'} recorded"
