"""The Job and Cluster dashboards on a large cluster, with and without recording rules.

    python tests/bench/bench_dashboards.py [--nodes N] [--minutes N] [--runs N]

Makes the raw series of N nodes of 8 GPUs (cluster_series.py), puts them into a Prometheus with
promtool, and has promtool write what hpml's recording rules would have recorded. Then every query
of both dashboards is asked several times, with as many points as the default time range has; the
Job dashboard shows the largest job. The peer: the same panels without recording rules. The rules'
expressions stand in its queries, each is asked once and given up after 5 s.

1,000 nodes (--nodes 1000) take 3 GB of scratch space, 4 GB of memory and an hour on two busy CPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import re
import statistics
import string
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import promql_parser
from hpml_dashboards import JSON
from hpml_dashboards.serve import PrometheusServer as Source
from hpml_dashboards.serve import ViewerServer
from ruamel.yaml import YAML

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench.cluster_series import CLUSTER, INTERVAL, Cluster
from tests.dashboardcheck import RULES
from tests.monitoring.backfill_support import panels
from tests.monitoring.browser_support import chromium
from tests.monitoring.prometheus_support import Prometheus, booted_prometheus, program

END = 1_767_225_600  # of the data; the end of a block of two hours
RANGES = {"hpml-job": 3600, "hpml-cluster": 3 * 3600}  # seconds that they show by default
POINT = 15  # seconds between two points, in Grafana and in the viewer
PATIENCE = 5  # seconds after which a query without recording rules is given up
FIRST_SCREEN = 21  # rows of the grid
GOAL = 1.0
READY = """(() => { const panels = [...document.querySelectorAll('[data-panel]')]
    .filter(panel => panel.getBoundingClientRect().top < 900);
    return panels.length && panels.every(panel => panel.dataset.state); })()"""


@dataclass(frozen=True)
class Query:
    """A query of a panel."""

    dashboard: str
    panel: str
    expression: str
    is_instant: bool
    is_on_first_screen: bool


@dataclass(frozen=True)
class Rules:
    """Recording rules by name, and the expressions of all rules by group."""

    recorded: dict[str, str]
    groups: dict[str, list[str]]

    def metrics(self, expressions: list[str]) -> set[str]:
        """Return the raw metrics that expressions need, through recording rules too."""
        raw: set[str] = set()
        pending = [name for text in expressions for name in names(text)]
        while pending:
            name = pending.pop()
            if name in self.recorded:
                pending += names(self.recorded[name])
            raw.add(name)
        return raw - self.recorded.keys()

    def levels(self) -> Iterator[dict[str, str]]:
        """Yield rules such that each needs only those of earlier levels."""
        left = dict(self.recorded)
        while left:
            level = {
                name: text
                for name, text in left.items()
                if not names(text) & (left.keys() - {name})
            }
            yield level
            left = {name: text for name, text in left.items() if name not in level}

    def inlined(self, expression: str, seconds: int) -> str:
        """Return an expression that needs no recording rule."""

        def written_out(match: re.Match[str]) -> str:
            name, matchers, window = match.groups()
            text = f"({self.inlined(self.recorded[name], seconds)})"
            if matchers and "jobid" in matchers:
                text = f"({text} and on (cluster, jobid) hpml_job_info{matchers})"
            return f"{text}[{seconds}s:{INTERVAL}s]" if window else text

        return re.sub(r"\b(hpml:[a-z0-9_:]+)(\{[^}]*\})?(\[[^]]*\])?", written_out, expression)


def names(expression: str) -> set[str]:
    """Return the metrics that an expression names."""
    found: set[str] = set()

    def visit(node: object) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            found.add(str(node.name))
        return True

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


def read_rules() -> Rules:
    """Return the rules that prometheus.yml loads."""
    texts = [RULES / "hpml.yml", RULES / "hpml-alerts.yml"]
    groups = [group for text in texts for group in YAML(typ="safe").load(text)["groups"]]
    rules = [rule for group in groups for rule in group["rules"]]
    return Rules(
        {rule["record"]: rule["expr"] for rule in rules if "record" in rule},
        {group["name"]: [rule["expr"] for rule in group["rules"]] for group in groups},
    )


def read_queries(job: str) -> list[Query]:
    """Return the queries of the dashboards' panels, for one job."""
    found = []
    for uid, seconds in RANGES.items():
        values = {"cluster": CLUSTER, "jobid": job, "__range": f"{seconds}s"}
        values |= {"__interval": f"{POINT}s", "__rate_interval": "60s"}
        for panel in panels(json.loads((JSON / f"{uid}.json").read_text("utf-8"))):
            found += [
                Query(
                    uid,
                    panel["title"],
                    string.Template(target["expr"]).substitute(values),
                    bool(target.get("instant")),
                    panel["gridPos"]["y"] < FIRST_SCREEN,
                )
                for target in panel.get("targets", ())
            ]
    return found


