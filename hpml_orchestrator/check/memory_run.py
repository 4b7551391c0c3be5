"""Run a job's program under `memory_probe.py` for a few steps, in a scratch directory."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hpml_orchestrator import assets
from hpml_orchestrator.errors import HpmlError, InputError, JobFailedError, counted
from hpml_orchestrator.records.process import live_processes
from hpml_orchestrator.records.texts import human_bytes, printable, seconds_text
from hpml_orchestrator.script.template import variable, word
from hpml_orchestrator.staging.request import kind_at

if TYPE_CHECKING:
    from hpml_orchestrator.spec.data import Stage
    from hpml_orchestrator.spec.job import Job

Figures: TypeAlias = Mapping[str, Any]
"""What a probe measured at one size of the batch, see `memory_probe.py`."""

STEPS, MOST_STEPS = 4, 20
"""Optimizer steps of each run; it ends between them, when the memory no longer grows."""
_SHARE_OF_TIME = 0.25  # of the time limit, after which a run ends with fewer steps
_FORMULAS = "hpml advise JOB_FILE --model 7B"
_PROBE = Path(__file__).with_name("memory_probe.py")
_POLL_SECONDS = 0.1
_SHARE_OF_FREE = 0.8  # of the free memory of this machine, before a run is ended
_MOST_ENTRIES = 2000  # of the working directory that are mirrored one by one
_PYTHONS = ("python", "python3")
_ELSEWHERE = ("SLURM_", "HPML_", "PMI", "PMIX_", "OMPI_", "TORCHELASTIC_", "GROUP_", "ROLE_")
_RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
}
"""What torchrun sets for a single rank."""


@dataclass(frozen=True)
class Program:
    """A Python program of a job: a script, or a module as of `python -m`."""

    script: str
    module: str
    args: Sequence[str]
    python: str
    field: str  # of the job file that names it

    @property
    def name(self) -> str:
        """What people call it."""
        return os.path.basename(self.script) or self.module


@dataclass(frozen=True)
class Measured:
    """What short runs of a program used.

    Attributes:
        figures: what the probe counted, by the batch of the rank; 0 if the program chose it.
        workers: bytes of its child processes that it does not share with them, likewise.
        seconds: how long all runs took.
        notes: what a reader has to know of how it was measured.
    """

    figures: Mapping[int, Figures]
    workers: Mapping[int, float]
    seconds: float
    notes: Sequence[str] = ()

    @property
    def last(self) -> Figures:
        """The figures at the largest batch."""
        return self.figures[max(self.figures)]


def program_of(job: Job) -> Program:
    """Return the Python program of a job.

    Raises:
        InputError: it does not exist, or no Python program can be found in `command`.
    """
    python, hint = job.environment.python, f"advice by formulas: {_FORMULAS}"
    if job.environment.container is not None:
        message = "the program runs in a container, which hpml advise does not start"
        raise InputError(message, field="environment.container", hint=hint)
    if job.script is not None:
        return Program(_existing(job.script, "script"), "", job.args, python, "script")
    if job.module is not None:
        return Program("", job.module, job.args, python, "module")
    command = [*(job.command or ())]
    first = os.path.basename(command[0])
    if first in _PYTHONS or first.startswith("python3."):
        rest = [*command[1:], *job.args]
        while rest and rest[0] in ("-u", "-B", "-O", "-s", "-E"):
            rest = rest[1:]
        if rest[:1] == ["-m"] and len(rest) > 1:
            return Program("", rest[1], rest[2:], command[0], "command")
        if rest and not rest[0].startswith("-"):
            path = os.path.normpath(os.path.join(job.workdir, rest[0]))
            return Program(_existing(path, "command"), "", rest[1:], command[0], "command")
    shown = " ".join(command)
    message = "is not a Python program that can be measured"
    raise InputError(message, field="command", value=shown, hint=hint)


def _existing(path: str, place: str) -> str:
    if not os.path.isfile(path):
        reason = "is not a file" if os.path.exists(path) else "does not exist"
        raise InputError(reason, field=place, value=path)
    return path


def measure(
    job: Job,
    program: Program,
    *,
    batches: Sequence[int] = (),
    with_batch: Callable[[Sequence[str], int], Sequence[str]] | None = None,
    limit_seconds: float = 120.0,
    environment: Mapping[str, str],
) -> Measured:
    """Run a program for a few steps and return what it used.

    Args:
        job: the complete job, for its environment and staged data.
        program: what to run.
        batches: one or two batch sizes of a rank; a larger second one is halved, as often as the
            first run's time and memory require it.
        with_batch: returns the arguments with a batch size set; None: it cannot be set.
        limit_seconds: for all runs together.
        environment: of this process.

    Raises:
        JobFailedError: the program fails, makes no step, or takes too long.
        InputError: it needs data that would be unpacked or does not exist.
    """
    started = time.monotonic()
    deadline = started + limit_seconds
    figures: dict[int, Figures] = {}
    workers: dict[int, float] = {}
    notes: list[str] = []
    sizes = [*batches] if with_batch else []
    for number, size in enumerate(sizes or [0]):
        chosen = size
        if number:
            spent = time.monotonic() - started
            first = figures[sizes[0]]
            peak = float(first["peak_bytes"])
            stepping = float(first.get("stepping_seconds", spent))
            while chosen > sizes[0] and (
                spent + stepping * (chosen / sizes[0] - 1) > deadline - time.monotonic()
                or peak * chosen / sizes[0] > _SHARE_OF_FREE * _free_bytes()
            ):
                chosen //= 2
            if chosen <= sizes[0]:
                chosen = max(1, sizes[0] // 2)
            if chosen in figures:
                break
        words = with_batch(program.args, chosen) if with_batch and chosen else program.args
        run = _Run(job, program, words, environment, limit_seconds)
        try:
            figures[chosen], workers[chosen] = run.result(deadline)
        except HpmlError as fault:
            if not number:
                raise
            notes.append(f"a run at batch {chosen} was not possible: {fault}")
    if any(one.get("refused") for one in figures.values()):
        path = next(one["refused"][0] for one in figures.values() if one.get("refused"))
        notes.append(f"the program was not allowed to write to {path}")
    return Measured(figures, workers, time.monotonic() - started, notes)


def _free_bytes() -> float:
    with open("/proc/meminfo", encoding="ascii") as stream:
        lines = dict(line.split(":", 1) for line in stream)
    return float(lines["MemAvailable"].split()[0]) * 1024


@dataclass
class _Run:
    """One run of a program under the probe."""

    job: Job
    program: Program
    words: Sequence[str]
    environment: Mapping[str, str]
    limit: float
    saved: bool = True
    workers: float = field(default=0.0, init=False)

    def result(self, deadline: float) -> tuple[Figures, float]:
        """Return the probe's figures, and the most that child processes used.

        Raises:
            JobFailedError: the program did not make two steps.
        """
        with tempfile.TemporaryDirectory(prefix="hpml-advise-") as name:
            scratch = Path(os.path.realpath(name))
            status, output = self._start(scratch, deadline)
            try:
                figures = json.loads((scratch / "figures.json").read_text("utf-8"))
            except (OSError, ValueError):
                figures = {"end": "failed" if status is not None else "killed", "steps": 0}
        if self.saved and figures["end"] == "failed" and "hook" in figures.get("error", "").lower():
            # torch.func and some compilers refuse hooks of saved tensors
            self.saved = False
            return self.result(deadline)
        enough = figures["steps"] >= 2 and "optimizer" in figures  # noqa: PLR2004
        if not enough:
            raise self._fault(figures, status, output)
        return figures, self.workers

    def _fault(self, figures: Figures, status: int | str | None, output: str) -> JobFailedError:
        """Return the error for a run without two steps, with the program's own message if any."""
        name, steps, end = self.program.name, figures["steps"], figures["end"]
        hint = f"advice by formulas: {_FORMULAS}"
        lines = [printable(line) for line in output.splitlines() if line.strip()]
        if end == "no-torch":
            return JobFailedError(
                f"the program's Python has no usable PyTorch ({figures['error']}): "
                f"{self.program.python}",
                hint="check environment.venv, conda, modules and python of the job file; " + hint,
            )
        if isinstance(status, str):  # why hpml ended it
            return JobFailedError(f"{name} was ended: {status}", hint=hint)
        if status is None:
            message = f"{name} made {counted(steps, 'optimizer step')} of {STEPS}"
            hint = f"give it more time: --time-limit {round(self.limit) * 2}; or {hint}"
            return JobFailedError(f"{message} in {seconds_text(self.limit)}", hint=hint)
        refused = figures.get("refused") or []
        if end == "failed" and refused and refused[0] in figures.get("error", ""):
            hint = "write below {run.dir}, or below the working directory; " + hint
            message = f"{name} writes to {refused[0]} before its second step, which hpml advise "
            return JobFailedError(message + "does not allow", hint=hint)
        if end == "ended":
            what = (
                "ended after one step of a PyTorch optimizer"
                if steps
                else ("ended without a step of a PyTorch optimizer")
            )
            if not figures.get("before_bytes") and not steps:
                what = "ended and used no PyTorch model"
            return JobFailedError(f"{name} {what}", hint=hint)
        error = figures.get("error") or (lines[-1] if lines else f"exit status {status}")
        return JobFailedError(f"{name} failed after {counted(steps, 'step')}: {error}", hint=hint)

    def _start(self, scratch: Path, deadline: float) -> tuple[int | str | None, str]:
        """Run the program; return its exit status (None: too slow, a text: why) and its output."""
        work = scratch / "work"
        mirror(Path(self.job.workdir), work)
        for name in ("tmp", "run"):
            (scratch / name).mkdir()
        spec = {
            "script": self.program.script,
            "module": self.program.module,
            "steps": STEPS,
            "most_steps": MOST_STEPS,
            "seconds": _SHARE_OF_TIME * self.limit,
            "output": str(scratch / "figures.json"),
            "scratch": str(scratch),
            "workdir": self.job.workdir,
            "saved": self.saved,
        }
        (scratch / "spec.json").write_text(json.dumps(spec), "utf-8")
        (scratch / "start.sh").write_text(self._script(scratch), "utf-8")
        text = scratch / "output.txt"
        with text.open("wb") as stream:
            process = subprocess.Popen(
                ["bash", str(scratch / "start.sh")],
                cwd=work,
                env=self._variables(scratch),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        status: int | str | None = None
        try:
            status = self._watch(process, deadline)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # Workers may have left the process group; the session still holds them.
            _kill_session(process.pid)
            process.wait()
        return status, text.read_text("utf-8", errors="replace")

    def _watch(self, process: subprocess.Popen[bytes], deadline: float) -> int | str | None:
        most = _SHARE_OF_FREE * _free_bytes()
        while time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(_POLL_SECONDS)
            others = sum(
                _private_bytes(stat.pid)
                for stat in live_processes()
                if stat.session == process.pid and stat.pid != process.pid
            )
            # Pages that workers share with the rank become private to them as soon as the rank
            # gives up its memory, which is before the kernel reports its end. Read the rank last,
            # and drop the sample if it has none.
            own = _private_bytes(process.pid)
            if own:
                self.workers = max(self.workers, others)
            if others + own > most:
                free = human_bytes(most)
                return f"it took more memory than the {free} that this machine can spare"
        return None

    def _variables(self, scratch: Path) -> dict[str, str]:
        inherited = {
            name: value
            for name, value in self.environment.items()
            if not name.startswith(_ELSEWHERE) and name not in _RANK
        }
        cores = min(self.job.resources.cpus_per_rank, os.cpu_count() or 1)
        with socket.socket() as probe:
            # A free port, so that this run does not meet a training that already uses the default
            # one.
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        return {
            **inherited,
            **_RANK,
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": str(cores),
            "TMPDIR": str(scratch / "tmp"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            "WANDB_MODE": "disabled",
            "MPLCONFIGDIR": str(scratch / "tmp"),
        }

    def _script(self, scratch: Path) -> str:
        """Return the shell script that loads the job's software and becomes the program."""
        software, lines = self.job.environment, []
        for name in ("run", "local", "shm", "checkpoint"):
            placeholder = f"{name}.dir"
            (scratch / name).mkdir(exist_ok=True)
            lines.append(f"export {variable(placeholder)}={shlex.quote(str(scratch / name))}")
        index = self.job.tasks.indices[0] if self.job.tasks is not None else 0
        lines.append(f"export SLURM_JOB_ID=0 SLURM_ARRAY_TASK_ID={index}")
        for stage in self.job.stage:
            place = shlex.quote(_staged(stage, scratch))
            lines.append(f"export {variable(f'stage.{stage.name}')}={place}")
        if software.modules:
            functions = shlex.quote(str(assets.path("templates/sbatch/hpml-job.sh")))
            lines += [f"source {functions}", 'source "$(hpml_module_init)"']
            lines += [f"module load {word(module)} || exit" for module in software.modules]
        if software.venv:
            lines.append(f"source {word(software.venv)}/bin/activate || exit")
        if software.conda:
            lines += [
                'source "$("${CONDA_EXE:-conda}" info --base)/etc/profile.d/conda.sh" || exit',
                f"conda activate {word(software.conda)} || exit",
            ]
        if software.setup:
            lines += ["set -e", software.setup, "set +e"]
        for name, value in software.variables.items():
            lines.append(f"export {name}={word(value)}")
        words = " ".join(word(one) for one in self.words)
        lines.append(
            f"exec {word(self.program.python)} {shlex.quote(str(_PROBE))} "
            f"{shlex.quote(str(scratch / 'spec.json'))} {words}"
        )
        return "\n".join(lines) + "\n"


def _staged(stage: Stage, scratch: Path) -> str:
    """Return where the program finds an entry of `stage`: the source itself."""
    place = f"stage.{stage.name}.source"
    if os.path.isdir(stage.source):
        return str(stage.source)
    if not os.path.isfile(stage.source):
        raise InputError("does not exist", field=place, value=stage.source)
    if kind_at(stage.source, stage.kind) != "file":
        message = "is an archive, which hpml advise does not unpack"
        raise InputError(message, field=place, value=stage.source)
    directory = scratch / "stage" / stage.name
    directory.mkdir(parents=True)
    (directory / os.path.basename(stage.source)).symlink_to(stage.source)
    return str(directory)


def mirror(source: Path, target: Path) -> None:
    """Make a directory whose files are links to those of another one, nearest to the top first.

    A directory with many entries is one link: the program may read there, and not write.
    """
    target.mkdir(parents=True)
    left = _MOST_ENTRIES
    waiting = [(source, target)]
    while waiting:
        here, there = waiting.pop(0)
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        except OSError:
            continue
        left -= len(entries)
        for entry in entries:
            place = there / entry.name
            is_tree = entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
            if is_tree and _entries(entry.path, left) < left:
                place.mkdir()
                waiting.append((Path(entry.path), place))
            else:
                place.symlink_to(entry.path)


def _entries(directory: str, most: int) -> int:
    try:
        with os.scandir(directory) as found:
            return sum(1 for _ in itertools.islice(found, max(0, most)))
    except OSError:
        return most


def _private_bytes(pid: int) -> float:
    """Return the memory of a process that no other one has; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as stream:
            lines = [line.split() for line in stream]
    except OSError:
        return 0.0
    return sum(float(line[1]) for line in lines if line[0] == "Private_Dirty:") * 1024


def _kill_session(leader: int) -> None:
    for stat in live_processes():
        if stat.session == leader:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(stat.pid, signal.SIGKILL)
