"""The files that a script needs next to it: `hpml-job.sh`, its functions, and `hpml-node.pyz`.

`hpml-node.pyz` holds all of hpml's Python that the nodes need: a zip archive of modules. Its
commands run as `python -I -S hpml-node.pyz COMMAND …`.
"""

from __future__ import annotations

import importlib.util
import io
import marshal
import os
import subprocess
import zipfile
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

from hpml_orchestrator import assets
from hpml_orchestrator.errors import InputError

_PACKAGE = Path(__file__).resolve().parent.parent
_ROOMS = ("records", "staging", "topology", "placement", "node")
_MAIN = """\
import sys

from hpml_orchestrator.node.main import main

sys.exit(main(sys.argv[1:]))
"""
_UNCHECKED_HASH = (1).to_bytes(4, "little")  # PEP 552: it is not compared with the source
# Up to Python 3.13 later versions mark shared objects, which differ from process to process; only
# version 5, of Python 3.14, can write slices, and it gives the same bytes in all.
_MARSHAL_VERSION = 2 if marshal.version < 5 else marshal.version  # noqa: PLR2004 - as above
_EPOCH = (1980, 1, 1, 0, 0, 0)


def node_files() -> dict[str, bytes]:
    """Return name and content of each file that `job.sh` needs next to it."""
    functions = assets.path("templates/sbatch/hpml-job.sh").read_bytes()
    return {"hpml-node.pyz": build(), "hpml-job.sh": functions}


@cache
def build() -> bytes:
    """Return the archive's bytes; equal sources give equal bytes with equal interpreters.

    Next to each source is its bytecode for this interpreter; another one sees the magic number and
    compiles the source. Everything is stored uncompressed: a rank's start pays neither for
    compiling nor for inflating.
    """
    files = {"__main__.py": _MAIN.encode()}
    sources = [_PACKAGE / f"{name}.py" for name in ("__init__", "errors", "log", "version")]
    for room in _ROOMS:
        sources += sorted((_PACKAGE / room).rglob("*.py"))
    for source in sources:
        name, data = source.relative_to(_PACKAGE.parent).as_posix(), source.read_bytes()
        # The loader reuses __pycache__; compiling everything takes 0.2 s of each submission.
        code = SourceFileLoader(name, str(source)).get_code(name)
        assert code is not None  # noqa: S101 - None is for extension modules
        head = importlib.util.MAGIC_NUMBER + _UNCHECKED_HASH + importlib.util.source_hash(data)
        files[name] = data
        files[f"{name}c"] = head + marshal.dumps(_named(code, name), _MARSHAL_VERSION)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in files.items():
            # A fixed date: with the time of the build, each submission would have another archive,
            # and equal ones could not share a file.
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), data)
    return buffer.getvalue()


def _named(code: CodeType, name: str) -> CodeType:
    consts = (_named(one, name) if isinstance(one, CodeType) else one for one in code.co_consts)
    return code.replace(co_filename=name, co_consts=tuple(consts))


# Check the syntax of a script with `bash -n`.

_BASH_SECONDS = 10.0


def check_script(script: str, directory: str) -> None:
    """Refuse a script that is none, or that bash cannot parse.

    Args:
        script: what the templates made.
        directory: of the user's templates.

    Raises:
        InputError: names the line.
    """
    if not script.startswith("#!"):
        message = f"{directory}: the script does not begin with #!"
        hint = 'a template of its own begins with {% extends "hpml/NAME.sh.j2" %}'
        raise InputError(message, field="templates", hint=hint)
    complaint = _bash_complaint(script)
    if complaint:
        message = f"{directory}: bash cannot read the script: {complaint}"
        raise InputError(message, field="templates")


def check_setup(lines: str, origin: str) -> None:
    """Refuse an `environment.setup` that bash cannot parse on its own: it must leave nothing open.

    Args:
        lines: the user's shell lines.
        origin: their source, for the hint.

    Raises:
        InputError: names the line.
    """
    complaint = _bash_complaint(lines)
    if complaint:
        message = f"bash cannot read it: {complaint}"
        raise InputError(message, field="environment.setup", hint=f"fix it in the {origin}")


def _bash_complaint(script: str) -> str:
    """Return the error of `bash -n` for a script; none of it is run."""
    environment = {key: value for key, value in os.environ.items() if key != "BASH_ENV"}
    # `-n` runs nothing, so a `shopt -s extglob` in the script has no effect on what follows it.
    options = ["-O", "extglob"] if "extglob" in script else []
    try:
        process = subprocess.run(
            ["bash", "--norc", "--noprofile", *options, "-n"],
            input=script.encode("utf-8", "surrogateescape"),
            env={**environment, "LC_ALL": "C"},
            capture_output=True,
            timeout=_BASH_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""  # no bash here: the nodes have one
    lines = process.stderr.decode("utf-8", "replace").strip().split("\n")
    # A here-document without its end is a warning, and swallows the rest of the script.
    if process.returncode == 0 and "here-document" not in lines[0]:
        return ""
    return " ".join(line.removeprefix("bash: ") for line in lines[:2])
