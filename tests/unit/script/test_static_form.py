"""When the launcher itself binds the ranks, in which words, and why it does not."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.placement.planner import plan
from hpml_orchestrator.script import render
from hpml_orchestrator.script.static_form import StaticForm, describe, static_form
from tests.unit.placement.machines import dgx_a100, intel, mi250x, milan, two_by_twelve
from tests.unit.script.support import HERE, site
from tests.unit.script.support import whole_job as job

if TYPE_CHECKING:
    from hpml_orchestrator.spec import Job, ResolvedSite
    from hpml_orchestrator.topology.model import Topology


def line(one: Job, machine: Topology) -> str:
    """The script's lines that start the ranks, as one."""
    text = render(one, HERE, site(), topologies={"m": machine})
    return " ".join(text.partition("hpml_command=(")[2].replace("\\\n", "").split())


@pytest.mark.parametrize(
    ("machine", "resources", "name", "words"),
    [
        (
            milan(),
            {},
            "map_ldom",
            "--cpu-bind=map_ldom:3,2,1,0 --mem-bind=prefer,map_mem:3,2,1,0",
        ),
        (
            two_by_twelve(),
            {"gpus": 0, "ranks_per_node": 4},
            "cores",
            (
                "--cpu-bind=cores --distribution=block:block --cpus-per-task=6 "
                "--mem-bind=prefer,map_mem:0,0,1,1"
            ),
        ),
        (
            intel((0, 0, 1, 1)),
            {"binding": {"hardware_threads": False}},
            "mask_cpu",
            "--cpu-bind=mask_cpu:f,f0,f00,f000 --mem-bind=prefer,map_mem:0,0,1,1",
        ),
    ],
    ids=["reversed", "blocks", "one-thread"],
)
def test_srun_binds_in_the_most_readable_words(
    machine: Topology, resources: dict[str, Any], name: str, words: str
) -> None:
    """Domains before blocks of cores before masks, each only where it says the plan exactly."""
    one = job(**resources)
    form = static_form(one, site(), {"m": machine})
    assert (form.name, " ".join(form.options), form.missing) == (name, words, ())
    assert f" {words} --kill-on-bad-exit=1" in line(one, machine)
    assert "--cpu-bind=none" not in line(one, machine)


@pytest.mark.parametrize("machine", [dgx_a100(), mi250x()], ids=["dgx", "mi250x"])
def test_masks_say_what_the_nodes_plan(machine: Topology) -> None:
    """Each rank's mask has the very CPUs that the node's own plan gives it."""
    form = static_form(job(gpus=8), site(), {"m": machine})
    assert form.name == "mask_cpu"
    masks = form.options[0].removeprefix("--cpu-bind=mask_cpu:").split(",")
    there = [{cpu for cpu in range(256) if int(mask, 16) >> cpu & 1} for mask in masks]
    assert there == [set(one.cpus) for one in plan(machine, 8).ranks]


@pytest.mark.parametrize(
    ("machine", "resources", "ranks", "words"),
    [
        (milan((0, 1, 2, 3)), {}, 4, "--map-by ppr:1:numa --bind-to numa"),
        (
            two_by_twelve(),
            {"gpus": 0, "ranks_per_node": 4},
            4,
            "--map-by ppr:2:socket:pe=6 --bind-to core",
        ),
        (milan(), {}, 4, '--rankfile "$hpml_attempt/rankfile"'),
    ],
    ids=["domains", "parts", "reversed"],
)
def test_mpirun_binds(machine: Topology, resources: dict[str, Any], ranks: int, words: str) -> None:
    """By its options where they say the plan, else by a rankfile; never `--bind-to none` then."""
    found = line(job("mpirun", **resources), machine)
    start = f'mpirun -np "$((SLURM_NNODES * {ranks}))"'
    if "numa" in words:  # the same words for every version of Open MPI
        assert f"{start} {words} " in found
    else:
        assert f"hpml_place=({words})" in found
        assert f'{start} "${{hpml_place[@]}}" ' in found
    assert "--bind-to none" not in found


