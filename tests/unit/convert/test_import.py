"""Single lines of a script, and scripts that are none."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpml_orchestrator.convert import Finding, Imported, Place, import_script
from hpml_orchestrator.convert.lexer import ShellError
from hpml_orchestrator.convert.parser import parse
from hpml_orchestrator.convert.script import MAX_BYTES, decode, read_script
from hpml_orchestrator.errors import HpmlError, InputError, NotFoundError
from hpml_orchestrator.spec import Job
from hpml_orchestrator.spec.document import parse_yaml

PLACE = Place(directory="/home/ada/proj", base="/home/ada/proj", environment={"HOME": "/home/ada"})


def imported(*lines: str, place: Place = PLACE) -> Imported:
    return import_script("\n".join(["#!/bin/bash", *lines, ""]), name="job.sh", place=place)


def header(*lines: str) -> Any:
    """The resources of a script that starts one rank per task."""
    made = imported(*(f"#SBATCH {line}" for line in lines), "srun python train.py")
    return made.job.get("resources", {})


def launch(line: str, *options: str) -> Imported:
    return imported(*(f"#SBATCH {one}" for one in options), line)


def told(made: Imported, kind: str) -> list[Finding]:
    return [one for one in made.findings if one.kind == kind]


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        (["-N 3"], {"nodes": 3}),
        (["-N2-4"], {"nodes": 2}),
        (["--nodes=2", "--ntasks=8"], {"nodes": 2, "ranks_per_node": 4}),
        (["-n8 --ntasks-per-node 4"], {"nodes": 2, "ranks_per_node": 4}),
        (["--tasks-per-n=4"], {"ranks_per_node": 4}),
        (["--gpus-per-node=4 --ntasks-per-gpu=2"], {"gpus": 4, "ranks_per_gpu": 2}),
        (["-N2 --gpus=a100:8 --ntasks-per-node=4"], {"nodes": 2, "gpus": "a100:4"}),
        (["-n2 --gpus-per-task=h100:1 -N1"], {"gpus": "h100:2"}),
        (["-N1 --gres=gpu:2(S:0-1),shard:1"], {"gpus": 2, "ranks_per_node": 1}),
        (["-N1 -n2 --gpus-per-node=v100:1,a100:1"], {"gpus": ["v100:1", "a100:1"]}),
        (["--mem=1T"], {"memory": "1024G"}),
        (["--mem 2500"], {"memory": "2500M"}),
        (["-N1 -n4 -c2 --mem-per-cpu=512"], {"memory": "4G"}),
        (["--mem=4G", "--mem-per-cpu=1G"], {"memory": "1G"}),
        (["-N1 --gpus-per-node=2 --mem-per-gpu=1500M --cpus-per-gpu=3"], {"memory": "3000M"}),
        (["-t 5"], {"time": "00:05:00"}),
        (["--time=1-0", "-t 2:00:00"], {"time": "02:00:00"}),
        (["-C 'a100&ib'"], {"constraint": "a100&ib"}),
        (["--exclusive"], {"exclusive": True}),
        (["--mail-type=ALL --mail-user=ada"],
         {"mail": {"to": "ada", "on": ["begin", "end", "fail", "requeue"]}}),
        (["--begin=now+1hour -w n[1-3] -s --nice"],
         {"extra": ["--begin=now+1hour", "--nodelist=n[1-3]", "--oversubscribe", "--nice"]}),
        (["--reservation=a", "--reservation=b"], {"extra": ["--reservation=b"]}),
    ],
)  # fmt: skip
def test_directives_become_fields(lines: list[str], wanted: dict[str, Any]) -> None:
    """Short, long, abbreviated and repeated options, as sbatch reads them."""
    found = header(*lines)
    assert {name: found.get(name) for name in wanted} == wanted


def test_ranks_that_follow_from_gpus_are_left_out() -> None:
    """One rank per GPU is what hpml does anyway."""
    assert "ranks_per_node" not in header("-N1 --gpus-per-node=4 --ntasks-per-node=4")


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("--requeue", "requeue"),
        ("--dependency=afterok:1", "hpml submit --after"),
        ("--mem=0", "resources.memory"),
        ("--time=UNLIMITED", "resources.time"),
        ("--gpu-bind=closest", "hpml's to say"),
        ("--clusters=other", "login node"),
        ("--unheard=1", "resources.extra"),
        ("--comment='a b'", "id"),
        ("--extra='a b'", "characters"),
        ("--mail-type=ARRAY_TASKS", "ARRAY_TASKS"),
        ("--partition='a b'", "letters"),
    ],
)
def test_what_a_job_file_has_no_word_for_is_told(line: str, part: str) -> None:
    """The line is named, and a reason or a way out."""
    made = imported(f"#SBATCH {line}", "srun python train.py")
    lost = told(made, "lost")
    assert [one.line for one in lost] == [2]
    assert part in f"{lost[0].why} {lost[0].todo} {lost[0].text}"


@pytest.mark.parametrize(
    ("lines", "part"),
    [
        (["#PBS -l nodes=2", "python train.py"], "PBS"),
        (["#BSUB -n 4", "python train.py"], "LSF"),
        (["#$ -pe mpi 4", "python train.py"], "Grid Engine"),
        (["#SBATCH --nodes=two", "python train.py"], "two"),
        (["#SBATCH --nodes", "python train.py"], "value is missing"),
        (["#SBATCH --time=soon", "python train.py"], "soon"),
        (["#SBATCH -N1 stray", "python train.py"], "stray"),
        (["#SBATCH hetjob", "python train.py"], "heterogeneous"),
        (["#SBATCH -J 'open", "python train.py"], "unmatched"),
        (["#SBATCH -N1", "echo hello"], "starts a program"),
        (["#SBATCH -N1", 'python "train.py'], 'a " is not closed'),
        (["#SBATCH -N1", "if true; then python train.py"], "`fi` is missing"),
        (["f() { f; }", "f"], "calls itself"),
    ],
)
def test_what_is_no_script_for_sbatch_is_refused(lines: list[str], part: str) -> None:
    """One error with the line and a hint; PBS and others are named."""
    with pytest.raises(InputError, match="(?s)") as caught:
        imported(*lines)
    assert part in f"{caught.value} {caught.value.hint}"
    assert caught.value.hint


@pytest.mark.parametrize("first", ["", "echo hello", "#!/usr/bin/env perl", "#!/bin/tcsh"])
def test_other_interpreters_are_refused(first: str) -> None:
    """A batch script for hpml is a shell script."""
    with pytest.raises(InputError, match="line 1"):
        import_script(f"{first}\npython train.py\n", name="job.sh", place=PLACE)


@pytest.mark.parametrize(
    ("line", "options", "fields"),
    [
        ("python -m torch.distributed.run --nproc-per-node 2 t.py a", ["-N1"],
         {"script": "t.py", "args": ["a"], "resources": {"ranks_per_node": 2}}),
        ("torchrun --nproc_per_node=gpu -m pkg.t", ["--gpus-per-node=2"],
         {"module": "pkg.t", "resources": {"gpus": 2}}),
        ("torchrun --nproc_per_node=$(nproc) t.py", ["-c 6"],
         {"script": "t.py", "resources": {"ranks_per_node": 6}}),
        ("srun -n 4 -c 2 ./solve --x=1", ["-n 4 -c 2"],
         {"launcher": "srun", "command": ["./solve", "--x=1"],
          "resources": {"ranks_per_node": 4, "cpus_per_rank": 2}}),
        ("env A=1 B='x y' python3.11 -u t.py", [],
         {"launcher": "srun", "script": "t.py",
          "environment": {"python": "python3.11", "variables": {"A": "1", "B": "x y"}}}),
        ("exec nohup /opt/env/bin/python t.py", [],
         {"launcher": "srun", "script": "t.py", "environment": {"python": "/opt/env/bin/python"}}),
        ("python -W ignore t.py", [],
         {"launcher": "srun", "command": ["python", "-W", "ignore", "t.py"]}),
        ("python -c 'print(1)'", [],
         {"launcher": "srun", "command": ["python", "-c", "print(1)"]}),
        ('srun bash -c "torchrun --node_rank=\\$SLURM_PROCID --nproc_per_node=2 t.py --a 1"',
         ["-N2"],
         {"script": "t.py", "args": ["--a", "1"], "resources": {"nodes": 2, "ranks_per_node": 2}}),
        ("bash run.sh 1", [], {"launcher": "srun", "command": ["bash", "run.sh", "1"]}),
        ("srun --container-image=ubuntu python t.py", [],
         {"launcher": "srun", "script": "t.py",
          "environment": {"container": {"engine": "pyxis", "image": "ubuntu"}}}),
        ("python t.py --json '{\"a\": [1, 2]}' --p a,b --neg -1", [],
         {"launcher": "srun", "script": "t.py",
          "args": ["--json", '{"a": [1, 2]}', "--p", "a,b", "--neg", "-1"]}),
    ],
)  # fmt: skip
def test_launch_lines_become_a_program(
    line: str, options: list[str], fields: dict[str, Any]
) -> None:
    """Any spelling of a launcher leaves the program and its arguments."""
    found = launch(line, "--time=1:00:00", *options).job
    assert found == {"name": "job", **fields}


@pytest.mark.parametrize(
    ("lines", "fields", "told_of"),
    [
        (["mpirun -np 4 ./solve"], {"launcher": "mpirun"}, ""),
        (["mpiexec --oversubscribe -n 4 ./solve"], {"launcher": "mpirun"}, ""),
        (["module load OpenMPI/4.1.5-GCC", "mpirun ./solve"], {"launcher": "mpirun"}, ""),
        (["mpirun --mca btl ^openib --bind-to none -np 4 ./solve"],
         {"launcher": "mpirun", "environment": {"variables": {"OMPI_MCA_btl": "^openib"}}}, ""),
        (["mpirun --display bind --pmixmca gds hash --prtemca odls_base_sigkill_timeout 9 ./solve"],
         {"launcher": "mpirun", "environment": {"variables": {"PMIX_MCA_gds": "hash"}}}, ""),
        (["mpirun -ppn 4 -genv A 1 ./solve"], {"launcher": "srun", "mpi": "pmix"},
         "its options are not those of Open MPI's mpirun"),
        (["mpiexec.hydra -n 4 ./solve"], {"launcher": "srun", "mpi": "pmix"},
         "its options are not those of Open MPI's mpirun"),
        (["module load intel-mpi/2021.9", "mpirun -np 4 ./solve"],
         {"launcher": "srun", "mpi": "pmix"}, "the mpirun of module intel-mpi/2021.9 is not"),
        (["horovodrun -np 4 -H localhost:4 ./solve"], {"launcher": "horovodrun"}, ""),
        (["srun --container-image=ubuntu horovodrun -np 4 ./solve"],
         {"launcher": "srun", "mpi": "pmix"}, "pyxis is a part of srun"),
    ],
)  # fmt: skip
def test_mpirun_and_horovodrun_stay_what_they_are(
    lines: list[str], fields: dict[str, Any], told_of: str
) -> None:
    """Where hpml starts the very same; another MPI's mpirun becomes srun, and that is told."""
    made = imported("#SBATCH -N1 -n4 -t 60", *lines)
    job = made.job
    assert (job["launcher"], job.get("mpi")) == (fields["launcher"], fields.get("mpi"))
    assert job["command"] == ["./solve"]
    assert job["resources"] == {"ranks_per_node": 4}
    for name, value in fields.get("environment", {}).get("variables", {}).items():
        assert job["environment"]["variables"][name] == value
    changed = told(made, "changed")
    assert [told_of in one.why for one in changed] == [True] * bool(told_of)


