"""Commands that bring data to this node: stage, and its ls, verify, clean and bench."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from hpml_orchestrator.cli import stagebench, stageheld
from hpml_orchestrator.cli.common import JsonOption, chosen_site, print_json
from hpml_orchestrator.cli.conflicts import refuse_empty, refuse_with
from hpml_orchestrator.cli.dataoptions import count_option, outside_links_option
from hpml_orchestrator.cli.grouped import OwnArguments
from hpml_orchestrator.cli.stagefields import told_as_options

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from hpml_orchestrator.cli.stopping import Stop
    from hpml_orchestrator.staging import Bases, StageRequest
    from hpml_orchestrator.staging.capacity import Room
    from hpml_orchestrator.staging.engine import EngineOptions
    from hpml_orchestrator.staging.errands import Errand, Outcome

__all__ = ["register"]

_PRINTABLE = ("path", "digest", "bytes", "files", "seconds", "reused", "target", "name")

group = typer.Typer(
    cls=OwnArguments, invoke_without_command=True, subcommand_metavar="| COMMAND [ARGS]…"
)


def _complete(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete a command's name as the first word; where none begins so, the shell takes files."""
    if ctx.params.get("sources") or not incomplete:
        return []
    known = [one.name or getattr(one.callback, "__name__", "") for one in group.registered_commands]
    return [name for name in known if name.startswith(incomplete)]


def register(app: typer.Typer) -> None:
    """Add this group's commands to the application."""
    app.add_typer(group, name="stage")


stageheld.register(group)
stagebench.register(group)


