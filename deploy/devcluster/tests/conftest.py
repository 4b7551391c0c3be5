"""A real cluster for the development cluster's own tests."""

from tests.cluster.conftest import bare_cluster, slurm_cluster

__all__ = ["bare_cluster", "slurm_cluster"]
