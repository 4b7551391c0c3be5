"""A small training whose speed depends on storage, loader workers and cores, for `--try`.

    trialtraining.py --data DIR --samples 200 --workers 0

The slow disk is a fake: opening a file below `--slow PATH` takes `--open-seconds` longer, as on a
file server far away. Loader workers are threads. A step
computes for as long as the arithmetic takes, so ranks that share a core are slower.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hpml_channel import Channel

BATCH = 4


class Images:
    """Files, read as often as it takes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._files = sorted(Path(options.data).iterdir())
        self._slow, self._seconds = options.slow, options.open_seconds
        self._samples = int(options.samples)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> bytes:
        path = self._files[index % len(self._files)]
        if self._slow and str(path).startswith(self._slow):
            time.sleep(self._seconds)
        return path.read_bytes()


def batches(images: Images, options: argparse.Namespace) -> Iterator[list[bytes]]:
    """Yield the batches, loaded by workers if there are any."""
    starts = range(0, len(images), BATCH)
    if options.workers:
        with ThreadPoolExecutor(options.workers) as pool:
            waiting = [pool.submit(images.__getitem__, index) for index in range(len(images))]
            for start in starts:
                yield [one.result() for one in waiting[start : start + BATCH]]
            pool.shutdown(cancel_futures=True)
    else:
        for start in starts:
            yield [images[index] for index in range(start, min(start + BATCH, len(images)))]


def compute(rounds: int) -> float:
    """Keep one core busy."""
    total = 0.0
    for number in range(rounds):
        total += number * 0.5
    return total


def main() -> None:
    """Train, and report it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", "--folder", required=True)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--slow", default="")
    parser.add_argument("--open-seconds", type=float, default=0.01)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", default="")
    parser.add_argument("--quiet", action="store_true", help="report nothing")
    options = parser.parse_args()
    channel = Channel() if options.quiet else Channel.from_env()
    channel.event("rendezvous")
    channel.event("warm-up", steps=1)
    began = time.perf_counter()
    for batch in batches(Images(options), options):
        waited = time.perf_counter() - began
        compute(options.rounds)
        took = time.perf_counter() - began
        began += took
        channel.count(samples=len(batch), steps=1, data_wait_seconds=waited, step_seconds=took)
        if channel.stop_requested():
            break
    if os.environ.get("RANK", "0") == "0":
        channel.result(test_accuracy=0.9)
    channel.close()


if __name__ == "__main__":
    main()
