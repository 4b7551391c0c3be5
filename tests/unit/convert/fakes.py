"""Fake launchers and programs, which say what they were given: `fakes.py NAME ARGUMENT…`.

They are not real launchers: a fake takes its options off and becomes its program, once, with the
number of ranks and nodes in FAKE_RANKS and FAKE_NODES. A program appends what it got to the file
FAKE_RECORD as a line of JSON. How options are read here has nothing in common with the importer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

LAUNCHERS = ("srun", "torchrun", "accelerate", "deepspeed", "mpirun", "horovodrun")
PROGRAMS = ("python", "python3", "julia", "apptainer", "timeout", "solve")
NAMES = (*LAUNCHERS, *PROGRAMS)


def options(words: list[str], values: str, flags: str) -> tuple[dict[str, str], list[str]]:
    """Read `-x V`, `--name V`, `--name=V` and flags up to the program."""
    parser = argparse.ArgumentParser(prefix_chars="-", allow_abbrev=False, add_help=False)
    for option in values.split():
        names = option.split("|")
        spelled = {n.replace("-", "_") if n.startswith("--") else n for n in names} | {*names}
        spelled = {n if not n.startswith("__") else f"--{n[2:]}" for n in spelled}
        parser.add_argument(*spelled, dest=names[0].strip("-").replace("-", "_"))
    for option in flags.split():
        parser.add_argument(*option.split("|"), action="store_true")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    found = vars(parser.parse_args(words))
    rest = found.pop("rest")
    return {n: v for n, v in found.items() if v not in (None, False)}, rest


def become(words: list[str], ranks: int, nodes: int, **more: str) -> None:
    """Become the program."""
    os.environ |= {"FAKE_RANKS": str(ranks), "FAKE_NODES": str(nodes), **more}
    os.execvp(words[0], words)  # noqa: S606 - as a launcher does


def slurm(name: str) -> int:
    return int(os.environ.get(f"SLURM_{name}") or 0)


def srun(words: list[str]) -> None:
    given, rest = options(
        words,
        "--nodes|-N --ntasks|-n --ntasks-per-node --cpus-per-task|-c --gres --gpus --gpus-per-node "
        "--gpus-per-task --mem --mpi --export --wait --cpu-bind --jobid -w -p --job-name|-J "
        "--time|-t --account|-A --container-image --container-mounts --chdir|-D --output|-o "
        "--gpu-bind --kill-on-bad-exit",
        "--label|-l --unbuffered|-u --overlap --exclusive --exact -K",
    )
    nodes = int(given.get("nodes") or slurm("NNODES"))
    per_node = int(given.get("ntasks_per_node") or 0)
    ranks = int(given.get("ntasks") or per_node * nodes or slurm("NTASKS") or nodes)
    settings = dict(s.split("=", 1) for s in given.get("export", "").split(",") if "=" in s)
    os.chdir(given.get("chdir", "."))
    become(rest, ranks, nodes, FAKE_MPI=given.get("mpi", ""), **settings)


def torchrun(words: list[str]) -> None:
    given, rest = options(
        words,
        "--nnodes --nproc-per-node --rdzv-id --rdzv-backend --rdzv-endpoint --node-rank --log-dir "
        "--master-addr --master-port --max-restarts --local-addr",
        "--standalone --no-python -m --module",
    )
    each = given.get("nproc_per_node", "1")
    ranks = int(each) if each.isdigit() else slurm("GPUS_ON_NODE") or slurm("CPUS_ON_NODE")
    nodes = int(given.get("nnodes", "1"))
    program = [] if "no_python" in given else ["python", *["-m"] * ("m" in given)]
    become([*program, *rest], ranks * nodes, nodes)


def accelerate(words: list[str]) -> None:
    given, rest = options(
        words[1:],
        "--num-processes --num-machines --machine-rank --main-process-ip --main-process-port "
        "--mixed-precision",
        "--multi_gpu -m",
    )
    more = (
        {"ACCELERATE_MIXED_PRECISION": given["mixed_precision"]}
        if "mixed_precision" in given
        else {}
    )
    ranks = int(given.get("num_processes") or slurm("GPUS_ON_NODE") or 1)
    program = ["python", *["-m"] * ("m" in given)]
    become([*program, *rest], ranks, int(given.get("num_machines", "1")), **more)


def deepspeed(words: list[str]) -> None:
    given, rest = options(
        words, "--num-gpus --num-nodes --hostfile --master-port --master-addr", "--no_local_rank"
    )
    nodes = int(given.get("num_nodes", "1"))
    become(["python", *rest], int(given.get("num_gpus") or slurm("GPUS_ON_NODE")) * nodes, nodes)


def mpirun(words: list[str]) -> None:
    pairs = {}
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option == "--mca":
            pairs[f"OMPI_MCA_{words.pop(0)}"] = words.pop(0)
        elif option == "-x":
            name, _, value = words.pop(0).partition("=")
            pairs[name] = value
        elif option in ("-np", "-n", "-npernode", "--bind-to", "--map-by", "--hostfile"):
            pairs[option] = words.pop(0)
    nodes = slurm("NNODES")
    each = pairs.get("-npernode") or pairs.get("--map-by", "").partition(":")[2].partition(":")[0]
    ranks = int(pairs.get("-np") or pairs.get("-n") or 0) or int(each or 0) * nodes
    settings = {n: v for n, v in pairs.items() if not n.startswith("-")}
    become(words, ranks or slurm("NTASKS") or nodes, nodes, **settings)


def horovodrun(words: list[str]) -> None:
    given, rest = options(
        words, "-np|--num-proc -H|--hosts --start-timeout --network-interface", "--gloo --verbose"
    )
    become(rest, int(given["np"]), 1)


def program(name: str, words: list[str]) -> None:
    if words[:1] == ["-u"]:
        del words[0]  # hpml sets PYTHONUNBUFFERED
    if words[:2] == ["-m", "torch.distributed.run"]:
        torchrun(words[2:])
    if words[:1] == ["-c"]:
        return
    with Path(os.environ["FAKE_RECORD"]).open("a") as record:
        got = {"argv": [name, *words], "cwd": os.getcwd(), "env": dict(os.environ)}
        record.write(json.dumps(got) + "\n")


def install(directory: Path) -> None:
    """Write a fake of each name into a directory for PATH."""
    for name in NAMES:
        path = directory / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {__file__} {name} "$@"\n')
        path.chmod(0o755)


if __name__ == "__main__":
    NAME, ARGUMENTS = sys.argv[1], sys.argv[2:]
    if NAME in LAUNCHERS:
        globals()[NAME](ARGUMENTS)
    else:
        program(NAME, ARGUMENTS)
