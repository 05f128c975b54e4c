"""The mining inspector: its metrics against plain loops, its page in a real browser, and its refusals."""

import base64
import html
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import psm
from helpers import SMALL, browser_dom, needs_browser
from psm.cli.main import main
from psm.config.schema import ImagesConfig
from psm.data import ImageDataset, ImageStore, load_dataset
from psm.evaluation.mining_analysis import Mining, load_snapshot
from psm.methods.registry import METHODS
from psm.reporting.inspector import page as pages
from psm.reporting.inspector.collect import QueryMetrics, choose, shown_negatives, worst_negatives, worst_positives
from psm.reporting.sprites import pack
from psm.utils.errors import UserError

K = 5  # positives that PSM mines


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("runs") / "a"
    psm.pretrain(out, **SMALL | {"epochs": 3, "save": {"snapshots": 1}})
    return out


@pytest.fixture(scope="module")
def data() -> Any:
    return load_dataset("shapes", ImagesConfig(limit=100, size=16), progress=False)


@pytest.fixture(scope="module")
def inspection(run: Any) -> Any:
    return psm.inspect(run, queries=30, negatives=10, others=40, progress=False)


def content_of(page: Any) -> Any:
    """The data embedded in a page, arrays as numpy's."""
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL).group(1)

    def array(item: Any) -> Any:
        if item.keys() != {"kind", "shape", "bytes"}:
            return item
        return np.frombuffer(base64.b64decode(item["bytes"]), "<" + np.dtype(item["kind"]).str[1:]).reshape(
            item["shape"]
        )

    return json.loads(text, object_hook=array)


def by_loops(checkpoint: Any, images: Any, queries: Any, others: Any) -> Any:
    """What is mined, one image and one equation at a time, in double precision from the networks' outputs."""
    snapshot = load_snapshot(checkpoint)
    networks, bank = snapshot.networks, snapshot.bank

    def unit(vector: Any) -> Any:
        return vector.double() / vector.double().norm()

    @torch.inference_mode()
    def vectors(image: Any) -> Any:
        inputs = snapshot.views.plain(images.take(torch.tensor([image])))
        z = networks.projector(networks.encoder(inputs))
        return unit(networks.predictor(z)[0]), unit(networks.target(inputs)[0]), unit(z[0])

    embedded = {int(i): vectors(int(i)) for i in [*queries, *others]}

    def mined(image: Any) -> Any:
        key, usable = embedded[image][1], [row for row in range(int(bank.fill)) if int(bank.ids[row]) != image]
        rows = [(float(key @ bank.rows[row].double()), row) for row in usable]
        return [row for _, row in sorted(rows, reverse=True)[:K]]

    found = []
    for image in map(int, queries):
        query, key, z = embedded[image]
        rows = mined(image)
        raised = [math.exp(float(z @ bank.rows[row].double())) for row in rows]
        positives = [
            (int(bank.ids[row]), e / sum(raised), float(query @ bank.rows[row].double()))
            for row, e in zip(rows, raised, strict=True)
        ]
        own = float(query @ key)
        negatives = []
        for other in map(int, others):
            if other == image:
                continue
            candidates = [(other, embedded[other][1])]
            candidates += [(int(bank.ids[row]), bank.rows[row].double()) for row in mined(other)]
            for of, vector in candidates:
                similarity = float(query @ vector)
                negatives.append((of, similarity, math.exp(-0.5 * (similarity - own) ** 2)))
        found.append((image, positives, own, negatives))
    return found


