"""Projector and predictor: two linear layers with batch norm, against the formula."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from psm.models.heads import prediction_head, projection_head


@pytest.mark.parametrize(("make", "arguments"), [(projection_head, (96, 80, 24)), (prediction_head, (24, 80, 40))])
def test_heads_are_linear_norm_relu_linear_norm(
    make: Callable[..., nn.Sequential], arguments: tuple[int, int, int]
) -> None:
    torch.manual_seed(0)
    head = make(*arguments).double()
    inputs = torch.randn(7, arguments[0], dtype=torch.float64)
    first, second = (part.weight for part in head if isinstance(part, nn.Linear))
    assert {name for name, _ in head.named_parameters() if "bias" in name} == {"1.bias", "4.bias"}

    def norm(values: Tensor) -> Tensor:
        return (values - values.mean(0)) / (values.var(0, unbiased=False) + 1e-5).sqrt()

    expected = norm(norm(inputs @ first.T).relu() @ second.T)
    torch.testing.assert_close(head(inputs), expected)


def test_heads_default_to_the_papers_widths() -> None:
    head = projection_head(512)
    assert [part.weight.shape for part in head if isinstance(part, nn.Linear)] == [(512, 512), (128, 512)]
    assert [part.weight.shape for part in prediction_head() if isinstance(part, nn.Linear)] == [(512, 128), (128, 512)]
