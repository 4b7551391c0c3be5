"""The provenance of a run: code, versions, host, command line."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpml_orchestrator.records.schema import GitRecord, ProvenanceRecord

# Run git on the code of a job.

# Filters run as usual: without that of Git LFS, its files would count as changed.
# Without the last setting, `git diff` rewrites the index if only times of files differ.
_QUIET = ("core.hooksPath=/dev/null", "core.fsmonitor=", "diff.autoRefreshIndex=false")
# Inside a git hook, the other GIT_ variables point to another repository than the job's.
_KEPT_VARIABLES = ("GIT_CONFIG_", "GIT_CEILING_", "GIT_DISCOVERY_")


def run_git(
    directory: str, *arguments: str, timeout: float | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run git in a directory; it changes nothing there, runs no hooks and does not prompt.

    Raises:
        OSError: git cannot be started.
        subprocess.TimeoutExpired: it took too long.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name.startswith(_KEPT_VARIABLES)
    }
    environment |= {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    settings = [word for setting in _QUIET for word in ("-c", setting)]
    return subprocess.run(
        ["git", "-C", directory, *settings, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=timeout,
    )


_GIT_TIMEOUT_SECONDS = 20
_PLAIN_DIFF = ("--binary", "--no-color", "--no-ext-diff", "--no-textconv")
_DIFF_LIMIT_BYTES = 4 * 1024 * 1024


def collect(
    directory: str,
    *,
    argv: Sequence[str],
    environment: Mapping[str, str],
    own: Sequence[Path] = (),
) -> tuple[ProvenanceRecord, bytes]:
    """Return the provenance of a submission and the diff of the uncommitted changes.

    Args:
        directory: of the job's code; its git repository is described.
        argv: the command line of hpml.
        environment: variables with the user's name.
        own: directories that hpml writes to; untracked files there do not count as changes.

    Returns:
        A mapping for the record, and the diff (`git diff HEAD --binary`) as bytes: empty when the
        tree is clean or not a git checkout, or the diff is over 4 MiB (`git.diff` notes that).
    """
    git, diff = _git(directory, own)
    record: ProvenanceRecord = {
        "hpml": __version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "user": environment.get("USER") or environment.get("LOGNAME") or str(os.getuid()),
        "command_line": list(argv),
        "directory": _working_directory(),
        "git": git,
    }
    return record, diff


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed while this process is in it
        return ""


def _git(directory: str, own: Sequence[Path]) -> tuple[GitRecord | None, bytes]:
    place = _git_output(directory, "rev-parse", "HEAD", "--show-toplevel", "--abbrev-ref", "HEAD")
    if place is None:
        return None, b""
    commit, *top, branch = place.decode(errors="replace").rstrip("\n").split("\n")
    status = _git_output(directory, "status", "--porcelain", "--untracked-files=normal")
    # With the user's colours or diff program, the output could not be applied as a patch.
    diff = _git_output(directory, "diff", "HEAD", *_PLAIN_DIFF) or b""
    root, own = Path("\n".join(top)), [Path(os.path.realpath(path)) for path in own]
    lines = [
        line
        for line in (status or b"").decode(errors="replace").splitlines()
        if not (line.startswith("??") and _is_in(root / line[3:], own))
    ]
    record: GitRecord = {
        "commit": commit,
        "branch": branch,
        "top": str(root),
        "dirty": None if status is None else bool(lines),
        "untracked": [line[3:] for line in lines if line.startswith("??")][:100],
    }
    if len(diff) > _DIFF_LIMIT_BYTES:
        record["diff"] = f"left out: {len(diff)} bytes, over {_DIFF_LIMIT_BYTES}"
        diff = b""
    elif diff:
        record["diff"] = "dirty.diff"
    return record, diff


def _is_in(path: Path, directories: Sequence[Path]) -> bool:
    return any(path == directory or directory in path.parents for directory in directories)


def _git_output(directory: str, *arguments: str) -> bytes | None:
    try:
        done = run_git(directory, *arguments, timeout=_GIT_TIMEOUT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
