"""What the processes of this machine are doing, for the report of a test that waited in vain."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["told_of"]

_SECONDS = 20


def told_of(folder: Path) -> str:
    """Return all processes, and the stacks of those whose command or directory names a folder."""
    columns = "pid,ppid,sid,psr,stat,etimes,time,wchan:20,args"
    parts = [_output("ps", "-eLww", "-o", columns)]
    spy = shutil.which("py-spy", path=str(Path(sys.executable).parent))
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _names(entry, str(folder)):
            parts.append(f"--- {entry.name}: {_read(entry / 'autogroup')}")
            parts.append(_read(entry / "stack"))
            if spy is not None:
                parts.append(_output(spy, "dump", "--pid", entry.name))
    return "\n".join(parts)


def _names(process: Path, folder: str) -> bool:
    try:
        return folder in _read(process / "cmdline") or folder in str((process / "cwd").readlink())
    except OSError:
        return False


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "replace").replace("\0", " ").strip()
    except OSError:
        return ""


def _output(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout + done.stderr
