"""The script: (job, capabilities) -> text through templates/, and what it is submitted with."""

from hpml_orchestrator.script.directives import directives
from hpml_orchestrator.script.render import Capabilities, render

__all__ = ["Capabilities", "directives", "render"]
