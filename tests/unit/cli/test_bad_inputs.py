"""Bad job files and command lines, through the real command: one message, and nothing done."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpml_orchestrator.records.store import Store
from tests.unit.cli.conftest import as_anybody

HPML = Path(sys.executable).parent / "hpml"
GOOD = "name: good\nlauncher: srun\ncommand: ['true']\n"
LIMIT_SECONDS = 120
OLD = ("probe-20240101-000000-aaaaaa", "probe-20240102-000000-bbbbbb")
MARK = "sbatch-was-called"


def bomb() -> str:
    """Nine aliases of nine aliases, nine times: a billion values in 500 characters."""
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    for one, other in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{other}: &{other} [{', '.join([f'*{one}'] * 9)}]")
    return "\n".join(lines)


def resources(text: str) -> str:
    return f"{GOOD}resources: {{{text}}}\n"


# file's content, part of the message (its field, or what is wrong with the file)
FILES: dict[str, tuple[str | bytes, str]] = {
    "unknown key": (f"{GOOD}resorces: {{}}\n", "resorces: there is no such field; did you mean r"),
    "wrong type": (resources("nodes: many"), "resources.nodes: must be a whole number"),
    "negative time": (resources("time: -5"), "resources.time: must be a time limit"),
    "a number of 5000 digits": (
        resources(f"nodes: {'9' * 5000}"),
        "is not YAML: Exceeds the limit",
    ),
    "not a number": (resources("nodes: .nan"), "resources.nodes: must be a whole number (got nan)"),
    "a unit that there is not": (resources("memory: 64 Gigs"), "resources.memory: must be a size"),
    "nothing behind the colon": (resources("nodes: "), "resources.nodes: must be a whole number"),
    "off": (resources("exclusive: off"), "resources.exclusive: must be true or false (got 'off')"),
    "a date": (
        "name: 2024-01-01\ncommand: [a]\n",
        "name: must be text: put it in quotes (got 2024",
    ),
    "a directive smuggled in": (
        resources("partition: 'a\\n#SBATCH --wrap=x'").replace("'", '"'),
        "resources.partition: must be letters, digits",
    ),
    "a variable of the launcher": (
        f"{GOOD}environment: {{variables: {{RANK: 1}}}}\n",
        "environment.variables.RANK: is set by the shell",
    ),
    "two programs": (f"{GOOD}script: x.py\n", "give exactly one of script, module and command"),
    "a placeholder for nothing": (
        f"{GOOD}args: ['{{stage.dta}}']\nstage: [{{name: data, source: /etc}}]\n",
        "args.0: {stage.dta} names nothing that is staged",
    ),
    "a NUL character": (f'{GOOD}args: ["a\\0b"]\n', "args.0: must not hold a NUL character"),
    "duplicate keys": (f"{GOOD}name: again\n", "is not YAML: while constructing a mapping in line"),
    "a bomb of aliases": (bomb(), "holds more than 200000 values"),
    "an alias of itself": ("name: &x [*x]\n", "is nested deeper than 32 levels"),
    "an alias of nothing": ("name: *nothing\n", "found undefined alias 'nothing' in line 1"),
    "a tag that runs Python": (
        "name: !!python/object/apply:os.system ['touch pwned']\n",
        "could not determine a constructor for the tag",
    ),
    "tabs": ("name: a\nresources:\n\tnodes: 2\n", r"found character '\t' that cannot start"),
    "absurd nesting": (f"args: {'[' * 20000}{']' * 20000}\n", "is nested deeper than 32 levels"),
    "an empty file": ("", "job.yaml holds no fields"),
    "binary": (bytes(range(256)) * 8, "job.yaml is not UTF-8 text (byte 128)"),
    "UTF-16": (GOOD.encode("utf-16"), "job.yaml is not UTF-8 text (byte 0)"),
    "a mark of byte order": (
        f"\ufeff{GOOD}nods: 1\n",
        "nods: there is no such field; did you mean",
    ),
    "lines of Windows": (
        f"{GOOD}nods: 1\n".replace("\n", "\r\n"),
        "nods: there is no such field; did you mean",
    ),
    "five megabytes": (b"#" * 5_000_000, "job.yaml is over 4194304 bytes"),
}

# words after `hpml`, exit status, part of the message
LINES: list[tuple[list[str], int, str]] = [
    *[
        (["submit", "good.yaml", "--set", text], 2, message)
        for text, message in [
            ("x", "--set: must be FIELD=VALUE, such as resources.nodes=4 (got 'x')"),
            ("=4", "--set: must be FIELD=VALUE"),
            ("a..b=1", "--set: must be FIELD=VALUE"),
            ("resources.nodes=", "resources.nodes: must be a whole number, and there is nothing"),
            ("resources.nodes=two", "resources.nodes: must be a whole number (got 'two')"),
            ("resources.nodes=[1", "--set resources.nodes is not YAML"),
            ("resource.nodes=2", "resource: there is no such field; did you mean resources?"),
            ("name.first=x", "name: has no fields of its own"),
            ("stage.0.name=x", "stage"),
            ("resources=4", "resources: must be a mapping of fields"),
        ]
    ],
    (["submit", "none.yaml"], 3, "no such job file: "),
    (["submit", "good.yaml/job.yaml"], 2, "Not a directory"),
    (["submit", "directory"], 2, "directory is a directory, not a regular file"),
    (["submit", "pipe"], 2, "pipe is a pipe, not a regular file"),
    (["submit", "/dev/zero"], 2, "/dev/zero is a device, not a regular file"),
    (["submit", "loop.yaml"], 2, "loop.yaml: Too many levels of symbolic links"),
    (["submit", "closed.yaml"], 2, "closed.yaml: Permission denied"),
    (["submit", "good.yaml", "--backend", "slrum"], 2, "--backend: must be auto, slurm or local"),
    (["submit", "good.yaml", "--local", "--backend", "slurm"], 2, "--backend: cannot be given tog"),
    (["submit", "good.yaml", "--resume", "last"], 2, "--resume: takes no job file"),
    (["submit", "--resume", "last", "--set", "name=x"], 2, "--set: cannot be given together with"),
    (["submit", "--resume", "nothing"], 3, "no run 'nothing' under "),
    (["render", "good.yaml", "--explain", "-o", "out"], 2, "--explain: cannot be given together"),
    (["render", "good.yaml", "--force"], 2, "--force: needs --output DIR"),
    (["show", "nothing"], 3, "no run 'nothing' under "),
    (["show", "probe"], 2, "RUN: names 2 runs: probe-20240102-000000-bbbbbb, probe-20240101-00"),
    (["cancel", "last", "nothing"], 3, "no run 'nothing' under "),
    (["wait", "99999"], 3, "no run '99999' under "),
    (["--records", "nowhere", "show", "last"], 3, "no runs under "),
    (["--records", "nowhere", "show", "last.3"], 3, "no run 'last.3' under "),
    (["--records", "good.yaml", "list"], 7, "cannot read "),
    (
        ["--records", "sealed", "submit", "--no-check", "good.yaml"],
        7,
        "cannot write records under ",
    ),
    (["submti", "good.yaml"], 2, "COMMAND: hpml has no such command (got 'submti')"),
]

Call = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of good and bad things, two old runs, and a fake sbatch.

    The sbatch here is a FAKE: all it does is to leave a mark that it was called, which the real
    one cannot do.
    """
    root = tmp_path_factory.mktemp("bad")
    (root / "good.yaml").write_text(GOOD)
    (root / "directory").mkdir()
    os.mkfifo(root / "pipe")
    (root / "loop.yaml").symlink_to("loop.yaml")
    (root / "closed.yaml").write_text(GOOD)
    (root / "closed.yaml").chmod(0)
    (root / "sealed").mkdir(mode=0o500)
    store = Store(root / "records")
    for sid in OLD:
        store.prepare(sid, script="", archive=b"", submit={}, runs={0: {}})
    (root / "bin").mkdir()
    fake = root / "bin" / "sbatch"
    fake.write_text(
        f'#!/bin/sh\n# FAKE\n: > "{root}/{MARK}"\necho "sbatch: error: fake" >&2\nexit 1\n'
    )
    fake.chmod(0o755)
    return root


