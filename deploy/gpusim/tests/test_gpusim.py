"""The simulated NVML answers as the real one does, with the figures of its state file."""

from __future__ import annotations

import math
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest

from deploy.gpusim.gpusim import (
    Process,
    Ramp,
    Sine,
    Square,
    State,
    a100,
    divided,
    h100,
    integral,
    value,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deploy.gpusim.gpusim import Curve
    from tests.monitoring.gpusim_support import Gpusim

NOT_SUPPORTED, NOT_FOUND, INSUFFICIENT_SIZE, TIMEOUT = 3, 6, 7, 10
INVALID_ARGUMENT, VERSION_MISMATCH = 2, 25
GIB = 1 << 30


@pytest.fixture
def sleeper() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
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
    "sine": (Sine(2, 10, 50, 0.3), lambda t: 30 + 20 * math.sin(math.pi * (t + 0.3))),
    "ramp": (Ramp(5, 2.5), lambda t: 5 + 2.5 * t),
    "ramp to a limit": (Ramp(50, -4, 42), lambda t: max(42.0, 50 - 4 * t)),
}


@pytest.mark.parametrize("name", CURVES)
def test_the_drivers_curves_are_those_of_the_definition(name: str) -> None:
    """Value, integral and the move to a later epoch agree with sums over the plain function."""
    curve, plain = CURVES[name]
    for t in (0.0, 0.4, 1.9, 2.6, 7.3):
        assert value(curve, t) == pytest.approx(plain(t))
        assert integral(curve, t) == pytest.approx(area(plain, t), rel=1e-3, abs=1e-2)
        assert value(curve.later(2.2), t) == pytest.approx(plain(t + 2.2))


@pytest.mark.parametrize("name", CURVES)
def test_the_library_has_the_same_curves(gpusim: Gpusim, name: str) -> None:
    """Power now and energy so far lie between what the definition gives before and after a call."""
    curve, plain = CURVES[name]
    state = gpusim.write(State(gpus=(a100(0, power=curve),), epoch=time.time() - 4))
    with gpusim.probe() as ask:
        for _ in range(5):
            energy, before, after = ask(
                "timed(lambda: nvmlDeviceGetTotalEnergyConsumption(h(0)))",
            )
            least, most = (area(plain, moment - state.epoch) for moment in (before, after))
            assert least - 0.1 <= energy / 1000 <= most + 0.1
            instant, before, after = ask("timed(lambda: fields(h(0), 186)[0])")
            steps = [before + (after - before) * step / 1000 for step in range(1001)]
            possible = [plain(moment - state.epoch) for moment in steps]
            assert min(possible) - 0.5 <= instant / 1000 <= max(possible) + 0.5
            time.sleep(0.05)


def test_counters_do_not_jump_when_the_state_changes(gpusim: Gpusim) -> None:
    """A new power after a new epoch: energy goes on from where it was."""
    state = gpusim.write(State(gpus=(a100(0, power=100),), epoch=time.time() - 100))
    with gpusim.probe() as ask:
        first, before, after = ask("timed(lambda: nvmlDeviceGetTotalEnergyConsumption(h(0)))")
        watts = 100 * 1000  # in the driver's mW and mJ
        assert watts * (before - state.epoch) - 1 <= first <= watts * (after - state.epoch) + 1
        gpusim.write(state.at().changed(0, power=0))
        changed = time.time()
        second = ask("nvmlDeviceGetTotalEnergyConsumption(h(0))")
        assert first <= second <= watts * (changed - state.epoch) + 1
        assert ask("nvmlDeviceGetTotalEnergyConsumption(h(0))") == second
        assert ask("fields(h(0), 83)") == [second]


