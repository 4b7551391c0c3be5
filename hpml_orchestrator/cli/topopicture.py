"""A node as a picture (SVG): nested boxes for sockets, domains, cores and devices, ranks in colour.

Every box is as large as its text and the boxes inside it, so nothing can overlap.
"""

from __future__ import annotations

import colorsys
import html
import re
import textwrap
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpml_orchestrator.errors import counted
from hpml_orchestrator.records.texts import printable
from hpml_orchestrator.topology.model import format_list, parse_list

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hpml_orchestrator.placement.model import Plan, RankPlan
    from hpml_orchestrator.runs.reporting.summary import RankLocation
    from hpml_orchestrator.topology.model import Core, Domain, Gpu, Nic, Topology

_CORES_PER_ROW, _DEVICES_PER_ROW, _RANKS_PER_ROW = 16, 4, 5
_CORE_WIDTH, _DEVICE_WIDTH, _RANK_WIDTH, _PAGE_WIDTH = 24, 156, 230, 600
_TITLE, _HEADING, _DETAIL, _LABEL = 16, 11, 9, 8
"""Font sizes, in pixels."""
_CHARACTER = 0.73
"""Width of a character in parts of the font's size: generous, for fonts differ."""
_TEXT_MAX, _WRONG_COLUMNS = 72, 48
_TURN = 0.381966  # of the circle of colours: the next colour is far from the earlier ones
_NEAR = ("PIX", "PXB", "PHB", "NODE")
_STYLE = """
text{font-family:'DejaVu Sans',Verdana,Arial,sans-serif;fill:#1f2933}
.page{fill:#ffffff;stroke:#cbd2d9}
.socket{fill:#f3f5f7;stroke:#7b8794}
.domain{fill:#ffffff;stroke:#3e6b99}
.apart{stroke-dasharray:5 3}
.core{fill:#dbe9f6;stroke:#8fb3d4}
.gpu{fill:#d9f2e1;stroke:#2f855a}
.nic{fill:#fdebd0;stroke:#b9770e}
.free{fill:#f5f7fa;stroke:#cbd2d9}
.rank{stroke:#52606d;stroke-width:0.6}
.several{fill:#9aa5b1}
.wrong{stroke:#c81e1e;stroke-width:2}
"""


def nearest_nics(topology: Topology, gpu: str) -> str:
    """Return the level and the names of the cards that are nearest to a GPU; SYS is not near."""
    for level in _NEAR:
        near = [nic for name, nic, distance in topology.links if (name, distance) == (gpu, level)]
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
    """Return the ranks of a plan; those that it does not bind have no CPUs."""
    return [
        _rank_box(rank, rank.local_rank, cpus=rank.cpu_list(), own=plan.policy != "none")
        for rank in plan.ranks
    ]


def boxes_of_places(places: Sequence[RankLocation]) -> list[RankBox]:
    """Return ranks as they ran; CPUs that all of them share belong to none."""
    shared = len(places) > 1 and len({place.cpus for place in places}) == 1
    return [
        _rank_box(place, place.rank, cpus=place.cpus, own=not shared, wrong=place.wrong)
        for place in places
    ]


def _rank_box(
    rank: RankPlan | RankLocation, number: int, *, cpus: str, own: bool, wrong: Sequence[str] = ()
) -> RankBox:
    cores = len(rank.cores) if isinstance(rank.cores, tuple) else rank.cores
    parts = [
        "" if cores is None else counted(cores, "core"),
        f"NUMA {format_list(rank.numa)}" if rank.numa else "",
        "" if rank.distance is None else f"distance {rank.distance}",
    ]
    openmp = "" if rank.threads is None else counted(rank.threads, "OpenMP thread")
    return RankBox(
        str(number),
        rank.gpu or "",
        parse_list(cpus) if own else (),
        rank.nic or "",
        (f"CPUs {cpus or 'unknown'}", ", ".join(filter(None, parts)), openmp),
        "; ".join(wrong),
    )


