"""The loss of a batch: over its directions, or what an objective says of its projections."""

from typing import Any

import torch
from torch import Tensor

from psm.losses.contrastive import ContrastiveLoss, LossOutput
from psm.losses.functional import redundancy_loss
from psm.losses.objectives import ProjectionObjective
from psm.mining.batch import MiningBatch
from psm.mining.draws import Draws, as_draws
from psm.mining.memory_bank import MemoryBank
from psm.mining.processes import ONE_PROCESS, Processes
from psm.models.outputs import Embeddings, directions, joined_pairs, mean_keys, view_pairs
from psm.utils.devices import prefers_few_kernels

REDUCTIONS = ("mean", "sum")
COMPILES = torch.__version__ >= "2.13"  # with torch 2.6 the compiler fails on the loss; others were not tried


def method_loss(
    embeddings: Embeddings,
    loss: ContrastiveLoss | ProjectionObjective,
    bank: MemoryBank | None = None,
    ids: Tensor | None = None,
    generator: torch.Generator | Draws | None = None,
    symmetric: bool = True,
    positive_generator: torch.Generator | Draws | None = None,
    progress: float = 1.0,
    reduction: str = "mean",
    redundancy_weight: float = 0.0,
    processes: Processes = ONE_PROCESS,
    mine_by_mean: bool = False,
) -> LossOutput:
    """The loss of a batch.

    Args:
        embeddings: of V views, (V, N, D) each, not normalized.
        loss: of one direction, or of the projections.
        bank: what is mined from; only read.
        ids: (N,) ids of the images.
        generator: source of the draws of PNSM and MoCHi.
        symmetric: all directions between the views; False: from view 1 alone.
        positive_generator: source of the draws of the positives, so that they change no other; None: ``generator``.
        progress: share of the run's steps that are done, for rules that start late.
        reduction: mean of the directions, or the sum of the two between any two views (mean over pairs of views).
        redundancy_weight: of All4One's term beside the loss, over the same directions.
        processes: that have the same embeddings and share the anchors; every one gets the whole loss.
        mine_by_mean: search the bank with the mean of an image's keys, and once, instead of with each view's. The bank
            should hold such means: enqueue ``psm.mean_keys(embeddings.key)``, or ``MethodSpec.bank_keys`` of them.
    """
    pairs = directions(len(embeddings.projection), symmetric)
    if isinstance(loss, ProjectionObjective):
        z = embeddings.projection
        losses = [loss.shared_out(z[a], z[b], processes) for a, b in pairs if a < b]
        return LossOutput(torch.stack(losses).mean(), {})
    common: dict[str, Any] = {
        **{"ids": ids, "bank": bank, "draws": as_draws(generator), "processes": processes},
        "generator": generator if isinstance(generator, torch.Generator) else None,
        **{"positive_generator": positive_generator, "progress": progress, "searches": {}},
        "mining_key": mean_keys(embeddings.key) if mine_by_mean else None,
    }
    if loss.joins_directions(mine_by_mean) and prefers_few_kernels(embeddings.key.device):
        common["ids"] = None if ids is None else ids.repeat(len(pairs))
        batch = MiningBatch(*joined_pairs(embeddings, symmetric), **common, directions=tuple(pairs))
        total, metrics = loss.on_batch(batch)
    else:
        outputs = [
            loss.on_batch(MiningBatch(*pair, **common, directions=(views,)))
            for pair, views in zip(view_pairs(embeddings, symmetric), pairs, strict=True)
        ]
        total = torch.stack([output.loss for output in outputs]).mean()
        metrics = {name: torch.stack([o.metrics[name] for o in outputs]).mean() for name in outputs[0].metrics}
    if reduction == "sum" and symmetric:
        total = 2 * total
        metrics |= {name: 2 * metrics[name] for name in ("chance",) if name in metrics}
    if redundancy_weight:
        term = redundancy_loss([(embeddings.projection[a], embeddings.key[b].detach()) for a, b in pairs], processes)
        total, metrics = total + redundancy_weight * term, metrics | {"redundancy": term.detach()}
    return LossOutput(total, metrics)
