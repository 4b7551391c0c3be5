"""The job file's `checkpoint`: what it takes, what it refuses, and its placeholder."""

from __future__ import annotations

from typing import Any

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.records.job import REASONS, Job
from tests.unit.jobfile.conftest import Load, LoadSite

JOB = "name: a\nscript: train.py\n"


def test_a_job_without_it(load: Load) -> None:
    """Nothing is saved or requeued unless the job file asks for it."""
    assert not load(JOB).job.checkpoint.enabled
    assert not load(f"{JOB}checkpoint: false").job.checkpoint.enabled


def test_the_profile_says_how_and_the_job_whether(load: Load, site: LoadSite) -> None:
    """A mapping of a site profile enables it for no job, and gives its values to those that ask."""
    profile = site('[defaults.checkpoint]\nlead = "10m"\nattempts = 3\n')
    assert not load(JOB, site=profile).job.checkpoint.enabled
    own = load(f"{JOB}checkpoint: {{attempts: 5}}", site=profile).job.checkpoint
    assert (own.enabled, own.lead, own.attempts) == (True, 600, 5)
    own = load(JOB, "checkpoint=true", site=profile).job.checkpoint
    assert (own.enabled, own.lead) == (True, 600)
    off = load(f"{JOB}checkpoint: {{attempts: 5}}", "checkpoint=false", site=profile)
    assert not off.job.checkpoint.enabled
    everywhere = site("[defaults]\ncheckpoint = true\n")
    assert load(JOB, site=everywhere).job.checkpoint.enabled


