"""Convert the text of an sbatch script to a draft of a job file.

Each line of the script becomes fields or a comment of the draft: `hpml check` is the judge of it.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import textwrap
from dataclasses import dataclass
from getpass import getuser
from pathlib import Path
from typing import TYPE_CHECKING

from hpml_orchestrator.convert.body import COPIES, NO_EPILOGUE, PROVIDED, REMOVES, Body, Line
from hpml_orchestrator.convert.copies import LOCAL, Copies
from hpml_orchestrator.convert.header import (
    MEMORY,
    Allocation,
    Header,
    allocation,
    known_variables,
    read_header,
)
from hpml_orchestrator.convert.launch import (
    ALL_GPUS,
    HIDES_GPUS,
    OPENMP,
    OPENMP_REASON,
    PYTHON,
    Launch,
    add_srun_options,
    ranks_per_domain,
)
from hpml_orchestrator.convert.report import (
    DraftFields,
    ImportNote,
    ImportReport,
    Value,
    by_hand,
    printable,
)
from hpml_orchestrator.convert.values import HOLE, Values, has_hole, hole_names, shown
from hpml_orchestrator.errors import InputError, counted
from hpml_orchestrator.jobfile.load import merge
from hpml_orchestrator.jobfile.rules import resolved_job
from hpml_orchestrator.jobfile.text import (
    BRACES,
    NODE_DIRECTORIES,
    PER_RANK,
    PLACEHOLDER,
    intended_placeholder,
)
from hpml_orchestrator.jobfile.write import job_text
from hpml_orchestrator.records.ids import parse_array
from hpml_orchestrator.records.job import (
    Binding,
    Container,
    Job,
    Mail,
    Resources,
)
from hpml_orchestrator.records.units import ALL_MEMORY, Gpus, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PROGRAM = ("script", "module", "command", "args")
_OTHER_MPI = re.compile(r"(intel-?mpi|impi|mpich|mvapich|cray-mpich)", re.IGNORECASE)
_SET_LATER = frozenset({"OMP_NUM_THREADS", "PYTHONUNBUFFERED"})  # by hpml, after setup
_SOFTWARE = frozenset({"module", "venv", "conda", "cd"})
_STARTS = re.compile(
    r"(^|[\s;&|])(srun|mpirun|mpiexec|sbatch|torchrun|accelerate launch|deepspeed)\s|torch\.distrib"
)
_ARGUMENTS = re.compile(r"\$(?:[0-9#]|\{[0-9#][}:])|\b(?:shift|getopts|BASH_SOURCE)\b")
_SIZES = re.compile(r"SLURM_(CPUS_PER_TASK|NTASKS|NPROCS|NTASKS_PER_NODE)\b")
_OWN_DIRECTORY = re.compile(r"/\{array\.index\}(/|$)")
_SECRET = re.compile(r"_KEY|TOKEN|SECRET|PASSWORD")
_CLEANS_UP = re.compile(r"((source|\.|conda|mamba|micromamba) +)?deactivate\b|(module|ml|unset)\b")
_PLACEHOLDERS = {
    **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), "{job.id}"),
    "SLURM_ARRAY_TASK_ID": "{array.index}",
    **{
        name: f"{{env.{name}}}"
        for name in (*NODE_DIRECTORIES, "SLURM_ARRAY_JOB_ID", "HOME", "USER")
    },
}
_UNREADABLE_NAMES = re.compile(
    r"RANDOM|SECONDS|LINENO|_|\d*|SLURM_(CPUS_PER_TASK|N(TASKS|PROCS).*)"
)
_BY_SHELL = (
    "a shell in each rank starts the program, as only the job knows all of its words: hpml cannot "
    "check its arguments or vary them in a sweep"
)
_UNUSED = "nothing in the job file uses it, or hpml does itself what it was for"


@dataclass(frozen=True)
class ImportContext:
    """Where an import happens.

    Attributes:
        directory: absolute; where sbatch would be called, and so where the script starts.
        base: absolute; the directory of the job file, which its relative paths count from.
        environment: of the caller: sbatch passes it on to the script.
    """

    directory: str
    base: str
    environment: Mapping[str, str]

    def path(self, path: str) -> str:
        """Return a path for the job file: relative below its directory, `~` for home."""
        full = os.path.normpath(os.path.join(self.directory, path))
        for root, prefix in ((self.base, ""), (self.environment.get("HOME", ""), "~/")):
            if root not in ("", "/") and full == root:
                return prefix[:1] or "."
            if root not in ("", "/") and full.startswith(f"{root}/"):
                return prefix + full[len(root) + 1 :]
        return full


@dataclass(frozen=True)
class Imported:
    """A draft: its job with absolute paths, its text, and notes by line.

    `lines` has the fields that each line of the script became part of; the text has all other lines
    as comments.
    """

    job: Job
    text: str
    notes: tuple[ImportNote, ...]
    lines: Mapping[int, tuple[str, ...]]


def import_script(text: str, *, name: str, context: ImportContext) -> Imported:
    """Return the draft of an sbatch script; nothing of the script is run.

    Args:
        text: the script.
        name: its file name, which names the job if the script has no --job-name.
        context: directories of the submission and of the job file.

    Raises:
        InputError: it is not a shell script for sbatch, or starts no program.
    """
    if "\0" in text:
        raise InputError("a NUL character: not a text file", hint="name the script for sbatch")
    return _Import(text, name, context).draft()


class _Import:
    def __init__(self, text: str, name: str, context: ImportContext) -> None:
        self.text, self.name, self.context = text, name, context
        self.report = ImportReport()
        self.header = read_header(text, self.report)
        # Slurm sets the script's variables from the header alone; options of srun join the header
        # after the body has been read.
        self.known = known_variables(self.header, allocation(self.header, ImportReport()))
        self.known["SLURM_SUBMIT_DIR"] = context.directory
        self.known["SLURM_JOB_NAME"] = self.header.text("job-name") or name
        start = os.path.normpath(os.path.join(context.directory, self.header.text("chdir")))
        self.body = Body(text, Values(context.environment, self.known, start), self.report)
        self.launch, self.values = self.body.launch, self.body.values
        add_srun_options(self.header, self.launch)
        self.size = _job_size(self.header, self.launch, self.report)
        self.copies = Copies(self.values.variables.keys())
        job = self.header.text("job-name") or os.path.splitext(os.path.basename(name))[0]
        job = re.sub(r"[^A-Za-z0-9._+-]+", "-", job).lstrip("._+-")[:64] or "job"
        self.fields = DraftFields(Job(job))
        self.exports: dict[str, str] = {}  # lines at the end of setup
        self.workdir = start
        self.by_shell = self._needs_shell()

    def draft(self) -> Imported:
        """Return the draft; fields that do not load become comments."""
        self._read_copies()
        self._divide_lines()
        for line in self.body.before:
            self.workdir = line.value if line.kind == "cd" else self.workdir
        self._put_launcher()
        self._put_program()
        self._put_resources()
        self._put_environment()
        self._put_data()
        self.report.extend(self.launch.report)
        job = self._loaded()
        notes = self.report.notes()
        lines: dict[int, set[str]] = {}
        for name, numbers in self.fields.stated.items():
            for number in numbers:
                lines.setdefault(number, set()).add(name)
        text = job_text(self.fields.written(), [*self._head(notes)], self._comments(lines))
        return Imported(job, text, notes, {n: tuple(sorted(one)) for n, one in lines.items()})

    def _loaded(self) -> Job:
        """Return the job that the draft's text describes."""
        while True:
            try:
                base = Path(self.context.base)
                return resolved_job(merge(self.fields.written()).fields, base, (), "")
            except InputError as error:
                problem = error.problems[0] if error.problems else error
                names = [
                    name
                    for name in self.fields.stated
                    if f"{problem.field}.".startswith(f"{name}.")
                ]
                if not names or names == ["name"]:
                    raise
                name = max(names, key=len)
                self._withdraw(name, f"it cannot be {name}: {problem.message}")

    def _withdraw(self, name: str, why: str) -> None:
        """Make comments of the lines of a field that does not load."""
        written, numbers = self._shown_field(name), set(self.fields.stated[name])
        self.fields.remove(name)
        lines = [one for one in (*self.body.before, *self.body.after) if one.line in numbers]
        if name == "environment.setup":  # one line may spoil it
            faulty = [one for one in lines if "\ufffd" in printable(one.source)]
            lines = faulty or lines
        for line in lines:
            line.in_setup = line.is_field = False
            self.report.lost(line.line, line.source, why, "write it by hand")
        if not lines:
            self.report.lost(min(numbers, default=0), written, why, "write it by hand")
        if name in _PROGRAM:
            self._put_shell()
        if name in (*_PROGRAM, "environment.setup"):
            self._put_setup()

    def _shown_field(self, name: str) -> str:
        value: Value = self.fields.job
        for part in name.split("."):
            value = value[part] if isinstance(value, dict) else getattr(value, part)
        return str(value)

    # Which words only the job can compute.

    def _needs_shell(self) -> bool:
        if self.body.line.block and not self.launch.launcher:
            return True
        return any(
            self._filled(word) is None for word in [*self._words(), self.launch.program]
        ) or has_hole("".join(self.launch.words[:1]))

    def _words(self) -> list[str]:
        passed = ("$@", "${@}", "$*", "${*}")
        return [w for w in self.launch.words if not (has_hole(w) and shown(w) in passed)]

    def _placed(self, value: str) -> str:
        """Return a value with placeholders for parts that are the same at any time in the job."""

        def placeholder(match: re.Match[str]) -> str:
            name = hole_names(match[0])[0]
            if name in self.values.variables or name not in _PLACEHOLDERS:
                return match[0]
            if name == "SLURM_ARRAY_TASK_ID" and "array" not in self.header.options:
                return match[0]
            return _PLACEHOLDERS[name]

        parts = re.split("(\0[^\0]*\0)", value)
        value = "".join(part if i % 2 else _escaped(part) for i, part in enumerate(parts))
        return HOLE.sub(placeholder, self.copies.replaced(value))

    def _filled(self, value: str) -> str | None:
        """Return a value with placeholders for all of its holes; None if one may be any words."""
        value = self._placed(value)
        for source in HOLE.findall(value):
            is_quoted, text = source.startswith('"'), source.strip('"')
            name = hole_names(f"\0{text}\0")[0]
            if not re.fullmatch(r"[A-Za-z_]\w*", name) or _UNREADABLE_NAMES.fullmatch(name):
                return None
            given = self.context.environment.get(name, "")
            own = name in self.values.variables or self.values.sourced
            plain = not own and given and not re.search(r"[\s*?[]", given)
            if name in PER_RANK or not (is_quoted or plain or name.startswith("SLURM")):
                return None
            if name == "SLURM_ARRAY_TASK_ID" or value[: value.index("\0")].endswith("$"):
                return None
            value = value.replace(f"\0{source}\0", f"{{env.{name}}}")
        return value

    # Lines of the script.

    def _read_copies(self) -> None:
        copies = self.copies
        for line in self.body.before:
            self._enter(line)
            is_copy = line.words and line.kind != "drop" and copies.take(line.words)
            line.kind = "stage" if is_copy else line.kind
        for line in self.body.after:
            self._enter(line)
            self._read_after(line)
        copies.directory, copies.on_node = self.launch.directory, ""
        if self.body.line.directories[1] and not copies.directory:
            self._enter(self.body.line)

    def _enter(self, line: Line) -> None:
        copies = self.copies
        copies.line, copies.text = line.line, line.source
        copies.directory, on_node = line.directories
        copies.on_node = ""
        copies.on_node = copies.path(on_node) if on_node and copies.is_local(on_node) else ""

    def _read_after(self, line: Line) -> None:
        name = os.path.basename("".join(line.words[:1]))
        why = self.copies.take_back(line.results) if line.results else None
        copies_there = re.search(rf"\b({'|'.join(COPIES)})\s", line.source) and (
            line.directories[1] or self.body.is_on_node(line.source, LOCAL)
        )
        line.is_field = why == "" or self._is_call(line)
        if line.kind in ("comment", "drop") or line.is_field:
            return
        if why or (copies_there and not line.results):
            why = f"`collect` cannot copy back the same files: {why or 'it names no condition'}"
            todo = "have the program write to {run.dir}, or name one file or directory in `collect`"
            self.report.lost(line.line, line.source, why, todo)
        elif name in ("rm", "rmdir"):
            why = f"{NO_EPILOGUE}; it removes what it staged"
            self.report.lost(line.line, line.source, why, "remove the rest in another way")
        elif line.kind != "keep" or name in REMOVES or _CLEANS_UP.match(line.source):
            self.report.add("dropped", line.line, line.source, NO_EPILOGUE)
        else:
            todo = "have the program write its results to shared storage, such as {run.dir}; "
            todo += "do the rest in another job with `hpml submit --after`"
            self.report.lost(line.line, line.source, NO_EPILOGUE, todo)

    def _divide_lines(self) -> None:
        """Decide which copies become `stage` and `collect`, and which lines stay in setup."""
        copies, before = self.copies, self.body.before
        values = [*self.launch.words, *self.launch.variables.values()]
        used = set(re.findall(r"\w+", " ".join(" ".join(HOLE.findall(word)) for word in values)))
        # A program such as `bash -c '… $NAME'` also reads variables of setup.
        used |= set(re.findall(r"\$\{?(\w+)", " ".join([*values, *self._whole_text()])))
        values += [v for li in before if li.exported for v in li.assigned.values()]
        copies.decline_unless_used(values)
        works_there = self.by_shell or any(
            line.kind in ("keep", "venv") and self.body.is_on_node(line.source, LOCAL)
            for line in before
        )
        if works_there:
            copies.staged.clear()
        copied = not copies.staged and any(line.kind == "stage" for line in before)
        stay = copies.move_results(values, shell_works_there=works_there or copied)
        for result in copies.results:
            if result.place in stay:
                why = "other jobs may also write there, as the script does not make the directory"
                self.report.changed(result.line, result.text, why, "name a directory")
        for line in before:
            if line.kind == "stage" and not copies.staged:
                line.kind = "keep"
            elif line.kind == "quiet" and copies.staged and not line.source.startswith("mkdir"):
                on_node = self.body.is_on_node(line.source, LOCAL)
                line.kind = "drop" if on_node else "quiet"
        self._choose_setup(used)

    def _whole_text(self) -> list[str]:
        return [self.body.line.source] if self.body.line.block and self.by_shell else []

    def _choose_setup(self, names: set[str]) -> None:
        """Decide which lines stay shell lines.

        hpml loads modules and activates environments before `environment.setup`. So they are fields
        only as long as no line before them must stay there; a `cd` also stays behind a `mkdir`.

        `names` are variables that the launch line needs from the shell.
        """
        before = [line for line in self.body.before if line.kind not in ("comment", "drop")]
        blocked = moved = active = False
        for line in before:
            environment = line.kind in ("venv", "conda")
            if line.kind in _SOFTWARE and (
                blocked or (environment and active) or (line.kind == "cd" and moved)
            ):
                line.kind = "keep"
            active = active or environment
            blocked = blocked or line.kind == "keep" or self._is_unknown(line)
            moved = moved or blocked or line.source.startswith("mkdir")
        needed = False  # whether a later command may read exported variables
        for line in reversed(before):
            own = line.assigned.keys() <= PROVIDED
            inherited = line.exported and not own and (needed or self._is_unknown(line))
            if line.kind in ("keep", "quiet") or names & line.assigned.keys() or inherited:
                line.in_setup = line.kind not in ("stage", *_SOFTWARE)
                names = names | set(re.findall(r"[A-Za-z_]\w*", line.source))
            needed = needed or line.kind == "keep"
        # shell options are of no use without a line that they apply to
        if all(re.match(r"set\b", line.source) for line in before if line.in_setup):
            for line in before:
                line.in_setup = False
        self._claim_constants(before)

    def _claim_constants(self, before: list[Line]) -> None:
        read = _read_names(self.launch.source)
        for line in reversed(before):  # constants of the program's words, and of variables
            if line.in_setup and not self._is_kept(line):
                line.in_setup, line.kind = False, "drop"
            elif line.assigned and not line.exported:
                line.is_field = bool(line.assigned.keys() & read)
            if line.is_field or line.exported:
                read |= _read_names(line.source)

    def _is_unknown(self, line: Line) -> bool:
        values = [value for name, value in line.assigned.items() if name not in PROVIDED]
        return any(has_hole(self._placed(value)) for value in values)

    def _is_kept(self, line: Line) -> bool:
        """Note a line that cannot run in `environment.setup`; return whether it can."""
        placed = {name: self._placed(value) for name, value in line.assigned.items()}
        is_rewritten = _SIZES.search(line.source) or _ARGUMENTS.search(line.source)
        if placed and is_rewritten and not any(map(has_hole, placed.values())):
            # Setup does not know the paths of staged data: there the script's own stay.
            there = {k: line.assigned[k] if "{stage." in v else v for k, v in placed.items()}
            words = (f"{name}={_shell_word(value)}" for name, value in there.items())
            line.source = "export " * line.exported + " ".join(words)
        # quoted text may be a program of awk
        elif _ARGUMENTS.search(re.sub(r"'[^']*'", "", line.source)):
            why = "it needs the name or the arguments of the script, which hpml's job does not have"
            self.report.lost(line.line, line.source, why, "write the values into setup and args")
            return False
        if line.kind == "keep" and re.match(r"(?!.*\|\|).*\bread\b.* -d ''", line.source):
            why = "`read -d ''` ends with status 1, which ends hpml's job"
            self.report.lost(line.line, line.source, why, "write `|| :` behind it, before the <<")
        if line.kind != "quiet":
            self._note_sizes(line, line.source)
        return True

    def _note_sizes(self, line: Line, text: str) -> None:
        for name, value in self.size.variables().items():
            given = self.known.get(name, "")
            if re.search(rf"\b{name}\b", text) and given != value:
                why = f"{name} is {given or 'not set'} in the script's job, {value} in hpml's"
                self.report.lost(line.line, line.source, why, f"write a number for ${name}")

    # Fields.

    def _put_launcher(self) -> None:
        fields, header, launch = self.fields, self.header, self.launch
        fields.put("name", fields.job.name, *self._lines_of("job-name"))
        if array := header.text("array"):
            try:
                fields.put("array", parse_array(array), *self._lines_of("array"))
            except ValueError as error:
                option = header.options["array"]
                self.report.lost(option.line, option.shown, str(error), "write `array` by hand")
        launcher: Value = launch.launcher or "srun"
        modules = [n for li in self.body.before if li.kind == "module" for n in li.value.split()]
        others = [name for name in modules if _OTHER_MPI.search(name)]
        if launcher == "mpirun" and others:
            why = f"the module {others[0]} has another MPI, and hpml starts Open MPI's mpirun only"
            launch.lost(launch.source, why, "write `launcher: srun` and `mpi: pmi2` or `mpi: pmix`")
        fields.put("launcher", launcher, launch.line)
        if launcher == "srun" and launch.mpi:
            fields.put("mpi", launch.mpi, launch.line)
        several = self.size.ranks * self.size.nodes > 1 and not PYTHON.fullmatch(launch.program)
        if launch.launcher == "srun" and several and not launch.mpi:
            why = "srun without --mpi takes the cluster's default, hpml takes none"
            launch.changed(why, "a program that uses MPI needs `mpi: pmix` or `mpi: pmi2`")
        if self.body.line.block and launch.launcher:
            why = f"{self.body.line.block}: hpml starts the launch line once, whatever is around it"
            self.report.lost(
                self.body.line.line,
                self.body.line.source,
                why,
                "for several runs use `array`; write the values of its variables into args",
            )

    def _lines_of(self, *options: str) -> list[int]:
        option = self.header.option(*options)
        return [option.line] if option else []

    def _put_program(self) -> None:
        launch, words = self.launch, self._words()
        for word in launch.words:
            if word not in words:
                why = "`hpml submit` passes no arguments to the program"
                launch.lost(word, why, "write them into args")
        rest = " ".join(map(shown, words[1:]))
        if not PYTHON.fullmatch(launch.program) and _STARTS.search(rest):
            why = f"{launch.program} starts the ranks: hpml does not bind or watch each of them"
            launch.lost(launch.source, why, "begin the command with the launcher")
        python = launch.python if launch.launcher == "torchrun" else ""
        if self.by_shell:
            self._put_shell()
        else:
            python = self._put_words([self._filled(word) or "" for word in words]) or python
        if python not in ("", "python") and not has_hole(python) and not self.by_shell:
            path = self.context.path(os.path.join(launch.directory, python))
            named = path if "/" in path else f"./{path}"
            self.fields.put("environment.python", named if "/" in python else python, launch.line)

    def _put_words(self, words: list[str]) -> str:
        """Set the program and its arguments; return its interpreter if that is Python."""
        launch, fields = self.launch, self.fields
        python = words[0] if PYTHON.fullmatch(launch.program) else ""
        rest = words[2:] if words[1:2] == ["-u"] else words[1:]
        first = "".join(rest[:1])
        if python and first == "-m" and len(rest) > 1:
            fields.put("module", rest[1], launch.line)
            rest = rest[2:]
        elif python and first and first[0] != "-" and "{" not in first and launch.directory:
            path = os.path.normpath(os.path.join(launch.directory, rest.pop(0)))
            inside = path.startswith(f"{self.workdir}/")
            script = os.path.relpath(path, self.workdir) if inside else path
            fields.put("script", script, launch.line)
        else:
            fields.put("command", tuple(words), launch.line)
            python, rest = "", []
        if rest:
            fields.put("args", tuple(rest), launch.line)
        for word in rest:
            if _OWN_DIRECTORY.search(word):
                why = "hpml also makes a directory for each task, which `hpml show` names"
                launch.changed(why, f"write {{run.dir}} for {word} if the program writes there")
        return python

    def _put_shell(self) -> None:
        """Have a shell start the program by the user's own line."""
        launch, self.by_shell = self.launch, True
        for name in _PROGRAM:
            if name in self.fields.stated:
                self.fields.remove(name)
        if self.body.line.block and not launch.launcher:
            text = self._block_text()
            own = "" if self.body.line.block == "a function" else self.body.line.source
        else:
            own = text = "exec " + " ".join(map(_quoted, launch.words))
        # In a function of the script $1 is the function's.
        if match := re.search(r"\$([1-9]|\{[1-9](?!:?[-=]))", own):
            why = "`hpml submit` passes no arguments to the program"
            launch.lost(match[0], why, "write its value into the command")
        used = re.findall(r"\$\{?[#!]?([A-Za-z_]\w*)", text)
        for name in dict.fromkeys(used):
            if name in self.values.variables:
                is_array = re.search(rf"\$\{{[#!]?{name}\[", text)
                line = f"export {name}"
                if is_array:  # an array cannot be exported
                    line = f'export ARRAY_{name}="$(declare -p {name})"'
                    text = f'eval "$ARRAY_{name}"\n{text}'
                self.exports.setdefault(name, line)
        self.fields.put("command", ("bash", "-c", _escaped(text)), launch.line)
        launch.changed(_BY_SHELL, "write them into `args` if you know them")

    def _is_call(self, line: Line) -> bool:
        """Whether a line calls the function that the launch line is in."""
        block = self.body.line
        is_inside = block.block == "a function" and not self.launch.launcher
        return is_inside and line.kind != "comment" and _names(block, line.source)

    def _block_text(self) -> str:
        """Return the loop, pipeline or function around the program, and what it needs to run."""
        block = self.body.line
        calls = [one for one in self.body.after if self._is_call(one)]
        if block.block == "a function" and not calls:
            self.launch.lost(block.source, "the script calls it nowhere", "call it in command")
        text = "\n".join([block.source, *(one.source for one in calls)])
        self._note_sizes(block, text)
        for line in reversed(self.body.before):
            if line.block == "a function" and _names(line, text):
                text = f"{line.source}\n{text}"
        options = [one for one in self.body.before if re.match(r"(set|shopt)\b", one.source)]
        for line in options:
            line.is_field = True
        return "\n".join([*(one.source for one in options), text])

    def _put_resources(self) -> None:
        size, header, fields, sizes = self.size, self.header, self.fields, self.launch.sizes
        gpus = size.gpus.count
        shared = size.ranks // gpus if gpus and size.ranks % gpus == 0 else 1
        states_ranks = header.option("ntasks-per-node", "ntasks") or any(
            word.isdecimal() for name, word in sizes.items() if name != "nodes"
        )
        default = 0 if states_ranks and shared == 1 else gpus * shared or 1
        seconds, time = header.numbers.get("time"), header.option("time")
        if time is None:
            why = "hpml asks for an hour, sbatch for the partition's default"
            self.report.changed(0, "no --time", why, "write resources.time")
        elif not seconds:
            why = "a job file needs a time limit: the job gets one hour"
            self.report.lost(time.line, time.shown, why, "write resources.time")
        extra = header.extra.values()
        values: dict[str, tuple[object, tuple[str, ...]]] = {
            "nodes": (size.nodes, ("nodes", "ntasks", "gpus")),
            "gpus": (size.gpus if header.gpus or gpus else None, (*header.gpus, "gres")),
            "ranks_per_gpu": (
                shared if shared > 1 else None,
                ("ntasks-per-gpu", "ntasks", "ntasks-per-node"),
            ),
            "ranks_per_node": (
                size.ranks if size.ranks != default else None,
                ("ntasks-per-node", "ntasks"),
            ),
            "cpus_per_rank": (size.cpus_per_rank, ("cpus-per-task", "cpus-per-gpu")),
            "memory": (size.memory_mb, ("mem", "mem-per-gpu")),
            "memory_per_cpu": (header.numbers.get("mem-per-cpu"), ("mem-per-cpu",)),
            "time": (seconds or None, ("time",)),
            **{
                name: (header.text(name) or None, (name,))
                for name in ("partition", "account", "qos", "constraint")
            },
            "exclusive": ("exclusive" in header.options or None, ("exclusive",)),
            "extra": (tuple(one.value for one in extra) or None, ()),
        }
        for name, (value, options) in values.items():
            lines = [line for option in options for line in self._lines_of(option)]
            lines += [one.line for one in extra] if name == "extra" else []
            # also where the script states hpml's default: a site profile may have another
            if value is not None and (value != getattr(Resources(), name) or lines):
                fields.put(f"resources.{name}", value, *lines)
        if header.mail_on:
            to = header.text("mail-user") or self.context.environment.get("USER") or getuser()
            lines = [*self._lines_of("mail-user"), *self._lines_of("mail-type")]
            on: Value = tuple(header.mail_on)
            fields.put("resources.mail", Mail(to, on), *lines)
        if self.launch.binding:
            policy: Value = self.launch.binding
            fields.put("binding", Binding(policy), self.launch.line)
        self._put_checkpoint()

    def _put_checkpoint(self) -> None:
        header, fields = self.header, self.fields
        lines = [*self._lines_of("signal"), *self._lines_of("requeue")]
        if header.signal:
            fields.put("checkpoint.signal", header.signal, *lines)
            if header.signal_seconds:
                fields.put("checkpoint.lead", header.signal_seconds, *lines)
        if header.signal or "requeue" in header.options:
            fields.put("checkpoint.requeue", tuple(dict.fromkeys(header.requeue)), *lines)

    def _put_environment(self) -> None:
        launch, fields, before = self.launch, self.fields, self.body.before
        modules = [line for line in before if line.kind == "module"]
        if modules:
            names = tuple(name for line in modules for name in line.value.split())
            fields.put("environment.modules", names, *(line.line for line in modules))
        for line in before:
            if line.kind in ("venv", "conda"):
                path = self.context.path(line.value) if "/" in line.value else line.value
                fields.put(f"environment.{line.kind}", path, line.line)
            line.is_field = line.is_field or line.kind in (*_SOFTWARE, "stage")
        if self.workdir != self.context.base:
            lines = [line.line for line in before if line.kind == "cd"]
            workdir = self.context.path(self.workdir)
            fields.put("workdir", workdir, *self._lines_of("chdir"), *lines)
        self._put_variables()
        if launch.container:
            container: Value = launch.container
            if "image" in container:
                mounts = tuple(container.get("mounts", ()))
                value = Container(container["engine"], container["image"], mounts)
                fields.put("environment.container", value, launch.line)
            if launch.directory != self.workdir:
                why = "the ranks of a container start in workdir"
                launch.lost(launch.source, why, "write workdir")

    def _put_variables(self) -> None:
        for line in self.body.before:
            if line.kind not in ("drop", "comment"):
                self._put_line(line)
        launch = self.launch
        for name, value in launch.variables.items():
            self._put_variable(name, value, launch.line, f"{name}={shown(value)}")
        if kept := [line for line in self.body.before if line.in_setup]:
            why = "they run once, on the first node, before the ranks"
            todo = "a line that fails ends the job: `|| :` behind it helps"
            said = f"{counted(len(kept), 'command')} in environment.setup"
            self.report.changed(kept[0].line, said, why, todo)
        self._put_setup()

    def _put_line(self, line: Line) -> None:
        """Set the variables of a line."""
        for name in OPENMP & line.assigned.keys() if self.launch.binding != "none" else ():
            self.report.add("dropped", line.line, line.source, OPENMP_REASON)
            del line.assigned[name]
            line.in_setup = line.in_setup and bool(line.assigned)
        for name, value in line.assigned.items() if line.exported else ():
            if not line.in_setup or name in _SET_LATER:
                line.is_field |= self._put_variable(name, value, line.line, line.source)
        if not line.exported and line.assigned.keys() <= PROVIDED and line.assigned:
            line.is_field = False
        line.is_field = line.is_field or line.in_setup
        if not line.is_field:
            is_option = re.match(r"set\b", line.source)
            why = "no shell line is left that it applies to" if is_option else _UNUSED
            self.report.add("dropped", line.line, line.source, why)

    def _put_setup(self) -> None:
        """Set `environment.setup`; lines between those that it has are comments in it."""
        kept, launch = [line for line in self.body.before if line.in_setup], self.launch
        text = self._export_lines()
        for line in self._region_before():
            if kept and line.line <= kept[-1].line:
                text += [line.source] if line.in_setup else self._commented([line])
        text += self.exports.values()
        if text:
            if launch.directory and launch.directory != self.values.directory:
                text.append(f"cd {shlex.quote(launch.directory)}")
            numbers = [n for one in kept for n in range(one.line, one.end + 1)]
            self.fields.put("environment.setup", "\n".join(text) + "\n", *numbers)

    def _region_before(self) -> list[Line]:
        lines = self.body.before
        start = next((n for n, line in enumerate(lines) if line.kind != "comment"), len(lines))
        return lines[start:]

    def _export_lines(self) -> list[str]:
        """Set the environment that `--export` asks for; return lines that setup needs first."""
        option = self.header.option("export")
        sources = [line.source for line in self.body.before if line.in_setup]
        sources += [*self.exports.values(), str(self.fields.job.command) * self.by_shell]
        lines = [
            f"{name}={shlex.quote(self.known[name])}"
            for name in ("SLURM_JOB_NAME", "SLURM_SUBMIT_DIR")  # hpml's job has others
            if any(name in source for source in sources)
        ]
        parts = [part for part in option.value.split(",") if part] if option else []
        if option:
            inherit = "all" if {"ALL", "all"} & set(parts) else "minimal"
            self.fields.put("environment.inherit", inherit, option.line)
        for part in parts:
            name, equals, value = part.partition("=")
            value = value if equals else self.context.environment.get(name, "")
            if value and (name not in OPENMP or self.launch.binding == "none"):
                self.fields.put(f"environment.variables.{name}", value, *self._lines_of("export"))
                if any(name in source for source in sources):
                    lines.insert(0, f"export {name}={shlex.quote(value)}")
        return lines

    def _put_variable(self, name: str, value: str, line: int, text: str) -> bool:
        """Set a variable of the ranks, in setup if only the job can compute it.

        Returns:
            Whether the draft has it.
        """
        default = {"OMP_NUM_THREADS": str(self.size.cpus_per_rank), "PYTHONUNBUFFERED": "1"}
        placed = self._placed(value)
        if name == "CUDA_VISIBLE_DEVICES":
            self.body.note_devices(line, text, placed)
            return False
        if name in OPENMP and self.launch.binding != "none":
            self.report.add("dropped", line, text, OPENMP_REASON)
            return False
        if name in PROVIDED or placed == default.get(name):
            self.report.add("dropped", line, text, f"hpml sets {name} itself")
            return False
        if has_hole(placed) and name in _SET_LATER:
            why = f"hpml sets {name} again after environment.setup"
            self.report.lost(line, text, why, f"write environment.variables.{name}")
            return False
        if "{stage." in placed:  # setup does not know the paths of staged data
            placed = self._filled(HOLE.sub('\0"\\1"\0', value.replace('"', ""))) or placed
        if has_hole(placed):
            self.exports[name] = f"export {name}={_shell_word(placed)}"
            return True
        if _SECRET.search(name):
            why = "the value can be read in the job file and in the records of its runs"
            todo = "remove it there, and export it before `hpml submit` instead"
            self.report.changed(line, f"{name}=…", why, todo)
        self.fields.put(f"environment.variables.{name}", placed, line)
        return True

    def _put_data(self) -> None:
        copies, path, results = self.copies, self.context.path, []
        if copies.staged:
            lines = [line.line for line in self.body.before if line.kind == "stage"]
            self.fields.put("stage", copies.stages(path), *lines)
        for result in copies.results:
            entry = copies.collected(result, path)
            where = f"{entry.target}/RUN/NODE/{os.path.basename(entry.source)}"
            why = f"on each node, all of {shown(result.place)} is copied back to {where}"
            if "dir}" in entry.source:
                why = f"the program writes to {entry.source}, which is copied back to {where}"
            self.report.changed(result.line, result.text, why)
            if entry not in results:
                results.append(entry)
        if results:
            lines = [result.line for result in copies.results]
            self.fields.put("collect", tuple(results), *lines)

    # Comments.

    def _head(self, notes: tuple[ImportNote, ...]) -> Iterator[str]:
        name = printable(self.name)
        yield f"Draft of {name} by hpml import; relative paths count from this file."
        yield from by_hand(notes)

    def _comments(self, lines: dict[int, set[str]]) -> dict[str, list[str]]:
        """Return the comments above each field: lines of the script that are in no field."""
        before, region = self.body.before, self._region_before()
        program = next(n for n in ("script", "module", "command") if n in self.fields.stated)
        last = max((line.line for line in before if line.in_setup), default=0)
        launch = self.body.line
        launch.is_field = not (launch.block and self.launch.launcher)
        for line in (*before, launch, *self.body.after):
            if line.source.startswith("#SBATCH") or line.line == 1:
                line.is_field = line.line in lines or line.line == 1
            for number in range(line.line, line.end + 1) if line.is_field else ():
                lines.setdefault(number, lines.get(line.line, {program}))
        rest = [one for one in region if one.line > last]
        places = ("resources", "environment", "stage", "collect", "checkpoint")
        there = [name for name in places if name in self.fields.written()]
        header = before[: len(before) - len(region)]
        above: dict[str, list[str]] = {}
        if self.by_shell:
            above["command"] = [f"# {row}" for row in textwrap.wrap(_BY_SHELL, 94)]
        for name, some in (("resources", header), ("environment", rest)):
            place = next((one for one in there if places.index(one) >= places.index(name)), "")
            above.setdefault(place, []).extend(self._commented(some))
        above.setdefault("", []).extend(self._commented([launch, *self.body.after]))
        return above

    def _commented(self, lines: list[Line]) -> Iterator[str]:
        """Yield comments with lines that are not in a field, below the reason."""
        before = ""
        for line in lines:
            is_own = line.kind == "comment" and not line.source.startswith("#SBATCH")
            if line.is_field:
                continue
            why = "" if is_own else self.report.reason(line.line, line.end) or _UNUSED
            if why and why != before:
                yield f"# {why}:"
            before = why
            rows = printable(line.source).split("\n")
            yield from rows if is_own else (f"#   {row}" for row in rows)


