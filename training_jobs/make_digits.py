"""Write scikit-learn's handwritten digits as 1,797 PNG files, one folder per digit.

    python make_digits.py data/digits
    python make_digits.py data/digits --tar digits.tar

The files are DIR/<digit>/<index>.png, 8x8 pixels, gray 0 to 255: many small files, like real image
data sets. DIR appears complete or not at all, and a complete one is not changed. No download: the
digits come with scikit-learn (from the UCI repository, CC BY 4.0).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

IMAGES = 1797
CLASSES = 10
BRIGHTEST = 16  # scikit-learn's pixels are 0 to 16


class DigitsError(Exception):
    """The digits cannot be written; the message is for the user."""


def write_digits(target: Path) -> bool:
    """Write the folders unless they are complete; return whether anything was written.

    Raises:
        DigitsError: `target` contains something else, or cannot be written.
    """
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        if is_complete(target):
            return False
        raise DigitsError(f"{target} exists and does not hold the {IMAGES} digits: remove it first")
    try:
        from PIL import Image  # noqa: PLC0415 - for the images alone
        from sklearn.datasets import load_digits  # noqa: PLC0415 - as above
    except ImportError as error:
        raise DigitsError(
            f"{error.name} is not installed: pip install scikit-learn pillow"
        ) from None
    digits = load_digits()
    target.parent.mkdir(parents=True, exist_ok=True)
    # In the same directory, since a rename is atomic only within one file system.
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        for digit in range(CLASSES):
            (temporary / str(digit)).mkdir()
        for index, (pixels, digit) in enumerate(zip(digits.images, digits.target)):  # noqa: B905 - Python 3.9 has no strict
            gray = (pixels * 255 / BRIGHTEST).round().astype("uint8")
            Image.fromarray(gray).save(temporary / str(digit) / f"{index:04d}.png")
        temporary.chmod(0o755)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return True


def is_complete(target: Path) -> bool:
    """Return whether a directory contains all digits, judging by the number of files."""
    folders = [target / str(digit) for digit in range(CLASSES)]
    return sum(len(list(folder.glob("*.png"))) for folder in folders) == IMAGES


def write_tar(source: Path, archive: Path) -> None:
    """Write the folders as a plain tar with names that start with the class; always equal bytes."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(prefix=f".{archive.name}.", dir=archive.parent)
    try:
        with os.fdopen(fd, "wb") as stream, tarfile.open(fileobj=stream, mode="w") as tar:
            for path in sorted(source.glob("*/*.png")):
                tar.add(path, str(path.relative_to(source)), filter=_without_owner)
        Path(temporary).chmod(0o644)
        Path(temporary).rename(archive)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    member.mode = 0o644
    return member


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(description="Write scikit-learn's digits as PNG files.")
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory to write to")
    parser.add_argument("--tar", type=Path, metavar="FILE", help="also write a plain tar")
    options = parser.parse_args(arguments)
    try:
        if write_digits(options.directory):
            print(f"wrote {IMAGES} images to {options.directory}")
        else:
            print(f"{options.directory} is complete already ({IMAGES} images)")
        if options.tar is not None:
            write_tar(options.directory, options.tar)
            print(f"wrote {options.tar}")
    except (DigitsError, OSError) as error:
        print(f"make_digits.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
