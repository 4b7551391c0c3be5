"""What `nvidia-smi topo -m` prints, as a `Topology`: GPUs and cards, and the CPUs near to GPUs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.topology.build import cores_without_siblings, name_key
from hpml_orchestrator.topology.cpulist import format_list, parse_list
from hpml_orchestrator.topology.model import Domain, Gpu, Nic, Topology

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["looks_like_nvidia_smi", "read_nvidia_smi"]

_SOURCE = "nvidia-smi topo -m"
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_TAILS = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
_DEVICE = re.compile(r"(?:GPU|NIC|mlx|hfi|qib|bnxt|irdma|efa|rdmap|roce|ibp)\w*")
_LEGEND = re.compile(r"\s*(NIC[0-9]+):\s*(\S+)\s*")
_CELL = re.compile(r"X|SYS|NODE|PHB|PXB|PIX|PSB|C2C|N/?A|OK|SOC|(?:NV|XGMI)[0-9]*")
_LEVELS = frozenset({"PIX", "PXB", "PHB", "NODE", "SYS"})
_WITHIN = _LEVELS - {"SYS"}
_OLD_LEVELS = {"SOC": "SYS"}  # so in drivers before 387
_HALF_COLUMN = 4


@dataclass(frozen=True)
class _Header:
    """The devices of the matrix and the columns behind, with the offsets that these begin at."""

    devices: tuple[str, ...]
    tails: tuple[str, ...]
    offsets: tuple[int, ...]


@dataclass
class _Row:
    """One GPU's row: its levels by device, and its affinities as text."""

    levels: dict[str, str]
    tails: dict[str, str]


def looks_like_nvidia_smi(text: str) -> bool:
    """Tell whether a text has the matrix's header."""
    return any(_header(line) for line in _COLOURS.sub("", text[:1_000_000]).splitlines())


def read_nvidia_smi(text: str) -> Topology:
    """Return the node; what the matrix does not tell (memory, sockets) is missing there too.

    Raises:
        InputError: it is no such text, or rows are missing.
    """
    lines = _COLOURS.sub("", text).splitlines()
    header: Optional[_Header] = None  # noqa: UP045
    rows: dict[str, _Row] = {}
    legend: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        named = _LEGEND.fullmatch(line)
        if header is None:
            header = _header(line)
        elif named:
            legend[named[1]] = named[2]
        elif line.split()[:1] and line.split()[0] in header.devices:
            name = line.split()[0]
            if name in rows:
                raise InputError(f"line {number}: a second row for {name}")
            rows[name] = _row(line, header, number)
    if header is None:
        raise InputError("is no output of nvidia-smi topo -m: a line of GPU0, GPU1, … is missing")
    gpus = [name for name in header.devices if name.startswith("GPU")]
    lost = [name for name in gpus if name not in rows]
    if lost:
        raise InputError(
            f"is cut off: there is no row for {', '.join(lost)}",
            hint="save it again: nvidia-smi topo -m > topo.txt",
        )
    return _topology(header, rows, gpus, legend)


def _header(line: str) -> Optional[_Header]:  # noqa: UP045
    """Return the header that a line is; None where it is none."""
    expanded = line.expandtabs(8)
    words = expanded.split()
    if not words or not re.fullmatch(r"GPU[0-9]+", words[0]) or "X" in words:
        return None
    tails = tuple(name for name in _TAILS if name in expanded)
    start = min((expanded.index(name) for name in tails), default=len(expanded))
    devices = tuple(expanded[:start].split())
    if len(set(devices)) < len(devices) or not all(_DEVICE.fullmatch(one) for one in devices):
        return None
    return _Header(devices, tails, tuple(expanded.index(name) for name in tails))


def _row(line: str, header: _Header, number: int) -> _Row:
    count = len(header.devices)
    cells = [cell.strip() for cell in line.split("\t")]
    by_tab = len(cells) > count
    if not by_tab:
        cells = line.split()
    matrix = cells[1 : count + 1]
    wrong = [cell for cell in matrix if not _CELL.fullmatch(cell)]
    if len(matrix) < count or wrong:
        raise InputError(
            f"line {number}: {cells[0]} must have {count} cells such as PIX, NV4 or SYS"
            + (f", not {wrong[0][:40]!r}" if wrong else f", not {len(matrix)}: is it cut off?")
        )
    levels = {
        device: _OLD_LEVELS.get(cell, cell)
        for device, cell in zip(header.devices, matrix)
        if device != cells[0]
    }
    tails = cells[count + 1 :]
    if by_tab:
        # The columns are one or two tabs wide: an empty cell before the last column is padding.
        if len(tails) > len(header.tails) and "GPU NUMA ID" in header.tails:
            tails = [*tails[:2], tails[-1]]
    else:
        tails = _aligned(line, header, tails)
    return _Row(levels, dict(zip(header.tails, tails)))


