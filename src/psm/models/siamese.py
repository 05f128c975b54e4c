"""The networks of a method: online encoder, projector and predictor, and the target network (EMA)."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from psm import ops
from psm.models.grad_cache import recompute_in_backward
from psm.models.outputs import Embeddings

_Embedded = tuple[Tensor, Tensor, Tensor, Tensor]


class _Float32Buffers(nn.Module):
    """Buffers that move to a device and stay in float32 when the module around them is converted."""

    def _apply(self, function: Any, recurse: bool = True) -> "_Float32Buffers":
        before = dict(self.named_buffers())
        super()._apply(function, recurse)
        for name, buffer in before.items():
            self._buffers[name] = buffer.to(self._buffers[name].device)  # type: ignore[union-attr]
        return self


@contextmanager
def counted_at_once(networks: nn.Module, device: torch.device) -> Iterator[None]:
    """Context in which batch norms do not count their batches; on exit all counters are raised in one kernel.

    For accelerators and one forward pass of each layer in training mode; on a CPU nothing is changed. The counters are
    not used where batch norm has a momentum; they are kept as torch would keep them.
    """
    layers: list[Any] = [
        layer
        for layer in networks.modules()
        if type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d)
        and layer.training
        and layer.momentum is not None
        and layer.num_batches_tracked is not None
    ]
    if device.type == "cpu" or not layers:
        yield
        return
    counters = [layer.num_batches_tracked for layer in layers]
    for layer in layers:
        layer.num_batches_tracked = None
    try:
        yield
    finally:
        for layer, counter in zip(layers, counters, strict=True):
            layer.num_batches_tracked = counter
    torch._foreach_add_(counters, 1)


class SiameseNetworks(nn.Module):
    """Online encoder, projector and predictor, trained by gradient, and a target encoder and projector.

    The target's parameters are an exponential moving average of the online ones (``update_target``). Its batch-norm
    running statistics come from its own forward passes and are never averaged with the online network's. All views
    run through a network as one batch, of 2N for two. Keys have a gradient only with neither target nor predictor.
    """

    def __init__(
        self, encoder: nn.Module, projector: nn.Module, predictor: nn.Module | None = None, target: bool = True
    ):
        """Assemble the networks.

        Args:
            encoder: Images (B, 3, H, W) to features (B, F).
            projector: Features (B, F) to projections (B, D).
            predictor: Projections (B, D) to queries (B, D); None: the projections are the queries.
            target: Copy encoder and projector as the target network, which gives the keys.
        """
        super().__init__()
        self.encoder = encoder
        self.projector = projector
        self.predictor = predictor
        copies = nn.Sequential(deepcopy(encoder), deepcopy(projector)).requires_grad_(False) if target else None
        self.target = copies
        self.target_average = _Float32Buffers()  # holds the EMA where the target is in half precision
        self._compiled_embed: Callable[..., _Embedded] | None = None

    def compile_parts(self, backend: str | Callable[..., Any], mode: str | None = None) -> None:
        """Compile the networks with ``torch.compile``: all as one graph, for gradient caching each by itself.

        The state dict does not change.
        """
        for network in self.children():
            network.compile(backend=backend, mode=mode)
        self._compiled_embed = torch.compile(self._embed, backend=backend, mode=mode)

    @property
    def compiled(self) -> bool:
        """True after ``compile_parts``."""
        return self._compiled_embed is not None

    @property
    def heads(self) -> list[str]:
        """Names of the heads that there are."""
        return ["projector", *(["predictor"] if self.predictor is not None else [])]

    @property
    def _online_networks(self) -> nn.ModuleList:
        """The networks that are trained by gradient."""
        return nn.ModuleList([self.encoder, self.projector, *([self.predictor] if self.predictor else [])])

    def _accelerated(self, device: torch.device) -> AbstractContextManager[object]:
        """Faster convolutions for the device, unless the networks are compiled."""
        return nullcontext() if self.compiled else ops.accelerated(self, device)

    def forward(
        self, views: Tensor, grad_cache_chunk: int | None = None, target_views: Tensor | None = None
    ) -> tuple[Embeddings, Tensor]:
        """Embed V views of N images.

        Args:
            views: (V, N, 3, H, W).
            grad_cache_chunk: Images per forward pass; each chunk runs again in the backward pass, so that memory holds
                the activations of one chunk (gradient caching). Batch norm sees one chunk at a time. None: all N.
            target_views: (V, N, 3, H, W) what the target network sees of the same images; None: ``views``.

        Returns:
            The embeddings, (V, N, D) each, and the encoder's features (VN, F).
        """
        chunk = grad_cache_chunk or views.shape[1]
        once = not self.compiled and chunk >= views.shape[1]
        with counted_at_once(self, views.device) if once else nullcontext():
            return self._forward(views, chunk, target_views)

    def _forward(self, views: Tensor, chunk: int, target_views: Tensor | None) -> tuple[Embeddings, Tensor]:
        online = [part.flatten(0, 1) for part in views.split(chunk, dim=1)]
        target = online if target_views is None else [x.flatten(0, 1) for x in target_views.split(chunk, dim=1)]
        recompute = len(online) > 1
        embed = self._embed if self._compiled_embed is None or recompute else self._compiled_embed
        outputs = [embed(*parts, recompute=recompute) for parts in zip(online, target, strict=True)]
        columns = ([x.unflatten(0, (len(views), -1)) for x in column] for column in zip(*outputs, strict=True))
        projection, query, key, features = (x[0] if len(x) == 1 else torch.cat(x, 1) for x in columns)
        return Embeddings(projection, query, key), features.flatten(0, 1)

    def _embed(self, views: Tensor, target_views: Tensor, recompute: bool) -> _Embedded:
        """Projection, query, key (B, D) and features (B, F) of views (B, 3, H, W), the key of ``target_views``."""
        features, projection, query = (
            recompute_in_backward(self._online, self._online_networks, views) if recompute else self._online(views)
        )
        if self.target is None:
            return projection, query, projection if self.predictor is None else projection.detach(), features
        with torch.no_grad(), self._accelerated(views.device):
            return projection, query, self.target(target_views), features

    def _online(self, views: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with self._accelerated(views.device):
            features = self.encoder(views)
            projection = self.projector(features)
            return features, projection, self.predict(projection)

    def predict(self, projection: Tensor) -> Tensor:
        """Queries (B, D) from online projections (B, D)."""
        return projection if self.predictor is None else self.predictor(projection)

    def embed_keys(self, images: Tensor) -> Tensor:
        """Keys (B, D) of images (B, 3, H, W): projections of the target network, of the online one without target."""
        with self._accelerated(images.device):
            return self.projector(self.encoder(images)) if self.target is None else self.target(images)

    def reset_target(self) -> None:
        """Make the target equal to the online network, batch-norm statistics included. Does nothing without target."""
        if self.target is not None:
            self.target.load_state_dict(nn.Sequential(self.encoder, self.projector).state_dict())

    @torch.no_grad()
    def update_target(self, momentum: float) -> None:
        """EMA: target = momentum * target + (1 - momentum) * online. Does nothing without target."""
        if self.target is None:
            return
        online: list[Tensor] = [*self.encoder.parameters(), *self.projector.parameters()]
        target: list[Tensor] = list(self.target.parameters())
        average = list(self.target_average.buffers())
        if not average:
            torch._foreach_lerp_(target, online, 1.0 - momentum)
            return
        torch._foreach_lerp_(average, [weights.float() for weights in online], 1.0 - momentum)
        torch._foreach_copy_(target, average)

    def average_in_float32(self) -> None:
        """Keep the EMA in float32 where the target is in half precision, whose resolution is coarser than an update.

        Call it after the weights were converted. The average is part of the state dict.
        """
        if self.target is not None and any(
            p.dtype in (torch.float16, torch.bfloat16) for p in self.target.parameters()
        ):
            for index, weights in enumerate(self.target.parameters()):
                self.target_average.register_buffer(str(index), weights.detach().float().clone())
