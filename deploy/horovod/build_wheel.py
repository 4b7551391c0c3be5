#!/usr/bin/env python3
"""Build a wheel of Horovod for one Python environment, once, and keep it for the next time.

    deploy/horovod/build_wheel.py --python /path/to/venv/bin/python            # prints the wheel
    deploy/horovod/build_wheel.py --python /path/to/venv/bin/python --install  # and installs it

Takes Horovod's unmodified source package from the package index that pip is set up for. PyTorch has
to be installed in the environment. Variables `HOROVOD_*` of Horovod's own build go through, such as
`HOROVOD_GPU_OPERATIONS=NCCL`. Needs Python 3.9 or newer and nothing else; see docs/horovod.md.

Exit status: 0 done; 1 the build or the installation failed; 2 a wrong option; 69 a tool is missing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

VERSION = "0.28.1"
SOURCE_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
BUILD_TOOLS = ("setuptools>=68,<85", "wheel", "packaging")
SETTINGS = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITH_MPI": "1",
}
TOOLS = {"cmake": "cmake", "g++": "g++", "make": "make", "mpicxx": "libopenmpi-dev"}
MISSING = 69  # EX_UNAVAILABLE: `make` may continue without Horovod
MB_PER_COMPILER = 2000  # a file with all of PyTorch's headers took g++ 12 1,870 MB
LOG_LINES_SHOWN = 20

# PyTorch's headers need C++17, and Horovod's CMake files ask for C++14, last of all options.
COMPILER = """#!/bin/sh
for word do
  shift
  case $word in -std=c++1[14] | -std=gnu++1[14]) word=-std=c++17 ;; esac
  set -- "$@" "$word"
done
exec {compiler} "$@"
"""

# Where PyTorch looks for a CUDA toolkit, besides variables. Horovod without GPU operations needs
# none, but would want the whole of what PyTorch finds, which is often a part.
NO_CUDA = """
import os, shutil
which, exists = shutil.which, os.path.exists
shutil.which = lambda name, *more, **named: which(name, *more, **named) if name != "nvcc" else None
os.path.exists = lambda path: path != "/usr/local/cuda" and exists(path)
"""

# Describes the environment from its own Python, as a line of JSON.
ASK = """
import importlib.metadata as m, json, os, platform, sysconfig
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return ""
print(json.dumps({"torch": version("torch"), "pip": version("pip"),
    "abi": sysconfig.get_config_var("SOABI") or "", "platform": sysconfig.get_platform(),
    "libc": "".join(platform.libc_ver()),
    "headers": os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))}))
"""
# Which wheel was installed, by the record that pip keeps of a file it was given.
ASK_INSTALLED = """
import importlib.metadata as m
try: print(m.distribution("horovod").read_text("direct_url.json") or "")
except m.PackageNotFoundError: pass
"""
CHECK = """
import horovod.torch as hvd
assert hvd.gloo_built() and hvd.mpi_built(), "built without gloo or MPI"
"""


class BuildError(Exception):
    """The wheel cannot be built or installed; the message is for the user.

    Attributes:
        status: the exit status.
    """

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Target:
    """What a wheel is built for; two environments with the same answers can share it."""

    python: str
    torch: str
    pip: str
    abi: str
    platform: str
    libc: str
    mpi: str

    @property
    def key(self) -> str:
        """The wheel's directory in the cache, named after everything that the build depends on."""
        parts = [f"horovod-{VERSION}", f"torch-{self.torch}", self.abi, self.mpi, self.libc]
        chosen = sorted(
            f"{name}={value}"
            for name, value in os.environ.items()
            if name.startswith("HOROVOD_") and SETTINGS.get(name) != value
        )
        if chosen:
            parts.append(hashlib.sha256("\0".join(chosen).encode()).hexdigest()[:8])
        return "_".join("".join(part.split()) for part in [*parts, self.platform] if part)


def main() -> int:
    """Run the command line; return its exit status."""
    options = _options()
    try:
        target = look_at(options.python)
        wheel = find(options.cache / target.key)
        if wheel is None:
            wheel = build(target, options.cache)
        if options.install:
            install(target.python, wheel)
    except BuildError as error:
        print(f"build_wheel.py: error: {error}", file=sys.stderr)
        return error.status
    except OSError as error:
        print(f"build_wheel.py: error: {error}", file=sys.stderr)
        return 1
    print(wheel)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=f"Build a wheel of Horovod {VERSION} for a Python environment with PyTorch."
    )
    parser.add_argument(
        "--python", default=sys.executable, help="of the environment; default: the one that runs"
    )
    parser.add_argument("--install", action="store_true", help="install the wheel there as well")
    parser.add_argument(
        "--cache",
        type=Path,
        default=default_cache(),
        metavar="DIR",
        help="where wheels are kept (default: %(default)s)",
    )
    options = parser.parse_args()
    options.cache = options.cache.absolute()
    return options


