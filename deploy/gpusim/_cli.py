"""The command gpusim: runs programs with simulated GPUs that look busy, and compares drivers."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.gpusim.gpusim import (
    Curve,
    Device,
    GpusimError,
    Process,
    Ramp,
    Simulator,
    Sine,
    Square,
    State,
    a100,
    divided,
    h100,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["main"]

_MODELS = {"a100": a100, "h100": h100}
_GIB = 1 << 30
_DIFFERENT = 3
_MAX_GPUS = 31  # PCI addresses are made 8 apart


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    node = argparse.ArgumentParser(add_help=False)
    node.add_argument("--gpus", type=int, default=8, metavar="N", help="how many (default: 8)")
    node.add_argument("--model", choices=sorted(_MODELS), default="h100")
    node.add_argument("--mig", action="store_true", help="divide the last GPU: 1, 2 and 3 slices")
    parser = argparse.ArgumentParser(
        prog="gpusim", description="Simulated NVIDIA GPUs for machines without any."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", parents=[node], help="run a command that sees simulated GPUs")
    run.add_argument("--state", type=Path, metavar="FILE", help="use this state file instead")
    run.add_argument("words", nargs="+", metavar="COMMAND", help="after --")
    state = commands.add_parser(
        "state", parents=[node], help="write a state file, to be changed by hand"
    )
    state.add_argument("file", type=Path)
    compare = commands.add_parser("compare", help="how this machine's GPU answers otherwise")
    compare.add_argument("--model", choices=sorted(_MODELS), default="h100")
    arguments = parser.parse_args(words)
    if not 1 <= getattr(arguments, "gpus", 1) <= _MAX_GPUS:
        parser.error(f"--gpus takes 1 to {_MAX_GPUS}")
    return arguments


def _busy(gpu: Device, number: int) -> Device:
    """A GPU at work: every figure moves, each GPU in a rhythm of its own."""
    ranges = {
        "util": (5, 95),
        "mem_util": (2, 60),
        "power": (90, 350 + 5 * number),
        "clock_sm": (345, 1755),
        "clock_graphics": (345, 1755),
        "pcie_tx": (1e6, 2e9),
        "pcie_rx": (1e6, 4e9),
        "nvlink_tx": (0, 5e9),
        "nvlink_rx": (0, 5e9),
        "gpm_graphics": (5, 95),
        "gpm_sm": (3, 80),
        "gpm_occupancy": (1, 35),
        "gpm_tensor": (0, 45),
        "gpm_dram": (1, 55),
    }
    moves: dict[str, Curve] = {
        name: Square(20 + 3 * number, low, high, 2 * number, 0.7)
        for name, (low, high) in ranges.items()
        if name in gpu.settings
    }
    moves["temp"] = Sine(60, 40, 70 + number, 5 * number)
    moves["throttle_sw_power"] = Square(45, 0, 1, number, 0.1)
    moves["ecc_vol_cor"] = Ramp(0, 0.01)
    return gpu.changed(**moves)


def _node(arguments: argparse.Namespace) -> State:
    make = _MODELS[arguments.model]
    gpus = [_busy(make(number), number) for number in range(arguments.gpus)]
    if arguments.mig:
        gpus[-1] = divided(gpus[-1], 1, 2, 3)
    return State(gpus=tuple(gpus))


def _with_process(state: State, pid: int) -> State:
    """The command itself is on every second GPU: the others are allocated to nobody."""
    for index, gpu in enumerate(state.gpus):
        if index % 2 == 0 and not gpu.mig:
            process = Process(pid, memory=(10 + index) * _GIB, sm=60)
            state = state.changed(index, processes=(process,))
    return state


def _run(arguments: argparse.Namespace) -> int:
    simulator = Simulator()
    with tempfile.TemporaryDirectory(prefix="hpml-gpusim-") as scratch:
        path = arguments.state or Path(scratch) / "state"
        state = None if arguments.state else simulator.write(_node(arguments), path)
        environment = os.environ | simulator.environment(path.resolve())
        # before the child begins, or a signal in that moment would leave it behind
        child: subprocess.Popen[bytes] | None = None
        asked: list[int] = []

        def pass_on(number: int, _: object) -> None:
            asked.append(number)
            if child is not None:
                child.terminate()

        # the terminal sends its signals to both: the child decides what they mean
        signal.signal(signal.SIGINT, lambda *_: None)  # it would inherit that one is ignored
        signal.signal(signal.SIGTERM, pass_on)
        try:
            child = subprocess.Popen(arguments.words, env=environment)
        except OSError as error:
            raise GpusimError(f"{arguments.words[0]}: {error.strerror}") from error
        if asked:
            child.terminate()
        if state is not None:
            simulator.write(_with_process(state, child.pid), path)
        code = child.wait()
    return code if code >= 0 else 128 - code


def _answers(environment: Mapping[str, str]) -> tuple[str, dict[str, object]]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("_answers.py"))],
        env=dict(environment),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        why = done.stderr.strip().rpartition("\n")[2]
        raise GpusimError(f"{sys.executable} cannot ask the driver: {why}")
    told = json.loads(done.stdout)
    return told["name"], told["answers"]


def _compare(arguments: argparse.Namespace) -> int:
    """Prints what a real driver answers in another way; 3 where there is a difference."""
    simulator = Simulator()
    real, expected = _answers(os.environ)
    with tempfile.TemporaryDirectory(prefix="hpml-gpusim-") as scratch:
        path = Path(scratch) / "state"
        gpu = _MODELS[arguments.model](0)
        simulator.write(State(gpus=(gpu,), epoch=time.time() - 60), path)  # it has samples by now
        name, found = _answers(os.environ | simulator.environment(path))
    different = [each for each, answer in expected.items() if found[each] != answer]
    print(f"{len(expected)} questions, {len(different)} answered in different ways")
    if different:
        print(f"\n| | {real} | {name} |\n|---|---|---|")
    for each in different:
        print(f"| {each} | {expected[each]} | {found[each]} |")
    return _DIFFERENT if different else 0


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
        The exit status: the command's own (128 + n if signal n ended it), 3 where `compare` finds a
        difference, or 1 with a message.
    """
    arguments = _arguments(words)
    try:
        if arguments.command == "compare":
            return _compare(arguments)
        if arguments.command == "state":
            Simulator().write(_node(arguments), arguments.file)
            return 0
        return _run(arguments)
    except (GpusimError, OSError) as error:
        print(f"gpusim: {error}", file=sys.stderr)
        return 1
