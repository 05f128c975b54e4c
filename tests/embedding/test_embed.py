"""`psm embed`: what the file holds in every format, what is left out, and work that is interrupted and continued."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pandas
import polars
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import psm
from helpers import save_images, save_untrained_encoder
from psm.cli.main import main
from psm.embedding import embed as embedding
from psm.embedding.formats import FORMATS, read_table
from psm.models.pretrained import checksum
from psm.utils.errors import UserError

CLASSES = ("ant", "bee")
NAMES = sorted(f"{kind}/{i}.png" for kind in CLASSES for i in range(9))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save_untrained_encoder(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save_images(tmp_path_factory.mktemp("images"), NAMES)


def embed(run: Any, data: Any, out: Any, **keys: Any) -> Any:
    return psm.embed(run, data, out, **{"progress": False, "batch_size": 5, **keys})


@torch.inference_mode()
def by_hand(run: Any, folder: Any, names: Any) -> Any:
    """Features of image files, one at a time in plain PyTorch."""
    encoder = psm.load_encoder(run)
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (encoder.info.mean, encoder.info.std))
    features = []
    for name in names:
        image = Image.open(folder / name).convert("RGB").resize((16, 16), Image.Resampling.LANCZOS)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
        features.append(encoder(((pixels - mean) / std)[None])[0])
    return torch.stack(features).numpy()


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_format_holds_path_label_and_embedding(
    run: Any, folder: Any, tmp_path: Path, suffix: str, dtype: str
) -> None:
    out = tmp_path / f"features{suffix}"
    result = embed(run, folder, out, dtype=dtype)
    assert (result.file, result.rows, result.unreadable) == (out, 18, [])
    table = read_table(out)
    assert list(table.paths) == NAMES
    assert [table.label(row) for row in range(18)] == [name[:3] for name in NAMES]
    assert table.embeddings.dtype == dtype
    tolerance = 1e-4 if dtype == "float32" else 5e-3
    np.testing.assert_allclose(table.embeddings, by_hand(run, folder, NAMES), atol=tolerance, rtol=tolerance)
    assert table.about["encoder"]["checksum"] == f"{read_checksum(run):08x}"
    assert not list(tmp_path.glob("*.part"))
    assert not list(tmp_path.glob(".writing-*"))


def read_checksum(run: Any) -> Any:
    """The checksum of the weights in a run's encoder."""
    return checksum(load_file(run / "encoder.safetensors"))


def test_pandas_polars_and_faiss_read_it_in_one_line(run: Any, folder: Any, tmp_path: Path) -> None:
    expected = by_hand(run, folder, NAMES)
    embed(run, folder, tmp_path / "features.parquet")
    embed(run, folder, tmp_path / "features.npy", normalize=True)
    embed(run, folder, tmp_path / "features.csv")
    frame = pandas.read_parquet(tmp_path / "features.parquet")
    assert list(frame.columns) == ["path", "label", "embedding"]
    np.testing.assert_allclose(np.stack(frame.embedding), expected, atol=1e-4)
    frame = polars.read_parquet(tmp_path / "features.parquet")
    assert frame["label"].to_list() == [name[:3] for name in NAMES]
    np.testing.assert_allclose(frame["embedding"].to_numpy(), expected, atol=1e-4)
    assert pandas.read_csv(tmp_path / "features.csv").shape == (18, 2 + expected.shape[1])
    index = faiss.IndexFlatIP(expected.shape[1])
    index.add(np.load(tmp_path / "features.npy"))
    similarity, nearest = index.search(np.load(tmp_path / "features.npy"), 1)
    assert nearest[:, 0].tolist() == list(range(18))
    np.testing.assert_allclose(similarity, 1, atol=1e-5)
    assert pandas.read_csv(tmp_path / "features.npy.names.csv").path.tolist() == NAMES


