"""The exporter of a node as a process: collectors, web server and a job's summary."""

from __future__ import annotations

import gzip as gzip_module
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder

from hpml_exporters.core import collector
from hpml_exporters.core.collector import (
    Collector,
    Family,
    MetricSpec,
    node_families,
    server_families,
)
from hpml_exporters.core.sampler import CollectorSource, Sampler, Samples
from hpml_exporters.gpu import figures as gpu
from hpml_exporters.jobs import collector as jobs
from hpml_exporters.node import disks, health, infiniband, lustre, nfs, shm
from hpml_exporters.options import COLLECTORS, Context, NodeOptions
from hpml_exporters.slurm import collector as slurm
from hpml_exporters.training import collector as training
from hpml_orchestrator.errors import InputError, RecordError

if TYPE_CHECKING:
    from hpml_exporters.web.server import Counters

# Every metric that can be shown; `python -m hpml_exporters.app` prints docs/metrics.md.

SUBJECTS = {
    "GPUs": gpu.SPECS,
    "Jobs": jobs.SPECS,
    "Node": (*shm.SPECS, *disks.SPECS, *infiniband.SPECS, *nfs.SPECS, *lustre.SPECS, *health.SPECS),
    "Training": training.SPECS,
    "Slurm": slurm.SPECS,
    "The exporter itself": collector.SPECS,
}
"""Metrics by the headings of the documentation."""

ALL: tuple[MetricSpec, ...] = tuple(spec for specs in SUBJECTS.values() for spec in specs)

_HEAD = """\
# Metrics

Written by `make docs` from the descriptions that the exporters use; `hpml export metrics` prints
the same. How to get them: [Monitoring](monitoring.md).

Units are base units and part of the name. Counters end in `_total`: use `rate()` and `increase()`.
They count from the exporter's start unless the description differs. What identifies a thing
is in an `_info` metric, whose value is always 1: join it, as in
`hpml_gpu_power_watts * on (uuid) group_left (jobid) hpml_job_gpu_info{owner="1"}`. A value that
cannot be read now is absent, never 0. The exporter's own CPU time, memory and start are the
`process_*` metrics of Prometheus' client library.
"""


