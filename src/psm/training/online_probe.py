"""A linear classifier that learns beside the encoder, from its features as they are: labels never reach the encoder."""

from typing import Any

import torch
from torch import Tensor, nn

LR = 0.03  # at the start of the run; falls by a cosine to zero
MOMENTUM = 0.9
STATISTICS_MOMENTUM = 0.1  # of the features' running mean and variance, as in batch norm
EPS = 1e-5


class OnlineProbe(nn.Module):
    """A linear layer on standardized features, trained by SGD with momentum.

    Its weights are buffers and its gradients are written down, so that no optimizer, no backward pass and no random
    draw of the run knows of it: the encoder is the same to the bit with it and without it. They are saved in the
    checkpoint, so that a resumed run goes on with them.
    """

    weight: Tensor
    bias: Tensor
    weight_momentum: Tensor
    bias_momentum: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, width: int, classes: int):
        super().__init__()
        for name in ("weight", "weight_momentum"):
            self.register_buffer(name, torch.zeros(classes, width))
        for name in ("bias", "bias_momentum"):
            self.register_buffer(name, torch.zeros(classes))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("variance", torch.ones(width))

    def _apply(self, function: Any, recurse: bool = True) -> "OnlineProbe":
        """Move to a device but keep float32, whatever the precision of the run."""
        before = dict(self.named_buffers())
        super()._apply(function, recurse)
        for name, buffer in before.items():
            setattr(self, name, buffer.to(getattr(self, name).device))
        return self

    @torch.no_grad()
    def update(self, features: Tensor, labels: Tensor, lr: float) -> None:
        """One step on features (N, F), which are not changed, and labels (N,). Does not wait for the device."""
        features = features.detach().float()
        variance, mean = torch.var_mean(features, dim=0, correction=0)
        self.mean.lerp_(mean, STATISTICS_MOMENTUM)
        self.variance.lerp_(variance, STATISTICS_MOMENTUM)
        inputs = (features - mean) * torch.rsqrt(variance + EPS)
        residual = torch.addmm(self.bias, inputs, self.weight.T).softmax(1)
        residual.scatter_add_(1, labels[:, None], residual.new_full((len(labels), 1), -1.0)).div_(len(labels))
        self.weight_momentum.mul_(MOMENTUM).addmm_(residual.T, inputs)
        self.bias_momentum.mul_(MOMENTUM).add_(residual.sum(0))
        self.weight.sub_(self.weight_momentum, alpha=lr)
        self.bias.sub_(self.bias_momentum, alpha=lr)

    @torch.no_grad()
    def forward(self, features: Tensor) -> Tensor:
        """Logits (N, classes) of features (N, F), standardized by the running statistics."""
        inputs = (features.float().to(self.mean.device) - self.mean) * torch.rsqrt(self.variance + EPS)
        return torch.addmm(self.bias, inputs, self.weight.T)
