"""Single lines of a script, and files that are not scripts."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpml_orchestrator.convert.draft import ImportContext, Imported, import_script
from hpml_orchestrator.convert.report import ImportNote
from hpml_orchestrator.convert.shell import read_script
from hpml_orchestrator.errors import HpmlError, InputError, NotFoundError
from hpml_orchestrator.jobfile.load import is_in, leaves, parse_yaml
from hpml_orchestrator.runs.load import load_job
from hpml_orchestrator.script.render import Capabilities, render
from hpml_orchestrator.site.model import ResolvedSite, Site

CONTEXT = ImportContext(
    directory="/home/ada/proj", base="/home/ada/proj", environment={"HOME": "/home/ada"}
)


def imported(*lines: str, context: ImportContext = CONTEXT) -> Imported:
    """Import a script, whose job file must describe the job that was made."""
    text = "\n".join(["#!/bin/bash", *lines, ""])
    made = import_script(text, name="job.sh", context=context)
    assert load_job(f"{context.base}/job.yaml", fields=written(made)).job == made.job
    return made


def written(made: Imported) -> Any:
    """The fields of a job file as they are written."""
    return parse_yaml(made.text, "it")


def launch(line: str, *options: str) -> Imported:
    return imported(*(f"#SBATCH {option}" for option in options), line)


def notes(made: Imported, kind: str) -> list[ImportNote]:
    return [note for note in made.notes if note.kind == kind]


def setup(*lines: str) -> list[str]:
    """The shell lines of a script that starts `python t.py` at its end."""
    job = written(imported("#SBATCH --time=1:00:00", *lines, "srun python t.py"))
    assert (job["script"], job["launcher"]) == ("t.py", "srun")
    return str(job.get("environment", {}).get("setup", "")).splitlines()


@pytest.mark.parametrize(
    ("options", "resources"),
    [
        ("-N 3", {"nodes": 3}),
        ("-N2-4", {"nodes": 2}),
        ("--nodes=2\n--ntasks=8", {"nodes": 2, "ranks_per_node": 4}),
        ("-n8 --ntasks-per-node 4", {"nodes": 2, "ranks_per_node": 4}),
        ("--tasks-per-n=4", {"ranks_per_node": 4}),
        ("-N1 --gpus-per-node=4 --ntasks-per-node=4", {"gpus": 4, "ranks_per_node": 4}),
        ("--gpus-per-node=4 --ntasks-per-gpu=2", {"gpus": 4, "ranks_per_gpu": 2}),
        ("-N2 --gpus=a100:8 --ntasks-per-node=4", {"nodes": 2, "gpus": "a100:4"}),
        ("-n2 --gpus-per-task=h100:1 -N1", {"gpus": "h100:2"}),
        ("-n4 --ntasks-per-gpu=2 -N1", {"gpus": 2, "ranks_per_gpu": 2}),
        ("-N1 --gres=gpu:2(S:0-1),shard:1", {"gpus": 2, "ranks_per_node": 1}),
        ("-N1 -n2 --gpus-per-node=v100:1,a100:1", {"gpus": "v100:1,a100:1"}),
        ("--mem=1T", {"memory": "1T"}),
        ("--mem 2500", {"memory": "2500M"}),
        ("-N1 -n4 -c2 --mem-per-cpu=512", {"memory_per_cpu": "512M"}),
        ("--mem=4G\n--mem-per-cpu=1G", {"memory_per_cpu": "1G"}),
        ("--mem=0", {"memory": "all"}),
        ("-N1 --gpus-per-node=2 --mem-per-gpu=1500M --cpus-per-gpu=3", {"memory": "3000M"}),
        ("-t 5", {"time": "00:05:00"}),
        ("--time=1-0\n-t 2:00:00", {"time": "02:00:00"}),
        ("-C 'a100&ib'", {"constraint": "a100&ib"}),
        ("--exclusive", {"exclusive": True}),
        (
            "--mail-type=END\n--mail-type=BEGIN --mail-user=ada",
            {"mail": {"to": "ada", "on": ["begin", "end"]}},
        ),
        (
            "--mail-type=ALL --mail-user=ada",
            {"mail": {"to": "ada", "on": ["begin", "end", "fail", "requeue"]}},
        ),
        (
            "--begin=now+1hour -w n[1-3] -s --nice",
            {"extra": ["--begin=now+1hour", "--nodelist=n[1-3]", "--oversubscribe", "--nice"]},
        ),
        ("--reservation=a\n--reservation=b", {"extra": ["--reservation=b"]}),
        ("--signal=WINCH@90", {"extra": ["--signal=WINCH@90"]}),
    ],
)
def test_directives_become_fields(options: str, resources: dict[str, Any]) -> None:
    """Short, long, abbreviated and repeated options, as sbatch reads them."""
    made = imported(*(f"#SBATCH {row}" for row in options.split("\n")), "srun python t.py")
    found = written(made).get("resources", {})
    assert {name: found.get(name) for name in resources} == resources


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("#SBATCH --requeue\n{}", {"requeue": ["preemption", "node_failure"]}),
        ("#SBATCH --signal=USR1@90\n{}", {"signal": "USR1", "lead": "00:01:30", "requeue": []}),
        ("#SBATCH --signal=B:SIGUSR2\n{}", {"signal": "USR2", "lead": "00:01:00", "requeue": []}),
        (
            "#SBATCH --signal=usr1@120 --requeue\ntrap 'scontrol requeue $SLURM_JOB_ID' USR1\n{}",
            {
                "signal": "USR1",
                "lead": "00:02:00",
                "requeue": ["time_limit", "preemption", "node_failure"],
            },
        ),
        ("#SBATCH --signal=TERM@0\n{}", {"signal": "TERM", "requeue": []}),
        ("#SBATCH --no-requeue\n{}", None),
        ("# scontrol requeue\n{}", None),
    ],
)
def test_requeue_and_signal_become_checkpoint(script: str, expected: dict[str, Any] | None) -> None:
    """The job saves at the same moment, by the same signal, and continues after the same ends."""
    made = imported(script.format("srun python t.py"))
    assert written(made).get("checkpoint") == expected


@pytest.mark.parametrize(
    ("option", "part"),
    [
        ("--dependency=afterok:1", "hpml submit --after"),
        ("--dependency=singleton", "hpml submit --after [any:]RUN"),
        ("--time=UNLIMITED", "resources.time"),
        ("--gpu-bind=closest", "binding"),
        ("--clusters=other", "login node"),
        ("--unheard=1", "resources.extra"),
        ("--comment='a b'", "id"),
        ("--extra='a b'", "characters"),
        ("--mail-type=ARRAY_TASKS", "ARRAY_TASKS"),
        ("--get-user-env", "no field"),
        ("--nodes=two", "Slurm refuses it"),
        ("--time=soon", "Slurm refuses it"),
        ("stray", "not an option"),
        ("hetjob", "no heterogeneous jobs"),
        ("--partition='a b'", "cannot be resources.partition"),
        ("--array=x", "array"),
    ],
)
def test_directives_without_a_field_are_reported(option: str, part: str) -> None:
    """The line is named, and a reason or a way out."""
    (lost,) = notes(imported(f"#SBATCH {option}", "srun python train.py"), "lost")
    assert lost.line == 2
    assert part in f"{lost.why} {lost.todo} {lost.text}"


@pytest.mark.parametrize(
    ("script", "part"),
    [
        ("#PBS -l nodes=2\npython train.py", "PBS"),
        ("#BSUB -n 4\npython train.py", "LSF"),
        ("#$ -pe mpi 4\npython train.py", "Grid Engine"),
        ("#SBATCH --nodes\npython train.py", "value is missing"),
        ("#SBATCH -J 'open\npython train.py", "unmatched"),
        ("#SBATCH -N1\necho hello", "starts a program"),
        ("f() { f; }\nf", "starts a program"),
        ('echo\npython "train.py', "line 3: not valid bash"),
        ("cat <<E\nx\nE\n)", "line 5: not valid bash"),
        ("if true; then\npython train.py", "not valid bash"),
    ],
)
def test_scripts_that_sbatch_or_bash_would_refuse(script: str, part: str) -> None:
    """One error with the line and a hint; PBS and others are named."""
    with pytest.raises(InputError) as caught:
        imported(script)
    assert part in f"{caught.value} {caught.value.hint}"
    assert caught.value.hint


DRAFTS: list[tuple[str, str, str]] = [  # script, a part of its draft, a part of the list by hand
    # what surrounds the launch line
    ("for i in 1; do\n  python t.py $i\ndone",
     'command: [bash, -c, "for i in 1; do\\n  python t.py $i\\ndone"]', ""),
    ("[ -f x ] && srun python t.py", "script: t.py", "srun python t.py: a condition: hpml"),
    ("if a; then\npython t.py\nelse\npython u.py; fi",
     'command: [bash, -c, "if a; then\\npython t.py\\nelse\\npython u.py; fi"]', ""),
    ("train() {\n  srun python train.py $1\n}\ntrain 1\npython eval.py",
     "command: [bash, -c, exec python train.py $1]", "line 2: train() {"),
    ("cat x | python t.py", "command: [bash, -c, cat x | python t.py]", ""),
    ("srun python train.py | python plot.py", "script: train.py", "python plot.py: another"),
    ("srun python t.py < c", "script: t.py", "< c: ranks read no standard input"),
    ("python t.py --seed 1\npython t.py --seed 2", "args: [--seed, '2']", "line 2: python t.py"),
    ("trap 'cp /tmp/x .' EXIT\npython t.py", "#   trap 'cp /tmp/x .' EXIT", "line 2: trap"),
    ("IFS=,\npython t.py $A", "    IFS=,\n", ""),
    # words that only the job knows
    ("python t.py --lr $1", "command: [bash, -c, exec python t.py --lr $1]", "$1: `hpml submit`"),
    ("L=$1\nshift\npython t.py $L", "#   L=$1\n#   shift\n", "line 2: L=$1: it needs"),
    ("D=$(date)\npython t.py $D-${C[1]}", "exec python t.py $D-${C[1]}", ""),
    ("C=(1 $(date))\npython t.py ${C[1]}", 'export ARRAY_C="$(declare -p C)"', ""),
    ('D=$(date)\npython t.py --day "$D"', "args: [--day, '{env.D}']", ""),
    ("python t.py {run.dir} ${run_dir}", "exec python t.py '{{run.dir}}' ${{run_dir}}", ""),
    ("python t.py {run.dir}", "args: ['{{run.dir}}']", ""),
    ("python t.py --n $SLURM_NTASKS", "exec python t.py --n $SLURM_NTASKS", ""),
    ("export WORLD_SIZE=$(cat n)\npython t.py $WORLD_SIZE", "exec python t.py $WORLD_SIZE", ""),
    ('python t.py p\\$"$A"', "exec python t.py 'p$'\"$A\"", ""),
    ("python t.py --seed $SLURM_ARRAY_TASK_ID", "--seed $SLURM_ARRAY_TASK_ID", ""),
    ("python t.py \\ & wait", "python t.py \\ & wait", ""),
    # launchers
    (('#SBATCH -N2\nL="torchrun --nnodes 2 --nproc_per_node 8"\n'
      'srun bash -c "$L --node_rank \\$SLURM_PROCID t.py"'), "script: t.py", ""),
    ("bash -c 'cd src && srun python t.py'", "script: t.py", "without the other commands"),
    ("timeout 60 srun python t.py", "script: t.py", "timeout 60: hpml starts the launcher"),
    ("mpirun python t.py : -np 2 ./serve", "script: t.py", ": -np 2 ./serve: mpirun starts"),
    ("mpiexec.hydra -n 4 ./solve", "command: [./solve]", "mpiexec.hydra: hpml starts Open MPI's"),
    ("module load intel-mpi\nmpirun -n 4 ./solve", "modules: [intel-mpi]", "has another MPI"),
    ("accelerate launch --use_fsdp t.py", "[accelerate, launch, --use_fsdp, t.py]",
     "no counterpart of --use_fsdp"),
    ("torchrun $OPTIONS t.py", "exec torchrun $OPTIONS t.py", "$OPTIONS may be options"),
    ("nsys profile -o out python train.py", "[nsys, profile, -o, out, python, train.py]", ""),
    ("nsys profile torchrun --nproc_per_node=2 t.py", "[nsys, profile, torchrun,",
     "nsys starts the ranks"),
    ("kernprof -l train.py", "command: [kernprof, -l, train.py]", ""),
    ("nnUNetv2_train 1 2d 0", "command: [nnUNetv2_train, '1', 2d, '0']", ""),
    ("gmx mdrun", "command: [gmx, mdrun]", ""),
    ("srun -n 2 hostname", "command: [hostname]", ""),
    ("numactl --cpunodebind=0 python t.py", "[numactl, --cpunodebind=0,", "numactl: hpml binds"),
    ("srun --multi-prog conf", "command: [conf]", "srun --multi-prog: a job file has no"),
    ("srun --mpi=cray_shasta ./solve", "command: [./solve]", "use none, pmix or pmi2"),
    # sizes
    ("torchrun --nproc_per_node=${N:-4} t.py", "ranks_per_node: 4", "${N:-4}: the draft has"),
    ("torchrun --nnodes=1:2 --nproc_per_node=4 t.py", "ranks_per_node: 4", "1:2: the draft has"),
    ("torchrun --nproc_per_node=gpu t.py", "launcher: torchrun", "the header asks for none"),
    ("#SBATCH -n4\nsrun torchrun --nproc_per_node=4 t.py", "ranks_per_node: 4",
     "srun starts the launcher 4 times"),
    ("#SBATCH -N2 -n7\nsrun python t.py", "ranks_per_node: 4", "-n 7: does not divide by 2"),
    ("#SBATCH -N2 -n8\nmpirun -np 4 ./f", "ranks_per_node: 2", "mpirun fills one node after"),
    ("#SBATCH -N2 --gpus-per-node=4\nsrun torchrun --standalone --nproc_per_node=4 t.py",
     "nodes: 1", "on 1 of the header's 2 nodes"),
    ("#SBATCH -N1 --gres=gpu:4\nsrun --gres=gpu:1 python t.py", "gpus: 4", "--gres=gpu:1: the"),
    ("#SBATCH --gres=gpu:4\nexport CUDA_VISIBLE_DEVICES=0,1\npython t.py", "gpus: 4",
     "CUDA_VISIBLE_DEVICES=0,1: the header asks for 4 GPUs"),
    (("#SBATCH -c 32 --gres=gpu:4\nW=$(expr $SLURM_CPUS_PER_TASK - 2)\n"
      'torchrun --nproc_per_node=4 t.py "$W"'), "{env.W}", "SLURM_CPUS_PER_TASK is 32 in"),
    ("export OMP_NUM_THREADS=$(nproc)\npython t.py", "script: t.py", "after environment.setup"),
    # results that `collect` does not copy
    *((f"python t.py --out $TMPDIR/out\n{line}", f"#   {line}", f"line 3: {line}")
      for line in ("cp $TMPDIR/*.pt results/", "rsync -a $TMPDIR/out/ login1:results/",
                   "tar czf out.tgz -C $TMPDIR out", "cp -r $TMPDIR .",
                   "cp -r $TMPDIR/out $(cat where)",
                   "if [ -f $TMPDIR/out/a ]; then cp $TMPDIR/out/a .; fi")),
    ("TMPDIR=$(mktemp -d)\npython t.py\ncp -r $TMPDIR/o r", "#   cp -r $TMPDIR/o r", "line 4: cp"),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "part", "todo"), DRAFTS)
def test_what_a_person_reads_at_once_becomes_a_draft(lines: str, part: str, todo: str) -> None:
    """Through a shell, or with a word about what is left to do; nothing of it is refused."""
    made = imported(*lines.split("\n"))
    head, _, draft = made.text.partition("\nname: ")
    assert part in draft
    assert todo.strip() in head if todo else "by hand:" not in head


SAMPLES = sorted((Path(__file__).parents[2] / "data/sbatch-scripts").glob("*.sh"))


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_every_line_is_a_field_or_a_comment(path: Path) -> None:
    """Of a fixed sample no line vanishes: it is in fields that the draft has, or written in it."""
    script = path.read_text()
    made = import_script(script, name=path.name, context=CONTEXT)
    kept = {row.strip(" #") for row in made.text.splitlines()}
    fields = set(leaves(written(made)))
    for number, row in enumerate(script.splitlines()[1:], start=2):
        if not row.strip(" #"):
            continue
        names = made.lines.get(number, ())
        assert all(
            any(is_in(name, field) or is_in(field, name) for field in fields) for name in names
        )
        assert names or row.strip(" #") in kept, f"{number}: {row}"
    assert load_job(f"{CONTEXT.base}/job.yaml", fields=written(made)).job == made.job


@pytest.mark.parametrize("first", ["", "echo hello", "#!/usr/bin/env perl", "#!/bin/tcsh"])
def test_other_interpreters_are_refused(first: str) -> None:
    """A batch script for hpml is a shell script."""
    with pytest.raises(InputError, match="line 1"):
        import_script(f"{first}\npython train.py\n", name="job.sh", context=CONTEXT)


SRUN = {"launcher": "srun"}
MPI = {"launcher": "mpirun", "script": "t.py"}
TORCH = {"launcher": "torchrun", "script": "t.py"}
LAUNCHES: list[tuple[str, str, dict[str, Any]]] = [
    ("torchrun --nproc_per_node=auto t.py", "-c 6",
     TORCH | {"resources": {"ranks_per_node": 6, "cpus_per_rank": 1}}),
    ("env A=1 B='x y' python3.11 -u t.py", "",
     SRUN | {"script": "t.py",
             "environment": {"python": "python3.11", "variables": {"A": "1", "B": "x y"}}}),
    ("exec nohup /opt/env/bin/python t.py", "",
     SRUN | {"script": "t.py", "environment": {"python": "/opt/env/bin/python"}}),
    ("python -W ignore t.py", "", SRUN | {"command": ["python", "-W", "ignore", "t.py"]}),
    ("srun python -c 'print(1)'", "", SRUN | {"command": ["python", "-c", "print(1)"]}),
    ("bash run.sh 1", "", SRUN | {"command": ["bash", "run.sh", "1"]}),
    ("time -p -- srun python t.py", "", SRUN | {"script": "t.py"}),
    ("srun bash -c 'python t.py --rank $RANK'", "",
     SRUN | {"command": ["bash", "-c", "python t.py --rank $RANK"]}),
    ("srun --cpu-bind=none --mem=0 --container-image=ubuntu python t.py", "",
     SRUN | {"script": "t.py", "binding": "none",
             "environment": {"container": {"engine": "pyxis", "image": "ubuntu"}}}),
    ("srun --cpu-bind=verbose,ldoms python t.py", "", SRUN | {"script": "t.py",
                                                                 "binding": "numa"}),
    ("srun --cpu-bind=none torchrun t.py", "", TORCH | {"resources": {"ranks_per_node": 1}}),
    ("cd sub || exit 1; python t.py > log.txt 2>&1", "",
     SRUN | {"script": "t.py", "workdir": "sub"}),
    ("mpiexec --oversubscribe -n 4 ./solve", "-N1 -n4",
     {"launcher": "mpirun", "command": ["./solve"],
      "resources": {"nodes": 1, "ranks_per_node": 4}}),
    ("mpirun --display bind --pmixmca gds hash -x A=1 --bind-to none ./solve", "-N1 -n4",
     {"launcher": "mpirun", "command": ["./solve"], "binding": "none",
      "resources": {"nodes": 1, "ranks_per_node": 4},
      "environment": {"variables": {"PMIX_MCA_gds": "hash", "A": "1"}}}),
    # The lecture's line (SURF), and its parts.
    (('KMP_AFFINITY="granularity=fine,compact,1,0" OMP_NUM_THREADS=12 mpirun -np 2 '
      "--map-by ppr:1:socket --bind-to socket --report-bindings python t.py"), "-N1 -n2 -c12",
     MPI | {"resources": {"nodes": 1, "ranks_per_node": 2, "cpus_per_rank": 12},
            "binding": "socket"}),
    ("mpirun --map-by ppr:2:socket python t.py", "-N2 --sockets-per-node=2",
     MPI | {"resources": {"nodes": 2, "ranks_per_node": 4, "extra": ["--sockets-per-node=2"]},
            "binding": "socket"}),
    ("mpirun -np 4 --map-by ppr:1:package --bind-to core:overload-allowed python t.py", "-N2",
     MPI | {"resources": {"nodes": 2, "ranks_per_node": 2}, "binding": "spread"}),
    ("mpirun --map-by ppr:4:node --bind-to numa python t.py", "-N2",
     MPI | {"resources": {"nodes": 2, "ranks_per_node": 4}, "binding": "numa"}),
    ("export OMP_PLACES=cores; GOMP_CPU_AFFINITY=0-3 mpirun -n 1 -x OMP_PROC_BIND=true python t.py",
     "", MPI | {"resources": {"ranks_per_node": 1}}),
    ("OMP_PROC_BIND=true mpirun -n 1 --bind-to none python t.py", "",
     MPI | {"binding": "none", "resources": {"ranks_per_node": 1},
            "environment": {"variables": {"OMP_PROC_BIND": "true"}}}),
]  # fmt: skip


@pytest.mark.parametrize(("line", "option", "fields"), LAUNCHES)
def test_launch_lines_become_a_program(line: str, option: str, fields: dict[str, Any]) -> None:
    """Any spelling of a launcher leaves the program and its arguments."""
    made = launch(line, option)
    assert written(made) == {"name": "job", **fields}
    assert not notes(made, "lost")


SITES: list[tuple[str, str, dict[str, Any]]] = [
    ("-N1 -n1 -c1 --gpus=0 --time=1:00:00 --export=ALL", "srun --mpi=none ./solve",
     {"launcher": "mpirun", "environment": {"inherit": "minimal"}, "mpi": "pmix"}),
    ("-N1 --gpus-per-node=4 --cpus-per-gpu=1 -t 60", "torchrun --nproc_per_node=4 t.py",
     {"launcher": "srun"}),
    ("-n4 --gres=gpu:4 -c1 -t 60", "srun python t.py", {}),
    ("--gpus=2 --ntasks-per-gpu=1 -c1 -t 60", "srun -n2 python t.py", {}),
]  # fmt: skip


@pytest.mark.parametrize(("options", "line", "defaults"), SITES)
def test_a_site_profile_changes_nothing_that_the_script_states(
    options: str, line: str, defaults: dict[str, Any]
) -> None:
    """Also where the script states hpml's own default; the rest is the profile's."""
    resources = {
        "nodes": 3, "gpus": 8, "ranks_per_node": 5, "cpus_per_rank": 7, "time": "2h", "qos": "q",
    }  # fmt: skip
    site = ResolvedSite(Site(defaults={**defaults, "resources": resources}))
    made = imported(f"#SBATCH {options}", line)
    job = load_job("/home/ada/proj/job.yaml", site=site, fields=written(made)).job
    assert job == replace(made.job, resources=replace(made.job.resources, qos="q"))


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("srun --cpu-bind=map_cpu:0,1 python t.py", "srun --cpu-bind=map_cpu:0,1"),
        ("srun --gpu-bind=closest python t.py", "srun --gpu-bind=closest"),
        ("mpirun --map-by ppr:1:socket python t.py", "mpirun --map-by ppr:1:socket"),
        ("mpirun -rf ranks.txt python t.py", "mpirun -rf ranks.txt"),
        ("torchrun --numa-binding node t.py", "torchrun --numa-binding node"),
        ("torchrun --max_restarts=3 t.py", "torchrun --max_restarts=3"),
        ('python t.py "$@"', "$@"),
        ("python t.py && ./evaluate", "&& ./evaluate"),
        ("python t.py; cp out.pt /home", "cp out.pt /home"),
        ("trap 'save' USR1; srun python t.py", "trap 'save' USR1"),
        ("uv sync; python a.py; conda run python train.py; bash b.sh", "bash b.sh"),
    ],
)
def test_what_is_not_carried_over_is_reported(line: str, text: str) -> None:
    """Exactly one finding, with the words of the script; nothing is lost in silence."""
    made = launch(line, "-N1")
    assert written(made).get("script") == "t.py" or written(made)["command"][0] in ("bash", "conda")
    (lost,) = notes(made, "lost")
    assert lost.text == text
    assert lost.why


@pytest.mark.parametrize(
    "line",
    [
        "source env.sh",
        "ulimit -n 65536",
        "pip install -e .",
        "python prepare.py",
        "./server &",
        "echo 'lr: 1' > conf.yaml",
        "cat > cfg.json <<END\n{}\nEND",
        "if [ -d /x ]; then\n  module load a\nelse\n  export B=1\nfi",
        "while ! ls ready; do sleep 1; done",
        "prepare() {\n  mkdir -p out\n}",
        "[[ -n $DEBUG ]] && export MORE=1",
        "case $X in a) ;; b) umask 002;; esac",
        "(cd data && make)",
        "unset PYTHONPATH",
        "module use /apps/modules",
        "export WANDB_RUN_ID=$(uuidgen)",
        "export PATH=/opt/bin:$PATH",
        "cp model.pt backup.pt",
        "module load a && source v/bin/activate",
        "export SLURM_CPU_FREQ_REQ=high",
        "source /opt/conda/etc/profile.d/conda.sh",
        "declare -a A=(1 2)",
        "echo $[2/$N] > $A/$B/n",
    ],
)
def test_other_lines_become_setup_as_they_stand(line: str) -> None:
    """Blocks and here-documents stay whole."""
    assert setup(line) == line.splitlines()


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        # an export goes with the lines that may need it; one that nothing needs is a field
        (["export A=1", "./prepare", "export B=2"], ["export A=1", "./prepare"]),
        (["N=3", "M=4", "echo $N"],
         ["N=3", "# nothing in the job file uses it, or hpml does itself what it was for:",
          "#   M=4", "echo $N"]),
        (["export MASTER_ADDR=$(hostname)", "P=$(cat port)"], []),
        # modules and activations keep their place behind other lines
        (["module load a", "module swap a b", "source v/bin/activate"],
         ["module swap a b", "source v/bin/activate"]),
        (["set -e", "module load a", "source v/bin/activate"], []),
        # what is loaded when the job starts is removed before the others are loaded
        (["module purge", "module load a"], ["module purge", "module load a"]),
        (["set -e", "date"], ["set -e", "date"]),
        (["#SBATCH --export=ALL,A=1", "./f $A"], ["export A=1", "./f $A"]),
        # `cd` after a line that may depend on the directory stays there
        (["date", "cd /home/ada/proj"], ["date"]),
        (["mkdir out", "cd ../proj", "./prepare"], ["mkdir out", "cd ../proj", "./prepare"]),
        (["cd $(mktemp -d)", "cd ~/proj", "./prepare"],
         ["cd $(mktemp -d)", "cd ~/proj", "./prepare"]),
        (["export P=$PWD:$P", "cd /home/ada/proj"], ["export P=$PWD:$P", "cd /home/ada/proj"]),
        # an assignment to a variable that a shell line may have exported changes it for the ranks
        (["source env.sh", "A=1"], ["source env.sh", "A=1"]),
        (["export A=$(date)", "A=1"], ["export A=$(date)"]),
        # what hpml-bind would set again is a variable, too
        (["export OMP_NUM_THREADS=4", "./prepare"], ["export OMP_NUM_THREADS=4", "./prepare"]),
        (["source $SLURM_SUBMIT_DIR/env.sh"],
         ["SLURM_SUBMIT_DIR=/home/ada/proj", "source $SLURM_SUBMIT_DIR/env.sh"]),
        # a copy that no argument names stays: the program may find it by TMPDIR
        (["ls", "mkdir $TMPDIR/d", "cp f.h5 $TMPDIR/d"],
         ["ls", "mkdir $TMPDIR/d", "cp f.h5 $TMPDIR/d"]),
        # copies stay where shell lines work on them
        (["cp /d/a.zip $TMPDIR", "unzip $TMPDIR/a.zip"],
         ["cp /d/a.zip $TMPDIR", "unzip $TMPDIR/a.zip"]),
    ],
)  # fmt: skip
def test_setup_keeps_what_belongs_together(lines: list[str], wanted: list[str]) -> None:
    """The order, the directory and the variables of the script's lines."""
    assert setup(*lines) == wanted


