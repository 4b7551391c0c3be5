"""Recovery of a submission: every branch, and every way to be killed."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpml_orchestrator.errors import SchedulerError, SchedulerUnavailable
from hpml_orchestrator.scheduler.model import Scheduler, SubmitRequest
from hpml_orchestrator.scheduler.slurm.messages import Absent, Found, Outcome, Undecided, recover
from hpml_orchestrator.testing.clock import FakeClock
from hpml_orchestrator.testing.scheduler import FakeScheduler, Fault, Killed

START = 1_800_000_000.0


def request_in(directory: Path) -> SubmitRequest:
    return SubmitRequest(directory, directory / "log", "train", "hpml:1", {})


def decide(
    scheduler: Scheduler,
    directory: Path,
    *,
    started: float | None = START,
    now: float = START + 10,
    wrote: tuple[str, ...] = (),
    grace_seconds: float = 120,
) -> Outcome:
    return recover(
        scheduler,
        directory,
        name="train",
        prepared_at=START,
        sbatch_started_at=started,
        attempt_job_ids=wrote,
        now=now,
        grace_seconds=grace_seconds,
    )


def submitted(fake: FakeScheduler, directory: Path, fault: Fault) -> None:
    fake.faults.append(fault)
    with pytest.raises((Killed, SchedulerError)):
        fake.submit(request_in(directory))


@pytest.mark.parametrize(
    ("answer", "wrote", "found"),
    [
        ("12;Fake\n", ("13",), Found("12", "sbatch.out")),
        ("", ("", " 31\n", "32"), Found("31", "job")),
    ],
)
def test_an_id_on_disk(tmp_path: Path, answer: str, wrote: tuple[str, ...], found: Found) -> None:
    """1, 2. sbatch's answer, else an id that the job wrote: even if the scheduler is down."""
    (tmp_path / "sbatch.out").write_text(answer)
    down = FakeScheduler(faults=[Fault.UNAVAILABLE])
    assert decide(down, tmp_path, wrote=wrote) == found


def test_an_answer_of_another_cluster(tmp_path: Path) -> None:
    """The job of that id here is another one: the submission counts as refused."""
    (tmp_path / "sbatch.out").write_text("12;box\n")
    outcome = decide(FakeScheduler(), tmp_path)
    assert isinstance(outcome, Absent)
    assert "cluster box, as job 12; this is fake" in outcome.refused
    assert "scancel --clusters=box 12" in outcome.hint


@pytest.mark.parametrize("torn", ["", "1", "12", "sbatch: 12\n", "\x00\x00"])
def test_torn_answer(tmp_path: Path, torn: str) -> None:
    """A torn answer is none: the queue knows better."""
    fake = FakeScheduler()
    fake.submit(request_in(tmp_path))
    (tmp_path / "sbatch.out").write_text(torn)
    assert decide(fake, tmp_path) == Found("1", "queue")


def test_sbatch_still_works(tmp_path: Path) -> None:
    """3. As long as an sbatch is seen nothing is decided, however long it takes."""
    fake = FakeScheduler()
    fake.delay_seconds = 1e6
    submitted(fake, tmp_path, Fault.KILLED_DURING)
    outcome = decide(fake, tmp_path, now=START + 10_000)
    assert isinstance(outcome, Undecided)
    assert 0 < outcome.retry_after < 60


def test_scheduler_down(tmp_path: Path) -> None:
    """4. No answer of the scheduler is not the same as no job."""
    down = FakeScheduler(faults=[Fault.UNAVAILABLE] * 2)
    for started in (None, START):
        outcome = decide(down, tmp_path, started=started, now=START + 10_000)
        assert isinstance(outcome, Undecided)
        assert "does not answer" in outcome.reason


def test_oldest_job_in_the_queue(tmp_path: Path) -> None:
    """4. Of several jobs the oldest is the one: the others find its marker and end."""
    fake = FakeScheduler()
    fake.submit(request_in(tmp_path))
    fake.submit(request_in(tmp_path))
    (tmp_path / "sbatch.out").unlink()
    assert decide(fake, tmp_path) == Found("1", "queue")


def test_never_started(tmp_path: Path) -> None:
    """5. Without the marker sbatch was never started."""
    assert decide(FakeScheduler(), tmp_path, started=None) == Absent("sbatch was never started")


def test_refused(tmp_path: Path) -> None:
    """6. A certain refusal on disk needs no wait, and is passed on."""
    fake = FakeScheduler()
    submitted(fake, tmp_path, Fault.REFUSED)
    outcome = decide(fake, tmp_path)
    assert isinstance(outcome, Absent)
    assert "Invalid account" in outcome.refused
    assert "account" in outcome.hint


