"""Which build of PyTorch `make` installs, with indexes on loopback that serve fake wheels."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import socket
import subprocess
import sysconfig
import threading
import venv
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "torch" / "install.py"
WANTED = "torch==2.13.0"
DRIVER = "libnvidia-ml.so.1"


def fake_wheel(directory: Path, name: str, version: str, needs: str = "") -> None:
    """Make a wheel of the given name with 1.5 MB of nothing in it."""
    info = f"{name}-{version}.dist-info"
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: A FAKE\n"
    directory.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", about + (f"Requires-Dist: {needs}\n" if needs else ""))
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{name}/nothing", bytes(1_500_000))
        names = [*wheel.namelist(), f"{info}/RECORD"]
        wheel.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in names))


class Machine:
    """A virtual environment with pip, which takes a directory on loopback for PyPI.

    Attributes:
        cpu_index: where the CPU build is, and a package of somebody else's that PyPI has too.
        requested: the paths that were asked of the indexes.
        environment: of the installation.
    """

    def __init__(self, path: Path, url: str, requested: list[str]) -> None:
        self._path = path
        self.cpu_index, self.requested = f"{url}/cpu", requested
        fake_wheel(path / "served/pypi/torch", "torch", "2.13.0", needs="fakeneed")
        fake_wheel(path / "served/pypi/fakeneed", "fakeneed", "1")
        fake_wheel(path / "served/cpu/torch", "torch", "2.13.0+cpu", needs="fakeneed")
        fake_wheel(path / "served/cpu/fakeneed", "fakeneed", "2")
        venv.create(path / "venv", with_pip=False)
        pip = importlib.util.find_spec("pip")
        assert pip is not None
        assert pip.origin is not None
        (self._packages,) = path.glob("venv/lib/python*/site-packages")
        (self._packages / "pip").symlink_to(Path(pip.origin).parent)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PIP_")},
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"{url}/pypi",
            "PIP_NO_CACHE_DIR": "1",
        }

    def install(self, index: str, requirement: str = WANTED, status: int = 0) -> str:
        done = subprocess.run(
            [self._path / "venv/bin/python", SCRIPT, requirement, "--cpu-index", index],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == status, done.stderr
        return done.stdout

    def installed(self) -> dict[str, str]:
        names = [one.name.removesuffix(".dist-info") for one in self._packages.glob("*.dist-info")]
        return {name: version for name, _, version in (one.partition("-") for one in names)}


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    requested: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            requested.append(self.path)

    serve = functools.partial(Handler, directory=str(tmp_path / "served"))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Machine(tmp_path, f"http://127.0.0.1:{server.server_port}", requested)
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def no_driver() -> None:
    if Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi"):
        pytest.skip("this machine has an NVIDIA driver")


@pytest.mark.usefixtures("no_driver")
def test_the_cpu_build_comes_from_the_index_given(machine: Machine) -> None:
    """PyTorch alone, and it is said; what it needs comes from where pip is set up to look."""
    told = machine.install(machine.cpu_index)
    assert machine.installed() == {"torch": "2.13.0+cpu", "fakeneed": "1"}
    assert f"installing torch==2.13.0+cpu from {machine.cpu_index}" in told
    assert "downloading torch-2.13.0+cpu-py3-none-any.whl (1.5 MB)" in told


@pytest.mark.usefixtures("no_driver")
def test_a_cpu_build_that_pip_finds_itself_is_taken(machine: Machine, tmp_path: Path) -> None:
    """As on a machine with a local wheel: the index is not even asked."""
    machine.environment["PIP_FIND_LINKS"] = str(tmp_path / "served/cpu/torch")
    told = machine.install(machine.cpu_index)
    assert machine.installed() == {"torch": "2.13.0+cpu", "fakeneed": "1"}
    assert "from where pip is set up to look" in told
    assert not [path for path in machine.requested if path.startswith("/cpu")]


@pytest.mark.usefixtures("no_driver")
@pytest.mark.parametrize("asked", [True, False])
def test_without_a_cpu_build_the_large_one_is_announced(machine: Machine, asked: bool) -> None:
    """An index that does not answer is no error; how much comes is said before it comes."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        index = f"http://127.0.0.1:{silent.getsockname()[1]}/cpu" if asked else ""
        told = machine.install(index)
    assert machine.installed() == {"torch": "2.13.0", "fakeneed": "1"}
    assert ("nor does http://127.0.0.1" in told) is asked
    assert told.index("3 GB to download") < told.index("downloading torch-2.13.0-py3")


def test_with_a_driver_pip_decides_and_what_is_there_stays(
    machine: Machine, tmp_path: Path
) -> None:
    """The library that every program finds the driver by; another of Python's plays it."""
    extension = importlib.util.find_spec("_json")
    assert extension is not None
    assert extension.origin is not None
    if not extension.origin.endswith(sysconfig.get_config_var("EXT_SUFFIX")):
        pytest.skip("this Python has no library to play the driver's")
    (tmp_path / DRIVER).symlink_to(extension.origin)
    machine.environment["LD_LIBRARY_PATH"] = str(tmp_path)
    machine.install(machine.cpu_index)
    assert machine.installed() == {"torch": "2.13.0", "fakeneed": "1"}
    assert not [path for path in machine.requested if path.startswith("/cpu")]
    machine.requested.clear()
    del machine.environment["LD_LIBRARY_PATH"]
    assert machine.install(machine.cpu_index) == ""
    assert machine.requested == []


def test_any_other_requirement_goes_to_pip(machine: Machine) -> None:
    """Only `torch==RELEASE` leaves the build open; the exit status is that of pip."""
    machine.install(machine.cpu_index, "torch>=9", status=1)
    assert not [path for path in machine.requested if path.startswith("/cpu")]
