"""From a configuration to its method and its networks."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import torch
from torch import nn

from psm.config.schema import METHOD_GROUPS, PretrainSettings, ResolvedPretrainConfig
from psm.methods.plugins import missing_plugins
from psm.methods.registry import METHODS, find_method
from psm.methods.spec import KINDS, MethodSpec
from psm.models.encoder import as_encoder
from psm.models.factory import create_encoder
from psm.models.heads import prediction_head, projection_head
from psm.models.siamese import SiameseNetworks
from psm.utils.errors import UserError
from psm.utils.seeding import derived_seed


def method_of(config: PretrainSettings) -> MethodSpec:
    """The method's parts with the configuration's overrides put in.

    A stored configuration is complete, so that its method's row in the table is not needed, and what the row has become
    since changes nothing: settings that did not exist then have the values that change nothing. Where a part is
    missing, the plugins that the run was trained with are named.
    """
    groups = method_groups(config)
    try:
        complete = all(_is_complete(name, given) for name, given in groups.items())
        return (MethodSpec() if complete else find_method(config.method).spec).override(groups)
    except UserError as error:
        raise missing_plugins(error, config.plugins) from None


def _is_complete(name: str, given: Any) -> bool:
    """True if a group of settings has all but those that change nothing where they are not given."""
    if given is None:
        return False
    values = given if isinstance(given, Mapping) else asdict(given)
    if name in KINDS:
        part = values.get(KINDS[name].selector)
        cls = KINDS[name].find(part) if isinstance(part, str) else None
    else:
        cls = type(getattr(MethodSpec(), name))
    return cls is not None and all(
        values.get(field.name) is not None for field in fields(cls) if not field.metadata.get("neutral")
    )


def method_groups(config: PretrainSettings) -> dict[str, Any]:
    """The groups of a configuration that describe its method."""
    return {name: getattr(config, name) for name in METHOD_GROUPS}


def method_title(name: str) -> str:
    """A method as pages call it: the title of its row, or its name if no row is known."""
    return METHODS[name].title if name in METHODS else name


def build_networks(
    config: ResolvedPretrainConfig, method: MethodSpec, size: int, encoder: nn.Module | None = None
) -> SiameseNetworks:
    """The networks that the configuration names, with weights drawn from its seed.

    Args:
        config: encoder, stem, heads and seed.
        method: says whether there are a target and a predictor.
        size: of the views in pixels.
        encoder: a network of the user's own instead of a named one.
    """
    heads = config.heads
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(config.seed, "weights"))
        backbone = create_encoder(config.encoder, config.stem, size) if encoder is None else as_encoder(encoder, size)
        last = heads.norm_last
        projector = projection_head(backbone.width, heads.hidden_dim, heads.out_dim, heads.layers, last)
        hidden = method.predictor.hidden_dim or heads.hidden_dim
        predictor = prediction_head(heads.out_dim, hidden, heads.out_dim, last) if method.predictor.enabled else None
        return SiameseNetworks(backbone, projector, predictor, method.target.enabled)
