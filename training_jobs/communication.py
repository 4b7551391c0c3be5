"""Compare the communication cost of methods of data-parallel training, at equal accuracy.

    python communication.py --method allreduce
    torchrun --standalone --nproc-per-node=2 communication.py --method topk --target-accuracy 0.95
    python shaped_ranks.py --ranks 2 --mbit 100 communication.py --method int8

A small network learns scikit-learn's digits until it reaches the target. All parameters form one
vector, so each method in communication_methods.py and communication_async.py takes a few lines.
`bytes_sent` is what rank 0 sends for training, `comm_seconds` how long it waits for that; neither
includes evaluations, nor does `seconds_to_accuracy`. The clock stops when nothing is in flight.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.profiler import record_function

import hpml_job
from communication_async import ASYNCHRONOUS, EVERY, FREE, METHODS, ParameterServer, SharedMemory
from communication_wire import Memory, Wire, synchronize
from hpml_channel import Channel
from hpml_checkpoint import Checkpoints, Ranks, StopAgreement
from hpml_job import JobError, say
from hpml_profile import trace_steps

NUMBERS = {  # numeric options: default, minimum, help
    "epochs": (40, 1, "length of the training"),
    "batch-size": (32, 1, "samples per rank and step"),
    "lr": (0.1, 0, "learning rate, whatever the number of ranks"),
    "width": (256, 1, "of the two hidden layers"),
    "seed": (1, 0, ""),
    "eval-every": (EVERY, 1, "steps"),
    "staleness": (2, 0, "steps by which stale applies a gradient late"),
    "checkpoint-every": (100, 1, "steps"),
    "warm-up-steps": (5, 0, "first steps that samples/s leaves out"),
}
SAVED = ("steps", "elapsed", "accuracy", "reached", "vector", "interface_bytes", "late")
COUNTED = ("bytes_sent", "latencies", "seconds", "busy_bytes")  # attributes of the wire


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line; exits with 2 if they are invalid."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--method", choices=[*METHODS, *ASYNCHRONOUS], default="allreduce")
    add("--rounding", choices=("nearest", "stochastic"), default="nearest", help="rounding of int8")
    hpml_job.add_options(parser, NUMBERS)
    add("--backend", choices=("nccl", "gloo"), help="default: nccl with GPUs, otherwise gloo")
    add("--target-accuracy", type=float, default=0.95, help="validation accuracy to reach")
    add("--run-on", action="store_true", help="continue after reaching the target")
    add("--latency-us", type=float, help="per message, from hpml bench; default: measured")
    add("--bandwidth-gb", type=float, help="GB/s of all-reduce, from hpml bench")
    options = parser.parse_args(arguments)
    hpml_job.check_numbers(parser, options, NUMBERS)
    return options


class Training:
    """The state of the training on one rank."""

    def __init__(self, options: argparse.Namespace, device: torch.device, wire: Wire) -> None:
        self.options, self.wire = options, wire
        self.steps, self.elapsed, self.accuracy, self.interface_bytes = 0, 0.0, 0.0, 0
        self.reached: dict[str, float] = {}  # seconds and steps to the target
        self.late = [0.0, 0.0, 0.0]  # async's staleness: count, sum and maximum
        self.store: ParameterServer | SharedMemory | None = None  # for async and hogwild
        self.checkpoints: Checkpoints | None = None
        # All ranks start with the same parameters, except those of an ensemble, which must differ.
        torch.manual_seed(options.seed + (1000 * wire.rank if options.method == "ensemble" else 0))
        width = options.width
        self.model = nn.Sequential(
            *(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
            nn.Linear(width, 10),
        ).to(device)
        self.vector = parameters_to_vector(self.model.parameters()).detach()
        torch.manual_seed(1000 * options.seed + wire.rank)  # for stochastic rounding
        shapes = [one.shape for one in self.model.parameters()]
        self.memory = Memory(shapes, options.seed, options.staleness, options.rounding)
        if options.method == "easgd":
            self.memory.tensors["centre"] = self.vector.clone()
        mine = self.vector.clone()
        if options.method == "ps":  # this rank owns an equal part; the last is padded
            part = -(-len(mine) // wire.ranks)
            mine = nn.functional.pad(mine, (0, part * wire.ranks - len(mine)))
            mine = mine[wire.rank * part :][:part].clone()
        self.mine = nn.Parameter(mine)
        self.optimizer = torch.optim.SGD([self.mine], lr=options.lr, momentum=0.9)

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """Take a step; return this rank's loss."""
        vector_to_parameters(self.vector, self.model.parameters())
        loss = nn.functional.cross_entropy(self.model(images), labels)
        gradients = torch.autograd.grad(loss, list(self.model.parameters()))
        gradient = parameters_to_vector(gradients)
        self.steps += 1
        if self.store:
            self.vector = self.store.apply(gradient)
            return loss.detach()
        self.memory.step = self.steps
        before, after = METHODS[self.options.method]
        self.mine.grad = before(gradient, self.wire, self.memory)
        self.optimizer.step()
        whole = after(self.mine.detach(), self.wire, self.memory)
        if self.options.method != "ps":
            self.mine.data.copy_(whole)
        self.vector = whole[: len(gradient)].clone()
        return loss.detach()

    def drain(self) -> None:
        """Wait for what is in flight; it is still applied as late as without this wait."""
        for _, work in self.memory.queue:
            self.wire.wait(work)
        if self.options.method in FREE:
            self.wire.meet()

    def newest(self) -> Tensor:
        """Return the parameters to evaluate."""
        return self.store.newest() if self.store else self.memory.tensors.get("centre", self.vector)

    def evaluate(self, images: Tensor, labels: Tensor) -> float:
        """Return the accuracy on images; each rank takes a part, in an ensemble all images."""
        vector_to_parameters(self.newest(), self.model.parameters())
        mine = slice(self.wire.rank, None, self.wire.ranks)
        with torch.no_grad():  # evaluation is not counted as communication
            if self.options.method == "ensemble":
                guesses = self.model(images).softmax(1)
                dist.all_reduce(guesses)
                return float((guesses.argmax(1) == labels).double().mean())
            right = (self.model(images[mine]).argmax(1) == labels[mine]).sum().double()
        dist.all_reduce(right)
        return float(right) / len(labels)

    def save(self) -> None:
        """Write a checkpoint with each rank's own parameters, errors and old gradients."""
        if self.checkpoints is None:
            return
        # The queue is drained: an all-reduce in flight would write into its tensor.
        own = {
            "memory": self.memory.tensors,
            "queue": [gradient for gradient, _ in self.memory.queue],
            "mine": self.mine.detach(),
            "optimizer": self.optimizer.state_dict(),
        }
        figures = {name: getattr(self, name) for name in SAVED}
        if self.store:
            figures["vector"] = self.store.newest()
        figures["wire"] = [getattr(self.wire, name) for name in COUNTED]
        ranks = self.checkpoints.ranks.gather(own)
        self.checkpoints.save({"ranks": ranks, **figures}, step=self.steps)

    def load(self) -> None:
        """Continue from the newest checkpoint, if there is one."""
        found = self.checkpoints.load() if self.checkpoints else None
        if found is None:
            return
        own, device = found.state["ranks"][self.wire.rank], self.mine.device
        self.memory.tensors = {name: value.to(device) for name, value in own["memory"].items()}
        self.memory.queue.extend((gradient.to(device), None) for gradient in own["queue"])
        self.mine.data.copy_(own["mine"])
        self.optimizer.load_state_dict(own["optimizer"])
        for name in SAVED:
            setattr(self, name, found.state[name])
        self.vector = self.vector.to(device)
        if self.options.method in ASYNCHRONOUS:
            self.mine.data.copy_(self.vector)
        elif self.options.method != "ps":  # ranks differ, for example with localsgd
            self.vector = self.mine.detach().clone()
        for name, value in zip(COUNTED, found.state["wire"]):  # noqa: B905 - Python 3.9
            setattr(self.wire, name, value)

    def start(self) -> None:
        """Start sharing the parameters, if the method does that."""
        mine = self.mine, self.optimizer, self.wire
        if self.options.method in ASYNCHRONOUS:
            is_async = self.options.method == "async"
            self.store = ParameterServer(*mine, self.late) if is_async else SharedMemory(*mine)


