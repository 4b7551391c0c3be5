"""What makes a node look like another machine: its files, and what its processes preload."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import _procs
from _errors import DevclusterError
from _sysfs import OVER, write_tree

if TYPE_CHECKING:
    from _machines import Machine

_SOURCE = Path(__file__).parent / "vmachine" / "vmachine.c"
_COMPILER = "gcc"


@dataclass(frozen=True)
class Virtual:
    """A machine that has been written into the box.

    Attributes:
        binds: real folders and the places in the machine's tree where a node mounts them.
        over: folders of the tree and what a node lays them over.
        environment: what the processes of a node need to see the machine.
    """

    binds: tuple[tuple[str, str], ...] = ()
    over: tuple[tuple[str, str], ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


def prepare(machine: Machine, root: Path, prolog: Path) -> Virtual:
    """Writes the machine's tree, its library and the task prolog that brings it into jobs."""
    records, library = root / "records", root / "vmachine.so"
    records.mkdir()
    records.chmod(0o777)  # jobs of all users write there, and replace each other's
    compile_library(machine, library, records)
    binds = write_tree(machine, root)
    over = tuple((str(root / part), real) for part, real in OVER.items() if Path(real).is_dir())
    # hwloc would ask the processor itself, CPU by CPU, and get the real one's answers.
    environment = {"LD_PRELOAD": str(library), "HWLOC_COMPONENTS": "-x86"}
    _write_prolog(prolog, environment)
    return Virtual(tuple(binds), over, environment)


def preloaded(environment: dict[str, str], own: dict[str, str]) -> dict[str, str]:
    """Adds what a node's processes need to an environment that may already have preloads."""
    library, before = own.get("LD_PRELOAD"), environment.get("LD_PRELOAD")
    joined = environment | own
    if library and before:
        joined["LD_PRELOAD"] = before if library in before.split(":") else f"{library}:{before}"
    return joined


def compile_library(machine: Machine, library: Path, records: Path) -> None:
    """Compiles vmachine/ for one machine and one folder of records."""
    command = [
        _COMPILER,
        *("-std=gnu11", "-shared", "-fPIC", "-O2"),
        f"-DVIRTUAL_CPUS={machine.cpus}",
        f"-DVIRTUAL_DOMAINS={machine.all_domains}",
        f'-DRECORDS="{records}"',
        *("-o", str(library), str(_SOURCE), "-ldl", "-pthread"),
    ]
    result = subprocess.run(
        command,
        env=_procs.daemon_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise DevclusterError(f"{_COMPILER} did not compile {_SOURCE.name}:\n{result.stderr}")


def _write_prolog(path: Path, environment: dict[str, str]) -> None:
    """Writes what slurmstepd runs before each task, the batch script included."""
    library = environment["LD_PRELOAD"]
    others = [
        f"echo export {name}={value}" for name, value in environment.items() if name != "LD_PRELOAD"
    ]
    lines = [
        "#!/bin/sh",
        'case ":$LD_PRELOAD:" in',
        f"*:{library}:*) ;;",
        f'*) echo "export LD_PRELOAD={library}${{LD_PRELOAD:+:$LD_PRELOAD}}" ;;',
        "esac",
        *others,
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    path.chmod(0o755)
