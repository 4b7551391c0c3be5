"""Will a job fit into memory? Advice for `hpml advise`, and warnings for `hpml check`.

`hpml check` never starts the user's program: it reads the record of its last run.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hpml_orchestrator import assets
from hpml_orchestrator.check.request import CheckFinding, memory_field, warning
from hpml_orchestrator.diagnosis import memory
from hpml_orchestrator.diagnosis.memory import DeviceNeed, HostNeed, Linear, TrainingOption
from hpml_orchestrator.errors import HpmlError, InputError, JobFailedError, counted
from hpml_orchestrator.records.process import live_processes
from hpml_orchestrator.records.texts import human_bytes, printable
from hpml_orchestrator.records.units import MIB, parse_gpus
from hpml_orchestrator.runs.reporting.monitor import aggregate_nodes, monitored_nodes
from hpml_orchestrator.scheduler.command import job_environment
from hpml_orchestrator.scheduler.local.processes import identity, kill_until_gone
from hpml_orchestrator.script.render import render_environment
from hpml_orchestrator.script.template import variable, word
from hpml_orchestrator.staging.request import kind_at
from hpml_orchestrator.staging.space import memory_headroom

if TYPE_CHECKING:
    from hpml_orchestrator.records.job import Job
    from hpml_orchestrator.records.store import Store
    from hpml_orchestrator.site.model import Site

# Run a job's program for a few steps under `memory_probe.py`.
#
# It runs in the job's working directory; `{run.dir}` and the like are scratch directories.

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


_NEAR_LIMIT = 0.97
"""Share of the memory limit above which the next run may be killed (TraceML: critical at 97 %)."""
_LATER = 1.03
"""Allowance for what follows the first steps: evaluation, the smaller last batch, fragmentation.
Fitted: without it the advice was 3 % below the peak of nine full runs on a CPU on average.
docs/advise.md lists the errors for sizes that were not used in the fit."""
_LAST_RUNS = 20
_PROGRAM = ("name", "script", "module", "command", "args", "workdir")
_SIZE = ("ranks_per_node", "gpus", "ranks_per_gpu", "nodes")


@dataclass(frozen=True)
class Advice:
    """Whether a job fits, and the ways to make it fit.

    Attributes:
        how: `measured` or `formula`.
        batch: batch size of one rank; None if unknown.
        host: need of one node; None if only formulas were used.
        host_bytes: its need at `batch`; None if unknown.
        host_limit: the job's memory on a node; None if the job file requests none.
        device: need of a rank on its device; None for a job without GPUs.
        device_bytes: memory of a rank's device, or its share of a shared one; None if unknown.
        device_why: the source of that number.
        options: the ways to train, simplest first; on the host without GPUs.
        way: the first of them that fits; None if none does, or there is nothing to compare with.
        room: what each way may use: the device's memory without the reserve, or the host's.
        largest_batch: largest batch size of one rank that fits; None if unknown.
        replicas: trainings that fit on one device side by side; 1 for jobs with several ranks.
        counts_activations: whether all sizes include the activations; without them the advice may
            be that a job does not fit, but never that it fits.
    """

    how: str
    batch: int | None
    host: HostNeed | None = None
    host_bytes: float | None = None
    host_limit: float | None = None
    device: DeviceNeed | None = None
    device_bytes: float | None = None
    device_why: str = ""
    options: Sequence[TrainingOption] = ()
    way: TrainingOption | None = None
    room: float | None = None
    largest_batch: int | None = None
    replicas: int = 1
    notes: Sequence[str] = field(default=())
    counts_activations: bool = True

    @property
    def host_fits(self) -> bool | None:
        """Whether a node's memory suffices; None if unknown."""
        if self.host_bytes is None or self.host_limit is None:
            return None
        return self._if_known(self.host_bytes <= self.host_limit)

    @property
    def device_fits(self) -> bool | None:
        """Whether the job fits its devices as it is; None if unknown, or if it has no devices."""
        if self.device is None or self.room is None or not self.options:
            return None
        return self._if_known(self.way is self.options[0])

    def _if_known(self, fits: bool) -> bool | None:
        return None if fits and not self.counts_activations else fits

    @property
    def fits(self) -> bool | None:
        """Whether the job fits as it is; None if unknown."""
        known = [one for one in (self.host_fits, self.device_fits) if one is not None]
        return all(known) if known else None

    def to_json(self) -> dict[str, object]:
        """Return the advice for programs; sizes are bytes."""
        return {
            **asdict(self),
            "fits": self.fits,
            "host_fits": self.host_fits,
            "device_fits": self.device_fits,
        }


