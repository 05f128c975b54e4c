"""The settings of `psm finetune` and `psm predict`. Imports nothing heavy."""

from dataclasses import dataclass
from typing import Generic, Never

from psm.config.keys import Unset, key
from psm.config.run_keys import RunKeys
from psm.config.schema import ImagesConfig, OptimConfig, SaveConfig


@dataclass
class FinetuneViewsConfig:
    """Random augmentation of the training images: one view of each, milder than in pretraining."""

    enabled: bool = key(True, "false: images as they are; with head_only=true features are then computed only once")
    size: int | None = key(None, "side of a view in pixels; none: that of the images", at_least=1)
    crop_scale: list[float] = key(
        [0.5, 1.0],
        "random resized crop: smallest and largest fraction of the area",
        above=0,
        at_most=1,
        length=2,
        ascending=True,
    )
    crop_ratio: list[float] = key(
        [3 / 4, 4 / 3],
        "random resized crop: smallest and largest aspect ratio",
        above=0,
        length=2,
        ascending=True,
    )
    flip: float = key(0.5, "probability of a horizontal flip", at_least=0, at_most=1)
    color_jitter: float = key(0.5, "probability of color jitter", at_least=0, at_most=1)
    brightness: float = key(0.2, "color jitter: factor from 1 - this to 1 + this", at_least=0)
    contrast: float = key(0.2, "color jitter: factor from 1 - this to 1 + this", at_least=0)
    saturation: float = key(0.2, "color jitter: factor from 1 - this to 1 + this", at_least=0)
    hue: float = key(0.02, "color jitter: hue angle from - this to this, in turns", at_least=0, at_most=0.5)
    grayscale: float = key(0.0, "probability of dropping color", at_least=0, at_most=1)
    blur: float = key(0.0, "probability of a Gaussian blur", at_least=0, at_most=1)
    blur_sigma: list[float] = key(
        [0.1, 2.0],
        "blur: smallest and largest standard deviation, in pixels of the view",
        above=0,
        length=2,
        ascending=True,
    )
    solarize: float = key(0.0, "probability of inverting the pixels brighter than the middle", at_least=0, at_most=1)


@dataclass
class FinetuneOptimConfig(OptimConfig[Unset], Generic[Unset]):
    """The optimizer; its learning rate warms up, then falls by a cosine to zero, a pure function of the step."""

    lr: float | Unset = key(
        None,
        "learning rate of the head after warm-up; none: sgd 0.03, adamw 1e-3, lars 1; head_only: sgd 0.1",
        at_least=0,
    )
    weight_decay: float | Unset = key(
        None, "weight decay; none: sgd 5e-4, adamw 1e-2, lars 1e-6; head_only: 0", at_least=0
    )


@dataclass
class LogConfig:
    """What is said while training."""

    log_every: int = key(50, "send the loss to the loggers every so many steps", at_least=1)


@dataclass
class FinetuneSubject(Generic[Unset]):
    """What is trained on what, and for how long."""

    out: str = key("", "run folder to write (needed)")
    checkpoint: str = key(
        "", "run folder, checkpoint or encoder.safetensors to start from (needed); none: train from scratch"
    )
    data: str | list[str] = key(
        "", "labeled images: cifar10, ..., or a folder with a subfolder for each class (needed)"
    )
    encoder: str | Unset = key(None, "network to train from scratch; none: that of the checkpoint")
    stem: str = key(
        "auto",
        "from scratch: cifar (3x3), imagenet (7x7 and pooling) or auto: cifar below 96 pixels",
        choices=("auto", "cifar", "imagenet"),
    )
    head_only: bool = key(False, "train the linear classifier alone; the encoder stays as it is")
    layer_decay: float = key(
        1.0,
        "factor of the learning rate from each layer to the one below it: 0.75 trains the first layers least",
        above=0,
        at_most=1,
    )
    label_smoothing: float = key(0.1, "share of the target that is spread evenly over all classes", at_least=0, below=1)
    validation: float = key(
        0.1,
        "share of each class of the training images held out to choose the best epoch and to calibrate; 0: none",
        at_least=0,
        below=1,
    )
    epochs: int = key(30, "how often the images are seen", at_least=1)
    batch_size: int = key(64, "images a step over all devices together", at_least=2)


@dataclass
class FinetuneSettings(RunKeys, FinetuneSubject[Unset], Generic[Unset]):  # keys of the last class are listed first
    """Every setting of fine-tuning, both as users give them and as a run has them."""

    images: ImagesConfig[Unset] = key(ImagesConfig, "")
    views: FinetuneViewsConfig = key(FinetuneViewsConfig, "")
    optim: FinetuneOptimConfig[Unset] = key(FinetuneOptimConfig, "")
    monitor: LogConfig = key(LogConfig, "")
    save: SaveConfig = key(SaveConfig, "")


@dataclass
class FinetuneConfig(FinetuneSettings[None]):
    """psm finetune: train a classifier from a pretrained encoder and labeled images."""


@dataclass
class ResolvedFinetuneConfig(FinetuneSettings[Never]):
    """psm finetune: the settings of a run, with what the checkpoint and the data decide filled in."""
