"""Features of many images, shared out over the processes of a run."""

from torch import Tensor, nn

from psm.data import ImageStore
from psm.evaluation.features import extract
from psm.training.distributed import broadcast_buffers, rank_part
from psm.views.transform import Views


def own_features(encoder: nn.Module, images: ImageStore, views: Views, indices: Tensor) -> Tensor:
    """Features (n, F) of this process's part of some images, on the encoder's device; `gather_rows` joins the parts.

    Called on every rank. Batch norm has the statistics of rank 0 on all of them.
    """
    broadcast_buffers(encoder)
    own = indices[rank_part(len(indices))]
    rows = own if len(own) else indices[:1]  # fewer images than processes: one tells the width
    return extract(encoder, images, views, rows, device=next(encoder.parameters()).device)[: len(own)]
