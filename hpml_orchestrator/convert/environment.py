"""The environment of an imported job: modules, conda or venv, variables, container."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.convert.values import PROVIDED, has_hole

if TYPE_CHECKING:
    from hpml_orchestrator.convert.body import Walk
    from hpml_orchestrator.convert.draft import Draft
    from hpml_orchestrator.convert.findings import Report
    from hpml_orchestrator.convert.header import Request
    from hpml_orchestrator.convert.importer import Place
    from hpml_orchestrator.convert.launch import Launch
    from hpml_orchestrator.convert.resources import Size

__all__ = ["put_environment"]

_PATHS = frozenset("PATH LD_LIBRARY_PATH LIBRARY_PATH MANPATH CPATH MODULEPATH".split())
_OWN = PROVIDED | {"SRUN_CPUS_PER_TASK", "SLURM_CPU_BIND", "SLURM_EXPORT_ENV"}
_HOLE = re.compile("\0(\\d+)\0")


def put_environment(
    draft: Draft,
    launch: Launch,
    walk: Walk,
    request: Request,
    wanted: Size,
    place: Place,
    report: Report,
) -> None:
    """Set the fields of `environment`."""
    if launch.modules:
        names = [name for name, _ in launch.modules]
        draft.put("environment.modules", names, launch.modules[0][1], "module load")
    if launch.conda is not None:
        name, line = launch.conda
        shown = place.path(name) if "/" in name else name
        draft.put("environment.conda", shown, line, f"conda activate {name}")
    if launch.venv is not None:
        path, line = launch.venv
        draft.put("environment.venv", place.path(path), line, f"source {path}/bin/activate")
    _put_export(draft, request, place, report)
    for name, (line, text, value) in launch.exported.items():
        composed = re.search(rf"\$\{{?{name}\b", launch.source) is not None
        if composed and value is not None and has_hole(value):
            continue  # a part of the command line, carried with it
        _put_variable(draft, name, value, line, text, walk, wanted, report)
    for name, value in launch.variables.items():
        _put_variable(
            draft,
            name,
            value,
            launch.line,
            f"{name}={walk.expander.source(value)}",
            walk,
            wanted,
            report,
        )
    if launch.threads is not None:
        _put_variable(
            draft,
            "OMP_NUM_THREADS",
            launch.threads,
            launch.line,
            launch.source,
            walk,
            wanted,
            report,
        )
    if launch.container is not None:
        container = dict(launch.container)
        if container["engine"] == "apptainer" and "://" not in container["image"]:
            container["image"] = place.path(
                f"{launch.directory}/{container['image']}"
                if not container["image"].startswith("/")
                else container["image"]
            )
        draft.put("environment.container", container, launch.line, launch.source)


def _put_export(draft: Draft, request: Request, place: Place, report: Report) -> None:
    """Set what `--export` says about the environment that travels."""
    option = request.said("export")
    if option is None or request.export is None:
        return
    parts = [part for part in request.export.split(",") if part]
    words = [part for part in parts if "=" not in part]
    if not {"ALL", "all"} & set(words):
        draft.put("environment.inherit", "minimal", option.line, option.shown)
    for part in parts:
        name, equals, value = part.partition("=")
        if equals:
            draft.put(f"environment.variables.{name}", value, option.line, option.shown)
        elif name.upper() not in ("ALL", "NONE", "NIL"):
            value = place.environment.get(name, "")
            if value:
                draft.put(f"environment.variables.{name}", value, option.line, option.shown)
            else:
                report.lost(
                    option.line,
                    option.shown,
                    f"{name} is not set here",
                    f"write environment.variables.{name}",
                )


def _put_variable(
    draft: Draft,
    name: str,
    value: str | None,
    line: int,
    text: str,
    walk: Walk,
    wanted: Size,
    report: Report,
) -> None:
    """Set one variable, or say why not."""
    if name in _OWN:
        return
    if name == "CUDA_VISIBLE_DEVICES":
        report.lost(line, text, "Slurm gives each job its GPUs", "write resources.gpus")
        return
    if name == "OMP_NUM_THREADS" and _own_threads(value, wanted, walk):
        return
    if name in _PATHS:
        report.lost(
            line,
            text,
            "a variable is set to one text, which would hide what modules and environments add",
            "put it into a module or the environment, or set it before `hpml submit`",
        )
        return
    if value is None:
        report.lost(
            line, text, "its value is known in the job only", f"write environment.variables.{name}"
        )
        return
    value = _without_itself(name, value, line, text, walk, report)
    value = walk.staging.replaced(value)
    value = _placed(value, walk)
    if has_hole(value):
        report.lost(
            line,
            text,
            "its value is known in the job only",
            f"write environment.variables.{name}, or set it in the program",
        )
        return
    if name == "OMP_NUM_THREADS":
        report.changed(
            line,
            text,
            f"carried as it is; without it hpml sets {wanted.cpus_per_rank}, the CPUs of a rank",
            "remove the variable if one thread per CPU is what you want",
        )
    draft.put(f"environment.variables.{name}", value, line, text)


def _own_threads(value: str | None, wanted: Size, walk: Walk) -> bool:
    """Whether hpml sets the same number of threads itself."""
    if value is None or value == str(wanted.cpus_per_rank):
        return True
    return [hole.source.strip("${}") for hole in walk.expander.holes_of(value)] == [
        "SLURM_CPUS_PER_TASK"
    ]


def _without_itself(name: str, value: str, line: int, text: str, walk: Walk, report: Report) -> str:
    """Return a value like `/mine:$NAME` without the part that was there before and is not here."""

    def gone(match: re.Match[str]) -> str:
        hole: Any = walk.expander.holes[int(match[1])]
        return "" if hole.names == {name} else match[0]

    made = _HOLE.sub(gone, value)
    if made == value:
        return value
    made = made.strip(":")
    report.changed(line, text, f"{name} is not set here: written as {made}")
    return made


def _placed(value: str, walk: Walk) -> str:
    """Return a value with a path that has the job's id told as the run's directory."""
    if re.search(r"\s", value):
        return value  # more than a path
    parts = value.split("/")
    jobs = [
        index
        for index, part in enumerate(parts)
        if any(hole.kind == "job" for hole in walk.expander.holes_of(part))
    ]
    if len(parts) > 1 and jobs:
        return "/".join(["{run.dir}", *parts[jobs[-1] + 1 :]])
    return value
