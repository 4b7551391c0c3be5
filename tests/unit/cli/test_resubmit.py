"""`hpml resubmit` of runs of the local backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.support import Hpml, Shell

pytestmark = pytest.mark.xdist_group("local runs")


@pytest.fixture(scope="module")
def old(shell: Shell) -> dict[str, Any]:
    """A run that has ended, of a job whose every part is filled in."""
    (shell.root / "data").mkdir()
    (shell.root / "data" / "a").write_text("a")
    job = shell.job(
        "again",
        command=["bash", "-c", 'touch "$1/x"; echo "got $* $WORD"', "bash"],
        args=["{local.dir}", "--name=a b", "{stage.data}"],
        stage=[{"name": "data", "source": "data", "target": "local"}],
        collect=[{"source": "{local.dir}/x", "target": "results"}],
        environment={"variables": {"WORD": "$HOME"}, "setup": "true\n"},
        resources={"time": "5:00", "extra": ["--nice=5"], "mail": {"to": "me", "on": ["fail"]}},
        monitor=False,
        binding="none",
    )
    done = shell.hpml("run", "--local", "--json", job)
    assert done.code == 0, done.err
    ended: dict[str, Any] = done.json()
    Path(job).unlink()  # the record is enough
    return ended


def test_the_recorded_job_is_submitted_again(shell: Shell, hpml: Hpml, old: dict[str, Any]) -> None:
    """Without changes it is the same job, byte for byte the same script."""
    made = hpml("resubmit", old["id"], "--json").json()
    assert hpml("wait", made["id"]).code == 0
    records = [
        json.loads(Path(one["submission"], "submit.json").read_text()) for one in (old, made)
    ]
    assert records[1]["continues"] == old["id"]
    assert records[0]["job"] == records[1]["job"]
    scripts = [Path(one["submission"], "job.sh").read_text() for one in (old, made)]
    assert scripts[0] == scripts[1]
    assert f"continues  {old['id']}" in hpml("show", made["id"]).out


def test_what_a_newer_version_recorded_stays(shell: Shell, hpml: Hpml) -> None:
    """Fields that this version does not know are no error, and the new record has them, too."""
    ran = shell.hpml("run", "--local", "--json", shell.job("newer", monitor=False)).json()
    path = Path(ran["submission"], "submit.json")
    record = json.loads(path.read_text())
    record["job"]["colour"], record["job"]["resources"]["watts"] = "red", 300
    path.write_text(json.dumps(record))
    made = hpml("resubmit", ran["id"], "--set", "resources.time=7:00", "--json").json()
    assert hpml("wait", made["id"]).code == 0
    job = hpml("show", "--json", made["id"]).json()["record"]["job"]
    assert (job["colour"], job["resources"]["watts"]) == ("red", 300)
    assert job["resources"]["time"] == "00:07:00"


def test_with_changes(hpml: Hpml, old: dict[str, Any]) -> None:
    """Fields replace the recorded ones, arguments are appended."""
    words = ("--set", "resources.time=7:00", "--set", "environment.variables.WORD=other")
    made = hpml("resubmit", old["id"], *words, "--json", "--", "--epochs=3").json()
    assert hpml("wait", made["id"]).code == 0
    assert "/data --epochs=3 other\n" in hpml("logs", made["id"]).out
    shown = hpml("show", "--json", made["id"]).json()["record"]["job"]
    assert shown["resources"]["time"] == "00:07:00"


def test_it_continues_from_the_checkpoints(shell: Shell, hpml: Hpml) -> None:
    """The new run finds what the old one saved, and the old one stays as long as it does."""
    save = 'cd "$HPML_CHECKPOINT_DIR"; ls; [[ -e saved ]] || { touch saved; exit 3; }'
    mkdir = 'mkdir -p "$HPML_CHECKPOINT_DIR"; '
    job = shell.job("saves", command=["bash", "-c", mkdir + save], checkpoint=True)
    first = shell.hpml("run", "--local", "--json", job).json()
    assert first["exit_code"] == 3
    done = hpml("resubmit", first["id"])
    assert f"continues from the checkpoints of {first['id']} in {first['directory']}" in done.err
    assert hpml("wait", "last").code == 0
    assert hpml("logs", "last").out.endswith("each\nsaved\n")
    assert "has the checkpoints of saves-" in hpml("prune", first["id"]).out
    second = hpml("list", "--json").json()[0]["id"]
    assert f"; {second} saved last\n" in hpml("resubmit", first["id"]).err


@pytest.mark.parametrize(
    ("words", "code", "parts"),
    [
        (("--set", "resources.nodes=0"), 2, ("resources.nodes",)),
        (("--set", "resources.nodes=9"), 2, ("9",)),
        (("--set", "resuorces.nodes=2"), 2, ("resuorces",)),
        (("extra",), 2, ("hpml resubmit RUN -- ARGUMENT",)),
    ],
)
def test_refusals(
    hpml: Hpml, old: dict[str, Any], words: tuple[str, ...], code: int, parts: tuple[str, ...]
) -> None:
    """A wrong change is refused as by `submit`, and nothing is submitted."""
    before = len(hpml("list", "--json", "--all").json())
    assert hpml("resubmit", old["id"], *words).refuses(code, *parts)
    assert len(hpml("list", "--json", "--all").json()) == before


def test_a_beginning_of_an_id_is_not_enough(hpml: Hpml, old: dict[str, Any]) -> None:
    """As for every command that acts: another run could be meant."""
    assert hpml("resubmit", old["id"][:7]).refuses(3, "no run")


def test_of_two_in_the_same_second_one_saves_there(shell: Shell, hpml: Hpml) -> None:
    """Two submissions with one directory of checkpoints, and two that continue one run."""
    job = shell.job(
        "twice",
        command=["sleep", "60"],
        checkpoint={"directory": str(shell.root / "twice")},
        monitor=False,
        binding="none",
    )

    def one_of_two(*words: str) -> str:
        """Start both at once; return the id of the one that was submitted."""
        both = [shell.start(*words) for _ in range(2)]
        printed = [process.communicate(timeout=120) for process in both]
        (made,) = [out.split()[1] for out, _ in printed if out]
        (error,) = [err for out, err in printed if not out]
        assert sorted(process.returncode for process in both) == [0, 2]
        assert f"{made}, which is " in error
        assert "saves its checkpoints there" in error or "is continued by" in error
        return made

    first = one_of_two("submit", "--local", "--no-check", job)
    assert [one["id"] for one in hpml("list", "--name", "twice", "--json").json()] == [first]
    (shell.root / "link").symlink_to(shell.root)
    linked = f"checkpoint.directory={shell.root / 'link' / 'twice'}"
    assert hpml("submit", "--local", job, "--set", linked).refuses(2, f"{first}, which is ")
    checked = hpml("check", "--local", "--json", job)
    assert checked.code != 0
    (finding,) = [one for one in checked.json()["findings"] if one["level"] == "error"]
    assert finding["field"] == "checkpoint.directory"
    assert f"{first}, which is " in finding["message"]
    assert hpml("cancel", first).code == 0
    assert hpml("wait", first).code != 0
    assert hpml("cancel", one_of_two("resubmit", "--no-check", first)).code == 0