def needs_of(measured: Measured, job: Job) -> tuple[HostNeed, DeviceNeed]:
    """Return what a job needs on each node and device, based on short runs of one rank.

    If a job with GPUs was measured without one, its model and activations are counted for the
    device. Its processes need what they had before the first step, the CUDA libraries, and pinned
    buffers.
    """
    figures, last = measured.figures, measured.last
    states = {name: float(last.get(name, 0)) for name in ("weights", "gradients", "optimizer")}
    whole = sum(states.values())
    activations = memory.line_through(
        {b: float(f.get("activations", 0)) for b, f in figures.items()}
    )
    on_gpu = "cuda_bytes" in last
    peaks = {
        b: float(f["cuda_bytes"]) - float(f.get("activations", 0)) - whole
        if on_gpu
        else float(f["peak_bytes"])
        - float(f.get("before_bytes", 0))
        - float(f.get("activations", 0))
        - states["gradients"]
        - states["optimizer"]
        for b, f in figures.items()
    }
    other = memory.line_through({b: max(0.0, peak) for b, peak in peaks.items()})
    device = DeviceNeed(
        **states,
        activations=activations,
        other=other,
        layers=int(last.get("layers", 1)),
        buckets=0.0 if last.get("ddp") else states["gradients"],
    )
    shared = max(float(f.get("file_bytes", 0)) for f in figures.values())
    process = memory.line_through(
        {b: _LATER * f["peak_bytes"] - float(f.get("file_bytes", 0)) for b, f in figures.items()}
    )
    workers = memory.line_through(measured.workers)
    pinned, cuda = Linear(0.0), 0.0
    if job.resources.gpu_count and not on_gpu:
        before = float(last.get("before_bytes", 0)) - float(last.get("file_bytes", 0))
        process, cuda = Linear(max(0.0, before - states["weights"])), float(memory.CUDA_HOST_BYTES)
        pinned = memory.line_through(
            {
                b: float(f.get("batch_bytes", 0)) * float(f.get("ahead", 1)) * bool(f.get("pins"))
                for b, f in figures.items()
            }
        )
    host = HostNeed(job.resources.ranks, process, workers, shared, pinned, cuda)
    return host, device


def extension_notes(
    measured: Measured, host: HostNeed, device: DeviceNeed, batch: int | None
) -> Iterator[str]:
    """Yield a note if the batch exceeds those measured, and their memory did not yet grow.

    At small batch sizes the optimizer's step may need more memory than the activations; a line
    through them does not hold for batch sizes at which the activations need more.
    """
    largest, each = max(measured.figures), device.activations.per_sample or 0.0
    if batch is not None and batch > largest and (host.process.per_sample or 0.0) < each:
        least = human_bytes((batch - largest) * each)
        yield (
            f"up to batch {largest} memory grew less than the activations: a rank may need "
            f"{least} more than listed at batch {batch}, or a multiple of that"
        )


