"""A chain against every node reading, on four nodes whose links and file server are shaped.

    python tests/bench/bench_chain.py [--quick]

Needs root: four network namespaces stand for nodes, a fifth for the shared file system, joined by a
bridge; `tc tbf` gives every link the same rate in each direction. The file server is a stand-in
(`Server` below): it sends ranges of files over TCP, waits a millisecond for each open, and counts
opens and bytes; nodes read it through a `Source` of this bench, and all else is hpml's own: plan,
engine, chain, digests, publishing. So ratios count, not rates. Ways take turns; a run ends when the
last node has published. Two sets of data: one of large files, one of many small ones.

Last comes the model (`staging/distribution.py`): against what was measured here, and on paper for
1,024 nodes, with its inputs.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import platform
import shutil
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from hpml_orchestrator.staging.distribution import Rates, choose, seconds_of
from tests.unit.staging.many.networks import Network, NoNetworkError
from tests.unit.staging.many.nodes import Nodes

NODES = 4
LINK_MEGABITS = 400
OPEN_SECONDS = 0.001
OPENS_AT_ONCE = 4  # what the stand-in's metadata server does side by side
PORT = 9999
CLONE_NEWNET = 0x40000000
RANGE = struct.Struct(">HQQ")
WAYS = ("shared", "chain")

REMOTE = """
import socket, struct, threading
import hpml_orchestrator.staging.distribution as D
from hpml_orchestrator.staging.source import TreeSource
RANGE = struct.Struct(">HQQ")
class Remote(TreeSource):
    def reader(self, plan):
        return Reader(plan)
class Reader:
    def __init__(self, plan):
        self.plan, self.local, self.open = plan, threading.local(), []
    def read(self, number):
        start, end = 0, self.plan.files[number].size
        if not hasattr(self.local, "sock"):
            self.local.sock = socket.create_connection(SERVER)
            self.local.buffer = memoryview(bytearray(1 << 20))
            self.open.append(self.local.sock)
        sock, buffer = self.local.sock, self.local.buffer
        name = self.plan.files[number].path.encode()
        sock.sendall(RANGE.pack(len(name), start, end) + name)
        while start < end:
            count = sock.recv_into(buffer[: min(1 << 20, end - start)])
            if not count:
                raise OSError(5, "the file server is gone")
            yield buffer[:count]
            start += count
    def close(self):
        for sock in self.open:
            sock.close()