def test_refused_without_configuration(tmp_path: Path) -> None:
    """6. Where Slurm has no configuration the queue cannot be read, and sbatch sent nothing."""
    text = "sbatch: fatal: Could not establish a configuration source\n"
    (tmp_path / "sbatch.err").write_text(text)
    outcome = decide(FakeScheduler(faults=[Fault.UNAVAILABLE]), tmp_path)
    assert isinstance(outcome, Absent)
    assert "not configured" in outcome.refused
    assert "--local" in outcome.hint
    (tmp_path / "sbatch.err").write_text(text.rstrip("\n"))
    assert isinstance(decide(FakeScheduler(faults=[Fault.UNAVAILABLE]), tmp_path), Undecided)


@pytest.mark.parametrize(
    "text",
    [
        "sbatch: error: Batch job submission failed: Invalid acc",
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n",
        "sbatch: error: remark\n",
        "",
    ],
)
def test_uncertain_words(tmp_path: Path, text: str) -> None:
    """7. Anything but a certain refusal has to wait for the grace period."""
    (tmp_path / "sbatch.err").write_text(text)
    outcome = decide(FakeScheduler(), tmp_path, now=START + 50)
    assert isinstance(outcome, Undecided)
    assert outcome.retry_after == 70
    assert isinstance(decide(FakeScheduler(), tmp_path, now=START + 120), Absent)


def test_short_grace_is_not_for_lost_answers(tmp_path: Path) -> None:
    """7. After "Socket timed out" the whole grace period counts, whatever the caller passes."""
    assert isinstance(decide(FakeScheduler(), tmp_path, grace_seconds=10), Absent)
    text = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n"
    (tmp_path / "sbatch.err").write_text(text)
    outcome = decide(FakeScheduler(), tmp_path, grace_seconds=10)
    assert isinstance(outcome, Undecided)
    assert outcome.retry_after == 110


def test_answer_while_deciding(tmp_path: Path) -> None:
    """8. An answer that arrives while the scheduler is asked is not overlooked."""

    class Late(FakeScheduler):
        def find(self, directory: Path, *, name: str, since: float) -> list[str]:
            (directory / "sbatch.out").write_text("5\n")
            return super().find(directory, name=name, since=since)

    assert decide(Late(), tmp_path, now=START + 500) == Found("5", "sbatch.out")


class Caller:
    """A model of what `hpml submit` does, up to being killed at any step and started again."""

    def __init__(self, fake: FakeScheduler, directory: Path) -> None:
        self.fake = fake
        self.directory = directory
        self.started: float | None = None
        self.recorded: str | None = None
        self.refused = False

    def submit(self, killed_before_marker: bool, killed_before_record: bool) -> None:
        if killed_before_marker:
            raise Killed
        self.started = self.fake.clock.time()
        job_id = self.fake.submit(request_in(self.directory))
        if killed_before_record:
            raise Killed
        self.recorded = job_id

    def resume(self, wrote: tuple[str, ...]) -> Outcome:
        return recover(
            self.fake,
            self.directory,
            name="train",
            prepared_at=START,
            sbatch_started_at=self.started,
            attempt_job_ids=wrote,
            now=self.fake.clock.time(),
        )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    faults=st.lists(st.sampled_from(Fault), max_size=8),
    kills=st.lists(st.tuples(st.booleans(), st.booleans()), max_size=6),
    pauses=st.lists(st.floats(0, 200), max_size=10),
    delay=st.floats(0, 300),
    unseen_delay=st.floats(0, 119),
    job_speaks=st.booleans(),
)
def test_never_two_jobs_and_never_a_lost_one(
    faults: list[Fault],
    kills: list[tuple[bool, bool]],
    pauses: list[float],
    delay: float,
    unseen_delay: float,
    job_speaks: bool,
) -> None:
    """However hpml, sbatch and answers die, exactly one job comes to be, and is on record."""
    fake = FakeScheduler(FakeClock(START), faults)
    fake.delay_seconds, fake.unseen_delay_seconds = delay, unseen_delay
    kills, pauses = list(kills), list(pauses)
    with tempfile.TemporaryDirectory() as name:
        caller = Caller(fake, Path(name))
        outcome: Outcome = Absent("new")
        for _ in range(400):
            try:
                if isinstance(outcome, Absent):
                    outcome = Undecided("submitted", 0)
                    caller.submit(*(kills.pop(0) if kills else (False, False)))
                    break
                wrote = tuple(fake.jobs) if job_speaks else ()
                outcome = caller.resume(wrote)
            except (Killed, SchedulerUnavailable):
                pass
            except SchedulerError:
                outcome = Absent("refused")
            if isinstance(outcome, Found):
                caller.recorded = outcome.job_id
                break
            if isinstance(outcome, Undecided):
                wait = pauses.pop(0) if pauses else outcome.retry_after
                fake.clock.sleep(wait)
        fake.clock.sleep(1000)
        fake.submitting(Path(name))  # everything under way arrives
        assert list(fake.jobs) == ["1"]
        assert caller.recorded == "1"