def test_horovodrun_on_several_nodes_becomes_mpirun() -> None:
    """Hpml starts it on one node only; what that needs of Horovod is told."""
    made = launch("horovodrun -np 8 -H a:4,b:4 python t.py", "-N2 -n8", "-t 60")
    assert made.job["launcher"] == "mpirun"
    assert made.job["resources"] == {"nodes": 2, "ranks_per_node": 4}
    assert ["built with MPI" in one.why for one in told(made, "changed")] == [True]


def test_the_second_program_of_an_mpirun_is_told() -> None:
    """A colon begins another program: no argument of the first, and nothing that hpml starts."""
    made = launch("mpirun -np 2 ./solve -x 1 : -np 2 ./serve", "-N1 -n4", "-t 60")
    assert made.job["command"] == ["./solve", "-x", "1"]
    (found,) = told(made, "lost")
    assert (found.text, "one program" in found.why) == (": -np 2 ./serve", True)


@pytest.mark.parametrize(
    "line",
    [
        "srun --cpu-bind=map_cpu:0,1 ./solve",
        "srun --gpu-bind=closest ./solve",
        "mpirun --map-by ppr:1:socket ./solve",
        "mpirun --bind-to core ./solve",
        "mpirun --rankfile ranks.txt ./solve",
        "mpirun -rf ranks.txt ./solve",
        "mpirun --cpu-set 0-7 ./solve",
        "torchrun --numa-binding node t.py",
        "numactl --cpunodebind=0 ./solve",
    ],
)
def test_binding_is_hpmls(line: str) -> None:
    """What binds in the script is told with the field that says how hpml does."""
    made = launch(line, "-N1", "-t 60")
    assert [*made.job.get("command", ["./solve"])] == ["./solve"]
    (found,) = told(made, "lost")
    assert (found.why, "binding" in found.todo) == ("hpml binds the ranks itself", True)
    assert told(launch("srun --cpu-bind=verbose,none ./solve", "-N1", "-t 60"), "lost") == []


