"""A node's topology as a picture: sockets, domains and cores as boxes, devices beside (SVG)."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpml_orchestrator.cli.topo import nearest_nics
from hpml_orchestrator.topology import format_list

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpml_orchestrator.topology import Core, Domain, Gpu, Nic, Topology

__all__ = ["picture"]

# All measures in pixels.
_MARGIN, _GAP, _PAD = 20, 12, 10
_CORE_COLUMNS, _CORE_W, _CORE_H, _CORE_GAP = 16, 24, 15, 3
_DOMAIN_W = _CORE_COLUMNS * (_CORE_W + _CORE_GAP) - _CORE_GAP + 2 * _PAD
_DOMAIN_HEAD, _LINE = 36, 13
_SOCKET_HEAD = 24
_DEVICE_COLUMNS, _DEVICE_W, _DEVICE_H, _DEVICE_GAP = 4, 156, 44, 8
_WIRE = 34
_CHARACTER, _CHARACTER_BOLD = 0.63, 0.73
"""Width of a character in parts of the font's size: generous, for fonts differ."""

_STYLE = """
text{font-family:'DejaVu Sans',Verdana,Arial,sans-serif;fill:#1f2933}
.page{fill:#ffffff;stroke:#cbd2d9}
.socket{fill:#f3f5f7;stroke:#7b8794}
.domain{fill:#ffffff;stroke:#3e6b99}
.apart{stroke-dasharray:5 3}
.core{fill:#dbe9f6;stroke:#8fb3d4}
.gpu{fill:#d9f2e1;stroke:#2f855a}
.nic{fill:#fdebd0;stroke:#b9770e}
.wire{stroke:#7b8794;fill:none}
.soft{fill:#52606d}
"""


@dataclass
class _Sheet:
    """Shapes drawn so far."""

    parts: list[str] = field(default_factory=list)

    def box(self, kind: str, x: int, y: int, width: int, height: int, hover: str = "") -> None:
        """Draw a box, with a text for those who point at it."""
        shape = f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="4"'
        told = f"><title>{html.escape(_drawable(hover))}</title></rect>" if hover else "/>"
        self.parts.append(shape + told)

    def text(self, x: int, y: int, words: str, *, size: int, room: int, look: str = "") -> None:
        """Draw a line of text, cut to its room."""
        wide = _CHARACTER_BOLD if "bold" in look else _CHARACTER
        most = max(1, int(room / (size * wide)))
        shown = words if len(words) <= most else f"{words[: most - 1]}…"
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}"{look}>{html.escape(_drawable(shown))}</text>'
        )

    def wire(self, *points: tuple[int, int]) -> None:
        """Draw a line through points."""
        path = " ".join(f"{x},{y}" for x, y in points)
        self.parts.append(f'<polyline class="wire" points="{path}"/>')


def picture(topology: Topology, *, title: str) -> str:
    """Return the text of an SVG file, on a white sheet so that it reads on any background.

    Args:
        topology: the node.
        title: what stands above.
    """
    sheet = _Sheet()
    left = _MARGIN
    inner = left + _PAD
    y = _MARGIN + 34
    shown: set[int] = set()
    sockets = {core.socket if topology.sockets_told else None for core in topology.cores}
    for socket in sorted(sockets, key=lambda one: one or 0):
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
                y += _domain(sheet, topology, inner, y, domain, cores, gpus, nics) + _GAP
        label = "sockets are not told" if socket is None else f"socket {socket}"
        sheet.parts.insert(0, _socket(left, top, y - top, label))
        y += _GAP
    for domain in topology.domains:
        if domain.number not in shown:
            y += _domain(
                sheet, topology, inner, y, domain, [], *_devices_of(topology, domain.number)
            )
            y += _GAP
    gpus, nics = _devices_of(topology, None)
    if gpus or nics:
        sheet.box("domain apart", inner, y, _DOMAIN_W, _DOMAIN_HEAD)
        words = "domain not told: these may be near to any"
        sheet.text(inner + _PAD, y + 22, words, size=11, room=_DOMAIN_W - 2 * _PAD)
        y += max(_DOMAIN_HEAD, _devices(sheet, topology, inner, y, gpus, nics)) + _GAP
    width = inner + _DOMAIN_W + _PAD + _MARGIN
    if topology.gpus or topology.nics:
        width += _WIRE - _DEVICE_GAP + _device_columns(topology) * (_DEVICE_W + _DEVICE_GAP)
    return _document(sheet, width, y + _MARGIN - _GAP, title)


