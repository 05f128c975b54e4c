"""One step of fine-tuning as a Lightning module: a view of each image, logits, cross entropy."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from psm.config.finetune import ResolvedFinetuneConfig
from psm.data import ImageStore
from psm.data.loader import Batch, BatchLoader
from psm.data.same_images import image_difference
from psm.data.stats import channel_statistics
from psm.evaluation.features import extract
from psm.finetuning.layers import layer_scales
from psm.models.classifier import Classifier, LinearHead
from psm.models.pretrained import EncoderInfo
from psm.training.distributed import gather, gather_rows
from psm.training.optim import build_optimizer
from psm.training.run_module import RunModule
from psm.training.shared_features import own_features
from psm.utils.devices import without_autocast
from psm.utils.indices import evenly_spaced
from psm.utils.seeding import derived_seed, seed_networks
from psm.views.transform import Views

SCRATCH = "none"  # the value of checkpoint= for a network without pretraining
STANDARDIZE_BY = 2000  # training images whose features the head is standardized by


class FinetuneModule(RunModule):
    """Owns the classifier and knows the labels of its images.

    With a frozen encoder and no augmentation the features are computed once, before the first step.
    """

    config: ResolvedFinetuneConfig
    networks: Classifier
    labels: Tensor

    def __init__(
        self,
        networks: Classifier,
        views: Views,
        images: ImageStore,
        validation: ImageStore | None,
        classes: Sequence[str],
        config: ResolvedFinetuneConfig,
        info: EncoderInfo,
        channels_last: bool = False,
    ):
        """Assemble the training of a classifier.

        Args:
            networks: the encoder and the head.
            views: the augmentation, and the normalization that the encoder expects.
            images: training images with labels.
            validation: images that are held out, with labels; None where none are.
            classes: names of the labels.
            config: the run's settings.
            info: describes the encoder.
            channels_last: memory layout of the inputs.
        """
        super().__init__(networks, config, images, views, info, ("loss", "train_accuracy"), channels_last)
        assert images.labels is not None
        self.register_buffer("labels", images.labels, persistent=False)
        self.validation, self.classes = validation, list(classes)
        self.image_mean = list(channel_statistics(images)[0])  # by which a resumed run recognizes its images
        self.features: Tensor | None = None  # (N, F) of the training images, where they never change
        self.validation_features: Tensor | None = None
        self._ddp_params_and_buffers_to_ignore = ["labels"]

    @property
    def task(self) -> str:
        if self.config.checkpoint == SCRATCH:
            return "a classifier from scratch"
        return f"{'a linear head on' if self.config.head_only else 'fine-tuning'} {self.config.checkpoint}"

    def shorter(self, seconds: float) -> str:
        shorter = super().shorter(seconds)
        if self.config.head_only or self.config.checkpoint == SCRATCH:
            return shorter
        return f"head_only=true trains the linear head alone; {shorter}"

    @property
    def caches_features(self) -> bool:
        """True if the encoder gives the same features at every step."""
        return self.config.head_only and not self.config.views.enabled

    def on_fit_start(self) -> None:
        if self.caches_features and self.features is None:
            self.features = self._plain_features(self.images).to(self.device)
            if self.validation is not None:
                self.validation_features = self._plain_features(self.validation)
        head = self.networks.head
        if isinstance(head, LinearHead) and not head.standardized and self.config.checkpoint != SCRATCH:
            sample = evenly_spaced(len(self.images), STANDARDIZE_BY)
            seen = self._plain_features(self.images, sample) if self.features is None else self.features[sample]
            head.standardize(seen)

    def _plain_features(self, images: ImageStore, indices: Tensor | None = None) -> Tensor:
        return extract(self.networks.encoder, images, self.views, indices)

    def train_dataloader(self) -> BatchLoader:
        loader = super().train_dataloader()
        assert isinstance(loader, BatchLoader)  # a labeled part is a selection, which is never streamed
        return loader.without_images() if self.caches_features else loader

    def configure_optimizers(self) -> torch.optim.Optimizer:
        learned = [p for p in self.networks.parameters() if p.requires_grad]
        return build_optimizer(learned, self.config.optim, layer_scales(self.networks.encoder, self.config.layer_decay))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        # Dropout and stochastic depth draw from torch's global generator.
        seed_networks(derived_seed(self.config.seed, "networks", batch.step, self.trainer.global_rank), self.device)
        logits = gather(self._logits(batch))
        labels = self.labels[gather(batch.ids)]
        with without_autocast(logits.device):
            loss = cross_entropy(logits.float(), labels, label_smoothing=self.config.label_smoothing)
        accuracy = 100 * (logits.detach().argmax(1) == labels).float().mean()
        self.step_metrics = {"loss": loss.detach(), "train_accuracy": accuracy}
        self.epoch_mean.update(self.step_metrics)
        return loss

    def _logits(self, batch: Batch) -> Tensor:
        """Logits (B, classes) of this rank's images."""
        if self.features is not None:
            return self.networks.head(self.features[batch.ids].to(self.dtype))
        if self.config.views.enabled:
            params = self.view_params(batch.step, self.device)
            views = self.views.apply(batch.images, params, channels_last=self.channels_last)
            return self.networks(views[0].to(self.dtype))
        inputs = self.views.plain(batch.images).to(self.dtype)
        return self.networks(inputs.contiguous(memory_format=torch.channels_last) if self.channels_last else inputs)

    @torch.inference_mode()
    def validation_logits(self) -> tuple[Tensor, Tensor]:
        """Logits (N, classes) of the validation images as the classifier is now, and their labels.

        Called on every rank: the images are shared out.
        """
        assert self.validation is not None
        assert self.validation.labels is not None
        if self.validation_features is None:
            every = torch.arange(len(self.validation))
            own = own_features(self.networks, self.validation, self.views, every)
            return gather_rows(own).cpu(), self.validation.labels
        rows = self.validation_features.to(self.networks.head.weight)
        return self.networks.head(rows).float().cpu(), self.validation.labels

    def description(self) -> dict[str, Any]:
        return super().description() | self.data_description()

    def data_description(self) -> dict[str, Any]:
        return {
            "images": len(self.images),
            "image_mean": self.image_mean,
            "classes": self.classes,
            "labels": _checksum(self.images.labels),
        }

    def data_difference(self, described: Mapping[str, Any]) -> str | None:
        now = self.data_description()
        if described["classes"] != now["classes"]:
            return f"its classes are {', '.join(now['classes'][:5])} instead of {', '.join(described['classes'][:5])}"
        same = {**described, "encoder_info": {"mean": described["image_mean"]}}
        difference = image_difference(same, len(self.images), self.image_mean)
        if difference is None and described["labels"] != now["labels"]:
            return "some of its images have other labels"
        return difference


def _checksum(labels: Tensor | None) -> int:
    return 0 if labels is None else zlib.crc32(labels.cpu().numpy().tobytes())
