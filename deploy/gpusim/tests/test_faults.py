"""What goes wrong with a driver goes wrong with the simulated one on demand, and right again."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deploy.gpusim.gpusim import (
    OLD_DRIVER,
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
TIMEOUT, LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND, GPU_IS_LOST, UNKNOWN = 10, 12, 13, 15, 999
TEMPERATURE = "nvmlDeviceGetTemperature(h({}), 0)"


def node(*gpus: Device, **settings: object) -> State:
    """Two idle GPUs unless told otherwise."""
    return State(gpus=gpus or (a100(0), a100(1)), **settings)  # type: ignore[arg-type]


def test_nothing_works_before_the_start(gpusim: Gpusim) -> None:
    """Each start needs an end of its own; after the last end nothing works again."""
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


def test_single_fields_and_the_start_can_fail(gpusim: Gpusim) -> None:
    """For one GPU or for all, by name or pattern."""
    gpusim.write(node(faults=(Fault("field:186", NOT_SUPPORTED, gpu=0),)))
    with gpusim.probe() as ask:
        assert ask("fields(h(0), 186, 82) + fields(h(1), 186)") == [None, 40, 60000]
        gpusim.write(node(faults=(Fault("nvmlInit*", DRIVER_NOT_LOADED),)))
        assert ask("nvmlInit()") == {"error": DRIVER_NOT_LOADED}


@pytest.mark.parametrize(
    ("kind", "amount", "call", "answer"),
    [
        ("slow", 150, TEMPERATURE.format(0), 35),
        ("stuck", 0.15, TEMPERATURE.format(0), 35),
        ("slow", 150, "nvmlShutdown()", None),
        ("stuck", 0.15, "nvmlShutdown()", None),
    ],
)
def test_calls_can_take_long(
    gpusim: Gpusim, kind: str, amount: float, call: str, answer: object
) -> None:
    """At least as long as they are told; then they answer as if nothing had been."""
    gpusim.write(node(faults=(Fault(call.partition("(")[0], amount, kind=kind),)))
    with gpusim.probe() as ask:
        found, before, after = ask(f"timed(lambda: {call})")
        assert found == answer
        assert after - before >= 0.15


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
    """Without a state file there is no driver; a new file is a driver again."""
    gpusim.write(node())
    with gpusim.probe() as ask:
        gpusim.path.unlink()
        assert ask("nvmlDeviceGetCount()") == {"error": UNINITIALIZED}
        assert ask("nvmlInit()") == {"error": DRIVER_NOT_LOADED}
        gpusim.write(node())
        assert ask("nvmlDeviceGetCount()") == 2


def test_a_wrong_state_file_is_no_driver(gpusim: Gpusim) -> None:
    """It says which line is wrong."""
    gpusim.path.write_text("hpml-gpusim 1\nepoch 0\ngpu\nutil sqare:1,2\n")
    done = gpusim.run("-c", "import pynvml; pynvml.nvmlInit()")
    assert "Driver Not Loaded" in done.stderr
    assert "line that is not understood: util" in done.stderr


def test_there_is_no_library(gpusim: Gpusim) -> None:
    """Also on a machine that has a real one."""
    environment = gpusim.environment | gpusim.simulator.missing()
    done = gpusim.run("-c", "import pynvml; pynvml.nvmlInit()", env=environment)
    assert "NVMLError_LibraryNotFound" in done.stderr


def test_an_old_driver_lacks_functions(gpusim: Gpusim) -> None:
    """The dynamic linker finds no such symbol, and programs can fall back to older forms."""
    old = Gpusim(gpusim.path, Simulator(without=OLD_DRIVER))
    old.write(node(a100(0, processes=(Process(1, memory=1 << 30),))))
    missing = "raw('nvmlDeviceGetMemoryInfo_v2', None)"
    with old.probe() as ask, gpusim.probe() as ask_new:
        assert ask(missing) == {"error": FUNCTION_NOT_FOUND}
        assert ask_new(missing) == INVALID_ARGUMENT
        assert ask("nvmlDeviceGetMemoryInfo(h(0)).total") == 80 << 30
        assert ask(TEMPERATURE.format(0)) == 35


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


def test_every_call_can_be_seen(gpusim: Gpusim, tmp_path: Path) -> None:
    """A file with the name of each function called, for tests of what a program asks."""
    gpusim.write(node())
    calls = tmp_path / "calls"
    environment = gpusim.environment | gpusim.simulator.environment(gpusim.path, calls=calls)
    code = "import pynvml as n; n.nvmlInit(); n.nvmlDeviceGetCount(); n.nvmlShutdown()"
    assert gpusim.run("-c", code, env=environment).returncode == 0
    called = ["nvmlInitWithFlags", "nvmlDeviceGetCount_v2", "nvmlShutdown"]
    assert calls.read_text().split() == called


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


def test_the_library_is_built_once(tmp_path: Path) -> None:
    """The second time the same file is used; another set of functions is another library."""
    fake = tmp_path / "fake-gcc"  # counts how often it is asked, which a real compiler does not
    fake.write_text(
        f"#!/bin/sh\necho run >> {tmp_path}/runs\n"
        'while [ "$1" != -o ]; do shift; done\ntouch "$2"\n',
    )
    fake.chmod(0o755)
    simulator = Simulator(cache=tmp_path / "cache", compiler=str(fake))
    directory = simulator.build()
    assert (directory / "libnvidia-ml.so.1").exists()
    assert simulator.build() == directory
    assert (tmp_path / "runs").read_text() == "run\n"
    other = replace(simulator, without=("nvmlDeviceGetName",)).build()
    assert other != directory
    assert (tmp_path / "runs").read_text() == "run\nrun\n"