def _document(sheet: _Sheet, width: int, height: int, title: str) -> str:
    head = _Sheet()
    head.box("page", 0, 0, width, height)
    head.text(
        _MARGIN, _MARGIN + 14, title, size=16, room=width - 2 * _MARGIN, look=' font-weight="bold"'
    )
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">'
    )
    lines = [
        opening,
        f"<title>{html.escape(_drawable(title))}</title>",
        f"<style>{_STYLE}</style>",
        *head.parts,
        *sheet.parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _drawable(words: str) -> str:
    """Return text without the control characters that XML has no place for."""
    return "".join(char if char.isprintable() else "\ufffd" for char in words)


def _socket(x: int, y: int, height: int, label: str) -> str:
    box = _Sheet()
    box.box("socket", x, y, _DOMAIN_W + 2 * _PAD, height)
    box.text(x + _PAD, y + 17, label, size=12, room=_DOMAIN_W, look=' font-weight="bold"')
    return "\n".join(box.parts)


def _devices_of(topology: Topology, domain: int | None) -> tuple[list[Gpu], list[Nic]]:
    gpus = [one for one in topology.gpus if one.domain == domain]
    return gpus, [one for one in topology.nics if one.domain == domain]


def _device_columns(topology: Topology) -> int:
    """Return how many devices stand side by side at most."""
    places = [one.number for one in topology.domains] + [None]
    groups = [group for place in places for group in _devices_of(topology, place)]
    return min(_DEVICE_COLUMNS, max(len(group) for group in groups))


def _domain(
    sheet: _Sheet,
    topology: Topology,
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
    whole = max(height, _devices(sheet, topology, x, y, gpus, nics))
    sheet.box("domain" if cores else "domain apart", x, y, _DOMAIN_W, whole)
    room = _DOMAIN_W - 2 * _PAD
    sheet.text(x + _PAD, y + 15, _headline(domain, cores), size=11, room=room)
    soft = ' class="soft"'
    cpus = format_list(cpu for core in cores for cpu in core.cpus)
    away = " ".join(str(distance) for _, distance in domain.distances)
    others = format_list(other for other, _ in domain.distances)
    second = [f"CPUs {cpus}"] if cores else []
    second += [f"distances to {others}: {away}"] if away else []
    for line, words in enumerate(second):
        sheet.text(x + _PAD, y + 29 + line * _LINE, words, size=9, room=room, look=soft)
    for place, core in enumerate(cores):
        row, column = divmod(place, _CORE_COLUMNS)
        left = x + _PAD + column * (_CORE_W + _CORE_GAP)
        top = y + head + row * (_CORE_H + _CORE_GAP)
        hover = f"core {core.number}: CPUs {format_list(core.cpus)}"
        sheet.box("core", left, top, _CORE_W, _CORE_H, hover)
        middle = ' text-anchor="middle"'
        sheet.text(
            left + _CORE_W // 2, top + 11, str(core.cpus[0]), size=8, room=_CORE_W, look=middle
        )
    return whole


def _headline(domain: Domain, cores: Sequence[Core]) -> str:
    words = [f"domain {domain.number}"]
    if cores:
        threads = {len(core.cpus) for core in cores}
        each = f" of {threads.pop()} threads" if len(threads) == 1 and threads != {1} else ""
        words.append(f"{len(cores)} core{'' if len(cores) == 1 else 's'}{each}")
        if len({cpu for core in cores for cpu in core.cpus}) < len(domain.cpus):
            words.append("in part")
    else:
        words.append("no CPUs")
    if domain.memory_bytes:
        words.append(f"{domain.memory_bytes / 1024**3:.0f} GiB")
    return " · ".join(words)


def _devices(
    sheet: _Sheet, topology: Topology, x: int, y: int, gpus: Sequence[Gpu], nics: Sequence[Nic]
) -> int:
    """Draw the devices of a domain at its right, GPUs above cards; return how high that is."""
    start = x + _DOMAIN_W + _PAD + _WIRE
    trunk = start - _WIRE // 2
    rows = 0
    groups: tuple[tuple[str, Sequence[Gpu | Nic]], ...] = (("gpu", gpus), ("nic", nics))
    for kind, group in groups:
        for place, one in enumerate(group):
            row, column = divmod(place, _DEVICE_COLUMNS)
            left = start + column * (_DEVICE_W + _DEVICE_GAP)
            top = y + (rows + row) * (_DEVICE_H + _DEVICE_GAP)
            near = nearest_nics(topology, one.name) if kind == "gpu" else ""
            _device(sheet, kind, left, top, one, near)
            if column == 0:
                sheet.wire((trunk, top + _DEVICE_H // 2), (start, top + _DEVICE_H // 2))
        rows += -(-len(group) // _DEVICE_COLUMNS)
    if rows:
        last = y + (rows - 1) * (_DEVICE_H + _DEVICE_GAP) + _DEVICE_H // 2
        sheet.wire((x + _DOMAIN_W, y + _DEVICE_H // 2), (trunk, y + _DEVICE_H // 2), (trunk, last))
    return rows * (_DEVICE_H + _DEVICE_GAP) - _DEVICE_GAP if rows else 0


def _device(sheet: _Sheet, kind: str, x: int, y: int, one: Gpu | Nic, near: str) -> None:
    room = _DEVICE_W - _PAD
    sheet.box(kind, x, y, _DEVICE_W, _DEVICE_H, f"{one.name} {one.address} {near}".strip())
    bold = ' font-weight="bold"'
    sheet.text(x + 6, y + 14, one.name, size=11, room=room, look=bold)
    sheet.text(x + 6, y + 26, one.address, size=9, room=room, look=' class="soft"')
    if near:
        sheet.text(x + 6, y + 38, near, size=9, room=room, look=' class="soft"')
