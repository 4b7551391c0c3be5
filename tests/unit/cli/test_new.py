"""`hpml new`: examples that run as they are, job files for scripts of one's own, refusals."""

from __future__ import annotations

import ast
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hpml_orchestrator import assets
from hpml_orchestrator.cli.new import EXAMPLES
from tests.unit.cli.support import Hpml, Shell

VENV = f"environment.venv={sys.prefix}"  # the tests' shell has no PyTorch on its PATH

pytestmark = pytest.mark.xdist_group("local runs")


def test_the_list(hpml: Hpml) -> None:
    """Every example with what it trains, also as JSON."""
    rows = dict(line.split("\t") for line in hpml("new", "--list").out.splitlines()[1:])
    assert rows == {name: example.about for name, example in EXAMPLES.items()}
    assert [one["name"] for one in hpml("new", "--list", "--json").json()] == list(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_complete(name: str, hpml: Hpml, tmp_path: Path) -> None:
    """All modules that its scripts import are there, and every job and sweep file is accepted."""
    target = tmp_path / "with blank"
    done = hpml("new", name, str(target))
    assert done.code == 0, done.err
    written = {path.name for path in target.iterdir()}
    assert written == set(EXAMPLES[name].files)
    assert f"    cd {shlex.quote(str(target))}\n" in done.out
    own = {path.stem for path in assets.path("training_jobs").glob("*.py")}
    for path in target.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {f"{used}.py" for used in names if used in own} <= written, path.name
    for path in target.glob("*.yaml"):
        if "\nbase: " in path.read_text():
            assert hpml("sweep", "plan", str(path), "--local").code == 0, path.name
        else:
            assert hpml("render", str(path)).code == 0, path.name
    assert hpml("new", name, str(target)).out.startswith(f"{target} has all files already")


def test_the_short_script_trains_and_resumes(shell: Shell, hpml: Hpml) -> None:
    """As it is, it saves; with more steps it continues after the last one."""
    assert hpml("new", "mine", "short").code == 0
    place = str(shell.root / "short" / "job.yaml")
    first = hpml("run", "--local", "--json", place, "--set", VENV, "--", "--steps=100")
    assert first.code == 0, first.err
    run = first.json()["id"]
    shown = hpml("show", run, "--json").json()
    assert 0 <= shown["summary"]["result"]["loss"] < 10
    again = hpml("resubmit", run, "--", "--steps=200")
    assert again.code == 0, again.err
    waited = hpml("wait", "last")
    assert waited.code == 0, waited.err
    steps = [line for line in hpml("logs", "last").out.splitlines() if line.startswith("step ")]
    assert [line.partition(":")[0] for line in steps] == ["step 200/200"]


ONE, TWO = ({"launcher": "torchrun", "ranks": ranks} for ranks in (1, 2))


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("plain.py", "print(1)", ONE),
        ("ddp.py", "dist.init_process_group()", TWO),
        ("hf.py", "from transformers import (\n    AutoModel,\n    Trainer,\n)", TWO),
        ("args.py", "from transformers import Seq2SeqTrainingArguments as Arguments", TWO),
        ("pl.py", "import lightning as L, transformers\nL.Trainer()", ONE),
        ("hvd.py", "import horovod.torch as hvd", {"launcher": "horovodrun", "ranks": 2}),
        ("it: is {a} name.py", "print(1)", ONE),
        ("run.sh", "#!/bin/sh\ntrue", {"launcher": "srun", "ranks": 1}),
    ],
)
def test_a_job_file_for_a_script(
    file: str, text: str, expected: dict[str, object], hpml: Hpml, tmp_path: Path
) -> None:
    """The launcher follows from what the script imports; the script stays as it was."""
    script = tmp_path / "project" / file
    script.parent.mkdir()
    script.write_text(text)
    script.chmod(0o755)
    for target in (script.parent, tmp_path / "elsewhere"):
        done = hpml("new", "mine", str(target), "--script", str(script))
        assert done.code == 0, done.err
        shown = hpml("render", str(target / "job.yaml"), "--json").json()["job"]
        assert shown["launcher"] == expected["launcher"]
        assert shown["resources"]["ranks_per_node"] == expected["ranks"]
        assert (shown["script"] or shown["command"][0]) == str(script)
    assert script.read_text() == text


def test_an_own_script_runs(shell: Shell, hpml: Hpml) -> None:
    """One without hpml's files, from its job file."""
    (shell.root / "hello.py").write_text("print('trained', 6 * 7)")
    made = hpml("new", "mine", ".", "--script", "hello.py")
    assert made.code == 0
    assert "cd ." not in made.out
    done = hpml("run", "--local", "job.yaml", "--set", VENV)
    assert done.code == 0, done.err
    assert "trained 42" in done.out


def test_refusals(hpml: Hpml, tmp_path: Path) -> None:
    """Each names the argument; nothing is written, and no file is replaced."""
    assert hpml("new").refuses(2, "NAME", "images, ")
    assert hpml("new", "imags", "x").refuses(2, "NAME", "'imags'", "did you mean images?")
    assert hpml("new", "images").refuses(2, "DIR", "hpml new images my-images")
    assert hpml("new", "--list", "images").refuses(2, "--list")
    assert hpml("new", "images", "x", "--script", "y.py").refuses(2, "--script", "mine")
    missing = str(tmp_path / "nothing.py")
    assert hpml("new", "mine", "x", "--script", missing).refuses(3, "--script", missing)
    notes = tmp_path / "notes.txt"
    notes.write_text("text")
    assert hpml("new", "mine", "x", "--script", str(notes)).refuses(2, "--script", "executable")
    (tmp_path / "train.py").write_text("mine")
    assert hpml("new", "mine", str(tmp_path)).refuses(2, "DIR", "train.py already exists")
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "train.py"}
    assert hpml("new", "mine", str(notes)).refuses(2, "DIR")
    assert hpml("new", "mine", "/proc/nothing").refuses(2, "DIR")


def test_a_wheel_has_the_examples(tmp_path: Path) -> None:
    """The table names no file that is not there."""
    names = {file for example in EXAMPLES.values() for file in example.files}
    directory = assets.path("training_jobs")
    assert [name for name in sorted(names) if not (directory / name).is_file()] == []
    listed = subprocess.run(
        [sys.executable, "-m", "compileall", "-q", *sorted(map(str, directory.glob("*.py")))],
        check=False,
        env={"PYTHONPYCACHEPREFIX": str(tmp_path)},
    )
    assert listed.returncode == 0
