"""The encoder as users take it away: its plain state dict as safetensors, and a small file on how to load it."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from psm.models.factory import as_encoder, create_encoder, unwrapped
from psm.utils.checkpoint_file import read_checkpoint
from psm.utils.errors import UserError
from psm.utils.files import write_atomically, write_text_atomically
from psm.utils.run_folder import RunFolder

ENCODER = "networks.encoder."  # where a checkpoint's state dict holds the encoder


@dataclass(frozen=True)
class EncoderInfo:
    """What it takes to use an encoder: which network it is, and how images are prepared for it."""

    encoder: str
    stem: str
    width: int
    size: int  # side of the images it was trained on
    mean: list[float]
    std: list[float]
    method: str
    data: str
    epoch: int

    def instructions(self) -> list[str]:
        """Lines of Python that load the encoder, with this package and, for a ResNet, without it."""
        ours = ["import psm", "encoder = psm.load_encoder('encoder.safetensors')"]
        if not self.encoder.startswith("resnet"):
            return ours
        small = ["net.conv1 = torch.nn.Conv2d(3, 64, 3, 1, 1, bias=False)", "net.maxpool = torch.nn.Identity()"]
        return [
            *ours,
            "# or without psm:",
            "import torch, torchvision, safetensors.torch",
            f"net = torchvision.models.{self.encoder}()",
            "net.fc = torch.nn.Identity()",
            *(small if self.stem == "cifar" else []),
            "net.load_state_dict(safetensors.torch.load_file('encoder.safetensors'), strict=True)",
        ]


def save_encoder(run: RunFolder, encoder: nn.Module, info: EncoderInfo) -> None:
    """Write encoder.safetensors and encoder.json; the first holds the second's contents too, so it can go alone."""
    description = asdict(info)
    own = unwrapped(encoder)
    # Copies: safetensors refuses weights that share memory. One entry of metadata: the order of several varies.
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in own.state_dict().items()}
    content = save(state, metadata={"psm": json.dumps(description)})
    write_atomically(run.encoder, lambda file: file.write(content))
    readable = json.dumps(description | {"how_to_load": info.instructions()}, indent=2) + "\n"
    write_text_atomically(run.info, readable)


def load_encoder(path: str | Path, module: nn.Module | None = None) -> nn.Module:
    """The encoder of a run folder, a checkpoint or an encoder file, in evaluation mode.

    Its attribute ``loading`` says how images are prepared. ``module`` receives the weights where the run was given a
    network of the user's own. A missing or superfluous weight is an error.
    """
    info, state = read_encoder(path)
    if module is None and info.encoder == "custom":
        raise UserError(f"{path} holds a network of its user's own: give that network beside the path.")
    encoder = create_encoder(info.encoder, info.stem, info.size) if module is None else as_encoder(module, info.size)
    try:
        unwrapped(encoder).load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise UserError(f"{path} does not fit the encoder {info.encoder}: {' '.join(str(error).split())}.") from None
    encoder.info = info
    return encoder.eval()


def read_encoder(path: str | Path) -> tuple[EncoderInfo, dict[str, Tensor]]:
    """How to load, and the state dict, from a run folder, a checkpoint or an encoder file."""
    path = find_encoder(path)
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, "pt") as file:
                described = (file.metadata() or {}).get("psm")
            state = load_file(path)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is not a readable safetensors file: {error}.") from None
        if described is None:
            raise UserError(f"{path} says nothing of how to load it: give an encoder.safetensors written by psm.")
        return _parse_info(described, path), state
    checkpoint = read_checkpoint(path)
    info = _parse_info(checkpoint["psm"]["encoder_info"], path)
    prefix = f"{ENCODER}module." if info.encoder == "custom" else ENCODER
    state = {k.removeprefix(prefix): v for k, v in checkpoint["state_dict"].items() if k.startswith(prefix)}
    return info, state


def find_encoder(path: str | Path) -> Path:
    """The file to read: the finished encoder of a run folder, or its last checkpoint while it trains."""
    path = Path(path).expanduser()
    if not path.exists():
        raise UserError(f"checkpoint={path} does not exist: give a run folder, a .ckpt or an encoder.safetensors.")
    if not path.is_dir():
        return path
    run = RunFolder(path)
    for file in (run.encoder, run.checkpoint):
        if file.exists():
            return file
    raise UserError(f"checkpoint={path} holds neither {run.encoder.name} nor a checkpoint: is it a run folder?")


def _parse_info(described: dict[str, Any] | str, path: Path) -> EncoderInfo:
    try:
        described = json.loads(described) if isinstance(described, str) else described
        return EncoderInfo(**{f.name: described[f.name] for f in fields(EncoderInfo)})
    except (KeyError, TypeError, json.JSONDecodeError):
        raise UserError(f"{path} does not say completely how to load it: was it written by another version?") from None
