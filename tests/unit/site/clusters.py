"""Help for tests of site profiles: reading them back, and answers of a real Slurm."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from hpml_orchestrator.scheduler.cluster import Gres, Node
from hpml_orchestrator.scheduler.command import Completed
from hpml_orchestrator.site.model import Site

DATA = Path(__file__).parents[1] / "scheduler" / "slurm" / "data" / "22.05.8"
A100 = (Gres("gpu", "a100", 4),)
IDLE = frozenset({"IDLE"})


def loaded(text: str) -> Site:
    """The profile as hpml reads it."""
    return Site.model_validate(tomllib.loads(text))


def uncommented(text: str) -> dict[str, Any]:
    """The profile with every proposed setting taken."""
    return tomllib.loads(re.sub(r"(?m)^#(?=[^ \n#])", "", text))


def nodes_of(nodes: list[Node], partition: str) -> tuple[str, ...]:
    return tuple(node.name for node in nodes if partition in node.partitions)


def slurm_answers() -> dict[str, list[Completed | BaseException]]:
    """What a real Slurm 22.05.8 answered."""
    files = {
        "scontrol --all show config": "config.txt",
        "scontrol --all show partition": "show-partition.txt",
        "scontrol --all show node": "show-node.txt",
        "sacctmgr -nP show user": "sacctmgr-user.txt",
        "sacctmgr -nP show qos": "sacctmgr-qos.txt",
    }
    return {command: [Completed(0, (DATA / name).read_text())] for command, name in files.items()}
