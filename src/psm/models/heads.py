"""The heads on top of an encoder: projector and predictor."""

from torch import nn


def projection_head(in_dim: int, hidden_dim: int = 512, out_dim: int = 128) -> nn.Sequential:
    """The projector: features (B, in_dim) to projections (B, out_dim), which the loss compares."""
    return mlp(in_dim, hidden_dim, out_dim)


def prediction_head(in_dim: int = 128, hidden_dim: int = 512, out_dim: int = 128) -> nn.Sequential:
    """The predictor: online projections (B, in_dim) to queries (B, out_dim)."""
    return mlp(in_dim, hidden_dim, out_dim)


def mlp(in_dim: int, hidden_dim: int, out_dim: int) -> nn.Sequential:
    """Linear, BN, ReLU, linear, BN; no biases, which batch norm would cancel."""
    return nn.Sequential(
        nn.Linear(in_dim, hidden_dim, bias=False),
        nn.BatchNorm1d(hidden_dim),
        nn.ReLU(inplace=True),
        nn.Linear(hidden_dim, out_dim, bias=False),
        nn.BatchNorm1d(out_dim),
    )
