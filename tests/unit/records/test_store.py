"""Submissions are written whole or not at all, and found again by what people remember."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpml_orchestrator.errors import InputError, NotFoundError, RecordError
from hpml_orchestrator.records.files import append_line, write_json, write_text
from hpml_orchestrator.records.store import Store, default_root
from hpml_orchestrator.records.submission import Submission

NOBODY = 65534


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store(tmp_path / "records")


SUBMIT = {"backend": "local", "created": 1.5, "job": {}}


def prepare(store: Store, sid: str, runs: int = 1) -> Submission:
    return store.prepare(
        sid,
        script="#!/bin/bash\n",
        shared={"hpml-node.pyz": b"PK"},
        submit={"name": sid.rsplit("-", 3)[0], **SUBMIT},
        runs={index: {"name": "x"} for index in range(runs)},
    )


def everything(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def test_a_prepared_submission_is_complete(store: Store) -> None:
    """Script, archive, arguments and the table of runs lie there, and the run with its plan."""
    sid = "a-20240101-000000-abcdef"
    submission = prepare(store, sid)
    assert submission.script.read_text() == "#!/bin/bash\n"
    assert os.access(submission.script, os.X_OK)
    assert (submission.directory / "hpml-node.pyz").read_bytes() == b"PK"
    assert submission.record() == {"schema_version": 1, "sid": sid, "name": "a", **SUBMIT}
    assert submission.runs() == [(0, sid)]
    run = store.run(sid)
    assert run.record() == {"schema_version": 1, "rid": sid, "sid": sid, "index": 0, "name": "x"}
    assert (run.attempts(), submission.job(), submission.refused()) == ([], None, None)
    assert submission.started_at() is None


def test_submissions_share_the_archive(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file per content, which nobody changes; where links cannot be had, each has a copy."""
    first, second = (
        prepare(store, f"a-2024010{day}-000000-abcdef").directory / "hpml-node.pyz"
        for day in (1, 2)
    )
    (kept,) = (store.root / "archives").iterdir()
    assert first.samefile(kept)
    assert second.samefile(kept)
    assert kept.stat().st_mode & 0o777 == 0o444
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "no")))
    third = prepare(store, "a-20240103-000000-abcdef").directory / "hpml-node.pyz"
    assert third.read_bytes() == b"PK"
    assert not third.samefile(kept)


@pytest.mark.parametrize("damage", ["truncated", "foreign"])
def test_an_archive_that_is_not_to_be_trusted_is_replaced(store: Store, damage: str) -> None:
    """Cut short by a full disk, or somebody else's: a new one takes its place."""
    first = prepare(store, "a-20240101-000000-abcdef").directory / "hpml-node.pyz"
    (kept,) = (store.root / "archives").iterdir()
    if damage == "foreign":
        if os.getuid() != 0:
            pytest.skip("needs root, to give a file away")
        os.chown(kept, NOBODY, NOBODY)
    else:
        kept.chmod(0o644)
        os.truncate(kept, 1)
    second, third = (
        prepare(store, f"a-2024010{day}-000000-abcdef").directory / "hpml-node.pyz"
        for day in (2, 3)
    )
    assert second.read_bytes() == b"PK"
    assert second.stat().st_uid == os.getuid()
    assert second.samefile(kept)
    assert third.samefile(kept)
    assert not first.samefile(kept)


def test_a_name_that_is_taken_leaves_the_first_as_it_was(store: Store) -> None:
    """A second submission of the same id is refused and takes nothing away."""
    sid = "a-20240101-000000-abcdef"
    prepare(store, sid)
    before = everything(store.root)
    with pytest.raises(RecordError, match="cannot write records"):
        prepare(store, sid)
    assert everything(store.root) == before


FAILING = """
import os, sys
from pathlib import Path
from hpml_orchestrator.errors import RecordError
from hpml_orchestrator.records.store import Store
if sys.argv[2] != "0":
    os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
try:
    Store(Path(sys.argv[1])).prepare(
        "a-20240101-000000-abcdef", script="x" * 100_000, shared={"hpml-node.pyz": b"y" * 300_000},
        submit={"name": "a"}, runs={index: {"name": "x"} for index in range(3)})
except RecordError as error:
    print(f"{error} | {error.hint}")
    sys.exit(7)
"""


def prepare_elsewhere(root: Path, uid: int) -> str:
    done = subprocess.run(
        [sys.executable, "-c", FAILING, str(root), str(uid)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    return done.stdout


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    mount = tmp_path / "tiny"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)]
    if os.getuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("needs root and the right to mount a tmpfs")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_a_full_disk_leaves_nothing(tiny: Path) -> None:
    """When the space does not suffice for the whole submission, none of it stays."""
    said = prepare_elsewhere(tiny, 0)
    assert "No space left on device" in said
    assert everything(tiny) == ["runs", "submissions"]