def test_devices_are_who_the_state_says(gpusim: Gpusim) -> None:
    """Names, UUIDs, PCI addresses; the minor number need not be the index."""
    gpus = (a100(3, minor=1, cpus="0-2,65", numa="1"), h100(1, minor=0))
    gpusim.write(State(gpus=gpus, driver="535.1.2", cuda=12020))
    with gpusim.probe() as ask:
        assert ask("nvmlDeviceGetCount()") == 2
        assert ask("nvmlSystemGetDriverVersion()") == "535.1.2"
        assert ask("nvmlSystemGetCudaDriverVersion()") == 12020
        assert ask("nvmlDeviceGetName(h(0))") == "NVIDIA A100-SXM4-80GB (simulated)"
        assert ask("[nvmlDeviceGetMinorNumber(h(i)) for i in (0, 1)]") == [1, 0]
        pci = ask("nvmlDeviceGetPciInfo(h(0))")
        assert (pci["busId"], pci["bus"]) == ("00000000:1F:00.0", 0x1F)
        assert pci["busIdLegacy"] == "0000:1F:00.0"
        assert ask(f"nvmlDeviceGetIndex(nvmlDeviceGetHandleByUUID({gpus[1].uuid!r}))") == 1
        assert ask("nvmlDeviceGetIndex(nvmlDeviceGetHandleByPciBusId('0000:0f:00.0'))") == 1
        assert ask(f"nvmlDeviceGetIndex(nvmlDeviceGetHandleBySerial({gpus[0].serial!r}))") == 0
        assert ask("nvmlDeviceGetHandleByUUID('GPU-none')") == {"error": NOT_FOUND}
        assert ask("h(2)") == {"error": INVALID_ARGUMENT}
        assert ask("nvmlDeviceGetCpuAffinity(h(0), 2)") == [0b111, 0b10]
        assert ask("nvmlDeviceGetMemoryAffinity(h(0), 1, 0)") == [0b10]
        assert ask("nvmlDeviceGetCpuAffinity(h(1), 2)") == {"error": NOT_SUPPORTED}
        assert ask("nvmlDeviceGetCudaComputeCapability(h(1))") == [9, 0]


def test_a_name_needs_room(gpusim: Gpusim) -> None:
    """A buffer that is too small is refused, a missing one too."""
    gpusim.write(State(gpus=(a100(0),)))
    with gpusim.probe() as ask:
        short = "raw('nvmlDeviceGetName', h(0), ctypes.create_string_buffer(8), 8)"
        assert ask(short) == INSUFFICIENT_SIZE
        assert ask("raw('nvmlDeviceGetName', h(0), None, 96)") == INVALID_ARGUMENT


def test_both_forms_of_memory(gpusim: Gpusim) -> None:
    """The first counts what is reserved as used; the second wants its version."""
    gpu = a100(0, mem_total=80 * GIB, mem_reserved=GIB, mem_used=3 * GIB)
    gpusim.write(State(gpus=(gpu,)))
    with gpusim.probe() as ask:
        first = ask("nvmlDeviceGetMemoryInfo(h(0))")
        assert first == {"total": 80 * GIB, "free": 76 * GIB, "used": 4 * GIB}
        second = ask("nvmlDeviceGetMemoryInfo(h(0), nvmlMemory_v2)")
        assert (second["used"], second["reserved"], second["free"]) == (3 * GIB, GIB, 76 * GIB)
        wrong = "nvmlDeviceGetMemoryInfo(h(0), 0x01000028)"
        assert ask(wrong) == {"error": VERSION_MISMATCH}
        assert ask("nvmlDeviceGetBAR1MemoryInfo(h(0))")["bar1Total"] == 128 * GIB