@pytest.fixture
def call(place: Path) -> Call:
    """Run the real hpml there, as somebody whom file permissions bind."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        dropped = ("SLURM", "SBATCH", "HPML")
        kept = {n: v for n, v in os.environ.items() if not n.startswith(dropped)}
        return subprocess.run(
            [*as_anybody(), HPML, *words],
            cwd=place,
            env={
                **kept,
                "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
                "HPML_HOME": str(place / "records"),
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=False,
        )

    return run


def refused(done: subprocess.CompletedProcess[str], place: Path, code: int, message: str) -> None:
    """One message that says what is wrong, the right status, and nothing left behind."""
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert [line for line in lines if line.startswith("hpml: ")] == lines[:1], done.stderr
    assert lines[0].startswith("hpml: error: ")
    assert message in lines[0]
    assert all(line.startswith("hint: ") for line in lines[1:]), done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(os.listdir(place / "records" / "submissions")) == sorted(OLD)
    assert not (place / MARK).exists(), "sbatch was called"
    assert not {"nowhere", "out", "pwned"} & set(os.listdir(place))
    assert os.listdir(place / "sealed") == []


@pytest.mark.parametrize("name", FILES)
def test_a_bad_job_file_is_refused(name: str, place: Path, call: Call) -> None:
    """Its field, or the file, is named; nothing is written down and nothing submitted."""
    content, message = FILES[name]
    data = content.encode("utf-8") if isinstance(content, str) else content
    (place / "job.yaml").write_bytes(data)
    refused(call("submit", "job.yaml"), place, 2, message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = 2024-01-01\ncommand = ['a']\n", "name: must be text: put it in quotes (got 2024"),
        ("name = 'a'\nname = 'b'\n", "job.toml is not TOML: "),
    ],
)
def test_a_bad_toml_file_is_refused(text: str, message: str, place: Path, call: Call) -> None:
    """As one in YAML is."""
    (place / "job.toml").write_text(text)
    refused(call("submit", "job.toml"), place, 2, message)


@pytest.mark.parametrize(
    ("words", "code", "message"), LINES, ids=[" ".join(words) for words, _, _ in LINES]
)
def test_a_bad_command_line_is_refused(
    words: list[str], code: int, message: str, place: Path, call: Call
) -> None:
    """What is wrong is named; nothing is written down and nothing submitted."""
    if as_anybody() and shutil.which("setpriv") is None:
        pytest.fail("root needs util-linux's setpriv here")
    refused(call(*words), place, code, message)


def test_words_of_old_yaml_are_what_they_look_like(place: Path, call: Call) -> None:
    """YAML 1.1 made 10:00 the number 600, and `no` false; here they are a time and a word."""
    text = "name: off\ncommand: [no, 010, 1_0]\nresources: {time: 10:00, partition: no}\n"
    (place / "job.yaml").write_text(text)
    told = call("render", "job.yaml")
    assert (told.returncode, told.stderr) == (0, "")
    for line in ("--job-name=off", "--time=00:10:00", "--partition=no"):
        assert f"#SBATCH {line}\n" in told.stdout
    assert "hpml_command=( no 010 1_0 )" in " ".join(told.stdout.split())


def test_the_fake_sbatch_would_be_seen(place: Path, call: Call, tmp_path: Path) -> None:
    """A good job file gets as far as sbatch, so the tests above can fail."""
    done = call("--records", str(tmp_path / "records"), "submit", "good.yaml")
    assert (done.returncode, (place / MARK).exists()) == (4, True)
    (place / MARK).unlink()
    assert len(os.listdir(tmp_path / "records" / "submissions")) == 1
