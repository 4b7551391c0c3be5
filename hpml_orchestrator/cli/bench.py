"""Command `bench`: is this node normal?"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpml_orchestrator.bench import job, results, wording
from hpml_orchestrator.bench.results import clean_up, collect
from hpml_orchestrator.cli.common import (
    BackendOption,
    JsonOption,
    LocalOption,
    SetOption,
    chosen_site,
    print_json,
    print_table,
    refuse_empty,
    store_of,
)
from hpml_orchestrator.cli.follow import follow
from hpml_orchestrator.cli.jobfile import NoCheckOption, job_text, submit_rendered
from hpml_orchestrator.cli.process import EXIT_OUTLIER, notice
from hpml_orchestrator.cli.render import backend_name
from hpml_orchestrator.errors import InputError, JobFailedError, RecordError, counted
from hpml_orchestrator.jobfile.load import parse_setting
from hpml_orchestrator.records.texts import first_few, rate_text
from hpml_orchestrator.runs.follow import refuse_failed
from hpml_orchestrator.runs.load import load_job
from hpml_orchestrator.runs.prepare import Rendered, render_job
from hpml_orchestrator.runs.state import run_of
from hpml_orchestrator.scheduler.slurm.cluster import read_cluster
from hpml_orchestrator.site.profile import site_for

if TYPE_CHECKING:
    from hpml_orchestrator.bench.job import Nodes
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.runs.state import State
    from hpml_orchestrator.site.model import ResolvedSite

_SOURCE = "bench.yaml"  # stands in for a job file


def bench(
    context: typer.Context,
    nodes: Annotated[
        str,
        typer.Option(
            "--nodes", metavar="N|LIST", help="How many nodes, or which: node[1-3],node7."
        ),
    ] = "1",
    settings: SetOption = [],
    shared: Annotated[
        str,
        typer.Option(
            "--shared",
            metavar="DIR",
            help="Directory on the shared file system to measure.",
            show_default="the records",
        ),
    ] = "",
    backend: BackendOption = "auto",
    local: LocalOption = False,
    no_check: NoCheckOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure nodes and compare them with their siblings, their history and their specification.

    Submits a job that takes at most two minutes and measures all nodes at the same time, waits for
    it and prints a table. `--set` changes the job: partition, account, software to measure with.

    Exit status: 0 if all nodes are normal, 9 if one is an outlier or a part of it failed, 6 or
    another value if a node could not be measured or judged.
    """
    store = store_of(context)
    wanted = job.parse_nodes(nodes)
    refuse_empty({"--shared": shared or None})
    place = _shared(shared, store)
    name = backend_name(context, _SOURCE, backend, local=local)
    site = site_for(_SOURCE, os.environ, chosen=chosen_site(context), backend=name)

    def render() -> Rendered:
        return _render(store, wanted, settings, site, name, str(place) if shared else "")

    record = {"started_by": "hpml bench"}
    submission, job_id = submit_rendered(store, render, checked=not no_check, record=record)
    notice(f"submitted {submission.sid} as job {job_text(submission, job_id)}")
    run = run_of(submission).directory
    state = follow(store, submission, out=sys.stderr, output=False)
    clean_up(place if shared else run / "bench", submission.sid)
    _report(store, state, run, submission.sid, wanted, site, as_json=as_json)


def _shared(shared: str, store: Store) -> Path:
    if not shared:
        return store.root
    place = Path(os.path.abspath(os.path.expanduser(shared)))
    if not place.is_dir():
        raise InputError("is not a directory", field="--shared", value=shared)
    if not os.access(place, os.W_OK | os.X_OK):
        raise InputError("cannot be written by you", field="--shared", value=shared)
    return place


