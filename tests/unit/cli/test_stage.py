"""`hpml stage` on the command line: real copies, what it prints and refuses, and how it stops."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.cli.stage_node import Node, grow, same
from tests.unit.cli.test_words import HPML, complete

if TYPE_CHECKING:
    from tests.unit.cli.conftest import Shell


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return grow(tmp_path / "tree", 50)


def test_it_is_there_and_told(node: Node, tree: Path) -> None:
    """Figures, path and digest for people; the second time it is found."""
    told = node.stage(str(tree), "--to", "shm")
    assert (told.code, told.err) == (0, ""), told
    match = re.fullmatch(
        r"staged tree: 50 files, 24\.4 KiB \(25000 bytes\) in \d+\.\d\d s, \S+ \S+/s\n"
        r"  path    (/\S+)\n"
        r"  digest  (xxh3_128:[0-9a-f]{32})\n",
        told.out,
    )
    assert match, told.out
    assert same(tree, match[1])
    assert match[1].startswith(f"{node.ram}/hpml-{os.getuid()}/")
    again = node.stage(str(tree), "--to", "shm")
    assert again.out.startswith("tree was here already: 50 files, 24.4 KiB (25000 bytes), found in")
    assert match[2] in again.out


def test_programs_get_one_document(node: Node, tree: Path, tmp_path: Path) -> None:
    """A list with an object for each source, whatever their names; nothing else is printed."""
    archive = tmp_path / "more.tar"
    subprocess.run(["tar", "cf", archive, "-C", tree, "."], check=True)
    told = node.stage(str(tree), str(archive), "--to", "local", "--json")
    assert (told.code, told.err) == (0, "")
    first, second = told.json()
    assert [first["name"], second["name"]] == ["tree", "more"]
    assert first["digest"] == second["digest"] != ""
    assert (first["files"], first["bytes"], first["reused"]) == (50, 25000, False)
    assert (first["target"], first["choice"]) == ("local", None)
    assert first["source"] == str(tree)
    assert first["bytes_per_second"] > 0
    assert same(tree, first["path"])
    assert same(tree, second["path"])


def test_a_shell_script_gets_one_word(node: Node, tree: Path) -> None:
    """`data=$(hpml stage …)`; and what it names lasts as long as the script."""
    words = " ".join([str(HPML), *node.first, "stage"])
    script = (
        f"set -e; data=$({words} tree --to shm --print path); test -d $data/0; "
        f"(echo; timeout 60 {words} tree --to shm --print reused); "
        f"{words} ls; echo $data"
    )
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tree.parent,
        env=node.shell.environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    lines = done.stdout.splitlines()
    assert lines[1] == "yes"
    assert lines[3].startswith("tree\t")
    told = node.stage("ls", "--json").json()  # the script is over: its data are nobody's
    assert [(one["path"], one["in_use"]) for one in told] == [(lines[-1], "")]
    told = node.stage("clean")
    assert told.out.startswith(f"removed {lines[-1]} of {tree}: ")
    assert node.left() == []


def test_a_source_that_changed_is_staged_again(node: Node, tree: Path) -> None:
    """In the same shell, too: what is found is never older than the source."""
    words = (str(tree), "--to", "shm")
    path = node.stage(*words, "--print", "path").out.strip()
    (tree / "0" / "more.bin").write_bytes(b"x")
    assert node.stage(*words, "--print", "reused").out == "no\n"
    assert same(tree, path)
    assert node.stage(*words, "--print", "reused", "--keep").out == "yes\n"
    (tree / "0" / "more.bin").write_bytes(b"y")
    assert node.stage(*words, "--print", "reused").out == "no\n"
    assert same(tree, path)


def test_digests_that_are_asked_for_are_made(node: Node, tree: Path) -> None:
    """Without a hash there is none; with one the data are staged again."""
    words = (str(tree), "--to", "shm")
    told = node.stage(*words, "--no-hash")
    assert "  digest  " not in told.out
    assert node.stage(*words, "--no-hash", "--print", "reused").out == "yes\n"
    (one,) = node.stage(*words, "--json").json()
    assert not one["reused"]
    assert one["digest"].startswith("xxh3_128:")
    assert node.stage(*words, "--no-hash", "--print", "digest").out == f"{one['digest']}\n"


def test_every_field_can_be_printed(node: Node, tree: Path) -> None:
    """A line for each source, bare."""
    both = (str(tree), str(tree / "0"), "--to", "local", "--print")
    assert node.stage(*both, "bytes").out == "25000\n4000\n"
    assert node.stage(*both, "files").out == "50\n8\n"
    assert node.stage(*both, "name").out == "tree\ndata_0\n"
    assert node.stage(*both, "target").out == "local\nlocal\n"
    assert node.stage(*both, "reused").out == "yes\nyes\n"
    assert re.fullmatch(r"(xxh3_128:\w{32}\n){2}", node.stage(*both, "digest").out)
    assert re.fullmatch(r"([\d.e-]+\n){2}", node.stage(*both, "seconds").out)


def test_a_directory_may_be_called_like_a_command(node: Node, tmp_path: Path) -> None:
    """`./ls` is the directory; so is any name behind an option or another source."""
    for name in ("ls", "verify"):
        grow(node.shell.root / name, 3)
    try:
        told = node.stage("./ls", "verify", "--to", "shm", "--print", "name")
        assert told.out == "ls\nverify\n", told
        assert node.stage("--to", "shm", "ls", "--print", "reused").out == "yes\n"
        assert node.stage("ls").out.startswith("NAME\tSIZE\tFILES\t")
    finally:
        for name in ("ls", "verify"):
            shutil.rmtree(node.shell.root / name)
    told = node.stage("--json", "ls")
    assert told.code == 3
    assert "no such file or directory" in told.err
    assert "hint: did you mean `hpml stage ls`?" in told.err
    assert "did you mean `hpml stage verify`?" in node.stage("verfy", "x").err


def test_commands_and_options_are_completed(shell: Shell) -> None:
    """A command by its beginning as the first word; else files, which the shell knows itself."""
    assert complete(shell, "bash", "hpml stage ver").split() == ["verify"]
    assert complete(shell, "bash", "hpml stage ").split() == []
    assert complete(shell, "bash", "hpml stage data ver").split() == []
    assert complete(shell, "bash", "hpml stage data --epo").split() == ["--epochs"]
    assert complete(shell, "bash", "hpml stage clean --ol").split() == ["--older"]


def test_auto_says_why(node: Node, tree: Path) -> None:
    """The target, and why not the others; what is where it should be is not copied."""
    told = node.stage(str(tree), "--json").json()[0]
    choice = told["choice"]
    assert choice["target"] == told["target"]
    told_targets = {choice["target"], *(one["target"] for one in choice["others"])}
    assert told_targets == {"shm", "local", "in place"}
    assert all(one["why"] for one in choice["others"])
    lines = node.stage(str(tree)).out
    assert f"  target  {choice['target']}: " in lines
    assert lines.count("          not ") == 2


def test_what_is_in_memory_stays(node: Node) -> None:
    """A source in the node's own memory is used where it is, byte for byte its own path."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm here")
    source = Path("/dev/shm") / f"hpml-test-{os.getpid()}-\udcff"
    grow(source, 3)
    try:
        told = node.stage(str(source))
        assert told.out.startswith("hpml_test_"), told
        assert " stays where it is: 3 files" in told.out
        assert "  target  in place: it is on this node's own memory (tmpfs) already" in told.out
        assert "\\xff" in told.out
        (one,) = node.stage(str(source), "--json").json()
        assert one["path"] == str(source)
        assert one["method"] == "in place"
        done = subprocess.run(
            [HPML, *node.first, "stage", source, "--print", "path"],
            env=node.shell.environment(),
            capture_output=True,
            check=True,
        )
        assert done.stdout == os.fsencode(source) + b"\n"
    finally:
        shutil.rmtree(source)
    assert node.left() == node.left(node.disk) == []


