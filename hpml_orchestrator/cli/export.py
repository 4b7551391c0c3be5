"""Commands that show metrics to Prometheus: export node, export metrics."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpml_orchestrator.cli.common import JsonOption, print_json, print_table, refuse_gone_directory

if TYPE_CHECKING:
    from hpml_exporters.options import NodeOptions

__all__ = ["register"]

group = typer.Typer(help="Show what this node and its jobs do to Prometheus.", no_args_is_help=True)
_SECONDS = "SECONDS"
_ARENAS = "MALLOC_ARENA_MAX"


def register(app: typer.Typer) -> None:
    """Add this group's commands to the application."""
    app.add_typer(group, name="export")


def _switch(name: str, what: str) -> Any:
    return typer.Option(f"--no-{name}", help=f"Leave out {what}.")


def _interval(name: str, what: str) -> Any:
    return typer.Option(f"--{name}-interval", metavar=_SECONDS, help=f"Between two {what}.")


@group.command()
def node(
    listen: Annotated[
        str,
        typer.Option(
            "--listen", metavar="ADDRESS:PORT", help="Where to answer; port 0 takes a free one."
        ),
    ] = "127.0.0.1:9445",
    web_config: Annotated[
        str | None,
        typer.Option(
            "--web-config",
            metavar="FILE",
            help="TLS and passwords, a file in Prometheus' web-config format.",
            show_default=False,
        ),
    ] = None,
    no_gpu: Annotated[bool, _switch("gpu", "GPUs")] = False,
    no_jobs: Annotated[bool, _switch("jobs", "jobs: their CPU, memory and GPUs")] = False,
    no_processes: Annotated[
        bool, _switch("processes", "what jobs' processes read and write")
    ] = False,
    no_shm: Annotated[bool, _switch("shm", "jobs' files in RAM")] = False,
    no_disks: Annotated[bool, _switch("disks", "local disks")] = False,
    no_infiniband: Annotated[bool, _switch("infiniband", "InfiniBand ports")] = False,
    no_nfs: Annotated[bool, _switch("nfs", "NFS mounts")] = False,
    no_lustre: Annotated[bool, _switch("lustre", "Lustre mounts")] = False,
    no_training: Annotated[bool, _switch("training", "what training jobs tell")] = False,
    gpu_interval: Annotated[float, _interval("gpu", "readings of GPUs")] = 1.0,
    job_interval: Annotated[float, _interval("job", "readings of jobs")] = 5.0,
    process_interval: Annotated[float, _interval("process", "looks at processes")] = 10.0,
    node_interval: Annotated[float, _interval("node", "readings of disks and networks")] = 10.0,
    stuck_seconds: Annotated[
        float,
        typer.Option(
            "--stuck-seconds",
            metavar=_SECONDS,
            help="After that, a reading that has not ended counts as stuck; its series go.",
        ),
    ] = 10.0,
    exit_seconds: Annotated[
        float,
        typer.Option(
            "--exit-seconds",
            metavar=_SECONDS,
            help="After that, a stuck reading ends the exporter with 75, to be started again.",
        ),
    ] = 60.0,
    address_file: Annotated[
        str | None,
        typer.Option(
            "--address-file",
            metavar="FILE",
            help="Write there where it listens, once it does.",
            show_default=False,
        ),
    ] = None,
    roots: Annotated[
        list[str], typer.Option("--root", metavar="NAME=DIR", hidden=True, show_default=False)
    ] = [],  # noqa: B006 - typer copies it
) -> None:
    """Show this node's GPUs, jobs, disks and networks to Prometheus, until told to end.

    It answers /metrics and /healthz; standard error says where, and what there is nothing to read
    of. SIGTERM and Ctrl-C end it with 0.
    """
    from hpml_orchestrator.cli.conflicts import refuse_empty  # noqa: PLC0415

    refuse_empty({"--web-config": web_config, "--address-file": address_file})
    if not all(os.path.isabs(path) for path in (web_config, address_file) if path):
        refuse_gone_directory()
    _refuse_incomplete()
    from hpml_exporters.options import NodeOptions  # noqa: PLC0415

    switches = {
        "gpu": no_gpu,
        "jobs": no_jobs,
        "processes": no_processes,
        "shm": no_shm,
        "disks": no_disks,
        "infiniband": no_infiniband,
        "nfs": no_nfs,
        "lustre": no_lustre,
        "training": no_training,
    }
    options = NodeOptions(
        listen=listen,
        web_config=os.path.abspath(web_config) if web_config else "",
        without=tuple(name for name, off in switches.items() if off),
        gpu_interval=gpu_interval,
        job_interval=job_interval,
        process_interval=process_interval,
        node_interval=node_interval,
        stuck_seconds=stuck_seconds,
        exit_seconds=exit_seconds,
        address_file=os.path.abspath(address_file) if address_file else "",
        roots=_roots(roots),
    )
    _check(options)
    _warn(options)
    sys.stdout.flush()
    sys.stderr.flush()
    words = [sys.executable, "-P", "-m", "hpml_exporters", options.to_json()]
    os.execve(sys.executable, words, {_ARENAS: "2", **os.environ})  # noqa: S606 - no shell is wanted