def test_what_the_job_alone_knows_is_left_to_bash() -> None:
    """Holes stay shell text, all else is quoted, and what they need is set before."""
    made = imported(
        "D=$(date +%F)", "X='a b'", 'srun python t.py --day "$D" --x "$X" --n $SLURMD_NODENAME'
    )
    assert made.job["command"] == [
        "bash",
        "-c",
        "exec python t.py --day \"$(date +%F)\" --x 'a b' --n $SLURMD_NODENAME",
    ]
    assert [one.line for one in told(made, "changed") if "bash" in one.why] == [4]


def test_arguments_of_the_script_are_told() -> None:
    """A job file has no `$1`; it is told, and `"$@"` left out."""
    made = imported('python t.py "$@"')
    assert made.job.get("args") is None
    assert [one.text for one in told(made, "lost")] == ["$@"]
    made = imported("python t.py --lr $1")
    assert made.job["command"] == ["python", "t.py", "--lr", "$1"]
    assert "letter by letter" in told(made, "lost")[0].why


def test_threads_that_hpml_would_set_otherwise_are_kept() -> None:
    """One torchrun of 8 CPUs for 2 ranks: the script gives each rank 8 threads, hpml 4."""
    line = "export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK"
    made = imported("#SBATCH -N1 -c8", line, "torchrun --nproc_per_node=2 t.py")
    assert made.job["environment"]["variables"] == {"OMP_NUM_THREADS": "8"}
    made = imported("#SBATCH -N1 -n2 -c8", line, "srun python t.py")
    assert "environment" not in made.job