def test_an_escaped_dollar_before_a_string_is_text() -> None:
    """Without the backslash bash would translate the string."""
    assert written(imported(r'python t.py ~/p\$"b"'))["args"] == ["/home/ada/p$b"]


def test_variables_that_hpml_sets_after_setup_are_fields() -> None:
    """An export of OMP_NUM_THREADS in setup would have no effect; hpml's own value is left out."""
    line = "export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK PYTHONUNBUFFERED=0"
    made = imported("#SBATCH -N1 -c8", line, "./prepare", "torchrun --nproc_per_node=2 t.py")
    wanted = {"OMP_NUM_THREADS": "8", "PYTHONUNBUFFERED": "0"}
    assert written(made)["environment"]["variables"] == wanted
    made = imported("#SBATCH -N1 -n2 -c8", line.replace("0", "1"), "srun python t.py")
    assert "environment" not in written(made)
    assert {finding.line for finding in notes(made, "dropped")} == {3}


@pytest.mark.parametrize(
    ("lines", "field"),
    [
        ("conda activate e", "e"),
        ("conda activate /envs/e", "/envs/e"),
        ("source /opt/c/etc/profile.d/conda.sh\nconda activate e", None),
        ('eval "$(conda shell.bash hook)"\nconda activate e', None),
        ("source /opt/c/bin/activate e", None),
        ("micromamba activate e", None),
    ],
)
def test_a_conda_that_the_script_prepares_stays_in_setup(lines: str, field: str | None) -> None:
    """Hpml would find conda by CONDA_EXE or PATH, which may be another one."""
    environment = written(imported(*lines.split("\n"), "python t.py"))["environment"]
    assert environment.get("conda") == field
    assert environment.get("setup", "").splitlines() == ([] if field else lines.split("\n"))


