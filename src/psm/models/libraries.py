"""Encoders from other packages: torchvision's and timm's models, untrained and without classifier."""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import nn

from psm.models.torchvision_ops import define_missing_operators
from psm.utils.errors import UserError, did_you_mean


class Library(NamedTuple):
    """A package of models."""

    names: Callable[[], list[str]]
    create: Callable[[str], nn.Module]


def _torchvision_names() -> list[str]:
    models = _import("torchvision").models
    return models.list_models(module=models)  # classification models only


def _create_torchvision(name: str) -> nn.Module:
    """A classification model with its last linear layer replaced by the identity."""
    network = _whole_torchvision(name)
    parent, _, last = _last_linear(network, name).rpartition(".")
    setattr(network.get_submodule(parent), last, nn.Identity())
    return network


def torchvision_classifier(name: str) -> str:
    """The path of the classifier that a torchvision model loses here, for example ``fc`` or ``classifier.3``."""
    with torch.device("meta"):
        return _last_linear(_whole_torchvision(name), name)


def _whole_torchvision(name: str) -> nn.Module:
    known = _torchvision_names()
    if name not in known:
        raise UserError(f"torchvision has no classification model {name!r}{did_you_mean(name, known)}.")
    return _import("torchvision").models.get_model(name, weights=None)


def _last_linear(network: nn.Module, name: str) -> str:
    linear = [path for path, part in network.named_modules() if isinstance(part, nn.Linear)]
    if not linear:
        raise UserError(f"the model torchvision/{name} has no linear classifier to remove; use another encoder.")
    return linear[-1]


def _timm_names() -> list[str]:
    return _import("timm").list_models()


def _create_timm(name: str) -> nn.Module:
    known = _timm_names()
    if name not in known:
        raise UserError(f"timm has no model {name!r}{did_you_mean(name, known)}.")
    return _import("timm").create_model(name, pretrained=False, num_classes=0)


LIBRARIES = {
    "torchvision": Library(_torchvision_names, _create_torchvision),
    "timm": Library(_timm_names, _create_timm),
}


def _import(package: str) -> ModuleType:
    """An optional package; a UserError says how to install it."""
    define_missing_operators()  # timm imports torchvision
    try:
        return importlib.import_module(package)
    except (ImportError, RuntimeError) as error:  # torchvision built for another torch raises RuntimeError
        raise UserError(
            f"the encoder needs {package}, which cannot be imported ({error}); "
            f"install it with `pip install 'psm[{package}]'`."
        ) from error
