"""Labels that disagree with those of an image's neighbors."""

from typing import NamedTuple

import torch
from torch import Tensor

VOTES = 10  # neighbors that vote
LEAST = 0.6  # share of the votes for another label from which on a label is listed
CHUNK = 4096


class LabelVotes(NamedTuple):
    """What the labeled neighbors of each of N images say."""

    suggested: Tensor  # (N,) the label of most of them, -1 where there is none
    share: Tensor  # (N,) share of the votes for it
    own: Tensor  # (N,) share of the votes for the image's own label
    disagrees: Tensor  # (N,) True where another label has at least LEAST of the votes


def vote_on_labels(labels: Tensor, neighbors: Tensor) -> LabelVotes:
    """Let the nearest labeled neighbors vote.

    Args:
        labels: (N,), -1 where unknown.
        neighbors: (N, k) rows, nearest first, -1 for none.
    """
    count = int(labels.max()) + 1
    parts = []
    for some in torch.arange(len(labels)).split(CHUNK):
        near = neighbors[some, :VOTES]
        given = torch.where(near >= 0, labels[near.clamp(min=0)], -1)
        votes = torch.zeros(len(some), count + 1).scatter_add_(1, given + 1, torch.ones(given.shape))[:, 1:]
        votes /= votes.sum(1, keepdim=True).clamp(min=1)
        share, suggested = votes.max(1)
        own = votes.gather(1, labels[some].clamp(min=0)[:, None])[:, 0] * (labels[some] >= 0)
        parts.append((suggested.masked_fill(share == 0, -1), share, own))
    suggested, share, own = (torch.cat(column) for column in zip(*parts, strict=True))
    disagrees = (labels >= 0) & (suggested != labels) & (share >= LEAST)
    return LabelVotes(suggested, share, own, disagrees)