def test_paths_count_from_the_job_file(tmp_path: Path) -> None:
    """With the job file in another directory than sbatch's, workdir and data are told from it."""
    place = Place(directory="/home/ada/proj", base="/home/ada/proj/jobs", environment={})
    made = imported("cp data.h5 $TMPDIR/", "python t.py $TMPDIR/data.h5", place=place)
    assert made.job["workdir"] == "/home/ada/proj"
    assert made.job["stage"] == [{"name": "data", "source": "/home/ada/proj/data.h5"}]
    assert made.job["args"] == ["{stage.data}/data.h5"]


def test_an_archive_that_is_copied_and_unpacked_is_one_entry() -> None:
    """Copy, then untar on the node: one archive, brought and unpacked."""
    made = imported(
        "cp /data/set.tgz /tmp/", "tar xzf /tmp/set.tgz -C /tmp", "python t.py --data /tmp/set"
    )
    assert made.job["stage"] == [{"name": "set", "source": "/data/set.tgz", "kind": "tar"}]
    assert made.job["args"] == ["--data", "{stage.set}/set"]


def test_the_branch_of_an_if_that_is_taken_is_told() -> None:
    """What hpml cannot decide it says."""
    made = imported("if [ -d /x ]; then", "  module load a", "else", "  module load b", "fi",
                    "python t.py")  # fmt: skip
    assert made.job["environment"]["modules"] == ["a"]
    assert [one.line for one in told(made, "changed") if "if" in one.text] == [2]