def test_metrics_equal_plain_loops(run: Any, data: Any, inspection: Any) -> None:
    collected, labels = inspection.data, data.train.labels
    others = choose(data.train, 40, 0, "inspected others")
    for place, checkpoint in ((0, "epoch-0001.ckpt"), (2, "last.ckpt")):
        epoch = collected.snapshots[place]
        expected = by_loops(run / "checkpoints" / checkpoint, data.train, collected.queries, others)
        for row, (image, positives, own, negatives) in enumerate(expected):
            assert collected.queries[row] == image
            ids, weights, similarities = zip(*positives, strict=True)
            assert epoch.positives[row].tolist() == list(ids)
            assert epoch.weights[row].tolist() == pytest.approx(weights, abs=1e-5)
            assert epoch.positive_similarity[row].tolist() == pytest.approx(similarities, abs=1e-5)
            assert epoch.reference[row].item() == pytest.approx(own, abs=1e-5)
            assert epoch.num_negatives[row] == len(negatives) == epoch.histogram[row].sum()
            true = [bool(labels[i] == labels[image]) for i in ids]
            false = [bool(labels[of] == labels[image]) for of, _, _ in negatives]
            kept = sum(p for _, _, p in negatives)
            metrics = {name: value[row].item() for name, value in epoch.metrics._asdict().items()}
            assert metrics == pytest.approx(
                {
                    "similarity": sum(similarities) / K,
                    "kept": kept / len(negatives),
                    "nearer": sum(s > own for _, s, _ in negatives) / len(negatives),
                    "purity": sum(true) / K,
                    "purity_weighted": sum(w for w, t in zip(weights, true, strict=True) if t),
                    "hit": float(any(true)),
                    "false_negatives": sum(false) / len(negatives),
                    "false_negatives_kept": sum(p for (_, _, p), f in zip(negatives, false, strict=True) if f) / kept,
                },
                abs=1e-5,
            )
            assert epoch.histogram_false[row].sum() == sum(false)
            hardest = sorted({(round(s, 4), of) for of, s, _ in negatives}, reverse=True)
            assert epoch.negative_similarity[row, :5].tolist() == pytest.approx([s for s, _ in hardest[:5]], abs=2e-4)
            assert epoch.negative_similarity[row, -1].item() == pytest.approx(hardest[-1][0], abs=2e-4)
            for of, s in zip(epoch.negatives[row].tolist(), epoch.negative_similarity[row].tolist(), strict=True):
                assert min(abs(s - x) for x, i in hardest if i == of) < 2e-4


def test_epochs_are_in_order_and_the_last_counts_once(inspection: Any) -> None:
    assert inspection.data.epochs == [1, 2, 3]
    assert inspection.remarks == []
    assert content_of(inspection.page)["epochs"] == [1, 2, 3]


def test_page_holds_the_collected_data(data: Any, inspection: Any) -> None:
    content, collected = content_of(inspection.page), inspection.data
    images = content["images"]
    assert images[content["queries"]].tolist() == collected.queries.tolist()
    assert [content["classes"][i] for i in content["labels"]] == [data.classes[data.train.labels[i]] for i in images]
    for place, epoch in enumerate(collected.snapshots):
        assert images[content["positives"][place]].tolist() == epoch.positives.tolist()
        shown = content["negatives"][place]
        assert np.where(shown < 0, -1, images[shown]).tolist() == epoch.negatives.tolist()
        for name in ("weights", "positive_similarity", "negative_similarity", "negative_keep", "reference"):
            np.testing.assert_allclose(content[name][place] / 10_000, getattr(epoch, name), atol=5.1e-5)
        for name, values in epoch.metrics._asdict().items():
            np.testing.assert_allclose(content["metrics"][name][place] / 10_000, values, atol=5.1e-5)
            assert content["means"][place][name] == pytest.approx(values.mean().item(), abs=1e-6)
        assert sorted(content["worst"]["positives"][place]) == list(range(30))
    similarity = np.linspace(-1, 1, pages.GRID)
    kept = np.exp(-0.5 * (similarity[None, :] - similarity[:, None]) ** 2)
    np.testing.assert_allclose(content["about"]["sampler"] / 10_000, kept, atol=5.1e-5)
    assert inspection.page.stat().st_size < 1_000_000
    assert "http://" not in inspection.page.read_text().replace("http://www.w3.org", "")


