"""What a script passes to its agents is what they read, letter by letter."""

from __future__ import annotations

from typing import Any

import pytest

from hpml_orchestrator.node.options import (
    AgentOptions,
    BindOptions,
    MonitorOptions,
    SiteLimits,
    StageOptions,
    parse_options,
)
from hpml_orchestrator.script.render import render
from hpml_orchestrator.spec.site import ResolvedSite, Site
from hpml_orchestrator.staging.request import StageRequest
from tests.unit.script.support import HERE, job, words

ODD = 'it\'s $HOME `x` "q" \\ \u2028 ünï\n--'
RATES = {"shared_rate": "1G", "link_rate": "2M", "disk_rate": "3M", "metadata_rate": 3}
OPENS = {"opens_per_second": 1, "opens_per_second_per_job": 2, "array_jitter": 4}
SITE = {"interfaces": ["ib0", "eno1"], "staging": {**RATES, **OPENS}}


def options(site: dict[str, Any] | None = None, **fields: Any) -> AgentOptions:
    """What the agents of a job read from its script."""
    profile = None if site is None else ResolvedSite(Site.model_validate(site))
    script = render(job(**fields), HERE, profile)
    argv = words(script.partition("\nhpml_agents")[2].partition("\n\n# What the ranks find")[0])
    named = {"$hpml_shm": "/ram", "$hpml_local": "/disk"}  # which the shell expands
    return parse_options(["/a", *(named.get(argument, argument) for argument in argv)])


def test_how_the_ranks_are_bound() -> None:
    """What is left out has its default; without GPUs the node's do not count."""
    assert options().bind == BindOptions(1, no_gpus=True)
    assert (options().site, options().monitor) == (SiteLimits(), None)
    binding = {"policy": "numa", "verify": "strict", "loader_workers": 3, "hardware_threads": False}
    every = options(
        launcher="mpirun",
        resources={"gpus": 4, "ranks_per_gpu": 2},
        environment={"variables": {"OMP_NUM_THREADS": "3"}},
        binding=binding,
    )
    assert every.bind == BindOptions(8, "numa", "strict", 2, 3, one_thread=True, keep_threads=True)


def test_what_is_staged() -> None:
    """Every field arrives, with the directories that only the node knows."""
    entry = {"name": "x", "source": f"/s {ODD}", "keep": True, "outside_links": True}
    more = {"kind": "tree", "hash": False, "distribution": "chain"}
    others = [{"name": name, "source": "/y", "target": name} for name in ("shm", "local")]
    stage = [{**entry, **more, "target": f"/t {ODD}"}, *others]
    first = StageRequest("x", f"/s {ODD}", "tree", f"/t {ODD}", keep=True, outside_links=True)
    assert options(stage=stage, resources={"nodes": 2}).stages == [
        StageOptions(first, "chain", hash=False),
        StageOptions(StageRequest("shm", "/y", "auto", "/ram")),
        StageOptions(StageRequest("local", "/y", "auto", "/disk")),
    ]


def test_the_sites_limits_arrive_where_they_matter() -> None:
    """Limits reach all jobs that stage, rates several nodes, jitter arrays; sizes in bytes."""
    stage = [{"name": "d", "source": "/d"}]
    many = options(SITE, stage=stage, array="0-4", resources={"nodes": 2})
    sizes = {"shared_rate": 1 << 30, "link_rate": 2 << 20, "disk_rate": 3 << 20}
    assert many.site == SiteLimits(
        1, 2, 3, **sizes, array_jitter=4, array_tasks=5, interfaces=["ib0", "eno1"]
    )
    assert options(SITE, stage=stage).site == SiteLimits(1, 2, interfaces=["ib0", "eno1"])
    assert options(SITE, array="0-4").site == SiteLimits(interfaces=["ib0", "eno1"])


OWN = {"listen": "[::]:9445", "interval": 5, "web_config": "/etc/it's $HOME.yml", "targets": "/a*"}


@pytest.mark.parametrize(
    ("monitor", "expected"),
    [
        (True, MonitorOptions("127.0.0.1:0")),
        ({"enabled": True, **OWN}, MonitorOptions("[::]:9445", 5, "/etc/it's $HOME.yml", "/a*")),
        ({"enabled": False, "interval": 9}, None),
    ],
)
def test_how_the_job_is_monitored(monitor: Any, expected: MonitorOptions | None) -> None:
    """Whatever a shell would make of it."""
    assert options(monitor=monitor).monitor == expected