def test_pytorch_files_hold_tensors(run: Any, folder: Any, tmp_path: Path) -> None:
    embed(run, folder, tmp_path / "f.pt")
    embed(run, folder, tmp_path / "f.safetensors")
    embed(run, folder, tmp_path / "f.npz")
    saved = torch.load(tmp_path / "f.pt", weights_only=True)
    assert (saved["paths"], saved["classes"]) == (NAMES, ["ant", "bee"])
    tensors = load_file(tmp_path / "f.safetensors")
    assert torch.equal(tensors["embeddings"], saved["embeddings"])
    assert torch.equal(tensors["labels"], saved["labels"])
    assert bytes(tensors["paths"].tolist()).decode().split("\0")[:-1] == NAMES
    arrays = np.load(tmp_path / "f.npz")
    assert np.array_equal(arrays["embeddings"], saved["embeddings"].numpy())
    assert arrays["labels"].tolist() == [name[:3] for name in NAMES]


@pytest.mark.parametrize("suffix", FORMATS)
def test_odd_names_and_no_labels(run: Any, tmp_path: Path, suffix: str) -> None:
    names = sorted(['a "quoted", name.png', "line\nbreak.png", "ü/ナ.png"])
    save_images(tmp_path / "images", names)
    embed(run, tmp_path / "images", tmp_path / f"f{suffix}")
    table = read_table(tmp_path / f"f{suffix}")
    assert (list(table.paths), table.labels) == (names, None)


