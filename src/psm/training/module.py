"""One training step as a Lightning module: views, networks, loss, optimizer, EMA target update, bank update."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from psm.config.presets import LAPTOP
from psm.config.schema import ResolvedPretrainConfig
from psm.data import ImageStore
from psm.data.loader import Batch
from psm.losses.contrastive import LossOutput
from psm.losses.method_loss import COMPILES, method_loss
from psm.methods.spec import MethodSpec
from psm.mining.draws import Draws, KeyedDraws, draw_keys
from psm.mining.memory_bank import MemoryBank
from psm.mining.purity import NAMES as PURITY
from psm.mining.purity import purity
from psm.models.outputs import Embeddings
from psm.models.pretrained import EncoderInfo
from psm.models.siamese import SiameseNetworks
from psm.training.distributed import gather, processes
from psm.training.online_probe import LR as PROBE_LR
from psm.training.online_probe import OnlineProbe
from psm.training.optim import build_optimizer
from psm.training.run_module import RunModule
from psm.utils.devices import to_device, without_autocast
from psm.utils.errors import UserError
from psm.utils.schedule import learning_rate, target_momentum
from psm.utils.seeding import derived_seed, generator, seed_networks
from psm.views.transform import AugmentParams, Views


class StepOutputs(NamedTuple):
    """Detached tensors of the latest step, for the bank update and for the epoch's diagnostics."""

    features: Tensor  # (VB, F), encoder features of V views of this rank's images
    projection: Tensor  # (V, N, D), of the global batch
    keys: Tensor  # (N, D), what the bank is given: keys of view 2, or the mean over the views
    ids: Tensor  # (N,), image ids


def step_loss(
    networks: SiameseNetworks,
    views: Tensor,
    ids: Tensor,
    method: MethodSpec,
    bank: MemoryBank | None,
    draws: torch.Generator | Draws | None,
    chunk: int | None = None,
    target_views: Tensor | None = None,
    positive_draws: torch.Generator | Draws | None = None,
    progress: float = 1.0,
    loss_function: Callable[..., LossOutput] = method_loss,
) -> tuple[Tensor, dict[str, Tensor], StepOutputs]:
    """The loss of the global batch: each rank computes its anchors against the gathered embeddings.

    Args:
        views: this rank's views (V, B, 3, H, W).
        ids: image ids (B,).
        bank: memory bank that samples are mined from, if the method has one.
        draws: source of the mining draws.
        chunk: images per forward pass with gradient caching; None for one pass.
        target_views: what the target network sees of this rank's images (V, B, 3, H, W); None: ``views``.
        positive_draws: source of the draws of the positives.
        progress: share of the run's steps that are done.
        loss_function: ``method_loss``, compiled or not.

    Returns:
        The loss (over all directions, at least float32), its metrics and the outputs kept for later.
    """
    embeddings, features = networks(views, chunk, target_views)
    joined = gather_embeddings(embeddings)
    ids = gather(ids)
    with without_autocast(views.device):
        loss, metrics = loss_function(
            joined,
            method.criterion,
            bank,
            ids,
            draws,
            positive_generator=positive_draws,
            progress=method.positives.phase(progress),
            processes=processes(),
            **method.loss_options,
        )
    keys = method.bank_keys(joined.key)
    return loss, metrics, StepOutputs(features.detach(), joined.projection.detach(), keys, ids)


def gather_embeddings(embeddings: Embeddings) -> Embeddings:
    """The embeddings of all ranks' images; what is one tensor stays one, and is gathered once."""
    joined = {id(x): gather(x, dim=1) for x in embeddings}
    return Embeddings(*(joined[id(x)] for x in embeddings))


