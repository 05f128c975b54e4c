"""From a configuration to its parts: the composition of its method and its networks."""

from dataclasses import fields

import torch
from torch import nn

from psm.config.schema import PretrainConfig
from psm.methods.registry import Composition, compose
from psm.models import networks
from psm.models.siamese import SiameseNetworks
from psm.utils.seeding import derived_seed


def composition_of(config: PretrainConfig) -> Composition:
    """The method's composition with the configuration's overrides put in."""
    return compose(config.method, {f.name: getattr(config, f.name) for f in fields(Composition)})


def build_networks(config: PretrainConfig, size: int, encoder: nn.Module | None = None) -> SiameseNetworks:
    """The networks that the configuration names, with weights drawn from its seed, for views of ``size`` pixels."""
    heads, topology = config.heads, config.topology
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(config.seed, "weights"))
        backbone = (
            networks.encoder(config.encoder, config.stem, size)
            if encoder is None
            else networks.as_encoder(encoder, size)
        )
        projector = networks.projector(backbone.width, heads.hidden_dim, heads.out_dim)
        predictor = networks.predictor(heads.out_dim, heads.hidden_dim, heads.out_dim) if topology.predictor else None
        return SiameseNetworks(backbone, projector, predictor, topology.target)
