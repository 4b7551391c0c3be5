"""Make `binding` and the ranks per socket of what a launcher's options say about placement."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpml_orchestrator.convert.header import Header
    from hpml_orchestrator.convert.launch import Launch

OPENMP = frozenset({"OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"})
"""Variables that bind a rank's threads a second time."""
OPENMP_REASON = "hpml binds each rank; a bound OpenMP puts all loader workers on one core"

_POLICIES = {  # of a unit of mpirun's --bind-to and --map-by, and of srun's --cpu-bind
    **dict.fromkeys(("socket", "package", "sockets"), "socket"),
    **dict.fromkeys(("numa", "ldoms"), "numa"),
    **dict.fromkeys(("core", "hwthread", "cores", "threads"), "spread"),
    "none": "none",
}
_REASONS = {
    "socket": "`binding: socket`: each rank gets cores of one socket",
    "numa": "`binding: numa`: each rank gets cores of one NUMA domain",
    "spread": "`binding: spread`: each rank gets an equal part of the cores, not a single one",
    "none": "`binding: none`: hpml binds no rank",
}
_RANKS = "it decides resources.ranks_per_node"
_DEFAULT = "without the line hpml binds each rank to the cores next to its GPU"
_PER_DOMAIN = re.compile(r"ppr:(\d+):(\w+)")
_ASSUMED_SOCKETS = 2


def read_binding(launch: Launch, names: set[str], who: str) -> None:
    """Set `binding`, and ranks by node or socket, by mpirun's options.

    Args:
        launch: its sizes `bind_to` and `map_by` are removed.
        names: of all options.
        who: the launcher.
    """
    if "report-bindings" in names:
        why = "`hpml show RUN` prints where each rank is bound"
        launch.report.add("dropped", launch.line, f"{who} --report-bindings", why)
    bind_to, map_by = launch.sizes.pop("bind_to", ""), launch.sizes.pop("map_by", "")
    unit = bind_to.partition(":")[0].lower()
    if bind_to:
        _set_policy(launch, f"{who} --bind-to {bind_to}", unit)
    if not map_by:
        return
    text, ppr = f"{who} --map-by {map_by}", _PER_DOMAIN.match(map_by.lower())
    domain = ppr[2] if ppr else map_by.partition(":")[0].lower()
    if ppr and domain == "node":
        launch.sizes.setdefault("per_node", ppr[1])
    elif ppr and _POLICIES.get(domain) in ("socket", "numa"):
        launch.sizes |= {"per_domain": ppr[1], "domain": domain}
    if _POLICIES.get(domain) in ("socket", "numa") and not launch.binding:
        _set_policy(launch, text, domain)
    elif ppr and (domain == "node" or "per_domain" in launch.sizes):
        launch.report.changed(launch.line, text, _RANKS)
    else:
        _lose(launch, text)


def read_cpu_bind(launch: Launch) -> None:
    """Set `binding` by srun's --cpu-bind."""
    value = launch.sizes.pop("cpu_bind", "")
    if value:
        unit = value.removeprefix("verbose,").removeprefix("quiet,")
        _set_policy(launch, f"srun --cpu-bind={value}", unit)


def lose_cpu_bind(launch: Launch) -> None:
    """Report the --cpu-bind of an srun around another launcher, which starts the ranks."""
    if (value := launch.sizes.pop("cpu_bind", "none")) != "none":
        _lose(launch, f"srun --cpu-bind={value}")


def _set_policy(launch: Launch, text: str, unit: str) -> None:
    if policy := _POLICIES.get(unit, ""):
        launch.binding = policy
        launch.report.changed(launch.line, text, _REASONS[policy], _DEFAULT)
    else:
        _lose(launch, text)


def _lose(launch: Launch, text: str) -> None:
    launch.lost(text, "hpml starts and binds the ranks itself", "see `binding`")


def ranks_per_domain(launch: Launch, header: Header, tasks_per_node: int | None) -> int | None:
    """Return the ranks of a node by `--map-by ppr:N:socket`; None if the launch has none.

    Args:
        launch: its `per_domain` is N.
        header: may say how many sockets a node has.
        tasks_per_node: of the header; used if the sockets are unknown.
    """
    each = launch.size("per_domain")
    if each is None:
        return None
    domain = launch.sizes["domain"]
    sockets = header.text("sockets-per-node") or header.text("extra-node-info").partition(":")[0]
    if sockets.isdigit() and int(sockets) and domain != "numa":
        return each * int(sockets)
    ranks, source = each * _ASSUMED_SOCKETS, f"hpml assumes {_ASSUMED_SOCKETS}"
    if tasks_per_node:
        ranks, source = tasks_per_node, f"the header has {tasks_per_node} tasks on each node"
    why = f"the script has no number of {domain}s of a node; {source}: ranks_per_node is {ranks}"
    todo = f"write resources.ranks_per_node: {each} x {domain}s (`sinfo -o '%n %X'` has sockets)"
    launch.lost(f"mpirun --map-by ppr:{each}:{domain}", why, todo)
    return ranks