class PretrainModule(RunModule):
    """Owns the networks and the memory bank."""

    config: ResolvedPretrainConfig
    networks: SiameseNetworks

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
        metrics = ("loss", *method.metric_names, *(PURITY if config.monitor.purity else ()))
        super().__init__(networks, config, images, views, info, metrics, channels_last)
        self.labels: Tensor | None
        self.method = method
        bank = method.bank
        self.bank = MemoryBank(bank.size, config.heads.out_dim, bank.index) if method.needs_bank else None
        # Labels serve the purity metric and the online probe only; the networks never see them.
        needs_labels = config.monitor.purity or config.monitor.linear
        self.register_buffer("labels", images.labels if needs_labels else None, persistent=False)
        self.probe = self._build_probe() if config.monitor.linear else None
        self.outputs: StepOutputs  # of the latest step
        self._views_at_once: Callable[..., Tensor] = views.apply_at_once
        self._method_loss: Callable[..., LossOutput] = method_loss
        if config.compile is not None:
            compiled = partial(torch.compile, backend=config.compile, mode=config.compile_mode)
            self._views_at_once = compiled(views.apply_at_once)
            self._method_loss = compiled(method_loss) if COMPILES else method_loss
        # The bank is equal on all ranks by construction; without this DDP would broadcast it at every step.
        ignored = [] if self.probe is None else [f"probe.{name}" for name, _ in self.probe.named_buffers()]
        self._ddp_params_and_buffers_to_ignore = ["bank.rows", "bank.ids", "labels", *ignored]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A checkpoint holds the whole bank, so that any number of processes can go on with it. On every rank."""
        if self.bank is not None and self.bank.shard is not None:
            whole = self.bank.whole_state()
            checkpoint["state_dict"] |= {f"bank.{name}": value for name, value in whole.items()}
        super().on_save_checkpoint(checkpoint)

    def _build_probe(self) -> OnlineProbe:
        assert self.labels is not None
        return OnlineProbe(self.info.width, int(self.labels.max()) + 1)

    @property
    def task(self) -> str:
        return self.config.method

    @property
    def view_count(self) -> int:
        return self.config.views.count

    @property
    def forward_chunk(self) -> int | None:
        return self.config.grad_cache_chunk

    def shorter(self, seconds: float) -> str:
        config = self.config
        if config.preset != LAPTOP.name and (config.encoder, config.epochs) == ("resnet18", 200):
            return f"preset={LAPTOP.name} is {LAPTOP.about}"
        if config.encoder not in ("tiny", "custom"):
            return "encoder=tiny trains a small network that suits a CPU"
        return super().shorter(seconds)

    @property
    def memory_advice(self) -> str:
        return "a smaller batch_size, a grad_cache_chunk below it or a smaller images.size"

    def setup(self, stage: str) -> None:
        device = self.trainer.strategy.root_device.type
        if self.bank is not None and self.bank.index is not None and device != "cpu":
            raise UserError(f"bank.index=faiss searches on a CPU, and this run is on {device}: leave bank.index out.")
        super().setup(stage)
        if self.bank is not None and self.method.bank.sharded:
            self.bank.share_out(processes())
        self.networks.average_in_float32()
        averages = [name for name, _ in self.named_buffers() if name.startswith("networks.target_average.")]
        self._ddp_params_and_buffers_to_ignore += averages

    def configure_optimizers(self) -> torch.optim.Optimizer:
        predictor = self.networks.predictor
        factor = self.method.predictor.lr_factor
        return build_optimizer(
            (p for p in self.networks.parameters() if p.requires_grad),
            self.config.optim,
            {} if predictor is None else dict.fromkeys(predictor.parameters(), factor),
        )

    def make_views(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Views (V, B, 3, H, W) of this rank's images, with parameters drawn for the global batch.

        And what the target network sees of them, where that differs (``target.views=weak``).
        """
        params = self.view_params(batch.step, "cpu")
        views = self._apply_views(batch.images, params, weak=False)
        return views, None if self.method.target.views == "same" else self._apply_views(batch.images, params, weak=True)

    def _apply_views(self, images: Tensor, params: AugmentParams, weak: bool) -> Tensor:
        """Views of images by their parameters; compiled, as one batch on every device."""
        if self.config.compile is None or images.ndim == 5:
            return self.views.apply(images, params, channels_last=self.channels_last, weak=weak).to(self.dtype)
        packed = self.views.pack(params.weak() if weak else params, images)
        with torch.no_grad(), without_autocast(images.device):
            return self._views_at_once(images, packed, self.channels_last, not weak).to(self.dtype)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        seed, step = self.config.seed, batch.step
        # Dropout and stochastic depth draw from torch's global generator.
        seed_networks(derived_seed(seed, "networks", step, self.trainer.global_rank), self.device)
        views, target_views = self.make_views(batch)
        loss, metrics, self.outputs = step_loss(
            self.networks,
            views,
            batch.ids,
            self.method,
            self.bank,
            self._draws("negatives", step),
            self.config.grad_cache_chunk,
            target_views,
            positive_draws=self._positive_draws(step),
            progress=step / self.total_steps,
            loss_function=self._method_loss,
        )
        self.step_metrics = {"loss": loss.detach(), **metrics, **self._purity()}
        self.epoch_mean.update(self.step_metrics)
        if self.probe is not None:
            self._update_probe(self.probe, batch)
        return loss

    def _draws(self, purpose: str, step: int) -> torch.Generator | Draws:
        """Source of the mining draws of a step.

        On an accelerator, and for a compiled loss, keys that are drawn here: no generator is seeded there.
        """
        seed = self.config.seed
        if self.device.type == "cpu" and self.config.compile is None:
            return generator(seed, purpose, step)
        keys = draw_keys(self.config.batch_size, generator(seed, purpose, step))
        return KeyedDraws(to_device(keys, self.device), lambda: generator(seed, purpose, step, device=self.device))

    def _positive_draws(self, step: int) -> torch.Generator | Draws | None:
        """The same for the positives; a rule from elsewhere is given a generator."""
        rule = self.method.positives
        if not rule.draws:
            return None
        if rule.builtin:
            return self._draws("positives", step)
        return generator(self.config.seed, "positives", step, device=self.device)

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
        return purity(
            self.bank, self.outputs.keys, self.outputs.ids, self.labels, self.method.bank.allow_self, processes()
        )

    def after_update(self) -> None:
        """Update the EMA target, then the bank: both directions of the loss are computed by now."""
        target = self.method.target
        step = self.trainer.global_step  # Lightning counts this step after it
        self.networks.update_target(target_momentum(step, self.total_steps, target.momentum, target.schedule))
        if self.bank is not None:
            self.bank.enqueue(self.outputs.keys, self.outputs.ids)