def test_processes_need_room(
    gpusim: Gpusim,
    sleeper: Callable[[], subprocess.Popen[bytes]],
) -> None:
    """No buffer or a small one says how many; the forms differ in what they tell."""
    pids = [sleeper().pid for _ in range(3)]
    processes = tuple(Process(pid, memory=(1 + n) * GIB) for n, pid in enumerate(pids))
    gpusim.write(State(gpus=(a100(0, processes=processes), a100(1))))
    compute = "nvmlDeviceGetComputeRunningProcesses"
    with gpusim.probe() as ask:
        for form in ("", "_v2", "_v3"):
            name = repr(compute + form)
            assert ask(f"listed({name}, h(0), 0)") == [INSUFFICIENT_SIZE, 3]
            assert ask(f"listed({name}, h(0), 2)") == [INSUFFICIENT_SIZE, 3]
            assert ask(f"listed({name}, h(0), 5)") == [0, 3]
            assert ask(f"listed({name}, h(1), 0)") == [0, 0]
        for form in ("_v2", "_v3"):
            found = ask(f"{compute}{form}(h(0))")
            assert [(each["pid"], each["usedGpuMemory"]) for each in found] == [
                (pid, (1 + n) * GIB) for n, pid in enumerate(pids)
            ]
            assert {each["gpuInstanceId"] for each in found} in ({None}, {0xFFFFFFFF})
        details = ask("nvmlDeviceGetRunningProcessDetailList(h(0), nvmlProcessDetailList_v1, 0)")
        assert [each["pid"] for each in details] == pids


def test_a_process_that_ends_leaves_the_list(
    gpusim: Gpusim,
    sleeper: Callable[[], subprocess.Popen[bytes]],
) -> None:
    """As with the real driver, without a word from the state file; its memory is free again."""
    living, dying, ghost = sleeper(), sleeper(), sleeper()
    gpu = a100(
        0,
        mem_base=0,
        processes=(
            Process(living.pid, memory=2 * GIB),
            Process(dying.pid, memory=5 * GIB),
            Process(living.pid, memory=GIB, kind="G"),
            Process(ghost.pid, memory=GIB, kind="M", ghost=True),
        ),
    )
    gpusim.write(State(gpus=(gpu,)))
    used = "nvmlDeviceGetMemoryInfo(h(0), nvmlMemory_v2).used"
    pids = "[p.pid for p in nvmlDeviceGet{}RunningProcesses(h(0))]"
    with gpusim.probe() as ask:
        assert ask(pids.format("Compute")) == [living.pid, dying.pid]
        assert ask(used) == 9 * GIB
        for each in (dying, ghost):
            each.kill()
            each.wait()
        assert ask(pids.format("Compute")) == [living.pid]
        assert ask(pids.format("Graphics")) == [living.pid]
        assert ask(pids.format("MPSCompute")) == [ghost.pid]
        assert ask(used) == 4 * GIB


def test_shares_of_processes_have_a_time(
    gpusim: Gpusim,
    sleeper: Callable[[], subprocess.Popen[bytes]],
) -> None:
    """One new sample of each process that works; none newer than the last seen is an error."""
    busy, idle = sleeper().pid, sleeper().pid
    processes = (Process(busy, sm=70, mem=20), Process(idle, sm=0, mem=0))
    gpusim.write(State(gpus=(a100(0, processes=processes),)))
    with gpusim.probe() as ask:
        began = time.time()
        (sample,) = ask("nvmlDeviceGetProcessUtilization(h(0), 0)")
        assert (sample["pid"], sample["smUtil"], sample["memUtil"]) == (busy, 70, 20)
        assert began - 1 < sample["timeStamp"] / 1e6 <= time.time()
        future = int((time.time() + 100) * 1e6)
        answer = ask(f"nvmlDeviceGetProcessUtilization(h(0), {future})")
        assert answer == {"error": NOT_FOUND}


def test_throttling_is_counted_and_shown(gpusim: Gpusim) -> None:
    """A reason's bit is on where its share is half and more; its time is the share's integral."""
    gpu = a100(0, throttle_sw_power=0.75, throttle_hw_thermal=1, throttle_sw_thermal=0.25)
    gpusim.write(State(gpus=(gpu,), epoch=time.time() - 1000))
    with gpusim.probe() as ask:
        assert ask("nvmlDeviceGetCurrentClocksEventReasons(h(0))") == 0x4 | 0x40
        assert ask("nvmlDeviceGetCurrentClocksThrottleReasons(h(0))") == 0x4 | 0x40
        power, thermal, soft, hard = (each / 1e9 for each in ask("fields(h(0), 74, 75, 269, 270)"))
        assert power == pytest.approx(750, rel=0.02)
        assert (soft, hard) == (pytest.approx(250, rel=0.02), pytest.approx(1000, rel=0.02))
        assert thermal == pytest.approx(1250, rel=0.02)
        violation = ask("nvmlDeviceGetViolationStatus(h(0), NVML_PERF_POLICY_POWER)")
        assert violation["violationTime"] / 1e9 == pytest.approx(750, rel=0.02)


