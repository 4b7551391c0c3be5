"""Which version of Slurm the commands on this machine are."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from hpml_orchestrator.errors import SchedulerUnavailable
from hpml_orchestrator.scheduler.command import SubprocessRunner
from hpml_orchestrator.scheduler.slurm.ask import ask, unusable
from hpml_orchestrator.scheduler.slurm.values import parse_version

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpml_orchestrator.scheduler.command import Runner

__all__ = ["slurm_version"]

_TIMEOUT_SECONDS = 15.0
_KNOWN: WeakKeyDictionary[object, tuple[int, ...]] = WeakKeyDictionary()


def slurm_version(
    run: Runner, *, env: Mapping[str, str] | None = None, fresh: bool = False
) -> tuple[int, ...]:
    """Return the version, such as `(22, 5, 8)`; sbatch is asked once per process.

    Args:
        run: starts commands; all that start real processes share one answer.
        env: environment of the command; the process's own when none is given.
        fresh: ask again.

    Raises:
        CommandMissing: there is no sbatch.
        SchedulerUnavailable: it says no version.
    """
    key: object = SubprocessRunner if isinstance(run, SubprocessRunner) else run
    if not fresh and key in _KNOWN:
        return _KNOWN[key]
    done = ask(run, ["sbatch", "--version"], env=env, timeout=_TIMEOUT_SECONDS)
    if done.returncode != 0:
        raise unusable("sbatch", done)
    version = parse_version(done.stdout)
    if not version:
        raise SchedulerUnavailable(f"sbatch says no version: {done.stdout.strip()[:60] or '?'}")
    _KNOWN[key] = version
    return version
