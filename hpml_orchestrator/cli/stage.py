"""Commands `stage` and `pack`: copy data to this node, manage the copies, and pack files."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from hpml_orchestrator.cli.common import (
    JsonOption,
    chosen_site,
    print_json,
    print_table,
    refuse_empty,
    refuse_with,
)
from hpml_orchestrator.cli.process import Stop, notice
from hpml_orchestrator.errors import (
    CapacityError,
    HpmlError,
    InputError,
    NotFoundError,
    StagingError,
    counted,
    nearest,
)
from hpml_orchestrator.jobfile.text import parse_age
from hpml_orchestrator.records.texts import exact_bytes, human_bytes
from hpml_orchestrator.records.units import parse_bytes
from hpml_orchestrator.site.profile import node_paths
from hpml_orchestrator.staging.copy import CopyOptions
from hpml_orchestrator.staging.distribution import stage_chosen
from hpml_orchestrator.staging.manifest import verify as verify_staged
from hpml_orchestrator.staging.pack import PackRequest
from hpml_orchestrator.staging.pack import pack as make_pack
from hpml_orchestrator.staging.request import (
    IN_PLACE,
    UNREADABLE,
    Bases,
    Kind,
    is_directory,
    requests_for,
    shown,
    why,
)
from hpml_orchestrator.staging.stage import CopyStager
from hpml_orchestrator.staging.store import base_above, list_staged
from hpml_orchestrator.staging.store import clean as clean_bases
from hpml_orchestrator.staging.workers import open_rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self

    from rich.progress import Progress

    from hpml_orchestrator.records.job import Stage
    from hpml_orchestrator.site.profile import NodePaths
    from hpml_orchestrator.staging.distribution import StageOutcome
    from hpml_orchestrator.staging.manifest import VerifyReport
    from hpml_orchestrator.staging.store import Cleaned, StoredData

# What the commands that copy data share: options, a progress bar, and stopping by signals.

_WORKERS_MAX = 1024

_LINE_EVERY_SECONDS = 10.0
_BAR_EVERY_SECONDS = 0.2


def count_option(name: str, text: str, default: str = "one per CPU", *, least: int = 1) -> object:
    """Return an option for a number of processes or threads.

    Args:
        name: name of the option.
        text: its help.
        default: description of its default.
        least: the smallest value.
    """
    return typer.Option(
        name, metavar="N", min=least, max=_WORKERS_MAX, help=text, show_default=default
    )


def outside_links_option(verb: str) -> object:
    """Return the option to accept symbolic links out of the tree, refused by default."""
    text = f"{verb} symbolic links that leave the tree, as they are."
    return typer.Option("--outside-links", help=text)


def parse_size(option: str, text: str) -> int:
    """Return the bytes of a value such as `16K` or `1G`.

    Raises:
        InputError: it is not a size; names the option.
    """
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise InputError(str(error), field=option, value=text) from None


class Meter:
    """A bar on a terminal, a line every ten seconds elsewhere, both on standard error.

    Called with (bytes done, files done, total bytes, total files).

    Args:
        verb: the action, as in "packed 3 of 4 files".
        lines: whether to print lines without a terminal.
        terminal: whether to draw; None: detect it.
        clock: returns seconds.
    """

    def __init__(
        self,
        verb: str,
        *,
        lines: bool = True,
        terminal: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._verb = verb
        self._lines = lines
        self._clock = clock
        self._begin = clock()
        self._next = self._begin
        self._terminal = sys.stderr.isatty() if terminal is None else terminal
        self._bar: Progress | None = None
        if not self._terminal:
            self._next += _LINE_EVERY_SECONDS

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, files: int, all_bytes: int, all_files: int) -> None:
        """Show the figures if it is time for an update."""
        now = self._clock()
        # Called for every file, so most calls must cost almost nothing.
        if now < self._next:
            return
        counts = f"{self._verb} {files} of {all_files} files"
        if self._terminal:
            self._next = now + _BAR_EVERY_SECONDS
            self._draw(counts, done, all_bytes)
        elif self._lines:
            self._next = now + _LINE_EVERY_SECONDS
            seconds = now - self._begin
            rate = done / seconds if seconds else 0.0
            left = f", {(all_bytes - done) / rate:.0f} s left" if rate else ""
            notice(
                f"{counts}, {human_bytes(done)} of {human_bytes(all_bytes)} in {seconds:.0f} s, "
                f"{human_bytes(int(rate))}/s{left}"
            )

    def _draw(self, counts: str, done: int, all_bytes: int) -> None:
        if self._bar is None:
            from hpml_orchestrator.cli.terminal import progress_bar  # noqa: PLC0415 - rich takes long

            self._bar = progress_bar()
        self._bar.update(self._bar.task_ids[0], description=counts, completed=done, total=all_bytes)
        self._bar.refresh()


@contextlib.contextmanager
def stoppable(outcome: Callable[[], str]) -> Iterator[Stop]:
    """Run a block; if a signal ended it, report that and exit with 128 + its number.

    Args:
        outcome: what is left of the work, printed after the signal's name.
    """
    with Stop(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as stop:
        try:
            yield stop
        except (StagingError, KeyboardInterrupt):
            if not stop():
                raise
            name = "Ctrl-C" if stop.number == signal.SIGINT else signal.Signals(stop.number).name
            begin = "\n" if sys.stderr.isatty() else ""  # after the ^C
            typer.echo(f"{begin}hpml: {name}: {outcome()}", err=True)
            raise typer.Exit(128 + stop.number) from None


COMMANDS = ("ls", "verify", "clean")
_WORD_CHARACTERS = 40

_Field = Literal["path", "digest", "bytes", "files", "seconds", "reused", "target", "name"]


class _GroupWithArguments(TyperGroup):
    """A group that takes arguments: `hpml stage data` as well as `hpml stage verify`.

    If the first word is the name of a command, it means that command, so write `./name` for a file
    of
    that name. Everything else, including options, is for the group's own callback.
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
        """Run the named command, or else the callback."""
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
            help="Directories, files, archives or packs; write ./ls for a file named ls.",
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
            help="Find an earlier copy by the modification time of SRC alone, without checking "
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
            help="Replace symbolic links in a directory by copies of their targets.",
        ),
    ] = False,
    local_dir: Annotated[
        str | None,
        typer.Option(
            "--local-dir",
            metavar="DIR",
            help="Directory for --to local.",
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
    same data again finds it. An error or Ctrl-C leaves no incomplete copy; sources that are already
    staged stay.
    """
    refuse_empty({"--local-dir": local_dir})
    if field is not None:
        refuse_with("--print", {"--json": as_json})
    if trust_mtime and to == "auto":
        raise InputError("needs --to with a target other than auto", field="--trust-mtime")
    if to not in {"auto", "local"}:
        refuse_with(f"--to {to}", {"--local-dir": local_dir is not None})
    requests = requests_for(
        sources or [],
        to,
        kind=kind,
        keep=True,
        outside_links=outside_links,
        follow_links=follow_links,
        trust_mtime=trust_mtime,
    )
    paths = _paths_here(chosen_site(context))
    bases = _bases_of(paths, local_dir)
    if opens_per_second is None:
        opens_per_second = open_rate(paths.opens_per_node, paths.opens_per_job, paths.nodes)
    options = CopyOptions(
        hash=not no_hash, processes=processes, threads=threads, opens_per_second=opens_per_second
    )
    with _option_names(to, bases, local_dir):
        _stage(requests, bases, options, field or ("json" if as_json else ""))


def _stage(requests: list[Stage], bases: Bases, options: CopyOptions, form: str) -> None:
    """Stage one source after another; print each as soon as it is complete, JSON at the end."""
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
            hint = f"did you mean `hpml stage {near}`? its options come after it"
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
def _option_names(to: str, bases: Bases, local_dir: str | None) -> Iterator[None]:
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
                if not local_dir:
                    error.hint = "set by the site profile, $SLURM_TMPDIR or $TMPDIR"
            if option:
                raise InputError(
                    error.message, field=option, value=error.value, hint=error.hint
                ) from error
        raise


_Directories = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="DIR",
        help="Where it was staged: shm, local or a directory given to --to.",
        show_default="shm and local",
    ),
]


def _paths_here(site: str) -> NodePaths:
    """Return this node's staging directories and limits, from the site profile."""
    return node_paths(Path.cwd(), os.environ, chosen=site)


def _bases_of(paths: NodePaths, local_dir: str | None = None) -> Bases:
    """Return the directories of shm and local; `--local-dir` overrides the site profile."""
    local = os.path.abspath(local_dir) if local_dir else paths.scratch
    return Bases(shm=paths.ram, local=local)


@group.command("ls")
def ls(
    context: typer.Context, directories: _Directories = None, as_json: JsonOption = False
) -> None:
    """List your staged data on this node and what uses it."""
    bases = _bases(context, directories)
    staged = list_staged(bases)
    if as_json:
        print_json([asdict(data) for data in staged])
    elif not staged:
        typer.echo(f"nothing is staged in {', '.join(map(shown, bases))}", err=True)
    else:
        print_table(
            ("NAME", "SIZE", "FILES", "STATE", "STAYS", "IN USE", "LAST USED", "SOURCE", "PATH"),
            [_row(data) for data in staged],
        )


@group.command("verify")
def verify(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH", help="Paths printed by `hpml stage`.")
    ],
    processes: Annotated[int | None, count_option("--processes", "Reading processes.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Verify staged data against the digests computed while it was copied.

    The exit status is 8 if anything differs; the files that differ are listed.
    """
    if "" in paths:
        raise InputError("must be the path of staged data", field="PATH", value="")
    reports: list[VerifyReport] = []
    with stoppable(lambda: "not everything was compared") as stop:
        for path in paths:
            try:
                report = verify_staged(os.path.abspath(path), workers=processes, should_stop=stop)
            except OSError as error:
                raise StagingError(f"cannot read {shown(path)}: {why(error)}") from error
            reports.append(report)
            if not as_json and not report.count:
                _print_intact(report)
    if as_json:
        print_json([_report_json(report) for report in reports])
    damaged = [report for report in reports if report.count]
    if damaged:
        raise StagingError(
            "\n".join(line for report in damaged for line in _damage(report)),
            hint="stage it again for a new copy; `hpml stage clean` removes this one once it is "
            "unused",
        )


@group.command("clean")
def clean(
    context: typer.Context,
    places: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH",
            help="Remove only these: paths printed by `hpml stage`, shm, local, or a directory "
            "given to --to.",
            show_default="shm and local",
        ),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option("--all", help="Also remove all unused data that you staged or jobs kept."),
    ] = False,
    older: Annotated[
        str | None,
        typer.Option(
            "--older",
            metavar="AGE",
            help="Also remove data that you staged or jobs kept and that was unused for this "
            "long: 90m, 12h, 7d, 2w.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be removed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what is staged here, and remove what killed jobs left behind.

    What you staged by hand, and what a job with `keep: true` left, is removed only by its path,
    with --older or with --all; data in use is never removed.
    """
    if older is not None:
        refuse_with("--older", {"--all": everything})
    given = map(os.path.abspath, filter(None, places or []))
    only = [path for path in given if base_above(os.path.dirname(path))]
    if only:
        refuse_with("PATH", {"--all": everything, "--older": older is not None})
        if len(only) < len(places or []):
            raise InputError("must all be staged data, or all directories", field="PATH")
        _refuse_unknown(only)
        bases = list(dict.fromkeys(map(base_above, only)))
    else:
        bases = _bases(context, places)
    done = clean_bases(
        bases,
        only=only,
        everything=everything,
        older_seconds=None if older is None else parse_age(older, field="--older"),
        now=time.time(),
        dry_run=dry_run,
    )
    if as_json:
        print_json(
            {
                "dry_run": dry_run,
                "bytes": done.bytes,
                "removed": [asdict(data) for data in done.removed],
                "kept": [{**asdict(data), "reason": reason} for data, reason in done.kept],
                "failed": [{"path": path, "reason": reason} for path, reason in done.failed],
            }
        )
    else:
        _print_cleaned(done, bases, dry_run=dry_run)
    if done.failed or (only and done.kept):
        raise typer.Exit(StagingError.exit_code)


def _refuse_unknown(paths: list[str]) -> None:
    staged = [data.path for data in list_staged([*map(base_above, paths)])]
    known = {*staged, *map(os.path.dirname, staged)}
    for path in paths:
        if path not in known:
            hint = "`hpml stage ls` shows what is staged"
            raise NotFoundError(f"nothing is staged at {shown(path)}", hint=hint)


def _bases(context: typer.Context, directories: list[str] | None) -> list[str]:
    here = _bases_of(_paths_here(chosen_site(context)))
    by_word = {"shm": here.shm, "local": here.local}
    if not directories:
        return [base for base in dict.fromkeys(by_word.values()) if os.path.isdir(base)]
    paths = []
    for word in directories:
        base = by_word.get(word, word)
        path = os.path.abspath(base) if base else ""
        if not is_directory(path):
            raise NotFoundError(
                f"no such directory: {shown(path) or word or 'the empty path'}",
                hint="give shm, local or a directory that was given to --to",
            )
        paths.append(base_above(path) or path)
    return list(dict.fromkeys(paths))


def _row(data: StoredData) -> tuple[str, ...]:
    stays = "with its job" if data.job else "until cleaned" if data.by_hand else "while room"
    stays = stays if data.job or data.state == "ok" else "-"
    return (
        data.name,
        human_bytes(data.bytes),
        str(data.files),
        data.state,
        stays,
        shown(data.in_use) or "-",
        _minute(data.last_used),
        shown(data.source) or "-",
        shown(data.path),
    )


def _minute(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")


def _print_intact(report: VerifyReport) -> None:
    files = counted(report.files, "file")
    if not report.hashed:
        typer.echo(f"{shown(report.path)}: names and sizes of {files} match; no digests to compare")
        return
    rate = report.bytes / report.seconds if report.seconds else 0.0
    typer.echo(
        f"{shown(report.path)} is intact: {files}, {exact_bytes(report.bytes)} "
        f"read in {report.seconds:.2f} s, {human_bytes(int(rate))}/s"
    )


def _damage(report: VerifyReport) -> list[str]:
    lines = [f"{shown(report.path)} differs from its source in {counted(report.count, 'path')}"]
    lines += [f"{shown(path)}: {reason}" for path, reason in report.problems]
    more = report.count - len(report.problems)
    return [*lines, f"and {more} more"] if more else lines


def _report_json(report: VerifyReport) -> dict[str, object]:
    problems = [{"path": path, "reason": reason} for path, reason in report.problems]
    return {**asdict(report), "problems": problems}


def _print_cleaned(done: Cleaned, bases: list[str], *, dry_run: bool) -> None:
    verb = "would remove" if dry_run else "removed"
    for data in done.removed:
        typer.echo(f"{verb} {_data_text(data)}")
    for data, reason in done.kept:
        typer.echo(f"kept {_data_text(data)}: {shown(reason)}")
    for path, reason in done.failed:
        typer.echo(f"not removed: {shown(path)}: {shown(reason)}", err=True)
    if not (done.removed or done.kept or done.failed):
        typer.echo(f"nothing is staged in {', '.join(map(shown, bases))}", err=True)


def _data_text(data: StoredData) -> str:
    source = f", copy of {shown(data.source)}" if data.source else f", {data.state}"
    size = f"{human_bytes(data.bytes)}, since {_minute(data.since)}"
    return f"{shown(data.path)} ({size}{source})"


# Command `pack`: pack many small files into a few tar archives.


def pack(
    source: Annotated[
        str | None, typer.Argument(metavar="SOURCE", help="Directory to pack.")
    ] = None,
    dest: Annotated[
        str | None,
        typer.Argument(
            metavar="DEST", help="Directory for the archives, new or empty.", show_default=False
        ),
    ] = None,
    shard_size: Annotated[
        str,
        typer.Option(
            "--shard-size",
            metavar="SIZE",
            help="Maximum size of an archive; a single larger sample gets its own.",
        ),
    ] = "1G",
    workers: Annotated[int, count_option("--workers", "Processes, one archive each.", least=0)] = 0,
    outside_links: Annotated[bool, outside_links_option("Pack")] = False,
    as_json: JsonOption = False,
) -> None:
    """Pack many small files into a few tar archives.

    Use it on file systems that are slow with small files. tar and webdataset read the archives, and
    `hpml stage` unpacks them on the nodes. An error or Ctrl-C leaves nothing behind.
    """
    request = PackRequest(
        _given("SOURCE", source),
        _given("DEST", dest),
        parse_size("--shard-size", shard_size),
        workers,
        outside_links,
    )
    with stoppable(lambda: "nothing was packed") as stop, Meter("packed") as meter:
        result = make_pack(request, meter, stop)
    rate = result.bytes / result.seconds if result.seconds else 0.0
    if as_json:
        print_json({**asdict(result), "bytes_per_second": round(rate, 1)})
        return
    if result.note:
        typer.echo(f"note: {result.note}", err=True)
    typer.echo(
        f"packed {counted(result.files, 'file')}, {exact_bytes(result.bytes)} in "
        f"{result.seconds:.2f} s, {human_bytes(int(rate))}/s: "
        f"{counted(result.shards, 'archive')} in {shown(result.pack)}"
    )


def _given(field: str, path: str | None) -> str:
    if path is None:
        raise InputError("must be given", field=field, hint="hpml pack SOURCE DEST")
    if not path or "\0" in path:
        raise InputError("must name a directory", field=field, value=path)
    return path
