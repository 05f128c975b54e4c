"""format=torchvision and format=timm: weights that load in the library's own network with strict=True."""

from functools import partial
from pathlib import Path

from torch import nn

from psm.exporting.formats import Features, Format
from psm.exporting.lines import imports, input_lines
from psm.exporting.source import Source
from psm.exporting.weights import read_line, read_weights, reader_module, write_weights
from psm.models.factory import ENCODERS
from psm.models.libraries import LIBRARIES, torchvision_classifier
from psm.models.pretrained import CUSTOM, EncoderInfo
from psm.models.resnet import convolution
from psm.utils.errors import UserError


def library_name(info: EncoderInfo, library: str) -> str | None:
    """The name that a library may know an encoder by, or None: psm's ResNets have the names of torchvision and timm."""
    origin, _, name = info.encoder.rpartition("/")
    if origin == library or (origin in LIBRARIES and name.startswith("resnet")):
        return name
    return name if not origin and name in ENCODERS and name.startswith("resnet") else None


def network(info: EncoderInfo, library: str) -> nn.Module:
    """The library's own network without classifier, with the stem of the encoder."""
    name = library_name(info, library)
    if name is None:
        what = "a network of its user's own" if info.encoder == CUSTOM else f"encoder={info.encoder}"
        raise UserError(f"format={library} cannot hold {what}, which {library} does not have: {_instead(info)}.")
    built = LIBRARIES[library].create(name)
    if info.stem == "cifar":
        width = built.conv1.out_channels  # type: ignore[union-attr]
        built.conv1, built.maxpool = convolution(3, int(width), 3), nn.Identity()  # type: ignore[arg-type]
    return built


def _instead(info: EncoderInfo) -> str:
    library = info.encoder.partition("/")[0]
    own = f"{library}, " if library in LIBRARIES else ""
    return f"give format={own}onnx, torchscript, torch-export, safetensors or hf"


def refuse(library: str, source: Source) -> None:
    """Raise unless the library has the network, with these weights."""
    try:
        network(source.info, library).load_state_dict(source.state, strict=True)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"format={library} cannot hold encoder={source.info.encoder}: {library}'s network of that name has other "
            f"weights ({reason}); {_instead(source.info)}."
        ) from None


def load(library: str, source: Source, path: Path) -> Features:
    built = network(source.info, library)
    built.load_state_dict(read_weights(path), strict=True)
    return built.eval()


def network_lines(info: EncoderInfo, library: str) -> list[str]:
    """Lines that build the library's network as ``net``, without classifier."""
    name = library_name(info, library)
    if library == "timm":
        lines = [f'net = timm.create_model("{name}", num_classes=0)']
    else:
        # psm's own ResNets end in fc as torchvision's do: no need to ask torchvision, which may not be installed.
        classifier = "fc" if info.encoder == name else _attribute(torchvision_classifier(str(name)))
        lines = [f"net = torchvision.models.{name}()", f"net.{classifier} = torch.nn.Identity()"]
    if info.stem == "cifar":
        lines += [
            "net.conv1 = torch.nn.Conv2d(3, 64, 3, 1, 1, bias=False)",
            "net.maxpool = torch.nn.Identity()",
        ]
    return lines


def _attribute(path: str) -> str:
    """A dotted path as Python source: classifier.3 is classifier[3]."""
    first, *rest = path.split(".")
    return first + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in rest)


def usage(library: str, source: Source, file: str) -> list[str]:
    info = source.info
    return [
        imports("torch", library, reader_module(file)),
        *network_lines(info, library),
        f"net.load_state_dict({read_line(file)}, strict=True)",
        "net.eval()",
        *input_lines(info),
        f"features = net(images)  # (1, {info.width})",
    ]


def _format(library: str) -> Format:
    return Format(
        library,
        (".pth", ".safetensors"),
        write_weights,
        partial(load, library),
        partial(usage, library),
        partial(refuse, library),
        needs=(library,),
        extra=library,
    )


TORCHVISION = _format("torchvision")
TIMM = _format("timm")
