"""A classifier: an encoder and a linear head, saved as one safetensors file with its classes and its calibration."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from psm import ops
from psm.config.stored import run_folder_of
from psm.models.encoder import Encoder, as_encoder, unwrapped
from psm.models.factory import create_encoder
from psm.models.pretrained import (
    CUSTOM,
    EncoderInfo,
    checkpoint_encoder,
    is_classifier,
    parse_info,
    read_weights,
    write_weights,
)
from psm.utils.checkpoint_file import read_checkpoint
from psm.utils.errors import UserError
from psm.utils.run_folder import RunFolder
from psm.utils.seeding import generator

HEAD_PREFIX = "networks.head."  # of the head's keys in the state dict of a checkpoint


@dataclass(frozen=True)
class ClassifierInfo:
    """What a classifier was made from and how its scores are read."""

    encoder: EncoderInfo
    classes: list[str]
    temperature: float = 1.0  # logits are divided by it before the softmax
    scores: dict[str, Any] = field(default_factory=dict)  # accuracy and calibration error, as finetune.json has them


class Classifier(nn.Module):
    """Images (B, 3, H, W), normalized, to logits (B, classes)."""

    info: ClassifierInfo  # set by load_classifier

    def __init__(self, encoder: Encoder, head: nn.Linear, frozen: bool = False):
        """Put a head on an encoder.

        Args:
            encoder: Images (B, 3, H, W) to features (B, F).
            head: Features (B, F) to logits (B, classes).
            frozen: The encoder gets no gradient and stays in evaluation mode (batch norm with its running statistics).
        """
        super().__init__()
        self.encoder = encoder.requires_grad_(not frozen)
        self.head = head
        self.frozen = frozen
        self.train()

    def train(self, mode: bool = True) -> "Classifier":
        super().train(mode)
        if self.frozen:
            self.encoder.eval()
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        with ops.accelerated(self.encoder, inputs.device):
            return self.head(self.encoder(inputs))

    def probabilities(self, inputs: Tensor) -> Tensor:
        """Calibrated probabilities (B, classes) of normalized images (B, 3, H, W)."""
        return calibrated(self(inputs), self.info.temperature)


class Probabilities(nn.Module):
    """Features (B, F) to calibrated probabilities (B, classes)."""

    def __init__(self, head: nn.Linear, temperature: float):
        super().__init__()
        self.head, self.temperature = head, temperature

    def forward(self, features: Tensor) -> Tensor:
        return torch.softmax(self.head(features) / self.temperature, dim=1)


def calibrated(logits: Tensor, temperature: float) -> Tensor:
    """Probabilities (N, classes) of logits: the softmax of what they are after division by the temperature."""
    return (logits / temperature).softmax(1)


class LinearHead(nn.Linear):
    """Features (B, F) to logits (B, classes), as it is trained: features are standardized first, by fixed numbers.

    So one learning rate suits the features of any encoder. ``folded`` is the plain linear layer that does the same.
    """

    mean: Tensor  # (F,)
    std: Tensor  # (F,)

    def __init__(self, width: int, classes: int, seed: int):
        super().__init__(width, classes)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("std", torch.ones(width))
        with torch.no_grad():
            self.weight.normal_(std=0.01, generator=generator(seed, "head"))
            self.bias.zero_()

    @property
    def standardized(self) -> bool:
        """True once there are statistics."""
        return bool((self.mean != 0).any())

    def standardize(self, features: Tensor) -> None:
        """Take the statistics of features (N, F). A feature that hardly varies is not blown up."""
        std = features.std(0)
        self.mean.copy_(features.mean(0))
        self.std.copy_(std.clamp(min=max(1e-6, 0.1 * float(std.square().mean().sqrt()))))

    def forward(self, features: Tensor) -> Tensor:
        return super().forward((features - self.mean) / self.std)


def folded(head: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of the plain linear layer that computes the same as a `LinearHead`."""
    mean, std, weight, bias = (head[name].double() for name in ("mean", "std", "weight", "bias"))
    scaled = weight / std
    return {"weight": scaled.to(head["weight"].dtype), "bias": (bias - scaled @ mean).to(head["bias"].dtype)}


def save_classifier(path: Path, classifier: Classifier, info: ClassifierInfo) -> None:
    """Write a classifier; names of its weights are ``encoder.*``, as in encoder.safetensors, and ``head.*``."""
    state = {f"encoder.{name}": value for name, value in unwrapped(classifier.encoder).state_dict().items()}
    state |= {f"head.{name}": value for name, value in classifier.head.state_dict().items()}
    write_weights(path, state, {"kind": "classifier", **asdict(info)})