def default_cache() -> Path:
    """Return the directory of wheels: one for all checkouts of a user."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "hpml" / "horovod"


def look_at(python: str) -> Target:
    """Ask an environment's Python what a wheel for it depends on.

    Raises:
        BuildError: it cannot be run, has no PyTorch or no pip, or a tool for the build is missing.
    """
    found = shutil.which(python)
    if found is None:
        raise BuildError(f"--python {python}: no such program", 2)
    known = json.loads(_output([found, "-c", ASK]))
    lacking = [name for name in ("torch", "pip") if not known[name]]
    if lacking:
        raise BuildError(f"{found} has no {' and no '.join(lacking)}: install it there first")
    missing = sorted(package for tool, package in TOOLS.items() if shutil.which(tool) is None)
    if not known.pop("headers"):
        missing.append("python3-dev")
    if missing:
        raise BuildError(
            f"tools are missing: apt-get install {' '.join(missing)}, or load the modules of your"
            " site that have them",
            MISSING,
        )
    # The same of Open MPI, MPICH and Intel's: what a program is linked with decides.
    first = _output(["mpicxx", "-show"]) + _output(["mpirun", "--version"]).split("\n", 1)[0]
    mpi = f"mpi-{hashlib.sha256(first.encode()).hexdigest()[:8]}"
    return Target(python=found, mpi=mpi, **known)


def find(directory: Path) -> Path | None:
    """Return the wheel in a directory of the cache; None if it has none."""
    return next(iter(sorted(directory.glob("*.whl"))), None)


def build(target: Target, cache: Path) -> Path:
    """Build the wheel in a temporary directory of the cache; rename it when it is complete.

    Raises:
        BuildError: a download or the compiler failed.
    """
    cache.mkdir(parents=True, exist_ok=True)
    place, log = cache / target.key, cache / f"{target.key}.log"
    print(
        f"build_wheel.py: building Horovod {VERSION} for PyTorch {target.torch}: takes 3 to 10"
        f" minutes, once; the compiler's output goes to {log}",
        file=sys.stderr,
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix=".build-", dir=cache) as name:
        work = Path(name)
        made = work / "made"
        with log.open("w", encoding="utf-8") as stream:
            for command, environment in _steps(target, work, made):
                done = subprocess.run(
                    command, env=environment, stdout=stream, stderr=stream, check=False
                )
                if done.returncode:
                    _failed(log)
        wheel = find(made)
        if wheel is None:
            _failed(log)
        try:
            made.rename(place)
        except OSError:  # somebody else was faster: theirs is as good
            if find(place) is None:
                raise
    return place / wheel.name


def _steps(target: Target, work: Path, made: Path) -> list[tuple[list[str], dict[str, str]]]:
    """Return the commands of a build with their environments; nothing is installed anywhere."""
    tools, tweaks, source = work / "tools", work / "tweaks", work / "source.txt"
    source.write_text(f"horovod=={VERSION} --hash=sha256:{SOURCE_SHA256}\n", encoding="utf-8")
    compiler = work / "c++17"
    real = os.environ.get("CXX") or "g++"
    compiler.write_text(COMPILER.format(compiler=real), encoding="utf-8")
    compiler.chmod(0o755)
    pip = [target.python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    environment = {
        **SETTINGS,
        **os.environ,
        "CXX": str(compiler),
        # Horovod's build is not isolated, for PyTorch has to be seen; its tools come this way.
        "PYTHONPATH": f"{tweaks}:{tools}",
        "MAKEFLAGS": f"-j{_compilers_at_once()}",  # not those of a `make` that called this
        "TMPDIR": str(work),
    }
    tweaks.mkdir()
    if not any(name.startswith(("HOROVOD_GPU", "HOROVOD_CUDA")) for name in environment):
        (tweaks / "sitecustomize.py").write_text(NO_CUDA, encoding="utf-8")
        for name in ("CUDA_HOME", "CUDA_PATH"):
            environment.pop(name, None)
    # No cache of pip's: it would hand out a wheel that was built for another PyTorch.
    options = "--no-cache-dir --no-build-isolation --no-deps --no-binary=horovod --require-hashes"
    wheel = [*pip, "wheel", "--verbose", *options.split(), "--wheel-dir", str(made)]
    return [
        ([*pip, "install", "--target", str(tools), *BUILD_TOOLS], dict(os.environ)),
        ([*wheel, "--requirement", str(source)], environment),
    ]


def _compilers_at_once() -> int:
    memory_mb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    return max(1, min(len(os.sched_getaffinity(0)), memory_mb // MB_PER_COMPILER))


def _failed(log: Path) -> NoReturn:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    wrong = [line.strip() for line in lines if "error" in line.lower()] or lines
    shown = "\n".join(f"  {line[:200]}" for line in wrong[-LOG_LINES_SHOWN:])
    raise BuildError(f"the build failed; the whole of it is in {log}\n{shown}")


def install(python: str, wheel: Path) -> None:
    """Install a wheel, unless it is there, with what it needs; and see that it can be imported.

    Raises:
        BuildError: pip failed, or the installed Horovod does not work.
    """
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
    if json.dumps(wheel.as_uri()) not in _output([python, "-c", ASK_INSTALLED]):
        # Forced: another wheel of the same version may be there, built for another PyTorch.
        _output([*pip, "--force-reinstall", "--no-deps", str(wheel)])
        _output([*pip, f"horovod=={VERSION}"])  # it is there; brings what it needs
    _output([python, "-c", CHECK])


def _output(command: list[str]) -> str:
    """Run a command and return what it printed.

    Raises:
        BuildError: it failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = "\n".join(f"  {line}" for line in done.stderr.splitlines()[-LOG_LINES_SHOWN:])
        raise BuildError(f"{' '.join(command[:4])} … failed\n{last}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
