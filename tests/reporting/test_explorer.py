"""The explorer: its files and data against the collection, its page in a real browser, and its refusals."""

import base64
import csv
import html
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import psm
from helpers import browser_dom, needs_browser, save_images, save_untrained_encoder
from psm.cli.main import main
from psm.config.explore import ExploreConfig
from psm.data import ImageDataset, ImageStore
from psm.reporting.explorer import page as pages
from psm.utils.errors import UserError

NAMES = [f"{kind}/{i:02}.png" for kind in ("ant", "bee") for i in range(30)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save_untrained_encoder(tmp_path_factory.mktemp("run"))


def textured(folder: Any, names: Any, seed: int = 0) -> Any:
    """Images with details, which near-duplicates are found by."""
    random = np.random.default_rng(seed)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        noise = Image.fromarray(random.integers(0, 256, (9, 9, 3), dtype=np.uint8))
        noise.resize((40, 40), Image.Resampling.BICUBIC).save(folder / name)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Sixty images, two of them once more: resized, and mirrored."""
    folder = textured(tmp_path_factory.mktemp("images"), NAMES)
    Image.open(folder / "ant/03.png").resize((30, 30)).save(folder / "ant/copy.png")
    Image.open(folder / "bee/07.png").transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(folder / "bee/copy.png")
    return folder


def explore(run: Any, data: Any, out: Any = None, **keys: Any) -> Any:
    return psm.explore(run, data, out, **{"progress": False, "map": "pca", "clusters": 3, **keys})


@pytest.fixture(scope="module")
def exploration(run: Any, folder: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return explore(run, folder, tmp_path_factory.mktemp("out") / "explore", outliers=0.1)


def content_of(page: Any) -> Any:
    """The data embedded in a page, arrays as numpy's."""
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL).group(1)

    def array(item: Any) -> Any:
        if item.keys() != {"kind", "shape", "bytes"}:
            return item
        kind = "<" + np.dtype(item["kind"]).str[1:]
        return np.frombuffer(base64.b64decode(item["bytes"]), kind).reshape(item["shape"])

    return json.loads(text, object_hook=array)


def rows_of(file: Any) -> Any:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


def test_files_list_duplicates_outliers_clusters_and_labels(exploration: Any) -> None:
    out, table = exploration.folder, exploration.index.table
    groups = rows_of(out / "duplicates.csv")
    assert [(row["group"], row["path"]) for row in groups] == [
        ("1", groups[0]["path"]),  # mirrored, without a loss: the best match first
        ("1", groups[1]["path"]),
        ("2", "ant/03.png"),  # the larger file first
        ("2", "ant/copy.png"),
    ]
    assert {row["path"] for row in groups[:2]} == {"bee/07.png", "bee/copy.png"}
    assert all(float(row["match"]) > 0.7 for row in groups)
    embeddings = torch.nn.functional.normalize(torch.from_numpy(np.array(table.embeddings)), dim=1)
    cosine = (embeddings @ embeddings.T).fill_diagonal_(-1)
    distance = 1 - cosine.topk(10, dim=1).values.mean(1)
    outliers = rows_of(out / "outliers.csv")
    expected = distance.argsort(descending=True)[:6]
    assert [row["path"] for row in outliers] == [table.paths[i] for i in expected]
    assert [float(row["score"]) for row in outliers] == pytest.approx(distance[expected].tolist(), abs=1e-3)
    clusters = rows_of(out / "clusters.csv")
    assert sorted(row["path"] for row in clusters) == sorted(table.paths)
    assert [int(row["cluster"]) for row in clusters] == sorted(int(row["cluster"]) for row in clusters)
    first = [row for row in clusters if row["cluster"] == "1"]
    assert [float(row["similarity"]) for row in first] == sorted((float(r["similarity"]) for r in first), reverse=True)
    assert [row["representative"] for row in first[:2]] == ["1", "2"]
    for row in rows_of(out / "labels.csv"):
        assert row["label"] == row["path"][:3] != row["suggested"]
        assert float(row["share"]) >= 0.6