def test_paths_count_from_the_job_file() -> None:
    """With the job file in another directory than sbatch's, paths are still right."""
    context = ImportContext(directory="/home/ada/proj", base="/home/ada/proj/jobs", environment={})
    made = imported("cp data.h5 $TMPDIR/", "python t.py $TMPDIR/data.h5", context=context)
    assert written(made)["workdir"] == "/home/ada/proj"
    assert written(made)["stage"] == [{"name": "data", "source": "/home/ada/proj/data.h5"}]
    assert written(made)["args"] == ["{stage.data}/data.h5"]


def test_an_archive_that_is_copied_and_unpacked_is_one_entry() -> None:
    """Copy, then untar on the node: one archive, staged and unpacked."""
    made = imported(
        "cp /data/set.tgz /tmp/", "tar xzf /tmp/set.tgz -C /tmp", "python t.py --data /tmp/set"
    )
    assert written(made)["stage"] == [{"name": "set", "source": "/data/set.tgz", "kind": "tar"}]
    assert written(made)["args"] == ["--data", "{stage.set}/set"]


@pytest.mark.parametrize(
    ("copy", "arguments"),
    [
        ("cp train.py /tmp/out/", "--data data --out /tmp/out"),
        ("cp -r /d/set $TMPDIR/", "--data $TMPDIR/set --save-dir=$TMPDIR/set/ckpt"),
        ("cp -r /d/set $TMPDIR/", "--data $TMPDIR/set --log_dir $TMPDIR/set"),
        ("tar xf /d/set.tar -C /dev/shm", "--data /dev/shm/set --cache-dir /dev/shm/cache"),
    ],
)
def test_a_directory_that_the_program_writes_to_is_not_staged(copy: str, arguments: str) -> None:
    """Staged data are deleted at the end: the results would be, too."""
    made = imported(copy, f"python t.py {arguments}")
    assert "stage" not in written(made)
    assert written(made)["environment"]["setup"].strip() == copy
    assert "{stage" not in str(written(made))


