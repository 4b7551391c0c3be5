"""Options of ddp_images.py that change the training: model, optimizer, data, start and batch."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.unit.training_runs import JOBS, TRAINS, load, result_of, run, run_forked

pytestmark = TRAINS

PAIRS = {  # each model and each optimizer once
    "cnn": "adadelta",
    "lenet": "sgd",
    "alexnet": "nesterov",
    "vgg": "adam",
    "resnet18": "adagrad",
    "vit": "adamw",
}
# 72 images in 8 steps of 10 in the first epoch, then in 4 of 20.
SCHEDULE = "--epochs=3 --batch-schedule=2:2 --augment=flip --model=vit --optimizer=sgd --dropout=0"
SCHEDULE += " --lr-warmup-epochs=0 --width=4"
KILLED = """
real = job.train_step
def step(run, images, labels):
    if run.at.step == 10:
        job.torch.distributed.destroy_process_group()
        __import__("os")._exit(0)
    return real(run, images, labels)
job.train_step = step
"""


def draw(folder: Path, place: int, count: int, ending: str = "png") -> None:
    """Write noisy images, one quarter of which is bright: the class."""
    np, image = pytest.importorskip("numpy"), pytest.importorskip("PIL.Image")
    folder.mkdir(parents=True)
    random = np.random.default_rng(place)
    for number in range(count):
        pixels = random.integers(0, 150, (8, 8))
        pixels[place // 2 * 4 :, place % 2 * 4 :][:4, :4] += 100
        one = image.fromarray(pixels.astype("uint8"))
        if ending != "png":  # of any size
            one = one.resize((16 + number, 20))
        one.save(folder / f"{number}.{ending}")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return four classes of 24 images, 18 of each to train with."""
    directory = tmp_path_factory.mktemp("quarters")
    for place in range(4):
        draw(directory / str(place), place, 24)
    return directory


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return two classes of JPEG files in train/ and val/, with files that are none of them."""
    directory = tmp_path_factory.mktemp("split")
    for part, count in (("train", 20), ("val", 5)):
        for place in (1, 2):
            draw(directory / part / "ab"[place - 1] / "below", place, count, "JPEG")
    (directory / "train" / "a" / "._1.jpg").write_text("of another system")
    (directory / "train" / "a" / "notes.txt").write_text("mine")
    return directory


@pytest.fixture(scope="module")
def trained(data: Path, split: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what was printed and where results are: all runs of this file."""
    home = tmp_path_factory.mktemp("trained")

    def command(name: str, *options: str, where: Path = data) -> list[str]:
        own = [f"--{one}={home / name}" for one in ("checkpoint", "output")]
        return [f"--data={where}", "--workers=0", *own, *options]

    schedule = [*SCHEDULE.split(), "--batch-size=10", "--lr=0.1"]
    interrupted = command("interrupted", *schedule, "--checkpoint-steps=3")
    halves = command("halves", *SCHEDULE.split(), "--batch-size=5", "--lr=0.05", "--max-batch=4")
    start = ["--model=vit", "--width=4", f"--from={home / 'whole'}", "--size=8", "--epochs=1"]
    runs = [
        (1, command("whole", *schedule), ""),
        (1, interrupted, KILLED),
        (1, interrupted, ""),
        (2, halves, ""),
        (1, command("transfer", *start, "--train-images=9", "--lr=1e-12", where=split), ""),
    ]
    return run_forked(home, "ddp_images", runs), home


def newest(directory: Path) -> Any:
    return load(JOBS / "hpml_checkpoint.py").Checkpoints(directory).latest()


def difference(one: Any, other: Any) -> float:
    """Return the largest difference of the weights of two checkpoints."""
    old, new = (found.state["network"] for found in (one, other))
    return max(float((old[name] - new[name]).abs().max()) for name in old)


def test_the_batch_grows_at_a_constant_rate(trained: Any) -> None:
    """Steps, and so the progress, are those of the schedule; the rate is the first one."""
    found = newest(trained[1] / "whole")
    assert result_of(trained[1] / "whole")["train_images"] == 72
    assert found.step == 8 + 4 + 4
    assert found.state["optimizer"]["param_groups"][0]["lr"] == 0.1


def test_an_interrupted_training_with_augmented_images_is_the_same_to_the_bit(trained: Any) -> None:
    """It was killed in the second epoch, whose batches are larger than those of the first."""
    assert "resumed from" in trained[0]
    assert "1 epochs and 1 steps are done" in trained[0]
    assert difference(*(newest(trained[1] / name) for name in ("whole", "interrupted"))) == 0


def test_two_ranks_augment_the_same_images_as_one(trained: Any) -> None:
    """Equal to float tolerance, although each batch is computed in parts."""
    whole, halves = (newest(trained[1] / name) for name in ("whole", "halves"))
    assert whole.step == halves.step
    assert 0 < difference(whole, halves) < 1e-4


def test_a_training_starts_with_all_but_the_last_layer_of_another(trained: Any) -> None:
    """In folders as ImageFolder's; images are resized, and those to train with are limited."""
    old, new = (newest(trained[1] / n).state["network"] for n in ("whole", "transfer"))
    *body, weight, bias = old
    assert f"took {len(body)} tensors" in trained[0]
    assert f"new: {weight}, {bias}; not used: {weight}, {bias}" in trained[0]
    assert max(float((old[name] - new[name]).abs().max()) for name in body) < 1e-6
    assert (len(old[weight]), len(new[weight])) == (4, 2)
    result = result_of(trained[1] / "transfer")
    images = [result[f"{part}_images"] for part in ("train", "validation", "test")]
    assert images == [9, 10, 8], "a fifth of train/ is for the test"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return the scripts' modules."""
    monkeypatch.syspath_prepend(str(JOBS))
    names = ("ddp_images", "images_files", "images_model", "images_nets")
    return SimpleNamespace(**{name: load(JOBS / f"{name}.py") for name in names})


