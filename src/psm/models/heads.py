"""The heads on top of an encoder: projector and predictor."""

from torch import nn


def projection_head(width: int, hidden: int = 512, out: int = 128) -> nn.Sequential:
    """Features to the space in which the loss compares."""
    return two_layers(width, hidden, out)


def prediction_head(width: int = 128, hidden: int = 512, out: int = 128) -> nn.Sequential:
    """The online branch's projection to its query."""
    return two_layers(width, hidden, out)


def two_layers(width: int, hidden: int, out: int) -> nn.Sequential:
    """Each layer followed by batch norm and ReLU, the last by batch norm alone; batch norm makes a bias idle."""
    return nn.Sequential(
        nn.Linear(width, hidden, bias=False),
        nn.BatchNorm1d(hidden),
        nn.ReLU(inplace=True),
        nn.Linear(hidden, out, bias=False),
        nn.BatchNorm1d(out),
    )