@group.command()
def metrics(as_json: JsonOption = False) -> None:
    """List every metric that can be shown: name, type, labels, and what it counts."""
    _refuse_incomplete()
    from hpml_exporters.metrics import ALL  # noqa: PLC0415

    if as_json:
        from dataclasses import asdict  # noqa: PLC0415

        print_json([asdict(one) for one in ALL])
        return
    print_table(
        ("METRIC", "TYPE", "LABELS", "MEANING"),
        [(one.name, one.type, " ".join(one.labels) or "-", one.help) for one in ALL],
    )


def _refuse_incomplete() -> None:
    """Refuse to go on where the exporters' package was not installed with hpml."""
    from importlib.util import find_spec  # noqa: PLC0415

    if find_spec("hpml_exporters") is None:
        from hpml_orchestrator.errors import HpmlError  # noqa: PLC0415

        raise HpmlError(
            "the exporters are not installed with this hpml",
            hint="pip install 'hpml-orchestrator[export]'",
        )


def _roots(words: list[str]) -> Any:
    """Return where the kernel's file systems are: the usual places, but for those given."""
    from dataclasses import fields  # noqa: PLC0415

    from hpml_exporters.roots import Roots  # noqa: PLC0415

    from hpml_orchestrator.errors import InputError  # noqa: PLC0415

    given = dict(word.partition("=")[::2] for word in words)
    known = {one.name for one in fields(Roots)}
    if not set(given) <= known or not all(given.values()):
        hint = f"NAME is one of {', '.join(sorted(known))}"
        raise InputError("must be NAME=DIR", field="--root", value=" ".join(words), hint=hint)
    return Roots(**given)


def _check(options: NodeOptions) -> None:
    """Refuse wrong options under the names that they have on the command line."""
    from hpml_exporters.checks import check  # noqa: PLC0415

    from hpml_orchestrator.errors import InputError  # noqa: PLC0415

    try:
        check(options)
        if options.web_config:
            with open(options.web_config, "rb"):
                pass
    except InputError as error:
        told = (
            str(error).removeprefix(f"{error.field}: ").replace("stuck_seconds", "--stuck-seconds")
        )
        option = f"--{error.field.replace('_', '-')}"
        raise InputError(f"{option}: {told}", hint=error.hint) from None
    except OSError as error:
        raise InputError(
            f"cannot be read: {error.strerror}", field="--web-config", value=options.web_config
        ) from None


def _warn(options: NodeOptions) -> None:
    """Say what will be missing, and who will be able to look."""
    from importlib.util import find_spec  # noqa: PLC0415

    from hpml_exporters.checks import is_loopback  # noqa: PLC0415
    from hpml_exporters.server.address import split  # noqa: PLC0415

    if "gpu" not in options.without and find_spec("nvitop") is None:
        typer.echo(
            "hpml: note: GPUs are left out: nvitop is not installed\n"
            "hint: pip install 'hpml-orchestrator[export]'",
            err=True,
        )
    locked, encrypted = _locks(options.web_config)
    if is_loopback(split(options.listen)[0]) or (locked and encrypted):
        return
    if locked:
        what = f"the password for {options.listen} crosses the network unencrypted"
    else:
        how = "without a password" if encrypted else "unencrypted and without a password"
        what = f"whoever reaches {options.listen} can read who runs what here, {how}"
    wanted = "--web-config FILE brings both"
    if options.web_config:
        key = "tls_server_config" if locked else "basic_auth_users"
        wanted = f"{key} in {options.web_config}"
    typer.echo(f"hpml: warning: {what}\nhint: {wanted}, see docs/monitoring.md", err=True)


def _locks(path: str) -> tuple[bool, bool]:
    """Return whether a web-config file lets in only whom it names, and whether it brings TLS.

    Raises:
        InputError: the file is wrong.
    """
    if not path:
        return False, False
    from hpml_exporters.server import web_config  # noqa: PLC0415 - for those who have a file

    config = web_config.read(path)
    return config.locked, config.tls is not None
