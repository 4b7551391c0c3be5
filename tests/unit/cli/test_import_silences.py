"""What an import must not pass over in silence: found by somebody who tried to break it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from ruamel.yaml import YAML

if TYPE_CHECKING:
    from tests.unit.cli.support import Result, Shell

Hpml = Callable[..., "Result"]
HEAD = "#!/bin/bash\n#SBATCH --ntasks=1 --time=5\n"


def imported(shell: Shell, hpml: Hpml, body: str) -> tuple[dict[str, object], str]:
    """The job file's fields, and what was told."""
    (shell.root / "old.sh").write_text(HEAD + body)
    result = hpml("import", "old.sh")
    assert result.code == 0, result.err
    return YAML(typ="safe").load(result.out), result.err


@pytest.mark.parametrize(
    "line",
    [
        '[[ -n $DEBUG ]] && MORE="--debug"',
        'test -f nope.pt && MORE="--resume nope.pt"',
        "[ -d fast ] && MORE=fast || MORE=slow",
    ],
)
def test_what_a_test_sets_is_left_to_the_job(shell: Shell, hpml: Hpml, line: str) -> None:
    """The test itself goes into the command: it is not taken as true."""
    job, told = imported(shell, hpml, f"{line}\npython train.py $MORE --epochs 3\n")
    assert job["command"] == ["bash", "-c", f"{line}\nexec python train.py $MORE --epochs 3"]
    assert "is known in the job only" in told


@pytest.mark.parametrize(
    ("body", "args"),
    [
        ('run() { python train.py "$@"; }\nrun --a 1 --b "2 3"\n', ["--a", 1, "--b", "2 3"]),
        ('run() { local n=$1; shift; python train.py $n "$@"; }\nrun 5 --x\n', [5, "--x"]),
        ('run() { python train.py "${@:2}"; }\nrun name --epochs 3\n', ["--epochs", 3]),
        ("run() { python train.py one $@; }\nrun\n", ["one"]),
    ],
)
def test_a_function_passes_all_its_arguments_on(
    shell: Shell, hpml: Hpml, body: str, args: list[object]
) -> None:
    """As the shell would, after `shift` too."""
    job, _ = imported(shell, hpml, body)
    assert job["args"] == args


@pytest.mark.parametrize(
    "line",
    [
        "echo 'lr: 1' > conf.yaml",
        "printf x >> conf.yaml",
        "cat > cfg.json <<END\n{}\nEND",
        "trap 'cp ckpt $HOME' USR1",
        "umask 002",
    ],
)
def test_what_a_program_may_need_is_told_as_lost(shell: Shell, hpml: Hpml, line: str) -> None:
    """A file that is written, a signal that is handled, a mask that is set."""
    _, told = imported(shell, hpml, f"{line}\npython train.py\n")
    assert f"old.sh:3: not carried over: {line.splitlines()[0]}" in told


@pytest.mark.parametrize("line", ["echo hi >&2", "echo hi > /dev/null 2>&1", "date 2>&1"])
def test_output_that_goes_nowhere_is_not_told_as_lost(shell: Shell, hpml: Hpml, line: str) -> None:
    """Only files count."""
    _, told = imported(shell, hpml, f"{line}\npython train.py\n")
    assert "not carried over" not in told
