"""The arguments of the agents in a job's script: JSON objects that `node/options.py` reads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.placement.gpus import VISIBLE_VARIABLES
from hpml_orchestrator.script import template

if TYPE_CHECKING:
    from hpml_orchestrator.spec import Job, Stage
    from hpml_orchestrator.spec.site_load import ResolvedSite

__all__ = ["agent_argv"]

_SIZES = ("shared_rate", "link_rate", "disk_rate")


def agent_argv(job: Job, site: ResolvedSite | None) -> list[tuple[str, str]]:
    """Return option and value of each argument; objects leave out what is as by default.

    What the site says of its file system is there only as far as this job's staging depends on it.
    """
    options = {"--bind": _bind(job), "--site": _site(job, site), "--monitor": _monitor(job)}
    argv = [(option, _json(fields)) for option, fields in options.items() if fields]
    targets = {stage.target for stage in job.stage}
    argv += [
        (f"--{target}", template.Raw(f'"$hpml_{target}"'))
        for target in ("shm", "local")
        if target in targets
    ]
    return argv + [("--stage", _json(_stage(stage))) for stage in job.stage]


def _json(fields: dict[str, Any]) -> str:
    # As it is, not escaped to ASCII: a path is bytes, which the node's locale may read differently.
    return json.dumps(fields, ensure_ascii=False)


def _bind(job: Job) -> dict[str, Any]:
    binding, resources, variables = job.binding, job.resources, set(job.environment.variables)
    return {
        "ranks": resources.ranks,
        "policy": binding.policy,
        "verify": binding.verify,
        **_changed("ranks_per_gpu", resources.ranks_per_gpu, 1),
        **_changed("loader_workers", binding.loader_workers, 0),
        **_changed("one_thread", not binding.hardware_threads, False),
        **_changed("keep_threads", "OMP_NUM_THREADS" in variables, False),
        **_changed(
            "no_gpus", not resources.gpu_count and not set(VISIBLE_VARIABLES) & variables, False
        ),
    }


def _site(job: Job, site: ResolvedSite | None) -> dict[str, Any]:
    """Return rates for several nodes only, and how to spread the start for arrays only."""
    if site is None or not job.stage:
        return {}
    staging, fields = site.site.staging, {}
    names = ["opens_per_second", "opens_per_second_per_job"]
    if job.resources.nodes > 1:
        names += ["metadata_rate", *_SIZES]
    for name in names:
        value = getattr(staging, name)
        if value is not None:
            fields[name] = int(value[:-1]) << 20 if name in _SIZES else value  # MiB as 2048M
    interfaces = site.site.interfaces_of(job.resources.partition)
    if interfaces and job.resources.nodes > 1:
        fields["interfaces"] = interfaces
    if job.tasks is not None and staging.array_jitter:
        fields |= {"array_jitter": staging.array_jitter, "array_tasks": len(job.tasks.indices)}
    return fields


def _monitor(job: Job) -> dict[str, Any]:
    monitor = job.monitor
    if not monitor.enabled:
        return {}
    return {
        "listen": monitor.listen,
        **_changed("interval", monitor.interval, type(monitor)().interval),
        **_changed("web_config", monitor.web_config, None),
        **_changed("targets", monitor.targets, None),
    }


def _stage(stage: Stage) -> dict[str, Any]:
    return {
        "name": stage.name,
        "source": stage.source,
        "target": stage.target,
        "kind": stage.kind,
        **_changed("keep", stage.keep, False),
        **_changed("distribution", stage.distribution, "auto"),
        **_changed("outside_links", stage.outside_links, False),
        **_changed("hash", stage.hash, True),
        **_changed("epochs", stage.epochs, None),
    }


def _changed(name: str, value: Any, default: Any) -> dict[str, Any]:
    """Return a field, unless it has its default."""
    return {} if value == default else {name: value}
