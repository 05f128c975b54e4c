"""What is found in a collection, each part against a slow reference or with an answer known beforehand."""

import io
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFilter

from psm.data.decode import center_square
from psm.embedding.collection.clusters import find_clusters
from psm.embedding.collection.duplicates import SIDE, candidate_pairs, detail_match, find_duplicates, groups
from psm.embedding.collection.labels import vote_on_labels
from psm.embedding.collection.layout import find_layout
from psm.utils.errors import UserError


def picture(seed: int, side: int = 96) -> Image.Image:
    """A picture with details at several sizes."""
    random = np.random.default_rng(seed)
    total = np.zeros((side, side, 3))
    for cells, weight in ((4, 1.0), (12, 0.8), (30, 0.6)):
        noise = Image.fromarray(random.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
        total += weight * np.asarray(noise.resize((side, side), Image.Resampling.BICUBIC), dtype=float)
    return Image.fromarray((total / total.max() * 255).astype(np.uint8))


def small(image: Image.Image) -> np.ndarray:
    return np.asarray(center_square(image, SIDE)).transpose(2, 0, 1)


def encoded(image: Image.Image) -> Image.Image:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=40)
    return Image.open(stream).convert("RGB")


COPIES = {
    "encoded anew": encoded,
    "resized": lambda image: image.resize((50, 50), Image.Resampling.BICUBIC),
    "cropped": lambda image: image.crop((3, 7, 3 + 86, 7 + 86)),
    "cropped by a fifth": lambda image: image.crop((19, 0, 96, 77)),
    "mirrored": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "mirrored and cropped": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).crop((0, 5, 90, 95)),
}


@pytest.mark.parametrize("kind", COPIES)
def test_copies_match_and_others_do_not(kind: str) -> None:
    originals = [picture(seed) for seed in range(6)]
    pixels = np.stack([small(image) for image in (*originals, *map(COPIES[kind], originals))])
    everyone = torch.arange(12).expand(12, -1)
    found = find_duplicates(pixels, everyone, 0.7)
    assert found.pairs.tolist() == [[i, i + 6] for i in range(6)]
    assert found.group.tolist() == [*range(6), *range(6)]
    others = torch.tensor([[i, j] for i in range(6) for j in range(i + 1, 6)])
    assert detail_match(pixels, others).max() < 0.6
    assert found.match.min() > 0.7


def test_one_strong_edge_does_not_make_a_copy() -> None:
    """Images with the same horizon and weaker texture of their own."""
    random, horizon = np.random.default_rng(0), np.where(np.arange(96)[:, None, None] < 48, 40.0, 200.0)
    images = []
    for _ in range(4):
        noise = Image.fromarray(random.integers(0, 256, (20, 20, 3), dtype=np.uint8))
        texture = np.asarray(noise.resize((96, 96), Image.Resampling.BICUBIC), dtype=float) - 128
        images.append(Image.fromarray((horizon + 0.15 * texture).clip(0, 255).astype(np.uint8)))
    pixels = np.stack([small(image) for image in (*images, *map(encoded, images))])
    shares: list[float] = []
    found = find_duplicates(pixels, torch.arange(8).expand(8, -1), 0.7, shares.append)
    assert found.pairs.tolist() == [[i, i + 4] for i in range(4)]
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_the_match_of_a_pair_does_not_depend_on_its_order_or_company() -> None:
    originals = [picture(seed) for seed in range(4)]
    pixels = np.stack([small(x) for x in (*originals, *(COPIES["cropped"](x) for x in originals))])
    pairs = torch.tensor([[0, 4], [1, 5], [2, 6], [3, 7], [0, 1], [2, 3]])
    together = detail_match(pixels, pairs)
    alone = torch.cat([detail_match(pixels, pair[None]) for pair in pairs.flip(1)])
    assert torch.allclose(together, alone, atol=1e-5)
    assert detail_match(pixels, pairs[:0]).shape == (0,)


def test_images_without_details_match_by_their_color() -> None:
    def plain(*color: int) -> np.ndarray:
        return np.broadcast_to(np.array(color, dtype=np.uint8)[:, None, None], (3, SIDE, SIDE))

    soft = small(picture(3).filter(ImageFilter.GaussianBlur(1)))
    pixels = np.stack([plain(200, 30, 30), plain(201, 30, 31), plain(30, 30, 200), soft])
    pairs = torch.tensor([[0, 1], [0, 2], [0, 3], [2, 3]])
    assert detail_match(pixels, pairs).tolist() == [1, 0, 0, 0]


@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=20))
def test_groups_are_connected_components(count: int, drawn: list[tuple[int, int]]) -> None:
    pairs = [(a % count, b % count) for a, b in drawn if a % count != b % count]
    number = groups(torch.tensor(pairs, dtype=torch.long).reshape(-1, 2), count).tolist()
    reach = np.eye(count, dtype=bool)
    for a, b in pairs:
        reach[a, b] = reach[b, a] = True
    for _ in range(count):
        reach = (reach.astype(int) @ reach.astype(int)) > 0
    for i in range(count):
        alone = reach[i].sum() == 1
        assert (number[i] == -1) == alone
        for j in range(count):
            if not alone and reach[j].sum() > 1:
                assert (number[i] == number[j]) == bool(reach[i, j])
    present = sorted({value for value in number if value >= 0})
    assert present == list(range(len(present)))


