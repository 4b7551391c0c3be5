"""The GPU collector on simulated GPUs; what is right comes from the state file's arithmetic."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.gpusim.gpusim import (
    OLD_DRIVER,
    Event,
    Fault,
    GpusimError,
    Process,
    Simulator,
    Square,
    State,
    a100,
    divided,
    h100,
    integral,
    value,
)

logger = logging.getLogger(__name__)
GIB = 1 << 30
CHILD = Path(__file__).with_name("gpu_child.py")
UP = "hpml_gpu_up"


class Answer:
    """One sample: numbers by name and labels, with the time in which they were read."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.error = data.get("error", "")
        self.text = data.get("text", "")
        self.began, self.ended = data.get("began", 0.0), data.get("ended", 0.0)
        self.series = [(name, labels, number) for name, labels, number in data.get("series", ())]

    def all(self, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
        return [
            (have, number)
            for series, have, number in self.series
            if series == name and labels.items() <= have.items()
        ]

    def one(self, name: str, **labels: str) -> float:
        found = self.all(name, **labels)
        assert len(found) == 1, f"{name} {labels}: {found} {self.error} {self.text}"
        return found[0][1]

    def names(self) -> set[str]:
        return {name for name, _, _ in self.series}


class Running:
    """A child process with a collector on a simulated driver."""

    def __init__(
        self, path: Path, environment: dict[str, str], calls: Path, **settings: Any
    ) -> None:
        self.path, self.calls = path, calls
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), json.dumps(settings)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def do(self, what: str, **words: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": what, **words}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            assert self.process.stderr is not None
            pytest.fail(self.process.stderr.read())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def sample(self, ahead: float = 0.0) -> Answer:
        return Answer(self.do("sample", ahead=ahead))

    def stop(self) -> None:
        self.process.kill()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self.process.wait()

    def end(self) -> str:
        assert self.process.stdin is not None
        assert self.process.stderr is not None
        self.process.stdin.close()
        said = self.process.stderr.read()
        self.process.wait(20)
        return said


Start = Callable[..., Running]


@pytest.fixture(scope="session")
def simulator() -> Simulator:
    """The simulated driver, built once."""
    made = Simulator()
    try:
        made.build()
    except GpusimError as error:
        pytest.skip(f"SKIPPED, NOT TESTED: {error}")
    return made


@pytest.fixture
def start(tmp_path: Path, simulator: Simulator) -> Iterator[Start]:
    """Start a collector on a state of the simulated driver."""
    with ExitStack() as stack:

        def run(state: State | None, driver: Simulator = simulator, **settings: Any) -> Running:
            path, calls = tmp_path / "state", tmp_path / "calls"
            if state is not None:
                driver.write(state, path)
            environment = {**os.environ, **driver.environment(path, calls=calls)}
            if settings.pop("driverless", False):
                environment = {**os.environ, **driver.missing()}
            running = Running(path, environment, calls, **settings)
            stack.callback(running.stop)
            return running

        yield run


ALL = h100(
    0,
    minor=5,
    util=40,
    mem_util=20,
    temp=61,
    mem_temp=72,
    power=333,
    power_enforced=650,
    clock_sm=1700,
    clock_mem=2600,
    max_sm=1980,
    max_mem=2619,
    fan=55,
    mem_used=7 * GIB,
    ecc_vol_cor=11,
    ecc_vol_unc=2,
    ecc_agg_cor=31,
    ecc_agg_unc=4,
    remapped_cor=5,
    remapped_unc=6,
    remapped_pending=1,
    remapped_failure=0,
    pcie_replay=9,
    pcie_tx=3_000_000_000,
    pcie_rx=5_000_000_000,
    nvlink_tx=1_000_000_000,
    nvlink_rx=2_000_000_000,
    throttle_sw_power=0.25,
    throttle_sw_thermal=0.5,
    throttle_hw_power_brake=1,
    gpm_sm=44,
    gpm_occupancy=33,
    gpm_tensor=22,
    gpm_dram=11,
)


def test_gauges_are_what_the_state_says(start: Start) -> None:
    """Every gauge of a Hopper GPU, in base units."""
    running = start(State(gpus=(ALL,)))
    running.sample()
    time.sleep(0.2)
    seen = running.sample()
    expected = {
        (UP, ""): 1,
        ("hpml_gpu_utilization_ratio", ""): 0.40,
        ("hpml_gpu_memory_utilization_ratio", ""): 0.20,
        ("hpml_gpu_memory_used_bytes", ""): 7 * GIB,
        ("hpml_gpu_memory_total_bytes", ""): 80 * GIB,
        ("hpml_gpu_sm_active_ratio", ""): 0.44,
        ("hpml_gpu_sm_occupancy_ratio", ""): 0.33,
        ("hpml_gpu_tensor_active_ratio", ""): 0.22,
        ("hpml_gpu_dram_active_ratio", ""): 0.11,
        ("hpml_gpu_power_watts", ""): 333,
        ("hpml_gpu_power_limit_watts", ""): 650,
        ("hpml_gpu_temperature_celsius", ""): 61,
        ("hpml_gpu_memory_temperature_celsius", ""): 72,
        ("hpml_gpu_fan_speed_ratio", ""): 0.55,
        ("hpml_gpu_clock_hertz", "sm"): 1.7e9,
        ("hpml_gpu_clock_hertz", "memory"): 2.6e9,
        ("hpml_gpu_clock_max_hertz", "sm"): 1.98e9,
        ("hpml_gpu_clock_max_hertz", "memory"): 2.619e9,
        ("hpml_gpu_ecc_errors_total", "corrected volatile"): 11,
        ("hpml_gpu_ecc_errors_total", "uncorrected volatile"): 2,
        ("hpml_gpu_ecc_errors_total", "corrected aggregate"): 31,
        ("hpml_gpu_ecc_errors_total", "uncorrected aggregate"): 4,
        ("hpml_gpu_remapped_rows", "correctable"): 5,
        ("hpml_gpu_remapped_rows", "uncorrectable"): 6,
        ("hpml_gpu_remapped_rows_pending", ""): 1,
        ("hpml_gpu_remapped_rows_failed", ""): 0,
        ("hpml_gpu_pcie_replays_total", ""): 9,
    }
    have = {
        (name, " ".join(value for key, value in labels.items() if key != "uuid")): number
        for name, labels, number in seen.series
        if labels.get("uuid") == ALL.uuid and name != "hpml_gpu_info"
    }
    assert {key: have.get(key) for key in expected} == pytest.approx(expected, rel=1e-3)
    assert [labels for labels, _ in seen.all("hpml_gpu_info")] == [
        {
            "uuid": ALL.uuid,
            "name": ALL.name,
            "pci_bus_id": f"0000{ALL.bus_id}".lower(),
            "minor": "5",
            "mig": "",
        }
    ]
    assert (seen.one("hpml_gpus", state="up"), seen.one("hpml_gpus", state="lost")) == (1, 0)


def test_counters_grow_as_their_rates_say(start: Start) -> None:
    """Energy, throttled time, PCIe and NVLink between two readings: rate times time."""
    running = start(State(gpus=(ALL,)), options={"gpu_interval": 0.2})
    first = running.sample()
    for _ in range(5):
        time.sleep(0.2)
        last = running.sample()
    rates = {
        ("hpml_gpu_energy_joules_total", ""): 333,
        ("hpml_gpu_throttled_seconds_total", "power"): 0.25,
        ("hpml_gpu_throttled_seconds_total", "thermal"): 0.5,
        ("hpml_gpu_throttled_seconds_total", "sync_boost"): 0,
        ("hpml_gpu_throttled_seconds_total", "power_brake"): 1,
        ("hpml_gpu_throttled_seconds_total", "hw_thermal"): 0,
        ("hpml_gpu_pcie_bytes_total", "transmit"): 3e9,
        ("hpml_gpu_pcie_bytes_total", "receive"): 5e9,
        ("hpml_gpu_nvlink_bytes_total", "transmit"): 18 * 1e9,
        ("hpml_gpu_nvlink_bytes_total", "receive"): 18 * 2e9,
        ("hpml_gpu_busy_seconds_total", ""): 0.40,
    }
    for (name, which), rate in rates.items():
        label = "reason" if "throttled" in name else "direction"
        labels = {label: which} if which else {}
        grown = last.one(name, **labels) - first.one(name, **labels)
        # each reading was somewhere between the two times that the child noted
        least, most = last.began - first.ended, last.ended - first.began
        assert 0.99 * rate * least - 0.01 <= grown <= 1.01 * rate * most + 0.01, (name, which)


def test_busy_time_is_the_integral_of_utilization(start: Start) -> None:
    """A GPU that works in bursts: what aliases as a gauge is right as a total."""
    gpu = a100(0, util=Square(0.6, 0, 100, 0, 0.5))
    state = State(gpus=(gpu,))
    running = start(state, options={"gpu_interval": 0.02})
    first = running.sample()
    until = time.time() + 2.4
    while time.time() < until:
        time.sleep(0.02)
        last = running.sample()
    name = "hpml_gpu_busy_seconds_total"
    assert gpu.util is not None
    truth = integral(gpu.util, last.ended - state.epoch) - integral(
        gpu.util, first.ended - state.epoch
    )
    seconds = truth / 100
    assert seconds > 0.8
    assert last.one(name) - first.one(name) == pytest.approx(seconds, abs=0.25)


def test_a_gap_adds_only_what_one_reading_can_stand_for(start: Start) -> None:
    """A sampler that slept for an hour does not make an hour of busy GPU."""
    running = start(State(gpus=(a100(0, util=100),)))
    first = running.sample()
    second = running.sample(ahead=1)
    before = second.one("hpml_gpu_busy_seconds_total")
    after = running.sample(ahead=3600).one("hpml_gpu_busy_seconds_total")
    assert 1 <= before <= 1 + second.ended - first.began
    assert after - before == pytest.approx(2.5, abs=0.01)


# Jobs ------------------------------------------------------------------------------------------


def test_allocated_used_and_foreign_gpus_of_jobs(start: Start) -> None:
    """Minor numbers run against NVML's order; one job uses half of what it has, one trespasses."""
    gpus = tuple(
        a100(index, minor=3 - index, mem_base=0, processes=processes)
        for index, processes in enumerate(
            (
                (Process(1001, 2 * GIB, ghost=True), Process(1002, GIB, ghost=True)),
                (),
                (Process(2001, 3 * GIB, ghost=True),),
                (Process(9999, GIB, ghost=True), Process(2001, GIB, ghost=True)),
            )
        )
    )
    running = start(State(gpus=gpus))
    running.do(
        "jobs",
        jobs=[
            {"jobid": "10", "gpus": ["3", "2"], "pids": [1001, 1002]},
            {"jobid": "20", "gpus": [f"0000{gpus[2].bus_id}"], "pids": [2001]},
            {"jobid": "30", "gpus": [], "pids": [3001]},
        ],
    )
    seen = running.sample()
    assert {labels["uuid"] for labels, _ in seen.all("hpml_job_gpu_info", jobid="10")} == {
        gpus[0].uuid,
        gpus[1].uuid,
    }
    assert seen.one("hpml_job_gpus_allocated", jobid="10") == 2
    assert seen.one("hpml_job_gpus_used", jobid="10") == 1
    assert seen.one("hpml_job_gpus_foreign", jobid="10") == 0
    used = "hpml_job_gpu_memory_used_bytes"
    assert seen.one(used, jobid="10", uuid=gpus[0].uuid) == 3 * GIB
    assert seen.one(used, jobid="10", uuid=gpus[1].uuid) == 0
    processes = "hpml_job_gpu_processes"
    assert seen.one(processes, jobid="10", uuid=gpus[0].uuid) == 2
    assert seen.one(processes, jobid="10", uuid=gpus[1].uuid) == 0
    assert seen.one("hpml_job_gpus_used", jobid="20") == 1
    assert seen.one("hpml_job_gpus_foreign", jobid="20") == 1
    assert seen.one(used, jobid="20", uuid=gpus[3].uuid) == GIB
    assert not [one for one in seen.series if one[1].get("jobid") == "30"]
    owned = [
        (
            seen.one("hpml_gpu_processes", uuid=gpu.uuid, owner="job"),
            seen.one("hpml_gpu_processes", uuid=gpu.uuid, owner="none"),
        )
        for gpu in gpus
    ]
    assert owned == [(2, 0), (0, 0), (1, 0), (1, 1)]


def test_jobs_that_share_a_gpu_each_have_their_own_part(start: Start) -> None:
    """Clients of MPS stand in two lists of the driver and count once."""
    gpu = a100(
        0,
        processes=(
            Process(11, GIB, kind="M", ghost=True),
            Process(11, GIB, ghost=True),
            Process(12, 2 * GIB, kind="G", ghost=True),
            Process(12, 2 * GIB, kind="C", ghost=True),
        ),
    )
    running = start(State(gpus=(gpu,)))
    running.do(
        "jobs",
        jobs=[
            {"jobid": "1", "gpus": [gpu.uuid], "pids": [11]},
            {"jobid": "2", "gpus": None, "pids": [12]},
        ],
    )
    seen = running.sample()
    used = "hpml_job_gpu_memory_used_bytes"
    assert [seen.one(used, jobid=one) for one in "12"] == [GIB, 2 * GIB]
    assert [seen.one("hpml_job_gpus_used", jobid=one) for one in "12"] == [1, 1]
    assert not seen.all("hpml_job_gpus_allocated", jobid="2"), "nobody knows what 2 was given"
    assert seen.one("hpml_gpu_processes", owner="job") == 2


def test_instances_of_a_split_gpu_have_memory_activity_and_jobs(start: Start) -> None:
    """MIG: series by the instance's UUID, the parent's sensors by the parent's."""
    whole = divided(h100(0, minor=1, power=200), 1, 2)
    small, large = whole.mig
    large = replace(large, gpm_sm=60, gpm_graphics=80, mem_base=0)
    gpu = replace(
        whole,
        mig=(small, large),
        processes=(Process(71, 5 * GIB, gi=large.gi, ci=0, ghost=True),),
    )
    running = start(State(gpus=(gpu,)))
    running.do("jobs", jobs=[{"jobid": "4", "gpus": [small.uuid, large.uuid], "pids": [71]}])
    running.sample()
    time.sleep(0.2)
    seen = running.sample()
    info = {labels["uuid"]: labels for labels, _ in seen.all("hpml_gpu_info")}
    assert [info[one.uuid]["mig"] for one in (gpu, small, large)] == [
        "enabled",
        "1g.10gb",
        "2g.20gb",
    ]
    assert {info[one.uuid]["minor"] for one in (gpu, small, large)} == {"1"}
    assert seen.one("hpml_gpu_memory_total_bytes", uuid=large.uuid) == 20 * GIB
    assert seen.one("hpml_gpu_memory_used_bytes", uuid=large.uuid) == 5 * GIB
    assert seen.one("hpml_gpu_sm_active_ratio", uuid=large.uuid) == pytest.approx(0.6, rel=0.01)
    assert seen.one("hpml_gpu_utilization_ratio", uuid=large.uuid) == pytest.approx(0.8, rel=0.01)
    assert not seen.all("hpml_gpu_utilization_ratio", uuid=gpu.uuid), "a split GPU has none"
    assert [labels["uuid"] for labels, _ in seen.all("hpml_gpu_power_watts")] == [gpu.uuid]
    assert [labels["uuid"] for labels, _ in seen.all(UP)] == [gpu.uuid]
    assert seen.one("hpml_job_gpus_allocated", jobid="4") == 2
    assert seen.one("hpml_job_gpus_used", jobid="4") == 1
    assert seen.one("hpml_job_gpu_processes", jobid="4", uuid=small.uuid) == 0


def test_instances_come_and_go(start: Start, simulator: Simulator) -> None:
    """An administrator splits a GPU anew while we look."""
    plain = h100(0)
    running = start(State(gpus=(plain, h100(1, power=111))), look=0.0)
    assert len(running.sample().all("hpml_gpu_info")) == 2
    simulator.write(State(gpus=(divided(plain, 3, 3), h100(1, power=111))), running.path)
    seen = running.sample()
    assert len(seen.all("hpml_gpu_info")) == 4
    assert [labels["mig"] for labels, _ in seen.all("hpml_gpu_info", uuid=plain.uuid)] == [
        "enabled"
    ]
    simulator.write(State(gpus=(plain, h100(1, power=111))), running.path)
    seen = running.sample()
    assert len(seen.all("hpml_gpu_info")) == 2
    assert [number for _, number in seen.all(UP)] == [1, 1]
    assert seen.one("hpml_gpu_power_watts", uuid=h100(1).uuid) == 111


def test_in_a_job_only_its_own_gpus_are_shown(start: Start) -> None:
    """An exporter that a user started tells nothing of his neighbours."""
    gpus = tuple(a100(index, minor=2 - index) for index in range(3))
    processes = (Process(51, GIB, ghost=True), Process(61, GIB, ghost=True))
    state = State(gpus=(gpus[0], replace(gpus[1], processes=processes), gpus[2]))
    options = {"job": {"jobid": "5", "gpus": ["1", "0"]}}
    running = start(state, options=options)
    running.do(
        "jobs",
        jobs=[
            {"jobid": "5", "gpus": None, "pids": [51]},
            {"jobid": "6", "gpus": ["2"], "pids": [61]},
        ],
    )
    seen = running.sample()
    own = {gpus[1].uuid, gpus[2].uuid}
    assert {labels["uuid"] for _, labels, _ in seen.series if "uuid" in labels} == own
    assert {labels["jobid"] for _, labels, _ in seen.series if "jobid" in labels} == {"5"}
    assert seen.one("hpml_job_gpus_allocated") == 2
    assert seen.one("hpml_job_gpus_used") == 1


def test_process_lists_that_grow_while_they_are_read(start: Start, simulator: Simulator) -> None:
    """Between NVML's answer how many there are and the list itself, more may come."""
    few = State(gpus=(a100(0, processes=(Process(1, GIB, ghost=True),)),))
    many = replace(
        few, gpus=(a100(0, processes=tuple(Process(n, 1, ghost=True) for n in range(1, 200))),)
    )
    running = start(few, options={"process_interval": 0.0})
    running.do("jobs", jobs=[])
    over = threading.Event()

    def change() -> None:
        while not over.is_set():
            simulator.write(many, running.path)
            simulator.write(few, running.path)

    writer = threading.Thread(target=change)
    writer.start()
    try:
        seen = [running.sample() for _ in range(100)]
    finally:
        over.set()
        writer.join()
    assert {one.error for one in seen} == {""}
    assert {one.one("hpml_gpu_processes", owner="none") for one in seen} <= {0, 1, 199}
    simulator.write(many, running.path)
    assert running.sample().one("hpml_gpu_processes", owner="none") == 199


def test_processes_that_end_are_gone(start: Start) -> None:
    """A real process that is killed is in no list any more."""
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        gpu = a100(0, processes=(Process(sleeper.pid, GIB),))
        running = start(State(gpus=(gpu,)), options={"process_interval": 0.0})
        running.do("jobs", jobs=[{"jobid": "1", "gpus": ["0"], "pids": [sleeper.pid]}])
        assert running.sample().one("hpml_job_gpus_used", jobid="1") == 1
        sleeper.kill()
    assert running.sample().one("hpml_job_gpus_used", jobid="1") == 0


# Faults ----------------------------------------------------------------------------------------


def test_a_lost_gpu_takes_no_other_down_and_comes_back(start: Start, simulator: Simulator) -> None:
    """Its numbers go, `up` says 0, the XID error that tells why stays; later it is there again."""
    state = State(gpus=(a100(0, util=100), a100(1, util=50), a100(2, util=25)))
    running = start(state, retry=(0.0, 0.0), options={"gpu_interval": 0.1})
    running.do("jobs", jobs=[{"jobid": "1", "gpus": ["0", "1"], "pids": []}])
    lost = state.gpus[1].uuid
    for _ in range(4):
        running.sample()
        time.sleep(0.1)
    before = running.sample()
    broken = state.changed(1, events=(Event(1, 79),))
    simulator.write(broken, running.path)
    assert running.sample().one("hpml_gpu_xid_errors_total", uuid=lost, xid="79") == 1
    simulator.write(broken.changed(1, lost=1), running.path)
    for _ in range(3):
        seen = running.sample()
        assert seen.error == ""
        assert {labels["uuid"]: number for labels, number in seen.all(UP)} == {
            state.gpus[0].uuid: 1,
            lost: 0,
            state.gpus[2].uuid: 1,
        }
        assert (seen.one("hpml_gpus", state="up"), seen.one("hpml_gpus", state="lost")) == (2, 1)
        assert not seen.all("hpml_gpu_utilization_ratio", uuid=lost)
        assert not seen.all("hpml_gpu_busy_seconds_total", uuid=lost)
        assert seen.one("hpml_gpu_info", uuid=lost) == 1
        assert seen.one("hpml_gpu_xid_errors_total", uuid=lost, xid="79") == 1
        assert seen.one("hpml_job_gpus_allocated", jobid="1") == 2, "allocated still"
        assert seen.one("hpml_gpu_utilization_ratio", uuid=state.gpus[2].uuid) == 0.25
        time.sleep(0.1)
    simulator.write(state, running.path)
    seen = running.sample()
    assert [number for _, number in seen.all(UP)] == [1, 1, 1]
    assert seen.one("hpml_gpu_utilization_ratio", uuid=lost) == 0.5
    busy = "hpml_gpu_busy_seconds_total"
    for gpu in state.gpus:
        assert seen.one(busy, uuid=gpu.uuid) >= before.one(busy, uuid=gpu.uuid) > 0, "no reset"


def test_all_gpus_lost_and_back(start: Start, simulator: Simulator) -> None:
    """Even then the exporter says which ones they were."""
    state = State(gpus=(a100(0), a100(1)))
    running = start(state, retry=(0.0, 0.0))
    running.sample()
    simulator.write(replace(state, lost=True), running.path)
    for _ in range(3):
        assert [number for _, number in running.sample().all(UP)] == [0, 0]
    simulator.write(state, running.path)
    assert [number for _, number in running.sample().all(UP)] == [1, 1]


def test_gpus_that_are_lost_from_the_beginning_are_counted(start: Start) -> None:
    """They have no name yet, but they are not nothing."""
    running = start(State(gpus=(a100(0), a100(1, lost=1))))
    seen = running.sample()
    assert (seen.one("hpml_gpus", state="up"), seen.one("hpml_gpus", state="lost")) == (1, 1)


def test_xid_errors_are_counted_with_their_time(start: Start, simulator: Simulator) -> None:
    """`time() - last < 300` is what alerts ask; the first one is seen too."""
    state = State(gpus=(a100(0), a100(1)))
    running = start(state)
    assert not running.sample().all("hpml_gpu_xid_errors_total")
    events = (Event(1, 48), Event(2, 63), Event(3, 48))
    simulator.write(state.changed(1, events=events), running.path)
    began = time.time()
    seen = running.sample()
    uuid = state.gpus[1].uuid
    assert {
        (labels["uuid"], labels["xid"]): number
        for labels, number in seen.all("hpml_gpu_xid_errors_total")
    } == {(uuid, "48"): 2, (uuid, "63"): 1}
    last = seen.one("hpml_gpu_xid_last_timestamp_seconds", xid="48")
    assert began <= last <= time.time()
    later = running.sample()
    assert later.one("hpml_gpu_xid_errors_total", xid="48") == 2
    assert later.one("hpml_gpu_xid_last_timestamp_seconds", xid="48") == last


def test_what_fails_in_the_beginning_is_tried_again(start: Start, simulator: Simulator) -> None:
    """No data yet is not the same as not supported."""
    state = State(gpus=(a100(0, mem_temp=66, util=12),))
    early = (Fault("field:82", 21), Fault("nvmlDeviceGetUtilizationRates", 27))
    running = start(replace(state, faults=early), look=0.0)
    seen = running.sample()
    assert not seen.all("hpml_gpu_memory_temperature_celsius")
    assert not seen.all("hpml_gpu_utilization_ratio")
    simulator.write(state, running.path)
    seen = running.sample()
    assert seen.one("hpml_gpu_memory_temperature_celsius") == 66
    assert seen.one("hpml_gpu_utilization_ratio") == 0.12


def test_a_driver_that_was_loaded_again(start: Start, simulator: Simulator) -> None:
    """The collector says so and, made anew, works."""
    state = State(gpus=(a100(0, util=30),))
    running = start(state)
    running.sample()
    simulator.write(replace(state, generation=2), running.path)
    assert running.sample().error == "DriverLostError"
    running.do("close")
    running.do("make")
    assert running.sample().one("hpml_gpu_utilization_ratio") == 0.3


def test_a_driver_that_goes_and_comes(start: Start, simulator: Simulator) -> None:
    """Unloaded: lost, then not here; loaded: as if nothing had been."""
    state = State(gpus=(a100(0, util=30),))
    running = start(state)
    running.sample()
    running.path.unlink()
    assert running.sample().error == "DriverLostError"
    for _ in range(2):
        running.do("close")
        running.do("make")
        assert running.sample().error == "NotHereError"
    simulator.write(replace(state, generation=2), running.path)
    running.do("make")
    assert running.sample().one("hpml_gpu_utilization_ratio") == 0.3


@pytest.mark.parametrize("why", ["driverless", "unloaded", "no nvitop", "no gpu"])
def test_nothing_to_read_is_no_failure(start: Start, why: str) -> None:
    """No library, no driver, no nvitop or no GPU: one sentence, and nothing on stderr."""
    running = {
        "driverless": lambda: start(None, driverless=True),
        "unloaded": lambda: start(None),
        "no nvitop": lambda: start(State(gpus=(a100(0),)), hide="nvitop"),
        "no gpu": lambda: start(State(gpus=())),
    }[why]()
    seen = running.sample()
    assert seen.error == "NotHereError", seen.text
    assert seen.text
    running.do("close")
    if why == "driverless":
        loaded = set(running.do("modules")["modules"])
        assert not loaded & {"nvitop", "pynvml", "psutil"}, "heavy, and for nothing"
    assert running.end() == ""


def test_closing_does_not_wait_for_a_stuck_driver(start: Start, simulator: Simulator) -> None:
    """A call that hangs for a minute; the collector is given up at once and cleans up later."""
    state = State(gpus=(a100(0),))
    running = start(state)
    running.sample()
    stuck = Fault("nvmlDeviceGetUtilizationRates", 60, kind="stuck")
    simulator.write(replace(state, faults=(stuck,)), running.path)
    answer = running.do("stuck", wait=0.5)
    assert answer["hung"]
    assert answer["seconds"] < 5
    simulator.write(state, running.path)
    assert running.do("ended", within=20)["ended"]
    running.do("make")
    assert running.sample().one(UP) == 1


def test_ending_does_not_wait_for_a_stuck_shutdown(start: Start, simulator: Simulator) -> None:
    """Giving back is a call of the driver too."""
    state = State(gpus=(a100(0),))
    running = start(state)
    running.sample()
    stuck = Fault("nvmlShutdown", 60, kind="stuck")
    simulator.write(replace(state, faults=(stuck,)), running.path)
    assert running.do("close")["seconds"] < 5


# What a GPU does not have ----------------------------------------------------------------------

# Metrics that go when a call is not supported, and for which there is no other source.
GOES = {
    "nvmlDeviceGetUtilizationRates": {
        "utilization_ratio", "memory_utilization_ratio", "busy_seconds_total",
    },
    "nvmlDeviceGetMemoryInfo*": {"memory_used_bytes", "memory_total_bytes"},
    "nvmlGpm*": {
        "sm_active_ratio", "sm_occupancy_ratio", "tensor_active_ratio", "dram_active_ratio",
    },
    "nvmlDeviceGetTemperature*": {"temperature_celsius"},
    "nvmlDeviceGetTemperatureV": set(),
    "nvmlDeviceGetEnforcedPowerLimit": {"power_limit_watts"},
    "nvmlDeviceGetClockInfo": {"clock_hertz"},
    "nvmlDeviceGetMaxClockInfo": {"clock_max_hertz"},
    "nvmlDeviceGetFanSpeed": {"fan_speed_ratio"},
    "nvmlDeviceGetPowerUsage": set(),
    "nvmlDeviceGetTotalEnergyConsumption": set(),
    "nvmlDeviceGetCurrentClocks*": set(),
    "nvmlDeviceGetComputeRunningProcesses*": set(),
    "nvmlDeviceGet*RunningProcesses*": set(),
    "nvmlDeviceGetMinorNumber": set(),
    "nvmlDeviceGetMigMode": set(),
    "nvmlDeviceGetPciInfo*": set(),
    "nvmlEventSetCreate": set(),
    "nvmlDeviceRegisterEvents": set(),
    "nvmlEventSetWait*": set(),
    "nvmlDeviceGetFieldValues": {  # GPM has the rest
        "memory_temperature_celsius", "ecc_errors_total", "pcie_replays_total",
        "remapped_rows", "remapped_rows_pending", "remapped_rows_failed",
    },
    "field:186": set(),
    "field:83": set(),
    "field:82": {"memory_temperature_celsius"},
    "field:74": set(),
    "field:7[4-9]": set(),
    "field:3": set(),
    "field:94": {"pcie_replays_total"},
    "field:14[23]": {"remapped_rows"},
    "field:197": set(),
    "field:138": set(),
}  # fmt: skip


def test_each_call_may_be_missing(start: Start, simulator: Simulator) -> None:
    """Not supported, no permission, unknown: the others go on, fallbacks take over, no error."""
    state = State(gpus=(ALL, a100(1)))
    running = start(state)
    running.do("jobs", jobs=[])

    def look() -> Answer:
        running.do("close")
        running.do("make")
        running.sample()
        time.sleep(0.02)
        return running.sample(ahead=1)

    whole = look().names()
    assert len(whole) > 25
    for function, goes in GOES.items():
        for code in (3, 4, 999):
            simulator.write(replace(state, faults=(Fault(function, code),)), running.path)
            seen = look()
            assert seen.error == "", (function, code, seen.text)
            assert [number for _, number in seen.all(UP)] == [1, 1], (function, code)
            gone = whole - seen.names()
            assert gone == {f"hpml_gpu_{one}" for one in goes}, (function, code)


def test_an_unknown_error_at_every_call_is_a_lost_gpu(start: Start, simulator: Simulator) -> None:
    """What some drivers say of a GPU that is gone."""
    state = State(gpus=(a100(0), a100(1)))
    running = start(state)
    running.sample()
    simulator.write(replace(state, faults=(Fault("nvmlDevice*", 999, gpu=0),)), running.path)
    answers = [running.sample(ahead=number) for number in range(5)]
    assert {labels["uuid"]: number for labels, number in answers[-1].all(UP)} == {
        state.gpus[0].uuid: 0,
        state.gpus[1].uuid: 1,
    }


def test_an_old_driver(start: Start) -> None:
    """Symbols of the last five years are missing in the library."""
    gpu = a100(0, util=70, processes=(Process(5, GIB, ghost=True),), throttle_hw_power_brake=1)
    running = start(State(gpus=(gpu,)), driver=Simulator(without=OLD_DRIVER))
    running.do("jobs", jobs=[])
    first = running.sample()
    seen = running.sample(ahead=1)
    assert seen.one("hpml_gpu_utilization_ratio") == 0.7
    assert seen.one("hpml_gpu_temperature_celsius") == 35
    assert seen.one("hpml_gpu_memory_total_bytes") == 80 * GIB
    throttled = seen.one("hpml_gpu_throttled_seconds_total", reason="power_brake")
    assert 1 <= throttled <= 1 + seen.ended - first.began
    assert seen.one("hpml_gpu_processes", owner="none") == 1
    assert running.do("close")
    assert running.end() == "", "nvitop tells of each missing function"


def test_a_consumer_gpu_counts_energy_from_its_power(start: Start) -> None:
    """No ECC, no energy counter, no NVLink, no throttle counters: less, but nothing wrong."""
    gpu = a100(
        0, ecc_mode=None, ecc_vol_cor=None, ecc_vol_unc=None, ecc_agg_cor=None, ecc_agg_unc=None,
        nvlink_links=None, nvlink_tx=None, nvlink_rx=None, remapped_cor=None, remapped_unc=None,
        remapped_pending=None, remapped_failure=None, mig_mode=None, mig_max=None, mem_temp=None,
        power=200, throttle_sw_power=1, fan=30,
    )  # fmt: skip
    faults = (
        *(Fault("field:83", 3), Fault("field:7[4-9]", 3)),
        *(Fault("nvmlDeviceGetTotalEnergyConsumption", 3), Fault("nvmlDeviceGetViolation*", 3)),
    )
    running = start(State(gpus=(gpu,), faults=faults))
    first = running.sample()
    last = [running.sample(ahead=number) for number in range(1, 11)][-1]
    name = "hpml_gpu_energy_joules_total"
    assert last.one(name) - first.one(name) == pytest.approx(2000, rel=0.02)
    throttled = last.one("hpml_gpu_throttled_seconds_total", reason="power")
    assert throttled == pytest.approx(10, rel=0.05)
    assert not [one for one in last.names() if "ecc" in one or "nvlink" in one]
    assert last.one("hpml_gpu_fan_speed_ratio") == pytest.approx(0.3)


# Cost ------------------------------------------------------------------------------------------


def test_series_per_gpu_and_per_job(start: Start) -> None:
    """The budget of a node with 8 GPUs and 20 jobs is 800 series and 25 per job."""
    gpus = tuple(
        replace(
            ALL, **{**vars(h100(index)), "fan": 1, "processes": (Process(100 + index, ghost=True),)}
        )
        for index in range(8)
    )
    running = start(State(gpus=gpus))
    running.do(
        "jobs",
        jobs=[
            {"jobid": str(index), "gpus": [str(index % 8)], "pids": [100 + index % 8]}
            for index in range(20)
        ],
    )
    running.sample()
    time.sleep(0.1)
    seen = running.sample()
    per_gpu = [labels for name, labels, _ in seen.series if "jobid" not in labels]
    per_job = [labels for name, labels, _ in seen.series if "jobid" in labels]
    assert len({json.dumps([name, labels]) for name, labels, _ in seen.series}) == len(seen.series)
    assert len(per_gpu) <= 8 * 48 + 2
    assert len(per_job) <= 20 * 6
    assert {key for _, labels, _ in seen.series for key in labels} <= {
        "uuid", "name", "pci_bus_id", "minor", "mig", "state", "type", "reason", "error",
        "counter", "direction", "owner", "xid", "jobid",
    }  # fmt: skip


def test_the_hot_path_makes_few_calls_and_no_slow_one(start: Start) -> None:
    """Names, layouts and limits are asked for rarely, the calls that take 20 ms never."""
    running = start(State(gpus=tuple(h100(index) for index in range(8))))
    running.do("jobs", jobs=[])
    running.sample()
    running.calls.write_text("")
    told = running.do("repeat", times=20, pause=0.0)
    made = running.calls.read_text().split()
    logger.info("CPU per sample %.3f ms, calls per second %.1f", told["cpu"] * 1e3, len(made) / 20)
    print(f"8 GPUs: {told['cpu'] * 1e3:.3f} ms of CPU and {len(made) / 20:.1f} calls per sample")
    never = {"nvmlDeviceGetPcieThroughput", "nvmlDeviceGetName", "nvmlDeviceGetUUID", "nvmlInit"}
    assert not never & set(made)
    assert len(made) / 20 <= 8 * 9
    assert made.count("nvmlDeviceGetUtilizationRates") == 8 * 20
    assert made.count("nvmlDeviceGetMaxClockInfo") == 0
    assert made.count("nvmlDeviceGetEnforcedPowerLimit") <= 8


def test_a_slow_call_is_made_rarely(start: Start) -> None:
    """What costs much on this driver becomes rarer by itself; the rest keeps its rhythm."""
    slow = Fault("nvmlDeviceGetClockInfo", 40, kind="slow")
    running = start(State(gpus=tuple(a100(index) for index in range(4)), faults=(slow,)))
    running.sample()
    running.calls.write_text("")
    running.do("repeat", times=20, pause=0.0)
    made = running.calls.read_text().split()
    assert made.count("nvmlDeviceGetUtilizationRates") == 4 * 20
    assert made.count("nvmlDeviceGetClockInfo") <= 4 * 2


def test_nvitops_terminal_program_is_never_loaded(start: Start) -> None:
    """Its licence is another (GPL-3.0) than that of its API (Apache-2.0)."""
    running = start(State(gpus=(a100(0),)))
    running.sample()
    loaded = running.do("modules")["modules"]
    assert "nvitop.api" in loaded
    assert not [one for one in loaded if one.startswith(("nvitop.tui", "nvitop.cli"))]
    assert not {"torch", "pydantic", "typer", "rich"} & set(loaded)


def test_utilization_follows_a_curve(start: Start) -> None:
    """The gauge is the curve's value at a moment of the reading."""
    gpu = a100(0, util=Square(0.4, 10, 90))
    assert gpu.util is not None
    state = State(gpus=(gpu,))
    running = start(state)
    for _ in range(10):
        seen = running.sample()
        at = [value(gpu.util, moment - state.epoch) / 100 for moment in (seen.began, seen.ended)]
        if at[0] == at[1]:
            assert seen.one("hpml_gpu_utilization_ratio") == at[0]
        time.sleep(0.07)
