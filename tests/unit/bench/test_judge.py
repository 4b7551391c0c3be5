"""Verdicts on synthetic measurements, and the results that are kept: who is named, and who not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.bench.results import (
    BenchGpu,
    Measurement,
    Missing,
    Rate,
    directories_of,
    fits,
    judge,
    keep,
    node_type,
    parse,
    peaks_for,
    read_all,
)
from hpml_orchestrator.bench.wording import findings, rows, to_json
from hpml_orchestrator.diagnosis.devices import DEVICES, specification
from hpml_orchestrator.errors import RecordError
from hpml_orchestrator.site.model import Site

H100 = "NVIDIA H100 80GB HBM3"
UNIT = "B/s"


def node(
    name: str,
    run: str = "now",
    *,
    spread: float = 0.005,
    missing: Mapping[str, Missing] | None = None,
    gpus: tuple[BenchGpu, ...] = (),
    at: float = 1000.0,
    torch: str = "2.5",
    kind: str = "cpu",
    cpus: int = 8,
    **figures: float,
) -> Measurement:
    """Return a measurement; `disk_read=2.0` is the figure disk.read."""
    return Measurement(
        name,
        kind,
        run,
        at,
        cpus=cpus,
        torch=torch,
        gpus=gpus,
        figures={
            name.replace("__" if "__" in name else "_", "."): Rate(value, UNIT, spread)
            for name, value in figures.items()
        },
        missing=missing or {},
    )


FOUR = [node(f"n{index}", disk_read=100 + index) for index in range(4)]

OTHERS = {"cpu.memory": Rate(5, UNIT), "cpu.matmul.float32": Rate(5, UNIT)}


def earlier(name: str, *, runs: int = 3, **figures: Any) -> list[Measurement]:
    """Return equal measurements of earlier runs."""
    return [node(name, f"r{day}", at=day, **figures) for day in range(runs)]


@pytest.mark.parametrize(
    ("measured", "stored", "named"),
    [
        pytest.param(FOUR, [], [], id="healthy siblings"),
        pytest.param([*FOUR, node("bad", disk_read=90)], [], [("bad", "siblings")], id="slow"),
        pytest.param([*FOUR, node("bad", disk_read=97)], [], [], id="4 % below"),
        pytest.param([*FOUR, node("bad", disk_read=200)], [], [], id="faster"),
        pytest.param([*FOUR, node("bad", disk_read=90, spread=0.04)], [], [], id="uncertain"),
        pytest.param(
            [node("a", disk_read=90)],
            [node("a", f"r{day}", disk_read=100, at=day) for day in range(5)],
            [("a", "history")],
            id="slower than it was",
        ),
        pytest.param(
            [node("a", disk_read=90)],
            [node("a", f"r{day}", disk_read=80 + 10 * day, at=day) for day in range(5)],
            [],
            id="its history scatters more than that",
        ),
        pytest.param(
            [node("a", disk_read=90)], earlier("a", runs=2, disk_read=145), [], id="no median yet"
        ),
        pytest.param(
            [node("a", disk_read=90)], earlier("a", disk_read=145, spread=0.2), [], id="lucky runs"
        ),
        pytest.param(
            [node("a", disk_read=90)],
            [
                replace(one, load=0.9, figures={**one.figures, **OTHERS})
                for one in earlier("a", disk_read=145)
            ],
            [],
            id="runs of which most could not be judged",
        ),
        pytest.param(
            [node("a", disk_read=90)],
            [node("b", "r1", disk_read=145, spread=0.2)],
            [],
            id="a sibling that scattered",
        ),
        pytest.param([node("a", disk_read=90)], [node("a", disk_read=200)], [], id="same run"),
        pytest.param(
            [node("a", disk_read=90)], [node("b", "r1", disk_read=100, kind="other")], [], id="type"
        ),
        pytest.param(
            [node("a", disk_read=90)], [node("b", "r1", disk_read=100, cpus=4)], [], id="cpus"
        ),
        pytest.param(
            [node("a", cpu__matmul__float32=90)],
            earlier("a", cpu__matmul__float32=100, torch="2.4"),
            [],
            id="another PyTorch",
        ),
        pytest.param(
            [node("a", disk_read=90)],
            earlier("a", disk_read=100, torch="2.4"),
            [("a", "history")],
            id="a disk does not use PyTorch",
        ),
        pytest.param(
            [node("a", nodes_allreduce=90), node("b", nodes_allreduce=110)], [], [], id="shared"
        ),
        pytest.param(
            [node("a", host__memory__domain0=90, host__memory__domain1=100)],
            [],
            [("a", "siblings")],
            id="a slow domain",
        ),
        pytest.param(
            [replace(node("a", cpu__matmul__float32=80, disk_read=80), load=0.3)],
            earlier("a", cpu__matmul__float32=100, disk_read=100),
            [("a", "history")],
            id="CPUs that others use are not judged, the disk is",
        ),
        pytest.param(
            [
                node(
                    "a",
                    gpus=(BenchGpu(H100, "1"), BenchGpu(H100, "2"), BenchGpu(H100, "3")),
                    gpu0__memory=2.9e12,
                    gpu1__memory=2.9e12,
                    gpu2__memory=2.6e12,
                )
            ],
            [],
            [("a", "siblings")],
            id="a slow GPU",
        ),
        pytest.param(
            [node("a", gpus=(BenchGpu(H100),), gpu0__matmul__bfloat16=450e12)],
            [],
            [("a", "specification")],
            id="below half of the specification",
        ),
        pytest.param(
            [node("a", gpus=(BenchGpu(H100),), gpu0__matmul__bfloat16=620e12)], [], [], id="quick"
        ),
        pytest.param(
            [node("a", gpus=(BenchGpu(H100, "new"),), gpu0__memory=2.5e12)],
            [node("a", "r1", gpus=(BenchGpu(H100, "old"),), gpu0__memory=3e12)],
            [],
            id="a GPU that was replaced",
        ),
    ],
)  # fmt: skip
def test_who_is_named(
    measured: list[Measurement], stored: list[Measurement], named: list[tuple[str, str]]
) -> None:
    """An outlier is certain, larger than all scatter, and compared only with equal hardware."""
    verdict = judge(measured, stored)
    assert [(one.node, one.outlier) for one in verdict.outliers] == named
    assert verdict.normal is not bool(named)


def test_a_part_that_failed_is_a_finding_and_one_left_out_is_not() -> None:
    """A hung GPU makes the node abnormal; a node without PyTorch is normal."""
    hung = node("a", missing={"gpu3": Missing("no answer within 45 s", failed=True)})
    bare = node("b", missing={"matmul": Missing("needs PyTorch")}, disk_read=5, shm_read=6)
    bare = replace(bare, load=0.42)
    before = earlier("b", disk_read=5, shm_read=6)
    verdict = judge([hung, bare], before)
    assert not verdict.normal
    assert judge([bare], before).normal
    lines = list(findings([hung, bare], verdict, ["c"]))
    assert [line.split(None, 1) for line in lines] == [
        ["a", "gpu3: no answer within 45 s"],
        ["b", "normal"],
        ["not", "measured: matmul: needs PyTorch"],
        ["1", "of 2 figures are too uncertain to judge"],
        ["other", "processes used 42% of its CPUs meanwhile: CPU and memory are not judged"],
        ["c", "left no result"],
    ]


@pytest.mark.parametrize(
    ("part", "load", "gpus", "reason", "is_fault"),
    [
        ("node", 0.9, (), "no answer within 40 s", False),
        ("node", 0.2, (), "no answer within 40 s", True),
        ("node", 0.9, (BenchGpu(H100),), "no answer within 40 s", True),
        ("gpu0", 0.9, (BenchGpu(H100),), "no answer within 45 s", True),
        ("cpu", 0.9, (BenchGpu(H100),), "no answer within 40 s", False),
        ("disk", 0.9, (), "no answer within 40 s", True),
        ("node", 0.9, (), "ended with status 1", True),
    ],
)
def test_a_part_without_cpus_is_no_fault(
    part: str, load: float, gpus: tuple[BenchGpu, ...], reason: str, is_fault: bool
) -> None:
    """What computes on CPUs that other processes have is late; disks and crashes are faults."""
    made = node("a", gpus=gpus, missing={part: Missing(reason, failed=True)}, disk_read=5)
    verdict = judge([replace(made, load=load)], [])
    assert verdict.normal is not is_fault
    assert (verdict.left_out == {"a": {part: reason}}) is not is_fault


def test_a_node_that_scatters_is_not_called_normal() -> None:
    """If all figures are uncertain nothing is known; if some are, their number is printed."""
    wild = node("wild", disk_read=5, shm_read=6, spread=0.2)
    verdict = judge([wild], [])
    assert verdict.normal
    assert verdict.is_unclear("wild")
    assert [line.split(None, 1) for line in findings([wild], verdict)] == [
        ["wild", "unclear"],
        ["2", "of 2 figures are too uncertain to judge"],
    ]
    calm = replace(wild, figures={**wild.figures, "disk.read": Rate(5, UNIT)})
    assert not judge([calm], earlier("wild", disk_read=5)).is_unclear("wild")


def test_a_first_run_is_not_called_normal() -> None:
    """Its figures are certain, but there is nothing yet that they could be compared with."""
    first = node("a", disk_read=5, shm_read=6)
    verdict = judge([first], [])
    assert verdict.is_unclear("a")
    assert [line.split(None, 1) for line in findings([first], verdict)] == [
        ["a", "unclear"],
        ["2", "of 2 figures have nothing to be compared with yet"],
    ]
    assert to_json([first], verdict, [], "")["normal"] is False
    assert not judge([first], earlier("a", disk_read=5)).is_unclear("a")


def test_the_table_shows_the_lowest_and_what_it_is_below() -> None:
    """A row has the median, the lowest value with its place, and the distance from the others."""
    measured = [*FOUR, node("bad", disk_read=90)]
    verdict = judge(measured, earlier("bad", disk_read=100))
    assert rows(verdict) == [
        ("local disk read", "101 B/s", "90 B/s", "bad", "0.5%", "-11.3% of 4", "-10.0% of 3", "")
    ]
    assert list(findings(measured, verdict))[-1] == (
        "bad  local disk read 90 B/s, 11% below the median of 4 siblings, 102 B/s"
    )
    printed = json.loads(json.dumps(to_json(measured, verdict, [], "")))
    assert printed["normal"] is False
    assert printed["nodes"][4]["figures"][0]["outlier"] == "siblings"


def test_all_reduce_is_fitted() -> None:
    """Latency and bandwidth come from all sizes; a curve that was cut off has no fit."""
    curve = [(2, float(size), 2 * 1e-5 + size / 1e9) for size in (4096, 65536, 1 << 20)]
    made = replace(node("a"), curves={"nodes": curve, "node": curve[:2]})
    larger = replace(made, curves={"nodes": [(4, size, 2 * took) for _, size, took in curve]})
    found = fits([made, larger, replace(made, curves={"nodes": curve[::-1]})])
    assert list(found) == ["nodes"]
    assert [one.ranks for one in found["nodes"]] == [2, 4]
    assert found["nodes"][0].alpha == pytest.approx(1e-5)
    assert found["nodes"][0].bandwidth == pytest.approx(1e9)


# --- specification


@pytest.mark.parametrize(
    ("name", "bfloat16", "memory"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12, 3350e9),
        ("NVIDIA H100 PCIe", 756e12, 2000e9),
        ("NVIDIA A100-SXM4-80GB (simulated)", 312e12, 2039e9),
        ("A100-SXM4-40GB", 312e12, 1555e9),
        ("NVIDIA H200", 989e12, 4800e9),
        ("AMD Instinct MI250X", 191.5e12, 1638e9),
        ("Tesla V100-SXM2-32GB", None, 900e9),
        ("NVIDIA L4", 121e12, 300e9),
    ],
)
def test_what_vendors_specify(name: str, bfloat16: float | None, memory: float) -> None:
    """The names are those of the driver; the figures are dense."""
    peaks = specification(name)
    assert peaks is not None
    assert (peaks.flops.get("bfloat16"), peaks.memory_bandwidth) == (bfloat16, memory)
    assert peaks.origin.startswith("specification of ")


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A10G",
        "NVIDIA A100-4C",
        "a100",
        "NVIDIA H20",
        "",
    ],
)
def test_what_is_not_specified(name: str) -> None:
    """A part of a GPU, a name of several products, and one that only begins like another."""
    assert specification(name) is None


def test_a_device_has_a_source_and_plausible_figures() -> None:
    """Narrower types are not slower, and no two devices share a name."""
    assert len({device.name for device in DEVICES}) == len(DEVICES)
    for device in DEVICES:
        assert device.source, device
        assert device.float64 <= device.float32 <= device.float16, device
        assert 100 < device.memory < 10_000, device


# --- results


def test_results_survive_the_disk(tmp_path: Path) -> None:
    """What is kept is read again; damaged, foreign and half-written files are passed over."""
    made = replace(
        node("a", gpus=(BenchGpu(H100, "u"),), gpu0__memory=3e12, disk_read=5.0),
        curves={"node": [(2, 4096.0, 1e-5)]},
        missing={"cpu": Missing("needs PyTorch")},
    )
    assert keep([made], [tmp_path / "new" / "bench"]) == tmp_path / "new" / "bench"
    place = tmp_path / "new" / "bench" / "cpu" / "a"
    (place / "torn.json").write_text('{"node": "a", "fig')
    (place / "other.json").write_text("[]")
    good = json.loads((place / "now.json").read_text())
    bad: list[dict[str, Any]] = [
        {**good, "figures": {"x": {"value": float("nan"), "unit": "B/s"}}},
        {**good, "figures": {"gpu7.memory": {"value": 1.0, "unit": "B/s"}}},
        {**good, "node": "../../etc"},
        {**good, "schema_version": 99},
        {**good, "gpus": None},
    ]
    for index, record in enumerate(bad):
        (place / f"bad{index}.json").write_text(json.dumps(record))
    (place / ".now.json.abc").write_text("{")
    (tmp_path / "new" / "bench" / "README").write_text("hello")
    read, damaged = read_all([tmp_path / "new" / "bench", tmp_path / "missing"])
    assert [asdict(one) for one in read] == [asdict(made)]
    assert len(damaged) == 2 + len(bad)


def _write(directory: Path, first: int) -> None:
    for index in range(first, first + 40):
        keep([node("a", f"run{index}", disk_read=1.0 + index, at=index)], [directory])


def test_many_writers_and_a_bounded_history(tmp_path: Path) -> None:
    """Two hpml write at the same time: no file is damaged, and 50 of a node are kept."""
    processes = [get_context("fork").Process(target=_write, args=(tmp_path, k)) for k in (0, 100)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    read, damaged = read_all([tmp_path])
    assert not damaged
    assert len(read) == 50


def test_results_go_where_one_may_write(tmp_path: Path) -> None:
    """Next to the strongest profile first, then the others, then the records; else the reason."""
    directories = directories_of(
        tmp_path / "records", [Path("/proc/site.toml"), tmp_path / "s.toml"]
    )
    assert directories == [
        tmp_path / "s.bench",
        Path("/proc/site.bench"),
        tmp_path / "records" / "bench",
    ]
    assert keep([node("a")], directories) == tmp_path / "s.bench"
    assert keep([node("a")], directories[1:]) == tmp_path / "records" / "bench"
    with pytest.raises(RecordError, match="/proc/site.bench: "):
        keep([node("a")], directories[1:2])


@pytest.mark.parametrize(
    ("name", "gpus", "expected"),
    [
        ("gpu2", [], "big"),
        ("login", [], "8-cpus_amd-epyc-7763"),
        ("login", [{"name": H100}] * 2, "2x-nvidia-h100-80gb-hbm3_8-cpus_amd-epyc-7763"),
    ],
)
def test_types_of_nodes(name: str, gpus: list[dict[str, str]], expected: str) -> None:
    """The site profile names them; without it the hardware does."""
    site = Site.model_validate({"node_types": {"big": {"nodes": "gpu[1-4]"}}})
    record = {"node": name, "cpus": 8, "cpu_model": "AMD EPYC 7763", "gpus": gpus}
    assert node_type(record, site) == expected


@pytest.mark.parametrize(
    ("nodes", "gpu", "memory", "origin"),
    [
        (["a"], H100, 3.0e12, "measured on 1970-01-02 on a"),
        (["a", "b"], H100, 2.9e12, "measured on 1970-01-02 on 2 nodes"),
        (["new"], H100, 2.9e12, "measured on 1970-01-02 on 2 nodes"),
        (["gpu3"], "", None, "measured on 1970-01-02 on gpu1"),
        (["a"], "NVIDIA L4", 300e9, "specification of L4"),
        (["plain"], "", 30.0, "measured on 1970-01-02 on plain"),
        (["plain"], "NVIDIA L4", 300e9, "specification of L4"),
    ],
)
def test_the_roof_of_a_report(
    tmp_path: Path, nodes: list[str], gpu: str, memory: float | None, origin: str
) -> None:
    """The nodes' own newest measurements, else their type's, else the specification."""
    day = 86_400.0
    kept = [
        node("a", "old", gpus=(BenchGpu(H100),), gpu0__memory=1e12, at=day),
        node(
            "a",
            "new",
            gpus=(BenchGpu(H100),),
            gpu0__memory=3e12,
            gpu0__matmul__tf32=1.0,
            at=day + 9,
        ),
        node(
            "b",
            "new",
            gpus=(BenchGpu(H100),),
            gpu0__memory=2.8e12,
            gpu0__matmul__tf32=1.0,
            at=day + 9,
        ),
        node("plain", "r", host__memory__domain0=10.0, host__memory__domain1=20.0, at=day),
        node("gpu1", "r", kind="big", disk_read=7.0, at=day),
    ]
    keep(kept, [tmp_path])
    site = Site.model_validate({"node_types": {"big": {"nodes": "gpu[1-4]"}}})
    peaks = peaks_for(nodes, gpu, directories=[tmp_path], site=site)
    assert peaks is not None
    assert peaks.memory_bandwidth == (memory if memory is None else pytest.approx(memory))
    assert peaks.origin == origin


def test_a_file_server_is_as_fast_as_for_the_fewest_readers(tmp_path: Path) -> None:
    """What eight nodes got at the same time is not what one node can read."""
    alone = node("a", shared_read=400)
    crowd = node("b", shared_read=50)
    crowd = replace(crowd, figures={"shared.read": Rate(50, UNIT, ranks=8)})
    keep([alone, crowd], [tmp_path])
    peaks = peaks_for(["a", "b"], "", directories=[tmp_path])
    assert peaks is not None
    assert peaks.shared_read == 400


def test_without_results_there_is_no_roof(tmp_path: Path) -> None:
    """Neither for a CPU that was never measured nor for a GPU that nobody specified."""
    assert peaks_for(["a"], "", directories=[tmp_path]) is None
    assert peaks_for(["a"], "NVIDIA Unheard-of", directories=[tmp_path]) is None


def test_gpus_without_pytorch_keep_their_specification(tmp_path: Path) -> None:
    """Disks are measured, the GPU is as specified, and the origin names both."""
    keep([node("a", gpus=(BenchGpu(H100),), disk_read=7.0, at=0.0)], [tmp_path])
    peaks = peaks_for(["a"], H100, directories=[tmp_path])
    assert peaks is not None
    assert (peaks.local_disk_read, peaks.flops["bfloat16"]) == (7.0, 989e12)
    assert peaks.origin.endswith("GPU: specification of H100 SXM")


def test_a_record_that_lacks_a_field_is_refused() -> None:
    """The error names what is wrong."""
    with pytest.raises(RecordError, match="KeyError: 'figures'|KeyError: 'curves'"):
        parse({"node": "a"})
