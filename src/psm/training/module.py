"""One step of pretraining as a Lightning module: views, networks, loss, then the target's and the bank's update."""

from dataclasses import asdict, replace
from typing import Any, NamedTuple

import lightning
import torch
from torch import Tensor, nn

from psm.config import merge as settings
from psm.config.schema import PretrainConfig
from psm.data import ImageStore
from psm.data.loader import Batch, BatchLoader, rank_slice
from psm.losses.method_loss import method_loss
from psm.methods.spec import MethodSpec
from psm.mining.memory_bank import MemoryBank
from psm.mining.purity import NAMES as PURITY
from psm.mining.purity import purity
from psm.models.pretrained import EncoderInfo
from psm.models.siamese import Embeddings, SiameseNetworks
from psm.training.distributed import gather, sync_batchnorm
from psm.training.optim import settle, sgd
from psm.utils.devices import without_autocast
from psm.utils.errors import UserError
from psm.utils.schedule import learning_rate
from psm.utils.seeding import derived_seed, generator, seed_networks
from psm.views.transform import Views


class RunningMean(nn.Module):
    """Means over an epoch, summed on the device: nothing in a step waits for it. Part of the checkpoint."""

    total: Tensor
    count: Tensor

    def __init__(self, names: tuple[str, ...]):
        super().__init__()
        self.names = names
        self.register_buffer("total", torch.zeros(len(names)))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def update(self, facts: dict[str, Tensor]) -> None:
        self.total += torch.stack([facts[name].float() for name in self.names])
        self.count += 1

    def _apply(self, function: Any, recurse: bool = True) -> "RunningMean":
        """Sums stay in single precision in a network of half precision."""
        total = self.total
        super()._apply(function, recurse)
        self.total = total.to(self.total.device)
        return self

    def means(self) -> dict[str, float]:
        return dict(zip(self.names, (self.total / self.count).tolist(), strict=True))

    def reset(self) -> None:
        self.total.zero_()
        self.count.zero_()


class StepOutputs(NamedTuple):
    """What the latest step leaves behind for the bank and for diagnostics; no gradient."""

    features: Tensor  # (2B, F), of this process's images
    projection: Tensor  # (2, N, D)
    keys: Tensor  # (N, D), of view 2
    ids: Tensor  # (N,)


def step_loss(
    networks: SiameseNetworks,
    views: Tensor,
    ids: Tensor,
    method: MethodSpec,
    bank: MemoryBank | None,
    draws: torch.Generator | None,
    chunk: int | None = None,
) -> tuple[Tensor, dict[str, Tensor], StepOutputs]:
    """The loss of the batch that all processes hold together, the mean over directions, from this one's views.

    In at least single precision whatever the networks compute in. With ``chunk`` so many images at a time go through
    the networks.
    """
    embeddings, features = networks(views, chunk)
    joined = Embeddings(*(gather(x, dim=1) for x in embeddings))
    ids = gather(ids)
    with without_autocast(views.device):
        loss, facts = method_loss(joined, method.criterion, bank, ids, draws, method.loss.symmetric)
    return loss, facts, StepOutputs(features.detach(), joined.projection.detach(), joined.key[1].detach(), ids)