def test_memory_errors(gpusim: Gpusim) -> None:
    """Four counters; a GPU without ECC has none."""
    gpu = a100(0, ecc_vol_cor=1, ecc_vol_unc=2, ecc_agg_cor=30, ecc_agg_unc=40, retired_dbe=2)
    gpusim.write(State(gpus=(gpu, a100(1, ecc_mode=0))))
    with gpusim.probe() as ask:
        totals = "[nvmlDeviceGetTotalEccErrors(h({}), e, c) for c in (0, 1) for e in (0, 1)]"
        assert ask(totals.format(0)) == [1, 2, 30, 40]
        assert ask(totals.format(1)) == {"error": NOT_SUPPORTED}
        assert ask("fields(h(0), 3, 4, 5, 6)") == [1, 2, 30, 40]
        assert ask("fields(h(1), 1, 3)") == [0, None]
        assert ask("len(nvmlDeviceGetRetiredPages(h(0), 1))") == 2
        assert ask("nvmlDeviceGetRetiredPages(h(0), 0)") == {"error": NOT_SUPPORTED}
        assert ask("nvmlDeviceGetRemappedRows(h(0))") == [0, 0, 0, 0]


def test_pcie_throughput_takes_its_time(gpusim: Gpusim) -> None:
    """The old call measures for 20 ms; the counters are there at once."""
    gpu = a100(0, pcie_tx=512 << 20, pcie_rx=1 << 30, pcie_replay=3, pcie_bits=64)
    state = gpusim.write(State(gpus=(gpu,), epoch=time.time() - 10))
    with gpusim.probe() as ask:
        kib, before, after = ask("timed(lambda: nvmlDeviceGetPcieThroughput(h(0), 1))")
        assert kib == pytest.approx(1 << 20, rel=0.01)
        assert after - before >= 0.02
        (sent, received), before, after = ask("timed(lambda: fields(h(0), 197, 198))")
        for count, rate in ((sent, 512 << 20), (received, 1 << 30)):
            assert rate * (before - state.epoch) <= count <= rate * (after - state.epoch)
        assert ask("fields(h(0), 94)") == [3]


def test_pcie_counters_wrap(gpusim: Gpusim) -> None:
    """At 32 bits, as those of real GPUs may: after 1,024 s, 2,048 s and so on."""
    rate = 1 << 22
    state = gpusim.write(State(gpus=(a100(0, pcie_tx=rate),), epoch=time.time() - 1500))
    with gpusim.probe() as ask:
        (sent,), before, after = ask("timed(lambda: fields(h(0), 197))")
        least, most = (rate * (moment - state.epoch) - (1 << 32) for moment in (before, after))
        assert 0 < least - 1 <= sent <= most + 1 < 1 << 32


def test_nvlink_counts_by_link(gpusim: Gpusim) -> None:
    """Data in KiB of one link or of all; a link that is not there, and a GPU without any."""
    gpu = a100(0, nvlink_links=4, nvlink_tx=1 << 30, nvlink_crc=2)
    state = gpusim.write(State(gpus=(gpu, a100(1, nvlink_links=None)), epoch=time.time() - 10))
    with gpusim.probe() as ask:
        expression = "timed(lambda: fields(h(0), (138, 0), (138, NO_LINK), (138, 4), 91, 38))"
        (one, every, beyond, links, errors), before, after = ask(expression)
        assert (before - state.epoch) * (1 << 20) <= one <= (after - state.epoch) * (1 << 20)
        assert every == pytest.approx(4 * one, rel=1e-6)
        assert (beyond, links, errors) == (None, 4, 8)
        assert ask("fields(h(1), 91, (138, 0), 38)") == [None, None, None]
        assert ask("[nvmlDeviceGetNvLinkState(h(0), n) for n in (0, 3)]") == [1, 1]
        assert ask("nvmlDeviceGetNvLinkState(h(0), 4)") == {"error": INVALID_ARGUMENT}


