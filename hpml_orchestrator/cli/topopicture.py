"""The picture of a node (SVG): what it shows and where; `templates/report/topo.svg.j2` draws it.

Every box is at least as large as its text and the boxes inside it, so nothing overlaps.
"""

from __future__ import annotations

import colorsys
import math
import textwrap
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.document.templates import environment
from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.texts import printable
from hpml_orchestrator.topology.cpulist import format_list, parse_list
from hpml_orchestrator.topology.model import nearest_nics

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpml_orchestrator.placement.model import Plan, RankPlan
    from hpml_orchestrator.runs.reporting.summary import RankLocation
    from hpml_orchestrator.topology.model import Core, Domain, Gpu, Nic, Topology

_CORES_PER_ROW, _DEVICES_PER_ROW, _RANKS_PER_ROW = 16, 4, 5
_CORE_WIDTH, _DEVICE_WIDTH, _RANK_WIDTH, _PAGE_WIDTH = 24, 156, 230, 600  # pixels
_LABEL, _DETAIL, _HEADING, _TITLE = 8, 9, 11, 16  # font sizes in pixels
_CHARACTER = 0.73  # width of a character / font size; generous, because fonts differ
_TEXT_MAX, _WRONG_COLUMNS = 72, 48
_TURN = 0.381966  # golden section of the colour circle: neighbouring ranks differ clearly


@dataclass(frozen=True)
class DrawnRank:
    """One rank in the picture."""

    label: str  # its number
    gpu: str  # name, PCI address or UUID; empty without one
    nic: str  # name of its network card; empty without one
    cpus: tuple[int, ...]  # that it owns
    lines: tuple[str, ...]  # its description in the list of ranks
    wrong: str = ""  # how it differs from its plan


def ranks_of_plan(plan: Plan) -> list[DrawnRank]:
    """Return the ranks of a plan; ranks that are not bound own no CPUs."""
    bound = plan.policy != "none"
    return [_rank(rank, rank.local_rank, rank.cpu_list(), owns=bound) for rank in plan.ranks]


def ranks_of_places(places: Sequence[RankLocation]) -> list[DrawnRank]:
    """Return ranks as they ran; if all have the same CPUs, none owns them."""
    owns = len(places) == 1 or len({place.cpus for place in places}) > 1
    return [_rank(place, place.rank, place.cpus, owns=owns, wrong=place.wrong) for place in places]


def _rank(
    rank: RankPlan | RankLocation, number: int, cpus: str, *, owns: bool, wrong: Sequence[str] = ()
) -> DrawnRank:
    cores = len(rank.cores) if isinstance(rank.cores, tuple) else rank.cores
    parts = [
        "" if cores is None else counted(cores, "core"),
        f"NUMA {format_list(rank.numa)}" if rank.numa else "",
        "" if rank.distance is None else f"distance {rank.distance}",
    ]
    openmp = "" if rank.threads is None else counted(rank.threads, "OpenMP thread")
    lines = (f"CPUs {cpus or 'unknown'}", ", ".join(filter(None, parts)), openmp)
    own = parse_list(cpus) if owns else ()
    return DrawnRank(str(number), rank.gpu or "", rank.nic or "", own, lines, "; ".join(wrong))


def picture(topology: Topology, *, title: str, ranks: Sequence[DrawnRank] = ()) -> str:
    """Return the text of an SVG file: a node, and the cores and devices of each rank in colour."""
    node = _Node(topology, ranks)
    rows = [[box] for box in node.boxes()]
    width = max([_PAGE_WIDTH, *(box.width for (box,) in rows)])
    page = _Box("page", [title], [*rows, [node.legend(width)]], _TITLE)
    return environment("html").get_template("topo.svg.j2").render(page=page, boxes=page.place(0, 0))