class Data:
    """scikit-learn's digits: every fifth for testing, every tenth of the others for validation."""

    def __init__(self, options: argparse.Namespace, wire: Wire, device: torch.device) -> None:
        from sklearn.datasets import load_digits  # noqa: PLC0415 - takes a second

        digits = load_digits()
        images = torch.tensor(digits.data, dtype=torch.float32, device=device) / 16
        labels = torch.tensor(digits.target, device=device)
        rest = torch.arange(len(labels), device=device)
        self.test, rest = (images[::5], labels[::5]), rest[rest % 5 > 0]
        self.validation = images[rest[::10]], labels[rest[::10]]
        rest = rest[torch.arange(len(rest), device=device) % 10 > 0]
        self.images, self.labels, self.seed = images[rest], labels[rest], options.seed
        self.batch, self.mine = options.batch_size * wire.ranks, slice(wire.rank, None, wire.ranks)
        self.steps_per_epoch = len(self.labels) // self.batch
        if not self.steps_per_epoch:
            reason = f"{self.batch} samples a step, but only {len(self.labels)} in all"
            raise JobError(f"--batch-size {options.batch_size}: {reason}")

    def batch_of(self, step: int) -> tuple[Tensor, Tensor]:
        """Return this rank's part of a step's batch; the order depends on seed and epoch."""
        epoch, place = divmod(step, self.steps_per_epoch)
        random = torch.Generator().manual_seed(1000 * self.seed + epoch)
        order = torch.randperm(len(self.labels), generator=random)
        chosen = order[place * self.batch :][: self.batch][self.mine].to(self.labels.device)
        return self.images[chosen], self.labels[chosen]


