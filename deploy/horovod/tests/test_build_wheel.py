"""The builder of Horovod's wheel: what needs no five minutes of compiling."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "horovod" / "build_wheel.py"


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name in [name for name in os.environ if name.startswith("HOROVOD_")]:
        monkeypatch.delenv(name)
    spec = importlib.util.spec_from_file_location("build_wheel", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def call(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_wheel_that_is_there_is_not_built_again(builder: ModuleType, tmp_path: Path) -> None:
    """Called again for the same environment, the script names the wheel that it kept."""
    pytest.importorskip("torch", reason="a wheel is for an environment with PyTorch")
    try:
        target = builder.look_at(sys.executable)
    except builder.BuildError as error:
        pytest.skip(f"NOT TESTED: {error}")
    wheel = tmp_path / target.key / "horovod-0.28.1-kept.whl"
    wheel.parent.mkdir()
    wheel.touch()
    done = call("--python", sys.executable, "--cache", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{wheel}\n"


def test_another_pytorch_python_mpi_or_setting_is_another_wheel(
    builder: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a compiled Horovod depends on is in the name of its directory; paths are not."""
    target = builder.Target(
        "/a/python", "2.13.0", "23", "cpython-311", "linux-x86_64", "glibc", "m"
    )
    changes = {"torch": "2.14.0", "abi": "cpython-312", "mpi": "n", "platform": "x", "libc": "y"}
    keys = {replace(target, **{name: value}).key for name, value in changes.items()}
    assert len(keys | {target.key}) == 1 + len(changes)
    assert replace(target, python="/b/python", pip="24").key == target.key
    plain = target.key
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "NCCL")
    assert target.key != plain


def test_missing_tools_are_named_with_a_status_of_their_own(tmp_path: Path) -> None:
    """`make` then skips the tests; no build was started."""
    pytest.importorskip("torch", reason="a wheel is for an environment with PyTorch")
    done = call("--python", sys.executable, "--cache", tmp_path / "cache", PATH=str(tmp_path))
    assert done.returncode == 69
    assert "apt-get install cmake g++ libopenmpi-dev make" in done.stderr
    assert not (tmp_path / "cache").exists()


def test_missing_headers_are_named_too(tmp_path: Path) -> None:
    """A Python without its headers, as a fresh Debian has it: a script here plays it."""
    asked = {"torch": "2.13.0", "pip": "23", "abi": "a", "platform": "p", "libc": "l"}
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{json.dumps({**asked, 'headers': False})}'\n")
    python.chmod(0o755)
    done = call("--python", python, "--cache", tmp_path / "cache")
    assert done.returncode == 69
    assert "python3-dev" in done.stderr


@pytest.mark.parametrize(("asked", "toolkit"), [({}, False), ({"HOROVOD_GPU": "CUDA"}, True)])
def test_no_cuda_toolkit_is_found_unless_gpus_are_asked_for(
    tmp_path: Path, asked: dict[str, str], toolkit: bool
) -> None:
    """A build of PyTorch with CUDA looks for nvcc and CUDA_HOME; scripts here play all programs."""
    known = {"torch": "2.13.0", "pip": "23", "abi": "a", "platform": "p", "libc": "l"}
    seen = tmp_path / "seen"
    look = "import os, shutil; print(bool(shutil.which('nvcc')), bool(os.environ.get('CUDA_HOME')))"
    python = (
        f"case $* in *' wheel --verbose '*) '{sys.executable}' -c \"{look}\" > '{seen}' ;;\n"
        f"*' install '*) ;; *) echo '{json.dumps({**known, 'headers': True})}' ;; esac"
    )
    programs = {"python": python, **dict.fromkeys("cmake g++ make mpicxx mpirun nvcc".split(), ":")}
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path), **asked}
    call("--python", tmp_path / "python", "--cache", tmp_path / "cache", **environment)
    assert seen.read_text() == f"{toolkit} {toolkit}\n"


def test_a_python_that_is_not_there_is_a_wrong_option(tmp_path: Path) -> None:
    """Status 2 and one line."""
    done = call("--python", tmp_path / "python")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"build_wheel.py: error: --python {tmp_path / 'python'}: no such program"
    ]


def test_the_compiler_is_asked_for_cxx17(builder: ModuleType, tmp_path: Path) -> None:
    """Whatever older standard Horovod asks for; all other words stay as they are."""
    compiler = tmp_path / "c++"
    compiler.write_text(builder.COMPILER.format(compiler="printf '%s\\n'"))
    compiler.chmod(0o755)
    words = ["-O2", "-std=c++14", "-DTEXT=a b", "-std=gnu++11", "-std=c++20", "file*.cc"]
    done = subprocess.run([compiler, *words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "-O2",
        "-std=c++17",
        "-DTEXT=a b",
        "-std=c++17",
        "-std=c++20",
        "file*.cc",
    ]


def test_what_the_compiler_said_last_is_shown(builder: ModuleType, tmp_path: Path) -> None:
    """Of a failed build the lines with errors are printed, and where the rest is."""
    log = tmp_path / "x.log"
    log.write_text("fine\n" * 50 + "a.cc:3: error: no such type\nmake: stopped\n")
    with pytest.raises(builder.BuildError, match="no such type") as caught:
        builder._failed(log)
    assert str(log) in str(caught.value)
    assert "fine" not in str(caught.value)
