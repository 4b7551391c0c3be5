"""The Debian packages the cluster is made of: which are missing, and their installation."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from _errors import DevclusterError

if TYPE_CHECKING:
    from collections.abc import Iterator

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# program that is used -> Debian package that brings it
_BASE = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "srun": "slurm-wlm",
    "scontrol": "slurm-wlm",
    "munged": "munge",
    "munge": "munge",
    "nsenter": "util-linux",
}
_MACHINE = {"gcc": "gcc"}
_ACCOUNTING = {
    "slurmdbd": "slurmdbd",
    "sacctmgr": "slurm-wlm",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
    "mariadb": "mariadb-server",
}
# what the compiler cannot do without, and does not bring -> Debian package
_HEADERS = {"/usr/include/stdio.h": "libc6-dev"}
# library that a part of Slurm loads only when it is asked for -> the package that brings it
# (srun --mpi=pmix: Debian's plugin wants the name that only the development package has).
_OPTIONAL = {"libpmix.so": "libpmix-dev"}
_LIBRARY_PATHS = ("/usr/lib/*/{}", "/usr/lib/*/pmix2/lib/{}", "/usr/lib64/{}")
_POLICY = Path("/usr/sbin/policy-rc.d")


def missing_packages(*, accounting: bool = True, machine: bool = True) -> list[str]:
    """Names the packages whose programs are not on this machine."""
    wanted = _BASE | (_ACCOUNTING if accounting else {}) | (_MACHINE if machine else {})
    lacking = {
        package
        for program, package in wanted.items()
        if shutil.which(program, path=SEARCH_PATH) is None
    }
    if machine:
        lacking |= {package for path, package in _HEADERS.items() if not Path(path).exists()}
    return sorted(lacking)


def missing_libraries() -> list[str]:
    """Names the packages of libraries that a cluster boots without, and some tests want."""
    return sorted(
        package
        for library, package in _OPTIONAL.items()
        if not any(glob.glob(path.format(library)) for path in _LIBRARY_PATHS)
    )


def install() -> list[str]:
    """Installs what is missing with apt-get; returns the packages it had to install."""
    packages = missing_packages() + missing_libraries()
    if not packages:
        return []
    if os.geteuid() != 0:
        raise DevclusterError("installing packages needs root")
    if shutil.which("apt-get") is None:
        raise DevclusterError("no apt-get here: 'install' knows Debian and Ubuntu only")
    with _services_stay_off():
        result = _apt_get("install", "-y", "--no-install-recommends", *packages)
        if result.returncode != 0:
            # The usual cause: missing or outdated package lists.
            _apt_get("update")
            result = _apt_get("install", "-y", "--no-install-recommends", *packages)
    still = missing_packages()
    if result.returncode != 0 or still:
        reasons = [line for line in result.stderr.splitlines() if line.startswith("E:")]
        detail = "\n".join(_without_hosts(line) for line in reasons[-5:])
        raise DevclusterError(f"apt-get could not install {' '.join(still or packages)}\n{detail}")
    return packages


def _apt_get(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    return subprocess.run(
        ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=120", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def _without_hosts(line: str) -> str:
    """Takes addresses of package servers out of a message: they are nobody's business."""
    line = re.sub(r"\S+://\S+", "<package server>", line)
    return re.sub(r"\b(?:[\w-]+\.)+[a-z]{2,}(?::\d+)?\b|\b\d+(?:\.\d+){3}\b", "<host>", line)


@contextlib.contextmanager
def _services_stay_off() -> Iterator[None]:
    """Keeps package scripts from starting services; the cluster starts its own daemons."""
    if _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n", encoding="utf-8")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink(missing_ok=True)
