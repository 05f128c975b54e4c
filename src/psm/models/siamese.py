"""How networks make (query, key) pairs: one network or an online one and its target, with or without a predictor."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from psm.kernels.dispatch import faster
from psm.models.grad_cache import rerun


class Embeddings(NamedTuple):
    """What the networks say of two views of N images, each (2, N, D), view first."""

    projection: Tensor  # z: online projections
    query: Tensor  # q: predictions of the online branch, or z where there is no predictor
    key: Tensor  # target projections, or z where there is no target


class Pair(NamedTuple):
    """One direction: queries from one view, keys from the other; unit norm, (N, D) each."""

    query: Tensor
    key: Tensor
    projection: Tensor  # z1, the online projection of the query's view: weighs the mined positives (eq. 5)
    other: Tensor  # the key network's projection of the query's own view: a negative for other images (eq. 4)


class SiameseNetworks(nn.Module):
    """Encoder, projector and predictor are trained by gradient; a target is a moving average of the first two.

    Both views run through a network as one batch of 2N. The target's parameters move by ``follow``; its batch-norm
    statistics are its own, gathered in its own forward passes, and never averaged with the online network's. Keys carry
    a gradient only where queries and keys are made alike, that is with neither target nor predictor.
    """

    def __init__(
        self, encoder: nn.Module, projector: nn.Module, predictor: nn.Module | None = None, target: bool = True
    ):
        super().__init__()
        self.encoder = encoder
        self.projector = projector
        self.predictor = predictor
        copies = nn.Sequential(deepcopy(encoder), deepcopy(projector)).requires_grad_(False) if target else None
        self.target = copies
        self.compiled = False

    def compile_parts(self, backend: str) -> None:
        """Compile each network; how they are put together stays plain Python. State dicts do not change."""
        for network in self.children():
            network.compile(backend=backend)
        self.compiled = True

    @property
    def _learned(self) -> nn.ModuleList:
        """The networks that are trained by gradient."""
        return nn.ModuleList([self.encoder, self.projector, *([self.predictor] if self.predictor else [])])

    def _faster(self, device: torch.device) -> AbstractContextManager:
        """Convolutions by the way that is fastest on the device; a compiler has its own."""
        return nullcontext() if self.compiled else faster(device)

    def forward(self, views: Tensor, chunk: int | None = None) -> tuple[Embeddings, Tensor]:
        """The embeddings of the views (2, N, C, H, W), and the encoder's features (2N, F).

        With ``chunk`` so many images at a time run through the networks, and run through them again when their
        gradient is needed, so that memory holds the maps of one chunk (gradient caching). Batch norm then sees a chunk.
        """
        parts = views.split(chunk or views.shape[1], dim=1)
        each = [self._embed(part.flatten(0, 1), again=len(parts) > 1) for part in parts]
        projection, query, key, features = (
            torch.cat([x.unflatten(0, (len(views), -1)) for x in column], 1) for column in zip(*each, strict=True)
        )
        return Embeddings(projection, query, key), features.flatten(0, 1)

    def _embed(self, views: Tensor, again: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Projection, query, key and features of views (B, C, H, W)."""
        features, projection, query = rerun(self._online, self._learned, views) if again else self._online(views)
        if self.target is None:
            return projection, query, projection if self.predictor is None else projection.detach(), features
        with torch.no_grad(), self._faster(views.device):
            return projection, query, self.target(views), features

    def _online(self, views: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with self._faster(views.device):
            features = self.encoder(views)
            projection = self.projector(features)
            return features, projection, self.predict(projection)

    def predict(self, projection: Tensor) -> Tensor:
        """Queries from online projections."""
        return projection if self.predictor is None else self.predictor(projection)

    def keys(self, images: Tensor) -> Tensor:
        """Keys of images (B, C, H, W)."""
        with self._faster(images.device):
            return self.projector(self.encoder(images)) if self.target is None else self.target(images)

    @torch.no_grad()
    def update_target(self, momentum: float) -> None:
        """Move the target, if any: target = momentum * target + (1 - momentum) * online."""
        if self.target is not None:
            online = [*self.encoder.parameters(), *self.projector.parameters()]
            torch._foreach_lerp_(list(self.target.parameters()), online, 1.0 - momentum)


def pairs(embeddings: Embeddings, symmetric: bool = True) -> Iterator[Pair]:
    """The directed pairs, normalized in at least single precision: view 1 to 2, then view 2 to 1 if symmetric."""
    projection, query, key = (
        normalize(x.float() if x.dtype in (torch.bfloat16, torch.float16) else x, dim=-1) for x in embeddings
    )
    for of, to in ((0, 1), (1, 0))[: 1 + symmetric]:
        yield Pair(query[of], key[to], projection[of], key[of])
