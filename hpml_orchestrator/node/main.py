"""`hpml-node.pyz COMMAND …`: the parts of hpml that a batch script calls on the nodes."""

from __future__ import annotations

import signal
import sys

__all__ = ["main"]

USAGE = """\
usage: hpml-node.pyz COMMAND …
  claim SUBMISSION                    claim this attempt of the run; prints its directory
  agent ATTEMPT [--ranks N --policy P --verify V [--ranks-per-gpu N] [--loader-workers N]
        [--one-thread] [--keep-threads]] [--monitor ADDRESS:PORT …]
        [--stage N KIND SOURCE BASE]…
                                      one per node, for as long as the job
  wait-ready ATTEMPT NODES PID        wait until all nodes are ready, or say why not
  rendezvous ATTEMPT                  print the address and a free port of the head node
  bind ATTEMPT -- COMMAND …           become one rank
  note-signal ATTEMPT NAME            put on record that the ranks were passed a signal
  finish ATTEMPT CODE [REASON [LAUNCHER]]
                                      write down how the attempt ended; prints the script's status
"""


# Module and function of each command, and how many words it takes; None: any number.
_COMMANDS: dict[str, tuple[str, str, tuple[int, ...] | None]] = {
    "claim": ("claim", "claim", (1,)),
    "agent": ("agent", "main", None),
    "wait-ready": ("ready", "wait_ready", (3,)),
    "rendezvous": ("rendezvous", "rendezvous", (1,)),
    "note-signal": ("finish", "note_signal", (2,)),
    "finish": ("finish", "finish", (2, 3, 4)),
}


def main(argv: list[str]) -> int:
    """Run one command and return its exit status."""
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0 if argv else 2
    command, rest = argv[0], argv[1:]
    # Each command imports only what it needs: `bind` starts once per rank.
    if command == "bind":
        from hpml_orchestrator.node.bind import run as bind  # noqa: PLC0415

        return bind(rest)
    return _careful(command, rest)


def _careful(command: str, rest: list[str]) -> int:
    """Run a command whose errors are told in one line, not as a traceback."""
    from importlib import import_module  # noqa: PLC0415 - `bind` does without

    from hpml_orchestrator.errors import HpmlError  # noqa: PLC0415

    if command not in _COMMANDS:
        sys.stderr.write(f"hpml: no command {command!r}\n{USAGE}")
        return 2
    module, function, counts = _COMMANDS[command]
    if counts is not None and len(rest) not in counts:
        sys.stderr.write(f"hpml: {command}: wrong number of words\n{USAGE}")
        return 2
    for number in () if command == "agent" else (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the ranks
    try:
        run = getattr(import_module(f"hpml_orchestrator.node.{module}"), function)
        status: int = run(rest) if counts is None else run(*rest)
    except HpmlError as error:
        sys.stderr.write(f"hpml: {error}\n")
        if error.hint:
            sys.stderr.write(f"hpml: hint: {error.hint}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"hpml: {command}: {error}\n")
        return 1
    return status
