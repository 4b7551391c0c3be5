"""A node's topology as a picture: sockets, domains and cores as boxes, devices beside (SVG)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.cli.rankpicture import Ranks
from hpml_orchestrator.cli.sheet import BOLD, SOFT, Sheet, document, text_width
from hpml_orchestrator.errors import counted
from hpml_orchestrator.topology.cpulist import format_list
from hpml_orchestrator.topology.model import Gpu

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpml_orchestrator.cli.rankpicture import RankBox
    from hpml_orchestrator.topology import Core, Domain, Nic, Topology

__all__ = ["names", "nearest_nics", "picture"]

# All measures in pixels.
_MARGIN, _GAP, _PAD = 20, 12, 10
_CORE_COLUMNS, _CORE_W, _CORE_H, _CORE_GAP = 16, 24, 15, 3
_DOMAIN_W = _CORE_COLUMNS * (_CORE_W + _CORE_GAP) - _CORE_GAP + 2 * _PAD
_DOMAIN_HEAD, _LINE = 36, 13
_SOCKET_HEAD = 24
_DEVICE_COLUMNS, _DEVICE_W, _DEVICE_H, _DEVICE_GAP = 4, 156, 44, 8
_WIRE = 34
_SPACE = 3

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
    page = _Page(Sheet(), topology, Ranks(ranks, topology))
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
    owners: Ranks

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
