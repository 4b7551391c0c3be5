"""What goes wrong with a driver goes wrong with the simulated one on demand, and right again."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deploy.gpusim.gpusim import (
    Event,
    Fault,
    GpusimError,
    Process,
    Simulator,
    State,
    a100,
)
from tests.monitoring.gpusim_support import Gpusim

if TYPE_CHECKING:
    from deploy.gpusim.gpusim import Device

UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, DRIVER_NOT_LOADED = 1, 2, 3, 9
TIMEOUT, GPU_IS_LOST, UNKNOWN = 10, 15, 999
TEMPERATURE = "nvmlDeviceGetTemperature(h({}), 0)"


def node(*gpus: Device, **settings: object) -> State:
    """Two idle GPUs unless others are given."""
    return State(gpus=gpus or (a100(0), a100(1)), **settings)  # type: ignore[arg-type]


def test_nothing_works_before_the_start(gpusim: Gpusim) -> None:
    """Each start needs a matching shutdown; after the last shutdown nothing works."""
    gpusim.write(node())
    with gpusim.probe() as ask:
        assert ask("nvmlInit()") is None
        assert ask("nvmlShutdown()") is None
        assert ask("nvmlDeviceGetCount()") == 2
        assert ask("nvmlShutdown()") is None
        assert ask("nvmlDeviceGetCount()") == {"error": UNINITIALIZED}
        assert ask("nvmlShutdown()") == {"error": UNINITIALIZED}


OLD = "nvmlDeviceGetTemperature(kept['handle'], 0)"
LOST = {"error": GPU_IS_LOST}


@pytest.mark.parametrize(
    ("changes", "answers"),
    [
        # what happens after a handle of the first GPU was given out
        ({"gpu": {"lost": 1}}, [LOST, LOST, 35]),
        ({"lost": True}, [LOST, LOST, LOST]),
        (
            {"faults": (Fault("nvmlDeviceGetHandle", UNKNOWN, gpu=0),)},
            [35, {"error": UNKNOWN}, 35],
        ),
        (
            {"faults": (Fault("nvmlDeviceGetTemp*", NOT_SUPPORTED),)},
            [{"error": NOT_SUPPORTED}] * 3,
        ),
        ({"generation": 2}, [{"error": UNINITIALIZED}] * 3),
    ],
    ids=["GPU lost", "all lost", "handle refused", "call refused", "driver loaded again"],
)
def test_a_fault_and_its_end(
    gpusim: Gpusim, changes: dict[str, Any], answers: list[object]
) -> None:
    """The old handle, a new one and the other GPU say so; without the fault all is well again."""
    state = gpusim.write(node())
    calls = [OLD, TEMPERATURE.format(0), TEMPERATURE.format(1)]
    with gpusim.probe() as ask:
        ask("kept.__setitem__('handle', h(0))")
        changes = dict(changes)
        changed = state.changed(0, **changes.pop("gpu", {}))
        gpusim.write(replace(changed, **changes))
        assert [ask(call) for call in calls] == answers
        if "generation" in changes:
            assert ask("nvmlInit()") is None
            assert [ask(call) for call in calls] == [{"error": INVALID_ARGUMENT}, 35, 35]
        gpusim.write(state)
        assert ask("nvmlInit()") is None
        assert [ask(call) for call in calls] == [35, 35, 35]


def test_a_call_hangs_until_the_state_lets_it_go(gpusim: Gpusim) -> None:
    """So that a test of a minute's hang need not last a minute."""
    stuck = (Fault("nvmlDeviceGetTemperature", 3000, kind="stuck"),)
    state = gpusim.write(node(faults=stuck))
    with gpusim.probe() as ask:
        begun = time.monotonic()
        ask.send(TEMPERATURE.format(0))
        time.sleep(0.2)
        gpusim.write(replace(state, faults=()))
        assert ask.answer() == 35
        assert time.monotonic() - begun < 1000


