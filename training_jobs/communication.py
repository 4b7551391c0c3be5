"""Compare what data-parallel training costs in communication, method by method, at equal accuracy.

    python communication.py --method allreduce
    torchrun --standalone --nproc-per-node=2 communication.py --method topk --target-accuracy 0.95
    python shaped_ranks.py --ranks 2 --mbit 100 communication.py --method int8

A small network learns scikit-learn's digits until it reaches the target. All parameters are one
vector, so that each method in communication_methods.py is a few lines. `bytes_sent` is what a rank
sends for training, `comm_seconds` the time in which it waits for the others; evaluations are in
neither of them, nor in `seconds_to_accuracy`. The clock stops when nothing is under way.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.profiler import record_function

from communication_methods import LOCAL_STEPS, METHODS, Memory, Wire, allreduce, synchronize
from hpml_channel import Channel
from hpml_checkpoint import CheckpointError, Checkpoints, StopAgreement
from hpml_waits import trace_steps

SAVED = ("steps", "elapsed", "accuracy", "reached", "vector", "interface_bytes")


def options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--method", choices=list(METHODS), default="allreduce")
    add("--epochs", type=int, default=40)
    add("--batch-size", type=int, default=32, help="samples per rank and step")
    add("--lr", type=float, default=0.1, help="learning rate, whatever the number of ranks")
    add("--width", type=int, default=256, help="of the two hidden layers")
    add("--seed", type=int, default=1)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--backend", choices=("nccl", "gloo"), help="default: nccl with GPUs, otherwise gloo")
    add("--target-accuracy", type=float, default=0.95, help="on the validation part")
    add("--run-on", action="store_true", help="train on when the target is reached")
    add("--eval-every", type=int, default=LOCAL_STEPS, metavar="STEPS")
    add("--latency-us", type=float, help="of a message, as hpml bench prints; default: measured")
    add("--bandwidth-gb", type=float, help="GB/s of all-reduce, as hpml bench prints")
    add("--warm-up-steps", type=int, default=5, help="first steps that samples/s leaves out")
    add("--checkpoint", default=os.environ.get("HPML_CHECKPOINT_DIR"), metavar="DIR")
    add("--checkpoint-every", type=int, default=100, metavar="STEPS")
    add("--output", type=Path, metavar="DIR", help="write result.json there")
    traces = Path(os.environ.get("HPML_RUN_DIR", "."), "profile")
    add("--profile", type=Path, nargs="?", const=traces, metavar="DIR", help="trace five steps")
    chosen = parser.parse_args()
    if min(chosen.epochs, chosen.batch_size, chosen.width, chosen.eval_every) < 1:
        parser.error("--epochs, --batch-size, --width and --eval-every have to be 1 or more")
    return chosen


class Training:
    """What changes while the network learns, on one rank."""

    def __init__(self, options: argparse.Namespace, device: torch.device, wire: Wire) -> None:
        self.options, self.wire = options, wire
        self.steps, self.elapsed, self.accuracy, self.interface_bytes = 0, 0.0, 0.0, 0
        self.reached: dict[str, float] = {}  # seconds and steps to the target
        self.checkpoints: Checkpoints | None = None
        torch.manual_seed(options.seed)  # all ranks begin with the same parameters
        width = options.width
        self.model = nn.Sequential(
            *(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
            nn.Linear(width, 10),
        ).to(device)
        self.vector = parameters_to_vector(self.model.parameters()).detach()
        self.memory = Memory([one.shape for one in self.model.parameters()])
        mine = self.vector.clone()
        if options.method == "ps":  # this rank owns an equal part, the last one filled up
            part = -(-len(mine) // wire.ranks)
            mine = nn.functional.pad(mine, (0, part * wire.ranks - len(mine)))
            mine = mine[wire.rank * part :][:part].clone()
        self.mine = nn.Parameter(mine)
        self.optimizer = torch.optim.SGD([self.mine], lr=options.lr, momentum=0.9)

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        """Take a step; return this rank's loss."""
        method, wire, mine = self.options.method, self.wire, self.mine
        vector_to_parameters(self.vector, self.model.parameters())
        loss = nn.functional.cross_entropy(self.model(images), labels)
        gradients = torch.autograd.grad(loss, list(self.model.parameters()))
        gradient = parameters_to_vector(gradients)
        if method == "ps":  # get all gradients of the own part, and send the result
            # Parts have to be equally long for the exchange; the padding is cut off again below.
            padded = nn.functional.pad(gradient, (0, len(mine) * wire.ranks - len(gradient)))
            mine.grad = wire.exchange(padded).reshape(wire.ranks, -1).mean(0)
        else:
            mine.grad = METHODS[method](gradient, wire, self.memory)
        self.optimizer.step()
        self.steps += 1
        if method == "localsgd" and self.steps % LOCAL_STEPS == 0:
            mine.data.copy_(allreduce(mine.detach().clone(), wire, self.memory))
        whole = wire.all_gather(mine.detach()) if method == "ps" else mine.detach()
        self.vector = whole[: len(self.vector)].clone()
        return loss.detach()

    def drain(self) -> None:
        """Wait for what is under way, which is applied as late as without this wait."""
        for _, work in self.memory.queue:
            self.wire.wait(work)

    def evaluate(self, images: Tensor, labels: Tensor) -> float:
        """Return the accuracy on images, of which each rank takes a part."""
        vector_to_parameters(self.vector, self.model.parameters())
        mine = slice(self.wire.rank, None, self.wire.ranks)
        with torch.no_grad():
            right = (self.model(images[mine]).argmax(1) == labels[mine]).sum().double()
        if self.wire.ranks > 1:  # not counted: it belongs to no method
            dist.all_reduce(right)
        return float(right) / len(labels)

    def save(self) -> None:
        """Write a checkpoint; each rank has its own parameters, errors and old gradients."""
        if self.checkpoints is None:
            return
        # The queue is drained: an all-reduce under way would write into its tensor.
        own = {
            "memory": self.memory.tensors,
            "queue": [gradient for gradient, _ in self.memory.queue],
            "mine": self.mine.detach(),
            "optimizer": self.optimizer.state_dict(),
        }
        figures = {name: getattr(self, name) for name in SAVED}
        figures["wire"] = [self.wire.bytes_sent, self.wire.latencies, self.wire.seconds]
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
        if self.options.method != "ps":  # ranks of localsgd differ
            self.vector = self.mine.detach().clone()
        self.wire.bytes_sent, self.wire.latencies, self.wire.seconds = found.state["wire"]


