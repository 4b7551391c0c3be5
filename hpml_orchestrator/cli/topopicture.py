"""A node as a picture (SVG): sockets, domains, cores and devices as boxes, ranks as colours."""

from __future__ import annotations

import colorsys
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.cli.sheet import (
    BOLD,
    MIDDLE,
    SOFT,
    Sheet,
    document,
    text_width,
    wrapped,
)
from hpml_orchestrator.errors import counted
from hpml_orchestrator.topology.cpulist import format_list, parse_list
from hpml_orchestrator.topology.model import Gpu

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpml_orchestrator.placement.model import Plan
    from hpml_orchestrator.runs.bound import Place
    from hpml_orchestrator.topology import Core, Domain, Nic, Topology

__all__ = ["RankBox", "boxes_of_places", "boxes_of_plan", "names", "nearest_nics", "picture"]

# All measures in pixels.
_MARGIN, _GAP, _PAD = 20, 12, 10
_CORE_COLUMNS, _CORE_W, _CORE_H, _CORE_GAP = 16, 24, 15, 3
_DOMAIN_W = _CORE_COLUMNS * (_CORE_W + _CORE_GAP) - _CORE_GAP + 2 * _PAD
_DOMAIN_HEAD, _LINE = 36, 13
_SOCKET_HEAD = 24
_DEVICE_COLUMNS, _DEVICE_W, _DEVICE_H, _DEVICE_GAP = 4, 156, 44, 8
_WIRE = 34
_SPACE = 3
_CHIP_W, _CHIP_H, _CHIP_GAP, _CHIPS = 24, 13, 3, 4
_ENTRY_W, _ENTRY_H = 236, 50
_HEAD = 26
_WRONG_LINES = 2
_NARROW = 12
"""Parts of a core that are narrower than this have no room for a number."""

_TURN = 0.381966  # of the circle of colours: the next colour lies far from all before

_NEAR = ("PIX", "PXB", "PHB", "NODE")


def nearest_nics(topology: Topology, gpu: str) -> str:
    """Return the level and the names of the cards that are nearest to a GPU; SYS is not near."""
    for level in _NEAR:
        near = [nic for name, nic, away in topology.links if (name, away) == (gpu, level)]
        if near:
            return f"{level} {names(near)}"
    return ""


def names(words: Iterable[str]) -> str:
    """Return names as one text, with consecutive numbers as a range.

    >>> names(["GPU0", "GPU1", "GPU2", "mlx5_0"])
    'GPU0-2 mlx5_0'
    """
    runs: list[list[str]] = []  # a stem, its first number and its last
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


def picture(topology: Topology, *, title: str, ranks: Sequence[RankBox] = ()) -> str:
    """Return the text of an SVG file, on a white sheet so that it reads on any background.

    Args:
        topology: the node.
        title: stands above.
        ranks: the owners of its cores.
    """
    page = _Page(Sheet(), topology, _Ranks(ranks, topology))
    left = _MARGIN
    inner = left + _PAD
    y = _MARGIN + 34
    shown: set[int] = set()
    sockets = {core.socket if topology.sockets_told else None for core in topology.cores}
    for socket in sorted(sockets, key=lambda socket: socket or 0):
        top = y
        y += _SOCKET_HEAD
        for domain in topology.domains:
            cores = [
                core
                for core in topology.cores
                if core.domain == domain.number and socket in {core.socket, None}
            ]
            if cores:
                first = domain.number not in shown
                shown.add(domain.number)
                gpus, nics = _devices_of(topology, domain.number) if first else ([], [])
                y += page.domain(inner, y, domain, cores, gpus, nics) + _GAP
        label = "sockets unknown" if socket is None else f"socket {socket}"
        page.sheet.parts.insert(0, _socket(left, top, y - top, label))
        y += _GAP
    for domain in topology.domains:
        if domain.number not in shown:
            gpus, nics = _devices_of(topology, domain.number)
            y += page.domain(inner, y, domain, [], gpus, nics) + _GAP
    gpus, nics = _devices_of(topology, None)
    if gpus or nics:
        page.sheet.box("domain apart", inner, y, _DOMAIN_W, _DOMAIN_HEAD)
        words = "domain unknown: these may be near to any"
        page.sheet.text(inner + _PAD, y + 22, words, size=11, room=_DOMAIN_W - 2 * _PAD)
        y += max(_DOMAIN_HEAD, page.devices(inner, y, gpus, nics)) + _GAP
    width = inner + _DOMAIN_W + _PAD + _MARGIN
    if topology.gpus or topology.nics:
        width += _WIRE - _DEVICE_GAP + _device_columns(topology) * (_DEVICE_W + _DEVICE_GAP)
    if ranks:
        y += page.owners.legend(page.sheet, left, y, width - 2 * _MARGIN) + _GAP
    return document(page.sheet, width, y + _MARGIN - _GAP, title, margin=_MARGIN)


