"""Reads a node's topology out of a file of any known format, recognised by what is in it."""

from __future__ import annotations

import json
import os
from typing import Union

from hpml_orchestrator.errors import InputError, NotFoundError
from hpml_orchestrator.topology.hwloc_xml import hwloc_topology
from hpml_orchestrator.topology.model import Topology
from hpml_orchestrator.topology.nccl_xml import nccl_topology
from hpml_orchestrator.topology.nvidia_smi import looks_like_nvidia_smi, read_nvidia_smi
from hpml_orchestrator.topology.record import topology_of_json
from hpml_orchestrator.topology.sysfs import read_sysfs
from hpml_orchestrator.topology.xml_guard import BYTES_MAX, parse_xml

__all__ = ["read_topology", "topology_of_text"]

_HINT = (
    "known are: hwloc's XML (`lstopo machine.xml`), NCCL's topology file (NCCL_TOPO_DUMP_FILE), "
    "the output of `nvidia-smi topo -m`, of `hpml topo --json`, and a copy of /sys"
)


def read_topology(source: Union[str, os.PathLike[str]]) -> Topology:
    """Return the topology in a file, or in a text: one that has line ends or begins with `<`.

    A directory is a copy of a node's /sys, or has `sys` and `proc` of it side by side.

    Raises:
        InputError: the format is none that is known, or the file is damaged; names the file.
        NotFoundError: there is no such file.
    """
    if isinstance(source, str) and ("\n" in source or source.lstrip().startswith("<")):
        return topology_of_text(source)
    path = os.fspath(source)
    if os.path.isdir(path):
        return _read_tree(path)
    return topology_of_text(_read(path), name=path)


def topology_of_text(text: str, *, name: str = "") -> Topology:
    """Return the topology that a text describes.

    Args:
        text: the whole text of the file.
        name: what to call it in errors.

    Raises:
        InputError: the format is none that is known, or the text is damaged.
    """
    try:
        return _read_by_content(text)
    except InputError as error:
        raise InputError(f"{name or 'topology'}: {error.message}", hint=error.hint) from None


def _read_by_content(text: str) -> Topology:
    if not text.strip():
        raise InputError("is empty", hint=_HINT)
    body = text.lstrip("\ufeff \t\r\n")
    if body.startswith("{"):
        return _read_json(body)
    if not body.startswith("<"):
        if looks_like_nvidia_smi(text):
            return read_nvidia_smi(text)
        raise InputError("describes no machine in a format that hpml knows", hint=_HINT)
    root = parse_xml(body)
    if root.tag == "topology":
        return hwloc_topology(root)
    if root.tag == "system":
        return nccl_topology(root)
    raise InputError(f"is XML that describes no machine: <{root.tag[:40]}>", hint=_HINT)


def _read_json(body: str) -> Topology:
    """Return the topology that `hpml topo --json` printed, or the node agent wrote down."""
    try:
        return topology_of_json(json.loads(body))
    except (ValueError, RecursionError) as error:
        raise InputError(f"is no JSON: {error}", hint=_HINT) from None


def _read_tree(path: str) -> Topology:
    """Return the topology that a copy of /sys tells; /proc counts where it was copied, too."""
    for sys_root, proc_root in (
        (os.path.join(path, "sys"), os.path.join(path, "proc")),
        (path, os.path.join(path, os.pardir, "proc")),
    ):
        if os.path.isdir(os.path.join(sys_root, "devices", "system", "cpu")):
            return read_sysfs(sys_root, proc_root)
    raise InputError(
        f"{path}: is a directory without devices/system/cpu, as a copy of /sys has it", hint=_HINT
    )


def _read(path: str) -> str:
    """Return the text of a file or pipe of bounded size."""
    try:
        with open(path, "rb") as stream:
            data = stream.read(BYTES_MAX + 1)
    except FileNotFoundError:
        raise NotFoundError(f"no such file: {path}", hint=_HINT) from None
    except (OSError, ValueError) as error:
        told = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{path}: cannot be read: {told}") from None
    if len(data) > BYTES_MAX:
        raise InputError(f"{path}: is larger than {BYTES_MAX // 1024**2} MiB", hint=_HINT)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{path}: is no text in UTF-8", hint=_HINT) from None
