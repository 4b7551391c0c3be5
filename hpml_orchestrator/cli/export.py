"""Commands about metrics for Prometheus: export node, export slurm, export metrics, targets."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from hpml_exporters.app import ALL
from hpml_exporters.options import COLLECTORS, NodeOptions, Roots, check, cluster_name
from hpml_exporters.slurm.commands import Commands, TargetServer
from hpml_exporters.slurm.commands import targets as targets_of
from hpml_exporters.slurm.options import SlurmOptions
from hpml_exporters.web.config import WebConfig, listen_on, read

from hpml_orchestrator.cli.common import JsonOption, print_json, print_table, refuse_empty
from hpml_orchestrator.cli.process import become_exporter, refuse_gone_directory
from hpml_orchestrator.errors import InputError, RecordError, SchedulerUnavailable, extra_hint
from hpml_orchestrator.records.files import write_text
from hpml_orchestrator.records.targets import is_loopback

group = typer.Typer(no_args_is_help=True)
_PORT_MAX = 65535
_SLURM_PAGE = "docs/slurm-exporter.md"
_DIRECTORY_HINT = "use an existing directory that you may write to"
_SLURM_HINT = "run it where sinfo works: load Slurm's module, or set SLURM_CONF"


def _switch(name: str, what: str) -> object:
    return typer.Option(f"--no-{name}", help=f"Skip {what}.")


def _seconds(name: str, what: str) -> object:
    return typer.Option(f"--{name}", metavar="SECONDS", help=what)


def _file(name: str, what: str) -> object:
    return typer.Option(name, metavar="FILE", help=what)


def _address(name: str, what: str) -> object:
    return typer.Option(name, metavar="ADDRESS:PORT", help=what)


_Listen = Annotated[str, _address("--listen", "Address to listen on; port 0 picks a free one.")]
_WebConfig = Annotated[
    str | None,
    _file("--web-config", "TLS and passwords, a file in Prometheus' web-config format."),
]
_AddressFile = Annotated[
    str | None, _file("--address-file", "Write the address to FILE once it listens.")
]


@group.command()
def node(
    listen: _Listen = "127.0.0.1:9445",
    web_config: _WebConfig = None,
    no_gpu: Annotated[bool, _switch("gpu", "GPUs")] = False,
    no_jobs: Annotated[bool, _switch("jobs", "CPU, memory and GPUs of jobs")] = False,
    no_processes: Annotated[bool, _switch("processes", "I/O of jobs' processes")] = False,
    no_shm: Annotated[bool, _switch("shm", "jobs' files in memory")] = False,
    no_disks: Annotated[bool, _switch("disks", "local disks")] = False,
    no_infiniband: Annotated[bool, _switch("infiniband", "InfiniBand ports")] = False,
    no_nfs: Annotated[bool, _switch("nfs", "NFS mounts")] = False,
    no_lustre: Annotated[bool, _switch("lustre", "Lustre mounts")] = False,
    no_health: Annotated[bool, _switch("health", "clock, memory, links, heat of the node")] = False,
    no_training: Annotated[bool, _switch("training", "metrics sent by training jobs")] = False,
    gpu_interval: Annotated[float, _seconds("gpu-interval", "Interval of GPU readings.")] = 1.0,
    job_interval: Annotated[float, _seconds("job-interval", "Interval of job readings.")] = 5.0,
    process_interval: Annotated[
        float, _seconds("process-interval", "Interval of process readings.")
    ] = 10.0,
    node_interval: Annotated[
        float, _seconds("node-interval", "Interval of disk and network readings.")
    ] = 10.0,
    stuck_seconds: Annotated[
        float,
        _seconds(
            "stuck-seconds",
            "A reading that takes longer counts as stuck; its series are dropped.",
        ),
    ] = 10.0,
    exit_seconds: Annotated[
        float,
        _seconds(
            "exit-seconds", "After this time a stuck reading ends the exporter with status 75."
        ),
    ] = 60.0,
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster", metavar="NAME", help="Label of this cluster.", show_default="ClusterName"
        ),
    ] = "",
    address_file: _AddressFile = None,
    once: Annotated[bool, typer.Option("--once", help="Print the metrics once and exit.")] = False,
    roots: Annotated[list[str], typer.Option("--root", metavar="NAME=DIR", hidden=True)] = [],
) -> None:
    """Export metrics of this node's GPUs, jobs, disks and networks.

    Serves /metrics and /healthz until SIGTERM or Ctrl-C. Prints to stderr its address, and the
    metrics for which this node has no source.
    """
    given = locals()
    with _option_names():
        options = NodeOptions(
            listen=listen,
            web_config=_absolute("--web-config", web_config),
            without=tuple(name for name in COLLECTORS if given[f"no_{name}"]),
            gpu_interval=gpu_interval,
            job_interval=job_interval,
            process_interval=process_interval,
            node_interval=node_interval,
            stuck_seconds=stuck_seconds,
            exit_seconds=exit_seconds,
            cluster=cluster or cluster_name(),
            address_file=_absolute("--address-file", address_file),
            once=once,
            roots=_roots(roots),
        )
        check(options)
        if not no_gpu and find_spec("nvitop") is None:
            typer.echo(
                "hpml: note: no GPU metrics: nvitop is not installed\n"
                f"hint: {extra_hint('export')}",
                err=True,
            )
        _check_server(options, "job metrics", "docs/monitoring.md")
    become_exporter("hpml_exporters", options.to_json())


@group.command()
def slurm(
    listen: _Listen = "127.0.0.1:9446",
    web_config: _WebConfig = None,
    source: Annotated[str, typer.Option("--source", help="auto, pyslurm or commands.")] = "auto",
    interval: Annotated[float, _seconds("interval", "Between two refreshes, 30 at least.")] = 30.0,
    users: Annotated[
        bool, typer.Option("--users", help="Show jobs and fairshare by user.")
    ] = False,
    address_file: _AddressFile = None,
) -> None:
    """Export the cluster's queue, nodes and resources as Slurm shows them.

    Queries Slurm in the background; a scrape returns the last answer.
    """
    with _option_names():
        options = SlurmOptions(
            listen=listen,
            web_config=_absolute("--web-config", web_config),
            address_file=_absolute("--address-file", address_file),
            source=source,
            interval=interval,
            users=users,
        )
        _check_server(options.server(), "metrics of the cluster", _SLURM_PAGE)
    become_exporter("hpml_exporters.slurm", options.to_json())


@group.command()
def metrics(as_json: JsonOption = False) -> None:
    """List all metrics with type, labels and meaning."""
    if as_json:
        print_json([asdict(metric) for metric in ALL])
        return
    print_table(
        ("METRIC", "TYPE", "LABELS", "MEANING"),
        [(metric.name, metric.type, " ".join(metric.labels) or "-", metric.help) for metric in ALL],
    )


def targets(
    port: Annotated[int, typer.Option("--port", help="Port of the node exporters.")] = 9445,
    only_up: Annotated[
        bool,
        typer.Option("--only-up", help="Leave out nodes that are down, drained or powered down."),
    ] = False,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Write a file for file_sd.")
    ] = "",
    serve: Annotated[str, _address("--serve", "Serve /targets for http_sd.")] = "",
) -> None:
    """List the cluster's node exporters as JSON for Prometheus' file_sd or http_sd."""
    if not 0 < port <= _PORT_MAX:
        raise InputError(f"must be 1 to {_PORT_MAX}", field="--port", value=port)
    if output and serve:
        raise InputError("--output and --serve exclude each other")
    if serve:
        with _option_names(listen="--serve"):
            listener = listen_on(serve)
        with TargetServer(listener, Commands(), port, only_up=only_up) as server:
            if not is_loopback(listener.getsockname()[0]):
                danger = f"anyone who can reach {serve} can read the list of nodes"
                remedy = "listen on 127.0.0.1, behind an authenticating proxy"
                _warn(f"{danger}, without a password", remedy, _SLURM_PAGE)
            host = serve.rpartition(":")[0]
            typer.echo(f"http://{host}:{server.server_port}/targets", err=True)
            server.serve_forever()
    try:
        text = targets_of(Commands().nodes(), port, only_up=only_up)
    except SchedulerUnavailable as error:
        raise SchedulerUnavailable(str(error), hint=_SLURM_HINT) from None
    if output:
        try:
            write_text(Path(output), text)
        except RecordError as error:
            raise InputError(str(error), field="--output", hint=_DIRECTORY_HINT) from None
    else:
        typer.echo(text, nl=False)


@contextlib.contextmanager
def _option_names(**others: str) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        if not error.field.isidentifier():
            raise  # already names an option, or a field of a file
        option = others.get(error.field) or f"--{error.field.replace('_', '-')}"
        message = str(error).removeprefix(error.field)
        raise InputError(f"{option}{message}", hint=error.hint) from None


def _absolute(option: str, path: str | None) -> str:
    refuse_empty({option: path})
    if path and not os.path.isabs(path):
        refuse_gone_directory()
    return os.path.abspath(path) if path else ""


def _roots(words: list[str]) -> Roots:
    """Return the kernel's file systems: the usual directories, replaced by those given."""
    given = dict(word.partition("=")[::2] for word in words)
    names = sorted(asdict(Roots()))
    if not set(given) <= set(names) or not all(given.values()):
        hint = f"NAME is one of {', '.join(names)}"
        raise InputError("must be NAME=DIR", field="--root", value=" ".join(words), hint=hint)
    return Roots(**given)


def _check_server(options: NodeOptions, content: str, page: str) -> None:
    directory = os.path.dirname(options.address_file)
    if directory and not os.access(directory, os.W_OK):
        path = options.address_file
        raise InputError(
            "cannot be written", field="address_file", value=path, hint=_DIRECTORY_HINT
        )
    config = WebConfig()
    if options.web_config:
        config = read(options.web_config)
    with listen_on(options.listen) as listener:
        address = listener.getsockname()[0]
    if is_loopback(address) or (config.locked and config.tls):
        return
    if config.locked:
        danger = f"passwords for {options.listen} are sent unencrypted"
    else:
        how = "without a password" if config.tls else "unencrypted and without a password"
        danger = f"anyone who can reach {options.listen} can read {content}, {how}"
    remedy = "use --web-config FILE"
    if options.web_config:
        key = "tls_server_config" if config.locked else "basic_auth_users"
        remedy = f"set {key} in {options.web_config}"
    _warn(danger, remedy, page)


def _warn(danger: str, remedy: str, page: str) -> None:
    typer.echo(f"hpml: warning: {danger}\nhint: {remedy}, see {page}", err=True)
