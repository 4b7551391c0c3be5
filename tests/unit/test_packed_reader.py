"""hpml_packed.py reads a pack as it reads the tree: the same names, numbers and bytes, anywhere."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128

from hpml_orchestrator.packing import PackRequest, pack
from hpml_orchestrator.packing.layout import place
from tests.unit.packing.conftest import grow
from training_jobs import hpml_packed
from training_jobs.hpml_packed import Data, PackedData, PackError, TreeData, open_data

READER = Path(hpml_packed.__file__)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tree and its pack."""
    home = tmp_path_factory.mktemp("read")
    tree = grow(home / "tree", 300)
    for number in range(20):
        (tree / f"s{number:02d}.jpg").write_bytes(b"jpg%d" % number)
        (tree / f"s{number:02d}.cls").write_text(str(number % 3))
    (tree / "none").touch()
    os.link(tree / "s00.jpg", tree / "linked.jpg")
    (tree / "1" / "symbolic").symlink_to("../s01.jpg")
    (tree / "chain").symlink_to("1/symbolic")
    (tree / "dangling").symlink_to("gone")
    (tree / "to-directory").symlink_to("1")
    (tree / "empty").mkdir()
    with open(os.fsencode(tree) + b"/\xff\xfe", "wb") as stream:
        stream.write(b"odd")
    pack(PackRequest(str(tree), str(home / "pack"), 1 << 18))
    return tree, home / "pack"


def test_a_pack_reads_as_its_tree(both: tuple[Path, Path]) -> None:
    """Every name, number, size and byte is the same, links to files included."""
    tree, packed = (open_data(path) for path in both)
    assert isinstance(tree, TreeData)
    assert isinstance(packed, PackedData)
    names = list(tree.names())
    assert names == list(packed.names())
    assert len(names) == len(packed) == 300 + 40 + 5
    for number, name in enumerate(names):
        data = (both[0] / name).read_bytes()
        assert tree.read(number) == packed.read(name) == data
        assert tree.size(name) == packed.size(number) == len(data)
        assert tree.number(name) == packed.number(name) == number
        assert packed.digest(number) == xxh3_128(data).hexdigest()
    assert tree.samples() == packed.samples()
    assert packed.read(-1) == packed.read(len(packed) - 1)


def test_what_is_not_there_is_told(both: tuple[Path, Path], tmp_path: Path) -> None:
    """Names, numbers, directories: KeyError, IndexError, PackError, in packs and trees."""
    for path in both:
        data = open_data(path)
        assert "s00.jpg" in data
        for name in ("s00", "empty", "dangling", "zzz", "", "to-directory/00001.bin"):
            assert name not in data
            with pytest.raises(KeyError):
                data.read(name)
        for number in (len(data), -len(data) - 1):
            with pytest.raises(IndexError):
                data.read(number)
            with pytest.raises(IndexError):
                data.name(number)
    with pytest.raises(PackError, match="no such directory"):
        open_data(tmp_path / "nowhere")


def test_damage_is_told(both: tuple[Path, Path], tmp_path: Path) -> None:
    """A flipped bit of the index when it is opened; a missing or short archive when it is read."""
    copy = tmp_path / "copy"
    shutil.copytree(both[1], copy)
    os.truncate(copy / "data-00000.tar", 600)
    last = max(copy.glob("data-*.tar")).name
    (copy / last).unlink()
    data = open_data(copy)
    with pytest.raises(PackError, match=r"data-00000\.tar: cut short"):
        [data.read(number) for number in range(len(data))]
    with pytest.raises(PackError, match=f"{last}: No such file"):
        [data.read(number) for number in reversed(range(len(data)))]
    index = bytearray((copy / "pack.index").read_bytes())
    os.truncate(copy / "pack.index", 20)  # while it is open: a map would end the process
    with pytest.raises(PackError, match=r"pack\.index: damaged, too short"):
        data.read(0)
    index[-1] ^= 1
    (copy / "pack.index").write_bytes(index)
    with pytest.raises(PackError, match="damaged"):
        open_data(copy)
    (copy / "pack.index").write_bytes(index[:20])
    with pytest.raises(PackError, match="too short"):
        open_data(copy)


