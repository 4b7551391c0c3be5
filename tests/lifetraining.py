"""A small deterministic training that is stopped at any moment, and notes what it did.

    torchrun --nproc-per-node=2 lifetraining.py --notes DIR --checkpoints DIR --steps 1000

Same steps, seed and number of ranks: same weights, bit for bit, however often it was stopped. The
samples that the ranks used are part of the checkpoint, so the last one shows if one was used twice.
In the directory of notes are, written by rank 0:

    notes.jsonl     what happened: {"time", "attempt", "note", "step"}
    steps.ATTEMPT   the number of steps of an attempt so far, 8 bytes; survives SIGKILL
    pace            read, not written: 8 bytes, the step at which the training waits for more
    result.json     at the end: digest of weights and optimizer, and how often samples were used
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import struct
import time
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpml_channel import Channel
from hpml_checkpoint import Checkpoints, Ranks, StopAgreement

BATCH = 4  # samples per rank and step
STEPS_PER_EPOCH = 250
WIDTH = 16
NUMBER = struct.Struct("=q")


class Notes:
    """What rank 0 writes down for the tests; other ranks write nothing."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.attempt = int(Path(os.environ.get("HPML_ATTEMPT_DIR", "0")).name)
        self._writes = rank == 0
        directory.mkdir(parents=True, exist_ok=True)
        self._notes = directory / "notes.jsonl"
        self._steps = os.open(directory / f"steps.{self.attempt}", os.O_RDWR | os.O_CREAT, 0o644)
        self._pace: mmap.mmap | None = None
        with suppress(FileNotFoundError), (directory / "pace").open("rb") as file:
            self._pace = mmap.mmap(file.fileno(), NUMBER.size, access=mmap.ACCESS_READ)

    def note(self, note: str, step: int, **more: Any) -> None:
        """Append a note, in one write."""
        if self._writes:
            line = {"time": time.time(), "attempt": self.attempt, "note": note, "step": step}
            with self._notes.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**line, **more}) + "\n")

    def step(self, step: int) -> None:
        """Keep the number of steps that were made."""
        if self._writes:
            os.pwrite(self._steps, NUMBER.pack(step), 0)

    def must_wait(self, step: int) -> bool:
        """Whether the tests want no further steps for now."""
        return self._pace is not None and step >= NUMBER.unpack(self._pace[:])[0]


class Training:
    """The model, the position in the data, and the samples used so far."""

    def __init__(self, seed: int, ranks: Ranks, megabytes: int) -> None:
        self.ranks, self.step = ranks, 0
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        size = STEPS_PER_EPOCH * BATCH * ranks.world_size
        self.inputs = torch.randn(size, WIDTH)
        self.targets = self.inputs.sin().sum(1, keepdim=True)
        self.seed = seed
        # Each rank has other noise; without its state a resumed training gets other weights.
        torch.manual_seed(seed + 1000 + ranks.rank)
        self.used: list[Tensor] = []  # by this rank since the last save
        self.saved_used = torch.empty((0, ranks.world_size, BATCH), dtype=torch.int32)
        self.ballast = torch.randn(megabytes << 18)

    def indices(self) -> Tensor:
        """Return this rank's samples of the next step."""
        epoch, position = divmod(self.step, STEPS_PER_EPOCH)
        generator = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(len(self.inputs), generator=generator)
        first = (position * self.ranks.world_size + self.ranks.rank) * BATCH
        return order[first : first + BATCH]

    def advance(self) -> None:
        """Make a step."""
        indices = self.indices()
        inputs = self.inputs[indices] + 0.01 * torch.randn(BATCH, WIDTH)
        loss = nn.functional.mse_loss(self.model(inputs), self.targets[indices])
        self.optimizer.zero_grad()
        loss.backward()
        parameters = list(self.model.parameters())
        flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        dist.all_reduce(flat)
        means = torch.split(flat / self.ranks.world_size, [p.numel() for p in parameters])
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.grad = mean.view_as(parameter)
        self.optimizer.step()
        self.used.append(indices.to(torch.int32))
        self.step += 1

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has of all ranks; every rank has to call this."""
        mine = torch.stack(self.used) if self.used else torch.empty((0, BATCH), dtype=torch.int32)
        used = [torch.empty_like(mine) for _ in range(self.ranks.world_size)]
        dist.all_gather(used, mine)
        self.saved_used = torch.cat([self.saved_used, torch.stack(used, 1)])
        self.used.clear()
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "used": self.saved_used,
            "ballast": self.ballast,
        }

    def load(self, step: int, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.saved_used = step, state["used"]

    def digest(self) -> str:
        """Return a digest of all weights and of the optimizer's averages."""
        averages = [
            value
            for state in self.optimizer.state_dict()["state"].values()
            for value in state.values()
        ]
        digest = hashlib.sha256()
        for tensor in (*self.model.state_dict().values(), *averages):
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()


