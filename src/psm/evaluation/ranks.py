"""Ranks of features without labels: RankMe (Garrido et al. 2023) and LiDAR (Thilak et al. 2023).

Both are the exponential of the entropy of a spectrum. Their intervals are for the sampling of the images, by the
influence of each image on the spectrum (infinitesimal jackknife).
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from psm.evaluation.intervals import CONFIDENCE, Interval
from psm.utils.statistics import normal_quantile

EPSILON = 1e-7  # added to each share of the spectrum, as in both papers
CHUNK = 4096  # images at a time


class Rank(NamedTuple):
    """An effective rank with its 95 % interval."""

    value: float
    interval: Interval


@torch.inference_mode()
def rankme(features: Tensor, confidence: float = CONFIDENCE) -> Rank:
    """exp(-sum p log p) with p = sigma / sum(sigma) + 1e-7 over the singular values sigma of the features (N, F).

    The features are taken as they are, neither centered nor normalized. The singular values come from the eigenvalues
    of the (F, F) matrix of second moments in float64, so that memory does not grow with N.
    """
    count, width = features.shape
    moments = torch.zeros(width, width, dtype=torch.float64)
    for rows in features.split(CHUNK):
        rows = rows.double().cpu()
        moments.addmm_(rows.T, rows, alpha=1 / count)
    eigenvalues, vectors = torch.linalg.eigh(moments)
    sigma = eigenvalues.clamp(min=0).sqrt()
    usable = sigma > 1e-9 * sigma.max()  # the others are rounding, and weigh nothing
    value, slopes = _effective_rank(sigma)
    # An image changes an eigenvalue by (v . x)^2 - lambda, and its root by that over 2 sigma.
    slopes = torch.where(usable, slopes / (2 * sigma.clamp(min=1e-300)), 0.0)
    influence = torch.cat([(rows.double().cpu() @ vectors).square() @ slopes for rows in features.split(CHUNK)])
    return _with_interval(value, influence - (eigenvalues.clamp(min=0) * slopes).sum(), width, confidence)


@torch.inference_mode()
def lidar(views: Tensor, delta: float = 1e-4, confidence: float = CONFIDENCE) -> Rank:
    """The effective rank of the LDA matrix whose classes are images and whose samples are their views.

    S_w^(-1/2) S_b S_w^(-1/2), with S_b the covariance of the images' means, and S_w the mean covariance of an image's
    views plus ``delta`` times the identity; then exp(-sum p log p) with p = lambda / sum(lambda) + 1e-7.

    Args:
        views: features (n, q, F) of q views of each of n images, n and q at least 2.
        delta: keeps S_w invertible.
        confidence: of the interval.
    """
    images, count, width = views.shape
    means = torch.cat([part.mean(1) for part in _parts(views)])
    center = means.mean(0)
    between = (means - center).T @ (means - center) / (images - 1)
    within = delta * torch.eye(width, dtype=torch.float64)
    for deviations in _deviations(views, means):
        rows = deviations.flatten(0, 1)
        within.addmm_(rows.T, rows, alpha=1 / (images * (count - 1)))
    scale, directions = torch.linalg.eigh(within)
    whitening = directions / scale.clamp(min=1e-300).sqrt()
    eigenvalues, vectors = torch.linalg.eigh(whitening.T @ between @ whitening)
    eigenvalues, vectors = eigenvalues.clamp(min=0), whitening @ vectors  # generalized: v' S_w v = 1
    value, slopes = _effective_rank(eigenvalues)
    # An image changes an eigenvalue by (v . (mean - center))^2 - lambda v' W v, with W the covariance of its views.
    influence = ((means - center) @ vectors).square() * (images / (images - 1)) @ slopes
    weights = slopes * eigenvalues
    spread = torch.cat([(part @ vectors).square().sum(1) @ weights for part in _deviations(views, means)])
    influence -= spread / (count - 1) + delta * (vectors.square().sum(0) * weights).sum()
    return _with_interval(value, influence, width, confidence)


def _parts(views: Tensor) -> Iterator[Tensor]:
    """The views of some images at a time, (m, q, F), float64 on the CPU: not every device has it."""
    for part in views.split(max(1, CHUNK // views.shape[1])):
        yield part.double().cpu()


def _deviations(views: Tensor, means: Tensor) -> Iterator[Tensor]:
    """The views of some images at a time minus the means (n, F) of their images, (m, q, F)."""
    first = 0
    for part in _parts(views):
        yield part - means[first : first + len(part), None]
        first += len(part)


def _effective_rank(spectrum: Tensor) -> tuple[float, Tensor]:
    """exp(-sum p log p) of a spectrum (F,), and its derivative with respect to each of the values."""
    total = spectrum.sum().clamp(min=1e-300)
    shares = spectrum / total + EPSILON
    value = torch.exp(-(shares * shares.log()).sum())
    pull = 1 + shares.log()
    return value.item(), value * ((pull * spectrum).sum() / total - pull) / total


def _with_interval(value: float, influence: Tensor, width: int, confidence: float) -> Rank:
    """The rank with the interval that follows from the influence of each image, (N,)."""
    half = normal_quantile(confidence) * math.sqrt(influence.square().mean().item() / len(influence))
    return Rank(value, Interval(max(1.0, value - half), min(float(width), value + half)))
