"""The record of a run's software has the versions of the GPU driver, from a simulated one."""

from __future__ import annotations

from deploy.gpusim.gpusim import State, a100
from tests.monitoring.gpusim_support import Gpusim

CODE = "from hpml_orchestrator.node.software import nvidia_versions; print(nvidia_versions())"


def test_the_versions_of_the_driver(gpusim: Gpusim) -> None:
    """NVML gives the driver's version, and the newest CUDA that it supports."""
    state = gpusim.write(State((a100(0),)))
    done = gpusim.run("-c", CODE)
    cuda = f"{state.cuda // 1000}.{state.cuda % 1000 // 10}"
    assert done.stdout == f"{ {'nvidia_driver': state.driver, 'cuda': cuda} }\n", done.stderr
