"""What the tests of the command line share: a user's shell, a node to stage to, a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HPML = Path(sys.executable).parent / "hpml"
COLOUR = re.compile(r"\x1b\[[0-9;]*\b(3[0-8]|4[0-8]|9[0-7]|10[0-7])(;[0-9;]*)?m")
SVG = "{http://www.w3.org/2000/svg}"


def as_anybody() -> list[str]:
    """What to put before a command so that file permissions count for it, even for root."""
    if os.geteuid() != 0:
        return []
    return ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]


@dataclass
class Result:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """Standard output as one JSON document."""
        return json.loads(self.out)

    def refuses(self, code: int, *parts: str) -> bool:
        """Whether it ended with that status and one error that has these parts."""
        assert (self.code, self.out) == (code, ""), self
        assert self.err.count("hpml: error: ") == 1, self.err
        assert not [part for part in parts if part not in self.err], self.err
        return True


Hpml = Callable[..., Result]


@dataclass
class Shell:
    """A user's shell: a directory, records, variables."""

    root: Path
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def records(self) -> Path:
        """Where records live."""
        return self.root / "records"

    def environment(self) -> dict[str, str]:
        """The variables of the shell; nothing of the test machine's Slurm."""
        dropped = ("SLURM", "HPML", "SBATCH", "COV_", "PYTEST")
        kept = {n: v for n, v in os.environ.items() if not n.startswith(dropped)}
        return {
            **kept,
            "HPML_HOME": str(self.records),
            "XDG_CONFIG_HOME": str(self.root / "config"),  # not the developer's own profile
            "HPML_LOCAL_KILL_WAIT": "3",
            "COLUMNS": "100",
            **self.variables,
        }

    def job(self, name: str = "probe", **fields: Any) -> str:
        """Write a job file (JSON is YAML) and return its path; a field that is None is left out."""
        data = {"name": name, "launcher": "srun", "command": ["bash", "-c", "echo hi"], **fields}
        path = self.root / f"{name}.yaml"
        path.write_text(json.dumps({key: one for key, one in data.items() if one is not None}))
        return str(path)

    def start(self, *words: str, **more: Any) -> subprocess.Popen[str]:
        """Start hpml as a separate process."""
        return subprocess.Popen(
            [HPML, *words],
            env=self.environment(),
            cwd=self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **more,
        )

    def hpml(self, *words: str) -> Result:
        """Run hpml as a separate process."""
        with self.start(*words) as process:
            out, err = process.communicate(timeout=120)
        return Result(process.returncode, out, err)

    def bash(self, line: str, *words: str | Path, cwd: Path | None = None) -> Result:
        """Run a line of bash as somebody whom permissions bind; "$@" in it is hpml with words."""
        done = subprocess.run(
            [*as_anybody(), "bash", "-o", "pipefail", "-c", line, "bash", HPML, *words],
            env=self.environment(),
            cwd=cwd or self.root,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return Result(done.returncode, done.stdout, done.stderr)


@dataclass
class Node:
    """A node to stage to: directories for memory and disk, and a profile that names both."""

    root: Path
    hpml: Hpml
    shell: Shell

    def __post_init__(self) -> None:
        self.ram, self.disk = self.root / "ram", self.root / "disk"
        self.ram.mkdir()
        self.disk.mkdir()
        profile = self.root / "site.toml"
        profile.write_text(f'[paths]\nram = "{self.ram}"\nscratch = "{self.disk}"\n')
        self.first = ("--site", str(profile))

    def stage(self, *words: str) -> Result:
        """Run `hpml stage` in this process."""
        return self.hpml(*self.first, "stage", *words)

    def start(self, *words: str, **more: Any) -> subprocess.Popen[str]:
        """Start it as a separate process."""
        return self.shell.start(*self.first, "stage", *words, **more)

    def script(self, *words: str) -> str:
        """What a script that stages and ends has printed."""
        done = self.shell.bash('"$@"; true', *self.first, "stage", *words)
        assert done.code == 0, done.err
        return done.out.strip()


def grow(root: Path, files: int, size: int = 500) -> Path:
    """Make a tree of small files, with an empty directory and a link."""
    (root / "empty").mkdir(parents=True)
    for number in range(files):
        place = root / f"{number % 7}"
        place.mkdir(exist_ok=True)
        (place / f"{number:05}.bin").write_bytes(os.urandom(size))
    (root / "link").symlink_to("0")
    return root


def same(one: str | Path, other: str | Path) -> bool:
    """Whether two trees have the same names and contents."""
    return subprocess.run(["diff", "-r", one, other], check=False).returncode == 0


def in_terminal(command: Sequence[str | Path], environment: Mapping[str, str]) -> str:
    """What a command prints on a real terminal."""
    leader, follower = pty.openpty()
    with subprocess.Popen(
        command, env=environment, stdin=follower, stdout=follower, stderr=follower
    ) as process:
        os.close(follower)
        printed = b""
        while True:
            try:
                data = os.read(leader, 65_536)
            except OSError:  # how Linux reports that the last writer has closed it
                break
            if not data:
                break
            printed += data
        process.wait(120)
    os.close(leader)
    return printed.decode()
