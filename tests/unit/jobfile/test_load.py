"""A job file becomes a complete job or a clear error."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpml_orchestrator.errors import InputError, NotFoundError
from hpml_orchestrator.jobfile.load import parse_setting
from hpml_orchestrator.runs.load import load_job

if TYPE_CHECKING:
    from tests.unit.jobfile.conftest import Load

BASE = "name: a\nscript: x.py\n"


def test_yaml_is_version_1_2(load: Load) -> None:
    """`10:00` and `off` stay text, as YAML 1.2 has it, not 600 and false."""
    job = load(f"{BASE}args: [10:00, off, on, yes, No]\nresources: {{time: 10:00}}").job
    assert job.args == ("10:00", "off", "on", "yes", "No")
    assert job.resources.time == 600


def test_numbers_in_arguments_stay_as_they_are_written(load: Load) -> None:
    """A program receives `1.10`, `1e-3` and `007` as written in the file."""
    written = ["1.10", "1e-3", "007", "0x10", "1_000", "-0.0", "12"]
    text = f"{BASE}args: [{', '.join(written)}]\nenvironment: {{variables: {{V: 2.50}}}}"
    job = load(text, "environment.variables.W=3.0").job
    assert job.args == tuple(written)
    assert job.environment.variables == {"V": "2.50", "W": "3.0"}
    toml = "name = 'a'\nscript = 'x.py'\nargs = ['--lr', 1.10]"
    assert load(toml, name="job.toml").job.args == ("--lr", "1.10")


def test_toml_says_the_same(load: Load) -> None:
    """A TOML file with the same fields gives the same job; its suffix may be in capitals."""
    yaml = load(f"{BASE}resources: {{nodes: 2, gpus: [a100:4]}}\nstage: [{{name: d, source: s}}]")
    text = (
        'name = "a"\nscript = "x.py"\n[resources]\nnodes = 2\ngpus = ["a100:4"]\n'
        '[[stage]]\nname = "d"\nsource = "s"\n'
    )
    assert load(text, name="job.TOML").job == yaml.job


def test_aliases_and_merge_keys_work(load: Load) -> None:
    """Anchors, aliases and merge keys mean what they mean everywhere."""
    text = "name: &n a\nscript: x.py\nargs: [*n]\nenvironment: {variables: {<<: {A: x}, B: *n}}"
    job = load(text).job
    assert job.args == ("a",)
    assert job.environment.variables == {"A": "x", "B": "a"}


def test_a_bomb_of_aliases_is_refused_at_once(load: Load) -> None:
    """It is counted, not expanded."""
    bodies = ["[x, x]", *(f"[{','.join([f'*a{n}'] * 9)}]" for n in range(11))]
    lines = [f"a{n}: &a{n} {body}" for n, body in enumerate(bodies)]
    with pytest.raises(InputError, match="holds more than 200000 values"):
        load("\n".join(lines))


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("# nothing\n", "j.yaml", "holds no fields"),
        ("- a\n- b\n", "j.yaml", "holds no fields"),
        ("just text", "j.yaml", "holds no fields"),
        (BASE + "name: b\n", "j.yaml", 'is not YAML: .*duplicate key "name"'),
        (BASE + "a: b: c", "j.yaml", "is not YAML: mapping values are not allowed"),
        ("\tname: x", "j.yaml", "is not YAML: .*cannot start any token"),
        ("a: *nowhere", "j.yaml", "is not YAML: found undefined alias 'nowhere'"),
        (BASE + "x: !!python/object:os.system {}", "j.yaml", "is not YAML: could not determine"),
        (f"{BASE}---\n{BASE}", "j.yaml", "is not YAML: expected a single document"),
        ("? {a: b}\n: x\n", "j.yaml", "is not YAML: .*unhashable key"),
        ("x: " + "1" * 5000, "j.yaml", "is not YAML: Exceeds the limit"),
        ("x: " + "[" * 40 + "]" * 40, "j.yaml", "nested deeper than 32 levels"),
        ("x: &x [*x]\n", "j.yaml", "nested deeper than 32 levels"),
        ("x: " + "[" * 800, "j.yaml", "nested deeper than 32 levels"),
        ("x: \x00", "j.yaml", "is not YAML"),
        ("name: [", "j.toml", "is not TOML: Expected '='"),
        ("a = 1\na = 2", "j.toml", "is not TOML: Cannot overwrite a value"),
        ("a = " + "[" * 100_000, "j.toml", "nested deeper than 32 levels"),
        ("a = " + "[" * 50 + "]" * 50, "j.toml", "nested deeper than 32 levels"),
        (b"name: \xff\xfe", "j.yaml", r"is not UTF-8 text \(byte 6\)"),
    ],
)
def test_what_is_no_job_file(load: Load, text: str | bytes, name: str, message: str) -> None:
    """Every error of the file itself is one line with the file's name and the reason."""
    with pytest.raises(InputError, match=message) as caught:
        load(text, name=name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_of_20_megabytes_is_refused_unread(load: Load, tmp_path: Path) -> None:
    """What may never end is not even begun."""
    with pytest.raises(InputError, match="is over 4194304 bytes"):
        load(b"#" * 20_000_000)
    with pytest.raises(InputError, match="/dev/zero is not a regular file"):
        load_job("/dev/zero")
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(InputError, match="pipe.yaml is not a regular file"):
        load_job(tmp_path / "pipe.yaml")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """A missing file is not found; a directory or a path through a file cannot be read."""
    with pytest.raises(NotFoundError, match="no such job file"):
        load_job(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="is not a regular file"):
        load_job(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="Not a directory"):
        load_job(tmp_path / "file" / "job.yaml")


def test_paths_are_made_absolute(load: Load, tmp_path: Path) -> None:
    """Against the job file's directory, the program's against the workdir; ~ is the home."""
    text = """
name: a
script: train/x.py
workdir: code
environment: {venv: ../env, python: bin/py, container: {engine: apptainer, image: i.sif}}
stage:
  - {name: rel, source: data}
  - {name: abs, source: /data//x/../y}
  - {name: home, source: ~/data}
"""
    job = load(text).job
    assert job.workdir == f"{tmp_path}/code"
    assert job.script == f"{tmp_path}/code/train/x.py"
    assert job.environment.venv == os.path.normpath(f"{tmp_path}/../env")
    assert job.environment.python == f"{tmp_path}/bin/py"
    assert load(f"{BASE}environment: {{conda: ml}}").job.environment.conda == "ml"
    assert job.environment.container is not None
    assert job.environment.container.image == f"{tmp_path}/i.sif"
    enroot = load(f"{BASE}environment: {{container: {{engine: enroot, image: i.sqsh}}}}").job
    assert enroot.environment.container is not None
    assert enroot.environment.container.image == f"{tmp_path}/i.sqsh"
    home = os.path.expanduser("~")
    assert [stage.source for stage in job.stage] == [f"{tmp_path}/data", "/data/y", f"{home}/data"]


def test_a_home_in_arguments_is_the_home_as_in_a_shell(load: Load) -> None:
    """Only at the beginning of a word, also in variables; else a directory named ~ would appear."""
    text = """
name: a
command: [~/bin/x, "~", ~/a b, --x=~/c, ~~, 3]
args: [~/d]
environment: {variables: {HF_HOME: ~/hf, N: 1}}
"""
    job, home = load(text, "args=[~/e, 1.50]").job, os.path.expanduser("~")
    assert job.command == (f"{home}/bin/x", home, f"{home}/a b", "--x=~/c", "~~", "3")
    assert job.args == (f"{home}/e", "1.50")
    assert job.environment.variables == {"HF_HOME": f"{home}/hf", "N": "1"}


def test_checkpoints_beside_the_home_are_not_in_the_runs_directory(load: Load) -> None:
    """The home stands for `~` before `..` is resolved; elsewhere in a path it is text."""
    wanted = os.path.normpath(os.path.expanduser("~/../group/a"))
    for given, directory in [("~/../group/a", wanted), ("'{run.dir}/a/~b'", "a/~b")]:
        job = load(f"{BASE}checkpoint: {{directory: {given}}}").job
        assert job.checkpoint.directory == directory


def test_the_command_line_wins_and_the_last_of_it(load: Load) -> None:
    """Precedence: the last --set, an earlier one, the job file, the default."""
    text = f"{BASE}resources: {{nodes: 2, time: 5}}"
    resources = load(text, "resources.nodes=3", "resources.nodes=4").job.resources
    assert (resources.nodes, resources.time, resources.cpus_per_rank) == (4, 300, 1)


def test_settings_reach_into_lists(load: Load) -> None:
    """A list's entry is set by its index, a list as a whole by a YAML list."""
    text = f"{BASE}args: [a, b]\nstage: [{{name: d, source: s}}]"
    job = load(text, "args.1=z", "stage.0.target=shm").job
    assert (job.args, job.stage[0].target) == (("a", "z"), "shm")
    job = load(text, "stage=[{name: e, source: /t}]", "args=[]").job
    assert (job.args, job.stage[0].name) == ((), "e")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "stage.1.source=x",
            "stage.1: stage has no such entry; it is a list of length 1, numbered from 0 (got 'x')",
        ),
        ("stage.x.source=x", "stage.x: stage has no such entry"),
        ("stage.²=x", "stage.²: stage has no such entry"),
        ("stage.\u0660.source=x", "stage.\u0660: stage has no such entry"),
        ("args.0=--epochs=3", "args.0: args has no such entry; it is a list of length 0"),
        ("name.x=1", "name: has no inner fields"),
        ("nam=1", "nam: unknown field; did you mean name?"),
        ("resources.noes=1", "did you mean resources.nodes?"),
        ("resources.nodes=", "resources.nodes: must be a whole number, and there is nothing"),
    ],
)
def test_settings_of_what_is_not_there(load: Load, setting: str, message: str) -> None:
    """A --set that leads nowhere is refused with the place."""
    with pytest.raises(InputError) as caught:
        load(f"{BASE}args: []\nstage: [{{name: d, source: s}}]", setting)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text", ["x", "=1", "a..b=1", "a b=1", ".a=1", "1a=1", "", "a.=1", "--x=1"]
)
def test_what_is_no_setting(text: str) -> None:
    """--set takes FIELD=VALUE; its error shows that form."""
    with pytest.raises(InputError, match="--set: must be FIELD=VALUE, such as resources.nodes=4"):
        parse_setting(text)


