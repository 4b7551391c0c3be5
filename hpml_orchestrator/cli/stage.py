"""Command `stage`: copy data to this node; its subcommands are in staged.py."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from hpml_orchestrator.cli import staged
from hpml_orchestrator.cli.common import (
    JsonOption,
    chosen_site,
    print_json,
    refuse_empty,
    refuse_with,
)
from hpml_orchestrator.cli.copying import Meter, count_option, outside_links_option, stoppable
from hpml_orchestrator.errors import (
    CapacityError,
    HpmlError,
    InputError,
    NotFoundError,
    StagingError,
    counted,
    nearest,
)
from hpml_orchestrator.records.texts import exact_bytes, human_bytes
from hpml_orchestrator.staging.auto import stage_chosen
from hpml_orchestrator.staging.copy import CopyOptions
from hpml_orchestrator.staging.faults import UNREADABLE, shown
from hpml_orchestrator.staging.rate_limit import open_rate
from hpml_orchestrator.staging.request import IN_PLACE, Kind, requests_for
from hpml_orchestrator.staging.stage import CopyStager

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpml_orchestrator.cli.process import Stop
    from hpml_orchestrator.records.job import Stage
    from hpml_orchestrator.staging.auto import StageOutcome
    from hpml_orchestrator.staging.request import Bases

COMMANDS = ("ls", "verify", "clean")
_WORD_CHARACTERS = 40

_Field = Literal["path", "digest", "bytes", "files", "seconds", "reused", "target", "name"]


class _GroupWithArguments(TyperGroup):
    """A group that takes arguments: `hpml stage data` as well as `hpml stage verify`.

    A first word that is the name of a command is that command, so a file of that name is given as
    `./name`. Everything else, options too, is for the group's own callback.
    """

    allow_interspersed_args = True

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Leave the words of a command to that command."""
        if args and args[0] in self.commands:
            super().parse_args(ctx, [])  # fills in defaults
            ctx.args = list(args)
            return list(args)
        return super().parse_args(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters; the usage of a command shows none of the group's arguments."""
        params = super().get_params(ctx)
        if ctx.command is self:
            return params
        return [param for param in params if param.param_type_name != "argument"]

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was named, else the callback."""
        if not ctx.args:
            return super().invoke(ctx)
        name, *rest = ctx.args
        ctx.invoked_subcommand = name
        ctx.args = []
        with self.commands[name].make_context(name, rest, parent=ctx) as below:
            return below.command.invoke(below)


group = typer.Typer(
    cls=_GroupWithArguments, invoke_without_command=True, subcommand_metavar="| COMMAND [ARGS]…"
)
group.command("ls")(staged.ls)
group.command("verify")(staged.verify)
group.command("clean")(staged.clean)


def _complete(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete a command's name as the first word; otherwise the shell completes files."""
    if ctx.params.get("sources") or not incomplete:
        return []
    names = [command.name or "" for command in group.registered_commands]
    return [name for name in names if name.startswith(incomplete)]


@group.callback()
def stage(
    context: typer.Context,
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SRC",
            help="Directories, files, archives or packs; write ./ls for one named like a command.",
            autocompletion=_complete,
        ),
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="TARGET",
            help="shm (memory), local (the node's disk), a directory on this node, or auto: "
            "memory or disk, whichever fits and pays off, else the data is used in place.",
        ),
    ] = "auto",
    trust_mtime: Annotated[
        bool,
        typer.Option(
            "--trust-mtime",
            help="Find an earlier copy by the modification time of SRC alone, without a look at "
            "each file.",
        ),
    ] = False,
    kind: Annotated[
        Kind,
        typer.Option(
            "--kind",
            metavar="KIND",
            help="Type of SRC: auto, tree, file, tar, zip or pack. The last three are unpacked.",
        ),
    ] = "auto",
    no_hash: Annotated[
        bool,
        typer.Option("--no-hash", help="No digests: faster, but the copy cannot be verified."),
    ] = False,
    outside_links: Annotated[bool, outside_links_option("Copy")] = False,
    follow_links: Annotated[
        bool,
        typer.Option(
            "--follow-links",
            help="Copy what the symbolic links of a directory lead to, in their place.",
        ),
    ] = False,
    local_dir: Annotated[
        str | None,
        typer.Option(
            "--local-dir",
            metavar="DIR",
            help="The directory that --to local uses.",
            show_default="from the site profile, else $SLURM_TMPDIR, $TMPDIR or /tmp",
        ),
    ] = None,
    processes: Annotated[int | None, count_option("--processes", "Copying processes.")] = None,
    threads: Annotated[
        int | None,
        count_option(
            "--threads",
            "Threads per process.",
            "32 in all for a file server, else 1",
        ),
    ] = None,
    opens_per_second: Annotated[
        float | None,
        typer.Option(
            "--opens-per-second",
            metavar="RATE",
            min=0,
            max=1e9,
            help="Limit of file opens on the source's file system; 0: no limit.",
            show_default="from the site profile",
        ),
    ] = None,
    field: Annotated[
        _Field | None, typer.Option("--print", help="Print only this field, one line per SRC.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Copy data to this node's memory or local disk.

    Prints the path of the copy once it is complete. It stays until `hpml stage clean`; staging the
    same data again finds it. After an error or Ctrl-C no incomplete copy is left; sources already
    staged stay.
    """
    refuse_empty({"--local-dir": local_dir})
    if field is not None:
        refuse_with("--print", {"--json": as_json})
    if trust_mtime and to == "auto":
        raise InputError("needs --to with a target other than auto", field="--trust-mtime")
    if to not in {"auto", "local"}:
        refuse_with(f"--to {to}", {"--local-dir": local_dir is not None})
    with _option_names():
        requests = requests_for(
            sources or [],
            to,
            kind=kind,
            keep=True,
            outside_links=outside_links,
            follow_links=follow_links,
            trust_mtime=trust_mtime,
        )
    paths = staged.paths_here(chosen_site(context))
    bases = staged.bases_of(paths, local_dir)
    if opens_per_second is None:
        opens_per_second = open_rate(paths.opens_per_node, paths.opens_per_job, paths.nodes)
    options = CopyOptions(
        hash=not no_hash, processes=processes, threads=threads, opens_per_second=opens_per_second
    )
    with _option_names(to, bases, local_dir):
        _stage(requests, bases, options, field or ("json" if as_json else ""))


def _stage(requests: list[Stage], bases: Bases, options: CopyOptions, form: str) -> None:
    """Stage one source after the other; print each as soon as it is there, JSON at the end."""
    outcomes: list[StageOutcome] = []
    names = [request.name for request in requests]

    def left() -> str:
        done = len(outcomes)
        kept = f"; kept: {', '.join(names[:done])}" if done else ""
        return f"not staged: {', '.join(names[done:])}{kept}"

    try:
        with stoppable(left) as stop:
            for outcome in _outcomes(requests, bases, options, stop, quiet=bool(form)):
                outcomes.append(outcome)
                if form == "":
                    _print(outcome)
                elif form != "json":
                    typer.echo(_raw(_json(outcome)[form]))
    finally:
        # Also after an error, so that a program learns which copies exist.
        if form == "json" and (outcomes or sys.exc_info()[0] is None):
            print_json([_json(outcome) for outcome in outcomes])


def _outcomes(
    requests: list[Stage],
    bases: Bases,
    options: CopyOptions,
    stop: Stop,
    *,
    quiet: bool,
) -> Iterator[StageOutcome]:
    for request in requests:
        with Meter("staged", lines=not quiet) as meter:
            _check_source(request.source)
            stager = CopyStager(
                bases=bases,
                should_stop=stop,
                on_progress=meter,
                options=options,
            )
            try:
                outcome = stage_chosen(request, stager)
            finally:
                stager.leave()
        yield outcome


def _check_source(path: str) -> None:
    """Refuse a source that does not exist; it may be a mistyped subcommand."""
    try:
        os.lstat(path)
    except PermissionError as error:
        raise StagingError(
            f"cannot look at {shown(path)}: {error.strerror}", hint=UNREADABLE
        ) from error
    except (OSError, ValueError) as error:
        near = nearest(os.path.basename(path)[:_WORD_CHARACTERS], COMMANDS)
        hint = f"`hpml stage` also has the commands {', '.join(COMMANDS)}"
        if near:
            hint = f"did you mean `hpml stage {near}`? its options stand behind it"
        raise NotFoundError(f"no such file or directory: {shown(path)}", hint=hint) from error


def _print(outcome: StageOutcome) -> None:
    result, choice = outcome.result, outcome.choice
    size = f"{counted(result.files, 'file')}, {exact_bytes(result.bytes)}"
    if choice is not None and choice.target == IN_PLACE:
        line = f"{result.name} is used in place: {size}"
    elif result.reused:
        line = f"{result.name} is already staged: {size}, found in {result.seconds:.2f} s"
    else:
        rate = human_bytes(int(result.rate))
        line = f"staged {result.name}: {size} in {result.seconds:.2f} s, {rate}/s"
    typer.echo(f"{line}\n  path    {shown(result.path)}")
    if result.digest:
        typer.echo(f"  digest  {result.digest}")
    if choice is not None:
        typer.echo(f"  target  {choice.target}: {choice.why}")
        for target, why in choice.others:
            typer.echo(f"          not {target}: {why}")
    for note in _notes(outcome):
        typer.echo(f"note: {note}", err=True)


def _notes(outcome: StageOutcome) -> Iterator[str]:
    result = outcome.result
    if result.warning:
        yield result.warning
    for source in result.evicted:
        yield f"{shown(source)} was removed from the cache to make room"


def _json(outcome: StageOutcome) -> dict[str, object]:
    choice = outcome.choice
    fields = asdict(outcome.result)
    fields.update(
        source=outcome.request.source,
        target=choice.target if choice else outcome.request.target,
        bytes_per_second=round(outcome.result.rate, 1),
        choice=None,
    )
    if choice is not None:
        others = [{"target": target, "why": why} for target, why in choice.others]
        fields["choice"] = {"target": choice.target, "why": choice.why, "others": others}
    return fields


def _raw(value: object) -> str | bytes:
    """Return a value for the shell; a path keeps every byte."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    # `$(hpml stage --print path)` must get the bytes of the path, whatever the terminal's encoding.
    return os.fsencode(value) if isinstance(value, str) else f"{value}"


_OPTIONS = {
    "source": "SRC",
    "kind": "--kind",
    "target": "--to",
    "outside_links": "--outside-links",
}
_FIELD_IN_HINT = re.compile(r"\b(target|kind): (\w+)")


@contextlib.contextmanager
def _option_names(
    to: str = "", bases: Bases | None = None, local_dir: str | None = None
) -> Iterator[None]:
    try:
        yield
    except HpmlError as error:
        error.hint = _FIELD_IN_HINT.sub(
            lambda match: f"{_OPTIONS[match[1]]} {match[2]}", error.hint
        )
        # The field of a CapacityError is the name of the data, which may be any word.
        if isinstance(error, InputError) and not isinstance(error, CapacityError):
            base = getattr(bases, to, "") if to in {"shm", "local"} else ""
            option = _OPTIONS.get(error.field, "")
            if error.field == "target" and base and error.value == base:
                option = "--local-dir" if to == "local" and local_dir else option
                error.hint = error.hint or "set by the site profile, $SLURM_TMPDIR or $TMPDIR"
            if option:
                raise InputError(
                    error.message, field=option, value=error.value, hint=error.hint
                ) from error
        raise