def test_a_file_beside_the_results_is_staged() -> None:
    """Both are in one directory; each is moved by itself."""
    lines = ["cp d/set.h5 /tmp", "python t.py --data=/tmp/set.h5 --out=/tmp/out", "mv /tmp/out res"]
    job = written(imported(*lines))
    assert job["stage"] == [{"name": "set", "source": "d/set.h5"}]
    assert job["args"] == ["--data={stage.set}/set.h5", "--out={local.dir}/out"]


def test_setup_does_not_name_staged_data() -> None:
    """Their paths are not known yet: variables get them later, and a `mkdir` its own path."""
    copy, run = "cp -r /d/set/. $TMPDIR/${1:-set}", "srun python t.py $TMPDIR/set"
    environment = written(imported("D=$TMPDIR/${1:-set}", "mkdir -p $D", copy, run))["environment"]
    assert environment == {"setup": 'D="$TMPDIR"/set\nmkdir -p $D\n'}
    part = "export PART=$((SLURM_JOB_ID % 4))"
    environment = written(imported(part, copy, f"DATA=$TMPDIR/set/$PART {run}"))["environment"]
    assert environment == {
        "variables": {"DATA": "{stage.set}/{env.PART}"},
        "setup": f"{part}\n",
    }


def test_setup_has_the_name_of_the_scripts_job() -> None:
    """Without --job-name sbatch takes the file's name; hpml's job has another."""
    job = written(imported("D=out/$SLURM_JOB_NAME", "mkdir $D", "python t.py $D"))
    assert job["args"] == ["out/job.sh"]
    assert job["environment"]["setup"].startswith("SLURM_JOB_NAME=job.sh\n")
    job = written(imported("python t.py ${SLURM_JOB_NAME%.sh}"))
    assert job["environment"]["setup"] == "SLURM_JOB_NAME=job.sh\n"


