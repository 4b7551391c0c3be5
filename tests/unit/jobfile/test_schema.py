"""The JSON Schemas accept what the models accept, and refuse wrong types and unknown fields."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from pydantic import ValidationError

from hpml_orchestrator import assets
from hpml_orchestrator.errors import InputError
from hpml_orchestrator.jobfile.load import parse_yaml
from hpml_orchestrator.jobfile.schema import job_schema
from hpml_orchestrator.site.model import Site, site_schema

if TYPE_CHECKING:
    from tests.unit.jobfile.conftest import Load

JOB, SITE = job_schema(), site_schema()
BASE = "name: a\nscript: x.py\n"

JOBS_TAKEN = [
    BASE,
    "name: a\nmodule: x.y",
    "name: a\ncommand: [x, 1, 2.5, y]",
    BASE + "args: [a, 1, 0.5]\nlauncher: srun\nworkdir: /w\nbinding: none",
    BASE + "module: ~\ncommand: ~\narray: ~",
    *(BASE + f"resources: {{gpus: {gpus}}}" for gpus in ("0", "a100:4", "['a100:2', v100]", "[2]")),
    *(BASE + f"resources: {{time: {time}}}" for time in ("30", "'30'", "1-12:00:00")),
    *(BASE + f"resources: {{memory: {memory}}}" for memory in ("512", "64G", "~")),
    BASE + "resources: {nodes: 2, ranks_per_node: 4, cpus_per_rank: 8, exclusive: true, qos: q,"
    " partition: 'gpu,cpu', account: a, constraint: a&b, extra: [--reservation=course],"
    " mail: {to: me@x.org, on: [begin, time_limit_80]}}",
    BASE + "environment: {modules: [cuda/12.4], conda: ml, python: python3, inherit: minimal,"
    " variables: {A: x, B: 1, C: 0.5},"
    " container: {engine: apptainer, image: i.sif, mounts: ['/a:/b:ro']}}",
    BASE + "stage: [{name: d, source: s, kind: tar, target: /t, size: 4G}]",
    BASE + "stage: [{name: d, source: s, size: ~, target: auto, kind: tar, keep: true},"
    " {name: e, source: s, hash: false, outside_links: true},"
    " {name: f, source: s, kind: pack, distribution: chain}]",
    *(BASE + f"array: {array}" for array in ("0-9%2", "5", "[1, 3, 7]")),
    BASE + "launcher: srun\nmpi: pmix",
    BASE + "launcher: mpirun\nresources: {nodes: 2}",
    BASE + "launcher: horovodrun\nresources: {gpus: 4, ranks_per_gpu: 2}",
    BASE + "binding: numa\nmonitor: true",
    BASE + "binding: {policy: socket, verify: strict, loader_workers: 4, hardware_threads: false}"
    "\nmonitor: {enabled: true, interval: 3}",
    BASE + 'after: any:last\nmonitor: {}\nenvironment: {setup: "true\\n"}',
    BASE + "after: [4711, 'notok:prepare-20261122-112154-1xx8bx.3']",
]

JOBS_REFUSED = [
    "script: x.py",
    *(
        BASE + line
        for line in (
            "nam: b",
            "after: true",
            "after: ['any:', true]",
            "environment: {setup: ['true']}",
            "environment: {variables: {A: true}}",
            "environment: {container: {engine: docker, image: x}}",
            *(f"array: {array}" for array in ("true", "[]", "[-1]", "['1']", "-1")),
            "mpi: openmpi",
            *(
                f"resources: {{{field}}}"
                for field in (
                    "node: 2",
                    "nodes: '2'",
                    "nodes: 0",
                    "gpus: true",
                    "time: ~",
                    "ranks_per_gpu: 0",
                    "mail: {to: a, on: [x]}",
                )
            ),
            "resources: ~",
            "stage: [{name: d}]",
            *(
                f"stage: [{{name: d, source: s, {field}}}]"
                for field in ("sorce: t", "keep: 'yes'", "distribution: tree", "epochs: 1")
            ),
            "args: [true]",
            "args: [~]",
            "command: []",
            "launcher: magic",
            *(
                f"binding: {binding}"
                for binding in ("auto", "~", "{policy: auto}", "{loader_workers: true}", "{b: 1}")
            ),
            "monitor: 1",
        )
    ),
]

SITES_TAKEN = [
    "{}",
    "{schema_version: 1, cluster: elbe, slurm: 22.05.8, templates: templates}",
    *(f"node_types: {{a: {{memory: {memory}}}}}" for memory in ("64000", "64G", "~")),
    *(f"node_types: {{a: {{gpus: {gpus}}}}}" for gpus in ("4", "a100:4", "['a100:2', 2]", "'0'")),
    *(
        f"partitions: {{p: {{max_time: {time}, default_time: {time}}}}}"
        for time in ("60", "1-00", "unlimited", "~")
    ),
    (
        "{node_types: {a100x4: {nodes: 'gpu[01-16]', count: 16, local_disk: 1T, scratch: $LOCAL,"
        " interfaces: [ib0]}}, partitions: {gpu.a: {default: true, node_types: [a100x4],"
        " max_nodes: 4, max_memory_per_node: 500G, exclusive: true, accounts: [a], qos: []}},"
        " paths: {scratch: /local, ram: ~}, limits: {max_array_size: 1001, max_script_bytes: 400},"
        " interfaces: [eno1], modules: [cuda/12.4]}"
    ),
    (
        "staging: {opens_per_second: 2000, opens_per_second_per_job: 16000, array_jitter: 0,"
        " metadata_rate: 50000, shared_rate: 2000, link_rate: 10G, disk_rate: 2G}"
    ),
    *(
        f"directives: {{gpus-per-node: {rule}}}"
        for rule in (
            "{forbid: ask for CPUs}",
            "{omit: true}",
            "{rename: '--gres=gpu:{item}'}",
            "{default: 'a100:1'}",
            "{}",
        )
    ),
    (
        "defaults: {launcher: srun, resources: {gpus: 4, time: 90, memory: 500, mail: {to: me}},"
        " environment: {modules: [cuda], variables: {A: 1}}}"
    ),
]

SITES_REFUSED = [
    "partition: {}",
    "staging: {opens_per_second: 0}",
    "staging: {array_jitter: '1:00'}",
    "staging: {shared_rate: true}",
    "schema_version: 2",
    "cluster: 1",
    *(
        f"node_types: {{a: {{{field}}}}}"
        for field in ("memory: true", "gpus: ~", "gpus: 1.5", "cpus: -1", "cpu: 1")
    ),
    *(
        f"partitions: {{p: {{{field}}}}}"
        for field in ("max_time: 1.5", "default: 'yes'", "accounts: a")
    ),
    "partitions: []",
    "limits: {max_array_size: '1001'}",
    *(
        f"directives: {{{rule}}}"
        for rule in ("output: {omit: true}", "--mem: {omit: true}", "mem: {forbid: true}")
    ),
    *(f"defaults: {{{field}}}" for field in ("name: a", "stage: []", "array: 1-3")),
    "defaults: []",
]


def valid(schema: dict[str, Any], data: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(data)


@pytest.mark.parametrize("schema", [JOB, SITE], ids=["job", "site"])
def test_it_is_a_schema(schema: dict[str, Any]) -> None:
    """It is valid 2020-12, and every field in it has a description."""
    jsonschema.Draft202012Validator.check_schema(schema)
    for model in (schema, *schema["$defs"].values()):
        assert model["additionalProperties"] is False
        assert all("description" in field for field in model["properties"].values())


@pytest.mark.parametrize("text", JOBS_TAKEN)
def test_a_job_that_both_accept(load: Load, text: str) -> None:
    """The complete job that records keep is a job file again, and fits the schema, too."""
    job = load(text).job
    dumped = job.to_json()
    assert valid(JOB, parse_yaml(text, "job"))
    assert valid(JOB, dumped)
    assert load(json.dumps(dumped)).job == job


@pytest.mark.parametrize("text", JOBS_REFUSED)
def test_a_job_that_both_refuse(load: Load, text: str) -> None:
    """An unknown field or a wrong type."""
    with pytest.raises(InputError):
        load(text)
    assert not valid(JOB, parse_yaml(text, "job"))


@pytest.mark.parametrize("text", SITES_TAKEN)
def test_a_profile_that_both_accept(text: str) -> None:
    """A complete profile, with every default filled in, is one again."""
    data = parse_yaml(text, "site")
    dumped = Site.model_validate(data).model_dump(mode="json")
    assert valid(SITE, data)
    assert valid(SITE, dumped)
    Site.model_validate(dumped)


@pytest.mark.parametrize("text", SITES_REFUSED)
def test_a_profile_that_both_refuse(text: str) -> None:
    """An unknown field or a wrong type."""
    data = parse_yaml(text, "site")
    with pytest.raises(ValidationError):
        Site.model_validate(data)
    assert not valid(SITE, data)


def test_the_example_fits() -> None:
    """The shipped job file fits the schema."""
    text = (assets.path("training_jobs") / "digits.yaml").read_text("utf-8")
    assert valid(JOB, parse_yaml(text, "digits.yaml"))