def test_queries_are_even_over_classes_and_follow_the_seed() -> None:
    images = ImageStore(torch.zeros(60, 3, 8, 8, dtype=torch.uint8), torch.arange(60).clamp(max=3))
    chosen = choose(images, 8, 0, "queries")
    assert images.labels[chosen].bincount().tolist() == [1, 1, 1, 5]
    assert chosen.tolist() == sorted(set(chosen.tolist())) == choose(images, 8, 0, "queries").tolist()
    assert chosen.tolist() != choose(images, 8, 1, "queries").tolist()
    assert len(choose(images, 1000, 0, "queries")) == 60


def mining_of(similarity: Any, negatives: Any, allowed: Any = None) -> Any:
    similarity = torch.tensor([similarity])
    allowed = torch.ones_like(similarity).bool() if allowed is None else torch.tensor([allowed])
    nothing = torch.zeros(1, 0)
    return Mining(
        queries=torch.tensor([0]),
        positives=nothing.long(),
        positive_similarity=nothing,
        weights=nothing,
        reference=torch.zeros(1),
        negatives=torch.tensor(negatives),
        similarity=similarity,
        allowed=allowed,
        keep=torch.ones_like(similarity),
    )


def test_shown_negatives_are_the_hardest_and_a_spread_without_repeats() -> None:
    values = [i / 100 for i in range(100)]
    shown = shown_negatives(mining_of(values, list(range(100))), 8)
    assert shown.tolist() == [[99, 98, 97, 96, 95, 63, 32, 0]]
    # A repeated row is shown once; another image of equal similarity is kept; what is no negative is absent.
    shown = shown_negatives(mining_of([0.5, 0.5, 0.5, 0.1, 0.9], [7, 7, 8, 9, 1], [True, True, True, True, False]), 4)
    assert sorted(shown[0].tolist()) in ([-1, 0, 2, 3], [-1, 1, 2, 3])
    assert shown_negatives(mining_of([0.3], [4]), 5).tolist() == [[0, -1, -1, -1, -1]]


def test_worst_queries() -> None:
    nan = torch.full((4,), torch.nan)
    scores = QueryMetrics(*[nan] * 8)._replace(
        similarity=torch.tensor([0.1, 0.9, 0.5, torch.nan]), nearer=torch.tensor([0.2, 0.0, 0.4, 0.1])
    )
    assert worst_positives(scores).tolist() == [0, 2, 1, 3]
    assert worst_negatives(scores).tolist() == [2, 0, 3, 1]
    labeled = scores._replace(
        purity=torch.tensor([0.0, 0.0, 1.0, torch.nan]),
        purity_weighted=torch.tensor([0.0, 0.0, 1.0, torch.nan]),
        false_negatives_kept=torch.tensor([0.1, 0.3, 0.2, 0.0]),
    )
    assert worst_positives(labeled).tolist() == [1, 0, 2, 3]
    assert worst_negatives(labeled).tolist() == [1, 2, 0, 3]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_a_page(tmp_path: Path, method: str, small: dict[str, Any]) -> None:
    small |= {"method": method, "epochs": 1, "monitor": {"knn": False}}
    psm.pretrain(tmp_path / "run", **small)
    inspection = psm.inspect(tmp_path / "run", queries=12, negatives=6, others=30, progress=False)
    about, epoch = content_of(inspection.page)["about"], inspection.data.snapshots[0]
    mines, pushes = method in ("psm", "psmv2", "snclr", "nnclr"), method not in ("byol", "vicreg")
    assert about["mines"] == mines == (not any("mines no positives" in remark for remark in inspection.remarks))
    assert any("save.snapshots" in remark for remark in inspection.remarks)
    assert ("most similar 25%" in about["positives_text"]) == (method == "psmv2")
    assert epoch.positives.shape == (12, 1 if method == "nnclr" else K)
    assert epoch.negatives.shape == (12, 6 if pushes else 0)
    assert (epoch.weights.sum(1) > 0.99).all() == mines
    assert not (epoch.positives == inspection.data.queries[:, None]).any()
    assert epoch.metrics.purity.isfinite().all()
    assert epoch.metrics.false_negatives.isfinite().all() == pushes
    if METHODS[method].spec.sampler.keeps_all:
        torch.testing.assert_close(epoch.metrics.false_negatives_kept, epoch.metrics.false_negatives, equal_nan=True)