def test_a_copy_that_srun_starts_on_every_node_is_staged() -> None:
    """As multi-node scripts do."""
    made = imported("srun -N2 --ntasks-per-node=1 cp -r /d/set $TMPDIR/", "python t.py $TMPDIR/set")
    assert written(made)["stage"] == [{"name": "set", "source": "/d/set"}]
    assert written(made)["args"] == ["{stage.set}"]


@pytest.mark.parametrize(
    ("lines", "argument", "setup"),
    [
        (["N=${N:-90}", 'python t.py "$N"'], "{env.N}", ["N=${N:-90}"]),
        (['python t.py "${LR:-0.1}"'], 'exec python t.py "${LR:-0.1}"', []),
        (["#SBATCH -c 4", "python t.py ${SLURM_CPUS_PER_TASK:-1}"], "4", []),
        (["python t.py ${1:-2}"], "2", []),
    ],
)
def test_defaults_are_evaluated_in_the_job(
    lines: list[str], argument: str, setup: list[str]
) -> None:
    """A variable before `hpml submit` still replaces the default of the script."""
    made = written(imported(*lines))
    assert (made.get("args") or made["command"])[-1] == argument
    assert made.get("environment", {}).get("setup", "").splitlines() == setup


@pytest.mark.parametrize("first", ["#!/bin/bash -l", "#!/bin/bash --login", "#!/bin/sh -x"])
def test_options_of_the_interpreter_are_reported(first: str) -> None:
    """A login shell and others: hpml's script has none."""
    text = f"{first}\n#SBATCH --time=5\npython t.py\n"
    (changed,) = import_script(text, name="job.sh", context=CONTEXT).notes
    assert (changed.line, changed.kind, changed.text) == (1, "changed", first)
    assert ("login" in changed.todo) == ("-x" not in first)


