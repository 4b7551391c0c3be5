"""`hpml import`: where the job file goes, and what is reported."""

from __future__ import annotations

import pytest

from tests.unit.cli.support import Hpml, Shell

SCRIPT = """\
#!/bin/bash
#SBATCH --time=5 --clusters=other
echo hello
python train.py --lr 0.1
"""


@pytest.fixture
def script(shell: Shell) -> str:
    """A script with one thing that cannot be carried over."""
    (shell.root / "job.sh").write_text(SCRIPT)
    return "job.sh"


def test_the_job_file_and_the_report(hpml: Hpml, script: str) -> None:
    """The job file goes to stdout, the report to stderr; programs get both in one document."""
    made = hpml("import", script)
    assert made.code == 0
    assert "script: train.py\nargs: [--lr, '0.1']\nresources:\n  time: 00:05:00\n" in made.out
    assert made.err.startswith("job.sh:2: by hand: --clusters=other\n    ")
    assert "job.sh:3: changed: 1 command in environment.setup\n    they run once" in made.err
    assert hpml("import", script, "-o", "-").out == made.out
    document = hpml("import", script, "--json").json()
    assert (document["output"], document["text"]) == (None, made.out)
    assert document["job"]["args"] == ["--lr", "0.1"]
    first = document["findings"][0]
    assert set(first) == {"line", "text", "kind", "why", "todo"}
    assert (first["line"], first["text"], first["kind"]) == (2, "--clusters=other", "lost")


GWDG = """\
#!/bin/bash
#SBATCH --job-name=custom-name
#SBATCH --nodes=2 # total number of nodes
#SBATCH --ntasks-per-node=1 # total number of tasks per node
#SBATCH --cpus-per-task=2 # cpu cores per task, > 1
#SBATCH --mem-per-cpu=4GB # memory given to each cpu
#SBATCH --time=00:01:00 # total run time limit (HH:MM:SS)
#SBATCH --mail-type=all # mail when job begins and ends
#SBATCH --mail-user=custom@mail.com
module load anaconda3/2021.05
source activate custom-env
python custom-script.py
"""


def test_one_program_on_two_nodes_is_to_do_by_hand(hpml: Hpml, shell: Shell) -> None:
    """A course's own script: the draft starts it on one node as the script does, and says so."""
    (shell.root / "job.sh").write_text(GWDG)
    (shell.root / "custom-script.py").touch()
    made = hpml("import", "job.sh", "-o", "job.yaml")
    assert made.code == 0
    assert "job.sh:3: by hand: --nodes=2\n    the program starts on 1 of" in made.err
    text = (shell.root / "job.yaml").read_text()
    assert "# - line 3: --nodes=2: the program starts on 1 of the header's 2 nodes" in text
    assert "  modules: [anaconda3/2021.05]\n  conda: custom-env\n" in text
    assert "nodes: 2" not in text.partition("name:")[2]
    script = hpml("render", "job.yaml").out
    assert "#SBATCH --nodes=1\n" in script
    assert "#SBATCH --mem-per-cpu=4096M\n" in script
    assert "custom-name: " in (checked := hpml("check", "job.yaml")).out + checked.err


def test_a_reason_and_a_hint_are_printed_once(hpml: Hpml, script: str, shell: Shell) -> None:
    """Lines with one reason stand together."""
    (shell.root / script).write_text(SCRIPT + "./post.sh\n./more.sh\n")
    error = hpml("import", script).err
    first, second = "job.sh:5: by hand: ./post.sh\n", "job.sh:6: by hand: ./more.sh\n"
    assert f"{first}{second}    hpml runs nothing after the program\n    -> " in error
    assert error.count("hpml submit --after") == 1


def test_a_draft_through_a_shell_runs(hpml: Hpml, shell: Shell) -> None:
    """A list, a pattern for files and text in braces: the program gets what the script's gets."""
    (shell.root / "a.txt").touch()
    (shell.root / "job.sh").write_text(
        "#!/bin/bash\n#SBATCH --time=5\nL=(x 'y z')\nL+=($(echo w))\nrun_dir=r\n"
        "srun printf '<%s>' \"${L[@]}\" *.txt ${run_dir} {run.dir}\n"
    )
    assert hpml("import", "job.sh", "-o", "shell.yaml").code == 0
    done = hpml("run", "--local", "shell.yaml")
    assert "<x><y z><w><a.txt><r><{run.dir}>" in done.out + done.err


def test_a_file_is_replaced_only_with_force(hpml: Hpml, script: str, shell: Shell) -> None:
    """What is made is rendered as any job file; an existing file stays as it is."""
    made = hpml("import", script).out
    assert hpml("import", script, "-o", "made.yaml").code == 0
    path = shell.root / "made.yaml"
    assert path.read_text() == made
    assert "--time=00:05:00" in hpml("render", "made.yaml").out
    path.write_text("mine")
    assert hpml("import", script, "-o", "made.yaml").refuses(2, "already exists", "--force")
    assert path.read_text() == "mine"
    assert hpml("import", script, "-o", "made.yaml", "--force").code == 0
    assert path.read_text() == made
    assert not list(shell.root.glob(".made*"))


@pytest.mark.parametrize(
    ("words", "text", "code", "part"),
    [
        ("pbs.sh -o never.yaml", b"#!/bin/bash\n#PBS -l nodes=1\npython t.py\n", 2, "PBS"),
        ("binary.sh -o never.yaml", b"\x7fELF\0\0", 2, "binary"),
        ("open.sh -o never.yaml", b"#!/bin/bash\npython 't.py\n", 2, "line 2"),
        ("missing.sh -o never.yaml", None, 3, "no such script"),
        ("job.sh -o job.toml", None, 2, "written as YAML"),
        ("job.sh -o no/such/place.yaml", None, 2, "cannot write"),
    ],
)
def test_what_cannot_be_imported(
    hpml: Hpml, shell: Shell, script: str, words: str, text: bytes | None, code: int, part: str
) -> None:
    """A line, a hint, the status, and nothing written."""
    if text is not None:
        (shell.root / words.split(maxsplit=1)[0]).write_bytes(text)
    assert hpml("import", *words.split()).refuses(code, part, "hint: ")
    assert not (shell.root / "never.yaml").exists()