def test_names_of_any_bytes(node: Node, tmp_path: Path) -> None:
    """Names that are no text are copied; a source called so has a plain name and its own path."""
    odd = tmp_path / "odd-\udcff\udcfe"
    odd.mkdir()
    for name in (b"new\nline", b"\xff\xfe", b" ", b"-rf", "é".encode("latin-1"), b"q\"'\\"):
        (odd / os.fsdecode(name)).write_bytes(name)
    told = node.stage(str(odd), "--to", "shm")
    assert told.out.startswith("staged odd: 6 files"), told
    (one,) = node.stage(str(odd), "--to", "shm", "--json").json()
    assert one["source"] == str(odd)
    assert same(odd, one["path"])
    told = node.stage("ls")
    assert f"{tmp_path}/odd-\\xff\\xfe" in told.out
    told = node.stage("ls", "--json")
    assert told.json()[0]["source"] == str(odd)


@pytest.mark.parametrize(
    ("words", "code", "message", "hint"),
    [
        ([], 2, "SRC: must be given", "hpml stage data --to shm"),
        ([""], 2, "SRC: must name a directory or a file", ""),
        (["nowhere"], 3, "no such file or directory: ", "commands ls, verify, clean"),
        (["{tree}", "--to", "smh"], 2, "--to: must be auto, shm, local or the path", "--to ./smh"),
        (["{tree}", "--to", ""], 2, "--to: must be auto, shm, local or the path", ""),
        (["{tree}", "--to", "./none"], 2, "--to: no such directory on this node", ""),
        (["{tree}", "--to", "{tree}/0/00000.bin"], 2, "no such directory on this node", ""),
        (["{tree}", "--to", "{tree}"], 2, "SRC: source and target lie in one another", ""),
        (["{tree}", "{tree}/../other/tree"], 2, "would both be called tree", "--name"),
        (["{tree}", "{tree}/0", "--name", "x"], 2, "--name: names one source, and there are 2", ""),
        (["{tree}", "--name", "No"], 2, "--name: must be a small letter", ""),
        (["{tree}", "--name", ""], 2, "--name: must not be empty", ""),
        (["{tree}", "--local-dir", " "], 2, "--local-dir: must not be empty", ""),
        (["{tree}", "--kind", "rar"], 2, "--kind: must be one of auto, ", ""),
        (["{tree}", "--kind", "file"], 2, "SRC: kind file but a directory", ""),
        (["{tree}", "--print", "size"], 2, "--print: must be one of path, ", ""),
        (["{tree}", "--print", "path", "--json"], 2, "--json: cannot be given together", ""),
        (["{tree}", "--epochs", "0"], 2, "--epochs: must be a whole number, 1 or more", ""),
        (["{tree}", "--to", "shm", "--epochs", "3"], 2, "--epochs: cannot be given together", ""),
        (["{tree}", "--to", "shm", "--local-dir", "/tmp"], 2, "--local-dir: cannot be given", ""),
        (["{tree}", "--processes", "0"], 2, "--processes: must be a whole number, 1 or more", ""),
        (["{tree}", "--opens-per-second", "-1"], 2, "--opens-per-second: must be a number", ""),
        (["{tree}", "--frob"], 2, "--frob: hpml stage has no such option", ""),
        (["ls", "--frob"], 2, "--frob: hpml stage ls has no such option", ""),
        (["verify"], 2, "PATH…: must be given", "hpml stage verify"),
        (["clean", "--older", "soon"], 2, "--older: must be a number and s, m, h, d or w", ""),
        (["clean", "--older", "1d", "--all"], 2, "--all: cannot be given together", ""),
        (["clean", "--mine", "--dry-run"], 2, "--dry-run: cannot be given together", ""),
    ],
)
def test_what_is_wrong_is_told(
    node: Node, tree: Path, words: list[str], code: int, message: str, hint: str
) -> None:
    """One line, a hint, a status of its kind; nothing is made."""
    told = node.stage(*(word.format(tree=tree) for word in words))
    assert (told.code, told.out) == (code, ""), told
    assert message in told.err
    assert hint in told.err
    assert "Traceback" not in told.err
    assert node.left() == node.left(node.disk) == []