@group.callback()
def stage(
    context: typer.Context,
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SRC…",
            help="Directories, files, archives or packs. One called like a command: ./ls.",
            show_default=False,
            autocompletion=_complete,
        ),
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="TARGET",
            help="shm (RAM), local (the node's disk), auto (whichever fits and pays, else the "
            "data stays where it is), or a directory of this node.",
        ),
    ] = "auto",
    keep: Annotated[
        bool,
        typer.Option(
            "--keep/--no-keep",
            help="Leave it in the node's cache for whoever stages the same later; else it lasts as "
            "long as the shell or script that called.",
            show_default=False,
        ),
    ] = False,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="What the directory is called, if there is one SRC.",
            show_default="made of the last part of SRC",
        ),
    ] = None,
    kind: Annotated[
        str,
        typer.Option(
            "--kind",
            metavar="KIND",
            help="What SRC is: auto, tree, file, tar, zip, squashfs or pack. The last four are "
            "unpacked.",
        ),
    ] = "auto",
    epochs: Annotated[
        int | None,
        typer.Option(
            "--epochs",
            metavar="N",
            min=1,
            max=1_000_000,
            help="With --to auto: how often all of it will be read. Source and targets are timed "
            "with a sample, and what does not pay is not done.",
            show_default="not known",
        ),
    ] = None,
    no_hash: Annotated[
        bool, typer.Option("--no-hash", help="No digests: faster, and nothing to verify by.")
    ] = False,
    outside_links: Annotated[bool, outside_links_option("Take")] = False,
    local_dir: Annotated[
        str | None,
        typer.Option(
            "--local-dir",
            metavar="DIR",
            help="What local stands for.",
            show_default="the site profile's, else $SLURM_TMPDIR, $TMPDIR or /tmp",
        ),
    ] = None,
    processes: Annotated[int | None, count_option("--processes", "Processes that copy.")] = None,
    threads: Annotated[
        int | None,
        count_option(
            "--threads", "Threads of each of them.", "as many as the source's latency asks for"
        ),
    ] = None,
    opens_per_second: Annotated[
        float | None,
        typer.Option(
            "--opens-per-second",
            metavar="RATE",
            min=0,
            max=1e9,
            help="Open no more files than that on the source's file system; 0: no limit.",
            show_default="the site profile's limit",
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            "--print",
            metavar="FIELD",
            help="Print that alone, a line for each SRC: path, digest, bytes, files, seconds, "
            "reused, target or name.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Bring data to this node: into RAM or onto its disk, whole or not at all.

    It is there when the command ends, and its path is printed. Who stages the same again finds it.
    After an error or Ctrl-C nothing half-done is left; of several SRC those that were told stay.
    """
    from hpml_orchestrator.errors import InputError  # noqa: PLC0415
    from hpml_orchestrator.staging.errands import requests_for  # noqa: PLC0415

    refuse_empty({"--name": name, "--local-dir": local_dir, "--print": only})
    if only is not None:
        refuse_with("--print", {"--json": as_json})
        if only not in _PRINTABLE:
            raise InputError(f"must be one of {', '.join(_PRINTABLE)}", field="--print", value=only)
    if to != "auto":
        refuse_with(f"--to {to}", {"--epochs": epochs is not None})
    if to not in {"auto", "local"}:
        refuse_with(f"--to {to}", {"--local-dir": local_dir is not None})
    with told_as_options():
        errands = requests_for(
            sources or [],
            to,
            name=name or "",
            kind=kind,
            keep=keep,
            outside_links=outside_links,
        )
    paths = stageheld.paths_here(chosen_site(context))
    bases = stageheld.bases_of(paths, local_dir)
    from hpml_orchestrator.staging.engine import EngineOptions  # noqa: PLC0415
    from hpml_orchestrator.staging.manners import open_rate  # noqa: PLC0415

    if opens_per_second is None:
        opens_per_second = open_rate(paths.opens_per_node, paths.opens_per_job, paths.nodes)
    options = EngineOptions(
        hash=not no_hash, processes=processes, threads=threads, opens_per_second=opens_per_second
    )
    with told_as_options(to, bases, local_dir):
        _run(errands, bases, options, epochs, only or ("json" if as_json else ""))


def _run(
    errands: list[Errand], bases: Bases, options: EngineOptions, epochs: int | None, form: str
) -> None:
    from hpml_orchestrator.cli.stopping import stoppable  # noqa: PLC0415

    told: list[Outcome] = []
    names = [one.request.name for one in errands]

    def left() -> str:
        done = len(told)
        stays = f"; {', '.join(names[:done])} stays" if done else ""
        return f"nothing was published of {', '.join(names[done:])}{stays}"

    try:
        with stoppable(left) as stop:
            for outcome in _outcomes(errands, bases, options, epochs, stop, quiet=bool(form)):
                told.append(outcome)
                if form != "json":
                    _tell(outcome, form)
    finally:
        if form == "json" and (told or sys.exc_info()[0] is None):  # what stays is told, always
            print_json([_json(one) for one in told])


def _outcomes(
    errands: list[Errand],
    bases: Bases,
    options: EngineOptions,
    epochs: int | None,
    stop: Stop,
    *,
    quiet: bool,
) -> Iterator[Outcome]:
    import time  # noqa: PLC0415

    from hpml_orchestrator.cli.meter import Meter  # noqa: PLC0415
    from hpml_orchestrator.staging import CopyStager  # noqa: PLC0415
    from hpml_orchestrator.staging.caller import calling_process  # noqa: PLC0415
    from hpml_orchestrator.staging.errands import run_errand  # noqa: PLC0415
    from hpml_orchestrator.staging.faults import Retry  # noqa: PLC0415
    from hpml_orchestrator.staging.held import shell_key  # noqa: PLC0415
    from hpml_orchestrator.staging.sources import open_source  # noqa: PLC0415
    from hpml_orchestrator.staging.supply import LocalSupply  # noqa: PLC0415

    retry = Retry(time.sleep, stop)

    def supply_of(request: StageRequest, room: Room) -> LocalSupply:
        return LocalSupply(open_source(request, retry, room), options)

    caller = calling_process()
    for errand in errands:
        with Meter("staged", lines=not quiet) as meter:
            stager = CopyStager(
                shell_key(caller),
                bases=bases,
                owner_pid=caller,
                should_stop=stop,
                on_progress=meter,
                options=options,
                checks_source=True,
            )
            try:
                outcome = run_errand(errand, stager, bases, supply_of, epochs=epochs)
            finally:
                stager.leave()
        yield outcome


def _tell(outcome: Outcome, field: str) -> None:
    from hpml_orchestrator.errors import counted  # noqa: PLC0415
    from hpml_orchestrator.staging.capacity import exact_bytes, human_bytes  # noqa: PLC0415
    from hpml_orchestrator.staging.choose import IN_PLACE  # noqa: PLC0415
    from hpml_orchestrator.staging.faults import shown  # noqa: PLC0415

    result = outcome.result
    if field:
        typer.echo(_raw(_json(outcome)[field]))
        return
    size = f"{counted(result.files, 'file')}, {exact_bytes(result.bytes)}"
    if outcome.choice is not None and outcome.choice.target == IN_PLACE:
        done = f"{result.name} stays where it is: {size}"
    elif result.reused:
        done = f"{result.name} was here already: {size}, found in {result.seconds:.2f} s"
    else:
        done = (
            f"staged {result.name}: {size} in {result.seconds:.2f} s, "
            f"{human_bytes(int(result.rate))}/s"
        )
    typer.echo(done)
    typer.echo(f"  path    {shown(result.path)}")
    if result.digest:
        typer.echo(f"  digest  {result.digest}")
    if outcome.choice is not None:
        typer.echo(f"  target  {outcome.choice.target}: {outcome.choice.why}")
        for target, why in outcome.choice.others:
            typer.echo(f"          not {target}: {why}")
    for note in _notes(outcome):
        typer.echo(f"note: {note}", err=True)


def _notes(outcome: Outcome) -> Iterator[str]:
    from hpml_orchestrator.staging.choose import IN_PLACE  # noqa: PLC0415
    from hpml_orchestrator.staging.faults import shown  # noqa: PLC0415

    result = outcome.result
    if result.private and outcome.request.keep:
        yield f"{result.name}: later jobs will not find it: {result.private}"
    elif outcome.request.keep and not result.kept and result.method != IN_PLACE:
        yield (
            f"{result.name}: this shell had staged it without --keep, and so it goes with this "
            "shell; `hpml stage clean --mine` removes it"
        )
    for source in result.evicted:
        yield f"{shown(source)} had to leave the cache to make room"


def _json(outcome: Outcome) -> dict[str, Any]:
    """Return what came of one request, for programs."""
    from dataclasses import asdict  # noqa: PLC0415

    choice = outcome.choice
    told = asdict(outcome.result)
    told.update(
        source=outcome.request.source,
        target=choice.target if choice else outcome.request.target,
        bytes_per_second=round(outcome.result.rate, 1),
        choice=None,
    )
    if choice is not None:
        others = [{"target": target, "why": why} for target, why in choice.others]
        told["choice"] = {"target": choice.target, "why": choice.why, "others": others}
    return told


def _raw(value: Any) -> str | bytes:
    """Return what is printed for a shell: a path with every byte that it has."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return os.fsencode(value) if isinstance(value, str) else f"{value}"
