"""What Prometheus needs for the nodes of a cluster: memory, CPU time and bytes on disk.

    python tests/bench/bench_prometheus.py [--nodes N] [--seconds N]

A real Prometheus scrapes N simulated nodes every second, with the recording rules and without them.
Memory is that of the process less what it had at its start, per series; samples on disk are the
chunks of 120 samples that were full at the end, of series that all vary a little.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hpml_exporters.app import ALL

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench.cluster_series import INTERVAL, Cluster
from tests.dashboardcheck import RULES
from tests.monitoring.prometheus_support import Prometheus, booted_prometheus, static

VARIANTS = 20  # of a node's metrics, shown in turn
FIGURES = {
    "memory": "process_resident_memory_bytes",
    "cpu": "process_cpu_seconds_total",
    "series": "prometheus_tsdb_head_series",
    "samples": "prometheus_tsdb_head_samples_appended_total",
}


def texts(nodes: int) -> dict[str, list[bytes]]:
    """Return the metrics of each node by its instance, in several variants."""
    metrics = {
        f"{spec.name}_{end}" if end else spec.name
        for spec in ALL
        if not spec.name.startswith("hpml_slurm")
        for end in (("bucket", "sum", "count") if spec.type == "histogram" else ("",))
    }
    found: dict[str, list[list[str]]] = defaultdict(lambda: [[] for _ in range(VARIANTS)])
    for block in Cluster(nodes, metrics).openmetrics(0, VARIANTS * INTERVAL):
        if match := re.search(r'instance="(.+?)"', block):
            for variant, line in zip(found[match[1]], block.splitlines(), strict=True):
                variant.append(line.rpartition(" ")[0])
    return {
        instance: ["\n".join([*variant, ""]).encode() for variant in variants]
        for instance, variants in found.items()
    }


@contextlib.contextmanager
def exporters(shown: dict[str, list[bytes]]) -> Iterator[dict[str, Any]]:
    """Serve all nodes; yields the scrape config."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = shown[self.path[1:]][int(time.time()) % VARIANTS]
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(OSError):  # Prometheus has ended
                self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        targets = [
            {
                "targets": [f"127.0.0.1:{server.server_port}"],
                "labels": {"__metrics_path__": f"/{instance}", "instance": instance},
            }
            for instance in shown
        ]
        yield static("node", honor_labels=True, static_configs=targets)
        server.shutdown()


def figures(server: Prometheus) -> dict[str, float]:
    """Return Prometheus' metrics about itself."""
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:  # noqa: S310 - our own server
        text = answer.read().decode()
    return {
        name: sum(
            float(value) for value in re.findall(rf"^{metric}(?:{{.*}})? (.+)$", text, re.MULTILINE)
        )
        for name, metric in FIGURES.items()
    }


def measure(name: str, config: dict[str, Any], folder: Path, seconds: float, **more: Any) -> None:
    """Scrape for a while and print a line of the table."""
    with booted_prometheus(folder, [config], **more) as server:
        start = figures(server)
        time.sleep(seconds)
        end = figures(server)
        mapped = sum(path.stat().st_size for path in folder.glob("data/chunks_head/*"))
    samples = end["samples"] - start["samples"]
    per_series = (end["memory"] - start["memory"]) / end["series"]
    chunks = end["series"] * (samples / end["series"] // 120) * 120
    disk = f"{mapped / chunks:.2f} bytes" if chunks else "run it for longer"
    print(
        f"| {name} | {end['series']:.0f} | {samples / seconds:.0f} | {per_series / 1024:.1f} KiB "
        f"| {1e6 * (end['cpu'] - start['cpu']) / samples:.1f} s | {disk} |"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=130, help="for each line (default: 130)")
    options = parser.parse_args()
    print(
        f"{options.nodes} nodes of 8 GPUs, scraped every second for {options.seconds:g} s; "
        f"{platform.node()}: {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}\n\n"
        "| Prometheus | series | samples/s | memory per series | CPU time of a million samples "
        "| sample on disk |\n|---|---|---|---|---|---|"
    )
    shown = texts(options.nodes)
    rules = {"rule_files": [str(RULES / "hpml.yml"), str(RULES / "hpml-alerts.yml")]}
    intervals = {"global": {"evaluation_interval": "15s", "scrape_interval": "1s"}}
    with tempfile.TemporaryDirectory(prefix="hpml-bench-") as scratch, exporters(shown) as config:
        measure("without rules", config, Path(scratch, "plain"), options.seconds)
        measure("with rules", config, Path(scratch, "rules"), options.seconds, **rules, **intervals)


if __name__ == "__main__":
    main()
