"""`hpml list` and `hpml show` of submissions that earlier versions recorded."""

from __future__ import annotations

from hpml_orchestrator.testing.scheduler import FakeScheduler
from tests.unit.cli.support import Hpml, Shell
from tests.unit.records.old_submissions import OLD, restored


def test_records_of_earlier_versions_are_shown(
    shell: Shell, hpml: Hpml, slurm: FakeScheduler
) -> None:
    """Every one is listed, and shows the launcher and the command that was asked for."""
    assert not slurm.jobs
    for old in OLD:
        restored(old, shell.records)
    listed = hpml("list", "--all", "--json").json()
    assert {one["id"] for one in listed} == {old["submit"]["sid"] for old in OLD}
    for old in OLD:
        wanted, sid = old["wanted"], old["submit"]["sid"]
        shown = hpml("show", "--json", sid)
        assert (shown.code, shown.err) == (0, "")
        described = shown.json()
        assert described["launcher"] == wanted.get("launcher", "torchrun")
        program = wanted.get("command") or [wanted.get("script") or wanted["module"]]
        words = [*program, *wanted.get("args", ())]
        assert described["command"][-len(words) :] == words
        assert words[-1] in hpml("show", sid).out