def test_the_driver_is_unloaded(gpusim: Gpusim) -> None:
    """Without a state file no driver is loaded; a new file loads it again."""
    gpusim.write(node())
    with gpusim.probe() as ask:
        gpusim.path.unlink()
        assert ask("nvmlDeviceGetCount()") == {"error": UNINITIALIZED}
        assert ask("nvmlInit()") == {"error": DRIVER_NOT_LOADED}
        gpusim.write(node())
        assert ask("nvmlDeviceGetCount()") == 2


def test_a_wrong_state_file_is_no_driver(gpusim: Gpusim) -> None:
    """The message names the wrong line."""
    gpusim.path.write_text("hpml-gpusim 1\nepoch 0\ngpu\nutil sqare:1,2\n")
    done = gpusim.run("-c", "import pynvml; pynvml.nvmlInit()")
    assert "Driver Not Loaded" in done.stderr
    assert "line that is not understood: util" in done.stderr


def test_an_error_is_delivered_once(gpusim: Gpusim) -> None:
    """To a set that was registered before, for the GPUs that it wanted."""
    before = (Event(1, 13),)
    state = gpusim.write(node(a100(0, events=before), a100(1), a100(2)))
    with gpusim.probe() as ask:
        ask("event_set(0, 1)")
        assert ask("wait(30)") == {"error": TIMEOUT}
        unwanted = state.changed(2, events=(Event(1, 48),))
        gpusim.write(unwanted)
        assert ask("wait(30)") == {"error": TIMEOUT}
        ask.send("wait(20000)")
        time.sleep(0.1)
        state = unwanted.changed(0, events=(*before, Event(2, 79), Event(3, 119)))
        gpusim.write(state.changed(1, events=(Event(1, 31),)))
        found = [ask.answer(), ask("wait(1000)"), ask("wait(1000)")]
        assert sorted(found) == [[0, 79], [0, 119], [1, 31]]
        assert found.index([0, 79]) < found.index([0, 119])
        assert ask("wait(0)") == {"error": TIMEOUT}
        begun = time.monotonic()
        assert ask("wait(100)") == {"error": TIMEOUT}
        assert time.monotonic() - begun >= 0.1


def test_many_threads_while_the_state_changes(gpusim: Gpusim) -> None:
    """No call sees half a state, and none crashes."""
    lists = [tuple(Process(n, ghost=True) for n in range(1, most)) for most in (2, 40, 200)]
    states = [
        node(a100(0, mem_total=80 << 30, mem_reserved=0, mem_used=3 << 30, processes=each))
        for each in lists
    ]
    gpusim.write(states[0])
    written: list[int] = []

    def write_until(over: threading.Event) -> None:
        while not over.is_set():
            gpusim.write(states[len(written) % len(states)])
            written.append(len(written))

    with gpusim.probe() as ask:
        ask.send("crowd(8, 1.0, least=100)")
        over = threading.Event()
        writer = threading.Thread(target=write_until, args=(over,))
        writer.start()
        try:
            answer = ask.answer()
        finally:
            over.set()
            writer.join()
    assert answer["wrong"] == 0
    assert answer["right"] >= 100
    assert len(written) >= len(states)


def test_without_a_compiler_there_is_a_reason(tmp_path: Path) -> None:
    """And none of a failed build is kept."""
    with pytest.raises(GpusimError, match="no C compiler: no-such-gcc"):
        Simulator(cache=tmp_path, compiler="no-such-gcc").build()
    broken = tmp_path / "broken-gcc"
    broken.write_text("#!/bin/sh\necho no memory for this >&2\nexit 1\n")
    broken.chmod(0o755)
    simulator = Simulator(cache=tmp_path / "cache", compiler=str(broken))
    with pytest.raises(GpusimError, match="no memory for this"):
        simulator.build()
    assert list((tmp_path / "cache").glob("*/*")) == []