@dataclass
class _Box:
    """Lines of text above rows of smaller boxes; a row's only box is as wide as the row.

    Attributes:
        kind: its CSS classes; a box without is not drawn itself.
        lines: its text; the first line is in bold.
        rows: the boxes inside.
        size: of the first line's font, in pixels; of a label it is the only one, centred.
        hover: text for those who point at it.
        fill: its colour, if not that of its kind.
        width: in pixels, at least.
    """

    kind: str
    lines: Sequence[str] = ()
    rows: Sequence[Sequence[_Box]] = ()
    size: int = _HEADING
    hover: str = ""
    fill: str = ""
    width: float = 0
    height: float = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.lines = [_cut(line) for line in self.lines if line]
        self.rows = [row for row in self.rows if row]
        self._pad = 0 if not self.kind else 2 if self.size == _LABEL else 8
        self._gap = 3 if self.rows and self.rows[0][0].size == _LABEL else 10
        self._fonts = [self.size, *[_DETAIL] * len(self.lines)][: len(self.lines)]
        fonts = zip(self.lines, self._fonts, strict=True)
        widths = [len(line) * font * _CHARACTER for line, font in fonts]
        widths += [sum(box.width for box in row) + self._gap * (len(row) - 1) for row in self.rows]
        self.width = max(self.width, 2 * self._pad + max(widths, default=0))
        self._head = self._pad + sum(font + 4 for font in self._fonts)
        self._head += 4 if self.rows and self.lines else 0
        heights = [max(box.height for box in row) + self._gap for row in self.rows]
        self.height = self._head + sum(heights) + self._pad - (self._gap if heights else 0)

    def draw(self, x: float, y: float) -> Iterator[str]:
        """Yield the SVG elements of the box at a place, and of the boxes inside it."""
        if self.kind:
            fill = f' style="fill:{self.fill}"' if self.fill else ""
            yield (
                f'<rect class="{self.kind}" x="{x:g}" y="{y:g}" width="{self.width:g}" '
                f'height="{self.height:g}" rx="4"{fill}>'
                f"<title>{_escaped(self.hover or ' '.join(self.lines))}</title></rect>"
            )
        label = self.size == _LABEL
        left = x + (self.width / 2 if label else self._pad)
        look = ' text-anchor="middle"' if label else ""
        top = y + self._pad
        bold = ' font-weight="bold"'
        for line, font in zip(self.lines, self._fonts, strict=True):
            top += font
            yield (
                f'<text x="{left:g}" y="{top:g}" font-size="{font}"{look}{bold}>'
                f"{_escaped(line)}</text>"
            )
            top, bold = top + 4, ""
        top = y + self._head
        for row in self.rows:
            left = x + self._pad
            height = max(box.height for box in row)
            for box in row:
                box.height = height
                box.width = self.width - 2 * self._pad if len(row) == 1 else box.width
                yield from box.draw(left, top)
                left += box.width + self._gap
            top += height + self._gap


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT_MAX else f"{text[: _TEXT_MAX - 1]}…"


def _escaped(text: str) -> str:
    return html.escape(printable(text))


def _rows(boxes: Sequence[_Box], length: int) -> list[Sequence[_Box]]:
    widest = max((box.width for box in boxes), default=0)
    for box in boxes:
        box.width = widest
    return [boxes[start : start + length] for start in range(0, len(boxes), length)]


