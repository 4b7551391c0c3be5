"""The end of a job: determine its cause, verify the binding, and record both.

Slurm reports the reason for ending a job only in the job's output, and a launcher's exit status
does not identify the rank that failed first. So both are read from the output.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpml_orchestrator.errors import BindingError, RecordError, StagingError
from hpml_orchestrator.node import continuation
from hpml_orchestrator.placement import planfile
from hpml_orchestrator.placement.verify import NodeProof, proof_of_json, table, wrong_rows
from hpml_orchestrator.records import feed
from hpml_orchestrator.records.files import write_json
from hpml_orchestrator.records.job import NodeJob
from hpml_orchestrator.records.run import Attempt, Run, TrainingProgress, progress_of, written_since
from hpml_orchestrator.records.schema import beside
from hpml_orchestrator.records.texts import (
    ENDING_WORDS,
    memory_fault,
    printable,
    seconds_text,
    signal_name,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hpml_orchestrator.records.job import Checkpoint, Job
    from hpml_orchestrator.records.schema import Marker, ProofRecord

_SIGNALLED = 128
_KILLED = _SIGNALLED + signal.SIGKILL
_CAN_REACT = ("time_limit", "preemption", "requested")  # ranks that hang cannot

# `slurmstepd: error: *** JOB 5 ON node1 CANCELLED AT 2026-11-22T11:04:23 DUE TO TIME LIMIT ***`,
# the same from 22.05 to 26.05; local jobs have the line from their supervisor.
_CANCELLED = r"\*\*\* (JOB|STEP) {}\b\S* ON \S+ CANCELLED AT \S+(?: DUE TO ([A-Z ]+))?"
_CAUSES = {
    "TIME LIMIT": "TIMEOUT",
    "PREEMPTION": "PREEMPTED",
    "JOB REQUEUE": "REQUEUED",
    "NODE FAILURE": "NODE_FAIL",
}
_FAILED_NODE = re.compile(r"^srun: error: Node failure on (\S{1,255})$", re.MULTILINE)
_STOPPED = {
    **{why: (state, ENDING_WORDS[state]) for state, why in continuation.REASONS.items()},
    "hang": ("FAILED", "ranks hung"),
    "requested": ("FAILED", "stopped as requested"),
}
"""State and reason of an attempt whose ranks were asked to stop, by why."""
_UNSAVED = "nothing was saved below"
_SAVE_THERE = "have it save to {checkpoint.dir}, or set checkpoint.directory to where it saves"
# `srun: error: node1: tasks 2-3: Exited with exit code 7`, or strsignal's text of a signal.
# Programs may print anything, so every repetition is bounded: no output takes long to search.
_SRUN = (
    r"^srun: error: \S{1,255}: tasks? (?P<rank>\d{1,9})[\d,-]{0,255}: "
    r"(?:Exited with exit code (?P<code>\d{1,3}\b)|(?P<word>\w[\w -]{0,40}))"
)
_MPI = (
    r"Process name: (?:\[.{0,40},)?(?P<rank>\d{1,9})\]?\s{1,9}"
    r"Exit code: {1,9}(?P<code>\d{1,3}\b)"
)
_MPI_SIGNAL = (
    r"process rank (?P<rank>\d{1,9}) with PID \d{1,9} on node \S{1,255} "
    r"exited on signal (?P<signal>\d{1,3}\b)"
)
_TORCHRUN = (
    r"^Root Cause [^\0]{0,2000}?^ *rank +: (?P<rank>\d{1,9}) [^\0]{0,500}?"
    r"^ *exitcode +: (?P<code>-?\d{1,3}\b)"
)
_FAILED_RANK = {
    "srun": (_SRUN,),
    "torchrun": (_TORCHRUN,),
    "mpirun": (_MPI, _MPI_SIGNAL),
    "horovodrun": (_MPI, _MPI_SIGNAL),
}
_SIGNAL_WORDS = {signal.strsignal(number): number for number in range(1, signal.NSIG)}
_CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
# `slurmstepd: error: Detected 1 oom_kill event in StepId=5.0`, up to 22.05 with a hyphen.
_KILLED_FOR_MEMORY = re.compile(r"slurmstepd\S{0,255}: error: Detected \d{1,9} oom[-_]kill event")

# Messages of failing programs. torch and torchrun name the rank at the beginning of a line.
_RANK = re.compile(r"\[(?:rank|default)(\d{1,9})\]: ?")
_TRACEBACK = "Traceback (most recent call last)"
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:: .*)?")
# Exceptions of ranks that lost a failed rank, and of the launcher.
_FOLLOWS = re.compile(
    r"ChildFailedError|SignalException|Dist(?:Backend|Network)Error|BrokenPipe|Broken pipe"
    r"|[Cc]onnection (?:closed|reset|refused|aborted)|Connection(?:Reset|Refused|Aborted)Error"
)
_COMPLAINT = re.compile(
    r"(?!srun: |slurmstepd\S*: )\S+: error: .+"  # argparse, and hpml's own commands in the script
    r"|\S*python[\d.]*: (?:No module|can't|Error while) .+"
    r"|hpml-bind: .+|\S+: .*command not found|what\(\): .+|Fatal Python error: .+"
)
_COMPLAINT_LINES = 200
_ESCAPES = re.compile(r"\x1b\[[\d;]*m")
_SAID_CHARS = 240


class Ending(NamedTuple):
    """How an attempt ended."""

    exit_code: int  # the script's: if known, the failed rank's status, or 128 plus its signal
    state: str  # Slurm's word
    reason: str  # in words


def finish(attempt: str, submission: str, code: str, reason: str = "") -> int:
    """Report wrong bindings, record how the attempt ended, print the script's status.

    Writes `ended.json` and the event `ended`.

    Args:
        attempt: the attempt's directory.
        submission: the directory of `agent.json`.
        code: exit status of the script.
        reason: why it ended, if the script has determined it.
    """
    directory = Path(attempt)
    job_id = os.environ.get("SLURM_JOB_ID", "")
    records = Attempt(directory)
    output = records.output_end(Path("/proc/self/fd/2"))
    job = _job(Path(submission))
    launcher: str = job.launcher if job else ""
    if records.markers("failed"):
        launcher = ""  # no rank has started: what srun reports is the step of the agents
    end = ending(int(code), output, job_id=job_id, launcher=launcher, reason=reason)
    # A crash in Python's own shutdown says nothing about the training, so name it as what it is.
    if end.exit_code - _SIGNALLED in _CRASHES and _has_result(records):
        hint = "as when Python itself crashes at its end: finish the program with os._exit(0)"
        end = end._replace(reason=f"{end.reason} after the result was recorded ({hint})")
    future: dict[str, object] = {}
    if job and job.checkpoint.enabled:
        end, future = _future(records, job.checkpoint, end)
    completed = end.exit_code == 0 and not future.get("why")
    lines, failed = verify_binding(records.plans(), records.proofs(), completed=completed)
    sys.stderr.write("".join(f"hpml: {line}\n" for line in lines))
    misplaced = failed or end.exit_code == BindingError.exit_code
    # Only where nothing more specific explains the end.
    if misplaced and not reason and end.state in ("COMPLETED", "FAILED"):
        end = Ending(BindingError.exit_code, "FAILED", "binding")
    lines, missing = verify_results(records.markers("collected"), completed=completed)
    sys.stderr.write("".join(f"hpml: {line}\n" for line in lines))
    if missing and end.state == "COMPLETED":
        end = Ending(StagingError.exit_code, "FAILED", "results were not collected")
    # All agents have ended. Their rendezvous files hold the secret of the job's chains.
    shutil.rmtree(directory / "chain", ignore_errors=True)
    sys.stdout.write(f"{end.exit_code}\n")
    if future.get("why"):  # launchers print a lot about ranks that were ended
        outcome = "the run continues" if future["goes_on"] else "the run does not continue"
        if _UNSAVED in end.reason and _SAVE_THERE not in end.reason:
            outcome += f"; if the program can save, {_SAVE_THERE}"
        sys.stderr.write(f"hpml: {printable(end.reason)}: {outcome}\n")
    if future.get("ignored"):
        sys.stderr.write(f"hpml: {future['ignored']}\n")
    now = time.time()
    write_json(directory / "ended.json", {**end._asdict(), **future, "time": round(now, 6)})
    log = directory / "events" / "batch.jsonl"
    feed.append(log, "ended", node="batch", now=now, **end._asdict())
    return 0


def _job(submission: Path) -> Job | None:
    """Return the job; None if its file is gone: the end of the attempt is recorded anyway."""
    try:
        return NodeJob.read(submission).job
    except RecordError as error:
        sys.stderr.write(f"hpml: {error}\n")
        return None


def _future(records: Attempt, options: Checkpoint, end: Ending) -> tuple[Ending, dict[str, object]]:
    """Decide whether the run continues; return the ending that follows, and fields to record."""
    reached = progress_of(records)
    flags: list[bool] = []
    best: int | None = None
    directory = os.environ.get("HPML_CHECKPOINT_DIR", "")
    for earlier in Run(records.directory.parents[1]).attempts():
        ended = earlier.ended or {}
        if earlier.number < records.number:
            step = ended["step"] if "step" in ended else progress_of(earlier).step
            flags.append(bool(ended.get("progress", step is None or step > (best or 0))))
            best = max((one for one in (best, step) if one is not None), default=None)
    if reached.step is not None:
        flags.append(best is None or reached.step > best)
    else:
        # Programs that report no steps make progress if they write to their checkpoint directory.
        # Compare times of files with each other: this node's clock may differ from the server's.
        began = os.stat(records.directory / "head.json").st_mtime
        flags.append(bool(directory) and written_since(directory, began))
    decision = continuation.decide(
        options,
        state=end.state,
        exit_code=end.exit_code,
        asked=str((records.stop_request() or {}).get("reason", "")),
        stopping=reached.stopping,
        channel=reached.channel,
        progress=flags,
    )
    future: dict[str, object] = {
        "goes_on": decision.goes_on,
        "why": decision.why,
        "step": reached.step,
        "progress": flags[-1],
        "slowest_save": reached.slowest_save,
        "slowest_step": reached.slowest_step,
        **_ignored(records, reached, end),
    }
    unsaved = decision.why and directory and not any(flags) and not written_since(directory, 0.0)
    stays = f"{decision.stays}: {_SAVE_THERE}" if unsaved and decision.stays else decision.stays
    if stays:
        future["stays"] = stays
    if decision.why and end.state in ("COMPLETED", "FAILED"):
        state, words = _STOPPED[decision.why]
        if end.exit_code == 0:
            state = "REQUEUED" if decision.goes_on else state
        elif "SIGKILL" not in end.reason:  # agents send it to ranks that have not stopped
            words = f"{words}: {end.reason}"
        end = Ending(end.exit_code, state, words)
    if unsaved:
        end = end._replace(reason=f"{end.reason}, {_UNSAVED} {directory}")
    if decision.why and not decision.goes_on:
        reason = f"{end.reason}; {stays}" if stays else end.reason
        end = Ending(end.exit_code or continuation.EXIT_CONTINUED, end.state, reason)
    return end, future


def _ignored(records: Attempt, reached: TrainingProgress, end: Ending) -> dict[str, str]:
    """Return a sentence to record if the program ignored the request to stop; else nothing."""
    asked = (records.stop_request() or {}).get("reason")
    # Agents send SIGKILL to ranks that have not stopped in time.
    if asked not in _CAN_REACT or reached.stopping or end.exit_code != _KILLED:
        return {}
    lost = "the work since its last checkpoint is lost"
    if reached.saved_at is not None:
        seconds = seconds_text(max(0.0, time.time() - reached.saved_at))
        lost = f"{seconds} since its last checkpoint are lost"
    return {
        "ignored": "your program did not react to the request to stop and was ended; "
        f"{lost}; hpml_checkpoint.py shows how"
    }


def note_signal(attempt: str, name: str) -> int:
    """Record that the script passed a signal on to the ranks."""
    log = Path(attempt) / "events" / "batch.jsonl"
    feed.append(log, "signal", node="batch", name=f"SIG{name}", count=1)
    return 0


def ending(
    status: int, output: str, *, job_id: str, launcher: str = "", reason: str = ""
) -> Ending:
    """Determine how an attempt ended.

    Args:
        status: of the script.
        output: the job's output, or the end of it.
        job_id: the job's; the file may contain other jobs' output.
        launcher: the job's.
        reason: why it ended, if the script has determined it.
    """
    cancelled = re.finditer(_CANCELLED.format(re.escape(job_id)), output)
    causes = [(match[1], match[2] or "") for match in cancelled]
    # srun exits with 0 when a node fails, at least up to 22.05
    if status == 0 and not any(cause.startswith("NODE FAILURE") for _, cause in causes):
        return Ending(0, "COMPLETED", "completed")
    # Slurm's reason comes before a failed rank: ranks that are ended at a time limit fail as well.
    for known, state in _CAUSES.items():
        if any(cause.startswith(known) for _, cause in causes):
            named = _FAILED_NODE.search(output) if state == "NODE_FAIL" else None
            words = f"node {named[1]} failed" if named else ENDING_WORDS[state]
            return Ending(status or 1, state, words)
    # Slurm ends all ranks then, and the launcher reports one that may be innocent.
    failed, fault = _failed_rank(status, output, launcher), memory_fault(output, job_id)
    if fault and not (failed and failed.state == "OUT_OF_MEMORY"):
        return Ending(status, "OUT_OF_MEMORY", fault)
    if any(whole == "JOB" for whole, _ in causes):
        return Ending(status, "CANCELLED", "cancelled")
    if reason:
        return Ending(status, "FAILED", reason)
    return failed or Ending(status, "FAILED", _complaint(output, status) or "failed")


def _failed_rank(status: int, output: str, launcher: str) -> Ending | None:
    """Return the ending of a job with a failed rank: the one that its launcher reports first.

    srun exits with the highest status of its ranks, so srun did not print a line with a higher one.
    """
    matches = (
        match
        for pattern in _FAILED_RANK.get(launcher, ())
        for match in re.finditer(pattern, output, re.MULTILINE)
    )
    for match in matches:
        named = match.groupdict()
        rank = match["rank"]
        word = (named.get("word") or "").strip()
        if word.startswith("Out Of Memory"):
            return Ending(status, "OUT_OF_MEMORY", f"rank {rank} ran out of memory")
        code = int(named.get("code") or 0)
        number = int(named.get("signal") or _SIGNAL_WORDS.get(word, 0) or max(0, -code))
        if number >= signal.NSIG:
            continue  # no launcher printed this
        if launcher == "srun" and max(code, number and _SIGNALLED + number) > status:
            continue
        if number == signal.SIGKILL and _KILLED_FOR_MEMORY.search(output):
            words = f"rank {rank} ran out of memory"
            return Ending(_SIGNALLED + number, "OUT_OF_MEMORY", words)
        if number:
            words = f"rank {rank} ended by {signal_name(number)}"
            if number == signal.SIGKILL:
                words += ", as when memory runs out"
            code = _SIGNALLED + number
        elif code:
            words = f"rank {rank} exited with code {code}"
        else:
            continue
        message = _complaint(output, code, rank)
        return Ending(code, "FAILED", f"{words}: {message}" if message else words)
    return None


def _complaint(output: str, code: int, rank: str = "") -> str:
    """Return the line in which a program reported why it failed; empty if there is none."""
    lines = [line.rstrip("\r") for line in _ESCAPES.sub("", output).split("\n")]
    message = _exception(lines, rank) if code == 1 else ""
    for line in [] if message else lines[-_COMPLAINT_LINES:]:
        text = _RANK.sub("", line, count=1).strip()
        if _COMPLAINT.fullmatch(text):
            message = text
    if "CUDA out of memory" in message:
        message = f"GPU memory is full, use a smaller batch per rank: {message}"
    message = printable(message)
    return message if len(message) <= _SAID_CHARS else f"{message[:_SAID_CHARS]}…"


def _exception(lines: list[str], rank: str) -> str:
    """Return the last line of the traceback of a rank that failed; empty if there is none.

    Several ranks may write at the same time, so a traceback may be interrupted by other lines.
    """
    begun: set[str] = set()  # ranks whose traceback is not complete yet
    found: list[tuple[str, str]] = []
    for line in lines:
        match = _RANK.match(line)
        writer = match[1] if match else ""
        text = line[match.end() :] if match else line
        if _TRACEBACK in text:
            begun.add(writer)
        elif writer in begun and _EXCEPTION.fullmatch(text):
            begun.remove(writer)
            found.append((writer, text))
    # The launcher may name a rank that only lost its connection to the failed one. If there are
    # several exceptions, the last one counts: a program may log others and continue.
    causes = [one for one in found if not _FOLLOWS.search(one[1])]
    own = [one for one in causes if one[0] == rank]
    losses = [one for one in found if "ChildFailedError" not in one[1]]
    chosen = own[-1:] or causes[-1:] or losses[:1]
    if not chosen:
        return ""
    ((writer, text),) = chosen
    return text if writer in ("", rank) else f"rank {writer} raised {text}"


def _has_result(attempt: Attempt) -> bool:
    try:
        written = os.stat(attempt.directory.parents[1] / "result.json").st_mtime
        if written >= os.stat(attempt.directory / "head.json").st_mtime:
            return True
    except OSError:
        pass
    recent = feed.read_recent(attempt.directory / "events")
    return any(event.data.get("final") for event in recent)


def verify_binding(
    plans: Mapping[str, str], proofs: Iterable[ProofRecord], *, completed: bool
) -> tuple[list[str], bool]:
    """Combine the proofs of all nodes.

    Args:
        plans: the text of each node's plan, by node.
        proofs: the agents' proofs, as plain data.
        completed: whether the script succeeded; if not, a rank may be missing because of that.

    Returns:
        The lines to print, none if all ranks are bound as planned; and whether the job fails
        because of the binding (`verify: strict`).
    """
    judged = _proofs(proofs)
    rows: list[tuple[str, ...]] = []
    ranks = right = wrong = 0
    failed = False
    for node, text in plans.items():
        try:
            head = planfile.header(text)
        except ValueError:
            continue  # a damaged plan: nothing to verify
        verify = head.get("verify", "off")
        if verify == "off" or head["policy"] == "none":
            continue
        expected = int(head["ranks"])
        proof = judged.get(node) or NodeProof(node, head["policy"], verify, expected)
        faults = wrong_rows(proof)
        missing = max(0, expected - len(proof.ranks)) if completed else 0
        if missing:
            message = f"{expected - missing} of its {expected} ranks recorded their binding"
            faults.append(("-", node, "-", "-", "-", message))
        if verify == "strict":  # else the agents have reported it while the ranks ran
            rows += faults
            failed = failed or bool(faults)
        elif missing:
            rows.append(faults[-1])
        ranks += len(proof.ranks) + missing
        right += sum(not rank.wrong for rank in proof.ranks)
        wrong += sum(bool(rank.wrong) for rank in proof.ranks)
    if not wrong and not rows:
        return [], failed
    count = (
        f"{wrong} of {ranks} ranks WRONG" if wrong else f"{right} of {ranks} ranks bound as planned"
    )
    return [f"binding: {count}", *(table(rows) if rows else ())], failed


def verify_results(nodes: Iterable[Marker], *, completed: bool) -> tuple[list[str], bool]:
    """Check that all results were collected.

    Args:
        nodes: the record of each node.
        completed: whether the script succeeded; if not, its ranks may have written nothing yet.

    Returns:
        The lines to print, and whether results are missing.
    """
    rows = [row for node in nodes for row in node.get("entries", ())]
    missing = any(row.get("problem") for row in rows)
    lines = []
    if completed:
        found = {row["source"] for row in rows if row["path"] or row["problem"]}
        for source in dict.fromkeys(row["source"] for row in rows if row["source"] not in found):
            there = beside(row for row in rows if row["source"] == source)
            lines.append(f"NOT collected: no node has {source}{there}")
    return lines, missing or bool(lines)


def _proofs(proofs: Iterable[ProofRecord]) -> dict[str, NodeProof]:
    judged = {}
    for record in proofs:
        try:
            proof = proof_of_json(record)
        except ValueError:
            continue
        judged[proof.node] = proof
    return judged