def test_a_shared_file_system_is_no_target(
    node: Node, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused with what to do. A fake: the type of a file system that this test cannot mount."""
    for module in ("root", "auto"):
        monkeypatch.setattr(
            f"hpml_orchestrator.staging.{module}.file_system_type", lambda *_, **__: "lustre"
        )
    told = node.stage(str(tree), "--to", str(node.ram))
    assert (told.code, told.out) == (2, "")
    assert "lies on lustre, which nodes share" in told.err
    assert "hint: shm and local are the node's own" in told.err
    (one,) = node.stage(str(tree), "--json").json()
    assert one["path"] == str(tree)
    why = {other["target"]: other["why"] for other in one["choice"]["others"]}
    assert why["shm"] == f"{node.ram} lies on lustre, which nodes share"


def test_a_refused_target_is_left_as_it_was(node: Node, tree: Path) -> None:
    """A target in the source: not even an empty directory of hpml's is made in the data."""
    told = node.stage(str(tree), "--to", f"{tree}/0")
    assert (told.code, told.out) == (2, "")
    assert "lie in one another" in told.err
    assert not list(tree.rglob("hpml-*"))


def test_a_command_that_fails_leaves_nothing_at_all(node: Node, tree: Path) -> None:
    """Not even hpml's own directories, unless something of this shell's lies there."""
    os.mkfifo(tree / "fifo")
    assert node.stage(str(tree), "--to", "shm").code == 8
    assert os.listdir(node.ram) == []
    assert node.stage(f"{tree}/0", "--to", "shm", "--name", "part").code == 0
    assert node.stage(str(tree), "--to", "shm").code == 8
    assert [one["name"] for one in node.stage("ls", "--json").json()] == ["part"]


@pytest.mark.parametrize("words", [["{}"], ["x", "--to", "{}"], ["x", "--name", "{}"]])
def test_absurd_words_are_cut(node: Node, words: list[str]) -> None:
    """A word of 100,000 characters is an error that fits a page."""
    told = node.stage(*(word.format("x" * 100_000) for word in words))
    assert told.code in {2, 3}
    assert len(told.err) < 10_000


def test_a_fault_in_the_second_leaves_the_first(node: Node, tree: Path, tmp_path: Path) -> None:
    """What was told stays; the status is that of the fault."""
    told = node.stage(str(tree), str(tmp_path / "none"), "--to", "shm")
    assert told.code == 3
    assert told.out.startswith("staged tree: 50 files")
    assert node.left() != []
    told = node.stage(str(tree), str(tmp_path / "none"), "--to", "shm", "--json")
    assert told.code == 3
    assert [one["name"] for one in told.json()] == ["tree"], "programs are told what stays, too"


def test_special_files_are_refused_by_name(node: Node, tree: Path) -> None:
    """A fifo and a link that leaves the tree, both named; --outside-links takes the link."""
    os.mkfifo(tree / "pipe")
    (tree / "out").symlink_to("/etc/hostname")
    told = node.stage(str(tree), "--to", "shm")
    assert (told.code, told.out) == (8, "")
    assert "2 paths" in told.err
    assert "pipe: is a device, fifo or socket" in told.err
    assert "out: symbolic link to an absolute path" in told.err
    assert "taken as they are with --outside-links" in told.err
    assert node.left() == []
    (tree / "pipe").unlink()
    told = node.stage(str(tree), "--to", "shm", "--outside-links", "--print", "path")
    assert os.readlink(f"{told.out.strip()}/out") == "/etc/hostname"


def test_twenty_of_many_faults_are_told(node: Node, tree: Path) -> None:
    """A tree full of faults is an error of a page, not of a book."""
    for number in range(300):
        os.mkfifo(tree / f"pipe-{number}")
    told = node.stage(str(tree), "--to", "shm")
    assert told.code == 8
    assert "300 paths" in told.err
    assert "and 280 more" in told.err
    assert len(told.err.splitlines()) < 30


@pytest.mark.parametrize("count", [5000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_so_many_names(node: Node, tmp_path: Path, count: int) -> None:
    """One directory of many empty files is staged and found."""
    many = tmp_path / "many"
    many.mkdir()
    top = os.open(many, os.O_RDONLY)
    for number in range(count):
        os.close(os.open(f"{number}-\udcff", os.O_CREAT | os.O_WRONLY, dir_fd=top))
    os.close(top)
    told = node.stage(str(many), "--to", "shm", "--json").json()[0]
    assert (told["files"], told["bytes"]) == (count, 0)
    assert len(os.listdir(told["path"])) == count
    assert node.stage(str(many), "--to", "shm", "--print", "reused").out == "yes\n"


ROOT_ALONE = pytest.mark.skipif(os.getuid() != 0, reason="only root can do that here")


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 1 MiB and 60 inodes."""
    place = tmp_path / "tmpfs"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=60", "none", place], check=False
    )
    if done.returncode:
        pytest.skip("nothing can be mounted here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@ROOT_ALONE
def test_a_full_target_is_found_before_copying(node: Node, tmpfs: Path, tmp_path: Path) -> None:
    """Bytes and inodes; auto passes such a place over."""
    large = tmp_path / "large"
    large.mkdir()
    (large / "x").write_bytes(bytes(2 << 20))
    told = node.stage(str(large), "--to", str(tmpfs))
    assert told.code == 2
    assert "needs 2.0 MiB" in told.err or "needs" in told.err
    assert "hint: " in told.err
    many = grow(tmp_path / "many", 70, 1)
    told = node.stage(str(many), "--to", str(tmpfs))
    assert told.code == 2
    assert "inodes" in told.err
    assert "stage it with --kind file" in told.err
    assert node.left(tmpfs) == []
    told = node.stage(str(large), "--local-dir", str(tmpfs), "--json").json()[0]
    assert told["choice"]["target"] != "local"


@ROOT_ALONE
def test_a_target_that_cannot_be_written(node: Node, tmpfs: Path, tree: Path) -> None:
    """A read-only file system is an error that names the place."""
    subprocess.run(["mount", "-o", "remount,ro", tmpfs], check=True)
    told = node.stage(str(tree), "--to", str(tmpfs))
    assert told.code == 8
    assert "Read-only file system" in told.err
    assert str(tmpfs) in told.err


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """Root's rights are given up for a while; workers are forked without them as well."""
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@ROOT_ALONE
def test_a_user_without_rights(node: Node, tree: Path, tmp_path: Path) -> None:
    """What a user cannot read is named, and nothing is published."""
    assert node.stage(str(tree), "--to", "local").code == 0  # imports what nobody could read
    for place in [node.shell.root, tmp_path, *tmp_path.parents]:
        if not place.stat().st_mode & 0o001:
            place.chmod(0o711)
    node.ram.chmod(0o1777)
    secrets = tree / "1" / "secret", tree / "2"
    secrets[0].write_text("x")
    for one in secrets:
        one.chmod(0o000)
    with nobody():
        told = node.stage(str(tree), "--to", "shm")
        closed = node.stage(str(tree / "2" / "any"), "--to", "shm")
    assert (closed.code, closed.out) == (8, "")
    assert f"cannot look at {tree / '2' / 'any'}: Permission denied" in closed.err
    assert (told.code, told.out) == (8, ""), told
    assert "Permission denied" in told.err
    assert "2/.: Permission denied" in told.err
    assert "Traceback" not in told.err
    assert node.left() == []
    secrets[0].chmod(0o644)
    secrets[1].chmod(0o755)
    with nobody():
        told = node.stage(str(tree), "--to", "shm", "--print", "path")
    assert told.code == 0, told
    assert same(tree, told.out.strip())
    assert os.stat(told.out.strip()).st_uid == 65534


def test_a_quiet_run_is_quiet(node: Node, tree: Path) -> None:
    """Where there is no terminal, a run of a moment prints its result alone."""
    for form in (["--json"], ["--print", "path"]):
        done = subprocess.run(
            [HPML, *node.first, "stage", tree, "--to", "shm", *form],
            env=node.shell.environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
    assert json.dumps(str(tree)) not in done.stdout


def test_what_a_site_says_counts(node: Node, tree: Path) -> None:
    """A profile whose disk is a variable of jobs: outside of one there is no local directory."""
    (node.root / "site.toml").write_text('[paths]\nscratch = "$JOB_SCRATCH/x"\n', encoding="utf-8")
    told = node.stage(str(tree), "--to", "local")
    assert told.code == 2
    assert "no local staging directory" in told.err
    (node.disk / "x").mkdir()
    node.shell.variables["JOB_SCRATCH"] = str(node.disk)
    try:
        told = node.stage(str(tree), "--to", "local", "--print", "path")
    finally:
        del node.shell.variables["JOB_SCRATCH"]
    assert told.out.startswith(f"{node.disk}/x/hpml-")
    told = node.stage(str(tree), "--to", "local", "--local-dir", str(node.disk), "--print", "path")
    assert told.out.startswith(f"{node.disk}/hpml-")
    node.stage("clean", "--mine", str(node.disk / "x"))


def test_the_sites_limit_holds(node: Node, tree: Path) -> None:
    """As long as the command says nothing else: 50 files at 25 a second take a second and more."""
    with (node.root / "site.toml").open("a", encoding="utf-8") as profile:
        profile.write("[staging]\nopens_per_second = 25\n")
    slow = node.stage(str(tree), "--to", "shm", "--json").json()[0]["seconds"]
    assert slow > 0.9
