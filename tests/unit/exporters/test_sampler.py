"""Collectors at their own rhythms: what one of them does wrong stays its own."""

from __future__ import annotations

import ctypes
import gzip
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hpml_exporters.app import ExporterPages
from hpml_exporters.core import sampler as sampler_module
from hpml_exporters.core.collector import (
    SPECS,
    DriverLostError,
    Histogram,
    MetricSpec,
    NotHereError,
    StaleError,
)
from hpml_exporters.core.sampler import CollectorSource, Pauses, Sampler, next_due
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

from tests.patience import eventually
from tests.unit.exporters.collecting import Probe, Turned, family, figures, spec_of

QUICK = Pauses(absent=0.05, lost=0.02, lost_max=0.05)
HANGS_SECONDS = 300.0  # a call that does not return, unless the test lets it


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Turned:
    """A clock that only the test moves."""
    made = Turned(still=1000.0)
    monkeypatch.setattr(sampler_module, "time", made)
    return made


class Pausing:
    """In the place of the sampler's event: each wait takes its time of the clock, and none else."""

    def __init__(self, clock: Turned, ended: Callable[[], bool]) -> None:
        self.clock, self.ended = clock, ended

    def wait(self, seconds: float) -> bool:
        """Advance by this many seconds."""
        self.clock.ahead += seconds
        return self.ended()


@contextmanager
def sampling(*probes: Probe, **options: object) -> Iterator[Sampler]:
    """A sampler at work."""
    sampler = Sampler(
        [one.source() for one in probes],
        **{"pauses": QUICK, **options},  # type: ignore[arg-type]
    )
    sampler.start()
    try:
        yield sampler
    finally:
        sampler.stop()


def shown(sampler: Sampler) -> dict[str, float]:
    """What a scrape gets now."""
    return figures(ExporterPages(sampler).metrics("", gzip=False)[0])


def up(sampler: Sampler, name: str) -> float | None:
    """The value of hpml_exporter_up for a collector."""
    return shown(sampler).get(f"hpml_exporter_up{{collector={name}}}")


@pytest.mark.parametrize(
    ("origin", "interval", "now", "due"),
    [
        (100.0, 1.0, 99.0, 100.0),
        (100.0, 1.0, 100.0, 101.0),
        (100.0, 1.0, 100.4, 101.0),
        (100.0, 1.0, 107.9, 108.0),  # seven are left out, not made up for
        (0.0, 0.1, 0.3, 0.4),  # 0.3 / 0.1 is less than 3 in binary
    ],
)
def test_the_grid(origin: float, interval: float, now: float, due: float) -> None:
    """The next moment is later than now, and on the grid however late the last one was."""
    assert next_due(origin, interval, now) == pytest.approx(due)
    assert next_due(origin, interval, now) > now or now < origin


def test_each_collector_has_its_rhythm(clock: Turned) -> None:
    """Readings keep to the grid though they take half of the interval; a late one is not made up.

    The third takes three intervals and a half.
    """

    def take(turn: int) -> None:
        clock.ahead += 3.5 if turn == 3 else 0.5

    probe = Probe("slow", interval=1, act=take)
    sampler = Sampler([probe.source()])
    sampler._ended = Pausing(clock, lambda: len(probe.times) >= 6)  # type: ignore[assignment]
    sampler._keep_reading(sampler._slots[0], 1000.25)
    assert probe.times == [1000.25, 1001.25, 1002.25, 1006.25, 1007.25, 1008.25]


def test_a_failing_collector_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Its series go, its errors are counted and logged once, and the other's series stay."""
    well = threading.Event()

    def fail(turn: int) -> None:
        if turn > 2 and not well.is_set():
            raise OSError(5, "no such luck")

    bad, good = Probe("bad", act=fail), Probe("good")
    began = time.time()
    with sampling(bad, good) as sampler:
        eventually(lambda: len(bad.times) > 12 and len(good.times) > 4)
        now = shown(sampler)
        assert "hpml_bad_level" not in now
        assert now["hpml_good_level"] > 2
        assert now["hpml_exporter_up{collector=bad}"] == 0
        assert now["hpml_exporter_up{collector=good}"] == 1
        assert now["hpml_exporter_errors_total{collector=bad}"] >= 9
        assert now["hpml_exporter_errors_total{collector=good}"] == 0
        assert now["hpml_exporter_series{collector=good}"] == 1
        assert now["hpml_exporter_series{collector=bad}"] == 0
        last = now["hpml_exporter_last_success_timestamp_seconds{collector=bad}"]
        assert began <= last <= time.time()
        assert sampler.health() == (True, "failed: bad")
        well.set()
        eventually(lambda: up(sampler, "bad") == 1)
        assert (bad.made, bad.closed) == (1, 0)
    told = [line for line in caplog.messages if "no such luck" in line]
    assert told == ["collector bad: OSError: [Errno 5] no such luck"]
    eventually(lambda: (bad.closed, good.closed) == (1, 1))


