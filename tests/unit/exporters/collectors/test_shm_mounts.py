"""Other file systems in /dev/shm, real ones, in a mount namespace of the test's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = r"""
import ctypes, os, sys
from hpml_exporters.node import shm
from tests.unit.exporters.collectors.reading import context, post, sampled

place, kind, when, name = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
name = name.encode().decode("unicode_escape")
make = os.mkdir if kind != "file" else os.mknod
os.mkdir(f"{place}/held")
make(f"{place}/held/{name}")
for number in range(20):
    os.mknod(f"{place}/held/{number}")
make(f"{place}/held/{name}2")  # one of them is among the last to be looked at

def mount(folder):
    for path in (f"{place}/{folder}/{name}", f"{place}/{folder}/{name}2"):
        mount_one(path)

def mount_one(path):
    options = b"size=16m"
    if kind != "tmpfs":
        fuse = os.open("/dev/fuse", os.O_RDWR)  # nobody ever answers
        mode = b"100644" if kind == "file" else b"40755"
        options = b"fd=%d,rootmode=%s,user_id=0,group_id=0,allow_other" % (fuse, mode)
    system = b"tmpfs" if kind == "tmpfs" else b"fuse"
    if libc.mount(b"x", os.fsencode(path), system, 0, options):
        raise OSError(ctypes.get_errno(), "mount")
    if kind == "tmpfs":
        with open(f"{path}/x", "wb") as file:
            file.write(b"x" * (1 << 20))

told = context(shm=place)
post(told.jobs, {"41": (os.getuid(), [])})
collector = shm.make(told)
shm.ENTRIES = 5
if when == "before":
    mount("held")
sampled(collector)
if when == "meanwhile":
    mount("held")
if when == "renamed":
    os.rename(f"{place}/held", f"{place}/other")
    mount("other")
for _ in range(20):
    found = sampled(collector)
print(found["hpml_job_shm_bytes", "41"])
"""
WHEN = ("before", "meanwhile", "renamed")


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("unshare"), reason="needs root to mount")
@pytest.mark.parametrize(
    ("kind", "when", "name"),
    [
        *((kind, when, "x") for kind in ("tmpfs", "fuse", "file") for when in WHEN),
        *(("fuse", "before", name) for name in (r"a\rb", r"a\u2028b", r"a\x85b")),
    ],
)
def test_no_other_file_system_is_looked_at(place: Path, kind: str, when: str, name: str) -> None:
    """Whatever its name, and whenever it is mounted; one that never answers holds nobody up."""
    if kind != "tmpfs" and not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("needs FUSE")
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", PROGRAM, str(place), kind, when, name],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,  # and then it is killed, which ends FUSE's wait too
    )
    assert (done.stdout, done.stderr) == ("0\n", "")