def test_gpm_is_the_mean_between_two_samples(gpusim: Gpusim) -> None:
    """On Hopper and later; a metric that the state does not give is refused by itself."""
    curve = Ramp(0, 20)
    gpusim.write(State(gpus=(h100(0, gpm_sm=curve, gpm_tensor=42, gpm_fp64=None), a100(1))))
    with gpusim.probe() as ask:
        assert ask("nvmlGpmQueryDeviceSupport(h(0)).isSupportedDevice") == 1
        assert ask("nvmlGpmQueryDeviceSupport(h(1)).isSupportedDevice") == 0
        state = gpusim.write(State(gpus=(h100(0, gpm_sm=curve, gpm_tensor=42, gpm_fp64=None),)))
        (sm, tensor, fp64), (first, second) = ask("gpm(h(0), 0.2, 2, 5, 11)")
        assert tensor == pytest.approx(42)
        assert fp64 == {"error": NOT_SUPPORTED}
        # the mean of a ramp is its value half way between the samples
        least = 20 * (first[0] + second[0] - 2 * state.epoch) / 2
        most = 20 * (first[1] + second[1] - 2 * state.epoch) / 2
        assert least - 1e-3 <= sm <= most + 1e-3
        gpusim.write(State(gpus=(a100(0),)))
        assert ask("nvmlGpmSampleGet(h(0), nvmlGpmSampleAlloc())") == {"error": NOT_SUPPORTED}


def test_samples_are_means_of_sixths_of_a_second(gpusim: Gpusim) -> None:
    """Their sum gives the busy time exactly, however short the bursts are."""
    burst = Square(0.05, 0, 100, 0, 0.3)
    gpusim.write(State(gpus=(a100(0, util=burst),), epoch=time.time() - 15))
    with gpusim.probe() as ask:
        kind, samples = ask("nvmlDeviceGetSamples(h(0), 1, 0)")
        assert kind == 1
        values = [each["sampleValue"]["uiVal"] for each in samples]
        assert len(values) >= 80
        assert sum(values) / len(values) == pytest.approx(30, abs=1)
        times = [each["timeStamp"] for each in samples]
        assert times == sorted(times)
        later = ask(f"nvmlDeviceGetSamples(h(0), 1, {times[-3]})")[1]
        assert all(each["timeStamp"] > times[-3] for each in later)


