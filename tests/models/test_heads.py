"""Projector and predictor: two linear layers with batch norm, against the formula."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from psm.models.heads import LAST_NORMS, prediction_head, projection_head


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


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("norm_last", LAST_NORMS)
def test_heads_have_as_many_layers_and_end_as_asked(layers: int, norm_last: str) -> None:
    torch.manual_seed(0)
    head = projection_head(12, 9, 5, layers, norm_last)
    linear = [part for part in head if isinstance(part, nn.Linear)]
    widths = [(part.in_features, part.out_features) for part in linear]
    assert widths == [[(12, 5)], [(12, 9), (9, 5)], [(12, 9), (9, 9), (9, 5)]][layers - 1]
    assert [part.bias is not None for part in linear] == [False] * (layers - 1) + [norm_last == "none"]
    outputs = head(torch.randn(30, 12))
    last = head[-1]
    if norm_last == "none":
        assert isinstance(last, nn.Linear)
        assert outputs.mean(0).abs().max() > 1e-3
    else:
        assert isinstance(last, nn.BatchNorm1d)
        assert last.affine == (norm_last == "batch")
        torch.testing.assert_close(outputs.mean(0), torch.zeros(5), atol=1e-5, rtol=0)


def test_an_unknown_end_is_refused() -> None:
    with pytest.raises(ValueError, match="choose one of batch, batch-no-affine, none"):
        prediction_head(norm_last="layer")
