"""What a job's script has for `checkpoint`: options of the nodes, the directory, `--requeue`."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.script.directives import directives, effective_job
from hpml_orchestrator.script.render import render
from hpml_orchestrator.spec.site import ResolvedSite, Site
from tests.unit.script.support import APPTAINER, ENROOT, HERE, LAUNCHERS, PYXIS, job


def site(**fields: Any) -> ResolvedSite:
    return ResolvedSite(Site.model_validate(fields))


def exported(script: str) -> dict[str, str]:
    """The variables that a script exports, as it has them behind the `=`."""
    return dict(re.findall(r"^export (\w+)=(.*)$", script, re.MULTILINE))


def test_a_job_without_it_has_the_script_that_it_had() -> None:
    """No variable, no directory, no option of sbatch."""
    script = render(job(), HERE)
    assert script == render(job(checkpoint={"lead": 5}), HERE)  # a mapping of a profile's
    assert "HPML_CHECKPOINT" not in script
    assert "requeue" not in script


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_options_for_the_nodes(launcher: str) -> None:
    """They reach agents and the end of the script as JSON, times in seconds."""
    own = {"enabled": True, "lead": "5:00", "hang": "off", "signal": "SIGUSR1", "requeue": ["hang"]}
    asked = job(launcher=launcher, checkpoint=own, resources={"time": "10:00"})
    variables = exported(render(asked, HERE))
    (text,) = shlex.split(variables["HPML_CHECKPOINT"])
    assert json.loads(text) == {
        "lead": 300,
        "requeue": ["hang"],
        "attempts": 20,
        "hang": 0,
        "avoid_failed_nodes": True,
        "signal": "USR1",
        "time_limit": 600,
        "can_requeue": True,
    }


@pytest.mark.parametrize(
    ("directory", "word"),
    [
        ("checkpoints", '"$HPML_RUN_DIR"/checkpoints'),
        ("{run.dir}/my states", "\"$HPML_RUN_DIR\"'/my states'"),
        ("/shared/{run.id}/$", None),
        ("/shared/it's/{run.id}", "'/shared/it'\"'\"'s/'\"${HPML_RUN_DIR##*/}\""),
        ("/shared/{array.index}", '/shared/"$SLURM_ARRAY_TASK_ID"'),
    ],
)
def test_the_directory(directory: str, word: str | None) -> None:
    """A relative one is in the run's directory; all is quoted, and known before it is used."""
    own = {"enabled": True, "directory": directory}
    if word is None:
        with pytest.raises(ValueError, match="must not hold"):
            job(checkpoint=own)
        return
    script = render(job(checkpoint=own, args=["{checkpoint.dir}/a"]), HERE)
    assert exported(script)["HPML_CHECKPOINT_DIR"] == word
    begun, made, used = (
        script.index(part)
        for part in ("hpml_begin ", "export HPML_CHECKPOINT_DIR", '"$HPML_CHECKPOINT_DIR"/a')
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
    launch = render(job(checkpoint=own, **fields), HERE).partition("mkdir -p")[2].split("\n", 1)[1]
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
    assert seen.resources.extra == []
    (text,) = shlex.split(exported(render(asked, HERE, site(**profile)))["HPML_CHECKPOINT"])
    is_asked_of_site = "requeue" not in profile.get("directives", {})
    assert json.loads(text)["can_requeue"] == (
        profile.get("requeue", "auto") in ("auto", "yes") and is_asked_of_site
    )
