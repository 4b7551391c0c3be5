"""Commands that export metrics to Prometheus: export node, export metrics."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import asdict, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from hpml_exporters.catalogue import ALL
from hpml_exporters.options import NodeOptions, Roots, check, is_loopback
from hpml_exporters.web import config as web_config_file
from hpml_exporters.web.address import split

from hpml_orchestrator.cli.common import JsonOption, print_json, print_table, refuse_empty
from hpml_orchestrator.cli.process import become_exporter, refuse_gone_directory
from hpml_orchestrator.cli.slurm_export import slurm
from hpml_orchestrator.errors import InputError

__all__ = ["group"]

group = typer.Typer(no_args_is_help=True)
group.command()(slurm)
_SECONDS = "SECONDS"
_SLURM_CONFS = ("/run/slurm/conf/slurm.conf", "/etc/slurm/slurm.conf")
_SWITCHES = "gpu jobs processes shm disks infiniband nfs lustre training".split()


def _switch(name: str, what: str) -> Any:
    return typer.Option(f"--no-{name}", help=f"Skip {what}.")


def _interval(name: str, what: str) -> Any:
    return typer.Option(f"--{name}-interval", metavar=_SECONDS, help=f"Interval of {what}.")


@group.command()
def node(
    listen: Annotated[
        str,
        typer.Option(
            "--listen",
            metavar="ADDRESS:PORT",
            help="Address to listen on; port 0 picks a free one.",
        ),
    ] = "127.0.0.1:9445",
    web_config: Annotated[
        str | None,
        typer.Option(
            "--web-config",
            metavar="FILE",
            help="TLS and passwords, a file in Prometheus' web-config format.",
        ),
    ] = None,
    no_gpu: Annotated[bool, _switch("gpu", "GPUs")] = False,
    no_jobs: Annotated[bool, _switch("jobs", "CPU, memory and GPUs of jobs")] = False,
    no_processes: Annotated[bool, _switch("processes", "I/O of jobs' processes")] = False,
    no_shm: Annotated[bool, _switch("shm", "jobs' files in memory")] = False,
    no_disks: Annotated[bool, _switch("disks", "local disks")] = False,
    no_infiniband: Annotated[bool, _switch("infiniband", "InfiniBand ports")] = False,
    no_nfs: Annotated[bool, _switch("nfs", "NFS mounts")] = False,
    no_lustre: Annotated[bool, _switch("lustre", "Lustre mounts")] = False,
    no_training: Annotated[bool, _switch("training", "metrics sent by training jobs")] = False,
    gpu_interval: Annotated[float, _interval("gpu", "GPU readings")] = 1.0,
    job_interval: Annotated[float, _interval("job", "job readings")] = 5.0,
    process_interval: Annotated[float, _interval("process", "process readings")] = 10.0,
    node_interval: Annotated[float, _interval("node", "disk and network readings")] = 10.0,
    stuck_seconds: Annotated[
        float,
        typer.Option(
            "--stuck-seconds",
            metavar=_SECONDS,
            help="A reading that takes longer counts as stuck; its series are dropped.",
        ),
    ] = 10.0,
    exit_seconds: Annotated[
        float,
        typer.Option(
            "--exit-seconds",
            metavar=_SECONDS,
            help="After this time a stuck reading ends the exporter with status 75.",
        ),
    ] = 60.0,
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster", metavar="NAME", help="Label of this cluster.", show_default="ClusterName"
        ),
    ] = "",
    address_file: Annotated[
        str | None,
        typer.Option(
            "--address-file", metavar="FILE", help="Write the address to FILE once it listens."
        ),
    ] = None,
    roots: Annotated[list[str], typer.Option("--root", metavar="NAME=DIR", hidden=True)] = [],
) -> None:
    """Export metrics of this node's GPUs, jobs, disks and networks.

    Serves /metrics and /healthz until SIGTERM or Ctrl-C. The address goes to stderr, and so do
    metrics that this node has no source for.
    """
    refuse_empty({"--web-config": web_config, "--address-file": address_file})
    if not all(os.path.isabs(path) for path in (web_config, address_file) if path):
        refuse_gone_directory()
    skipped = (no_gpu, no_jobs, no_processes, no_shm, no_disks, no_infiniband, no_nfs, no_lustre)
    switches = zip(_SWITCHES, (*skipped, no_training), strict=True)
    options = NodeOptions(
        listen=listen,
        web_config=os.path.abspath(web_config) if web_config else "",
        without=tuple(name for name, skip in switches if skip),
        gpu_interval=gpu_interval,
        job_interval=job_interval,
        process_interval=process_interval,
        node_interval=node_interval,
        stuck_seconds=stuck_seconds,
        exit_seconds=exit_seconds,
        cluster=cluster or _cluster_name(),
        address_file=os.path.abspath(address_file) if address_file else "",
        roots=_roots(roots),
    )
    _check(options)
    _warn(options)
    become_exporter("hpml_exporters", options.to_json())


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


def _cluster_name() -> str:
    """Return the name in this node's slurm.conf, as jobs have it in SLURM_CLUSTER_NAME."""
    for path in (os.environ.get("SLURM_CONF"), *_SLURM_CONFS):
        with contextlib.suppress(OSError):
            text = Path(path or "").read_text("utf-8", "replace")
            match = re.search(r"^\s*ClusterName\s*=\s*(\S+)", text, re.MULTILINE | re.IGNORECASE)
            if match:
                return match[1].lower()
    return ""


def _roots(words: list[str]) -> Roots:
    """Return the kernel's file systems: the usual directories, replaced by those given."""
    given = dict(word.partition("=")[::2] for word in words)
    names = {field.name for field in fields(Roots)}
    if not set(given) <= names or not all(given.values()):
        hint = f"NAME is one of {', '.join(sorted(names))}"
        raise InputError("must be NAME=DIR", field="--root", value=" ".join(words), hint=hint)
    return Roots(**given)


def _check(options: NodeOptions) -> None:
    """Refuse wrong values, naming the options of the command line."""
    try:
        check(options)
        if options.web_config:
            with open(options.web_config, "rb"):
                pass
    except InputError as error:
        message = str(error).removeprefix(f"{error.field}: ")
        message = message.replace("stuck_seconds", "--stuck-seconds")
        option = f"--{error.field.replace('_', '-')}"
        raise InputError(f"{option}: {message}", hint=error.hint) from None
    except OSError as error:
        raise InputError(
            f"cannot be read: {error.strerror}", field="--web-config", value=options.web_config
        ) from None


def _warn(options: NodeOptions) -> None:
    """Warn of missing GPU metrics, and of metrics that anybody in the network can read."""
    if "gpu" not in options.without and find_spec("nvitop") is None:
        typer.echo(
            "hpml: note: no GPU metrics: nvitop is not installed\n"
            "hint: pip install 'hpml-orchestrator[export]'",
            err=True,
        )
    locked = encrypted = False
    if options.web_config:
        config = web_config_file.read(options.web_config)
        locked, encrypted = config.locked, config.tls is not None
    if is_loopback(split(options.listen)[0]) or (locked and encrypted):
        return
    if locked:
        danger = f"passwords for {options.listen} are sent unencrypted"
    else:
        how = "without a password" if encrypted else "unencrypted and without a password"
        danger = f"anyone who can reach {options.listen} can read job metrics, {how}"
    remedy = "use --web-config FILE"
    if options.web_config:
        key = "tls_server_config" if locked else "basic_auth_users"
        remedy = f"set {key} in {options.web_config}"
    typer.echo(f"hpml: warning: {danger}\nhint: {remedy}, see docs/monitoring.md", err=True)