def test_the_value_of_a_setting_is_yaml() -> None:
    """Numbers, lists and text; what is not YAML is refused with the field."""
    assert parse_setting("a.b=4") == ("a.b", 4)
    assert parse_setting("a=[x, 'y=z']") == ("a", ["x", "y=z"])
    assert parse_setting("a=x=y") == ("a", "x=y")
    assert parse_setting("time=10:00") == ("time", "10:00")
    with pytest.raises(InputError, match="--set a is not YAML"):
        parse_setting("a=[")


def test_every_value_has_an_origin(load: Load) -> None:
    """`render --explain` knows of each value whether it was set, written, or a default."""
    text = f"{BASE}args: [a, b]\nresources: {{time: 5}}\nstage: [{{name: d, source: s}}]"
    origins = load(
        text, "resources.nodes=2", "args.0=z", "environment={variables: {A: x}}", "stage.0.size=1G"
    ).origins
    assert origins["name"] == "job file"
    assert origins["resources.time"] == "job file"
    assert origins["resources.nodes"] == "command line"
    assert origins["resources.account"] == "default"
    assert origins["args"] == "command line"
    assert origins["environment.variables.A"] == "command line"
    assert origins["environment.venv"] == "default"
    assert origins["stage.0.source"] == "job file"
    assert origins["stage.0.size"] == "command line"
    assert origins["stage.0.kind"] == "default"
    empty = load(f"{BASE}environment: {{}}", "resources={}").origins
    assert (empty["environment.venv"], empty["resources.nodes"]) == ("default", "default")
    whole = load(text, "stage=[{name: e, source: t}]").origins
    assert whole["stage.0.source"] == "command line"
    assert whole["stage.0.kind"] == "default"


@pytest.mark.parametrize("escaped", [True, False])
def test_text_beyond_the_basic_plane_arrives(load: Load, escaped: bool) -> None:
    """JSON writes such characters as pairs of escapes, which name one character here too."""
    text = '"\\ud83d\\ude00"' if escaped else '"\U0001f600"'
    assert load(f"{BASE}args: [{text}]").job.args == ("\U0001f600",)
