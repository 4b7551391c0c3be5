"""The sbatch options of a job: what it asks for, and a site's rules, paths and interfaces."""

from __future__ import annotations

from typing import Any

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.job import Job
from hpml_orchestrator.script.render import directives, effective_job, render
from hpml_orchestrator.site.model import ResolvedSite, Site
from tests.unit.script.support import HERE
from tests.unit.script.support import job as job_of


def job(**resources: Any) -> Job:
    return job_of(resources=resources)


def rules(**options: dict[str, Any]) -> ResolvedSite:
    """A profile with these rules; `_` means `-`."""
    named = {name.replace("_", "-"): rule for name, rule in options.items()}
    return ResolvedSite(Site.model_validate({"directives": named}))


@pytest.mark.parametrize(
    ("launcher", "tasks", "cpus"), [("srun", 4, 3), ("mpirun", 4, 3), ("torchrun", 1, 12)]
)
def test_directives_say_what_is_asked(launcher: str, tasks: int, cpus: int) -> None:
    """One task per node for torchrun, one per rank for the others; the same CPUs either way."""
    resources = {"nodes": 2, "ranks_per_node": 4, "cpus_per_rank": 3, "time": "1-0"}
    assert directives(job_of(launcher=launcher, resources=resources)) == [
        "--job-name=probe",
        "--nodes=2",
        f"--ntasks-per-node={tasks}",
        f"--cpus-per-task={cpus}",
        "--time=1-00:00:00",
        "--open-mode=append",
    ]


def test_what_is_staged_into_ram_is_asked_for_as_memory() -> None:
    """Files in /dev/shm count as the job's: their size is added, and only theirs."""
    stage = [
        {"name": "a", "source": "/a", "target": "shm", "size": "2G"},
        {"name": "c", "source": "/c", "target": "local", "size": "9G"},
        {"name": "d", "source": "/d", "target": "shm"},
    ]
    asked = job_of(stage=stage, resources={"memory": "4G"})
    assert asked.memory_mib == 4096 + 2048
    assert "--mem=6144M" in directives(asked)
    assert not any("--mem" in line for line in directives(job_of(stage=stage)))
    assert effective_job(asked, rules(mem={}).site.directives).resources.memory == 4096
    each = {"memory_per_cpu": "1G", "ranks_per_node": 2, "cpus_per_rank": 2}
    assert "--mem-per-cpu=1536M" in directives(job_of(stage=stage, resources=each))
    assert "--mem=0" in directives(job_of(stage=stage, resources={"memory": "all"}))


@pytest.mark.parametrize(
    ("option", "rule", "resources", "gone", "come"),
    [
        (
            "gpus-per-node",
            {"rename": "--gres=gpu:{item}"},
            {"gpus": "a100:2,v100:1"},
            "--gpus-per-node=a100:2,v100:1",
            "--gres=gpu:a100:2,gpu:v100:1",
        ),
        ("exclusive", {"rename": "--exclusive=user"}, {"exclusive": True}, "--exclusive", "=user"),
        ("mem", {"omit": True}, {"memory": "4G"}, "--mem=4096M", None),
        ("hint", {"default": "nomultithread"}, {}, None, "--hint=nomultithread"),
        ("hint", {"default": "a"}, {"extra": ["--hint=b"]}, None, None),
        ("requeue", {"default": ""}, {}, None, "--requeue"),
        ("mem", {"forbid": "no"}, {}, None, None),
        ("ntasks-per-node", {"forbid": "no"}, {}, "--ntasks-per-node=1", None),
        ("mem", {"rename": "--real={value}", "default": "1G"}, {}, None, "--real=1G"),
    ],
)
def test_rules_change_the_options(
    option: str, rule: dict[str, Any], resources: dict[str, Any], gone: str | None, come: str | None
) -> None:
    """Everything that no rule is about stays as it is, in its order."""
    without = directives(job(**resources))
    lines = directives(job(**resources), rules(**{option: rule}))
    new = [line for line in lines if line not in without]
    assert [line.removeprefix("--exclusive") for line in new] == ([come] if come else [])
    assert [line for line in lines if line in without] == [line for line in without if line != gone]


@pytest.mark.parametrize(
    ("option", "resources", "field", "value"),
    [
        ("mem", {"memory": "2G"}, "resources.memory", "2G"),
        ("exclusive", {"exclusive": True}, "resources.exclusive", True),
        ("mail_user", {"mail": {"to": "me"}}, "resources.mail", None),
        ("nice", {"extra": ["--nice=5"]}, "resources.extra", "--nice=5"),
    ],
)
def test_a_job_that_asks_for_what_is_forbidden_is_refused(
    option: str, resources: dict[str, Any], field: str, value: object
) -> None:
    """With the field, its value and the site's own words."""
    site = rules(**{option: {"forbid": "our filter rejects it"}})
    with pytest.raises(
        InputError, match="which this site forbids: our filter rejects it"
    ) as caught:
        render(job(**resources), HERE, site)
    assert (caught.value.field, caught.value.value) == (field, value)


def test_the_job_as_slurm_will_see_it() -> None:
    """Without what the site leaves out, with what it adds, field by field."""
    omit = {"omit": True}
    site = rules(
        mem=omit,
        nice=omit,
        time=omit,
        account={"default": "physics"},
        qos={"default": "low"},
        reservation={"default": "course"},
        constraint={"rename": "--prefer={value}"},
        exclusive={"rename": "--exclusive=user"},
        gpus_per_node={"rename": "--gres=gpu:{item}"},
    )
    asked = job(
        memory="4G",
        time="2:00:00",
        exclusive=True,
        qos="high",
        constraint="a100",
        gpus=2,
        extra=["--nice=3", "--contiguous"],
    )
    seen = effective_job(asked, site.site.directives).resources
    assert (seen.memory, seen.exclusive, seen.time) == (None, False, 3600)
    assert (seen.account, seen.qos, seen.constraint) == ("physics", "high", None)
    assert str(seen.gpus) == "2", "under another name it is asked for all the same"
    assert sorted(seen.extra) == [
        "--contiguous",
        "--exclusive=user",
        "--prefer=a100",
        "--reservation=course",
    ]


def test_paths_and_interfaces_of_a_site_reach_the_script() -> None:
    """Scratch may be a variable of the job; nothing of it is code; a job's interfaces win."""
    data = {
        "paths": {"scratch": "$FAST/it's $(id) here", "ram": "/ram disk"},
        "interfaces": ["ib0", "ib1"],
    }
    stage = [{"name": target, "source": "/a", "target": target} for target in ("local", "shm")]
    text = render(job_of(stage=stage), HERE, ResolvedSite(Site.model_validate(data)))
    fast = '"${FAST:?of the site profile is not set in this job}"'
    assert f"""\nhpml_local={fast}'/it'"'"'s $(id) here'\n""" in text
    assert "\nhpml_shm='/ram disk'\n" in text
    assert ' NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-ib0,ib1}"' in text
    assert render(job(), HERE, ResolvedSite(Site(cluster="a"))) == render(job(), HERE)
