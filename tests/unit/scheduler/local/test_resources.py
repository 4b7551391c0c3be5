"""The `#SBATCH` header is read as sbatch reads it, and compared with this machine."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpml_orchestrator.errors import SchedulerError
from hpml_orchestrator.scheduler.local.resources import (
    Directives,
    LocalMachine,
    Needs,
    StopSignal,
    needs_of,
    read_directives,
)

MACHINE = LocalMachine(cpus=(0, 1, 2, 3), gpus=("0", "1"), memory_mb=4096)


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
        ("#SBATCH --time=90", "time_limit_seconds", 5400),
        ("#SBATCH --time=UNLIMITED", "time_limit_seconds", None),
        ("#SBATCH --time=0", "time_limit_seconds", None),
        ("#SBATCH --mem=0", "memory_mb", 0),
        ("#SBATCH --mem-per-cpu=1K", "memory_per_cpu_mb", 1),
        ("#SBATCH --signal=B:USR1@30", "stop_signal", StopSignal(signal.SIGUSR1, 30, True)),
        ("#SBATCH --signal=SIGTERM", "stop_signal", StopSignal(signal.SIGTERM, 60, False)),
    ],
)
def test_reads_each_spelling(line: str, field: str, value: object) -> None:
    """Long, short, separate and joined values, quotes and trailing comments mean what they say."""
    assert getattr(header(line), field) == value


def test_stops_at_the_first_command() -> None:
    """Lines below a command, and lines that only resemble one, are not directives."""
    comments = ("", "# text", "##SBATCH -n 9", " #SBATCH -n 9", "# SBATCH -n 9")
    found = header(*comments, "#SBATCH -n 2", "set -e", "#SBATCH -n 9")
    assert found.ntasks == 2


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
    """The message has the wrong words and the hint a solution."""
    with pytest.raises(SchedulerError) as caught:
        header(line)
    assert part in str(caught.value)
    assert caught.value.hint


def test_refuses_a_script_without_interpreter_line() -> None:
    """Sbatch does, too."""
    with pytest.raises(SchedulerError, match="batch script"):
        read_directives("echo hello\n")


PLAIN = st.text(st.characters(exclude_characters="\n\r\0", exclude_categories=["Cs"]), min_size=1)


@given(PLAIN, st.integers(1, 99))
def test_a_quoted_name_comes_back(name: str, ntasks: int) -> None:
    """Any name that is quoted as in the manual is read back, and so are the other fields."""
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
    """The message names the directive, the request and the available number."""
    with pytest.raises(SchedulerError) as caught:
        needs_of(header(line), MACHINE)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert "Slurm cluster" in caught.value.hint
