"""Near-duplicates: neighbors by the encoder whose details agree, whatever the flip and a crop of up to a fifth.

An encoder finds copies among the nearest neighbors of an image, but images that merely resemble it have similarities as
high. So each pair of neighbors is compared pixel by pixel at a small size: the correlation of what a blur removes, the
largest over mirror images and crops of either. Copies that were encoded anew, resized, cropped or flipped keep their
details in place; other images do not share them. Details are divided by their local strength: else one strong edge, an
object before a plain ground, would decide alone.
"""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from psm.ops import resize_matrix

SIDE = 24  # pixels at which images are compared
BLUR = 2.0  # standard deviation in these pixels of what does not count as detail
SCALES = (1.0, 0.95, 0.9, 0.85, 0.8)  # of the side that a crop keeps
STEP = 0.05  # between the positions of a crop
WEAK = 5 / 255  # strength of details that count half: weaker ones are the noise of compression
FLAT = 1.5 / 255  # root mean square of the details of an image that has none
FLAT_DIFFERENCE = 6 / 255  # mean difference of two such images that are the same
CHUNK = 32  # images whose crops are held at a time


class Duplicates(NamedTuple):
    """Pairs of images that are copies of one another, and the groups that they form."""

    pairs: Tensor  # (P, 2) rows, the smaller one first
    match: Tensor  # (P,) correlation of the details
    group: Tensor  # (N,) number of an image's group, -1 for images without a copy


def find_duplicates(
    pixels: np.ndarray, neighbors: Tensor, least: float, report: Callable[[float], None] = lambda share: None
) -> Duplicates:
    """Near-duplicates among the neighbors of each image.

    Args:
        pixels: uint8 (N, 3, SIDE, SIDE), in memory or memory-mapped.
        neighbors: (N, k) rows of similar images, -1 for none.
        least: correlation of the details from which on two images are copies.
        report: is told now and then which share of the work is done.
    """
    pairs = candidate_pairs(neighbors)
    match = detail_match(pixels, pairs, report)
    found = match >= least
    return Duplicates(pairs[found], match[found], groups(pairs[found], len(pixels)))


