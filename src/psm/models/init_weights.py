"""Weights to start from (``init=``): a run, a checkpoint, safetensors, or a state dict of torchvision or timm.

What belongs to the encoder must be there, all of it and in its shapes, and nothing else may be but a classifier.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file as load_safetensors
from torch import Tensor, nn

from psm.config.stored import is_finetuning
from psm.models.encoder import unwrapped
from psm.models.factory import CIFAR_STEM_BELOW, ENCODERS, STEMS, create_encoder
from psm.models.pretrained import EncoderInfo, checkpoint_encoder, checksum, read_encoder
from psm.models.published import HUB_WEIGHTS, find_published
from psm.models.resnet import ResNet
from psm.models.siamese import SiameseNetworks
from psm.utils.checkpoint_file import is_checkpoint, load_file
from psm.utils.errors import UserError
from psm.utils.run_folder import RunFolder

HEADS = ("projector", "predictor")
WRAPPERS = ("state_dict", "model_state_dict", "model")  # entries under which trainers save a state dict
STEM_SIZES = {"imagenet": "7x7", "cifar": "3x3"}
COUNTER = "num_batches_tracked"  # of batch norms; files written before torch 0.4.1 have none
ALLOWED = (
    "a run folder, a checkpoint, a .safetensors, a state dict of torchvision or timm (.pth, .pt) or the name of a "
    "published encoder"
)


@dataclass(frozen=True)
class InitialWeights:
    """What a file holds to start from."""

    source: str  # as the user gave it
    state: Mapping[str, Tensor]  # of the encoder, or a state dict of unknown origin
    info: EncoderInfo | None = None  # None: not written by psm
    settings: Mapping[str, Any] | None = None  # of the run that a checkpoint belongs to
    heads: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)  # projector and predictor of a checkpoint


@dataclass(frozen=True)
class Fitted:
    """A state dict that fits the encoder, and the names that were left out."""

    state: dict[str, Tensor]
    left_out: list[str]


def read_initial_weights(source: str | Path) -> InitialWeights:
    """Read ``init=``. Nothing is unpickled but tensors and plain values."""
    source = str(source)
    path = Path(source).expanduser()
    if not path.exists():
        published = find_published(source)
        if published is None:
            raise UserError(f"init={source} does not exist: give {ALLOWED}.")
        path = published
    if path.is_dir():
        path = _file_of_run(path, source)
    if path.suffix == ".safetensors":
        return _read_safetensors(path, source)
    content = load_file(path)
    if is_checkpoint(content):
        return _of_checkpoint(content, path, source)
    return InitialWeights(source, _state_dict(content, source))


def _file_of_run(folder: Path, source: str) -> Path:
    """The checkpoint of a run, which has the heads too; without one, or of `psm finetune`, its encoder."""
    run = RunFolder(folder)
    first = [run.encoder] if run.classifier.exists() else []  # of the best epoch, where the checkpoint is of the last
    for file in (*first, run.checkpoint, run.encoder, folder / HUB_WEIGHTS):
        if file.exists():
            return file
    raise UserError(f"init={source} is a folder without checkpoint or encoder: give {ALLOWED}.")


def _read_safetensors(path: Path, source: str) -> InitialWeights:
    try:
        with safe_open(path, "pt") as file:
            by_psm = "psm" in (file.metadata() or {})
        if not by_psm:
            return InitialWeights(source, load_safetensors(path))
    except (SafetensorError, OSError) as error:
        raise UserError(f"init={source} is not a readable safetensors file: {error}.") from None
    info, state = read_encoder(path)
    return InitialWeights(source, state, info)


def _of_checkpoint(checkpoint: Mapping[str, Any], path: Path, source: str) -> InitialWeights:
    info, state = checkpoint_encoder(checkpoint, path)
    heads = {name: _below(checkpoint["state_dict"], f"networks.{name}.") for name in HEADS}
    taken_over = None if is_finetuning(checkpoint) else checkpoint["psm"]["config"]
    return InitialWeights(source, state, info, taken_over, heads)


def _below(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _state_dict(content: Any, source: str) -> Mapping[str, Tensor]:
    """The state dict in a file: its content, or the entry that trainers save it under."""
    for name in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    tensors = isinstance(content, Mapping) and {k: v for k, v in content.items() if isinstance(v, Tensor)}
    if not tensors or len(tensors) < len(content):
        raise UserError(f"init={source} holds no state dict, that is names with tensors: give {ALLOWED}.")
    return tensors


def load_initial_weights(networks: SiameseNetworks, weights: InitialWeights, heads: bool | None) -> dict[str, Any]:
    """Put weights into the networks; the target starts equal to the online network.

    Args:
        networks: with random weights.
        weights: what was read.
        heads: take projector and predictor too: True, which refuses weights without them, False, or None, where they
            are there and fit.

    Returns:
        The record of it: where they came from, their checksum, which heads were taken, what was left out, and whether
        settings that a user does not give come from the same run.
    """
    encoder = unwrapped(networks.encoder)
    fitted = fit(weights, encoder, int(networks.encoder.width))  # type: ignore[arg-type]
    encoder.load_state_dict(fitted.state, strict=True)
    taken = [] if heads is False else [name for name in HEADS if _load_head(networks, weights, name, required=heads)]
    networks.reset_target()
    info = weights.info
    known = {} if info is None else {name: getattr(info, name) for name in ("encoder", "method", "data", "epoch")}
    return {
        "from": weights.source,
        "crc32": checksum(fitted.state),
        **known,
        "heads": taken,
        "left_out": fitted.left_out,
        "settings": weights.settings is not None,
    }


def describe(record: Mapping[str, Any], heads: Sequence[str]) -> str:
    """A sentence about a record of ``load_initial_weights``; ``heads`` are those that the networks have."""
    trained = f" ({record['method']}, epoch {record['epoch']} on {record['data']})" if "method" in record else ""
    random = [name for name in heads if name not in record["heads"]]
    said = [f"init={record['from']}{trained}: took {_joined(['the encoder', *record['heads']])}"]
    if record["left_out"]:
        said.append(f"left out {_joined(record['left_out'])}")
    if random:
        said.append(f"{_joined(random)} start{'' if len(random) > 1 else 's'} at random")
    settings = " Settings that are not given are those of that run." if record["settings"] else ""
    return f"{'; '.join(said)}.{settings}"


def _joined(words: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _load_head(networks: SiameseNetworks, weights: InitialWeights, name: str, required: bool | None) -> bool:
    """Load one head where the networks have it and the weights fit; a required one is refused otherwise."""
    head = getattr(networks, name)
    if head is None:
        return False
    state = weights.heads.get(name) or {}
    shapes = {key: value.shape for key, value in state.items()}
    if shapes == {key: value.shape for key, value in head.state_dict().items()}:
        head.load_state_dict(state, strict=True)
        return True
    if required:
        why = f"its {name} has other widths than heads.* say" if state else f"it holds no {name}"
        raise UserError(f"init_heads=true cannot take the heads of init={weights.source}: {why}; leave init_heads out.")
    return False


def fit(weights: InitialWeights, encoder: nn.Module, width: int) -> Fitted:
    """The weights as a state dict for the encoder; refused in a sentence where they are not its own.

    Args:
        weights: what was read.
        encoder: the network that receives them.
        width: of its features, which a classifier that is left out must take.
    """
    needed = encoder.state_dict()
    names = [name for name in needed if not name.endswith(COUNTER)]
    prefix = _prefix(weights, names)
    state = _below(weights.state, prefix)
    wrong = [name for name in names if name in state and state[name].shape != needed[name].shape]
    missing = [name for name in names if name not in state]
    if wrong or missing:
        raise _misfit(weights, encoder, wrong, missing, state)
    more = {name: value for name, value in state.items() if name not in needed and not name.endswith(COUNTER)}
    unknown = [name for name in more if not _of_classifier(name, more, width)]
    if unknown:
        raise UserError(
            f"init={weights.source} has {len(unknown)} weights that the encoder has not ({_some(unknown)}): it is "
            f"another network{_looks_like(state)}."
        )
    taken = {name: state.get(name, value) for name, value in needed.items()}
    for name, value in taken.items():
        if value.is_floating_point() and not value.isfinite().all():
            raise UserError(f"init={weights.source} has weights that are NaN or infinite ({name}): give another file.")
    outside = sorted({name.partition(".")[0] for name in weights.state if not name.startswith(prefix)})
    return Fitted(taken, [*sorted({name.rpartition(".")[0] for name in more}), *outside])


def _prefix(weights: InitialWeights, names: list[str]) -> str:
    """What stands before the encoder's names in the file: nothing, "module.", "backbone." and so on."""
    first = names[0]
    found = [name.removesuffix(first) for name in weights.state if name == first or name.endswith(f".{first}")]
    whole = [prefix for prefix in found if all(f"{prefix}{name}" in weights.state for name in names)]
    if "" in whole or not whole:
        return "" if "" in whole or not found else min(found, key=len)
    if len(whole) > 1:
        raise UserError(
            f"init={weights.source} holds several networks ({', '.join(whole)}): save the state dict of one of them."
        )
    return whole[0]