def train(options: argparse.Namespace, channel: Channel, device: torch.device) -> None:  # noqa: PLR0915
    """Train to the target, the last epoch or a stop request; report the figures."""
    wire, ranks = Wire(), Ranks()
    hpml_job.make_directories(options, ranks)
    data, training = Data(options, wire, device), Training(options, device, wire)
    total = options.epochs * data.steps_per_epoch
    settings = ("method", "batch_size", "lr", "width", "seed", "epochs", "staleness", "rounding")
    job = {**{name: getattr(options, name) for name in settings}, "ranks": wire.ranks}
    job["samples"] = len(data.labels)
    if options.checkpoint:
        training.checkpoints = Checkpoints(options.checkpoint, job=job, channel=channel)
        training.load()
    training.start()
    agreement = StopAgreement()
    channel.event("warm-up", steps=options.warm_up_steps)
    channel.event("training", step=training.steps, total_steps=total)
    stop, latency = bool(agreement.finish()), wire.measure_latency(device)
    with trace_steps(options.profile, wire.rank, after=options.warm_up_steps) as tracer:
        while training.steps < total and not stop and (options.run_on or not training.reached):
            began, waited, sent = time.perf_counter(), wire.seconds, wire.interface_bytes()
            with record_function("hpml.step"):
                with record_function("hpml.data"):
                    batch = data.batch_of(training.steps)
                loss = training.step(*batch)
                # A GPU still computes when the step returns: without this, the next step would be
                # charged for it.
                synchronize()
            tracer.step()
            is_evaluated = training.steps % options.eval_every == 0 or training.steps == total
            is_saved = training.steps % options.checkpoint_every == 0
            if options.method not in FREE or is_evaluated:
                asked = time.perf_counter()  # the exchange waits for what `stale` still sends
                stop = bool(agreement.exchange(channel.stop_requested()))
                wire.seconds += time.perf_counter() - asked
            if is_evaluated or is_saved or stop:
                training.drain()  # otherwise `stale` would communicate off the clock
            took = time.perf_counter() - began
            training.elapsed += took
            training.interface_bytes += wire.interface_bytes() - sent
            channel.gauge(loss=loss, comm_method=options.method)
            parts = {"step_seconds": took, "comm_seconds": wire.seconds - waited}
            channel.count(steps=1, samples=len(batch[1]), **parts)
            if is_evaluated:
                with channel.timed("evaluation_seconds"):
                    training.accuracy = training.evaluate(*data.validation)
                channel.event("evaluation", accuracy=training.accuracy)
                if not training.reached and training.accuracy >= options.target_accuracy:
                    training.reached = {"seconds": training.elapsed, "steps": training.steps}
            if is_saved:
                training.save()
    training.save()
    if stop:
        channel.event("stopping", step=training.steps)
    test_accuracy = None if stop else training.evaluate(*data.test)
    if training.store:
        training.store.end()
    updates, late, latest = training.late
    mbit = float(os.environ.get("SHAPED_MBIT", "0")) or None
    speed = mbit * 1e6 / 8 if mbit else (options.bandwidth_gb or 0.0) * 1e9
    latency = latency if options.latency_us is None else options.latency_us / 1e6
    figures = {
        "method": options.method, "validation_accuracy": training.accuracy,
        "test_accuracy": test_accuracy,
        "target_accuracy": options.target_accuracy,
        **{f"{name}_to_accuracy": training.reached.get(name) for name in ("seconds", "steps")},
        "bytes_sent": wire.bytes_sent, "interface_bytes": training.interface_bytes or None,
        "comm_seconds": wire.seconds, "train_seconds": training.elapsed,
        "predicted_seconds": wire.predict(latency, speed) if speed else None,
        "steps": training.steps, "world_size": wire.ranks, "bandwidth_mbit": mbit,
        "batch_size_per_rank": options.batch_size, "seed": options.seed, "stopped": stop,
        "staleness_mean": late / updates if updates else None,
        "staleness_max": latest if updates else None,
    }  # fmt: skip
    hpml_job.report(figures, channel, options, ranks)
    say(ranks, f"{'stopped' if stop else 'done'}: {json.dumps(figures)}")


def main(arguments: list[str] | None = None) -> NoReturn:
    """Train, and exit with 0, or with 2 and a line with the reason."""
    hpml_job.run(train, parse(arguments))


if __name__ == "__main__":
    main()