def _escaped(text: str) -> str:
    """Return text in which hpml sees no placeholder."""

    def doubled(match: re.Match[str]) -> str:
        is_one = PLACEHOLDER.fullmatch(match[0]) or intended_placeholder(match[1]) is not None
        return f"{{{match[0]}}}" if is_one else match[0]

    return BRACES.sub(doubled, text)


def _names(function: Line, text: str) -> bool:
    """Whether a text has the name of a function of the script."""
    name = re.match(r"(?:function\s+)?([^\s(){}]+)", function.source)
    return name is not None and bool(re.search(rf"(?<![\w-]){re.escape(name[1])}(?![\w-])", text))


def _read_names(source: str) -> set[str]:
    """Return the variables that a line of the script reads; in arithmetic they have no `$`."""
    return set(
        re.findall(r"\w+" if "((" in source or "[[" in source else r"\$\{?[#!]?(\w+)", source)
    )


def _shell_word(value: str) -> str:
    """Return a value as one word of a shell line, with variables in place of placeholders."""
    value = value.replace("{job.id}", '\0"$SLURM_JOB_ID"\0')
    value = re.sub(r"\{(local|shm)\.dir\}", lambda m: f'\0"$HPML_{m[1].upper()}_DIR"\0', value)
    value = value.replace("{array.index}", '\0"$SLURM_ARRAY_TASK_ID"\0')
    return _quoted(re.sub(r"\{env\.(\w+)\}", r'\0"$\1"\0', value))


