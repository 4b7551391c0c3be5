"""A cluster that has been booted: its state file, status, restart of a daemon, shutdown."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _procs
from _config import Layout, Ports, node_address
from _errors import DevclusterError
from _procs import Process

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MARKER = ".hpml-devcluster"
FOLDERS = ("etc", "run", "log", "state", "spool", "dev", "mysql", "tmp", "machine")
_KEPT_AFTER_DOWN = "log"
_CONTROLLER_DAEMONS = ("slurmctld", "slurmdbd", "mariadbd", "munged")


@dataclass
class State:
    """What a running cluster leaves in its box for the commands that come later."""

    box: str
    slurm_conf: str
    tag: str
    port_base: int
    nodes: list[str]
    visible: list[str]
    seconds: float = 0.0
    ready: bool = False
    machine: str | None = None
    environment: dict[str, str] = field(default_factory=dict)  # of all processes of the nodes
    processes: dict[str, Process] = field(default_factory=dict)
    commands: dict[str, list[str]] = field(default_factory=dict)  # of the daemons

    @staticmethod
    def path(box: Path) -> Path:
        """Where it is kept."""
        return box / "cluster.json"

    def save(self) -> None:
        """Writes it, all or nothing."""
        path = self.path(Path(self.box))
        draft = path.with_suffix(".tmp")
        draft.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        draft.replace(path)

    @classmethod
    def load(cls, box: Path) -> State | None:
        """Reads it; None where no cluster has been booted."""
        try:
            values: dict[str, Any] = json.loads(cls.path(box).read_text(encoding="utf-8"))
            values["processes"] = {
                name: Process(**process) for name, process in values["processes"].items()
            }
            return cls(**values)
        except FileNotFoundError:
            return None
        except PermissionError:
            raise DevclusterError(f"no right to read the box {box}") from None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DevclusterError(f"{cls.path(box)} is damaged: {error}") from None

    def dead(self) -> list[str]:
        """Names the processes that should run and do not."""
        return [name for name, process in self.processes.items() if not process.alive()]


def running(box: Path) -> State:
    """Gives the state of a cluster that is up; raises if no cluster is up."""
    state = State.load(box)
    if state is None or len(state.dead()) == len(state.processes):
        raise DevclusterError(f"no cluster is up in {box}")
    return state


@contextlib.contextmanager
def only_one(box: Path) -> Iterator[None]:
    """Keeps a second up or down off the same box."""
    with (box / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DevclusterError(f"another up or down is at work in {box}") from None
        yield


def require_root(what: str) -> None:
    """Raises for anybody but root."""
    if os.geteuid() != 0:
        raise DevclusterError(f"{what} needs root (name spaces, and jobs of several users)")


# --- status -------------------------------------------------------------------------------------


def _ask(box: Path, *command: str, seconds: float = 10) -> str | None:
    """Runs a short Slurm command; None if it does not answer."""
    environment = _procs.daemon_environment(SLURM_CONF=str(Layout(box).slurm_conf))
    try:
        result = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd="/",
            timeout=seconds,
            check=False,
        )
    except (subprocess.TimeoutExpired, OSError):
        return None
    return result.stdout if result.returncode == 0 else None


def node_states(box: Path) -> dict[str, str]:
    """Gives each node's state in Slurm's words, nothing where the controller does not answer."""
    output = _ask(box, "sinfo", "-h", "-a", "-N", "-o", "%N %T") or ""
    return dict(line.split() for line in output.splitlines())


def status(box: Path) -> dict[str, Any]:
    """Describes a cluster: its processes, and its nodes as Slurm sees them."""
    state = State.load(box)
    if state is None or len(state.dead()) == len(state.processes):
        return {"box": str(box), "up": False, "dead": [], "daemons": [], "nodes": []}
    dead = state.dead()
    states = {} if "slurmctld" in dead else node_states(box)
    daemons = [
        {"name": name, "pid": process.pid, "alive": name not in dead}
        for name, process in state.processes.items()
        if name not in state.nodes
    ]
    nodes = [
        {
            "name": name,
            "address": node_address(index),
            "pid": state.processes[name].pid if name in state.processes else None,
            "alive": name in state.processes and name not in dead,
            "state": states.get(name),
        }
        for index, name in enumerate(state.nodes)
    ]
    return describe(state) | {"up": True, "dead": dead, "daemons": daemons, "nodes": nodes}


def describe(state: State) -> dict[str, Any]:
    """Gives what a user of a cluster has to know of it."""
    return {
        "box": state.box,
        "slurm_conf": state.slurm_conf,
        "nodes": state.nodes,
        "visible": state.visible,
        "port_base": state.port_base,
        "machine": state.machine,
        "pids": {name: process.pid for name, process in state.processes.items()},
        "seconds": state.seconds,
    }


# --- restart ------------------------------------------------------------------------------------


def restart(box: Path, name: str, *, kill: bool) -> Process:
    """Ends slurmctld or a slurmd and starts it again, where its jobs and files still are."""
    require_root("restart")
    with only_one(box):
        state = running(box)
        if name not in (*state.nodes, "slurmctld") or name in state.dead():
            raise DevclusterError(f"no slurmctld and no slurmd of a node is running as {name}")
        process = state.processes[name]
        # Its namespaces hold the node's /tmp: without a process or a descriptor they would go.
        with _opened(process, "mnt") as mounts, _opened(process, "uts") as names:
            if kill:
                _procs.kill([process])
            else:
                _procs.stop([process], 20)
            own = state.environment if name in state.nodes else {}
            state.processes[name], child = _procs.start_detached(
                ("nsenter", f"--mount={mounts}", f"--uts={names}", "--", *state.commands[name]),
                Layout(box).log(name),
                _procs.daemon_environment(SLURM_CONF=state.slurm_conf) | own,
            )
            state.save()
            done = _procs.wait_until(lambda: child.poll() is not None or _answers(state, name), 60)
        if not done or child.poll() is not None:
            raise DevclusterError(f"{name} did not start again; see {Layout(box).log(name)}")
    return state.processes[name]


@contextlib.contextmanager
def _opened(process: Process, kind: str) -> Iterator[str]:
    """Opens a namespace of a process, and gives a path to it that outlives the process."""
    with Path(f"/proc/{process.pid}/ns/{kind}").open("rb") as space:
        yield f"/proc/{os.getpid()}/fd/{space.fileno()}"


def _answers(state: State, name: str) -> bool:
    """Tells whether slurmctld answers, or a node's slurmd takes connections."""
    if name not in state.nodes:
        return _ask(Path(state.box), "scontrol", "ping") is not None
    index = state.nodes.index(name)
    with socket.socket() as probe:
        return probe.connect_ex((node_address(index), Ports(state.port_base).node(index))) == 0


