"""Whether a job is monitored: a word or a mapping, off unless somebody says else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.spec import ResolvedJob, job_schema, load_job, parse_setting
from hpml_orchestrator.spec.monitor import Monitor
from hpml_orchestrator.spec.site_load import ResolvedSite, load_site

Load = Callable[..., ResolvedJob]
BASE = "name: a\nscript: x.py\n"


@pytest.fixture
def site(tmp_path: Path) -> Callable[[str], ResolvedSite]:
    """Load a site profile of a directory of its own."""

    def make(text: str) -> ResolvedSite:
        path = tmp_path / "site" / "site.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return load_site([path])

    return make


@pytest.fixture
def loaded(tmp_path: Path) -> Callable[..., ResolvedJob]:
    """Load a job file with settings and a site profile."""

    def make(text: str, site: ResolvedSite | None = None, *settings: str) -> ResolvedJob:
        path = tmp_path / "job.yaml"
        path.write_text(BASE + text)
        return load_job(path, [parse_setting(one) for one in settings], site)

    return make


def test_nobody_is_monitored_unasked(loaded: Load) -> None:
    """It opens a port and starts a process on each node: somebody has to want that."""
    assert loaded("").job.monitor.model_dump() == {
        "enabled": False,
        "listen": "127.0.0.1:0",
        "web_config": None,
        "targets": None,
        "interval": 1,
    }


@pytest.mark.parametrize(
    ("text", "settings", "enabled"),
    [
        ("monitor: true", (), True),
        ("monitor: false", (), False),
        ("monitor: {}", (), True),
        ("monitor: {interval: 5}", (), True),
        ("monitor: {interval: 5, enabled: false}", (), False),
        ("", ("monitor=true",), True),
        ("", ("monitor.interval=5",), True),
        ("monitor: true", ("monitor=false",), False),
        ("monitor: {interval: 5}", ("monitor.enabled=false",), False),
    ],
)
def test_a_word_or_a_mapping(
    loaded: Load, text: str, settings: tuple[str, ...], enabled: bool
) -> None:
    """Who says how a job shall be monitored wants that, unless the same mapping says no."""
    assert loaded(text, None, *settings).job.monitor.enabled is enabled


def test_a_setting_keeps_the_other_fields(loaded: Load) -> None:
    """`--set monitor=false` switches off, and forgets nothing."""
    monitor = loaded("monitor: {interval: 5}", None, "monitor=false").job.monitor
    assert (monitor.enabled, monitor.interval) == (False, 5)


def test_paths_are_of_the_file_that_names_them(
    loaded: Load, site: Callable[[str], ResolvedSite], tmp_path: Path
) -> None:
    """The job file's lie beside it, the profile's beside that, and `~` is the home."""
    own = loaded("monitor: {targets: ~/t, web_config: w.yml}").job.monitor
    assert own.targets == str(Path("~/t").expanduser())
    assert own.web_config == str(tmp_path / "w.yml")
    profile = site('[defaults.monitor]\ntargets = "../t"\nweb_config = "web.yml"\n')
    theirs = loaded("monitor: true", profile).job.monitor
    assert theirs.targets == str(tmp_path / "t")
    assert theirs.web_config == str(tmp_path / "site" / "web.yml")


def test_a_site_says_how_and_a_job_says_whether(
    loaded: Load, site: Callable[[str], ResolvedSite]
) -> None:
    """A profile's mapping switches nothing on by itself; a job's word takes the rest from it."""
    profile = site('[defaults.monitor]\nlisten = "0.0.0.0:0"\n')
    assert not loaded("", profile).job.monitor.enabled
    made = loaded("monitor: true", profile)
    assert (made.job.monitor.enabled, made.job.monitor.listen) == (True, "0.0.0.0:0")
    assert made.origins["monitor.enabled"] == "job file"
    assert made.origins["monitor.listen"].startswith("site profile ")
    assert made.origins["monitor.interval"] == "default"


@pytest.mark.parametrize(
    "text", ["[defaults]\nmonitor = true\n", "[defaults.monitor]\nenabled=true"]
)
def test_a_site_can_have_all_jobs_monitored(
    loaded: Load, site: Callable[[str], ResolvedSite], text: str
) -> None:
    """A job can still say no."""
    profile = site(text)
    made = loaded("", profile)
    assert made.job.monitor.enabled
    assert made.origins["monitor.enabled"].startswith("site profile ")
    assert not loaded("monitor: false", profile).job.monitor.enabled
    assert not loaded("", profile, "monitor=false").job.monitor.enabled


@pytest.mark.parametrize(
    ("text", "settings", "origin"),
    [
        ("monitor: {interval: 2}", (), "job file"),
        ("monitor: {}", (), "job file"),
        ("", ("monitor.interval=2",), "command line"),
        ("monitor: {interval: 2}", ("monitor.listen=127.0.0.1:1",), "command line"),
    ],
)
def test_where_the_switch_came_from(
    loaded: Load, text: str, settings: tuple[str, ...], origin: str
) -> None:
    """A mapping without the switch: from where its fields came."""
    assert loaded(text, None, *settings).origins["monitor.enabled"] == origin


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("monitor: 1", "monitor: must be true or false, or a mapping of fields such as listen"),
        ("monitor:", "monitor: must be true or false, or a mapping of fields such as listen"),
        ("monitor: prometheus", "monitor: must be true or false, or a mapping"),
        ("monitor: {port: 1}", "monitor.port: there is no such field"),
        ("monitor: {target: /x}", "did you mean monitor.targets?"),
        ("monitor: {listen: 9445}", "monitor.listen: must be text: put it in quotes (got 9445)"),
        ("monitor: {listen: '127.0.0.1'}", "monitor.listen: must be ADDRESS:PORT, such as"),
        ("monitor: {listen: '127.0.0.1:70000'}", "monitor.listen: must be ADDRESS:PORT"),
        ("monitor: {listen: '::1:80'}", "monitor.listen: must be ADDRESS:PORT"),
        ("monitor: {listen: '$(id):80'}", "monitor.listen: must be ADDRESS:PORT"),
        ("monitor: {interval: 0}", "monitor.interval: must be at least 1 (got 0)"),
        ("monitor: {interval: 61}", "monitor.interval: must be at most 60 (got 61)"),
        ("monitor: {interval: 1.5}", "monitor.interval: must be a whole number (got 1.5)"),
        ("monitor: {enabled: 1}", "monitor.enabled: must be true or false (got 1)"),
        ("monitor: {web_config: ''}", "monitor.web_config: must not be empty"),
    ],
)
def test_what_is_refused(loaded: Load, text: str, message: str) -> None:
    """With the field, what would be right, and the value."""
    with pytest.raises(InputError) as got:
        loaded(text)
    assert message in got.value.message


@pytest.mark.parametrize("listen", ["0.0.0.0:0", ":9445", "[::1]:0", "gpu01.cluster:65535"])
def test_addresses_that_are_taken(listen: str) -> None:
    """IPv4, IPv6 in brackets, names, and none for all."""
    assert Monitor(listen=listen).listen == listen


@pytest.mark.parametrize("value", [True, False, {}, {"enabled": True, "interval": 3}])
def test_the_schema_takes_both_forms(value: Any) -> None:
    """And refuses a number."""
    job = {"name": "a", "script": "x.py", "monitor": value}
    jsonschema.validate(job, job_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**job, "monitor": 1}, job_schema())
