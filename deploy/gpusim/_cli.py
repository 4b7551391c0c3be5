"""The command gpusim: runs programs with simulated GPUs, and changes these while they run."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.gpusim._curves import parse
from deploy.gpusim.gpusim import (
    Device,
    Event,
    GpusimError,
    Process,
    Ramp,
    Simulator,
    Square,
    State,
    a100,
    divided,
    h100,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_MODELS = {"a100": a100, "h100": h100}
_GIB = 1 << 30
_MAX_GPUS = 31  # PCI addresses are made 8 apart
_RANGES = """
util=5,95 mem_util=2,60 power=90,350 temp=40,70 clock_sm=345,1755 clock_graphics=345,1755
pcie_tx=1e6,2e9 pcie_rx=1e6,4e9 nvlink_tx=0,5e9 nvlink_rx=0,5e9 gpm_graphics=5,95 gpm_sm=3,80
gpm_occupancy=1,35 gpm_tensor=0,45 gpm_dram=1,55""".split()
"""Low and high of the figures of a busy GPU."""


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    node = argparse.ArgumentParser(add_help=False)
    node.add_argument("--gpus", type=int, default=8, metavar="N", help="how many (default: 8)")
    node.add_argument("--model", choices=sorted(_MODELS), default="h100")
    node.add_argument("--mig", action="store_true", help="divide the last GPU: 1, 2 and 3 slices")
    node.add_argument("--node", default="", metavar="NAME", help="GPUs of another node's UUIDs")
    node.add_argument("--idle", action="store_true", help="nothing moves until `set` changes it")
    parser = argparse.ArgumentParser(
        prog="gpusim", description="Simulated NVIDIA GPUs for machines without any."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", parents=[node], help="run a command that sees simulated GPUs")
    run.add_argument("--state", type=Path, metavar="FILE", help="use this state file instead")
    run.add_argument("words", nargs="+", metavar="COMMAND", help="after --")
    state = commands.add_parser("state", parents=[node], help="write a state file")
    state.add_argument("file", type=Path)
    change = commands.add_parser("set", help="change GPUs of a state file that programs use")
    change.add_argument("file", type=Path)
    change.add_argument("--gpu", metavar="N[,N...]", help="these only (default: all)")
    change.add_argument("--mig", type=int, metavar="N", help="the N-th MIG device of each")
    change.add_argument("--pid", type=int, action="append", help="its only processes from now on")
    change.add_argument("--xid", type=int, metavar="ERROR", help="an XID error happens")
    change.usage = f"{change.format_usage().removeprefix('usage: ').rstrip()} NAME=CURVE..."
    arguments, others = parser.parse_known_args(words)  # settings may stand after options
    arguments.settings = others if arguments.command == "set" else []
    if unknown := [each for each in others if each.startswith("-") or not arguments.settings]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if not 1 <= getattr(arguments, "gpus", 1) <= _MAX_GPUS:
        parser.error(f"--gpus takes 1 to {_MAX_GPUS}")
    return arguments


def _busy(gpu: Device, number: int) -> Device:
    """Return a GPU at work: every value changes, for each GPU in a different rhythm."""
    moves: dict[str, Any] = {}
    for name, _, limits in (word.partition("=") for word in _RANGES):
        if name in gpu.settings:
            low, high = map(float, limits.split(","))
            moves[name] = Square(20 + 3 * number, low, high, 2 * number, 0.7)
    if "temp" in moves:  # a whole GPU
        moves |= {"throttle_sw_power": Square(45, 0, 1, number, 0.1), "ecc_vol_cor": Ramp(0, 0.01)}
    mig = tuple(_busy(each, number + index) for index, each in enumerate(gpu.mig))
    return gpu.changed(**moves, mig=mig)


def _node(arguments: argparse.Namespace) -> State:
    make = _MODELS[arguments.model]
    gpus = [make(number, arguments.node) for number in range(arguments.gpus)]
    if arguments.mig:
        gpus[-1] = divided(gpus[-1], 1, 2, 3)
    if not arguments.idle:
        gpus = [_busy(gpu, number) for number, gpu in enumerate(gpus)]
    return State(gpus=tuple(gpus))


def _with_process(state: State, pid: int) -> State:
    """Return the state with the command on every second GPU, and on each MIG device."""
    for index, gpu in enumerate(state.gpus):
        if gpu.mig:
            where = [{"gi": each.gi, "ci": each.ci} for each in gpu.mig]
        else:
            where = [{}] if index % 2 == 0 else []
        memory = _GIB if gpu.mig else (10 + index) * _GIB
        processes = tuple(Process(pid, memory=memory, sm=60, **each) for each in where)
        state = state.changed(index, processes=processes)
    return state


def _set(arguments: argparse.Namespace) -> None:
    """Change GPUs of a state file; counters continue.

    Raises:
        ValueError: a word is not a setting, or the file is not a state file.
    """
    state = State.parse(arguments.file.read_text())
    pairs = [word.split("=", 1) for word in arguments.settings]
    if wrong := [pair[0] for pair in pairs if len(pair) == 1]:
        raise ValueError(f"{wrong[0]}: write NAME=CURVE, such as util=90")
    settings = {name: parse(text) for name, text in pairs}
    chosen = range(len(state.gpus))
    indices = [int(n) for n in arguments.gpu.split(",")] if arguments.gpu else chosen
    for index in indices:
        if index not in chosen:
            raise ValueError(f"--gpu {index}: there are {len(chosen)} GPUs, 0 is the first")
        state = state.replaced(index, _changed(state.gpus[index], arguments, settings))
    Simulator().write(state, arguments.file)


def _changed(gpu: Device, arguments: argparse.Namespace, settings: dict[str, Any]) -> Device:
    where = {}
    if arguments.mig is None:
        gpu = gpu.changed(**settings)
    elif not 0 <= arguments.mig < len(gpu.mig):
        raise ValueError(f"--mig {arguments.mig}: there are {len(gpu.mig)}, 0 is the first")
    else:
        mig = list(gpu.mig)
        mig[arguments.mig] = mig[arguments.mig].changed(**settings)
        where = {"gi": mig[arguments.mig].gi, "ci": mig[arguments.mig].ci}
        gpu = gpu.changed(mig=tuple(mig))
    if arguments.pid is not None:
        others = [each for each in gpu.processes if where and each.gi != where["gi"]]
        ours = [Process(pid, **where) for pid in arguments.pid]
        gpu = gpu.changed(processes=(*others, *ours))
    if arguments.xid is not None:
        number = 1 + max((event.number for event in gpu.events), default=0)
        gpu = gpu.changed(events=(*gpu.events, Event(number, arguments.xid)))
    return gpu


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


def main(words: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: the command's own (128 + n if signal n ended it), or 1 with a message.
    """
    arguments = _arguments(words)
    try:
        if arguments.command == "set":
            _set(arguments)
        elif arguments.command == "state":
            Simulator().write(_node(arguments), arguments.file)
        else:
            return _run(arguments)
    except (GpusimError, OSError, TypeError, ValueError) as error:
        print(f"gpusim: {error}", file=sys.stderr)
        return 1
    return 0