def candidate_pairs(neighbors: Tensor) -> Tensor:
    """Distinct pairs (P, 2) of an image and a neighbor, the smaller row first."""
    rows = torch.arange(len(neighbors))[:, None].expand_as(neighbors)[neighbors >= 0]
    others = neighbors[neighbors >= 0]
    low, high = torch.minimum(rows, others), torch.maximum(rows, others)
    pair = (low * len(neighbors) + high)[low != high].unique()  # a number each: sorted at once
    return torch.stack([pair // len(neighbors), pair % len(neighbors)], 1)


def detail_match(pixels: np.ndarray, pairs: Tensor, report: Callable[[float], None] = lambda share: None) -> Tensor:
    """Correlation (P,) of the details of two images: the largest over mirror images and crops of either.

    Args:
        pixels: uint8 (N, 3, SIDE, SIDE).
        pairs: (P, 2) rows.
        report: is told now and then which share of the work is done.
    """
    match = torch.full((len(pairs),), -1.0)
    for one, other in ((0, 1), (1, 0)):
        order = pairs[:, one].argsort(stable=True)
        for part in _by_image(pairs[order, one]):
            rows, counts = pairs[order[part], one].unique_consecutive(return_counts=True)
            crops = _crops(_read(pixels, rows))
            partners, partner_of = pairs[order[part], other].unique(return_inverse=True)
            images = _read(pixels, partners)
            both = _unit(_even(_details(torch.stack([images, images.flip(3)]))))  # (2, m, 3 * SIDE^2)
            lengths = counts.tolist()
            for cropped, places, near in zip(crops, order[part].split(lengths), partner_of.split(lengths), strict=True):
                best = (both[:, near] @ cropped.T).amax((0, 2))
                match[places] = torch.maximum(match[places], best)
            report((one + part.stop / len(pairs)) / 2)
    return _flat_match(pixels, pairs, match)


def groups(pairs: Tensor, count: int) -> Tensor:
    """Connected components (count,) of a graph, numbered by their first row; -1 for rows without an edge."""
    parent = list(range(count))

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = parent[row]
        return row

    for one, other in pairs.tolist():
        low, high = sorted((root(one), root(other)))
        parent[high] = low
    number = torch.full((count,), -1)
    members = pairs.flatten().unique()
    roots = torch.tensor([root(row) for row in members.tolist()], dtype=torch.long)
    number[members] = roots.unique(return_inverse=True)[1]
    return number


def _read(pixels: np.ndarray, rows: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(pixels[rows.numpy()])).float().div_(255)


def _by_image(rows: Tensor) -> Iterator[slice]:
    """Slices of sorted rows that hold all pairs of at most CHUNK images."""
    if not len(rows):
        return
    _, counts = rows.unique_consecutive(return_counts=True)
    ends = [0, *counts.cumsum(0)[CHUNK - 1 :: CHUNK].tolist(), len(rows)]
    for start, end in pairwise(ends):
        if end > start:
            yield slice(start, end)


def _even(details: Tensor) -> Tensor:
    """Details (..., 3, SIDE, SIDE) divided in place by their local strength."""
    strength = _blur() @ details.square().mean(-3, keepdim=True) @ _blur().T
    return details.div_(strength.sqrt_().add_(WEAK))


def _unit(images: Tensor) -> Tensor:
    """Images (..., 3, SIDE, SIDE) as vectors of mean 0 and length 1, in place."""
    vectors = images.flatten(-3)
    vectors -= vectors.mean(-1, keepdim=True)
    return vectors.div_(vectors.norm(dim=-1, keepdim=True).clamp_(min=1e-6))


def _crops(images: Tensor) -> Tensor:
    """The details of every crop of the images (n, 3, SIDE, SIDE), resized back, as unit vectors (n, C, 3 * SIDE^2)."""
    crops = []
    for scale in SCALES:
        sharp, blurred = _crop_matrices(scale)
        details = sharp @ images @ sharp.T - blurred @ images @ blurred.T  # the resizing and the blur are separable
        tiles = details.unflatten(3, (-1, SIDE)).unflatten(2, (-1, SIDE))  # (n, 3, top, SIDE, left, SIDE)
        crops.append(tiles.permute(0, 2, 4, 1, 3, 5).flatten(1, 2))
    return _unit(_even(torch.cat(crops, 1)))


@cache
def _crop_matrices(scale: float) -> tuple[Tensor, Tensor]:
    """Matrices (positions * SIDE, SIDE) that crop and resize along one axis, and the same with a blur after it."""
    starts = torch.arange(0, 1 - scale + 1e-6, STEP) * SIDE
    sharp = resize_matrix(starts, torch.full_like(starts, scale * SIDE), SIDE, SIDE)
    return sharp.flatten(0, 1), (_blur() @ sharp).flatten(0, 1)


@cache
def _blur() -> Tensor:
    place = torch.arange(SIDE, dtype=torch.float32)
    kernel = torch.exp(-0.5 * ((place[:, None] - place) / BLUR) ** 2)
    return kernel / kernel.sum(1, keepdim=True)


def _details(images: Tensor) -> Tensor:
    """What a blur removes from images (..., 3, SIDE, SIDE)."""
    return images - _blur() @ images @ _blur().T


def _flat_match(pixels: np.ndarray, pairs: Tensor, match: Tensor) -> Tensor:
    """The match with 1 for two images without details that have the same colors, 0 for a pair with one such image."""
    if not len(pairs):
        return match
    rows, place = pairs.unique(return_inverse=True)
    flat = torch.cat([_is_flat(_read(pixels, some)) for some in rows.split(4096)])[place]
    for index in flat.any(1).nonzero()[:, 0].tolist():
        one, other = _read(pixels, pairs[index])
        same = bool(flat[index].all()) and float((one - other).abs().mean()) <= FLAT_DIFFERENCE
        match[index] = 1.0 if same else 0.0
    return match


def _is_flat(images: Tensor) -> Tensor:
    return _details(images).square().mean((1, 2, 3)).sqrt() < FLAT
