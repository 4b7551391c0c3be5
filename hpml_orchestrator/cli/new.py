"""Commands `new` and `import`: start from an example, your own script, or an sbatch script."""

from __future__ import annotations

import os
import re
import shlex
import string
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from hpml_orchestrator import assets
from hpml_orchestrator.cli.common import JsonOption, print_json, print_table, refuse_with
from hpml_orchestrator.convert.draft import ImportContext, import_script
from hpml_orchestrator.convert.report import report_lines
from hpml_orchestrator.convert.shell import read_script
from hpml_orchestrator.errors import InputError, NotFoundError, RecordError, did_you_mean
from hpml_orchestrator.jobfile.write import one_line
from hpml_orchestrator.records.files import write_users_file
from hpml_orchestrator.runs.prepare import output_directory

_HELPERS = ("hpml_channel.py", "hpml_checkpoint.py", "hpml_waits.py")
_SHARED = (*_HELPERS, "hpml_job.py", "hpml_profile.py")  # shared by the examples
_IMAGES = (
    *("ddp_images.py", "images_data.py", "images_files.py", "images_model.py", "images_nets.py"),
    "make_digits.py",
)
_MINE = "mine"


@dataclass(frozen=True)
class Example:
    """What `hpml new NAME` writes: files of training_jobs; and the commands to run next."""

    about: str
    files: tuple[str, ...]
    commands: tuple[str, ...]


EXAMPLES = {
    "images": Example(
        "a CNN, ResNet or ViT on folders of images, with DDP or Horovod; digits or letters as data",
        (
            *_IMAGES,
            "horovod_images.py",
            "make_letters.py",
            "digits.yaml",
            "digits_horovod.yaml",
            "digits_sweep.yaml",
            "letters.yaml",
            "images_optimizers.yaml",
            "images_models.yaml",
            "images_transfer.yaml",
            "horovod_sweep.yaml",
            *_SHARED,
        ),
        ("python make_digits.py digits", "hpml run digits.yaml"),
    ),
    "lm": Example(
        "a GPT with DDP, FSDP, tensor or pipeline parallelism; the licence texts of Debian as data",
        (
            "lm.py",
            "lm_costs.py",
            "lm_data.py",
            "lm_model.py",
            "lm_parallel.py",
            "lm.yaml",
            "lm_parallel_sweep.yaml",
            *_SHARED,
        ),
        ("hpml run lm.yaml", "hpml sweep run lm_parallel_sweep.yaml --local"),
    ),
    "trees": Example(
        "a PointNet on point clouds of trees, with DDP; six synthetic species as data",
        (
            "trees.py",
            "trees_data.py",
            "trees_model.py",
            "make_trees.py",
            "trees_plot.py",
            "trees.yaml",
            *_SHARED,
        ),
        ("hpml run trees.yaml",),
    ),
    "communication": Example(
        "a small network, with 19 ways to exchange gradients: what each costs, and when it wins",
        (
            "communication.py",
            "communication_async.py",
            "communication_methods.py",
            "communication_plot.py",
            "communication_wire.py",
            "communication.yaml",
            "communication_consistency_sweep.yaml",
            "communication_sweep.yaml",
            "shaped_ranks.py",
            *_SHARED,
        ),
        ("hpml run communication.yaml", "hpml sweep run communication_sweep.yaml --local"),
    ),
    "inference": Example(
        "a trained model that serves requests: latency and throughput by batch size and window",
        ("infer.py", "infer_model.py", "infer.yaml", "infer_sweep.yaml", *_IMAGES, *_SHARED),
        (
            "python make_digits.py digits",
            "python ddp_images.py --data digits --checkpoint trained",
            "hpml run infer.yaml",
        ),
    ),
    "kmeans": Example(
        "k-means over any number of ranks: 100 clusters of generated points or of your own",
        ("kmeans.py", "kmeans_data.py", "kmeans.yaml", "kmeans_sweep.yaml", *_SHARED),
        ("hpml run kmeans.yaml", "hpml sweep run kmeans_sweep.yaml --local"),
    ),
    "convolutions": Example(
        "nothing: it times four algorithms of a convolution layer, and plans micro-batches",
        (
            "convolutions.py",
            "convolution_algorithms.py",
            "convolutions.yaml",
            "convolutions_sweep.yaml",
            *_SHARED,
        ),
        ("hpml run convolutions.yaml", "hpml sweep run convolutions_sweep.yaml --local"),
    ),
    _MINE: Example(
        "your own script: --script FILE; without it a short script to fill in",
        ("train.py", "job.yaml", *_HELPERS),
        ("hpml check job.yaml", "hpml run job.yaml"),
    ),
}