@dataclass
class _Box:
    """Lines of text above rows of smaller boxes; the only box of a row is as wide as the row."""

    kind: str  # CSS classes; empty for a box without an outline
    lines: Sequence[str] = ()  # the first one is bold
    rows: Sequence[Sequence[_Box]] = ()
    font: int = _HEADING  # of the first line; a box with `_LABEL` has one centred line
    hover: str = ""
    fill: str = ""  # colour, if it is not that of the kind
    width: int = 0  # pixels, at least

    def __post_init__(self) -> None:
        shown = [printable(line) for line in self.lines if line]
        cut = [line if len(line) <= _TEXT_MAX else f"{line[: _TEXT_MAX - 1]}…" for line in shown]
        fonts = [self.font, *[_DETAIL] * len(cut)]
        self.texts = list(zip(cut, fonts, strict=False))
        self.rows = [row for row in self.rows if row]
        self.is_label = self.font == _LABEL
        self.pad = 0 if not self.kind else 2 if self.is_label else 8
        self.gap = 3 if self.rows and self.rows[0][0].is_label else 10
        self.hover = printable(self.hover) or " ".join(cut)
        widths = [math.ceil(len(text) * font * _CHARACTER) for text, font in self.texts]
        widths += [sum(box.width + self.gap for box in row) - self.gap for row in self.rows]
        self.width = max(self.width, 2 * self.pad + max(widths, default=0))
        self.head = self.pad + sum(font + 4 for _, font in self.texts)
        self.head += 4 if self.rows and self.texts else 0
        heights = [max(box.height for box in row) + self.gap for row in self.rows]
        self.height: int = self.head + sum(heights) + self.pad - (self.gap if heights else 0)

    def place(self, x: int, y: int) -> Iterator[_Box]:
        """Yield the box and all boxes inside it, each with its place on the page."""
        self.x, self.y = x, y
        yield self
        y += self.head
        for row in self.rows:
            left, height = x + self.pad, max(box.height for box in row)
            for box in row:
                box.height = height
                box.width = self.width - 2 * self.pad if len(row) == 1 else box.width
                yield from box.place(left, y)
                left += box.width + self.gap
            y += height + self.gap


def _grid(boxes: Sequence[_Box], columns: int) -> list[Sequence[_Box]]:
    widest = max((box.width for box in boxes), default=0)
    for box in boxes:
        box.width = widest
    return [boxes[start : start + columns] for start in range(0, len(boxes), columns)]


def _label(kind: str, text: str, hover: str, fill: str = "") -> _Box:
    return _Box(kind, [text or " "], font=_LABEL, hover=hover, fill=fill, width=_CORE_WIDTH)


