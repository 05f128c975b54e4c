"""Purity of mined positives (figure 1): how often they have the query's label. Labels serve this measure alone."""

import torch
from torch import Tensor

from psm.mining.memory_bank import MemoryBank
from psm.mining.processes import ONE_PROCESS, Processes

MINED = 5  # figure 1 looks at the nearest and at the five nearest
SERVED = "purity_served"  # the share of queries that the bank can serve; divides the others, then falls away
NAMES = ("purity_top1", "purity_top5", "hit_top5", SERVED)


@torch.no_grad()
def purity(
    bank: MemoryBank,
    keys: Tensor,
    ids: Tensor,
    labels: Tensor,
    allow_self: bool = False,
    processes: Processes = ONE_PROCESS,
) -> dict[str, Tensor]:
    """Mine the five nearest rows for the keys (N, D) of the images ``ids`` (N,), before these keys are enqueued.

    ``labels`` are those of all images, by id; ``allow_self`` lets a query meet its own image; ``processes`` share the
    search. Gives scalars on the device, means over all queries; ``finalize`` divides them by the share of queries that
    the bank could serve.
    """
    mined = bank.search(keys, MINED, None if allow_self else ids, processes)
    same = (labels[mined.ids.clamp(min=0)] == labels[ids][:, None]) & mined.found[:, None]
    share = same.float()
    return {
        "purity_top1": share[:, 0].mean(),
        "purity_top5": share.mean(),
        "hit_top5": same.any(1).float().mean(),
        SERVED: mined.found.float().mean(),
    }


def finalize(means: dict[str, float]) -> dict[str, float]:
    """An epoch's means with each purity as a share of the queries that were served; without any, it is not told."""
    if SERVED not in means:
        return means
    served = means[SERVED]
    rest = {name: value for name, value in means.items() if name not in NAMES}
    return rest | ({name: means[name] / served for name in NAMES if name != SERVED} if served else {})