def test_without_labels(run: Any, data: Any) -> None:
    blind = ImageDataset("shapes", ImageStore(data.train.take(torch.arange(100))), None, ())
    out = run.parent / "blind.html"
    inspection = psm.inspect(run, blind, queries=10, negatives=4, others=20, progress=False, out=str(out))
    content = content_of(inspection.page)
    assert content["classes"] == []
    assert content["labels"] is None
    assert (content["metrics"]["purity"] == pages.MISSING).all()
    assert content["means"][0]["false_negatives"] is None
    similarity = inspection.data.snapshots[-1].metrics.similarity
    assert content["worst"]["positives"][-1].tolist() == similarity.argsort(stable=True).tolist()


def test_class_names_stay_text(run: Any, data: Any) -> None:
    hostile = "</script><b>x</b>&\udce9"
    named = ImageDataset("shapes", data.train, data.test, (hostile, *data.classes[1:]))
    out = run.parent / "hostile.html"
    psm.inspect(run, named, queries=10, others=20, progress=False, out=str(out))
    text = out.read_text()
    assert text.count("</script>") == 2
    assert "<b>x" not in text
    assert content_of(out)["classes"][0] == hostile


def test_sprites_find_their_images_and_fit(data: Any) -> None:
    ids = torch.arange(3, 60)
    sprites = pack(data.train, ids, max_characters=10**9)
    assert (sprites.side, sprites.pitch) == (16, 16)
    sheet = np.asarray(Image.open(_decoded(sprites.sheets[0]))).astype(int)
    for place in (0, 31, 32, 56):
        top, left = place // 32 * 16, place % 32 * 16
        image = data.train.take(ids[place : place + 1])[0].permute(1, 2, 0).numpy()
        assert np.abs(sheet[top : top + 16, left : left + 16] - image).mean() < 8
    large = ImageStore(torch.randint(0, 256, (40, 3, 100, 100), dtype=torch.uint8))
    assert pack(large, torch.arange(40), max_characters=10**9).side == 64
    small = pack(large, torch.arange(40), max_characters=60_000)
    assert small.side < 64
    assert small.characters <= 60_000


def _decoded(url: Any) -> Any:
    import io

    return io.BytesIO(base64.b64decode(url.partition(",")[2]))


