"""Placeholders of arguments, and the base of all models."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict

from hpml_orchestrator.errors import nearest
from hpml_orchestrator.records.units import OF_LAUNCHERS

_NOT_DOUBLED = r"\{(?!(?<=\{\{)[\w:.-]+\}\})"
PLACEHOLDER = re.compile(
    _NOT_DOUBLED + r"((?:stage|run|point|local|shm|array|job|checkpoint|env)\.[A-Za-z0-9_]+)\}"
)
"""What arguments and variables refer to data, the run, the job, a task, a point of a sweep and the
job's environment by; with doubled braces it is text."""
BRACES = re.compile(
    _NOT_DOUBLED
    + r"\s*((?:stage|run|point|local|shm|array|job|checkpoint|env)[._][^{}\s'\"]+"
    + r"|[A-Za-z][\w:.-]*)\s*\}",
    re.ASCII,
)
"""A word in braces, which may be a misspelt placeholder."""
FIXED_PLACEHOLDERS = (
    "run.dir",
    "run.id",
    "job.id",
    "array.index",
    "local.dir",
    "shm.dir",
    "checkpoint.dir",
)
"""Those that do not end in a name of the user's."""

_DOUBLED = re.compile(r"\{(\{([A-Za-z][\w:.-]*)\})\}", re.ASCII)
_NAMED = re.compile(
    r"(?:stages?|points?)[._:-]\w+|env[.:].+|(?:stage|run|point|local|shm|array|job|checkpoint)[._]\w*\W.*"
    r"|stage|run|array|local|shm|job",
    re.IGNORECASE,
)
_MISSPELT = 0.8  # similarity; high, so that {epoch}, {index} and other words remain text

NODE_DIRECTORIES = frozenset(
    "TMPDIR SLURM_TMPDIR LOCAL_SCRATCH LOCALSCRATCH LSCRATCH JOBFS".split()
)
"""Variables that name a directory on the node's own disk when the job starts."""
PER_RANK = OF_LAUNCHERS | frozenset(
    "SLURM_PROCID SLURM_LOCALID SLURM_NODEID OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK "
    "PMI_RANK PMIX_RANK".split()
)
"""Variables that only the ranks' own processes find: each rank may have another value."""


def intended_placeholder(word: str, known: Iterable[str] = ()) -> str | None:
    """Return the placeholder that a word in braces was probably meant to be.

    Args:
        word: what is between the braces.
        known: placeholders with names of the user's, such as `stage.digits`.

    Returns:
        None for a word that resembles no placeholder; empty if no known one is similar.

    >>> intended_placeholder("run_dir"), intended_placeholder("stage:set", ["stage.set"])
    ('run.dir', 'stage.set')
    >>> intended_placeholder("epoch"), intended_placeholder("node.name")
    (None, '')
    """
    plain = {re.sub(r"\W|_", "", name): name for name in (*FIXED_PLACEHOLDERS, *known)}
    meant = plain.get(nearest(re.sub(r"\W|_", "", word), plain, at_least=_MISSPELT), "")
    is_like_one = meant or _NAMED.fullmatch(word) or re.fullmatch(r"\w+\.\w+", word)
    return meant if is_like_one else None


def unescaped(text: str) -> str:
    """Return text with single braces in place of doubled ones, which escape a placeholder.

    >>> unescaped("{{run.dir}} {{epoch}} {'a': {'b': 1}}")
    "{run.dir} {{epoch}} {'a': {'b': 1}}"
    """
    return _DOUBLED.sub(
        lambda match: match[0] if intended_placeholder(match[2]) is None else match[1], text
    )


class Model(BaseModel):
    """Base of all models: unknown fields are refused, and nothing changes after validation.

    The docstring below a field is its description in the JSON Schema (`schema.py`).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
