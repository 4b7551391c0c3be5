"""Train as ddp_images.py does, with something wrong on purpose; copied next to it into a job.

    python faulty.py --data DIR --fault read=0.005 --fault forward=1:0.8

`--fault NAME=AMOUNT`, or NAME=RANK:AMOUNT for one rank only:

    start       seconds until the training reports anything, as an environment on a slow disk needs
    read        seconds that opening an image of `--slow-root` takes longer
    decode      seconds of CPU time that decoding an image takes longer
    forward     a part of the forward pass: the rank sleeps that much longer in it
    backward    the same in the backward pass
    pace        seconds that the forward pass sleeps
    quota       the rank joins the control group of $FAULTY_GROUP, which has little CPU time
    core        the CPU that the rank binds itself to
    save        seconds that a checkpoint takes longer
    evaluation  seconds that a batch of the evaluation takes longer
    memory      MiB that each step keeps, until $FAULTY_MOST_MIB are kept
    gpus        the simulated driver gets the ranks' process ids for so many GPUs
    xid         an error that the last simulated GPU reports in the first evaluation
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import PIL.Image

STARTED = time.perf_counter()
if TYPE_CHECKING:
    import ddp_images

    import hpml_checkpoint
else:
    import ddp_images

    import hpml_checkpoint


def faults_of(words: list[str]) -> dict[str, float]:
    """Return the faults of this rank by name."""
    faults = {}
    for word in words:
        name, _, amount = word.partition("=")
        rank, _, amount = amount.rpartition(":")
        if rank in {"", os.environ["RANK"]}:
            faults[name] = float(amount)
    return faults


def busy(seconds: float) -> None:
    """Use a CPU for a while."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class Faults:
    """What is wrong with a training, by hooks of its network."""

    def __init__(self, run: Any, faults: dict[str, float]) -> None:
        self.rank, self.network, self.faults = run.ranks.rank, run.network, faults
        self.forward_seconds = self.pass_began = 0.0
        self.kept: list[bytes] = []
        self.network.register_forward_pre_hook(self._before_forward)
        self.network.register_forward_hook(self._after_forward)
        self.network.register_full_backward_pre_hook(self._before_backward)
        if "gpus" in self.faults:
            pids = run.ranks.gather(os.getpid())
            for gpu in range(int(self.faults["gpus"])):
                self._set_gpu(gpu, "--pid", str(pids[gpu % len(pids)]))

    def _set_gpu(self, gpu: int, *words: str) -> None:
        if self.rank == 0:
            tool, file = os.environ["FAULTY_GPUSIM"], os.environ["GPUSIM"]
            subprocess.run([tool, "set", file, "--gpu", str(gpu), *words], check=True)

    def _before_forward(self, *_: Any) -> None:
        if not self.network.training:
            time.sleep(self.faults.get("evaluation", 0))
            if "xid" in self.faults:
                last = int(self.faults["gpus"]) - 1
                self._set_gpu(last, "--xid", f"{self.faults.pop('xid'):.0f}")
            return
        time.sleep(self.faults.get("pace", 0))
        time.sleep(self.faults.get("forward", 0) * self.forward_seconds)
        if len(self.kept) * self.faults.get("memory", 0) < float(os.environ["FAULTY_MOST_MIB"]):
            self.kept.append(b"x" * int(self.faults.get("memory", 0) * (1 << 20)))
        self.pass_began = time.perf_counter()

    def _after_forward(self, *_: Any) -> None:
        took = time.perf_counter() - self.pass_began
        self.forward_seconds += 0.1 * (took - self.forward_seconds)

    def _before_backward(self, *_: Any) -> None:
        time.sleep(self.faults.get("backward", 0) * self.forward_seconds)


def delay(function: Any, faults: dict[str, float], slow_root: str) -> Any:
    """Return a function that opens images, and takes longer."""

    @functools.wraps(function)
    def delayed(path: str) -> Any:
        if path.startswith(slow_root):
            time.sleep(faults.get("read", 0))
        busy(faults.get("decode", 0))
        return function(path)

    return delayed


def main() -> None:
    """Train with the options of the command line."""
    parser = argparse.ArgumentParser(description="Train with faults.")
    parser.add_argument("--fault", action="append", default=[], dest="fault_words")
    parser.add_argument("--slow-root", default="")
    options, others = parser.parse_known_args()
    faults = faults_of(options.fault_words)
    os.environ.setdefault("FAULTY_MOST_MIB", "0")
    if "core" in faults:
        os.sched_setaffinity(0, {int(faults["core"])})
    if "quota" in faults:
        Path(os.environ["FAULTY_GROUP"], "cgroup.procs").write_text(str(os.getpid()))
    reading = delay(PIL.Image.open, faults, options.slow_root)
    monkey: Any = PIL.Image
    monkey.open = reading
    publish = hpml_checkpoint.Checkpoints._publish

    def slowly(*arguments: Any) -> int:
        time.sleep(faults.get("save", 0))
        return publish(*arguments)

    hpml_checkpoint.Checkpoints._publish = slowly  # type: ignore[assignment,method-assign]
    time.sleep(max(0.0, faults.get("start", 0) - (time.perf_counter() - STARTED)))
    load = ddp_images.load

    def load_with_faults(run: Any) -> None:
        Faults(run, faults)  # the hooks keep it
        load(run)

    ddp_images.load = load_with_faults
    ddp_images.main(others)


if __name__ == "__main__":
    main()
