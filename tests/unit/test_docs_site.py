"""The documentation can be built as a site whose links and menu hold."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OUTSIDE = "README.md CHANGELOG.md CONTRIBUTING.md LICENSE mkdocs.yml".split()
NAMED = (
    "training_jobs/README.md",
    "deploy/devcluster/README.md",
    "deploy/gpusim/README.md",
    "deploy/prometheus/prometheus.yml",
    "exporters/README.md",
    "deploy/systemd/hpml-exporter-node.service",
)
"""What pages lead to outside of docs/."""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the documentation as it lies in the repository."""
    root = tmp_path / "copy"
    shutil.copytree(ROOT / "docs", root / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    for name in OUTSIDE:
        shutil.copy(ROOT / name, root / name)
    for name in NAMED:
        (root / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, root / name)
    return root


def build(root: Path) -> subprocess.CompletedProcess[str]:
    """Build the site with every warning an error."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(
        [*command, "--site-dir", root.with_name("site")],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if "No module named mkdocs" in done.stderr:
        pytest.skip("NOT TESTED: mkdocs is not installed (the extra 'dev' has it)")
    return done


def test_the_site_builds_without_a_warning(copy: Path) -> None:
    """Every page of docs/ is in the menu, and links to pages outside of docs/ lead to them."""
    done = build(copy)
    assert done.returncode == 0, done.stderr
    site = copy.with_name("site")
    pages = {path.stem for path in (copy / "docs").glob("*.md")}
    assert pages <= {path.stem for path in site.glob("*.html")}
    assert 'href="training_jobs/' in (site / "tutorial.html").read_text("utf-8")
    assert not list(site.rglob("*.1"))
    assert not [page for page in site.rglob("*.html") if "```" in page.read_text("utf-8")]
    menu = (copy / "mkdocs.yml").read_text("utf-8")
    assert pages <= {Path(name).stem for name in re.findall(r": (\S+\.md)$", menu, re.MULTILINE)}


def test_long_cells_of_tables_are_wrapped(copy: Path) -> None:
    """The theme keeps each on one line: whoever reads the metrics would scroll sideways."""
    assert build(copy).returncode == 0
    site = copy.with_name("site")
    found = re.findall(
        r'href="([^":]+\.css)" rel="stylesheet"', (site / "metrics.html").read_text()
    )
    assert re.search(r"table td,[^{]*\{\s*white-space: normal", (site / found[-1]).read_text())


@pytest.mark.parametrize(
    ("page", "text", "named"),
    [
        ("docs/tutorial.md", "[a](nowhere.md)", "nowhere.md"),
        ("README.md", "[a](docs/job-file.md#nothing)", "#nothing"),
        ("docs/alone.md", "# Alone", "alone.md"),
    ],
)
def test_what_leads_nowhere_is_noticed(copy: Path, page: str, text: str, named: str) -> None:
    """A broken link, a missing heading, and a page that is not in the menu fail the build."""
    with (copy / page).open("a", encoding="utf-8") as stream:
        stream.write(f"\n{text}\n")
    done = build(copy)
    assert done.returncode == 1
    assert named in done.stderr
