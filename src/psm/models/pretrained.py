"""Saving and loading trained encoders: safetensors with a plain state dict, and a JSON file on how to load it."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from psm.models.encoder import Encoder, as_encoder, unwrapped
from psm.models.factory import ENCODERS, create_encoder
from psm.models.published import HUB_WEIGHTS, PUBLISHED, find_published
from psm.utils.checkpoint_file import read_checkpoint
from psm.utils.errors import UserError, did_you_mean
from psm.utils.files import write_atomically, write_text_atomically
from psm.utils.run_folder import RunFolder

ENCODER_PREFIX = "networks.encoder."  # of the encoder's keys in the state dict of a checkpoint
CUSTOM = "custom"  # the name of an encoder that was given as a module


@dataclass(frozen=True)
class EncoderInfo:
    """Which network an encoder is, and how images are prepared for it."""

    encoder: str
    stem: str
    width: int  # of its features
    size: int  # H and W of the images that it was trained on
    mean: list[float]  # of each channel, for images in [0, 1]
    std: list[float]
    method: str
    data: str | list[str]
    epoch: int
    init: dict[str, Any] | None = (
        None  # the weights that training started from: see `init_weights.load_initial_weights`
    )

    def how_to_load(self) -> list[str]:
        """Lines of Python that load the encoder with this package and, for a ResNet, without it."""
        with_psm = ["import psm", "encoder = psm.load_encoder('encoder.safetensors')"]
        if not self.encoder.startswith("resnet"):
            return with_psm
        cifar_stem = ["net.conv1 = torch.nn.Conv2d(3, 64, 3, 1, 1, bias=False)", "net.maxpool = torch.nn.Identity()"]
        return [
            *with_psm,
            "# or without psm:",
            "import torch, torchvision, safetensors.torch",
            f"net = torchvision.models.{self.encoder}()",
            "net.fc = torch.nn.Identity()",
            *(cifar_stem if self.stem == "cifar" else []),
            "net.load_state_dict(safetensors.torch.load_file('encoder.safetensors'), strict=True)",
        ]


def save_encoder(run: RunFolder, encoder: nn.Module, info: EncoderInfo) -> None:
    """Write encoder.safetensors, whose metadata hold the info, and encoder.json into a run folder."""
    description = asdict(info)
    write_weights(run.encoder, unwrapped(encoder).state_dict(), description)
    readable = json.dumps(description | {"how_to_load": info.how_to_load()}, indent=2)
    write_text_atomically(run.info, f"{readable}\n")


def write_weights(path: Path, state: Mapping[str, Tensor], description: Mapping[str, Any]) -> None:
    """Write a state dict as safetensors, atomically; its metadata hold the description and a checksum of both."""
    # Copies: safetensors refuses tensors that share memory. One entry of metadata: the order of several varies.
    copies = {name: x.detach().cpu().contiguous().clone() for name, x in state.items()}
    content = save(copies, metadata={"psm": json.dumps({**description, "crc32": checksum(copies, description)})})
    write_atomically(path, lambda file: file.write(content))


def load_encoder(path: str | Path, module: nn.Module | None = None) -> Encoder:
    """A trained encoder in evaluation mode; its attribute ``info`` says how images are prepared for it.

    Args:
        path: A run folder, a checkpoint, an encoder.safetensors, or the name of a published encoder.
        module: Receives the weights of a run that was given a module as its encoder.

    Raises:
        UserError: The file cannot be read, or a weight is missing or unexpected.
    """
    info, state = read_encoder(path)
    if module is None and info.encoder == CUSTOM:
        raise UserError(f"{path} holds a network of its user's own: give that network beside the path.")
    encoder: Encoder
    if module is None:
        encoder = create_encoder(info.encoder, info.stem, info.size)
    else:
        encoder = as_encoder(module, info.size)
    try:
        unwrapped(encoder).load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise UserError(f"{path} does not fit the encoder {info.encoder}: {' '.join(str(error).split())}.") from None
    encoder.info = info
    return encoder.eval()


def read_encoder(path: str | Path) -> tuple[EncoderInfo, dict[str, Tensor]]:
    """The info and the state dict in a run folder, a checkpoint or an encoder.safetensors."""
    path = find_encoder(path)
    if path.suffix != ".safetensors":
        return checkpoint_encoder(read_checkpoint(path), path)
    description, state = read_weights(path)
    if is_classifier(description):  # its encoder alone
        of_encoder = {k.removeprefix("encoder."): v for k, v in state.items() if k.startswith("encoder.")}
        return parse_info(description.get("encoder"), path), of_encoder
    return parse_info(description, path), state


def checkpoint_encoder(checkpoint: Mapping[str, Any], path: Path) -> tuple[EncoderInfo, dict[str, Tensor]]:
    """The info and the state dict of the encoder in the contents of a checkpoint; ``path`` names it in errors."""
    info = parse_info(checkpoint["psm"]["encoder_info"], path)
    prefix = ENCODER_PREFIX if info.encoder in ENCODERS else f"{ENCODER_PREFIX}module."
    state = {k.removeprefix(prefix): v for k, v in checkpoint["state_dict"].items() if k.startswith(prefix)}
    return info, state


def find_encoder(path: str | Path) -> Path:
    """The file to read: the encoder of a finished run, the last checkpoint of an unfinished one, or the file given.

    What is no path may be the name of a published encoder.
    """
    path = Path(path).expanduser()
    if not path.exists():
        if published := find_published(str(path)):
            return published
        names = [row.name for row in PUBLISHED]
        known = f", or one of the published encoders {', '.join(names)}" if names else ""
        raise UserError(
            f"checkpoint={path} does not exist{did_you_mean(str(path), names)}: give a run folder, a .ckpt or an "
            f"encoder.safetensors{known}."
        )
    if not path.is_dir():
        return path
    run = RunFolder(path)
    for file in (run.encoder, run.checkpoint, path / HUB_WEIGHTS):
        if file.exists():
            return file
    raise UserError(f"checkpoint={path} holds neither {run.encoder.name} nor a checkpoint: is it a run folder?")


def is_classifier(description: Mapping[str, Any]) -> bool:
    """True for the description of a classifier.safetensors, which `psm finetune` writes."""
    return description.get("kind") == "classifier"


def read_weights(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the state dict in a safetensors file written by psm; refused if its checksum is wrong."""
    try:
        with safe_open(path, "pt") as file:
            description = (file.metadata() or {}).get("psm")
        state = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a readable safetensors file: {error}.") from None
    if description is None:
        raise UserError(f"{path} says nothing of how to load it: give an encoder.safetensors written by psm.")
    content = _as_mapping(description, path)
    if not is_classifier(content):
        parse_info(content, path)
    # Of an encoder that was written before its description was part of the checksum, the weights alone.
    if content.pop("crc32", None) not in (None, checksum(state, content), checksum(state)):
        raise UserError(f"{path} is damaged: its checksum does not match. Restore it from a copy.")
    return content, state


def _as_mapping(description: str, path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(description))
    except (TypeError, ValueError):
        raise UserError(f"{path} does not say completely how to load it: was it written by another version?") from None


def checksum(state: Mapping[str, Tensor], description: Mapping[str, Any] | None = None) -> int:
    """CRC-32 of the description, if given, and of names and values; 2.4 to 3.0 GB/s on one core."""
    value = 0 if description is None else zlib.crc32(json.dumps(description).encode())
    for name in sorted(state):
        value = zlib.crc32(name.encode(), value)
        value = zlib.crc32(state[name].contiguous().view(-1).view(torch.uint8).numpy().data, value)
    return value


def parse_info(description: Any, path: Path) -> EncoderInfo:
    """The info from its stored form; refused if something is missing."""
    try:
        optional = {f.name for f in fields(EncoderInfo) if f.default is not MISSING} - description.keys()
        return EncoderInfo(**{f.name: description[f.name] for f in fields(EncoderInfo) if f.name not in optional})
    except (AttributeError, KeyError, TypeError):
        raise UserError(f"{path} does not say completely how to load it: was it written by another version?") from None