# --- down ---------------------------------------------------------------------------------------


def down(box: Path, *, purge: bool = False) -> bool:
    """Stops a cluster and clears its box but for the logs; False where there was nothing to do."""
    if not (box / MARKER).exists():
        return False
    require_root("down")
    with only_one(box):
        state = State.load(box)
        if state is not None:
            halt(state)
        if purge:
            shutil.rmtree(box)
    return state is not None


def halt(state: State) -> None:
    """Ends all of a cluster, whole or half booted, and clears its box but for the logs."""
    box = Path(state.box)
    alive = {name: process for name, process in state.processes.items() if process.alive()}
    if "slurmctld" in alive and state.ready:
        _cancel_jobs(box)
    _procs.stop([alive[name] for name in state.nodes if name in alive], 10)
    # Jobs that did not end, and what has crept away from Slurm's process tracking.
    while strays := _procs.inside(state.tag):
        _procs.kill(strays)
    for name in _CONTROLLER_DAEMONS:  # each one still has those it needs
        if name in alive:
            _procs.stop([alive[name]], 20)
    for name in FOLDERS:
        if name != _KEPT_AFTER_DOWN:
            shutil.rmtree(box / name, ignore_errors=True)
    State.path(box).unlink(missing_ok=True)


def _cancel_jobs(box: Path) -> None:
    """Ends jobs in Slurm's own way first, so that a waiting srun or sbatch --wait hears of it."""
    jobs = (_ask(box, "squeue", "-h", "-o", "%A") or "").split()
    if not jobs:
        return
    _cancel(box, jobs)
    _cancel(box, jobs, "--full", "--signal=KILL")
    _procs.wait_until(lambda: not (_ask(box, "squeue", "-h", "-o", "%A") or "").split(), 5)


def _cancel(box: Path, jobs: Sequence[str], *options: str) -> None:
    _ask(box, "scancel", "--quiet", *options, *jobs)
