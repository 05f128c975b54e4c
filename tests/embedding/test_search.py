"""`psm search`: queries of every kind, the table, the page and the refusals; faiss beside the exact search."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import psm
from helpers import save_images, save_untrained_encoder
from psm.cli.main import main
from psm.embedding.search import run_search
from psm.utils.errors import UserError

NAMES = sorted(f"{kind}/{i}.png" for kind in ("ant", "bee") for i in range(10))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with an encoder, images and their embeddings."""
    folder = tmp_path_factory.mktemp("place")
    save_untrained_encoder(folder / "run")
    save_images(folder / "images", NAMES)
    psm.embed(folder / "run", folder / "images", folder / "features.parquet", progress=False)
    return folder


def test_an_image_finds_itself_first_and_others_by_similarity(place: Any) -> None:
    embeddings = psm.Embedder(place / "run", normalize=True).transform([place / "images" / name for name in NAMES])
    (result,) = psm.search(place / "features.parquet", place / "images" / NAMES[3], k=5)
    order = np.argsort(-(embeddings @ embeddings[3]))[:5]
    assert [match.path for match in result.matches] == [NAMES[row] for row in order]
    assert [match.row for match in result.matches] == order.tolist()
    assert result.matches[0].similarity == pytest.approx(1, abs=1e-5)
    assert [match.label for match in result.matches] == [NAMES[row][:3] for row in order]
    similarity = [match.similarity for match in result.matches]
    assert similarity == pytest.approx((embeddings @ embeddings[3])[order].tolist(), abs=1e-4)


def test_rows_and_paths_of_the_file_do_not_find_themselves(place: Any) -> None:
    by_row = psm.search(place / "features.parquet", row=[3, 5], k=4)
    assert [result.row for result in by_row] == [3, 5]
    assert all(result.row not in [match.row for match in result.matches] for result in by_row)
    (by_path,) = psm.search(place / "features.parquet", NAMES[3], k=4)
    assert [match.row for match in by_path.matches] == [match.row for match in by_row[0].matches]
    (everything,) = psm.search(place / "features.parquet", row=3, k=100)
    assert len(everything.matches) == 19


def test_several_queries_and_a_folder_of_them(place: Any) -> None:
    images = place / "images"
    mixed = psm.search(place / "features.parquet", [images / NAMES[0], NAMES[1]], row=2, k=3)
    assert [(result.file is None, result.row) for result in mixed] == [(False, None), (True, 1), (True, 2)]
    folder = psm.search(place / "features.parquet", images / "bee", k=1)
    assert [result.matches[0].path for result in folder] == [f"bee/{i}.png" for i in range(10)]


def test_the_command_prints_a_table_and_writes_a_page(place: Any, capsys: Any) -> None:
    features = place / "features.parquet"
    assert main(["search", str(features), f"query={place / 'images' / NAMES[3]}", "row=[7]", "k=4"]) == 0
    said = capsys.readouterr().out
    assert NAMES[3] in said
    assert "1.000" in said
    assert "searched: 20 images" in said
    page = (place / "features.parquet.search.html").read_text()
    assert page.count("data:image/jpeg;base64") == 2 + 4 + 4
    assert page.count('<section aria-label="Images like') == 2
    assert "http://" not in page
    assert "https://" not in page


def test_images_that_moved_are_found_by_data_and_a_page_without_them_is_written(
    place: Any, tmp_path: Path, capsys: Any, caplog: Any
) -> None:
    import shutil

    shutil.copytree(place / "images", tmp_path / "images")
    psm.embed(place / "run", tmp_path / "images", tmp_path / "f.npy", progress=False)
    (tmp_path / "images").rename(tmp_path / "moved")
    command = ["search", str(tmp_path / "f.npy"), "row=3", "k=4"]
    assert main(command) == 0
    page = tmp_path / "f.npy.search.html"
    assert "the page has no images" in caplog.text
    assert "data:image" not in page.read_text()
    assert main([*command, f"data={tmp_path / 'moved'}"]) == 0
    assert page.read_text().count("data:image") == 5
    assert main([*command, "page=false", f"out={tmp_path / 'x.html'}"]) == 0
    assert not (tmp_path / "x.html").exists()


def test_hostile_names_are_text(tmp_path: Path, place: Any, capsys: Any) -> None:
    names = ["[bold]<script>alert(1)<", "b"]
    save_images(tmp_path / "images", [f"{name}.png" for name in names])
    psm.embed(place / "run", tmp_path / "images", tmp_path / "f.csv", progress=False)
    assert main(["search", str(tmp_path / "f.csv"), "row=1"]) == 0
    assert "[bold]<script>" in capsys.readouterr().out
    assert "<script>" not in (tmp_path / "f.csv.search.html").read_text()