def test_a_command_line_that_is_put_together_is_taken_apart() -> None:
    """Launcher and program in variables, started through `bash -c`, as large trainings do."""
    made = imported(
        "#SBATCH -N4 --ntasks-per-node=1 --gres=gpu:8 -c40 -t 60",
        "cd $SLURM_SUBMIT_DIR",
        "N=8",
        'export LAUNCHER="python -u -m torch.distributed.run --nproc_per_node $N \\',
        '  --nnodes $SLURM_NNODES --rdzv_endpoint $(hostname):6000 --max_restarts 0"',
        'export CMD=" $SLURM_SUBMIT_DIR/train.py --save runs/$SLURM_JOB_ID/last "',
        'srun --jobid $SLURM_JOBID bash -c "$LAUNCHER --node_rank \\$SLURM_PROCID $CMD"',
    )
    assert made.job == {
        "name": "job",
        "script": "train.py",
        "args": ["--save", "{run.dir}/last"],
        "resources": {"nodes": 4, "gpus": 8, "cpus_per_rank": 5},
    }
    assert told(made, "lost") == []


def test_what_a_shell_reads_from_a_file_is_left_to_it() -> None:
    """`read`, lists with names, tools that start Python: bash sets them again in the job."""
    made = imported(
        "CFG[1]='--x 1'",
        'read LR BS <<< $(sed -n "3p" grid.csv)',
        "uv run python train.py ${CFG[$SLURM_LOCALID]} --lr $LR",
    )
    assert made.job["command"][2] == (
        "CFG[1]='--x 1'\n"
        'read LR BS <<< $(sed -n "3p" grid.csv)\n'
        "exec uv run python train.py ${CFG[$SLURM_LOCALID]} --lr $LR"
    )


def test_what_is_left_out_leaves_nothing_empty() -> None:
    """A variable that may not be set is told, and no empty mapping stands for it."""
    made = imported("export HPML_X=1", "python train.py")
    assert "environment" not in made.job
    assert [one.line for one in told(made, "lost")] == [2]


def test_letters_of_any_script_are_written_as_they_are() -> None:
    """Text stays readable in the job file, and what cannot be printed is escaped."""
    made = imported("python train.py --name 'é 😀' $'\\x1b[0m'")
    assert made.job["args"] == ["--name", "é 😀", "\x1b[0m"]
    assert '"é 😀"' in made.text
    assert "\x1b" not in made.text


def test_directories_that_only_the_job_knows_are_told() -> None:
    """A node's own disk is no directory to run in, and `$0` is Slurm's copy."""
    made = imported("cd $TMPDIR/work", "python train.py")
    assert "workdir" not in made.job
    assert "all nodes see" in told(made, "lost")[0].why
    made = imported('cd "$(dirname "$0")"', "$(which python) train.py")
    assert made.job["script"] == "train.py"
    assert "$0" in told(made, "lost")[0].why


def test_export_none_is_a_minimal_environment() -> None:
    """`--export` says what travels."""
    place = Place(directory="/d", base="/d", environment={"KEPT": "1"})
    made = imported("#SBATCH --export=KEPT,MADE=2", "python t.py", place=place)
    assert made.job["environment"] == {
        "inherit": "minimal",
        "variables": {"KEPT": "1", "MADE": "2"},
    }


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        (b"", "empty"),
        (b"#!/bin/bash\n\0", "NUL"),
        (b"#!/bin/bash\n# caf\xe9\n", "line 2"),
        (b"#!/bin/bash\r\npython t.py\r\n", "DOS"),
        (b"#" * (MAX_BYTES + 1), "KiB"),
    ],
)
def test_files_that_are_no_text_are_refused(raw: bytes, part: str) -> None:
    """Each with the reason, as sbatch would refuse them, too."""
    with pytest.raises(InputError, match=part):
        decode(raw, "job.sh")


def test_a_file_that_is_not_there_or_no_file(tmp_path: Path) -> None:
    """A missing file has an exit status of its own, and a directory or a pipe is not read."""
    with pytest.raises(NotFoundError):
        read_script(tmp_path / "nothing.sh")
    with pytest.raises(InputError, match="no regular file"):
        read_script(tmp_path)
    with pytest.raises(InputError, match="no regular file"):
        read_script(Path("/dev/zero"))