def _quoted(value: str) -> str:
    """Return a value of the script as one word of a shell line."""
    if not value:
        return "''"
    parts = HOLE.split(value)
    return "".join(p if i % 2 else shlex.quote(p) for i, p in enumerate(parts) if p)


# The size of the job.


@dataclass(frozen=True)
class _Size:
    """What the draft asks for; `ranks`, `gpus` and `memory_mb` are per node."""

    nodes: int
    ranks: int
    cpus_per_rank: int
    gpus: Gpus
    memory_mb: int | None

    def variables(self) -> dict[str, str]:
        """Return the variables of Slurm that may be others in hpml's job than in the script's."""
        return {
            "SLURM_CPUS_PER_TASK": str(self.cpus_per_rank),
            **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), str(self.nodes * self.ranks)),
            "SLURM_NTASKS_PER_NODE": str(self.ranks),
            **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), str(self.nodes)),
        }


def _job_size(header: Header, launch: Launch, report: ImportReport) -> _Size:
    """Return what a job file must ask for so that the program gets what it gets now."""
    given = allocation(header, report)
    started, nodes = _started_nodes(given, launch), given.nodes
    if started != nodes:
        option = header.option("nodes", "ntasks", "gpus")
        line, text = (option.line, option.shown) if option else (launch.line, launch.source)
        why = f"the program starts on {started} of the header's {nodes} nodes"
        why += "; the others would be idle" if started < nodes else ""
        todo = f"is it distributed? Then write resources.nodes: {nodes}, and launcher: torchrun "
        report.lost(line, text, why, f"{todo}(PyTorch), srun or mpirun")
        given = dataclasses.replace(given, nodes=started)
        nodes = started
    elif launch.outer is not None:
        outer = dataclasses.replace(launch, sizes=launch.outer, report=report)
        per_node = (outer.size("per_node") or 0) * nodes
        started = outer.size("total") or per_node or given.tasks or nodes
        if started != (nodes if launch.launcher == "torchrun" else 1):
            why = f"srun starts the launcher {started} times on {nodes} nodes, hpml once on each"
            launch.lost(launch.source, why, "correct ranks_per_node in the draft")
    ranks = _ranks(header, given, launch)
    cpus = -(-given.cpus // ranks)
    if cpus * ranks != given.cpus:
        launch.changed(
            f"{ranks} ranks share {counted(given.cpus, 'CPU')} per node by the header; "
            f"the job file asks for {cpus} each",
            "change resources.cpus_per_rank",
        )
    if not launch.launcher and given.gpus.count > 1:
        launch.changed(
            f"one process with {given.gpus.count} GPUs becomes one rank, which also finds RANK=0, "
            "WORLD_SIZE=1, LOCAL_RANK=0",
            "if it starts one process per GPU itself (Lightning, accelerate), remove launcher and "
            "ranks_per_node: hpml then starts one rank per GPU",
        )
    hides = header.option(*HIDES_GPUS)
    if hides and given.gpus.count > 1 and launch.launcher != "torchrun":
        report.changed(hides.line, hides.shown, *ALL_GPUS)
    return _Size(nodes, ranks, cpus, given.gpus, _memory(header, given, report))


def _started_nodes(given: Allocation, launch: Launch) -> int:
    if launch.launcher in ("", "horovodrun"):
        return 1
    default = 1 if launch.launcher == "torchrun" else given.nodes
    return launch.size("nodes") or default


def _ranks(header: Header, given: Allocation, launch: Launch) -> int:
    """Return the ranks of each node."""
    if not launch.launcher:
        return 1
    word = launch.sizes.get("per_node", "")
    if launch.launcher == "torchrun" and word in ("gpu", "auto", "cpu"):
        if word == "gpu" and not given.gpus.count:
            why = "starts a rank for each GPU, and the header asks for none"
            launch.lost(launch.source, why, "write resources.gpus, or ranks_per_node")
        return given.cpus if word == "cpu" else given.gpus.count or given.cpus
    per_node, total = launch.size("per_node"), launch.size("total")
    if total is None and per_node is None:
        tasks = given.tasks // given.nodes if given.tasks else None
        per_node = ranks_per_domain(launch, header, tasks)
        if launch.launcher == "torchrun":
            per_node = given.gpus.count or 1
    placed = per_node or "per_domain" in launch.sizes
    if total is None:
        total = per_node * given.nodes if per_node else given.tasks or given.nodes
    if launch.launcher == "mpirun" and given.nodes > 1 and total != given.tasks and not placed:
        why = f"mpirun fills one node after the other; the header has {given.tasks or 1} tasks"
        launch.lost(launch.source, why, "correct resources: hpml starts as many on each node")
    elif total % given.nodes or (per_node and per_node * given.nodes != total):
        why = f"{total} ranks on {given.nodes} nodes are not as many on each"
        launch.lost(launch.source, why, "correct ranks_per_node in the draft")
    return -(-total // given.nodes)


def _memory(header: Header, given: Allocation, report: ImportReport) -> int | None:
    """Return the memory of a node in MiB; None if the header does not say."""
    option, numbers = header.option(*MEMORY), header.numbers
    if option is None or numbers.get("mem"):
        return numbers.get("mem")
    if option.name == "mem":
        return ALL_MEMORY
    if option.name == "mem-per-cpu":
        return None  # a field of its own
    count, each = given.gpus.count, numbers[option.name]
    why = f"{count} GPUs x {size_text(each)} = {size_text(count * each)}"
    report.changed(option.line, option.shown, f"a job file has the memory of a node: {why}")
    return count * each or None
