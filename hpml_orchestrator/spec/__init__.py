"""What the user wants: the job file as a typed model, how it is loaded, and its JSON Schema."""

from hpml_orchestrator.spec.array import ArraySpec
from hpml_orchestrator.spec.job import Container, Environment, Job, Mail, Resources
from hpml_orchestrator.spec.load import ResolvedJob, load_job, parse_setting
from hpml_orchestrator.spec.schema import job_schema, site_schema
from hpml_orchestrator.spec.site_find import find_profiles
from hpml_orchestrator.spec.stage import Stage

__all__ = [
    "ArraySpec",
    "Container",
    "Environment",
    "Job",
    "Mail",
    "ResolvedJob",
    "Resources",
    "Stage",
    "find_profiles",
    "job_schema",
    "load_job",
    "parse_setting",
    "site_schema",
]
