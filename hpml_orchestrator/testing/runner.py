"""A runner of commands that answers from a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from hpml_orchestrator.scheduler.command import CommandMissing, Completed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

Answer: TypeAlias = "Completed | BaseException"


@dataclass(frozen=True)
class CommandCall:
    """One command that was run."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    timeout: float
    cwd: Path | None = None


class FakeRunner:
    """A `Runner` for tests: answers of each command in turn, the last one repeatedly.

    A key may name more than the command, `scontrol show node`: the longest that begins the call
    is the one that answers. An exception in place of an answer is raised. A command without
    answers is not installed.

    >>> run = FakeRunner({"squeue": [Completed(0, "hello")]})
    >>> run.run(["squeue", "--me"], env={}, timeout=1).stdout
    'hello'
    >>> run.calls[0].argv
    ('squeue', '--me')
    """

    def __init__(self, answers: Mapping[str, Sequence[Answer]]) -> None:
        self._answers = {command: list(queue) for command, queue in answers.items()}
        self.calls: list[CommandCall] = []

    def count(self, command: str) -> int:
        """Return how often a command was run."""
        return sum(call.argv[0] == command for call in self.calls)

    def run(self, argv: Sequence[str], *, env: Mapping[str, str], timeout: float) -> Completed:
        """Answer from the table."""
        return self._answer(CommandCall(tuple(argv), dict(env), timeout))

    def run_detached(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        timeout: float,
        cwd: Path,
        stdout: Path,
        stderr: Path,
    ) -> int:
        """Answer from the table, into the files."""
        stdout.write_bytes(b"")
        stderr.write_bytes(b"")
        done = self._answer(CommandCall(tuple(argv), dict(env), timeout, cwd))
        stdout.write_text(done.stdout, encoding="utf-8")
        stderr.write_text(done.stderr, encoding="utf-8")
        return done.returncode

    def _answer(self, call: CommandCall) -> Completed:
        self.calls.append(call)
        fitting = [key for key in self._answers if _begins(call.argv, key)]
        queue = self._answers[max(fitting, key=len)] if fitting else []
        if not queue:
            raise CommandMissing(f"there is no command {call.argv[0]}")
        answer = queue.pop(0) if len(queue) > 1 else queue[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer


def _begins(argv: Sequence[str], key: str) -> bool:
    words = key.split()
    return list(argv[: len(words)]) == words
