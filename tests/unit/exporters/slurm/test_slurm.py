"""The Slurm exporter and its sources on captured answers and broken ones; no Slurm is needed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from hpml_exporters.core.collector import StaleError
from hpml_exporters.core.sampler import CollectorSource, Sampler
from hpml_exporters.slurm.collector import SlurmCollector
from hpml_exporters.slurm.commands import (
    ClusterNode,
    Commands,
    TargetServer,
    View,
    count_tasks,
    head_of_reason,
    targets,
)
from hpml_exporters.slurm.options import Native, SlurmOptions, job_of, node_of
from hpml_exporters.web.config import listen_on
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from hpml_orchestrator.errors import InputError, SchedulerUnavailable
from hpml_orchestrator.scheduler.command import Completed
from tests.patience import eventually

DATA = Path(__file__).parent / "data"
NAMES = ("squeue", "sinfo", "sdiag")
CAPTURED = {name: (DATA / "22.05.8" / f"{name}.txt").read_text("utf-8") for name in NAMES}
Values = dict[str, float]


class FakeRunner:
    """Canned answers by the first or last argument of a command; an exception is raised."""

    def __init__(self, answers: Mapping[str, str | Exception] = CAPTURED) -> None:
        self.answers = dict(answers)
        self.calls: Counter[str] = Counter()

    def run(self, argv: Sequence[str], *, env: Mapping[str, str], timeout: float) -> Completed:
        """Answer as the command would."""
        assert env["SLURM_TIME_FORMAT"] == "%s"
        assert timeout > 0
        self.calls[argv[0]] += 1
        answer = self.answers.get(argv[-1], self.answers.get(argv[0], ""))
        if isinstance(answer, Exception):
            raise answer
        return Completed(0, answer)

    def run_detached(self, *_arguments: object, **_options: object) -> int:
        """Nothing here outlives the exporter."""
        raise NotImplementedError


class Families:
    """Families, for a registry."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self.families = list(families)

    def collect(self) -> list[Metric]:
        """Return them."""
        return self.families


def exposed(families: Iterable[Metric]) -> str:
    """The page that shows these families."""
    registry = CollectorRegistry()
    registry.register(Families(families))
    return generate_latest(registry).decode()


def samples(text: str) -> list[tuple[str, dict[str, str], float]]:
    """All series of an exposition."""
    families = text_string_to_metric_families(text)
    return [(one.name, one.labels, one.value) for family in families for one in family.samples]


def values(collector: SlurmCollector, now: float = 0.0) -> Values:
    """Refresh, and read the exposition again: series as `name['b']`, and their values."""
    try:
        families = collector.sample(now)
    except StaleError as error:
        families = error.families
    return {
        f"{name}{sorted(labels.values())}": value
        for name, labels, value in samples(exposed(families))
    }


def gpu_rows(nodes: Iterable[ClusterNode]) -> Iterator[tuple[str, str, float]]:
    """The type, state and number of GPUs of these nodes."""
    source = SimpleNamespace(name="fake", read=lambda: View([], nodes))
    for name, labels, value in samples(exposed(SlurmCollector(source).sample(0.0))):
        if name == "hpml_slurm_gpus":
            yield labels["type"], labels["state"], value


def row(job: str, state: str, start: int = 0, end: int = 0, **other: str) -> str:
    """A row of squeue as the exporter asks for it."""
    fields = [job, state, other.get("reason", "None"), other.get("partition", "main"), "normal"]
    fields += [other.get("user", "ada"), "100", str(start), str(end)]
    return "\x1f".join(fields) + "\x1e\n"


def test_a_captured_cluster() -> None:
    """Every task of an array counts; what is left of a drained node is down, not idle."""
    shown = values(SlurmCollector(Commands(FakeRunner())))
    assert shown["hpml_slurm_jobs['main', 'normal', 'running']"] == 2
    assert shown["hpml_slurm_jobs['main', 'normal', 'pending']"] == 12
    assert shown["hpml_slurm_jobs_pending['JobArrayTaskLimit', 'main']"] == 9
    assert shown["hpml_slurm_nodes['drained']"] == shown["hpml_slurm_nodes['mixed']"] == 1
    assert [shown[f"hpml_slurm_cpus['{state}']"] for state in ("allocated", "idle", "down")] == [
        *(2, 2, 4)
    ]
    assert shown["hpml_slurm_gpus['a100', 'down']"] == 2
    assert shown["hpml_slurm_partition_gpus['a100', 'allocated', 'low']"] == 1
    assert shown["hpml_slurm_node_gpus['node1']"] == shown["hpml_slurm_node_gpus['node2']"] == 2
    assert not [name for name in shown if "user" in name]