def test_a_divided_gpu(
    gpusim: Gpusim,
    sleeper: Callable[[], subprocess.Popen[bytes]],
) -> None:
    """MIG devices have their own identity, memory and processes; the GPU has no utilization."""
    one, two = sleeper().pid, sleeper().pid
    whole = a100(
        0,
        util=50,
        processes=(
            Process(one, memory=GIB, gi=7, ci=0),
            Process(two, memory=2 * GIB, gi=8, ci=0),
        ),
    )
    gpu = divided(whole, 1, 2)
    gpusim.write(State(gpus=(gpu, a100(1, mig_max=None, mig_mode=None))))
    pids = "[p.pid for p in nvmlDeviceGetComputeRunningProcesses({})]"
    with gpusim.probe() as ask:
        assert ask("nvmlDeviceGetMigMode(h(0))") == [1, 1]
        assert ask("nvmlDeviceGetMigMode(h(1))") == {"error": NOT_SUPPORTED}
        assert ask("nvmlDeviceGetMaxMigDeviceCount(h(0))") == 7
        assert ask("nvmlDeviceGetMaxMigDeviceCount(h(1))") == 0
        assert ask("m(0, 2)") == {"error": NOT_FOUND}
        for index, mig in enumerate(gpu.mig):
            assert ask(f"nvmlDeviceGetUUID(m(0, {index}))") == mig.uuid
            by_uuid = f"nvmlDeviceGetHandleByUUID({mig.uuid!r})"
            assert ask(f"nvmlDeviceGetGpuInstanceId({by_uuid})") == 7 + index
            assert ask(f"nvmlDeviceGetComputeInstanceId({by_uuid})") == 0
            parent = f"nvmlDeviceGetDeviceHandleFromMigDeviceHandle({by_uuid})"
            assert ask(f"nvmlDeviceGetUUID({parent})") == gpu.uuid
            attributes = ask(f"nvmlDeviceGetAttributes(m(0, {index}))")
            assert attributes["gpuInstanceSliceCount"] == index + 1
            assert attributes["memorySizeMB"] == 10240 * (index + 1)
        assert ask("[nvmlDeviceIsMigDeviceHandle(x) for x in (h(0), m(0, 0))]") == [0, 1]
        assert ask(pids.format("h(0)")) == [one, two]
        assert [ask(pids.format(f"m(0, {n})")) for n in (0, 1)] == [[one], [two]]
        found = ask("nvmlDeviceGetComputeRunningProcesses(m(0, 1))")
        assert (found[0]["gpuInstanceId"], found[0]["computeInstanceId"]) == (8, 0)
        base = 12 << 20
        used = "nvmlDeviceGetMemoryInfo(m(0, {}), nvmlMemory_v2).used"
        assert [ask(used.format(n)) for n in (0, 1)] == [base + GIB, base + 2 * GIB]
        assert ask("nvmlDeviceGetUtilizationRates(h(0))") == {"error": NOT_SUPPORTED}
        assert ask("nvmlDeviceGetUtilizationRates(m(0, 0))") == {"error": NOT_SUPPORTED}
        assert ask("nvmlDeviceGetMinorNumber(m(0, 0))") == {"error": INVALID_ARGUMENT}
        assert ask("fields(m(0, 0), 186)") == [None]


def test_gpm_of_an_instance(gpusim: Gpusim) -> None:
    """Each instance of a Hopper GPU has its own activity."""
    gpu = divided(h100(0), 1, 2)
    mig = (gpu.mig[0].changed(gpm_sm=25), gpu.mig[1].changed(gpm_sm=75))
    gpusim.write(State(gpus=(gpu.changed(mig=mig, gpm_sm=40),)))
    with gpusim.probe() as ask:
        found = [ask(f"gpm(h(0), 0.05, 2, gi={gi})")[0][0] for gi in (7, 8)]
        assert found == [pytest.approx(25), pytest.approx(75)]
        assert ask("gpm(h(0), 0.05, 2)")[0] == [pytest.approx(40)]
        assert ask("gpm(h(0), 0.05, 2, gi=3)") == {"error": INVALID_ARGUMENT}


ABSENT: list[tuple[str, dict[str, Any]]] = [
    ("nvmlDeviceGetFanSpeed(h(0))", {"fan": None}),
    ("nvmlDeviceGetUtilizationRates(h(0))", {"util": None}),
    ("nvmlDeviceGetPowerUsage(h(0))", {"power": None}),
    ("nvmlDeviceGetTotalEnergyConsumption(h(0))", {"power": None}),
    ("nvmlDeviceGetTemperature(h(0), 0)", {"temp": None}),
    ("nvmlDeviceGetClockInfo(h(0), 1)", {"clock_sm": None}),
    ("nvmlDeviceGetSamples(h(0), 1, 0)", {"util": None}),
    ("nvmlDeviceGetPcieThroughput(h(0), 0)", {"pcie_tx": None}),
    ("nvmlDeviceGetMigMode(h(0))", {"mig_mode": None}),
]


def test_what_the_state_leaves_out_is_not_supported(gpusim: Gpusim) -> None:
    """Each of these works where the state gives the figure, and is refused where it does not."""
    gpusim.write(State(gpus=(a100(0),)))
    with gpusim.probe() as ask:
        for call, settings in ABSENT:
            given = dict.fromkeys(settings, 1)
            gpusim.write(State(gpus=(a100(0, **given),), epoch=time.time() - 2))
            assert ask(call) not in ({"error": NOT_SUPPORTED}, None), call
            gpusim.write(State(gpus=(a100(0, **settings),)))
            assert ask(call) == {"error": NOT_SUPPORTED}, call
