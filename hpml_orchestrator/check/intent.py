"""Warn of requests that are valid and rarely meant, by the job file and the program's own text."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from hpml_orchestrator.check.finding import CheckFinding, warning
from hpml_orchestrator.records.units import size_text

if TYPE_CHECKING:
    from hpml_orchestrator.records.job import Job

_MOST_FILES, _MOST_BYTES = 30, 2**18
_LITTLE_MIB = 256  # PyTorch alone takes more
_TRAINS = re.compile(
    r"^\s*(import|from)\s+(torch|tensorflow|keras|sklearn|xgboost|lightgbm|numpy|pandas)\b",
    re.MULTILINE,
)
_DISTRIBUTED = re.compile(
    r"distributed|DataParallel|accelerat|lightning|deepspeed|horovod|mpi4py|composer|fairscale"
    r"|megatron|nemo|Trainer|Fabric|Strategy|RANK|PROCID|LOCALID|hpml_ch|submitit",
    re.IGNORECASE,
)
_IMPORT = re.compile(r"^\s*(?:from\s+\.*([\w.]*)\s+)?import\s+([\w*(][\w., \t]*)", re.MULTILINE)
_INDEX = re.compile(r"\{array\.index\}|\{point\.|ARRAY_TASK_ID|HPML_POINT")
_CHECKPOINT = re.compile(r"\{checkpoint\.dir\}|HPML_CHECKPOINT_DIR|hpml_ch(annel|eckpoint)\b")


def check_intent(job: Job) -> Iterator[CheckFinding]:
    """Yield warnings about a job that would run, but hardly as its user means it."""
    resources, memory = job.resources, job.resources.memory
    if memory and memory <= _LITTLE_MIB and (job.script or job.module):
        message = f"is {size_text(memory)}iB per node: a number without a unit is MiB"
        hint = f"write {memory}G for GiB"
        yield warning("memory.little", "resources.memory", memory, message, None, hint)
    files = _program_files(job)
    if not files:
        return
    program, fields = os.path.basename(next(iter(files))), job.environment
    own = job.checkpoint
    named = [*job.args, *(job.command or ()), *fields.variables.values(), fields.setup or ""]
    named.append(own.directory)
    text = "\n".join([*named, *files.values()])
    neither = f"neither the job file nor {program} names"
    total = resources.nodes * resources.ranks
    is_known = _TRAINS.search(text) or _imported(files) <= sys.stdlib_module_names
    if total > 1 and program.endswith(".py") and is_known and not _DISTRIBUTED.search(text):
        place = "ranks_per_node" if resources.ranks_per_node else "gpus"
        place = place if resources.ranks > 1 else "nodes"
        message = f"{total} ranks would do the same and write the same files: {program} has no "
        message += "distributed code"
        hint = "give one rank, or use torch.distributed; an `array` runs it with several settings"
        value = resources.written(place)
        yield warning("ranks.alone", f"resources.{place}", value, message, 1, hint)
    if job.array and len(job.array.indices) > 1 and not _INDEX.search(text):
        message = f"all tasks would do the same: {neither} the task's index"
        hint = "pass {array.index}, for example as --seed={array.index}"
        yield warning("array.unused", "array", str(job.array), message, None, hint)
    # An absolute directory was chosen for the program: it may be in a configuration file.
    is_named = own.is_shared or f"{{run.dir}}/{own.directory}" in text or _CHECKPOINT.search(text)
    if own.enabled and not is_named:
        message = f"{neither} the directory of checkpoints: the next attempt would begin anew"
        hint = "pass {checkpoint.dir}, or set `checkpoint.directory` to where the program saves"
        yield warning("checkpoint.unused", "checkpoint", True, message, None, hint)


def _imported(files: Mapping[str, str]) -> set[str]:
    """Return the packages from elsewhere that a program imports: what they do is not known."""
    names = {dotted.partition(".")[0] for text in files.values() for dotted in _imports(text)}
    return names - {part for path in files for part in path.removesuffix(".py").split("/")}


def _program_files(job: Job) -> dict[str, str]:
    """Return the texts of a job's program, which comes first, and of what it imports, by path."""
    module = (job.module or ".").replace(".", "/")
    words = [word for word in job.command or () if word.endswith((".py", ".sh"))]
    names = [job.script or "", f"{module}.py", f"{module}/__main__.py", *words]
    paths = [os.path.join(job.workdir, name) for name in names]
    found: dict[str, str] = {}
    for path in paths:  # grows
        if path in found or len(found) == _MOST_FILES or not os.path.isfile(path):
            continue
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as stream:
            found[path] = stream.read(_MOST_BYTES)
        for dotted in _imports(found.get(path, "")):
            inner = dotted.replace(".", "/")
            for top in (os.path.dirname(path), job.workdir):
                paths += [f"{top}/{inner}.py", f"{top}/{inner}/__init__.py"]
    return found


def _imports(text: str) -> Iterator[str]:
    """Yield the dotted names of modules that a program may import."""
    for package, names in _IMPORT.findall(text):
        for name in names.split(","):
            module = name.split()[0] if name.strip() else ""
            yield from filter(None, (package, f"{package}.{module}".strip(".")))