@pytest.mark.parametrize(
    ("configured", "used", "kind", "allocated"),
    [
        ("gpu:4", "gpu:(null):0(IDX:N/A)", "", 0),  # up to 25.11 an absent type is `(null)`
        ("gpu:4(S:0-1)", "gpu:(null):3(IDX:0,2-3)", "", 3),
        ("gpu:a100:4", "gpu:(null):3(IDX:0-2)", "a100", 3),
        ("gpu:4", "gpu:a100:3(IDX:0-2)", "", 3),
        ("gpu:1g.5gb:4", "gpu:1g.5gb:2(IDX:0,3)", "1g.5gb", 2),
        ("gpu:a100:3,gpu:h100:1", "gpu:(null):3(IDX:0-2)", "", 3),  # of which type is unknown
    ],
)
def test_used_gpus_of_a_node(configured: str, used: str, kind: str, allocated: int) -> None:
    """GPUs in use are counted with and without a type, in either of the two fields."""
    sinfo = CAPTURED["sinfo"].replace("\x1fgpu:a100:2\x1f", f"\x1f{configured}\x1f")
    sinfo = re.sub(r"gpu:a100:\d\(IDX:[^)]*\)", used, sinfo)
    nodes = Commands(FakeRunner({"sinfo": sinfo})).nodes()
    rows = {(name, state): value for name, state, value in gpu_rows(nodes)}
    assert rows == {(kind, "allocated"): 2 * allocated, (kind, "idle"): 4 - allocated} | {
        (kind, "down"): 4 - allocated  # node2 is drained
    }


@pytest.mark.parametrize(
    ("shown", "state", "usable"),
    [
        ("idle", "idle", True),
        ("mixed", "mixed", True),
        ("idle+cloud", "idle", True),
        ("idle+planned", "planned", True),
        ("idle+completing", "completing", True),
        ("mixed+planned", "mixed", True),
        ("idle-", "planned", True),
        ("idle+dynamic_norm", "idle", True),
        ("mixed+reboot_requested", "mixed", True),
        ("idle+blocked", "blocked", False),
        ("mixed+blocked", "mixed", False),
        ("idle+reserved", "reserved", False),
        ("mixed+reserved", "mixed", False),
        ("idle+perfctrs", "blocked", False),
        ("idle+maintenance", "maintenance", False),
        ("idle+maint", "maintenance", False),
        ("mixed+maintenance", "maintenance", False),
        ("mixed+drain", "draining", False),
        ("idle+drain", "drained", False),
        ("idle+powering_down", "powered_down", False),
        ("idle%", "powered_down", False),
        ("idle+cloud+powered_down", "powered_down", False),
        ("idle#", "powered_down", False),
        ("idle+power_down", "powered_down", False),
        ("mixed+powering_down", "mixed", False),
        ("idle+power_drain", "powered_down", False),
        ("idle+power_up", "powered_down", False),
        ("idle+reboot_issued", "rebooting", False),
        ("idle+reboot_requested", "rebooting", False),
        ("idle+fail", "down", False),
        ("failing", "down", False),
        ("inval", "down", False),
        ("idle*", "down", False),
        ("mixed+not_responding", "down", False),
        ("idle+invalid_reg", "down", False),
        ("unknown", "down", False),
        ("odd", "unknown", False),
        ("down+drain", "drained", False),  # as sinfo calls it: somebody works on it
        ("down+reboot_issued", "rebooting", False),
        ("idle+powering_down+not_responding", "powered_down", False),
        ("down+powered_down", "down", False),
        ("idle*+drain", "drained", False),
    ],
)
def test_states_of_a_node(shown: str, state: str, *, usable: bool) -> None:
    """The idle CPUs of a node that takes no new jobs now are down, whatever its state is called."""
    sinfo = CAPTURED["sinfo"].replace("\x1fmixed\x1f", f"\x1f{shown}\x1f")
    found = values(SlurmCollector(Commands(FakeRunner({**CAPTURED, "sinfo": sinfo}))))
    assert found[f"hpml_slurm_nodes{[state]}"] >= 1
    away = {"down", "drained", "maintenance", "rebooting", "powered_down"}
    assert (f"hpml_slurm_node_reason_info{sorted(['node1', state, ''])}" in found) == (
        state in away
    )
    free = "idle" if usable else "powered_down" if state == "powered_down" else "down"
    for one, least in (("idle", 0), ("powered_down", 0), ("down", 4)):  # node2 is drained
        assert found.get(f"hpml_slurm_cpus['{one}']", 0) == least + 2 * (one == free)


