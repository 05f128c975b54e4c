"""The samples mined for some queries, and the page of a run."""

from pathlib import Path
from typing import Any

import pytest
import torch

import psm
from helpers import SMALL, needs_browser, page_widths
from psm.config.schema import ImagesConfig
from psm.data import ImageDataset, ImageStore, load_dataset
from psm.evaluation.mining_analysis import mined_samples
from psm.reporting.run_page import write_page


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("runs") / "a"
    return psm.pretrain(out, **SMALL)


@pytest.fixture(scope="module")
def data() -> Any:
    return load_dataset("shapes", ImagesConfig(limit=100, size=16), progress=False)


def test_mined_samples(run: Any, data: Any) -> None:
    queries = torch.tensor([3, 50, 99])
    found = mined_samples(run.out / "checkpoints" / "last.ckpt", data, queries, negatives=6)
    assert [query.image for query in found] == [3, 50, 99]
    for query in found:
        assert len(query.positives) == 5
        assert sum(sample.share for sample in query.positives) == pytest.approx(1, abs=1e-5)
        assert query.image not in [sample.image for sample in query.positives]
        similarities = [sample.similarity for sample in query.negatives]
        assert similarities == sorted(similarities, reverse=True)
        for sample in (*query.positives, *query.negatives):
            same = data.train.labels[query.image] == data.train.labels[sample.image]
            assert sample.same_class == bool(same)
            assert 0 <= sample.share <= 1


def test_page_of_a_method_that_mines_nothing(tmp_path: Path, small: dict[str, Any]) -> None:
    result = psm.pretrain(tmp_path / "run", **small | {"method": "byol", "epochs": 1})
    page = write_page(result.out, result.data).read_text()
    assert "<svg" in page
    assert "What was mined" not in page


def test_page_without_labels_and_without_images(run: Any, data: Any) -> None:
    files = [f"holiday & home/{place:03d}.jpg" for place in range(100)]
    blind = ImageDataset("shapes", ImageStore(data.train.take(torch.arange(100)), None, files), None, ())
    page = write_page(run.out, blind).read_text()
    assert "What was mined" in page
    assert "solid blue" not in page
    assert 'alt="query: holiday &amp; home/000.jpg" title="holiday &amp; home/000.jpg"' in page
    assert ">000</span>" in page
    settings = (run.out / "config.yaml").read_text()
    unsealed = settings[: settings.rindex("# crc32")]
    (run.out / "config.yaml").write_text(unsealed.replace("data: shapes", "data: /does/not/exist"))
    page = write_page(run.out).read_text()
    (run.out / "config.yaml").write_text(settings)
    assert "<svg" in page
    assert "What was mined" not in page


@needs_browser
@pytest.mark.parametrize("width", [390, 1280])
def test_page_with_scores_fits_a_phone_and_a_screen(run: Any, data: Any, tmp_path: Path, width: Any) -> None:
    psm.evaluate(run.out, baselines=True, linear={"epochs": 1}, progress=False)
    inner, scrolled, smallest, largest = page_widths(write_page(run.out, data), tmp_path, width)
    assert scrolled <= inner
    assert 250 <= smallest <= largest <= inner