def new(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="An example of `hpml new --list`.", show_default=False),
    ] = None,
    directory: Annotated[
        str | None,
        typer.Argument(metavar="DIR", help="Directory to create and write to.", show_default=False),
    ] = None,
    script: Annotated[
        str | None,
        typer.Option(
            "--script",
            metavar="FILE",
            help="With `mine`: your training script; it is not changed.",
            show_default=False,
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the examples.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Start a training job from an example, or from your own script.

    Existing files are never replaced.
    """
    if list_:
        refuse_with("--list", {"NAME": name, "DIR": directory, "--script": script})
        _list(as_json=as_json)
        return
    example = _chosen(name)
    if not directory:
        message, value = "must name a directory", directory
        raise InputError(message, field="DIR", value=value, hint=f"hpml new {name} my-{name}")
    target = Path(os.path.abspath(os.path.expanduser(directory)))
    if script is None:
        source = assets.path("training_jobs")
        files = {file: (source / file).read_bytes() for file in example.files}
    elif name == _MINE:
        files = {"job.yaml": _job_of(script, target)}
    else:
        hint = f"hpml new {_MINE} {shlex.quote(directory)} --script {shlex.quote(script)}"
        raise InputError(f"belongs to `{_MINE}`", field="--script", value=script, hint=hint)
    written = _write(files, target, directory)
    if as_json:
        print_json({"directory": str(target), "files": written, "commands": example.commands})
        return
    if written:
        typer.echo(f"wrote {', '.join(written)} to {target}")
    else:
        typer.echo(f"{target} has all files already: wrote nothing")
    typer.echo("next:")
    here = [] if target == Path.cwd() else [f"cd {shlex.quote(directory)}"]
    for command in (*here, *example.commands):
        typer.echo(f"    {command}")


def _list(*, as_json: bool) -> None:
    if as_json:
        print_json([{"name": name, "about": one.about} for name, one in EXAMPLES.items()])
        return
    print_table(("NAME", "WHAT IT TRAINS"), [(name, one.about) for name, one in EXAMPLES.items()])


def _chosen(name: str | None) -> Example:
    if name not in EXAMPLES:
        names = ", ".join(EXAMPLES)
        hint = did_you_mean(name or "", EXAMPLES) or "hpml new --list"
        raise InputError(f"must be one of {names}", field="NAME", value=name, hint=hint)
    return EXAMPLES[name]


def _write(files: dict[str, bytes], target: Path, named: str) -> list[str]:
    """Write files that do not exist yet; return their names."""
    missing = []
    with output_directory(target, value=named, field="DIR"):
        for name, content in files.items():
            path = target / name
            if not os.path.lexists(path):
                missing.append(name)
            elif not path.is_file() or path.read_bytes() != content:
                message = f"{path} already exists with other content"
                raise InputError(message, field="DIR", value=named, hint="name a new directory")
        for place, name in enumerate(missing):
            try:
                write_users_file(target / name, files[name])
            except RecordError:
                for done in missing[:place]:
                    with suppress(OSError):
                        (target / done).unlink()
                raise
    return missing


# torch, accelerate, and transformers' Trainer, which joins the ranks without a line of user code.
_STARTS_GROUP = re.compile(
    r"\b(init_process_group|DistributedDataParallel|Accelerator|\w*TrainingArguments)\b"
    r"|\btransformers(\.| import (\([^)]*|.*)\b)\w*Trainer\b"
)

_JOB = string.Template("""\
# hpml check job.yaml    # finds mistakes without submitting
# hpml run job.yaml      # on Slurm if there is one, otherwise on this machine
name: $name
$start
# args: [--lr=0.1]       # as on the command line; {run.dir} is a directory for results
resources:
  nodes: 1
  ranks_per_node: $ranks      # processes per node; with `gpus: 4` usually as many
  cpus_per_rank: 1
  time: 1:00:00          # HH:MM:SS
# environment:
#   venv: ~/envs/train
# checkpoint: true       # save before the time limit and continue: needs a few lines in the script
# stage:                 # copy data to the node first; {stage.data} is its place there
#   - {name: data, source: ~/data, target: auto}
""")


def _job_of(script: str, target: Path) -> bytes:
    path = Path(os.path.abspath(os.path.expanduser(script)))
    if not path.is_file():
        raise NotFoundError(f"--script: no such file: {script}", hint="name your training script")
    try:
        text = path.read_text("utf-8", "replace")
    except OSError as error:
        raise InputError(f"cannot be read: {error}", field="--script", value=script) from error
    place = os.path.relpath(path, target) if path.is_relative_to(target) else str(path)
    ranks, launcher = 1, "srun"
    if path.suffix == ".py":
        launcher = "torchrun"
        if re.search(r"^\s*(import|from)\s+horovod\b", text, re.MULTILINE):
            launcher, ranks = "horovodrun", 2
        elif _STARTS_GROUP.search(text):
            ranks = 2
        start = f"script: {one_line(place)}"
    elif os.access(path, os.X_OK):
        start = f"command: {one_line([str(path)])}"
    else:
        message = "must be a Python file or executable"
        raise InputError(message, field="--script", value=script, hint=f"chmod +x {script}")
    name = re.sub(r"[^A-Za-z0-9._+-]+", "-", path.stem).lstrip("._+-") or "train"
    job = _JOB.substitute(name=one_line(name), start=f"launcher: {launcher}\n{start}", ranks=ranks)
    return job.encode("utf-8", "surrogateescape")


# `hpml import`: convert an sbatch script to a job file.


def import_(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="The sbatch script.", show_default=False)
    ],
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="JOB_FILE",
            help="Write the job file there instead of to stdout.",
            show_default=False,
        ),
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", help="With --output: replace an existing file.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Convert an sbatch script to a job file; warnings go to stderr.

    The script is only read, never run.
    """
    directory = os.getcwd()
    target = None if output in ("", "-") else Path(os.path.abspath(output))
    if target is not None and target.suffix.lower() == ".toml":
        raise InputError("is written as YAML", field="--output", value=output, hint="job.yaml")
    if target is not None and not force and os.path.lexists(target):
        raise InputError(
            "already exists", field="--output", value=output, hint="--force replaces it"
        )
    base = str(target.parent) if target else directory
    context = ImportContext(directory=directory, base=base, environment=dict(os.environ))
    name = os.path.basename(script)
    made = import_script(read_script(Path(script)), name=name, context=context)
    if target is not None:
        try:
            write_users_file(target, made.text)
        except RecordError as error:
            raise InputError(str(error), hint="name another file with --output") from error
    if as_json:
        print_json(
            {
                "output": str(target) if target else None,
                "job": made.job.to_json(),
                "text": made.text,
                "findings": [note.to_json() for note in made.notes],
            }
        )
        return
    if target is None:
        sys.stdout.buffer.write(made.text.encode("utf-8"))
        sys.stdout.flush()
    for line in report_lines(name, made.notes):
        typer.echo(line, err=True)
    if target is not None:
        typer.echo(f"wrote {output}; `hpml check {output}` judges it", err=True)
