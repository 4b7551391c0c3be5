"""The arguments in a job file are those that bash passes to the program."""

from __future__ import annotations

import re
import shlex
import subprocess

from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpml_orchestrator.convert.draft import ImportContext, import_script
from hpml_orchestrator.errors import HpmlError
from hpml_orchestrator.jobfile.load import parse_yaml
from hpml_orchestrator.jobfile.text import unescaped

ENVIRONMENT = {"HOME": "/home/ada", "U": "u v", "W": "w", "PATH": "/usr/bin:/bin"}
CONTEXT = ImportContext("/", "/", ENVIRONMENT)
# The program of the script: it prints its arguments, each with a NUL character at its end.
PROGRAM = "python() { shift; printf '%s\\0' \"$@\"; }\n"
ASSIGNMENTS = (
    "A=abc", 'A="a b"', "A=", "A='x y'", "B=$A", 'B="$A $A"', "B=$U", "N=2", "L=(1 2)",
    'L=("a b" c)', "L=($A $N)", "L+=(z)", "A+=q", "A=$(echo r)", "B=${Q:-d}", "B=~/k", "export A=e",
    "A=$W/x", "A=1; B=2", "N=$((N+1))", "A=a\\ b", 'A="x\ny"', "unset A", "declare A=d", "L[1]=r",
    "L=($A/$W/x)",
    'A="\\"q\\""', "if true; then A=c; fi", "f() { A=fun; }; f", "A=x:~/y",
)  # fmt: skip
FRAGMENTS = (
    "a", "--x=", "$A", "${A}", '"$A"', '"${A}x"', "'s q'", '"d q"', "\\$", '\\"', '"\\$A"', "'\\n'",
    "$((1+2))", '"$((N+1))"', "${L[0]}", '"${L[@]}"', "${L[@]}", "${#L[@]}", "$U", '"$U"', "$W",
    '"${Q:-z y}"', "$(echo h)", '"$(echo h i)"', "`echo k`", "~", "~/p", "{", "}", "#", "=", "é",
    '"a\\\\b"', "\\\\", "$", '"$"', "$'t\\tq'", '"a\\\nb"', "/", "[", '""', "''", "*", "{1,2}",
    "${A%c}", "$A/$W/x", "/$A-$A.b", "\\$@", '"$@"', "\\ ", " ", " ", " ",
)  # fmt: skip


def run(script: str) -> list[str] | None:
    """The arguments of the program that a script starts; None if it fails."""
    done = subprocess.run(
        ["bash", "-c", PROGRAM + script],
        cwd="/",
        env=ENVIRONMENT,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return done.stdout.decode().split("\0")[:-1] if done.returncode == 0 else None


def word(argument: str) -> str:
    """An argument of a job file as a word for bash: a placeholder is a variable."""
    parts = re.split(r"\{env\.(\w+)\}", argument)
    quoted = (f'"${{{part}}}"' if i % 2 else shlex.quote(part) for i, part in enumerate(parts))
    return "".join(quoted)


@settings(max_examples=60, deadline=None)
@example([], ["\\$@"])
@example(["A=$(echo r)"], ["$A", "é"])
@given(
    st.lists(st.sampled_from(ASSIGNMENTS), max_size=4),
    st.lists(st.sampled_from(FRAGMENTS), min_size=1, max_size=8),
)
def test_bash_would_pass_the_same_arguments(assignments: list[str], fragments: list[str]) -> None:
    """Or bash refuses the script, or a line of setup fails as the script's would not."""
    script = "\n".join([*assignments, f"python t.py {''.join(fragments)}", ""])
    if "$$" in script:  # the id of a process: another one in each run
        return
    try:
        made = import_script(f"#!/bin/bash\n{script}", name="job.sh", context=CONTEXT)
    except HpmlError:
        return
    job = parse_yaml(made.text, "it")
    environment = job.get("environment", {})
    exports = [f"export {k}={shlex.quote(v)}" for k, v in environment.get("variables", {}).items()]
    command = f"python t.py {' '.join(map(word, job.get('args', [])))}"
    if "command" in job:  # through a shell, which finds what setup exports
        text = unescaped(job["command"][2]).replace("exec python", "python")
        command = f"export -f python; bash -c {shlex.quote(text)}"
    lines = ["set -e", environment.get("setup", ""), *exports, command]
    imported = run("\n".join(lines))
    assert imported in (None, run(script))
