"""Retrieval: rank a gallery by cosine similarity to a query; relevant are the images of the query's class."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import normalize

from psm.utils.devices import resident

MAX_SIMILARITIES = 2**22  # sorted at a time, which bounds memory
GALLERY_BLOCK = 2**16  # images copied to the device at a time, where the gallery does not fit there


@torch.inference_mode()
def average_precisions(
    queries: Tensor,
    query_labels: Tensor,
    gallery: Tensor,
    gallery_labels: Tensor,
    leave_one_out: bool = False,
    device: torch.device | str = "cpu",
    advance: Callable[[int], None] = lambda count: None,
) -> Tensor:
    """Average precision (Q,) of each query with at least one relevant image, over the whole ranking of the gallery.

    AP is the mean, over the relevant images, of the share of relevant ones among all images ranked up to there.

    Args:
        queries: features, (N, F).
        query_labels: their classes, (N,).
        gallery: features of the images that are ranked, (M, F).
        gallery_labels: their classes, (M,).
        leave_one_out: the gallery is the queries themselves, and none finds itself.
        device: where to compute.
        advance: called with the number of queries after each chunk.
    """
    device = torch.device(device)
    rows, labels = resident(normalize(gallery, dim=1), device), gallery_labels.to(device)
    step = max(1, MAX_SIMILARITIES // len(rows))
    ranks = torch.arange(1, len(rows) + 1, device=device)
    found = []
    for first in range(0, len(queries), step):
        part = slice(first, first + step)
        unit = normalize(queries[part].to(device), dim=1)
        similarity = torch.cat([unit @ block.to(device).T for block in rows.split(GALLERY_BLOCK)], 1)
        if leave_one_out:  # itself comes last, and is not relevant
            itself = torch.arange(first, first + len(similarity), device=device)[:, None]
            similarity.scatter_(1, itself, -torch.inf)
        order = similarity.argsort(dim=1, descending=True)
        relevant = labels[order] == query_labels[part].to(device)[:, None]
        if leave_one_out:
            relevant[:, -1] = False
        precision = relevant.cumsum(1) / ranks
        total = relevant.sum(1)
        found.append(((precision * relevant).sum(1) / total)[total > 0])
        advance(len(similarity))
    return torch.cat(found).cpu()
