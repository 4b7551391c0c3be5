"""Probe a node: build the probe's command, and parse the output of `templates/look.sh`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpml_orchestrator import assets
from hpml_orchestrator.records.mounts import is_own_type

_BEGIN, _END = "=== hpml look ===", "=== hpml end ==="
_TOPOLOGY = "=== hpml topology ==="
_MEMORY = ("tmpfs", "ramfs")
_MODULE = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_./+@:=~-]{0,254}[A-Za-z0-9_+@=~-])?")
_INFINIBAND = "32"  # ARPHRD_INFINIBAND
_TMP = "/tmp"  # noqa: S108 - where hpml stages when nothing else is known


@dataclass(frozen=True)
class ScratchDirectory:
    """A directory on a node: its name (a variable or `path`), path, file system, sizes in KiB."""

    name: str
    path: str
    filesystem: str
    total_kib: int
    free_kib: int
    writable: bool

    @property
    def in_ram(self) -> bool:
        """Whether it uses memory instead of disk."""
        return self.filesystem in _MEMORY

    @property
    def shared(self) -> bool:
        """Whether other nodes may also see it."""
        return not is_own_type(self.filesystem)


@dataclass(frozen=True)
class Interface:
    """A network interface that is up; speed in Mbit/s, 0 if the kernel does not report it."""

    name: str
    speed_mbps: int
    infiniband: bool
    addressed: bool


@dataclass(frozen=True)
class NodeProbe:
    """What was found on one node."""

    host: str
    places: tuple[ScratchDirectory, ...] = ()  # directories for temporary data
    interfaces: tuple[Interface, ...] = ()  # best first
    modules: tuple[str, ...] | None = None  # None without a `module` command
    topology: str = ""  # hwloc XML of version 2
    sees_records: bool | None = None  # None if not probed

    @property
    def network(self) -> tuple[str, ...]:
        """Names of the interfaces that have an address, best first."""
        return tuple(interface.name for interface in self.interfaces if interface.addressed)

    @property
    def scratch(self) -> ScratchDirectory | None:
        """The local directory for staging, unless hpml uses it by default.

        A job's own directory comes before Slurm's TmpFS, and that before the largest disk.
        """
        fit = [
            place
            for place in self.places
            if place.writable and not (place.shared or place.in_ram or place.name == "ram")
        ]
        own = [place for place in fit if place.name.startswith("$") and place.path != _TMP]
        if any(place.name in ("$SLURM_TMPDIR", "$TMPDIR") for place in own):
            return None
        if own:
            return own[0]
        tmp = max((place.total_kib for place in fit if place.path == _TMP), default=0)
        largest = max(fit, key=lambda place: place.total_kib, default=None)
        if largest is not None and largest.total_kib <= tmp:
            largest = None
        tmp_fs = (place for place in fit if place.name == "TmpFS" and place.path != _TMP)
        return next(tmp_fs, largest)


def command(tmp_fs: str, *, topology: bool, token: str = "") -> list[str]:
    """Return the probe's command as an argument list; `token` is a new file next to records."""
    script = assets.path("templates/look.sh").read_text("utf-8")
    return ["/bin/sh", "-c", script, "hpml-look", tmp_fs, "xml" if topology else "", token]


def parse(text: str) -> NodeProbe | None:
    """Return the result of a probe; None if its output is incomplete."""
    # Require both markers: srun may be killed by its time limit, and half an answer would look like
    # a node with fewer disks and networks. Prologs may print other lines around it.
    match = re.search(rf"^{_BEGIN}\n(.*?){_END}$", text, re.DOTALL | re.MULTILINE)
    if match is None:
        return None
    lines, _, xml = match[1].partition(f"{_TOPOLOGY}\n")
    places: dict[str, ScratchDirectory] = {}
    interfaces: list[Interface] = []
    modules: list[str] = []
    host, sees_records = "", None
    for line in lines.split("\n"):
        match line.split("\t"):
            case ["host", host]:
                pass
            case ["records", seen]:
                sees_records = seen == "yes"
            case ["place", name, path, kind, total, free, writable] if (total + free).isdecimal():
                place = ScratchDirectory(name, path, kind, int(total), int(free), writable == "yes")
                places.setdefault(path, place)
            case ["interface", name, speed, kind, addressed]:
                mbps = int(speed) if speed.isdecimal() else 0  # -1: unknown
                interfaces.append(Interface(name, mbps, kind == _INFINIBAND, addressed == "yes"))
            case ["module", module]:
                modules.append(re.sub(r"\s*(\([^)]*\)|<[^>]*>)$", "", module.strip()))
    interfaces.sort(key=lambda link: (-link.infiniband, -link.speed_mbps, link.name))
    whole = '<topology version="2.' in xml[:2000] and xml.rstrip().endswith("</topology>")
    # `module -t avail` also prints the search paths, which end in a colon.
    names = dict.fromkeys(name for name in modules[1:] if _MODULE.fullmatch(name))
    return NodeProbe(
        host=host,
        places=tuple(places.values()),
        interfaces=tuple(interfaces),
        modules=tuple(names) if modules[:1] == ["modules yes"] else None,
        topology=xml if whole else "",
        sees_records=sees_records,
    )
