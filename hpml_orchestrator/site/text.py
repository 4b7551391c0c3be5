"""Texts of site profiles, with their patterns."""

from __future__ import annotations

from typing import Annotated

from hpml_orchestrator.jobfile.address import web_address
from hpml_orchestrator.records.units import (
    LONG_OPTION,
    MAX_PATH_BYTES,
    SBATCH_VALUE,
    Checked,
    matching,
)


def _web_address(value: str) -> str:
    if web_address(value) is None:
        raise ValueError("must have a host, an IPv6 address in brackets, and a port up to 65535")
    return value


_PATH_FORM = "an absolute path, or a variable and a path below it, such as $LOCAL_SCRATCH/data"

DirectiveValue = Annotated[
    str,
    matching(rf"{SBATCH_VALUE}*", "the value of an sbatch option, without blanks or quotes", 512),
]
Renamed = Annotated[
    str,
    matching(
        rf"{LONG_OPTION}(={SBATCH_VALUE}*(\{{(value|item)\}})?{SBATCH_VALUE}*)?",
        "one long sbatch option such as --gres=gpu:{value}",
        512,
    ),
]
OptionName = Annotated[
    str, matching(r"[a-z][a-z0-9-]*", "a long sbatch option's name without dashes, such as mem")
]
Line = Annotated[str, matching(r"[^\x00-\x1f\x7f]+", "one line of text", 1024)]
InterfaceName = Annotated[
    str, matching(r"[A-Za-z0-9][A-Za-z0-9_.@-]*", "a network interface such as ib0", 64)
]
NodePath = Annotated[
    str,
    matching(r"(/|\$[A-Za-z_][A-Za-z0-9_]*(/|$))[^\x00-\x1f\x7f]*", _PATH_FORM, MAX_PATH_BYTES),
]
WebAddress = Annotated[
    str,
    matching(
        r"https?://[A-Za-z0-9.:\[\]-]+(/[A-Za-z0-9._~%/-]*)?",
        "an http or https address without user, password or query, such as "
        "https://grafana.example.org",
        512,
    ),
    Checked(_web_address),
]
