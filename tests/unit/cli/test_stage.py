"""`hpml stage` on the command line: what it prints, what stays, and how it stops."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hpml_orchestrator.records.job import Stage
from hpml_orchestrator.staging.stage import CopyStager
from tests.patience import eventually
from tests.unit.cli.support import HPML, Node, grow, in_terminal, same

SLOWLY = ("--opens-per-second", "500")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return grow(tmp_path / "tree", 50)


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """At 500 opens per second, more than is copied before a signal comes."""
    return grow(tmp_path_factory.mktemp("sources") / "big", 3000, 2000)


def of_a_job(base: Path, source: Path, key: str, *, keep: bool) -> CopyStager:
    """Stage as a job's agent does; its stager still uses the data."""
    stager = CopyStager(key)
    stager.stage(Stage("tree", str(source), target=str(base), keep=keep))
    return stager


def test_the_copy_is_there_and_reused(node: Node, tree: Path) -> None:
    """Figures, path and digest for people; the second time it is found."""
    shown = node.stage(str(tree), "--to", "shm")
    assert (shown.code, shown.err) == (0, ""), shown
    match = re.fullmatch(
        r"staged tree: 50 files, 24\.4 KiB \(25000 bytes\) in \d+\.\d\d s, \S+ \S+/s\n"
        r"  path    (/\S+)\n"
        r"  digest  (xxh3_128:[0-9a-f]{32})\n",
        shown.out,
    )
    assert match, shown.out
    assert same(tree, match[1])
    assert match[1].startswith(f"{node.ram}/hpml-{os.getuid()}/")
    again = node.stage(str(tree), "--to", "shm").out
    assert again.startswith("tree is already staged: 50 files, 24.4 KiB (25000 bytes), found in ")
    (tree / "0" / "more.bin").write_bytes(b"y")
    assert node.stage(str(tree), "--to", "shm", "--print", "reused").out == "no\n"


def test_fields_and_json(node: Node, tree: Path) -> None:
    """A bare line for each source, or everything as JSON."""
    both = (str(tree), str(tree / "0"), "--to", "local")
    for field, pattern in {
        "bytes": "25000\n4000\n",
        "name": "tree\ndata_0\n",
        "target": "local\nlocal\n",
        "reused": "yes\nyes\n",
        "digest": r"(xxh3_128:\w{32}\n){2}",
        "seconds": r"([\d.e-]+\n){2}",
        "path": r"(/\S+\n){2}",
    }.items():
        assert re.fullmatch(pattern, node.stage(*both, "--print", field).out), field
    first, second = node.stage(*both, "--json").json()
    assert (first["source"], first["files"], first["choice"]) == (str(tree), 50, None)
    assert second["bytes_per_second"] >= 0
    assert "  digest  " not in node.stage(str(tree), "--to", "shm", "--no-hash").out


def test_a_directory_may_be_named_like_a_command(node: Node) -> None:
    """`./ls` is the directory; so is any name behind an option or another source."""
    for name in ("ls", "verify"):
        grow(node.shell.root / name, 3)
    try:
        staged = node.stage("./ls", "verify", "--to", "shm", "--print", "name")
        assert staged.out == "ls\nverify\n", staged
        assert node.stage("--to", "shm", "ls", "--print", "reused").out == "yes\n"
        assert node.stage("ls").out.startswith("NAME\tSIZE\tFILES\t")
    finally:
        for name in ("ls", "verify"):
            shutil.rmtree(node.shell.root / name)


def test_auto_gives_its_reasons(node: Node, tree: Path) -> None:
    """The target, and why not the others; what is in memory already is used in place."""
    (staged,) = node.stage(str(tree), "--json").json()
    choice = staged["choice"]
    targets = {choice["target"], *(other["target"] for other in choice["others"])}
    assert targets == {"shm", "local", "in place"}
    lines = node.stage(str(tree)).out
    assert f"  target  {choice['target']}: " in lines
    assert lines.count("          not ") == 2
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm here")
    source = grow(Path("/dev/shm") / f"hpml-test-{os.getpid()}-\udcff", 3)
    try:
        shown = node.stage(str(source)).out
        assert (" is used in place: 3 files" in shown, "\\xff" in shown) == (True, True)
        assert node.stage(str(source), "--json").json()[0]["bytes_per_second"] == 0
        words: list[str | Path] = [HPML, *node.first, "stage", source, "--print", "path"]
        printed = subprocess.check_output(words, env=node.shell.environment())
        assert printed == os.fsencode(source) + b"\n"
    finally:
        shutil.rmtree(source)


