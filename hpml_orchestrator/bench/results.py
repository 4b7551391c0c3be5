"""Results of `hpml bench`: one file per node and run, sorted by node type; and their comparison.

A directory of results contains `<node type>/<node>/<run>.json`. Each file is written atomically and
never changed, so any number of writers and readers may use a directory at the same time.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
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
    """A rate that a tenth of the repeats reach."""

    value: float
    unit: str  # FLOP/s, B/s or 1/s
    spread: float = 0.0  # between parts of the repeats, relative to the value
    ranks: int | None = None  # number of ranks in an all-reduce


@dataclass(frozen=True)
class Missing:
    """Why something was not measured."""

    reason: str
    failed: bool = False  # it broke or hung; otherwise it was skipped, for example without PyTorch


@dataclass(frozen=True)
class BenchGpu:
    """A GPU that was measured."""

    name: str
    uuid: str = ""


@dataclass(frozen=True)
class Measurement:
    """Result of one run of `hpml bench` on one node.

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
    load: float = 0.0  # share of the node's CPU time used by other processes
    torch: str = ""
    seconds: float = 0.0
    gpus: Sequence[BenchGpu] = ()
    figures: Mapping[str, Rate] = field(default_factory=dict)
    missing: Mapping[str, Missing] = field(default_factory=dict)
    curves: Mapping[str, Sequence[tuple[int, float, float]]] = field(default_factory=dict)


def parse(record: Mapping[str, Any]) -> Measurement:
    """Parse the record of a measurement.

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
    """Refuse a figure that is not a positive number, or whose GPU is not listed."""
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
    """Return a node's type: from the site profile, else derived from its hardware.

    Args:
        record: record of a measurement, with its `node`, `cpus`, `cpu_model` and `gpus`.
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
        with contextlib.suppress(InputError):  # its nodes are not in list form
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
        profiles: the site profiles, lowest precedence first.
    """
    beside = [path.with_suffix(".bench") for path in reversed(profiles)]
    return [*beside, records / "bench"]


def keep(measurements: Sequence[Measurement], directories: Sequence[Path]) -> Path:
    """Write measurements to the first writable directory, and return it.

    Raises:
        RecordError: none is writable; lists each with the reason.
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
        with contextlib.suppress(OSError):  # another process removed it, or it is not ours
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
        directories: directories of results; missing ones are skipped.
        types: only these node types.
        nodes: only these nodes.
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
                        continue  # it is being written
                    try:
                        made = parse(read_json(path))
                    except HpmlError:
                        damaged.append(path)
                        continue
                    # The directory determines the type: a site may rename one.
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

    Uses the newest measurements of these nodes; if there are none, those of their node type in the
    site profile, or of nodes with the same GPU.

    Args:
        nodes: nodes that a job ran on.
        gpu: the driver's name of their GPUs; empty if the job used none.
        directories: directories of results, see `directories_of`.
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
    # Without GPUs a job uses gloo, which is not measured on nodes with GPUs.
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
        measured: measurements, preferred ones first; the result has one fit for each number of
            ranks, in this order.
    """
    found: dict[str, dict[int, AllReduce]] = {}
    for made in measured:
        for name, points in made.curves.items():
            ranks = max((ranks for ranks, _, _ in points), default=0)
            # A fit fails with too few sizes.
            with contextlib.suppress(InputError, ZeroDivisionError):
                if ranks and ranks not in found.get(name, ()):
                    fit = fit_allreduce(*map(list, zip(*points, strict=True)))
                    found.setdefault(name, {})[ranks] = fit
    return {name: [*of_ranks.values()] for name, of_ranks in found.items()}


def peaks_of_run(facts: Facts, *, records: Path, site: ResolvedSite | None) -> Peaks | None:
    """Return the peaks of a run's nodes, as far as measured or specified.

    Args:
        facts: facts about the run.
        records: the root of the user's records.
        site: the site profile, if any.
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
        # Its GPUs are unknown: neither the processor's peak nor gloo's applies to them.
        return replace(peaks, flops={}, memory_bandwidth=None, allreduce={})
    return peaks


def _has(made: Measurement, gpu: str) -> bool:
    return any(one.name == gpu for one in made.gpus)


def _peaks_of(newest: Sequence[Measurement], gpu: str) -> Peaks:
    """Return the medians over nodes; without GPUs, a node's memory bandwidth sums its domains."""
    values: dict[str, list[float]] = {}
    readers = [made.figures[_SHARED].ranks or 1 for made in newest if _SHARED in made.figures]
    for made in newest:
        of_node: dict[str, list[float]] = {}
        for name, figure in made.figures.items():
            part, _, rest = name.partition(".")
            index = part.removeprefix("gpu")
            if part == "shared" and (figure.ranks or 1) > min(readers, default=1):
                continue  # more nodes read at the same time than elsewhere
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


