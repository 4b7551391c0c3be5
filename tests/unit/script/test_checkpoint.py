"""What a job's script has for `checkpoint`: the directory and `--requeue`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.script.render import directives, effective_job, render, render_agent
from hpml_orchestrator.site.model import ResolvedSite, Site
from tests.unit.script.support import APPTAINER, ENROOT, HERE, PYXIS, job


def site(**fields: Any) -> ResolvedSite:
    return ResolvedSite(Site.model_validate(fields))


def test_a_job_without_it_has_the_script_that_it_had() -> None:
    """No directory, no option of sbatch."""
    script = render(job(), HERE)
    assert script == render(job(checkpoint={"lead": 5}), HERE)  # a mapping of a profile's
    assert "checkpoint" not in script
    assert "requeue" not in script


@pytest.mark.parametrize(
    ("directory", "word"),
    [
        ("checkpoints", '"$HPML_RUN_DIR"/checkpoints'),
        ("{run.dir}/my states", "\"$HPML_RUN_DIR\"'/my states'"),
        ("/shared/it's/{run.id}", "'/shared/it'\"'\"'s/'\"${HPML_RUN_DIR##*/}\""),
        ("/shared/{array.index}", '/shared/"$SLURM_ARRAY_TASK_ID"'),
    ],
)
def test_the_directory(directory: str, word: str) -> None:
    """A relative one is in the run's directory; all is quoted, and known before it is used."""
    own = {"enabled": True, "directory": directory}
    script = render(job(checkpoint=own, args=["{checkpoint.dir}/a"]), HERE)
    assert f"\nhpml_checkpoints {word}\n" in script
    begun, made, used = (
        script.index(part)
        for part in ("hpml_begin ", "hpml_checkpoints ", '"$HPML_CHECKPOINT_DIR"/a')
    )
    assert begun < made < used


@pytest.mark.parametrize("container", [APPTAINER, ENROOT, PYXIS])
@pytest.mark.parametrize(("directory", "count"), [("checkpoints", 0), ("/shared/a", 1)])
def test_containers_mount_the_directory(
    container: dict[str, Any], directory: str, count: int
) -> None:
    """If it is not in the run's directory, which they mount anyway."""
    own = {"enabled": True, "directory": directory}
    fields = {"environment": {"container": container}, "launcher": "srun", "workdir": "/w"}
    launch = render(job(checkpoint=own, **fields), HERE).rpartition("hpml_run")[2]
    assert bool(launch.count("$HPML_CHECKPOINT_DIR")) == bool(count)
    with pytest.raises(InputError, match=r"checkpoint\.directory: must have neither colon"):
        render(job(checkpoint={"enabled": True, "directory": "/a:b"}, **fields), HERE)


@pytest.mark.parametrize(
    ("requeue", "profile", "option"),
    [
        (["hang"], {}, "--requeue"),
        (["hang"], {"requeue": "yes"}, "--requeue"),
        (["hang"], {"requeue": "no"}, "--no-requeue"),
        (["hang"], {"requeue": False}, "--no-requeue"),
        (["hang"], {"directives": {"requeue": {"forbid": "not here"}}}, "--no-requeue"),
        ([], {}, "--no-requeue"),
        (["hang"], {"directives": {"no-requeue": {"omit": True}}, "requeue": "no"}, ""),
    ],
)
def test_whether_slurm_may_run_the_job_again(
    requeue: list[str], profile: dict[str, Any], option: str
) -> None:
    """The script asks for it or not, whatever the default of the cluster; site rules hold."""
    asked = job(checkpoint={"enabled": True, "requeue": requeue})
    lines = directives(asked, site(**profile))
    assert [line for line in lines if "requeue" in line] == [option] * bool(option)
    seen = effective_job(asked, site(**profile).site.directives)
    assert seen.resources.extra == ()
    agent = json.loads(render_agent(asked, site(**profile)))
    is_asked_of_site = "requeue" not in profile.get("directives", {})
    assert agent["site"]["can_requeue"] == (
        profile.get("requeue", "auto") in ("auto", "yes") and is_asked_of_site
    )
