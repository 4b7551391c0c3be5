"""Which argument of a job names its data."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hpml_orchestrator.check.changes import data_argument
from hpml_orchestrator.runs.load import load_job

STARTED = 2e9
TREES = (
    "data/imagenet", "images", "train", "imagenet", "out", "runs/7", "ckpt", "written", "lists",
    "program", "links", "models/vit", "cifar10", ".venv",
)  # fmt: skip
FILES = {"x.tar": 9, "big.h5": 1 << 20, "small.txt": 9, "best.pth.tar": 9, "app.zip": 9}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with data, and with what only looks like data."""
    root = tmp_path_factory.mktemp("job")
    for name in TREES:
        (root / name).mkdir(parents=True)
        (root / name / "a").write_bytes(b"x" * 5000)
    for name, size in FILES.items():
        with (root / name).open("wb") as stream:
            stream.truncate(size)
    (root / "empty").mkdir()
    (root / "train.py").write_text("")
    (root / "program" / "__main__.py").write_text("")
    (root / "packed").mkdir()
    (root / "packed" / "tree.tar").write_bytes(bytes(10240))
    (root / "links" / "out").symlink_to("/etc/hostname")
    os.utime(root / "written", (STARTED + 1, STARTED + 1))
    return root


def found(root: Path, **fields: Any) -> tuple[str, str, str] | None:
    """Field, new word and source, below the working directory, of the data of a job."""
    (root / "job.yaml").write_text(json.dumps({"name": "job", **fields}))
    job = load_job(root / "job.yaml").job
    (root / "job.yaml").unlink()
    data = data_argument(job, before=STARTED)
    if data is None:
        return None
    source = str(data.entry["source"])
    assert data.size_bytes == float(1 << 20)  # sizes are rounded up
    assert data.entry.get("kind") == ("file" if Path(source).is_file() else None)
    return data.field, data.word, source.removeprefix(f"{root}/")


@pytest.mark.parametrize(
    ("args", "field", "word", "source"),
    [
        # relative and absolute, behind an option or alone
        (["--data", "./images"], "args.1", "{stage.data}", "images"),
        (["--data=images"], "args.0", "--data={stage.data}", "images"),
        (["--data-dir", "data/imagenet/"], "args.1", "{stage.data}", "data/imagenet"),
        (["--train_root=data/imagenet"], "args.0", "--train_root={stage.data}", "data/imagenet"),
        (["data.root=data/imagenet"], "args.0", "data.root={stage.data}", "data/imagenet"),
        (["data/imagenet"], "args.0", "{stage.data}", "data/imagenet"),
        (["--epochs", "3", "{here}/images"], "args.2", "{stage.data}", "images"),
        (["x.tar"], "args.0", "{stage.data}/x.tar", "x.tar"),
        (["--data=big.h5"], "args.0", "--data={stage.data}/big.h5", "big.h5"),
        # the first that is named; a path without a name only if no option names one
        (["--train=train", "--data=images"], "args.0", "--train={stage.data}", "train"),
        (["data/imagenet", "--data", "images"], "args.2", "{stage.data}", "images"),
        (["data/imagenet", "runs/7"], "args.0", "{stage.data}", "data/imagenet"),
        (["--dataset=data/imagenet"], "args.0", "--dataset={stage.data}", "data/imagenet"),
    ],
)
def test_an_argument_names_the_data(
    here: Path, args: list[str], field: str, word: str, source: str
) -> None:
    """A directory, or an archive that is not unpacked."""
    words = [one.replace("{here}", str(here)) for one in args]
    assert found(here, script="train.py", args=words) == (field, word, source)


@pytest.mark.parametrize(
    "args",
    [
        ["train"],  # may be a command of the program
        ["--dataset", "imagenet"],  # one that the program knows by its name
        ["data/imagenet", "./images"],  # which of both?
        ["--verbose", "data/imagenet"],  # the value of an option that nobody knows
        ["--workers", "data/imagenet"],
        ["--data=nowhere"],
        ["--data=small.txt"],  # a list of names
        ["./small.txt"],
        ["./big.h5"],
        ["--data=empty"],
        ["--data=out"],
        ["--data-output=images"],
        ["--train-log-dir", "./images"],
        ["--output_dir=data/imagenet"],
        ["--resume", "./ckpt"],
        ["./ckpt"],
        ["runs/7"],
        ["models/"],
        ["--data=best.pth.tar"],
        ["best.pth.tar"],
        ["--train-dir=written"],  # the run wrote into it
        ["./written"],
        ["./program"],
        ["--root=."],
        ["--root=/"],
        ["--data=links"],  # `hpml check` refuses it: a link leads out of it
        ["--data", "{run.dir}/images"],
        ["--data=/dev/shm"],
        ["--data="],
        ["--data"],
        ["--", "-images"],
    ],
)
def test_what_is_not_the_data(here: Path, args: list[str]) -> None:
    """Neither script, results and checkpoints, nor what could mean something else."""
    assert found(here, script="train.py", args=args) is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"command": ["python", "train.py", "data/imagenet"]}, "command.2"),
        ({"command": ["python", "-u", "train.py", "./images"]}, "command.3"),
        ({"command": ["python", "train.py"], "args": ["./images"]}, "args.0"),
        ({"command": ["./train", "data/imagenet"]}, "command.1"),
        ({"command": ["python", "./images"]}, None),  # that is the program
        ({"command": ["python", "app.zip"]}, None),
        ({"command": ["bash", "-c", "python train.py data/imagenet"]}, None),
        ({"script": "images/train.py", "args": ["--data=images"]}, None),
        ({"script": "train.py", "workdir": "images", "args": ["--root=../images"]}, None),
        ({"script": "train.py", "environment": {"venv": "images"}, "args": ["./images"]}, None),
        (
            {
                "script": "train.py",
                "checkpoint": {"directory": "{here}/images/{run.id}"},
                "args": ["--data=images"],
            },
            None,
        ),
    ],
)
def test_the_program_is_not_its_data(here: Path, fields: dict[str, Any], field: str | None) -> None:
    """Whatever starts it, wherever it keeps its own files."""
    words = json.loads(json.dumps(fields).replace("{here}", str(here)))
    data = found(here, **words)
    assert (data and data[0]) == field


def test_a_pack_stays_one(here: Path) -> None:
    """The program reads its shards, so they are not unpacked."""
    job = {"workdir": str(here), "args": ["--data=packed"]}
    (here / "job.yaml").write_text(json.dumps({"name": "job", "script": "train.py", **job}))
    whole = load_job(here / "job.yaml").job
    data = data_argument(whole)
    assert data is not None
    assert data.entry["kind"] == "tree"
