"""Command about a node's inside: topo."""

from __future__ import annotations

from typing import Annotated

import typer

from hpml_orchestrator.cli.common import (
    STANDARD_OUTPUT,
    JsonOption,
    SetOption,
    refuse_empty,
    refuse_with,
    store_of,
)
from hpml_orchestrator.cli.process import refuse_gone_directory
from hpml_orchestrator.errors import InputError

__all__ = ["topo"]


def topo(
    context: typer.Context,
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE",
            help="Topology file in any supported format, a copy of /sys, or - for standard input.",
            show_default="this node",
        ),
    ] = None,
    as_json: JsonOption = False,
    svg: Annotated[
        str | None,
        typer.Option(
            "--svg",
            metavar="FILE",
            help="Write a picture (SVG); - prints it instead of the tables.",
            show_default=False,
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            min=1,
            max=10_000,
            help="Show where this many ranks would run, each next to its GPU.",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="NAME",
            help="With --ranks: gpu-local, socket, numa, spread or none.",
            show_default="gpu-local",
        ),
    ] = None,
    job_file: Annotated[
        str | None,
        typer.Option(
            "--plan",
            metavar="JOB_FILE",
            help="Show where the ranks of that job would run; without FILE on a node of its "
            "partition, if the site profile has its topology.",
            show_default=False,
        ),
    ] = None,
    settings: SetOption = [],
    allowed_cpus: Annotated[
        str | None,
        typer.Option(
            "--allowed-cpus",
            metavar="LIST",
            help="With --ranks or --plan: use these CPUs only, such as 0-15,64-79.",
            show_default="all",
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            metavar="RUN",
            help="Show a node of that run, and where its ranks ran.",
            show_default=False,
        ),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(
            "--node",
            metavar="NODE",
            help="With --run: which of its nodes.",
            show_default="that of the first rank",
        ),
    ] = None,
) -> None:
    """Show a node's NUMA domains, cores, GPUs and network cards, and which are near each other.

    With `--ranks` or `--plan` it shows which GPU, cores and network card each rank would get; with
    `--run` where ranks really ran.
    """
    from hpml_orchestrator.cli import toponode, topoplan, toporun  # noqa: PLC0415

    texts = {"--svg": svg, "--policy": policy, "--plan": job_file, "--allowed-cpus": allowed_cpus}
    refuse_empty({**texts, "--run": run, "--node": node})
    _check(
        run=run,
        job_file=job_file,
        ranks=ranks,
        policy=policy,
        allowed_cpus=allowed_cpus,
        given={"FILE": file is not None, "--node": node, "--set": settings},
    )
    if svg == STANDARD_OUTPUT:
        refuse_with("--svg -", {"--json": as_json})
    if run:
        toporun.show_run(store_of(context), run, node or "", svg=svg, as_json=as_json)
        return
    if job_file or file not in {None, "-"}:
        refuse_gone_directory()
    if job_file:
        request, site_node = topoplan.request_of_job(context, job_file, settings)
        shown = (file is None and site_node) or toponode.read_node(file)
    else:
        shown = toponode.read_node(file)
        request = topoplan.request_of_options(ranks or 0, policy or "gpu-local")
    if job_file or ranks:
        topoplan.show_plan(shown, request, allowed_cpus or "", svg=svg, as_json=as_json)
    else:
        toponode.show_node(shown, svg=svg, as_json=as_json)
    if shown.usable and not allowed_cpus:
        typer.echo(f"note: this process may use the CPUs {shown.usable} only", err=True)


def _check(
    *,
    run: str | None,
    job_file: str | None,
    ranks: int | None,
    policy: str | None,
    allowed_cpus: str | None,
    given: dict[str, object],
) -> None:
    """Refuse options that exclude one another, and those that need another."""
    what = {"--ranks": ranks, "--plan": job_file}
    details = {"--policy": policy, "--allowed-cpus": allowed_cpus}
    if run:
        refuse_with("--run", {"FILE": given["FILE"], **what, **details})
    if job_file:
        refuse_with("--plan", {"--ranks": ranks, "--policy": policy})
    for option, value, needed, example in (
        ("--node", given["--node"], run, "--run RUN"),
        ("--set", given["--set"], job_file, "--plan JOB_FILE"),
        ("--policy", policy, ranks, "--ranks N"),
        ("--allowed-cpus", allowed_cpus, ranks or job_file, "--ranks N or --plan JOB_FILE"),
    ):
        if value and not needed:
            raise InputError(f"needs {example}", field=option, hint="hpml topo --help")