# Compare measurements with the specification, the node's history and its siblings; name outliers.
#
# A figure that is more than 5 % below the median of its siblings, or of the node's own history, is
# an outlier, but only if that distance exceeds the spread of the figure and that of its reference.
# A figure below half of the GPU's specification is also an outlier. Uncertain figures, and runs
# with mostly uncertain figures, are not used as references.

BELOW = 0.05
"""Outliers are further below than this; AMD's node check and ml-engineering also use 5 %."""

UNCERTAIN = 0.03
"""Figures whose repeats scatter more than this are too uncertain for a verdict."""

BUSY = 0.1
"""Share of a node's CPUs used by others above which its CPU and memory figures are too low."""

_OVERLOADED = 0.5  # share of the CPUs: the rest is too little for the parts' time limits
_OF_SPECIFICATION = 0.5  # good matrix products reach 0.75 to 0.9, quick ones 0.6
_FEW = 3  # too few values to drop the extremes
_LEAST_RUNS = 3  # the median of fewer may be a lucky run


@dataclass(frozen=True)
class Reference:
    """What a figure is compared with."""

    kind: str  # `siblings`, `history` or `specification`
    value: float
    count: int = 1  # number of values of which it is the median
    spread: float = 0.0  # spread of those values


@dataclass(frozen=True)
class FigureComparison:
    """One figure of one node, with its references."""

    node: str
    name: str
    figure: Rate
    references: Sequence[Reference] = ()
    outlier: str = ""  # kind of the reference that it falls below
    uncertain: bool = False  # too much scatter for a verdict, or disturbed by others

    def reference(self, kind: str) -> Reference | None:
        """Return the reference of that kind, if there is one."""
        return next((one for one in self.references if one.kind == kind), None)


@dataclass(frozen=True)
class BenchVerdict:
    """The result: every figure, and the findings as sentences."""

    figures: Sequence[FigureComparison] = ()
    outliers: Sequence[FigureComparison] = ()
    failed: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # node -> part -> reason
    left_out: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def uncertain(self, node: str) -> tuple[int, int]:
        """Return the number of uncertain figures of a node, and of all its figures."""
        own = [one.uncertain for one in self.figures if one.node == node]
        return sum(own), len(own)

    def alone(self, node: str) -> int:
        """Return the number of certain figures of a node that have no reference yet."""
        return sum(
            not one.uncertain and not one.references for one in self.figures if one.node == node
        )

    def is_unclear(self, node: str) -> bool:
        """Return whether no figure of a node could be judged."""
        uncertain, figures = self.uncertain(node)
        return uncertain + self.alone(node) == figures

    @property
    def normal(self) -> bool:
        """Whether no node is an outlier and no part of a node failed."""
        return not self.outliers and not self.failed


def judge(measured: Sequence[Measurement], stored: Sequence[Measurement]) -> BenchVerdict:
    """Return the verdict on the nodes of one run.

    Args:
        measured: measurements of this run.
        stored: measurements of earlier runs, oldest first; those of this run are ignored.
    """
    figures = compare(measured, stored)
    outliers = [one for one in figures if one.outlier]
    failed: dict[str, dict[str, str]] = {}
    left_out: dict[str, dict[str, str]] = {}
    for made in measured:
        for part, missing in made.missing.items():
            is_fault = missing.failed and not _has_no_cpus(made, part)
            (failed if is_fault else left_out).setdefault(made.node, {})[part] = missing.reason
    return BenchVerdict(figures, outliers, failed, left_out)


def compare(
    measured: Sequence[Measurement], stored: Sequence[Measurement]
) -> list[FigureComparison]:
    """Compare each figure of each node with its specification, own history and siblings."""
    runs = {made.run for made in measured}
    earlier = [_certain(made) for made in stored if made.run not in runs]
    # Each sibling counts once, with its newest result; otherwise a node that is measured often
    # would dominate the median.
    newest = {made.node: made for made in [*earlier, *map(_certain, measured)]}
    found = []
    for made in measured:
        siblings = [other for other in newest.values() if other.node != made.node]
        history = [other for other in earlier if other.node == made.node]
        for name, figure in made.figures.items():
            references = [
                *_siblings(made, name, siblings),
                *_history(made, name, history),
                *_specification(made, name),
            ]
            uncertain = _is_uncertain(made, name)
            outlier = "" if uncertain else _below(figure, references)
            found.append(FigureComparison(made.node, name, figure, references, outlier, uncertain))
    return found


def _is_uncertain(made: Measurement, name: str) -> bool:
    return made.figures[name].spread > UNCERTAIN or (made.load > BUSY and _of_cpus(made, name))


def _certain(made: Measurement) -> Measurement:
    """Return a measurement with only the figures that may serve as references."""
    kept = {n: one for n, one in made.figures.items() if not _is_uncertain(made, n)}
    return replace(made, figures=kept if 2 * len(kept) >= len(made.figures) else {})


def _below(figure: Rate, references: Sequence[Reference]) -> str:
    for reference in references:
        distance = 1 - figure.value / reference.value
        least = BELOW
        if reference.kind == "specification":
            least = 1 - _OF_SPECIFICATION
        if distance > max(least, figure.spread + reference.spread):
            return reference.kind
    return ""


