"""`hpml-node.pyz COMMAND …`: the commands that a batch script calls on nodes."""

from __future__ import annotations

import signal
import sys
from importlib import import_module

from hpml_orchestrator.errors import HpmlError

USAGE = """\
usage: hpml-node.pyz COMMAND …
  claim SUBMISSION                    claim this attempt of the run; prints its directory
  agent ATTEMPT SUBMISSION [--shm DIRECTORY] [--local DIRECTORY]
        [--job-directory shm|local]… [--collect SOURCE TARGET]…
                                      run the agent of this node until the job ends
  wait-ready ATTEMPT NODES PID        wait until all nodes are ready, or print why not
  rendezvous ATTEMPT                  print the address and a free port of the head node
  bind ATTEMPT -- COMMAND …           bind one rank and run its command
  shield COMMAND …                    run a launcher with SIGTERM blocked
  note-signal ATTEMPT NAME            record that a signal was passed on to the ranks
  terminated ATTEMPT                  request a stop if the script got SIGTERM while its job runs
  finish ATTEMPT SUBMISSION CODE [REASON]
                                      record how the attempt ended; prints the script's status
  go-on ATTEMPT SUBMISSION STATUS     requeue the job or submit its continuation, if the run
                                      continues; prints the script's status
"""

# Module, function and allowed numbers of arguments of each command; None if it parses argv itself.
# Modules are imported when called, because `bind` starts once per rank.
_COMMANDS: dict[str, tuple[str, str, tuple[int, ...] | None]] = {
    "claim": ("startup", "claim", (1,)),
    "agent": ("agent", "main", None),
    "wait-ready": ("startup", "wait_ready", (3,)),
    "rendezvous": ("startup", "rendezvous", (1,)),
    "bind": ("bind", "run", None),
    "shield": ("bind", "shield", None),
    "note-signal": ("finish", "note_signal", (2,)),
    "terminated": ("stopping", "terminated", (1,)),
    "finish": ("finish", "finish", (3, 4)),
    "go-on": ("continuation", "continue_run", (3,)),
}


def main(argv: list[str]) -> int:
    """Run a command and return its exit status; print an error as one line on stderr."""
    if not argv or argv[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0 if argv else 2
    command, rest = argv[0], argv[1:]
    if command not in _COMMANDS:
        sys.stderr.write(f"hpml: no command {command!r}\n{USAGE}")
        return 2
    module, function, counts = _COMMANDS[command]
    if counts is not None:
        if len(rest) not in counts:
            sys.stderr.write(f"hpml: {command}: wrong number of arguments\n{USAGE}")
            return 2
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)  # meant for the ranks
    run = getattr(import_module(f"hpml_orchestrator.node.{module}"), function)
    try:
        status: int = run(rest) if counts is None else run(*rest)
    except HpmlError as error:
        sys.stderr.write(f"hpml: error: {error}\n")
        if error.hint:
            sys.stderr.write(f"hpml: hint: {error.hint}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"hpml: error: {command}: {error}\n")
        return 1
    return status
