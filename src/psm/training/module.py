"""One training step as a Lightning module: views, networks, loss, optimizer, EMA target update, bank update."""

from dataclasses import asdict, replace
from typing import Any, NamedTuple

import lightning
import torch
from torch import Tensor, nn

from psm.config import merge as settings
from psm.config.schema import ResolvedPretrainConfig
from psm.data import ImageStore
from psm.data.loader import Batch, BatchLoader, rank_slice
from psm.data.stream_loader import StreamLoader, decode_workers
from psm.losses.method_loss import method_loss
from psm.methods.spec import MethodSpec
from psm.mining.memory_bank import MemoryBank
from psm.mining.purity import NAMES as PURITY
from psm.mining.purity import purity
from psm.models.outputs import Embeddings
from psm.models.pretrained import EncoderInfo
from psm.models.siamese import SiameseNetworks
from psm.training.distributed import gather, sync_batchnorm
from psm.training.online_probe import LR as PROBE_LR
from psm.training.online_probe import OnlineProbe
from psm.training.optim import adapt_loaded_state, build_optimizer
from psm.training.user_callbacks import plain_states
from psm.utils.devices import without_autocast
from psm.utils.errors import UserError
from psm.utils.schedule import learning_rate, target_momentum
from psm.utils.seeding import derived_seed, generator, seed_networks
from psm.views.transform import AugmentParams, Views


class RunningMean(nn.Module):
    """Mean of each metric over an epoch. Sums stay on the device (no host sync) and are saved in the checkpoint."""

    total: Tensor
    count: Tensor

    def __init__(self, names: tuple[str, ...]):
        super().__init__()
        self.names = names
        self.register_buffer("total", torch.zeros(len(names)))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def update(self, metrics: dict[str, Tensor]) -> None:
        """Add one step's metrics, scalars on the device."""
        self.total += torch.stack([metrics[name].float() for name in self.names])
        self.count += 1

    def _apply(self, function: Any, recurse: bool = True) -> "RunningMean":
        """Move to a device but keep float32: a half-precision sum would lose digits."""
        total = self.total
        super()._apply(function, recurse)
        self.total = total.to(self.total.device)
        return self

    def means(self) -> dict[str, float]:
        """The mean of every metric since the last reset; waits for the device."""
        return dict(zip(self.names, (self.total / self.count).tolist(), strict=True))

    def reset(self) -> None:
        self.total.zero_()
        self.count.zero_()


class StepOutputs(NamedTuple):
    """Detached tensors of the latest step, for the bank update and for the epoch's diagnostics."""

    features: Tensor  # (VB, F), encoder features of V views of this rank's images
    projection: Tensor  # (V, N, D), of the global batch
    keys: Tensor  # (N, D), keys of view 2
    ids: Tensor  # (N,), image ids


def step_loss(
    networks: SiameseNetworks,
    views: Tensor,
    ids: Tensor,
    method: MethodSpec,
    bank: MemoryBank | None,
    draws: torch.Generator | None,
    chunk: int | None = None,
    target_views: Tensor | None = None,
    positive_draws: torch.Generator | None = None,
    progress: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor], StepOutputs]:
    """The loss of the global batch, computed on every rank from the gathered embeddings.

    Args:
        views: this rank's views (V, B, 3, H, W).
        ids: image ids (B,).
        bank: memory bank that samples are mined from, if the method has one.
        draws: generator of the mining draws.
        chunk: images per forward pass with gradient caching; None for one pass.
        target_views: what the target network sees of this rank's images (V, B, 3, H, W); None: ``views``.
        positive_draws: generator of the draws of the positives.
        progress: share of the run's steps that are done.

    Returns:
        The loss (over all directions, at least float32), its metrics and the outputs kept for later.
    """
    embeddings, features = networks(views, chunk, target_views)
    joined = Embeddings(*(gather(x, dim=1) for x in embeddings))
    ids = gather(ids)
    with without_autocast(views.device):
        loss, metrics = method_loss(
            joined,
            method.criterion,
            bank,
            ids,
            draws,
            positive_generator=positive_draws,
            progress=progress,
            **method.loss_options,
        )
    return loss, metrics, StepOutputs(features.detach(), joined.projection.detach(), joined.key[1].detach(), ids)