@pytest.mark.parametrize("text", ["true", "{}", "{attempts: 20}"])
def test_the_short_form_and_a_mapping(load: Load, text: str) -> None:
    """`true` and any mapping enable it, with the same defaults."""
    own = load(f"{JOB}checkpoint: {text}").job.checkpoint
    assert own.enabled
    assert (own.directory, own.lead, own.hang) == ("checkpoints", None, 1800)
    assert (tuple(own.requeue), own.attempts, own.signal) == (REASONS, 20, None)
    assert own.avoid_failed_nodes


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("{lead: 90s}", "lead", 90),
        ("{lead: '30:00'}", "lead", 1800),
        ("{lead: 30:00}", "lead", 1800),
        ("{lead: 5}", "lead", 300),
        ("{lead: AUTO}", "lead", None),
        ("{hang: 2h}", "hang", 7200),
        ("{hang: off}", "hang", 0),
        ("{hang: false}", "hang", 0),
        ("{requeue: []}", "requeue", ()),
        ("{requeue: [hang, hang]}", "requeue", ("hang",)),
        ("{signal: SIGUSR1}", "signal", "USR1"),
        ("{signal: usr2}", "signal", "USR2"),
        ("{signal: TERM}", "signal", "TERM"),
        ("{directory: a/../b/}", "directory", "b"),
        ("{directory: '{run.dir}/states'}", "directory", "states"),
        ("{directory: '{run.dir}/x/{run.id}'}", "directory", "x/{run.id}"),
        ("{directory: '/shared/{run.id}'}", "directory", "/shared/{run.id}"),
        ("{directory: ~/states}", "is_shared", True),
    ],
)
def test_values(load: Load, text: str, name: str, value: Any) -> None:
    """Times, signals and directories are read in every form that means the same."""
    assert getattr(load(f"{JOB}checkpoint: {text}").job.checkpoint, name) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("checkpoint: yes please", "checkpoint: must be true or false, or a mapping of fields"),
        ("checkpoint: {dir: a}", "checkpoint.dir: unknown field; did you mean"),
        ("checkpoint: {lead: soon}", "checkpoint.lead: must be `auto`, or a time: 2h"),
        ("checkpoint: {lead: 0}", "checkpoint.lead: must be `auto`, or more than zero"),
        ("checkpoint: {lead: true}", "checkpoint.lead: must be `auto`, or a time"),
        ("checkpoint: {hang: never}", "checkpoint.hang: must be `off`, or a time"),
        ("checkpoint: {hang: 0}", "checkpoint.hang: must be `off`, or more than zero"),
        ("checkpoint: {requeue: true}", "checkpoint.requeue: must be a list of time_limit, pre"),
        ("checkpoint: {requeue: [timeout]}", "checkpoint.requeue.0: must be 'time_limit', 'pre"),
        ("checkpoint: {attempts: 0}", "checkpoint.attempts: must be at least 1 (got 0)"),
        ("checkpoint: {signal: KILL}", "checkpoint.signal: must be one of USR1, USR2, HUP, INT, "),
        ("checkpoint: {signal: SIGSTOP}", "checkpoint.signal: must be one of USR1, USR2, HUP, "),
        ("checkpoint: {signal: 10}", "checkpoint.signal: must be one of USR1, USR2, HUP, INT, TE"),
        ("checkpoint: {signal: USR1@90}", "checkpoint.signal: must be one of USR1, USR2, HUP, IN"),
        ("checkpoint: {directory: ''}", "checkpoint.directory: must not be empty"),
        ("checkpoint: {directory: .}", "checkpoint.directory: must be a directory inside of the"),
        ("checkpoint: {directory: a/../../b}", "checkpoint.directory: must be a directory inside"),
        ("checkpoint: {directory: '{run.dir}'}", "checkpoint.directory: must be a directory insi"),
        ("checkpoint: {directory: '{run.dir}s/a'}", "checkpoint.directory: must continue with /"),
        ("checkpoint: {directory: /}", "checkpoint.directory: must be a directory, not the root"),
        ("checkpoint: {directory: $SCRATCH/a}", "checkpoint.directory: must not hold $"),
        ("checkpoint: {directory: '{job.id}'}", "checkpoint.directory: {job.id} changes when the"),
        ("checkpoint: {directory: '{shm.dir}/a'}", "checkpoint.directory: {shm.dir} cannot be use"),
        ("checkpoint: {directory: '{runid}'}", "checkpoint.directory: {runid} names nothing; did"),
        (
            "checkpoint: {directory: '/s/{array.index}'}",
            "checkpoint.directory: {array.index} needs an array, such as `array: 0-9`",
        ),
        ("array: 0-3\ncheckpoint: {directory: /shared}", "checkpoint.directory: /shared would be"),
        (
            "checkpoint: true\nresources: {extra: [--signal=USR1@60]}",
            "resources.extra: --signal=USR1@60 would reach hpml's own processes, too: use `check",
        ),
        ("resources: {extra: [--no-requeue]}", "resources.extra: --no-requeue has its own field"),
        ("args: ['{checkpoint.dir}']", "args.0: {checkpoint.dir} needs `checkpoint: true`"),
        (
            "args: ['{checkpoint.dir}']\ncheckpoint: false",
            "args.0: {checkpoint.dir} needs `checkpoint: true`",
        ),
        (
            "checkpoint: true\nargs: ['{checkpoint_dir}']",
            "args.0: {checkpoint_dir} names nothing; did you mean {checkpoint.dir}?",
        ),
        ("checkpoint: true\nargs: ['{checkpoint.path}']", "args.0: {checkpoint.path} names nothi"),
        (
            "checkpoint: true\ncollect: [{source: '{checkpoint.dir}', target: /x}]",
            "collect.0.source: must be a path on the nodes",
        ),
        ("workdir: '{checkpoint.dir}'", "workdir: has no placeholders"),
    ],
)
def test_what_is_refused(load: Load, text: str, message: str) -> None:
    """The error begins with the field and names what would be right."""
    with pytest.raises(InputError) as caught:
        load(f"{JOB}{text}")
    assert any(line.startswith(message) for line in str(caught.value).splitlines()), caught.value


@pytest.mark.parametrize(
    "text",
    [
        "args: ['--out={checkpoint.dir}/a']",
        "environment: {variables: {OUT: '{checkpoint.dir}'}}",
        "resources: {extra: [--no-kill]}\nenvironment: {variables: {OUT: '{checkpoint.dir}/a'}}",
    ],
)
def test_where_its_directory_can_be_named(load: Load, text: str) -> None:
    """`{checkpoint.dir}` is known in arguments and variables."""
    assert isinstance(load(f"{JOB}checkpoint: true\n{text}").job, Job)
