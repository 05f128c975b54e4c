"""Importing torchvision where its compiled operators cannot be loaded.

PyPI's torchvision for Linux is built with CUDA. Beside a CPU-only torch its library of operators does not load
(libc10_cuda.so is missing), and ``import torchvision`` raises "operator torchvision::nms does not exist". The models
need none of these operators: with their names defined, torchvision is imported, and only calling an operator is an
error. Lightning and timm import torchvision where it is installed, so this applies to them too.
"""

import ctypes
import importlib.util
import sys
from pathlib import Path

import torch

# The operators that torchvision registers shapes for while it is imported, whether or not its library was loaded.
_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_definitions: list[torch.library.Library] = []  # kept: a definition ends with its Library object


def define_missing_operators() -> None:
    """Make torchvision importable beside a CPU-only torch. Does nothing if it is not installed or not affected.

    To be called before anything imports torchvision, Lightning or timm.
    """
    if _definitions or "torchvision" in sys.modules or torch.version.cuda is not None:
        return
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or not _needs_cuda(Path(spec.origin).parent):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(schema)
    _definitions.append(library)


def _needs_cuda(package: Path) -> bool:
    """True if torchvision's library of operators cannot be loaded for want of a CUDA library."""
    for extension in package.glob("_C*.so"):
        try:
            ctypes.CDLL(str(extension))
        except OSError as error:  # "libc10_cuda.so: cannot open shared object file: ..."
            return "cuda" in Path(str(error).partition(":")[0]).name
    return False