def test_submissions_come_newest_first(store: Store) -> None:
    """By the time in their ids, not by their names; other things in the directory do not count."""
    ids = ["b-20240101-000000-aaaaaa", "a-20240102-000000-aaaaaa", "c-20231231-235959-aaaaaa"]
    for sid in ids:
        prepare(store, sid)
    (store.submissions_dir / ".x-20240101-000000-aaaaaa.tmp").mkdir()
    (store.submissions_dir / "notes.txt").touch()
    assert [made.sid for made in store.submissions()] == [ids[1], ids[0], ids[2]]
    assert list(Store(store.root / "none").submissions()) == []


def test_a_run_is_found_by_what_people_remember(store: Store) -> None:
    """Its id, its job id, a beginning or an end of its id, or simply the last one.

    A number is a job id, also if a run's id happens to end with it.
    """
    first = prepare(store, "ab-20240101-000000-aaaa12")
    second = prepare(store, "cd-20240102-000000-bbbbb3")
    first.record_job("3", how="sbatch", now=0.0)
    second.record_job("12", how="sbatch", now=0.0)
    names = {first: (first.sid, "ab-2", "ab-2024", "aaaa12", "3"), second: ("12", "cd-2", "last")}
    for submission, words in names.items():
        assert [store.resolve(word) for word in words] == [submission] * len(words)
    write_text(second.directory / "job.json", "{")
    with pytest.raises(NotFoundError, match="no run '12' under"):
        store.resolve("12")


@pytest.mark.parametrize(
    ("word", "found", "found_by_cancel"),
    [
        ("digits-20240101-000000-abcd34", True, True),
        ("last", True, True),
        ("32", True, True),
        ("dig", False, False),  # three characters may be a mistake in typing
        ("d", False, False),
        ("4", False, False),  # a number is a job id, not an end of an id
        ("34", False, False),
        ("2024", False, False),
        ("digits", True, True),
        ("digits-2", True, False),  # the name of another job
        ("digits-2024", True, False),
        ("digits-20240101", True, True),
        ("digits-20240101-0000", True, True),
        ("digi", True, False),  # may have been meant for a run of another name
        ("abcd34", True, False),
        ("bcd3", False, False),  # neither beginning nor end
        ("digits.0", False, False),
    ],
)
def test_a_mistyped_word_names_no_other_run(
    store: Store, word: str, found: bool, found_by_cancel: bool
) -> None:
    """Parts of ids have four characters; what cannot be undone needs the whole name."""
    submission = prepare(store, "digits-20240101-000000-abcd34")
    submission.record_job("32", how="sbatch", now=0.0)
    for exact_name, wanted in ((False, found), (True, found_by_cancel)):
        if wanted:
            assert store.resolve(word, exact_name=exact_name) == submission
        else:
            with pytest.raises((NotFoundError, InputError)):
                store.resolve(word, exact_name=exact_name)


def test_the_name_of_a_job_names_its_runs_alone(store: Store) -> None:
    """`exp-2` is another job than `exp`, although it begins the ids of both."""
    prepare(store, "exp-20240101-000000-aaaaaa")
    for exact_name in (False, True):
        with pytest.raises(NotFoundError) if exact_name else contextlib.nullcontext():
            store.resolve("exp-2", exact_name=exact_name)
    second = prepare(store, "exp-2-20240101-000000-bbbbbb")
    for exact_name in (False, True):
        assert store.resolve("exp-2", exact_name=exact_name) == second


def test_a_name_or_job_id_of_several_runs(store: Store) -> None:
    """Commands that read take a name's newest run; a job id is this cluster's."""
    runs = [prepare(store, f"exp-2024010{number}-000000-aaaaaa") for number in (1, 2)]
    for run, cluster in zip(runs, ("a", "b"), strict=True):
        run.record_job("5", how="sbatch", now=0.0)
        write_json(run.directory / "submit.json", {**run.record(), "cluster": cluster})
    assert store.resolve("exp", newest=True) == runs[1]
    for word in ("exp", "exp-2024", "5"):
        with pytest.raises(InputError, match="names 2 runs"):
            store.resolve(word, newest=word != "exp")
    store.cluster = lambda: "a"
    assert store.resolve("5") == store.resolve("5", exact_name=True) == runs[0]


@pytest.mark.parametrize("started_by", ["hpml bench", "hpml report --try"])
def test_last_is_the_users_own_run(store: Store, started_by: str) -> None:
    """What hpml started for itself, or Slurm refused, is named by its id and its name alone."""
    sid = "own-20240102-000000-bbbbbb"
    own = prepare(store, sid)
    write_json(own.directory / "submit.json", {**own.record(), "started_by": started_by})
    with pytest.raises(NotFoundError, match="no runs under .* yet but those that were refused"):
        store.resolve("last")
    users = prepare(store, "ab-20240101-000000-aaaaaa")
    prepare(store, "no-20240103-000000-cccccc").record_refusal("no slurm.conf", now=0.0)
    assert store.resolve("last") == users
    assert store.resolve("own") == store.resolve(sid) == own


