"""The command `hpml`: its table of commands, its own options, and how errors are reported."""

from __future__ import annotations

import contextlib
import errno
import importlib
import inspect
import io
import os
import re
import shlex
import shutil
import sys
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from hpml_orchestrator.cli.process import (
    APPENDED,
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_NOT_WRITTEN,
    refuse_gone_directory,
    report_unwritable_output,
)
from hpml_orchestrator.cli.reference import EXAMPLES, examples
from hpml_orchestrator.errors import HpmlError, InputError, NotFoundError
from hpml_orchestrator.version import __version__


class CommandEntry(NamedTuple):
    """A command of the table: its module, its name there, one line of help, its panel."""

    module: str
    attribute: str
    help: str
    panel: str


_JOBS, _RUNS, _DATA, _SITE, _MORE = "Jobs", "Runs", "Data", "Cluster and nodes", "Reference"

COMMANDS = {
    "run": CommandEntry("jobfile", "run", "Submit a job, follow it and print a summary.", _JOBS),
    "submit": CommandEntry("jobfile", "submit", "Submit a job and return immediately.", _JOBS),
    "resubmit": CommandEntry(
        "jobfile", "resubmit", "Submit the job of an ended run again, with changes.", _JOBS
    ),
    "render": CommandEntry("render", "render", "Print the batch script of a job.", _JOBS),
    "check": CommandEntry(
        "render", "check", "Check a job against the cluster's limits without submitting it.", _JOBS
    ),
    "advise": CommandEntry(
        "advise", "advise", "Estimate whether a job fits into GPU and node memory.", _JOBS
    ),
    "import": CommandEntry(
        "new",
        "import_",
        "Convert an sbatch script to a job file; warnings go to stderr.",
        _JOBS,
    ),
    "new": CommandEntry(
        "new", "new", "Start a training job from an example, or from your own script.", _JOBS
    ),
    "sweep": CommandEntry(
        "sweep", "group", "Run a job many times: scaling, grids, searches.", _JOBS
    ),
    "list": CommandEntry("runs", "list_", "List runs, newest first.", _RUNS),
    "status": CommandEntry("runs", "status", "Show the state of unfinished or given runs.", _RUNS),
    "top": CommandEntry(
        "top",
        "top",
        "Show running jobs live: GPUs, memory, I/O, samples/s, time left, bottlenecks.",
        _RUNS,
    ),
    "usage": CommandEntry(
        "usage", "usage", "Show GPU-hours, waste and energy of jobs over weeks.", _RUNS
    ),
    "show": CommandEntry(
        "show", "show", "Show a run's phases, staging, results and binding.", _RUNS
    ),
    "report": CommandEntry(
        "report", "report", "Report why a run is slow, and what to change in its job file.", _RUNS
    ),
    "logs": CommandEntry("follow", "logs", "Print the output of a run.", _RUNS),
    "wait": CommandEntry("follow", "wait", "Wait until a run has ended.", _RUNS),
    "attach": CommandEntry(
        "follow", "attach", "Open a shell, or run a program, on a node of a running job.", _RUNS
    ),
    "requeue": CommandEntry(
        "jobfile", "requeue", "Save and requeue a run; continue an ended one.", _RUNS
    ),
    "cancel": CommandEntry(
        "cancel", "cancel", "Cancel runs or single tasks of a job array.", _RUNS
    ),
    "prune": CommandEntry("cancel", "prune", "Remove old runs and their files.", _RUNS),
    "stage": CommandEntry(
        "stage", "group", "Copy data to this node's memory or local disk.", _DATA
    ),
    "pack": CommandEntry("stage", "pack", "Pack many small files into a few tar archives.", _DATA),
    "init": CommandEntry("site", "init", "Query the cluster and write a site profile.", _SITE),
    "doctor": CommandEntry(
        "site", "doctor", "Check the installation, Slurm and this machine.", _SITE
    ),
    "bench": CommandEntry("bench", "bench", "Measure nodes and name those that are slow.", _SITE),
    "topo": CommandEntry(
        "topo", "topo", "Show a node's NUMA domains, cores, GPUs and NICs.", _SITE
    ),
    "export": CommandEntry("export", "group", "Export node and job metrics to Prometheus.", _SITE),
    "targets": CommandEntry(
        "export", "targets", "List node exporters for Prometheus, from Slurm.", _SITE
    ),
    "dashboards": CommandEntry(
        "dashboards", "group", "Show Grafana dashboards in a browser, or push them.", _SITE
    ),
    "schema": CommandEntry(
        "site", "schema", "Print the JSON Schema of job files, profiles or sweeps.", _MORE
    ),
    "man": CommandEntry("reference", "man", "Show the manual page of a command.", _MORE),
}

