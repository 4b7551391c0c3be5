"""Run a job's program for a few steps under `memory_probe.py`.

It runs in the job's working directory; `{run.dir}` and the like are scratch directories.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hpml_orchestrator import assets
from hpml_orchestrator.errors import InputError, JobFailedError, counted
from hpml_orchestrator.records.process import live_processes
from hpml_orchestrator.records.texts import human_bytes, printable
from hpml_orchestrator.scheduler.command import job_environment
from hpml_orchestrator.scheduler.local.processes import identity, kill_until_gone
from hpml_orchestrator.script.render import render_environment
from hpml_orchestrator.script.template import variable, word
from hpml_orchestrator.staging.request import kind_at
from hpml_orchestrator.staging.space import memory_headroom

if TYPE_CHECKING:
    from hpml_orchestrator.records.job import Job

Figures: TypeAlias = Mapping[str, Any]
"""What a probe measured at one batch size, see `memory_probe.py`."""

_PROBE = Path(__file__).with_name("memory_probe.py")
_SHARE_OF_TIME = 0.5  # share of a run's time after which it ends, even if it still grows
_SHARE_OF_FREE = 0.8  # share of the free memory at which a run is ended
_POLL_SECONDS = 0.1
_KILL_SECONDS = 5.0
_FORMULAS = "advice by formulas: hpml advise JOB_FILE --model 7B"
_QUIET_PYTHON = ("-u", "-B", "-O", "-s", "-E")
_ERROR = re.compile(r"[\w.]*(Error|Exception)\b")
_ZEROS = ("RANK", "LOCAL_RANK", "SLURM_JOB_ID", "MASTER_PORT")  # port 0 means any free port
_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Measured:
    """What short runs of a program used, by batch size of a rank; 0 if the program chose it."""

    figures: Mapping[int, Figures]
    workers: Mapping[int, float]  # bytes of its child processes, excluding shared ones
    seconds: float  # all runs together
    notes: Sequence[str] = ()  # for the user

    @property
    def last(self) -> Figures:
        """The figures at the largest batch."""
        return self.figures[max(self.figures)]


def command_of(job: Job) -> list[str]:
    """Return a job's Python, then its script, or `-m` and its module, then the arguments.

    Raises:
        InputError: it does not exist, or `command` contains no Python program.
    """
    if job.environment.container is not None:
        message = "the program runs in a container, which hpml advise does not start"
        raise InputError(message, field="environment.container", hint=_FORMULAS)
    if job.command is None:
        python, rest = job.environment.python, ["-m", job.module or ""]
        rest = [job.script, *job.args] if job.script else [*rest, *job.args]
    else:
        python, *rest = [*job.command, *job.args]
        rest = [*itertools.dropwhile(_QUIET_PYTHON.__contains__, rest)]
        program = rest[1:2] if rest[:1] == ["-m"] else rest[:1]
        is_python = re.fullmatch(r"python(3(\.\d+)?)?", os.path.basename(python))
        if not is_python or not program or program[0].startswith("-"):
            shown, message = shlex.join(job.command), "is not a Python program that can be measured"
            raise InputError(message, field="command", value=shown, hint=_FORMULAS)
    if rest[0] != "-m":
        rest[0] = os.path.normpath(os.path.join(job.workdir, rest[0]))
        if not os.path.isfile(rest[0]):
            field = "script" if job.script else "command"
            raise InputError("is not a file", field=field, value=rest[0])
    return [python, *rest]


def measure(job: Job, commands: Mapping[int, Sequence[str]], limit_seconds: float) -> Measured:
    """Run a program for a few steps at one or two batch sizes and return what it used.

    Args:
        job: the complete job, for its environment and staged data.
        commands: commands by batch size of a rank, see `command_of`. After the first one, the next
            one that is possible also runs, to get two points of a line.
        limit_seconds: for all runs together; the first may use half of it, and so on.

    Raises:
        JobFailedError: the program fails, makes no step, or takes too long.
        InputError: it needs data that would be unpacked or does not exist.
    """
    began = time.monotonic()
    figures: dict[int, Figures] = {}
    workers: dict[int, float] = {}
    notes: list[str] = []
    for batch, command in commands.items():
        try:
            left = limit_seconds - (time.monotonic() - began)
            share = left / 2 if len(commands) > 1 else left
            figures[batch], workers[batch] = _run(job, command, share)
        except JobFailedError as fault:
            if not figures:
                raise
            notes.append(f"a run at batch {batch} was not possible: {fault}")
        if len(figures) > 1:
            break
    return Measured(figures, workers, time.monotonic() - began, notes)


def _run(
    job: Job, command: Sequence[str], seconds: float, how: str = "hooks"
) -> tuple[Figures, float]:
    """Run a program; return the probe's figures, and the peak memory of its child processes."""
    with tempfile.TemporaryDirectory(prefix="hpml-advise-") as name:
        scratch, target = Path(name), Path(name) / "figures.json"
        probe = [command[0], _PROBE, target, _SHARE_OF_TIME * seconds, how]
        functions = shlex.quote(str(assets.path("templates/sbatch/hpml-job.sh")))
        words = " ".join(map(word, [*probe, *command[1:]]))
        text = f"set -euo pipefail\nsource {functions}\n{render_environment(job)}\nexec {words}\n"
        (scratch / "start.sh").write_text(text, "utf-8")
        with (scratch / "output.txt").open("w+b") as output:
            process = subprocess.Popen(
                ["bash", str(scratch / "start.sh")],
                env=_variables(job, scratch),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                why, workers = _watch(process, seconds)
            finally:
                kill_until_gone(
                    lambda: map(identity, _session(process.pid)), patience_seconds=_KILL_SECONDS
                )
                process.wait()
            output.seek(0)
            lines = output.read().decode("utf-8", "replace").split("\n")
        figures = json.loads(target.read_text("utf-8")) if target.exists() else {"steps": 0}
    if figures["steps"] > 1:
        return figures, workers
    said = [line for line in lines if line.strip()] or [f"exit status {process.returncode}"]
    last = printable(next(filter(_ERROR.match, reversed(said)), said[-1]))
    if process.returncode > 0 and how == "hooks" and "hook" in last.lower():
        # torch.func and some compilers reject hooks for saved tensors
        return _run(job, command, seconds, "plain")
    why, hint = why or (last if process.returncode else "two are needed"), ""
    if why.startswith(("ImportError", "ModuleNotFoundError")):
        hint = f"check environment.venv, conda, modules and python ({command[0]}); "
    if why.endswith("--time-limit, are over"):
        hint = "give it more time with --time-limit; "
    made = counted(figures["steps"], "optimizer step")
    raise JobFailedError(f"{name_of(command)} ended after {made}: {why}", hint=hint + _FORMULAS)


def name_of(command: Sequence[str]) -> str:
    """Return the name of the program's file or module."""
    return os.path.basename(command[2] if command[1] == "-m" else command[1])


def _watch(process: subprocess.Popen[bytes], seconds: float) -> tuple[str, float]:
    """Wait for a program; return why it must be ended, and the peak memory of its children."""
    headroom, deadline, workers = memory_headroom(), time.monotonic() + seconds, 0.0
    most = float("inf") if headroom is None else _SHARE_OF_FREE * headroom.bytes
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_SECONDS)
            return "", workers
        others = sum(_private_bytes(one) for one in _session(process.pid) if one != process.pid)
        # Pages that workers share with the rank become private to them as soon as the rank frees
        # its memory, which happens before the kernel reports its end. Read the rank last, and drop
        # the sample if the rank has no memory.
        own = _private_bytes(process.pid)
        workers = max(workers, others) if own else workers
        if own + others > most:
            return f"it took more than the {human_bytes(most)} that this machine can spare", workers
    return f"{seconds:.0f} s, its share of --time-limit, are over", workers


