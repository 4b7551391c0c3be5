"""`hpml doctor --node`: whether a node is fit for jobs, and draining it in Slurm if it is not."""

from __future__ import annotations

from socket import gethostname
from typing import TYPE_CHECKING

import typer

from hpml_orchestrator.cli.common import print_json, print_table
from hpml_orchestrator.cli.fitness import Expected, examine_node
from hpml_orchestrator.cli.process import notice
from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.scheduler.command import SubprocessRunner
from hpml_orchestrator.scheduler.slurm.client import ask
from hpml_orchestrator.scheduler.slurm.messages import clean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpml_orchestrator.cli.fitness import NodeFinding

_REASON_CHARS = 200
_SECONDS = 30.0


def check_node(gpus: int | None, *, drain: bool, as_json: bool) -> None:
    """Print what was found; the exit status is 1 with an error, 0 with warnings alone."""
    findings = examine_node(Expected(gpus=gpus))
    if as_json:
        print_json([finding._asdict() for finding in findings])
    else:
        print_table(("CHECK", "RESULT", "FOUND"), findings)
    errors = [finding for finding in findings if finding.result == "error"]
    for finding in errors:  # what Slurm and NHC's users look for in the log
        typer.echo(f"ERROR: hpml: {finding.check}: {finding.found}", err=True)
    if errors and drain:
        _drain(errors)
    if errors:
        raise typer.Exit(1)


def _drain(errors: Sequence[NodeFinding]) -> None:
    node = gethostname().partition(".")[0]
    reason = "; ".join(f"{error.check}: {error.found}" for error in errors)[:_REASON_CHARS]
    shown = _scontrol("show", "node", node, "--oneliner")
    # An administrator's own reason must not be replaced by ours at every run of the health check.
    if "DRAIN" in shown.partition(" State=")[2].partition(" ")[0].upper():
        notice(f"{node} is drained already")
        return
    _scontrol("update", f"nodename={node}", "state=drain", f"reason=hpml: {reason}")
    notice(f"drained {node}")


def _scontrol(*words: str) -> str:
    done = ask(SubprocessRunner(), ["scontrol", *words], timeout=_SECONDS)
    if done.returncode != 0:
        raise HpmlError(f"cannot drain this node: {clean(done.stderr) or clean(done.stdout)}")
    return done.stdout
