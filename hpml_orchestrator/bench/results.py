"""Results of `hpml bench`: one file per node and run, kept by node type, read as a report's roof.

A directory of results is `<directory>/<node type>/<node>/<run>.json`. Each file is written in one
step and never changed, so any number of writers and readers may use a directory at the same time.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.diagnosis.devices import specification
from hpml_orchestrator.diagnosis.model import AllReduce, Peaks
from hpml_orchestrator.diagnosis.models import fit_allreduce
from hpml_orchestrator.errors import HpmlError, InputError, RecordError
from hpml_orchestrator.records.files import read_json, write_json
from hpml_orchestrator.scheduler.model import expand

if TYPE_CHECKING:
    from hpml_orchestrator.diagnosis.model import Facts
    from hpml_orchestrator.site.model import ResolvedSite, Site

_KEPT_PER_NODE = 50
_SHARED = "shared.read"
_NAME = re.compile(r"(?!\.)[\w.+-]{1,128}", re.ASCII)


@dataclass(frozen=True)
class Rate:
    """A rate that a tenth of several repeats reach."""

    value: float
    unit: str  # FLOP/s, B/s or 1/s
    spread: float = 0.0  # of parts of the repeats, as a share of the value
    ranks: int | None = None  # that took part in an all-reduce


@dataclass(frozen=True)
class Missing:
    """Why something was not measured."""

    reason: str
    failed: bool = False  # it broke or hung; otherwise it was left out, for example without PyTorch


@dataclass(frozen=True)
class BenchGpu:
    """A GPU that was measured."""

    name: str
    uuid: str = ""


@dataclass(frozen=True)
class Measurement:
    """What one run of `hpml bench` found on one node.

    Attributes:
        figures: by names such as `gpu0.matmul.bfloat16`; higher is better.
        missing: by the name of a part, such as `gpu0` or `matmul`.
        curves: `gpus` and `nodes`: (ranks, bytes, seconds) of each all-reduce.
    """

    node: str
    type: str
    run: str
    time: float
    cpus: int = 0
    cpu_model: str = ""
    load: float = 0.0  # share of the node's CPU time that other processes used meanwhile
    torch: str = ""
    seconds: float = 0.0
    gpus: Sequence[BenchGpu] = ()
    figures: Mapping[str, Rate] = field(default_factory=dict)
    missing: Mapping[str, Missing] = field(default_factory=dict)
    curves: Mapping[str, Sequence[tuple[int, float, float]]] = field(default_factory=dict)


def parse(record: Mapping[str, Any]) -> Measurement:
    """Return the measurement that a record holds.

    Raises:
        RecordError: it is damaged.
    """
    try:
        curves = {
            str(name): [(int(ranks), float(size), float(took)) for ranks, size, took in points]
            for name, points in record["curves"].items()
        }
        made = Measurement(
            node=_plain(record["node"]),
            type=_plain(record["type"]),
            run=_plain(record["run"]),
            time=float(record["time"]),
            gpus=tuple(BenchGpu(str(gpu["name"]), str(gpu["uuid"])) for gpu in record["gpus"]),
            figures={str(name): Rate(**value) for name, value in record["figures"].items()},
            missing={str(name): Missing(**value) for name, value in record["missing"].items()},
            curves=curves,
            cpus=int(record["cpus"]),
            cpu_model=str(record["cpu_model"]),
            load=float(record["load"]),
            torch=str(record["torch"]),
            seconds=float(record["seconds"]),
        )
        for name, figure in made.figures.items():
            _check(name, figure, len(made.gpus))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RecordError(f"not a result of hpml bench: {type(error).__name__}: {error}") from error
    return made


def _check(name: str, figure: Rate, gpus: int) -> None:
    """Refuse a figure that is not a number above 0, or of a GPU that is not listed."""
    if not (math.isfinite(figure.value) and figure.value > 0 and math.isfinite(figure.spread)):
        raise ValueError(f"{name} is not a number above 0")
    index = name.partition(".")[0].removeprefix("gpu")
    if index.isdecimal() and int(index) >= gpus:
        raise ValueError(f"{name} is of a GPU that is not listed")


def _plain(value: object) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(f"{value!r} is not a name")
    return value


def node_type(record: Mapping[str, Any], site: Site | None) -> str:
    """Return the node type of the site profile that names a node, else one made of its hardware.

    Args:
        record: of a measurement, with its `node`, `cpus`, `cpu_model` and `gpus`.
        site: the site profile.
    """
    named = _type_in_profile(str(record.get("node", "")), site)
    if named:
        return named
    gpus = [str(gpu.get("name", "")) for gpu in record.get("gpus", ())]
    kinds = [f"{gpus.count(name)}x-{name}" for name in dict.fromkeys(gpus)]
    text = "_".join([*kinds, f"{record.get('cpus', 0)}-cpus", str(record.get("cpu_model", ""))])
    return re.sub(r"[^a-z0-9_.]+", "-", text.lower()).strip("-._")[:100] or "unknown"


def _type_in_profile(node: str, site: Site | None) -> str:
    for name, kind in site.node_types.items() if site else ():
        with contextlib.suppress(InputError):  # its nodes in another form than a list
            if kind.nodes and node in expand(kind.nodes) and _NAME.fullmatch(name):
                return name
    return ""


# --- directories of results


def directories_of(records: Path, profiles: Sequence[Path]) -> list[Path]:
    """Return the directories that may hold results, the preferred one first.

    Each site profile in use may have a directory next to it: `site.bench` for `site.toml`. Users
    who may not write there have `bench` in their records.

    Args:
        records: the root of the user's records.
        profiles: the site profiles, the weakest first.
    """
    beside = [path.with_suffix(".bench") for path in reversed(profiles)]
    return [*beside, records / "bench"]


def keep(measurements: Sequence[Measurement], directories: Sequence[Path]) -> Path:
    """Write measurements to the first directory that can be written, and return it.

    Raises:
        RecordError: none of them can be written; names each with the reason.
    """
    faults = []
    for directory in directories:
        try:
            for made in measurements:
                _write(directory / made.type / made.node, made)
        except (OSError, RecordError) as error:
            cause = error.__cause__ if isinstance(error, RecordError) else error
            faults.append(f"{directory}: {getattr(cause, 'strerror', None) or error}")
            continue
        return directory
    raise RecordError(f"the results cannot be kept: {'; '.join(faults)}")


def _write(directory: Path, made: Measurement) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / f"{made.run}.json", asdict(made))
    # A file that another process has just removed sorts last, where nothing is deleted.
    results = sorted(directory.glob("*.json"), key=_modified)
    for old in results[:-_KEPT_PER_NODE]:
        with contextlib.suppress(OSError):  # another hpml removes it, or it is not ours
            old.unlink()


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return math.inf


def read_all(
    directories: Iterable[Path], *, types: Iterable[str] = (), nodes: Iterable[str] = ()
) -> tuple[list[Measurement], list[Path]]:
    """Return the stored measurements, oldest first, and the files that could not be read.

    Args:
        directories: of results; those that do not exist are empty.
        types: only of these node types.
        nodes: only of these nodes.
    """
    wanted_types, wanted_nodes = set(types), set(nodes)
    found: dict[tuple[str, str], Measurement] = {}
    damaged: list[Path] = []
    for directory in directories:
        for kind in _entries(directory):
            if wanted_types and kind.name not in wanted_types:
                continue
            for node in _entries(kind):
                if wanted_nodes and node.name not in wanted_nodes:
                    continue
                for path in _entries(node):
                    if path.suffix != ".json" or path.name.startswith("."):
                        continue  # somebody is writing it
                    try:
                        made = parse(read_json(path))
                    except HpmlError:
                        damaged.append(path)
                        continue
                    # The directory names the type: a site may rename one.
                    found[made.node, made.run] = replace(made, type=kind.name)
    return sorted(found.values(), key=lambda made: made.time), damaged


def _entries(directory: Path) -> Iterator[Path]:
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return
    for name in names:
        yield directory / name


# --- what reports use


def peaks_for(
    nodes: Sequence[str],
    gpu: str,
    *,
    directories: Iterable[Path] = (),
    site: Site | None = None,
) -> Peaks | None:
    """Return the peaks of nodes: measured by `hpml bench`, else from the GPU's specification.

    The newest measurements of these nodes count; if there are none, those of their node type in the
    site profile, or of nodes with the same GPU.

    Args:
        nodes: that a job ran on.
        gpu: what the driver calls their GPUs; empty if it used none.
        directories: of results, see `directories_of`.
        site: the site profile.
    """
    places = list(directories)
    stored, _ = read_all(places, nodes=nodes) if nodes else ([], [])
    of_gpu = [made for made in stored if not gpu or _has(made, gpu)]
    if not of_gpu:
        kinds = {kind for node in nodes if (kind := _type_in_profile(node, site))}
        others, _ = read_all(places, types=kinds) if kinds or gpu else ([], [])
        of_gpu = [made for made in others if not gpu or _has(made, gpu)]
    specified = specification(gpu) if gpu else None
    if not of_gpu:
        return specified
    measured = _peaks_of(list({made.node: made for made in of_gpu}.values()), gpu)
    # Without GPUs a job uses gloo, which the bench of a node with GPUs does not measure.
    alike = [made for made in reversed(of_gpu) if bool(made.gpus) == bool(gpu)]
    measured = replace(measured, allreduce=fits(alike))
    if specified is None:
        return measured
    # Without PyTorch the GPUs were not measured.
    origin = "" if measured.flops else f"; GPU: {specified.origin}"
    return replace(
        measured,
        flops=measured.flops or specified.flops,
        memory_bandwidth=measured.memory_bandwidth or specified.memory_bandwidth,
        host_to_device=measured.host_to_device or specified.host_to_device,
        origin=measured.origin + origin,
    )


def fits(measured: Iterable[Measurement]) -> dict[str, list[AllReduce]]:
    """Return latency and bandwidth of all-reduce, by `node` and `nodes`.

    Args:
        measured: the preferred first; one of each number of ranks is returned, in this order.
    """
    found: dict[str, dict[int, AllReduce]] = {}
    for made in measured:
        for name, points in made.curves.items():
            ranks = max((ranks for ranks, _, _ in points), default=0)
            # With too few sizes nothing can be fitted.
            with contextlib.suppress(InputError, ZeroDivisionError):
                if ranks and ranks not in found.get(name, ()):
                    fit = fit_allreduce(*map(list, zip(*points, strict=True)))
                    found.setdefault(name, {})[ranks] = fit
    return {name: [*of_ranks.values()] for name, of_ranks in found.items()}


def peaks_of_run(facts: Facts, *, records: Path, site: ResolvedSite | None) -> Peaks | None:
    """Return the peaks of a run's nodes, as far as measured or specified.

    Args:
        facts: of the run.
        records: the root of the user's records.
        site: the site profile, if there is one.
    """
    named = [*(node.node for node in facts.nodes), *(rank.node for rank in facts.ranks)]
    gpus = [gpu.name for node in facts.nodes for gpu in node.gpus]
    peaks = peaks_for(
        list(dict.fromkeys(filter(None, named))),
        gpus[0] if gpus else "",
        directories=directories_of(records, site.sources if site else []),
        site=site.site if site else None,
    )
    if peaks is not None and facts.gpu_count and not gpus:
        # Which GPUs it had is unknown: neither the processor's peak nor gloo's is theirs.
        return replace(peaks, flops={}, memory_bandwidth=None, allreduce={})
    return peaks


def _has(made: Measurement, gpu: str) -> bool:
    return any(one.name == gpu for one in made.gpus)


def _peaks_of(newest: Sequence[Measurement], gpu: str) -> Peaks:
    """Return the medians over nodes; without GPUs the memory of a node is all of its domains."""
    values: dict[str, list[float]] = {}
    readers = [made.figures[_SHARED].ranks or 1 for made in newest if _SHARED in made.figures]
    for made in newest:
        of_node: dict[str, list[float]] = {}
        for name, figure in made.figures.items():
            part, _, rest = name.partition(".")
            index = part.removeprefix("gpu")
            if part == "shared" and (figure.ranks or 1) > min(readers, default=1):
                continue  # more nodes than elsewhere read at the same time
            if part == "host":
                of_node.setdefault("host.memory", []).append(figure.value)
            elif index.isdecimal() and made.gpus[int(index)].name == gpu:
                values.setdefault(f"gpu.{rest}", []).append(figure.value)
            elif not index.isdecimal():
                values.setdefault(name, []).append(figure.value)
        for name, parts in of_node.items():
            values.setdefault(name, []).append(sum(parts))
    median = {name: statistics.median(several) for name, several in values.items()}
    prefix = "gpu.matmul." if gpu else "cpu.matmul."
    last = max(newest, key=lambda made: made.time)
    day = time.strftime("%Y-%m-%d", time.localtime(last.time))
    where = last.node if len(newest) == 1 else f"{len(newest)} nodes"
    return Peaks(
        flops={n.removeprefix(prefix): v for n, v in median.items() if n.startswith(prefix)},
        memory_bandwidth=median.get("gpu.memory" if gpu else "host.memory"),
        host_to_device=median.get("gpu.host_to_device"),
        local_disk_read=median.get("disk.read"),
        shared_read=median.get("shared.read"),
        link_bandwidth=median.get("nodes.allreduce"),
        origin=f"measured on {day} on {where}",
    )