WORDS = st.sampled_from(
    "python train.py srun torchrun --nproc_per_node=2 $X ${X:-1} \"$Y\" 'a' $(date) | && ; & ( ) { "
    "} if then fi for in do done case esac << EOF > log A=1 export module load cp $TMPDIR/a tar "
    "-xf #SBATCH --nodes=2 -n4 --mem=1G \\ \n \n \n \" ' ` $(( 1+1 )) [[ ]] cd bash -c "
    "mpirun -np accelerate launch --num_processes deepspeed ${A[0]} A=(1 2) {1..3} *.py".split(" ")
)


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.text(max_size=300), st.lists(WORDS, max_size=40).map(" ".join)))
def test_any_text_is_imported_or_refused(body: str) -> None:
    """Whatever stands in a script, there is a job file that loads, or one of hpml's own errors."""
    try:
        made = import_script(f"#!/bin/bash\n{body}\n", name="job.sh", place=PLACE)
    except HpmlError:
        return
    assert made.text.endswith("\n")
    assert Job.model_validate(parse_yaml(made.text, "it")) == Job.model_validate(made.job)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    """Bytes that are no text give an error of hpml's own."""
    try:
        text = decode(raw, "job.sh")
        import_script(text, name="job.sh", place=PLACE)
    except HpmlError:
        pass