def test_a_command_that_fails_leaves_nothing(node: Node, tree: Path) -> None:
    """Faults are named in options of the command; sources already staged are kept."""
    os.mkfifo(tree / "pipe")
    (tree / "out").symlink_to("/etc/hostname")
    failed = node.stage(str(tree), "--to", "shm")
    assert failed.refuses(8, "pipe: is a device, fifo or socket", "--outside-links) takes links")
    assert os.listdir(node.ram) == []
    (tree / "pipe").unlink()
    path = node.stage(str(tree), "--to", "shm", "--outside-links", "--print", "path").out.strip()
    assert os.readlink(f"{path}/out") == "/etc/hostname"
    (tree / "gone").symlink_to("none")
    followed = node.stage(str(tree), "--to", "shm", "--follow-links", "--print", "path")
    assert os.path.isfile(f"{followed.out.strip()}/out")
    assert not os.path.islink(f"{followed.out.strip()}/out")
    noted = node.stage(str(tree), "--to", "shm", "--follow-links")
    assert "note: tree: links that lead nowhere in the copy: 1; `find " in noted.err
    failed = node.stage(str(tree / "0"), str(tree / "none"), "--to", "shm", "--json")
    assert failed.code == 3
    assert [staged["name"] for staged in failed.json()] == ["data_0"], "programs learn what is kept"


@pytest.mark.parametrize("fault", ["grows", "goes", "comes"])
def test_a_source_that_changes_midway(node: Node, big: Path, tmp_path: Path, fault: str) -> None:
    """Nothing is published, and the next run works."""
    tree = tmp_path / "tree"
    shutil.copytree(big, tree, symlinks=True)
    process = node.start(str(tree), "--to", "shm", *SLOWLY)
    eventually(lambda: any(node.ram.glob("hpml-*/*/.data.partial-*/*/*")))
    last = tree / "6" / max(os.listdir(tree / "6"))
    if fault == "grows":
        last.write_bytes(b"x" * 10_000)
    elif fault == "goes":
        last.unlink()
    else:
        (tree / "6" / "new").touch()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (8, ""), err
    assert re.search("No such file or directory|changed while it was copied", err)
    assert os.listdir(node.ram) == []
    assert same(tree, node.stage(str(tree), "--to", "shm", "--print", "path").out.strip())


def test_a_disk_that_fills_midway(node: Node, big: Path, tmpfs: Callable[[str], Path]) -> None:
    """Another process takes the room that was there when the copy began."""
    disk = tmpfs("32m")
    process = node.start(str(big), "--to", str(disk), *SLOWLY)
    eventually(lambda: any(disk.glob("hpml-*/*/.data.partial-*/*/*")))
    command = ["dd", "if=/dev/zero", f"of={disk / 'filler'}", "bs=64k", "status=none"]
    subprocess.run(command, check=False)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (8, "")
    assert "No space left on device" in err
    assert os.listdir(disk) == ["filler"]


@pytest.mark.parametrize(
    "words",
    ["pack {} p", "stage ls {}", "stage clean {}", "stage verify {}", "stage {} --to shm"],
)
def test_behind_a_closed_directory(node: Node, tmp_path: Path, words: str) -> None:
    """'Permission denied' is not 'not found'."""
    closed = tmp_path / "closed"
    (closed / "in").mkdir(parents=True)
    closed.chmod(0)
    ended = node.shell.bash('"$@"', *node.first, *words.format(closed / "in").split())
    closed.chmod(0o700)
    assert ended.refuses(8, "closed/in: Permission denied", "ask its owner")


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_in_good_order(
    node: Node, tree: Path, big: Path, sent: signal.Signals
) -> None:
    """Status 128 + its number; nothing is half-published, and the next run works."""
    process = node.start(str(tree), str(big), "--to", "shm", *SLOWLY, start_new_session=True)
    eventually(lambda: any(node.ram.glob("hpml-*/big-*/.data.partial-*/*/*")))
    os.killpg(process.pid, sent)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + sent, (out, err)
    assert out.startswith("staged tree: 50 files")
    name = "Ctrl-C" if sent == signal.SIGINT else sent.name
    assert err.splitlines()[-1] == f"hpml: {name}: not staged: big; kept: tree"
    assert not list(node.ram.glob("hpml-*/big-*"))
    assert node.stage(str(big), "--to", "shm", "--print", "files").out == "3000\n"


