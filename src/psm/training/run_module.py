"""What every training has in common as a Lightning module: networks, batches, schedule, metrics, description."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import lightning
import torch
from torch import Tensor, nn

from psm.config import merge as settings
from psm.config.run_settings import RunSettings
from psm.data import ImageStore
from psm.data.loader import BatchLoader, rank_slice
from psm.data.same_images import image_difference
from psm.data.stream_loader import StreamLoader, decode_workers
from psm.models.pretrained import EncoderInfo
from psm.training.distributed import sync_batchnorm
from psm.training.optim import adapt_loaded_state, build_optimizer
from psm.training.user_callbacks import plain_states
from psm.utils.schedule import learning_rate
from psm.utils.seeding import generator
from psm.views.transform import AugmentParams, Views

HOUR = 3600.0


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


class RunModule(lightning.LightningModule):
    """Owns the networks. Every random draw is a function of the seed and the step.

    A subclass has ``training_step``, which sets ``step_metrics`` and adds them to ``epoch_mean``.
    """

    def __init__(
        self,
        networks: nn.Module,
        config: RunSettings,
        images: ImageStore,
        views: Views,
        info: EncoderInfo,
        metrics: tuple[str, ...],
        channels_last: bool = False,
    ):
        """Assemble a training.

        Args:
            networks: what is trained; its attribute ``encoder`` is the encoder.
            config: the run's settings.
            images: the training images.
            views: makes the inputs of a step from them.
            info: describes the encoder; stored in every checkpoint.
            metrics: names of the step's metrics, the loss among them.
            channels_last: memory layout of the views.
        """
        super().__init__()
        self.networks = networks
        self.config = config
        self.epoch_mean = RunningMean(metrics)
        self.images = images
        self.views = views
        self.info = info
        self.channels_last = channels_last
        self.step_metrics: dict[str, Tensor] = {}  # of the latest step, on the device

    @property
    def encoder(self) -> nn.Module:
        """The encoder among the networks."""
        return self.networks.get_submodule("encoder")

    @property
    def steps_per_epoch(self) -> int:
        """Full batches in an epoch; the images left over are other ones each time."""
        return len(self.images) // self.config.batch_size

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.config.epochs * self.steps_per_epoch

    @property
    def task(self) -> str:
        """What is trained, in a few words for the plan."""
        raise NotImplementedError

    @property
    def view_count(self) -> int:
        """Views that a step makes of each image."""
        return 1

    @property
    def forward_chunk(self) -> int | None:
        """Images whose activations are held at a time; None: those of the batch."""
        return None

    def shorter(self, seconds: float) -> str:
        """Which key makes a run of so many seconds shorter."""
        return f"epochs={max(1, int(self.config.epochs * HOUR / seconds))} would take an hour"

    @property
    def memory_advice(self) -> str:
        """Which keys make a run need less memory."""
        return "a smaller batch_size or images.size"

    def setup(self, stage: str) -> None:
        # Lightning converts after restoring a checkpoint, which would round the restored weights; so convert now.
        self.trainer.precision_plugin.convert_module(self)
        if self.trainer.world_size > 1 and self.config.sync_batchnorm:
            sync_batchnorm(self.networks, self.trainer.strategy.root_device)

    def train_dataloader(self) -> BatchLoader | StreamLoader:
        trainer = self.trainer
        workers = decode_workers(self.config.images.workers, trainer.world_size // trainer.num_nodes)
        if self.images.streamed is not None:
            return StreamLoader(
                self.images.streamed,
                self.config.batch_size,
                self.config.seed,
                draws=lambda step: self.view_params(step, "cpu").crop_draws(self.views.settings.crop_ratio),
                size=self.views.size,
                step=lambda: trainer.global_step,
                rank=trainer.global_rank,
                world=trainer.world_size,
                device=trainer.strategy.root_device,
                workers=workers,
            )
        return BatchLoader(
            self.images,
            self.config.batch_size,
            self.config.seed,
            step=lambda: trainer.global_step,
            rank=trainer.global_rank,
            world=trainer.world_size,
            device=trainer.strategy.root_device,
            workers=workers,
        )

    def view_params(self, step: int, device: torch.device | str) -> AugmentParams:
        """The augmentation parameters of this rank's images at a step, drawn for the global batch."""
        size = self.config.batch_size
        rows = rank_slice(size, self.trainer.global_rank, self.trainer.world_size)
        numbers = generator(self.config.seed, "views", step)
        return self.views.sample_params(size, numbers, self.view_count, rows=rows, device=device)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer((p for p in self.networks.parameters() if p.requires_grad), self.config.optim)

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

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Update the weights, then what follows them.

        Not in a hook of the module: Lightning runs callbacks first, and one that saves a checkpoint after the step
        would miss these updates.
        """
        super().optimizer_step(*args, **kwargs)
        self.after_update()
        self._set_learning_rate(self.trainer.global_step + 1)

    def after_update(self) -> None:
        """What follows an update of the weights and belongs into a checkpoint after it."""

    def description(self) -> dict[str, Any]:
        """The run's configuration and data, stored in every checkpoint."""
        return {
            "config": settings.to_dict(self.config),
            "encoder_info": asdict(self.info),
            "images": len(self.images),
            "names": self.images.names_checksum,
        }

    def data_description(self) -> dict[str, Any]:
        """What tells on another process whether it has the same images."""
        return {"images": len(self.images), "encoder_info": {"mean": list(self.info.mean)}}

    def data_difference(self, described: Mapping[str, Any]) -> str | None:
        """How the images differ from those that a description or a checkpoint's ``psm`` is of, or None.

        As part of a sentence; what the description does not mention is not compared.
        """
        return image_difference(described, len(self.images), self.info.mean, self.images.names_checksum)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.info = replace(self.info, epoch=self.trainer.global_step // self.steps_per_epoch)
        # A callback such as EarlyStopping has asked for the end: the run counts as finished.
        checkpoint["psm"] = self.description() | {"stopped_early": self.trainer.should_stop}
        checkpoint["callbacks"] = plain_states(checkpoint.get("callbacks", {}))