def test_page_holds_the_collection(exploration: Any) -> None:
    content, collection = content_of(exploration.page), exploration.collection
    assert content["paths"] == list(exploration.index.paths)
    np.testing.assert_allclose(content["x"] / 65_535, collection.layout[:, 0], atol=1e-4)
    np.testing.assert_allclose(content["y"] / 65_535, 1 - collection.layout[:, 1], atol=1e-4)
    assert content["neighbors"].tolist() == collection.neighbors[:, :12].tolist()
    np.testing.assert_allclose(content["similarity"] / 10_000, collection.similarity[:, :12], atol=1e-4)
    assert content["cluster"].tolist() == collection.clusters.cluster.tolist()
    assert sum(cluster["size"] for cluster in content["clusters"]) == 62
    names = [sorted(content["paths"][i] for i in group) for group in content["duplicates"]]
    assert names == [["bee/07.png", "bee/copy.png"], ["ant/03.png", "ant/copy.png"]]
    assert [content["classes"][i] for i in content["labels"]] == [path[:3] for path in content["paths"]]
    text = exploration.page.read_text()
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "https://" not in text


def test_embeddings_are_taken_over_and_settings_may_change(run: Any, tmp_path: Path) -> None:
    folder = textured(tmp_path / "images", [f"{i}.png" for i in range(25)])
    first = explore(run, folder)
    assert first.folder == run / "explore"
    features = first.folder / "features.npy"
    made = features.stat().st_mtime_ns
    assert rows_of(first.folder / "outliers.csv") == []
    again = explore(run, folder, outliers=0.2)  # the default folder is replaced
    assert features.stat().st_mtime_ns == made
    assert len(rows_of(again.folder / "outliers.csv")) == 5
    assert not (again.folder / "labels.csv").exists()
    textured(folder, ["new.png"], seed=9)
    assert len(explore(run, folder).index) == 26
    assert features.stat().st_mtime_ns != made


def test_a_large_collection_shows_some_images_and_lists_all(run: Any, folder: Any, tmp_path: Path) -> None:
    result = explore(run, folder, tmp_path / "out", shown=30)
    content = content_of(result.page)
    assert len(content["paths"]) == 30
    assert content["about"]["count"] == 62
    assert len(rows_of(result.folder / "clusters.csv")) == 62
    assert {"ant/03.png", "ant/copy.png"} < set(content["paths"])  # what the lists begin with is shown
    rows = [result.index.row_of(path) for path in content["paths"]]
    embeddings = torch.nn.functional.normalize(result.index.vectors(rows), dim=1)
    nearest = (embeddings @ embeddings.T).fill_diagonal_(-1).argmax(1)
    assert content["neighbors"][:, 0].tolist() == nearest.tolist()


