"""CIFAR as published, in both layouts; broken and hostile files."""

import builtins
import io
import os
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from psm.config.schema import ImagesConfig
from psm.data import load_dataset, safe_pickle
from psm.utils.errors import UserError

IMAGES = np.random.default_rng(0).integers(0, 256, (60, 3072), dtype=np.uint8)
LABELS = [number % 10 for number in range(60)]
FINE = [(number * 7) % 100 for number in range(60)]
NAMES = [f"kind {number}" for number in range(10)]
HUNDRED = [f"fine {number}" for number in range(100)]


def python2_pickle(value: Any) -> Any:
    """Protocol 2 as Python 2 wrote it: text as byte strings, arrays through numpy.core.multiarray."""

    def text(data: Any) -> Any:
        return b"T" + len(data).to_bytes(4, "little") + data

    if isinstance(value, dict):
        return b"}(" + b"".join(python2_pickle(k) + python2_pickle(v) for k, v in value.items()) + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(map(python2_pickle, value)) + b"e"
    if isinstance(value, str):
        return text(value.encode())
    if isinstance(value, int):
        return b"J" + value.to_bytes(4, "little", signed=True)
    shape = b"".join(python2_pickle(side) for side in value.shape)
    start = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\0t" + text(b"b") + b"tR"
    kind = (
        b"cnumpy\ndtype\n(" + text(b"u1") + b"K\0K\1tR(K\3" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    )
    return start + b"(K\1(" + shape + b"t" + kind + b"\x89" + text(value.tobytes()) + b"tb"


def dump_python2(value: Any) -> Any:
    return b"\x80\x02" + python2_pickle(value) + b"."


def write_ten(root: Any, dump: Any = dump_python2) -> Any:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for number in range(5):
        rows = slice(10 * number, 10 * number + 10)
        batch = {"data": IMAGES[rows], "labels": LABELS[rows], "batch_label": "x", "filenames": ["a.png"] * 10}
        (folder / f"data_batch_{number + 1}").write_bytes(dump(batch))
    (folder / "test_batch").write_bytes(dump({"data": IMAGES[50:], "labels": LABELS[50:]}))
    (folder / "batches.meta").write_bytes(dump({"label_names": NAMES, "num_vis": 3072}))
    return folder