def used_wrongly(used: Tensor) -> dict[str, int]:
    """Count the samples of a checkpoint that were used twice in an epoch, and those left out."""
    twice = missing = 0
    size = STEPS_PER_EPOCH * used.shape[1] * BATCH
    for epoch in torch.split(used, STEPS_PER_EPOCH):
        counts = Counter(epoch.flatten().tolist())
        twice += sum(count - 1 for count in counts.values())
        missing += (size if len(epoch) == STEPS_PER_EPOCH else epoch.numel()) - len(counts)
    return {"steps": len(used), "twice": twice, "missing": missing}


class Run:
    """One attempt of the training."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.notes = Notes(options.notes, int(os.environ["RANK"]))
        self.notes.note("begin", 0)
        self.channel = Channel.from_env()
        self.channel.event("rendezvous")
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
        torch.set_num_threads(1)
        job = {"steps": options.steps, "seed": options.seed}
        self.checkpoints = Checkpoints(options.checkpoints, job=job, channel=self.channel)
        self.ranks = self.checkpoints.ranks
        self.training = Training(options.seed, self.ranks, options.megabytes)
        self.agreement = StopAgreement(self.ranks)

    def resume(self) -> None:
        """Load the newest good checkpoint, if there is one."""
        found = self.checkpoints.load()
        if found is not None:
            self.training.load(found.step, found.state)
        self.notes.note("resumed", self.training.step)

    def save(self) -> None:
        """Save, and note when that began and ended."""
        training = self.training
        self.notes.note("save", training.step)
        self.checkpoints.save(training.state(), step=training.step)
        self.notes.note("saved", training.step)

    def must_stop(self) -> bool:
        """Return whether the ranks agreed to stop."""
        return self.agreement.exchange(int(self.channel.stop_requested())) > 0

    def evaluate(self) -> bool:
        """Do nothing for a while; return whether the ranks agreed to stop in the meantime."""
        self.notes.note("evaluation", self.training.step)
        stop = False
        for _ in range(40):
            time.sleep(self.options.pause)
            stop = self.must_stop()
            if stop:
                break
        self.channel.event("evaluation", step=self.training.step)
        return stop

    def train(self) -> bool:
        """Train to the end or to a stop; return whether it was stopped."""
        options, training, channel = self.options, self.training, self.channel
        channel.event("training", step=training.step, total_steps=options.steps)
        first, stop = training.step, False
        while training.step < int(options.steps) and not stop:
            began = time.perf_counter()
            while self.notes.must_wait(training.step) and not channel.stop_requested():
                time.sleep(0.02)
            training.advance()
            stop = self.must_stop()
            self.notes.step(training.step)
            if training.step == first + 1:
                self.notes.note("first-step", training.step)
            time.sleep(options.pause)
            took = time.perf_counter() - began
            channel.count(samples=BATCH, steps=1, step_seconds=took)
            if not stop and training.step % options.evaluate_every == 0:
                stop = self.evaluate()
            if stop or training.step % options.save_every == 0 or training.step == options.steps:
                self.save()
        self.agreement.finish()
        stopped = training.step < int(options.steps)
        if stopped:
            channel.event("stopping", step=training.step)
            self.notes.note("stopping", training.step)
        return stopped

    def end(self, *, stopped: bool) -> None:
        """Write the result of a complete training, from what its last checkpoint holds."""
        found = None if stopped else self.checkpoints.latest()
        if found is not None and self.ranks.rank == 0:
            used = used_wrongly(found.state["used"])
            result = {"digest": self.training.digest(), **used}
            (self.options.notes / "result.json").write_text(json.dumps(result), encoding="utf-8")
            self.channel.result(**result)
        self.channel.close()


def main() -> None:
    """Train with the options of the command line."""
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--notes", type=Path, required=True)
    add("--checkpoints", type=Path, default=os.environ.get("HPML_CHECKPOINT_DIR"))
    add("--steps", type=int, required=True)
    add("--save-every", type=int, default=100)
    add("--evaluate-every", type=int, default=350)
    add("--pause", type=float, default=0.0, help="seconds that each step sleeps")
    add("--megabytes", type=int, default=4, help="size of a checkpoint")
    add("--seed", type=int, default=1)
    run = Run(parser.parse_args())
    run.resume()
    run.end(stopped=run.train())
    dist.barrier()
    dist.destroy_process_group()
    # Left out is what may hang or abort at the interpreter's exit with gloo's threads.
    os._exit(0)


if __name__ == "__main__":
    main()
