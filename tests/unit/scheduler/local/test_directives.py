"""The `#SBATCH` header is read as sbatch reads it."""

from __future__ import annotations

import dataclasses
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpml_orchestrator.errors import SchedulerError
from hpml_orchestrator.scheduler.local.directives import (
    Directives,
    StopSignal,
    parse_memory_mb,
    parse_time_limit,
    read_directives,
)
from hpml_orchestrator.scheduler.local.resources import Machine, Needs, needs_of

MACHINE = Machine(cpus=(0, 1, 2, 3), gpus=("0", "1"), memory_mb=4096)


def header(*lines: str) -> Directives:
    return read_directives("\n".join(["#!/bin/bash", *lines, "true"]) + "\n")


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("#SBATCH --ntasks=3", "ntasks", 3),
        ("#SBATCH --ntasks 3", "ntasks", 3),
        ("#SBATCH -n3", "ntasks", 3),
        ("#SBATCH -n 3 # why", "ntasks", 3),
        ("#SBATCH --ntasks=3#why", "ntasks", 3),
        ("#SBATCH\t-c\t8", "cpus_per_task", 8),
        ("#SBATCH -N 1-4", "nodes", 1),
        ("#SBATCH -HQn 2", "ntasks", 2),
        ("#SBATCH --job-name='a b'", "job_name", "a b"),
        ('#SBATCH --job-name="it\'s # here"', "job_name", "it's # here"),
        (r"#SBATCH -J a\#b", "job_name", "a#b"),
        ("#SBATCH --gres=gpu:a100:2(S:0)", "gpus", 2),
        ("#SBATCH --gres=shard:1,gpu", "gpus", 1),
        ("#SBATCH --gpus-per-node=h100:4", "gpus", 4),
        ("#SBATCH -G 2", "gpus", 2),
        ("#SBATCH --mem=2G", "memory_mb", 2048),
        ("#SBATCH --exclusive=user", "exclusive", True),
        ("#SBATCH -t 1-00:00:01", "time_limit_seconds", 86401),
        ("#SBATCH --signal=B:USR1@30", "stop_signal", StopSignal(signal.SIGUSR1, 30, True)),
        ("#SBATCH --signal=SIGTERM", "stop_signal", StopSignal(signal.SIGTERM, 60, False)),
    ],
)
def test_reads_each_spelling(line: str, field: str, value: object) -> None:
    """Long, short, separate and joined values, quotes and trailing comments mean what they say."""
    assert getattr(header(line), field) == value


def test_stops_at_the_first_command() -> None:
    """What stands below a command is no directive, below blank lines and comments it is."""
    found = header("", "# text", "  # more", "#SBATCH -n 2", "set -e", "#SBATCH -n 9")
    assert found.ntasks == 2


@pytest.mark.parametrize("line", ["##SBATCH -n 9", " #SBATCH -n 9", "# SBATCH -n 9"])
def test_passes_over_what_only_looks_like_a_directive(line: str) -> None:
    """The word stands at the very start of the line."""
    assert header(line).ntasks is None


def test_lists_what_means_nothing_here() -> None:
    """Options of the cluster are kept as written for the record and change nothing else."""
    found = header("#SBATCH -p gpu --account=me --qos high --requeue", "#SBATCH --gres=lustre:1")
    assert found.ignored == ("-p gpu", "--account=me", "--qos high", "--requeue", "--gres=lustre:1")
    assert dataclasses.replace(found, ignored=()) == header()


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("#SBATCH --ntasks=two", "--ntasks=two"),
        ("#SBATCH -n", "-n"),
        ("#SBATCH --time=soon", "--time=soon"),
        ("#SBATCH -t '1:0", "unmatched '"),
        ("#SBATCH: -n 2", "unexpected ':'"),
        ("#SBATCH --array=0-", "--array=0-"),
        ("#SBATCH -a 0-3%0", "-a 0-3%0"),
        ("#SBATCH --dependency=afterok:1", "--dependency=afterok:1"),
        ("#SBATCH --signal=NOPE@3", "NOPE"),
        ("#SBATCH --mem=lots", "lots"),
        ("#SBATCH --nodes=4-2", "4-2"),
    ],
)
def test_refuses_what_it_cannot_honour(line: str, part: str) -> None:
    """The message holds the words that are wrong and the hint says what to do."""
    with pytest.raises(SchedulerError) as caught:
        header(line)
    assert part in str(caught.value)
    assert caught.value.hint


