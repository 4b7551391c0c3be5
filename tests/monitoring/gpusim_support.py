"""Simulated GPUs for tests: the library, a state file each, and child processes that see them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deploy.gpusim.gpusim import GpusimError, Simulator, State

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROBE = Path(__file__).with_name("gpusim_probe.py")


@dataclass
class Gpusim:
    """A state file, and what sees it."""

    path: Path
    simulator: Simulator = field(default_factory=Simulator)

    def write(self, state: State) -> State:
        """Makes this the state; every process sees it with its next call."""
        return self.simulator.write(state, self.path)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a process that sees the GPUs."""
        return dict(os.environ) | self.simulator.environment(self.path)

    def run(self, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs this Python with these arguments and returns its output."""
        return subprocess.run(  # noqa: PLW1510 - the options have it
            [sys.executable, *words],
            **{
                "env": self.environment,
                "capture_output": True,
                "text": True,
                "timeout": 240,
                "check": False,
                "stdin": subprocess.DEVNULL,
                **options,
            },
        )

    @contextlib.contextmanager
    def probe(self, *, start: bool = True) -> Iterator[Probe]:
        """A child process that calls NVML; it has called nvmlInit if `start` is true."""
        with subprocess.Popen(
            [sys.executable, str(_PROBE)],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as child:
            try:
                probe = Probe(child)
                if start:
                    assert probe("nvmlInit()") is None
                yield probe
            finally:
                child.kill()


@dataclass(frozen=True)
class Probe:
    """Asks the child; `send` and `answer` apart for calls that hang."""

    child: subprocess.Popen[str]

    def send(self, expression: str) -> None:
        """Lets the child begin."""
        assert self.child.stdin is not None
        self.child.stdin.write(expression + "\n")
        self.child.stdin.flush()

    def answer(self) -> Any:
        """Waits for the child's answer."""
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        if not line:
            assert self.child.stderr is not None
            pytest.fail(f"the probe ended: {self.child.stderr.read()}")
        return json.loads(line)

    def __call__(self, expression: str) -> Any:
        self.send(expression)
        return self.answer()


@pytest.fixture(scope="session")
def gpusim_library() -> Simulator:
    """Builds the simulated driver; skips with a clear reason if no C compiler is found."""
    simulator = Simulator()
    try:
        simulator.build()
    except GpusimError as error:
        if "no C compiler" not in str(error):
            raise
        pytest.skip(f"NO SIMULATED GPUS: {error}")
    return simulator


@pytest.fixture
def gpusim(gpusim_library: Simulator, tmp_path: Path) -> Gpusim:
    """A state file of the test's own."""
    return Gpusim(tmp_path / "gpusim.state", gpusim_library)
