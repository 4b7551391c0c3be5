"""The JSON Schemas accept what the models accept, and refuse unknown fields as they do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hpml_orchestrator import assets
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.spec import Site, job_schema, site_schema
from hpml_orchestrator.spec.document import parse_yaml

if TYPE_CHECKING:
    from tests.unit.spec.conftest import Load

JOB, SITE = job_schema(), site_schema()
BASE: dict[str, Any] = {"name": "a", "script": "x.py"}
KIND = {"nodes": "gpu[01-16]", "count": 16}

JOBS_TAKEN: list[dict[str, Any]] = [
    BASE,
    {"name": "a", "module": "x.y"},
    {"name": "a", "command": ["x", 1, 2.5, "y"]},
    {**BASE, "args": ["a", 1, 0.5], "launcher": "srun", "workdir": "/w", "binding": "none"},
    {**BASE, "module": None, "command": None},
    *({**BASE, "resources": {"gpus": gpus}} for gpus in (0, 4, "a100:4", ["a100:2", "v100"], [2])),
    *({**BASE, "resources": {"time": time}} for time in (30, "30", "1-12:00:00")),
    *({**BASE, "resources": {"memory": memory}} for memory in (512, "64G", None)),
    {
        **BASE,
        "resources": {
            "nodes": 2,
            "ranks_per_node": 4,
            "cpus_per_rank": 8,
            "partition": "gpu,cpu",
            "account": "a",
            "qos": "q",
            "constraint": "a&b",
            "exclusive": True,
            "mail": {"to": "me@x.org", "on": ["begin", "time_limit_80"]},
            "extra": ["--reservation=course"],
        },
    },
    {
        **BASE,
        "environment": {
            "modules": ["cuda/12.4"],
            "conda": "ml",
            "python": "python3",
            "variables": {"A": "x", "B": 1, "C": 0.5},
            "inherit": "minimal",
            "container": {"engine": "apptainer", "image": "i.sif", "mounts": ["/a:/b:ro"]},
        },
    },
    {**BASE, "stage": [{"name": "d", "source": "s", "kind": "tar", "target": "/t", "size": "4G"}]},
    {**BASE, "stage": [{"name": "d", "source": "s", "size": None}]},
    {**BASE, "array": "0-9%2"},
    {**BASE, "array": 5},
    {**BASE, "array": [1, 3, 7]},
    {**BASE, "array": None},
    {**BASE, "launcher": "srun", "mpi": "pmix"},
    {**BASE, "launcher": "mpirun", "resources": {"nodes": 2}},
    {**BASE, "launcher": "horovodrun", "resources": {"gpus": 4, "ranks_per_gpu": 2}},
    {**BASE, "binding": "numa", "monitor": True},
    {**BASE, "monitor": {}},
    {**BASE, "monitor": {"enabled": True, "interval": 3}},
    {
        **BASE,
        "binding": {
            "policy": "socket",
            "verify": "strict",
            "loader_workers": 4,
            "hardware_threads": False,
            "form": "static",
        },
    },
    {**BASE, "after": "any:last", "environment": {"setup": "true\n"}},
    {**BASE, "after": [4711, "notok:prepare-20261122-112154-1xx8bx.3"]},
    {
        **BASE,
        "stage": [
            {"name": "d", "source": "s", "target": "auto", "kind": "squashfs", "keep": True},
            {"name": "e", "source": "s", "hash": False, "outside_links": True, "epochs": 3},
            {"name": "f", "source": "s", "kind": "pack", "distribution": "partition"},
        ],
    },
]

JOBS_REFUSED: list[dict[str, Any]] = [
    {"script": "x.py"},
    {**BASE, "nam": "b"},
    {**BASE, "dependency": "afterok:1"},
    {**BASE, "after": True},
    {**BASE, "after": ["any:", True]},
    {**BASE, "environment": {"setup": ["true"]}},
    {**BASE, "array": True},
    {**BASE, "array": []},
    {**BASE, "array": [-1]},
    {**BASE, "array": ["1"]},
    {**BASE, "array": -1},
    {**BASE, "mpi": "openmpi"},
    {**BASE, "resources": {"node": 2}},
    {**BASE, "resources": {"nodes": "2"}},
    {**BASE, "resources": {"nodes": 0}},
    {**BASE, "resources": {"gpus": True}},
    {**BASE, "resources": {"time": None}},
    {**BASE, "resources": None},
    {**BASE, "resources": {"mail": {"to": "a", "on": ["x"]}}},
    {**BASE, "environment": {"variables": {"A": True}}},
    {**BASE, "environment": {"container": {"engine": "docker", "image": "x"}}},
    {**BASE, "stage": [{"name": "d"}]},
    {**BASE, "stage": [{"name": "d", "source": "s", "sorce": "t"}]},
    {**BASE, "stage": [{"name": "d", "source": "s", "keep": "yes"}]},
    {**BASE, "stage": [{"name": "d", "source": "s", "distribution": "tree"}]},
    {**BASE, "stage": [{"name": "d", "source": "s", "epochs": 1.5}]},
    {**BASE, "args": [True]},
    {**BASE, "args": [None]},
    {**BASE, "command": []},
    {**BASE, "launcher": "magic"},
    {**BASE, "binding": "auto"},
    {**BASE, "binding": None},
    {**BASE, "monitor": 1},
    {**BASE, "binding": {"policy": "auto"}},
    {**BASE, "binding": {"loader_workers": True}},
    {**BASE, "binding": {"bind": "numa"}},
    {**BASE, "resources": {"ranks_per_gpu": 0}},
]


SITES_TAKEN: list[dict[str, Any]] = [
    {},
    {"schema_version": 1, "cluster": "elbe", "slurm": "22.05.8", "templates": "templates"},
    *(
        {"node_types": {"a": {**KIND, "memory": memory}}}
        for memory in (64000, "64G", "64000M", None)
    ),
    *({"node_types": {"a": {**KIND, "gpus": gpus}}} for gpus in (4, "a100:4", ["a100:2", 2], "0")),
    *({"node_types": {"a": {"local_disk": disk}}} for disk in (100, "1T")),
    *(
        {"partitions": {"p": {"max_time": time, "default_time": time}}}
        for time in (60, "1-00", "unlimited", None)
    ),
    {
        "node_types": {"a100x4": {**KIND, "scratch": "$LOCAL", "interfaces": ["ib0"]}},
        "partitions": {
            "gpu.a": {
                "default": True,
                "node_types": ["a100x4"],
                "max_nodes": 4,
                "max_memory_per_node": "500G",
                "exclusive": True,
                "accounts": ["a"],
                "qos": [],
            }
        },
        "paths": {"scratch": "/local", "ram": None},
        "limits": {"max_array_size": 1001, "max_script_bytes": 4_000_000},
        "interfaces": ["eno1"],
        "modules": ["cuda/12.4"],
    },
    *({"staging": {"shared_rate": rate}} for rate in (2000, "20G", None)),
    {
        "staging": {
            "opens_per_second": 2000,
            "opens_per_second_per_job": 16_000,
            "array_jitter": 0,
            "metadata_rate": 50_000,
            "link_rate": "10G",
            "disk_rate": "2G",
        }
    },
    *(
        {"directives": {"gpus-per-node": rule}}
        for rule in (
            {"forbid": "ask for CPUs"},
            {"omit": True},
            {"rename": "--gres=gpu:{item}"},
            {"default": "a100:1"},
            {},
        )
    ),
    {
        "defaults": {
            "launcher": "srun",
            "resources": {"gpus": 4, "time": 90, "memory": 500, "mail": {"to": "me"}},
            "environment": {"modules": ["cuda"], "variables": {"A": 1}},
        }
    },
]

SITES_REFUSED: list[dict[str, Any]] = [
    {"partition": {}},
    {"staging": {"opens_per_second": 0}},
    {"staging": {"opens_per_second_per_job": 1.5}},
    {"staging": {"array_jitter": "1:00"}},
    {"staging": {"shared_rate": True}},
    {"staging": {"opens": 5}},
    {"schema_version": 2},
    {"cluster": 1},
    {"node_types": {"a": {"memory": True}}},
    {"node_types": {"a": {"gpus": None}}},
    {"node_types": {"a": {"gpus": 1.5}}},
    {"node_types": {"a": {"cpus": -1}}},
    {"node_types": {"a": {"cpu": 1}}},
    {"partitions": {"p": {"max_time": 1.5}}},
    {"partitions": {"p": {"default": "yes"}}},
    {"partitions": {"p": {"accounts": "a"}}},
    {"partitions": []},
    {"limits": {"max_array_size": "1001"}},
    {"directives": {"output": {"omit": True}}},
    {"directives": {"--mem": {"omit": True}}},
    {"directives": {"mem": {"omitted": True}}},
    {"directives": {"mem": {"forbid": True}}},
    {"defaults": {"name": "a"}},
    {"defaults": {"stage": []}},
    {"defaults": {"resources": {"node": 1}}},
    {"defaults": {"array": "1-3"}},
    {"defaults": []},
    {"interfaces": "ib0"},
]


def valid(schema: dict[str, Any], data: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(data)


def site_taken(data: Any) -> bool:
    try:
        Site.model_validate(data)
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize("schema", [JOB, SITE], ids=["job", "site"])
def test_it_is_a_schema(schema: dict[str, Any]) -> None:
    """It is valid 2020-12, and every field in it has a description."""
    jsonschema.Draft202012Validator.check_schema(schema)
    for model in (schema, *schema["$defs"].values()):
        assert model["additionalProperties"] is False
        assert all("description" in field for field in model["properties"].values())


@pytest.mark.parametrize("data", JOBS_TAKEN, ids=range(len(JOBS_TAKEN)))
def test_a_job_that_both_accept(load: Load, data: dict[str, Any]) -> None:
    """The complete job that records keep is a job file again, and fits the schema, too."""
    job = load(json.dumps(data)).job
    dumped = job.model_dump(mode="json")
    assert valid(JOB, data)
    assert valid(JOB, dumped)
    assert load(json.dumps(dumped)).job == job


@pytest.mark.parametrize("data", JOBS_REFUSED, ids=range(len(JOBS_REFUSED)))
def test_a_job_that_both_refuse(load: Load, data: dict[str, Any]) -> None:
    """An unknown field or a wrong type."""
    with pytest.raises(InputError):
        load(json.dumps(data))
    assert not valid(JOB, data)


@pytest.mark.parametrize("data", SITES_TAKEN, ids=range(len(SITES_TAKEN)))
def test_a_profile_that_both_accept(data: dict[str, Any]) -> None:
    """A complete profile, with every default filled in, is one again."""
    dumped = Site.model_validate(data).model_dump(mode="json")
    assert valid(SITE, data)
    assert valid(SITE, dumped)
    assert site_taken(dumped)


@pytest.mark.parametrize("data", SITES_REFUSED, ids=range(len(SITES_REFUSED)))
def test_a_profile_that_both_refuse(data: dict[str, Any]) -> None:
    """An unknown field or a wrong type."""
    assert not site_taken(data)
    assert not valid(SITE, data)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5000)
    | st.sampled_from(["64G", "1-00", "a100:4", "unlimited", "a", "", "/x", "$A/b", "--x={item}"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                [*SITE["properties"], "a", "mem"]
                + [name for model in SITE["$defs"].values() for name in model["properties"]]
            ),
            inner,
            max_size=2,
        )
    ),
    max_leaves=6,
)
TABLES = st.fixed_dictionaries(
    {},
    optional={
        "node_types": st.dictionaries(st.just("a"), VALUES, max_size=1),
        "partitions": st.dictionaries(st.just("p"), VALUES, max_size=1),
        "directives": st.dictionaries(st.sampled_from(["mem", "gres"]), VALUES, max_size=1),
        "defaults": VALUES,
        "paths": VALUES,
        "limits": VALUES,
    },
)


@given(TABLES | st.dictionaries(st.sampled_from([*SITE["properties"]]), VALUES, max_size=3))
def test_the_schema_never_refuses_what_the_model_takes(data: dict[str, Any]) -> None:
    """An editor marks nothing as wrong that hpml would read."""
    if site_taken(data):
        assert valid(SITE, data), data


def test_the_example_fits() -> None:
    """The shipped job file fits the schema."""
    text = (assets.path("training_jobs") / "digits.yaml").read_text("utf-8")
    assert valid(JOB, parse_yaml(text, "digits.yaml"))
