"""The options that ddp_images.py and horovod_images.py have in common."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from images_model import MODELS

PRECISIONS = ("auto", "bf16", "fp16", "off")
COUNTS = (
    "width epochs batch_size accumulate eval_every checkpoint_every groups timeout_seconds".split()
)
# A checkpoint with other settings is refused: it belongs to another training.
SETTINGS = "model width dropout epochs batch_size lr lr_warmup_epochs seed".split()


def options_of(description: str) -> argparse.ArgumentParser:
    """Return the options of both scripts, to which a script adds its own."""
    parser = argparse.ArgumentParser(description=description)
    add, environment = parser.add_argument, os.environ
    add("--data", type=Path, required=True, metavar="DIR", help="has one folder per class")
    add("--model", choices=tuple(MODELS), default="cnn")
    add("--width", type=int, default=16, help="channels of the first layer, a multiple of 4")
    add("--dropout", type=float, default=0.2)
    add("--epochs", type=int, default=12)
    add("--batch-size", type=int, default=32, help="images per rank and step")
    add("--lr", type=float, default=0.05, help="learning rate of one rank; times the world size")
    add("--lr-warmup-epochs", type=int, default=2, help="epochs to reach the scaled learning rate")
    add("--seed", type=int, default=1)
    add("--workers", type=int, default=1, help="processes per rank that read images; 0: none")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--amp", choices=PRECISIONS, default="auto", help="mixed precision")
    add("--target-accuracy", type=float, metavar="PART", help="report the seconds to reach it")
    add("--stop-at-target", action="store_true", help="end when the target is reached")
    add("--eval-every", type=int, default=1, metavar="EPOCHS")
    add("--warm-up-steps", type=int, default=20, help="first steps that samples/s leaves out")
    where = environment.get("HPML_CHECKPOINT_DIR") or None
    add("--checkpoint", type=Path, default=where, metavar="DIR", help="save and resume there")
    add("--checkpoint-every", type=int, default=1, metavar="EPOCHS")
    add("--checkpoint-steps", type=int, metavar="STEPS", help="save every so many steps, too")
    add("--checkpoint-from", type=Path, metavar="DIR", help="start with another run's model")
    add("--stop-after-epochs", type=int, metavar="N", help="end early; the schedule stays")
    add("--output", type=Path, metavar="DIR", help="write result.json there")
    add("--timeout-seconds", type=int, default=600, help="how long a rank waits for others")
    traces = str(Path(environment.get("HPML_RUN_DIR", ""), "profile"))
    add("--profile", type=Path, nargs="?", const=traces, metavar="DIR", help="trace five steps")
    return parser


def parse(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line; ends the process if one makes no sense."""
    options = parser.parse_args(arguments)
    for name in COUNTS:
        if getattr(options, name, None) is not None and getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.width % 4:
        parser.error("--width must be a multiple of 4")
    if options.target_accuracy is not None and not 0 < options.target_accuracy <= 1:
        parser.error("--target-accuracy must be above 0 and at most 1")
    if options.stop_at_target and options.target_accuracy is None:
        parser.error("--stop-at-target needs --target-accuracy PART")
    return options


def at_least(least: float) -> Callable[[str], float]:
    """Return what makes a number of an option's text, and refuses one that is less."""

    def number(text: str) -> float:
        if not float(text) >= least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least:g}")
        return float(text)

    return number
