"""Commands about a site: init where there is no Slurm, schema, templates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.unit.cli.support import Result, Shell

Hpml = Callable[..., "Result"]


@pytest.fixture(autouse=True)
def without_slurm(shell: Shell, tmp_path: Path) -> Iterator[None]:
    """A path without any command."""
    shell.variables["PATH"] = str(tmp_path)
    yield
    shell.variables.clear()


def test_init_without_slurm_says_that_none_is_needed(shell: Shell, hpml: Hpml) -> None:
    """One line and a hint, status 3, and no file."""
    told = hpml("init")
    assert (told.code, told.out) == (3, "")
    assert told.err.startswith("hpml: error: there is no Slurm here: ")
    assert "the local backend, which needs no profile" in told.err
    assert not (shell.root / "hpml.toml").exists()


def test_init_refuses_a_place_before_it_asks(shell: Shell, hpml: Hpml) -> None:
    """Status 2, naming the option."""
    told = hpml("init", "--user", "-o", "x.toml")
    assert (told.code, told.err.split(":")[2]) == (2, " --output")
    (shell.root / "there.toml").write_text("mine")
    told = hpml("init", "-o", "there.toml")
    assert told.code == 2
    assert "hint: --force replaces it" in told.err
    assert (shell.root / "there.toml").read_text() == "mine"


@pytest.mark.parametrize("what", ["job", "site"])
def test_schemas_are_json(hpml: Hpml, what: str) -> None:
    """For editors."""
    schema = hpml("schema", what).json()
    assert schema["$schema"].endswith("2020-12/schema")
    assert schema["title"].startswith(f"hpml {what}")


def test_a_template_is_begun_used_and_listed(shell: Shell, hpml: Hpml) -> None:
    """From eject to a script that has the site's line."""
    told = hpml("template", "eject", "srun", "-o", "mine")
    assert told.code == 0
    lines = told.out.splitlines()
    assert lines[0] == f"wrote {shell.root / 'mine' / 'srun.sh.j2'}"
    profile = shell.root / "hpml.toml"
    profile.write_text(f"{lines[-1].strip()}\n")
    try:
        with (shell.root / "mine" / "srun.sh.j2").open("a") as stream:
            stream.write("{% block user %}echo {{ job.name }}\n{% endblock %}")
        script = hpml("render", shell.job(), "--backend", "slurm").out
        assert "\necho probe\n" in script
        listed = {row["name"]: row for row in hpml("template", "list", "--json").json()}
        assert listed["srun"]["origin"] == str(shell.root / "mine")
        assert listed["torchrun"]["origin"] == "hpml"
        without = hpml("--site", "none", "template", "list").out
        assert str(shell.root) not in without
        again = hpml("template", "eject", "srun", "-o", "mine")
        assert (again.code, "--force" in again.err) == (2, True)
    finally:
        profile.unlink()
