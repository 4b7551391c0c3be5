"""`hpml-bind -- command`: become one rank, and record where it runs.

In this first form nothing is bound; the rank inherits what the launcher gave it. Started once per
rank, so it imports next to nothing and execs as soon as it can.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping

__all__ = ["main", "rank_variables", "run"]

USAGE = "usage: hpml-bind [ATTEMPT] -- COMMAND [ARGUMENT]…\n"


def main() -> int:
    """Entry point of `hpml-bind`; the attempt comes from `$HPML_ATTEMPT_DIR`."""
    return run(sys.argv[1:])


def run(argv: list[str]) -> int:
    """Record this rank's place and exec its command; returns only on an error.

    Args:
        argv: optionally the attempt's directory, then `--` and the command.

    Returns:
        2 for wrong usage, 126 or 127 when the command cannot be executed.
    """
    if argv and argv[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0
    try:
        split = argv.index("--")
    except ValueError:
        split = -1
    if split < 0 or split > 1 or split + 1 >= len(argv):
        sys.stderr.write(USAGE)
        return 2
    attempt = argv[0] if split else os.environ.get("HPML_ATTEMPT_DIR", "")
    command = argv[split + 1 :]
    os.environ.update(rank_variables(os.environ))
    if attempt:
        _listen(attempt)
        try:
            _record(attempt, command)
        except (OSError, ValueError) as error:
            sys.stderr.write(f"hpml-bind: cannot record the binding: {error}\n")
    # Python ignores these two, and what is ignored stays so across exec: not for the command.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)  # noqa: S606 - becoming the command is the purpose
    except FileNotFoundError:
        sys.stderr.write(f"hpml-bind: {command[0]}: command not found\n")
        return 127
    except (OSError, ValueError) as error:
        sys.stderr.write(f"hpml-bind: {command[0]}: {getattr(error, 'strerror', error)}\n")
        return 126


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE of a task that srun started.

    Empty where a launcher has set RANK, and outside a step. Tasks are spread in blocks, as many on
    each node (`--ntasks-per-node`), so the count on one node is the total divided by the nodes.

    >>> rank_variables({"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4",
    ...     "SLURM_STEP_NUM_NODES": "2"})["LOCAL_WORLD_SIZE"]
    '2'
    """
    if "RANK" in environment or "SLURM_PROCID" not in environment:
        return {}
    total = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or "1"
    nodes = environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES") or "1"
    return {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "WORLD_SIZE": total,
        "LOCAL_WORLD_SIZE": str(max(1, int(total) // max(1, int(nodes)))),
        "GROUP_RANK": environment.get("SLURM_NODEID", "0"),
    }


def _listen(attempt: str) -> None:
    """Tell the rank where this node's agent listens."""
    from hpml_orchestrator.node.names import attempt_channel  # noqa: PLC0415

    os.environ["HPML_CHANNEL"] = attempt_channel(os.environ, attempt)
    os.environ["HPML_STOP_FILE"] = os.path.join(attempt, "stop")


def _record(attempt: str, command: list[str]) -> None:
    """Append this rank's place to the node's file: one small write."""
    import json  # noqa: PLC0415
    import socket  # noqa: PLC0415

    host = socket.gethostname()
    node = os.environ.get("SLURMD_NODENAME") or host.partition(".")[0]
    record = {
        "schema_version": 1,
        "rank": int(os.environ.get("RANK") or 0),
        "local_rank": int(os.environ.get("LOCAL_RANK") or 0),
        "world_size": int(os.environ.get("WORLD_SIZE") or 1),
        "node": node,
        "host": host,
        "pid": os.getpid(),
        "cpus": sorted(os.sched_getaffinity(0)),
        "visible_gpus": os.environ.get("CUDA_VISIBLE_DEVICES")
        or os.environ.get("ROCR_VISIBLE_DEVICES"),
        "bound": False,
        "program": command[0],
    }
    line = json.dumps(record, ensure_ascii=False) + "\n"
    path = os.path.join(attempt, "binding", f"{node}.jsonl")
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, line.encode("utf-8", "surrogateescape"))
    finally:
        os.close(descriptor)