class PretrainModule(lightning.LightningModule):
    """Owns the networks and the memory bank. Every random draw is a function of the seed and the step."""

    def __init__(
        self,
        networks: SiameseNetworks,
        method: MethodSpec,
        views: Views,
        images: ImageStore,
        config: ResolvedPretrainConfig,
        info: EncoderInfo,
        channels_last: bool = False,
    ):
        super().__init__()
        self.labels: Tensor | None
        self.networks = networks
        self.method = method
        self.config = config
        self.info = info
        bank = method.bank
        self.bank = MemoryBank(bank.size, config.heads.out_dim, bank.index) if method.needs_bank else None
        self.epoch_mean = RunningMean(("loss", *method.metric_names, *(PURITY if config.monitor.purity else ())))
        # Labels serve the purity metric and the online probe only; the networks never see them.
        needs_labels = config.monitor.purity or config.monitor.linear
        self.register_buffer("labels", images.labels if needs_labels else None, persistent=False)
        self.probe = self._build_probe() if config.monitor.linear else None
        self.channels_last = channels_last
        self.views = views
        self.images = images
        self.outputs: StepOutputs  # of the latest step
        self.step_metrics: dict[str, Tensor] = {}  # of the latest step, on the device
        # The bank is equal on all ranks by construction; without this DDP would broadcast it at every step.
        ignored = [] if self.probe is None else [f"probe.{name}" for name, _ in self.probe.named_buffers()]
        self._ddp_params_and_buffers_to_ignore = ["bank.rows", "bank.ids", "labels", *ignored]

    def _build_probe(self) -> OnlineProbe:
        assert self.labels is not None
        return OnlineProbe(self.info.width, int(self.labels.max()) + 1)

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in an epoch; the images left over are other ones each time."""
        return len(self.images) // self.config.batch_size

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.config.epochs * self.steps_per_epoch

    def setup(self, stage: str) -> None:
        device = self.trainer.strategy.root_device.type
        if self.bank is not None and self.bank.index is not None and device != "cpu":
            raise UserError(f"bank.index=faiss searches on a CPU, and this run is on {device}: leave bank.index out.")
        # Lightning converts after restoring a checkpoint, which would round the restored weights; so convert now.
        self.trainer.precision_plugin.convert_module(self)
        self.networks.average_in_float32()
        averages = [name for name, _ in self.named_buffers() if name.startswith("networks.target_average.")]
        self._ddp_params_and_buffers_to_ignore += averages
        if self.trainer.world_size > 1 and self.config.sync_batchnorm:
            sync_batchnorm(self.networks, self.trainer.strategy.root_device)

    def train_dataloader(self) -> BatchLoader | StreamLoader:
        trainer = self.trainer
        if self.images.streamed is not None:
            return StreamLoader(
                self.images.streamed,
                self.config.batch_size,
                self.config.seed,
                draws=lambda step: self._params(step, "cpu").crop_draws(self.views.settings.crop_ratio),
                size=self.views.size,
                step=lambda: trainer.global_step,
                rank=trainer.global_rank,
                world=trainer.world_size,
                device=trainer.strategy.root_device,
                workers=decode_workers(self.config.images.workers, trainer.world_size // trainer.num_nodes),
            )
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
        predictor = self.networks.predictor
        return build_optimizer(
            (p for p in self.networks.parameters() if p.requires_grad),
            self.config.optim,
            scaled=() if predictor is None else predictor.parameters(),
            lr_factor=self.method.predictor.lr_factor,
        )

    def on_train_start(self) -> None:
        adapt_loaded_state(self.trainer.optimizers[0])
        self._set_learning_rate(self.trainer.global_step)

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step (counted from 0)."""
        optim, steps = self.config.optim, self.total_steps
        return learning_rate(step, steps, round(optim.warmup * steps), optim.lr, optim.warmup_lr)

    def _set_learning_rate(self, step: int) -> None:
        """Set the rate of the step that comes next. Callbacks of that step see it, as with a Lightning scheduler."""
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = self.learning_rate(step) * group.get("lr_factor", 1.0)

    def description(self) -> dict[str, Any]:
        """The run's configuration and data, stored in every checkpoint."""
        return {
            "config": settings.to_dict(self.config),
            "encoder_info": asdict(self.info),
            "images": len(self.images),
            "names": self.images.names_checksum,
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.info = replace(self.info, epoch=self.trainer.global_step // self.steps_per_epoch)
        # A callback such as EarlyStopping has asked for the end: the run counts as finished.
        checkpoint["psm"] = self.description() | {"stopped_early": self.trainer.should_stop}
        checkpoint["callbacks"] = plain_states(checkpoint.get("callbacks", {}))

    def make_views(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Views (V, B, 3, H, W) of this rank's images, with parameters drawn for the global batch.

        And what the target network sees of them, where that differs (``target.views=weak``).
        """
        params = self._params(batch.step, self.device)
        views = self.views.apply(batch.images, params, channels_last=self.channels_last).to(self.dtype)
        if self.method.target.views == "same":
            return views, None
        weak = self.views.apply(batch.images, params, channels_last=self.channels_last, weak=True)
        return views, weak.to(self.dtype)

    def _params(self, step: int, device: torch.device | str) -> AugmentParams:
        """The augmentation parameters of this rank's images at a step, drawn for the global batch."""
        size = self.config.batch_size
        rows = rank_slice(size, self.trainer.global_rank, self.trainer.world_size)
        numbers = generator(self.config.seed, "views", step)
        return self.views.sample_params(size, numbers, self.config.views.count, rows=rows, device=device)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        seed, step = self.config.seed, batch.step
        # Dropout and stochastic depth draw from torch's global generator.
        seed_networks(derived_seed(seed, "networks", step, self.trainer.global_rank), self.device)
        draws = generator(seed, "negatives", step, device=self.device)
        views, target_views = self.make_views(batch)
        loss, metrics, self.outputs = step_loss(
            self.networks,
            views,
            batch.ids,
            self.method,
            self.bank,
            draws,
            self.config.grad_cache_chunk,
            target_views,
            positive_draws=generator(seed, "positives", step, device=self.device),
            progress=step / self.total_steps,
        )
        self.step_metrics = {"loss": loss.detach(), **metrics, **self._purity()}
        self.epoch_mean.update(self.step_metrics)
        if self.probe is not None:
            self._update_probe(self.probe, batch)
        return loss

    def _update_probe(self, probe: OnlineProbe, batch: Batch) -> None:
        """Train the online probe on the features of this step's views; the encoder is not touched."""
        assert self.labels is not None
        features = self.outputs.features.float()
        labels = self.labels[batch.ids].repeat(len(features) // len(batch.ids))
        with without_autocast(self.device):
            lr = learning_rate(batch.step, self.total_steps, 0, PROBE_LR, 0.0)
            probe.update(gather(features), gather(labels), lr)

    def _purity(self) -> dict[str, Tensor]:
        """Label agreement of mined rows, if ``monitor.purity`` is set."""
        if not self.config.monitor.purity or self.labels is None or self.bank is None:
            return {}
        return purity(self.bank, self.outputs.keys, self.outputs.ids, self.labels, self.method.bank.allow_self)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Update the weights, then the EMA target, then the bank (both directions of the loss are computed by now).

        Not in a hook of the module: Lightning runs callbacks first, and one that saves a checkpoint after the step
        would miss these updates.
        """
        super().optimizer_step(*args, **kwargs)
        target = self.method.target
        step = self.trainer.global_step  # Lightning counts this step after it
        self.networks.update_target(target_momentum(step, self.total_steps, target.momentum, target.schedule))
        if self.bank is not None:
            self.bank.enqueue(self.outputs.keys, self.outputs.ids)
        self._set_learning_rate(self.trainer.global_step + 1)
