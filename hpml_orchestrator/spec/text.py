"""Texts that a job file may hold: each kind with the one pattern that it must match.

Values are shell-quoted wherever they reach a script; these patterns come before that. What ends in
an `#SBATCH` line (which no quoting protects alike in every Slurm version) is held to characters
that neither sbatch nor a shell gives a meaning to.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

__all__ = [
    "Address",
    "After",
    "Argument",
    "Constraint",
    "Directive",
    "DirectiveValue",
    "InterfaceName",
    "JobName",
    "Line",
    "ModuleName",
    "NodePath",
    "OptionName",
    "PathText",
    "PlainWord",
    "Renamed",
    "ShellLines",
    "StageName",
    "VariableName",
    "VariableValue",
]

MAX_ARGUMENT_BYTES = 131_071
"""Longest single argument or NAME=value that Linux hands to a process (MAX_ARG_STRLEN - 1)."""

MAX_PATH_BYTES = 4095

_RESERVED_PREFIXES = tuple("SLURM_ SLURMD_ SBATCH_ SRUN_ HPML_ PMI OMPI_ PRTE_ BASH".split())
_RESERVED = frozenset(
    # a shell gives these a meaning of its own, or refuses to set them
    "ENV IFS PS4 PROMPT_COMMAND SHELLOPTS UID EUID PPID GROUPS FUNCNAME DIRSTACK GLOBIGNORE "
    "POSIXLY_CORRECT CDPATH LINENO SECONDS RANDOM SRANDOM EPOCHSECONDS EPOCHREALTIME OPTARG OPTIND "
    "OPTERR PIPESTATUS PWD OLDPWD SHLVL TIMEFORMAT HISTCMD COMP_WORDBREAKS MAPFILE REPLY COPROC "
    "_ "
    # the launcher sets these
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK MASTER_ADDR MASTER_PORT "
    "PET_NODE_RANK HOROVOD_RANK HOROVOD_SIZE HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE "
    "HOROVOD_CROSS_RANK HOROVOD_CROSS_SIZE".split()
)
# Users' own, whatever begins so; of version 5 PMIX and PRTE are parts with settings of their own.
_OPEN_MPI_SETTINGS = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_", "OMPI_ALLOW_RUN_AS_ROOT")


def _no_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("must not hold a NUL character")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        pass
    else:
        return value
    try:  # JSON writes characters beyond U+FFFF as pairs of escapes, which YAML leaves apart
        return value.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError as error:
        raise ValueError("must be valid Unicode text") from error


def _argument(value: str) -> str:
    value = _no_nul(value)
    size = len(value.encode("utf-8"))
    if size > MAX_ARGUMENT_BYTES:
        raise ValueError(
            f"is {size} bytes long; Linux passes at most {MAX_ARGUMENT_BYTES} in one argument: "
            "put it into a file and pass the file's path"
        )
    return value


def _shell_lines(value: str) -> str:
    value = _no_nul(value).replace("\r\n", "\n")
    size = len(value.encode("utf-8"))
    if size > MAX_ARGUMENT_BYTES:
        raise ValueError(f"is {size} bytes long; put so much into a file, and `source` that")
    found = re.search(r"[\x01-\x08\x0b-\x1f\x7f]", value)
    if found:
        line = value.count("\n", 0, found.start()) + 1
        raise ValueError(
            f"line {line}: must not hold the control character {found[0]!r}; in the shell "
            f"it is $'\\x{ord(found[0]):02x}'"
        )
    return value


def _path(value: str) -> str:
    value = _no_nul(value)
    size = len(value.encode("utf-8"))
    if not value:
        raise ValueError("must not be empty")
    if size > MAX_PATH_BYTES:
        raise ValueError(f"is {size} bytes long; a path has at most {MAX_PATH_BYTES}")
    return value


def _variable(value: str) -> str:
    if value.startswith(_OPEN_MPI_SETTINGS):
        return value
    if value in _RESERVED or value.upper().startswith(_RESERVED_PREFIXES):
        raise ValueError("is set by the shell, Slurm, the launcher or hpml; choose another name")
    return value


def _pattern(pattern: str, words: str, longest: int) -> AfterValidator:
    compiled = re.compile(pattern)

    def check(value: str) -> str:
        if len(value) > longest:
            raise ValueError(f"is {len(value)} characters long; at most {longest} are allowed")
        if not compiled.fullmatch(value):
            raise ValueError(f"must be {words}")
        return value

    return AfterValidator(check)


After = Annotated[
    str,
    _pattern(
        r"((ok|any|notok):)?[A-Za-z0-9][A-Za-z0-9._+-]*",
        "a run as `hpml list` names it, or one behind ok:, any: or notok:",
        256,
    ),
]
JobName = Annotated[
    str,
    _pattern(
        r"[A-Za-z0-9][A-Za-z0-9._+-]*",
        "letters, digits and . _ + - and begin with a letter or digit",
        64,
    ),
]
StageName = Annotated[
    str,
    _pattern(r"[a-z][a-z0-9_]*", "lower-case letters, digits and _ and begin with a letter", 31),
]
PlainWord = Annotated[
    str,
    _pattern(
        r"[A-Za-z0-9_][A-Za-z0-9_.,:@/+=-]*", "letters, digits and . , : @ / + = _ - only", 256
    ),
]
Constraint = Annotated[
    str,
    _pattern(
        r"[A-Za-z0-9_\[(][A-Za-z0-9_.,:|&*()\[\]=-]*",
        "feature names joined with & | , * ( ) [ ] and no blanks",
        256,
    ),
]
Address = Annotated[
    str, _pattern(r"[A-Za-z0-9_.+-]+(@[A-Za-z0-9.-]+)?", "a user name or a mail address", 254)
]
ModuleName = Annotated[
    str,
    _pattern(r"[A-Za-z0-9_][A-Za-z0-9_./+@:=~-]*", "a module's name such as cuda/12.4", 256),
]
Directive = Annotated[
    str,
    _pattern(
        r"--[a-z][a-z0-9-]*(=[A-Za-z0-9_.,:@/+=%*()\[\]|&-]+)?",
        "one long sbatch option such as --reservation=course, without blanks or quotes",
        512,
    ),
]
DirectiveValue = Annotated[
    str,
    _pattern(
        r"[A-Za-z0-9_.,:@/+=%*()\[\]|&-]*",
        "the value of an sbatch option, without blanks or quotes",
        512,
    ),
]
OptionName = Annotated[
    str,
    _pattern(r"[a-z][a-z0-9-]*", "a long sbatch option's name without dashes, such as mem", 64),
]
Line = Annotated[str, _pattern(r"[^\x00-\x1f\x7f]+", "one line of text", 1024)]
Renamed = Annotated[
    str,
    _pattern(
        r"--[a-z][a-z0-9-]*(=[A-Za-z0-9_.,:@/+=%*()\[\]|&-]*(\{(value|item)\})?"
        r"[A-Za-z0-9_.,:@/+=%*()\[\]|&-]*)?",
        "one long sbatch option such as --gres=gpu:{value}",
        512,
    ),
]
InterfaceName = Annotated[
    str, _pattern(r"[A-Za-z0-9][A-Za-z0-9_.@-]*", "a network interface such as ib0", 64)
]
NodePath = Annotated[
    str,
    _pattern(
        r"(/|\$[A-Za-z_][A-Za-z0-9_]*(/|$))[^\x00-\x1f\x7f]*",
        "an absolute path, or a variable and a path below it, such as $LOCAL_SCRATCH/data",
        4095,
    ),
]
VariableName = Annotated[
    str,
    _pattern(r"[A-Za-z_][A-Za-z0-9_]*", "a variable's name: letters, digits and _", 256),
    AfterValidator(_variable),
]
Argument = Annotated[str, AfterValidator(_argument)]
VariableValue = Annotated[str, AfterValidator(_argument)]
PathText = Annotated[str, AfterValidator(_path)]
ShellLines = Annotated[str, AfterValidator(_shell_lines)]