def advise(
    job: Job,
    *,
    how: str,
    batch: int | None,
    host: HostNeed | None,
    device: DeviceNeed,
    device_memory: tuple[float, str] | None = None,
    host_limit: float | None = None,
    notes: Sequence[str] = (),
) -> Advice:
    """Return the advice for a job with known needs.

    Args:
        job: the complete job.
        how: `measured` or `formula`.
        batch: batch size of one rank.
        host: need of a node.
        device: need of one rank.
        device_memory: bytes of one GPU, and the source of that number.
        host_limit: memory of a node that the job can use if it requests none itself, bytes.
        notes: to include in the advice.
    """
    resources = job.resources
    limit = float(resources.node_memory * MIB) or host_limit
    needed = None if host is None else host.at(batch)
    ranks = resources.ranks * resources.nodes
    options = memory.ways(device, batch, gpus=ranks, gpus_per_node=resources.ranks)
    counted = how != "formula" or device.activations.per_sample is not None
    if resources.gpu_count:
        size, why = device_memory or (None, "")
        size = None if size is None else size / resources.ranks_per_gpu
        room = None if size is None else (1 - memory.RESERVE) * size
        growing = (device.activations, device.other)
        fixed = device.states + (device.buckets if ranks > 1 else 0.0)
        most = None if room is None else memory.largest_batch(room, *growing, fixed=fixed)
        way = memory.first_fit(options, room)
        alone = ranks == 1 and way is not None and counted
        replicas = int(room // options[0].need) if room and alone else 1
        return Advice(
            how, batch, host, needed, limit, device, size, why, options, way, room, most,
            max(1, replicas), notes, counted,
        )  # fmt: skip
    if host is None:
        share = None if limit is None else limit / resources.ranks
        way = memory.first_fit(options, share)
        needed = options[0].need * resources.ranks
        return Advice(
            how, batch, None, needed, limit, options=options, way=way, room=share, notes=notes,
            counts_activations=counted,
        )  # fmt: skip
    # On the host, a rank's share of the memory also holds the interpreter, data and workers.
    parts = device.states + device.activations.at(batch) + device.other.at(batch)
    beside = max(0.0, host.per_rank(batch) - parts)
    options = [TrainingOption(way.name, way.need + beside, way.what) for way in options]
    share = None if limit is None else (limit - host.shared) / resources.ranks
    way = memory.first_fit(options, share)
    most = None if share is None else memory.largest_batch(share, host.process, host.workers)
    return Advice(
        how, batch, host, needed, limit, None, None, "", options, way, share, most, notes=notes
    )


# --- for hpml check


def check_memory(job: Job, store: Store) -> list[CheckFinding]:
    """Return a warning if the last run of the same program and arguments needed more memory."""
    with contextlib.suppress(HpmlError, OSError, ValueError, KeyError, TypeError, AttributeError):
        message = _last_run(job, store) if job.resources.node_memory else ""
        if message:
            hint = "ask for more, or see `hpml advise`"
            shown = human_bytes(job.resources.node_memory * MIB)
            field = f"resources.{memory_field(job)}"
            return [warning("memory.last_run", field, shown, message, None, hint)]
    return []


def _last_run(job: Job, store: Store) -> str:
    """Return what is wrong with `resources.memory`, based on the program's newest run."""
    now = job.memory_mib * MIB
    names = (one for one in store.submissions() if one.sid.startswith(f"{job.name}-"))
    for submission, _ in zip(names, range(_LAST_RUNS), strict=False):
        before = submission.requested_job()
        runs = submission.runs()
        attempt = store.run(runs[0][1]).newest() if len(runs) == 1 else None
        if (
            attempt is None
            or attempt.ended is None
            or any(getattr(before, one) != getattr(job, one) for one in _PROGRAM)
        ):
            continue
        asked = before.resources
        if any(getattr(asked, one) != getattr(job.resources, one) for one in _SIZE):
            return ""
        used = aggregate_nodes(monitored_nodes(attempt))
        peak = used.figures.get("memory_peak_bytes", 0.0) if used else 0.0
        # More memory than before may be enough, so the old failure is no reason to warn.
        enough = job.resources.node_memory > asked.node_memory
        if attempt.ended.get("state") == "OUT_OF_MEMORY" and not enough:
            return f"its last run, {submission.sid}, ran out of memory with no less than this"
        if peak >= _NEAR_LIMIT * now:
            share = f"{human_bytes(peak)}, {100 * peak / now:.0f} % of this"
            return f"its last run, {submission.sid}, used {share}"
        return ""
    return ""


def gpu_memory(job: Job, site: Site | None = None) -> tuple[float, str] | None:
    """Return a GPU's memory and its source: the job's GPU type or constraint, or the site."""
    resources = job.resources
    words = [resources.constraint or "", *(kind for kind, _ in resources.gpus.kinds)]
    for kind in site.node_types_of(resources.partition) if site is not None else ():
        words += [name for name, _ in parse_gpus(kind.gpus).kinds]
    return next(filter(None, map(memory.device_bytes_of, words)), None)
