"""ResNets: names and shapes of torchvision's, values of a forward pass written out with plain functions."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from psm.models.factory import create_encoder
from psm.models.resnet import ResNet

BATCH_NORM = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}

RESNETS = {"resnet18": ([2, 2, 2, 2], 1), "resnet34": ([3, 4, 6, 3], 1), "resnet50": ([3, 4, 6, 3], 4)}


def expected_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """torchvision's names and shapes without fc, written down from its published architecture."""
    depths, expansion = RESNETS[name]
    shapes: dict[str, tuple[int, ...]] = {"conv1.weight": (64, 3, 7, 7)}

    def batch_norm(prefix: str, channels: int) -> None:
        for part in BATCH_NORM:
            shapes[f"{prefix}.{part}"] = () if part == "num_batches_tracked" else (channels,)

    batch_norm("bn1", 64)
    before = 64
    for stage, depth in enumerate(depths, start=1):
        width = 64 * 2 ** (stage - 1)
        after = width * expansion
        for index in range(depth):
            prefix = f"layer{stage}.{index}"
            if expansion == 1:
                kernels = [(width, before, 3, 3), (width, width, 3, 3)]
            else:
                kernels = [(width, before, 1, 1), (width, width, 3, 3), (after, width, 1, 1)]
            for number, kernel in enumerate(kernels, start=1):
                shapes[f"{prefix}.conv{number}.weight"] = kernel
                batch_norm(f"{prefix}.bn{number}", kernel[0])
            if index == 0 and (stage > 1 or before != after):
                shapes[f"{prefix}.downsample.0.weight"] = (after, before, 1, 1)
                batch_norm(f"{prefix}.downsample.1", after)
            before = after
    return shapes


def resnet(name: str, stem: str = "auto") -> ResNet:
    encoder = create_encoder(name, stem)
    assert isinstance(encoder, ResNet)
    return encoder


def parameters(module: nn.Module) -> int:
    return sum(tensor.numel() for tensor in module.parameters())


@pytest.mark.parametrize("name", RESNETS)
def test_state_dict_is_torchvisions(name: str) -> None:
    state = resnet(name, stem="imagenet").state_dict()
    assert {key: tuple(value.shape) for key, value in state.items()} == expected_shapes(name)


@pytest.mark.parametrize(
    ("name", "count", "width"),
    [("resnet18", 11_176_512, 512), ("resnet34", 21_284_672, 512), ("resnet50", 23_508_032, 2048)],
)
def test_parameter_counts_and_widths_are_the_published_ones(name: str, count: int, width: int) -> None:
    network = resnet(name, stem="imagenet")
    assert parameters(network) == count
    assert network.width == width
    state = network.state_dict()
    assert state["layer4.0.downsample.0.weight"].shape == (width, width // 2, 1, 1)


def test_tiny_has_about_a_million_parameters_and_halves_small_images() -> None:
    network = resnet("tiny")
    assert 1.1e6 < parameters(network) < 1.3e6
    assert network.width == 256
    assert network.conv1.weight.shape == (32, 3, 3, 3)
    assert network.conv1.stride == (2, 2)
    assert isinstance(network.maxpool, nn.Identity)
    assert resnet("tiny", stem="imagenet").conv1.weight.shape == (32, 3, 7, 7)


def test_bottleneck_strides_in_its_3x3() -> None:
    block = resnet("resnet50").layer2[0]
    assert [block.conv1.stride, block.conv2.stride, block.conv3.stride] == [(1, 1), (2, 2), (1, 1)]


@pytest.mark.parametrize("stem", ["cifar", "imagenet"])
@pytest.mark.parametrize("name", ["tiny", "resnet18", "resnet50"])
def test_forward_equals_the_network_written_out(name: str, stem: str) -> None:
    torch.manual_seed(0)
    network = resnet(name, stem=stem).double().eval()
    for tensor in network.state_dict().values():  # batch norms that do something
        if tensor.ndim == 1:
            tensor.copy_(torch.rand_like(tensor) + 0.5)
    state = network.state_dict()
    images = torch.randn(2, 3, 40, 40, dtype=torch.float64)

    def norm(maps: Tensor, prefix: str) -> Tensor:
        mean, var, weight, bias = (
            state[f"{prefix}.{part}"][:, None, None] for part in ("running_mean", "running_var", "weight", "bias")
        )
        return (maps - mean) / (var + 1e-5).sqrt() * weight + bias

    def conv(maps: Tensor, prefix: str, stride: int = 1) -> Tensor:
        weight = state[f"{prefix}.weight"]
        return functional.conv2d(maps, weight, stride=stride, padding=weight.shape[-1] // 2)

    maps = norm(conv(images, "conv1", 2 if stem == "imagenet" or name == "tiny" else 1), "bn1").relu()
    if stem == "imagenet":
        maps = functional.max_pool2d(maps, 3, 2, 1)
    convolutions, strided = (3, 2) if name == "resnet50" else (2, 1)
    for stage in range(1, 5):
        for index in range({"tiny": [1] * 4, "resnet18": [2] * 4, "resnet50": [3, 4, 6, 3]}[name][stage - 1]):
            prefix, stride = f"layer{stage}.{index}", 2 if stage > 1 and index == 0 else 1
            inner, past = maps, maps
            for number in range(1, convolutions + 1):
                inner = conv(inner, f"{prefix}.conv{number}", stride if number == strided else 1)
                inner = norm(inner, f"{prefix}.bn{number}")
                inner = inner.relu() if number < convolutions else inner
            if f"{prefix}.downsample.0.weight" in state:
                past = norm(conv(maps, f"{prefix}.downsample.0", stride), f"{prefix}.downsample.1")
            maps = (inner + past).relu()
    features = network(images)
    assert features.shape == (2, network.width)
    torch.testing.assert_close(features, maps.mean((2, 3)))


def test_initialization_is_hes_by_fan_out() -> None:
    torch.manual_seed(0)
    network = resnet("resnet18")
    for name in ("conv1", "layer1.0.conv1", "layer3.0.conv1", "layer4.0.downsample.0"):
        layer = network.get_submodule(name)
        assert isinstance(layer, nn.Conv2d)
        fan_out = layer.out_channels * layer.kernel_size[0] ** 2
        assert layer.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.05)
    assert (
        network.get_parameter("layer1.0.bn2.weight").eq(1).all()
    )  # the residual's last batch norm does not start at zero


def test_pooling_before_the_relu_changes_neither_value_nor_gradient() -> None:
    """The stem of the paper of residual networks has them the other way round."""
    maps = torch.randn(2, 4, 9, 9, dtype=torch.double).round(decimals=1).requires_grad_()  # with ties
    pool = resnet("tiny", "imagenet").maxpool
    ways = functional.relu(pool(maps)), pool(functional.relu(maps))
    gradients = [torch.autograd.grad(out.square().sum(), maps)[0] for out in ways]
    assert torch.equal(*ways)
    assert torch.equal(*gradients)


def test_channels_last_changes_no_value() -> None:
    torch.manual_seed(0)
    network = resnet("tiny").eval()
    images = torch.randn(3, 3, 32, 32)
    plain = network(images)
    network = network.to(memory_format=torch.channels_last)
    torch.testing.assert_close(network(images.to(memory_format=torch.channels_last)), plain, rtol=1e-4, atol=1e-4)
