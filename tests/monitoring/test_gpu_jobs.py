"""Which job has and uses which simulated GPU, compared with the state file."""

from __future__ import annotations

import subprocess
import threading
import time
from dataclasses import replace

import pytest

from deploy.gpusim.gpusim import Process, Simulator, State, a100, divided, h100
from tests.monitoring.gpu_support import GIB, UP, Start


def test_jobs_that_share_a_gpu_each_have_their_own_part(gpu_collector: Start) -> None:
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
    running = gpu_collector(State(gpus=(gpu,)))
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


def test_instances_of_a_split_gpu_have_memory_activity_and_jobs(gpu_collector: Start) -> None:
    """MIG: series by the instance's UUID, the parent's sensors by the parent's."""
    whole = divided(h100(0, minor=1, power=200), 1, 2)
    small, large = whole.mig[0].changed(gpm_graphics=10), whole.mig[1]
    large = large.changed(gpm_sm=60, gpm_graphics=80, mem_base=0)
    gpu = replace(
        whole,
        mig=(small, large),
        processes=(Process(71, 5 * GIB, gi=large.gi, ci=0, ghost=True),),
    )
    running = gpu_collector(State(gpus=(gpu,)))
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
    share = seen.one("hpml_gpu_utilization_ratio", uuid=gpu.uuid)
    assert share == pytest.approx((0.8 * 2 + 0.1) / 7, rel=0.02), "2 and 1 of 7 slices"
    assert [info[each.uuid]["parent"] for each in (gpu, small)] == ["", gpu.uuid]
    assert info[large.uuid]["gpu_instance"] == str(large.gi)
    assert [labels["uuid"] for labels, _ in seen.all("hpml_gpu_power_watts")] == [gpu.uuid]
    assert [labels["uuid"] for labels, _ in seen.all(UP)] == [gpu.uuid]
    assert seen.one("hpml_job_gpus_allocated", jobid="4") == 2
    assert seen.one("hpml_job_gpus_used", jobid="4") == 1
    assert seen.one("hpml_job_gpu_processes", jobid="4", uuid=small.uuid) == 0


def test_instances_come_and_go(gpu_collector: Start, gpusim_library: Simulator) -> None:
    """An administrator repartitions a GPU between two readings."""
    plain = h100(0)
    running = gpu_collector(State(gpus=(plain, h100(1, power=111))), look=0.0)
    assert len(running.sample().all("hpml_gpu_info")) == 2
    gpusim_library.write(State(gpus=(divided(plain, 3, 3), h100(1, power=111))), running.path)
    seen = running.sample()
    assert len(seen.all("hpml_gpu_info")) == 4
    assert [labels["mig"] for labels, _ in seen.all("hpml_gpu_info", uuid=plain.uuid)] == [
        "enabled"
    ]
    gpusim_library.write(State(gpus=(plain, h100(1, power=111))), running.path)
    seen = running.sample()
    assert len(seen.all("hpml_gpu_info")) == 2
    assert [number for _, number in seen.all(UP)] == [1, 1]
    assert seen.one("hpml_gpu_power_watts", uuid=h100(1).uuid) == 111


def test_in_a_job_only_its_own_gpus_are_shown(gpu_collector: Start) -> None:
    """An exporter that a user started shows nothing about other users' jobs."""
    gpus = tuple(a100(index, minor=2 - index) for index in range(3))
    processes = (Process(51, GIB, ghost=True), Process(61, GIB, ghost=True))
    state = State(gpus=(gpus[0], replace(gpus[1], processes=processes), gpus[2]))
    options = {"job": {"jobid": "5", "gpus": ["1", "0"]}}
    running = gpu_collector(state, options=options)
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


def test_a_job_whose_gpus_are_not_known_claims_those_it_uses(gpu_collector: Start) -> None:
    """The node's other GPUs are not shown."""
    gpus = (a100(0), a100(1, processes=(Process(51, GIB, ghost=True),)))
    running = gpu_collector(State(gpus=gpus), options={"job": {"jobid": "5"}})
    assert not [labels for _, labels, _ in running.sample().series if "uuid" in labels]
    running.do("jobs", jobs=[{"jobid": "5", "gpus": None, "pids": [51]}])
    seen = running.sample(ahead=11)
    assert {labels["uuid"] for _, labels, _ in seen.series if "uuid" in labels} == {gpus[1].uuid}
    running.do("jobs", jobs=[{"jobid": "5", "gpus": None, "pids": []}])
    assert running.sample(ahead=22).one(UP, uuid=gpus[1].uuid) == 1, "its process ended"


def test_process_lists_that_grow_while_they_are_read(
    gpu_collector: Start, gpusim_library: Simulator
) -> None:
    """Between NVML's answer how many there are and the list itself, more may come."""
    few = State(gpus=(a100(0, processes=(Process(1, GIB, ghost=True),)),))
    many = replace(
        few, gpus=(a100(0, processes=tuple(Process(n, 1, ghost=True) for n in range(1, 200))),)
    )
    running = gpu_collector(few, options={"process_interval": 0.0})
    running.do("jobs", jobs=[])
    over = threading.Event()

    def change() -> None:
        while not over.is_set():
            gpusim_library.write(many, running.path)
            gpusim_library.write(few, running.path)

    writer = threading.Thread(target=change)
    writer.start()
    try:
        seen = [running.sample() for _ in range(100)]
    finally:
        over.set()
        writer.join()
    assert {one.error for one in seen} == {""}
    assert {one.one("hpml_gpu_processes", owner="none") for one in seen} <= {0, 1, 199}
    gpusim_library.write(many, running.path)
    assert running.sample().one("hpml_gpu_processes", owner="none") == 199


def test_processes_that_end_are_gone(gpu_collector: Start) -> None:
    """After a real process is killed, it disappears from the list."""
    with subprocess.Popen(["sleep", "600"]) as sleeper:
        gpu = a100(0, processes=(Process(sleeper.pid, GIB),))
        running = gpu_collector(State(gpus=(gpu,)), options={"process_interval": 0.0})
        running.do("jobs", jobs=[{"jobid": "1", "gpus": ["0"], "pids": [sleeper.pid]}])
        assert running.sample().one("hpml_job_gpus_used", jobid="1") == 1
        sleeper.kill()
    assert running.sample().one("hpml_job_gpus_used", jobid="1") == 0
