"""Every wrong value is refused with its field, the value and what would be right."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from hpml_orchestrator.errors import InputError
from hpml_orchestrator.runs.load import ResolvedJob

Load = Callable[..., ResolvedJob]
BASE = {"name": "name: a", "script": "script: x.py"}
TEXT = "must be text"
WHOLE = "must be a whole number"
FIELDS = "must be a mapping of fields"
TIME = (
    "must be a time limit: 2h, 90m, 1d12h, or minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"
)
SIZE = "must be a size such as 500M, 64G or 1T (a bare number is MiB)"
GPUS = "must be a number of GPUs per node, with a type such as a100:4"
WORDS = "must be letters, digits and . , : @ / + = _ - only"
TASKS = "must be indices such as 0-9, 1,3,7 or 0-31:4, with %2 behind them for at most two at once"
POLICY = "must be a policy such as numa, or a mapping of fields such as policy and verify"
SWITCH = "must be true or false, or a mapping of fields such as listen and targets"
LISTEN = "must be ADDRESS:PORT, such as 127.0.0.1:0; port 0 takes a free one"
OWN = "is set by the shell, Slurm, the launcher or hpml; choose another name"


def message_of(load: Load, text: str) -> str:
    given = text.partition(":")[0]
    lines = [line for name, line in BASE.items() if name != given]
    with pytest.raises(InputError) as caught:
        load("\n".join([*lines, text]) + "\n")
    assert caught.value.hint.endswith("`hpml schema job` prints every field")
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: 5", f"name: {TEXT}: put it in quotes (got 5)"),
        ("name:", f"name: {TEXT}, and there is nothing: fill it in or leave it out"),
        ("name: a b", "name: must be letters, digits and . _ + - and begin with a letter"),
        ("name: " + "a" * 65, "name: is 65 characters long; at most 64 are allowed (got 'aaa"),
        (
            "launcher: magic",
            "launcher: must be 'torchrun', 'srun', 'mpirun' or 'horovodrun' (got 'magic')",
        ),
        ("script: ''", "script: must not be empty (got '')"),
        ("script: " + "a" * 4096, "script: is "),
        ("args: hello", "args: must be a list (in YAML, each entry begins with"),
        (
            "args: [{stage.set}]",
            "args.0: must be text, and YAML reads {stage.set} as a mapping: put",
        ),
        (
            "args:\n- --lr: 0.10",
            "args.0: must be text, and YAML reads `--lr: 0.10` as a mapping: write --lr=0.10, or",
        ),
        (
            "environment: {variables: {A: {run.dir}}}",
            "environment.variables.A: must be text, and YAML reads {run.dir} as a mapping: put",
        ),
        ("args: [[a, 1]]", 'args.0: must be text, and this is a list: ["a", 1]'),
        ("args: [{a: {b: 1}}]", 'args.0: must be text, and this is a mapping: {"a": {"b": 1}}'),
        ("command: [x, note: true]", "command.1: must be text, and YAML reads `note: true` as a"),
        (
            "args: [true]",
            "args.0: is a boolean: put it in quotes, as the program should receive it",
        ),
        ('args: ["a\\0b"]', "args.0: must not hold a NUL character"),
        ("args: ['" + "é" * 65_536 + "']", "args.0: is 131072 bytes long; Linux passes at most"),
        ("resources: 5", f"resources: {FIELDS} (got 5)"),
        ("resources: {nodes: 1.5}", f"resources.nodes: {WHOLE} (got 1.5)"),
        ("resources: {nodes: 0}", "resources.nodes: must be at least 1 (got 0)"),
        ("resources: {nodes: 100001}", "resources.nodes: must be at most 100000 (got 100001)"),
        ("resources: {gpus: x x}", f"resources.gpus: {GPUS}"),
        ("resources: {gpus: [a100:1, a100:2]}", "resources.gpus: names one type of GPU twice"),
        ("resources: {time: off}", f"resources.time: {TIME} (got 'off')"),
        (
            "resources: {memory: 1.5}",
            f"resources.memory: {SIZE}, or `all` of a node's memory (got 1.5)",
        ),
        ("resources: {memory: 2000T}", "resources.memory: must be more than zero and at most"),
        ("resources: {partition: a b}", f"resources.partition: {WORDS} (got 'a b')"),
        ("resources: {constraint: a b}", "resources.constraint: must be feature names joined"),
        ("resources: {mail: {on: [end]}}", "resources.mail.to: must be given"),
        ("resources: {mail: {to: a, on: []}}", "resources.mail.on: must have 1 or more entries"),
        ("resources: {mail: {to: a, on: [x]}}", "resources.mail.on.0: must be 'begin', 'end'"),
        ("resources: {extra: [-N 3]}", "resources.extra.0: must be one long sbatch option"),
        ("resources: {extra: [--mem=3]}", "resources.extra: --mem has its own field: reso"),
        ("resources: {extra: [--requeue]}", "resources.extra: --requeue has its own field: "),
        ("resources: {extra: [--output=a]}", "resources.extra: --output is set by hpml: leave it"),
        (
            "resources: {extra: ['--gres=lustre:1,gpu:2']}",
            "resources.extra: --gres has its own",
        ),
        ("environment: {modules: [a b]}", "environment.modules.0: must be a module's name such"),
        ("environment: {conda: -x}", "environment.conda: must not begin with a dash"),
        (
            "resources: {memory: 1G, memory_per_cpu: 1G}",
            "resources: give memory or memory_per_cpu, not both",
        ),
        ("environment: {conda: a, venv: b}", "environment: give conda or venv, not both"),
        ("environment: {inherit: none}", "environment.inherit: must be 'all' or 'minimal'"),
        ("environment: {variables: {A: true}}", "environment.variables.A: is a boolean"),
        ("environment: {variables: {a b: x}}", "environment.variables.a b: must be a variable's"),
        ("environment: {variables: {RANK: 0}}", f"environment.variables.RANK: {OWN}"),
        ("environment: {variables: {PMIX_RANK: 0}}", f"environment.variables.PMIX_RANK: {OWN}"),
        ("environment: {variables: {IFS: 0}}", f"environment.variables.IFS: {OWN}"),
        (
            "environment: {container: {engine: docker, image: i}}",
            "environment.container.engine: must be 'apptainer', 'pyxis' or 'enroot' (got 'docker')",
        ),
        (
            "environment: {container: {engine: pyxis, image: -i}}",
            "environment.container.image: must not begin with a dash",
        ),
        (
            "environment: {container: {engine: pyxis, image: i, mounts: [a]}}",
            "environment.container.mounts: must be absolute paths without commas",
        ),
        (
            "collect: [{source: out, target: r}]",
            "collect.0.source: must be a path on the nodes: begin it with {local.dir}",
        ),
        ("stage: [{name: d, source: s, trust_mtime: true}]", "stage.0.trust_mtime: is for data"),
        ("collect: [{source: /, target: r}]", "collect.0.source: must be a file or directory"),
        ("collect: [{source: '{local.dir}/a'}]", "collect.0.target: must be given"),
        ("collect: [{source: '{local.dir}/*', target: r}]", "collect.0.source: is taken as it is"),
        ("collect: [{source: '{shm.dir}/../a', target: r}]", "collect.0.source: is taken as it is"),
        ("collect: [{source: '{shm.dir}a', target: r}]", "collect.0.source: must be a path on"),
        *(
            (f"collect: [{{source: /tmp/a, target: '{bad}'}}]", "collect.0.target: may begin with")
            for bad in ("{local.dir}/x", "$HOME/r", "{host}/r", "x/{run.dir}", "{run.dir}x", "a*")
        ),
        (
            "collect: [{source: '{local.dir}/a', target: r}, {source: /tmp/a, target: r}]",
            "collect.1: its results would be ",
        ),
        (
            "collect: [{source: '{local.dr}/a', target: r}]",
            "collect.0.source: must be a path on the nodes",
        ),
        (
            "collect: [{source: '{stage.x}/a', target: r}]",
            "collect.0.source: {stage.x} names nothing",
        ),
        (
            "collect: [{source: '{local.dir}/{point.lr}', target: r}]",
            "collect.0.source: {point.lr} is not known here; results of each run are in TARGET/RUN",
        ),
        (
            "collect: [{source: '{env.OUT}/a', target: r}]",
            "collect.0.source: {env.OUT} is not known here: it is read after environment.setup",
        ),
        ("stage: [{name: D, source: s}]", "stage.0.name: must be lower-case letters, digits"),
        ("stage: [{name: d, source: s, kind: rar}]", "stage.0.kind: must be 'auto', 'file', 'tre"),
        ("stage: [{name: d, source: s, target: x}]", "stage.0.target: must be shm, local, auto"),
        ("stage: [{name: d, source: s, size: x}]", f"stage.0.size: {SIZE} (got 'x')"),
        (
            "stage: [{name: d, source: s}, {name: d, source: t}]",
            "stage: the name 'd' is used twice",
        ),
        ("array: 0-", f"array: {TASKS} (got '0-')"),
        ("array: 9-0", "array: must have the smaller index first, not 9-0 (got '9-0')"),
        ("array: 0-9:0", "array: must have a step above zero, not 0-9:0"),
        ("array: 0-9%0", "array: must have a number above zero behind the %"),
        ("array: 1_3", f"array: {TASKS} (got 13)"),
        ("array: []", "array: must name at least one index; leave the field out for a single job"),
        ("array: [a]", "array: must be a list of whole numbers such as [1, 3, 7], or indices"),
        ("array: 4000001", "array: must have indices up to 4000000, which is the most Slurm takes"),
        ("array: 0-10000", "array: must have at most 10000 tasks, since each has a directory of"),
        ("mpi: pmix", "mpi: needs `launcher: srun`; with torchrun, which starts the ranks"),
        ("binding: auto", "binding.policy: must be 'gpu-local', 'socket', 'numa', 'spread' or"),
        ("binding: true", f"binding: {POLICY} (got true)"),
        ("binding: null", f"binding: {POLICY}, and there is nothing"),
        (
            "binding: {verify: true}",
            "binding.verify: must be 'strict', 'warn' or 'off' (got true)",
        ),
        ("monitor: 1", f"monitor: {SWITCH} (got 1)"),
        ("monitor: {listen: '127.0.0.1'}", f"monitor.listen: {LISTEN}"),
        ("monitor: {listen: 'a:70000'}", "monitor.listen: must have a port of at most 65535"),
        ("monitor: {listen: '$(id):80'}", f"monitor.listen: {LISTEN}"),
        (
            "resources: {ranks_per_gpu: 2}",
            "resources.ranks_per_gpu: needs GPUs to share: give `gpus`, or leave it out (got 2)",
        ),
        (
            "resources: {gpus: 4, ranks_per_gpu: 2, ranks_per_node: 4}",
            (
                "resources.ranks_per_gpu: 2 ranks on each of 4 GPUs are 8 ranks per node, but "
                "ranks_per_node is 4: leave one of the two out (got 2)"
            ),
        ),
        (
            "launcher: horovodrun\nresources: {nodes: 2}",
            (
                "launcher: horovodrun starts ranks on one node only, and resources.nodes is 2: use "
                "`launcher: mpirun`, or `launcher: srun` with `mpi: pmix`"
            ),
        ),
        (
            "launcher: mpirun\nenvironment: {container: {engine: pyxis, image: i}}",
            "launcher: mpirun cannot start ranks in a container of pyxis, which is a part of srun",
        ),
        (
            "launcher: mpirun\nenvironment: {container: {engine: enroot, image: i}}",
            "launcher: mpirun cannot start ranks in a container of enroot, which hides Open MPI's",
        ),
        (
            "environment: {container: {engine: enroot, image: 'nvcr.io#a/b:1'}}",
            "environment.container.image: `enroot start` takes no reference: make a file",
        ),
        (
            "environment: {container: {engine: enroot, image: i, mounts: ['/a b']}}",
            "environment.container: image and mounts: enroot cannot mount paths with blanks",
        ),
        ("launcher: mpirun\nmpi: pmix", "mpi: needs `launcher: srun`; with mpirun, which"),
        (
            "launcher: accelerate",
            (
                "launcher: must be torchrun, srun, mpirun or horovodrun: use `launcher: torchrun`, "
                "whose ranks find what accelerate looks for in the environment (got 'accelerate')"
            ),
        ),
        ("1: x", "1: a field's name must be text (got 1)"),
        ("after: afterok:1", "after.0: must be a run as `hpml list` names it, or one behind ok:"),
        (
            "resources: {extra: [--dependency=singleton]}",
            "resources.extra: --dependency has its own",
        ),
        ('environment: {setup: "a\\n\\eb"}', "environment.setup: line 2: must not hold the"),
        ('environment: {setup: "a\\0"}', "environment.setup: must not hold a NUL character"),
    ],
)
def test_a_wrong_value(load: Load, text: str, message: str) -> None:
    """The message starts with the field, describes the right form, and shows the value."""
    shown = message_of(load, text)
    assert shown.startswith(message)
    assert "Input" not in shown


@pytest.mark.parametrize(
    ("text", "field", "meant"),
    [
        ("gpus: 4", "gpus", "resources.gpus"),
        ("enviroment: {}", "enviroment", "environment"),
        ("resources: {node: 2}", "resources.node", "resources.nodes"),
        ("resources: {mail: {too: a, to: b}}", "resources.mail.too", "resources.mail.to"),
        ("stage: [{name: d, sorce: s}]", "stage.0.sorce", "stage.0.source"),
        ("cpu_bind: cores", "cpu_bind", "binding"),
        ("resources: {mem: 4G}", "resources.mem", "resources.memory"),
        ("ntasks-per-node: 4", "ntasks-per-node", "resources.ranks_per_node"),
        ("walltime: 4", "walltime", "resources.time"),
        ("env: {A: b}", "env", "environment.variables"),
        ("image: x", "image", "environment.container.image"),
        ("zzzz: 1", "zzzz", ""),
        ("function-after: 1", "function-after", ""),
        ("'[key]': 1", "[key]", ""),
        (f"{'y' * 100}: 1", f"{'y' * 60}…", ""),
        ('"a\\nb": 1', "a�b", ""),
    ],
)
def test_an_unknown_field(load: Load, text: str, field: str, meant: str) -> None:
    """An unknown field is refused with the nearest known one, at its own place or elsewhere."""
    question = f"; did you mean {meant}?" if meant else ""
    assert f"{field}: unknown field{question}" in message_of(load, text).splitlines()


@pytest.mark.parametrize(
    ("text", "given"),
    [("", "none of them"), ("script: x\nmodule: y\ncommand: [z]", "script and module and command")],
)
def test_exactly_one_program(load: Load, text: str, given: str) -> None:
    """A job runs a script, a module or a command; other contradictions are named with that."""
    with pytest.raises(InputError, match=f"give exactly one .* not {given}\nmpi: needs"):
        load(f"name: a\nmpi: pmix\n{text}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("args: [x, '{stage.digit}']", "args.1: {stage.digit} names nothing; did you mean {stage."),
        ("command: ['{run.q}/y']", "command.0: {run.q} names nothing; "),
        ("command: ['{local.dirr}']", "command.0: {local.dirr} names nothing; did you mean {lo"),
        ("environment: {variables: {A: '{run.x}'}}", "environment.variables.A: {run.x} names noth"),
        ("args: ['{array.index}']", "args.0: {array.index} needs an array, such as `array: 0-9`"),
        *(
            (f"args: ['--to={wrong}/a']", f"args.0: {wrong} names nothing; did you mean {meant}?")
            for wrong, meant in (
                ("{run_dir}", "{run.dir}"),
                ("{rundir}", "{run.dir}"),
                ("{Run-Dir}", "{run.dir}"),
                ("{ run.dir }", "{run.dir}"),
                ("{runs.dir}", "{run.dir}"),
                ("{job_id}", "{job.id}"),
                ("{array_index}", "{array.index}"),
                ("{stage_digits}", "{stage.digits}"),
                ("{stages.digits}", "{stage.digits}"),
            )
        ),
        ("args: ['{node.name}']", "args.0: {node.name} names nothing (the text itself is written"),
        ("args: ['{array.task}']", "args.0: {array.task} names nothing; there is {array.index}"),
        ("args: ['{stage}']", "args.0: {stage} names nothing; stage data under that name"),
        ("command: [x, '{env:HOME}']", "command.1: {env:HOME} names nothing"),
        ("args: ['{env.2X}']", "args.0: {env.2X} names nothing; a variable's name has letters"),
        ("args: ['{env.RANK}']", "args.0: {env.RANK} is not the same in all ranks: read RANK in"),
        ("args: ['${run.dir}']", "args.0: the $ before {run.dir} is passed on as text: leave it"),
        ("collect: [{source: '{local.dir}/{env.A}', target: r}]", "collect.0.source: {env.A} is"),
        ("workdir: '{run.dir}'", "workdir: has no placeholders; args, command and environment.v"),
        ("stage: [{name: a, source: '/a/{job.id}'}]", "stage.0.source: has no placeholders"),
    ],
)
def test_an_unknown_placeholder(load: Load, text: str, message: str) -> None:
    """It is named along with contradictions, and so is one in a field that has none."""
    stage = "" if text.startswith("stage") else "stage: [{name: digits, source: s}]"
    with pytest.raises(InputError) as caught:
        load(f"name: a\nscript: x\nmpi: pmix\n{stage}\n{text}\n")
    lines = str(caught.value).splitlines()
    assert any(line.startswith("mpi: needs") for line in lines[:-1])
    assert lines[-1].startswith(message)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}',
        '{"a":{"b":"{run.dir}"}}',
        "{}",
        "{0}",
        "{a,b}",
        "{epoch}-{val_loss:.2f}-{index}",
        "{a b}",
        "${HOME} ${run_dir} ${model.name} ${oc.env:HOME}",
        "print(f'{torch.version}')",
        "{{ item }} {{epoch}} {{.Names}}",
        "{run.id}/{job.id}/{env.USER}",
        "{{run.dir}} {{run_dir}} ${{run.dir}} {{node.name}}",
    ],
)
def test_other_braces_are_text(load: Load, text: str) -> None:
    """JSON, formats of Python, shell variables and doubled braces are not placeholders."""
    job = load("name: a\nscript: x\n", f"args=[{json.dumps(text)}]").job
    assert job.args == (text,)


def test_all_findings_come_at_once(load: Load) -> None:
    """Three faults are three lines, and the error carries the first field and value."""
    with pytest.raises(InputError) as caught:
        load("name: a b\nscript: x\nresources: {nodes: 0}\nfoo: 1\n")
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == [
        "name",
        "resources.nodes",
        "foo",
    ]
    assert (caught.value.field, caught.value.value) == ("name", "a b")
