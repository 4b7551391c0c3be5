"""`agent.json` beside a script, and the agents' arguments in it: what the nodes read of a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.errors import RecordError
from hpml_orchestrator.node.environment import AgentOptions, parse_options
from hpml_orchestrator.node.planning import BindOptions
from hpml_orchestrator.records.files import write_text
from hpml_orchestrator.records.job import AGENT_FILE, NodeJob, SiteLimits, Stage
from hpml_orchestrator.script.render import render, render_agent
from hpml_orchestrator.site.model import ResolvedSite, Site
from tests.unit.script.support import HERE, job, words

ODD = 'it\'s $HOME `x` "q" \\ \u2028 ünï\n--'
RATES = {"shared_rate": "1G", "link_rate": "2M", "disk_rate": "3M", "metadata_rate": 3}
OPENS = {"opens_per_second": 1, "opens_per_second_per_job": 2, "array_jitter": 4}
SITE = {"interfaces": ["ib0", "eno1"], "staging": {**RATES, **OPENS}, "requeue": "no"}


def options(place: Path, **fields: Any) -> AgentOptions:
    """What the agents of a job read."""
    asked = job(**fields)
    write_text(place / AGENT_FILE, render_agent(asked))
    script = render(asked, HERE)
    argv = words(script.partition("\nhpml_agents")[2].partition("\n\ncd -- ")[0])
    named = {"$hpml_shm": "/ram", "$hpml_local": "/disk"}  # which the shell expands
    return parse_options(["/a", str(place), *(named.get(one, one) for one in argv)])


def test_the_job_arrives_as_it_is(tmp_path: Path) -> None:
    """Letter by letter, with the units that a job file has; equal jobs have equal files."""
    entry = {"name": "x", "source": f"/s {ODD}", "size": "2G", "target": f"/t {ODD}"}
    asked = job(
        args=[ODD],
        array="0-8:2%2",
        stage=[entry],
        resources={"gpus": "a100:2,v100:1", "time": "2h", "nodes": 2},
        environment={"variables": {"A": ODD}},
        monitor={"web_config": "/etc/it's $HOME.yml", "interval": 5},
        checkpoint={"lead": "5:00", "hang": "off", "signal": "SIGUSR1", "requeue": ["hang"]},
    )
    text = render_agent(asked)
    write_text(tmp_path / AGENT_FILE, text)
    assert NodeJob.read(tmp_path) == NodeJob(asked)
    assert text == render_agent(job(**json.loads(text)["job"]))
    assert json.loads(text)["job"]["resources"]["time"] == "02:00:00"


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """One line names it and says what to do."""
    with pytest.raises(RecordError, match="No such file or directory.*submit the job again"):
        NodeJob.read(tmp_path)
    write_text(tmp_path / AGENT_FILE, render_agent(job())[:-100])
    with pytest.raises(RecordError, match=r"agent\.json cannot be read \(.*submit the job again"):
        NodeJob.read(tmp_path)


def test_the_sites_limits() -> None:
    """Sizes are in bytes; without a profile nothing is limited."""
    assert NodeJob.from_json(json.loads(render_agent(job()))).site == SiteLimits()
    text = render_agent(job(), ResolvedSite(Site.model_validate(SITE)))
    sizes = {"shared_rate": 1 << 30, "link_rate": 2 << 20, "disk_rate": 3 << 20}
    assert NodeJob.from_json(json.loads(text)).site == SiteLimits(
        1, 2, 3, **sizes, array_jitter=4, interfaces=("ib0", "eno1"), can_requeue=False
    )


def test_how_the_ranks_are_bound() -> None:
    """Without GPUs the node's do not count."""
    assert BindOptions.of(job()) == BindOptions(1, no_gpus=True)
    visible = {"environment": {"variables": {"CUDA_VISIBLE_DEVICES": "0"}}}
    assert BindOptions.of(job(**visible)) == BindOptions(1)
    binding = {"policy": "numa", "verify": "strict", "loader_workers": 3, "hardware_threads": False}
    every = job(
        launcher="mpirun",
        resources={"gpus": 4, "ranks_per_gpu": 2},
        environment={"variables": {"OMP_NUM_THREADS": "3"}},
        binding=binding,
    )
    assert BindOptions.of(every) == BindOptions(
        8, "numa", "strict", 2, 3, one_thread=True, keep_threads=True
    )


def test_what_is_staged_and_collected(tmp_path: Path) -> None:
    """With the directories that only the node's shell knows."""
    entry = {"name": "x", "source": f"/s {ODD}", "keep": True, "outside_links": True}
    others = [{"name": name, "source": "/y", "target": name} for name in ("shm", "local")]
    read = options(
        tmp_path,
        stage=[{**entry, "kind": "tree", "target": f"/t {ODD}"}, *others],
        collect=[{"source": "{local.dir}/it's", "target": f"/c {ODD[:4]}"}],
        resources={"nodes": 2},
    )
    assert [read.at_its_directory(stage) for stage in read.job.stage] == [
        Stage("x", f"/s {ODD}", "tree", f"/t {ODD}", keep=True, outside_links=True),
        Stage("shm", "/y", "auto", "/ram"),
        Stage("local", "/y", "auto", "/disk"),
    ]
    assert (read.bases, read.job_directories) == ({"shm": "/ram", "local": "/disk"}, ["local"])
    assert read.collect == [("$HPML_LOCAL_DIR/it's", f"/c {ODD[:4]}")]
    plain = options(tmp_path)
    assert (plain.bases, plain.job_directories, plain.collect) == ({}, [], [])
