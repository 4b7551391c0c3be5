"""Command `attach`: a shell or a program on a node of a running job."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from typing import Annotated

import typer

from hpml_orchestrator.cli.common import (
    RunWord,
    appended_arguments,
    refuse_empty,
    store_of,
)
from hpml_orchestrator.errors import NotFoundError
from hpml_orchestrator.runs.attach import attachment
from hpml_orchestrator.runs.select import one_run
from hpml_orchestrator.runs.status import states


def attach(
    context: typer.Context,
    run: RunWord = "last",
    node: Annotated[
        str | None,
        typer.Option("--node", metavar="NODE", help="One of the job's nodes; default: its first."),
    ] = None,
) -> None:
    """Open a shell, or run a program, on a node of a running job.

    Words after `--` are the program and its arguments; without them it is bash. It starts in the
    job's working directory and has the job's CPUs, memory and GPUs on that node. For a job array,
    name one task: RUN.INDEX. The exit status is that of the program.
    """
    refuse_empty({"--node": node})
    store = store_of(context)
    submission = one_run(store.resolve(run, newest=True), field="RUN", has="nodes")
    joined = attachment(
        states(store, [submission])[0],
        appended_arguments(context),
        node=node or "",
        terminal=sys.stdin.isatty() and sys.stdout.isatty(),
        environment=os.environ,
    )
    if joined.directory is not None and os.path.isdir(joined.directory):
        os.chdir(joined.directory)
    program = joined.argv[0]
    if shutil.which(program, path=joined.environment.get("PATH")) is None:
        raise NotFoundError(f"no such program: {program}", hint="it is looked up on the job's PATH")
    if joined.cpus:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, joined.cpus)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(program, joined.argv, joined.environment)  # noqa: S606 - as the user asks
