"""Train nothing, as a training does: real ranks, files and meetings; the device is a sleep.

    python light.py --data DIR --steps 200 --fault read=0.008

Starts in a moment and needs little CPU time, so its shares are the same on a machine that is busy
with other tests. `--fault` is that of faulty.py. Ranks meet by a socket of rank 0.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import queue
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

STARTED = time.perf_counter()
if TYPE_CHECKING:
    from hpml_channel import Channel
else:
    try:
        from hpml_channel import Channel
    except ImportError:
        Channel = None

FORWARD, BACKWARD, BATCH, EVALUATION_BATCHES = 0.03, 0.03, 16, 5
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def faults_of(words: list[str]) -> dict[str, float]:
    """Return the faults of this rank by name."""
    faults = {}
    for word in words:
        name, _, amount = word.partition("=")
        rank, _, amount = amount.rpartition(":")
        if rank in {"", str(RANK)}:
            faults[name] = float(amount)
    return faults


class Meeting:
    """All ranks; rank 0 answers when every one is there."""

    def __init__(self) -> None:
        self.others: list[socket.socket] = []
        port = int(os.environ["MASTER_PORT"]) + 1  # torchrun listens at the other
        where = (os.environ["MASTER_ADDR"], port)
        if RANKS > 1 and RANK == 0:
            with socket.create_server(where) as server:
                self.others = [server.accept()[0] for _ in range(RANKS - 1)]
        while RANKS > 1 and not self.others:
            try:
                self.others = [socket.create_connection(where)]
            except ConnectionRefusedError:
                time.sleep(0.05)

    def meet(self, content: bytes = b"x") -> None:
        """Wait until all ranks are here, and exchange as many bytes."""
        if RANK:
            self.others[0].sendall(content)
        for other in self.others:
            left = len(content)
            while left:
                left -= len(other.recv(left))
        for other in self.others if RANK == 0 else ():
            other.sendall(content)


def busy(seconds: float) -> None:
    """Use a CPU for a while."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class Training:
    """A training with faults."""

    def __init__(self, options: argparse.Namespace, faults: dict[str, float]) -> None:
        self.options, self.faults = options, faults
        self.files = sorted(options.data.iterdir())
        self.slow = str(options.data).startswith(options.slow_root)
        self.batches: queue.Queue[list[bytes]] = queue.Queue(2)
        self.kept: list[bytes] = []
        for _ in range(options.workers):
            threading.Thread(target=self._read_ahead, daemon=True).start()

    def _read(self) -> list[bytes]:
        batch = []
        for file in self.files[:BATCH]:
            time.sleep(self.faults.get("read", 0) * self.slow)
            busy(self.faults.get("decode", 0))
            batch.append(file.read_bytes())
        return batch

    def _read_ahead(self) -> None:
        while True:
            self.batches.put(self._read())

    def next_batch(self) -> list[bytes]:
        """Return the next batch."""
        return self.batches.get() if self.options.workers else self._read()

    def compute(self) -> None:
        """Forward and backward."""
        faults = self.faults
        time.sleep(FORWARD * (1 + faults.get("forward", 0)) + faults.get("pace", 0))
        time.sleep(BACKWARD * (1 + faults.get("backward", 0)))
        most = float(os.environ.get("FAULTY_MOST_MIB", "0"))
        if len(self.kept) * faults.get("memory", 0) < most:
            self.kept.append(b"x" * int(faults.get("memory", 0) * (1 << 20)))

    def evaluate(self) -> None:
        """Evaluate, and let a GPU fail."""
        time.sleep(EVALUATION_BATCHES * (FORWARD / 2 + self.faults.get("evaluation", 0)))
        if "xid" in self.faults:
            set_gpu(int(self.faults["gpus"]) - 1, "--xid", f"{self.faults.pop('xid'):.0f}")

    def save(self, step: int) -> None:
        """Write a checkpoint."""
        time.sleep(self.faults.get("save", 0))
        if RANK == 0 and "HPML_CHECKPOINT_DIR" in os.environ:
            (Path(os.environ["HPML_CHECKPOINT_DIR"]) / "step").write_text(str(step))


def set_gpu(gpu: int, *words: str) -> None:
    """Change the figures of a simulated GPU."""
    tool, file = os.environ["FAULTY_GPUSIM"], os.environ["GPUSIM"]
    with open(f"{file}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run([tool, "set", file, "--gpu", str(gpu), *words], check=True)


def train(training: Training, channel: Any, meeting: Meeting) -> None:
    """Make all steps."""
    options = training.options
    channel.event("warm-up", steps=5)
    channel.event("training", step=0, total_steps=options.steps)
    mark = time.perf_counter()
    for step in range(1, options.steps + 1):
        training.next_batch()
        read = time.perf_counter()
        training.compute()
        computed = time.perf_counter()
        meeting.meet()
        met = time.perf_counter()
        meeting.meet(bytes(options.bytes))
        averaged = time.perf_counter()
        channel.gauge(loss=1 / step, comm_method="socket")
        channel.count(
            steps=1,
            samples=BATCH,
            data_wait_seconds=read - mark,
            wait_seconds=met - computed,
            comm_seconds=averaged - met,
            step_seconds=averaged - mark,
        )
        if step % options.evaluate_every == 0:
            began = time.perf_counter()
            training.evaluate()
            meeting.meet()
            took = time.perf_counter() - began
            channel.count(evaluation_seconds=took)
            channel.event("evaluation", seconds=took, epoch=step // options.evaluate_every)
            if options.save:
                began = time.perf_counter()
                training.save(step)
                meeting.meet()
                took = time.perf_counter() - began
                channel.count(save_seconds=took)
                if RANK == 0:
                    channel.event("checkpoint", step=step, seconds=took, size_bytes=4)
        mark = time.perf_counter()


def main() -> None:
    """Train with the options of the command line."""
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--data", type=Path, required=True)
    add("--steps", type=int, default=250)
    add("--evaluate-every", type=int, default=50)
    add("--workers", type=int, default=1)
    add("--bytes", type=int, default=1000, help="of the gradients")
    add("--save", type=int, default=0)
    add("--slow-root", default="")
    add("--fault", action="append", default=[])
    options = parser.parse_args()
    faults = faults_of(options.fault)
    if "core" in faults:
        os.sched_setaffinity(0, {int(faults["core"])})
    if "quota" in faults:
        Path(os.environ["FAULTY_GROUP"], "cgroup.procs").write_text(str(os.getpid()))
    time.sleep(max(0.0, faults.get("start", 0) - (time.perf_counter() - STARTED)))
    channel = argparse.Namespace() if Channel is None else Channel.from_env()
    if Channel is None:
        for call in ("event", "gauge", "count", "close"):
            setattr(channel, call, lambda *_, **__: None)
    channel.event("rendezvous")
    meeting = Meeting()
    if faults.get("gpus", 0) > RANK:
        set_gpu(RANK, "--pid", str(os.getpid()))
    train(Training(options, faults), channel, meeting)
    channel.close()


if __name__ == "__main__":
    main()
