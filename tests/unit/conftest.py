"""Images to train with, for the tests of all training jobs."""

from pathlib import Path

import pytest

from tests.unit.training_runs import DIGITS, run


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("data") / "digits"
    done = run([DIGITS, target])
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def few(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty images of each of four digits: enough to train in a moment."""
    target = tmp_path_factory.mktemp("few")
    for digit in "0123":
        (target / digit).mkdir()
        for path in sorted((digits / digit).iterdir())[:30]:
            (target / digit / path.name).symlink_to(path)
    return target