@given(st.lists(st.text(st.sampled_from("a./-b"), min_size=1, max_size=8)))
def test_the_reader_sorts_as_the_packer_does(names: list[str]) -> None:
    """The copyable file has the order written down once more; both are the same."""
    for name in names:
        assert hpml_packed.place(name) == place(os.fsencode(name))


def _sum(data: Data, numbers: list[int]) -> str:
    digest = xxh3_128()
    for number in numbers:
        digest.update(data.read(number))
    return digest.hexdigest()


def test_forks_and_threads_share_one_reader(both: tuple[Path, Path]) -> None:
    """Four processes and four threads read at the same time through the same descriptors."""
    data = open_data(both[1])
    numbers = list(range(len(data)))
    expected = _sum(data, numbers)
    context = multiprocessing.get_context("fork")
    sums = context.SimpleQueue()
    processes = [context.Process(target=lambda: sums.put(_sum(data, numbers))) for _ in range(4)]
    for process in processes:
        process.start()
    assert [sums.get() for _ in processes] == [expected] * 4
    for process in processes:
        process.join()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: _sum(data, numbers), range(8))) == {expected}
    again = pickle.loads(pickle.dumps(data))  # noqa: S301 - our own
    assert _sum(again, numbers) == expected
    assert len(pickle.dumps(data)) < 500


def test_reading_needs_nothing(both: tuple[Path, Path], tmp_path: Path) -> None:
    """The one file, copied, with an interpreter that sees no package at all."""
    shutil.copy(READER, tmp_path)
    code = (
        "import sys; from hpml_packed import open_data; data = open_data(sys.argv[1]); "
        "print(data.read('s07.jpg').decode(), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, both[1]],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "jpg7 False\n"


def length(name: str, data: bytes) -> tuple[str, int, int]:
    """What the loader's workers make of a file; a function of a module can be pickled."""
    return name, len(data), sum(data)


def by_ending(sample: dict[str, Any]) -> tuple[str, int]:
    return sample["__key__"], int(sample.get("cls", b"-1"))


@pytest.mark.parametrize(("workers", "start"), [(0, None), (2, "fork"), (2, "spawn")])
def test_a_real_loader_reads_it(both: tuple[Path, Path], workers: int, start: str | None) -> None:
    """PyTorch's DataLoader with its own workers gives every file once, in the order asked for."""
    torch_data = pytest.importorskip("torch.utils.data")
    found = []
    for path in both:
        dataset = hpml_packed.PackedDataset(path, length, endings=(".bin", ".jpg"))
        options = {"num_workers": workers, "multiprocessing_context": start}
        loader = torch_data.DataLoader(dataset, batch_size=16, collate_fn=list, **options)
        found.append([item for batch in loader for item in batch])
        assert isinstance(dataset, torch_data.Dataset)
    assert found[0] == found[1]
    assert len(found[0]) == 300 + 20 + 1
    for name, size, total in found[0]:
        data = (both[0] / name).read_bytes()
        assert (size, total) == (len(data), sum(data))


def test_samples_are_items(both: tuple[Path, Path]) -> None:
    """`by_sample`: all files of one base name at once, as webdataset has them."""
    pytest.importorskip("torch")
    dataset = hpml_packed.PackedDataset(both[1], by_sample=True)
    items = {dataset[number]["__key__"]: dataset[number] for number in range(len(dataset))}
    assert len(items) == len(dataset)
    assert items["s07"] == {"__key__": "s07", "jpg": b"jpg7", "cls": b"1"}
    assert items["2/00002"].keys() == {"__key__", "bin"}
    assert dataset[-1] == dataset[len(dataset) - 1]
    labelled = hpml_packed.PackedDataset(both[0], by_ending, by_sample=True)
    assert [labelled[number] for number in range(len(labelled))].count(("s05", 2)) == 1
