"""What is exported: an encoder with what is known of it, and the description that its file carries."""

import re
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from psm.config.export import ExportConfig
from psm.config.schema import ResolvedPretrainConfig
from psm.data.location import data_name
from psm.exporting.graph import build_graph
from psm.models.classifier import ClassifierInfo, Probabilities
from psm.models.encoder import Encoder, unwrapped
from psm.models.pretrained import EncoderInfo
from psm.utils.checkpoint_file import read_checkpoint
from psm.utils.run_folder import RunFolder

DESCRIPTION = "psm.json"  # file of the description in formats that are archives


@dataclass(frozen=True)
class Source:
    """An encoder to export."""

    encoder: Encoder
    config: ExportConfig
    run: RunFolder | None  # None: the encoder is a lone file
    training: ResolvedPretrainConfig | None  # settings of the run
    classes: ClassifierInfo | None = None  # of a classifier whose probabilities are exported
    head: Probabilities | None = None  # its head

    @property
    def info(self) -> EncoderInfo:
        return self.encoder.info

    @property
    def output(self) -> str:
        """What the graph gives, as its output is named."""
        return "features" if self.classes is None else "probabilities"

    @property
    def width(self) -> int:
        """Numbers that the graph gives for an image."""
        return self.info.width if self.classes is None else len(self.classes.classes)

    @property
    def network(self) -> nn.Module:
        """Inputs (B, 3, size, size) to what the graph gives, by psm."""
        return self.encoder if self.head is None else nn.Sequential(self.encoder, self.head)

    @property
    def public_info(self) -> EncoderInfo:
        """The info without paths, which mean nothing elsewhere: folders and files by their names."""
        init = self.info.init
        return replace(
            self.info,
            data=data_name(self.info.data),
            init=None if init is None else init | {"from": Path(init["from"]).name},
        )

    @property
    def name(self) -> str:
        """What the file calls the model."""
        info = self.public_info
        words = self.config.name or f"{info.method}-{info.encoder.replace('/', '-')}-{info.data}"
        return re.sub(r"[^\w.-]+", "-", words).strip("-.")

    @cached_property
    def graph(self) -> nn.Sequential:
        """The module whose computation is exported; its weights are a copy without gradients."""
        config = self.config
        encoder = deepcopy(self.encoder).requires_grad_(False)
        head = None if self.head is None else deepcopy(self.head).requires_grad_(False)
        return build_graph(encoder, self.info, config.preprocess, config.layout, config.normalize, head)

    @cached_property
    def state(self) -> dict[str, Tensor]:
        """The state dict of the encoder, contiguous copies."""
        state = unwrapped(self.encoder).state_dict()
        return {name: x.detach().cpu().contiguous().clone() for name, x in state.items()}

    @cached_property
    def training_images(self) -> int | None:
        """How many images the run was trained on, where its checkpoint is still there."""
        if self.run is None or not self.run.checkpoint.exists():
            return None
        return read_checkpoint(self.run.checkpoint)["psm"]["images"]

    def example(self, count: int = 2) -> Tensor:
        """Images as the graph takes them, of no special height and width where these may vary."""
        size = self.info.size
        if not self.config.preprocess:
            images = torch.zeros(count, 3, size, size)
        else:
            images = torch.zeros(count, 3, size + 7, size + 12, dtype=torch.uint8)
        return images.permute(0, 2, 3, 1).contiguous() if self.config.layout == "nhwc" else images

    def description(self, format_name: str, graph: bool, usage: list[str]) -> dict[str, Any]:
        """What the file says of itself, plain values only."""
        config = self.config
        about: dict[str, Any] = {"name": self.name, "license": config.license, "format": format_name}
        about |= asdict(self.public_info)
        if graph:
            size = "any height and width" if config.preprocess else f"{self.info.size} x {self.info.size} pixels"
            values = "uint8" if config.preprocess else "float32, normalized by mean and std"
            about["input"] = f"images, {config.layout.upper()}, {values}, {size}"
            length = ", of length 1" if config.normalize else ""
            about["output"] = f"{self.output} (N, {self.width}){length}"
        if self.classes is not None:
            about |= {"classes": self.classes.classes, "temperature": self.classes.temperature}
            about["scores"] = self.classes.scores
        return about | {"usage": usage, "psm": version("psm"), "torch": torch.__version__}