def write_hundred(root: Any, dump: Any = dump_python2) -> Any:
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    for name, rows in (("train", slice(0, 50)), ("test", slice(50, 60))):
        coarse = [label // 5 for label in FINE[rows]]
        (folder / name).write_bytes(dump({"data": IMAGES[rows], "fine_labels": FINE[rows], "coarse_labels": coarse}))
    (folder / "meta").write_bytes(dump({"fine_label_names": HUNDRED, "coarse_label_names": NAMES}))
    return folder


def write_binary(root: Any) -> Any:
    ten, hundred = root / "cifar-10-batches-bin", root / "cifar-100-binary"
    ten.mkdir()
    hundred.mkdir()
    rows = np.concatenate([np.array(LABELS, dtype=np.uint8)[:, None], IMAGES], axis=1)
    for number in range(5):
        rows[10 * number : 10 * number + 10].tofile(ten / f"data_batch_{number + 1}.bin")
    rows[50:].tofile(ten / "test_batch.bin")
    (ten / "batches.meta.txt").write_text("\n".join(NAMES) + "\n\n")
    fine = np.array(FINE, dtype=np.uint8)[:, None]
    rows = np.concatenate([fine // 5, fine, IMAGES], axis=1)
    rows[:50].tofile(hundred / "train.bin")
    rows[50:].tofile(hundred / "test.bin")
    (hundred / "fine_label_names.txt").write_text("\n".join(HUNDRED))
    return ten, hundred


def read(name: Any, root: Any, **settings: Any) -> Any:
    return load_dataset(name, ImagesConfig(root=str(root), download=False, **settings), progress=False)


def check(data: Any, labels: Any, names: Any) -> None:
    assert data.classes == tuple(names)
    train, test = (part.take(torch.arange(len(part))).numpy() for part in (data.train, data.test))
    assert np.array_equal(train, IMAGES[:50].reshape(-1, 3, 32, 32))
    assert np.array_equal(test, IMAGES[50:].reshape(-1, 3, 32, 32))
    assert data.train.labels.tolist() == labels[:50]
    assert data.test.labels.tolist() == labels[50:]
    assert data.train.labels.dtype == torch.int64


DUMPS = [dump_python2, *(lambda value, protocol=protocol: pickle.dumps(value, protocol) for protocol in range(6))]


@pytest.mark.parametrize("dump", DUMPS)
def test_python_layouts_in_every_protocol(tmp_path: Path, dump: Any) -> None:
    ten, hundred = write_ten(tmp_path, dump), write_hundred(tmp_path, dump)
    check(read("cifar10", tmp_path), LABELS, NAMES)
    check(read("cifar10", ten), LABELS, NAMES)
    check(read("cifar100", tmp_path), FINE, HUNDRED)
    check(load_dataset(str(ten), progress=False), LABELS, NAMES)
    check(load_dataset(str(hundred), progress=False), FINE, HUNDRED)


def test_keys_as_bytes_labels_as_an_array_and_columns_first(tmp_path: Path) -> None:
    folder = write_ten(tmp_path)
    batch = {b"data": np.asfortranarray(IMAGES[:10]), b"labels": np.array(LABELS[:10])}
    (folder / "data_batch_1").write_bytes(pickle.dumps(batch))
    check(read("cifar10", tmp_path), LABELS, NAMES)


def test_binary_layouts(tmp_path: Path) -> None:
    ten, hundred = write_binary(tmp_path)
    for place in (tmp_path, ten):
        check(read("cifar10", place), LABELS, NAMES)
    for place in (tmp_path, hundred):
        check(read("cifar100", place), FINE, HUNDRED)
    check(load_dataset(str(hundred), progress=False), FINE, HUNDRED)


def test_a_path_that_holds_one_published_folder(tmp_path: Path) -> None:
    write_ten(tmp_path)
    check(load_dataset(str(tmp_path), progress=False), LABELS, NAMES)
    (tmp_path / "holiday").mkdir()  # now the path could mean either
    with pytest.raises(UserError, match="holds no image"):
        load_dataset(str(tmp_path), progress=False)


def test_limit_and_size(tmp_path: Path) -> None:
    write_ten(tmp_path)
    data = read("cifar10", tmp_path, limit=20, size=16)
    assert torch.bincount(data.train.labels).tolist() == [2] * 10
    assert (data.train.shape, len(data.test)) == ((3, 16, 16), 10)
    exact = read("cifar10", tmp_path, limit=20).train.take(torch.arange(20)).double()
    coarse = data.train.take(torch.arange(20)).double()
    assert torch.corrcoef(torch.stack([exact.mean((2, 3)).flatten(), coarse.mean((2, 3)).flatten()]))[0, 1] > 0.95


def test_truncated_files(tmp_path: Path) -> None:
    folder = write_ten(tmp_path)
    whole = (folder / "data_batch_2").read_bytes()
    for length in (0, 1, 50, 1000, len(whole) - 1):
        (folder / "data_batch_2").write_bytes(whole[:length])
        with pytest.raises(UserError, match="data_batch_2"):
            read("cifar10", tmp_path)
    (folder / "data_batch_2").unlink()
    with pytest.raises(UserError, match="lacks data_batch_2"):
        read("cifar10", tmp_path)
    (tmp_path / "binary").mkdir()
    ten, _ = write_binary(tmp_path / "binary")
    (ten / "test_batch.bin").write_bytes((ten / "test_batch.bin").read_bytes()[:-5])
    with pytest.raises(UserError, match="cut short"):
        read("cifar10", ten)


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ({"data": IMAGES[:10, :100], "labels": LABELS[:10]}, "3072 values"),
        ({"data": IMAGES[:10].astype(np.int64), "labels": LABELS[:10]}, "uint8"),
        ({"data": IMAGES[:10], "labels": LABELS[:9]}, "10 images and 9 labels"),
        ({"data": IMAGES[:10], "labels": [10] * 10}, "outside 0 to 9"),
        ({"data": IMAGES[:10], "labels": [-1] * 10}, "outside 0 to 9"),
        ({"data": IMAGES[:10], "labels": ["1"] * 10}, "no list of labels"),
        ({"data": IMAGES[:10]}, "no list of labels"),
        ({"labels": LABELS[:10]}, "no uint8 images"),
        ([1, 2], "no dictionary"),
    ],
)
def test_contents_are_checked(tmp_path: Path, batch: Any, reason: Any) -> None:
    folder = write_ten(tmp_path)
    (folder / "data_batch_3").write_bytes(pickle.dumps(batch))
    with pytest.raises(UserError, match=reason):
        read("cifar10", tmp_path)


class Call:
    """Pickles to a call of any function with any arguments."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


HOSTILE = [
    Call(os.system, "touch ran"),
    Call(os.mkdir, "ran"),
    Call(builtins.eval, "open('ran', 'w')"),
    Call(builtins.exec, "open('ran', 'w')"),
    Call(getattr, "text", "upper"),
    Call(io.open, "ran", "w"),
    Call(np.load, "x"),
    Call(np.memmap, "ran", "u1", "w+", 0, (4,)),
    Call(np.testing.measure, "open('ran', 'w')"),
    Call(pickle.loads, b"cos\nmkdir\n(Vran\ntR."),
    Call(__import__, "os"),
    np.array([Call(os.mkdir, "ran")], dtype=object),
    np.array([(1, 2)], dtype=[("a", "u1"), ("b", "i4")]),
    {"data": [{"deep": (Call(os.mkdir, "ran"),)}]},
]


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_hostile_pickles_are_refused_and_do_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: Any, protocol: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_ten(tmp_path)
    (folder / "data_batch_1").write_bytes(pickle.dumps({"data": HOSTILE[number], "labels": LABELS[:10]}, protocol))
    with pytest.raises(UserError, match="data_batch_1 was refused"):
        read("cifar10", tmp_path)
    assert not (tmp_path / "ran").exists()


RAW = {
    "bytes that claim exabytes": b"\x80\x04\x8e" + (1 << 60).to_bytes(8, "little") + b"x.",
    "text that grows": b"\x80\x02X\0\x10\0\0"
    + b"a" * 4096
    + b"q\0"
    + b"0c_codecs\nencode\n(h\0X\x06\0\0\0latin1tR" * 40
    + b".",
    "a persistent reference": b"Psomewhere\n.",
    "an extension code": b"\x80\x02\x82\x01.",
    "an array whose length is a lie": python2_pickle(IMAGES[:1]).replace(b"J\x00\x0c\0\0", b"J\x00\x0d\0\0"),
    "a type that numpy would take for pointers": python2_pickle(IMAGES[:1]).replace(b"\x02\0\0\0u1", b"\x02\0\0\0O8"),
    "state for the reader itself": b"cnumpy\ndtype\n}Vx\nK\1sb.",
    "slot state for the reader itself": b"cnumpy\ndtype\n(N}V_call\nK\1stb.",
    "a module that does not exist": b"cno_such_module\nthing\n.",
    "a dotted way round": b"\x80\x04\x8c\x05numpy\x8c\x0endarray.dtype\x93.",
    "noise": bytes(range(256)),
}


@pytest.mark.parametrize("what", RAW)
def test_malformed_pickles_are_refused(tmp_path: Path, what: Any) -> None:
    content = RAW[what]
    (tmp_path / "file").write_bytes(
        content if content.endswith(b".") or what == "noise" else b"\x80\x02" + content + b"."
    )
    with pytest.raises(UserError, match="was refused"):
        safe_pickle.read(tmp_path / "file")


def test_claimed_sizes_take_no_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\x80\x02Nr\xff\xff\xff\xff.")  # a memo index of 2**32 - 1
    tracemalloc.start()
    assert safe_pickle.read(tmp_path / "file") is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.truncate(2_000_000_000)  # sparse: takes no room
    with pytest.raises(UserError, match="larger than"):
        safe_pickle.read(tmp_path / "file")


def test_the_reader_is_the_same_after_an_attack(tmp_path: Path) -> None:
    for content in RAW.values():
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(UserError):
            safe_pickle.read(tmp_path / "file")
    write_ten(tmp_path)
    check(read("cifar10", tmp_path), LABELS, NAMES)


def test_scalars_of_numpy_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(pickle.dumps([np.int64(-5), np.uint8(200), np.float32(0.5)]))
    assert safe_pickle.read(tmp_path / "file") == [-5, 200, 0.5]
