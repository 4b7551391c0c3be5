"""A real cluster for the development cluster's own tests."""

from tests.cluster.conftest import bare_cluster, slurm_cluster, tmp_path, tmp_path_factory

__all__ = ["bare_cluster", "slurm_cluster", "tmp_path", "tmp_path_factory"]