@pytest.mark.parametrize(
    ("lines", "argument", "entry"),
    [
        # What the script makes has its path; else other jobs of the node may write there, too.
        ("mkdir -p $TMPDIR/out\npython t.py $TMPDIR/out\ncp -r $TMPDIR/out res",
         "{env.TMPDIR}/out", "{env.TMPDIR}/out -> res"),
        ("rm -rf /tmp/o\npython t.py /tmp/o/x\nrsync -a /tmp/o/x/ res",
         "/tmp/o/x", "/tmp/o/x -> res"),
        ("python t.py $SLURM_TMPDIR/out\ncp -r $SLURM_TMPDIR/out res",
         "{env.SLURM_TMPDIR}/out", "{env.SLURM_TMPDIR}/out -> res"),
        ("mkdir -p $TMPDIR\npython t.py $TMPDIR/out\ncp -r $TMPDIR/out res",
         "{local.dir}/out", "{local.dir}/out -> res"),
        ("O=/dev/shm/out\npython t.py --out=$O/a\ncp -r $O/* res",
         "--out={shm.dir}/out/a", "{shm.dir}/out -> res"),
        ("python t.py --root=/tmp\nmv /tmp/out res", "--root={local.dir}",
         "{local.dir}/out -> res"),
        ("W=/tmp/$USER/$SLURM_JOB_ID\npython t.py $W/out\nrsync -a $W/out res",
         "{local.dir}/out", "{local.dir}/out -> res"),
        ("python t.py +run.dir=$TMPDIR/out\ncp -r $TMPDIR/out res",
         "+run.dir={local.dir}/out", "{local.dir}/out -> res"),
        ("python t.py /tmp/a\ncp /tmp/a/m.pt res/$SLURM_JOB_ID.pt", "{local.dir}/a",
         "{local.dir}/a/m.pt -> res"),
        ("cp -r /d/code $TMPDIR\ncd $TMPDIR/code\npython t.py .\ncp result $HOME/x",
         ".", "{env.TMPDIR}/code/result -> ~/x"),
        # `collect` names a directory: `cp FILE FILE` has the second file's directory.
        ("python t.py /tmp/a\ncp /tmp/a/m.pt res/best.pt", "{local.dir}/a",
         "{local.dir}/a/m.pt -> res"),
        ("python t.py /tmp/a\ncp /tmp/a/m.pt .", "{local.dir}/a", "{local.dir}/a/m.pt -> ."),
        ("python t.py /tmp/a\ncp /tmp/a/m.pt m.pt", "{local.dir}/a", "{local.dir}/a/m.pt -> ."),
        ("python t.py /tmp/a\nmv /tmp/a/LOG out/LOG", "{local.dir}/a", "{local.dir}/a/LOG -> out"),
        ("python t.py /tmp/a\ncp /tmp/a/m.pt res", "{local.dir}/a", "{local.dir}/a/m.pt -> res"),
        ("python t.py /tmp/a\ncp -r /tmp/a res_$SLURM_JOB_ID", "{local.dir}/a",
         "{local.dir}/a -> ."),
    ],
)  # fmt: skip
def test_results_on_the_node_are_collected(lines: str, argument: str, entry: str) -> None:
    """The program writes to the place that is copied back, and no other job does."""
    job = written(imported(*lines.split("\n")))
    assert (job.get("args") or job["command"])[-1] == argument
    assert [f"{one['source']} -> {one['target']}" for one in job["collect"]] == [entry]


