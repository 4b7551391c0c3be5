"""Write a site profile from what a cluster says of itself: the work behind `hpml init`."""

from hpml_orchestrator.site.initialise import (
    Plan,
    Profile,
    initialise,
    plan,
    save,
)
from hpml_orchestrator.site.look import Look
from hpml_orchestrator.site.node_text import Surroundings
from hpml_orchestrator.site.nodes import NodeGroup, group_nodes
from hpml_orchestrator.site.text import profile_text

__all__ = [
    "Look",
    "NodeGroup",
    "Plan",
    "Profile",
    "Surroundings",
    "group_nodes",
    "initialise",
    "plan",
    "profile_text",
    "save",
]