def _has_no_cpus(made: Measurement, part: str) -> bool:
    """Return whether a CPU-only part is late because other processes use the CPUs."""
    late = made.missing[part].reason.startswith("no answer ")
    figure = f"{part}.allreduce" if part in ("node", "nodes") else f"{part}."
    return late and made.load > _OVERLOADED and _of_cpus(made, figure)


def _of_cpus(made: Measurement, name: str) -> bool:
    on_cpus = name.endswith(".allreduce") and not made.gpus
    return on_cpus or name.startswith(("cpu.", "host.", "shm."))


def _siblings(made: Measurement, name: str, others: Sequence[Measurement]) -> Iterator[Reference]:
    part, _, rest = name.partition(".")
    values = []
    if _number(part) is not None:  # siblings are the other GPUs of this node
        values += _same(made, made, rest, but=name)
    elif part == "host":
        values += [
            one.value
            for other, one in made.figures.items()
            if other.startswith("host.") and other != name
        ]
    for other in others:
        if other.type != made.type or not _same_conditions(made, other, name):
            continue
        if name == "nodes.allreduce":
            continue  # it involves several nodes: compare only with the history
        if _number(part) is not None:
            values += _same(made, other, rest)
        elif name in other.figures and other.figures[name].ranks == made.figures[name].ranks:
            values.append(other.figures[name].value)
    if values:
        yield _reference("siblings", values)


def _same(made: Measurement, other: Measurement, rest: str, but: str = "") -> list[float]:
    kinds = {gpu.name for gpu in made.gpus}
    found = []
    for index, gpu in enumerate(other.gpus):
        figure = other.figures.get(name := f"gpu{index}.{rest}")
        if figure is not None and name != but and gpu.name in kinds:
            found.append(figure.value)
    return found


def _history(made: Measurement, name: str, earlier: Sequence[Measurement]) -> Iterator[Reference]:
    index = _number(name.partition(".")[0])
    values = []
    for other in earlier:
        figure = other.figures.get(name)
        if figure is None or figure.ranks != made.figures[name].ranks:
            continue
        if index is not None and other.gpus[index] != made.gpus[index]:
            continue  # the GPU was replaced
        if other.type == made.type and _same_conditions(made, other, name):
            values.append(figure.value)
    if len(values) >= _LEAST_RUNS:
        yield _reference("history", values)


def _specification(made: Measurement, name: str) -> Iterator[Reference]:
    part, _, rest = name.partition(".")
    index = _number(part)
    peaks = specification(made.gpus[index].name) if index is not None else None
    if peaks is None:
        return
    value = {"memory": peaks.memory_bandwidth, "host_to_device": peaks.host_to_device}.get(rest)
    value = value or peaks.flops.get(rest.removeprefix("matmul."))
    if value:
        yield Reference("specification", value)


def _same_conditions(made: Measurement, other: Measurement, name: str) -> bool:
    if made.cpus != other.cpus:
        return False
    uses_torch = "matmul" in name or "allreduce" in name
    return made.torch == other.torch or not uses_torch


def _number(part: str) -> int | None:
    """Return the index of `gpu3`; None for other parts."""
    index = part.removeprefix("gpu")
    return int(index) if part.startswith("gpu") and index.isdecimal() else None


def _reference(kind: str, values: Sequence[float]) -> Reference:
    ordered, median = sorted(values), statistics.median(values)
    # One slow sibling would widen the reference's spread so far that no outlier could be detected,
    # including itself. So drop the extremes.
    middle = ordered[1:-1] if len(ordered) > _FEW else ordered
    return Reference(kind, median, len(values), (middle[-1] - middle[0]) / 2 / median)


# Collect the results of a run of `hpml bench`, and remove files left by killed nodes.

_CUT_OFF = {"reason": "the job ended before all was measured", "failed": True}


def collect(run: Path, rid: str, site: Site | None) -> tuple[list[Measurement], list[Path]]:
    """Return the measurements ordered by node name, and the unreadable files.

    Args:
        run: the run's directory.
        rid: its id.
        site: the site profile, which defines node types.
    """
    found: list[Measurement] = []
    damaged: list[Path] = []
    for path in sorted((run / "bench").glob("*.json")):
        try:
            record = read_json(path)
            if not record.get("complete"):
                record.setdefault("missing", {})["measurement"] = _CUT_OFF
            found.append(parse({**record, "run": rid, "type": node_type(record, site)}))
        except (HpmlError, AttributeError, TypeError):
            damaged.append(path)
    return found, damaged


def clean_up(shared: Path, rid: str) -> None:
    """Remove files that killed nodes left on the shared file system.

    Args:
        shared: the directory that was measured.
        rid: the run's id, which is part of the file names.
    """
    for path in shared.glob(f".hpml-bench-{rid}-*"):
        with contextlib.suppress(OSError):
            shutil.rmtree(path)