@pytest.mark.parametrize(
    "text",
    ["$(", "(", "{ ", "<<A ", '"$(', "${", "if ", "a\n", "a;", "$a", "`a`", "x=(", "f()", "! ",
     "a|", "case x in ", "[[ ", "$((", "\\\n", "a() b\n", "for i in {1..9}; do ", "A+=$A ", "'"],
)  # fmt: skip
def test_hostile_texts_take_bounded_time(text: str) -> None:
    """The largest file that is read, full of one thing, is done with in seconds."""
    body = text * (MAX_BYTES // len(text))
    began = time.monotonic()
    with pytest.raises(InputError):
        import_script(f"#!/bin/bash\n{body}\n", name="job.sh", place=PLACE)
    assert time.monotonic() - began < 300


def test_loops_in_loops_end() -> None:
    """Loops that would make millions of rounds are not followed to their end."""
    loops = "for a in {1..60}; do " * 6
    with pytest.raises(InputError, match="loops"):
        imported(f"{loops} echo x; {'done; ' * 6}", "python t.py")


def test_values_that_double_end() -> None:
    """A variable that grows with itself is refused before memory is gone."""
    with pytest.raises(InputError, match="too long"):
        imported("A=aaaaaaaaaaaaaaaa", *["A=$A$A"] * 40, "python t.py $A")


@pytest.mark.parametrize(
    ("text", "line"),
    [("a\n'b\n", 2), ("a\n\n$(b\n", 3), ("cat <<E\nx\nE\n)\n", 4), ("if a\nthen b\n", 3)],
)
def test_errors_name_the_line(text: str, line: int) -> None:
    """Here-documents and joined lines count."""
    with pytest.raises(ShellError) as caught:
        parse(text)
    assert caught.value.line == line


@pytest.mark.parametrize(
    "line",
    [
        "/usr/bin/time -v -o f srun python train.py",
        "srun /usr/bin/time -v --output=f python train.py",
        "srun time --format %e -- python train.py",
    ],
)
def test_time_is_no_part_of_the_command(line: str) -> None:
    """The program is carried; what `time` would write is told as lost."""
    made = launch(line)
    assert (made.job["script"], "command" in made.job) == ("train.py", False)
    (lost,) = told(made, "lost")
    assert lost.text.lstrip("/usrbin").startswith("time -")
    assert "hpml show" in lost.why


@pytest.mark.parametrize("word", ["time", "time -p", "time -p --", "srun /usr/bin/time"])
def test_time_alone_is_not_worth_a_word(word: str) -> None:
    """It prints a line or two."""
    made = launch(f"{word} srun python train.py".replace("time srun", "time"))
    assert made.job["script"] == "train.py"
    assert not told(made, "lost")


@pytest.mark.parametrize(
    ("line", "workdir"),
    [
        ("apptainer exec --pwd /w -B $PWD:/w i.sif python train.py", None),
        ("apptainer exec --pwd /w/sub --bind $PWD/data:/w:ro i.sif python train.py", "data/sub"),
        ("apptainer exec --pwd $PWD i.sif python train.py", None),
        ("apptainer exec --pwd $HOME/other i.sif python train.py", "~/other"),
        (
            "srun --container-image=i --container-mounts=/d:/w --container-workdir=/w python a.py",
            "/d",
        ),
    ],
)
def test_a_directory_of_a_container_becomes_that_of_the_nodes(
    line: str, workdir: str | None
) -> None:
    """What a mount says is on the nodes under another name."""
    made = launch(line)
    assert made.job.get("workdir") == workdir
    assert made.job["script"] in ("train.py", "a.py")
    assert not told(made, "lost")


@pytest.mark.parametrize(
    "line",
    [
        "apptainer exec --pwd /opt/code i.sif python train.py",
        "srun --container-image=i --container-workdir=/opt/code python train.py",
    ],
)
def test_a_directory_that_only_the_container_has_is_told(line: str) -> None:
    """It is no working directory of the nodes."""
    made = launch(line)
    assert "workdir" not in made.job
    (lost,) = told(made, "lost")
    assert "/opt/code" in lost.text


@pytest.mark.parametrize(
    "option", ["--cpu-bind=cores", "--mem=4G", "--mem-per-cpu=1G", "--mem-per-gpu=2G", "-t 5"]
)
def test_limits_of_a_step_are_told_as_lost(option: str) -> None:
    """Hpml's srun has none of its own."""
    (lost,) = told(launch(f"srun {option} python train.py"), "lost")
    assert lost.text == f"srun {option}" or lost.text.startswith("srun --time")


@pytest.mark.parametrize("option", ["--cpu-bind=none", "--mem=0"])
def test_what_hpmls_srun_does_anyway_is_not_told(option: str) -> None:
    """All of the job's memory, and no binding."""
    assert not told(launch(f"srun {option} python train.py"), "lost")


@pytest.mark.parametrize(
    "text",
    [
        "case $1 in a) echo hi;; b) module load cuda;; esac",
        "case $1 in a) ;; *) for i in 1; do cd /data; done;; esac",
        'if [ -n "$X" ]; then :; else export NCCL_DEBUG=INFO; fi',
        'if [ -n "$X" ]; then :; else if true; then pip install x; fi; fi',
    ],
)  # fmt: skip
def test_what_only_another_branch_does_is_told(text: str) -> None:
    """The first branch does nothing, the others would."""
    made = imported(text, "srun python train.py")
    (changed,) = [one for one in told(made, "changed") if "known in the job only" in one.why]
    assert changed.text == text
    quiet = imported("case $1 in a) echo hi;; b) echo ho;; esac", "srun python train.py")
    assert not [one for one in told(quiet, "changed") if "known in the job only" in one.why]


@pytest.mark.parametrize(
    "test",
    [
        'if [ -n "$X" ]; then LR=2; fi',
        'if [ -n "$X" ]; then :; else LR=2; fi',
        "case $X in a) ;; b) LR=2;; esac",
        '[ -n "$X" ] && LR=2',
    ],
)  # fmt: skip
def test_a_variable_that_a_branch_may_change_is_left_to_the_job(test: str) -> None:
    """With its value from before, which counts where the branch is not taken."""
    made = imported("LR=1", test, "srun python train.py --lr $LR")
    shell, option, text = made.job["command"]
    assert (shell, option) == ("bash", "-c")
    assert text == f"LR=1\n{test}\nexec python train.py --lr $LR"


def test_a_command_that_ran_before_a_cd_is_told() -> None:
    """What is left to the job's shell runs in the program's directory."""
    lines = ["D=$(cat conf)", "cd sub", "srun python train.py $D"]
    told_so = [one for one in told(imported(*lines), "changed") if "ran in" in one.why]
    assert [one.text for one in told_so] == ["$(cat conf)"]
    assert "/home/ada/proj, and runs in /home/ada/proj/sub" in told_so[0].why
    lines = ["cd sub", "D=$(cat conf)", "srun python train.py $D"]
    assert not [one for one in told(imported(*lines), "changed") if "ran in" in one.why]


def test_numbers_of_nodes_are_told_as_numbers_are() -> None:
    """One node is no nodes, on either side."""
    for asked, named, words in (
        (2, 1, "it names 1 node and the header 2: 2 are asked for"),
        (1, 2, "it names 2 nodes and the header 1: 1 is asked for"),
    ):
        line = f"srun torchrun --nnodes={named} --rdzv-endpoint=$H:1 --nproc-per-node=2 t.py"
        made = launch(line, f"-N{asked} --ntasks-per-node=1 --gres=gpu:2")
        assert words in [one.why for one in told(made, "changed")]
