"""Start the ranks of a training on this machine, each behind a network link with limited bandwidth.

    python shaped_ranks.py --ranks 2 --mbit 100 communication.py --method int8

Each rank gets a separate network namespace, with a virtual cable to a bridge; `tc` limits what it
sends and receives. Nothing outside of these namespaces is changed, and they end with the ranks.
Needs Linux with `ip`, `tc`, `unshare` and `nsenter`, and root or user namespaces. hpml's channel
does not reach into the namespaces: the script must write its figures to result.json.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

INSIDE = "SHAPED_RANKS_INSIDE"  # set in the namespace of the bridge
NETWORK = "10.77.0."


def main() -> int:
    """Start the ranks and wait for them; return the highest exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mbit", type=float, required=True, help="Mbit/s of each rank's link")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGUMENT ...]")
    options = parser.parse_args()
    if options.ranks < 1 or options.mbit <= 0 or not options.command:
        parser.error("it needs --ranks of 1 or more, --mbit above 0, and a script")
    _enter_namespace(parser)
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        _run("ip link add bridge0 type bridge")
        _run("ip link set bridge0 up")
        for rank in range(options.ranks):
            ranks.append(_start(rank, options))  # noqa: PERF401 - what was started is ended below
        for process in ranks:
            if process.stdin is not None:
                process.stdin.close()  # lets the rank start
        while any(process.poll() is None for process in ranks):
            if any(process.poll() for process in ranks):  # otherwise the others wait for it
                break
            time.sleep(0.05)
    finally:
        for process in ranks:
            process.kill()
        statuses = [abs(process.wait()) for process in ranks]
    return max(statuses, default=0)


def _enter_namespace(parser: argparse.ArgumentParser) -> None:
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter") if not shutil.which(tool)]
    if missing:
        parser.error(f"{', '.join(missing)}: not installed (Debian: iproute2, util-linux)")
    if INSIDE not in os.environ:
        flags = ["--net"] if os.geteuid() == 0 else ["--map-root-user", "--net"]
        tried = subprocess.run(
            ["unshare", *flags, "true"], capture_output=True, text=True, check=False
        )
        if tried.returncode:
            parser.error(f"no network namespace can be made here: {tried.stderr.strip()}")
        os.environ[INSIDE] = "1"
        command = ["unshare", *flags, "--", sys.executable, *sys.argv]
        os.execvp("unshare", command)  # noqa: S606 - there is nothing for a shell to do


def _start(rank: int, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start a rank that waits until its standard input is closed, and connect its namespace."""
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(options.ranks),
        "MASTER_ADDR": f"{NETWORK}1",
        "MASTER_PORT": "29500",
        # The host name resolves to an address outside of the namespace.
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "RES_OPTIONS": "timeout:1 attempts:1",  # no name server is reachable
        "SHAPED_MBIT": f"{options.mbit:g}",
    }
    # Gloo binds to eth0 as soon as the script starts, so the rank waits for the cable.
    wait = 'read -r _; exec "$@" </dev/null'
    process = subprocess.Popen(
        ["unshare", "--net", "--", "sh", "-c", wait, "sh", sys.executable, *options.command],
        stdin=subprocess.PIPE,
        env=environment,
    )
    here = os.readlink("/proc/self/ns/net")
    while os.readlink(f"/proc/{process.pid}/ns/net") == here:  # until unshare has created its own
        time.sleep(0.01)
    within = f"nsenter --target {process.pid} --net --"
    _run(f"ip link add cable{rank} type veth peer name eth0 netns {process.pid}")
    _run(f"ip link set cable{rank} master bridge0 up")
    _run(f"{within} ip address add {NETWORK}{rank + 1}/24 dev eth0")
    _run(f"{within} ip link set lo up")
    # Packets of real size: the kernel would send 64 KiB at once, far more than `burst`.
    _run(f"{within} ip link set eth0 gso_max_segs 1 up")
    burst = max(16, int(options.mbit * 1000 / 8 / 250))  # KiB at full speed, per 4 ms
    limit = f"tbf rate {options.mbit:g}mbit burst {burst}kb latency 300ms"
    _run(f"{within} tc qdisc add dev eth0 root {limit}")
    _run(f"tc qdisc add dev cable{rank} root {limit}")  # what the rank receives
    return process


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{Path(__file__).name}: error: {command}: {done.stderr.strip()}")


if __name__ == "__main__":
    sys.exit(main())
