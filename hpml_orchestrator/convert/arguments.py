"""Arguments and variables of a program as a job file has them: with placeholders."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from hpml_orchestrator.convert.values import HOLE, hole_names
from hpml_orchestrator.jobfile.text import NODE_DIRECTORIES, PER_RANK, PLACEHOLDER

if TYPE_CHECKING:
    from hpml_orchestrator.convert.body import Body

SIZES = re.compile(r"SLURM_(CPUS_PER_TASK|NTASKS|NPROCS|NTASKS_PER_NODE)\b")
"""Variables of Slurm that may have other values in hpml's job than in the script's."""

_PLACEHOLDERS = {
    **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), "{job.id}"),
    "SLURM_ARRAY_TASK_ID": "{array.index}",
    **{
        name: f"{{env.{name}}}"
        for name in (*NODE_DIRECTORIES, "SLURM_ARRAY_JOB_ID", "HOME", "USER")
    },
}
_ONE_WORD = "[[ -n ${name} && ${name} != *[[:space:]*?[]* ]]  # {line} has it without quotes"
_MANY_WORDS = re.compile(r"\$\{\w+(:?\+|:?[-=][^}]*\s)")  # without quotes: no word, or several
_UNKNOWN_WORDS = "only the job can compute which words it becomes"
_WRITE_OUT = "write it out, or have the program find it out"
_REFUSED = (  # expansions that a placeholder cannot replace
    (
        re.compile(r"\$[0-9#@*]|\$\{([0-9@*]|#[@*}])"),
        "`hpml submit` passes the script no arguments",
        "give it a value in the script: ${1:-VALUE}",
    ),
    (
        re.compile(r"(?!\$[\w{(]|\$'|`)|\$\{(?!#).*\[[@*]\]|\$[?!]"),
        _UNKNOWN_WORDS,
        _WRITE_OUT,
    ),
    (
        re.compile(rf"\$\{{?{SIZES.pattern}\}}?$"),
        "the header does not decide it, and hpml's job has another value",
        "write the number",
    ),
    (
        re.compile(rf"\$\{{?({'|'.join(sorted(PER_RANK))})\b"),
        "it is not the same in all ranks",
        "read the variable in the program",
    ),
)


class Placeholders:
    """Replaces expansions in words by placeholders.

    Args:
        text: the script.
        body: its commands.
        is_array: whether the job is an array.

    Attributes:
        exports: lines at the end of setup that the placeholders need.
    """

    def __init__(self, text: str, body: Body, *, is_array: bool) -> None:
        self.text, self.body, self.is_array = text, body, is_array
        self.values, self.launch = body.values, body.launch
        self.exports: dict[str, str] = {}

    def placed(self, value: str) -> str:
        """Return a value with placeholders for what is the same at any time in the job."""

        def placeholder(match: re.Match[str]) -> str:
            name = hole_names(match[0])[0]
            if name in self.values.variables or name not in _PLACEHOLDERS:
                return match[0]
            if name == "SLURM_ARRAY_TASK_ID" and not self.is_array:
                why = "the script has no --array"
                raise self.launch.refused(f"${name}", why, "write it, such as #SBATCH --array=0-9")
            return _PLACEHOLDERS[name]

        if match := PLACEHOLDER.search(HOLE.sub("", value)):
            why = "hpml would replace this placeholder"
            raise self.launch.refused(match[0], why, "rename the file")
        return HOLE.sub(placeholder, self.body.copies.replaced(value))

    def filled(self, value: str) -> str:
        """Return a value with placeholders for all of its holes.

        Raises:
            InputError: a hole may be several words, or is a pattern for file names.
        """
        return HOLE.sub(lambda match: self._expansion(match[1]), self.placed(value))

    def _expansion(self, source: str) -> str:
        is_quoted, text = source.startswith('"'), source.strip('!"')
        for pattern, why, hint in _REFUSED:
            if pattern.match(text):
                raise self.launch.refused(text, why, hint)
        if source[0] == "!" or (not is_quoted and _MANY_WORDS.match(text)):
            raise self.launch.refused(text, _UNKNOWN_WORDS, _WRITE_OUT)
        name = hole_names(f"\0{text}\0")[0]
        own = name in self.values.variables
        if not is_quoted and name and re.search(rf"\b{name}\+?=[\"'](?!\$\()[^\"'(]*\s", self.text):
            why = "only the job can compute how many words it becomes"
            raise self.launch.refused(text, why, "assign it on one line, before any condition")
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or name in ("RANDOM", "SECONDS", "LINENO", "_"):
            name, own = self.assign(source), False
        given = self.values.environment.get(name, "")
        plain = not own and not self.values.sourced and given and not re.search(r"[\s*?[]", given)
        is_number = text.startswith(("$((", "$'", "${#")) or name.startswith("SLURM")
        if not (is_quoted or is_number or plain):
            line = f"line {self.launch.line}"
            self.exports[f"{name} "] = _ONE_WORD.format(name=name, line=line)
            why = "the job ends before the ranks start unless the value is exactly one word"
            self.body.report.changed(self.launch.line, text, why, "write several words out")
        return f"{{env.{name}}}"

    def assign(self, source: str) -> str:
        """Add a line to setup that assigns an expansion to a variable; return its name."""
        for name, line in self.exports.items():
            if line == f"{name}={source}":
                return name
        names = (f"ARG_{number}" for number in range(1, 1000))
        name = next(n for n in names if n not in self.exports and n not in self.text)
        self.exports[name] = f"{name}={source}"  # not exported: only hpml reads it
        return name


def shell_word(value: str) -> str:
    """Return a value as one word of a shell line, with variables in place of placeholders."""
    value = value.replace("{job.id}", '\0"$SLURM_JOB_ID"\0')
    value = re.sub(r"\{(local|shm)\.dir\}", lambda m: f'\0"$HPML_{m[1].upper()}_DIR"\0', value)
    value = value.replace("{array.index}", '\0"$SLURM_ARRAY_TASK_ID"\0')
    value = re.sub(r"\{env\.(\w+)\}", r'\0"$\1"\0', value)
    parts = HOLE.split(value)
    return "".join(p if i % 2 else shlex.quote(p) for i, p in enumerate(parts) if p)
