"""Booting a cluster, step by step."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import _procs
from _cluster import FOLDERS, MARKER, State, halt, node_states, only_one, require_root
from _config import Files, Layout, Ports, Settings, short_name
from _errors import DevclusterError
from _nodes import PRIVATE_FOLDERS, NodeSpec, folders_to_keep
from _packages import missing_packages
from _virtual import Virtual, prepare

if TYPE_CHECKING:
    from collections.abc import Callable

_LOG_LINES = 15


def up(settings: Settings, say: Callable[[str], None]) -> State:
    """Boots a cluster; on any failure nothing of it is left running."""
    require_root("up")
    settings.check()
    missing = missing_packages(accounting=settings.accounting, machine=settings.machine is not None)
    if missing:
        raise DevclusterError(
            f"these packages are missing: {' '.join(missing)}; run 'devcluster install' first"
        )
    box = settings.box
    _own_box(box)
    with only_one(box):
        _refuse_second(box)
        ports = Ports.pick(settings)
        visible = folders_to_keep([box, *settings.shares])
        if settings.accounting:
            _require_passage(box)
        for name in FOLDERS:
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
        strange = not (box / MARKER).exists() and any(box.iterdir())
    except OSError as error:
        raise DevclusterError(f"cannot use the box {box}: {error.strerror}") from None
    if foreign:
        raise DevclusterError(f"the box {box} belongs to somebody else")
    if strange:
        raise DevclusterError(f"{box} holds other things than a cluster; choose another --box")
    box.chmod(0o755)
    (box / MARKER).touch()


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
            machine=settings.machine.name if settings.machine else None,
        )
        self.virtual = Virtual()

    def run(self) -> State:
        self.files.write()
        try:
            self._machine()
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
            halt(self.state)
            raise
        return self.state

    def _report(self, what: str) -> None:
        self.say(f"{time.monotonic() - self.began:6.2f} s  {what}")

    def _start(self, name: str, *command: str, spec: NodeSpec | None = None) -> None:
        self.state.commands[name] = list(command)
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

    def _must(self, name: str, *command: str, seconds: float = 180) -> str:
        result = self._command(*command, seconds=seconds)
        if result.returncode != 0:
            text = (result.stderr or result.stdout).strip()
            raise self._failure(name, f"did not take '{' '.join(command)}': {text}")
        return result.stdout

    def _machine(self) -> None:
        machine = self.settings.machine
        if machine is None:
            return
        root, prolog = self.settings.box / "machine", self.layout.task_prolog
        self.virtual = prepare(machine, root, prolog)
        self.state.environment = self.virtual.environment
        self._report(f"nodes will look like {machine.name}")

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
        self._wait("munged", self._works("munge", "-n", "-S", str(self.layout.munge_socket)), 180)
        self._report("munged answers")

    def _mariadbd(self) -> None:
        box = self.settings.box
        data, socket = box / "mysql", self.layout.mysql_socket
        # Not /tmp: a MariaDB that starts deletes there the temporary tables of all others.
        temporary = box / "tmp"
        shutil.chown(data, "mysql")
        shutil.chown(temporary, "mysql")
        self._must(
            "mariadbd",
            "mariadb-install-db",
            "--no-defaults",
            "--user=mysql",
            f"--datadir={data}",
            f"--tmpdir={temporary}",
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
            f"--tmpdir={temporary}",
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
        self._wait("mariadbd", self._works("mariadb-admin", *client, "ping"), 180)
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
            timeout=180,
            check=False,
        )
        if result.returncode != 0:
            raise self._failure("mariadbd", f"made no database: {result.stderr.strip()}")
        self._report("mariadbd has a database")

    def _controller_spec(self) -> NodeSpec:
        return NodeSpec(short_name(), self.state.tag, str(self.layout.hosts))

    def _slurmdbd(self) -> None:
        self._start("slurmdbd", "slurmdbd", "-D", spec=self._controller_spec())
        self._wait("slurmdbd", self._works("sacctmgr", "-n", "-P", "show", "cluster"), 180)
        add = ("sacctmgr", "-i", "add")
        self._must("slurmdbd", *add, "cluster", "devcluster")
        self._must("slurmdbd", *add, "account", "dev", "Description=dev", "Organization=dev")
        self._must("slurmdbd", *add, "user", "root,nobody,games", "account=dev")
        self._report("slurmdbd knows the cluster's users")

    def _slurmctld(self) -> None:
        conf = ("-f", str(self.layout.slurm_conf))
        self._start("slurmctld", "slurmctld", "-D", *conf, spec=self._controller_spec())
        self._wait("slurmctld", self._works("scontrol", "ping"), 180)
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
                binds=self.virtual.binds,
                over=self.virtual.over,
                environment=self.virtual.environment,
            )
            self._start(name, "slurmd", "-D", "-N", name, *conf, spec=spec)
        wanted = dict.fromkeys(self.settings.node_names, "idle")
        first = self.settings.node_names[0]
        self._wait(first, lambda: node_states(self.settings.box) == wanted, 180)
        self.files.open_for_commands()
        self._report(f"{self.settings.nodes} nodes are idle")

    def _first_job(self) -> None:
        count = str(self.settings.nodes)
        output = self._must(
            "slurmctld", "srun", "-N", count, "-n", count, "-t", "1", "hostname", seconds=180
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
