"""Command about a node's inside: topo."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from hpml_orchestrator.cli.common import (
    STANDARD_OUTPUT,
    JsonOption,
    SetOption,
    print_json,
    print_table,
    refuse_empty,
    refuse_with,
    store_of,
)
from hpml_orchestrator.cli.process import refuse_gone_directory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hpml_orchestrator.cli.rankpicture import RankBox
    from hpml_orchestrator.topology import Topology

__all__ = ["names", "nearest_nics", "print_node", "read_nodewrite_picture", "topo"]

_LEVELS = ("PIX", "PXB", "PHB", "NODE", "SYS")
_GIB = 1024**3
_NO_VALUE = "-"


def topo(
    context: typer.Context,
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE",
            help="Topology file of any known format, a copy of /sys, or - for standard input.",
            show_default="this node",
        ),
    ] = None,
    as_json: JsonOption = False,
    svg: Annotated[
        str | None,
        typer.Option(
            "--svg",
            metavar="FILE",
            help="Write a picture (SVG); - prints it instead of the tables.",
            show_default=False,
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks",
            min=1,
            max=10_000,
            help="Say instead where so many ranks would run, each next to its GPU.",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="NAME",
            help="With --ranks: gpu-local, socket, numa, spread or none.",
            show_default="gpu-local",
        ),
    ] = None,
    job_file: Annotated[
        str | None,
        typer.Option(
            "--plan",
            metavar="JOB_FILE",
            help="Say instead where that job's ranks would run; without FILE on a node of its "
            "partition, if the site profile has its topology.",
            show_default=False,
        ),
    ] = None,
    settings: SetOption = [],
    allowed_cpus: Annotated[
        str | None,
        typer.Option(
            "--allowed-cpus",
            metavar="LIST",
            help="With --ranks or --plan: the only CPUs to use, such as 0-15,64-79.",
            show_default="all",
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            metavar="RUN",
            help="Show a node of that run, and where its ranks ran there.",
            show_default=False,
        ),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(
            "--node",
            metavar="NODE",
            help="With --run: which of its nodes.",
            show_default="that of the first rank",
        ),
    ] = None,
) -> None:
    """Show a node's NUMA domains, cores, GPUs and network cards, and which are near each other.

    With `--ranks` or `--plan` it says which GPU, cores and network card each rank would get there;
    with `--run` where they really ran.
    """
    from hpml_orchestrator.cli import topoplan  # noqa: PLC0415

    refuse_empty(
        {
            "--policy": policy,
            "--plan": job_file,
            "--allowed-cpus": allowed_cpus,
            "--run": run,
            "--node": node,
        }
    )
    given = topoplan.Asked(
        ranks,
        policy or "",
        job_file or "",
        tuple(settings),
        allowed_cpus or "",
        run or "",
        node or "",
    )
    given.check(file)
    if svg == STANDARD_OUTPUT:
        refuse_with("--svg -", {"--json": as_json})
    if run:
        from hpml_orchestrator.cli.toporun import tell_run  # noqa: PLC0415

        tell_run(store_of(context), run, given.node, svg=svg, as_json=as_json)
        return
    known: tuple[str, Topology] | None = None
    if job_file or file not in {None, "-"}:
        refuse_gone_directory()
    if job_file:
        job = topoplan.job_of(context, given)
        known = topoplan.site_topology(job) if file is None else None
        wanted = topoplan.wanted_by_job(job, given)
    source, topology = known or (file, read_node(file))
    title = _title(source, topology)
    restriction = _restriction(topology) if source is None else ""
    if job_file or ranks is not None:
        if ranks is not None:
            wanted = topoplan.wanted_by_words(ranks, given)
        if not allowed_cpus:
            wanted = replace(wanted, allowed_cpus=restriction)
        topoplan.tell_plan(topology, wanted, svg=svg, title=title, as_json=as_json)
    else:
        _tell_node(topology, title, svg=svg, as_json=as_json)
    if restriction and not allowed_cpus:
        typer.echo(f"note: this process may use the CPUs {restriction} alone", err=True)


def _tell_node(topology: Topology, title: str, *, svg: str | None, as_json: bool) -> None:
    """Print a node, and draw it; a picture on standard output stands there alone."""
    if svg is not None:
        write_picture(topology, svg, title=title)
    if as_json:
        from hpml_orchestrator.topology.record import topology_json  # noqa: PLC0415

        print_json(topology_json(topology))
    elif svg != STANDARD_OUTPUT:
        print_node(topology, title)
    for warning in topology.warnings:
        typer.echo(f"warning: {warning}", err=True)


def _restriction(topology: Topology) -> str:
    """Return which of this node's CPUs this process may use; empty where these are all."""
    import os  # noqa: PLC0415

    from hpml_orchestrator.topology import format_list  # noqa: PLC0415

    allowed = os.sched_getaffinity(0)
    return format_list(allowed) if topology.cpus - allowed else ""