@pytest.mark.parametrize("model", PAIRS)
def test_each_model_and_each_optimizer_learns(
    model: str, modules: SimpleNamespace, request: pytest.FixtureRequest
) -> None:
    """At its usual rate the loss of a batch falls; images may have 8 to 64 pixels and colours."""
    torch = pytest.importorskip("torch")
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(1)
    make, cpu = modules.images_model.make_model, torch.device("cpu")
    arguments = [f"--model={model}", f"--optimizer={PAIRS[model]}", "--width=6", "--dropout=0"]
    options = modules.ddp_images.parse(["--data=x", *arguments])
    for shape in ((3, 64, 64), (1, 28, 20), (1, 8, 8)):
        torch.manual_seed(1)
        network = make(options, shape, 4, cpu)
        assert network(torch.randn(2, *shape)).shape == (2, 4)
    optimizer = modules.images_model.make_optimizer(network, options)
    labels, losses = torch.arange(16) % 4, []
    images = labels.view(16, 1, 1, 1) - 1.5 + 0.1 * torch.randn(16, *shape)
    for _ in range(20):
        loss = torch.nn.functional.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--batch-schedule=2:2,2:4"], "'2:2,2:4' must be rising epochs with factors"),
        (["--batch-schedule=3"], "'3' must be rising epochs with factors, as 6:2,9:4"),
        (["--augment=turn"], "argument --augment: invalid choice: 'turn'"),
        (["--optimizer=lbfgs"], "argument --optimizer: invalid choice: 'lbfgs'"),
        (["--weight-decay=-1"], "--weight-decay -1.0 must be at least 0"),
        (["--from=a", "--checkpoint-from=b"], "--from takes weights only, --checkpoint-from"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str],
    named: str,
    modules: SimpleNamespace,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Status 2, and a last line with option, value and what would be right."""
    with pytest.raises(SystemExit, match="2"):
        modules.ddp_images.parse(["--data=x", *arguments])
    assert named in capsys.readouterr().err.splitlines()[-1]


def test_data_that_make_no_sense_are_refused(modules: SimpleNamespace, tmp_path: Path) -> None:
    """More images than there are, a class that is not trained, a part without images."""
    find, error = modules.images_files.find_images, modules.images_files.JobError
    for folder in ("train/a", "train/b", "val/a", "val/b"):
        draw(tmp_path / folder, 0, 4)
    for part in ("train", "validation", "test"):
        assert find(tmp_path)[0][part], part
    with pytest.raises(error, match=f"--train-images 7: .* {tmp_path} has 6 of 2 classes"):
        find(tmp_path, 7)
    draw(tmp_path / "val/c", 0, 1)
    with pytest.raises(error, match=r"val/c is not a class of .*train"):
        find(tmp_path)
    (tmp_path / "val/c").rename(tmp_path / "c")
    (tmp_path / "test").mkdir()
    with pytest.raises(error, match=f"--data {tmp_path}: .*test has no PNG or JPEG file"):
        find(tmp_path)


def test_weights_of_another_model_are_refused(
    trained: Any, modules: SimpleNamespace, tmp_path: Path
) -> None:
    """Of another width, of another model, of no model, or not there: one line."""
    model, ranks = modules.images_model, SimpleNamespace(rank=0, world_size=1)
    ranks.gather = lambda value: [value]
    network = modules.images_nets.MODELS["vit"]((1, 8, 8), 2, 8, 0.0)
    (empty := tmp_path / "empty.pt").write_bytes(b"nothing")
    torch, other = pytest.importorskip("torch"), tmp_path / "other.pt"
    torch.save({"model": {"module.0.weight": torch.zeros(1)}}, other)
    for source, named in (
        (trained[1] / "whole", r"0.places is \[16, 16\] there, \[16, 32\] here: --model, --width"),
        (other, r"0.places is missing there, \[16, 32\] here: --model"),
        (empty, "empty.pt: "),
        (tmp_path / "none.pt", "none.pt: No such file or directory"),
        (tmp_path, "there is no checkpoint and no state dict"),
    ):
        with pytest.raises(model.JobError, match=f"--from {source}: |{named}") as raised:
            model.transfer(network, str(source), ranks)
        assert re.search(named, str(raised.value)), raised.value
        assert len(str(raised.value).splitlines()) == 1


def test_letters_are_drawn_the_same_each_time(tmp_path: Path) -> None:
    """In three parts; an existing directory stays as it is."""
    command = [JOBS / "make_letters.py", tmp_path / "a", "--letters", "AB", "--images", 10]
    assert run(command).returncode == 0
    counts = [
        len(list((tmp_path / "a" / part / "A").iterdir())) for part in ("train", "val", "test")
    ]
    assert counts == [6, 2, 2]
    refused = run(command)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert os.listdir(tmp_path) == ["a"]
    module: ModuleType = load(JOBS / "make_letters.py")
    assert module.main([str(tmp_path / "b"), "--letters=AB", "--images=10"]) == 0
    names = sorted(one.relative_to(tmp_path / "a") for one in (tmp_path / "a").rglob("*.jpg"))
    assert [(tmp_path / "a" / one).read_bytes() for one in names] == [
        (tmp_path / "b" / one).read_bytes() for one in names
    ]
