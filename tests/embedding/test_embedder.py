"""`psm.Embedder` as scikit-learn uses it: in pipelines, cloned, pickled, and over every kind of image."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.utils.validation import check_is_fitted

import psm
from helpers import save_images, save_untrained_encoder
from psm.utils.errors import UserError


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save_untrained_encoder(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Images whose class is their brightness."""
    folder = tmp_path_factory.mktemp("images")
    random = np.random.default_rng(0)
    for i in range(24):
        pixels = random.integers(0, 100, (20, 20, 3)) + (150 if i % 2 else 0)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i:02}.png")
    return sorted(str(path) for path in folder.glob("*.png"))


def test_a_pipeline_with_logistic_regression_learns_from_paths(run: Any, paths: Any) -> None:
    labels = ["bright" if i % 2 else "dark" for i in range(24)]
    classifier = make_pipeline(psm.Embedder(run, batch_size=7), LogisticRegression())
    classifier.fit(paths[:16], labels[:16])
    assert classifier.score(paths[16:], labels[16:]) == 1
    assert cross_val_score(classifier, np.array(paths), labels, cv=3).mean() > 0.9
    assert classifier.predict([Image.open(paths[1])]) == ["bright"]


def test_every_kind_of_input_gives_the_features_of_the_encoder(run: Any, paths: Any) -> None:
    embedder = psm.Embedder(run, batch_size=5)
    encoder = psm.load_encoder(run)
    with torch.inference_mode():
        expected = encoder(encoder.preprocess(paths)).numpy()
    arrays = np.stack([np.array(Image.open(path)) for path in paths])
    tensors = torch.from_numpy(arrays).permute(0, 3, 1, 2)
    frame = pandas.DataFrame({"path": paths})
    for images in (paths, [Image.open(p) for p in paths], arrays, list(arrays), tensors, np.array(paths), frame.path):
        found = embedder.transform(images)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=1e-4)
    np.testing.assert_allclose(embedder.transform(frame[["path"]]), expected, atol=1e-4)
    unit = psm.Embedder(run, normalize=True).fit_transform(paths)
    np.testing.assert_allclose(unit, expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-5)
    assert embedder.transform([]).shape == (0, encoder.width)


def test_parameters_clones_pickles_and_names_of_columns(run: Any, paths: Any, tmp_path: Path) -> None:
    embedder = psm.Embedder(run, batch_size=3).fit()
    check_is_fitted(embedder)
    assert embedder.get_params()["batch_size"] == 3
    expected = embedder.transform(paths[:4])
    for copy in (clone(embedder), pickle.loads(pickle.dumps(embedder))):
        assert "_loaded" not in vars(copy)
        np.testing.assert_array_equal(copy.transform(paths[:4]), expected)
    assert len(pickle.dumps(embedder)) < 2_000  # parameters, not weights
    frame = embedder.set_output(transform="pandas").fit_transform(paths[:4])
    assert list(frame.columns[:2]) == ["embedding0", "embedding1"]
    other = save_untrained_encoder(tmp_path / "other", seed=3)
    changed = psm.Embedder(run)
    first = changed.transform(paths[:4])
    assert not np.allclose(changed.set_params(checkpoint=other).transform(paths[:4]), first)


def test_what_is_no_image_and_a_lone_image_are_refused(run: Any, paths: Any, tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(UserError, match=r"text.png cannot be read"):
        psm.Embedder(run).transform([*paths[:2], tmp_path / "text.png"])
    with pytest.raises(UserError, match="put it into a list"):
        psm.Embedder(run).transform(paths[0])
    with pytest.raises(UserError, match="does not exist"):
        psm.Embedder(tmp_path / "no run").fit(paths)


def test_it_embeds_without_scikit_learn(run: Any, tmp_path: Path) -> None:
    save_images(tmp_path, ["a.png"])
    code = (
        "import sys; sys.modules['sklearn'] = None; import psm;"
        f"shape = psm.Embedder({str(run)!r}).fit_transform([{str(tmp_path / 'a.png')!r}]).shape;"
        "print(shape, 'lightning' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "(1, 256) False", result.stderr