def test_data_without_files_have_thumbnails_too(place: Any, tmp_path: Path) -> None:
    psm.embed(place / "run", "shapes", tmp_path / "f.npy", images={"limit": 30}, progress=False)
    assert main(["search", str(tmp_path / "f.npy"), "row=3", "k=4"]) == 0
    assert (tmp_path / "f.npy.search.html").read_text().count("data:image") == 5


def test_another_encoder_is_refused_and_a_moved_one_is_named(place: Any, tmp_path: Path) -> None:
    other = save_untrained_encoder(tmp_path / "other", seed=1)
    query = place / "images" / NAMES[0]
    with pytest.raises(UserError, match=r"made by another encoder .*checksum"):
        psm.search(place / "features.parquet", query, checkpoint=str(other))
    run = save_untrained_encoder(tmp_path / "run", seed=2)
    psm.embed(run, place / "images", tmp_path / "f.npy", progress=False)
    run.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="any more: give checkpoint="):
        psm.search(tmp_path / "f.npy", query)
    assert psm.search(tmp_path / "f.npy", query, checkpoint=str(tmp_path / "elsewhere"))[0].matches[0].row == 0
    assert psm.search(tmp_path / "f.npy", row=0)  # needs no encoder


def test_mistakes_get_a_sentence(place: Any, tmp_path: Path, capsys: Any) -> None:
    features = str(place / "features.parquet")
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "empty").mkdir()
    np.save(tmp_path / "plain.npy", np.zeros((3, 4)))
    (tmp_path / "plain.npy.names.csv").write_text("path\na\nb\nc\n")
    np.save(tmp_path / "alone.npy", np.zeros((3, 4)))
    (tmp_path / "cut.parquet").write_bytes((place / "features.parquet").read_bytes()[:500])
    for arguments, says in (
        ([], "features= is missing"),
        ([features], "a query is missing"),
        ([features, f"query={tmp_path / 'text.jpg'}"], "cannot be read as an image"),
        ([features, f"query={tmp_path / 'none.jpg'}"], "neither an image file nor the path of an image"),
        ([features, f"query={tmp_path / 'empty'}"], "holds no image"),
        ([features, "row=20"], "rows run from 0 to 19"),
        ([features, "row=-1"], "too small"),
        ([str(tmp_path / "none.parquet"), "row=0"], "does not exist"),
        ([str(tmp_path / "text.jpg"), "row=0"], "ends in none of"),
        ([str(tmp_path / "plain.npy"), "row=0"], "does not say which encoder"),
        ([str(tmp_path / "alone.npy"), "row=0"], "alone.npy.names.csv, which `psm embed` wrote"),
        ([str(tmp_path / "cut.parquet"), "row=0"], "this is not a parquet file.\n"),
        ([features, "row=0", f"out={tmp_path}"], "is a folder"),
        ([features, "row=0", f"out={tmp_path / 'text.jpg'}"], "exists: give overwrite=true"),
    ):
        assert main(["search", *arguments]) == 2, arguments
        assert says in capsys.readouterr().err
    index = psm.ImageIndex(features)
    with pytest.raises(UserError, match=r"shape \(1, 3\)"):
        index.search(torch.zeros(1, 3))


def test_faiss_finds_what_the_exact_search_finds_and_is_made_once(
    place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("psm.embedding.faiss_search.MANY", 400)
    psm.embed(place / "run", "shapes", tmp_path / "f.npy", images={"limit": 400}, progress=False)
    file = tmp_path / "f.npy"
    exact, inverted = psm.ImageIndex(file), psm.ImageIndex(file, "faiss", probes=10)
    queries = exact.vectors(list(range(30)))
    similarity, rows = exact.search(queries, 5, exclude=range(30))
    approximate, found = inverted.search(queries, 5, exclude=range(30))
    shared = [len({*a} & {*b}) for a, b in zip(rows.tolist(), found.tolist(), strict=True)]
    assert np.mean(shared) > 4.5
    np.testing.assert_allclose(approximate[:, 0], similarity[:, 0], atol=2e-3)
    assert (found != np.arange(30)[:, None]).all()
    made = (tmp_path / "f.npy.faiss").stat().st_mtime_ns
    run_search({"features": str(file), "row": 0, "index": "faiss"})
    assert (tmp_path / "f.npy.faiss").stat().st_mtime_ns == made
    assert [record.message.endswith("once: this takes minutes.") for record in caplog.records] == [True]
    content = bytearray((tmp_path / "f.npy.faiss").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "f.npy.faiss").write_bytes(content)
    again = psm.ImageIndex(file, "faiss", probes=10).search(queries, 5)[1]
    assert again[:, 0].tolist() == list(range(30))
    assert (tmp_path / "f.npy.faiss").read_bytes() != bytes(content)  # damaged: made anew
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    with pytest.raises(UserError, match=r"psm\[faiss\]"):
        psm.ImageIndex(file, "faiss")
