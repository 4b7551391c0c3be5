"""Whether a job is monitored from inside, and where its metrics are to be found."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictInt

from hpml_orchestrator.spec import text

__all__ = ["Monitor", "on_or_off", "spelled_out", "switched_on"]

_LISTEN = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]*):([0-9]{1,5})")
_MAX_PORT = 65535
_MAX_NAME = 253


def _listen(value: str) -> str:
    match = _LISTEN.fullmatch(value)
    if not match or int(match[2]) > _MAX_PORT or len(match[1]) > _MAX_NAME:
        raise ValueError("must be ADDRESS:PORT, such as 127.0.0.1:0; port 0 takes a free one")
    return value


class Monitor(BaseModel):
    """The exporter that each node's agent runs for this job alone."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    enabled: StrictBool = Field(
        default=False,
        description="Whether the job is monitored; a mapping in a job file says so by itself.",
    )
    listen: Annotated[str, AfterValidator(_listen)] = Field(
        default="127.0.0.1:0",
        description="ADDRESS:PORT that metrics are served at on each node; port 0 takes a free "
        "one, and so does a port that another process has; 0.0.0.0 is reached from other machines.",
    )
    web_config: text.PathText | None = Field(
        default=None,
        description="File in Prometheus' web-config format: TLS and users; relative to the file "
        "that names it.",
    )
    targets: text.PathText | None = Field(
        default=None,
        description="Directory that Prometheus finds its targets in (file_sd_configs), on the "
        "shared file system; targets/ beside the records when left out.",
    )
    interval: Annotated[StrictInt, Field(ge=1, le=60)] = Field(
        default=1,
        description="Seconds between two readings of GPUs; the processes are read every fifth "
        "time, the node's disks and networks every tenth.",
    )


def on_or_off(value: Any) -> Any:
    """Take `true` or `false` for a monitor that is on or off, with all else by default."""
    if isinstance(value, bool):
        return {"enabled": value}
    if isinstance(value, (dict, Monitor)):
        return value
    raise ValueError("must be true or false, or a mapping of fields such as listen and targets")


def spelled_out(data: dict[str, Any]) -> dict[str, Any]:
    """Return a job's fields with `true` or `false` as the mapping that it stands for.

    So its inner fields can be laid over those of a site profile, and be set one by one.
    """
    value = data.get("monitor")
    return {**data, "monitor": {"enabled": value}} if isinstance(value, bool) else data


def switched_on(data: dict[str, Any]) -> dict[str, Any] | None:
    """Return the fields of a job whose mapping switches the monitor on; None where nothing does.

    Somebody who writes for one job where its monitor listens wants one. A site profile's mapping
    says what holds for those jobs that want one, so it is not asked here.
    """
    value = data.get("monitor")
    if not isinstance(value, dict) or "enabled" in value:
        return None
    return {**data, "monitor": {"enabled": True, **value}}
