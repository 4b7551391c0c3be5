"""Collectors at their own rhythms: what one of them does wrong stays its own."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hpml_exporters.core import sampler as sampler_module
from hpml_exporters.core import slot as slot_module
from hpml_exporters.core.collector import DriverLostError, NotHereError
from hpml_exporters.core.sampler import Sampler, next_due
from hpml_exporters.core.slot import Pauses, Slot, Source, checked
from hpml_exporters.core.snapshot import Snapshot
from hpml_exporters.metric import Family, MetricSpec, Sample

from tests.patience import eventually
from tests.unit.exporters.collecting import Probe, Turned, family, figures

QUICK = Pauses(absent=0.05, lost=0.02, lost_max=0.05)
HANGS_SECONDS = 300.0  # a call that does not return, unless the test lets it


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Turned:
    """A clock that stands unless the test puts it forward."""
    made = Turned(still=1000.0)
    for module in (sampler_module, slot_module):
        monkeypatch.setattr(module, "time", made)
    return made


class Pausing:
    """In the place of the sampler's event: each wait takes its time of the clock, and none else."""

    def __init__(self, clock: Turned, ended: Callable[[], bool]) -> None:
        self.clock, self.ended = clock, ended

    def wait(self, seconds: float) -> bool:
        """Let so many seconds go by."""
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
    return figures(sampler.metrics(openmetrics=False, gzip=False))


def up(sampler: Sampler, name: str) -> float | None:
    """Whether a collector is told to be well."""
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


def test_a_failing_collector_harms_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    """Its series go, its errors are counted and told once, and the other's series stay."""

    def fail(turn: int) -> None:
        if turn > 2:
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
        assert bad.closed == 0
    told = [line for line in capfd.readouterr().err.splitlines() if "no such luck" in line]
    assert told == ["hpml: collector bad: OSError: [Errno 5] no such luck"]
    eventually(lambda: (bad.closed, good.closed) == (1, 1))


def test_a_collector_that_recovers_is_shown_again() -> None:
    """After a failed reading the next good one counts."""

    def fail(turn: int) -> None:
        if turn == 2:
            raise ValueError("once")

    probe = Probe("bad", act=fail)
    with sampling(probe) as sampler:
        eventually(lambda: shown(sampler).get("hpml_exporter_errors_total{collector=bad}") == 1)
        eventually(lambda: up(sampler, "bad") == 1)
        assert shown(sampler)["hpml_bad_level"] >= 3
        assert probe.made == 1


def test_what_cannot_be_rendered_counts_as_failed() -> None:
    """A wrong family is caught before it gets near to a scrape."""
    spec = MetricSpec("hpml_x", "gauge", "X.", ("a",), source="x")
    for samples in ((Sample((), 1),), (Sample(("a", "b"), 1),), (Sample(("a",), "1"),)):  # type: ignore[arg-type]
        with pytest.raises((TypeError, ValueError)):
            checked([Family(spec, samples)])
    with pytest.raises(TypeError):
        checked([Family(spec, (Sample((1,), 1),))])  # type: ignore[arg-type]
    bad = Probe("bad", act=lambda _: [Family(spec, (Sample((), 1),))])
    good = Probe("good")
    with sampling(bad, good) as sampler:
        eventually(lambda: up(sampler, "bad") == 0)
        eventually(lambda: up(sampler, "good") == 1)


def test_what_is_not_here_is_no_failure() -> None:
    """It is told to be absent, asked again later, and shown once it is there."""
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