def backfill(cluster: Cluster, rules: Rules, begin: int, folder: Path) -> None:
    """Write the raw series, then level by level what the rules record of them."""
    promtool = program("promtool")
    raw = folder / "raw.txt"
    with raw.open("w", encoding="utf-8") as file:
        file.writelines(cluster.openmetrics(begin, END))
    create = [promtool, "tsdb", "create-blocks-from"]
    run([*create, "openmetrics", str(raw), str(folder / "data")])
    raw.unlink()
    for level in rules.levels():
        group = {"name": "level", "rules": [{"record": n, "expr": e} for n, e in level.items()]}
        (folder / "level.yml").write_text(json.dumps({"groups": [group]}))
        with booted_prometheus(folder, [], options=["--query.timeout=30m"]) as server:
            span = [f"--start={begin}", f"--end={END - INTERVAL}", f"--eval-interval={INTERVAL}s"]
            output = [f"--output-dir={folder / 'level'}", f"--url={server.url}"]
            run([*create, "rules", *span, *output, str(folder / "level.yml")])
        for block in (folder / "level").glob("*"):
            block.rename(folder / "data" / block.name)


def run(argv: list[str]) -> None:
    """Run promtool; its complaints come with the error."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode or "level=error" in done.stderr:
        raise SystemExit(f"{' '.join(argv)}\n{done.stderr}")


def ask(
    server: Prometheus, query: Query, expression: str, begin: int, patience: int = 120
) -> float:
    """Return the seconds that a query takes; infinite if Prometheus gives it up."""
    parameters = {"query": expression, "timeout": f"{patience}s"}
    if query.is_instant:
        parameters["time"] = str(END - INTERVAL)
    else:
        # as many points as the dashboard has, in the time that there is data for
        step = POINT * (END - begin) / RANGES[query.dashboard]
        parameters |= {"start": str(begin), "end": str(END - INTERVAL), "step": f"{step:.3f}"}
    began = time.perf_counter()
    try:
        server.api("query" if query.is_instant else "query_range", **parameters)
    except AssertionError as error:
        if not isinstance(error.__cause__, urllib.error.HTTPError):
            raise
        if "timeout" not in str(error) and "timed out" not in str(error):
            raise
        return math.inf
    return time.perf_counter() - began


def quantile(values: list[float], share: float) -> float:
    """Return the value that this share of the values does not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def measure_queries(
    server: Prometheus, rules: Rules, queries: list[Query], begin: int, runs: int
) -> None:
    """Ask all queries and print a line for each dashboard."""
    print("| dashboard | queries | p50 | p95 | worst | p95 without rules | ratio | goal p95 |")
    print("|---|---|---|---|---|---|---|---|")
    slow = []
    for uid, seconds in RANGES.items():
        mine = [query for query in queries if query.dashboard == uid]
        times = {
            query: [ask(server, query, query.expression, begin) for _ in range(runs)]
            for query in mine
        }
        slow += [(max(values), query) for query, values in times.items()]
        every = [value for values in times.values() for value in values]
        recorded = [q for q in mine if "hpml:" in q.expression and q.is_on_first_screen]
        peers = [
            ask(server, query, rules.inlined(query.expression, seconds), begin, PATIENCE)
            for query in recorded
        ]
        ours = quantile([value for query in recorded for value in times[query]], 0.95)
        theirs = quantile(peers, 0.95)
        shown = f"{theirs:.2f} s" if theirs < math.inf else f"> {PATIENCE} s"
        ratio = f"{'<' * (theirs == math.inf)} {ours / min(theirs, PATIENCE):.3f}"
        p95 = quantile(every, 0.95)
        print(
            f"| {uid} | {len(mine)} | {quantile(every, 0.5):.3f} s | {p95:.3f} s "
            f"| {max(every):.2f} s | {shown} | {ratio} "
            f"| < {GOAL:g} s{' MISSED' if p95 >= GOAL else ''} |"
        )
        given_up = sum(value == math.inf for value in peers)
        print(
            f"{uid}: {len(recorded)} queries of the first screen also without rules, "
            f"{given_up} of them given up after {PATIENCE} s",
            file=sys.stderr,
        )
    print("\nSlowest queries:")
    for worst, query in sorted(slow, key=lambda pair: -pair[0])[:6]:
        print(f"- {worst:.2f} s: {query.dashboard}, {query.panel}: {query.expression[:90]}")