def picture(topology: Topology, *, title: str, ranks: Sequence[RankBox] = ()) -> str:
    """Return the text of an SVG file: sockets, domains and cores, and their devices next to them.

    Args:
        topology: the node.
        title: above the picture.
        ranks: the owners of its cores.
    """
    node = _Node(topology, ranks)
    boxes = node.boxes()
    width = max([_PAGE_WIDTH, *(box.width for box in boxes)])
    page = _Box("page", [title], [*([box] for box in boxes), [node.legend(width)]], size=_TITLE)
    width, height = page.width, page.height
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img">'
    )
    lines = [
        opening,
        f"<title>{_escaped(title)}</title>",
        f"<style>{_STYLE}</style>",
        *page.draw(0, 0),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


class _Node:
    """The boxes of a node and of its ranks.

    Args:
        topology: the node.
        ranks: the owners of its cores, in order.
    """

    def __init__(self, topology: Topology, ranks: Sequence[RankBox]) -> None:
        self.topology = topology
        self.ranks = list(ranks)
        self._owners: dict[int, list[int]] = defaultdict(list)
        for place, rank in enumerate(self.ranks):
            for cpu in rank.cpus:
                self._owners[cpu].append(place)
        self._gpus: dict[str, str] = {}  # whatever a rank may call its GPU -> the GPU's name
        for gpu in reversed(topology.gpus):
            self._gpus.update(dict.fromkeys((gpu.name, gpu.address, gpu.uuid), gpu.name))
        self._gpus.pop("", None)

    def boxes(self) -> list[_Box]:
        """Return sockets, domains that are in none, and devices that are in no domain."""
        topology = self.topology
        boxes: list[_Box] = []
        shown: set[int] = set()
        for socket in sorted({core.socket for core in topology.cores}):
            rows = []
            for domain in topology.domains:
                cores = [
                    core
                    for core in topology.cores
                    if (core.domain, core.socket) == (domain.number, socket)
                ]
                if cores:
                    rows.append([self._domain(domain, cores, devices=domain.number not in shown)])
                    shown.add(domain.number)
            boxes.append(_Box("socket", [f"socket {socket}"], rows))
        boxes += [
            self._domain(domain, []) for domain in topology.domains if domain.number not in shown
        ]
        if unknown := self._devices(None):
            boxes.append(_Box("domain apart", ["domain unknown"], unknown))
        return boxes

    def _domain(self, domain: Domain, cores: Sequence[Core], *, devices: bool = True) -> _Box:
        rows = _rows([self._core(core) for core in cores], _CORES_PER_ROW)
        cpus = format_list(cpu for core in cores for cpu in core.cpus)
        others = format_list(other for other, _ in domain.distances)
        distances = " ".join(str(distance) for _, distance in domain.distances)
        lines = [
            _headline(domain, cores),
            f"CPUs {cpus}" if cpus else "",
            f"distances to {others}: {distances}" if distances else "",
        ]
        inner = _Box("", lines, rows, width=_CORES_PER_ROW * (_CORE_WIDTH + 3))
        beside = _Box("", (), self._devices(domain.number) if devices else ())
        return _Box("domain" if cores else "domain apart", (), [[inner, beside]])

    def _core(self, core: Core) -> _Box:
        """Return a core in the colour of its rank; grey, with their number, if it has several."""
        hover = f"core {core.number}: CPUs {format_list(core.cpus)}"
        if not self._owners:
            return self._label("core", str(core.cpus[0]), hover)
        owners = sorted({place for cpu in core.cpus for place in self._owners.get(cpu, ())})
        if not owners:
            return self._label("core free", "", f"{hover}: no rank")
        hover += f": rank {','.join(self.ranks[place].label for place in owners)}"
        if len(owners) > 1:
            return self._label("core rank several", f"x{len(owners)}", hover)
        return self._label("core rank", self.ranks[owners[0]].label, hover, _colour(owners[0]))

    def _label(self, kind: str, text: str, hover: str, fill: str = "") -> _Box:
        return _Box(kind, [text or " "], size=_LABEL, hover=hover, fill=fill, width=_CORE_WIDTH)

    def _devices(self, domain: int | None) -> list[Sequence[_Box]]:
        gpus = [self._device("gpu", gpu) for gpu in self.topology.gpus if gpu.domain == domain]
        nics = [self._device("nic", nic) for nic in self.topology.nics if nic.domain == domain]
        return [*_rows(gpus, _DEVICES_PER_ROW), *_rows(nics, _DEVICES_PER_ROW)]

    def _device(self, kind: str, device: Gpu | Nic) -> _Box:
        near = nearest_nics(self.topology, device.name) if kind == "gpu" else ""
        labels = [
            self._label(
                "rank wrong" if rank.wrong else "rank",
                rank.label,
                f"rank {rank.label} {rank.wrong}".strip(),
                _colour(place),
            )
            for place, rank in enumerate(self.ranks)
            if device.name == (self._gpus.get(rank.gpu) if kind == "gpu" else rank.nic)
        ]
        lines = [device.name, device.address, near]
        return _Box(kind, lines, _rows(labels, _RANKS_PER_ROW), width=_DEVICE_WIDTH)

    def legend(self, width: float) -> _Box:
        """Return the list of ranks, for a page of some width."""
        note = "" if self._owners else ": not bound"
        if any(len(places) > 1 for places in self._owners.values()):
            note = " (several ranks share grey cores)"
        boxes = [self._entry(place, rank) for place, rank in enumerate(self.ranks)]
        widest = max([_RANK_WIDTH, *(box.width for box in boxes)])
        rows = _rows(boxes, max(1, int(width / (widest + 10))))
        return _Box("", [f"ranks{note}"] if boxes else (), rows)

    def _entry(self, place: int, rank: RankBox) -> _Box:
        gpu = self._gpus.get(rank.gpu, rank.gpu) or "no GPU"
        wrong = textwrap.wrap(f"WRONG: {rank.wrong}", _WRONG_COLUMNS) if rank.wrong else []
        return _Box(
            "rank wrong" if wrong else "rank",
            [f"rank {rank.label}: {gpu}{f', {rank.nic}' if rank.nic else ''}", *rank.lines, *wrong],
            fill=_colour(place),
            width=_RANK_WIDTH,
        )


def _headline(domain: Domain, cores: Sequence[Core]) -> str:
    words = [f"domain {domain.number}", counted(len(cores), "core") if cores else "no CPUs"]
    threads = {len(core.cpus) for core in cores}
    if len(threads) == 1 and threads != {1}:
        words[-1] += f" of {threads.pop()} threads"
    if 0 < len({cpu for core in cores for cpu in core.cpus}) < len(domain.cpus):
        words.append("in part")
    if domain.memory_bytes:
        words.append(f"{domain.memory_bytes / 1024**3:.0f} GiB")
    return " · ".join(words)


def _colour(place: int) -> str:
    red, green, blue = colorsys.hls_to_rgb((0.58 + place * _TURN) % 1, (0.74, 0.83)[place % 2], 0.7)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"
