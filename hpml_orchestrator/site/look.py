"""What one look at a node finds: a short POSIX shell program, and the reader of what it prints.

The program changes nothing and needs nothing but sh and df; what it cannot find it leaves out. It
prints one finding per line, its parts divided by tabs, between two marks, so that a greeting of
the login shell does no harm.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["SCRIPT", "Interface", "Look", "Place", "command", "parse"]

_BEGIN, _END = "=== hpml look ===", "=== hpml end ==="
_TOPOLOGY = "=== hpml topology ==="
_SHARED = re.compile(
    r"nfs|lustre|gpfs|beegfs|ceph|afs|9p|cifs|smb|fuse|panfs|orangefs|pvfs|wekafs|glusterfs|quobyte"
)
_MEMORY = ("tmpfs", "ramfs")
_MODULE = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_./+@:=~-]{0,254}[A-Za-z0-9_+@=~-])?")
_INFINIBAND = "32"  # ARPHRD_INFINIBAND

# $1: directory of TmpFS; $2: `xml` where the hardware's description is wanted as well.
SCRIPT = rf"""
PATH=${{PATH:-/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin}}; export PATH; LC_ALL=C; export LC_ALL
tab=$(printf '\t')
within() {{ # seconds, command: given up after that, where there is a program for it
  seconds=$1; shift
  if command -v timeout >/dev/null 2>&1; then timeout -k 1 "$seconds" "$@"; else "$@"; fi
}}
place() {{ # name, directory
  test -d "$2" || return 0
  writable=no; test -w "$2" && writable=yes
  type=$(within 5 df -PT "$2" 2>/dev/null | awk 'NR == 2 {{ print $2 }}')
  within 5 df -Pk "$2" 2>/dev/null | awk -v n="$1" -v d="$2" -v t="$type" -v w="$writable" \
    'NR == 2 {{ printf "place\t%s\t%s\t%s\t%s\t%s\t%s\n", n, d, t, $2, $4, w }}'
}}
echo '{_BEGIN}'
printf 'host\t%s\n' "$(uname -n)"
place ram /dev/shm
for name in SLURM_TMPDIR TMPDIR $(env | sed -n 's/^\([A-Za-z0-9_]*SCRATCH[A-Za-z0-9_]*\)=.*/\1/p') \
  LOCALDIR LOCAL_TMPDIR JOBFS PBS_JOBFS BBPATH; do
  eval "value=\${{$name:-}}"
  case $value in /*) place "\$$name" "$value" ;; esac
done
place TmpFS "$1"
for directory in /tmp /scratch /local /localscratch /local_scratch /local/scratch /lscratch \
  /scratch/local /mnt/scratch /mnt/local /mnt/nvme /nvme /raid /raid/scratch /ssd; do
  place path "$directory"
done
for path in /sys/class/net/*; do
  name=${{path##*/}}
  case $name in lo|docker*|veth*|virbr*|br-*|cni*|flannel*|cali*|tap*|tun*) continue ;; esac
  case $name in dummy*|ifb*|sit*|'*') continue ;; esac
  state=$(cat "$path/operstate" 2>/dev/null)
  case $state in up|unknown) ;; *) continue ;; esac
  speed=$(cat "$path/speed" 2>/dev/null)
  type=$(cat "$path/type" 2>/dev/null)
  address=no; grep -q "^$name$tab" /proc/net/route 2>/dev/null && address=yes
  printf 'interface\t%s\t%s\t%s\t%s\t%s\n' \
    "$name" "$state" "${{speed:-?}}" "${{type:-?}}" "$address"