def test_an_exported_directory_of_results_moves_with_them() -> None:
    """The program reads the variable."""
    job = written(imported("export OUT=$TMPDIR/out", "python t.py", "cp -r $OUT res"))
    assert job["environment"]["variables"] == {"OUT": "{local.dir}/out"}
    assert job["collect"] == [{"source": "{local.dir}/out", "target": "res"}]


def test_every_line_after_the_launch_is_reported() -> None:
    """By its number: hpml runs nothing after the program."""
    rest = [
        "A=1", "export B=2", "wait", "echo done", "mkdir -p plots", "cd ..", "conda deactivate",
        "module unload a", "rm -rf $TMPDIR/x", "mv out/best.pt results/",
        "mv out results_$SLURM_JOB_ID", "tar czf out.tgz out", "scp out.tgz login1:",
        "./postprocess.sh", "if true; then echo a; fi", "touch done", "set +x", "exit 0",
    ]  # fmt: skip
    made = imported("#SBATCH --time=1", "python t.py", *rest, "# the end")
    reported = {finding.line: finding for finding in made.notes if finding.line > 3}
    assert sorted(reported) == list(range(4, 4 + len(rest)))
    lost = [one.text for one in reported.values() if one.kind == "lost"]
    assert lost == rest[8:16]
    assert "collect" not in written(made)


def test_a_block_keeps_the_options_of_its_shell() -> None:
    """Otherwise a program that fails in a pipeline would count as completed."""
    made = imported("#SBATCH --time=1", "set -o pipefail", "python t.py 2>&1 | grep -v '{job.id}'")
    shell = "set -o pipefail\npython t.py 2>&1 | grep -v '{{job.id}}'"
    assert written(made)["command"] == ["bash", "-c", shell]


def test_sizes_of_the_scripts_job_in_a_block_are_reported() -> None:
    """There hpml's ranks have other numbers of tasks and CPUs."""
    header = "#SBATCH --ntasks=4 --cpus-per-task=2 --time=1"
    made = imported(header, "for i in 1 2; do python t.py $i $SLURM_NTASKS; done")
    assert any("SLURM_NTASKS is 4" in note.why for note in notes(made, "lost"))


def test_only_the_line_that_a_field_cannot_hold_becomes_a_comment() -> None:
    """A control character does not take the other lines of setup with it."""
    made = imported("#SBATCH --time=1", "ulimit -n 9", 'echo "a\033[1m"', "./get.sh", "python t.py")
    kept = written(made)["environment"]["setup"].splitlines()
    assert [line for line in kept if line[0] != "#"] == ["ulimit -n 9", "./get.sh"]
    assert any(line.startswith("#   echo") for line in kept)
    assert [note.line for note in notes(made, "lost")] == [4]


def test_a_variable_that_nothing_reads_is_a_comment() -> None:
    """A word of the program with its name is no use of it."""
    assert "#   data=/x" in imported("#SBATCH --time=1", "data=/x", "python t.py --data /y").text


