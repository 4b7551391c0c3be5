"""Walk through the commands of a script: collect what they set up, and what they start."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpml_orchestrator.convert import branches
from hpml_orchestrator.convert.commands import EFFECTLESS, HANDLERS, PREPARES
from hpml_orchestrator.convert.launch import Launch
from hpml_orchestrator.convert.launchers import peel
from hpml_orchestrator.convert.lexer import ShellError
from hpml_orchestrator.convert.parser import parse
from hpml_orchestrator.convert.staging import Staging
from hpml_orchestrator.convert.syntax import (
    Branches,
    Command,
    Function,
    Item,
    Loop,
    Node,
    Pipeline,
    Redirect,
    Script,
)
from hpml_orchestrator.convert.values import Expander, Variable, has_hole

if TYPE_CHECKING:
    from hpml_orchestrator.convert.findings import Report

__all__ = ["Walk"]

_MAX_DEPTH = 12
_MAX_ROUNDS = 64
_MAX_STEPS = 20_000
_TEES = frozenset("tee ts cat grep sed awk unbuffer sort tail head rotatelogs".split())
_OUTPUT = ("hpml keeps all output in the run's record", "`hpml logs RUN` prints it")
_DECLARES = frozenset("export declare typeset local readonly".split())
_SHELLS = frozenset({"bash", "sh"})
_TESTS = frozenset("[ test grep command type which true false".split())


@dataclass
class Found:
    """What a script sets up.

    Attributes:
        directories: made by it, outside of the nodes -> line.
        exported: variables that programs see -> line and text.
        quiet: harmless commands that are left out, name -> line.
    """

    modules: list[tuple[str, int]] = field(default_factory=list)
    conda: tuple[str, int] | None = None
    venv: tuple[str, int] | None = None
    exported: dict[str, tuple[int, str]] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)
    quiet: dict[str, int] = field(default_factory=dict)
    directories: list[tuple[str, int]] = field(default_factory=list)


class Walk:
    """Goes through a script and collects what it does; nothing is run.

    Args:
        expander: what is known of variables.
        report: takes what cannot be carried.
    """

    def __init__(self, expander: Expander, report: Report) -> None:
        self.expander = expander
        self.report = report
        self.staging = Staging(expander, report)
        self.found = Found()
        self.functions: dict[str, Node] = {}
        self._depth = 0
        self._steps = 0
        self._loop = 0
        self.exports_all = False
        self.start = expander.directory
        self.on_node = False  # whether the script has gone to a directory of the node's own

    def script(self, script: Script) -> None:
        """Go through a list of commands."""
        directory = self.expander.directory
        for chain in branches.chains(script.items):
            if len(chain) > 1 and _decides(chain[0].pipeline):
                self.guarded(chain)
            else:
                for item in chain:
                    self._item(item)
        if script.subshell:
            self.expander.directory = directory

    def guarded(self, chain: list[Item]) -> None:
        """Go through what a test decides: what it sets is known in the job only."""
        source = branches.joined(chain)
        before, values = self._state(), dict(self.expander.variables)
        for item in chain:
            self._item(item)
        self._leave_open(values, source, chain[0].pipeline.line)
        if self._state() != before:
            self.report.changed(
                chain[0].pipeline.line,
                source,
                "what the test decides is known in the job only: read as if it were true",
                "look whether that is what you want",
            )

    def _leave_open(self, values: dict[str, Variable], source: str, line: int) -> None:
        """Leave variables that were set since to the job."""
        for name, variable in list(self.expander.variables.items()):
            if values.get(name) is not variable:
                self._open(name, values.get(name), source, line)

    def _open(self, name: str, before: Variable | None, source: str, line: int) -> None:
        """Leave a variable to the job, which sets it as the script did, and perhaps once more."""
        known = before.definition if before is not None else ""
        self.expander.variables[name] = Variable(None, f"{known}\n{source}".lstrip("\n"), line)

    def _item(self, item: Item) -> None:
        if item.join == "||" and not self._launches(item.pipeline):
            return  # what is done when something fails
        self.pipeline(item.pipeline)

    def _launches(self, pipeline: Pipeline) -> bool:
        return bool(re.search(r"\b(srun|torchrun|mpirun|accelerate|deepspeed)\b", pipeline.source))

    def pipeline(self, pipeline: Pipeline) -> None:
        """Go through one pipeline: the launch in it, or its first command."""
        first, *others = pipeline.nodes
        names = [_name(node) for node in pipeline.nodes]
        if others and names[0] in EFFECTLESS and any(_starts(node) for node in others):
            first = next(node for node in others if _starts(node))
            self.report.lost(
                pipeline.line,
                pipeline.source,
                "ranks read no standard input",
                "give the program a file's name",
            )
        count = len(self.found.launches)
        self.node(first)
        if others and len(self.found.launches) > count:
            after = [name for name in names[pipeline.nodes.index(first) + 1 :] if name]
            if set(after) <= _TEES:
                self._output(pipeline.line, f"| {' | '.join(after)}")
            else:
                self.report.lost(
                    pipeline.line, pipeline.source, "output goes to the run's record, not to a pipe"
                )

    def _output(self, line: int, text: str) -> None:
        self.report.changed(line, text, *_OUTPUT)

    def node(self, node: Node) -> None:
        """Go through one command, simple or not."""
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise ShellError(getattr(node, "line", 1), "loops over more than hpml follows")
        self._depth += 1
        try:
            if self._depth > _MAX_DEPTH * 4:
                raise ShellError(getattr(node, "line", 1), "functions that call each other")
            if isinstance(node, Command):
                self.command(node)
            elif isinstance(node, Script):
                self.script(node)
            elif isinstance(node, Function):
                self.functions[node.name] = node.body
            elif isinstance(node, Loop):
                self.loop(node)
            elif isinstance(node, Branches):
                self.branches(node)
        finally:
            self._depth -= 1

    def branches(self, node: Branches) -> None:
        """Take the first branch, and say so if that makes a difference."""
        for condition in node.conditions[:1]:
            for item in condition.items:
                if any(_starts(one) for one in item.pipeline.nodes):
                    self.pipeline(item.pipeline)
        before = self._state()
        values = dict(self.expander.variables)
        if node.bodies:
            self.script(node.bodies[0])
        self._leave_open(values, node.source, node.line)
        others = node.bodies[1:]
        for name in branches.sets(others):
            self._open(name, values.get(name), node.source, node.line)
        launches = len(self.found.launches)
        for body in others:
            if any(self._launches(item.pipeline) for item in body.items):
                self.script(body)
        changed = self._state() != before or len(self.found.launches) != launches
        if changed or branches.acts(others):
            self.report.changed(
                node.line,
                node.source.split("\n")[0],
                f"what `{node.keyword}` decides is known in the job only: "
                + (
                    "read as if its condition were true"
                    if node.keyword == "if"
                    else "its first case is taken"
                ),
                "look whether that is what you want",
            )

    def _state(self) -> tuple[object, ...]:
        found = self.found
        return (
            len(found.modules),
            found.conda,
            found.venv,
            len(found.exported),
            len(found.launches),
            self.expander.directory,
            len(self.staging.entries),
        )

    def loop(self, node: Loop) -> None:
        """Go through the rounds of a loop over words that are known, once through all others."""
        outer, self._loop = self._loop, self._loop or node.line
        values = None if node.words is None else self.expander.words(node.words)
        if values is None or any(map(has_hole, values)) or not node.variable:
            if node.variable:
                self.expander.variables[node.variable] = Variable(None, "", node.line)
            count = len(self.found.launches)
            self.script(node.body)
            if len(self.found.launches) > count:
                self.report.lost(
                    node.line,
                    node.source.split("\n")[0],
                    "how often the loop starts a program is known in the job only",
                    "submit each round as a job of its own",
                )
        else:
            for value in values[:_MAX_ROUNDS]:
                self.expander.assign(node.variable, (value,), node.line)
                self.script(node.body)
        self._loop = outer

    def command(self, command: Command) -> None:  # noqa: C901, PLR0912 - a branch per kind
        """Go through a simple command."""
        declares = bool(command.words) and command.words[0].source in _DECLARES
        if command.assignments and (declares or not command.words):
            self.assign_all(command)
        if not command.words:
            return
        words = self.expander.words(command.words)
        if not words:
            return
        name = os.path.basename(words[0])
        if name in _DECLARES:
            self.exports(name, words[1:], command)
        elif words[0] in self.functions:
            self.call(words, command)
        elif name in HANDLERS and HANDLERS[name](self, words, command):
            pass
        elif name in ("read", "mapfile", "readarray", "getopts"):
            for word in words[1:]:
                if word.isidentifier():
                    self.expander.variables[word] = Variable(None, command.source, command.line)
        elif name == "shift" and self.expander.positional is not None:
            count = int(words[1]) if len(words) > 1 and words[1].isdigit() else 1
            self.expander.positional = self.expander.positional[count:]
        elif name in EFFECTLESS and _writes(command):
            self.report.lost(
                command.line,
                command.source.split("\n")[0],
                "writes a file that a program may read",
                "write it once by hand, or let the program write it",
            )
        elif name in EFFECTLESS:
            self.found.quiet.setdefault(name, command.line)
        elif self.staging.take(words, command.line, command.source):
            pass
        elif name in PREPARES and words[:2] != ["uv", "run"]:
            why, todo = PREPARES[name]
            self.report.lost(command.line, command.source, why, todo)
        else:
            self.launch(words, command)

    def assign_all(self, command: Command) -> None:
        """Set the variables of an assignment."""
        for one in command.assignments:
            before = self.expander.variables.get(one.name)
            if one.array and one.source.startswith(f"{one.name}["):
                self.expander.variables[one.name] = Variable(None, one.source, one.line)
                continue
            if one.array:
                items = tuple(self.expander.words(one.words))
            else:
                items = (self.expander.text(one.words[0]),)
            if one.append and before is not None and before.items is not None:
                is_list = before.is_list or one.array
                items = (*before.items, *items) if is_list else (before.items[0] + items[0],)
                self.expander.assign(one.name, items, one.line, is_list=is_list)
            else:
                self.expander.assign(one.name, items, one.line, is_list=one.array)
            if self.exports_all:
                self.found.exported[one.name] = (one.line, one.source)

    def exports(self, name: str, words: list[str], command: Command) -> None:
        """Note which variables programs see."""
        if name != "export" and not any(re.fullmatch(r"-\w*x\w*", word) for word in words):
            return
        if any(re.fullmatch(r"-\w*[nf]\w*", word) for word in words):
            return
        for one in command.assignments:
            self.found.exported[one.name] = (one.line, f"{name} {one.source}")
        for word in words:
            if word.isidentifier():
                self.found.exported[word] = (command.line, command.source)

    def call(self, words: list[str], command: Command) -> None:
        """Go through a function of the script."""
        if self._depth > _MAX_DEPTH:
            raise ShellError(command.line, f"the function {words[0]} calls itself")
        outer = self.expander.positional
        self.expander.positional = tuple(words[1:])
        self.node(self.functions[words[0]])
        self.expander.positional = outer

    def launch(self, words: list[str], command: Command) -> None:
        """Keep a command that starts a program."""
        variables = {one.name: self.expander.text(one.words[0]) for one in command.assignments}
        launch = Launch(
            command.line,
            command.source,
            words,
            variables=variables,
            looped=self._loop,
        )
        launch = peel(launch, self.expander, launch.notes)
        if not launch.words:
            if not launch.helper:
                self.report.lost(command.line, command.source, "starts no program")
            return
        inner = os.path.basename(launch.words[0])
        if launch.launcher == "srun" and self._around(launch, inner, command):
            return
        if inner in _SHELLS and self._shell(launch, command):
            return
        if inner in _SHELLS and len(launch.words) > 1:
            launch.notes.changed(
                launch.line,
                launch.source,
                "carried as a command: what its script does was not read",
            )
        if _is_helper(launch.words):
            self.report.lost(
                command.line,
                command.source,
                "prepares the training, and is no part of it",
                "do it once by hand",
            )
            return
        self._redirects(launch, command.redirects)
        self._keep(launch)

    def _around(self, launch: Launch, inner: str, command: Command) -> bool:
        """Whether srun starts a small command on the nodes: a copy, a look, a directory."""
        if inner == "mkdir":
            return HANDLERS["mkdir"](self, launch.words, command)
        if inner in EFFECTLESS or (inner == "rm" and HANDLERS["rm"](self, launch.words, command)):
            self.found.quiet.setdefault(f"srun {inner}", command.line)
            return True
        if self.staging.take(launch.words, command.line, command.source):
            return True
        if inner in PREPARES:
            self.report.lost(command.line, command.source, *PREPARES[inner])
            return True
        return False

    def _keep(self, launch: Launch) -> None:
        """Keep a launch with the environment that it would find."""
        if not launch.directory:
            launch.directory = self.expander.directory
            launch.on_node = self.on_node
        launch.modules = tuple(self.found.modules)
        launch.conda, launch.venv = self.found.conda, self.found.venv
        for name, (line, source) in self.found.exported.items():
            variable = self.expander.variables.get(name)
            if variable is not None and name not in launch.exported:
                value = variable.items[0] if variable.items else None
                launch.exported[name] = (line, source, value)
        self.found.launches.append(launch)

    def _redirects(self, launch: Launch, redirects: tuple[Redirect, ...]) -> None:
        for one in redirects:
            if one.operator.startswith("<"):
                if one.operator in ("<<", "<<-") and launch.words[1:] in ([], ["-"]):
                    launch.standard_input = "".join(one.document)
                    launch.words = [launch.words[0], "-c", launch.standard_input]
                else:
                    launch.notes.lost(
                        launch.line,
                        f"{one.operator}{one.target.source}",
                        "ranks read no standard input",
                        "give the program a file's name",
                    )
            elif one.target.source not in ("1", "2", "/dev/null"):
                launch.notes.changed(launch.line, f"{one.operator}{one.target.source}", *_OUTPUT)

    def _shell(self, launch: Launch, command: Command) -> bool:
        """Look into `bash -c TEXT`; True where that found the program."""
        words = launch.words[1:]
        while words and re.fullmatch(r"-[elux]+", words[0]):
            words = words[1:]
        match = re.fullmatch(r"-[elux]*c", words[0]) if words else None
        if match is None or len(words) < 2:  # noqa: PLR2004 - -c and its text
            return False
        try:
            script = parse(self._text(words[1]), command.line)
        except ShellError:
            return False
        count = len(self.found.launches)
        state = self._state()
        positional, self.expander.positional = self.expander.positional, tuple(words[3:])
        directory = self.expander.directory
        self.script(script)
        self.expander.positional = positional
        self.expander.directory = directory
        inner = self.found.launches[count:]
        del self.found.launches[count:]
        if len(inner) != 1 or script.items[-1].background:
            if not inner and self._state() == state:
                return False
            self._keep(launch)
            return True
        only = inner[0]
        only.notes.merge(launch.notes)
        self.found.launches.append(
            only.also(
                line=launch.line,
                source=launch.source,
                launcher=only.launcher or launch.launcher,
                single_node=only.single_node and not launch.launcher,
                per_node=only.per_node if only.launcher else launch.per_node,
                total=only.total if only.launcher else launch.total,
                nodes=only.nodes or launch.nodes,
                mpi=only.mpi or launch.mpi,
                container=only.container or launch.container,
                variables={**launch.variables, **only.variables},
            )
        )
        return True

    def _text(self, value: str) -> str:
        """Return the text of `bash -c` with what the outer shell left to the job written back."""
        return self.expander.source(value)


def _decides(pipeline: Pipeline) -> bool:
    """Whether a pipeline is there for its exit status."""
    names = [_name(node) for node in pipeline.nodes]
    return pipeline.source.startswith(("[[", "((")) or names[-1] in _TESTS


def _writes(command: Command) -> bool:
    """Whether a command's output goes to a file."""
    return any(
        ">" in one.operator
        and "&" not in one.operator.removeprefix("&")
        and not one.target.source.startswith("/dev/")
        for one in command.redirects
    )


def _name(node: Node) -> str:
    if isinstance(node, Command) and node.words:
        return os.path.basename(node.words[0].source)
    return ""


def _starts(node: Node) -> bool:
    """Whether a command may start a program."""
    name = _name(node)
    return bool(name) and name not in EFFECTLESS and name not in PREPARES and name not in HANDLERS


def _is_helper(words: list[str]) -> bool:
    """Whether a call of Python is one of those that prepare or look."""
    if not re.fullmatch(r"python(\d(\.\d+)?)?", os.path.basename(words[0])):
        return False
    rest = [word for word in words[1:] if word not in ("-u", "-B", "-O")]
    if rest[:1] in (["-V"], ["--version"], []):
        return True
    return rest[0] == "-m" and rest[1:2] and rest[1] in ("pip", "venv", "ensurepip", "virtualenv")  # type: ignore[return-value]