@pytest.mark.parametrize(
    ("type_", "labels", "value", "error"),
    [
        ("gauge", (), 1, ValueError),
        ("gauge", ("a", "b"), 1, ValueError),
        ("gauge", ("a",), "x", ValueError),
        ("gauge", ("a",), Histogram((), (1,), 1), TypeError),
        ("histogram", ("a",), 1, TypeError),
        ("histogram", ("a",), Histogram((1.0,), (1,), 1), ValueError),
        ("gauge", (1,), 1, TypeError),
    ],
)
def test_a_family_that_cannot_be_rendered_is_a_failed_reading(
    type_: Any, labels: Any, value: Any, error: type[Exception]
) -> None:
    """Also when it is found later, by the scrape for which the families are made."""
    spec = MetricSpec("hpml_x", type_, "X.", ("a",), source="x")
    with pytest.raises(error):
        spec.family([(labels, value)])
    late = Probe("late", act=lambda _: (spec.family([row]) for row in [(labels, value)]))
    good = Probe("good")
    sampler = Sampler([late.source(), good.source()])
    for slot in sampler._slots:
        slot.read()
    now = shown(sampler)
    assert (now["hpml_exporter_up{collector=late}"], now["hpml_good_level"]) == (0, 1)
    assert now["hpml_exporter_errors_total{collector=late}"] == 1
    assert shown(sampler)["hpml_exporter_errors_total{collector=late}"] == 1


def test_a_failed_reading_may_keep_the_last_figures(caplog: pytest.LogCaptureFixture) -> None:
    """As the cluster's, while Slurm does not answer: they are shown, and `up` is 0."""

    def act(turn: int) -> list[Metric] | None:
        if turn > 1:
            raise StaleError("Slurm does not answer", [family("slurm", 1)])
        return None

    sampler = Sampler([Probe("slurm", act=act).source()])
    for errors in (0, 1, 2):
        sampler._slots[0].read()
        now = shown(sampler)
        assert now["hpml_slurm_level"] == 1
        assert now["hpml_exporter_errors_total{collector=slurm}"] == errors
        assert now["hpml_exporter_up{collector=slurm}"] == (errors == 0)
    assert sampler.health() == (True, "failed: slurm")
    assert caplog.messages == ["collector slurm: old figures are shown: Slurm does not answer"]


def test_values_that_are_none_and_names_of_any_bytes() -> None:
    """A counter that is NaN or negative is absent; a label that is no UTF-8 can be sent."""
    spec = MetricSpec("hpml_x_total", "counter", "X.", ("a",), source="x")
    label = os.fsdecode(b"caf\xe9\0")
    probe = Probe("x", act=lambda _: [spec.family([((label,), 1), (("n",), float("nan"))])])
    with sampling(probe) as sampler:
        eventually(lambda: "hpml_x_total{a=caf?\ufffd}" in shown(sampler))
        assert "hpml_x_total{a=n}" not in shown(sampler)


def test_what_is_not_here_is_no_failure() -> None:
    """It is reported as absent, tried again later, and shown once it is there."""
    there = threading.Event()

    def appear(turn: int) -> None:
        if turn < 4 or not there.is_set():
            raise NotHereError

    probe = Probe("late", interval=30, act=appear)
    with sampling(probe) as sampler:
        eventually(lambda: up(sampler, "late") == 1)
        now = shown(sampler)
        assert now["hpml_exporter_collector_present{collector=late}"] == 0
        assert now["hpml_exporter_errors_total{collector=late}"] == 0
        assert "hpml_exporter_last_success_timestamp_seconds{collector=late}" not in now
        there.set()
        eventually(lambda: "hpml_late_level" in shown(sampler))
        assert shown(sampler)["hpml_exporter_collector_present{collector=late}"] == 1
    gaps = [two - one for one, two in zip(probe.times, probe.times[1:], strict=False)]
    assert min(gaps) >= 0.05