def test_lines_that_hpml_replaces_are_reported() -> None:
    """What it sets itself, and what follows the program on its line."""
    lines = ["export RANK=0", "MASTER_PORT=1", "export CUDA_VISIBLE_DEVICES=0"]
    made = imported("#SBATCH --time=1 --gpus=1", *lines, "python t.py &&", "  echo done")
    assert [(one.line, one.kind) for one in made.notes if one.kind == "dropped"] == [
        (number, "dropped") for number in (3, 4, 5, 7)
    ]
    for line in ("export MASTER_PORT=$((10000 + SLURM_JOB_ID % 99))", "MASTER_PORT=$(port)"):
        (note,) = notes(imported("#SBATCH --time=1", line, "python t.py"), "dropped")
        assert note.text == line


def test_a_directory_for_each_task_is_compared_with_the_runs() -> None:
    """The path stays as it is: the program may as well read from there."""
    made = imported("#SBATCH --array=0-3 --time=1", "python t.py -o out/$SLURM_ARRAY_TASK_ID/")
    assert written(made)["args"] == ["-o", "out/{array.index}/"]
    (note,) = [note for note in notes(made, "changed") if "{run.dir}" in note.todo]
    assert note.line == 3


def test_lines_after_the_launch_change_nothing_before_it() -> None:
    """Directories, variables and files that are read later."""
    before = ["#SBATCH --time=1", "LR=0.1", "export A=$LR", "python t.py --lr $LR"]
    after = ["LR=0.2", "cd ..", "source env.sh", "cp /d/a /tmp/", "export A=$LR", "set -a"]
    assert written(imported(*before, *after)) == written(imported(*before))


def test_a_job_id_of_the_callers_own_job_is_not_taken() -> None:
    """`hpml import` may be called in an interactive job."""
    context = ImportContext("/d", "/d", {"SLURM_JOB_ID": "7", "DATA": "/data"})
    lines = ["cp $DATA/$SLURM_JOB_ID/a.txt /tmp/", "python t.py /tmp/a.txt"]
    assert "7" not in str(written(imported(*lines, context=context)))


def test_secrets_are_reported() -> None:
    """The finding does not repeat the value."""
    made = imported("export WANDB_API_KEY=abc123", "python t.py")
    (finding,) = (one for one in notes(made, "changed") if "WANDB" in one.text)
    assert "can be read" in finding.why
    assert "abc123" not in str(finding)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("-n2 --gpus-per-task=1 -N1", "srun python t.py"),
        ("-n2 --gres=gpu:2", "srun --gpu-bind=closest python t.py"),
    ],
)
def test_gpus_that_are_hidden_no_more_are_reported(options: str, line: str) -> None:
    """Where Slurm gave each task one GPU, `cuda:0` would be the same one for all."""
    assert "each rank sees all GPUs of its node" in str(launch(line, options).notes)


def test_export_of_the_header_says_what_travels() -> None:
    """`--export` without ALL is a minimal environment."""
    context = ImportContext(directory="/d", base="/d", environment={"KEPT": "1"})
    made = imported("#SBATCH --export=KEPT,MADE=2", "python t.py", context=context)
    assert written(made)["environment"] == {
        "inherit": "minimal",
        "variables": {"KEPT": "1", "MADE": "2"},
    }


def test_letters_of_any_script_are_written_as_they_are() -> None:
    """Text stays readable in the job file."""
    made = imported("python train.py --name 'é 😀'")
    assert written(made)["args"] == ["--name", "é 😀"]
    assert "é 😀" in made.text


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        (b"", "empty"),
        (b"#!/bin/bash\n\0", "NUL"),
        (b"#!/bin/bash\n# caf\xe9\n", "line 2"),
        (b"#!/bin/bash\r\npython t.py\r\n", "DOS"),
        (b"#" * 300_000, "KiB"),
    ],
)
def test_files_that_are_no_text_are_refused(raw: bytes, part: str, tmp_path: Path) -> None:
    """Each with the reason, as sbatch would refuse them, too."""
    (tmp_path / "job.sh").write_bytes(raw)
    with pytest.raises(InputError, match=part):
        read_script(tmp_path / "job.sh")


def test_a_file_that_is_not_there_or_no_file(tmp_path: Path) -> None:
    """A missing file has another exit status, and a directory or a pipe is not read."""
    with pytest.raises(NotFoundError):
        read_script(tmp_path / "nothing.sh")
    for path in (tmp_path, Path("/dev/zero")):
        with pytest.raises(InputError, match="not a regular file"):
            read_script(path)


WORDS = st.sampled_from(
    "python train.py srun torchrun --nproc_per_node=2 $X ${X:-1} \"$Y\" 'a' $(date) | && ; & ( ) { "
    "} if then fi for in do done case esac << EOF > log A=1 export module load cp $TMPDIR/a tar "
    "-xf #SBATCH --nodes=2 -n4 --mem=1G \\ \n \n \n \" ' ` $(( 1+1 )) [[ ]] cd bash -c "
    "mpirun -np accelerate launch --num_processes deepspeed ${A[0]} A=(1 2) {1..3} *.py".split(" ")
)


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.text(max_size=300), st.lists(WORDS, max_size=40).map(" ".join)))
def test_any_text_is_imported_or_refused(body: str) -> None:
    """For any text there is a job file that loads, or one of hpml's own errors."""
    try:
        made = import_script(f"#!/bin/bash\n{body}\n", name="job.sh", context=CONTEXT)
    except HpmlError:
        return
    assert made.text.endswith("\n")
    assert load_job(f"{CONTEXT.base}/job.yaml", fields=written(made)).job == made.job
    assert render(made.job, Capabilities(interpreter="/usr/bin/python3"))


@pytest.mark.parametrize(
    "text",
    ["$(", "(", "{ ", "<<A ", '"$(', "${", "if ", "a\n", "$a", "`a`", "x=(", "f()", "a|",
     "case x in ", "$((", "\\\n", "for i in {1..9}; do ", "A=$A$A\n", "'"],
)  # fmt: skip
def test_hostile_texts_end(text: str) -> None:
    """A file full of one thing is imported or refused; nothing recurses or grows without bound."""
    with contextlib.suppress(InputError):
        imported(text * (8192 // len(text)))
