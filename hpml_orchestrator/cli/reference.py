"""The manual: examples, exit statuses and variables, in addition to the help of commands."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpml_orchestrator import assets
from hpml_orchestrator.cli.process import (
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_NOT_WRITTEN,
    EXIT_OUTLIER,
    EXIT_STUCK,
    EXIT_TERMINATED,
)
from hpml_orchestrator.errors import HpmlError, InputError, NotFoundError, did_you_mean

if TYPE_CHECKING:
    from typer.core import TyperGroup

_EXAMPLES = """\
hpml
    Train on this machine and print a summary: hpml run --local job.yaml
    Submit to Slurm and come back later: hpml submit job.yaml
    Keep records elsewhere: hpml --records /scratch/ada/hpml list
hpml render
    Print the script: hpml render job.yaml
    Show where each value comes from: hpml render job.yaml --set resources.nodes=4 --explain
    Write the script and its files, to edit by hand: hpml render job.yaml -o by-hand
hpml submit
    Submit a job: hpml submit job.yaml
    Override fields of the job file: hpml submit job.yaml -s resources.nodes=2 -s resources.time=90
    Complete an interrupted submission: hpml submit --resume last
hpml resubmit
    Continue from the checkpoints, with more time: hpml resubmit last --set resources.time=12:00:00
    With another argument: hpml resubmit last -- --lr=0.01
hpml run
    Submit a job and follow it: hpml run job.yaml
    Append arguments to those of the job file: hpml run job.yaml -- --epochs=3 --lr=0.1
    Run on this machine, with a JSON summary: hpml run job.yaml --local --json
hpml sweep
    Strong scaling, six repeats of each: hpml sweep run job.yaml --strong nodes=1,2,4,8
hpml sweep plan
    Show all points and the cost first: hpml sweep plan job.yaml --strong nodes=1,2,4,8
hpml sweep run
    Strong scaling: hpml sweep run job.yaml --strong nodes=1,2,4,8 --repeats 6
    All combinations of two arguments: hpml sweep run job.yaml --grid lr=0.01,0.1 --grid width=16,32
    A sweep file, in the background: hpml sweep run sweep.yaml --detach
    What failed, once more: hpml sweep run last --top-up
hpml sweep repeat
    The best three of a search: hpml sweep repeat last --best 3 --repeats 6
hpml sweep list
    All sweeps, newest first: hpml sweep list
hpml sweep status
    What the newest has done: hpml sweep status last
    The newest, again and again: hpml sweep status last --watch
hpml sweep resume
    Continue after a closed terminal: hpml sweep resume last
hpml sweep cancel
    Cancel what is not done: hpml sweep cancel last
hpml sweep tick
    In a crontab: hpml sweep tick digits-strong-20260102-030405-abcdef
hpml sweep report
    Open the report: hpml sweep report last --open
    As Markdown: hpml sweep report last --markdown
hpml sweep compare
    Before and after a change: hpml sweep compare digits-strong-20260102-030405-abcdef last
hpml list
    List the five newest runs: hpml list -n 5
    Runs of the last two days that failed: hpml list --since 2d --state failed,timeout,out_of_memory
    Runs of a name, and of a sweep: hpml list --name 'digits-*' --sweep last
hpml status
    All unfinished runs: hpml status
    One run as JSON: hpml status last --json
hpml top
    Your jobs, live: hpml top
    Figures from a Prometheus: hpml top --prometheus http://prometheus.example.org:9090
    Once, for a script: hpml top --json
hpml usage
    GPU-hours of your jobs in the last four weeks: hpml usage
    Accounts with the most unused GPU-hours: hpml usage --by account --all-users --since 1w
    Users who leave many GPUs unused: hpml usage --by user --all-users --min-unused 100 --json
hpml report
    Why is it slow, and what to change: hpml report last
    As a page for others: hpml report last --html report.html
    Before and after a change: hpml report digits-20260102-030405-abcdef last
hpml logs
    Follow the output of the newest run: hpml logs -f
    Print the last 50 lines: hpml logs digits-20260102-030405-abcdef -n 50
hpml attach
    A shell on the first node of the newest run: hpml attach last
    Watch the GPUs of another node: hpml attach last --node node2 -- nvidia-smi -l 5
hpml requeue
    Have the newest run save and continue in its next attempt: hpml requeue last
    Continue a task of a job array that failed: hpml requeue digits-20260101-120000-abcdef.3
hpml cancel
    Cancel the newest run: hpml cancel last
    Cancel two runs by their job ids: hpml cancel 4711 4712
    Cancel all unfinished runs of a name: hpml cancel --name digits
    Cancel all of your unfinished runs, without being asked: hpml cancel --all --yes
