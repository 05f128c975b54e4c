"""One rank of several, with or without the others: its step in parts, and the collectives that it takes part in.

Within `simulated(world)` this process computes what one rank of so many computes, on tensors of the shapes that it
would have, and every collective returns at once with values of the right shape. The same step under a real process
group is what the simulation is compared with.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from psm.config.schema import OptimConfig, ViewsConfig
from psm.data.loader import rank_slice
from psm.methods import get_method
from psm.mining.memory_bank import MemoryBank
from psm.models.factory import create_encoder
from psm.models.heads import prediction_head, projection_head
from psm.models.siamese import SiameseNetworks
from psm.training import distributed
from psm.training.module import step_loss
from psm.training.optim import build_optimizer
from psm.views.transform import Views

WIDTH = 128
# Who calls a collective: what it is for.
PURPOSES = {
    "SyncBatchNormCPU.forward": "batch norm",
    "_Sum.forward": "batch norm",
    "_Gather.forward": "gather",
    "_Gather.backward": "gather, backward",
    "_SharedSum.forward": "loss",
    "gather_rows": "loss",
}


@dataclass(frozen=True)
class Shape:
    """What a step is of."""

    batch: int
    bank: int
    encoder: str = "tiny"
    size: int = 32
    sharded: bool = False


@dataclass
class Traffic:
    """Collectives by purpose: how many calls, and the bytes that this rank gives to them."""

    calls: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    def add(self, tensor: Tensor) -> None:
        purpose = PURPOSES[sys._getframe(2).f_code.co_qualname]
        self.calls[purpose] = self.calls.get(purpose, 0) + 1
        self.bytes[purpose] = self.bytes.get(purpose, 0) + tensor.numel() * tensor.element_size()

    def rows(self) -> dict[str, list[int]]:
        return {purpose: [self.calls[purpose], self.bytes[purpose]] for purpose in sorted(self.calls)}


@contextmanager
def recorded(traffic: Traffic) -> Iterator[None]:
    """Count the collectives of psm; those of DDP follow from the number of weights."""
    reduce, gather = dist.all_reduce, dist.all_gather

    def all_reduce(tensor: Tensor, *options: Any) -> None:
        traffic.add(tensor)
        reduce(tensor, *options)

    def all_gather(parts: list[Tensor], local: Tensor) -> None:
        traffic.add(local)
        gather(parts, local)

    with mock.patch.multiple(dist, all_reduce=all_reduce, all_gather=all_gather):
        yield


@contextmanager
def simulated(world: int) -> Iterator[None]:
    """This process is rank 0 of so many, and the others are not there."""

    def all_reduce(tensor: Tensor, *options: Any) -> None:
        pass

    def all_gather(parts: list[Tensor], local: Tensor) -> None:
        for part in parts:
            part.copy_(local)

    with (
        mock.patch.multiple(dist, all_reduce=all_reduce, all_gather=all_gather, get_rank=lambda: 0),
        mock.patch.object(distributed, "world", return_value=world),
    ):
        yield


class Rank(nn.Module):
    """What one rank does in a step of PSM, as the training module does it, with a clock between the parts."""

    def __init__(self, shape: Shape, rank: int, world: int):
        super().__init__()
        torch.manual_seed(0)
        self.shape, self.spec = shape, get_method("psm")
        encoder = create_encoder(shape.encoder, image_size=shape.size)
        self.networks = SiameseNetworks(encoder, projection_head(encoder.width), prediction_head())
        if world > 1:
            distributed.sync_batchnorm(self.networks, torch.device("cpu"))
        self.bank = MemoryBank(shape.bank, WIDTH)
        if shape.sharded:
            self.bank.share_out(distributed.processes())
        ids = torch.arange(shape.bank) + shape.batch
        self.bank.enqueue(torch.randn(shape.bank, WIDTH), ids)
        self._ddp_params_and_buffers_to_ignore = [f"bank.{n}" for n in ("rows", "ids", "pointer", "fill")]
        self.views = Views(ViewsConfig(), shape.size, (0.5,) * 3, (0.2,) * 3)
        rows = rank_slice(shape.batch, rank, world)
        self.rows, self.ids = rows, torch.arange(shape.batch)[rows]
        own = len(self.ids)
        self.images = torch.randint(0, 256, (own, 3, shape.size, shape.size), dtype=torch.uint8)
        learned = [p for p in self.networks.parameters() if p.requires_grad]
        self.optimizer = build_optimizer(learned, OptimConfig(lr=0.03, weight_decay=5e-4))
        self.seconds: dict[str, float] = {}

    def clocked(self, part: str, work: Callable[[], Any]) -> Any:
        """The result of some work, whose CPU time (of all threads) is added to a part's."""
        start = time.process_time()
        result = work()
        self.seconds[part] = self.seconds.get(part, 0.0) + time.process_time() - start
        return result

    def forward(self, views: Tensor) -> Any:
        """The loss, as Lightning's DDP wraps it."""
        numbers = torch.Generator().manual_seed(1)
        networks = self.networks.forward

        def clocked_networks(*given: Any) -> Any:
            return self.clocked("networks, forward", lambda: networks(*given))

        before = self.seconds.get("networks, forward", 0.0)
        start = time.process_time()
        with mock.patch.object(self.networks, "forward", clocked_networks):
            result = step_loss(self.networks, views, self.ids, self.spec, self.bank, numbers)
        inside = self.seconds["networks, forward"] - before
        self.seconds["loss"] = self.seconds.get("loss", 0.0) + time.process_time() - start - inside
        return result

    @property
    def _inside(self) -> float:
        """CPU seconds of `forward` so far."""
        return self.seconds.get("networks, forward", 0.0) + self.seconds.get("loss", 0.0)

    def make_views(self) -> Tensor:
        params = self.views.sample_params(self.shape.batch, torch.Generator().manual_seed(0), rows=self.rows)
        return self.views.apply(self.images, params)

    def update(self, outputs: Any) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.networks.update_target(0.99)
        self.bank.enqueue(outputs.keys, outputs.ids)

    def step(self, wrapped: nn.Module | None = None) -> None:
        """One step; ``wrapped`` is DDP around this rank."""
        views = self.clocked("views", self.make_views)
        before, start = self._inside, time.process_time()
        loss, _, outputs = (wrapped or self)(views)
        around = time.process_time() - start - (self._inside - before)
        self.seconds["DDP, forward"] = self.seconds.get("DDP, forward", 0.0) + around
        self.clocked("backward", loss.backward)
        self.clocked("update", lambda: self.update(outputs))