def test_a_job_that_waits_in_several_partitions() -> None:
    """It counts in each, and once in the queue; there is no partition of their names together."""
    rows = "".join(
        row(job, "PENDING", reason="Priority", partition="gpu,long") for job in ("1", "2_[1-3]")
    )
    rows += row("3", "RUNNING", 110, partition="long")
    runner = FakeRunner({**CAPTURED, "squeue": rows})
    collector = SlurmCollector(Commands(runner))
    shown = values(collector)
    for partition in ("gpu", "long"):
        assert shown[f"hpml_slurm_jobs['{partition}', 'normal', 'pending']"] == 4
        assert shown[f"hpml_slurm_jobs_pending['Priority', '{partition}']"] == 4
    assert shown["hpml_slurm_queue_jobs['Priority', 'pending']"] == 4
    assert shown["hpml_slurm_queue_jobs['', 'running']"] == 1
    runner.answers["squeue"] = row("1", "CANCELLED", 120, 120, partition="gpu,long")
    shown = values(collector, 100.0)
    assert shown["hpml_slurm_jobs_ended_total['cancelled', 'gpu']"] == 1
    assert not [name for name in shown if "gpu,long" in name]


def test_pyslurm_and_the_commands_show_the_same() -> None:
    """Jobs by state and reason, and nodes, of one cluster at one moment (Slurm 25.11.7)."""
    captured = json.loads((DATA / "25.11.7/pyslurm-25.11.2.json").read_text("utf-8"))
    jobs = [job_of(SimpleNamespace(**job)) for job in captured["jobs"]]
    waiting = ("PENDING", "RUNNING")
    native = [
        (job.state, job.reason) for job in jobs if job.state in waiting for _ in range(job.tasks)
    ]
    text = []
    for line in (DATA / "25.11.7/squeue.txt").read_text("utf-8").splitlines():
        job, _, state, reason, *_ = line.split("|")
        text += [(state, head_of_reason(reason))] * (count_tasks(job) if "[" in job else 1)
    assert Counter(native) == Counter(text)
    nodes = {node["name"]: node_of(SimpleNamespace(**node)) for node in captured["nodes"]}
    for shown in json.loads((DATA / "25.11.7/nodes.json").read_text("utf-8"))["nodes"]:
        node = nodes[shown["name"]]
        assert node.state == shown["state"][0].lower()
        assert (node.cpus, node.cpus_allocated) == (shown["cpus"], shown["alloc_cpus"])
        assert set(node.partitions) == set(shown["partitions"])
    assert nodes["node1"].gpus_allocated == {"a100": 2}


def test_a_job_that_ends_is_counted_once() -> None:
    """Ends and waits count from the exporter's start."""
    runner = FakeRunner({**CAPTURED, "squeue": row("1", "FAILED", 110, 120) + row("2", "PENDING")})
    collector = SlurmCollector(Commands(runner))
    assert "hpml_slurm_jobs_ended_total['failed', 'main']" not in values(collector)
    runner.answers["squeue"] = row("1", "FAILED", 110, 120) + row("2", "TIMEOUT", 160, 1060)
    for now in (100.0, 200.0):
        shown = values(collector, now)
        assert shown["hpml_slurm_jobs_ended_total['main', 'timeout']"] == 1
        assert shown["hpml_slurm_job_wait_seconds_sum['main']"] == 60
        assert shown["hpml_slurm_job_wait_seconds_bucket['60.0', 'main']"] == 1
        assert shown["hpml_slurm_job_wait_seconds_bucket['10.0', 'main']"] == 0


@pytest.mark.parametrize(
    "answer",
    [SchedulerUnavailable("no answer in 60 s"), CAPTURED["squeue"][:-40]],
    ids=["silent", "half an answer"],
)
def test_while_slurm_does_not_answer(answer: str | Exception) -> None:
    """The last figures are kept and marked, and Slurm is asked less and less often."""
    runner = FakeRunner()
    collector = SlurmCollector(Commands(runner))
    before = values(collector)
    runner.answers["squeue"] = answer
    for step in range(1, 41):
        with pytest.raises(StaleError, match="no answer in 60 s|cut off"):
            collector.sample(30.0 * step)
    shown = values(collector, 1201.0)
    assert runner.calls["squeue"] < 1 + 8
    jobs = "hpml_slurm_jobs['main', 'normal', 'running']"
    stamp = "hpml_slurm_last_refresh_timestamp_seconds[]"
    assert (shown[jobs], shown[stamp]) == (before[jobs], before[stamp])
    runner.answers["squeue"] = CAPTURED["squeue"]
    assert values(collector, 9000.0)[stamp] > before[stamp]


