"""A site's rules in the script: options renamed, by default, forbidden; paths and interfaces."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.script import directives, render
from hpml_orchestrator.script.directives import as_asked
from hpml_orchestrator.spec import Job
from hpml_orchestrator.spec.site_load import ResolvedSite, load_site
from tests.unit.script.support import HERE
from tests.unit.script.support import job as job_of

Made = Callable[[str], ResolvedSite]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Load a profile from text."""

    def load(text: str) -> ResolvedSite:
        path = tmp_path / "hpml.toml"
        path.write_text(text, "utf-8")
        return load_site([path])

    return load


def job(**resources: Any) -> Job:
    return job_of(resources=resources)


@pytest.mark.parametrize(
    ("rules", "resources", "gone", "come"),
    [
        (
            '[directives.gpus-per-node]\nrename = "--gres=gpu:{item}"',
            {"gpus": "a100:2,v100:1"},
            "--gpus-per-node=a100:2,v100:1",
            "--gres=gpu:a100:2,gpu:v100:1",
        ),
        (
            '[directives.partition]\nrename = "--clusters={value}"',
            {"partition": "a,b"},
            "--partition=a,b",
            "--clusters=a,b",
        ),
        (
            '[directives.exclusive]\nrename = "--exclusive=user"',
            {"exclusive": True},
            "--exclusive",
            "--exclusive=user",
        ),
        ("[directives.mem]\nomit = true", {"memory": "4G"}, "--mem=4096M", None),
        ('[directives.hint]\ndefault = "nomultithread"', {}, None, "--hint=nomultithread"),
        ('[directives.requeue]\ndefault = ""', {}, None, "--requeue"),
        ('[directives.mem]\nforbid = "no"', {}, None, None),
        ('[directives.ntasks-per-node]\nforbid = "no"', {}, "--ntasks-per-node=1", None),
        (
            '[directives.mem]\nrename = "--mem-per-node={value}"\ndefault = "1G"',
            {},
            None,
            "--mem-per-node=1G",
        ),
    ],
)
def test_rules_change_the_options(
    made: Made, rules: str, resources: dict[str, Any], gone: str | None, come: str | None
) -> None:
    """Everything that no rule is about stays as it is, in its order."""
    without = directives(job(**resources))
    lines = directives(job(**resources), made(rules))
    if gone:
        assert gone in without
        assert gone not in lines
    assert [line for line in lines if line not in without] == ([come] if come else [])
    kept = [line for line in without if line != gone]
    assert [line for line in lines if line in without] == kept


def test_a_default_does_not_touch_what_the_job_asks_for(made: Made) -> None:
    """Not even through `extra`."""
    site = made('[directives.hint]\ndefault = "nomultithread"')
    lines = directives(job(extra=["--hint=multithread"]), site)
    assert [line for line in lines if line.startswith("--hint")] == ["--hint=multithread"]


@pytest.mark.parametrize(
    ("option", "resources", "field"),
    [
        ("mem", {"memory": "4G"}, "resources.memory"),
        ("exclusive", {"exclusive": True}, "resources.exclusive"),
        ("nodes", {"nodes": 2}, "resources.nodes"),
        ("time", {"time": "2:00:00"}, "resources.time"),
        ("mail-user", {"mail": {"to": "me"}}, "resources.mail"),
        ("nice", {"extra": ["--nice=5"]}, "resources.extra"),
    ],
)
def test_a_job_that_asks_for_what_is_forbidden_is_refused(
    made: Made, option: str, resources: dict[str, Any], field: str
) -> None:
    """The field, the site's own words, and where they stand."""
    site = made(f'[directives.{option}]\nforbid = "our filter rejects it"')
    with pytest.raises(InputError) as caught:
        render(job(**resources), HERE, site)
    assert caught.value.field == field
    words = f"{field}: asks for --{option}, which this site forbids: our filter rejects it"
    assert words in str(caught.value)
    assert str(site.sources[0]) in caught.value.hint


STAGES = [
    {"name": "one", "source": "/a", "target": "local"},
    {"name": "two", "source": "/b", "target": "shm"},
]


def run_lines(script: str, begins: tuple[str, ...], environment: dict[str, str]) -> str:
    """Run the lines of a script that begin so, and print what they set."""
    lines = [line for line in script.splitlines() if line.startswith(begins)]
    program = "\n".join(["set -eu", *lines, "env", "set | grep ^hpml_"])
    done = subprocess.run(
        ["bash", "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def test_what_is_staged_goes_where_the_site_says(made: Made) -> None:
    """Scratch may be a variable of the job; one that is not set ends the job with its name."""
    staged = job_of(stage=STAGES)
    site = made('[paths]\nscratch = "$FAST/it\'s $(id) here"\nram = "/ram disk"')
    script = render(staged, HERE, site)
    begins = ("hpml_shm=", "hpml_local=")
    said = run_lines(script, begins, {"FAST": "/fast", "PATH": "/usr/bin:/bin"})
    assert "hpml_shm='/ram disk'" in said
    assert "/fast/it" in said
    assert "uid=" not in said, "nothing of it is run"
    missing = run_lines(script, begins, {"PATH": "/usr/bin:/bin"})
    assert "FAST: of the site profile is not set in this job" in missing


def test_interfaces_are_told_to_the_ranks(made: Made) -> None:
    """Unless the user, or the job, has said so already."""
    site = made('interfaces = ["ib0", "ib1"]')
    script = render(job(), HERE, site)
    begins = ("export NCCL_SOCKET_IFNAME",)
    assert "NCCL_SOCKET_IFNAME=ib0,ib1\n" in run_lines(script, begins, {"PATH": "/usr/bin"})
    said = run_lines(script, begins, {"PATH": "/usr/bin", "GLOO_SOCKET_IFNAME": "eth7"})
    assert "GLOO_SOCKET_IFNAME=eth7\n" in said
    assert "IFNAME" not in render(job(), HERE)


def test_without_rules_a_profile_changes_nothing(made: Made) -> None:
    """To the byte."""
    assert render(job(gpus=2), HERE, made('cluster = "a"')) == render(job(gpus=2), HERE)


def test_the_job_as_slurm_will_see_it(made: Made) -> None:
    """Without what the site leaves out, with what it adds, field by field."""
    site = made(
        "[directives]\nmem.omit = true\nexclusive.omit = true\nnice.omit = true\n"
        'account.default = "physics"\nqos.default = "low"\nreservation.default = "course"\n'
        'gpus-per-node.rename = "--gres=gpu:{item}"\n'
    )
    asked = job(memory="4G", exclusive=True, qos="high", gpus=2, extra=["--nice=3", "--contiguous"])
    seen = as_asked(asked, site.site.directives).resources
    assert seen.memory is None
    assert not seen.exclusive
    assert (seen.account, seen.qos) == ("physics", "high")
    assert seen.gpus == "2", "under another name it is asked for all the same"
    assert seen.extra == ["--contiguous", "--reservation=course"]
