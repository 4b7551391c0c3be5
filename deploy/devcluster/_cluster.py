"""The cluster as a whole: booting it, asking how it is, taking it down."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _procs
from _config import Files, Layout, Ports, Settings, node_address, short_name
from _errors import DevclusterError
from _nodes import PRIVATE_FOLDERS, NodeSpec, folders_to_keep
from _packages import missing_packages
from _procs import Process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_MARKER = ".hpml-devcluster"
_FOLDERS = ("etc", "run", "log", "state", "spool", "dev", "mysql")
_KEPT_AFTER_DOWN = "log"
_LOG_LINES = 15
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
    processes: dict[str, Process] = field(default_factory=dict)

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
    """Gives the state of a cluster that is up; raises where there is none."""
    state = State.load(box)
    if state is None or len(state.dead()) == len(state.processes):
        raise DevclusterError(f"no cluster is up in {box}")
    return state


@contextlib.contextmanager
def _only_one(box: Path) -> Iterator[None]:
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


# --- up -----------------------------------------------------------------------------------------


def up(settings: Settings, say: Callable[[str], None]) -> State:
    """Boots a cluster; on any failure nothing of it is left running."""
    require_root("up")
    settings.check()
    missing = missing_packages(accounting=settings.accounting)
    if missing:
        raise DevclusterError(
            f"these packages are missing: {' '.join(missing)}; run 'devcluster install' first"
        )
    box = settings.box
    _own_box(box)
    with _only_one(box):
        _refuse_second(box)
        ports = Ports.pick(settings)
        visible = folders_to_keep([box, *settings.shares])
        if settings.accounting:
            _require_passage(box)
        for name in _FOLDERS:
            folder = box / name
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(mode=0o755)
        return _Boot(settings, ports, visible, say).run()


def _own_box(box: Path) -> None:
    """Makes the box, or makes sure that it is one and ours: its content gets deleted."""
    try:
        box.mkdir(mode=0o755, parents=True, exist_ok=True)
        foreign = box.stat().st_uid != os.geteuid()
        strange = not (box / _MARKER).exists() and any(box.iterdir())
    except OSError as error:
        raise DevclusterError(f"cannot use the box {box}: {error.strerror}") from None
    if foreign:
        raise DevclusterError(f"the box {box} belongs to somebody else")
    if strange:
        raise DevclusterError(f"{box} holds other things than a cluster; choose another --box")
    box.chmod(0o755)
    (box / _MARKER).touch()


def _refuse_second(box: Path) -> None:
    state = State.load(box)
    if state is None:
        return
    dead = state.dead()
    if len(dead) < len(state.processes):
        hint = f" ({', '.join(dead)} died)" if dead else ""
        raise DevclusterError(f"a cluster is already up in {box}{hint}; 'devcluster down' ends it")
    # The machine went down under it, or all daemons were killed: jobs may still be there.
    _procs.kill(_procs.inside(state.tag))


def _require_passage(box: Path) -> None:
    """MariaDB does not run as root; its user must be able to get to its files."""
    for folder in box.parents:
        if not folder.stat().st_mode & 0o001:
            raise DevclusterError(
                f"MariaDB's user cannot reach {box}, because {folder} is closed to others: "
                f"choose another --box, or use --no-accounting"
            )


class _Boot:
    """One boot, step by step."""

    def __init__(
        self,
        settings: Settings,
        ports: Ports,
        visible: tuple[str, ...],
        say: Callable[[str], None],
    ) -> None:
        self.settings = settings
        self.layout = Layout(settings.box)
        self.files = Files(settings, ports, self.layout)
        self.ports = ports
        self.say = say
        self.began = time.monotonic()
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.commands = _procs.daemon_environment(SLURM_CONF=str(self.layout.slurm_conf))
        self.state = State(
            box=str(settings.box),
            slurm_conf=str(self.layout.slurm_conf),
            tag=f"devcluster-{secrets.token_hex(8)}",
            port_base=ports.base,
            nodes=list(settings.node_names),
            visible=list(visible),
        )

    def run(self) -> State:
        self.files.write()
        try:
            self._munged()
            if self.settings.accounting:
                self._mariadbd()
                self._slurmdbd()
            self._slurmctld()
            self._slurmds()
            self._first_job()
            self.state.seconds = round(time.monotonic() - self.began, 2)
            self.state.ready = True
            self.state.save()
        except BaseException:
            # Ctrl-C and signals too: half a cluster is of no use to anybody. A second one must
            # not cut the clean-up short.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            _halt(self.state)
            raise
        return self.state

    def _report(self, what: str) -> None:
        self.say(f"{time.monotonic() - self.began:6.2f} s  {what}")

    def _start(self, name: str, *command: str, spec: NodeSpec | None = None) -> None:
        if spec is not None:
            node = str(Path(__file__).with_name("_nodes.py"))
            command = (sys.executable, "-B", node, spec.to_json(), *command)
        process, child = _procs.start_detached(command, self.layout.log(name), self.commands)
        self.children[name] = child
        self.state.processes[name] = process
        self.state.save()

    def _wait(self, name: str, condition: Callable[[], bool], seconds: float) -> None:
        """Waits for a step to be done; a daemon that ended, or no time left, is a failure."""
        ended: list[str] = []

        def settled() -> bool:
            ended[:] = [other for other, child in self.children.items() if child.poll() is not None]
            return bool(ended) or condition()

        if not _procs.wait_until(settled, seconds):
            raise self._failure(name, f"was not ready after {seconds:.0f} s")
        if ended:
            raise self._failure(ended[0], f"ended with status {self.children[ended[0]].returncode}")

    def _failure(self, name: str, what: str) -> DevclusterError:
        log = self.layout.log(name)
        return DevclusterError(f"{name} {what}; the end of {log}:\n{_tail(log)}")

    def _command(self, *command: str, seconds: float = 20) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                command,
                env=self.commands,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                cwd="/",
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 124, "", f"no answer in {seconds:.0f} s")

    def _works(self, *command: str) -> Callable[[], bool]:
        return lambda: self._command(*command).returncode == 0

    def _must(self, name: str, *command: str, seconds: float = 60) -> str:
        result = self._command(*command, seconds=seconds)
        if result.returncode != 0:
            text = (result.stderr or result.stdout).strip()
            raise self._failure(name, f"did not take '{' '.join(command)}': {text}")
        return result.stdout

    def _munged(self) -> None:
        run, key = self.settings.box / "run", self.settings.box / "etc" / "munge.key"
        self._start(
            "munged",
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={self.layout.munge_socket}",
            f"--pid-file={run}/munged.pid",
            f"--seed-file={run}/munged.seed",
            f"--log-file={self.layout.log('munged')}",
        )
        self._wait("munged", self._works("munge", "-n", "-S", str(self.layout.munge_socket)), 20)
        self._report("munged answers")

    def _mariadbd(self) -> None:
        box = self.settings.box
        data, socket = box / "mysql", self.layout.mysql_socket
        shutil.chown(data, "mysql")
        self._must(
            "mariadbd",
            "mariadb-install-db",
            "--no-defaults",
            "--user=mysql",
            f"--datadir={data}",
            "--skip-test-db",
            "--auth-root-authentication-method=socket",
            seconds=120,
        )
        self._start(
            "mariadbd",
            "mariadbd",
            "--no-defaults",
            "--user=mysql",
            f"--datadir={data}",
            f"--socket={socket}",
            f"--port={self.ports.database}",
            "--bind-address=127.0.0.1",
            f"--pid-file={data}/mariadbd.pid",
            # What slurmdbd asks for, and otherwise as little memory and syncing as there can be.
            "--innodb-lock-wait-timeout=900",
            "--innodb-buffer-pool-size=64M",
            "--innodb-log-file-size=64M",
            "--innodb-flush-log-at-trx-commit=0",
            "--loose-innodb-snapshot-isolation=OFF",
            "--performance-schema=OFF",
            "--skip-log-bin",
        )
        client = ("--no-defaults", f"--socket={socket}")
        self._wait("mariadbd", self._works("mariadb-admin", *client, "ping"), 60)
        password = self.files.database_password
        # By standard input, as the words of a command are for all users to see.
        sql = (
            "create database slurm_acct_db;"
            f"create user slurm@'127.0.0.1' identified by '{password}';"
            f"create user slurm@localhost identified by '{password}';"
            "grant all on slurm_acct_db.* to slurm@'127.0.0.1';"
            "grant all on slurm_acct_db.* to slurm@localhost;"
        )
        result = subprocess.run(
            ["mariadb", *client],
            input=sql,
            env=self.commands,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if result.returncode != 0:
            raise self._failure("mariadbd", f"made no database: {result.stderr.strip()}")
        self._report("mariadbd has a database")

    def _controller_spec(self) -> NodeSpec:
        return NodeSpec(short_name(), self.state.tag, str(self.layout.hosts))

    def _slurmdbd(self) -> None:
        self._start("slurmdbd", "slurmdbd", "-D", spec=self._controller_spec())
        self._wait("slurmdbd", self._works("sacctmgr", "-n", "-P", "show", "cluster"), 60)
        add = ("sacctmgr", "-i", "add")
        self._must("slurmdbd", *add, "cluster", "devcluster")
        self._must("slurmdbd", *add, "account", "dev", "Description=dev", "Organization=dev")
        self._must("slurmdbd", *add, "user", "root,nobody", "account=dev")
        self._report("slurmdbd knows the cluster's users")

    def _slurmctld(self) -> None:
        conf = ("-f", str(self.layout.slurm_conf))
        self._start("slurmctld", "slurmctld", "-D", *conf, spec=self._controller_spec())
        self._wait("slurmctld", self._works("scontrol", "ping"), 60)
        self._report("slurmctld answers")

    def _slurmds(self) -> None:
        conf = ("-f", str(self.layout.slurm_conf))
        for name in self.settings.node_names:
            (self.settings.box / "spool" / name).mkdir()
            spec = NodeSpec(
                name=name,
                tag=self.state.tag,
                hosts=str(self.layout.hosts),
                private=PRIVATE_FOLDERS,
                visible=tuple(self.state.visible),
                tmp_size=self.settings.tmp_size,
            )
            self._start(name, "slurmd", "-D", "-N", name, *conf, spec=spec)
        wanted = dict.fromkeys(self.settings.node_names, "idle")
        first = self.settings.node_names[0]
        self._wait(first, lambda: node_states(self.settings.box) == wanted, 60)
        self.files.open_for_commands()
        self._report(f"{self.settings.nodes} nodes are idle")

    def _first_job(self) -> None:
        count = str(self.settings.nodes)
        output = self._must(
            "slurmctld", "srun", "-N", count, "-n", count, "-t", "1", "hostname", seconds=40
        )
        if sorted(output.split()) != sorted(self.settings.node_names):
            raise self._failure("slurmctld", f"ran the first job elsewhere: {output.split()}")
        self._report("the first srun ran on all of them")


def _tail(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return "\n".join(f"  {line}" for line in lines[-_LOG_LINES:]) or "  (it is empty)"


# --- status -------------------------------------------------------------------------------------


def _ask(box: Path, *command: str, seconds: float = 10) -> str | None:
    """Runs a short Slurm command; None where it does not answer."""
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
    output = _ask(box, "sinfo", "-h", "-N", "-p", "main", "-o", "%N %T") or ""
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
        "pids": {name: process.pid for name, process in state.processes.items()},
        "seconds": state.seconds,
    }


# --- down ---------------------------------------------------------------------------------------


def down(box: Path, *, purge: bool = False) -> bool:
    """Stops a cluster and clears its box but for the logs; False where there was nothing to do."""
    if not (box / _MARKER).exists():
        return False
    require_root("down")
    with _only_one(box):
        state = State.load(box)
        if state is not None:
            _halt(state)
        if purge:
            shutil.rmtree(box)
    return state is not None


def _halt(state: State) -> None:
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
    for name in _FOLDERS:
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