def _socket(x: int, y: int, height: int, label: str) -> str:
    box = Sheet()
    box.box("socket", x, y, _DOMAIN_W + 2 * _PAD, height)
    box.text(x + _PAD, y + 17, label, size=12, room=_DOMAIN_W, look=BOLD)
    return "\n".join(box.parts)


def _devices_of(topology: Topology, domain: int | None) -> tuple[list[Gpu], list[Nic]]:
    gpus = [gpu for gpu in topology.gpus if gpu.domain == domain]
    return gpus, [nic for nic in topology.nics if nic.domain == domain]


def _device_columns(topology: Topology) -> int:
    """Return how many devices stand side by side at most."""
    places = [domain.number for domain in topology.domains] + [None]
    groups = [group for place in places for group in _devices_of(topology, place)]
    return min(_DEVICE_COLUMNS, max(len(group) for group in groups))


@dataclass(frozen=True)
class _Page:
    """The sheet, the node on it, and the owners of its cores."""

    sheet: Sheet
    topology: Topology
    owners: _Ranks

    def domain(
        self,
        x: int,
        y: int,
        domain: Domain,
        cores: Sequence[Core],
        gpus: Sequence[Gpu],
        nics: Sequence[Nic],
    ) -> int:
        """Draw a domain with its cores and devices; return how high that is."""
        rows = -(-len(cores) // _CORE_COLUMNS)
        head = _DOMAIN_HEAD + (_LINE if domain.distances and cores else 0)
        height = head + rows * (_CORE_H + _CORE_GAP) + (_PAD if rows else 0)
        whole = max(height, self.devices(x, y, gpus, nics))
        self.sheet.box("domain" if cores else "domain apart", x, y, _DOMAIN_W, whole)
        room = _DOMAIN_W - 2 * _PAD
        self.sheet.text(x + _PAD, y + 15, _headline(domain, cores), size=11, room=room)
        cpus = format_list(cpu for core in cores for cpu in core.cpus)
        away = " ".join(str(distance) for _, distance in domain.distances)
        others = format_list(other for other, _ in domain.distances)
        second = [f"CPUs {cpus}"] if cores else []
        second += [f"distances to {others}: {away}"] if away else []
        for line, words in enumerate(second):
            self.sheet.text(x + _PAD, y + 29 + line * _LINE, words, size=9, room=room, look=SOFT)
        for place, core in enumerate(cores):
            row, column = divmod(place, _CORE_COLUMNS)
            left = x + _PAD + column * (_CORE_W + _CORE_GAP)
            top = y + head + row * (_CORE_H + _CORE_GAP)
            self.owners.core(self.sheet, core, left, top, _CORE_W, _CORE_H)
        return whole

    def devices(self, x: int, y: int, gpus: Sequence[Gpu], nics: Sequence[Nic]) -> int:
        """Draw the devices of a domain at its right, GPUs above cards; return how high that is."""
        start = x + _DOMAIN_W + _PAD + _WIRE
        trunk = start - _WIRE // 2
        rows = 0
        groups: tuple[Sequence[Gpu | Nic], ...] = (gpus, nics)
        for group in groups:
            for place, device in enumerate(group):
                row, column = divmod(place, _DEVICE_COLUMNS)
                left = start + column * (_DEVICE_W + _DEVICE_GAP)
                top = y + (rows + row) * (_DEVICE_H + _DEVICE_GAP)
                self._device(left, top, device)
                if column == 0:
                    self.sheet.wire((trunk, top + _DEVICE_H // 2), (start, top + _DEVICE_H // 2))
            rows += -(-len(group) // _DEVICE_COLUMNS)
        if rows:
            last = y + (rows - 1) * (_DEVICE_H + _DEVICE_GAP) + _DEVICE_H // 2
            self.sheet.wire(
                (x + _DOMAIN_W, y + _DEVICE_H // 2), (trunk, y + _DEVICE_H // 2), (trunk, last)
            )
        return rows * (_DEVICE_H + _DEVICE_GAP) - _DEVICE_GAP if rows else 0

    def _device(self, x: int, y: int, device: Gpu | Nic) -> None:
        if isinstance(device, Gpu):
            kind, near = "gpu", nearest_nics(self.topology, device.name)
            ranks = self.owners.of_gpu(device)
        else:
            kind, near, ranks = "nic", "", self.owners.of_nic(device)
        hover = f"{device.name} {device.address} {near}".strip()
        self.sheet.box(kind, x, y, _DEVICE_W, _DEVICE_H, hover)
        room = _DEVICE_W - _PAD
        left = room - math.ceil(text_width(device.name, 11, BOLD)) - _SPACE
        taken = self.owners.chips(self.sheet, ranks, x + _DEVICE_W - 4, y + 4, room=left)
        self.sheet.text(x + 6, y + 14, device.name, size=11, room=room - taken, look=BOLD)
        self.sheet.text(x + 6, y + 26, device.address, size=9, room=room, look=SOFT)
        if near:
            self.sheet.text(x + 6, y + 38, near, size=9, room=room, look=SOFT)


def _headline(domain: Domain, cores: Sequence[Core]) -> str:
    words = [f"domain {domain.number}"]
    if cores:
        threads = {len(core.cpus) for core in cores}
        each = f" of {threads.pop()} threads" if len(threads) == 1 and threads != {1} else ""
        words.append(f"{counted(len(cores), 'core')}{each}")
        if len({cpu for core in cores for cpu in core.cpus}) < len(domain.cpus):
            words.append("in part")
    else:
        words.append("no CPUs")
    if domain.memory_bytes:
        words.append(f"{domain.memory_bytes / 1024**3:.0f} GiB")
    return " · ".join(words)


@dataclass(frozen=True)
class RankBox:
    """One rank as it is drawn.

    Attributes:
        label: its number.
        gpu: name or PCI address of its GPU in the topology; empty without one.
        cpus: CPUs that are its own.
        nic: name of its network card; empty without one.
        lines: about it, for the list of ranks.
        wrong: what is wrong with it; empty when it runs as planned.
    """

    label: str
    gpu: str = ""
    cpus: tuple[int, ...] = ()
    nic: str = ""
    lines: tuple[str, ...] = ()
    wrong: str = ""


def boxes_of_plan(plan: Plan) -> list[RankBox]:
    """Return the ranks of a plan; those that it does not bind have no CPUs of their own."""
    return [
        RankBox(
            str(rank.local_rank),
            rank.gpu or "",
            () if plan.policy == "none" else rank.cpus,
            rank.nic or "",
            _lines(rank.cpu_list(), len(rank.cores), rank.numa, rank.distance, rank.threads),
        )
        for rank in plan.ranks
    ]


def boxes_of_places(places: Sequence[Place]) -> list[RankBox]:
    """Return ranks as they were seen; CPUs that all of them share are nobody's own."""
    shared = len(places) > 1 and len({place.cpus for place in places}) == 1
    return [
        RankBox(
            str(place.rank),
            place.gpu or "",
            () if shared else parse_list(place.cpus),
            place.nic,
            _lines(place.cpus, place.cores, place.numa, place.distance, place.threads),
            "; ".join(place.wrong),
        )
        for place in places
    ]


def _lines(
    cpus: str, cores: int | None, numa: Sequence[int], distance: int | None, threads: int | None
) -> tuple[str, ...]:
    parts = [] if cores is None else [counted(cores, "core")]
    parts += [f"NUMA {format_list(numa)}"] if numa else []
    parts += [] if distance is None else [f"distance {distance}"]
    openmp = "" if threads is None else counted(threads, "OpenMP thread")
    return (f"CPUs {cpus or 'unknown'}", ", ".join(parts), openmp)


class _Ranks:
    """The ranks of a node, ready to be drawn.

    Args:
        boxes: the ranks, in order.
        topology: the node.
    """

    def __init__(self, boxes: Sequence[RankBox], topology: Topology) -> None:
        self.boxes = list(boxes)
        self.colours = [_colour(place) for place in range(len(self.boxes))]
        self._of_cpu: dict[int, list[int]] = {}
        self._gpus: list[int | None] = []
        names: dict[str, int] = {}
        for gpu in reversed(topology.gpus):
            names.update(dict.fromkeys((gpu.name, gpu.address, gpu.uuid), gpu.index))
        names.pop("", None)
        for place, box in enumerate(self.boxes):
            self._gpus.append(names.get(box.gpu))
            for cpu in box.cpus:
                self._of_cpu.setdefault(cpu, []).append(place)
        self._names = {gpu.index: gpu.name for gpu in topology.gpus}

    def core(self, sheet: Sheet, core: Core, x: int, y: int, width: int, height: int) -> None:
        """Draw a core in the colour of its rank; in parts where its CPUs are of different ranks."""
        hover = f"core {core.number}: CPUs {format_list(core.cpus)}"
        if not self._of_cpu:
            sheet.box("core", x, y, width, height, hover)
            middle = x + width // 2
            sheet.text(middle, y + 11, str(core.cpus[0]), size=8, room=width, look=MIDDLE)
            return
        owners = [tuple(self._of_cpu.get(cpu, ())) for cpu in core.cpus]
        every = sorted({place for places in owners for place in places})
        numbers = ",".join(self.boxes[place].label for place in every)
        hover += f": rank {numbers}" if every else ": no rank's own"
        sheet.box("core free", x, y, width, height, hover)
        parts = owners if len(set(owners)) > 1 else owners[:1]
        wide = width // len(parts)
        for part, places in enumerate(parts):
            if not places:
                continue
            look = ' rx="4"' if len(parts) == 1 else ""
            kind = "rank several" if len(places) > 1 else "rank"
            look += "" if len(places) > 1 else f' fill="{self.colours[places[0]]}"'
            sheet.box(kind, x + part * wide, y, wide, height, hover, look)
            words = f"x{len(places)}" if len(places) > 1 else self.boxes[places[0]].label
            if wide >= _NARROW:
                middle = x + part * wide + wide // 2
                sheet.text(middle, y + 11, words, size=8, room=wide, look=MIDDLE + BOLD)

    def of_gpu(self, gpu: Gpu) -> list[int]:
        """Return the places of the ranks that have a GPU."""
        return [place for place, index in enumerate(self._gpus) if index == gpu.index]

    def of_nic(self, nic: Nic) -> list[int]:
        """Return the places of the ranks that communicate through a network card."""
        return [place for place, box in enumerate(self.boxes) if box.nic == nic.name]

    def chips(self, sheet: Sheet, places: Sequence[int], right: int, y: int, *, room: int) -> int:
        """Draw the numbers of ranks in their colours, up to a right edge; return how wide it is.

        Those that find no room become one that counts them: two stand there however small it is.
        """
        most = min(_CHIPS, max(2, (room + _CHIP_GAP) // (_CHIP_W + _CHIP_GAP)))
        shown = list(places[: most if len(places) <= most else most - 1])
        count = len(shown) + (len(shown) < len(places))
        left = right - count * (_CHIP_W + _CHIP_GAP) + _CHIP_GAP
        for number, place in enumerate(shown):
            self._chip(sheet, place, left + number * (_CHIP_W + _CHIP_GAP), y)
        if count > len(shown):
            middle = right - _CHIP_W // 2
            sheet.text(
                middle, y + 10, f"+{len(places) - len(shown)}", size=8, room=_CHIP_W, look=MIDDLE
            )
        return right - left if count else 0

    def _chip(self, sheet: Sheet, place: int, x: int, y: int) -> None:
        box = self.boxes[place]
        look = f' rx="3" fill="{self.colours[place]}"'
        kind = "rank bad" if box.wrong else "rank"
        sheet.box(kind, x, y, _CHIP_W, _CHIP_H, f"rank {box.label} {box.wrong}".strip(), look)
        middle = x + _CHIP_W // 2
        sheet.text(middle, y + 10, box.label, size=8, room=_CHIP_W, look=MIDDLE + BOLD)

    def legend(self, sheet: Sheet, x: int, y: int, width: int) -> int:
        """Draw the list of ranks; return how high it is."""
        if not self.boxes:
            return 0
        columns = max(1, min(len(self.boxes), (width + _GAP) // (_ENTRY_W + _GAP)))
        wide = (width + _GAP) // columns - _GAP
        note = "" if self._of_cpu else ": not bound"
        if any(len(places) > 1 for places in self._of_cpu.values()):
            note = " (several ranks share grey cores)"
        sheet.text(x, y + 14, f"ranks{note}", size=12, room=width, look=BOLD)
        high = _ENTRY_H + _WRONG_LINES * _LINE * any(box.wrong for box in self.boxes)
        for place, box in enumerate(self.boxes):
            row, column = divmod(place, columns)
            left, top = x + column * (wide + _GAP), y + _HEAD + row * (high + _GAP)
            self._chip(sheet, place, left, top)
            inner, room = left + _CHIP_W + 6, wide - _CHIP_W - 6
            index = self._gpus[place]
            name = box.gpu if index is None else self._names[index]
            title = f"rank {box.label}: {name or 'no GPU'}{f', {box.nic}' if box.nic else ''}"
            sheet.text(inner, top + 10, title, size=10, room=room, look=BOLD)
            lines = [(line, SOFT) for line in box.lines if line]
            wrong = f"WRONG: {box.wrong}" if box.wrong else ""
            lines += [(line, ' class="wrong"') for line in wrapped(wrong, 9, room, _WRONG_LINES)]
            for number, (words, look) in enumerate(lines, 1):
                sheet.text(inner, top + 10 + number * _LINE, words, size=9, room=room, look=look)
        rows = -(-len(self.boxes) // columns)
        return _HEAD + rows * (high + _GAP) - _GAP


def _colour(place: int) -> str:
    """Return a light colour that dark letters can be read on, unlike those of its neighbours."""
    red, green, blue = colorsys.hls_to_rgb((0.58 + place * _TURN) % 1, (0.74, 0.83)[place % 2], 0.7)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"
