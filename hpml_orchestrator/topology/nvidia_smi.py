"""What nvidia-smi prints: `-L` as text, and `topo -m` as a `Topology`.

The latter has GPUs, network cards, and the CPUs near GPUs.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.topology.build import cores_without_siblings, free_number, name_key
from hpml_orchestrator.topology.cpulist import format_list, parse_list
from hpml_orchestrator.topology.model import Domain, Gpu, Nic, Topology

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SOURCE = "nvidia-smi topo -m"
_LISTING_SECONDS = 20
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_CPUS, _DOMAINS, _MEMORIES = "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"
_TAILS = (_CPUS, _DOMAINS, _MEMORIES)
_DEVICE = re.compile(r"(?:GPU|NIC|mlx|hfi|qib|bnxt|irdma|efa|rdmap|roce|ibp)\w*")
_ANY_CARD = re.compile(r"[A-Za-z][\w.-]*")  # a card's driver names it: ionic_0, erdma_0, ibs785
_LEGEND = re.compile(r"\s*(NIC[0-9]+):\s*(\S+)\s*")
_CELL = re.compile(r"X|SYS|NODE|PHB|PXB|PIX|PSB|C2C|N/?A|OK|(?:NV|XGMI)[0-9]*")
_LEVELS = frozenset({"PIX", "PXB", "PHB", "NODE", "SYS"})
_CUT = re.compile(r"[0-9]+(?:,[0-9]+){5}")  # on 2-socket servers that number CPUs in turns


@dataclass(frozen=True)
class _Header:
    """The devices of the matrix, and the columns behind it."""

    devices: tuple[str, ...]
    tails: tuple[str, ...]


@dataclass(frozen=True)
class _Row:
    """The row of a GPU: its level to each device, and the columns behind as text."""

    levels: dict[str, str]
    tails: dict[str, str]

    def numbers(self, column: str, *, strict: bool = False) -> tuple[int, ...]:
        """Return the list in a column; none for N/A, a blank and, if not strict, anything else."""
        text = self.tails.get(column, "").strip()
        try:
            return () if text.upper() == "N/A" else parse_list(text)
        except ValueError as error:
            if strict:
                raise InputError(f"{column}: {error}") from None
            return ()


def list_gpus() -> str:
    """Return the output of `nvidia-smi -L`; empty if it fails."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_LISTING_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def looks_like_nvidia_smi(text: str) -> bool:
    """Return whether a text has the matrix's header."""
    return any(_header(line) for line in _COLOURS.sub("", text[:1_000_000]).splitlines())


def read_nvidia_smi(text: str) -> Topology:
    """Return the node; what the matrix does not have (memory, sockets) is missing there too.

    Raises:
        InputError: the text is not from nvidia-smi, or rows are missing.
    """
    header: _Header | None = None
    rows: dict[str, _Row] = {}
    legend: dict[str, str] = {}
    for number, line in enumerate(_COLOURS.sub("", text).splitlines(), 1):
        named = _LEGEND.fullmatch(line)
        name = (line.split() or [""])[0]
        if header is None:
            header = _header(line)
        elif named:
            legend[named[1]] = named[2]
        elif name in header.devices:
            if name in rows:
                raise InputError(f"line {number}: a second row for {name}")
            rows[name] = _row(line, header, number)
    if header is None:
        raise InputError(
            "is not the output of nvidia-smi topo -m: the line GPU0, GPU1, … is missing"
        )
    gpus = [name for name in header.devices if name.startswith("GPU")]
    lost = [name for name in gpus if name not in rows]
    if lost:
        raise InputError(
            f"is cut off: rows are missing for {', '.join(lost)}",
            hint="save it again: nvidia-smi topo -m > topo.txt",
        )
    cards = {name: legend.get(name, name) for name in header.devices if name not in gpus}
    if len(set(cards.values())) < len(cards):
        raise InputError("the NIC legend has one name for two cards")
    return _topology({name: rows[name] for name in gpus}, cards)


def _header(line: str) -> _Header | None:
    """Parse a line as a header; None if it is not one."""
    expanded = line.expandtabs(8)
    words = expanded.split()
    if not words or not re.fullmatch(r"GPU[0-9]+", words[0]) or "X" in words:
        return None
    tails = tuple(name for name in _TAILS if name in expanded)
    start = min((expanded.index(name) for name in tails), default=len(expanded))
    devices = tuple(expanded[:start].split())
    pattern = _ANY_CARD if tails else _DEVICE  # prose may begin with GPU0, too
    if len(set(devices)) < len(devices) or not all(pattern.fullmatch(name) for name in devices):
        return None
    return _Header(devices, tails)


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
    levels = dict(zip(header.devices, matrix))
    tails = cells[count + 1 :]
    if len([cell for cell in tails if cell]) == len(header.tails):
        # The columns are one or two tabs wide: where all are filled, empty cells are padding;
        tails = [cell for cell in tails if cell]
    elif not by_tab:
        tails = []  # without tabs it is unknown which column is blank
    elif len(tails) > len(header.tails) and _MEMORIES in header.tails:
        tails = [*tails[:2], tails[-1]]  # else one before the last column is.
    return _Row(levels, dict(zip(header.tails, tails)))