class Data:
    """scikit-learn's digits: every fifth is for testing, every tenth of the others to validate."""

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
            raise CheckpointError(f"--batch-size {options.batch_size}: {reason}")

    def batch_of(self, step: int) -> tuple[Tensor, Tensor]:
        """Return this rank's part of a step's batch: the order follows from seed and epoch."""
        epoch, place = divmod(step, self.steps_per_epoch)
        random = torch.Generator().manual_seed(1000 * self.seed + epoch)
        order = torch.randperm(len(self.labels), generator=random)
        chosen = order[place * self.batch :][: self.batch][self.mine].to(self.labels.device)
        return self.images[chosen], self.labels[chosen]


def train(options: argparse.Namespace, device: torch.device, channel: Channel) -> dict[str, object]:
    """Train to the target, the last epoch or a stop request; return the figures."""
    wire = Wire()
    data, training = Data(options, wire, device), Training(options, device, wire)
    total = options.epochs * data.steps_per_epoch
    settings = ("method", "batch_size", "lr", "width", "seed", "epochs")
    job = {**{name: getattr(options, name) for name in settings}, "ranks": wire.ranks}
    job["samples"] = len(data.labels)
    if options.checkpoint:
        training.checkpoints = Checkpoints(options.checkpoint, job=job, channel=channel)
        training.load()
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
                # A GPU still computes when the step returns: without this the next step would pay
                # for it.
                synchronize()
            tracer.step()
            asked = time.perf_counter()
            stop = bool(agreement.exchange(channel.stop_requested()))
            wire.seconds += time.perf_counter() - asked  # it comes behind what `stale` still sends
            is_evaluated = training.steps % options.eval_every == 0 or training.steps == total
            is_saved = training.steps % options.checkpoint_every == 0
            if is_evaluated or is_saved or stop:
                training.drain()  # else `stale` would communicate while no clock runs
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
    mbit = float(os.environ.get("SHAPED_MBIT", "0")) or None
    speed = mbit * 1e6 / 8 if mbit else (options.bandwidth_gb or 0.0) * 1e9
    latency = latency if options.latency_us is None else options.latency_us / 1e6
    return {
        "method": options.method, "validation_accuracy": training.accuracy,
        "test_accuracy": None if stop else training.evaluate(*data.test),
        "target_accuracy": options.target_accuracy,
        **{f"{name}_to_accuracy": training.reached.get(name) for name in ("seconds", "steps")},
        "bytes_sent": wire.bytes_sent, "interface_bytes": training.interface_bytes or None,
        "comm_seconds": wire.seconds, "train_seconds": training.elapsed,
        "predicted_seconds": wire.predict(latency, speed) if speed else None,
        "steps": training.steps, "world_size": wire.ranks, "bandwidth_mbit": mbit,
        "batch_size_per_rank": options.batch_size, "seed": options.seed, "stopped": stop,
    }  # fmt: skip


def main() -> None:
    """Join the ranks, train, write the figures, and end with 0, or with 2 and one line."""
    chosen, channel, status = options(), Channel.from_env(), 0
    channel.event("rendezvous")
    use_gpu = chosen.device == "cuda" or (chosen.device == "auto" and torch.cuda.is_available())
    device = torch.device("cpu")
    if use_gpu:  # ranks may share one, but NCCL refuses that
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(chosen.backend or ("nccl" if use_gpu else "gloo"))
    channel.event("preparation")
    rank = dist.get_rank() if dist.is_initialized() else 0
    try:
        figures = train(chosen, device, channel)
        if rank == 0:
            channel.result(**figures)
            if chosen.output:
                chosen.output.mkdir(parents=True, exist_ok=True)
                # Renamed when complete: no reader finds half of a result.
                aside = chosen.output / ".result.json.new"
                aside.write_text(json.dumps(figures, indent=2) + "\n")
                aside.replace(chosen.output / "result.json")
            end = "stopped" if figures["stopped"] else "done"
            print(f"{end}: {json.dumps(figures)}", flush=True)
    except (CheckpointError, OSError) as error:
        print(f"communication.py: error: {error}", file=sys.stderr, flush=True)
        status = 2
    channel.close()
    # With gloo a correct training may die at the interpreter's exit (pytorch#190489).
    gc.collect()
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.all_reduce(torch.zeros(1, device=device))
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