_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""Typer's class for wrong command lines. Some versions of Typer bundle Click, others import it."""

_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF, errno.EFBIG)
_ANYWHERE = frozenset(
    "list status show report logs wait attach requeue cancel prune schema export topo man".split()
)
"""Commands about records or this node work even without a current directory."""

_APPENDING = {
    **dict.fromkeys(("run", "submit", "render", "check", "advise"), "JOB_FILE"),
    **dict.fromkeys(("attach", "resubmit"), "RUN"),
}
"""Commands whose words after `--` are for a program, and what precedes those words."""


class LazyGroup(TyperGroup):
    """A group that imports a command only when it is called or its help is requested."""

    def __init__(self, **attributes: Any) -> None:
        # Only names and help lines: importing all commands would add the import time of pydantic,
        # rich and the sweeps to every `hpml list` and every completion.
        listed = {
            name: TyperCommand(name, help=entry.help, rich_help_panel=entry.panel)
            for name, entry in COMMANDS.items()
        }
        super().__init__(**{**attributes, "commands": listed})
        self._loaded: set[str] = set()

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that the first argument names, and return it."""
        self.load(args[0])
        # Cut here, because Click would parse the words after `--` as the command's own arguments,
        # but `--epochs=3` is for the program.
        if args[0] in _APPENDING and "--" in args:
            place = args.index("--")
            ctx.meta[APPENDED] = args[place + 1 :]
            args = args[:place]
        return super().resolve_command(ctx, args)

    def load(self, name: str) -> None:
        """Import a command; the table has the line that is also its docstring's first paragraph."""
        if name not in COMMANDS or name in self._loaded:
            return
        entry = COMMANDS[name]
        module = importlib.import_module(f"hpml_orchestrator.cli.{entry.module}")
        target = getattr(module, entry.attribute)
        holder = typer.Typer()
        if isinstance(target, typer.Typer):
            callback = target.registered_callback
            text = _help(entry.help, callback.callback if callback else None)
            holder.add_typer(target, name=name, help=text, rich_help_panel=entry.panel)
        else:
            text = _help(entry.help, target)
            holder.command(name, help=text, rich_help_panel=entry.panel)(target)
        command = typer.main.get_group(holder).commands[name]
        command.epilog = examples(name)
        for below in getattr(command, "commands", {}).values():
            below.help = _help(str(below.help).partition("\n\n")[0], below.callback)
            below.epilog = examples(f"{name} {below.name}")
        self.commands[name] = command
        self._loaded.add(name)


def _help(line: str, function: object) -> str:
    """Return a command's help: the table's line, then the docstring without its first paragraph."""
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")[1:] if function else []
    return "\n\n".join([line, *(" ".join(paragraph.split()) for paragraph in paragraphs)])


app = typer.Typer(
    cls=LazyGroup,
    name="hpml",
    help="Run machine-learning training from one job file, on a Slurm cluster or on this machine.",
    epilog=examples(""),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hpml {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    records: Annotated[
        str,
        typer.Option(
            "--records",
            metavar="DIR",
            help="Directory of run records.",
            envvar="HPML_HOME",
            show_default="~/.local/state/hpml",
        ),
    ] = "",
    site_profile: Annotated[
        str,
        typer.Option(
            "--site",
            metavar="FILE",
            help="Use only this site profile; `none` for no profile.",
            envvar="HPML_SITE",
            show_default="hpml.toml of the project, then of the user, then of the system",
        ),
    ] = "",
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks.", envvar="HPML_DEBUG")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show Slurm commands and their duration.")
    ] = False,
    _: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    # Cancelling a job must work even from a directory that was removed.
    relative = bool(records) and not os.path.isabs(os.path.expanduser(records))
    wants_help = {"-h", "--help"} & set(sys.argv[1:])
    if (relative or context.invoked_subcommand not in _ANYWHERE) and not wants_help:
        refuse_gone_directory()
    source = context.get_parameter_source("site_profile")
    if source is not None and source.name == "COMMANDLINE" and site_profile != "none":
        path = os.path.abspath(os.path.expanduser(site_profile))
        if not os.path.exists(path) and not wants_help:  # even for commands that read no records
            raise NotFoundError(f"no such site profile: {path}", hint="or `--site none`")
    if verbose:
        import logging  # noqa: PLC0415 - it takes 10 ms

        logging.basicConfig(format="hpml: %(message)s")
        logging.getLogger("hpml_orchestrator.scheduler").setLevel(logging.DEBUG)
    context.obj = {"records": records, "site": site_profile, "debug": debug}


