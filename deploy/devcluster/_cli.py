"""The command line."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import _boot
import _cluster
import _packages
from _config import MAX_NODES, Settings
from _errors import DevclusterError
from _machines import MACHINES
from _nodes import enter
from _virtual import preloaded

if TYPE_CHECKING:
    from collections.abc import Sequence

_FAILED = 1
_STATUS_DOWN = 3
_INTERRUPTED = 130


def _default_box() -> Path:
    return Path(f"/tmp/hpml-devcluster-{os.getuid()}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="devcluster",
        description="A small real Slurm cluster of virtual nodes on this one machine.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, *, box: bool = True, data: bool = True) -> Any:
        command = commands.add_parser(name, help=text, description=text)
        if box:
            command.add_argument(
                "--box",
                type=Path,
                default=_default_box(),
                metavar="DIR",
                help="where all of the cluster's files are (default: %(default)s)",
            )
        if data:
            command.add_argument("--json", action="store_true", help="print the answer as JSON")
        return command

    add("install", "Install the Debian packages that are missing.", box=False)
    _up_options(add("up", "Boot a cluster and wait until its first job has run."))
    down = add("down", "Stop a cluster and everything that runs on its nodes.", data=False)
    down.add_argument("--purge", action="store_true", help="remove the box with its logs as well")
    add("status", "Show the daemons and nodes; exit status 0: up, 1: partly, 3: not up.")
    add("env", "Print the line that points Slurm's commands to the cluster.")
    restart = add("restart", "Stop slurmctld or a node's slurmd and start it again.")
    restart.add_argument("name", metavar="DAEMON", help="slurmctld, node1, ...")
    restart.add_argument("--kill", action="store_true", help="end it by SIGKILL")
    inside = add("exec", "Run a command on a node: devcluster exec node1 -- df /tmp.", data=False)
    inside.add_argument("node", metavar="NODE")
    inside.add_argument("words", nargs="*", metavar="-- CMD")
    return parser


def _up_options(up: argparse.ArgumentParser) -> None:
    standard = Settings(Path("/"))

    def number(option: str, default: int | None, metavar: str, text: str) -> None:
        shown = "" if default is None else " (default: %(default)s)"
        up.add_argument(option, type=int, default=default, metavar=metavar, help=text + shown)

    number("--nodes", standard.nodes, "N", f"virtual nodes, up to {MAX_NODES}")
    up.add_argument(
        "--machine",
        choices=sorted(MACHINES),
        metavar="NAME",
        help=f"what the nodes look like, and tasks are bound to: {', '.join(sorted(MACHINES))}",
    )

    def size(option: str, usual: int, metavar: str, text: str) -> None:
        shown = f"{text} (default: {usual}, or the machine's)"
        up.add_argument(option, type=int, metavar=metavar, help=shown)

    size("--cpus", standard.cpus, "C", "CPUs of each node, may be more than are real")
    size("--gpus", standard.gpus, "G", "GPUs of each node, by name only")
    size("--memory", standard.memory, "MB", "memory of each node, may be more than is real")
    number("--tmp-size", standard.tmp_size, "MIB", "size of each node's /tmp and of its /dev/shm")
    number("--port-base", None, "P", "first of the ports (default: a row of free ones)")
    number("--kill-wait", standard.kill_wait, "S", "seconds from a job's SIGTERM to SIGKILL")
    number("--grace-time", standard.grace_time, "S", "seconds a preempted job of 'low' has")
    number("--over-time-limit", standard.over_time_limit, "MIN", "minutes beyond --time")
    up.add_argument(
        "--share",
        type=Path,
        action="extend",
        nargs="+",
        default=[],
        metavar="DIR",
        help="folder below /tmp or /dev/shm that all nodes see at the same path",
    )
    up.add_argument(
        "--slurm-conf",
        type=argparse.FileType(encoding="utf-8"),
        metavar="FILE",
        help="lines laid over slurm.conf: settings, words of NodeName lines, or all partitions",
    )
    up.add_argument("--no-accounting", action="store_true", help="no slurmdbd: boots faster")
    up.add_argument(
        "--job-comment",
        action=argparse.BooleanOptionalAction,
        default=standard.job_comment,
        help="keep a job's comment in the accounting (default: no)",
    )


def _absolute(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _print(values: dict[str, Any]) -> None:
    print(json.dumps(values, indent=1))


def _install(options: argparse.Namespace) -> int:
    packages = _packages.install()
    if options.json:
        _print({"installed": packages})
    else:
        print("installed: " + " ".join(packages) if packages else "nothing to install")
    return 0


def _sizes(options: argparse.Namespace) -> dict[str, int]:
    """Gives CPUs, GPUs and memory of a node: the options' values, else the machine's."""
    given = {
        name: value
        for name in ("cpus", "gpus", "memory")
        if (value := getattr(options, name)) is not None
    }
    if options.machine is None:
        return given
    machine = MACHINES[options.machine]
    for name in ("cpus", "gpus"):
        if name in given:
            raise DevclusterError(f"--{name} is the machine's; leave it out with --machine")
    has = {"cpus": machine.cpus, "gpus": len(machine.gpus), "memory": machine.memory_mib}
    return has | given


def _up(options: argparse.Namespace) -> int:
    settings = Settings(
        box=options.box,
        nodes=options.nodes,
        machine=MACHINES.get(options.machine),
        **_sizes(options),
        tmp_size=options.tmp_size,
        accounting=not options.no_accounting,
        port_base=options.port_base,
        kill_wait=options.kill_wait,
        grace_time=options.grace_time,
        over_time_limit=options.over_time_limit,
        job_comment=options.job_comment,
        shares=tuple(_absolute(share) for share in options.share),
        slurm_conf=tuple(options.slurm_conf.read().splitlines()) if options.slurm_conf else (),
    )
    # A signal takes the same way out as a failure, which leaves nothing running.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    state = _boot.up(settings, _say)
    if options.json:
        _print(_cluster.describe(state))
        return 0
    box = "" if options.box == _default_box() else f" --box {shlex.quote(str(options.box))}"
    print(f"{len(state.nodes)} nodes are up: {' '.join(state.nodes)}. To use them:")
    print(f"  export SLURM_CONF={shlex.quote(state.slurm_conf)}")
    print(f"To look at one, and to end them:\n  {sys.argv[0]} exec{box} node1 -- df /tmp")
    print(f"  {sys.argv[0]} down{box}")
    return 0


def _say(line: str) -> None:
    # The reader may have closed the pipe; that must not stop a boot.
    with contextlib.suppress(BrokenPipeError):
        print(line, file=sys.stderr, flush=True)


def _interrupt(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _down(options: argparse.Namespace) -> int:
    stopped = _cluster.down(options.box, purge=options.purge)
    print(f"the cluster in {options.box} is down" if stopped else f"nothing is up in {options.box}")
    return 0


def _status(options: argparse.Namespace) -> int:
    values = _cluster.status(options.box)
    if options.json:
        _print(values)
    elif not values["up"]:
        print(f"nothing is up in {options.box}")
    else:
        print(f"box {values['box']}, SLURM_CONF={values['slurm_conf']}")
        for item in [*values["daemons"], *values["nodes"]]:
            life = "runs" if item["alive"] else "DEAD"
            more = f"  {item['address']:<12} {item['state']}" if "address" in item else ""
            print(f"  {item['name']:<10} {life}  pid {item['pid']!s:<8}{more}".rstrip())
    if not values["up"]:
        return _STATUS_DOWN
    return _FAILED if values["dead"] else 0


def _env(options: argparse.Namespace) -> int:
    state = _cluster.running(options.box)
    if options.json:
        _print({"SLURM_CONF": state.slurm_conf})
    else:
        print(f"export SLURM_CONF={shlex.quote(state.slurm_conf)}")
    return 0


def _restart(options: argparse.Namespace) -> int:
    process = _cluster.restart(options.box, options.name, kill=options.kill)
    if options.json:
        _print({"name": options.name, "pid": process.pid})
    else:
        print(f"{options.name} runs again, pid {process.pid}")
    return 0


def _exec(options: argparse.Namespace) -> int:
    if not options.words:
        raise DevclusterError("exec needs a command: devcluster exec NODE -- CMD...")
    state = _cluster.running(options.box)
    if options.node not in state.nodes:
        raise DevclusterError(f"no node {options.node}; there are {', '.join(state.nodes)}")
    process = state.processes.get(options.node)
    if process is None or not process.alive():
        raise DevclusterError(f"the slurmd of {options.node} does not run")
    _cluster.require_root("exec")
    environment = dict(os.environ) | {
        "SLURM_CONF": state.slurm_conf,
        "SLURMD_NODENAME": options.node,
    }
    enter(process.pid, options.words, preloaded(environment, state.environment))


_COMMANDS = {
    "install": _install,
    "up": _up,
    "down": _down,
    "status": _status,
    "env": _env,
    "restart": _restart,
    "exec": _exec,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the exit status is 1 for what went wrong and 2 for wrong usage."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    words: list[str] = []
    if "--" in given:
        # argparse would read options of the command as its own.
        cut = given.index("--")
        given, words = given[:cut], given[cut + 1 :]
    parser = _parser()
    options = parser.parse_args(given)
    if words and options.command != "exec":
        parser.error(f"{options.command} takes no '--'")
    if options.command == "exec":
        options.words += words
    if "box" in options:
        options.box = _absolute(options.box)
    try:
        status = _COMMANDS[options.command](options)
        sys.stdout.flush()
    except DevclusterError as error:
        print(f"devcluster: {error}", file=sys.stderr)
        return _FAILED
    except BrokenPipeError:
        # The reader (head, less) has gone: its right. Nothing is left to be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    except KeyboardInterrupt:
        end = "; nothing was left running" if options.command == "up" else ""
        print(f"devcluster: interrupted{end}", file=sys.stderr)
        return _INTERRUPTED
    return status
