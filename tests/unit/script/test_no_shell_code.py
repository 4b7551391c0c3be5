"""No value of a job file ever becomes shell code: scripts are run, not only read.

The script runs under real bash with hpml's own node archive and the local backend's srun; a program
at the end of it writes down what it was given. A value that became code would leave a canary file.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.jobfile.schema import job_schema
from hpml_orchestrator.script import archive
from hpml_orchestrator.script.render import Capabilities, render
from tests.unit.script.support import CANARY

if TYPE_CHECKING:
    from tests.unit.script.conftest import Sandbox

PAYLOADS = [
    "plain",
    f"$(touch {CANARY})",
    f"`touch {CANARY}`",
    f"'; touch {CANARY}; '",
    f'"; touch {CANARY}; "',
    f"a\ntouch {CANARY}\nb",
    f"\n\n#SBATCH --wrap='touch {CANARY}'\n",
    f"a; touch {CANARY} #",
    f"&& touch {CANARY} || touch {CANARY} &",
    f"${{IFS}}$(touch${{IFS}}{CANARY})",
    f"\\\\'$(touch {CANARY})\\'",
    f"!! {{{{ 7*7 }}}} {{% raw %}} $(touch {CANARY})",
    "ünïcödé \u2028 \u00a0 漢字 \U0001f600 \x07\x1b[0m\r\t\x7f",
    "*?[a-z]~ ~root {a,b} $HOME ${PATH}",
    "-n",
    "--",
    "",
    "\\",
    "'",
    '"',
    "trailing newline\n",
]


def job_with(sandbox: Sandbox, payload: str, **more: Any) -> dict[str, Any]:
    return {
        "name": "probe",
        "launcher": "srun",
        "command": [sys.executable, str(sandbox.root / "recorder.py"), payload],
        "args": [payload, f"--x={payload}"],
        "environment": {"variables": {"VALUE": payload}},
        **more,
    }


@pytest.mark.parametrize("payload", PAYLOADS, ids=range(len(PAYLOADS)))
def test_arguments_variables_and_paths_arrive_as_they_were_written(
    sandbox: Sandbox, payload: str
) -> None:
    """Arguments, variables, the working directory and staging paths reach the program unchanged."""
    name = payload.replace("/", "_").strip() or "dir"
    workdir, source, target = (sandbox.root / f"{kind}{name}" for kind in "wst")
    for directory in (workdir, source, target):
        directory.mkdir()
    (source / "x").write_text("x")
    stage = [{"name": "data", "source": str(source), "target": str(target)}]
    data = job_with(sandbox, payload, workdir=str(workdir), stage=stage)
    data["args"].append("{stage.data}" + payload)
    seen = sandbox.run(sandbox.load(data).job)
    *argv, staged = seen["argv"]
    assert argv == [payload, payload, f"--x={payload}"]
    entry = re.escape(f"{target}/hpml-{os.getuid()}/") + r"[\w-]+@sandbox-1/data"
    assert re.fullmatch(entry + re.escape(payload), staged)
    assert seen["env"]["VALUE"] == payload
    assert seen["cwd"] == str(workdir)
    assert list(target.iterdir()) == []


def test_placeholders_of_the_run_time_are_one_word_and_never_evaluated(sandbox: Sandbox) -> None:
    """Ids, and variables as setup left them: blanks, quotes and substitutions stay text."""
    value = f"a  'b' \"c\" $(touch {CANARY}) `touch {CANARY}` *"
    data = job_with(sandbox, "{env.VALUE}")
    data["args"] = ["{job.id}", "{run.id}", "--x={env.MADE}", "{env.EMPTY}", "{{env.MADE}}"]
    data["environment"] = {
        "setup": f"export MADE={shlex.quote(value)} EMPTY=",
        "variables": {"VALUE": "<{env.MADE}>"},
    }
    seen = sandbox.run(sandbox.load(data).job)
    # started by hand: the run has the job's id
    assert seen["argv"] == [f"<{value}>", "1", "1", f"--x={value}", "", "{env.MADE}"]


@pytest.mark.parametrize("place", ["args", "variables"])
def test_a_variable_that_is_not_set_ends_the_job(sandbox: Sandbox, place: str) -> None:
    """Before any rank starts, with its name in the output and in the record."""
    data = job_with(sandbox, "x")
    data["environment"]["setup"] = "unset -v VALUE_OF_ADA"
    if place == "args":
        data["args"] = ["{env.HOME}/{env.VALUE_OF_ADA}"]
    else:
        data["environment"]["variables"] = {"VALUE_OF_ADA": "/x:{env.VALUE_OF_ADA}"}
    done = sandbox.start(sandbox.load(data).job)
    message = "{env.VALUE_OF_ADA}: the variable is not set in the job"
    assert (done.returncode, f"hpml: {message}\n" in done.stderr.decode()) == (78, True)
    (ended,) = sandbox.submission.glob("runs/*/attempts/0/ended.json")
    assert json.loads(ended.read_text())["reason"] == message
    assert not (sandbox.root / "record.json").exists()


SCHEMA: Any = job_schema()
REQUIRED: dict[str, dict[str, Any]] = {
    "Stage": {"name": "data", "source": "/nowhere"},
    "Mail": {"to": "me"},
    "Container": {"engine": "apptainer", "image": "i.sif"},
}
Holder = Callable[[str], Any]


def places(node: dict[str, Any], kind: str = "") -> Iterator[tuple[str, Holder]]:
    """Yield each place of a schema where text can stand, and what makes a value that holds it."""
    for choice in (node, *node.get("anyOf", ())):
        if "$ref" in choice:
            name = choice["$ref"].rsplit("/", 1)[-1]
            yield from places(SCHEMA["$defs"][name], name)
        if choice.get("type") == "array":
            yield "0", lambda text: [text]
            for place, holder in places(choice["items"]):
                yield f"0.{place}", lambda text, holder=holder: [holder(text)]  # type: ignore[misc]
        if choice.get("additionalProperties") not in (None, False):
            yield "<key>", lambda text: {text: "x"}
            yield "<value>", lambda text: {"NAME": text}
        for key, value in choice.get("properties", {}).items():
            inner: list[tuple[str, Holder]] = [("", lambda text: text), *places(value)]
            for place, holder in inner:
                yield (
                    f"{key}.{place}".rstrip("."),
                    lambda text, key=key, holder=holder: {  # type: ignore[misc]
                        **REQUIRED.get(kind, {}),
                        key: holder(text),
                    },
                )


PLACES = dict(places(SCHEMA))


def job_holding(place: str, value: str) -> dict[str, Any]:
    """The smallest job with that value in that field."""
    program = {} if place.startswith(("module", "command")) else {"script": "x.py"}
    return {"name": "probe", **program, **PLACES[place](value)}


@pytest.mark.parametrize("place", sorted({*PLACES} - {"environment.setup"}))
def test_a_value_in_any_field_is_refused_or_stays_data(sandbox: Sandbox, place: str) -> None:
    """The loader refuses a value with its field, or the script quotes it.

    `environment.setup` is shell code, the user's own. 1 MB fits no argument and no path.
    """
    for payload in PAYLOADS[1:]:
        try:
            script = render(sandbox.set(job_holding(place, payload)).job, Capabilities())
        except InputError:
            continue
        assert no_code(script, sandbox.root), (place, payload)
    with pytest.raises(InputError) as caught:
        sandbox.set(job_holding(place, "x" * 1_000_000))
    assert place.partition(".")[0] in str(caught.value)
    assert len(str(caught.value)) < 4000


def no_code(script: str, workdir: Path) -> bool:
    """Whether bash, running the script with every command out of reach, leaves no canary.

    By an empty PATH each external program is a no-op: expansions and substitutions still happen,
    so a payload would act. A canary file is in the script's first directory, or in
    the job's workdir.
    """
    scratch = workdir / "no-code"
    commands = scratch / "bin"
    if not commands.exists():
        commands.mkdir(parents=True)
        (commands / "touch").symlink_to("/usr/bin/touch")
        # every guard that would end the script early is answered: the claim, the archive, the waits
        (commands / "python").write_text("#!/bin/sh\necho /nowhere/attempts/0\n")
        (commands / "python").chmod(0o755)
        (scratch / "hpml-node.pyz").write_bytes(b"")
        (scratch / "agent.json").write_bytes(b"")
        over = b"hpml_run() { :; }\nhpml_wait_ready() { export HPML_STAGE_DATA=/nowhere; }\n"
        functions = archive.node_files()["hpml-job.sh"]  # these would end the script
        (scratch / "hpml-job.sh").write_bytes(functions + over)
    begin = f"hpml_begin {commands}/python "
    text = re.sub(r"^hpml_begin \S+ ", lambda _: begin, script, flags=re.MULTILINE)
    assert text != script
    (scratch / "job.sh").write_text(text, encoding="utf-8")
    subprocess.run(["bash", "-n", "job.sh"], cwd=scratch, check=True, timeout=120)
    subprocess.run(
        ["/bin/bash", "job.sh"],
        cwd=scratch,
        env={"PATH": str(commands), "SLURM_JOB_ID": "1", "SLURM_NNODES": "1"},
        capture_output=True,
        timeout=120,
        check=False,
    )
    return not any(workdir.rglob(CANARY))


def test_a_value_that_became_code_would_be_noticed(sandbox: Sandbox) -> None:
    """The deep fields are tried, and the canary works."""
    deep = "name resources.extra.0 environment.variables.<key> environment.container.mounts.0 "
    assert {*deep.split(), "stage.0.source", "resources.mail.on.0"} <= set(PLACES)
    script = render(sandbox.set({"name": "probe", "command": ["VALUE"]}).job, Capabilities())
    assert no_code(script, sandbox.root)
    for payload in (
        f"$(touch {CANARY})",
        f"x\ntouch {CANARY}",
        f"x; touch {CANARY}",
        f"`touch {CANARY}`",
    ):
        assert not no_code(script.replace("VALUE", payload), sandbox.root), payload
        for canary in sandbox.root.rglob(CANARY):
            canary.unlink()


TEXT = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=80)


@settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(texts=st.lists(TEXT, min_size=1, max_size=6))
def test_any_text_arrives_unchanged(make_sandbox: Callable[[], Sandbox], texts: list[str]) -> None:
    """Random Unicode, and 128 KiB less one byte, reach the program to the character."""
    sandbox = make_sandbox()
    data = job_with(sandbox, "end")
    texts = [text.replace("{stage.", "{stage_").replace("{run.", "") for text in texts]
    data["args"] = [*texts, "é" * 65_535]  # the most that Linux passes
    data["environment"]["variables"] = {f"V{index}": text for index, text in enumerate(texts)}
    seen = sandbox.run(sandbox.load(data).job)
    assert seen["argv"] == ["end", *data["args"]]
    assert [seen["env"][f"V{index}"] for index in range(len(texts))] == texts