def _of_classifier(name: str, more: Mapping[str, Tensor], width: int) -> bool:
    """True for the weight or bias of a linear layer (or 1x1 convolution) on the encoder's features."""
    layer, _, kind = name.rpartition(".")
    weight, bias = more.get(f"{layer}.weight"), more.get(f"{layer}.bias")
    if weight is None or kind not in ("weight", "bias"):
        return False
    linear = weight.ndim >= 2 and weight.shape[1] == width and weight[0, 0].numel() == 1
    return linear and (bias is None or bias.shape == weight.shape[:1])


def _misfit(
    weights: InitialWeights, encoder: nn.Module, wrong: list[str], missing: list[str], state: Mapping[str, Tensor]
) -> UserError:
    """What does not fit, and what to do."""
    if isinstance(encoder, ResNet) and wrong == ["conv1.weight"] and not missing:
        theirs = "imagenet" if state["conv1.weight"].shape[-1] == 7 else "cifar"
        if state["conv1.weight"].shape[:2] == encoder.conv1.weight.shape[:2]:
            return UserError(
                f"init={weights.source} has the {theirs} stem, a convolution of {STEM_SIZES[theirs]}, and this run the "
                f"{encoder.stem} stem of {STEM_SIZES[encoder.stem]} (stem=auto takes cifar below {CIFAR_STEM_BELOW} "
                f"pixels): give stem={theirs}, or other weights."
            )
    if wrong:
        name = wrong[0]
        shapes = f"{tuple(state[name].shape)} instead of {tuple(encoder.state_dict()[name].shape)}"
        said = f"{len(wrong)} of its weights have another shape ({name}: {shapes})"
    else:
        said = f"it lacks {len(missing)} weights ({_some(missing)})"
    return UserError(f"init={weights.source} does not fit the encoder: {said}{_looks_like(state)}.")


def _looks_like(state: Mapping[str, Tensor]) -> str:
    """Which network of psm a state dict belongs to, as the end of a sentence; nothing where none fits."""
    shapes = {name: value.shape for name, value in state.items() if not name.endswith(COUNTER)}
    shapes = {name: shape for name, shape in shapes.items() if not name.startswith("fc.")}
    for name in ENCODERS:
        for stem in STEMS:
            with torch.device("meta"):
                own = create_encoder(name, stem).state_dict()
            if shapes == {key: value.shape for key, value in own.items() if not key.endswith(COUNTER)}:
                return f"; it looks like encoder={name} stem={stem}"
    return ""


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