def test_what_names_no_run_or_several(store: Store) -> None:
    """Nothing fits: not found. More than one fits: which they are. An empty word: refused."""
    with pytest.raises(NotFoundError, match="no runs under .* yet"):
        store.resolve("last")
    for number in range(7):
        submission = prepare(store, f"ab-2024010{number + 1}-000000-aaaaaa")
        submission.record_job("5", how="sbatch", now=0.0)
    with pytest.raises(InputError, match="names 7 runs: ab-20240107.* and 2 more"):
        store.resolve("ab-2")
    with pytest.raises(InputError, match=r"ab-20240106-000000-aaaaaa \(2024-01-0[567] \d\d:"):
        store.resolve("ab-2")
    with pytest.raises(InputError, match="names 7 runs"):
        store.resolve("5")
    with pytest.raises(NotFoundError, match="no run 'zz' under"):
        store.resolve("zz")
    with pytest.raises(NotFoundError, match="no run '99' under"):
        store.resolve("99")
    with pytest.raises(InputError, match="RUN: must name a run"):
        store.resolve("")
    with pytest.raises(NotFoundError, match="no run 'x' under"):
        store.run("x")


def test_attempts_and_bindings_are_read_as_they_come(store: Store) -> None:
    """Attempts count as numbers; a rank that started twice counts as it started last."""
    run = store.run(prepare(store, "a-20240101-000000-abcdef").sid)
    for number in (0, 2, 10):
        (run.directory / "attempts" / str(number) / "binding").mkdir(parents=True)
    (run.directory / "attempts" / "junk").mkdir()
    attempts = run.attempts()
    assert [attempt.number for attempt in attempts] == [0, 2, 10]
    assert (attempts[0].job_id, attempts[0].ended, list(attempts[0].events())) == ("", None, [])
    for rank, node, pid in ((1, "n1", 1), (0, "n1", 2), (1, "n1", 3)):
        line = f'{{"rank": {rank}, "node": "{node}", "pid": {pid}}}'
        append_line(attempts[0].directory / "binding" / f"{node}.jsonl", line)
    append_line(attempts[0].directory / "binding" / "n2.jsonl", '{"rank": "x"}')
    assert [(line["rank"], line["pid"]) for line in attempts[0].bindings()] == [(0, 2), (1, 3)]
    write_json(attempts[0].directory / "ended.json", {"exit_code": 0, "time": 9})
    assert (attempts[0].ended or {})["exit_code"] == 0
    write_text(attempts[0].directory / "ended.json", "{")
    assert attempts[0].ended is None


@pytest.mark.parametrize(
    ("environment", "root"),
    [
        ({"HPML_HOME": "/r", "XDG_STATE_HOME": "/s", "HOME": "/h"}, "/r"),
        ({"HPML_HOME": "", "XDG_STATE_HOME": "/s", "HOME": "/h"}, "/s/hpml"),
        ({"HOME": "/h"}, "/h/.local/state/hpml"),
        ({"HPML_HOME": "/r/../q/"}, "/q"),
    ],
)
def test_where_records_live(environment: dict[str, str], root: str) -> None:
    """$HPML_HOME, else $XDG_STATE_HOME, else below the home."""
    assert default_root(environment) == Path(root)


def array(store: Store, sid: str, indices: tuple[int, ...] = (3, 5)) -> Submission:
    runs = {index: {"name": "x"} for index in indices}
    return store.prepare(sid, script="", shared={}, submit={}, runs=runs, array=True)


def test_an_array_of_one_task_numbers_it_too(store: Store) -> None:
    """The run of the only task has its index in its name, and so the submission is an array."""
    sid = "a-20240101-000000-abcdef"
    made = array(store, sid, (7,))
    assert (made.runs(), made.is_array()) == ([(7, f"{sid}.7")], True)
    assert not prepare(store, "a-20240101-000001-abcdef").is_array()


def test_one_task_is_named_by_its_index(store: Store) -> None:
    """Whatever names the array, with the index behind it; Slurm's own form too."""
    sid = "a.b-20240101-000000-abcdef"
    made = array(store, sid)
    made.record_job("41", how="sbatch", now=0.0)
    for word in (f"{sid}.5", "last.5", "a.b.5", "abcdef.5", "41.5", "41_5"):
        found = store.resolve(word)
        assert (found.directory, found.index) == (made.directory, 5), word
        assert (found.label, found.runs()) == (f"{sid}.5", [(5, f"{sid}.5")])
    assert store.resolve(sid).index is None
    assert store.resolve("a.b").index is None


def test_a_task_that_is_not_there(store: Store) -> None:
    """An index that the array lacks and a task of a single job have different errors."""
    sid = "a-20240101-000000-abcdef"
    array(store, sid)
    with pytest.raises(NotFoundError, match="has no task 4") as missing:
        store.resolve("last.4")
    assert missing.value.hint == "its tasks: 3 and 5"
    prepare(store, "b-20240101-000001-ghijkm")
    with pytest.raises(InputError, match="not a job array"):
        store.resolve("last.0")
    with pytest.raises(NotFoundError, match=r"no run 'zzz.3'"):
        store.resolve("zzz.3")
