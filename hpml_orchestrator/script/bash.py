"""Check the syntax of a script with `bash -n`."""

from __future__ import annotations

import os
import subprocess

from hpml_orchestrator.errors import InputError

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
