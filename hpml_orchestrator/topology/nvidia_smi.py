"""What `nvidia-smi topo -m` prints, as a `Topology`: GPUs and cards, and the CPUs near to GPUs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.topology.build import cores_without_siblings, name_key
from hpml_orchestrator.topology.cpulist import parse_list
from hpml_orchestrator.topology.model import Domain, Gpu, Nic, Topology
from hpml_orchestrator.topology.smi_domains import domains_of_affinities

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["looks_like_nvidia_smi", "read_nvidia_smi"]

_SOURCE = "nvidia-smi topo -m"
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_TAILS = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
_DEVICE = re.compile(r"(?:GPU|NIC|mlx|hfi|qib|bnxt|irdma|efa|rdmap|roce|ibp)\w*")
_ANY_CARD = re.compile(r"[A-Za-z][\w.-]*")  # a card's driver names it: ionic_0, erdma_0, ibs785
_LEGEND = re.compile(r"\s*(NIC[0-9]+):\s*(\S+)\s*")
_CELL = re.compile(r"X|SYS|NODE|PHB|PXB|PIX|PSB|C2C|N/?A|OK|SOC|(?:NV|XGMI)[0-9]*")
_CELLS = re.compile(rf"(?:{_CELL.pattern}){{2,}}")
_LEVELS = frozenset({"PIX", "PXB", "PHB", "NODE", "SYS"})
_WITHIN = _LEVELS - {"SYS"}
_DOMAINS_MAX = 10_000
_OLD_LEVELS = {"SOC": "SYS"}  # so in drivers before 387
_COVERED = re.compile(r"([A-Z]{1,3})([0-9]+-[0-9,-]+)")
_CUT = re.compile(r"[0-9]+(?:,[0-9]+){5}")  # so on 2-socket servers that number in turns
_HALF_COLUMN = 4
_BLANK_COLUMN = 13  # a short cell padded to the 16 columns of its header leaves 12 blanks


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
    named = _ANY_CARD if tails else _DEVICE  # prose may begin with GPU0, too
    if len(set(devices)) < len(devices) or not all(named.fullmatch(one) for one in devices):
        return None
    return _Header(devices, tails, tuple(expanded.index(name) for name in tails))


def _row(line: str, header: _Header, number: int) -> _Row:
    count = len(header.devices)
    cells = [cell.strip() for cell in line.split("\t")]
    by_tab = len(cells) > count
    if not by_tab:
        cells = [cell for word in line.split() for cell in _unglued(word)]
    cells[count : count + 1] = _uncovered(cells[count]) if len(cells) > count else []
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
        # The columns are one or two tabs wide: where all are filled, empty cells are padding;
        # else one before the last column is.
        filled = [cell for cell in tails if cell]
        if len(filled) == len(header.tails):
            tails = filled
        elif len(tails) > len(header.tails) and "GPU NUMA ID" in header.tails:
            tails = [*tails[:2], tails[-1]]
    else:
        tails = _aligned(line, header, tails)
    return _Row(levels, dict(zip(header.tails, tails)))


def _unglued(word: str) -> list[str]:
    """Return the cells of a word; terminals that wrap long rows glue two of them (`NODENODE`)."""
    return _CELL.findall(word) if _CELLS.fullmatch(word) else [word]


def _uncovered(cell: str) -> list[str]:
    """Return the last level of a row and the CPUs, where these have been written over its end.

    Some drivers do so to rows with many columns: `PH0-115` is `PHB` and `0-115`.
    """
    match = _COVERED.fullmatch(cell)
    if match is None or _CELL.fullmatch(cell):
        return [cell]
    levels = [one for one in _LEVELS if one.startswith(match[1])]
    return [levels[0] if len(levels) == 1 else "N/A", match[2]] if levels else [cell]


def _aligned(line: str, header: _Header, tails: list[str]) -> list[str]:
    """Put an empty cell where there are too few behind the matrix, and blanks in one's place.

    That is in front where the first text stands too far right, or behind the CPUs where the next
    text stands too far from them.
    """
    if len(tails) >= len(header.tails) or not tails or header.tails[0] != "CPU Affinity":
        return tails
    expanded = line.expandtabs(8)
    behind = expanded.split(maxsplit=len(header.devices) + 1)[-1]
    if len(expanded) - len(behind) >= header.offsets[0] + _HALF_COLUMN:
        return ["", *tails]
    gap = re.match(r"\S+(\s+)", behind)
    if gap and len(gap[1]) >= _BLANK_COLUMN:
        return [tails[0], "", *tails[1:]]
    return tails


def _topology(
    header: _Header, rows: Mapping[str, _Row], names: Sequence[str], legend: Mapping[str, str]
) -> Topology:
    warnings: list[str] = []
    affinities = {name: _list(rows[name].tails.get("CPU Affinity", ""), name) for name in names}
    cut = [name for name in names if _CUT.fullmatch(rows[name].tails.get("CPU Affinity", ""))]
    if cut:
        warnings.append(
            f"The CPU affinity of {', '.join(cut)} has six numbers: nvidia-smi cuts longer lists "
            "off there, so that CPUs may be missing; `lstopo` tells them all."
        )
    cells = {name: rows[name].tails.get("NUMA Affinity", "") for name in names}
    named = {name: _list_of(cell) for name, cell in cells.items()}
    memories = {one for name in names for one in _list_of(rows[name].tails.get("GPU NUMA ID", ""))}
    numbers, domains = domains_of_affinities(affinities, named, warnings, memories=memories)
    domains += [Domain(one, ()) for one in memories - {domain.number for domain in domains}]
    domains.sort(key=lambda one: one.number)
    cores, note = cores_without_siblings(domains)
    if cores:
        warnings += [note, "CPUs and NUMA domains without a GPU are not told."]
    else:
        warnings.append("CPUs are not told: the affinity of every GPU is blank or N/A.")
    gpus = tuple(
        Gpu(index, name, domain=numbers[name], cpus=affinities[name])
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


def _list(text: str, name: str) -> tuple[int, ...]:
    if text.strip().upper() in {"", "N/A"}:
        return ()
    try:
        return parse_list(text)
    except ValueError as error:
        raise InputError(f"CPU Affinity of {name}: {error}") from None


def _list_of(text: str) -> tuple[int, ...]:
    """Return the domains that a cell names, in order; none for N/A, a blank and what is no list."""
    try:
        return tuple(one for one in parse_list(text) if one < _DOMAINS_MAX)
    except ValueError:
        return ()
