"""The script: (job, capabilities) -> text through templates/, and what it is submitted with."""

from hpml_orchestrator.script.render import Capabilities, directives, render

__all__ = ["Capabilities", "directives", "render"]