hpml prune
    Show what would be removed: hpml prune --older-than 30d
    Remove it, but keep the newest 20: hpml prune --older-than 30d --keep 20 --yes
    Remove failed and cancelled runs: hpml prune --state FAILED,CANCELLED --yes
hpml wait
    Wait in a script until a run has ended: hpml wait last
hpml show
    Show the newest run: hpml show
    Show every rank of a large run: hpml show last --ranks
hpml doctor
    Check this machine: hpml doctor
hpml schema
    Schema of job files, for an editor: hpml schema job
hpml import
    Print the job file: hpml import train.sh
    Write it, replacing an older one: hpml import train.sh -o train.yaml --force
hpml advise
    Will it fit: hpml advise job.yaml
    On other GPUs, with a larger batch: hpml advise job.yaml --device-memory 80G -- --batch-size=256
    By formulas, without running it: hpml advise job.yaml --model 7B
hpml check
    Check a job: hpml check job.yaml
hpml init
    Write hpml.toml in this directory: hpml init
    Write your own profile and probe the nodes: hpml init --user --probe
hpml bench
    This machine: hpml bench --local
    Four nodes of a partition: hpml bench --nodes 4 --set resources.partition=gpu
    Named nodes, as a health check: hpml bench --nodes node[1-3] --json
hpml topo
    This node: hpml topo
    A saved topology, with a picture: hpml topo machine.xml --svg node.svg
    Where four ranks would run: hpml topo machine.xml --ranks 4 --svg ranks.svg
    Where a job's ranks would run: hpml topo --plan job.yaml
    Where a run's ranks ran: hpml topo --run last --svg ranks.svg
hpml new
    List the examples: hpml new --list
    Start from one: hpml new images ~/digits
    A job file for your own script: hpml new mine . --script train.py
hpml pack
    Pack a data set into archives of 2 GiB: hpml pack imagenet packed --shard-size 2G
    On a file system that is slow to open files: hpml pack imagenet packed --workers 32
hpml stage
    Into memory: hpml stage imagenet --to shm
    In a script, as `data=$(…)`: hpml stage imagenet --print path
    An archive, and a directory named like a command: hpml stage val.tar ./ls
hpml stage ls
    List your data on this node: hpml stage ls
hpml stage verify
    Verify a copy: hpml stage verify /dev/shm/hpml-1000/imagenet-…/data
hpml stage clean
    Show what is staged here, and remove what killed jobs left: hpml stage clean
    At the end of a script: hpml stage clean "$data"
    Show what was unused for a week: hpml stage clean --older 7d --dry-run
hpml export
    Export metrics of this node's GPUs and jobs: hpml export node
hpml export node
    On localhost only: hpml export node
    For a remote Prometheus, with TLS: hpml export node --listen :9445 --web-config web.yml
hpml export slurm
    Export the cluster's queue and nodes: hpml export slurm
    Jobs and fairshare by user, too: hpml export slurm --users
hpml export metrics
    The whole catalogue as JSON: hpml export metrics --json
hpml targets
    Print the node exporters of a cluster: hpml targets
    Serve them to Prometheus: hpml targets --only-up --serve 127.0.0.1:9447
hpml dashboards
    Show them in the browser: hpml dashboards show
    Put them into a Grafana: hpml dashboards push --url https://grafana.example.org
hpml dashboards build
    Write them for Grafana's provisioning: hpml dashboards build --output /var/lib/grafana/hpml
hpml dashboards push
    See what would change: hpml dashboards push --url https://grafana.example.org --dry-run
    With a data source: hpml dashboards push --url https://grafana.example.org --prometheus http://prometheus:9090
hpml dashboards show
    Of a Prometheus elsewhere: hpml dashboards show --prometheus http://prometheus.cluster:9090
    On a login node, through an SSH tunnel: hpml dashboards show --listen 127.0.0.1:8080 --no-open
hpml man
    Read about a command: hpml man submit
    Install all pages: hpml man --output /usr/local/share/man