def measure_rules(server: Prometheus, rules: Rules) -> None:
    """Evaluate every rule once, as Prometheus does at each interval."""
    print("\n| rule group | rules | one evaluation | slowest rule |\n|---|---|---|---|")
    total = 0.0
    for group, expressions in rules.groups.items():
        times = []
        for expression in expressions:
            began = time.perf_counter()
            server.api("query", query=f"count({expression})", time=str(END - INTERVAL))
            times.append(time.perf_counter() - began)
        total += sum(times)
        print(f"| {group} | {len(times)} | {sum(times):.2f} s | {max(times):.2f} s |")
    print(f"| all | {sum(map(len, rules.groups.values()))} | {total:.2f} s | |")


def measure_viewer(server: Prometheus, job: str, begin: int, folder: Path) -> None:
    """Open both dashboards in Chromium and print when all panels of the first screen are there."""
    span = f"from={begin * 1000}&to={(END - INTERVAL) * 1000}"
    with ViewerServer(Source(server.url)) as viewer, chromium(folder / "profile") as page:
        threading.Thread(target=viewer.serve_forever, daemon=True).start()
        page.resize(1400, 900)
        for uid in RANGES:
            address = viewer.address.replace("/?", f"/d/{uid}?{span}&var-jobid={job}&")
            times = []
            for _ in range(3):
                began = time.perf_counter()
                page.open(address, READY)
                times.append(time.perf_counter() - began)
            missed = " MISSED" if statistics.median(times) >= 3 else ""
            print(
                f"first screen of {uid} in Chromium: {times[0]:.1f} s at first, median of 3 "
                f"{statistics.median(times):.1f} s (goal: < 3 s{missed})"
            )
        viewer.shutdown()


def print_size(cluster: Cluster, begin: int, folder: Path) -> None:
    """Print what is stored and what a sample takes on disk."""
    metas = [json.loads(path.read_text()) for path in folder.glob("data/*/meta.json")]
    samples = sum(meta["stats"]["numSamples"] for meta in metas)
    series = sum(meta["stats"]["numSeries"] for meta in metas)
    chunks = sum(path.stat().st_size for path in folder.glob("data/*/chunks/*"))
    index = sum(path.stat().st_size for path in folder.glob("data/*/index"))
    print(
        f"{cluster.nodes} nodes of 8 GPUs, {(END - begin) // 60} minutes at {INTERVAL} s: "
        f"{cluster.series} raw series ({cluster.node_series / cluster.nodes:.0f} a node, those "
        f"that these dashboards and the rules ask), {series - cluster.series} recorded; "
        f"{samples} samples, {chunks / samples:.2f} bytes each; "
        f"index: {index / series:.0f} bytes per series and block\n"
    )


def version() -> str:
    """Return the version of Prometheus."""
    done = subprocess.run(
        [program("prometheus"), "--version"], capture_output=True, text=True, check=True
    )
    return done.stdout.split(" (")[0]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--minutes", type=int, default=30, help="of data (default: 30)")
    parser.add_argument("--runs", type=int, default=5, help="of each query (default: 5)")
    parser.add_argument("--no-viewer", action="store_true", help="start no Chromium")
    options = parser.parse_args()
    begin = END - 60 * options.minutes
    rules = read_rules()
    every = [expression for group in rules.groups.values() for expression in group]
    with (
        tempfile.TemporaryDirectory(prefix="hpml-bench-") as scratch,
        contextlib.ExitStack() as at_end,
    ):
        folder = Path(scratch)
        texts = [query.expression for query in read_queries("1")]
        cluster = Cluster(options.nodes, rules.metrics([*every, *texts]))
        began = time.monotonic()
        backfill(cluster, rules, begin, folder)
        print(
            f"{platform.node()}: {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, "
            f"Linux {platform.release()}, Python {platform.python_version()}, {version()}; "
            f"data made in {time.monotonic() - began:.0f} s"
        )
        server = at_end.enter_context(booted_prometheus(folder, []))
        print_size(cluster, begin, folder)
        queries = read_queries(cluster.largest_job)
        measure_queries(server, rules, queries, begin, options.runs)
        measure_rules(server, rules)
        if not options.no_viewer:
            print()
            measure_viewer(server, cluster.largest_job, begin, folder)


if __name__ == "__main__":
    main()
