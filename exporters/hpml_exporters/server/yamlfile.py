"""YAML as plain texts, lists and mappings, by a library that is not kept.

Every scalar stays as it is written, as the format's own reader takes a number for a text where a
text is due. ruamel.yaml is imported for the reading and dropped after it: measured, it would hold
1.5 MiB all day, and dropped 0.1.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from hpml_exporters.server.regular import open_regular
from hpml_orchestrator.errors import InputError

__all__ = ["read"]

_MOST_BYTES = 1 << 20
_LIBRARY = "ruamel"
_QUOTED = re.compile(r"'.{5,}'|\".{5,}\"")


def read(path: str) -> Any:
    """Return what a YAML file holds: texts, lists, mappings; an empty file holds an empty mapping.

    Raises:
        InputError: it cannot be read, or is no YAML. Its text is never shown: it has secrets.
    """
    try:
        with open_regular(path) as file:
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        why = error.strerror or "it cannot be read"
        raise InputError(why, field="web_config", value=path) from None
    if len(text) > _MOST_BYTES:
        raise InputError("it is longer than 1 MiB", field="web_config", value=path)
    there = f"{_LIBRARY}.yaml" in sys.modules
    try:
        return _parse(text, path) or {}
    finally:
        if not there:
            for name in [one for one in sys.modules if one.split(".")[0] == _LIBRARY]:
                del sys.modules[name]


def _parse(text: bytes, path: str) -> Any:
    """Return what YAML says.

    Raises:
        InputError: it is no YAML.
    """
    from ruamel.yaml import YAML  # noqa: PLC0415 - dropped after use
    from ruamel.yaml.error import MarkedYAMLError, YAMLError  # noqa: PLC0415 - as above

    try:
        return YAML(typ="base", pure=True).load(text)
    except MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        problem = (error.problem or "no YAML").splitlines()[0]
        words = line + _QUOTED.sub("…", problem)  # what it quotes may be a secret
    except (YAMLError, UnicodeError, ValueError, RecursionError):
        words = "no YAML"
    raise InputError(words, field="web_config", value=path)