def _aligned(line: str, header: _Header, tails: list[str]) -> list[str]:
    """Put an empty cell in front where the first text behind the matrix stands too far right."""
    if len(tails) < len(header.tails) and tails and header.tails[0] == "CPU Affinity":
        expanded = line.expandtabs(8)
        offset = len(expanded) - len(expanded.split(maxsplit=len(header.devices) + 1)[-1])
        if offset >= header.offsets[0] + _HALF_COLUMN:
            return ["", *tails]
    return tails


def _topology(
    header: _Header, rows: Mapping[str, _Row], names: Sequence[str], legend: Mapping[str, str]
) -> Topology:
    warnings: list[str] = []
    affinities = {name: _list(rows[name].tails.get("CPU Affinity", ""), name) for name in names}
    numbers = {name: _number(rows[name].tails.get("NUMA Affinity", "")) for name in names}
    if not any(number is not None for number in numbers.values()):
        numbers = _counted(affinities, warnings)
    domains = _domains(affinities, numbers, warnings)
    memories = {_number(rows[name].tails.get("GPU NUMA ID", "")) for name in names}
    told = {one.number for one in domains}
    domains += [Domain(one, ()) for one in memories if one is not None and one not in told]
    domains.sort(key=lambda one: one.number)
    cores, note = cores_without_siblings(domains)
    if cores:
        warnings += [note, "CPUs and NUMA domains without a GPU are not told."]
    else:
        warnings.append("CPUs are not told: the affinity of every GPU is blank or N/A.")
    with_cpus = {one.number for one in domains if one.cpus}
    gpus = tuple(
        Gpu(
            index,
            name,
            domain=numbers[name] if numbers[name] in with_cpus else None,
            cpus=affinities[name],
        )
        for index, name in enumerate(names)
    )
    warnings += [
        f"The NUMA domain of {gpu.name} is not told." for gpu in gpus if gpu.domain is None
    ]
    cards = {one: legend.get(one, one) for one in header.devices if not one.startswith("GPU")}
    if len(set(cards.values())) < len(cards):
        raise InputError("the NIC legend gives two cards one name")
    found = tuple(
        (gpu.name, cards[column], rows[gpu.name].levels[column])
        for gpu in gpus
        for column in cards
        if rows[gpu.name].levels[column] in _LEVELS
    )
    nics = []
    for name in sorted(cards.values(), key=name_key):
        near = {
            gpu.domain for gpu in gpus for g, n, level in found
            if (g, n) == (gpu.name, name) and level in _WITHIN
        }  # fmt: skip
        nics.append(Nic(name, domain=near.pop() if len(near) == 1 else None))
    return Topology(
        source=_SOURCE,
        cores=cores,
        domains=tuple(domains),
        gpus=gpus,
        nics=tuple(nics),
        links=found,
        warnings=tuple(warnings),
        sockets_told=False,
    )


def _counted(
    affinities: Mapping[str, tuple[int, ...]], warnings: list[str]
) -> dict[str, Optional[int]]:  # noqa: UP045
    """Return the domain of each GPU where none is told: sets of CPUs, counted by the lowest."""
    sets = sorted({cpus for cpus in affinities.values() if cpus})
    if not sets or sum(map(len, sets)) > len(set().union(*sets)):  # they overlap
        return dict.fromkeys(affinities)
    warnings.append("NUMA domains have no numbers: they are counted by their lowest CPU.")
    return {name: sets.index(cpus) if cpus else None for name, cpus in affinities.items()}


def _domains(
    affinities: Mapping[str, tuple[int, ...]],
    numbers: Mapping[str, Optional[int]],  # noqa: UP045
    warnings: list[str],
) -> list[Domain]:
    """Return the domains that GPUs are near to; where no GPU's is told, one of all CPUs."""
    cpus_of: dict[int, set[int]] = {}
    taken: set[int] = set()
    for name, number in numbers.items():
        mine = set(affinities[name]) - cpus_of.get(number, set()) if number is not None else set()
        if number is None or not affinities[name]:
            continue
        if mine & taken:
            warnings.append(
                f"The CPUs {format_list(mine & taken)} are told for two domains: "
                "the first has them."
            )
        cpus_of.setdefault(number, set()).update(mine - taken)
        taken |= mine
    if not taken:
        everything = {cpu for cpus in affinities.values() for cpu in cpus}
        if everything:
            warnings.append("No NUMA domain is told: all CPUs count as domain 0.")
            cpus_of = {0: everything}
    return [Domain(number, tuple(sorted(cpus))) for number, cpus in sorted(cpus_of.items())]


def _list(text: str, name: str) -> tuple[int, ...]:
    if text.strip().upper() in {"", "N/A"}:
        return ()
    try:
        return parse_list(text)
    except ValueError as error:
        raise InputError(f"CPU Affinity of {name}: {error}") from None


def _number(text: str) -> Optional[int]:  # noqa: UP045
    """Return the one domain that a cell names; None for N/A, a blank, or several (`0-1`)."""
    return int(text) if re.fullmatch(r"[0-9]{1,4}", text.strip()) else None