"""

EXAMPLES: dict[str, list[tuple[str, str]]] = {}
"""Command without `hpml` -> purpose and command line; the first example is the shortest call."""
for _line in _EXAMPLES.splitlines():
    if _line.startswith("hpml"):
        EXAMPLES[_line[5:]] = _examples = []
    else:
        _purpose, _, _call = _line.strip().partition(": hpml ")
        _examples.append((f"{_purpose}:", f"hpml {_call}"))

VARIABLES = {
    "HPML_HOME": "Directory of run records, which the compute nodes must see. Default: "
    "`$XDG_STATE_HOME/hpml`, else `~/.local/state/hpml`.",
    "HPML_SITE": "The site profile to use, or `none`. Default: the nearest `hpml.toml` in the job "
    "file's directory or above it, then `~/.config/hpml/site.toml`, then `/etc/hpml/site.toml`.",
    "HPML_BACKEND": "What `--backend auto` means: `slurm` or `local`. Default: `backend` of the "
    "site profile, else Slurm if sbatch is on PATH.",
    "HPML_DEBUG": "Show tracebacks, as `--debug` does.",
    "HPML_LOCAL_KILL_WAIT": "Seconds between SIGTERM and SIGKILL for local jobs; default 30.",
    "NO_COLOR": "Print no colours.",
}

_OTHERS = {
    0: "success; for `run` and `wait`: the job completed",
    EXIT_OUTLIER: "`hpml bench`: a node is slower than its siblings, its history or its "
    "specification, or a part of it failed",
    EXIT_INTERNAL: "a bug in hpml; `--debug` shows the traceback",
    EXIT_NOT_WRITTEN: "standard output cannot be written; after a successful submission the exit "
    "status is still 0, and the job id goes to stderr",
    EXIT_STUCK: "`hpml export node`: a driver call does not return; restart the exporter",
    EXIT_INTERRUPTED: "Ctrl-C; a submitted job continues, and its id is printed",
    EXIT_TERMINATED: "SIGTERM (129: SIGHUP)",
}
_MORE = {
    1: "; `doctor`: something is missing",
    5: "; complete an interrupted submission with `hpml submit --resume RUN`; `cancel`: a run that "
    "is being submitted has no job yet",
    8: "; `hpml pack`: a directory cannot be packed; `hpml stage verify`: "
    "staged data differs from its source",
    79: ": the status of a job's script, not of hpml",
}


def examples(command: str) -> str:
    """Return a command's examples for the end of its help."""
    lines = [f"{purpose}\n  {line}" for purpose, line in EXAMPLES[command]]
    return "\n".join(["Examples:", *lines])


def exit_statuses() -> dict[int, str]:
    """Return the meaning of every exit status, in order.

    A class that shares its status with its base class, as `CapacityError` does with `InputError`,
    is
    described there.
    """
    meanings = dict(_OTHERS)
    pending: list[type[HpmlError]] = [HpmlError]
    while pending:
        error = pending.pop()
        meanings.setdefault(error.exit_code, error.meaning + _MORE.get(error.exit_code, ""))
        pending += [
            kind for kind in error.__subclasses__() if kind.__module__ == HpmlError.__module__
        ]
    return dict(sorted(meanings.items()))


# Command `man`: show the manual page of a command, or install all pages.


def man(
    context: typer.Context,
    words: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="Default: hpml itself.")
    ] = [],
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Install all pages in DIR/man1; DIR must be on your MANPATH.",
        ),
    ] = "",
) -> None:
    """Show the manual page of a command.

    Without man(1), or if the output is not a terminal, this prints the command's help.
    """
    if output:
        if words:
            raise InputError("takes no command", field="--output", value=" ".join(words))
        _install(output)
        return
    # `man hpml-submit` is the name of the page
    names = " ".join(words).replace("-", " ").removeprefix("hpml").split()
    command, child = _find(context.find_root(), names)
    page = _page("-".join(["hpml", *names]))
    if page and sys.stdout.isatty() and shutil.which("man"):
        subprocess.run(["man", "-l", page], check=False)
    else:
        typer.echo(command.get_help(child))


def _find(context: Any, names: list[str]) -> tuple[Any, Any]:
    command: Any = context.command
    for name in names:
        group: TyperGroup | None = command if hasattr(command, "commands") else None
        if group is None or name not in group.commands:
            raise InputError(
                "no such command",
                field="COMMAND",
                value=" ".join(names),
                hint=did_you_mean(name, group.commands if group else ()) or "hpml --help",
            )
        command = group.resolve_command(context, [name])[1]
        context = typer.Context(command, parent=context, info_name=name)
    return command, context


def _page(title: str) -> Path | None:
    try:
        return assets.path(f"docs/man/man1/{title}.1")
    except NotFoundError:
        return None


def _install(directory: str) -> None:
    target = Path(directory).expanduser() / "man1"
    pages = sorted(assets.path("docs/man/man1").glob("*.1"))
    try:
        target.mkdir(parents=True, exist_ok=True)
        for page in pages:
            shutil.copyfile(page, target / page.name)
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror or error}", field="--output", value=directory
        ) from error
    typer.echo(f"wrote {len(pages)} pages to {target}")
