"""Run git on the code of a job."""

from __future__ import annotations

import os
import subprocess

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