def test_refuses_a_script_without_interpreter_line() -> None:
    """Sbatch does, too."""
    with pytest.raises(SchedulerError, match="batch script"):
        read_directives("echo hello\n")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("2:03", 123),
        ("1:02:03", 3723),
        ("1-2", 93600),
        ("1-2:3", 93780),
        ("1-2:3:4", 93784),
        ("UNLIMITED", None),
        ("infinite", None),
        ("0", None),
        ("-1", None),
    ],
)
def test_reads_each_form_of_time(text: str, seconds: int | None) -> None:
    """All of Slurm's forms; zero is no limit."""
    assert parse_time_limit(text) == seconds


@given(st.integers(0, 400), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_time_forms_agree(days: int, hours: int, minutes: int, seconds: int) -> None:
    """The same moment written in every form that can hold it is the same limit."""
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    expected = total or None
    assert parse_time_limit(f"{days}-{hours}:{minutes}:{seconds}") == expected
    assert parse_time_limit(f"{days * 24 + hours:02}:{minutes:02}:{seconds:02}") == expected
    assert parse_time_limit(f"{total // 60}:{seconds}") == expected
    assert parse_time_limit(f"{days}-{hours:02}:{minutes:02}") == (total - seconds or None)


@given(st.text(max_size=12))
def test_time_is_read_or_refused(text: str) -> None:
    """No text makes it fail in another way."""
    try:
        found = parse_time_limit(text)
    except ValueError:
        return
    assert found is None or found > 0


@given(st.integers(0, 10**9), st.sampled_from(["", "K", "M", "G", "T", "k", "g"]))
def test_memory_never_shrinks(number: int, unit: str) -> None:
    """Sizes are rounded up to whole MiB."""
    factor = {"": 2**20, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}[unit.upper()]
    found = parse_memory_mb(f"{number}{unit}")
    assert (found - 1) * 2**20 < number * factor <= found * 2**20 or number == found == 0


PLAIN = st.text(st.characters(exclude_characters="\n\r\0", exclude_categories=["Cs"]), min_size=1)


@given(PLAIN, st.integers(1, 99))
def test_a_quoted_name_comes_back(name: str, ntasks: int) -> None:
    """Whatever the name holds, quoting it as the manual says gives it back, and the rest too."""
    quoted = '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'
    found = header(f"#SBATCH --job-name={quoted} --ntasks={ntasks}")
    assert (found.job_name, found.ntasks) == (name, ntasks)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), max_size=5))
def test_any_header_is_read_or_refused(lines: list[str]) -> None:
    """No header makes it fail in another way than sbatch's own refusal."""
    try:
        header(*(f"#SBATCH {line}" for line in lines))
    except SchedulerError as error:
        assert error.hint  # noqa: PT017 - it need not be raised


@pytest.mark.parametrize(
    ("line", "cpus", "gpus"),
    [
        ("#SBATCH --export=NONE", 1, 0),
        ("#SBATCH -n 2 -c 2", 4, 0),
        ("#SBATCH --ntasks-per-node=2 --gpus-per-task=1", 2, 2),
        ("#SBATCH --gpus=2 --cpus-per-gpu=2", 4, 2),
        ("#SBATCH --exclusive -n1", 4, 0),
    ],
)
def test_counts_slots(line: str, cpus: int, gpus: int) -> None:
    """CPUs are tasks times CPUs per task, GPUs what any of the options asks for."""
    assert needs_of(header(line), MACHINE) == Needs(cpus=cpus, gpus=gpus)


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("#SBATCH --nodes=2", ("--nodes=2", "2 nodes", "one node")),
        ("#SBATCH -n 4 --ntasks-per-node=2", ("-n 4", "--ntasks-per-node=2", "2 nodes")),
        ("#SBATCH --gpus=3", ("--gpus=3", "3 GPUs", "2 GPUs")),
        ("#SBATCH --gres=gpu:4", ("--gres=gpu:4", "4 GPUs")),
        ("#SBATCH -n 3 -c 2", ("-n 3 -c 2", "6 CPUs", "4 CPUs")),
        ("#SBATCH --mem=1T", ("--mem=1T", "1048576 MiB", "4096 MiB")),
        ("#SBATCH -n 4 --mem-per-cpu=2G", ("--mem-per-cpu=2G", "8192 MiB")),
    ],
)
def test_refuses_more_than_the_machine_has(line: str, parts: tuple[str, ...]) -> None:
    """The message names the directive, what it asks for, and what there is."""
    with pytest.raises(SchedulerError) as caught:
        needs_of(header(line), MACHINE)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert "Slurm cluster" in caught.value.hint