def load_classifier(path: str | Path, module: nn.Module | None = None) -> Classifier:
    """A classifier in evaluation mode; its attribute ``info`` has classes, temperature and how images are prepared.

    Examples:
        >>> classifier = psm.load_classifier("runs/clf")  # doctest: +SKIP
        >>> classifier.probabilities(inputs)              # doctest: +SKIP

    Args:
        path: A run folder of `psm finetune`, a classifier.safetensors or a checkpoint of such a run.
        module: Receives the weights of an encoder that was given as a module.

    Raises:
        UserError: The file is no classifier, or cannot be read.
    """
    info, state = read_classifier(path)
    about = info.encoder
    if module is None and about.encoder == CUSTOM:
        raise UserError(f"{path} holds a network of its user's own: give that network beside the path.")
    encoder = (
        create_encoder(about.encoder, about.stem, about.size) if module is None else as_encoder(module, about.size)
    )
    classifier = Classifier(encoder, nn.Linear(about.width, len(info.classes)))
    try:
        load_weights(classifier, state)
    except RuntimeError as error:
        raise UserError(f"{path} does not fit the encoder {about.encoder}: {' '.join(str(error).split())}.") from None
    encoder.info = about
    classifier.info = info
    return classifier.eval()


def load_weights(classifier: Classifier, state: Mapping[str, Tensor]) -> None:
    """Put the weights of ``read_classifier`` into a classifier, which must have the same ones."""
    unwrapped(classifier.encoder).load_state_dict(_below("encoder.", state), strict=True)
    classifier.head.load_state_dict(_below("head.", state), strict=True)


def read_classifier(path: str | Path) -> tuple[ClassifierInfo, dict[str, Tensor]]:
    """The info and the state dict in a run folder, a classifier.safetensors or a checkpoint of `psm finetune`."""
    path = find_classifier(path)
    if path.suffix == ".safetensors":
        description, state = read_weights(path)
        if not is_classifier(description):
            raise UserError(_no_classifier(path))
        return _parse(description, path), state
    checkpoint = read_checkpoint(path)
    described = checkpoint["psm"]
    if "classes" not in described:
        raise UserError(_no_classifier(path))
    info, weights = checkpoint_encoder(checkpoint, path)
    state = {f"encoder.{name}": value for name, value in weights.items()}
    head = folded(_below(HEAD_PREFIX, checkpoint["state_dict"]))
    state |= {f"head.{name}": value for name, value in head.items()}
    return ClassifierInfo(info, list(described["classes"])), state


def holds_classifier(path: str | Path) -> bool:
    """True for a run folder of a finished `psm finetune`, its classifier.safetensors or a checkpoint of such a run."""
    path = Path(path).expanduser()
    if path.is_dir():
        return RunFolder(path).classifier.exists()
    if path.suffix == ".safetensors":
        return is_classifier(read_weights(path)[0])
    return "classes" in read_checkpoint(path)["psm"]


def find_classifier(path: str | Path) -> Path:
    """The file to read: the classifier of a finished run, the best or last checkpoint of an unfinished one."""
    path = Path(path).expanduser()
    if not path.exists():
        raise UserError(
            f"checkpoint={path} does not exist: give a run folder of `psm finetune` or a classifier.safetensors."
        )
    if not path.is_dir():
        return path
    run = RunFolder(path)
    files = [run.classifier] if run.classifier.exists() else [run.best, run.checkpoint]
    for file in files:
        if file.exists():
            return file
    raise UserError(_no_classifier(path))


def _no_classifier(path: Path) -> str:
    run = RunFolder(run_folder_of(path))
    if path != run.folder and run.classifier.exists():
        return f"checkpoint={path} holds no classifier: give {run.classifier}."
    if run.marker.exists():
        path = run.folder
    return (
        f"checkpoint={path} holds no classifier: train one with `psm finetune checkpoint={path} data=LABELED "
        "out=runs/clf`, then give runs/clf."
    )


def _parse(description: Mapping[str, Any], path: Path) -> ClassifierInfo:
    try:
        return ClassifierInfo(
            parse_info(description["encoder"], path),
            [str(name) for name in description["classes"]],
            float(description["temperature"]),
            dict(description["scores"]),
        )
    except (KeyError, TypeError, ValueError, json.JSONDecodeError):
        raise UserError(f"{path} does not say completely how to load it: was it written by another version?") from None


def _below(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