def _render(
    store: Store,
    wanted: Nodes,
    settings: list[str],
    site: ResolvedSite | None,
    backend: str,
    shared: str,
) -> Rendered:
    values = [parse_setting(setting) for setting in settings]
    directory = store.root / "bench"
    directory.mkdir(parents=True, exist_ok=True)
    program = job.place_program(directory)

    def load(size: job.BenchSize, args: list[str], more: list[tuple[str, str]]) -> Any:
        fields = job.job_fields(size, wanted, program, args)
        return load_job(_SOURCE, [*more, *values], site, backend=backend, fields=fields)

    first = load(job.BenchSize(), [], []).job
    cluster = None
    if backend == "slurm":
        cluster = read_cluster()
    size = job.size_of(wanted, first.resources.partition, cluster)
    sized = load(size, [], []).job
    python = job.own_python(sized)
    more = [("environment.python", python)] if python else []
    whole = load(size, job.arguments(sized, shared, job.SECONDS), more)
    return render_job(whole)


def _report(
    store: Store,
    state: State,
    run: Path,
    rid: str,
    wanted: Nodes,
    site: ResolvedSite | None,
    *,
    as_json: bool,
) -> None:
    """Judge, store and print the measurements."""
    measured, damaged = collect(run, rid, site.site if site else None)
    directories = results.directories_of(store.root, site.sources if site else [])
    kinds = {made.type for made in measured}
    stored, unreadable = results.read_all(directories, types=kinds) if kinds else ([], [])
    if damaged or unreadable:
        notice(f"warning: not readable: {first_few([str(p) for p in [*damaged, *unreadable]], 3)}")
    verdict = results.judge(measured, stored)
    kept = _keep(measured, directories) if measured else ""
    there = {made.node for made in measured}
    lost = [name for name in wanted.names if name not in there]
    if not wanted.names and len(there) < wanted.count:
        lost = [counted(wanted.count - len(there), "node")]
    if as_json:
        print_json(wording.to_json(measured, verdict, lost, kept))
    elif measured:
        _print(measured, verdict, lost, kept)
    if not verdict.normal:
        raise typer.Exit(EXIT_OUTLIER)
    refuse_failed(state)
    if lost:
        raise JobFailedError(
            f"{first_few(lost)} left no result", hint=f"hpml logs {state.submission.label}"
        )
    blind = [made.node for made in measured if _is_blind(made)]
    if blind:
        raise JobFailedError(
            f"the GPUs of {first_few(blind)} were not measured: it needs PyTorch with GPU support",
            hint="name software that has it: --set environment.venv=DIR, or environment.modules",
        )
    unclear = [made.node for made in measured if verdict.is_unclear(made.node)]
    if unclear:
        hint = "other processes disturb: measure again, with the node to yourself"
        if any(verdict.alone(name) > verdict.uncertain(name)[0] for name in unclear):
            hint = "measure again: three certain runs are a history; or several nodes together"
        raise JobFailedError(f"no figure of {first_few(unclear)} can be judged", hint=hint)


def _is_blind(made: results.Measurement) -> bool:
    measured = any(name.startswith("gpu") for name in made.figures)
    return "GPUs" in made.missing or (bool(made.gpus) and not measured)


def _keep(measured: list[results.Measurement], directories: list[Path]) -> str:
    try:
        return str(results.keep(measured, directories))
    except RecordError as error:
        notice(f"warning: {error}")
        return ""


def _print(
    measured: list[results.Measurement], verdict: results.BenchVerdict, lost: list[str], kept: str
) -> None:
    for kind in dict.fromkeys(made.type for made in measured):
        same = [made for made in measured if made.type == kind]
        torch = ", ".join(dict.fromkeys(f"PyTorch {made.torch}" for made in same if made.torch))
        took = max(made.seconds for made in same)
        about = [counted(len(same), "node"), kind, torch or "no PyTorch", f"{took:.0f} s"]
        typer.echo(", ".join(about))
    print_table(wording.HEADER, wording.rows(verdict), optional=["history", "where", "spread"])
    for name, (fit, *_) in results.fits(measured).items():
        where = "inside the node" if name == "node" else "between nodes"
        latency = f"{fit.alpha * 1e6:.0f} µs"
        speed = rate_text(fit.bandwidth, "B/s") if fit.beta else "unknown"
        typer.echo(f"all-reduce {where}: latency {latency} per message, bandwidth {speed}")
    for line in wording.findings(measured, verdict, lost):
        typer.echo(line)
    if kept:
        typer.echo(f"kept in {kept}")