def page() -> str:
    """Return the page as Markdown."""
    lines = [_HEAD]
    for title, specs in SUBJECTS.items():
        lines += [f"## {title}", "", *_table(specs), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _table(specs: Iterable[MetricSpec]) -> Iterator[str]:
    yield "| metric | type | labels | meaning | source |"
    yield "|---|---|---|---|---|"
    for spec in specs:
        labels = " ".join(f"`{one}`" for one in spec.labels)
        cells = (f"`{spec.name}`", spec.type, labels, spec.help, spec.source)
        yield f"| {' | '.join(_cell(one) for one in cells)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


_LOG = logging.getLogger(__name__)

EXIT_STUCK = 75
"""A driver call does not return: start me again."""

_LOOK_SECONDS = 1.0
_SUMMARY_SECONDS = (1.0, 5.0)  # reads as often as the GPU collector, within these bounds
_WRITE_SECONDS = 30.0
_END_SECONDS = 5.0
_GZIP_LEVEL = 1  # compressed once, to a tenth of its size


class NodeCollector(Sampler):
    """This node's metrics, for any registry of prometheus_client.

        REGISTRY.register(NodeCollector())

    It reads in separate threads until `stop`.
    """

    def __init__(self, options: NodeOptions | None = None) -> None:
        options = options or NodeOptions()
        super().__init__(sources_of(options), specs=ALL, constant=_node(options))
        self.start()


class ExporterPages:
    """The pages of the web server."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._registry = CollectorRegistry()
        self._registry.register(sampler)
        self._others = CollectorRegistry()
        self._texts: dict[bool, tuple[Samples, str]] = {}
        for registry in (self._registry, self._others):
            ProcessCollector(registry=registry)

    def count(self, server: Counters) -> None:
        """Show the web server's counters as well."""
        for registry in (self._registry, self._others):
            registry.register(_ServerCollector(server))

    def metrics(self, accept: str, names: Sequence[str] = (), *, gzip: bool) -> tuple[bytes, str]:
        """Return the body of /metrics and its content type.

        Args:
            accept: the header `Accept`.
            names: of the series to return; empty: all.
            gzip: compressed.
        """
        try:
            encode, content_type = choose_encoder(accept)
        except TypeError:  # the version that the client wants is not a number
            encode, content_type = choose_encoder("")
        if names:
            body = encode(self._registry.restricted_registry(names))
        else:
            openmetrics = content_type.startswith("application/openmetrics-text")
            # The others are few: families of prometheus_client and of the server.
            body = self._text(openmetrics=openmetrics).encode() + encode(self._others)
        return gzip_module.compress(body, _GZIP_LEVEL) if gzip else body, content_type

    def _text(self, *, openmetrics: bool) -> str:
        snapshot = self._sampler.snapshot()
        shown, text = self._texts.get(openmetrics, (None, ""))
        if shown is not snapshot:
            families = (one for one in snapshot.families if isinstance(one, Family) and len(one))
            text = "".join(one.text(openmetrics=openmetrics) for one in families)
            self._texts[openmetrics] = snapshot, text
        return text

    def health(self) -> tuple[bool, str]:
        """Return whether no reading is stuck, and a description of stuck or failed ones."""
        return self._sampler.health()


class _ServerCollector:
    """The web server's counters as a custom collector."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def collect(self) -> Iterable[Metric]:
        now = self._counters
        return server_families(now.connections, now.responses, now.closed)


class _SummaryWriter:
    """Sums up the job's figures in a separate thread, and writes them regularly.

    Its errors never affect the metrics.
    """

    def __init__(self, options: NodeOptions, sampler: Sampler) -> None:
        from hpml_exporters.summary import JobSummary  # noqa: PLC0415 - in jobs alone

        least, most = _SUMMARY_SECONDS
        self._pause = min(max(options.gpu_interval, least), most)
        self._path, self._sampler = options.summary_file, sampler
        self._summary = JobSummary(options)
        self._began = self._written = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="summary", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Write the last figures, waiting a few seconds at most."""
        self._ended.set()
        self._thread.join(_END_SECONDS)

    def _follow(self) -> None:
        while not self._ended.wait(self._pause):
            # A short job loses at most half of its figures if its exporter is killed, while the
            # nodes of a large job do not keep writing to the shared file system.
            later = time.monotonic() + self._pause  # until which nobody writes, if not now
            due = later - self._written > min(_WRITE_SECONDS, (later - self._began) / 2)
            self._note(write=due)
        self._note(write=True)

    def _note(self, *, write: bool) -> None:
        try:
            self._summary.note(self._sampler.snapshot())
            if write:
                self._written = time.monotonic()
                self._summary.write(self._path)
        except Exception as error:  # noqa: BLE001 - the metrics are shown all the same
            _LOG.warning("summary: %s: %s", type(error).__name__, error)


def sources_of(options: NodeOptions) -> list[CollectorSource]:
    """Return the enabled collectors, that of the jobs first: others depend on it."""
    context = Context(options)
    names = [name for name in COLLECTORS if name not in options.without]
    names.sort(key=lambda name: name != "jobs")
    return [CollectorSource(name, partial(_made, COLLECTORS[name], context)) for name in names]


def _node(options: NodeOptions) -> list[Metric]:
    scope = "node" if options.job is None else "job"
    return node_families(options.cluster, options.node_name, scope)


def _made(module: str, context: Context) -> Collector:
    made: Collector = import_module(f"hpml_exporters.{module}").make(context)
    return made


def run(options: NodeOptions, sources: Iterable[CollectorSource] | None = None) -> int:
    """Export this node until a signal ends it; returns the exit status.

    Args:
        options: what and where.
        sources: other collectors than those of the options.

    Raises:
        HpmlError: the server cannot be started, or its address not be written.
    """
    from hpml_exporters.web.server import Server  # noqa: PLC0415 - the largest import, after the rest

    ending = block_signals()  # before there are threads to inherit it

    def give_up(why: str) -> None:
        _LOG.critical("%s: ending for a new start", why)
        if summary:
            summary.end()
        os._exit(EXIT_STUCK)  # a thread may hang in a driver call

    sampler = Sampler(
        sources_of(options) if sources is None else sources,
        specs=ALL,
        constant=_node(options) if sources is None else (),
        stuck_seconds=options.stuck_seconds,
        exit_seconds=options.exit_seconds,
        give_up=give_up,
    )
    pages = ExporterPages(sampler)
    server = Server(options.listen, options.web_config, pages, any_port=options.any_port)
    pages.count(server.counters)
    summary: _SummaryWriter | None = None
    # Listen first: a wrong or taken address ends the exporter before a driver is loaded.
    host, port = server.start()
    try:
        sampler.start()
        if options.summary_file:
            summary = _SummaryWriter(options, sampler)
        shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if options.address_file:
            _publish_address(options.address_file, shown)
        _LOG.info("%s://%s/metrics", server.scheme, shown)
        _wait_for_end(ending, options.parent_pid)
    finally:
        sampler.stop(last_reading=summary is not None)  # what a short job did since the last one
        if summary:
            summary.end()
        server.stop()
    return 0


def print_once(options: NodeOptions) -> int:
    """Print the metrics after one reading, without a server, and return the exit status."""
    # Ctrl-C ends it, even while a driver's call does not return to Python.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    sampler = Sampler(sources_of(options), specs=ALL, constant=_node(options))
    sampler.read_once()
    sys.stdout.write(ExporterPages(sampler).metrics("", gzip=False)[0].decode())
    return 0


def _publish_address(path: str, address: str) -> None:
    from hpml_orchestrator.records.files import write_text  # noqa: PLC0415 - in jobs alone

    try:
        write_text(path, f"{address}\n")
    except RecordError as error:
        raise InputError(error.message, field="address_file", value=path) from None


def block_signals() -> set[signal.Signals]:
    """Block the signals that end the exporter, so that the main thread can wait for them.

    Signals that the caller ignores, as `nohup` and a shell's `&` do, stay ignored: `sigwait`
    would return even these.
    """
    ending = {signal.SIGTERM}
    ending |= {
        one for one in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN
    }
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    return ending


def _wait_for_end(ending: set[signal.Signals], parent: int) -> None:
    """Return at a signal, or after the parent process has ended.

    Not with sigtimedwait: if the process was stopped for longer than its time-out, as by
    `scontrol suspend`, Python returns a signal that nobody sent (seen with 3.9 to 3.13).
    """
    if parent:
        threading.Thread(target=_watch_parent, args=(parent,), name="parent", daemon=True).start()
    signal.sigwait(ending)


def _watch_parent(parent: int) -> None:
    """End this process after its parent has ended; runs in a thread."""
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    _LOG.warning("the process that started this exporter is gone")
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.stdout.write(page())