def read_node(file: str | None) -> Topology:
    """Return the topology of a file, of standard input, or of this node."""
    from hpml_orchestrator.errors import InputError  # noqa: PLC0415

    if file is None:
        from hpml_orchestrator.topology import read_sysfs  # noqa: PLC0415

        return read_sysfs(gpu_listing=_gpu_listing())
    if not file:
        raise InputError(
            "must name a file", field="FILE", value=file, hint="this node: `hpml topo`"
        )
    from hpml_orchestrator.topology.recognise import read_topology, topology_of_text  # noqa: PLC0415

    if file != "-":
        from pathlib import Path  # noqa: PLC0415

        return read_topology(Path(file))
    from hpml_orchestrator.topology.xml_guard import BYTES_MAX  # noqa: PLC0415

    data = sys.stdin.buffer.read(BYTES_MAX + 1)
    if len(data) > BYTES_MAX:
        raise InputError(f"standard input: is larger than {BYTES_MAX // 1024**2} MiB")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError("standard input: is no text in UTF-8") from None
    return topology_of_text(text, name="standard input")


def _gpu_listing() -> str:
    """Return what `nvidia-smi -L` says of MIG instances; nothing where there is none of them."""
    import os  # noqa: PLC0415

    if not os.path.isdir("/proc/driver/nvidia/capabilities"):
        return ""
    from hpml_orchestrator.errors import HpmlError  # noqa: PLC0415
    from hpml_orchestrator.scheduler.command import SubprocessRunner  # noqa: PLC0415

    try:
        result = SubprocessRunner().run(["nvidia-smi", "-L"], env=os.environ, timeout=20)
    except (HpmlError, OSError):
        return ""
    return result.stdout if result.returncode == 0 and "MIG " in result.stdout else ""


def _title(file: str | None, topology: Topology) -> str:
    import os  # noqa: PLC0415

    if file:
        name = "standard input" if file == "-" else os.path.basename(os.path.abspath(file)) or file
        return f"{name} ({topology.source})"
    return f"{os.uname().nodename} ({topology.source})"


def write_picture(
    topology: Topology, path: str, *, title: str, ranks: Sequence[RankBox] = ()
) -> None:
    """Write a node's picture.

    Args:
        topology: the node.
        path: of the file; - for standard output.
        title: what stands above.
        ranks: whose its cores are.

    Raises:
        InputError: the file cannot be written.
    """
    from hpml_orchestrator.cli.topopicture import picture  # noqa: PLC0415
    from hpml_orchestrator.errors import InputError  # noqa: PLC0415

    drawn = picture(topology, title=title, ranks=ranks)
    if path == STANDARD_OUTPUT:
        sys.stdout.buffer.write(
            drawn.encode("utf-8")
        )  # as its first line says, whatever the locale
        sys.stdout.flush()
        return
    from hpml_orchestrator.cli.outputs import write_output  # noqa: PLC0415

    try:
        write_output(path, drawn)
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror}", field="--svg", value=path
        ) from None