def test_a_terminal_gets_a_bar(node: Node, big: Path) -> None:
    """Files, bytes, rate and the time that is left; the result is the last that stays."""
    words = [*node.first, "stage", str(big), "--to", "shm", "--opens-per-second", "1500"]
    shown = in_terminal([HPML, *words], {**node.shell.environment(), "TERM": "xterm"})
    assert "of 3000 files" in shown
    assert "staged big: 3000 files" in shown


def test_ls(node: Node, tree: Path) -> None:
    """What a person staged stays until it is cleaned, what a job kept while there is room."""
    empty = node.stage("ls")
    places = f"nothing is staged in {node.ram}, {node.disk}\n"
    assert (empty.code, empty.out, empty.err) == (0, "", places)
    assert node.stage("ls", "--json").json() == []
    mine = node.script(str(tree), "--to", "shm", "--print", "path")
    jobs = of_a_job(node.ram, tree / "0", "job-7", keep=False)
    of_a_job(node.disk, tree, "job-7", keep=True).leave()
    table = node.stage("ls", str(node.ram), str(node.disk)).out.splitlines()
    assert table[0] == "NAME\tSIZE\tFILES\tSTATE\tSTAYS\tIN USE\tLAST USED\tSOURCE\tPATH"
    found = {row[4]: row for row in (line.split("\t") for line in table[1:])}
    assert found.keys() == {"until cleaned", "with its job", "while room"}
    assert found["until cleaned"][:4] == ["tree", "24.4 KiB", "50", "ok"]
    assert found["until cleaned"][-2:] == [str(tree), mine]
    used = {stays: row[5] for stays, row in found.items()}
    assert used == {
        "until cleaned": "-",
        "with its job": f"process {os.getpid()}",
        "while room": "-",
    }
    jobs.cleanup()
    staged = {data["path"]: data for data in node.stage("ls", "--json").json()}
    assert len(staged) == 2, "what goes with a job is gone"
    assert (staged[mine]["by_hand"], staged[mine]["files"], staged[mine]["bytes"]) == (
        True,
        50,
        25_000,
    )


def test_verify(node: Node, tree: Path) -> None:
    """One bit, a missing file, one too many: status 8, by their names; it stays until cleaned."""
    path = node.stage(str(tree), "--to", "shm", "--print", "path").out.strip()
    intact = node.stage("verify", path).out
    assert intact.startswith(f"{path} is intact: 50 files, 24.4 KiB (25000 bytes) read in ")
    files = sorted(Path(path).glob("*/*.bin"))
    data = bytearray(files[0].read_bytes())
    data[100] ^= 1
    files[0].chmod(0o600)
    files[0].write_bytes(data)
    files[1].unlink()
    (Path(path) / "odd-\udcff").write_text("x")
    names = [f"0/{files[0].name}: ", f"0/{files[1].name}: ", "odd-\\xff: "]
    shown = node.stage("verify", path)
    assert shown.refuses(8, f"{path} differs from its source in 3 paths", *names)
    shown = node.stage("verify", path, "--json", "--processes", "1")
    (report,) = shown.json()
    assert (shown.code, report["count"], report["hashed"]) == (8, 3, True)
    assert len(report["problems"]) == 3
    assert [data["state"] for data in node.stage("ls", "--json").json()] == ["damaged"]
    again = node.stage(str(tree), "--to", "shm")
    assert again.refuses(8, f"{path} was changed after you staged it", f"clean {path}` removes it")
    assert ": staged by hand, changed since, last used " in node.stage("clean", "shm").out
    assert node.stage("clean", path).code == 0
    assert node.stage(str(tree), "--to", "shm", "--print", "reused").out == "no\n"
    path = node.stage(str(tree), "--to", "local", "--no-hash", "--print", "path").out.strip()
    assert "names and sizes of 50 files match; no digests to" in node.stage("verify", path).out
    assert "PATH: must be the path of staged data" in node.stage("verify", "").err