done
for path in /sys/class/infiniband/*/ports/*; do
  test -r "$path/state" || continue
  device=${{path#/sys/class/infiniband/}}; device=${{device%%/*}}
  printf 'infiniband\t%s\t%s\t%s\n' \
    "$device" "$(cat "$path/state")" "$(cat "$path/rate" 2>/dev/null)"
done
if command -v bash >/dev/null 2>&1; then
  within 20 bash -lc 'type module >/dev/null 2>&1 && echo "modules yes"; module -t avail 2>&1' \
    </dev/null 2>/dev/null | sed 's/^/module\t/' | head -n 20000
fi
if test "$2" = xml; then
  for program in lstopo-no-graphics lstopo; do
    command -v "$program" >/dev/null 2>&1 || continue
    echo '{_TOPOLOGY}'
    "$program" --disallowed --of xml - 2>/dev/null ||
      "$program" --whole-system --of xml - 2>/dev/null
    break
  done
fi
echo '{_END}'
"""


@dataclass(frozen=True)
class Place:
    """A directory on a node: how it is called, what lies below it, sizes in KiB."""

    name: str
    path: str
    filesystem: str
    total_kib: int
    free_kib: int
    writable: bool

    @property
    def in_ram(self) -> bool:
        """Whether it takes memory, not disk."""
        return self.filesystem in _MEMORY

    @property
    def shared(self) -> bool:
        """Whether other nodes see it too, or may."""
        return bool(_SHARED.search(self.filesystem.lower()))


@dataclass(frozen=True)
class Interface:
    """A network interface that is up; speed in Mbit/s, 0 where the kernel does not know it."""

    name: str
    speed_mbps: int
    infiniband: bool
    addressed: bool


@dataclass(frozen=True)
class Look:
    """What was found on one node.

    Attributes:
        host: its host name.
        places: directories for temporary data.
        interfaces: networks, the best first.
        infiniband: `device: state, rate` of each active port.
        modules: environment modules; None where there is no `module` command.
        topology: hwloc XML of version 2, empty where there is none.
    """

    host: str
    places: tuple[Place, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    infiniband: tuple[str, ...] = ()
    modules: tuple[str, ...] | None = None
    topology: str = ""

    @property
    def ram(self) -> Place | None:
        """`/dev/shm`."""
        return next((one for one in self.places if one.name == "ram"), None)

    @property
    def network(self) -> tuple[str, ...]:
        """Names of the interfaces that have an address, the best first."""
        return tuple(one.name for one in self.interfaces if one.addressed)

    @property
    def scratch(self) -> Place | None:
        """The local directory to stage to, where it is another than hpml takes by itself.

        A job's own directory goes before the directory that Slurm calls TmpFS, and that before the
        largest disk. Those in RAM, shared ones and those that cannot be written do not count.
        """
        fit = [
            one
            for one in self.places
            if one.writable and not one.shared and not one.in_ram and one.name != "ram"
        ]
        own = [one for one in fit if one.name.startswith("$") and one.path != _TMP]
        known = [one for one in own if one.name not in ("$SLURM_TMPDIR", "$TMPDIR")]
        if len(own) > len(known):
            return None  # hpml takes these by itself
        if known:
            return known[0]
        site = next((one for one in fit if one.name == "TmpFS" and one.path != _TMP), None)
        tmp = max((one.total_kib for one in fit if one.path == _TMP), default=0)
        largest = max(fit, key=lambda one: one.total_kib, default=None)
        if site is not None:
            return site
        return largest if largest is not None and largest.total_kib > tmp else None


_TMP = "/tmp"  # noqa: S108 - where hpml stages when nothing else is known


def command(tmp_fs: str, *, topology: bool) -> list[str]:
    """Return the command that looks, as an argument list."""
    return ["/bin/sh", "-c", SCRIPT, "hpml-look", tmp_fs, "xml" if topology else ""]


def parse(text: str) -> Look | None:
    """Return what a look printed; None where it did not come to its end."""
    body, end, _ = text.partition(f"\n{_BEGIN}\n")[2].partition(f"{_END}\n")
    if not end and text.startswith(f"{_BEGIN}\n"):
        body, end, _ = text.removeprefix(f"{_BEGIN}\n").partition(f"{_END}\n")
    if not end:
        return None
    lines, _, xml = body.partition(f"{_TOPOLOGY}\n")
    found: dict[str, list[list[str]]] = {}
    for line in lines.split("\n"):
        kind, *parts = line.split("\t")
        found.setdefault(kind, []).append(parts)
    hosts = found.get("host", [[""]])
    listed = [parts[0] for parts in found.get("module", []) if parts]
    return Look(
        host=hosts[0][0] if hosts[0] else "",
        places=tuple(_places(found.get("place", []))),
        interfaces=_interfaces(found.get("interface", [])),
        infiniband=tuple(
            f"{parts[0]}: {parts[1].partition(': ')[2] or parts[1]}, {parts[2] or 'rate unknown'}"
            for parts in found.get("infiniband", [])
            if len(parts) == 3 and "ACTIVE" in parts[1]  # noqa: PLR2004 - as the script prints it
        ),
        modules=_modules(listed[1:]) if listed[:1] == ["modules yes"] else None,
        topology=xml if _is_topology(xml) else "",
    )


def _places(rows: list[list[str]]) -> list[Place]:
    places: list[Place] = []
    for row in rows:
        if len(row) != 6 or not (row[3].isascii() and row[3].isdigit() and row[4].isdigit()):  # noqa: PLR2004
            continue
        name, path, filesystem, total, free, writable = row
        place = Place(name, path, filesystem, int(total), int(free), writable == "yes")
        if path not in [one.path for one in places]:
            places.append(place)
    return places


def _interfaces(rows: list[list[str]]) -> tuple[Interface, ...]:
    found = [
        Interface(
            row[0],
            max(0, int(row[2])) if _number(row[2]) else 0,
            row[3] == _INFINIBAND,
            row[4] == "yes",
        )
        for row in rows
        if len(row) == 5  # noqa: PLR2004 - as the script prints it
    ]
    return tuple(sorted(found, key=lambda one: (-one.infiniband, -one.speed_mbps, one.name)))


def _number(text: str) -> bool:
    return re.fullmatch(r"-?[0-9]{1,9}", text) is not None


def _modules(lines: list[str]) -> tuple[str, ...]:
    """Names in the output of `module -t avail`: paths end with a colon, defaults are marked."""
    names = (re.sub(r"\s*(\([^)]*\)|<[^>]*>)$", "", line.strip()) for line in lines)
    return tuple(dict.fromkeys(name for name in names if _MODULE.fullmatch(name)))


def _is_topology(xml: str) -> bool:
    """Whether it is a whole hwloc document of version 2."""
    head = xml[:2000]
    return re.search(r'<topology version="2\.', head) is not None and xml.rstrip().endswith(
        "</topology>"
    )
