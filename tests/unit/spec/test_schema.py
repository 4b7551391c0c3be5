"""The JSON Schema takes what the loader takes, and refuses unknown fields as it does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from hpml_orchestrator import assets, spec
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.spec import ResolvedJob, job_schema
from hpml_orchestrator.spec.document import parse_yaml

Load = Callable[..., ResolvedJob]
BASE: dict[str, Any] = {"name": "a", "script": "x.py"}

TAKEN: list[dict[str, Any]] = [
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
    *({**BASE, "binding": word} for word in ("gpu-local", "socket", "numa", "spread")),
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

REFUSED: list[dict[str, Any]] = [
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
    {**BASE, "binding": {"policy": "auto"}},
    {**BASE, "binding": {"loader_workers": True}},
    {**BASE, "binding": {"bind": "numa"}},
    {**BASE, "resources": {"ranks_per_gpu": 0}},
]


def valid(data: Any) -> bool:
    return jsonschema.Draft202012Validator(job_schema()).is_valid(data)


def test_it_is_a_schema() -> None:
    """It is valid 2020-12 itself, and every field in it says what it is for."""
    schema = job_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for model in (schema, *schema["$defs"].values()):
        assert model["additionalProperties"] is False
        assert all("description" in field for field in model["properties"].values())


@pytest.mark.parametrize("data", TAKEN, ids=range(len(TAKEN)))
def test_both_take_it(load: Load, data: dict[str, Any]) -> None:
    """What the loader takes, the schema takes."""
    load(json.dumps(data))
    assert valid(data)


@pytest.mark.parametrize("data", REFUSED, ids=range(len(REFUSED)))
def test_both_refuse_it(load: Load, data: dict[str, Any]) -> None:
    """What is unknown or of a wrong type, both refuse."""
    with pytest.raises(InputError):
        load(json.dumps(data))
    assert not valid(data)


def test_the_resolved_job_is_a_job_file_again(load: Load, tmp_path: Path) -> None:
    """The complete job that records keep loads to itself and fits the schema."""
    for data in TAKEN:
        job = load(json.dumps(data)).job
        dumped = job.model_dump(mode="json")
        assert valid(dumped)
        assert load(json.dumps(dumped)).job == job


def test_the_example_fits() -> None:
    """The shipped job file fits the schema."""
    text = (assets.path("training_jobs") / "digits.yaml").read_text("utf-8")
    assert valid(parse_yaml(text, "digits.yaml"))


def test_all_names_are_there() -> None:
    """`__all__` of the room names what is there."""
    assert all(hasattr(spec, name) for name in spec.__all__)
