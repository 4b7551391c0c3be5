"""The ways that everybody has to copy a tree, to compare with: cp, rsync, tar, Python."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import StagingError
from hpml_orchestrator.staging.ladder import LARGE, SMALL, Way
from hpml_orchestrator.staging.request import StagingStopped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["peers", "run_program"]

_ASKED_EVERY_SECONDS = 0.1
_TAR = 'tar cf - -C "$1" . | tar xf - -C "$2"'


def peers(
    small: str,
    large: str,
    should_stop: Callable[[], bool],
    which: Callable[[str], str | None] = shutil.which,
) -> list[Way]:
    """Return the ways that this machine has the programs for.

    Args:
        small: directory of the small files.
        large: directory of the large one.
        should_stop: asked while a program runs, which is ended then.
        which: finds programs.
    """

    def run(*words: str) -> Callable[[str], None]:
        return lambda target: run_program([*words, target], should_stop)

    found = []
    if which("cp"):
        found.append(Way("cp -r", SMALL, False, run("cp", "-r", f"{small}/.")))
    if which("rsync"):
        found.append(Way("rsync -a -W", SMALL, False, run("rsync", "-a", "-W", f"{small}/")))
    if which("tar") and which("sh"):
        found.append(Way("tar | tar", SMALL, False, run("sh", "-c", _TAR, "sh", small)))
    found.append(Way("shutil.copytree", SMALL, False, _copytree(small)))
    if which("cp"):
        found.append(Way("cp, one file", LARGE, False, run("cp", "-r", f"{large}/.")))
    return found


def run_program(words: Sequence[str], should_stop: Callable[[], bool]) -> None:
    """Run a program to its end in a process group of its own.

    Raises:
        StagingStopped: should_stop said so; the program was ended.
        StagingError: it failed; with the last line of what it said.
    """
    with subprocess.Popen(
        list(words),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        said: list[bytes] = []
        # a thread waits, for that ends at once with the program, unlike asking now and then
        waiter = threading.Thread(target=lambda: said.append(process.communicate()[1]), daemon=True)
        waiter.start()
        try:
            while waiter.is_alive():
                waiter.join(_ASKED_EVERY_SECONDS)
                if should_stop():
                    raise StagingStopped
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            waiter.join()
            raise
    if process.returncode:
        lines = b"".join(said).decode("utf-8", "backslashreplace").strip().splitlines()
        raise StagingError(f"{words[0]} ended with {process.returncode}: {(lines or ['-'])[-1]}")


def _copytree(small: str) -> Callable[[str], None]:
    def run(target: str) -> None:
        shutil.copytree(small, f"{target}/small")

    return run