def test_a_page_that_would_be_too_large_is_refused(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_PAGE_BYTES", 50_000)
    out = run.parent / "large.html"
    with pytest.raises(UserError, match="fewer queries="):
        psm.inspect(run, queries=30, progress=False, out=str(out))
    assert not out.exists()


def test_a_network_of_the_users_own(tmp_path: Path, small: dict[str, Any]) -> None:
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Conv2d(3, 8, 3)

        def forward(self, images: Any) -> Any:
            return self.layer(images)

    small.pop("encoder")
    psm.pretrain(tmp_path / "run", encoder=Own(), **small | {"epochs": 1, "monitor": {"knn": False}})
    with pytest.raises(UserError, match="encoder="):
        psm.inspect(tmp_path / "run", progress=False)
    assert not (tmp_path / "run" / "inspect.html").exists()
    inspection = psm.inspect(tmp_path / "run", encoder=Own(), queries=5, others=10, progress=False)
    assert inspection.data.snapshots[0].positives.shape == (5, K)


def test_command_line(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sub" / "page.html"
    small = ["queries=6", "others=20", "progress=false"]
    assert main(["inspect", str(run), f"out={out}", *small]) == 0
    assert str(out) in capsys.readouterr().out
    before = out.read_bytes()
    refusals = {
        "exists": ["inspect", f"run={run}", f"out={out}"],
        "is missing": ["inspect"],
        "does not exist": ["inspect", str(tmp_path / "nowhere")],
        "is not a run folder": ["inspect", str(tmp_path)],
        "is a file": ["inspect", str(out)],
        "is a folder": ["inspect", str(run), f"out={tmp_path}"],
        "did you mean 'queries'": ["inspect", str(run), "querys=3"],
        "too small": ["inspect", str(run), "queries=0"],
        "does not exist (any more)": ["inspect", str(run), "data=/not/there"],
        "was trained on": ["inspect", str(run), "images.limit=50"],
    }
    for expected, arguments in refusals.items():
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert expected in error
        assert len(error.strip().splitlines()) == 1
    assert out.read_bytes() == before
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]
    assert main(["inspect", f"run={run}", f"out={out}", "overwrite=true", "seed=1", *small]) == 0
    assert out.read_bytes() != before


def test_other_images_of_the_same_number_are_refused(run: Any, data: Any) -> None:
    other = ImageDataset("shapes", ImageStore(255 - data.train.take(torch.arange(100))), None, ())
    with pytest.raises(UserError, match="was trained on"):
        psm.inspect(run, other, progress=False)


# ---- in a browser -------------------------------------------------------------------------------------------------

SELF_TEST = """
<script>
const observed = {};
const press = (key, target = document.body) =>
  target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const note = name => {
  observed[name] = { hash: location.hash, title: document.getElementById("query-title").textContent };
};
window.addEventListener("error", event => { observed.error = event.message; });
note("start");
press("ArrowRight"); note("right");
press("ArrowLeft"); note("left");
press("["); note("earlier");
press("]"); press("]"); note("later");
document.getElementById("grid").focus();
press("End", document.getElementById("grid")); note("end");
press("Enter", document.getElementById("grid")); observed.focused = document.activeElement.id;
press("Escape"); observed.back = document.activeElement.id;
press("j"); observed.walked = document.getElementById("negative-text").textContent;
press("w"); note("worst");
observed.cells = document.querySelectorAll(".cell").length;
observed.selected = document.querySelectorAll('.cell[aria-selected="true"]').length;
observed.dots = document.querySelectorAll("[id^=dot-]").length;
observed.rows = document.querySelectorAll("#positives .row").length;
observed.figures = Array.from(document.querySelectorAll("#positives .row.now figure"), figure => figure.textContent);
observed.options = Array.from(document.getElementById("class").options, option => option.textContent);
observed.injected = document.querySelectorAll("option b, h2 b").length;
observed.charts = document.querySelectorAll("#trends h3").length;
document.body.replaceChildren();
const output = Object.assign(document.createElement("pre"), { id: "observed" });
output.textContent = JSON.stringify(observed);
document.body.append(output);
</script>
</body>"""


def in_browser(page: Any, tmp_path: Any, fragment: Any = "") -> Any:
    """The state of the page after some key presses in a real browser."""
    copy = tmp_path / "copy.html"
    copy.write_text(page.read_text().replace("</body>", SELF_TEST))
    dom = browser_dom(f"{copy.as_uri()}{fragment}", tmp_path / "profile", width=1280)
    return json.loads(html.unescape(re.search(r'<pre id="observed">(.*?)</pre>', dom, re.DOTALL).group(1)))


@needs_browser
def test_keys_in_a_browser(inspection: Any, tmp_path: Path) -> None:
    observed = in_browser(inspection.page, tmp_path)
    content, collected = content_of(inspection.page), inspection.data
    assert "error" not in observed
    order = [int(collected.queries[i]) for i in content["worst"]["positives"][-1]]
    earlier = [int(collected.queries[i]) for i in content["worst"]["positives"][1]]

    def hash_of(query: Any, epoch: Any) -> Any:
        return f"#query={query}&epoch={epoch}&sort=positives"

    assert observed["start"]["hash"] == hash_of(order[0], 3) == observed["left"]["hash"] == observed["later"]["hash"]
    assert observed["right"]["hash"] == hash_of(order[1], 3)
    assert observed["earlier"]["hash"] == hash_of(order[0], 2)
    assert order[0] in earlier
    assert observed["end"]["hash"] == hash_of(order[-1], 3)
    assert observed["worst"]["hash"] == hash_of(order[0], 3)
    labels = content["labels"][content["queries"]]
    name = content["classes"][labels[content["worst"]["positives"][-1][0]]]
    assert observed["start"]["title"] == f"Image {order[0]}: {name}"
    assert (observed["focused"], observed["back"]) == ("detail", "grid")
    assert observed["walked"].startswith("negative 1 of the 10 shown: image ")
    assert (observed["selected"], observed["dots"], observed["rows"], observed["charts"]) == (1, 10, 3, 4)
    assert observed["options"] == ["all", *content["classes"]]
    row = content["worst"]["positives"][-1][0]
    weights, positives = content["weights"][-1][row], content["positives"][-1][row]
    for text, weight, image in zip(observed["figures"], weights, positives, strict=True):
        verdict = "✓" if content["labels"][image] == labels[row] else "✗"
        assert f"w {weight / 10_000:.2f}" in text
        assert verdict in text


@needs_browser
def test_fragment_and_hostile_names_in_a_browser(run: Any, data: Any, tmp_path: Path) -> None:
    names = tuple(f"<b>{name}</b></script>" for name in data.classes)
    files = [f"<b>{place % 7}</b>/</script>{place}.png" for place in range(len(data.train))]
    train = ImageStore(data.train.take(torch.arange(len(data.train))), data.train.labels, files)
    named = ImageDataset("shapes", train, data.test, names)
    inspection = psm.inspect(run, named, queries=30, others=20, progress=False, out=str(tmp_path / "page.html"))
    query = int(inspection.data.queries[7])
    observed = in_browser(inspection.page, tmp_path, f"#query={query}&epoch=2&sort=image")
    assert "error" not in observed
    assert observed["start"]["hash"] == f"#query={query}&epoch=2&sort=image"
    assert observed["start"]["title"] == f"{files[query]}: {names[data.train.labels[query]]}"
    at_query, at_epoch = map(int, re.findall(r"query=(\d+)&epoch=(\d+)", observed["end"]["hash"])[0])
    row = inspection.data.queries.tolist().index(at_query)
    snapshot = inspection.data.snapshots[list(inspection.data.epochs).index(at_epoch)]
    shown = int((snapshot.negatives[row] >= 0).sum())
    assert shown > 20
    assert observed["walked"].startswith(f"negative 1 of the {shown} shown: <b>")
    assert observed["options"][1] == names[0]
    assert observed["injected"] == 0


@needs_browser
def test_thousands_of_queries_without_labels_and_negatives_in_a_browser(tmp_path: Path, small: dict[str, Any]) -> None:
    images = torch.randint(0, 256, (2000, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    unlabeled = ImageDataset("images", ImageStore(images), None, ())
    small |= {"data": unlabeled, "method": "byol", "epochs": 1, "batch_size": 500, "images": {}}
    psm.pretrain(tmp_path / "run", **small)
    inspection = psm.inspect(tmp_path / "run", unlabeled, queries=2000, others=100, progress=False)
    observed = in_browser(inspection.page, tmp_path)
    assert "error" not in observed
    assert observed["cells"] < 100  # only visible cells are in the document
    assert (observed["selected"], observed["dots"], observed["rows"]) == (1, 0, 1)
    assert observed["start"]["title"].startswith("Image ")
    assert inspection.page.stat().st_size < 3_000_000