def test_loaded_data_and_datasets(run: Any, tmp_path: Path) -> None:
    images = torch.randint(0, 256, (40, 3, 20, 20), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images[7] = images[3]
    data = ImageDataset("mine", ImageStore(images), None, ())
    result = explore(run, data, tmp_path / "a")
    assert [row["path"] for row in rows_of(tmp_path / "a" / "duplicates.csv")] == ["train/3", "train/7"]
    dataset = torch.utils.data.TensorDataset(images, torch.arange(40) % 4)
    assert explore(run, dataset, tmp_path / "b").collection.votes is not None
    assert result.collection.votes is None


def test_unreadable_and_vanished_images(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = textured(tmp_path / "images", [f"{i:02}.png" for i in range(24)])
    (folder / "broken.png").write_bytes(b"no image")
    result = explore(run, folder, tmp_path / "out")
    assert len(result.index) == 24
    assert content_of(result.page)["about"]["unreadable"] == 1
    embed = psm.reporting.explorer._embed

    def vanish(*arguments: Any) -> None:
        embed(*arguments)
        for name in ("01.png", "02.png"):
            (folder / name).unlink()

    monkeypatch.setattr("psm.reporting.explorer._embed", vanish)
    result = explore(run, folder, tmp_path / "out", overwrite=True)
    assert len(content_of(result.page)["paths"]) == 24
    assert rows_of(tmp_path / "out" / "duplicates.csv") == []  # two missing images are not copies of each other


def test_command_line_and_mistakes(run: Any, folder: Any, tmp_path: Path, capsys: Any) -> None:
    command = ["explore", str(run), f"data={folder}", "map=pca", "progress=false"]
    assert main([*command, f"out={tmp_path / 'out'}"]) == 0
    said = capsys.readouterr().out
    assert "duplicates: 4 images in 2 groups" in said
    assert f"page:       {tmp_path / 'out' / 'explore.html'}" in said
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("precious")
    (tmp_path / "none").mkdir()
    lone = save_images(tmp_path / "lone", ["a.png"])
    for arguments, says in (
        ([f"out={tmp_path / 'out'}"], "holds a page already: give overwrite=true"),
        ([f"out={tmp_path / 'full'}"], "is not empty and holds no page"),
        ([f"out={tmp_path / 'full' / 'mine.txt'}"], "is a file"),
        ([f"out={tmp_path / 'x'}", f"data={tmp_path / 'none'}"], "holds no image"),
        ([f"out={tmp_path / 'y'}", f"data={lone}"], "a single image"),
        (["clusters=1"], "too small"),
    ):
        keys = {word.partition("=")[0] for word in arguments}
        kept = [word for word in command if word.partition("=")[0] not in keys or "=" not in word]
        assert main([*kept, *arguments]) == 2, arguments
        assert says in capsys.readouterr().err
    assert main(["explore", f"data={folder}"]) == 2
    assert "checkpoint= is missing" in capsys.readouterr().err
    assert main(["explore", str(tmp_path / "nothing"), f"data={folder}"]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "y").exists()


def test_a_page_that_cannot_stay_small_is_refused(
    run: Any, folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "MAX_PAGE_BYTES", 60_000)
    with pytest.raises(UserError, match="give a smaller shown="):
        explore(run, folder, tmp_path / "out")


SELF_TEST = """
<script>
const seen = {};
const key = (name, target = document.activeElement, more = {}) =>
  target.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true, cancelable: true, ...more }));
const now = () => ({ hash: location.hash, title: byId("picked-title").textContent, scale: view.scale, x: view.x });
window.addEventListener("error", event => { seen.error = String(event.message); });
window.addEventListener("load", () => setTimeout(() => {
try {
  canvas.focus();
  seen.start = now();
  key("ArrowRight");
  seen.first = state.image;
  const before = screenX(state.image);
  key("ArrowRight");
  seen.right = screenX(state.image) - before;
  const top = screenY(state.image);
  key("ArrowUp");
  seen.up = screenY(state.image) - top;
  key("+");
  seen.zoomed = now();
  key("ArrowRight", canvas, { shiftKey: true });
  seen.moved = now();
  key("0");
  seen.whole = now();
  key("Enter");
  seen.focused = document.activeElement.className;
  document.activeElement.click();
  seen.neighbor = now();
  key("Escape");
  seen.back = document.activeElement.id;
  key("2");
  seen.list = [location.hash, document.querySelectorAll("#entries .group").length];
  key("n");
  seen.next = now();
  key("n");
  seen.after = now();
  key("p");
  seen.previous = now();
  key("c");
  seen.color = state.color;
  key("t");
  seen.thumbs = [state.thumbs, byId("thumbs").getAttribute("aria-pressed")];
  key("t");
  key("/");
  seen.finding = document.activeElement.id;
  byId("find").value = "copy";
  byId("find").dispatchEvent(new Event("input"));
  seen.found = byId("found").textContent;
  key("Enter");
  seen.match = now();
  byId("find").value = "";
  byId("find").dispatchEvent(new Event("input"));
  key("Escape");
  drawMap();
  seen.drawn = drawn.length;
  const shown = drawn.find(item => item.place !== state.image);
  const box = canvas.getBoundingClientRect();
  const where = { clientX: box.left + shown.x, clientY: box.top + shown.y };
  const at = { ...where, pointerId: 1, pointerType: "mouse", bubbles: true };
  canvas.dispatchEvent(new PointerEvent("pointerdown", at));
  canvas.dispatchEvent(new PointerEvent("pointerup", at));
  seen.clicked = [state.image, shown.place];
  const from = view.x;
  canvas.dispatchEvent(new PointerEvent("pointerdown", at));
  canvas.dispatchEvent(new PointerEvent("pointermove", { ...at, clientX: at.clientX + 50 }));
  canvas.dispatchEvent(new PointerEvent("pointerup", { ...at, clientX: at.clientX + 50 }));
  seen.dragged = view.x < from;
  const scale = view.scale;
  canvas.dispatchEvent(new WheelEvent("wheel", { ...where, deltaY: -200, cancelable: true }));
  seen.wheel = view.scale / scale;
  const start = performance.now();
  for (let i = 0; i < 20; i++) drawMap();
  seen.frame = (performance.now() - start) / 20;
} catch (error) { seen.error = String(error.stack); }
seen.width = [document.documentElement.scrollWidth, innerWidth];
seen.ground = getComputedStyle(document.documentElement).backgroundColor;
seen.titles = Array.from(document.querySelectorAll("#entries h3"), title => title.textContent);
seen.legend = Array.from(document.querySelectorAll("#legend button"), made => made.textContent);
seen.injected = document.querySelectorAll("#entries b b, h2 i, #legend em, .card em").length;
document.body.replaceChildren();
const output = Object.assign(document.createElement("pre"), { id: "observed" });
output.textContent = JSON.stringify(seen);
document.body.append(output);
}, 1000));
</script>
</body>"""


def in_browser(page: Any, tmp_path: Any, fragment: str = "", width: int = 1280, dark: bool = False) -> Any:
    """The state of the page after key presses and clicks in a real browser."""
    copy = tmp_path / f"copy-{width}.html"
    copy.write_text(page.read_text().replace("</body>", SELF_TEST))
    dom = browser_dom(f"{copy.as_uri()}{fragment}", tmp_path / f"profile-{width}", width, dark)
    return json.loads(html.unescape(re.search(r'<pre id="observed">(.*?)</pre>', dom, re.DOTALL).group(1)))


@needs_browser
def test_keys_and_pointers_in_a_browser(exploration: Any, tmp_path: Path) -> None:
    seen, content = in_browser(exploration.page, tmp_path), content_of(exploration.page)
    assert "error" not in seen, seen["error"]
    assert seen["start"]["title"] == "Pick an image on the map or in a list."
    assert 0 <= seen["first"] < 62
    assert seen["right"] > 0 > seen["up"]
    assert seen["zoomed"]["scale"] == pytest.approx(1.4 * seen["start"]["scale"])
    assert seen["moved"]["x"] > seen["zoomed"]["x"]
    assert seen["whole"]["scale"] == pytest.approx(seen["start"]["scale"])
    assert seen["focused"] == "card"
    picked = content["paths"].index(seen["whole"]["title"])
    assert seen["neighbor"]["title"] == content["paths"][content["neighbors"][picked][0]]
    assert (seen["back"], seen["finding"]) == ("map", "find")
    assert seen["list"] == [f"{seen['neighbor']['hash'].partition('&list')[0]}&list=duplicates", 2]
    first, second = content["duplicates"][0]
    assert [seen[name]["title"] for name in ("next", "after", "previous")] == [
        content["paths"][place] for place in (first, second, first)
    ]
    assert seen["color"] == "cluster"
    assert seen["thumbs"] == [False, "false"]
    assert seen["found"] == "2 images"
    assert "copy" in seen["match"]["title"]
    assert seen["drawn"] > 10
    assert seen["clicked"][0] == seen["clicked"][1]
    assert seen["dragged"]
    assert seen["wheel"] == pytest.approx(np.exp(0.3), rel=1e-6)
    assert seen["titles"] == ["Group 1: 2 images", "Group 2: 2 images"]
    assert sorted(seen["legend"]) == ["cluster 1", "cluster 2", "cluster 3"]
    assert seen["width"][0] <= seen["width"][1]
    assert seen["ground"] == "rgb(255, 255, 255)"


@needs_browser
def test_fragment_hostile_names_and_a_dark_narrow_window_in_a_browser(run: Any, tmp_path: Path) -> None:
    kinds = ["<em>a<", "b"]
    names = [f"{kind}/<script>alert(1)<{i}.png" for kind in kinds for i in range(12)]
    folder = textured(tmp_path / "images", names)
    result = explore(run, folder, tmp_path / "out")
    row = 7
    seen = in_browser(result.page, tmp_path, f"#image={row}&color=label&list=outliers", width=500, dark=True)
    assert "error" not in seen, seen["error"]
    assert seen["start"]["hash"] == f"#image={row}&color=label&list=outliers"
    assert seen["start"]["title"] == result.index.paths[row]
    assert seen["injected"] == 0
    assert seen["width"][0] <= seen["width"][1] == 500
    assert seen["ground"] == "rgb(22, 24, 27)"


@pytest.mark.slow
@needs_browser
def test_ten_thousand_images_in_a_browser(run: Any, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    noise = random.integers(0, 256, (10_000, 3, 16, 16), dtype=np.uint8)
    images = np.asarray(noise).repeat(2, 2).repeat(2, 3)
    data = ImageDataset("many", ImageStore(images, torch.arange(10_000) % 40), None, tuple(map(str, range(40))))
    result = explore(run, data, tmp_path / "out", clusters=20)
    assert result.page.stat().st_size < 20_000_000
    seen = in_browser(result.page, tmp_path)
    assert "error" not in seen, seen["error"]
    assert len(content_of(result.page)["paths"]) == 10_000
    assert seen["drawn"] > 100


def test_settings_have_their_defaults() -> None:
    assert ExploreConfig().shown == 10_000
    assert ExploreConfig().images.max_unreadable == 1.0
