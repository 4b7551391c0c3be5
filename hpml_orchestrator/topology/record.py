"""A topology as plain data: what `hpml topo --json` prints and the node agent writes down."""

from __future__ import annotations

from typing import Any

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.topology.cpulist import format_list, parse_list
from hpml_orchestrator.topology.model import Core, Domain, Gpu, Nic, Topology

__all__ = ["topology_json", "topology_of_json"]


def topology_json(topology: Topology) -> dict[str, Any]:
    """Return a topology ready for `json.dumps`; sets of CPUs are lists in the kernel's format."""
    return {
        "source": topology.source,
        "domains": [
            {
                "number": one.number,
                "cpus": format_list(one.cpus),
                "memory_bytes": one.memory_bytes,
                "distances": {str(other): away for other, away in one.distances},
            }
            for one in topology.domains
        ],
        "cores": [
            {
                "number": one.number,
                "socket": one.socket,
                "domain": one.domain,
                "cpus": format_list(one.cpus),
            }
            for one in topology.cores
        ],
        "sockets_told": topology.sockets_told,
        "gpus": [
            {
                "index": one.index,
                "name": one.name,
                "address": one.address,
                "uuid": one.uuid,
                "parent": one.parent,
                "domain": one.domain,
                "cpus": format_list(one.cpus),
            }
            for one in topology.gpus
        ],
        "nics": [
            {
                "name": one.name,
                "address": one.address,
                "domain": one.domain,
                "cpus": format_list(one.cpus),
            }
            for one in topology.nics
        ],
        "links": [{"gpu": gpu, "nic": nic, "level": level} for gpu, nic, level in topology.links],
        "warnings": list(topology.warnings),
    }


def topology_of_json(data: Any) -> Topology:
    """Return the topology that such data hold.

    Raises:
        InputError: it is not what `topology_json` makes.
    """
    try:
        return _coherent(_made(data))
    except KeyError as error:
        told = f"the field {error.args[0]!r} is missing"
    except ValueError as error:
        told = str(error)
    except (TypeError, AttributeError, OverflowError) as error:
        told = f"a value is of the wrong type: {error}"
    raise InputError(
        f"is no topology as `hpml topo --json` writes it: {told}",
        hint="hpml topo --json > node.json",
    )


def _coherent(topology: Topology) -> Topology:
    """Return a topology whose parts fit together, as all readers make it.

    Raises:
        ValueError: they do not.
    """
    domains = {one.number: set(one.cpus) for one in topology.domains}
    seen: set[int] = set()
    for core in topology.cores:
        cpus = set(core.cpus)
        if not cpus or cpus & seen or not cpus <= domains.get(core.domain, set()):
            raise ValueError(f"core {core.number} does not fit its domain and the other cores")
        seen |= cpus
    numbers = [one.number for one in topology.cores]
    indices = [one.index for one in topology.gpus]
    for what, found in (("domain", list(domains)), ("core", numbers), ("GPU", indices)):
        if min(found, default=0) < 0 or len(set(found)) < len(found):
            raise ValueError(f"the numbers of {what}s are not right")
    if len(domains) < len(topology.domains):
        raise ValueError("a domain is told twice")
    _check_values(topology, set(domains))
    return topology


def _check_values(topology: Topology, domains: set[int]) -> None:
    """Refuse single values that no reader makes.

    Raises:
        ValueError: there is one; names its field.
    """
    homes = [(f"gpus[{place}]", one.domain) for place, one in enumerate(topology.gpus)]
    homes += [(f"nics[{place}]", one.domain) for place, one in enumerate(topology.nics)]
    for where, home in homes:
        if home is not None and home not in domains:
            raise ValueError(f"{where}.domain: there is no domain {home}")
    amounts = [(f"cores[{place}].socket", one.socket) for place, one in enumerate(topology.cores)]
    for place, domain in enumerate(topology.domains):
        amounts.append((f"domains[{place}].memory_bytes", domain.memory_bytes))
        amounts += [(f"domains[{place}].distances[{to}]", away) for to, away in domain.distances]
    for where, amount in amounts:
        if amount < 0:
            raise ValueError(f"{where} is negative: {amount}")
    names = [one.name for one in topology.nics]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ValueError(f"nics[{place}].name: {name} is told twice")


def _of_kind(data: Any, name: str, kind: type) -> Any:
    """Return a field that must be of one kind, since a text would pass for others as well.

    Raises:
        TypeError: it is of another.
    """
    if not isinstance(data[name], kind):
        raise TypeError(f"{name} must be a {kind.__name__}, and is {data[name]!r:.40}")
    return data[name]


def _made(data: Any) -> Topology:
    """Return what plain data hold, whether it makes sense or not."""
    return Topology(
        source=str(data["source"]),
        cores=tuple(
            Core(
                int(one["number"]),
                int(one["socket"]),
                int(one["domain"]),
                parse_list(one["cpus"]),
            )
            for one in data["cores"]
        ),
        domains=tuple(
            Domain(
                int(one["number"]),
                parse_list(one["cpus"]),
                int(one["memory_bytes"]),
                tuple((int(other), int(away)) for other, away in one["distances"].items()),
            )
            for one in data["domains"]
        ),
        gpus=tuple(
            Gpu(
                int(one["index"]),
                str(one["name"]),
                str(one["address"]),
                str(one["uuid"]),
                str(one["parent"]),
                None if one["domain"] is None else int(one["domain"]),
                parse_list(one["cpus"]),
            )
            for one in data["gpus"]
        ),
        nics=tuple(
            Nic(
                str(one["name"]),
                str(one["address"]),
                None if one["domain"] is None else int(one["domain"]),
                parse_list(one["cpus"]),
            )
            for one in data["nics"]
        ),
        links=tuple((str(one["gpu"]), str(one["nic"]), str(one["level"])) for one in data["links"]),
        warnings=tuple(str(one) for one in _of_kind(data, "warnings", list)),
        sockets_told=_of_kind(data, "sockets_told", bool),
    )
