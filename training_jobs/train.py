"""A short training as a template: it reports to hpml, saves, resumes and stops when asked to.

    torchrun --standalone --nproc-per-node=2 train.py --steps 200
    hpml run job.yaml

Replace `make_model`, `batch_of` and the loss by your own. All ranks make the same calls.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpml_channel import Channel
from hpml_checkpoint import Checkpoints, StopAgreement
from hpml_waits import measure_waits

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--batch-size", type=int, default=32, help="samples per rank and step")
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--save-every", type=int, default=500, metavar="STEPS")
parser.add_argument("--checkpoint", default=os.environ.get("HPML_CHECKPOINT_DIR", "checkpoints"))


def make_model() -> nn.Module:
    """Return the model to train."""
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))


def batch_of(step: int, rank: int, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets: they depend on step and rank, so a resume repeats nothing."""
    inputs = torch.randn(batch_size, 8, generator=torch.Generator().manual_seed(step * 4096 + rank))
    return inputs, inputs.sum(1, keepdim=True)


def main() -> None:
    """Train from the newest checkpoint to the last step, or until hpml asks to stop."""
    options = parser.parse_args()
    channel = Channel.from_env()
    # Before init_process_group, which waits for all ranks: if one is missing, hpml knows where the
    # others are.
    channel.event("rendezvous")
    use_gpu = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank % torch.cuda.device_count()) if use_gpu else "cpu"
    if use_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_gpu else "gloo")
    channel.event("preparation")  # all ranks have joined
    rank = dist.get_rank()

    torch.manual_seed(1)
    model = DistributedDataParallel(make_model().to(device))
    measure_waits(model, channel)  # finds the rank that the others wait for
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    # A checkpoint of another `job` is refused: its position in the data would be wrong.
    settings = {"ranks": dist.get_world_size(), "batch_size": options.batch_size}
    checkpoints = Checkpoints(options.checkpoint, job=settings, channel=channel)
    agreement, step, stop = StopAgreement(checkpoints.ranks), 0, False
    if found := checkpoints.load():
        model.load_state_dict(found.state["model"])
        optimizer.load_state_dict(found.state["optimizer"])
        step = found.step

    def save() -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        checkpoints.save(state, step=step)

    channel.event("training", step=step, total_steps=options.steps)
    while step < options.steps and not stop:
        began = time.perf_counter()
        inputs, targets = batch_of(step, rank, options.batch_size)
        waited = time.perf_counter() - began
        loss = (model(inputs.to(device)) - targets.to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        channel.gauge(loss=loss.detach())
        channel.count(
            steps=1,
            samples=len(inputs),
            data_wait_seconds=waited,
            step_seconds=time.perf_counter() - began,
        )
        # Ranks learn of a stop at different times: they agree on the step after which all stop.
        stop = bool(agreement.exchange(channel.stop_requested()))
        # After a stop the save below follows at once.
        if step % options.save_every == 0 and not stop:
            save()
        if rank == 0 and step % 100 == 0:
            print(f"step {step}/{options.steps}: loss {loss.item():.4f}", flush=True)
    save()
    if stop:
        channel.event("stopping", step=step)
    elif rank == 0:
        channel.result(loss=loss.item() if step else None)
    channel.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # at a normal exit, gloo's threads may crash (pytorch#190489)
