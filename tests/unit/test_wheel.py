"""The wheel alone is hpml: what a user does works in an environment that never saw a checkout."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import urllib.parse
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.patience import eventually
from tests.unit.training_runs import TRAINS

ROOT = Path(__file__).parents[2]

# Every `hpml … --help`, in one process of the installed Python.
HELP = """
import typer
from typer.testing import CliRunner
from hpml_orchestrator.cli.main import COMMANDS, app

def show(words, command):
    done = CliRunner().invoke(app, [*words, "--help"])
    assert done.exit_code == 0 and "Usage" in done.output, (words, done.output)
    print("hpml", *words)
    for name, child in getattr(command, "commands", {}).items():
        show([*words, name], child)

root = typer.main.get_command(app)
for name in COMMANDS:
    root.load(name)
show([], root)
"""


class Installed:
    """An environment with the wheel, and a home outside the checkout, where commands run."""

    def __init__(self, wheel: Path, place: Path, extras: tuple[str, ...] = ()) -> None:
        """Install the wheel alone; what it depends on is linked from this environment.

        Nothing else is linked: a dependency that the wheel does not name is missing.
        """
        venv.create(place / "venv", symlinks=True)
        self.bin = place / "venv" / "bin"
        self.home = place / "home"
        self.home.mkdir()
        install = f"--python {self.bin}/python install --no-deps --no-index {wheel}".split()
        subprocess.run([sys.executable, "-m", "pip", "--quiet", *install], check=True, timeout=300)
        (self.site,) = (place / "venv" / "lib").glob("python*/site-packages")
        for path in needed_by("hpml-orchestrator", extras):
            if not (self.site / path.name).exists():
                (self.site / path.name).symlink_to(path)
        self.environment = {
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "PATH": f"{self.bin}:/usr/local/bin:/usr/bin:/bin",
            **{f"XDG_{n}_HOME": str(self.home / n) for n in ("CONFIG", "STATE", "CACHE", "DATA")},
        }

    def start(self, *command: str, directory: Path | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=directory or self.home,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *command: str, status: int = 0, directory: Path | None = None) -> str:
        """Return the output of a command, what it wrote to stderr last."""
        with self.start(*command, directory=directory) as process:
            try:
                out, err = process.communicate(timeout=300)
            finally:
                process.kill()
        assert process.returncode == status, out + err
        return out + err

    @contextmanager
    def served(self, *command: str) -> Iterator[str]:
        """Start a server; yield the address that it prints, and end it as its user would."""
        with self.start(*command) as process:
            try:
                stream = process.stdout if "dashboards" in command else process.stderr
                assert stream
                yield next(found[0] for line in stream if (found := re.search(r"http://\S+", line)))
                process.send_signal(signal.SIGINT)
                process.wait(60)
            finally:
                process.kill()
        assert process.returncode in {0, 130}


def needed_by(name: str, extras: tuple[str, ...]) -> set[Path]:
    """Return what this environment's site-packages has of a distribution's dependencies."""
    found: set[Path] = set()
    seen: set[str] = set()
    todo = [(name, extras)]
    while todo:
        name, extras = todo.pop()
        for line in distribution(name).requires or ():
            wanted = Requirement(line)
            marker = wanted.marker
            chosen = marker is None or any(marker.evaluate({"extra": e}) for e in ("", *extras))
            if not chosen or str(wanted) in seen:
                continue
            seen.add(str(wanted))
            todo.append((wanted.name, tuple(wanted.extras)))
            installed = distribution(wanted.name)
            for file in installed.files or ():
                if file.parts[0] not in {"..", "__pycache__"} and file.suffix != ".pth":
                    found.add(Path(str(installed.locate_file(file.parts[0]))))
    return found


def build(source: Path, kind: str, out: Path) -> Path:
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(out)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name in ("hatchling", "build"):
        pytest.importorskip(name, reason=f"{name} is not installed: no wheel can be built")
    return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(wheel, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def complete(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(wheel, tmp_path_factory.mktemp("complete"), ("train", "dashboards"))


def contents(wheel: Path) -> dict[str, int]:
    with zipfile.ZipFile(wheel) as opened:
        return {member.filename: member.CRC for member in opened.infolist()}


def test_the_source_package_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    """Byte for byte, and without the files that git ignores."""
    with tarfile.open(build(ROOT, "sdist", tmp_path / "sdist")) as opened:
        opened.extractall(tmp_path / "tree", filter="data")
    (tree,) = (tmp_path / "tree").iterdir()
    (tree / "training_jobs" / "digits").mkdir()
    (tree / "training_jobs" / "digits" / "0.png").touch()
    assert contents(build(tree, "wheel", tmp_path / "again")) == contents(wheel)


def test_the_wheel_holds_hpml_and_nothing_else(wheel: Path) -> None:
    """Modules, and under _assets/ what is no module; no tests, and no bytecode."""
    names = contents(wheel).keys()
    roots = ("hpml_orchestrator", "hpml_exporters", "hpml_dashboards")
    assert {re.split("[/-]", name)[0] for name in names} == {*roots}
    assert not [name for name in names if re.search(r"__pycache__|(^|/)(tests?_|tests/)", name)]
    assert {"hpml_dashboards/json/hpml-job.json", "hpml_dashboards/viewer/viewer.js"} <= names


@pytest.mark.parametrize("page", ["README.md", "docs/install-cluster.md"])
def test_pages_name_the_wheel_of_this_version(wheel: Path, page: str) -> None:
    """What they tell users to install is the file that a build makes."""
    named = re.findall(r"hpml_orchestrator-[\w.-]+", (ROOT / page).read_text())
    assert {*named} == {wheel.name}


def test_nothing_installed_names_the_checkout(installed: Installed) -> None:
    """Neither a file of hpml nor the path that its Python imports from."""
    hpml = [*installed.bin.glob("hpml*"), *(installed.bin.parent / "share").rglob("*")]
    hpml += [path for top in installed.site.glob("hpml_*") for path in top.rglob("*")]
    files = [path for path in hpml if path.is_file()]
    assert len(files) > 500
    assert not [path for path in files if str(ROOT).encode() in path.read_bytes()]
    assert str(ROOT) not in installed.run("python", "-c", "import sys; print(sys.path)")


def test_every_command_has_help(installed: Installed) -> None:
    """Each command's modules are in the wheel, and need no extra to be described."""
    shown = installed.run("python", "-c", HELP).splitlines()
    assert {"hpml submit", "hpml sweep run", "hpml dashboards push", "hpml export slurm"} <= {
        *shown
    }


