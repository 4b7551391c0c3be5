"""`binding` and `monitor`: short forms and mappings, laid over the site profile's defaults."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.job import Binding

if TYPE_CHECKING:
    from tests.unit.jobfile.conftest import Load, LoadSite

BASE = "name: a\nscript: x.py\n"


@pytest.mark.parametrize("policy", ["gpu-local", "socket", "numa", "spread", "none"])
def test_a_policy_alone(load: Load, policy: str) -> None:
    """`binding: numa` is a mapping with that policy, in YAML, in TOML and on the command line."""
    wanted = Binding.from_json({"policy": policy})
    assert load(f"{BASE}binding: {policy}").job.binding == wanted
    assert load(f"{BASE}binding: {{policy: {policy}}}").job.binding == wanted
    assert load(BASE, f"binding={policy}").job.binding == wanted
    toml = f"name = 'a'\nscript = 'x.py'\nbinding = '{policy}'"
    assert load(toml, name="job.toml").job.binding == wanted


def test_a_setting_changes_one_field(load: Load) -> None:
    """A short form on the command line keeps the other fields; a mapping replaces them."""
    text = f"{BASE}binding: {{verify: off, loader_workers: 3}}"
    binding = load(text, "binding=socket", "binding.hardware_threads=false").job.binding
    assert (binding.policy, binding.verify, binding.loader_workers) == ("socket", "off", 3)
    assert load(text, "binding={policy: none}").job.binding == Binding(policy="none")
    monitor = load(f"{BASE}monitor: {{interval: 5}}", "monitor=false").job.monitor
    assert (monitor.enabled, monitor.interval) == (False, 5)


@pytest.mark.parametrize(
    ("text", "settings", "enabled", "origin"),
    [
        ("monitor: true", (), True, "job file"),
        ("monitor: false", (), False, "job file"),
        ("monitor: {}", (), True, "job file"),
        ("monitor: {interval: 5}", (), True, "job file"),
        ("monitor: {interval: 5, enabled: false}", (), False, "job file"),
        ("", ("monitor=true",), True, "command line"),
        ("", ("monitor.interval=5",), True, "command line"),
        ("monitor: {interval: 2}", ("monitor.listen=127.0.0.1:1",), True, "command line"),
        ("monitor: true", ("monitor=false",), False, "command line"),
        ("monitor: {interval: 5}", ("monitor.enabled=false",), False, "command line"),
    ],
)
def test_a_mapping_switches_the_monitor_on(
    load: Load, text: str, settings: tuple[str, ...], enabled: bool, origin: str
) -> None:
    """Unless it is switched off explicitly; the switch has the origin of its other fields."""
    resolved = load(BASE + text, *settings)
    assert resolved.job.monitor.enabled is enabled
    assert resolved.origins["monitor.enabled"] == origin


@pytest.mark.parametrize(
    "second", ['[defaults]\nbinding = "numa"', '[defaults.binding]\npolicy = "numa"']
)
def test_a_site_has_defaults_for_binding(load: Load, site: LoadSite, second: str) -> None:
    """A policy alone in any file keeps the other fields of the file below."""
    made = site('[defaults.binding]\nverify = "strict"\npolicy = "none"\n', second)
    job = load(f"{BASE}binding: socket", site=made)
    assert (job.job.binding.policy, job.job.binding.verify) == ("socket", "strict")
    assert job.origins["binding.policy"] == "job file"
    assert job.origins["binding.verify"] == f"site profile {made.sources[0]}"
    job = load(BASE, "binding.verify=off", site=made)
    assert (job.job.binding.policy, job.job.binding.verify) == ("numa", "off")
    assert job.origins["binding.policy"] == f"site profile {made.sources[1]}"


def test_a_site_says_how_and_a_job_says_whether(load: Load, site: LoadSite) -> None:
    """A profile's mapping alone switches no monitor on; a job's `true` takes the rest from it."""
    made = site('[defaults.monitor]\nlisten = "0.0.0.0:0"\n')
    assert not load(BASE, site=made).job.monitor.enabled
    job = load(f"{BASE}monitor: true", site=made)
    assert (job.job.monitor.enabled, job.job.monitor.listen) == (True, "0.0.0.0:0")
    assert job.origins["monitor.listen"].startswith("site profile ")


def test_paths_are_relative_to_the_file_that_names_them(
    load: Load, site: LoadSite, tmp_path: Path
) -> None:
    """The paths of a job file are relative to it, those of a profile to the profile."""
    own = load(f"{BASE}monitor: {{targets: ~/t, web_config: w.yml}}").job.monitor
    assert own.targets == str(Path("~/t").expanduser())
    assert own.web_config == str(tmp_path / "w.yml")
    made = site('[defaults.monitor]\ntargets = "../t"\nweb_config = "web.yml"\n')
    theirs = load(f"{BASE}monitor: true", site=made).job.monitor
    assert theirs.targets == str(tmp_path / "t")
    assert theirs.web_config == str(tmp_path / "0" / "web.yml")


def test_a_wrong_policy_of_a_site_is_named(site: LoadSite) -> None:
    """The error has the field of the profile."""
    with pytest.raises(InputError, match="must be 'gpu-local', 'socket'") as caught:
        site('[defaults]\nbinding = "cores"\n')
    assert caught.value.field == "defaults.binding.policy"
