"""The plan file: its grammar to the letter, odd values, damage, and what reading it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpml_orchestrator.placement.model import Plan, RankPlan
from hpml_orchestrator.placement.planfile import find, read, write

PLAN = Plan(
    ranks=(
        RankPlan(
            local_rank=0,
            gpu="0000:c7:00.0",
            gpu_index=3,
            gpu_uuid="GPU-1a",
            cpus=(0, 1, 2, 64, 65, 66),
            cores=(0, 1, 2),
            numa=(0, 2),
            memory=2,
            nic="mlx5_0",
            threads=2,
            loader_workers=1,
            distance=12,
        ),
        RankPlan(local_rank=1, cpus=(7,), cores=(7,), numa=(0,)),
    ),
    policy="gpu-local",
    warnings=("a line\nand 100 % more",),
)
TEXT = """\
hpml-plan 1 ranks=2 policy=gpu-local
rank 0 bind=yes gpu=0000:c7:00.0 index=3 uuid=GPU-1a cpus=0-2,64-66 cores=0-2 numa=0,2 mem=2 \
nic=mlx5_0 threads=2 workers=1 distance=12
rank 1 bind=yes gpu=- index=- uuid=- cpus=7 cores=7 numa=0 mem=- nic=- threads=1 workers=0 \
distance=-
warning a%20line%0aand%20100%20%25%20more
"""


def test_the_text_of_a_plan() -> None:
    """The file follows the grammar, and reads back as the same plan."""
    assert write(PLAN) == TEXT
    assert read(TEXT) == PLAN


def test_one_rank_is_found_alone() -> None:
    """Missing values are left out; unknown keys are kept and do no harm."""
    assert find(TEXT, 1) == {
        "bind": "yes",
        "cpus": "7",
        "cores": "7",
        "numa": "0",
        "threads": "1",
        "workers": "0",
    }
    newer = TEXT.replace(" distance=12", " distance=12 colour=blue")
    assert find(newer, 0)["colour"] == "blue"
    assert read(newer) == PLAN


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a plan file"),
        ("{}\n", "not a plan file"),
        (TEXT.replace("hpml-plan 1", "hpml-plan 2"), "another version"),
        (TEXT.replace("ranks=2", "ranks=two"), "first line is damaged"),
        (TEXT.replace(" policy=gpu-local", ""), "first line is damaged"),
        (TEXT.replace("rank 0 ", "rank 5 "), "no rank 0"),
        (TEXT[: TEXT.index(" mem=2")], "no rank 0"),
        (TEXT.replace("gpu=0000:c7:00.0", "gpu=%zz"), "damaged value"),
        (TEXT.replace("cpus=0-2,64-66", "cpus=0-2,x"), "not a list of CPUs"),
        (TEXT.replace("cpus=0-2,64-66", "cpus=2-0"), "not a range of CPUs"),
    ],
)
def test_a_damaged_file_is_refused(text: str, words: str) -> None:
    """A file that is not a plan, of another version, cut short or garbled gives no plan."""
    with pytest.raises(ValueError, match=words):
        read(text)


@settings(max_examples=200, deadline=None)
@given(st.text(), st.none() | st.text(), st.text(), st.lists(st.text(), max_size=3))
def test_any_text_comes_back(gpu: str, nic: str | None, uuid: str, warnings: list[str]) -> None:
    """Names with blanks, percent signs, newlines, dashes or none of ASCII survive."""
    made = Plan(
        (RankPlan(0, gpu=gpu, gpu_uuid=uuid, nic=nic, cpus=(1,), cores=(0,)),),
        warnings=tuple(warnings),
    )
    text = write(made)
    assert text.isascii()
    assert read(text) == made


def test_reading_a_line_imports_next_to_nothing() -> None:
    """Every rank pays for what hpml-bind imports: no json, no dataclasses, no typing."""
    code = (
        "import sys; before = set(sys.modules); "
        "from hpml_orchestrator.placement.planfile import find; "
        "from hpml_orchestrator.topology.cpulist import parse_list; "
        f"parse_list(find({TEXT!r}, 0)['cpus']); "
        "print(*sorted(set(sys.modules) - before))"
    )
    told = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert told.stdout.split() == [
        "__future__",
        "hpml_orchestrator",
        "hpml_orchestrator.placement",
        "hpml_orchestrator.placement.planfile",
        "hpml_orchestrator.topology",
        "hpml_orchestrator.topology.cpulist",
    ]
