"""The documentation can be built as a site whose links and menu hold."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT

# What pages lead to outside of docs/.
OUTSIDE = """\
README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md LICENSE mkdocs.yml training_jobs/README.md
deploy/devcluster/README.md deploy/gpusim/README.md deploy/prometheus/prometheus.yml
deploy/prometheus/rules/hpml.yml deploy/prometheus/rules/hpml-alerts.yml deploy/grafana/README.md
deploy/README.md deploy/prometheus/rules/optional/dcgm-exporter.yml
deploy/prometheus/rules/optional/jobstats.yml exporters/README.md
deploy/systemd/hpml-exporter-node.service deploy/slurm/hpml-health.sh training_jobs/train.py
""".split()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the documentation as it is in the repository."""
    root = tmp_path / "copy"
    shutil.copytree(ROOT / "docs", root / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    for name in OUTSIDE:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    return root


def build(root: Path) -> subprocess.CompletedProcess[str]:
    """Build the site with every warning an error."""
    pytest.importorskip("mkdocs", reason="NOT TESTED: the extra 'dev' has mkdocs")
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", root.parent / "site"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_site_builds_without_a_warning(copy: Path) -> None:
    """Every page of docs/ is in the menu, links lead outside of docs/, long cells are wrapped."""
    done = build(copy)
    assert done.returncode == 0, done.stderr
    site = copy.parent / "site"
    pages = {path.stem for path in (copy / "docs").glob("*.md")}
    assert pages <= {path.stem for path in site.glob("*.html")}
    assert 'href="training_jobs/' in (site / "tutorial.html").read_text("utf-8")
    assert not list(site.rglob("*.1"))
    assert not [page for page in site.rglob("*.html") if "```" in page.read_text("utf-8")]
    menu = (copy / "mkdocs.yml").read_text("utf-8")
    assert pages <= {Path(name).stem for name in re.findall(r": (\S+\.md)$", menu, re.MULTILINE)}
    # the theme keeps each cell on one line: whoever reads the metrics would scroll sideways
    text = (site / "metrics.html").read_text("utf-8")
    style = re.findall(r'href="([^":]+\.css)" rel="stylesheet"', text)[-1]
    assert re.search(r"table td,[^{]*\{\s*white-space: normal", (site / style).read_text())


def test_what_leads_nowhere_is_noticed(copy: Path) -> None:
    """A broken link, a missing heading, and a page that is not in the menu fail the build."""
    for page, text in (
        ("docs/tutorial.md", "[a](nowhere.md)"),
        ("README.md", "[a](docs/job-file.md#nothing)"),
        ("docs/alone.md", "# Alone"),
    ):
        with (copy / page).open("a", encoding="utf-8") as stream:
            stream.write(f"\n{text}\n")
    done = build(copy)
    assert done.returncode == 1
    for named in ("nowhere.md", "#nothing", "alone.md"):
        assert named in done.stderr
