"""Where the ranks of a job would run on a node: `hpml topo --ranks`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from hpml_orchestrator.cli.common import print_json, print_table
from hpml_orchestrator.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from hpml_orchestrator.topology import Topology

__all__ = ["tell_plan"]


def tell_plan(
    topology: Topology, ranks: int, policy: str, allowed_cpus: str, *, as_json: bool
) -> None:
    """Print which GPU, cores and network card each rank of a node would get.

    Args:
        topology: the node.
        ranks: ranks on it.
        policy: one of the planner's.
        allowed_cpus: the only CPUs to use, in the kernel's list format; all when empty.
        as_json: whether to print JSON.

    Raises:
        InputError: there is no such policy, or the CPUs are no list.
    """
    from hpml_orchestrator.placement.planner import POLICIES, plan  # noqa: PLC0415
    from hpml_orchestrator.placement.show import (  # noqa: PLC0415
        PLAN_COLUMNS,
        plan_json,
        plan_rows,
    )
    from hpml_orchestrator.topology import parse_list  # noqa: PLC0415

    if policy not in POLICIES:
        raise InputError(
            f"must be one of {', '.join(POLICIES)}",
            field="--policy",
            value=policy,
            hint=did_you_mean(policy, POLICIES),
        )
    allowed = None
    if allowed_cpus:
        try:
            allowed = parse_list(allowed_cpus)
        except ValueError:
            raise InputError(
                "must be CPU numbers such as 0-7,64-71", field="--allowed-cpus", value=allowed_cpus
            ) from None
        if not set(allowed) & topology.cpus:
            raise InputError(
                "names none of the node's CPUs", field="--allowed-cpus", value=allowed_cpus
            )
    made = plan(topology, ranks, policy=policy, allowed_cpus=allowed)
    warnings = [*topology.warnings, *made.warnings]
    if as_json:
        print_json({**plan_json(made), "warnings": warnings})
        return
    print_table([column.upper() for column in PLAN_COLUMNS], plan_rows(made))
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)
