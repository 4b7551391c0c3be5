"""The JSON Schema of a site profile takes what the model takes, and refuses as it does."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hpml_orchestrator.spec import site_schema
from hpml_orchestrator.spec.site import Site

SCHEMA = site_schema()
KIND = {"nodes": "gpu[01-16]", "count": 16}

TAKEN: list[dict[str, Any]] = [
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

REFUSED: list[dict[str, Any]] = [
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


def valid(data: Any) -> bool:
    return jsonschema.Draft202012Validator(SCHEMA).is_valid(data)


def taken(data: Any) -> bool:
    try:
        Site.model_validate(data)
    except ValidationError:
        return False
    return True


def test_it_is_a_schema() -> None:
    """It is valid 2020-12 itself, and every field in it says what it is for."""
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for model in (SCHEMA, *SCHEMA["$defs"].values()):
        assert model["additionalProperties"] is False
        assert all("description" in field for field in model["properties"].values())


@pytest.mark.parametrize("data", TAKEN, ids=range(len(TAKEN)))
def test_both_take_it(data: dict[str, Any]) -> None:
    """What the model takes, the schema takes."""
    assert taken(data)
    assert valid(data)


@pytest.mark.parametrize("data", REFUSED, ids=range(len(REFUSED)))
def test_both_refuse_it(data: dict[str, Any]) -> None:
    """What is unknown or of a wrong type, both refuse."""
    assert not taken(data)
    assert not valid(data)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5000)
    | st.sampled_from(["64G", "1-00", "a100:4", "unlimited", "a", "", "/x", "$A/b", "--x={item}"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                [*SCHEMA["properties"], "a", "mem"]
                + [name for one in SCHEMA["$defs"].values() for name in one["properties"]]
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


@given(TABLES | st.dictionaries(st.sampled_from([*SCHEMA["properties"]]), VALUES, max_size=3))
def test_the_schema_never_refuses_what_the_model_takes(data: dict[str, Any]) -> None:
    """An editor marks nothing as wrong that hpml would read."""
    if taken(data):
        assert valid(data), data


def test_what_the_model_writes_fits() -> None:
    """A complete profile, with every default filled in, is one again."""
    for data in TAKEN:
        dumped = Site.model_validate(data).model_dump(mode="json")
        assert valid(dumped)
        assert taken(dumped)
