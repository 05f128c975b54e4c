"""The heads on top of an encoder: projector and predictor."""

from itertools import pairwise

from torch import nn

LAST_NORMS = ("batch", "batch-no-affine", "none")


def projection_head(
    in_dim: int, hidden_dim: int = 512, out_dim: int = 128, layers: int = 2, norm_last: str = "batch"
) -> nn.Sequential:
    """The projector: features (B, in_dim) to projections (B, out_dim), which the loss compares."""
    return mlp(in_dim, hidden_dim, out_dim, layers, norm_last)


def prediction_head(
    in_dim: int = 128, hidden_dim: int = 512, out_dim: int = 128, norm_last: str = "batch"
) -> nn.Sequential:
    """The predictor: online projections (B, in_dim) to queries (B, out_dim)."""
    return mlp(in_dim, hidden_dim, out_dim, 2, norm_last)


def mlp(in_dim: int, hidden_dim: int, out_dim: int, layers: int = 2, norm_last: str = "batch") -> nn.Sequential:
    """Linear, BN, ReLU for each hidden layer, then linear and BN; no biases, which batch norm would cancel.

    Args:
        in_dim: width of the inputs.
        hidden_dim: width of the hidden layers.
        out_dim: width of the outputs.
        layers: linear layers.
        norm_last: batch, batch-no-affine (without scale and shift), or none: a linear layer with bias is the last.
    """
    if norm_last not in LAST_NORMS:
        raise ValueError(f"norm_last {norm_last!r} is unknown: choose one of {', '.join(LAST_NORMS)}")
    dims = [in_dim, *[hidden_dim] * (layers - 1)]
    modules: list[nn.Module] = []
    for before, width in pairwise(dims):
        modules += [nn.Linear(before, width, bias=False), nn.BatchNorm1d(width), nn.ReLU(inplace=True)]
    modules.append(nn.Linear(dims[-1], out_dim, bias=norm_last == "none"))
    if norm_last != "none":
        modules.append(nn.BatchNorm1d(out_dim, affine=norm_last == "batch"))
    return nn.Sequential(*modules)