class PretrainModule(lightning.LightningModule):
    """Owns the networks and the bank. Every random draw depends on the seed and the step alone."""

    def __init__(
        self,
        networks: SiameseNetworks,
        method: MethodSpec,
        views: Views,
        images: ImageStore,
        config: PretrainConfig,
        info: EncoderInfo,
        channels_last: bool = False,
    ):
        super().__init__()
        self.networks = networks
        self.method = method
        self.config = config
        bank = method.bank
        self.bank = MemoryBank(bank.size, config.heads.out_dim, bank.index) if method.needs_bank else None
        self.meter = RunningMean(("loss", *method.metric_names, *(PURITY if config.monitor.purity else ())))
        # Known only where purity is measured: nothing that learns ever sees a label.
        self.register_buffer("labels", images.labels if config.monitor.purity else None, persistent=False)
        self.info = info
        self.channels_last = channels_last
        self.views = views
        self.images = images
        self.latest: StepOutputs | None = None
        # The bank is the same on all ranks by construction; DDP would broadcast it anew at every step.
        self._ddp_params_and_buffers_to_ignore = ["bank.rows", "bank.ids", "labels"]

    @property
    def steps_per_epoch(self) -> int:
        return len(self.images) // self.config.batch_size

    def setup(self, stage: str) -> None:
        device = self.trainer.strategy.root_device.type
        if self.bank is not None and self.bank.index is not None and device != "cpu":
            raise UserError(f"bank.index=faiss searches on a CPU, and this run is on {device}: leave bank.index out.")
        # Lightning converts after it has restored a checkpoint, which would round what a resumed run begins with.
        self.trainer.precision_plugin.convert_module(self)
        if self.trainer.world_size > 1 and self.config.sync_batchnorm:
            sync_batchnorm(self.networks, self.trainer.strategy.root_device)

    def train_dataloader(self) -> BatchLoader:
        trainer = self.trainer
        return BatchLoader(
            self.images,
            self.config.batch_size,
            self.config.seed,
            step=lambda: trainer.global_step,
            rank=trainer.global_rank,
            world=trainer.world_size,
            device=trainer.strategy.root_device,
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd((p for p in self.networks.parameters() if p.requires_grad), self.config.optim)

    def on_train_start(self) -> None:
        settle(self.trainer.optimizers[0])

    def learning_rate(self, step: int) -> float:
        optim, steps = self.config.optim, self.config.epochs * self.steps_per_epoch
        return learning_rate(step, steps, round(optim.warmup * steps), optim.lr, optim.warmup_lr)

    def description(self) -> dict[str, Any]:
        """What a checkpoint says of the run beside its weights."""
        return {
            "config": settings.to_dict(self.config),
            "encoder_info": asdict(self.info),
            "images": len(self.images),
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.info = replace(self.info, epoch=self.trainer.global_step // self.steps_per_epoch)
        checkpoint["psm"] = self.description()

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        for group in self.optimizers().optimizer.param_groups:
            group["lr"] = self.learning_rate(batch.step)

    def two_views(self, batch: Batch) -> Tensor:
        """Views (2, B, 3, H, W). The draws are made for the global batch, so sharing it out changes no view."""
        size = self.config.batch_size
        rows = rank_slice(size, self.trainer.global_rank, self.trainer.world_size)
        draws = self.views.sample_params(
            size, generator(self.config.seed, "views", batch.step), rows=rows, device=self.device
        )
        views = self.views.apply(batch.images, draws, channels_last=self.channels_last)
        return views.to(self.dtype)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        # Networks with draws of their own (dropout, stochastic depth) take them from torch's global generator.
        seed_networks(derived_seed(self.config.seed, "networks", batch.step, self.trainer.global_rank), self.device)
        draws = generator(self.config.seed, "negatives", batch.step, device=self.device)
        loss, facts, self.latest = step_loss(
            self.networks,
            self.two_views(batch),
            batch.ids,
            self.method,
            self.bank,
            draws,
            self.config.grad_cache_chunk,
        )
        if self.labels is not None:
            facts = facts | purity(
                self.bank, self.latest.keys, self.latest.ids, self.labels, self.method.bank.allow_self
            )
        self.meter.update({"loss": loss.detach(), **facts})
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Once both directions are computed and the weights moved: the target follows, the view-2 keys are enqueued.

        Lightning calls callbacks before the module's own hooks, so that in a hook of the module these updates would
        be missing from a checkpoint that a callback writes after the step.
        """
        super().optimizer_step(*args, **kwargs)
        self.networks.update_target(self.method.target.momentum)
        if self.bank is not None:
            self.bank.enqueue(self.latest.keys, self.latest.ids)
