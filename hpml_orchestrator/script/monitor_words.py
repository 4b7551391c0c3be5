"""The words that tell the agents to monitor the job; `node/arguments.py` reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpml_orchestrator.spec import Job

__all__ = ["monitor_words"]


def monitor_words(job: Job) -> list[tuple[str, str]]:
    """Return option and value of each; what is as by default is left out, all where it is off."""
    asked = job.monitor
    if not asked.enabled:
        return []
    words = [("--monitor", asked.listen)]
    if asked.interval != type(asked)().interval:
        words.append(("--monitor-interval", str(asked.interval)))
    if asked.web_config is not None:
        words.append(("--monitor-web-config", asked.web_config))
    if asked.targets is not None:
        words.append(("--monitor-targets", asked.targets))
    return words
