"""What a line of the script starts, and how the options of launchers are read."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpml_orchestrator.convert.report import Report
from hpml_orchestrator.convert.values import shown

if TYPE_CHECKING:
    from hpml_orchestrator.convert.header import Gpus

__all__ = [
    "BINDING",
    "BINDING_OPTIONS",
    "OUTPUT",
    "PYTHON",
    "Launch",
    "LauncherOptions",
    "last_value",
    "positive",
]

OUTPUT = ("hpml keeps all output in the run's record", "`hpml logs RUN` prints it")
PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
BINDING = ("hpml binds the ranks itself", "`binding` in the job file says how")
BINDING_OPTIONS = frozenset(
    "cpu-bind gpu-bind mem-bind accel-bind distribution hint numa-binding enable-cpu-affinity "
    "bind-cores-to-rank bind-core-list map-by bind-to bind-to-core rank-by cpus-per-rank "
    "cpus-per-proc rankfile rf cpu-set cpu-list".split()
)


@dataclass
class Launch:
    """A program that the script starts.

    Attributes:
        line: where.
        source: as written.
        words: the command line; once the launchers are taken off, the program.
        directory: where it starts.
        launcher: `torchrun`, `srun`, `mpirun`, `horovodrun`, or empty for a plain process.
        per_node: ranks on each node, where the line says so.
        total: ranks of all nodes, where the line says so.
        nodes: nodes that the line names.
        single_node: whether torchrun was started on the first node only.
        cpus: of each rank, where srun names them.
        gpus: of each node, where srun names them.
        mpi: whether srun is to offer MPI; of an mpirun, that it is not Open MPI's.
        container: engine, image and mounts.
        variables: environment of this line alone.
        python: the interpreter that ran the launcher.
        report: what its options lose, reported for the launch that is carried over only.
    """

    line: int
    source: str
    words: list[str]
    directory: str
    launcher: str = ""
    per_node: int | str | None = None
    total: int | None = None
    nodes: int | None = None
    single_node: bool = False
    cpus: int | None = None
    gpus: Gpus | None = None
    mpi: bool = False
    container: dict[str, Any] | None = None
    variables: dict[str, str] = field(default_factory=dict)
    python: str = ""
    report: Report = field(default_factory=Report)

    def also(self, **changes: Any) -> Launch:
        """Return it with other fields."""
        return dataclasses.replace(self, **changes)

    def lost(self, text: str, why: str, todo: str = "") -> None:
        """Report a part of the line that is not carried over."""
        self.report.lost(self.line, text, why, todo)

    def changed(self, report: Report, why: str, todo: str = "") -> None:
        """Report the line as carried over in another way."""
        report.changed(self.line, self.source, why, todo)


def positive(text: str | None) -> int | None:
    """Return a number above zero, None for all else."""
    return int(text) if text and re.fullmatch(r"0*[1-9][0-9]{0,6}", text) else None


def last_value(options: dict[str, list[str]], *names: str) -> str | None:
    """Return the last value of the first of these options that is given."""
    return next((options[name][-1] for name in names if name in options), None)


@dataclass(frozen=True)
class LauncherOptions:
    """The options of a launcher; `_` in their names counts as `-`.

    All others are reported; one of those takes the next word as its value unless that is an
    option or a Python script.

    Attributes:
        values: options with a value that hpml has a counterpart for.
        flags: such options without a value.
        pairs: such options with two values.
        double: whether an option of one dash is read as a long one, as mpirun does.
    """

    values: str
    flags: str
    pairs: str = ""
    double: bool = False

    def read(self, launch: Launch, who: str) -> tuple[dict[str, list[str]], list[str]]:
        """Return values by option and the words that follow."""
        arity = dict.fromkeys(self.values.split(), 1) | dict.fromkeys(self.flags.split(), 0)
        arity |= dict.fromkeys(self.pairs.split(), 2)
        options: dict[str, list[str]] = {}
        words = launch.words[1:]
        while words and words[0].startswith("-") and words[0] != "-":
            word = words.pop(0)
            if word == "--":
                break
            spelling, equals, value = word.lstrip("-").partition("=")
            name = spelling.replace("_", "-")
            if name not in arity and (self.double or word.startswith("--")):
                fits = [option for option in arity if option.startswith(name)]
                name = fits[0] if len(fits) == 1 else name
            known = name in arity
            count = arity[name] if known else name not in _OTHER_FLAGS and bool(words)
            if not equals and (known or (count and not re.match(r"-|.*\.py$", words[0]))):
                value = "=".join(words[:count])
                del words[:count]
                word = f"{word} {value}".strip()
            options.setdefault(name, []).append(value)
            if name in BINDING_OPTIONS and value != "none":
                launch.lost(f"{who} {shown(word)}", *BINDING)
            elif not known and (name, value) not in _DEFAULTS:
                launch.lost(f"{who} {shown(word)}", "hpml starts the ranks without it")
        return options, words


_OTHER_FLAGS = frozenset(
    "use-deepspeed use-fsdp autotune cleanenv contain containall e c C writable writable-tmpfs w "
    "fakeroot no-home use-hwthread-cpus enable-cpu-affinity bind-cores-to-rank cpu".split()
)
_DEFAULTS = {("bind-to", "none"), ("max-restarts", "0"), ("gpu-ids", "all")}
