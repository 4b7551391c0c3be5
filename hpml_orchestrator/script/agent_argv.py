"""The arguments of the agents in a job's script: JSON objects that `node/options.py` reads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.placement.gpus import VISIBLE_VARIABLES
from hpml_orchestrator.script import template

if TYPE_CHECKING:
    from hpml_orchestrator.spec import Job, ResolvedSite

__all__ = ["agent_argv"]

_SIZES = ("shared_rate", "link_rate", "disk_rate")
_DEFAULTS: dict[str, dict[str, Any]] = {
    "--bind": {
        "ranks_per_gpu": 1,
        "loader_workers": 0,
        "one_thread": False,
        "keep_threads": False,
        "no_gpus": False,
    },
    "--monitor": {"interval": 1, "web_config": None, "targets": None},
    "--stage": {
        "keep": False,
        "distribution": "auto",
        "outside_links": False,
        "hash": True,
        "epochs": None,
    },
}
"""Fields that are left out of an option's object while they have this value."""


def agent_argv(job: Job, site: ResolvedSite | None) -> list[tuple[str, str]]:
    """Return option and value of each argument.

    What the site says of its file system is there only as far as this job's staging depends on it.
    """
    options = [("--bind", _bind(job)), ("--site", _site(job, site))]
    monitor = ("listen", "interval", "web_config", "targets")
    if job.monitor.enabled:
        options.append(("--monitor", {name: getattr(job.monitor, name) for name in monitor}))
    argv = [_argument(option, fields) for option, fields in options if fields]
    targets = {stage.target for stage in job.stage}
    argv += [
        (f"--{target}", template.Raw(f'"$hpml_{target}"'))
        for target in ("shm", "local")
        if target in targets
    ]
    names = ("name", "source", "target", "kind", *_DEFAULTS["--stage"])
    return argv + [
        _argument("--stage", {name: getattr(stage, name) for name in names}) for stage in job.stage
    ]


def _argument(option: str, fields: dict[str, Any]) -> tuple[str, str]:
    default = _DEFAULTS.get(option, {})
    changed = {
        name: value
        for name, value in fields.items()
        if name not in default or value != default[name]
    }
    # Not escaped to ASCII: a path is bytes, which the node's locale may read differently.
    return option, json.dumps(changed, ensure_ascii=False)


def _bind(job: Job) -> dict[str, Any]:
    binding, resources, variables = job.binding, job.resources, set(job.environment.variables)
    return {
        "ranks": resources.ranks,
        "policy": binding.policy,
        "verify": binding.verify,
        "ranks_per_gpu": resources.ranks_per_gpu,
        "loader_workers": binding.loader_workers,
        "one_thread": not binding.hardware_threads,
        "keep_threads": "OMP_NUM_THREADS" in variables,
        "no_gpus": not resources.gpu_count and not set(VISIBLE_VARIABLES) & variables,
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
