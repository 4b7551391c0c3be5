"""Jobs, sites and scripts that the tests of this folder share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpml_orchestrator.script import Capabilities, render
from hpml_orchestrator.spec import Job, ResolvedSite, Site

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpml_orchestrator.topology import Topology

CANARY = "canary-of-hpml"
HERE = Capabilities(interpreter="/opt/hpml/bin/python3.11")
LAUNCHERS = ("torchrun", "srun", "mpirun", "horovodrun")
APPTAINER = {"engine": "apptainer", "image": "/i m.sif", "mounts": ["/data:/data:ro"]}
PYXIS = {"engine": "pyxis", "image": "nvcr.io#nvidia/pytorch:24.05-py3", "mounts": ["/d"]}


def job(**fields: Any) -> Job:
    """A job that is complete but for these fields."""
    program = {} if {"script", "module", "command"} & set(fields) else {"script": "/w/train.py"}
    return Job.model_validate({"name": "probe", "workdir": "/w d", **program, **fields})


def site(*kinds: str, partition: dict[str, Any] | None = None, **fields: Any) -> ResolvedSite:
    """A profile with one partition, `gpu`, of these node types."""
    names = kinds or ("m",)
    data = {
        "partitions": {"gpu": {"node_types": list(names), **(partition or {})}},
        "node_types": {name: fields.pop(name, {}) for name in names},
        **fields,
    }
    return ResolvedSite(Site.model_validate(data))


def whole_job(launcher: str = "srun", form: str = "auto", **resources: Any) -> Job:
    """A job that gets whole nodes of the partition `gpu`, with four GPUs, unless said else."""
    return job(
        launcher=launcher,
        binding={"form": form, **resources.pop("binding", {})},
        resources={"gpus": 4, "exclusive": True, "partition": "gpu", **resources},
    )


def static_job(
    launcher: str, machine: Topology, resources: Mapping[str, Any], **binding: str
) -> str:
    """The script of a job on two whole nodes of a machine, in which the launcher binds."""
    asked = whole_job(launcher, "static", nodes=2, binding=binding, **{"gpus": 0, **resources})
    return render(asked, HERE, site(), topologies={"m": machine})
