"""Exit statuses of `hpml`, and what each of them means."""

from __future__ import annotations

import signal

from hpml_orchestrator.errors import HpmlError

__all__ = ["EXIT_INTERNAL", "EXIT_INTERRUPTED", "EXIT_NOT_WRITTEN", "exit_statuses"]

EXIT_INTERNAL = 70
EXIT_STUCK = 75
EXIT_NOT_WRITTEN = 74
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM

_OTHERS = {
    0: "done; for `run` and `wait`: the job completed",
    EXIT_INTERNAL: "a fault of hpml's; `--debug` shows where",
    EXIT_NOT_WRITTEN: "standard output cannot be written; a submission that succeeded exits with 0 "
    "all the same, and names the job on standard error",
    EXIT_STUCK: "of `hpml export node`: a driver's call does not return; start it again",
    EXIT_INTERRUPTED: "Ctrl-C: the job, if there is one, goes on; its id is told; of `hpml stage`: "
    "nothing half-done is left",
    EXIT_TERMINATED: "SIGTERM; of `hpml stage`: nothing half-done is left (129 after SIGHUP)",
}
_MORE = {
    1: "; for `doctor`: something is missing",
    5: "; a submission with `hpml submit --resume RUN`; for `cancel` also: a run that is being "
    "submitted has no job to cancel yet",
    8: "; of `hpml pack`: a tree could not be packed, or a pack is damaged; of "
    "`hpml stage verify`: staged data differ from what came",
    79: ": the status of a job's script, not of hpml",
}


def exit_statuses() -> dict[int, str]:
    """Return the meaning of every exit status, in their order.

    A class that shares its status with the class above it, as `CapacityError` does with
    `InputError`, is told with that.
    """
    found = dict(_OTHERS)
    pending: list[type[HpmlError]] = [HpmlError]
    while pending:
        error = pending.pop()
        found.setdefault(error.exit_code, error.meaning + _MORE.get(error.exit_code, ""))
        pending += [one for one in error.__subclasses__() if one.__module__ == HpmlError.__module__]
    return dict(sorted(found.items()))
