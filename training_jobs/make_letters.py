"""Draw letters in colour as JPEG files, harder than the digits, in folders train, val and test.

    python make_letters.py letters
    python make_letters.py others --letters QRSTUVWXYZ

The files are DIR/train/<letter>/<index>.jpg, and so on: 32x32 pixels, rotated, shifted, on a
background with a line and noise. Equal options draw equal letters. No download: the font comes with
Pillow.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIZE = 32
FIFTHS = {"train": 3, "val": 1, "test": 1}  # fifths of the images


def draw(letter: str, random: np.random.Generator) -> Image.Image:
    """Return a letter in a random dark colour, size, angle and position, on a light background."""
    back, line, front = (
        tuple(int(one) for one in random.integers(low, low + 96, 3)) for low in (160, 80, 0)
    )
    image = Image.new("RGB", (SIZE, SIZE), back)
    ImageDraw.Draw(image).line([int(one) for one in random.integers(0, SIZE, 4)], line, 2)
    mask = Image.new("L", (SIZE, SIZE))
    font = ImageFont.load_default(int(random.integers(22, 33)))
    x, y = (SIZE / 2 + float(one) for one in random.uniform(-4, 4, 2))
    ImageDraw.Draw(mask).text((x, y), letter, 255, font, anchor="mm")
    mask = mask.rotate(float(random.uniform(-20, 20)), Image.Resampling.BILINEAR)
    image.paste(front, mask=mask)
    noisy = np.asarray(image) + random.normal(0, 12, (SIZE, SIZE, 3))
    return Image.fromarray(noisy.clip(0, 255).astype("uint8"))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(description="Draw letters in colour as JPEG files.")
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR", help="directory to create")
    add("--letters", default="ABCDEFGHIJKLMNOP", help="the classes, default %(default)s")
    add("--images", type=int, default=200, metavar="N", help="per letter, default %(default)s")
    add("--seed", type=int, default=1, metavar="N")
    options = parser.parse_args(arguments)
    target, each = options.directory, max(1, options.images // sum(FIFTHS.values()))
    temporary = None
    try:
        if target.exists():
            raise FileExistsError(f"{target} exists: remove it first")
        target.parent.mkdir(parents=True, exist_ok=True)
        # In the same directory, since a rename is atomic only within one file system.
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        for letter in sorted({*options.letters}):
            random = np.random.default_rng((options.seed, ord(letter)))
            for part, fifths in FIFTHS.items():
                (temporary / part / letter).mkdir(parents=True)
                for number in range(fifths * each):
                    file = temporary / part / letter / f"{number:04d}.jpg"
                    draw(letter, random).save(file, quality=90)
        temporary.chmod(0o755)
        temporary.rename(target)
    except OSError as error:
        print(f"make_letters.py: error: {error}", file=sys.stderr)
        return 2
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    print(f"wrote {len({*options.letters}) * each * sum(FIFTHS.values())} images to {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
