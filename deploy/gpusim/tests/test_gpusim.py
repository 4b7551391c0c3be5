"""The simulated NVML answers as the real one does, with the figures of its state file."""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from deploy.gpusim.gpusim import (
    Process,
    Ramp,
    Square,
    State,
    a100,
    divided,
    h100,
    integral,
    value,
)

if TYPE_CHECKING:
    from deploy.gpusim.gpusim import Curve, Device
    from tests.monitoring.gpusim_support import Gpusim

GIB = 1 << 30
INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND, VERSION_MISMATCH = (
    {"error": code} for code in (2, 3, 6, 25)
)
US = os.getpid()
Sleeper = Callable[[], subprocess.Popen[bytes]]


@pytest.fixture
def sleeper() -> Iterator[Sleeper]:
    """Starts processes that sleep; they are ended after the test."""
    started = []

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "600"]))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.wait()


def area(of: Callable[[float], float], end: float, steps: int = 20_000) -> float:
    """The integral from 0 to `end` by the midpoint rule: no formula of ours."""
    width = end / steps
    return width * sum(of((step + 0.5) * width) for step in range(steps))


CURVES: dict[str, tuple[Curve, Callable[[float], float]]] = {
    # what README.md defines, written once more as plain functions
    "square": (
        Square(3, 10, 90, 1.25, 0.25),
        lambda t: 90.0 if math.fmod(t + 1.25, 3) < 0.75 else 10.0,
    ),
    "ramp": (Ramp(5, 2.5), lambda t: 5 + 2.5 * t),
}


@pytest.mark.parametrize("name", CURVES)
def test_curves(gpusim: Gpusim, name: str) -> None:
    """Value and integral are those of the definition, in C as well."""
    curve, plain = CURVES[name]
    for t in (0.0, 0.4, 2.0, 7.3):
        assert value(curve, t) == pytest.approx(plain(t))
        assert integral(curve, t) == pytest.approx(area(plain, t), rel=1e-3, abs=1e-2)
    state = gpusim.write(State(gpus=(a100(0, power=curve),), epoch=time.time() - 4))
    with gpusim.probe() as ask:
        energy, before, after = ask("timed(lambda: nvmlDeviceGetTotalEnergyConsumption(h(0)))")
        least, most = (area(plain, moment - state.epoch) for moment in (before, after))
        assert least - 0.1 <= energy / 1000 <= most + 0.1
        instant, before, after = ask("timed(lambda: fields(h(0), 186)[0])")
        steps = [before + (after - before) * step / 1000 for step in range(1001)]
        possible = [plain(moment - state.epoch) for moment in steps]
        assert min(possible) - 0.5 <= instant / 1000 <= max(possible) + 0.5