def test_an_exporter_while_slurm_does_not_answer(caplog: pytest.LogCaptureFixture) -> None:
    """It shows the old figures, its collector counts as failed, and /healthz names it."""
    runner = FakeRunner({**CAPTURED, "sdiag": SchedulerUnavailable("sdiag: access denied")})
    collector = SlurmCollector(Commands(runner))
    collector.sample(0.0)
    runner.answers["squeue"] = SchedulerUnavailable("no answer")
    collector.interval = 0.01
    sampler = Sampler([CollectorSource("slurm", lambda: collector)])
    sampler.start()
    try:

        def shown() -> dict[str, float]:
            return {
                name + str(labels): value
                for name, labels, value in samples(exposed(sampler.collect()))
            }

        eventually(lambda: shown().get("hpml_exporter_errors_total{'collector': 'slurm'}", 0) > 3)
        assert shown()["hpml_exporter_up{'collector': 'slurm'}"] == 0
        assert shown()["hpml_slurm_nodes{'state': 'mixed'}"] == 1
        assert sampler.health() == (True, "failed: slurm")
        runner.answers["squeue"] = CAPTURED["squeue"]
        eventually(lambda: shown()["hpml_exporter_up{'collector': 'slurm'}"] == 1)
        assert sampler.health() == (True, "ok")
    finally:
        sampler.stop()
    denied, failed = caplog.messages  # each reason once
    assert denied == "metrics left out: sdiag: access denied"
    assert failed == "collector slurm: old figures are shown: no answer"


def test_what_is_asked_for_now_and_then() -> None:
    """Licences, reservations and, with --users, fairshares of users but not of accounts."""
    answers = {
        "licenses": "LicenseName=matlab Total=7 Used=3 Free=4\n",
        "reservations": "ReservationName=maint StartTime=100 EndTime=200 NodeCnt=1 State=INACTIVE",
        "sshare": "lab||0.5\nlab|ada|0.25\nlab|bob|nan\n",
    }
    runner = FakeRunner(CAPTURED | answers)
    shown = values(SlurmCollector(Commands(runner, shares=True), users=True))
    rare = ("hpml_slurm_license", "hpml_slurm_reservation", "hpml_slurm_user_fair")
    assert {name: value for name, value in shown.items() if name.startswith(rare)} == {
        "hpml_slurm_licenses['matlab']": 7,
        "hpml_slurm_licenses_used['matlab']": 3,
        "hpml_slurm_reservation_nodes['inactive', 'maint']": 1,
        "hpml_slurm_reservation_start_timestamp_seconds['maint']": 100,
        "hpml_slurm_reservation_end_timestamp_seconds['maint']": 200,
        "hpml_slurm_user_fairshare_ratio['ada', 'lab']": 0.25,
    }


@pytest.mark.parametrize(
    ("start", "end", "shown"),
    [
        ("2026-11-20T10:00:00", "2026-11-20T12:00:00", {"start", "end"}),
        ("now+1hour", "Unknown", set()),
        ("None", "N/A", set()),
        ("10:58:40", "Tomorr 10:00", set()),  # SLURM_TIME_FORMAT=relative in a site's wrapper
        ("100", "UNLIMITED", {"start"}),
        ("0", "(null)", set()),
    ],
)
def test_an_unknown_time_of_a_reservation(start: str, end: str, shown: set[str]) -> None:
    """It has no series; it is not 1970."""
    text = f"ReservationName=r StartTime={start} EndTime={end} Duration=UNLIMITED NodeCnt=1"
    runner = FakeRunner({**CAPTURED, "reservations": f"{text} State=ACTIVE\n"})
    found = values(SlurmCollector(Commands(runner)))
    times = {
        name: found.get(f"hpml_slurm_reservation_{name}_timestamp_seconds['r']")
        for name in ("start", "end")
    }
    assert {name for name, value in times.items() if value is not None} == shown
    assert found["hpml_slurm_reservation_nodes['active', 'r']"] == 1