def test_candidate_pairs_are_distinct_and_ordered() -> None:
    neighbors = torch.tensor([[1, 2], [0, -1], [3, 0], [3, 2]])
    assert candidate_pairs(neighbors).tolist() == [[0, 1], [0, 2], [2, 3]]


def test_clusters_of_separate_directions_are_found_largest_first() -> None:
    random = torch.Generator().manual_seed(0)
    centers = torch.eye(5, 16)
    sizes = [30, 80, 50, 40, 60]
    kind = torch.repeat_interleave(torch.arange(5), torch.tensor(sizes))
    rows = (centers[kind] + 0.1 * torch.randn(len(kind), 16, generator=random)) * torch.rand(len(kind), 1) * 9
    found = find_clusters(rows, 5, seed=0)
    assert found.number == 5
    order = [1, 4, 2, 3, 0]  # by size
    assert found.cluster.tolist() == [order.index(k) for k in kind.tolist()]
    assert found.similarity.min() > 0.7
    assert torch.equal(find_clusters(rows, 5, seed=0).cluster, found.cluster)
    assert find_clusters(rows[:45], 20, seed=0).number == 2  # twenty images a cluster
    assert find_clusters(torch.ones(50, 4), 2, seed=0).number >= 1  # all alike


def test_pca_is_that_of_the_singular_vectors() -> None:
    rows = torch.randn(60, 8, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 9)
    layout, kind = find_layout(rows, torch.empty(60, 0), torch.empty(60, 0), "pca", 0)
    unit = torch.nn.functional.normalize(rows.double(), dim=1)
    u, s, _ = torch.linalg.svd(unit - unit.mean(0), full_matrices=False)
    assert kind == "pca"
    for axis in range(2):
        line = (u * s)[:, axis]
        line = (line - line.min()) / (line.max() - line.min())
        difference = min((layout[:, axis] - line).abs().max(), (layout[:, axis] - (1 - line)).abs().max())
        assert difference < 1e-5
    assert (layout.min(), layout.max()) == (0, 1)
    assert find_layout(rows[:5, :1], torch.empty(5, 0), torch.empty(5, 0), "auto", 0)[0].shape == (5, 2)


def test_umap_is_used_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        """Stands for umap.UMAP, which takes half a minute to compile."""

        def __init__(self, **settings: Any):
            self.settings = settings

        def fit_transform(self, rows: Any) -> Any:
            indices, distances = self.settings["precomputed_knn"]
            assert indices[:, 0].tolist() == list(range(len(rows)))
            assert (distances[:, 0] == 0).all()
            assert indices.shape == distances.shape == (len(rows), self.settings["n_neighbors"])
            return rows[:, :2]

    module = type(sys)("umap")
    module.UMAP = Fake
    monkeypatch.setitem(sys.modules, "umap", module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: module)
    rows = torch.rand(30, 5)
    near, cosine = torch.zeros(30, 20, dtype=torch.long), torch.zeros(30, 20)
    assert find_layout(rows, near, cosine, "auto", 0)[1] == "umap"
    assert find_layout(rows[:10], near[:10], cosine[:10], "auto", 0)[1] == "pca"  # too few
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert find_layout(rows, near, cosine, "auto", 0)[1] == "pca"
    with pytest.raises(UserError, match=r"psm\[umap\]"):
        find_layout(rows, near, cosine, "umap", 0)


@pytest.mark.slow
def test_umap_itself_keeps_separate_clusters_apart() -> None:
    pytest.importorskip("umap")
    random = torch.Generator().manual_seed(0)
    kind = torch.arange(120) % 3
    rows = torch.eye(3, 8)[kind] + 0.05 * torch.randn(120, 8, generator=random)
    unit = torch.nn.functional.normalize(rows, dim=1)
    cosine, near = (unit @ unit.T).fill_diagonal_(-1).topk(20, dim=1)
    layout, _ = find_layout(rows, near, cosine, "umap", 0)
    distance = torch.cdist(layout, layout).fill_diagonal_(9)
    assert (kind[distance.argmin(1)] == kind).all()


def test_votes_equal_a_plain_loop() -> None:
    random = np.random.default_rng(0)
    labels = random.integers(-1, 4, 50)
    neighbors = random.integers(-1, 50, (50, 12))
    found = vote_on_labels(torch.from_numpy(labels), torch.from_numpy(neighbors))
    for row in range(50):
        given = [labels[n] for n in neighbors[row, :10] if n >= 0 and labels[n] >= 0]
        shares = [given.count(label) / max(1, len(given)) for label in range(4)]
        assert float(found.share[row]) == pytest.approx(max(shares))
        assert shares[int(found.suggested[row])] == pytest.approx(max(shares))
        own = shares[labels[row]] if labels[row] >= 0 else 0
        assert float(found.own[row]) == pytest.approx(own)
        expected = labels[row] >= 0 and max(shares) >= 0.6 and int(found.suggested[row]) != labels[row]
        assert bool(found.disagrees[row]) == expected
