#!/usr/bin/env python3
"""Install one release of PyTorch, without CUDA where there is no NVIDIA driver.

    python deploy/torch/install.py torch==2.13.0 --cpu-index URL

Installs into the Python that runs it, and prints what pip downloads. On x86, PyPI's build of
PyTorch comes with CUDA. Without an NVIDIA driver this takes the CPU build instead: from where pip
is set up to look (PIP_FIND_LINKS, a mirror), else from the index given, if it answers. Where there
is none it takes PyPI's.

Exit status: that of pip.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import os
import re
import subprocess
import sys
from urllib.parse import unquote

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
RELEASE = re.compile(r"torch==([\d.]+)")
LARGE_DOWNLOAD = re.compile(r"Downloading (?:\S+/)?(\S+) \(([\d.]+ [MG]B)\)")
ANSWER_SECONDS = 5
PROBE_SECONDS = 20  # an index may have many addresses
CUDA_SIZE = "about 3 GB to download and 5 GB on disk"  # 2.8 and 4.7 for PyTorch 2.13.0


def main() -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(
        description="Install PyTorch, without CUDA where there is no NVIDIA driver."
    )
    parser.add_argument("requirement", help="such as torch==2.13.0")
    parser.add_argument("--cpu-index", default="", metavar="URL", help="an index with CPU builds")
    options = parser.parse_args()
    release = RELEASE.fullmatch(options.requirement)
    if not release or installed_version() == release[1] or has_nvidia_driver():
        return pip_install(options.requirement)
    cpu_version = f"{release[1]}+cpu"
    cpu_build = f"torch=={cpu_version}"
    if is_offered(cpu_version):
        say(f"no NVIDIA driver here: installing {cpu_build} from where pip is set up to look")
        return pip_install(cpu_build)
    if options.cpu_index and is_offered(cpu_version, options.cpu_index):
        say(f"no NVIDIA driver here: installing {cpu_build} from {options.cpu_index}")
        # Only PyTorch comes from that index; what it needs comes from where pip is set up to look.
        status = pip_install("--no-deps", "--index-url", options.cpu_index, cpu_build)
        return status or pip_install(options.requirement)
    asked = f", nor does {options.cpu_index} offer it" if options.cpu_index else ""
    say(f"no NVIDIA driver here, but pip finds no {cpu_build}{asked}")
    say(f"installing {options.requirement}, which works without a GPU; with CUDA it is {CUDA_SIZE}")
    return pip_install(options.requirement)


def has_nvidia_driver() -> bool:
    """Return whether programs can talk to an NVIDIA driver; containers and WSL have its library."""
    if os.path.exists("/proc/driver/nvidia"):
        return True
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def installed_version() -> str:
    """Return the installed release of PyTorch, whatever its build; empty without one."""
    try:
        return importlib.metadata.version("torch").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return ""


def is_offered(version: str, index: str = "") -> bool:
    """Return whether pip finds a version of PyTorch for this Python: where it is set up, or there.

    Args:
        version: with its build, such as 2.13.0+cpu.
        index: URL; asked once, for some seconds at most.
    """
    where = ["--index-url", index, "--retries", "0", "--timeout", str(ANSWER_SECONDS)]
    try:
        answer = subprocess.run(
            [*PIP, "index", "versions", *(where if index else []), "torch"],
            capture_output=True,
            text=True,
            check=False,
            timeout=PROBE_SECONDS if index else None,
        )
    except subprocess.TimeoutExpired:
        return False
    return version in re.split(r"[\s,]+", answer.stdout)


def pip_install(*arguments: str) -> int:
    """Install with pip and print its large downloads as they begin; return pip's exit status."""
    command = [*PIP, "install", "--progress-bar", "off", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as pip:
        for line in pip.stdout or ():
            download = LARGE_DOWNLOAD.search(line)
            if download:
                say(f"downloading {unquote(download[1])} ({download[2]})")
    return pip.returncode


def say(message: str) -> None:
    """Print a line at once."""
    print(f"install.py: {message}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