def main() -> None:
    """Entry point: run a command; report errors in one line with a hint and their exit status."""
    debug = "--debug" in sys.argv[1:] or bool(os.environ.get("HPML_DEBUG"))
    _open_streams()
    try:
        try:
            _call()
        finally:
            sys.stdout.flush()
    except HpmlError as error:
        if debug:
            raise
        if isinstance(error, NotFoundError) and error.job_id and shutil.which("sbatch"):
            error.hint = _foreign_job(error) or error.hint
        _report(error)
        raise SystemExit(error.exit_code) from None
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe. Python flushes the streams again at exit
        # and would report the broken pipe then.
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise SystemExit(0) from None
    except Exception as error:
        if debug:
            raise
        # An error without a file name comes from writing to stdout: a full disk behind a
        # redirection is not a bug in hpml.
        if isinstance(error, OSError) and error.errno in _CANNOT_WRITE and not error.filename:
            report_unwritable_output(error)
            raise SystemExit(EXIT_NOT_WRITTEN) from None
        typer.echo(
            f"hpml: internal error: {type(error).__name__}: {error}\n"
            "hint: this is a bug in hpml; run again with `hpml --debug …` and report the output",
            err=True,
        )
        raise SystemExit(EXIT_INTERNAL) from None


def _open_streams() -> None:
    # A daemon or cron may start hpml with closed streams. The next opened file would then become
    # stdout and be overwritten.
    for name, mode in (("stdout", "w"), ("stderr", "w"), ("stdin", "r")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        # File names may contain characters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")


def _call() -> None:
    try:
        status = app(prog_name="hpml", standalone_mode=False)
    except typer.Abort:
        raise SystemExit(EXIT_INTERRUPTED) from None
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer itself exits with 1 then
            raise end.__context__ from None
        raise
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(error, err=True)
        else:
            _report(_usage_error(error))
        raise SystemExit(InputError.exit_code) from None
    if isinstance(status, int) and status:
        raise SystemExit(status)


def _foreign_job(error: NotFoundError) -> str:
    """Return what Slurm reports about a job without a run of hpml; empty if nothing."""
    from hpml_orchestrator.scheduler.slurm import client  # noqa: PLC0415 - rarely needed

    status = None
    with contextlib.suppress(HpmlError):
        status = client.SlurmScheduler().query([error.job_id]).get(error.job_id)
    if status is None:
        return ""
    cancel = "" if status.state.over else f"; to cancel it: scancel {error.job_id}"
    known = f"Slurm's job {error.job_id} is {status.state}, and hpml has not submitted it"
    return f"{known}: scontrol show job {error.job_id}{cancel}"


def _report(error: HpmlError) -> None:
    lines = str(error).splitlines() or [type(error).__name__]
    typer.echo(f"hpml: error: {lines[0]}", err=True)
    for line in lines[1:]:
        typer.echo(f"             {line}", err=True)
    if error.hint:
        typer.echo(f"hint: {error.hint}", err=True)


def _usage_error(error: Any) -> HpmlError:
    """Return Typer's error with a hint: the probable intention, or the command's help."""
    message, context = error.format_message().removesuffix("."), error.ctx
    if context is None:  # an option without its value
        return InputError(message, hint="see the command's --help")
    path = context.command_path
    hint = f"{path} --help"
    option = getattr(error, "option_name", "")
    first = _APPENDING.get(path.removeprefix("hpml "), "")
    example = EXAMPLES.get(path.removeprefix("hpml").strip(), [("", hint)])[0][1]
    if any(option in param.opts for param in context.find_root().command.params):
        hint = f"it goes before the command: hpml {option} …{path.removeprefix('hpml')}"
    elif type(error).__name__ == "MissingParameter":
        hint = example
    elif match := re.fullmatch(r"No such command '(\S+\.(?:ya?ml|toml))'", message):
        hint = f"hpml run {match[1]}"
        if path == "hpml sweep":  # its options differ from those of `hpml run`
            words = sys.argv[sys.argv.index(match[1]) :] if match[1] in sys.argv else [match[1]]
            hint = f"did you mean `hpml sweep run {shlex.join(words)}`?"
    elif match := re.search(r"\(([a-z_.]+=\S+)\)", message):
        hint = f"to set a field of the job file: --set {match[1]}"
        if first:
            hint += f"; to pass it to the program: {path} {first} -- {match[1]}"
    elif first and (option or "extra argument" in message):
        word = option or "ARGUMENT"
        hint = f"to pass it to the program: {path} {first} -- {word} …; options: {path} --help"
    return InputError(message, hint=hint)
