"""Ranks in the picture of a node: a colour each, on cores, GPU and network card."""

from __future__ import annotations

import colorsys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml_orchestrator.cli.sheet import BOLD, MIDDLE, SOFT, wrapped
from hpml_orchestrator.errors import counted
from hpml_orchestrator.topology.cpulist import format_list, parse_list

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpml_orchestrator.cli.sheet import Sheet
    from hpml_orchestrator.placement.model import Plan
    from hpml_orchestrator.runs.bound import Place
    from hpml_orchestrator.topology import Core, Gpu, Nic, Topology

__all__ = ["RankBox", "Ranks", "boxes_of_places", "boxes_of_plan"]

# All measures in pixels.
_CHIP_W, _CHIP_H, _CHIP_GAP, _CHIPS = 24, 13, 3, 4
_ENTRY_W, _ENTRY_H, _LINE, _GAP = 236, 50, 13, 12
_HEAD = 26
_WRONG_LINES = 2
_NARROW = 12
"""Parts of a core that are narrower than this have no room for a number."""

_TURN = 0.381966  # of the circle of colours: the next colour lies far from all before


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


class Ranks:
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