NAMES = (a100(3, minor=1), h100(1, minor=0))
MEMORY = a100(0, mem_total=80 * GIB, mem_reserved=GIB, mem_used=3 * GIB)
ECC = a100(0, ecc_vol_cor=1, ecc_vol_unc=2, ecc_agg_cor=30, ecc_agg_unc=40, retired_dbe=2)
LINKS = (a100(0, nvlink_links=4, nvlink_crc=2), a100(1, nvlink_links=None))
MIG = divided(a100(0, util=50, processes=(Process(US, GIB, gi=8, ci=0),)), 1, 2)
ABSENT = a100(0, fan=None, util=None, power=None, temp=None, clock_sm=None, pcie_tx=None)
TOTALS = "[nvmlDeviceGetTotalEccErrors(h({}), e, c) for c in (0, 1) for e in (0, 1)]"
ANSWERS: dict[str, tuple[tuple[Device, ...], dict[str, Any]]] = {
    "names": (
        NAMES,
        {
            "nvmlDeviceGetCount()": 2,
            "nvmlSystemGetDriverVersion()": "535.1.2",
            "nvmlSystemGetCudaDriverVersion()": 12020,
            "nvmlDeviceGetName(h(0))": "NVIDIA A100-SXM4-80GB (simulated)",
            "[nvmlDeviceGetMinorNumber(h(i)) for i in (0, 1)]": [1, 0],
            "nvmlDeviceGetPciInfo(h(0)).busId": "00000000:1F:00.0",
            "nvmlDeviceGetPciInfo(h(0)).busIdLegacy": "0000:1F:00.0",
            f"nvmlDeviceGetIndex(nvmlDeviceGetHandleByUUID({NAMES[1].uuid!r}))": 1,
            "nvmlDeviceGetHandleByUUID('GPU-none')": NOT_FOUND,
            "h(2)": INVALID_ARGUMENT,
            "nvmlDeviceGetCudaComputeCapability(h(1))": [9, 0],
            "raw('nvmlDeviceGetName', h(0), ctypes.create_string_buffer(8), 8)": 7,
            "raw('nvmlDeviceGetName', h(0), None, 96)": 2,
        },
    ),
    # the first form counts what is reserved as used; the second wants its version
    "memory": (
        (MEMORY,),
        {
            "nvmlDeviceGetMemoryInfo(h(0))": {"total": 80 * GIB, "free": 76 * GIB, "used": 4 * GIB},
            "nvmlDeviceGetMemoryInfo(h(0), nvmlMemory_v2).used": 3 * GIB,
            "nvmlDeviceGetMemoryInfo(h(0), nvmlMemory_v2).free": 76 * GIB,
            "nvmlDeviceGetMemoryInfo(h(0), 0x01000028)": VERSION_MISMATCH,
            "nvmlDeviceGetBAR1MemoryInfo(h(0)).bar1Total": 128 * GIB,
        },
    ),
    "memory errors": (
        (ECC, a100(1, ecc_mode=0)),
        {
            TOTALS.format(0): [1, 2, 30, 40],
            TOTALS.format(1): NOT_SUPPORTED,
            "fields(h(0), 3, 4, 5, 6)": [1, 2, 30, 40],
            "fields(h(0), 29, 30, 142)": [None, 2, 0],
            "fields(h(1), 3)": [None],
        },
    ),
    "links": (
        LINKS,
        {
            "fields(h(0), (138, 4), (165, 4), (165, 3), 91, 38, 94)": [None, None, 1, 4, 8, 0],
            "fields(h(1), 91, (138, 0), 38)": [None, None, None],
        },
    ),
    "MIG": (
        (MIG, a100(1, mig_max=None, mig_mode=None)),
        {
            "nvmlDeviceGetMigMode(h(0))": [1, 1],
            "nvmlDeviceGetMigMode(h(1))": NOT_SUPPORTED,
            "[nvmlDeviceGetMaxMigDeviceCount(h(n)) for n in (0, 1)]": [7, 0],
            "m(0, 2)": NOT_FOUND,
            "[nvmlDeviceGetUUID(m(0, n)) for n in (0, 1)]": [device.uuid for device in MIG.mig],
            f"nvmlDeviceGetGpuInstanceId(nvmlDeviceGetHandleByUUID({MIG.mig[1].uuid!r}))": 8,
            "nvmlDeviceGetComputeInstanceId(m(0, 1))": 0,
            "nvmlDeviceGetUUID(nvmlDeviceGetDeviceHandleFromMigDeviceHandle(m(0, 1)))": MIG.uuid,
            "[nvmlDeviceIsMigDeviceHandle(x) for x in (h(0), m(0, 0))]": [0, 1],
            "[p.pid for p in nvmlDeviceGetComputeRunningProcesses(h(0))]": [US],
            "[p.pid for p in nvmlDeviceGetComputeRunningProcesses(m(0, 0))]": [],
            "nvmlDeviceGetComputeRunningProcesses(m(0, 1))[0].gpuInstanceId": 8,
            "nvmlDeviceGetMemoryInfo(m(0, 1), nvmlMemory_v2).used": GIB + (12 << 20),
            "nvmlDeviceGetUtilizationRates(h(0))": NOT_SUPPORTED,
            "nvmlDeviceGetUtilizationRates(m(0, 0))": NOT_SUPPORTED,
            "nvmlDeviceGetMinorNumber(m(0, 0))": INVALID_ARGUMENT,
            "fields(m(0, 0), 186)": [None],
        },
    ),
    "what the state leaves out": (
        (ABSENT,),
        dict.fromkeys(
            (
                "nvmlDeviceGetFanSpeed(h(0))",
                "nvmlDeviceGetUtilizationRates(h(0))",
                "nvmlDeviceGetPowerUsage(h(0))",
                "nvmlDeviceGetTotalEnergyConsumption(h(0))",
                "nvmlDeviceGetTemperature(h(0), 0)",
                "nvmlDeviceGetClockInfo(h(0), 1)",
                "nvmlDeviceGetPcieThroughput(h(0), 0)",
                "nvmlGpmSampleGet(h(0), nvmlGpmSampleAlloc())",
            ),
            NOT_SUPPORTED,
        ),
    ),
}