def test_names_that_nobody_expects() -> None:
    """Unknown states, other bytes, quotes and braces arrive as values of labels."""
    odd = ['a"} 1\nhpml_slurm_nodes 0', "b\udcff", "c\\"]
    rows = "".join(row("7", "NEW_STATE", partition=name, user=name) for name in odd)
    runner = FakeRunner({**CAPTURED, "squeue": rows + "no row\x1e"})
    shown = values(SlurmCollector(Commands(runner), users=True))
    assert sum(v for name, v in shown.items() if name.startswith("hpml_slurm_jobs[")) == 3
    assert len([name for name in shown if name.startswith("hpml_slurm_user_jobs[")]) == 3


def test_users_are_capped() -> None:
    """Beyond two hundred names the rest is one."""
    rows = "".join(row(str(user), "PENDING", user=f"u{user}") for user in range(300))
    runner = FakeRunner({**CAPTURED, "squeue": rows})
    shown = values(SlurmCollector(Commands(runner), users=True))
    assert shown["hpml_slurm_user_jobs['other', 'pending']"] == 100


@pytest.mark.parametrize(("only_up", "names"), [(False, ["node1", "node2"]), (True, ["node1"])])
def test_targets(*, only_up: bool, names: list[str]) -> None:
    """A target per node, with labels; a drained one on request only."""
    groups = json.loads(targets(Commands(FakeRunner()).nodes(), 9445, only_up=only_up))
    assert [group["labels"]["node"] for group in groups] == names
    assert groups[0]["targets"][0].endswith(":9445")
    assert groups[0]["labels"]["__meta_slurm_partitions"] == ",main,low,"
    assert groups[-1]["labels"]["__meta_slurm_state"] == ("mixed" if only_up else "drained")


def test_targets_are_served_while_slurm_is_away() -> None:
    """Slurm is asked once a minute at most; without any list the answer is 503."""
    runner = FakeRunner({"sinfo": SchedulerUnavailable("no answer in 60 s")})
    with TargetServer(listen_on("127.0.0.1:0"), Commands(runner), 9445, only_up=False) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/targets"
        try:
            with pytest.raises(HTTPError, match="503") as told:
                urlopen(url)
            told.value.close()
            runner.answers = dict(CAPTURED)
            for _ in range(2):
                with urlopen(url) as answer:
                    assert len(json.load(answer)) == 2
        finally:
            server.shutdown()
            thread.join()
    assert runner.calls["sinfo"] == 2


@pytest.mark.parametrize(("listen", "warned"), [("127.0.0.1:0", False), ("0.0.0.0:0", True)])
@pytest.mark.parametrize("command", [("targets", "--serve"), ("export", "slurm", "--listen")])
def test_an_address_without_a_password(
    command: tuple[str, ...], listen: str, *, warned: bool
) -> None:
    """A warning comes before the address where other machines can reach it."""
    argv = [sys.executable, "-m", "hpml_orchestrator.cli", *command, listen]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        told = list(takewhile(lambda line: "http://" not in line, lines))
        process.terminate()
    assert any("without a password" in line for line in told) == warned


@pytest.mark.parametrize("wrong", [{"source": "sql"}, {"interval": 5.0}], ids=str)
def test_wrong_options(wrong: dict[str, object]) -> None:
    """They are refused by name."""
    with pytest.raises(InputError) as told:
        SlurmOptions(**wrong)  # type: ignore[arg-type]
    assert told.value.field in wrong


def test_pyslurm_is_used_where_it_can_be_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A fake module returns what the real one returned; statistics have pyslurm's names."""
    captured = json.loads((DATA / "25.11.7/pyslurm-25.11.2.json").read_text("utf-8"))
    objects = {
        kind: {number: SimpleNamespace(**one) for number, one in enumerate(captured[kind])}
        for kind in ("jobs", "nodes")
    }
    numbers = SimpleNamespace(schedule_cycle_last=61, jobs_submitted=11)
    statistics = SimpleNamespace(load=lambda: numbers)
    fake = SimpleNamespace(
        Jobs=SimpleNamespace(load=lambda: objects["jobs"]),
        Nodes=SimpleNamespace(load=lambda: objects["nodes"]),
        slurmctld=SimpleNamespace(Statistics=statistics),
    )
    monkeypatch.setitem(sys.modules, "pyslurm", fake)
    (tmp_path / "slurm.conf").touch()
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.setenv("PATH", "")
    view = Native().read()
    assert len(list(view.jobs)) == len(captured["jobs"])
    assert view.statistics["schedule_cycle_last"] == 61
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none.conf"))
    with pytest.raises(SchedulerUnavailable):
        Native()
