"""Quantities are read in Slurm's forms, and refused in every other one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpml_orchestrator.records.units import (
    format_time,
    parse_bytes,
    parse_count,
    parse_gpu_option,
    parse_gpus,
    parse_mebibytes,
    parse_time,
    parse_time_limit,
    read_bytes,
    read_count,
    read_gres,
    read_seconds,
    size_text,
)

GIB = 1024**3


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (30, 1800),
        ("30", 1800),
        ("30:00", 1800),
        ("10:00", 600),
        ("1-0", 86_400),
        ("1-12", 129_600),
        (" 90 ", 5400),
        ("2h", 7200),
        ("90s", 90),
        ("1d", 86_400),
        ("1h30m", 5400),
        ("1d12h", 129_600),
        ("1.5h", 5400),
        ("1w", 604_800),
    ],
)
def test_time_limits_mean_what_slurm_means(written: str | int, seconds: int) -> None:
    """A bare number is minutes, two parts are minutes and seconds; a letter is a unit."""
    assert parse_time(written) == seconds


@pytest.mark.parametrize(
    "written",
    [
        "",
        "x",
        "-5",
        0,
        "0:00",
        "1:2:3:4",
        "1-2:3:4:5",
        "1.5",
        "1H",
        "h",
        "0s",
        "1h2h",
        "1h30",
        "1 h",
        "2y",
        True,
        "1 0",
        "9" * 40,
        "٣٠",
    ],
)
def test_no_time_limit(written: str | int) -> None:
    """What is in none of Slurm's forms, zero, or over ten years is refused."""
    with pytest.raises(ValueError, match="must be"):
        parse_time(written)


def test_sbatch_has_no_units() -> None:
    """`--time=2h` is refused by sbatch, so it is not read as a limit either."""
    with pytest.raises(ValueError, match="of sbatch: minutes, MM:SS"):
        parse_time_limit("2h")


@given(st.integers(1, 3650 * 86_400))
def test_times_survive_being_written(seconds: int) -> None:
    """Every time limit reads back as the same one after it was written as Slurm writes it."""
    assert parse_time(format_time(seconds)) == seconds


@pytest.mark.parametrize(
    ("written", "size"),
    [
        (512, 512 * 1024**2),
        ("512", 512 * 1024**2),
        ("512M", 512 * 1024**2),
        ("64G", 64 * GIB),
        ("64GiB", 64 * GIB),
        ("1T", 1024 * GIB),
        ("8K", 8192),
    ],
)
def test_sizes_mean_what_slurm_means(written: str | int, size: int) -> None:
    """A bare number is MiB; K, M, G, T are powers of 1024, however they are spelled."""
    assert parse_bytes(written) == size


@pytest.mark.parametrize(
    "written",
    ["", "0", "-1G", "1.5G", "8B", "8iB", "1P", "1025T", "G", "64 G B", True, "8\u212a", "٨G"],
)
def test_no_size(written: str | int) -> None:
    """Bytes, fractions, nothing, too much, and letters that only look like K are refused."""
    with pytest.raises(ValueError, match="must be"):
        parse_bytes(written)


@pytest.mark.parametrize(
    ("written", "text", "count"),
    [
        (0, "", 0),
        ("a100", "a100:1", 1),
        ("a100:4", "a100:4", 4),
        ("2080ti:4", "2080ti:4", 4),
        ([2], "2", 2),
        ([], "", 0),
    ],
)
def test_gpus_of_a_node(written: Any, text: str, count: int) -> None:
    """A number, a type with or without a number, a MIG profile, or a list of such."""
    gpus = parse_gpus(written)
    assert (str(gpus), gpus.count) == (text, count)


@pytest.mark.parametrize(
    "written",
    [
        *("", ",", "a100:", "a100:x", ":4", "-1", "4.0", "a b", "a100:1,a100:2", "a100:1,v100:0"),
        *("aé:4", "a\u0664:\u0664", "x" * 65, "10000", "a;b", "$(x)", "a100\n", "2080ti", "4:4"),
        *([True], [["a"]], [{}]),
    ],
)
def test_no_gpus(written: Any) -> None:
    """Anything else is refused: blanks, repeats, letters that a script could not hold."""
    with pytest.raises(ValueError, match="must be|names one|asks for"):
        parse_gpus(written)


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (read_seconds, "1-02:03:04", 93_784),
        (read_seconds, "02:03.5", 123.5),
        (read_seconds, "30", 1800),
        *((read_seconds, text, None) for text in ("UNLIMITED", "", "4294967295", "n/a")),
        (read_bytes, "62.50G", int(62.5 * GIB)),
        (read_bytes, "1000Mc", 1000 * 1024**2),
        *((read_bytes, text, None) for text in ("", "n/a", "18446744073709551615", "4294967294")),
        *((read_count, text, None) for text in ("N/A", "-1", "18446744073709551614")),
        (read_gres, "gpu:1g.10gb:7(IDX:0,2-6)", [("gpu", "1g.10gb", 7)]),
        (read_gres, "gpu:a100:2,gpu:a100:1", [("gpu", "a100", 3)]),
        (read_gres, "gres/gpu=2,lustre", [("gpu", "", 2), ("lustre", "", 1)]),
        (read_gres, "gpu:(null):3(IDX:0-2)", [("gpu", "", 3)]),
        (read_gres, "gpu:(null):0(IDX:N/A)", [("gpu", "", 0)]),
        (
            read_gres,
            "gpu:(null):2(S:0),shard:(null):0(0/8,0/8)",
            [("gpu", "", 2), ("shard", "", 0)],
        ),
        (read_gres, "gpu:tesla:3(IDX:0,2-3),gpu:1(IDX:1)", [("gpu", "tesla", 3), ("gpu", "", 1)]),
        (read_gres, "gres/gpu:a100=2", [("gpu", "a100", 2)]),
        (parse_time_limit, "infinite", None),
        (parse_time_limit, "0", None),
        (parse_time_limit, "1:30", 90),
        (parse_mebibytes, "0", 0),
        (parse_mebibytes, "1K", 1),
        (parse_mebibytes, "2GB", 2048),
        (parse_count, " 12 ", 12),
        (size_text, 0, "0M"),
    ],
)
def test_values_of_slurm_and_of_sbatch(read: Any, text: Any, value: Any) -> None:
    """What Slurm prints is a value or None; options of sbatch also mean "no limit" and "all"."""
    assert read(text) == value


@pytest.mark.parametrize(
    ("option", "gpus"),
    [
        ("gpu:a100:2", "a100:2"),
        ("gres:gpu", "1"),
        ("gpu=2,lustre:1", "2"),
        ("0", "0"),
    ],
)
def test_gpus_of_an_sbatch_option(option: str, gpus: str) -> None:
    """`--gpus`, `--gpus-per-node`, and the gpu part of `--gres`."""
    assert str(parse_gpu_option(option)) == gpus


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_time_limit, "soon"),
        (parse_mebibytes, "2X"),
        *((parse_count, text) for text in ("0", "-1", "x", "10000000")),
        *((parse_gpu_option, text) for text in ("a100:", "a100:x", "")),
    ],
)
def test_options_that_are_refused(parse: Any, text: str) -> None:
    """The error describes the right form."""
    with pytest.raises(ValueError, match="must be"):
        parse(text)
