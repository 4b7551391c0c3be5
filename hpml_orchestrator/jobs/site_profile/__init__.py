"""Write a site profile from what a cluster says of itself: the work behind `hpml init`."""

from hpml_orchestrator.jobs.site_profile.initialise import (
    Plan,
    Profile,
    initialise,
    plan,
    save,
)
from hpml_orchestrator.jobs.site_profile.look import Look
from hpml_orchestrator.jobs.site_profile.node_text import Surroundings
from hpml_orchestrator.jobs.site_profile.nodes import NodeGroup, group_nodes
from hpml_orchestrator.jobs.site_profile.text import profile_text

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