def test_manual_pages(installed: Installed) -> None:
    """`man hpml` works in the activated environment, with a page for every command."""
    pages = installed.bin.parent / "share" / "man" / "man1"
    assert {p.name for p in pages.iterdir()} == {p.name for p in ROOT.glob("docs/man/man1/*")}
    if shutil.which("man") is None:
        pytest.skip("NOT TESTED: man is not installed (apt-get install man-db)")
    assert installed.run("man", "-w", "hpml-submit") == f"{pages}/hpml-submit.1\n"


def test_completion(installed: Installed) -> None:
    """Bash completes a command with what --show-completion prints."""
    script = 'eval "$(hpml --show-completion)"; COMP_WORDS=(hpml subm) COMP_CWORD=1\n'
    script += '_hpml_completion hpml; echo "${COMPREPLY[@]}"'
    assert installed.run("bash", "-c", script) == "submit\n"


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("hpml schema job", '"$defs"'),
        ("hpml man submit", "hpml submit [OPTIONS]"),
        ("hpml man --output pages", "pages"),
        ("hpml import script.sh", "launcher: srun"),
        ("hpml topo --json", '"source": "sysfs"'),
        ("hpml export metrics", "hpml_exporter_up\tgauge\tcollector\t"),
        ("hpml-bind -- echo bound", "bound\n"),
        ("python -c 'import hpml_orchestrator as hpml; print(hpml.submit)'", "function submit"),
    ],
)
def test_commands_find_their_files(installed: Installed, command: str, output: str) -> None:
    """The wheel has all files that a command reads."""
    script = "#!/bin/bash\n#SBATCH -N 1\nsrun python train.py\n"
    (installed.home / "script.sh").write_text(script)
    assert output in installed.run(*shlex.split(command))