def print_node(topology: Topology, title: str) -> None:
    """Print a node's domains, GPUs and network cards as tables."""
    from hpml_orchestrator.topology import format_list  # noqa: PLC0415

    counts = (
        (len({core.socket for core in topology.cores}), "socket"),
        (len(topology.domains), "NUMA domain"),
        (len(topology.cores), "core"),
        (len(topology.cpus), "CPU"),
        (len(topology.devices), "GPU"),
        (len(topology.nics), "network card"),
    )
    told = ", ".join(
        f"{count} {word}{'' if count == 1 else 's'}"
        for count, word in counts
        if word != "socket" or topology.sockets_told
    )
    typer.echo(f"{title}: {told}\n")
    print_table(
        ("DOMAIN", "SOCKET", "CORES", "CPUS", "MEMORY", "GPUS", "NICS", "DISTANCES"),
        list(_domain_rows(topology)),
    )
    if topology.gpus:
        typer.echo()
        rows = [
            (
                one.name,
                one.address or _NO_VALUE,
                _number(one.domain),
                format_list(one.cpus) or _NO_VALUE,
                nearest_nics(topology, one.name) or _NO_VALUE,
            )
            for one in topology.gpus
        ]
        print_table(("GPU", "ADDRESS", "DOMAIN", "LOCAL CPUS", "NEAREST NICS"), rows)
    if topology.nics:
        typer.echo()
        print_table(
            ("NIC", "ADDRESS", "DOMAIN"),
            [(one.name, one.address or _NO_VALUE, _number(one.domain)) for one in topology.nics],
        )


def _domain_rows(topology: Topology) -> Iterator[Sequence[str]]:
    from hpml_orchestrator.topology import format_list  # noqa: PLC0415

    for one in topology.domains:
        cores = [core for core in topology.cores if core.domain == one.number]
        sockets = {core.socket for core in cores} if topology.sockets_told else set()
        yield (
            str(one.number),
            ",".join(str(socket) for socket in sorted(sockets)) or _NO_VALUE,
            str(len(cores)),
            format_list(one.cpus) or _NO_VALUE,
            f"{one.memory_bytes / _GIB:.0f} GiB" if one.memory_bytes else _NO_VALUE,
            names(gpu.name for gpu in topology.gpus if gpu.domain == one.number) or _NO_VALUE,
            names(nic.name for nic in topology.nics if nic.domain == one.number) or _NO_VALUE,
            " ".join(f"{other}:{away}" for other, away in one.distances) or _NO_VALUE,
        )


def _number(domain: int | None) -> str:
    return _NO_VALUE if domain is None else str(domain)


def nearest_nics(topology: Topology, gpu: str) -> str:
    """Return the level and the names of the cards that are nearest to a GPU; SYS is not near."""
    found = [(level, nic) for name, nic, level in topology.links if name == gpu]
    for level in _LEVELS[:-1]:
        near = [nic for one, nic in found if one == level]
        if near:
            return f"{level} {names(near)}"
    return ""


def names(words: Iterable[str]) -> str:
    """Return names as one text, rows of numbers drawn together.

    >>> names(["GPU0", "GPU1", "GPU2", "mlx5_0"])
    'GPU0-2 mlx5_0'
    """
    import re  # noqa: PLC0415

    runs: list[list[str]] = []  # a word, its number and the last number of its run
    for word in words:
        match = re.fullmatch(r"(|.*[^0-9])(0|[1-9][0-9]{0,8})", word)
        stem, number = (match[1], match[2]) if match else (word, "")
        last = runs[-1] if runs else ["", "", ""]
        if number and last[2] and last[0] == stem and int(number) == int(last[2]) + 1:
            last[2] = number
        else:
            runs.append([stem, number, number])
    return " ".join(
        f"{stem}{first}" + (f"-{last}" if last != first else "") for stem, first, last in runs
    )
