"""The arguments of the agents in a job's script: JSON objects that `node/options.py` reads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from hpml_orchestrator.placement.gpus import VISIBLE_VARIABLES
from hpml_orchestrator.script import template
from hpml_orchestrator.spec.text import PLACEHOLDER
from hpml_orchestrator.spec.values import MIB

if TYPE_CHECKING:
    from pydantic import BaseModel

    from hpml_orchestrator.spec.data import Stage
    from hpml_orchestrator.spec.job import Job
    from hpml_orchestrator.spec.site import ResolvedSite

_BASES = ("shm", "local")
_SIZES = ("shared_rate", "link_rate", "disk_rate")


def agent_argv(job: Job, site: ResolvedSite | None) -> list[tuple[str, str]]:
    """Return option and value of each argument; objects omit fields that have their default.

    Of the site's staging settings only those that this job needs are included.
    """
    options = {"--bind": _bind(job), "--site": _site(job, site)}
    if job.monitor.enabled:
        changed = _changed(job.monitor, "interval", "web_config", "targets")
        options["--monitor"] = {"listen": job.monitor.listen, **changed}
    argv = [(option, _json(fields)) for option, fields in options.items() if fields]
    argv += [(f"--{base}", template.Raw(f'"$hpml_{base}"')) for base in bases_of(job)]
    argv += [("--stage", _json(_stage(stage))) for stage in job.stage]
    argv += [("--job-directory", name) for name in own_directories(job)]
    for entry in job.collect:
        words = [template.word(path) for path in (entry.source, entry.target)]
        argv.append(("--collect", template.Raw(" ".join(words))))
    return argv


def own_directories(job: Job) -> list[str]:
    """Return which of `shm` and `local` have a directory of the job."""
    used = [*(job.command or ()), *job.args, *job.environment.variables.values()]
    used += [entry.source for entry in job.collect]
    names = {name for text in used for name in PLACEHOLDER.findall(str(text))}
    return [name for name in _BASES if f"{name}.dir" in names]


def bases_of(job: Job) -> list[str]:
    """Return which of `shm` and `local` the nodes need."""
    used = {stage.target for stage in job.stage} | {*own_directories(job)}
    return [name for name in _BASES if name in used]


def _json(fields: dict[str, object]) -> str:
    # Not escaped to ASCII: a path is bytes, and the node's locale may decode an escape differently.
    return json.dumps(fields, ensure_ascii=False)


def _changed(model: BaseModel, *names: str) -> dict[str, object]:
    values = {name: getattr(model, name) for name in names}
    fields = type(model).model_fields
    return {name: value for name, value in values.items() if value != fields[name].default}


def _bind(job: Job) -> dict[str, object]:
    binding, resources, variables = job.binding, job.resources, set(job.environment.variables)
    flags = {
        "one_thread": not binding.hardware_threads,
        "keep_threads": "OMP_NUM_THREADS" in variables,
        "no_gpus": not resources.gpu_count and not set(VISIBLE_VARIABLES) & variables,
    }
    return {
        "ranks": resources.ranks,
        "policy": binding.policy,
        "verify": binding.verify,
        **_changed(resources, "ranks_per_gpu"),
        **_changed(binding, "loader_workers"),
        **{name: True for name, is_set in flags.items() if is_set},
    }


def _site(job: Job, site: ResolvedSite | None) -> dict[str, object]:
    """Return rates for several nodes only, and how to spread the start for arrays only."""
    interfaces = site.site.interfaces_of(job.resources.partition) if site else []
    always: dict[str, object] = {"interfaces": interfaces} if interfaces else {}
    if site is None or not job.stage:
        return always
    staging = site.site.staging
    names = ["opens_per_second", "opens_per_second_per_job"]
    if job.resources.nodes > 1:
        names += ["metadata_rate", *_SIZES]
    fields = _changed(staging, *names)
    fields |= {name: getattr(staging, name) * MIB for name in _SIZES if name in fields}
    if job.tasks is not None and staging.array_jitter:
        fields |= {"array_jitter": staging.array_jitter, "array_tasks": len(job.tasks.indices)}
    return {**fields, **always}


def _stage(stage: Stage) -> dict[str, object]:
    always = {name: getattr(stage, name) for name in ("name", "source", "target", "kind")}
    changed = ("keep", "distribution", "outside_links", "follow_links", "hash", "trust_mtime")
    return {**always, **_changed(stage, *changed)}
