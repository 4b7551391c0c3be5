"""Command requeue."""

from __future__ import annotations

import os

import typer

from hpml_orchestrator.cli.common import JsonOption, RunWord, print_json, store_of
from hpml_orchestrator.cli.process import notice
from hpml_orchestrator.runs.requeue import requeue as requeue_run


def requeue(
    context: typer.Context,
    run: RunWord,
    as_json: JsonOption = False,
) -> None:
    """Save and requeue a run; continue an ended one.

    The ranks of a running run are asked to save and stop, and then its job is requeued; that needs
    `checkpoint` in the job file. For a run that has ended before it was done this submits another
    job that continues it. The tasks of a job array continue one by one.
    """
    store = store_of(context)
    submission = store.resolve(run, exact_name=True)
    done = requeue_run(store, submission, environment=os.environ, notice=notice)
    if as_json:
        print_json(done)
    else:
        typer.echo(f"{done['id']}: {done['outcome']}")