class _Node:
    def __init__(self, topology: Topology, ranks: Sequence[DrawnRank]) -> None:
        self.topology, self.ranks = topology, ranks
        self.owners: dict[int, list[int]] = defaultdict(list)  # CPU -> indices of ranks
        for index, rank in enumerate(ranks):
            for cpu in rank.cpus:
                self.owners[cpu].append(index)
        self.gpus: dict[str, str] = {}  # name, PCI address or UUID -> name
        for gpu in reversed(topology.gpus):
            self.gpus.update(dict.fromkeys((gpu.name, gpu.address, gpu.uuid), gpu.name))
        self.gpus.pop("", None)

    def boxes(self) -> list[_Box]:
        """Return the sockets, domains without cores, and devices whose domain is unknown."""
        sockets: dict[int, list[Sequence[_Box]]] = {}
        apart, cores = [], sorted(self.topology.cores, key=lambda core: core.socket)
        for domain in self.topology.domains:
            parts: dict[int, list[Core]] = defaultdict(list)
            for core in cores:
                if core.domain == domain.number:
                    parts[core.socket].append(core)
            devices = self.devices(domain.number)
            for socket, part in parts.items():
                sockets.setdefault(socket, []).append([self.domain(domain, part, devices)])
                devices = []  # shown once, if the domain spans sockets
            if not parts:
                apart.append(self.domain(domain, [], devices))
        boxes = [_Box("socket", [f"socket {n}"], rows) for n, rows in sorted(sockets.items())]
        if unknown := self.devices(None):
            apart.append(_Box("domain apart", ["domain unknown"], unknown))
        return boxes + apart

    def domain(
        self, domain: Domain, cores: Sequence[Core], devices: Sequence[Sequence[_Box]]
    ) -> _Box:
        words = [f"domain {domain.number}", counted(len(cores), "core") if cores else "no CPUs"]
        threads = {len(core.cpus) for core in cores}
        if len(threads) == 1 and threads != {1}:
            words[-1] += f" of {threads.pop()} threads"
        cpus = {cpu for core in cores for cpu in core.cpus}
        if 0 < len(cpus) < len(domain.cpus):
            words.append("in part")
        if domain.memory_bytes:
            words.append(f"{domain.memory_bytes / 1024**3:.0f} GiB")
        lines = [" · ".join(words), f"CPUs {format_list(cpus)}" if cpus else ""]
        if domain.distances:
            others = format_list(other for other, _ in domain.distances)
            lines.append(f"distances to {others}: {' '.join(str(d) for _, d in domain.distances)}")
        rows = _grid([self.core(core) for core in cores], _CORES_PER_ROW)
        left = _Box("", lines, rows, width=_CORES_PER_ROW * (_CORE_WIDTH + 3))
        return _Box("domain" if cores else "domain apart", (), [[left, _Box("", (), devices)]])

    def core(self, core: Core) -> _Box:
        """Return a core in the colour of its rank; grey with their number if it has several."""
        hover = f"core {core.number}: CPUs {format_list(core.cpus)}"
        if not self.owners:
            return _label("core", str(core.cpus[0]), hover)
        owners = sorted({index for cpu in core.cpus for index in self.owners.get(cpu, ())})
        if not owners:
            return _label("core free", "", f"{hover}: no rank")
        hover += f": rank {','.join(self.ranks[index].label for index in owners)}"
        if len(owners) > 1:
            return _label("core rank several", f"x{len(owners)}", hover)
        return _label("core rank", self.ranks[owners[0]].label, hover, _colour(owners[0]))

    def devices(self, domain: int | None) -> list[Sequence[_Box]]:
        """Return rows of the GPUs and of the network cards of a domain."""
        rows = []
        for kind, devices in (("gpu", self.topology.gpus), ("nic", self.topology.nics)):
            found = [self.device(kind, device) for device in devices if device.domain == domain]
            rows += _grid(found, _DEVICES_PER_ROW)
        return rows

    def device(self, kind: str, device: Gpu | Nic) -> _Box:
        near = nearest_nics(self.topology, device.name) if kind == "gpu" else ""
        labels = [
            _label(_kind(rank), rank.label, f"rank {rank.label} {rank.wrong}", _colour(index))
            for index, rank in enumerate(self.ranks)
            if device.name == (self.gpus.get(rank.gpu) if kind == "gpu" else rank.nic)
        ]
        lines = [device.name, device.address, near]
        return _Box(kind, lines, _grid(labels, _RANKS_PER_ROW), width=_DEVICE_WIDTH)

    def legend(self, width: int) -> _Box:
        """Return the list of ranks on a page of some width."""
        note = "" if self.owners else ": not bound"
        if any(len(owners) > 1 for owners in self.owners.values()):
            note = " (several ranks share grey cores)"
        boxes = []
        for index, rank in enumerate(self.ranks):
            title = f"rank {rank.label}: {self.gpus.get(rank.gpu, rank.gpu) or 'no GPU'}"
            title += f", {rank.nic}" if rank.nic else ""
            wrong = textwrap.wrap(f"WRONG: {rank.wrong}", _WRONG_COLUMNS) if rank.wrong else []
            lines = [title, *rank.lines, *wrong]
            boxes.append(_Box(_kind(rank), lines, fill=_colour(index), width=_RANK_WIDTH))
        widest = max((box.width for box in boxes), default=width)
        rows = _grid(boxes, int(width / (widest + 10)) or 1)
        return _Box("", [f"ranks{note}"] if boxes else (), rows)


def _kind(rank: DrawnRank) -> str:
    return "rank wrong" if rank.wrong else "rank"


def _colour(index: int) -> str:
    red, green, blue = colorsys.hls_to_rgb((0.58 + index * _TURN) % 1, (0.74, 0.83)[index % 2], 0.7)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"