def test_blocks_of_few_rows_make_the_same_file(
    run: Any, folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for suffix in FORMATS:
        embed(run, folder, tmp_path / f"whole{suffix}")
    monkeypatch.setattr("psm.embedding.table.BLOCK_BYTES", 256 * 4 * 7)
    for suffix in FORMATS:
        embed(run, folder, tmp_path / f"blocks{suffix}")
        whole, blocks = (read_table(tmp_path / f"{name}{suffix}") for name in ("whole", "blocks"))
        assert np.array_equal(whole.embeddings, blocks.embeddings)
        assert list(whole.paths) == list(blocks.paths)
        assert np.array_equal(whole.labels, blocks.labels)


def test_unreadable_images_are_listed_and_left_out(run: Any, tmp_path: Path, capsys: Any) -> None:
    folder = save_images(tmp_path / "images", [f"{i}.png" for i in range(7)])
    for name in ("0a", "3a", "9"):
        (folder / f"{name}.jpg").write_bytes(b"no image")
    out = tmp_path / "features.parquet"
    command = ["embed", str(run), f"data={folder}", f"out={out}", "progress=false"]
    assert main([*command, "images.limit=2"]) == 0
    said = capsys.readouterr().out
    assert "left out:   1 image, listed" in said
    assert "(1 row of 256 numbers" in said
    assert main([*command, "overwrite=true", "batch_size=4"]) == 0
    said = capsys.readouterr().out
    assert "unreadable: 3a.jpg: not an image" in said
    assert "left out:   3 images" in said
    table = read_table(out)
    assert list(table.paths) == [f"{i}.png" for i in range(7)]
    np.testing.assert_allclose(table.embeddings, by_hand(run, folder, table.paths), atol=1e-4)
    listed = (tmp_path / "features.parquet.unreadable.txt").read_text().splitlines()
    assert [line.split("\t")[0] for line in listed] == ["0a.jpg", "3a.jpg", "9.jpg"]


def test_a_batch_of_unreadable_images_and_no_readable_image(run: Any, tmp_path: Path) -> None:
    folder = save_images(tmp_path / "images", ["z.png"])
    for i in range(6):
        (folder / f"{i}.png").write_bytes(b"no image")
    assert embed(run, folder, tmp_path / "f.npy", batch_size=3).rows == 1
    with pytest.raises(UserError, match=r"6 of 7 images .* .*max_unreadable=0.5 .* kept"):
        embed(run, folder, tmp_path / "g.npy", images={"max_unreadable": 0.5})
    assert embed(run, folder, tmp_path / "g.npy").rows == 1
    (folder / "z.png").unlink()
    with pytest.raises(UserError, match="None of the 6 images"):
        embed(run, folder, tmp_path / "h.npy")
    assert not list(tmp_path.glob("h.npy*"))


class Stopped(BaseException):
    """What a test interrupts with."""


def interrupted(run: Any, data: Any, out: Any, after: int, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> None:
    """Embed, and be interrupted when so many batches are written."""
    append, count = embedding.PartialRows.append, 0

    def counted(self: Any, *arguments: Any) -> None:
        nonlocal count
        append(self, *arguments)
        count += 1
        if count == after:
            raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(embedding.PartialRows, "append", counted)
        with pytest.raises(Stopped):
            embed(run, data, out, **keys)


def test_interrupted_work_is_continued_to_the_same_bits(
    run: Any, folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed(run, folder, tmp_path / "whole.npy")
    out = tmp_path / "features.npy"
    interrupted(run, folder, out, 2, monkeypatch)
    assert not out.exists()
    assert not list(tmp_path.glob("features.npy.names*"))
    seen = []
    compute = embedding.LoadedEncoder.embed

    def counted(self: Any, pixels: Any, batch_size: int) -> Any:
        seen.append(len(pixels))
        return compute(self, pixels, batch_size)

    monkeypatch.setattr(embedding.LoadedEncoder, "embed", counted)
    embed(run, folder, out)
    assert seen == [5, 3]  # the first ten of the 18 images were done
    assert out.read_bytes() == (tmp_path / "whole.npy").read_bytes()
    assert not (tmp_path / "features.npy.part").exists()


def test_a_damaged_or_cut_off_partial_file_is_computed_again_from_there(
    run: Any, folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed(run, folder, tmp_path / "whole.npy")
    for name, damage in (("flip", 5_000), ("cut", None)):
        out = tmp_path / f"{name}.npy"
        interrupted(run, folder, out, 3, monkeypatch)
        rows = tmp_path / f"{name}.npy.part" / "rows.bin"
        content = bytearray(rows.read_bytes())
        if damage is None:
            del content[-10:]
            with (rows.parent / "batches.jsonl").open("a") as file:
                file.write('{"images": 3, "ro')
        else:
            content[damage] ^= 1
        rows.write_bytes(content)
        embed(run, folder, out)
        assert out.read_bytes() == (tmp_path / "whole.npy").read_bytes()


def test_work_begun_with_other_weights_images_or_settings_is_not_continued(
    run: Any, folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "features.npy"
    interrupted(run, folder, out, 2, monkeypatch)
    other = save_untrained_encoder(tmp_path / "other", seed=1)
    fewer = save_images(tmp_path / "fewer", NAMES[:12])
    for arguments, keys, named in (
        ((other, folder), {}, "another encoder"),
        ((run, fewer), {}, "another data"),
        ((run, folder), {"normalize": True}, "another normalize"),
        ((run, folder), {"dtype": "float16"}, "another dtype"),
    ):
        with pytest.raises(UserError, match=f"unfinished work .* {named}"):
            embed(*arguments, out, **keys)
    assert embed(other, folder, out, overwrite=True).rows == 18
    np.testing.assert_allclose(read_table(out).embeddings, by_hand(other, folder, NAMES), atol=1e-4)


def test_no_batch_waits_for_the_disk(run: Any, folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, synced = os.fsync, []
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(file), fsync(file)))
    counts = []
    for batch_size in (1, 18):
        embed(run, folder, tmp_path / "features.npy", batch_size=batch_size, overwrite=True)
        counts.append(len(synced))
        synced.clear()
    assert counts[0] == counts[1] > 0


def test_data_without_files_and_datasets(run: Any, tmp_path: Path) -> None:
    assert embed(run, "shapes", tmp_path / "f.npy", images={"limit": 30}).rows == 30
    with (tmp_path / "f.npy.names.csv").open() as file:
        names = [row["path"] for row in csv.DictReader(file)]
    assert names[0].startswith("train/")
    images = torch.randint(0, 256, (9, 3, 20, 20), dtype=torch.uint8)
    data = psm.data.ImageDataset("mine", psm.data.ImageStore(images), None, ())
    embed(run, data, tmp_path / "g.npy")
    dataset = torch.utils.data.TensorDataset(images, torch.arange(9) % 3)
    assert embed(run, dataset, tmp_path / "h.npy").rows == 9
    assert read_table(tmp_path / "h.npy").labels is not None
    assert read_table(tmp_path / "g.npy").about["data"] is None


def test_an_existing_file_is_kept_unless_told_and_missing_names_are_said(
    run: Any, folder: Any, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "features.npy"
    out.write_bytes(b"precious")
    for arguments, says in (
        ([str(run), f"data={folder}", f"out={out}"], "exists: give overwrite=true"),
        ([str(run), f"data={folder}"], "out= is missing"),
        ([f"data={folder}", f"out={tmp_path / 'f.npy'}"], "checkpoint= is missing"),
        ([str(run), f"data={folder}", f"out={tmp_path / 'f.hdf5'}"], "ends in none of .parquet"),
        ([str(run), f"data={folder}", f"out={tmp_path}"], "is a folder"),
        ([str(run), f"data={tmp_path / 'none' / 'here'}", f"out={tmp_path / 'f.npy'}"], "does not exist"),
        ([str(tmp_path), f"data={folder}", f"out={tmp_path / 'f.npy'}"], "neither encoder.safetensors nor"),
        ([str(folder / NAMES[0]), f"data={folder}", f"out={tmp_path / 'f.npy'}"], "is no checkpoint"),
    ):
        assert main(["embed", *arguments, "progress=false"]) == 2
        assert says in capsys.readouterr().err
    assert out.read_bytes() == b"precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["features.npy"]
    assert main(["embed", str(run), f"data={folder}", f"out={out}", "overwrite=true", "progress=false"]) == 0
    assert read_table(out).embeddings.shape == (18, 256)


def test_parquet_without_pyarrow_names_the_extra(
    run: Any, folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)
    with pytest.raises(UserError, match=r"psm\[parquet\]"):
        embed(run, folder, tmp_path / "f.parquet")


@pytest.mark.parametrize("suffix", FORMATS)
def test_damaged_files_and_files_of_others_are_refused(run: Any, folder: Any, tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"f{suffix}"
    embed(run, folder, out)
    content = bytearray(out.read_bytes())
    for place in (len(content) // 2, len(content) // 3):
        content[place] ^= 1
    out.write_bytes(content)
    with pytest.raises(UserError, match=r"damaged|does not"):
        read_table(out)
    out.write_bytes(b"nothing of the kind")
    with pytest.raises(UserError, match=r"damaged|does not"):
        read_table(out)
    with pytest.raises(UserError, match="does not exist"):
        read_table(tmp_path / f"other{suffix}")


def test_values_that_float16_cannot_hold_are_refused(
    run: Any, folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding.LoadedEncoder, "embed", lambda *arguments: torch.full((5, 256), 1e6))
    with pytest.raises(UserError, match="65504"):
        embed(run, folder, tmp_path / "f.npy", dtype="float16")


def test_an_interrupt_says_how_to_continue(
    run: Any, folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(embedding.PartialRows, "append", stop)
    assert main(["embed", str(run), f"data={folder}", f"out={tmp_path / 'f.npy'}", "progress=false"]) == 130
    assert "the same command continues where it was" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_ctrl_c_in_a_process_keeps_the_work_and_says_how_to_continue(run: Any, tmp_path: Path) -> None:
    folder = save_images(tmp_path / "images", [f"{i:04}.png" for i in range(400)])
    out = tmp_path / "features.npy"
    command = [sys.executable, "-m", "psm", "embed", str(run), f"data={folder}", f"out={out}", "batch_size=1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    batches = tmp_path / "features.npy.part" / "batches.jsonl"
    while process.poll() is None and not (batches.exists() and batches.stat().st_size > 300):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130, said
    assert "the same command continues where it was" in said
    assert "Traceback" not in said
    assert not out.exists()
    done = len(batches.read_text().splitlines())
    assert 0 < done < 400
    embed(run, folder, out, batch_size=1)
    np.testing.assert_allclose(
        read_table(out).embeddings[:3], by_hand(run, folder, ["0000.png", "0001.png", "0002.png"]), atol=1e-4
    )
