"""The loss of a batch: the mean over its directions, or what an objective says of its projections."""

from typing import Any

import torch
from torch import Tensor

from psm.losses.contrastive import ContrastiveLoss, LossOutput
from psm.losses.objectives import ProjectionObjective
from psm.mining.batch import MiningBatch
from psm.mining.memory_bank import MemoryBank
from psm.models.outputs import Embeddings, view_pairs


def method_loss(
    embeddings: Embeddings,
    loss: ContrastiveLoss | ProjectionObjective,
    bank: MemoryBank | None = None,
    ids: Tensor | None = None,
    generator: torch.Generator | None = None,
    symmetric: bool = True,
    positive_generator: torch.Generator | None = None,
    progress: float = 1.0,
) -> LossOutput:
    """The loss of a batch.

    Args:
        embeddings: of two views, (2, N, D) each, not normalized.
        loss: of one direction, or of the projections.
        bank: what is mined from; only read.
        ids: (N,) ids of the images.
        generator: source of the draws of PNSM and MoCHi.
        symmetric: mean of both directions; False: view 1 to view 2 alone.
        positive_generator: source of the draws of the positives, so that they change no other; None: ``generator``.
        progress: share of the run's steps that are done, for rules that start late.
    """
    if isinstance(loss, ProjectionObjective):
        return LossOutput(loss.on_projections(*embeddings.projection), {})
    common: dict[str, Any] = {
        **{"ids": ids, "bank": bank, "generator": generator},
        **{"positive_generator": positive_generator, "progress": progress},
    }
    outputs = [loss.on_batch(MiningBatch(*pair, **common)) for pair in view_pairs(embeddings, symmetric)]
    metrics = {name: torch.stack([o.metrics[name] for o in outputs]).mean() for name in outputs[0].metrics}
    return LossOutput(torch.stack([output.loss for output in outputs]).mean(), metrics)