def test_an_unknown_site_plans_on_the_nodes() -> None:
    """Nothing is said, and nothing changes: each node plans for itself."""
    text = render(job(), HERE)
    assert "--cpu-bind=none" in text
    assert "static" not in text
    assert static_form(job(form="node"), site(), {"m": milan()}) == StaticForm()
    assert describe(StaticForm()) == "each node plans for itself"
    form = static_form(job(), site(), {"m": milan()})
    assert describe(form) == "the launcher binds, by map_ldom; each node checks it"


WHOLE = "the job does not get whole nodes (resources.exclusive)"
NO_PARTITION = "the job names no partition, and the site profile has no default one"
NOT_ONE_BY_ONE = "starts the ranks, and only srun and mpirun can bind them one by one"
EXTRA = ["--hint=nomultithread", "--core-spec=2"]


@pytest.mark.parametrize(
    ("one", "profile", "missing"),
    [
        (job(form="static"), None, ["there is no site profile with the topology of the nodes"]),
        (job("horovodrun", "static"), site(), [f"horovodrun {NOT_ONE_BY_ONE}"]),
        (job(form="static", binding={"policy": "none"}), site(), ["policy none binds nothing"]),
        (job(form="static", exclusive=False), site(), [WHOLE]),
        (job(form="static", partition=None), site(), [NO_PARTITION]),
        (
            job(form="static", partition="gpu,fat", extra=EXTRA),
            site(m={"cpus": 120}),
            [
                "the site profile does not know partition fat",
                *(f"{option} leaves parts of a node out" for option in EXTRA),
                "jobs can have 120 CPUs of node type m, and its topology has 128",
            ],
        ),
        (
            job("torchrun", "static", exclusive=False, gpus=1),
            site("m", "other"),
            [
                f"torchrun {NOT_ONE_BY_ONE}",
                WHOLE,
                "the job asks for 1 of the 4 GPUs that nodes of type m have",
                "node type other has no topology in the site profile",
            ],
        ),
    ],
)
def test_what_is_missing_is_named(
    one: Job, profile: ResolvedSite | None, missing: list[str]
) -> None:
    """`form: static` is refused with every condition that does not hold; `auto` goes on without."""
    machines = {"m": milan()}
    with pytest.raises(InputError) as caught:
        render(one, HERE, profile, topologies=machines)
    told_all = f"binding.form: cannot be static: {'; '.join(missing)} (got 'static')"
    assert str(caught.value) == told_all
    assert caught.value.field == "binding.form"
    silent = one.model_copy(update={"binding": one.binding.model_copy(update={"form": "auto"})})
    assert static_form(silent, profile, machines) == StaticForm(missing=tuple(missing))
    assert "--cpu-bind=none" in render(silent, HERE, profile, topologies=machines)


def test_a_partition_that_gives_whole_nodes_will_do() -> None:
    """As will the site's own default for --exclusive and for the partition."""
    machines = {"m": milan()}
    one = job(form="static", exclusive=False)
    assert static_form(one, site(partition={"exclusive": True}), machines).name == "map_ldom"
    rules = {"exclusive": {"default": ""}, "partition": {"default": "gpu"}}
    bare = job(form="static", exclusive=False, partition=None)
    assert static_form(bare, site(directives=rules), machines).name == "map_ldom"
    for rule in ({"omit": True}, {"rename": "--exclusive=user"}):
        with pytest.raises(InputError, match=re.escape(WHOLE)):
            static_form(job(form="static"), site(directives={"exclusive": rule}), machines)


def test_node_types_must_be_alike() -> None:
    """Ranks would lie elsewhere on one of them; two that differ in name only are one machine."""
    alike = {"m": milan(), "n": replace(milan(), warnings=("told by another file",))}
    assert static_form(job(form="static"), site("m", "n"), alike).name == "map_ldom"
    with pytest.raises(InputError, match="ranks lie differently on nodes of the types m and n"):
        static_form(job(form="static"), site("m", "n"), {**alike, "n": milan((0, 1, 2, 3))})