@pytest.mark.parametrize(("gpus", "answers"), ANSWERS.values(), ids=ANSWERS)
def test_answers(gpusim: Gpusim, gpus: tuple[Device, ...], answers: dict[str, Any]) -> None:
    """What each call returns for these GPUs, 1000 seconds after the epoch."""
    epoch = time.time() - 1000
    gpusim.write(State(gpus=gpus, driver="535.1.2", cuda=12020, epoch=epoch))
    with gpusim.probe() as ask:
        assert {call: ask(call) for call in answers} == answers


def test_a_process_that_ends_leaves_the_list(gpusim: Gpusim, sleeper: Sleeper) -> None:
    """As with the real driver, without a word from the state file; its memory is free again."""
    living, dying, ghost = sleeper(), sleeper(), sleeper()
    processes = (
        Process(living.pid, memory=2 * GIB),
        Process(dying.pid, memory=5 * GIB),
        Process(living.pid, memory=GIB, kind="G"),
        Process(ghost.pid, memory=GIB, kind="M", ghost=True),
    )
    gpusim.write(State(gpus=(a100(0, mem_base=0, processes=processes),)))
    used = "nvmlDeviceGetMemoryInfo(h(0), nvmlMemory_v2).used"
    pids = "[p.pid for k in ('Compute', 'Graphics', 'MPSCompute')"
    pids += " for p in getattr(pynvml, f'nvmlDeviceGet{k}RunningProcesses')(h(0))]"
    with gpusim.probe() as ask:
        assert ask(pids) == [living.pid, dying.pid, living.pid, ghost.pid]
        assert ask(used) == 9 * GIB
        for each in (dying, ghost):
            each.kill()
            each.wait()
        assert ask(pids) == [living.pid, living.pid, ghost.pid]
        assert ask(used) == 4 * GIB


def test_gpm_is_the_mean_between_two_samples(gpusim: Gpusim) -> None:
    """On Hopper and later, of the GPU or an instance; a metric that is not given is refused."""
    gpu = divided(h100(0, gpm_sm=Ramp(0, 20), gpm_tensor=42, gpm_occupancy=None), 1, 2)
    mig = (gpu.mig[0].changed(gpm_sm=25), gpu.mig[1].changed(gpm_sm=75))
    state = gpusim.write(State(gpus=(gpu.changed(mig=mig),)))
    with gpusim.probe() as ask:
        assert ask("nvmlGpmQueryDeviceSupport(h(0)).isSupportedDevice") == 1
        (sm, tensor, occupancy), (first, second) = ask("gpm(h(0), 0.2, 2, 5, 3)")
        assert (tensor, occupancy) == (pytest.approx(42), NOT_SUPPORTED)
        # the mean of a ramp is its value half way between the samples
        least = 20 * (first[0] + second[0] - 2 * state.epoch) / 2
        most = 20 * (first[1] + second[1] - 2 * state.epoch) / 2
        assert least - 1e-3 <= sm <= most + 1e-3
        found = [ask(f"gpm(h(0), 0.05, 2, gi={gi})")[0][0] for gi in (7, 8)]
        assert found == [pytest.approx(25), pytest.approx(75)]
        assert ask("gpm(h(0), 0.05, 2, gi=3)") == INVALID_ARGUMENT


def test_a_reason_is_on_in_its_share_of_the_seconds(gpusim: Gpusim) -> None:
    """A program that reads the bits once per second counts the share in the state file."""
    shares = {"throttle_sw_power": 0.3, "throttle_hw_thermal": 1, "throttle_idle": 0}
    names = ("CurrentClocksEventReasons", "CurrentClocksThrottleReasons")
    with gpusim.probe(start=False) as ask:
        seen = []
        for second in range(40):
            gpusim.write(State(gpus=(a100(0, "", **shares),), epoch=time.time() - second - 0.1))
            if not second:
                ask("nvmlInit()")
            one, other = (ask(f"nvmlDeviceGet{name}(h(0))") for name in names)
            seen += [one, other]
    assert set(seen) == {0x40, 0x44}
    assert seen.count(0x44) / len(seen) == pytest.approx(0.3, abs=0.1)


def test_a_job_finds_the_state_by_the_variable_that_it_inherits(gpusim: Gpusim) -> None:
    """Jobs of hpml inherit GPUSIM, and nothing that begins with HPML_."""
    gpusim.write(State(gpus=(a100(0), a100(1))))
    environment = gpusim.environment
    environment["GPUSIM"] = environment.pop("HPML_GPUSIM")
    count = "import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlDeviceGetCount())"
    assert gpusim.run("-c", count, env=environment).stdout.strip() == "2"
