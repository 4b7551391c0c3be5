"""How ranks are bound to the cores and memory next to their GPUs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt

__all__ = ["POLICY_WORDS", "Binding", "policy_alone", "spelled_out"]

POLICY_WORDS = ("gpu-local", "socket", "numa", "spread", "none")
"""The planner's policies, as job files write them."""


class Binding(BaseModel):
    """Where the ranks of a node run, and how that is proven."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    policy: Literal["gpu-local", "socket", "numa", "spread", "none"] = Field(
        default="gpu-local",
        description="gpu-local: cores next to each rank's GPU. socket, numa: of that socket or "
        "NUMA domain alone; without GPUs one rank per socket or domain. spread: equal parts of all "
        "cores. none: nothing is bound; where each rank ran is recorded.",
    )
    verify: Literal["strict", "warn", "off"] = Field(
        default="warn",
        description="What happens when a rank does not run where it should. strict: the job fails; "
        "warn: it is told; off: nobody looks.",
    )
    loader_workers: Annotated[StrictInt, Field(ge=0, le=1000)] = Field(
        default=0,
        description="Processes per rank that load data: so many of its cores are left to them.",
    )
    hardware_threads: StrictBool = Field(
        default=True,
        description="Whether ranks get all hardware threads of their cores, or the first one only.",
    )
    form: Literal["auto", "node", "static"] = Field(
        default="auto",
        description="node: each node plans for itself. static: the launcher binds, by masks made "
        "of the site profile's topology; needs whole nodes. auto: static where that can be, and "
        "each node checks it.",
    )


def policy_alone(value: Any) -> Any:
    """Take a policy's name for a binding with that policy and all else by default."""
    if isinstance(value, str) and value in POLICY_WORDS:
        return {"policy": value}
    if isinstance(value, (dict, Binding)):
        return value
    *words, last = POLICY_WORDS
    raise ValueError(
        f"must be {', '.join(words)} or {last}, or a mapping of fields such as policy and verify"
    )


def spelled_out(data: dict[str, Any]) -> dict[str, Any]:
    """Return a job's fields with a policy's name as the mapping that it stands for.

    So its inner fields can be laid over those of a site profile, and be set one by one.
    """
    value = data.get("binding")
    known = isinstance(value, str) and value in POLICY_WORDS
    return {**data, "binding": {"policy": value}} if known else data
