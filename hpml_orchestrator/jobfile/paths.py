"""Make the paths of a job absolute."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from hpml_orchestrator.records.job import JobPart

_T = TypeVar("_T")

_PATHS = re.compile(
    r"workdir|script|stage\.\d+\.source|monitor\.(web_config|targets)|environment\.venv"
)
_PATHS_OR_NAMES = re.compile(r"environment\.(conda|python)")
_WORDS = re.compile(r"(args|command)\.\d+|collect\.\d+\.source|environment\.variables\..+")


def absolute(job: _T, base: str | Path) -> _T:
    """Return a job with absolute paths: the script against the workdir, all else against `base`.

    A leading `~/` of arguments and variables becomes the home, as in a shell.

    Args:
        job: a job, or some fields of one that are not read yet, as in a site profile.
        base: directory of the file that it comes from.
    """
    given = dict(texts_of(job))
    workdir = _joined(base, given.get("workdir", "."))
    engine = given.get("environment.container.engine", "")

    def change(field: str, text: str) -> str:
        if _WORDS.fullmatch(field):
            return os.path.expanduser(text) if f"{text}/".startswith("~/") else text
        is_path = (
            _PATHS.fullmatch(field)
            or (_PATHS_OR_NAMES.fullmatch(field) and "/" in text)
            or (re.fullmatch(r"collect\.\d+\.target", field) and text[:1] != "{")
            or (field == "environment.container.image" and is_image_file(engine, text))
        )
        return _joined(workdir if field == "script" else base, text) if is_path else text

    return cast("_T", with_texts(job, change))


def is_image_file(engine: str, image: str) -> bool:
    """Whether the image of a container is a file, and not a reference or name."""
    is_squashfs = image.endswith((".sqsh", ".squashfs")) or (engine == "enroot" and "/" in image)
    return "://" not in image and (is_squashfs or engine == "apptainer")


def texts_of(value: object, field: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name and the value of every text in a job, or in fields of one."""
    if isinstance(value, str):
        yield field, value
    for name, inner in _inside(value):
        yield from texts_of(inner, f"{field}.{name}" if field else str(name))


def with_texts(value: Any, change: Callable[[str, str], str], field: str = "") -> Any:
    """Return a job, or fields of one, with each text as `change` makes it of its name and value."""
    if isinstance(value, str):
        return change(field, value)
    new = {
        name: with_texts(inner, change, f"{field}.{name}" if field else str(name))
        for name, inner in _inside(value)
    }
    if isinstance(value, JobPart):
        return replace(value, **new)  # type: ignore[arg-type,type-var] # each part is a dataclass
    if isinstance(value, (list, tuple)):
        return type(value)(new.values())
    return new if isinstance(value, dict) else value


def _inside(value: object) -> Iterable[tuple[object, object]]:
    if isinstance(value, JobPart):
        return [(one.name, getattr(value, one.name)) for one in fields(value)]  # type: ignore[arg-type] # one is
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple)) else ()


def _joined(base: str | Path, path: str) -> str:
    if not path or "\0" in path or "://" in path:
        return path  # wrong, which the reader of the fields reports, or a URL
    return os.path.normpath(os.path.join(base, os.path.expanduser(path)))
