"""Stop a training at chosen moments, in every way a cluster can, and check the result.

The training is tests/lifetraining.py. It trains up to the step in its file `pace` and no further,
so each stop meets it where the schedule wants it, on a slow machine too.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Self

from hpml_orchestrator.node.processes import RankRecords, is_alive
from tests.cluster.hpml_on_slurm import PYTHON, ROOT, Desk, eventually
from tests.cluster.user import VENV, install
from tests.patience import PATIENCE_SECONDS
from tests.patience import eventually as soon

SAVE_EVERY = 100
EVALUATE_EVERY = 60
_SUCCESSOR_SECONDS = 40
_NUMBER = struct.Struct("=q")
_FILES = (
    "tests/lifetraining.py",
    "training_jobs/hpml_channel.py",
    "training_jobs/hpml_checkpoint.py",
)
_FINAL = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "PREEMPTED")
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


@dataclass(frozen=True)
class Kind:
    """A way to stop a training.

    Attributes:
        act: does it; gets the life and the random numbers.
        warned: whether ranks can save before they end.
        outlives: whether the attempt continues.
        by_hand: whether the program fails, so that only `hpml requeue` continues the run.
        damages: whether the newest checkpoint is damaged before the next attempt.
    """

    act: Callable[[Life, random.Random], None]
    warned: bool = True
    outlives: bool = False
    by_hand: bool = False
    damages: bool = False


@dataclass(frozen=True)
class Stop:
    """One stop: how, at what moment, and not before which step."""

    kind: str
    moment: str
    step: int


@dataclass
class Figures:
    """What one stop cost.

    Attributes:
        stop: which.
        attempt: the attempt that it met.
        acted: seconds since the epoch.
        saved: seconds from the stop to the end of the save that followed; None if there was none.
        lost_steps: steps that were made and had to be made again.
        lost_seconds: from the last step that counts to the first new one.
        queued: seconds from the end of the attempt to the first step of the next.
    """

    stop: Stop
    attempt: int
    acted: float
    saved: float | None = None
    lost_steps: int = 0
    lost_seconds: float | None = None
    queued: float | None = None


@dataclass
class Life:
    """A training, from its submission to its last step.

    Attributes:
        desk: the user's.
        name: of the job.
        fields: of the job file, laid over the usual ones.
        steps: of the whole training.
        local: whether it runs on the local backend.
    """

    desk: Desk
    name: str
    fields: dict[str, Any]
    steps: int = 1000
    pause: float = 0.005
    local: bool = False
    job: Any = None
    figures: list[Figures] = field(default_factory=list)

    @property
    def notes_directory(self) -> Path:
        return self.desk.directory / f"{self.name}-notes"

    @property
    def run(self) -> Path:
        return Path(self.job["directory"])

    @property
    def ranks_in_all(self) -> int:
        own = {"ranks_per_node": 2 if self.local else 1}
        return (1 if self.local else 2) * int((own | self.fields["resources"])["ranks_per_node"])

    @property
    def job_id(self) -> str:
        """The id of the newest job: a continuation is another job."""
        return str(json.loads(Path(self.job["submission"], "job.json").read_text())["job_id"])

    @property
    def output(self) -> str:
        path = self.run / "output.log"
        return path.read_text("utf-8", "replace") if path.exists() else ""

    def prepare(self) -> list[str]:
        """Write the training's files and a pace of 0; return its options."""
        for file in _FILES:
            shutil.copy(ROOT / file, self.desk.directory)
        self.notes_directory.mkdir()
        self.set_pace(0)
        options = {
            "notes": self.notes_directory,
            "steps": self.steps,
            "save-every": SAVE_EVERY,
            "evaluate-every": EVALUATE_EVERY,
            "pause": self.pause,
        }
        return [f"--{name}={value}" for name, value in options.items()]

    def start(self) -> None:
        """Submit the training, which waits at its first step."""
        options = self.prepare()
        data = self.desk.directory / "data"
        data.mkdir(exist_ok=True)
        (data / "x").write_text("x")
        nodes = {} if self.local else {"nodes": 2, "partition": "low"}
        job: dict[str, Any] = {
            "launcher": "torchrun",
            "script": str(self.desk.directory / "lifetraining.py"),
            "args": options,
            "resources": {"ranks_per_node": 2 if self.local else 1, "time": "20:00", **nodes},
            "stage": [{"name": "d", "source": str(data), "target": "shm"}],
            "environment": {"python": PYTHON, "venv": str(VENV)},
            # A third node, to avoid a failed one, is not there.
            "checkpoint": {"attempts": 100, "avoid_failed_nodes": False},
        }
        for name, value in self.fields.items():
            job[name] = {**job[name], **value} if isinstance(value, dict) else value
        where = ["--local"] if self.local else []
        self.job = self.desk.json("submit", *where, self.desk.job(self.name, **job))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End what a failed test has left."""
        self.desk.hpml("cancel", self.job["id"], code=None)

    def set_pace(self, step: int) -> None:
        """Let the training make steps up to this one."""
        path = self.notes_directory / "pace"
        with path.open("r+b" if path.exists() else "wb") as file:  # it is mapped: never truncated
            file.write(_NUMBER.pack(step))

    def notes(self, attempt: int, note: str) -> list[dict[str, Any]]:
        """Return an attempt's notes of one sort."""
        path = self.notes_directory / "notes.jsonl"
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        found = map(json.loads, lines)
        return [one for one in found if (one["attempt"], one["note"]) == (attempt, note)]

    def made(self, attempt: int) -> int:
        """Return up to which step an attempt came; 0 if it made none."""
        try:
            content = (self.notes_directory / f"steps.{attempt}").read_bytes()
        except FileNotFoundError:
            return 0
        return int(_NUMBER.unpack(content)[0]) if content else 0

    def attempt(self) -> int:
        """Return the newest attempt's number, -1 before the first."""
        folder = self.run / "attempts"
        numbers = [int(path.name) for path in folder.glob("[0-9]*")] if folder.exists() else []
        return max(numbers, default=-1)

    def place(self, attempt: int | None = None) -> Path:
        """Return an attempt's directory."""
        return self.run / "attempts" / str(self.attempt() if attempt is None else attempt)

    def wait(self, check: Callable[[], Any], what: str, seconds: float = PATIENCE_SECONDS) -> Any:
        """Wait for something of the training; if it does not come, show the output.

        An attempt that has been over for 30 s has no successor: then there is nothing to wait for.
        """

        def came_or_over() -> Any:
            found = check()
            if not found:
                ended = self.place() / "ended.json"
                over = ended.exists() and time.time() - ended.stat().st_mtime > _SUCCESSOR_SECONDS
                assert not over, f"{what}: the training is over"
            return found

        try:
            return soon(came_or_over, what, seconds)
        except AssertionError as error:
            where = f"attempt {self.attempt()}, step {self.made(self.attempt())}"
            raise AssertionError(f"{self.name}: {error} ({where})\n{self.shown()}") from None

    def shown(self) -> str:
        """Return beginning and end of the output."""
        text = self.output
        return text if len(text) < 9000 else f"{text[:4000]}\n...\n{text[-4000:]}"

    def ranks(self) -> list[int]:
        """Return the process ids of the newest attempt's ranks."""
        files = (self.place() / "binding").glob("*.jsonl")
        return [rank.pid for file in files for rank in RankRecords(file).new() if is_alive(rank)]

    def agents(self) -> list[int]:
        """Return the process ids of the newest attempt's agents."""
        found, own = [], [b"agent", os.fsencode(self.place())]
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            # srun has the same words, but they are not its own command
            if words[3:4] and words[3].endswith(b".pyz") and words[4:6] == own:
                found.append(int(entry.name))
        return found

    def processes(self) -> list[str]:
        """List what still runs of this training, anywhere on the machine."""
        mark = b"HPML_RUN_DIR=" + os.fsencode(self.run) + b"\0"
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (entry / "environ").read_bytes() + b"\0":
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    found.append(f"{entry.name} {line.decode(errors='replace')}")
            except OSError:
                continue
        return found

    def damage(self) -> None:
        """Change bytes in the middle of the newest checkpoint, if there is one."""
        files = [path for path in (self.run / "checkpoints").rglob("*") if path.is_file()]
        large = [path for path in files if path.stat().st_size > 2**20]
        for path in sorted(large, key=lambda file: file.stat().st_mtime)[-1:]:
            with path.open("r+b") as file:
                file.seek(path.stat().st_size // 2)
                file.write(b"damaged")

    def meet(self, stop: Stop, numbers: random.Random) -> None:
        """Wait until the training has reached the moment of the stop."""
        if stop.moment == "start-up":
            signs = ["events/node*", "nodes/*.ready.json", "binding/*"]
            if "SIGTERM" not in stop.kind:  # which reaches steps only
                signs += ["started", "events/batch*"]
            sign = numbers.choice(signs)
            self.wait(lambda: list(self.place().glob(sign)), f"{sign} of an attempt")
            return
        # It may have come further than planned before the last stop.
        made = [self.made(attempt) for attempt in range(self.attempt() + 1)]
        step = max([stop.step, *(steps + 10 for steps in made)])
        if stop.moment in {"evaluation", "save"}:  # the next one behind the step
            every = EVALUATE_EVERY if stop.moment == "evaluation" else SAVE_EVERY
            step = (step // every + 1) * every
        self.set_pace(step)
        if stop.moment == "training":
            self.wait(lambda: self.made(self.attempt()) >= step, f"step {step}")
            return

        def reached() -> bool:
            return any(one["step"] >= step for one in self.notes(self.attempt(), stop.moment))

        self.wait(reached, f"{stop.moment} at step {step}")

    def go_on(self, steps: int) -> None:
        """Let the newest attempt make some steps."""
        attempt = self.attempt()
        step = self.made(attempt) + steps
        self.set_pace(step)
        self.wait(lambda: self.made(attempt) >= step, f"{steps} more steps")

    def suffer(self, stop: Stop, numbers: random.Random) -> None:
        """Carry out one stop and wait until the training continues."""
        kind = KINDS[stop.kind]
        self.meet(stop, numbers)
        attempt = self.attempt()
        figures = Figures(stop, attempt, time.time())
        self.figures.append(figures)
        kind.act(self, numbers)
        if kind.outlives:
            self.go_on(30)
            return
        asked = time.monotonic()
        requeued = False

        def goes_on() -> bool:
            nonlocal asked, requeued
            if self.attempt() > attempt:
                return True
            if time.monotonic() - asked > 1.5:
                (state,) = self.desk.json("status", self.job["id"])
                over = state["state"] in _FINAL
                assert not (over and requeued and state["state"] == "COMPLETED"), state
                assert not over or kind.by_hand or requeued, (stop, state, self.shown())
                if over and not requeued:
                    requeued = True
                    if kind.damages:
                        self.damage()
                    self.desk.hpml("requeue", self.job["id"])
                asked = time.monotonic()
            return False

        self.wait(goes_on, f"an attempt after {attempt}, after {stop}", 200)

    def end(self) -> None:
        """Let the training end, and judge it."""
        self.set_pace(2**62)
        done = self.desk.json("wait", self.job["id"], code=None)
        assert done["state"] == "COMPLETED", (done, self.shown())
        result = json.loads((self.notes_directory / "result.json").read_text())
        assert result == {**reference(self.steps, self.ranks_in_all), "twice": 0, "missing": 0}
        for figures in self.figures:
            self._measure(figures)
        for figures in self.figures:
            kind = KINDS[figures.stop.kind]
            allowed = 1 if kind.warned else SAVE_EVERY * (2 if kind.damages else 1)
            assert figures.lost_steps <= allowed, figures
        soon(lambda: not self.processes(), f"processes are left: {self.processes()}", 30)
        if not self.local:
            assert self.desk.staged(self.job_id) == []
            states = "sinfo", "--noheader", "--Node", "--format=%T"
            eventually(lambda: set(self.desk.slurm(*states).split()) == {"idle"}, 60, "idle nodes")

    def _measure(self, figures: Figures) -> None:
        """Fill in what a stop cost, from the notes of its attempt and of the next that resumed."""
        attempt = figures.attempt
        saves = [n["time"] for n in self.notes(attempt, "saved") if n["time"] > figures.acted]
        if KINDS[figures.stop.kind].outlives:
            return
        figures.saved = saves[0] - figures.acted if saves else None
        later = range(attempt + 1, self.attempt() + 1)
        resumed = next((n for a in later for n in self.notes(a, "resumed")), None)
        first = next((n for a in later for n in self.notes(a, "first-step")), None)
        assert resumed is not None, figures
        figures.lost_steps = max(0, self.made(attempt) - resumed["step"])
        if first is not None and first["attempt"] == attempt + 1:
            ended = self.place(attempt) / "ended.json"
            if ended.exists():  # SIGKILL may come before it
                figures.queued = first["time"] - json.loads(ended.read_text())["time"]
            kept = [n["time"] for n in self.notes(attempt, "saved") if n["step"] == resumed["step"]]
            figures.lost_seconds = first["time"] - kept[0] if kept else None


@cache
def reference(steps: int, ranks: int) -> dict[str, Any]:
    """Return the result of the same training, uninterrupted, without hpml."""
    place = install() / f"reference-{steps}-{ranks}"
    place.mkdir(parents=True)
    for file in _FILES:
        shutil.copy(ROOT / file, place)
    options = (f"--steps={steps}", f"--notes={place}", f"--checkpoints={place}/checkpoints")
    own = {k: v for k, v in os.environ.items() if not k.startswith(("HPML_", "SLURM_"))}
    subprocess.run(
        [
            sys.executable,
            *_TORCHRUN,
            f"--nproc-per-node={ranks}",
            place / "lifetraining.py",
            *options,
        ],
        env={**own, "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        timeout=600,
    )
    result: dict[str, Any] = json.loads((place / "result.json").read_text())
    shutil.rmtree(place)
    assert (result["twice"], result["missing"]) == (0, 0)
    return result


def _request(life: Life, _: random.Random) -> None:
    life.desk.hpml("requeue", life.job["id"])


def _request_twice(life: Life, _: random.Random) -> None:
    """Ask again at once; on a slow machine the attempt is over by then: an error."""
    _request(life, _)
    again = life.desk.hpml("requeue", life.job["id"], code=None)
    late = ("is just starting or ending", "it needs no requeue")
    assert again.returncode == 0 or any(reason in again.stderr for reason in late), again


def _slurm_requeue(life: Life, _: random.Random) -> None:
    life.desk.call("scontrol", "requeue", life.job_id)


def _preempt(life: Life, _: random.Random) -> None:
    options = ("--partition=main", "--nodes=2", "--exclusive", "--time=1", "--output=/dev/null")
    life.desk.call("sbatch", "--parsable", *options, "--wrap=true")


def _kill_rank(life: Life, numbers: random.Random) -> None:
    os.kill(numbers.choice(life.wait(life.ranks, "ranks")), signal.SIGKILL)


def _kill_agent(life: Life, numbers: random.Random) -> None:
    """Kill an agent; it is started again and the training continues, until Slurm requeues it."""
    attempt, made = life.attempt(), life.made(life.attempt())
    os.kill(numbers.choice(life.wait(life.agents, "agents")), signal.SIGKILL)
    life.set_pace(made + 30)
    ended = life.place(attempt) / "ended.json"
    life.wait(lambda: ended.exists() or life.made(attempt) >= made + 30, "steps or the end")
    if not ended.exists():
        _slurm_requeue(life, numbers)


def _restart_slurmd(life: Life, numbers: random.Random) -> None:
    life.desk.cluster.restart(numbers.choice(life.desk.cluster.nodes), kill=True)


def _restart_controller(life: Life, _: random.Random) -> None:
    life.desk.cluster.restart("slurmctld")


def _fail_node(life: Life, numbers: random.Random) -> None:
    node = numbers.choice(life.desk.cluster.nodes)
    life.desk.slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=power")
    # The controller has ended the jobs of the node by now; it may have come back by itself.
    resume = ("scontrol", "update", f"nodename={node}", "state=resume")
    life.desk.cluster.run(*resume, check=False)


def _terminate(life: Life, _: random.Random) -> None:
    life.desk.call("scancel", "--signal=TERM", life.job_id)


def _terminate_twice(life: Life, _: random.Random) -> None:
    _terminate(life, _)
    life.desk.call("scancel", "--signal=TERM", life.job_id)


def _reach_limit(_life: Life, _numbers: random.Random) -> None:
    """Do nothing: the time limit comes."""


KINDS = {
    "hpml requeue": Kind(_request),
    "hpml requeue, twice": Kind(_request_twice),
    "scontrol requeue": Kind(_slurm_requeue),
    "preemption": Kind(_preempt),
    "SIGTERM": Kind(_terminate),
    "SIGTERM, twice": Kind(_terminate_twice),
    "time limit": Kind(_reach_limit),
    "rank killed": Kind(_kill_rank, warned=False, by_hand=True),
    "agent killed": Kind(_kill_agent, warned=False),
    "checkpoint damaged": Kind(_kill_rank, warned=False, by_hand=True, damages=True),
    "node failed": Kind(_fail_node, warned=False),
    "slurmd killed": Kind(_restart_slurmd, outlives=True),
    "slurmctld restarted": Kind(_restart_controller, outlives=True),
}
MOMENTS = ("training", "evaluation", "save", "start-up")
# What is not there yet in start-up, or would only make the attempt start later.
_NEVER_AT_START = (
    "time limit",
    "agent killed",
    "slurmd killed",
    "slurmctld restarted",
    "node failed",
)


def schedule(numbers: random.Random, kinds: list[str], steps: int) -> list[Stop]:
    """Put kinds of stops at random moments, in the order of the training's steps."""
    places = sorted(numbers.sample(range(20, steps - 2 * SAVE_EVERY, 10), len(kinds)))
    stops: list[Stop] = []
    for kind, step in zip(kinds, places, strict=True):
        moment = numbers.choice(MOMENTS)
        # hpml gives a run up that makes no progress three times in a row.
        idle = bool(stops) and stops[-1].moment == "start-up"
        if moment == "start-up" and (idle or kind in _NEVER_AT_START):
            moment = "training"
        # Before the newest checkpoint is damaged, there has to be an older one.
        least = 2 * SAVE_EVERY + 10 if KINDS[kind].damages else 0
        stops.append(Stop(kind, moment, max(step, least)))
    return stops


def table(lives: list[Life]) -> str:
    """Return the figures of stops by kind."""
    row = "{:<22}{:>4}{:>20}{:>8}{:>12}{:>20}"
    most = "s, median (most)"
    lines = [
        row.format("stop", "n", "warning to saved", "lost", "lost", "end to first step"),
        row.format("", "", most, "steps", "s, median", most),
    ]
    for kind in KINDS:
        found = [f for life in lives for f in life.figures if f.stop.kind == kind]
        if found:
            steps = max(f.lost_steps for f in found)
            lost = [f.lost_seconds for f in found if f.lost_seconds is not None]
            saved, queued = ([f.saved for f in found], [f.queued for f in found])
            middle = f"{median(lost):.1f}" if lost else "-"
            lines.append(
                row.format(kind, len(found), _spread(saved), steps, middle, _spread(queued))
            )
    attempts = sum(life.attempt() + 1 for life in lives)
    stops = sum(len(life.figures) for life in lives)
    lines.append(f"{stops} stops, {len(lives)} trainings, {attempts} attempts")
    return "\n".join(lines) + "\n"


def _spread(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{median(known):.1f} ({max(known):.1f})" if known else "-"
