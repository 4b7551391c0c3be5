"""Reads a node's topology from a file of any known format, recognised by its content."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ET

from hpml_orchestrator.errors import InputError, NotFoundError
from hpml_orchestrator.topology.hwloc_xml import hwloc_topology
from hpml_orchestrator.topology.model import Topology, topology_of_json
from hpml_orchestrator.topology.sysfs import read_sysfs

BYTES_MAX = 64 * 1024 * 1024
# Expat's codes for an end too early: no element, and unclosed token, character or section.
_CUT_OFF = frozenset({3, 5, 6, 20, 29})
_HINT = (
    "known formats: hwloc's XML (`lstopo machine.xml`), the output of `hpml topo --json`, "
    "a copy of /sys"
)


def read_topology(source: str | os.PathLike[str]) -> Topology:
    """Return the topology in a file.

    A directory is a copy of a node's /sys, or has `sys` and `proc` of it side by side.

    Raises:
        InputError: the format is unknown, or the file is damaged; names the file.
        NotFoundError: the file does not exist.
    """
    path = os.fspath(source)
    if os.path.isdir(path):
        return _read_tree(path)
    try:
        with open(path, "rb") as stream:
            data = stream.read(BYTES_MAX + 1)
    except FileNotFoundError:
        raise NotFoundError(f"no such file: {path}", hint=_HINT) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{path}: cannot be read: {reason}") from None
    return topology_of_text(decode(data, name=path), name=path)


def read_topology_field(path: str, *, field: str, origin: object) -> Topology:
    """Return the topology in a file that a field of a site profile names.

    Args:
        path: the file.
        field: such as `node_types.big.topology`.
        origin: the site profile.

    Raises:
        InputError: the file does not exist or describes no node; names file, field and profile.
    """
    where = f"in {origin}"
    try:
        topology = read_topology(path)
    except (InputError, NotFoundError) as error:
        raise InputError(
            str(error), field=field, hint=f"{where}; {error.hint}".rstrip("; ")
        ) from None
    if not topology.cores:
        hint = f"{where}; `hpml topo --json` on such a node writes one"
        raise InputError(f"{path}: describes no CPUs", field=field, hint=hint)
    return topology


def decode(data: bytes, *, name: str) -> str:
    """Return the text of a file, read up to one byte more than it may have.

    Raises:
        InputError: it is too large, or not UTF-8.
    """
    if len(data) > BYTES_MAX:
        raise InputError(f"{name}: is larger than {BYTES_MAX // 1024**2} MiB", hint=_HINT)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{name}: is not UTF-8 text", hint=_HINT) from None


def topology_of_text(text: str, *, name: str = "topology") -> Topology:
    """Return the topology that a text describes.

    Raises:
        InputError: the format is unknown, or the text is damaged.
    """
    try:
        return _read_by_content(text)
    except InputError as error:
        raise InputError(f"{name}: {error}", hint=error.hint) from None


def _read_by_content(text: str) -> Topology:
    body = text.lstrip("\ufeff \t\r\n")
    if not body:
        raise InputError("is empty", hint=_HINT)
    if body.startswith("{"):
        try:
            return topology_of_json(json.loads(body))
        except ValueError as error:
            raise InputError(f"is not valid JSON: {error}", hint=_HINT) from None
    if body.startswith("<"):
        root = parse_xml(body)
        if root.tag == "topology":
            return hwloc_topology(root)
        raise InputError(f"is XML but not a machine's topology: <{root.tag[:40]}>", hint=_HINT)
    raise InputError("is not a topology in a known format", hint=_HINT)


def parse_xml(text: str) -> ET.Element:
    """Return the root of an XML document of bounded size.

    Raises:
        InputError: the text is not XML, is cut off, or defines entities, which may expand forever.
    """
    if "<!ENTITY" in text:
        raise InputError(
            "defines XML entities, which no topology file does",
            hint="export it again: `lstopo topology.xml`",
        )
    try:
        return ET.fromstring(text)  # noqa: S314 - bounded, and without entities
    except ET.ParseError as error:
        if error.code in _CUT_OFF:
            raise InputError(
                f"the XML is cut off: it ends at line {error.position[0]} with elements still open",
                hint="copy or export the file again",
            ) from None
        raise InputError(f"is not valid XML: {error}") from None
    except (ValueError, LookupError) as error:  # a declared encoding that Python does not know
        raise InputError(f"is not valid XML: {error}") from None


def _read_tree(path: str) -> Topology:
    for sys_root, proc_root in (
        (os.path.join(path, "sys"), os.path.join(path, "proc")),
        (path, os.path.join(path, os.pardir, "proc")),
    ):
        if os.path.isdir(os.path.join(sys_root, "devices", "system", "cpu")):
            return read_sysfs(sys_root, proc_root)
    raise InputError(
        f"{path}: is a directory without devices/system/cpu, as a copy of /sys has it", hint=_HINT
    )
