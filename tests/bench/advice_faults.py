"""One bottleneck in a training script; bench_advice.py copies it beside the script as faults.py.

$KNOBS is a JSON object: `out` (directory of the result), `seconds` to train, and what is wrong.
Rank 0 writes `speed.json`: samples of all ranks, seconds of the loop and of the process.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
import threading
import time
import zipfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

STARTED = time.perf_counter()
KNOBS: dict[str, Any] = json.loads(os.environ.get("KNOBS", "{}"))
OUT = Path(KNOBS.get("out", "."))
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
MEMBERS, DOCUMENTS, LISTED = 64, 32, 1500
UNTIMED, LEAST = 5, 30  # steps before the clock starts, and of a run
WORDS = dict(word.lstrip("-").partition("=")[::2] for word in sys.argv)
STORE = Path(WORDS.get("data") or WORDS.get("dataset", "."))
SAVED = Path(WORDS.get("save") or WORDS.get("out_dir", "."))


def make_store(store: Path) -> None:
    """Write the data that the scripts read."""
    (store / "many").mkdir(parents=True)
    draw = np.random.default_rng(1)
    for name in ("train", "val"):
        draw.integers(0, 256, 1_000_000).astype(np.uint16).tofile(store / f"{name}.bin")
    (store / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 256}))
    with zipfile.ZipFile(store / "samples.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        for number in range(MEMBERS):
            packed.writestr(f"{number}.txt", " ".join(map(str, draw.random(1000))))
    for number in range(DOCUMENTS):
        (store / f"{number}.json").write_text(json.dumps(draw.random(20_000).tolist()))
    for number in range(LISTED):
        (store / "many" / f"{number:05}.bin").touch()


def read(index: int) -> None:
    """Read a sample in the way that is slow; without such a knob it is in memory already."""
    way = KNOBS.get("read")
    if way == "zip":
        with zipfile.ZipFile(STORE / "samples.zip") as packed:
            [float(word) for word in packed.read(f"{index % MEMBERS}.txt").split()]
    elif way == "json":
        json.loads((STORE / f"{index % DOCUMENTS}.json").read_bytes())
    elif way == "listing":
        sorted(os.listdir(STORE / "many"))[index % LISTED]
    elif way == "wait":  # of a storage that answers late
        time.sleep(KNOBS["wait"])


def prepare() -> None:
    """Parse for a while, as a script that builds an index; then begin what runs beside."""
    until = time.perf_counter() + KNOBS.get("prepare", 0)
    while time.perf_counter() < until:
        json.loads((STORE / "0.json").read_bytes())
    if KNOBS.get("hog"):
        threading.Thread(target=_use_the_lock, daemon=True).start()
    if KNOBS.get("gc"):
        KNOBS["kept"] = [[number] for number in range(KNOBS["gc"])]


def _use_the_lock() -> None:
    while True:
        pass


def slow_down(model: Any) -> None:
    """Let rank 1 sleep in its forward pass."""
    if RANK == 1 and KNOBS.get("sleep"):
        model.register_forward_pre_hook(lambda *_: time.sleep(KNOBS["sleep"]))


def evaluating(timed: Callable[[str], AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """Return the channel's clock of evaluations, if the user thought of it."""
    return nullcontext() if KNOBS.get("untimed") else timed("evaluation_seconds")


def save(model: Any, optimizer: Any) -> None:
    """Write the weights to a disk every few steps; `save_ranks` says how many ranks do."""
    every = KNOBS.get("save_every", 0)
    is_due = every and not clock.steps % every and KNOBS["save_ranks"] > RANK
    for number in range(KNOBS["copies"] if is_due else 0):
        with (SAVED / f"rank{RANK}-{number}.pt").open("wb") as file:
            torch.save((model.state_dict(), optimizer.state_dict()), file)
            file.flush()
            os.fsync(file.fileno())


class Clock:
    """Counts the samples, and ends the training of all ranks at the same step."""

    def __init__(self) -> None:
        self.steps = self.samples = self.last = 0
        self.began = time.perf_counter()

    def is_over(self, samples: int) -> bool:
        """Count a step of this rank; return whether it was the last one."""
        if KNOBS.get("gc"):
            gc.collect()
        self.steps += 1
        self.samples += samples
        now, stop = time.perf_counter(), OUT / "stop"
        if self.steps == UNTIMED:
            self.began, self.samples = now, 0
        # Another rank is ahead by one step at most, since each averages gradients.
        is_due = self.steps >= LEAST and now - self.began > KNOBS["seconds"]
        if RANK == 0 and not self.last and is_due:
            (OUT / "stop.new").write_text(str(self.steps + 2))
            (OUT / "stop.new").replace(stop)
        if not self.last and stop.exists():
            self.last = int(stop.read_text())
        if self.steps != self.last:
            return False
        if RANK == 0:
            figures = {"samples": self.samples * RANKS, "seconds": now - self.began}
            figures |= {"steps": self.steps, "whole": now - STARTED}
            (OUT / "speed.json").write_text(json.dumps(figures))
        return True


clock = Clock()
