"""`hpml-node.pyz COMMAND …`: the parts of hpml that a batch script calls on the nodes."""

from __future__ import annotations

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
  finish ATTEMPT CODE REASON          write down how the attempt ended; 79 where ranks ran elsewhere
                                      than they should, and the job is strict about that
  srun …                              the local backend's srun
"""


_WORDS = {"claim": (1,), "wait-ready": (3,), "rendezvous": (1,), "finish": (2, 3)}


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
    if command == "srun":
        from hpml_orchestrator.node.srun import main as srun  # noqa: PLC0415

        return srun(rest)
    return _careful(command, rest)


def _careful(command: str, rest: list[str]) -> int:
    """Run a command whose errors are told in one line, not as a traceback."""
    from hpml_orchestrator.errors import HpmlError  # noqa: PLC0415

    if len(rest) not in _WORDS.get(command, range(1000)):
        sys.stderr.write(f"hpml: {command}: wrong number of words\n{USAGE}")
        return 2
    try:
        if command == "claim":
            from hpml_orchestrator.node.claim import claim  # noqa: PLC0415

            return claim(*rest)
        if command == "agent":
            from hpml_orchestrator.node.agent import main as agent  # noqa: PLC0415

            return agent(rest)
        if command == "wait-ready":
            from hpml_orchestrator.node.ready import wait_ready  # noqa: PLC0415

            return wait_ready(*rest)
        if command == "rendezvous":
            from hpml_orchestrator.node.rendezvous import rendezvous  # noqa: PLC0415

            return rendezvous(*rest)
        if command == "finish":
            from hpml_orchestrator.node.claim import finish  # noqa: PLC0415

            return finish(*rest)
    except HpmlError as error:
        sys.stderr.write(f"hpml: {error}\n")
        if error.hint:
            sys.stderr.write(f"hpml: hint: {error.hint}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"hpml: {command}: {error}\n")
        return 1
    sys.stderr.write(f"hpml: no command {command!r}\n{USAGE}")
    return 2