D.open_source = lambda request, retry, most, **_: Remote(request.source, retry, "stand-in")
"""


class Server:
    """A stand-in for a shared file system: ranges of files over TCP, with a wait for each open."""

    def __init__(self, root: Path, namespace: str, address: str) -> None:
        self._root = root
        self.bytes = self.opens = 0
        self._opening = threading.Semaphore(OPENS_AT_ONCE)
        self._lock = threading.Lock()
        self._listener = _listen_in(namespace, address)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(sock,), daemon=True).start()

    def _answer(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError), sock, sock.makefile("rb") as stream:
            while head := stream.read(RANGE.size):
                length, start, end = RANGE.unpack(head)
                name = stream.read(length).decode()
                with self._opening:
                    time.sleep(OPEN_SECONDS)
                with open(self._root / name, "rb", buffering=0) as file:
                    while start < end:
                        count = min(1 << 20, end - start)
                        sent = os.sendfile(sock.fileno(), file.fileno(), start, count)
                        if not sent:
                            return
                        start += sent
                        with self._lock:
                            self.bytes += sent
                with self._lock:
                    self.opens += 1

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()


def _listen_in(namespace: str, address: str) -> socket.socket:
    """A listening socket of a namespace; it stays there, whichever process uses it."""
    found: list[socket.socket] = []

    def listen() -> None:
        with open(f"/run/netns/{namespace}", "rb") as space:
            # os.setns came with Python 3.12; it concerns this thread alone
            if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
            found.append(socket.create_server((address, PORT), backlog=1024))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    return found[0]


def make(root: Path, files: int, size: int) -> Path:
    """A tree of files of one size."""
    root.mkdir()
    block = os.urandom(size)
    for number in range(files):
        (root / f"{number % 32}").mkdir(exist_ok=True)
        (root / f"{number % 32}" / f"{number}").write_bytes(block)
    return root


def run(way: str, source: Path, root: Path, network: Network) -> tuple[float, float, int]:
    """Stage to all nodes; returns (seconds of the slowest, bytes read / size, opens)."""
    server = Server(source, network.namespace(NODES), network.address(NODES))
    size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    nodes = Nodes(root, source, NODES)
    nodes.attempt = f"attempt-{time.monotonic_ns()}"
    address = (network.address(NODES), PORT)
    try:
        for index in range(NODES):
            nodes.start(
                index, prefix=network.prefix(index), method=way, interfaces=["eth0"],
                before=f"SERVER = {address!r}{REMOTE}", options={"processes": 2, "threads": 8},
                timeout=30.0, clean=True,
            )  # fmt: skip
        ends = nodes.ends(seconds=600)
    finally:
        nodes.close()
        server.close()
    if any(end["status"] for end in ends) or len({end["digest"] for end in ends}) != 1:
        raise SystemExit(f"bench_chain: {way}: {ends}")
    return max(end["seconds"] for end in ends), server.bytes / size, server.opens


def measured(files: int, size: int, nodes: int) -> dict[str, float]:
    """The model's estimate for this benchmark's network."""
    link = LINK_MEGABITS * 1e6 / 8
    rates = Rates(
        shared_rate=link, link_rate=link, disk_rate=1e9,
        metadata_rate=OPENS_AT_ONCE / OPEN_SECONDS,
    )  # fmt: skip
    return {
        way: seconds_of(way, size=files * size, files=files, nodes=nodes, rates=rates)
        for way in WAYS
    }


def on_paper() -> None:
    """The model for large jobs, with its inputs."""
    print("\non paper: 150 GB in 1,281,167 files (the size of ImageNet-1k), by the model with its")
    for nodes in (4, 16, 64, 256, 1024):
        choice = choose(size=150 * 10**9, files=1_281_167, nodes=nodes)
        shared, chain = choice.seconds["shared"], choice.seconds["chain"]
        print(
            f"  {nodes:5} nodes: shared {shared:9.0f} s, {150 * nodes:7} GB read; "
            f"chain {chain:6.0f} s, 150 GB read; {shared / chain:6.1f}x"
        )


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--quick", action="store_true")
    quick = options.parse_args().quick
    runs = 1 if quick else 5
    sets = [
        ("large", 8, (4 << 20) if quick else (32 << 20)),
        ("small", 500 if quick else 4000, 8192),
    ]
    print(
        f"host {platform.node()}, kernel {platform.release()}, Python {platform.python_version()}"
    )
    print(f"{NODES} namespaces, every link {LINK_MEGABITS} Mbit/s each way (tc tbf), target tmpfs")
    print(f"file server (stand-in): one such link, {OPENS_AT_ONCE} opens of 1 ms at a time")
    root = Path(tempfile.mkdtemp(prefix="hpml-bench-", dir="/dev/shm"))
    try:
        with Network(NODES + 1, rate=f"{LINK_MEGABITS}mbit") as network:
            for name, files, size in sets:
                source = make(root / name, files, size)
                found: dict[str, list[tuple[float, float, int]]] = {way: [] for way in WAYS}
                for _ in range(runs):
                    for way in WAYS:
                        found[way].append(run(way, source, root, network))
                model = measured(files, size, NODES)
                print(f"\n{name}: {files} files of {size} bytes to {NODES} nodes, median of {runs}")
                for way in WAYS:
                    seconds = statistics.median(one[0] for one in found[way])
                    _, times, opens = found[way][-1]
                    print(
                        f"  {way:6} {seconds:7.2f} s   read from the file server: {times:.2f}x the "
                        f"data, {opens} opens   (model {model[way]:.2f} s)"
                    )
                ratio = statistics.median(
                    shared[0] / chain[0]
                    for shared, chain in zip(found["shared"], found["chain"], strict=True)
                )
                print(f"  chain against every node reading: {ratio:.2f}x as fast")
                shutil.rmtree(source)
    except NoNetworkError as error:
        print(f"bench_chain: not measured, no shaped namespaces here: {error}")
    finally:
        shutil.rmtree(root)
    on_paper()


if __name__ == "__main__":
    main()
