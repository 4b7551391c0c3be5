"""When the launcher itself binds the ranks, by which options, and why it does not."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.script import render
from hpml_orchestrator.script.static_form import StaticForm, describe, static_form
from tests.unit.placement.machines import intel, milan, two_by_twelve
from tests.unit.script.support import HERE, site
from tests.unit.script.support import whole_job as job

if TYPE_CHECKING:
    from hpml_orchestrator.spec import Job, ResolvedSite
    from hpml_orchestrator.topology.model import Topology

MILAN = {"m": milan()}
NO_GPUS = {"gpus": 0, "ranks_per_node": 4}


@pytest.mark.parametrize(
    ("launcher", "machine", "resources", "name", "options"),
    [
        (
            "srun",
            milan(),
            {},
            "map_ldom",
            "--cpu-bind=map_ldom:3,2,1,0 --mem-bind=prefer,map_mem:3,2,1,0",
        ),
        (
            "srun",
            two_by_twelve(),
            NO_GPUS,
            "cores",
            (
                "--cpu-bind=cores --distribution=block:block --cpus-per-task=6 "
                "--mem-bind=prefer,map_mem:0,0,1,1"
            ),
        ),
        (
            "srun",
            intel((0, 0, 1, 1)),
            {"binding": {"hardware_threads": False}},
            "mask_cpu",
            "--cpu-bind=mask_cpu:f,f0,f00,f000 --mem-bind=prefer,map_mem:0,0,1,1",
        ),
        ("mpirun", milan((0, 1, 2, 3)), {}, "map-by", "--map-by ppr:1:numa --bind-to numa"),
        (
            "mpirun",
            two_by_twelve(),
            NO_GPUS,
            "map-by",
            "--map-by ppr:2:socket:pe=6 --bind-to core",
        ),
        ("mpirun", milan(), {}, "rankfile", '--rankfile "$hpml_attempt/rankfile"'),
    ],
)
def test_the_launcher_binds_by_its_most_readable_options(
    launcher: str, machine: Topology, resources: dict[str, Any], name: str, options: str
) -> None:
    """Domains before blocks of cores before masks, each only where it equals the plan exactly."""
    asked = job(launcher, **resources)
    form = static_form(asked, site(), {"m": machine})
    assert (form.name, form.missing) == (name, ())
    text = render(asked, HERE, site(), topologies={"m": machine})
    line = " ".join(text.partition("hpml_command=(")[2].replace("\\\n", "").split())
    assert f" {options} " in line or f"hpml_place=({options})" in line
    assert "--cpu-bind=none" not in line
    assert "--bind-to none" not in line
    assert describe(form) == f"the launcher binds, by {name}; each node checks it"


WHOLE = "the job does not get whole nodes (resources.exclusive)"
ONE_BY_ONE = "starts the ranks, and only srun and mpirun can bind them one by one"
EXTRA = ["--hint=nomultithread", "--core-spec=2"]


@pytest.mark.parametrize(
    ("asked", "profile", "missing"),
    [
        (job(form="static"), None, ["there is no site profile with the topology of the nodes"]),
        (job("horovodrun", "static"), site(), [f"horovodrun {ONE_BY_ONE}"]),
        (job(form="static", binding={"policy": "none"}), site(), ["policy none binds nothing"]),
        (
            job(form="static", partition=None),
            site(),
            ["the job names no partition, and the site profile has no default one"],
        ),
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
                f"torchrun {ONE_BY_ONE}",
                WHOLE,
                "the job asks for 1 of the 4 GPUs that nodes of type m have",
                "node type other has no topology in the site profile",
            ],
        ),
    ],
)
def test_what_is_missing_is_named(
    asked: Job, profile: ResolvedSite | None, missing: list[str]
) -> None:
    """`form: static` is refused with every condition that does not hold; `auto` goes on without."""
    with pytest.raises(InputError) as caught:
        render(asked, HERE, profile, topologies=MILAN)
    assert f"cannot be static: {'; '.join(missing)} (got" in str(caught.value)
    assert caught.value.field == "binding.form"
    silent = asked.model_copy(update={"binding": asked.binding.model_copy(update={"form": "auto"})})
    form = static_form(silent, profile, MILAN)
    assert form == StaticForm(missing=tuple(missing))
    assert describe(form) == f"each node plans for itself: {'; '.join(missing)}"
    assert "--cpu-bind=none" in render(silent, HERE, profile, topologies=MILAN)
    assert static_form(job(form="node"), profile, MILAN) == StaticForm()


def test_a_partition_that_gives_whole_nodes_will_do() -> None:
    """As will the site's own default for --exclusive and for the partition."""
    asked = job(form="static", exclusive=False)
    assert static_form(asked, site(partition={"exclusive": True}), MILAN).name == "map_ldom"
    rules = {"exclusive": {"default": ""}, "partition": {"default": "gpu"}}
    bare = job(form="static", exclusive=False, partition=None)
    assert static_form(bare, site(directives=rules), MILAN).name == "map_ldom"
    for rule in ({"omit": True}, {"rename": "--exclusive=user"}):
        with pytest.raises(InputError, match=re.escape(WHOLE)):
            static_form(job(form="static"), site(directives={"exclusive": rule}), MILAN)


def test_node_types_must_be_alike() -> None:
    """Ranks would lie elsewhere on one of them; a topology has to have all cores."""
    alike = {**MILAN, "n": replace(milan(), warnings=("of another file",))}
    assert static_form(job(form="static"), site("m", "n"), alike).name == "map_ldom"
    with pytest.raises(InputError, match="ranks lie differently on nodes of the types m and n"):
        static_form(job(form="static"), site("m", "n"), {**alike, "n": milan((0, 1, 2, 3))})
    partial = {"m": replace(milan(), source="nvidia-smi topo -m")}
    reason = "the topology of node type m (nvidia-smi topo -m) does not have all cores"
    assert static_form(job(), site(), partial).missing == (reason,)
