"""Metrics of a node as a whole: /dev/shm, local disks, InfiniBand, NFS and Lustre as a client."""

from __future__ import annotations

from hpml_exporters.node import disks, infiniband, lustre, nfs, shm

__all__ = ["SPECS"]

SPECS = (*shm.SPECS, *disks.SPECS, *infiniband.SPECS, *nfs.SPECS, *lustre.SPECS)
"""All of them, in the order of the documentation."""