def test_why_there_is_nothing_to_read_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Once per reason, such as a library that is not installed; it is not a failure."""

    def miss(turn: int) -> None:
        raise NotHereError("no driver") if turn < 4 else ModuleNotFoundError("no nvitop")

    probe = Probe("gpu", act=miss)
    with sampling(probe) as sampler:
        eventually(lambda: len(probe.times) > 6)
        assert up(sampler, "gpu") == 1
    assert caplog.messages == [
        "collector gpu: nothing to read: no driver",
        "collector gpu: nothing to read: no nvitop",
    ]


def test_a_lost_driver_makes_the_collector_anew() -> None:
    """It is closed and made again, with pauses that grow; meanwhile it counts as down."""
    seen = threading.Event()

    def lose(turn: int) -> None:
        if turn == 5:
            seen.wait(HANGS_SECONDS)  # so that the test does not miss it
        if 2 <= turn <= 5:
            raise DriverLostError("gone")

    probe = Probe("gpu", interval=0.02, act=lose)
    with sampling(probe, pauses=Pauses(lost=0.05, lost_max=0.15)) as sampler:
        eventually(lambda: up(sampler, "gpu") == 0)
        seen.set()
        eventually(lambda: up(sampler, "gpu") == 1)
        assert shown(sampler)["hpml_exporter_errors_total{collector=gpu}"] == 4
    eventually(lambda: probe.closed == 5)
    assert probe.made == 5
    pauses = [probe.times[n + 1] - probe.times[n] for n in range(1, 5)]
    assert [
        pause >= least for pause, least in zip(pauses, (0.05, 0.1, 0.15, 0.15), strict=True)
    ] == [True] * 4


def test_a_stuck_reading_is_dropped_and_others_go_on() -> None:
    """Its series go and it counts as down; once the call returns it is shown as if nothing was."""
    hangs, release = threading.Event(), threading.Event()

    def hang(_: int) -> None:
        if hangs.is_set():
            release.wait(HANGS_SECONDS)

    bad, good = Probe("bad", act=hang), Probe("good")
    # not shorter: a thread that waits for its turn on a busy machine is not stuck
    with sampling(bad, good, stuck_seconds=2.0) as sampler:
        eventually(lambda: "hpml_bad_level" in shown(sampler))
        hangs.set()
        eventually(lambda: up(sampler, "bad") == 0)
        now = shown(sampler)
        assert "hpml_bad_level" not in now
        assert now["hpml_exporter_stuck_readings_total{collector=bad}"] == 1
        assert sampler.health() == (False, "stuck: bad")
        before = len(good.times)
        eventually(lambda: len(good.times) > before + 3)
        assert up(sampler, "good") == 1
        hung = len(bad.times)
        release.set()
        eventually(lambda: up(sampler, "bad") == 1)
        assert shown(sampler)["hpml_bad_level"] >= hung
        assert sampler.health() == (True, "ok")
        assert shown(sampler)["hpml_exporter_stuck_readings_total{collector=bad}"] == 1


def test_making_a_collector_is_watched_too() -> None:
    """A driver that hangs at the start counts as stuck, too; the end of it is logged once."""
    release = threading.Event()
    told: list[str] = []
    probe = Probe("gpu")

    def make() -> Probe:
        release.wait(HANGS_SECONDS)
        return probe

    sampler = Sampler(
        [CollectorSource("gpu", make)],
        stuck_seconds=0.1,
        exit_seconds=0.3,
        give_up=told.append,
    )
    sampler.start()
    eventually(lambda: told)
    time.sleep(0.1)
    assert len(told) == 1
    assert told[0].startswith("collector gpu: stuck for ")
    release.set()
    sampler.stop()


def test_old_readings_are_dropped(clock: Turned) -> None:
    """What a collector read counts for three intervals, or five seconds if that is longer."""
    sampler = Sampler([Probe("old", interval=0.01).source()])
    sampler._slots[0].read()
    first = sampler.snapshot()
    assert sampler.snapshot() is first
    for ahead, there in ((4.9, True), (5.1, False)):  # nothing is posted meanwhile
        clock.ahead = ahead
        assert ("hpml_old_level" in shown(sampler)) is there
    assert up(sampler, "old") == 0


@pytest.mark.usefixtures("clock")
def test_a_scrape_shows_the_last_readings_in_the_format_that_it_asks_for() -> None:
    """Text, compressed or not, and OpenMetrics; a version that a client makes up does no harm."""
    sampler = Sampler([Probe("one").source(), Probe("two").source()])
    pages = ExporterPages(sampler)
    for slot in sampler._slots:
        slot.read()
    first, kind = pages.metrics("", gzip=False)
    unpacked = gzip.decompress(pages.metrics("", gzip=True)[0])
    assert figures(unpacked).keys() == figures(first).keys()
    assert kind.startswith("text/plain; version=0.0.4")
    wanted = "application/openmetrics-text; version=1.0.0"
    opened, kind = pages.metrics(wanted, gzip=False)
    assert kind.startswith(wanted)
    assert opened.endswith(b"# EOF\n")
    sampler._slots[0].read()
    second = figures(pages.metrics("", gzip=False)[0])
    assert (figures(first)["hpml_one_level"], second["hpml_one_level"]) == (1, 2)
    assert second["hpml_two_level"] == 1
    assert pages.metrics(wanted, gzip=False)[0].count(b"# EOF\n") == 1
    for version in [*range(2, 9), "x"]:  # formats that a client makes up
        made_up = f"application/openmetrics-text;version={version}"
        assert b"\nhpml_one_level 2.0\n" in pages.metrics(made_up, gzip=False)[0]


def test_some_series_alone_and_any_registry() -> None:
    """`name[]` chooses; the sampler is a collector like any other."""
    spec = spec_of("one")
    sampler = Sampler([Probe("one").source(), Probe("two").source()], specs=[spec, *SPECS])
    for slot in sampler._slots:
        slot.read()
    assert figures(ExporterPages(sampler).metrics("", ["hpml_one_level"], gzip=False)[0]) == {
        "hpml_one_level": 1
    }
    registry = CollectorRegistry()
    registry.register(sampler)
    assert registry.get_sample_value("hpml_two_level") == 1
    assert figures(generate_latest(registry))["hpml_exporter_up{collector=two}"] == 1


def test_a_metric_of_two_collectors_is_one_family() -> None:
    """Prometheus refuses a family that is there twice; of equal series the first counts."""
    spec = MetricSpec("hpml_x", "gauge", "X.", ("a",), source="x")
    one = Probe("one", act=lambda _: [spec.family([(("a",), 1), (("b",), 1)])])
    two = Probe("two", act=lambda _: [spec.family([(("b",), 2), (("c",), 2)])])
    sampler = Sampler([one.source(), two.source()])
    for slot in sampler._slots * 2:
        slot.read()
    body = ExporterPages(sampler).metrics("", gzip=False)[0]
    assert body.count(b"# TYPE hpml_x ") == 1
    found = {key: value for key, value in figures(body).items() if key.startswith("hpml_x")}
    assert found == {"hpml_x{a=a}": 1, "hpml_x{a=b}": 1, "hpml_x{a=c}": 2}


def test_a_thread_that_no_exit_would_end_ends_nothing(tmp_path: Path) -> None:
    """Its collector is dropped for good; once the kernel lets it go it is shown again.

    The parent of a process that has not begun yet waits as a driver's caller may, in state D: here
    the child opens a FIFO first. By ctypes, since Python's own function holds its lock meanwhile.
    """
    fifo, told = tmp_path / "fifo", list[str]()
    os.mkfifo(fifo)
    libc, actions, pid = ctypes.CDLL(None), ctypes.create_string_buffer(256), ctypes.c_int()
    libc.posix_spawn_file_actions_init(actions)
    libc.posix_spawn_file_actions_addopen(actions, 3, os.fsencode(fifo), os.O_RDONLY, 0)
    words = (ctypes.c_char_p * 2)(b"true", None)

    def hang(turn: int) -> None:
        if turn == 2:
            libc.posix_spawn(ctypes.byref(pid), b"/bin/true", actions, None, words, None)
            os.waitpid(pid.value, 0)

    bad, good = Probe("bad", act=hang), Probe("good")
    with sampling(bad, good, stuck_seconds=1, exit_seconds=1.5, give_up=told.append) as sampler:
        eventually(lambda: up(sampler, "bad") == 0)
        before = len(good.times)
        eventually(lambda: len(good.times) > before + 40)  # for longer than exit_seconds
        assert "hpml_bad_level" not in shown(sampler)
        os.close(os.open(fifo, os.O_WRONLY))
        eventually(lambda: up(sampler, "bad") == 1)
    assert told == []


def test_the_last_reading_of_a_short_job() -> None:
    """With this option everything is read again at the end, and then closed."""
    probe = Probe("job", interval=60)
    with sampling(probe) as sampler:
        eventually(lambda: probe.times)
        sampler.stop(last_reading=True)
        eventually(lambda: shown(sampler)["hpml_job_level"] == 2)
        eventually(lambda: probe.closed == 1)
