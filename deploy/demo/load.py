"""A training of known load, for the monitoring demo: it computes, waits for data and reports both.

    python load.py --compute 0.2 --wait 0.05 --steps 1000

Each step computes for `--compute` seconds, a tenth of it on the CPU and the rest asleep, as a rank
does while its GPU works, and sleeps for `--wait`, as one that waits for its loader. Rank 0 takes
`--slow` times as long, and the others wait for it at the end of each step. The demo's simulated
GPUs are ten times as busy as the ranks' CPUs.
"""

from __future__ import annotations

import argparse
import os
import time

from hpml_channel import Channel


def main() -> None:
    """Run steps until a signal stops the program."""
    parser = argparse.ArgumentParser(description="A training of known load.")
    parser.add_argument("--compute", type=float, default=0.2, help="seconds of each step")
    parser.add_argument("--wait", type=float, default=0.02, help="for data, in each step")
    parser.add_argument("--slow", type=float, default=1.0, help="factor for rank 0")
    parser.add_argument("--steps", type=int, default=10_000)
    options = parser.parse_args()
    channel = Channel.from_env()
    is_slow = os.environ.get("RANK") == "0"
    slower = options.slow if is_slow else 1.0
    meets = 0.0 if is_slow else (options.slow - 1) * (options.wait + options.compute)
    for step in range(options.steps):
        began = time.monotonic()
        time.sleep(options.wait * slower)
        waited = time.monotonic() - began
        until = time.process_time() + 0.1 * options.compute * slower
        while time.process_time() < until:
            sum(range(10_000))
        time.sleep(0.9 * options.compute * slower)
        time.sleep(meets)
        took = time.monotonic() - began
        channel.count(samples=32, steps=1, data_wait_seconds=waited, step_seconds=took)
        channel.count(wait_seconds=meets)
        channel.gauge(loss=2.3 / (1 + step / 50))
        if channel.stop_requested():
            break
    channel.close()


if __name__ == "__main__":
    main()