def _topology(rows: Mapping[str, _Row], cards: Mapping[str, str]) -> Topology:
    """Return the topology of GPUs and their rows, and of cards' columns and their names."""
    warnings: list[str] = []
    cpus = {name: row.numbers(_CPUS, strict=True) for name, row in rows.items()}
    cut = [name for name, row in rows.items() if _CUT.fullmatch(row.tails.get(_CPUS, ""))]
    if cut:
        warnings.append(
            f"The CPU affinity of {', '.join(cut)} has six numbers: nvidia-smi cuts longer lists "
            "off there, so CPUs may be missing; `lstopo` has them all."
        )
    memories = {number for row in rows.values() for number in row.numbers(_MEMORIES)}
    homes, domains = _domains(rows, cpus, memories, warnings)
    cores, note = cores_without_siblings(domains)
    if cores:
        warnings += [note, "CPUs and NUMA domains without a GPU are unknown."]
    else:
        warnings.append("CPUs are unknown: the affinity of every GPU is blank or N/A.")
    gpus = tuple(
        Gpu(index, name, domain=homes.get(name), cpus=cpus[name]) for index, name in enumerate(rows)
    )
    warnings += [f"The NUMA domain of {gpu.name} is unknown." for gpu in gpus if gpu.domain is None]
    links = tuple(
        (name, card, row.levels[column])
        for name, row in rows.items()
        for column, card in cards.items()
        if row.levels[column] in _LEVELS
    )
    nics = []
    for card in sorted(cards.values(), key=name_key):
        near = {homes.get(gpu) for gpu, nic, level in links if nic == card and level != "SYS"}
        nics.append(Nic(card, domain=near.pop() if len(near) == 1 else None))
    return Topology(
        source=_SOURCE,
        cores=cores,
        domains=tuple(domains),
        gpus=gpus,
        nics=tuple(nics),
        links=links,
        warnings=tuple(warnings),
        sockets_told=False,
    )


def _domains(
    rows: Mapping[str, _Row],
    cpus: Mapping[str, Sequence[int]],
    memories: set[int],
    warnings: list[str],
) -> tuple[dict[str, int], list[Domain]]:
    """Return the domain of each GPU that has a known one, and all domains by number.

    A GPU names one domain, none (N/A), or several: that of its CPUs with those of GPU memory
    (`0,2-17` on a GB200), or all domains of a virtual machine (`0-1`). If it does not name one
    number, its CPUs decide: they belong to a named domain, or else form a new one.
    """
    named = {name: row.numbers(_DOMAINS) for name, row in rows.items()}
    homes: dict[str, int] = {}
    home_of: dict[int, int] = {}  # CPU -> domain
    inferred = []
    for name in sorted(rows, key=lambda name: (len(named[name]) != 1, cpus[name])):
        known = {home_of.get(cpu) for cpu in cpus[name]}
        used = {*home_of.values(), *memories}
        if len(named[name]) == 1:
            homes[name] = named[name][0]
        elif known == {None}:  # CPUs of no domain yet
            unused = [number for number in named[name] if number not in used]
            homes[name] = unused[0] if unused else free_number(used)
            inferred.append(name)
        elif len(known) == 1:
            homes[name] = known.pop() or 0
        for cpu in cpus[name] if name in homes else ():
            home_of.setdefault(cpu, homes[name])
    if inferred:
        warnings.append(f"The NUMA domain of {', '.join(inferred)} is inferred from its CPUs.")
    strays = {cpu for near in cpus.values() for cpu in near} - set(home_of)
    if strays:
        number = free_number({*home_of.values(), *memories})
        warnings.append(
            f"The NUMA domain of the CPUs {format_list(strays)} is unknown: they count as "
            f"domain {number}."
        )
        home_of.update(dict.fromkeys(strays, number))
    cpus_of: dict[int, list[int]] = {number: [] for number in {*homes.values(), *memories}}
    for cpu in sorted(home_of):
        cpus_of.setdefault(home_of[cpu], []).append(cpu)
    homes = {name: home for name, home in homes.items() if cpus_of[home] or home not in memories}
    unknown = sorted({home for home in homes.values() if not cpus_of[home]})
    if unknown and home_of:
        warnings += [f"The CPUs of domain {number} are unknown." for number in unknown]
    return homes, [Domain(number, tuple(cpus_of[number])) for number in sorted(cpus_of)]
