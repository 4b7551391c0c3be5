"""Arguments and variables of a program as a job file has them: with placeholders."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from hpml_orchestrator.convert.values import HOLE, hole_names
from hpml_orchestrator.spec.text import NODE_DIRECTORIES, PER_RANK, PLACEHOLDER

if TYPE_CHECKING:
    from hpml_orchestrator.convert.body import Body

__all__ = ["SIZES", "Arguments", "shell_word"]

SIZES = re.compile(r"SLURM_(CPUS_PER_TASK|NTASKS|NPROCS|NTASKS_PER_NODE)\b")
"""Variables of Slurm that hpml's job may have with other values than the script's."""

_PLACEHOLDERS = {
    **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), "{job.id}"),
    "SLURM_ARRAY_TASK_ID": "{array.index}",
    **{
        name: f"{{env.{name}}}"
        for name in (*NODE_DIRECTORIES, "SLURM_ARRAY_JOB_ID", "HOME", "USER")
    },
}
_ONE_WORD = "[[ -n ${name} && ${name} != *[[:space:]*?[]* ]]  # {line} has it without quotes"


class Arguments:
    """Puts placeholders into words.

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
            why = "is a placeholder of hpml's own"
            raise self.launch.refused(match[0], why, "rename the file")
        return HOLE.sub(placeholder, self.body.copies.replaced(value))

    def argument(self, word: str) -> str:
        """Return a word with placeholders; setup finds out what only the shell can.

        Raises:
            InputError: it may be several words, or is a pattern for file names.
        """
        return self.filled(self.placed(word))

    def filled(self, value: str) -> str:
        """Return a value with placeholders for its holes."""
        return HOLE.sub(lambda match: self._expansion(match[1]), value)

    def _expansion(self, source: str) -> str:
        """Return the placeholder of an expansion."""
        quoted, text = source.startswith('"'), source.strip('!"')
        name = hole_names(f"\0{text}\0")[0]
        where = f"line {self.launch.line}"
        hint = "write it out, or have the program find it out"
        if name.isdigit() or name in ("#", "@", "*") or re.match(r"\$\{([0-9@*]|#[@*}])", text):
            why = "`hpml submit` passes the script no arguments"
            hint = "give it a value in the script: ${1:-VALUE}"
            raise self.launch.refused(text, why, hint)
        if (
            source[0] == "!"
            or not re.match(r"\$[\w{(]|\$'|`", text)
            or re.search(r"^\$\{(?!#).*\[[@*]\]|^\$[?!]", text)
        ):
            raise self.launch.refused(text, "only the job knows which words it becomes", hint)
        if SIZES.fullmatch(name):
            why = "the header does not decide it, and hpml's job has another value"
            raise self.launch.refused(text, why, "write the number")
        if name in PER_RANK:
            why = "it is not the same in all ranks"
            raise self.launch.refused(text, why, f"read {name} in the program")
        own = name in self.values.variables
        if not quoted and name and re.search(rf"\b{name}\+?=[\"'](?!\$\()[^\"'(]*\s", self.text):
            why = "only the job knows how many words it becomes"
            raise self.launch.refused(text, why, "assign it on one line, before any condition")
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or name in ("RANDOM", "SECONDS", "LINENO", "_"):
            name, own = self.assign(source), False
        given = self.values.environment.get(name, "")
        plain = not own and not self.values.sourced and given and not re.search(r"[\s*?[]", given)
        number = text.startswith(("$((", "$'", "${#")) or name.startswith("SLURM") or plain
        if not (quoted or number):
            self.exports[f"{name} "] = _ONE_WORD.format(name=name, line=where)
        return f"{{env.{name}}}"

    def assign(self, source: str) -> str:
        """Have setup assign the value of an expansion to a variable; return its name."""
        for name, line in self.exports.items():
            if line == f"{name}={source}":
                return name
        names = (f"ARG_{number}" for number in range(1, 1000))
        name = next(n for n in names if n not in self.exports and n not in self.text)
        self.exports[name] = f"{name}={source}"  # the ranks do not find it
        return name


def shell_word(value: str) -> str:
    """Return a value as one word for a shell, which fills in its holes and placeholders."""
    value = re.sub(r"\{stage\.(\w+)\}", lambda m: f'\0"$HPML_STAGE_{m[1].upper()}"\0', value)
    value = value.replace("{job.id}", '\0"$SLURM_JOB_ID"\0')
    value = value.replace("{array.index}", '\0"$SLURM_ARRAY_TASK_ID"\0')
    value = re.sub(r"\{env\.(\w+)\}", r'\0"$\1"\0', value)
    parts = HOLE.split(value)
    return "".join(p if i % 2 else shlex.quote(p) for i, p in enumerate(parts) if p)