def test_clean(node: Node, tree: Path) -> None:
    """What was staged by hand, or a job kept, goes by its path, with --older or with --all."""
    mine = node.script(str(tree), "--to", "shm", "--print", "path")
    of_a_job(node.disk, tree, "job-7", keep=True).leave()
    line = rf"{re.escape(mine)} \(24\.4 KiB, since \d{{4}}-\d\d-\d\d \d\d:\d\d, copy of {tree}\)"
    assert re.search(f"would remove {line}\n", node.stage("clean", "--all", "--dry-run").out)
    shown = node.stage("clean").out
    assert re.search(f"kept {line}: staged by hand, last used ", shown)
    assert re.search(r"kept \S+ \(24\.4 KiB, .*: kept for later jobs, last used ", shown)
    assert same(tree, mine)
    cleaned = node.stage("clean", "--older", "1h", "--json").json()
    assert (cleaned["removed"], len(cleaned["kept"])) == ([], 2)
    assert re.search(f"removed {line}\n", node.stage("clean", "shm", "--all").out)
    assert os.listdir(node.ram) == []
    cleaned = node.stage("clean", "--older", "0s", str(node.disk), "--json").json()
    assert [data["source"] for data in cleaned["removed"]] == [str(tree)]
    assert cleaned["bytes"] == 25_000
    assert os.listdir(node.disk) == []


def test_clean_a_path(node: Node, tree: Path) -> None:
    """Only that, even if a job kept it, but not while something uses it."""
    mine = node.script(str(tree), "--to", "shm", "--print", "path")
    other = node.script(str(tree / "0"), "--to", "shm", "--print", "path")
    job = of_a_job(node.disk, tree, "job-7", keep=True)
    (kept,) = [data["path"] for data in node.stage("ls", str(node.disk), "--json").json()]
    busy = node.stage("clean", kept)
    assert (busy.code, f"in use by process {os.getpid()}" in busy.out) == (8, True)
    assert same(tree, kept)
    job.leave()
    assert node.stage("clean", kept, mine).code == 0
    assert (os.listdir(node.disk), os.path.exists(mine), os.path.exists(other)) == ([], False, True)
    gone = node.stage("clean", mine)
    assert gone.refuses(3, f"nothing is staged at {mine}", "hpml stage ls")
    assert node.stage("clean", other, "--all").refuses(2, "--all: cannot be given together with")
    assert node.stage("clean", other, "shm").refuses(2, "PATH: must all be staged data, or all")
    store = os.path.dirname(os.path.dirname(os.path.dirname(other)))
    assert node.stage("clean", store, "--all").code == 0
    assert os.listdir(node.ram) == []


def test_a_job_is_named_that_uses_it(node: Node, tree: Path) -> None:
    """In the table, and by `clean`, which leaves it."""
    path = node.script(str(tree), "--to", "shm", "--print", "path")
    command = ["flock", "--shared", f"{os.path.dirname(path)}/.lease", "sh", "-c", "echo; read _"]
    environment = {**node.shell.environment(), "SLURM_JOB_ID": "4711"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe) as user:
        assert user.stdout is not None
        user.stdout.readline()
        assert "\tjob 4711\t" in node.stage("ls").out
        assert node.stage("clean", "--all").out.endswith("): in use by job 4711\n")
        user.communicate(b"\n")
    assert node.stage("clean", "--all").out.startswith(f"removed {path} (")


@pytest.mark.parametrize(
    "words", ["{} --keep", "{} --name x", "clean --mine", "ls --mine"], ids=lambda words: words[-6:]
)
def test_options_that_there_are_not(node: Node, tree: Path, words: str) -> None:
    """Such as those of development versions: nothing is staged or removed."""
    option = words.split()[1]
    ended = node.stage(*words.format(tree).split())
    assert ended.refuses(2, f"No such option: {option}", "hint: hpml stage")
    assert os.listdir(node.ram) == os.listdir(node.disk) == []
