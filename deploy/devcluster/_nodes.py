"""A virtual node: enters separate namespaces and runs a command inside them.

Run as a program (`_nodes.py SPEC COMMAND...`) it makes the calling process a node: own host name,
own /tmp and /dev/shm, own /etc/hosts; then it becomes COMMAND, which is slurmd. It keeps its
process number through all of that, so whoever started it knows slurmd's. The controller's daemons
start the same way for the sake of /etc/hosts, but keep the machine's folders.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from _errors import DevclusterError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PRIVATE_FOLDERS = ("/tmp", "/dev/shm")

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUTS = 0x04000000
_MS_NOSUID = 0x2
_MS_NODEV = 0x4
_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_PRIVATE = 0x40000
_MNT_DETACH = 0x2


@dataclass(frozen=True)
class NodeSpec:
    """What makes one virtual node."""

    name: str  # its host name
    tag: str  # the cluster's random mark, see _procs.inside
    hosts: str  # file to be seen as /etc/hosts
    private: tuple[str, ...] = ()  # folders of which it has its own
    visible: tuple[str, ...] = ()  # folders that remain visible below the private ones
    tmp_size: int = 0  # MiB, for each private folder
    binds: tuple[tuple[str, str], ...] = ()  # real folders, and where else they appear
    over: tuple[tuple[str, str], ...] = ()  # folders, and what they are laid over
    environment: dict[str, str] = field(default_factory=dict)  # added to that of the command

    def to_json(self) -> str:
        """Writes it for the command line."""
        return json.dumps(asdict(self))


def folders_to_keep(folders: Iterable[Path]) -> tuple[str, ...]:
    """Picks the folders that a private /tmp or /dev/shm would hide; each one only once."""
    keep: list[Path] = []
    for folder in sorted({folder.resolve() for folder in folders}):
        for private in PRIVATE_FOLDERS:
            if folder == Path(private):
                raise DevclusterError(
                    f"{private} is private to each node and cannot be shared as a whole; "
                    f"share a folder in it"
                )
        hidden = any(folder.is_relative_to(private) for private in PRIVATE_FOLDERS)
        if hidden and not any(folder.is_relative_to(kept) for kept in keep):
            keep.append(folder)
    return tuple(str(folder) for folder in keep)


def _check(result: int, what: str) -> None:
    if result != 0:
        raise DevclusterError(f"{what}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str, target: str, kind: str, flags: int, data: str) -> None:
    # mount(8) would resolve the descriptor paths that become() needs, hence the call itself.
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode()
    )
    _check(result, f"cannot mount {target}")


def become(spec: NodeSpec) -> None:
    """Turns this process into the node: everything after runs in the node's namespaces."""
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS), "cannot create separate namespaces")
    # First of all: no mount made here may travel back to the machine.
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE, "")
    socket.sethostname(spec.name)
    _mount(spec.hosts, "/etc/hosts", "", _MS_BIND, "")
    # The only way to a folder once its parent is covered is a descriptor opened before.
    kept = [(os.open(path, os.O_PATH | os.O_DIRECTORY), path) for path in spec.visible]
    for private in spec.private:
        options = f"mode=1777,size={spec.tmp_size}m"
        source = f"{spec.tag}-{spec.name}"
        _mount(source, private, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    os.umask(0o022)
    for descriptor, path in kept:
        os.makedirs(path, exist_ok=True)
        _mount(f"/proc/self/fd/{descriptor}", path, "", _MS_BIND | _MS_REC, "")
        os.close(descriptor)
    for source, target in (*spec.binds, *spec.over):
        _mount(source, target, "", _MS_BIND | _MS_REC, "")
    if spec.over:
        _hide_cpusets()
    os.chdir("/")


def _hide_cpusets() -> None:
    """Takes the cgroups away that name real CPUs: hwloc would believe in no others."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/mounts", encoding="utf-8") as mounts:
        found = [line.split() for line in mounts]
    for _, place, kind, options, *_ in reversed(found):
        if kind == "cgroup2" or (kind == "cgroup" and "cpuset" in options.split(",")):
            _check(libc.umount2(place.encode(), _MNT_DETACH), f"cannot unmount {place}")


def enter(pid: int, command: Sequence[str], environment: dict[str, str]) -> NoReturn:
    """Replaces this process by a command in the namespaces of the process given."""
    # Joining the mounts leaves the working directory at the root; go back if it exists here.
    back = 'cd "$1" 2>/dev/null || cd /; shift; exec "$@"'
    arguments = ["nsenter", "--target", str(pid), "--mount", "--uts", "--"]
    arguments += ["/bin/sh", "-c", back, "sh", os.getcwd(), *command]
    sys.stdout.flush()
    os.execvpe("nsenter", arguments, environment)  # noqa: S606 - it ends as the command


def _main() -> NoReturn:
    values = json.loads(sys.argv[1])
    spec = NodeSpec(**values)
    command = sys.argv[2:]
    try:
        become(spec)
        os.execvpe(command[0], command, os.environ | spec.environment)  # noqa: S606 - the daemon
    except (DevclusterError, OSError) as error:
        sys.exit(f"{spec.name}: {error}")


if __name__ == "__main__":
    _main()
