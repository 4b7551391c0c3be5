"""Counters of processes that come and go are added up once each, whoever waits for whom."""

from __future__ import annotations

from hpml_exporters.jobs.inherit import Inherited


def look(job: Inherited, *processes: tuple[int, int, int, int], gone: tuple[int, ...] = ()) -> int:
    """One look at processes (pid, parent, start, count), parents first; returns the total."""
    for pid in gone:
        job.gone(pid)
    for pid, parent, start, count in processes:
        job.seen(pid, parent, start, (count,))
    return job.total[0]


def test_growth_is_added() -> None:
    """All at the first look, then what is new."""
    job = Inherited(1)
    assert look(job, (1, 0, 1, 100), (2, 1, 2, 50)) == 150
    assert look(job, (1, 0, 1, 130), (2, 1, 2, 50)) == 180


def test_an_ended_process_without_a_parent_here_keeps_its_count() -> None:
    """Slurm's daemon waited for it: what was seen last is all there is."""
    job = Inherited(1)
    look(job, (1, 0, 1, 100), (2, 0, 2, 50))
    assert look(job, (1, 0, 1, 100), gone=(2,)) == 150


def test_a_child_that_was_waited_for_is_not_counted_twice() -> None:
    """Its 50, and 7 it had after the last look, come back with the parent's; 5 are the parent's."""
    job = Inherited(1)
    look(job, (1, 0, 1, 100), (2, 1, 2, 50))
    assert look(job, (1, 0, 1, 100 + 57 + 5), gone=(2,)) == 150 + 7 + 5


def test_children_that_came_and_went_between_two_looks() -> None:
    """Nobody saw them; their parent has their counts."""
    job = Inherited(1)
    look(job, (1, 0, 1, 100))
    assert look(job, (1, 0, 1, 900)) == 900


def test_the_parent_is_read_a_moment_before_it_waits() -> None:
    """The child is gone already, its counts come with the next look."""
    job = Inherited(1)
    look(job, (1, 0, 1, 100), (2, 1, 2, 50))
    assert look(job, (1, 0, 1, 100), gone=(2,)) == 150
    assert look(job, (1, 0, 1, 150)) == 150
    assert look(job, (1, 0, 1, 160)) == 160


def test_a_child_nobody_waits_for() -> None:
    """Its parent never gets its counts, and may grow by itself."""
    job = Inherited(1)
    look(job, (1, 0, 1, 100), (2, 1, 2, 50))
    look(job, (1, 0, 1, 100), gone=(2,))
    look(job, (1, 0, 1, 100))
    assert look(job, (1, 0, 1, 140)) == 190


def test_grandchildren() -> None:
    """A shell waits for a program, and Slurm's task for the shell."""
    job = Inherited(1)
    look(job, (1, 0, 1, 10), (2, 1, 2, 20), (3, 2, 3, 40))
    job.gone(2, 3)
    assert look(job, (1, 0, 1, 10 + 20 + 40)) == 70
    job = Inherited(1)
    look(job, (1, 0, 1, 10), (2, 1, 2, 20), (3, 2, 3, 40))
    look(job, (1, 0, 1, 10), (2, 1, 2, 20), gone=(3,))
    assert look(job, (1, 0, 1, 10 + 60), gone=(2,)) == 70


def test_an_id_that_is_used_again() -> None:
    """Another start time is another process."""
    job = Inherited(1)
    look(job, (2, 0, 5, 50))
    assert look(job, (2, 0, 9, 3)) == 53
    assert look(job, (2, 0, 9, 4)) == 54


def test_it_never_goes_back() -> None:
    """Whatever the kernel may say."""
    job = Inherited(1)
    look(job, (1, 0, 1, 100))
    assert look(job, (1, 0, 1, 60)) == 100