def test_a_missing_extra_is_named(installed: Installed) -> None:
    """With a way to install it that does not ask a package index for hpml."""
    told = installed.run("hpml", "dashboards", "build", "--output", "built", status=1)
    assert "grafana_foundation_sdk is not installed\nhint: install hpml with its extra" in told


def test_a_job_runs_and_is_reported(installed: Installed) -> None:
    """Its script, its record and its report name the environment, and never the checkout."""
    job = {"name": "wheel", "launcher": "srun", "command": ["sh", "-c", "echo $RANK of wheel"]}
    (installed.home / "job.yaml").write_text(json.dumps(job))
    assert f"hpml_begin {installed.bin}/python" in installed.run("hpml", "render", "job.yaml")
    done = installed.run("hpml", "run", "--local", "job.yaml")
    assert "0 of wheel\n" in done
    assert "COMPLETED" in done
    assert "COMPLETED" in installed.run("hpml", "report", "last")
    records = [path for path in (installed.home / "STATE").rglob("*") if path.is_file()]
    assert records
    assert not [path for path in records if str(ROOT).encode() in path.read_bytes()]


@TRAINS
@pytest.mark.alone
def test_the_images_example_trains(complete: Installed) -> None:
    """As `hpml new images` says: write the images, run the job."""
    directory = complete.home / "images"
    assert "hpml run digits.yaml" in complete.run("hpml", "new", "images", "images")
    complete.run("python", "make_digits.py", "digits", directory=directory)
    job = (directory / "digits.yaml").read_text().replace("--epochs=12", "--epochs=2")
    (directory / "digits.yaml").write_text(job)
    done = complete.run("hpml", "run", "digits.yaml", "--local", directory=directory)
    assert "2 ranks bound" in done
    assert "epoch 2/2" in done
    assert re.search(r"training .* samples/s", done)
    assert "verdict" in complete.run("hpml", "report", "last")


def test_a_node_is_exported(installed: Installed) -> None:
    """Its collectors find their modules in the wheel."""
    with installed.served("hpml", "export", "node", "--listen", "127.0.0.1:0") as address:
        up = re.compile(r'hpml_exporter_up\{.*collector="\w+".*\} 1')
        eventually(lambda: up.search(read(address)), "a collector has read something")
    assert up.search(installed.run("hpml", "export", "node", "--once"))


def read(address: str, *then: str) -> str:
    """Return a page, or the last of several that share cookies."""
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    for url in (address, *(urllib.parse.urljoin(address, path) for path in then)):
        with browser.open(url, timeout=30) as page:
            text: str = page.read().decode()
    return text


class EmptyPrometheus(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b'{"status": "success", "data": {"resultType": "vector", "result": []}}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def test_dashboards_are_built_and_shown(complete: Installed) -> None:
    """The viewer's program and the dashboards come from the wheel."""
    assert "built/hpml-job.json" in complete.run("hpml", "dashboards", "build", "--output", "built")
    with ThreadingHTTPServer(("127.0.0.1", 0), EmptyPrometheus) as prometheus:
        threading.Thread(target=prometheus.serve_forever, daemon=True).start()
        source = f"http://127.0.0.1:{prometheus.server_port}"
        show = ["dashboards", "show", "--no-open", "--listen", "0", "--prometheus", source]
        with complete.served("hpml", *show) as address:
            assert "viewer.js" in read(address, "/")
            assert len(read(address, "/viewer/viewer.js")) > 1_000_000
            assert '"hpml-job"' in read(address, "/api/dashboards")
        prometheus.shutdown()