def test_why_there_is_nothing_to_read_is_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    """Once for each reason, however often it is found; whoever misses the GPUs finds it there."""

    def miss(turn: int) -> None:
        raise NotHereError("no driver" if turn < 4 else "no library")

    probe = Probe("gpu", act=miss)
    with sampling(probe):
        eventually(lambda: len(probe.times) > 6)
    assert capfd.readouterr().err.splitlines() == [
        "hpml: collector gpu: nothing to read: no driver",
        "hpml: collector gpu: nothing to read: no library",
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


def test_a_module_that_is_not_installed_is_not_here(capfd: pytest.CaptureFixture[str]) -> None:
    """Without nvitop there are no GPUs to show, which is told once and is no failure."""

    def make() -> Probe:
        raise ModuleNotFoundError("No module named 'nvitop'")

    slot = Slot(Source("gpu", make), pauses=QUICK, changed=lambda: None)
    assert [slot.read() for _ in range(3)] == [0.05] * 3
    assert slot.state.outcome == "absent"
    assert capfd.readouterr().err.count("nvitop") == 1


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
    """A driver that hangs at the start is stuck as one that hangs later; its end is told once."""
    release = threading.Event()
    told: list[str] = []
    probe = Probe("gpu")

    def make() -> Probe:
        release.wait(HANGS_SECONDS)
        return probe

    sampler = Sampler(
        [Source("gpu", make)],
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
    slot = Slot(Probe("x", interval=10).source(), changed=lambda: None)
    assert slot.stale_after == 5.0
    slot.read()
    assert slot.stale_after == 30.0
    sampler = Sampler([Probe("old", interval=0.01).source()])
    held = sampler._slots[0]
    held.read()
    first = sampler.snapshot()
    assert figures(first.body())["hpml_old_level"] == 1
    assert sampler.snapshot() is first
    for ahead, there in ((4.9, True), (5.1, False)):  # nothing is posted meanwhile
        clock.ahead = ahead
        assert ("hpml_old_level" in shown(sampler)) is there
    assert up(sampler, "old") == 0


@pytest.mark.usefixtures("clock")
def test_a_snapshot_changes_when_something_was_posted() -> None:
    """Scrapes in between get the same bytes, and a new reading makes a new one."""
    sampler = Sampler([Probe("one").source(), Probe("two").source()])
    for slot in sampler._slots:
        slot.read()
    first = sampler.snapshot()
    assert sampler.metrics(openmetrics=False, gzip=False) is sampler.metrics(
        openmetrics=False, gzip=False
    )
    sampler._slots[0].read()
    second = sampler.snapshot()
    assert second is not first
    assert figures(first.body())["hpml_one_level"] == 1
    assert figures(second.body())["hpml_one_level"] == 2
    assert figures(second.body())["hpml_two_level"] == 1


def test_a_scrape_does_not_wait_for_a_collector() -> None:
    """While all collectors hang, a scrape is answered with what there is."""
    release = threading.Event()

    def hang(_: int) -> None:
        release.wait(HANGS_SECONDS)

    probe = Probe("bad", act=hang)
    with sampling(probe) as sampler:
        eventually(lambda: probe.times)
        begun = time.monotonic()
        for _ in range(50):
            shown(sampler)
        assert time.monotonic() - begun < HANGS_SECONDS / 2
        release.set()


def test_the_last_reading_of_a_short_job() -> None:
    """Told so, everything is read once more at the end, and closed after it."""
    probe = Probe("job", interval=60)
    with sampling(probe) as sampler:
        eventually(lambda: probe.times)
        sampler.stop(last_reading=True)
        eventually(lambda: shown(sampler)["hpml_job_level"] == 2)
        eventually(lambda: probe.closed == 1)


def test_forms_of_a_snapshot_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many scrapes at once get the bytes of one rendering; gzip holds the same."""
    snapshot = Snapshot([family("x", 1)], time=0, monotonic=0)
    calls: list[int] = []
    render = snapshot._renderer.text

    def slow(families: object) -> bytes:
        calls.append(1)
        time.sleep(0.05)
        return render(families)  # type: ignore[arg-type]

    monkeypatch.setattr(snapshot._renderer, "text", slow)
    bodies: list[bytes] = []
    threads = [threading.Thread(target=lambda: bodies.append(snapshot.body())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len({id(body) for body in bodies}) == 1
    assert gzip.decompress(snapshot.body(gzip=True)) == bodies[0]
    assert snapshot.body(openmetrics=True).endswith(b"# EOF\n")
    assert gzip.decompress(snapshot.body(openmetrics=True, gzip=True)) == snapshot.body(
        openmetrics=True
    )
    assert len(calls) == 1
