"""How a job file says where ranks run: a word or a mapping, laid over the site profile's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.spec import ResolvedJob, load_job, parse_setting
from hpml_orchestrator.spec.binding import POLICY_WORDS, Binding
from hpml_orchestrator.spec.site_load import load_site

Load = Callable[..., ResolvedJob]
BASE = "name: a\nscript: x.py\n"


def test_a_job_is_bound_next_to_its_gpus_by_default(load: Load) -> None:
    """Whoever says nothing gets the policy for GPUs, proven and told, planned on each node."""
    binding = load(BASE).job.binding
    assert binding.model_dump() == {
        "policy": "gpu-local",
        "verify": "warn",
        "loader_workers": 0,
        "hardware_threads": True,
        "form": "auto",
    }


@pytest.mark.parametrize("word", POLICY_WORDS)
def test_a_word_is_a_policy(load: Load, word: str) -> None:
    """`binding: numa` says the same as a mapping with that policy alone, on every way in."""
    wanted = Binding.model_validate({"policy": word})
    assert load(f"{BASE}binding: {word}").job.binding == wanted
    assert load(f"{BASE}binding: {{policy: {word}}}").job.binding == wanted
    assert load(BASE, f"binding={word}").job.binding == wanted
    toml = f"name = 'a'\nscript = 'x.py'\nbinding = '{word}'"
    assert load(toml, name="job.toml").job.binding == wanted


def test_a_setting_reaches_into_a_word(load: Load) -> None:
    """The command line changes one field; a word there changes the policy and nothing else."""
    text = f"{BASE}binding: numa"
    binding = load(text, "binding.verify=strict").job.binding
    assert (binding.policy, binding.verify) == ("numa", "strict")
    text = f"{BASE}binding: {{verify: off, loader_workers: 3}}"
    binding = load(text, "binding=socket", "binding.form=node").job.binding
    assert (binding.policy, binding.verify, binding.loader_workers) == ("socket", "off", 3)
    whole = load(text, "binding={policy: none}").job.binding
    assert whole == Binding(policy="none"), "a mapping replaces all of it"


def test_each_field_of_a_word_has_its_origin(load: Load) -> None:
    """`hpml render --explain` says who chose the policy, and that the rest is by default."""
    origins = load(f"{BASE}binding: numa", "binding.verify=strict").origins
    assert origins["binding.policy"] == "job file"
    assert origins["binding.verify"] == "command line"
    assert origins["binding.form"] == "default"
    origins = load(BASE, "binding=none").origins
    assert origins["binding.policy"] == "command line"
    assert origins["binding.verify"] == "default"


@pytest.mark.parametrize("given", ['binding = "numa"', '[defaults.binding]\npolicy = "numa"'])
def test_a_site_has_defaults_for_it(tmp_path: Path, given: str) -> None:
    """A word in either file leaves the other fields to the file below."""
    first, second, job = tmp_path / "a.toml", tmp_path / "b.toml", tmp_path / "job.yaml"
    first.write_text('[defaults.binding]\nverify = "strict"\npolicy = "none"\n')
    second.write_text(given if given.startswith("[") else f"[defaults]\n{given}\n")
    site = load_site([first, second])
    job.write_text(f"{BASE}binding: socket")
    made = load_job(job, [], site)
    assert (made.job.binding.policy, made.job.binding.verify) == ("socket", "strict")
    assert made.origins["binding.policy"] == "job file"
    assert made.origins["binding.verify"] == f"site profile {first}"
    job.write_text(BASE)
    made = load_job(job, [parse_setting("binding.verify=off")], site)
    assert (made.job.binding.policy, made.job.binding.verify) == ("numa", "off")
    assert made.origins["binding.policy"] == f"site profile {second}"


def test_a_sites_wrong_policy_is_named(tmp_path: Path) -> None:
    """The error has the field of the profile."""
    profile = tmp_path / "site.toml"
    profile.write_text('[defaults]\nbinding = "cores"\n')
    with pytest.raises(InputError, match="must be gpu-local, socket, numa, spread or none") as got:
        load_site([profile])
    assert got.value.field == "defaults.binding"


def test_ranks_that_share_gpus_are_counted(load: Load) -> None:
    """Ranks per node follow from GPUs and ranks per GPU; saying the same twice is fine."""
    text = f"{BASE}resources: {{gpus: 4, ranks_per_gpu: 2}}"
    assert load(text).job.resources.ranks == 8
    assert load(text, "resources.ranks_per_node=8").job.resources.ranks == 8
    assert load(text, "resources.ranks_per_node=6").job.resources.ranks == 6, "2, 2, 1 and 1"