def _session(leader: int) -> list[int]:
    return [stat.pid for stat in live_processes() if stat.session == leader]


def _private_bytes(pid: int) -> float:
    """Return the memory that a process shares with no other; 0 if it is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii")
    except OSError:
        return 0.0
    return 1024 * float(text.partition("Private_Dirty:")[2].split()[0])


def _variables(job: Job, scratch: Path) -> dict[str, str]:
    """Return the program's environment: the job's, with scratch directories for its own."""
    names = [variable(f"{one}.dir") for one in ("run", "local", "shm", "checkpoint")]
    places = {name: str(scratch / name) for name in (*names, "TMPDIR", "HPML_ATTEMPT_DIR")}
    for place in places.values():
        os.mkdir(place)
    for stage in job.stage:  # the program reads the source directly
        source = stage.source
        if not os.path.isdir(source):
            if not os.path.isfile(source) or kind_at(source, stage.kind) != "file":
                message = "is neither a directory nor a file that is not unpacked"
                raise InputError(message, field=f"stage.{stage.name}.source", value=source)
            source = os.path.dirname(source)
        places[variable(f"stage.{stage.name}")] = source
    return {
        **job_environment(os.environ, job.environment.inherit),
        **{name: os.environ[name] for name in _DEVICES if name in os.environ},
        **dict.fromkeys(_ZEROS, "0"),
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "WANDB_MODE": "disabled",
        "SLURM_ARRAY_TASK_ID": str(job.array.indices[0] if job.array is not None else 0),
        **places,
    }
