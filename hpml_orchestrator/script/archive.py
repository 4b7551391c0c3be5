"""Build `hpml-node.pyz`: the one file that the nodes need of hpml.

Its parts run as `python -I -S hpml-node.pyz COMMAND …`, for which the interpreter imports `runpy`.
The ranks' start has a way around that, `BINDER`, and a module of its own, `hpml_bind`.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from hpml_orchestrator.script.onefile import bytecode, one_module

__all__ = ["BINDER", "build"]

BINDER = (
    "import sys, zipimport; sys.path.append(sys.argv.pop(1)); "
    'exec(zipimport.zipimporter(sys.path[-1]).get_code("hpml_bind"))'
)
"""Code for `python -I -S -c BINDER hpml-node.pyz ATTEMPT -- COMMAND`: opens the archive twice."""

_PACKAGE = Path(__file__).resolve().parent.parent
_ROOMS = ("records", "staging", "topology", "placement", "node")
_BIND = (
    "placement.cpulist",
    "placement.planfile",
    "node.kernel",
    "node.bind",
)
_MAIN = """\
import sys

if sys.argv[1:2] == ["bind"]:
    from hpml_bind import run

    sys.exit(run(sys.argv[2:]))
from hpml_orchestrator.node.main import main

sys.exit(main(sys.argv[1:]))
"""
_EPOCH = (1980, 1, 1, 0, 0, 0)


def build() -> bytes:
    """Return the archive's bytes; equal sources give equal bytes with equal interpreters.

    It holds plain sources (standard library only, Python 3.9 or newer), and of `hpml_bind` also
    the bytecode of this interpreter, which is the one that runs it on the nodes, if they have it.
    All is stored uncompressed so that a rank's start does not pay for unpacking.
    """
    bind = one_module(_PACKAGE, list(_BIND), "run")
    files = {
        "__main__.py": _MAIN.encode(),
        "hpml_bind.py": bind.encode(),
        "hpml_bind.pyc": bytecode(bind, "hpml_bind.py"),
    }
    sources = [_PACKAGE / "__init__.py", _PACKAGE / "errors.py"]
    for room in _ROOMS:
        sources += sorted((_PACKAGE / room).rglob("*.py"))
    for source in sources:
        files[source.relative_to(_PACKAGE.parent).as_posix()] = source.read_bytes()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), data)
    return buffer.getvalue()
